"""The command cancel_workflows."""

import json
from datetime import timedelta
from io import StringIO
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command

from django_workflows import Command, Event, Workflow, publish, started_by, when
from django_workflows.models import Delivery, Lifecycle, Status
from tests.delivering import deliver_due, statuses_of
from tests.models import InvoiceState, ParcelState, TallyState

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("own_registry", "workflows")]


class Opened(Event):
    key: str


class Bill(Command):
    pass


class Post(Command):
    pass


class Overdue(Command):
    pass


@pytest.fixture(autouse=True)
def _declared(own_registry: Any) -> None:
    """A tally bills, and the bill posts a parcel; each waits for its timeout."""

    class Tally(Workflow[TallyState]):
        @started_by(Opened, once_per="key")
        def begin(self, message: Opened) -> None:
            self.send(Bill())
            self.send(Overdue(), delay=timedelta(days=1))

        @when(Overdue)
        def give_up(self, message: Overdue) -> None: ...

    class Invoice(Workflow[InvoiceState]):
        @started_by(Bill)
        def begin(self, message: Bill) -> None:
            self.send(Post())

    class Parcel(Workflow[ParcelState]):
        @started_by(Post)
        def begin(self, message: Post) -> None: ...


def run(*arguments: object, **options: Any) -> str:
    out = StringIO()
    call_command("cancel_workflows", *map(str, arguments), stdout=out, **options)
    return out.getvalue()


def run_json(*arguments: object, **options: Any) -> dict[str, Any]:
    return json.loads(run(*arguments, json=True, **options))  # type: ignore[no-any-return]


def opened(*keys: str) -> list[TallyState]:
    publish(*(Opened(key=key) for key in keys))
    deliver_due()
    return [TallyState.objects.get(key=key) for key in keys]


def lifecycles(model: Any = TallyState) -> list[str]:
    return list(model.objects.order_by("pk").values_list("lifecycle", flat=True))


def test_an_instance_is_cancelled_with_what_waits_for_it() -> None:
    first, _second = opened("a", "b")

    said = run_json(first.pk, reason="The customer has left.")

    assert lifecycles() == [Lifecycle.CANCELLED, Lifecycle.RUNNING]
    assert said["cancelled"] == 1
    assert said["instances"] == [
        {
            "id": str(first.pk),
            "workflow": "tests.TallyState",
            "lifecycle": "running",
            "parent": None,
        }
    ]
    waited = Delivery.objects.get(instance_id=first.pk, message_name="tests.Overdue")
    assert (waited.status, waited.reason) == (Status.CANCELLED, "The customer has left.")


def test_what_it_has_started_goes_on() -> None:
    [tally] = opened("a")

    run(tally.pk)

    assert lifecycles(InvoiceState) == lifecycles(ParcelState) == [Lifecycle.RUNNING]


def test_with_cascade_all_that_it_has_started_is_cancelled_too() -> None:
    [tally] = opened("a")

    said = run_json(tally.pk, cascade=True)

    invoice, parcel = InvoiceState.objects.get(), ParcelState.objects.get()
    assert (invoice.lifecycle, parcel.lifecycle) == ("cancelled", "cancelled")
    assert [(one["id"], one["parent"]) for one in said["instances"]] == [
        (str(tally.pk), None),
        (str(invoice.pk), str(tally.pk)),
        (str(parcel.pk), str(invoice.pk)),
    ]


@pytest.mark.parametrize("cascade", [True, False])
def test_a_dry_run_says_what_would_be_cancelled_and_does_nothing(cascade: bool) -> None:
    [tally] = opened("a")

    said = run_json(tally.pk, cascade=cascade, dry_run=True)

    assert (said["cancelled"], said["would_cancel"]) == (0, 3 if cascade else 1)
    assert lifecycles() == lifecycles(ParcelState) == [Lifecycle.RUNNING]
    assert statuses_of(Overdue) == [Status.PENDING]


def test_an_instance_that_has_ended_is_left_alone() -> None:
    first, second = opened("a", "b")
    run(first.pk)

    said = run_json(first.pk, second.pk)

    assert [one["id"] for one in said["instances"]] == [str(second.pk)]
    assert [(one["id"], one["lifecycle"]) for one in said["skipped"]] == [
        (str(first.pk), "cancelled")
    ]


def test_all_of_a_workflow_are_cancelled_and_no_others() -> None:
    opened("a", "b", "c")

    said = run_json("--all", workflow="tests.TallyState")

    assert said["cancelled"] == 3
    assert lifecycles() == ["cancelled"] * 3
    assert lifecycles(InvoiceState) == ["running"] * 3


def test_an_id_given_twice_is_cancelled_once() -> None:
    [tally] = opened("a")

    assert run_json(tally.pk, tally.pk)["cancelled"] == 1


def test_what_was_done_is_said_in_words() -> None:
    first, second = opened("a", "b")
    run(second.pk)

    said = run(first.pk, second.pk)

    assert "Cancelled 1 instance." in said
    assert f"{second.pk} is cancelled, so it was left alone." in said
    [row] = [line.split() for line in said.splitlines() if str(first.pk) in line]
    assert row == ["tests.TallyState", str(first.pk), "running"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Say what to cancel"),
        (["--all"], "--all needs --workflow"),
        (["--all", "--workflow", "tests.TalyState"], "Did you mean tests.TallyState?"),
        (["--all", "--workflow", "tests.TallyState", uuid4()], "Both ids and --all"),
        (["not-an-id"], "'not-an-id' is not a UUID"),
    ],
)
def test_nonsense_is_refused_with_the_remedy(arguments: list[object], says: str) -> None:
    opened("a")

    with pytest.raises(CommandError, match=says.replace("?", r"\?")):
        run(*arguments)

    assert lifecycles() == [Lifecycle.RUNNING]


def test_an_unknown_id_is_refused_before_anything_is_cancelled() -> None:
    [tally] = opened("a")

    with pytest.raises(CommandError, match="No instance has the id"):
        run(tally.pk, uuid4())

    assert lifecycles() == [Lifecycle.RUNNING]


def test_an_id_of_another_workflow_is_refused() -> None:
    [tally] = opened("a")

    with pytest.raises(CommandError, match="No instance has the id"):
        run(tally.pk, workflow="tests.InvoiceState")

    assert lifecycles() == [Lifecycle.RUNNING]
