"""What failed alike: the failed deliveries by handler and class of error, newest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import CharField, Count, Max, Min
from django.db.models.functions import Cast

from django_workflows import registry
from django_workflows.models import Delivery, DeliveryQuerySet, Status

#: Failed deliveries that are looked at, the newest.
EXAMINED = 20_000
#: Groups that are given, those with the most deliveries.
GROUPS = 100


@dataclass(frozen=True)
class Group:
    """Deliveries to one handler that failed with one class of error."""

    handler: str
    error_class: str
    count: int
    first_at: datetime | None
    last_at: datetime | None
    #: The newest of them, without its body.
    example: Delivery


@dataclass(frozen=True)
class Groups:
    """The groups, the largest first, and what they are of."""

    groups: list[Group]
    #: How many failed deliveries were looked at; more are there unless `is_complete`.
    examined: int
    is_complete: bool
    #: Groups that were found and are not given.
    left_out: int = 0

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)


def failed_groups(*, examined: int = EXAMINED, limit: int = GROUPS) -> Groups:
    """The groups of the newest failed deliveries, by an index, in three queries."""
    failed = Delivery.objects.filter(status=Status.FAILED)
    oldest = next(iter(failed.order_by("-pk").values_list("pk", flat=True)[examined:][:1]), None)
    looked_at = failed if oldest is None else failed.filter(pk__gt=oldest)
    rows = looked_at.order_by().values("handler", "error_class")
    found = _by_current_name(
        rows.annotate(
            count=Count("pk"),
            first_at=Min("ended_at"),
            last_at=Max("ended_at"),
            latest=Max(Cast("pk", CharField())),  # Postgres before 18 has no max() of uuids
        )
    )
    found.sort(key=lambda row: (-row["count"], row["handler"], row["error_class"]))
    ids = [UUID(row["latest"]) for row in found[:limit]]
    examples = Delivery.objects.defer(*_WIDE).in_bulk(ids)
    groups = [
        Group(example=examples[pk], **{name: row[name] for name in _GIVEN})
        for pk, row in zip(ids, found, strict=False)
        if pk in examples  # else it has been replayed or deleted meanwhile
    ]
    return Groups(
        groups,
        sum(row["count"] for row in found),
        oldest is None,
        max(len(found) - limit, 0),
    )


def group_of(handler: str, error_class: str) -> DeliveryQuerySet:
    """All failed deliveries of a group, however many, for `replay`; the handler by any name."""
    names = names_of(handler)
    return Delivery.objects.filter(status=Status.FAILED, handler__in=names, error_class=error_class)


def names_of(handler: str) -> tuple[str, ...]:
    """The stored name of a handler or workflow and its aliases; itself, if nothing declares it."""
    recipient = registry.current().recipient(handler)
    return (recipient.name, *recipient.aliases) if recipient else (handler,)


_GIVEN = ("handler", "error_class", "count", "first_at", "last_at")
_WIDE = (
    "body",
    "original_body",
    "attributes",
    "sticky_attributes",
    "workflow_ids",
    "failures",
    "traceback",
    "changes",
)


def _by_current_name(rows: Any) -> list[dict[str, Any]]:
    """The rows with those of a renamed handler added to those of its name."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        row["handler"] = names_of(row["handler"])[0]
        key = row["handler"], row["error_class"]
        if (other := found.get(key)) is None:
            found[key] = row
            continue
        other["count"] += row["count"]
        other["first_at"] = min(filter(None, (other["first_at"], row["first_at"])), default=None)
        other["last_at"] = max(filter(None, (other["last_at"], row["last_at"])), default=None)
        other["latest"] = max(other["latest"], row["latest"])
    return list(found.values())
