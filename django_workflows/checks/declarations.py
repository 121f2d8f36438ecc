"""Names, and what handlers and workflows have in common."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from django.core.checks import CheckMessage

from django_workflows import registry
from django_workflows.checks.reports import (
    Problems,
    error,
    is_message,
    messages,
    names_of,
    path,
    place,
    place_of_step,
    steps,
)
from django_workflows.declarations import WorkflowDefinition
from django_workflows.errors import DeclarationError
from django_workflows.messages import Command, Message
from django_workflows.models import Delivery


def check_declarations(**_kwargs: Any) -> list[CheckMessage]:
    return [
        *no_stored_name(),
        *recipients_of_one_name(),
        *messages_of_one_name(),
        *long_names(),
        *states_of_two_workflows(),
        *commands_of_two_handlers(),
        *no_state(),
        *not_messages(),
        *functions_that_cannot_be_called(),
        *unrecoverable_that_is_no_error(),
    ]


# Names


def no_stored_name() -> Problems:
    """E015: what is declared outside the apps has a name only if it was given one."""
    named: list[tuple[str, Callable[[], str]]] = [
        *((path(message), message.stored_name) for message in messages()),
        *((place(one), partial(getattr, one, "name")) for one in registry.current().handlers),
    ]
    for where, name in named:
        try:
            name()
        except DeclarationError as problem:
            text, remedy = str(problem).split(". ", 1)
            yield error(15, f"{text}.", f"{remedy} Or move it into an installed app.", where)


def recipients_of_one_name() -> Problems:
    """E001: a stored name, or alias, leads to one handler or workflow."""
    for name, found in _by_name(registry.current().recipients):
        if all(isinstance(r, WorkflowDefinition) and r.state is found[0].state for r in found):
            continue  # E003 says it better
        yield error(
            1,
            f"{_and(place(r) for r in found)} have one stored name, {name!r}, so deliveries of the "
            f"later ones would be handled by the first.",
            "Give one of them another name: @handles(..., name='...') on a handler, workflow_name "
            "on a workflow's state. Or remove the alias.",
            place(found[-1]),
        )


def messages_of_one_name() -> Problems:
    """E002: a stored name, or alias, leads to one message."""
    for name, found in _by_name(messages()):
        yield error(
            2,
            f"{_and(path(m) for m in found)} have one stored name, {name!r}.",
            f"Give one of them another: class {found[-1].__name__}(..., name='...'). Or remove "
            f"the alias.",
            path(found[-1]),
        )


def _by_name(declared: Iterable[Any]) -> Iterator[tuple[str, list[Any]]]:
    """The names that several of these have, with who has them."""
    by_name: dict[str, list[Any]] = defaultdict(list)
    for one in declared:
        for name in dict.fromkeys(names_of(one)):
            by_name[name].append(one)
    return ((name, found) for name, found in by_name.items() if len(found) > 1)


def long_names() -> Problems:
    """E021: a stored name fits its column."""
    column: Any = Delivery._meta.get_field("message_name")  # the handler's is as long
    for one in (*messages(), *registry.current().recipients):
        where = path(one) if isinstance(one, type) else place(one)
        for name in names_of(one):
            if len(name) > column.max_length:
                yield error(
                    21,
                    f"{where} has the stored name {name:.60}... of {len(name)} characters; at most "
                    f"{column.max_length} fit.",
                    "Give it a shorter name or alias.",
                    where,
                )


# Who reacts to what


def states_of_two_workflows() -> Problems:
    """E003: the state is the workflow's identity."""
    by_state: dict[Any, list[WorkflowDefinition]] = defaultdict(list)
    for workflow in registry.current().workflows:
        by_state[workflow.state].append(workflow)
    for state, found in by_state.items():
        if len(found) > 1:
            yield error(
                3,
                f"{_and(place(w) for w in found)} have one state, {path(state)}, and each would "
                f"run on the other's instances.",
                f"Declare a state of its own for {place(found[-1])}, or make them one workflow.",
                place(found[-1]),
            )


def commands_of_two_handlers() -> Problems:
    """E012: a command is an order to one."""
    for message in messages():
        found = registry.current().recipients_of(message)
        if issubclass(message, Command) and len(found) > 1:
            yield error(
                12,
                f"The command {path(message)} is handled by {_and(place(r) for r in found)}.",
                "A command has one handler. Keep one of them, or make the message an Event.",
                path(message),
            )


def no_state() -> Problems:
    """E026: steps without a state run for nobody, unless a subclass names one."""
    named = [workflow.context_class for workflow in registry.current().workflows]
    for declared in registry.current().stateless:
        is_generic = bool(getattr(declared, "__parameters__", ()))  # meant for subclasses
        if not is_generic and not any(issubclass(one, declared) for one in named):
            yield error(
                26,
                f"{path(declared)} has steps and names no state, so it is no workflow and they "
                f"never run.",
                f"Write class {declared.__name__}(Workflow[YourState]), or name the state in a "
                f"subclass.",
                path(declared),
            )


# Functions


def not_messages() -> Problems:
    """E019: what is subscribed to can be sent."""
    for label, where, message, _function, _arguments in _functions():
        if not is_message(message):
            yield error(
                19,
                f"{where} is declared with {label}, and {message!r} is no message to be sent.",
                "Name a class of your own that extends Command or Event.",
                where,
            )


def functions_that_cannot_be_called() -> Problems:
    """E018 and E020: a function is called plainly, with the arguments that it is given."""
    for label, where, _message, function, arguments in _functions():
        if kind := _needs_more_than_a_call(function):
            yield error(
                18,
                f"{where} is {kind}: calling it runs nothing of it.",
                f"Make it a plain function: def {function.__name__}({', '.join(arguments)}). Call "
                f"asynchronous code in it with asgiref.sync.async_to_sync.",
                where,
            )
        elif not _takes(function, len(arguments)):
            yield error(
                20,
                f"{where} is declared with {label} and cannot be called with "
                f"({', '.join(arguments)}).",
                f"Write def {function.__name__}({', '.join(arguments)}).",
                where,
            )


def _functions() -> Iterator[tuple[str, str, type[Message], Callable[..., Any], tuple[str, ...]]]:
    """Of each handler and step: decorator, place, message, function, and its arguments."""
    for handler in registry.current().handlers:
        label = f"@handles({getattr(handler.message, '__name__', handler.message)})"
        yield label, place(handler), handler.message, handler.function, ("message", "context")
    for workflow, step in steps():
        own = step.parameters
        given = ("self", *own) if workflow.is_class else (*own, "state", "context")
        where = place_of_step(workflow, step)
        yield step.decorator, where, step.message, step.function, given


def _needs_more_than_a_call(function: Any) -> str:
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "async"
    return "a generator" if inspect.isgeneratorfunction(function) else ""


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except ValueError:  # a callable whose signature cannot be known
        return True
    except TypeError:
        return False
    return True


def unrecoverable_that_is_no_error() -> Problems:
    """E023: what is compared with what was raised can be raised."""
    declared: list[tuple[str, Any]] = [
        *((place(handler), handler) for handler in registry.current().handlers),
        *((place_of_step(workflow, step), step) for workflow, step in steps()),
    ]
    for where, one in declared:
        for named in one.recovery.unrecoverable:
            if not (isinstance(named, type) and issubclass(named, BaseException)):
                yield error(
                    23,
                    f"{where} has {named!r} in unrecoverable, which is no class of exceptions.",
                    "Name exception classes only: unrecoverable=[CardExpired].",
                    where,
                )


def _and(places: Iterable[str]) -> str:
    *rest, last = places
    return f"{', '.join(rest)} and {last}"
