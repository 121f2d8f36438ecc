"""Which handlers and workflows react to which message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from django_workflows import conf
from django_workflows.messages import Message, name_in_app

if TYPE_CHECKING:
    from django_workflows.models import WorkflowState

IfMissing = Literal["ignore", "retry", "fail"]
Errors = tuple[type[BaseException], ...]


@dataclass(frozen=True, slots=True)
class attribute:  # noqa: N801  reads as a word: lookup=attribute("tenant")
    """A lookup by an attribute, or sticky attribute, that travels with the message."""

    key: str


Lookup = str | Callable[[Any], Any] | attribute


@dataclass(eq=False)
class Handler:
    """A plain function for one message: `@handles(TakePayment)`."""

    message: type[Message]
    function: Callable[..., None]
    given_name: str | None
    aliases: tuple[str, ...]
    atomic: bool
    given_queue: str | None
    unrecoverable: Errors

    @cached_property
    def name(self) -> str:
        """The stored name: the app's label and the function's name, unless one was given."""
        return self.given_name or name_in_app(self.function, "@handles")

    @property
    def queue(self) -> str:
        return self.given_queue or conf.current().QUEUE

    @property
    def messages(self) -> tuple[type[Message], ...]:
        return (self.message,)

    @property
    def sender(self) -> Callable[..., None]:
        """What receivers of the signals connect to."""
        return self.function


@dataclass(eq=False, frozen=True)
class Step:
    """A workflow's function for one message."""

    message: type[Message]
    function: Callable[..., None]
    starts: bool
    #: The value to find the instance by: a field of the message, an attribute, a function.
    lookup: Lookup | None
    #: The state field that must equal it (`once_per` for a step that starts).
    maps_to: str | None
    if_missing: IfMissing
    unrecoverable: Errors

    @property
    def name(self) -> str:
        return self.function.__name__


@dataclass(eq=False)
class WorkflowDefinition:
    """A declared workflow, whether by a class or by functions."""

    state: type[WorkflowState]
    #: WorkflowContext, or the user's class that extends it.
    context_class: type[Any]
    given_queue: str | None = None
    steps: list[Step] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The stored name: the state's `workflow_name`, else its model label."""
        return self.state.workflow_name or self.state._meta.label

    @property
    def aliases(self) -> tuple[str, ...]:
        return tuple(self.state.workflow_aliases)

    @property
    def queue(self) -> str:
        return self.given_queue or conf.current().QUEUE

    @property
    def messages(self) -> tuple[type[Message], ...]:
        return tuple(dict.fromkeys(step.message for step in self.steps))

    @property
    def sender(self) -> type[WorkflowState]:
        """What receivers of the signals connect to."""
        return self.state

    def start_of(self, message: type[Message]) -> Step | None:
        """The step that this message starts an instance with."""
        return next((s for s in self.steps if s.starts and s.message is message), None)

    def step_of(self, message: type[Message]) -> Step | None:
        """The step that this message continues an instance with."""
        return next((s for s in self.steps if not s.starts and s.message is message), None)

    def run(self, step: Step, message: Message, context: Any) -> None:
        """Call the step, as a method of the user's class or as a function."""
        if self.is_class:
            step.function(context, message)
        else:
            step.function(message, context.state, context)

    @property
    def is_class(self) -> bool:
        return self.context_class.__module__ != "django_workflows.context"


Recipient = Handler | WorkflowDefinition


class Registry:
    """What is declared. The last word on names: two recipients of one name are a check error."""

    def __init__(self) -> None:
        self.recipients: list[Recipient] = []
        self._by_message: dict[type[Message], tuple[Recipient, ...]] = {}
        self._by_name: dict[str, Recipient] = {}

    def add(self, recipient: Recipient) -> None:
        self.recipients.append(recipient)
        self.changed()

    def changed(self) -> None:
        """Forget what was derived; a step has been added, or a recipient."""
        self._by_message.clear()
        self._by_name.clear()

    @property
    def workflows(self) -> list[WorkflowDefinition]:
        return [r for r in self.recipients if isinstance(r, WorkflowDefinition)]

    @property
    def handlers(self) -> list[Handler]:
        return [r for r in self.recipients if isinstance(r, Handler)]

    @property
    def queues(self) -> set[str]:
        """Every queue that a delivery may be on."""
        return {conf.current().QUEUE, *(recipient.queue for recipient in self.recipients)}

    def recipients_of(self, message: type[Message]) -> tuple[Recipient, ...]:
        """The handlers and workflows that react to this message."""
        found = self._by_message.get(message)
        if found is None:
            found = tuple(r for r in self.recipients if message in r.messages)
            self._by_message[message] = found
        return found

    def recipient(self, name: str) -> Recipient | None:
        """The handler or workflow of this stored name or alias."""
        if not self._by_name:
            for recipient in reversed(self.recipients):
                for alias in recipient.aliases:
                    self._by_name[alias] = recipient
            for recipient in reversed(self.recipients):
                self._by_name[recipient.name] = recipient
        return self._by_name.get(name)


def message_of(recipient: Recipient, name: str) -> type[Message] | None:
    """The message of this stored name or alias that the recipient reacts to."""
    return next((m for m in recipient.messages if name in m.stored_names()), None)


_current = Registry()


def current() -> Registry:
    """The registry of this process, the same for all its threads."""
    return _current


@contextmanager
def isolated() -> Iterator[Registry]:
    """An empty registry for the whole process while the block runs; for tests."""
    global _current
    before, _current = _current, Registry()
    try:
        yield _current
    finally:
        _current = before
