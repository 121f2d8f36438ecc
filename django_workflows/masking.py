"""What is marked as sensitive, masked before it is shown, logged or exported.

In the tables everything is as it is; each of these functions gives a copy. What this process
does not know, a message or a field that nothing declares any more, is masked as well.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from pydantic import BaseModel, RootModel

from django_workflows import registry
from django_workflows.declarations import WorkflowDefinition
from django_workflows.messages import MASK, Message, is_mark
from django_workflows.models import Delivery, WorkflowState
from django_workflows.notices import CommandFailed

#: Gives what is shown in place of a sensitive value.
Hide = Callable[[Any], Any]

#: A text that begins like a secret is one, though it was cut or goes on for long.
SEED = 40
#: Shorter secrets are found only as words of their own.
SHORT = 4


# A delivery


def masked(delivery: Delivery, others: Iterable[str] = ()) -> Delivery:
    """A copy to be shown: body, attributes, changes, reason, errors and traceback masked.

    Other secrets, of what is shown together with it, are masked wherever they stand.
    """
    shown = copy.copy(delivery)
    secrets: set[str] = set()
    shown.body = body_of(delivery, secrets)
    if delivery.original_body:
        shown.original_body = _body_of(delivery, delivery.original_body, secrets)
    shown.changes = changes_of(delivery, secrets)
    cover = covering(delivery, secrets.union(others))
    if others:
        shown.body = _in_json(shown.body, cover)
        shown.original_body = _in_json(shown.original_body, cover)
        shown.changes = _in_texts(shown.changes, cover)
    shown.attributes = _in_texts(delivery.attributes, cover)
    shown.sticky_attributes = _in_texts(delivery.sticky_attributes, cover)
    shown.failures = _in_texts(delivery.failures, cover)
    for name in ("reason", "error", "traceback"):
        setattr(shown, name, cover(getattr(delivery, name)))
    return shown


def body_of(delivery: Delivery, secrets: set[str] | None = None) -> str:
    """The body, as JSON, with the values of sensitive fields masked; these are added to secrets."""
    return _body_of(delivery, delivery.body, set() if secrets is None else secrets)


def _body_of(delivery: Delivery, text: str, secrets: set[str]) -> str:
    hide = _collecting(secrets)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(hide(text))
    return json.dumps(_masked_body(body, message_class(delivery), hide), ensure_ascii=False)


def changes_of(delivery: Delivery, secrets: set[str] | None = None) -> Any:
    """What the step changed, `{field: [before, after]}`, with sensitive fields masked."""
    if not isinstance(delivery.changes, dict):
        return delivery.changes
    hide = _collecting(set() if secrets is None else secrets)
    state = state_class(delivery.handler)
    known = {field.name for field in state._meta.fields} if state else set()
    hidden = set(state.sensitive_fields) if state else set()
    shown = {}
    for name, pair in delivery.changes.items():
        if name in known and name not in hidden:
            shown[name] = pair
        else:
            shown[name] = [hide(value) for value in pair] if isinstance(pair, list) else hide(pair)
    return shown


def text_of(delivery: Delivery, text: str) -> str:
    """A text about the delivery, such as an error, without the values of sensitive fields."""
    return covering(delivery, secrets_of(delivery))(text)


def in_brief(delivery: Delivery, text: str) -> str:
    """A text about a delivery whose body was not read: of an error, the class alone is left."""
    if not text:
        return text
    if not concerns_sensitive(delivery):
        return covering(delivery, ())(text)
    name = re.match(r"[\w.]+(?=: )", text)
    return f"{name[0]}: {MASK}" if name else MASK


def secrets_of(delivery: Delivery) -> set[str]:
    """The values of the delivery's sensitive fields, as they may stand in a text.

    Of the columns that were read: a delivery that a worker has claimed comes without some.
    """
    secrets: set[str] = set()
    unread = delivery.get_deferred_fields()
    if "body" not in unread:
        body_of(delivery, secrets)
    if "original_body" not in unread and delivery.original_body:
        _body_of(delivery, delivery.original_body, secrets)
    if "changes" not in unread:
        changes_of(delivery, secrets)
    return secrets


def concerns_sensitive(delivery: Delivery) -> bool:
    """Whether its message, or the state that it changes, has fields that are sensitive."""
    message = message_class(delivery)
    if message is None:
        return True
    if issubclass(message, CommandFailed):
        return anything_is_sensitive()
    state = state_class(delivery.handler)
    return has_marks(message) or bool(state and state.sensitive_fields)


def covering(delivery: Delivery, secrets: Iterable[str]) -> Callable[[str], str]:
    """A function that masks the secrets in a text about the delivery.

    With them go what pydantic and Postgres quote of values, where anything is sensitive: these
    may be of another message, or of the state.
    """
    state = state_class(delivery.handler)
    quotes = [*_QUOTED_BY_PYDANTIC] if anything_is_sensitive() else []
    if state and state.sensitive_fields:
        quotes += _QUOTED_BY_POSTGRES
    return _covering(secrets, quotes)


def _covering(secrets: Iterable[str], quotes: Iterable[re.Pattern[str]]) -> Callable[[str], str]:
    seeds = sorted({v for secret in secrets for v in _variants(secret)}, key=len, reverse=True)

    def cover(text: str) -> str:
        for quote in quotes:
            text = quote.sub(rf"\g<1>{MASK}\g<2>", text)
        for value in seeds:
            text = _without(text, value)
        return text

    return cover


_QUOTED_BY_PYDANTIC = (re.compile(r"(input_value=).*?(, input_type=)", re.DOTALL),)
_QUOTED_BY_POSTGRES = (
    re.compile(r"(Key \([^)\n]*\)=\()[^\n]*?(\) (?:already exists|is not present|conflicts))"),
    re.compile(r"(Failing row contains \()[^\n]*(\))"),
)


def stand_in(delivery: Delivery, error: BaseException) -> BaseException:
    """The error as it may be logged: itself, or one with its name, traceback and a masked text.

    It never raises: that an error cannot be masked must not hide that there was one.
    """
    try:
        cover = covering(delivery, secrets_of(delivery))
        return _stand_in(error, cover, set()) or error
    except Exception as problem:
        return _named_like(error, f"(its text could not be masked: {type(problem).__name__})")


def _stand_in(
    error: BaseException | None, cover: Callable[[str], str], seen: set[int]
) -> BaseException | None:
    """None: neither it nor what it came from says anything that is sensitive."""
    if error is None or id(error) in seen:
        return None
    seen.add(id(error))
    said = _said(error)
    notes = list(getattr(error, "__notes__", ()))
    cause = _stand_in(error.__cause__, cover, seen)
    context = _stand_in(error.__context__, cover, seen)
    covered = cover(said)
    if covered == said and not cause and not context and list(map(cover, notes)) == notes:
        return None
    other = _named_like(error, covered)
    for note in notes:
        other.add_note(cover(note))
    other.__cause__, other.__context__ = cause or error.__cause__, context or error.__context__
    other.__suppress_context__ = error.__suppress_context__
    return other


def _named_like(error: BaseException, text: str) -> BaseException:
    kind = type(error)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    other: BaseException = type(kind.__name__, (Exception,), named)(text)
    return other.with_traceback(error.__traceback__)


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a broken __str__ must not hide the failure
        return "(its text cannot be read)"


# An instance


def values_of(instance: WorkflowState) -> dict[str, Any]:
    """The values of the instance's fields, by name, with sensitive ones masked."""
    return {
        field.name: shown_value(instance, field.name, getattr(instance, field.attname))
        for field in instance._meta.concrete_fields
    }


