"""What is declared: handlers, steps and workflows, as the engine sees them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict, TypeGuard, cast

from django_workflows import conf
from django_workflows.errors import DeclarationError, did_you_mean, require_wait
from django_workflows.messages import Event, Message, name_in_app

if TYPE_CHECKING:
    from django_workflows.models import WorkflowState

Errors = tuple[type[BaseException], ...]
Backoff = timedelta | Callable[[int], timedelta]


class RecoveryOptions(TypedDict, total=False):
    """How failures are dealt with; what is left out is as the workflow, then the project, says.

    `attempts` in all before the delivery is failed; `backoff`, the wait after a failure, or a
    function of how many there have been; `unrecoverable` errors fail the delivery at once.
    """

    attempts: int | None
    backoff: Backoff | None
    unrecoverable: Iterable[type[BaseException]]


@dataclass(frozen=True)
class Recovery:
    """How failures are dealt with; what is left out is for the next wider declaration to say."""

    attempts: int | None = None
    #: The wait after a failure, or a function of how many there have been.
    backoff: Backoff | None = None
    unrecoverable: Errors = ()

    @classmethod
    def of(cls, options: RecoveryOptions, whose: str, *others: str) -> Recovery:
        """The options of a declaration, which has `others` besides.

        Raises `DeclarationError` for an option that it does not have or a value that cannot work.
        """
        given: Mapping[str, Any] = options
        known = (*others, *RecoveryOptions.__annotations__)
        for name in given:
            if name not in known:
                raise DeclarationError(
                    f"{whose} has no option {name!r}. {did_you_mean(name, known)}"
                )
        return cls(
            _attempts(given.get("attempts"), whose),
            _backoff(given.get("backoff"), whose),
            _unrecoverable(given.get("unrecoverable", ()), whose),
        )

    def otherwise(self, wider: Recovery) -> Recovery:
        """This, completed by a wider one."""
        return Recovery(
            self.attempts if self.attempts is not None else wider.attempts,
            self.backoff if self.backoff is not None else wider.backoff,
            self.unrecoverable + wider.unrecoverable,
        )


def _attempts(given: Any, whose: str) -> int | None:
    if given is None or (type(given) is int and given >= 1):
        return given
    raise DeclarationError(
        f"{whose} has attempts={given!r}. Write a whole number of at least 1, such as attempts=3."
    )


def _backoff(given: Any, whose: str) -> Backoff | None:
    if given is None or callable(given):
        return cast("Backoff | None", given)
    try:
        require_wait(given, "backoff")
    except ValueError:
        raise DeclarationError(
            f"{whose} has backoff={given!r}. Write a timedelta from 0 to 100 years, such as "
            f"backoff=timedelta(seconds=3), or a function of how many failures there have been."
        ) from None
    return cast("timedelta", given)


def _unrecoverable(given: Any, whose: str) -> Errors:
    """Its entries are for a check, which reports them all."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        name = getattr(given, "__name__", given)
        raise DeclarationError(
            f"{whose} has unrecoverable={name}, which must be a list. Write unrecoverable=[{name}]."
        )
    return tuple(given)


def require_parentheses(message: object, decorator: str) -> None:
    """Raise `DeclarationError` if the decorated function stands where the message should."""
    if inspect.isroutine(message):
        raise DeclarationError(
            f"{decorator} on {message.__qualname__} names no message. Write {decorator}(Message)."
        )


@dataclass(frozen=True)
class wait:  # noqa: N801  reads as a word: if_missing=wait(timedelta(hours=1), then="fail")
    """Park a message whose instance does not exist yet, for `limit`; then ignore or fail it."""

    limit: timedelta
    then: Literal["ignore", "fail"] = "ignore"


IfMissing = Literal["ignore", "retry", "fail", "wait"] | wait


