"""The two tables: the abstract state of a workflow, and the deliveries of messages."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, ClassVar

from django.db import models, router, transaction
from django.db.models import F, Q
from django.db.models.base import ModelBase
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from uuid_utils.compat import uuid7

from django_workflows import clock
from django_workflows.errors import StaleState


class Lifecycle(models.TextChoices):
    """Where an instance stands. The first three handle messages; the others have ended."""

    RUNNING = "running", _("running")
    COMPENSATING = "compensating", _("compensating")
    FAILED = "failed", _("failed")
    COMPLETED = "completed", _("completed")
    COMPENSATED = "compensated", _("compensated")
    CANCELLED = "cancelled", _("cancelled")


LIVE = (Lifecycle.RUNNING, Lifecycle.COMPENSATING, Lifecycle.FAILED)


class WorkflowStateQuerySet(models.QuerySet["Any"]):
    """Moves the version on whenever rows are updated, so that no running step overwrites them."""

    def update(self, **values: Any) -> int:
        values.setdefault("version", F("version") + 1)
        values.setdefault("updated_at", timezone.now())
        return super().update(**values)


class WorkflowState(models.Model):
    """The state of one instance of a workflow; extend it with the fields of your process.

    Steps change it by assigning to its fields; the engine saves it with the step. Outside a
    step `save()` raises `StaleState` when another writer was faster.
    """

    #: The workflow's stored name, and the names that it had before.
    workflow_name: ClassVar[str | None] = None
    workflow_aliases: ClassVar[tuple[str, ...]] = ()
    #: For how long an ended instance is kept; None leaves it to RETENTION.
    workflow_retention: ClassVar[timedelta | None] = None
    #: Fields whose values are shown only to who may see them.
    sensitive_fields: ClassVar[tuple[str, ...]] = ()

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    version = models.PositiveBigIntegerField(default=0, editable=False)
    lifecycle = models.CharField(
        max_length=12, choices=Lifecycle, default=Lifecycle.RUNNING, editable=False, db_index=True
    )
    starter_workflow = models.CharField(max_length=200, default="", blank=True, editable=False)
    starter_id = models.UUIDField(null=True, blank=True, editable=False, db_index=True)
    started_at = models.DateTimeField(default=timezone.now, editable=False)
    updated_at = models.DateTimeField(default=timezone.now, editable=False)
    ended_at = models.DateTimeField(null=True, blank=True, editable=False)

    objects = WorkflowStateQuerySet.as_manager()

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self._meta.verbose_name} {self.pk} ({self.lifecycle})"

    def save(
        self,
        *,
        force_insert: bool | tuple[ModelBase, ...] = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Iterable[str] | None = None,
    ) -> None:
        """Save the instance outside a step, in a transaction of its own or the caller's.

        Raises `StaleState`, and saves nothing, when the row's version is not the one read.
        """
        using = using or router.db_for_write(type(self), instance=self)
        if self._state.adding:
            self.version = 1
            super().save(force_insert=force_insert or True, using=using)
            return
        if update_fields is not None:
            update_fields = {*update_fields, "version", "updated_at"}
        if "version" in self.get_deferred_fields():
            raise StaleState(
                f"{self._meta.label} {self.pk} was read without its version, so nobody can tell "
                f"whether it was saved since. Do not defer the field: add it to only()."
            )
        read = self.version
        try:
            with transaction.atomic(using=using):
                self._move_version_on(using)
                super().save(force_update=True, using=using, update_fields=update_fields)
        except BaseException:
            self.version = read
            raise

    @property
    def is_live(self) -> bool:
        """Whether the instance still handles messages."""
        return self.lifecycle in LIVE

    def _move_version_on(self, using: str) -> None:
        """Take the row, if it is still the one that was read."""
        row = type(self)._base_manager.using(using).filter(pk=self.pk, version=self.version)
        self.version, self.updated_at = self.version + 1, timezone.now()
        if not row.update(version=self.version):
            raise StaleState(
                f"{self._meta.label} {self.pk} was saved by another writer since version "
                f"{self.version - 1} was read. Read it again and repeat the change."
            )


class Status(models.TextChoices):
    """What has become of a delivery."""

    PENDING = "pending", _("pending")
    RUNNING = "running", _("running")
    HANDLED = "handled", _("handled")
    NOTED = "noted", _("noted")
    IGNORED = "ignored", _("ignored")
    FAILED = "failed", _("failed")
    CANCELLED = "cancelled", _("cancelled")


UNENDED = (Status.PENDING, Status.RUNNING)
REPLAYABLE = (Status.FAILED, Status.IGNORED, Status.CANCELLED)
#: An undo command that its instance no longer needs must not be sent by a replay of everything.
IS_REPLAYABLE = Q(status__in=REPLAYABLE) & ~Q(status=Status.CANCELLED, undoes=True)


class DeliveryQuerySet(models.QuerySet["Delivery"]):
    def replay(self) -> int:
        """Make the replayable deliveries of this queryset due now, each with a fresh count.

        Returns how many there were. Handled ones are never replayed, nor is what is pending
        or running. One UPDATE, in the caller's transaction or its own; the relay does the rest.
        """
        now = clock.read(transaction.get_connection(self.db))
        return self.filter(IS_REPLAYABLE).update(
            status=Status.PENDING,
            reason="",
            attempts=0,
            losses=0,
            held_up_since=None,
            waits_for="",
            due_at=now,
            relay_at=now,
            ended_at=None,
        )


class Delivery(models.Model):
    """One message on its way to one handler or workflow. The row is the truth.

    Only the engine writes it. Rows of ended deliveries stay: they are the inbox, the history
    and the replay store in one. What a new row starts with is the database's default, so that
    workers of the release before can go on inserting rows while a column is new.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    message_id = models.UUIDField(help_text=_("Shared by all deliveries of one message."))
    message_name = models.CharField(max_length=200)
    body = models.TextField(help_text=_("The message as JSON."))
    original_body = models.TextField(
        default="",
        db_default="",
        blank=True,
        help_text=_("As it was sent, if the body was edited since."),
    )
    attributes = models.JSONField(default=dict, blank=True)
    sticky_attributes = models.JSONField(default=dict, blank=True)
    correlation_id = models.UUIDField(help_text=_("Shared by a whole conversation."))
    causation_id = models.UUIDField(null=True, help_text=_("The message that caused this one."))
    workflow_ids = models.JSONField(
        default=dict, blank=True, help_text=_("Workflow name to instance id, as it travels.")
    )
    trace_context = models.TextField(
        default="", blank=True, help_text=_("The sender's span for OpenTelemetry, as JSON.")
    )

    handler = models.CharField(max_length=200, help_text=_("The handler or workflow it goes to."))
    part = models.CharField(max_length=36, default="", blank=True)
    instance_id = models.UUIDField(null=True, blank=True)
    sender = models.CharField(max_length=200, default="", blank=True)
    sender_instance_id = models.UUIDField(null=True, blank=True)
    sender_step = models.CharField(max_length=200, default="", blank=True)
    queue = models.CharField(max_length=100, default="default")

    status = models.CharField(
        max_length=9, choices=Status, default=Status.PENDING, db_default=Status.PENDING
    )
    reason = models.TextField(default="", db_default="", blank=True)
    claims = models.PositiveIntegerField(default=0, db_default=0, help_text=_("The fencing token."))
    attempts = models.PositiveIntegerField(
        default=0, db_default=0, help_text=_("Failures of the handler.")
    )
    losses = models.PositiveIntegerField(
        default=0, db_default=0, help_text=_("Leases that ran out.")
    )
    conflicts = models.PositiveIntegerField(
        default=0, db_default=0, help_text=_("Runs lost to a conflict.")
    )
    failures = models.JSONField(
        default=list,
        db_default=models.Value([], models.JSONField()),
        blank=True,
        help_text=_("When and why each attempt failed, latest last."),
    )
    error = models.TextField(default="", db_default="", blank=True)
    error_class = models.CharField(
        max_length=200,
        default="",
        db_default="",
        blank=True,
        help_text=_("What the last error was."),
    )
    traceback = models.TextField(default="", db_default="", blank=True)

    undoes = models.BooleanField(
        default=False, db_default=False, help_text=_("A compensation of the instance that sent it.")
    )
    waits_for = models.CharField(
        max_length=64,
        default="",
        db_default="",
        blank=True,
        help_text=_("The key of the instance it waits for."),
    )

    step = models.CharField(max_length=200, default="", db_default="", blank=True)
    version = models.PositiveBigIntegerField(null=True, blank=True)
    changes = models.JSONField(
        null=True, blank=True, help_text=_("Fields that the step changed: [before, after].")
    )

    created_at = models.DateTimeField()
    due_at = models.DateTimeField(help_text=_("Not to be handled before."))
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    relay_at = models.DateTimeField(null=True, blank=True)
    held_up_since = models.DateTimeField(
        null=True, blank=True, help_text=_("Since when only conflicts or unknown names stop it.")
    )

    objects = DeliveryQuerySet.as_manager()

    class Meta:
        verbose_name = _("delivery")
        verbose_name_plural = _("deliveries")
        permissions = (
            ("replay_delivery", "Can replay deliveries"),
            ("edit_delivery", "Can replay deliveries with an edited body"),
            ("cancel_delivery", "Can cancel deliveries"),
            ("skip_delivery", "Can mark deliveries as handled by hand"),
            ("reschedule_delivery", "Can make waiting deliveries due now"),
            ("cancel_instance", "Can cancel instances of workflows"),
            ("compensate_instance", "Can continue the undoing of instances"),
            ("view_sensitive", "Can view what is marked as sensitive"),
        )
        constraints = (
            models.UniqueConstraint(
                fields=["message_id", "handler", "part"], name="django_workflows_once_per_handler"
            ),
            models.CheckConstraint(
                condition=Q(status__in=UNENDED, relay_at__isnull=False)
                | (~Q(status__in=UNENDED) & Q(relay_at__isnull=True)),
                name="django_workflows_relay_at_iff_unended",
            ),
        )
        indexes = (
            # The relay and the DatabaseBroker: what is due on a queue.
            models.Index(
                fields=["queue", "relay_at"],
                name="django_workflows_due",
                condition=Q(relay_at__isnull=False),
            ),
            # An instance's timeline, and the timeouts that a step cancels.
            models.Index(
                fields=["instance_id"],
                name="django_workflows_instance",
                condition=Q(instance_id__isnull=False),
            ),
            # What an instance has sent, and has noted to undo.
            models.Index(
                fields=["sender_instance_id"],
                name="django_workflows_sender",
                condition=Q(sender_instance_id__isnull=False),
            ),
            # Messages that came before their instance.
            models.Index(
                fields=["waits_for"],
                name="django_workflows_waiting",
                condition=~Q(waits_for=""),
            ),
            # The list of what failed, and its replay.
            models.Index(
                fields=["id"], name="django_workflows_failed", condition=Q(status="failed")
            ),
            # What failed alike: its list, and its replay.
            models.Index(
                fields=["handler", "error_class", "id"],
                name="django_workflows_alike",
                condition=Q(status="failed"),
            ),
            # How many were handled, and failed, in each of the last minutes and hours.
            models.Index(
                fields=["status", "ended_at"],
                name="django_workflows_ended",
                condition=Q(status__in=("handled", "failed")),
            ),
        )

    def __str__(self) -> str:
        return f"{self.message_name} to {self.handler} ({self.status})"


class Worker(models.Model):
    """A process that handles deliveries, or relays them, and when it was last seen."""

    host = models.CharField(max_length=253)
    pid = models.PositiveIntegerField()
    queues = models.JSONField(default=list, blank=True, help_text=_("What it takes work from."))
    relays = models.BooleanField(default=False, help_text=_("Whether it looks for what is due."))
    started_at = models.DateTimeField()
    seen_at = models.DateTimeField()

    class Meta:
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        default_permissions = ("view",)
        constraints = (
            models.UniqueConstraint(
                fields=["host", "pid"], name="django_workflows_one_per_process"
            ),
        )

    def __str__(self) -> str:
        return f"{self.host} {self.pid}"