def shown_value(instance: WorkflowState, name: str, value: Any) -> Any:
    """The value of the field of this name, masked if it is sensitive and there is one."""
    return MASK if name in type(instance).sensitive_fields and value not in (None, "") else value


def secrets_of_instance(instance: WorkflowState) -> set[str]:
    """The values of the instance's sensitive fields."""
    secrets: set[str] = set()
    hide = _collecting(secrets)
    for name in type(instance).sensitive_fields:
        field: Any = instance._meta.get_field(name)
        hide(field.value_from_object(instance))
    return secrets


def hidden(value: Any, secrets: Iterable[str]) -> Any:
    """The JSON value with the secrets masked wherever they stand in a text of it."""
    return _in_texts(value, _covering(secrets, ()))


# What is declared


def message_class(delivery: Delivery) -> type[Message] | None:
    """The delivery's message; by its name alone when its handler is not known any more."""
    recipient = registry.current().recipient(delivery.handler)
    found = registry.message_of(recipient, delivery.message_name) if recipient else None
    return found or _message_named(delivery.message_name)


def _message_named(name: str) -> type[Message] | None:
    recipients = registry.current().recipients
    return next((found for r in recipients if (found := registry.message_of(r, name))), None)


def state_class(workflow: str) -> type[WorkflowState] | None:
    definition = registry.current().recipient(workflow)
    return definition.state if isinstance(definition, WorkflowDefinition) else None


