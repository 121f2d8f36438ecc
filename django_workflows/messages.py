"""Messages: what they are, the name that is stored for each, and the way to JSON and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, get_args

from django.apps import apps
from django.db.models import Model
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticSerializationError

from django_workflows import conf
from django_workflows.errors import (
    DeclarationError,
    NotSerialisable,
    TooLarge,
    UnreadableBody,
)

#: What is shown in place of a value that not everybody may see.
MASK = "*****"


@dataclass(frozen=True)
class Sensitive:
    """Marks a field of a message: `iban: Annotated[str, Sensitive()]`.

    Its value is stored and handled like any other, and shown as `*****` in the admin, logs and
    exports, to those without the permission `django_workflows.view_sensitive`.
    """


class Message(BaseModel):
    """What `Command` and `Event` share; declare one of those.

    A message is frozen. Its stored name is the app label and the class name
    (`orders.OrderPlaced`), or `name=` of the class statement; `aliases=` are names
    that it had before, still read from the table.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    _given_name: ClassVar[str | None] = None
    _stored_name: ClassVar[str | None] = None
    _aliases: ClassVar[tuple[str, ...]] = ()
    #: Whether MAX_BODY_BYTES is for it; not for the engine's own, which hold messages of users.
    _has_size_limit: ClassVar[bool] = True

    def __init_subclass__(
        cls, *, name: str | None = None, aliases: Iterable[str] = (), **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if isinstance(aliases, str):
            raise DeclarationError(
                f"{cls.__qualname__} has aliases={aliases!r}, which must be a list of names. "
                f"Write aliases=[{aliases!r}]."
            )
        cls._given_name = name
        cls._stored_name = None
        cls._aliases = tuple(aliases)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        try:
            return handler(source)
        except PydanticSchemaGenerationError as error:
            raise DeclarationError(_no_json(cls, error)) from error

    @classmethod
    def __pydantic_init_subclass__(cls, **_kwargs: Any) -> None:
        for field in cls.model_fields:
            if hasattr(Message, field):
                raise DeclarationError(
                    f"The field {field!r} of {cls.__qualname__} hides a name of its base class. "
                    f"Give the field another name."
                )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        fields = type(self).model_fields
        for name, value in super().__repr_args__():
            yield name, MASK if name in fields and is_marked(fields[name]) else value

    @classmethod
    def stored_name(cls) -> str:
        """The name that is stored with every delivery of this message.

        Raises `DeclarationError` when the class is outside every installed app and has no `name=`.
        """
        if cls._stored_name is None:
            cls._stored_name = cls._given_name or name_in_app(cls, f"class {cls.__name__}")
        return cls._stored_name

    @classmethod
    def stored_names(cls) -> tuple[str, ...]:
        """The stored name, then the aliases."""
        return (cls.stored_name(), *cls._aliases)


class Command(Message):
    """An order to do something, imperative: `TakePayment`. It has exactly one handler."""


class Event(Message):
    """A fact, in the past tense: `PaymentTaken`. Any number of handlers react to it."""


def _no_json(message: type[Message], error: PydanticSchemaGenerationError) -> str:
    """Which fields have a type that JSON cannot carry, such as a model of Django."""
    for name, field in message.model_fields.items():
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if kind]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, Model):
                return (
                    f"The field {name!r} of {message.__qualname__} is a {kind.__name__}, a model "
                    f"of Django, which no message can carry. Send its primary key: {name}_id."
                )
    return f"{message.__qualname__} has a field that no message can carry ({error}). {_REMEDY}"


def is_marked(field: FieldInfo) -> bool:
    """Whether the field, or a member of its union, is marked as sensitive."""
    return any(map(is_mark, field.metadata)) or any(
        is_mark(mark)
        for member in get_args(field.annotation)
        for mark in getattr(member, "__metadata__", ())
    )


def is_mark(metadata: Any) -> bool:
    return metadata is Sensitive or isinstance(metadata, Sensitive)