@dataclass(frozen=True)
class Join:
    """What a step waits for that runs once all of several messages have arrived."""

    messages: tuple[type[Message], ...]
    #: How many: a number, a field of the state, or a function of it; None: one of each message.
    count: int | str | Callable[[Any], int] | None = None
    #: A field of the messages: those with the same value count once.
    distinct: str | None = None
    #: What arrivals are stored under, if not the function's name.
    name: str | None = None

    def may_complete(self, changed: Sequence[Any], *, starts: bool) -> bool:
        """Whether a step that changed these fields of the state can have made it complete."""
        if self.count is None or isinstance(self.count, int):
            return starts and self.count == 0
        if callable(self.count):
            return starts or bool(changed)
        return starts or self.count in {field.name for field in changed}

    def needed(self, state: WorkflowState) -> int | None:
        """How many arrivals make it complete; None while that is not known."""
        if self.count is None:
            return len(self.messages)
        if isinstance(self.count, str):
            return cast("int | None", getattr(state, self.count))
        return self.count(state) if callable(self.count) else self.count

    def counted(self, arrived: Iterable[Message]) -> list[Message]:
        """Those of the messages that count: all, or the first of each kind or distinct value."""
        if self.count is not None and self.distinct is None:
            return list(arrived)
        first: dict[Any, Message] = {}
        for message in arrived:
            value: Any = type(message)
            if self.distinct and self.count is not None:
                value = str(getattr(message, self.distinct))
            first.setdefault(value, message)
        return list(first.values())


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
    recovery: Recovery = Recovery()

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
    starts: bool = False
    #: The value to find the instance by: a field of the message, an attribute, a function.
    lookup: Lookup | None = None
    #: The state field that must equal it (`once_per` for a step that starts).
    maps_to: str | None = None
    if_missing: IfMissing = "ignore"
    recovery: Recovery = Recovery()
    #: For a notice from the engine: the command that failed, or the state of the child that ended.
    about: Any = None
    #: For a step that runs once several messages have arrived.
    join: Join | None = None

    @property
    def name(self) -> str:
        """What is stored of it: the function's name, unless a join was given one."""
        return (self.join.name if self.join else None) or self.function.__name__

    @staticmethod
    def _is_notice(message: Any) -> TypeGuard[type[Notice]]:
        """Also of what is no message at all, which a check reports."""
        return isinstance(message, type) and issubclass(message, Notice)

    @property
    def parameters(self) -> tuple[str, ...]:
        """What its function is called with, besides the state and the context."""
        if self.join:
            return ("messages",)
        return self.message.parameters if self._is_notice(self.message) else ("message",)

    @property
    def decorator(self) -> str:
        """Its decorator as it is read in the code."""
        named: tuple[Any, ...] = (self.message,)
        verb = "started_by" if self.starts else "when"
        if self.join:
            verb, named = "when_all", self.join.messages
        elif self.about is not None and self._is_notice(self.message):
            verb, named = self.message.verb, (self.about,)
        return f"@{verb}({', '.join(getattr(one, '__name__', str(one)) for one in named)})"

    def accepts(self, message: Message) -> bool:
        """Whether it is for this message; of a notice, also what the notice is about."""
        if type(message) is not self.message:
            return False
        return not isinstance(message, Notice) or message.is_about(self)

    @property
    def waits(self) -> wait | None:
        """For how long it lets a message wait for its instance, if at all."""
        if self.if_missing == "wait":
            return wait(conf.current().WAIT_LIMIT)
        return self.if_missing if isinstance(self.if_missing, wait) else None


class Notice(Event):
    """An event that the engine itself sends, to one instance; the step's declaration says which."""

    _has_size_limit = False

    #: The decorator of the steps for it, and what they are called with.
    verb: ClassVar[str]
    parameters: ClassVar[tuple[str, ...]]

    def is_about(self, step: Step) -> bool:
        """Whether the step is declared for what has happened."""
        raise NotImplementedError


@dataclass(eq=False)
class WorkflowDefinition:
    """A declared workflow, whether by a class or by functions."""

    state: type[WorkflowState]
    #: WorkflowContext, or the user's class that extends it.
    context_class: type[Any]
    given_queue: str | None = None
    recovery: Recovery = Recovery()
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

    @property
    def names(self) -> tuple[str, ...]:
        """The stored name, then the aliases."""
        return (self.name, *self.aliases)

    def start_of(self, message: Message) -> Step | None:
        """The step that this message starts an instance with."""
        return next((s for s in self.steps if s.starts and s.accepts(message)), None)

    def step_of(self, message: Message) -> Step | None:
        """The step that this message continues an instance with."""
        return next((s for s in self.steps if not s.starts and s.accepts(message)), None)

    @property
    def joins(self) -> dict[str, Step]:
        """The steps that run once several messages have arrived, by name."""
        return {step.name: step for step in self.steps if step.join}

    def run(self, step: Step, arguments: Sequence[Any], context: Any) -> None:
        """Call the step, as a method of the user's class or as a function."""
        if self.is_class:
            step.function(context, *arguments)
        else:
            step.function(*arguments, context.state, context)

    @property
    def is_class(self) -> bool:
        return self.context_class.__module__ != "django_workflows.context"


Recipient = Handler | WorkflowDefinition