def anything_is_sensitive() -> bool:
    """Whether any message or state that is declared has a sensitive field."""
    return any(
        (isinstance(recipient, WorkflowDefinition) and recipient.state.sensitive_fields)
        or any(map(has_marks, recipient.messages))
        for recipient in registry.current().recipients
    )


@lru_cache(maxsize=1024)
def has_marks(message: type[Message]) -> bool:
    """Whether a field of the message is marked, however deep."""
    return _marked(message, set())


def _marked(kind: Any, seen: set[Any]) -> bool:
    kind = _resolved(kind)
    if get_origin(kind) is Annotated and any(map(is_mark, kind.__metadata__)):
        return True
    if args := get_args(kind):
        return any(_marked(arg, seen) for arg in args if arg is not kind)
    fields = _fields_of(kind)
    if fields is None or kind in seen:
        return False
    seen.add(kind)
    return any(_marked(inner, seen) for inner in fields.values())


# A body


def _masked_body(body: Any, message: type[Message] | None, hide: Hide) -> Any:
    if not isinstance(body, dict):
        return hide(body)
    if message is None:
        return {key: hide(value) for key, value in body.items()}
    if issubclass(message, CommandFailed):
        return _masked_notice(body, hide)
    return _walk_fields(body, [message], hide)


def _masked_notice(body: dict[str, Any], hide: Hide) -> dict[str, Any]:
    """The notice carries the body of the command that failed, and its error."""
    secrets: set[str] = set()

    def keep(value: Any) -> Any:
        secrets.update(_leaves(value))
        return hide(value)

    about = Delivery(
        handler=str(body.get("handler", "")),
        message_name=str(body.get("command", "")),
        body=body.get("body", ""),
    )
    try:
        inner = _masked_body(json.loads(about.body), message_class(about), keep)
    except (ValueError, TypeError, RecursionError):
        inner = keep(about.body)
    error = covering(about, secrets)(str(body.get("error", "")))
    known = set(CommandFailed.model_fields)
    shown = {key: value if key in known else hide(value) for key, value in body.items()}
    return {**shown, "body": json.dumps(inner, ensure_ascii=False), "error": error}


