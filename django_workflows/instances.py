"""Instances of workflows in their tables: found, compared with what was read, and written.

The SQL is compiled once per state model, from its fields and Django's own compiler.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import cached_property
from typing import Any
from uuid import UUID

from django.core.exceptions import ValidationError
from django.core.serializers.json import DjangoJSONEncoder
from django.db import IntegrityError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.models import Field, Value
from django.db.models.expressions import DatabaseDefault
from django.db.models.sql import UpdateQuery

from django_workflows import clock
from django_workflows.declarations import Step, attribute
from django_workflows.errors import LookupMismatch, StaleState, WorkflowsError
from django_workflows.messages import Message
from django_workflows.models import LIVE, Delivery, WorkflowState
from django_workflows.statements import Columns

#: Fields that the engine alone writes.
MANAGED = (
    "id",
    "version",
    "lifecycle",
    "starter_workflow",
    "starter_id",
    "started_at",
    "updated_at",
    "ended_at",
)
_TIMED = ("started_at", "updated_at", "ended_at")


class DuplicateInstance(Exception):
    """The engine's INSERT of an instance met a unique constraint: find again."""


def key_of(step: Step, message: Message, delivery: Delivery) -> Any:
    """The value of the step's lookup for this message; None matches nothing."""
    lookup = step.lookup
    if isinstance(lookup, attribute):
        return {**delivery.sticky_attributes, **delivery.attributes}.get(lookup.key)
    if callable(lookup):
        return lookup(message)
    return getattr(message, lookup) if lookup else None


