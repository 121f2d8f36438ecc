"""States and other models that only tests need; their tables are made without migrations."""

from django.contrib.postgres.fields import ArrayField
from django.db import models

from django_workflows.models import WorkflowState


class Note(models.Model):
    """What a handler writes, so that a test sees whether it was committed, and how often."""

    text = models.CharField(max_length=200)

    def __str__(self) -> str:
        return self.text


class ParcelState(WorkflowState):
    """A state with a key of each type that lookups are made by."""

    order_id = models.UUIDField(null=True, unique=True)
    customer = models.CharField(max_length=100, default="", blank=True, db_index=True)
    number = models.IntegerField(null=True, db_index=True)
    insured = models.BooleanField(null=True, db_index=True)
    posted_on = models.DateField(null=True, db_index=True)
    weight = models.DecimalField(max_digits=8, decimal_places=3, null=True, db_index=True)
    seen = models.JSONField(default=list)


class InvoiceState(WorkflowState):
    """The state of a second workflow, next to that of parcels."""

    order_id = models.UUIDField(null=True, db_index=True)
    seen = models.JSONField(default=list)


class SurveyState(WorkflowState):
    """A state with the kinds of fields that are easy to save wrongly."""

    note = models.ForeignKey(Note, null=True, on_delete=models.SET_NULL, related_name="+")
    asked_at = models.DateTimeField(null=True)
    reward = models.DecimalField(max_digits=8, decimal_places=2, null=True)
    answers = models.JSONField(default=dict)
    rounds = models.IntegerField(db_default=7)
    touched_at = models.DateTimeField(auto_now=True)
    made_at = models.DateTimeField(auto_now_add=True)


class TaggedState(WorkflowState):
    """A state with fields that only Postgres has."""

    tags = ArrayField(models.CharField(max_length=50), default=list)

    class Meta:
        required_db_vendor = "postgresql"


class TallyState(WorkflowState):
    """Counts and lists what it has seen; one per key, ever."""

    key = models.CharField(max_length=50, unique=True)
    total = models.PositiveIntegerField(default=0)
    seen = models.JSONField(default=list)


class SlotState(WorkflowState):
    """One running instance per key; an ended one makes room for the next."""

    key = models.CharField(max_length=50)

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=["key"],
                condition=models.Q(ended_at__isnull=True),
                name="tests_one_running_slot",
            ),
        )


class CustomerState(WorkflowState):
    """A state with a field that not everybody may see."""

    sensitive_fields = ("iban",)

    name = models.CharField(max_length=50, default="", blank=True)
    iban = models.CharField(max_length=50, unique=True, null=True)  # noqa: DJ001  several have none


class LetterState(WorkflowState):
    """A state that rows of other models refer to."""


class Letter(models.Model):
    """A row that goes with its instance."""

    state = models.ForeignKey(LetterState, on_delete=models.CASCADE)

    def __str__(self) -> str:
        return f"Letter of {self.state_id}"


class Receipt(models.Model):
    """A row without which its instance must not go."""

    state = models.ForeignKey(LetterState, on_delete=models.PROTECT, related_name="+")

    def __str__(self) -> str:
        return f"Receipt of {self.state_id}"


class Copy(models.Model):
    """A row that the database alone keeps its instance for."""

    state = models.ForeignKey(LetterState, on_delete=models.DO_NOTHING, related_name="+")

    def __str__(self) -> str:
        return f"Copy of {self.state_id}"


class FolderState(WorkflowState):
    """An instance that would go with that of another workflow."""

    letter = models.ForeignKey(LetterState, null=True, on_delete=models.CASCADE, related_name="+")