def _walk(value: Any, kind: Any, hide: Hide) -> Any:
    """The value with what its type marks hidden."""
    if value is None or value == MASK:
        return value
    kind = _resolved(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        if any(map(is_mark, kind.__metadata__)):
            return hide(value)
        return _walk(value, args[0], hide)
    if origin in (Union, UnionType):
        return _walk_union(value, [_resolved(arg) for arg in args], hide)
    if isinstance(value, dict) and len(args) == 2:
        return {key: _walk(item, args[1], hide) for key, item in value.items()}
    if isinstance(value, list) and args:
        kinds = args if origin is tuple and args[-1] is not Ellipsis else [args[0]] * len(value)
        rest = [Any] * (len(value) - len(kinds))
        pairs = zip(value, (*kinds, *rest), strict=False)
        return [_walk(item, inner, hide) for item, inner in pairs]
    if isinstance(kind, type) and issubclass(kind, RootModel):
        return _walk(value, _fields_of(kind)["root"], hide)  # type: ignore[index]
    if isinstance(value, dict) and _fields_of(kind) is not None:
        return _walk_fields(value, [kind], hide)
    return hide(value) if isinstance(value, dict | list) and _marked(kind, set()) else value


def _walk_union(value: Any, members: Sequence[Any], hide: Hide) -> Any:
    """Whatever any member marks; which one it was is not known any more."""
    with_fields = [member for member in members if _fields_of(member) is not None]
    if isinstance(value, dict) and with_fields:
        value = _walk_fields(value, with_fields, hide)
    for member in members:
        if member not in with_fields:
            value = _walk(value, member, hide)
    return value


def _walk_fields(value: dict[str, Any], kinds: Sequence[Any], hide: Hide) -> dict[str, Any]:
    """An object of one of these classes; what is a field of none is hidden."""
    declared = [_fields_of(kind) or {} for kind in kinds]
    shown = {}
    for key, item in value.items():
        own = [fields[key] for fields in declared if key in fields]
        for kind in own:
            item = _walk(item, kind, hide)
        shown[key] = item if own else hide(item)
    return shown


def _fields_of(kind: Any) -> dict[str, Any] | None:
    """The fields of a model, dataclass or the like, with their types; None: it has none."""
    if not isinstance(kind, type):
        return None
    if issubclass(kind, BaseModel):
        found = {}
        for name, field in kind.model_fields.items():
            marks = tuple(field.metadata)
            inner = Annotated[(field.annotation, *marks)] if marks else field.annotation
            for key in (name, field.alias, field.serialization_alias):
                if key:
                    found[key] = inner
        computed = {name: field.return_type for name, field in kind.model_computed_fields.items()}
        return {**found, **computed}
    if dataclasses.is_dataclass(kind) or is_typeddict(kind) or hasattr(kind, "_fields"):
        try:
            return get_type_hints(kind, include_extras=True)
        except (NameError, TypeError):
            return None
    return None


def _resolved(kind: Any) -> Any:
    """What a `type` statement stands for, and itself without NewType."""
    while (inner := getattr(kind, "__value__", getattr(kind, "__supertype__", None))) is not None:
        kind = inner
    return kind


# Texts


def _collecting(secrets: set[str]) -> Hide:
    def hide(value: Any) -> Any:
        if value is None or value == "":
            return value
        secrets.update(_leaves(value))
        return MASK

    return hide


def _leaves(value: Any) -> Iterable[str]:
    """The texts and numbers in a value, and whatever else a state holds, as a text."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def _variants(secret: str) -> Iterable[str]:
    """The ways in which a text may show the value."""
    stripped = secret.strip()
    yield from (v for v in (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1]) if v.strip())
    if stripped and stripped != secret:
        yield stripped
    for read in (datetime.fromisoformat, date.fromisoformat):
        try:
            moment: Any = read(secret)
        except ValueError:
            continue
        yield from (str(moment), repr(moment))


def _without(text: str, value: str) -> str:
    """The text with each occurrence masked, also one that was cut or goes on beyond the seed."""
    pattern = re.escape(value[:SEED])
    if len(value) < SHORT:
        pattern = rf"(?<!\w){pattern}(?!\w)"
    parts, end = [], 0
    for found in re.finditer(pattern, text, re.IGNORECASE):
        if found.start() < end:
            continue
        parts += [text[end : found.start()], MASK]
        end = found.end()
        for mine, theirs in zip(value[SEED:], text[end:], strict=False):
            if mine != theirs:
                break
            end += 1
    text = "".join((*parts, text[end:]))
    for length in range(min(len(value) - 1, len(text), SEED), SHORT - 1, -1):
        if text.endswith(value[:length]):
            return text[:-length] + MASK
    return text


def _in_json(text: str, cover: Callable[[str], str]) -> str:
    """The JSON with each text in it covered."""
    return json.dumps(_in_texts(json.loads(text), cover), ensure_ascii=False) if text else ""


def _in_texts(value: Any, cover: Callable[[str], str]) -> Any:
    """The JSON value with each text in it covered."""
    if isinstance(value, str):
        return cover(value)
    if isinstance(value, dict):
        return {key: _in_texts(item, cover) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_texts(item, cover) for item in value]
    return value