class StateTable:
    """The rows of one state model in one database."""

    _tables: dict[tuple[str, type[WorkflowState]], StateTable] = {}  # noqa: RUF012

    @classmethod
    def of(cls, connection: BaseDatabaseWrapper, model: type[WorkflowState]) -> StateTable:
        key = connection.alias, model
        if key not in cls._tables:
            cls._tables[key] = cls(connection, model)
        return cls._tables[key]

    def __init__(self, connection: BaseDatabaseWrapper, model: type[WorkflowState]) -> None:
        self.model = model
        self.fields: list[Any] = [
            field for field in model._meta.concrete_fields if not field.generated
        ]
        self.own_fields = [field for field in self.fields if field.attname not in MANAGED]
        self.columns = Columns(connection, model, [f.name for f in model._meta.concrete_fields])
        self.id_field: Any = model._meta.pk
        self.quote = connection.ops.quote_name
        self.table = self.quote(model._meta.db_table)
        select, _params = (
            model._base_manager.using(connection.alias)
            .order_by()
            .query.get_compiler(connection=connection)
            .as_sql()
        )
        self.select: str = select

    @cached_property
    def saving_fields(self) -> list[Field[Any, Any]]:
        """The user's fields whose `pre_save` does something, such as `auto_now`."""
        return [f for f in self.own_fields if type(f).pre_save is not Field.pre_save]

    # Finding

    def by_id(
        self, cursor: CursorWrapper, instance_id: UUID, *, lock: bool = False
    ) -> WorkflowState | None:
        """The instance of this id, whether it has ended or not."""
        where = f"{self.table}.{self.quote('id')} = %s"
        found = self._query(cursor, where, "id", instance_id, lock)
        return found[0] if found else None

    def live(
        self, cursor: CursorWrapper, field_name: str, key: Any, *, lock: bool = False
    ) -> list[WorkflowState]:
        """The instances that have not ended and whose field equals the key.

        Raises `LookupMismatch` when the field cannot hold the key.
        """
        where = f"{self._equals(field_name)} AND {self.table}.{self.quote('ended_at')} IS NULL"
        return self._query(cursor, where, field_name, key, lock)

    def any(self, cursor: CursorWrapper, field_name: str, key: Any) -> UUID | None:
        """The id of an instance whose field equals the key, whether it has ended or not."""
        found = self._query(cursor, f"{self._equals(field_name)} LIMIT 1", field_name, key)
        return found[0].pk if found else None

    def _equals(self, field_name: str) -> str:
        field: Any = self.model._meta.get_field(field_name)
        return f"{self.table}.{self.quote(field.column)} = %s"

    def _query(
        self,
        cursor: CursorWrapper,
        where: str,
        field_name: str,
        key: Any,
        lock: bool = False,
    ) -> list[WorkflowState]:
        if lock and cursor.db.features.has_select_for_update:
            where += " FOR UPDATE"
        field: Any = self.model._meta.get_field(field_name)
        value = field.get_db_prep_value(self.converted(field_name, key), cursor.db, prepared=False)
        cursor.execute(f"{self.select} WHERE {where}", [value])
        return [self.columns.read(cursor.db, row) for row in cursor.fetchall()]

    def converted(self, field_name: str, key: Any) -> Any:
        """The key as the field holds it.

        Raises `LookupMismatch`, which names the field, its type and the key.
        """
        field: Any = self.model._meta.get_field(field_name)
        target = field.target_field if field.is_relation else field
        try:
            value = target.to_python(key)
            target.run_validators(value)
            if isinstance(key, float) and value != key:
                raise ValueError("the value would be rounded")
        except (ValidationError, ValueError, TypeError, ArithmeticError) as error:
            reasons = error.messages if isinstance(error, ValidationError) else [str(error)]
            raise LookupMismatch(
                f"{key!r:.200} cannot be looked up in {self.model._meta.label}.{field_name}, "
                f"which is a {type(target).__name__}: {' '.join(reasons)} "
                f"Mend the message or the lookup."
            ) from error
        return value

    # Comparing

    def snapshot(self, instance: WorkflowState) -> dict[str, Any]:
        """The values of the instance's fields as they are now, safe from changes in place."""
        values = instance.__dict__
        return {
            field.attname: value
            if isinstance(value := values.get(field.attname), _IMMUTABLE)
            else copy.deepcopy(value)
            for field in self.fields
        }

    def changed(self, instance: WorkflowState, before: dict[str, Any]) -> list[Field[Any, Any]]:
        """The user's fields that differ from the snapshot.

        Raises `WorkflowsError` when a field that the engine alone writes was changed, or an
        expression was assigned.
        """
        values = instance.__dict__
        for name in MANAGED:
            if values[name] != before[name]:
                raise WorkflowsError(
                    f"The step set {self.model._meta.label}.{name}, which the engine alone writes. "
                    f"Call neither save() nor set it: end an instance with complete(), and keep "
                    f"your own status in a field of your own."
                )
        changed = [f for f in self.own_fields if _differ(values.get(f.attname), before[f.attname])]
        for field in changed:
            if hasattr(values[field.attname], "resolve_expression"):
                raise WorkflowsError(
                    f"The step assigned an expression to {self.model._meta.label}.{field.name}. "
                    f"Assign a value: the version check makes `state.{field.name} += 1` safe."
                )
        return changed

    # Writing

    def insert(self, cursor: CursorWrapper, instance: WorkflowState) -> None:
        """Insert the instance as version 1.

        Raises `DuplicateInstance` when another instance has a value that must be unique.
        """
        instance.version = 1
        pairs = [
            (field, value)
            for field in self.fields
            if field.attname not in _TIMED
            and not isinstance(value := field.pre_save(instance, True), DatabaseDefault)
        ]
        places, params = self._places(cursor.db, pairs)
        now, now_params = _now(cursor.db)
        timed = ["started_at", "updated_at", *(() if instance.is_live else ("ended_at",))]
        columns = ", ".join(self.quote(name) for name in (*(f.column for f, _v in pairs), *timed))
        places += [now] * len(timed)
        params += now_params * len(timed)
        try:
            cursor.execute(
                f"INSERT INTO {self.table} ({columns}) VALUES ({', '.join(places)})", params
            )
        except IntegrityError as error:
            if is_unique_violation(error):
                raise DuplicateInstance(str(error)) from error
            raise

    def update(
        self,
        cursor: CursorWrapper,
        instance: WorkflowState,
        changed: Sequence[Field[Any, Any]],
    ) -> None:
        """Write the changed fields, what the engine manages, and the next version.

        Raises `StaleState` when another writer has saved the row since it was read.
        """
        fields: list[Any] = list(dict.fromkeys((*changed, *self._resaved(instance))))
        places, params = self._places(
            cursor.db, [(f, getattr(instance, f.attname)) for f in fields]
        )
        sets = [
            f"{self.quote(field.column)} = {place}"
            for field, place in zip(fields, places, strict=True)
        ]
        now, now_params = _now(cursor.db)
        sets += [
            '"version" = "version" + 1',
            f'"updated_at" = {now}',
            '"lifecycle" = %s',
            f'"ended_at" = {"NULL" if instance.lifecycle in LIVE else now}',
        ]
        params += [*now_params, str(instance.lifecycle)]
        params += () if instance.lifecycle in LIVE else now_params
        params += [self.id_field.get_db_prep_value(instance.pk, cursor.db), instance.version]
        cursor.execute(
            f'UPDATE {self.table} SET {", ".join(sets)} WHERE "id" = %s AND "version" = %s',
            params,
        )
        if cursor.rowcount != 1:
            raise StaleState(
                f"{self.model._meta.label} {instance.pk} was saved by another writer since "
                f"version {instance.version} was read."
            )
        instance.version += 1

    def _resaved(self, instance: WorkflowState) -> list[Field[Any, Any]]:
        """Fields that `pre_save` has just changed, `auto_now` above all."""
        resaved = []
        for field in self.saving_fields:
            before = instance.__dict__.get(field.attname)
            field.pre_save(instance, False)
            if _differ(instance.__dict__.get(field.attname), before):
                resaved.append(field)
        return resaved

    def _places(
        self, connection: BaseDatabaseWrapper, pairs: Sequence[tuple[Field[Any, Any], Any]]
    ) -> tuple[list[str], list[Any]]:
        """A placeholder for each value, and the parameters, as the field and database want them."""
        places: list[str] = []
        params: list[Any] = []
        for field, value in pairs:
            if hasattr(field, "get_placeholder") or hasattr(field, "get_placeholder_sql"):
                query = UpdateQuery(self.model)
                expression = Value(value, field).resolve_expression(query, for_save=True)
                sql, own = query.get_compiler(connection=connection).compile(expression)
                places.append(sql)
                params.extend(own)
            else:
                places.append("%s")
                params.append(field.get_db_prep_save(value, connection=connection))
        return places, params