def name_in_app(declared: type | Callable[..., Any], statement: str) -> str:
    """The stored name of a class or function: its app's label and its own name."""
    app = apps.get_containing_app_config(declared.__module__)
    if app is None:
        raise DeclarationError(
            f"{declared.__module__}.{declared.__qualname__} is outside every installed app, so it "
            f"has no stored name. Give it one: {statement}(..., name='some.{declared.__name__}')."
        )
    return f"{app.label}.{declared.__name__}"


def to_json(message: Message) -> str:
    """The body that is stored for this message.

    Raises `NotSerialisable` when a value would not arrive as it left, `TooLarge` when the
    body has more than MAX_BODY_BYTES bytes.
    """
    try:
        body = message.model_dump_json()
    except _UNWRITABLE as error:
        raise NotSerialisable(
            f"{_culprit(message)} cannot be written as JSON: {error}. {_REMEDY}"
        ) from error
    if message._has_size_limit:
        _check_size(type(message).__qualname__, body)
    _check_round_trip(message, body)
    return body


def from_json(message_class: type[Message], body: str) -> Message:
    """The message of this class with this body; unknown fields are ignored.

    Raises `UnreadableBody`, which names the fields that do not fit.
    """
    try:
        return message_class.model_validate_json(body, extra="ignore")
    except ValidationError as error:
        raise UnreadableBody(
            f"The stored body is not a valid {message_class.__qualname__} ({_problems(error)}). "
            f"Mend the class or the body, then replay the delivery."
        ) from error


def _problems(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'the body'}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_input=False)
    )


_UNWRITABLE = (PydanticSerializationError, UnicodeError, ValueError)
_REMEDY = "Send ids, numbers, text, dates or nested pydantic models instead."


def _culprit(message: Message) -> str:
    """The field that alone cannot be written, and its value."""
    name = type(message).__qualname__
    for field in type(message).model_fields:
        try:
            message.model_dump_json(include={field})
        except _UNWRITABLE:
            return f"{name}.{field} is {_shown_of(message, field)}, which"
    return name


def _shown_of(message: Message, field: str, value: Any = None) -> str:
    """The field's value, or the one given, as an error names it, unless it is sensitive."""
    if is_marked(type(message).model_fields[field]):
        return MASK
    return _shown(getattr(message, field) if value is None else value)


def _shown(value: Any) -> str:
    """The value as an error names it; some refuse, such as an int of 5,000 digits."""
    try:
        return f"{value!r:.200}"
    except Exception:
        return f"a {type(value).__qualname__}"


def _check_size(name: str, body: str) -> None:
    limit = conf.current().MAX_BODY_BYTES
    if len(body) * 4 > limit and (size := len(body.encode())) > limit:
        raise TooLarge(
            f"{name} is {size:,} bytes as JSON and MAX_BODY_BYTES is {limit:,}. "
            f"Store the data in a model and send its id, or raise the limit in DJANGO_WORKFLOWS."
        )


def _check_round_trip(message: Message, body: str) -> None:
    """What leaves must be what arrives: a set in an untyped field would arrive as a list."""
    try:
        arrived = type(message).model_validate_json(body, extra="ignore")
    except ValidationError as error:
        raise NotSerialisable(
            f"{_shown(message)} would not arrive ({_problems(error)}). {_REMEDY}"
        ) from error
    if arrived == message:
        return
    for field in type(message).model_fields:
        left, right = getattr(message, field), getattr(arrived, field)
        if not _alike(left, right):
            raise NotSerialisable(
                f"{type(message).__qualname__}.{field} is {_shown_of(message, field)} and would "
                f"arrive as {_shown_of(message, field, right)}. Declare the field's type so "
                f"that JSON keeps it. {_REMEDY}"
            )


def _alike(left: Any, right: Any) -> bool:
    """Equal, except that times in an ambiguous hour are compared as the instants they are."""
    if isinstance(left, datetime) and isinstance(right, datetime):
        return left.timestamp() == right.timestamp()
    if type(left) is not type(right):
        return False
    if isinstance(left, BaseModel):
        return all(
            _alike(getattr(left, field), getattr(right, field)) for field in type(left).model_fields
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_alike(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_alike, left, right))
    return bool(left == right)