def difference(
    instance: WorkflowState, before: dict[str, Any], changed: Sequence[Field[Any, Any]]
) -> str | None:
    """The changed fields as JSON, each `[before, after]`: what an instance's timeline shows."""
    if not changed:
        return None
    pairs = {
        f.name: [_readable(before[f.attname]), _readable(instance.__dict__[f.attname])]
        for f in changed
    }
    return _as_text.encode(pairs).replace("\\u0000", "\\ufffd")


def is_unique_violation(error: IntegrityError) -> bool:
    """Whether the database refused a value because another row has it."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) == "23505" or "UNIQUE constraint failed" in str(error)


_IMMUTABLE = (
    str,
    int,
    float,
    type(None),
    Decimal,
    UUID,
    date,
    datetime,
    time,
    timedelta,
    bytes,
)


def _differ(left: Any, right: Any) -> bool:
    if isinstance(left, dict | list) and isinstance(right, dict | list):
        return repr(left) != repr(right)  # 1 and True are equal, and are not the same JSON
    return left is not right and bool(left != right)


def _readable(value: Any) -> Any:
    """The value, or its text where JSON has no word for it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class _AnyEncoder(DjangoJSONEncoder):
    """Writes what JSON does not know as text, for a person to read."""

    def default(self, value: Any) -> Any:
        try:
            return super().default(value)
        except TypeError:
            return str(value)


_as_text = _AnyEncoder(skipkeys=True)


def _now(connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
    if connection.vendor == "postgresql":
        return clock.sql(), []
    return "%s", [connection.ops.adapt_datetimefield_value(clock.local())]
