"""Which handlers and workflows react to which message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django_workflows import conf
from django_workflows.declarations import Handler, Recipient, WorkflowDefinition
from django_workflows.messages import Message


class Registry:
    """What is declared. The last word on names: two recipients of one name are a check error."""

    def __init__(self) -> None:
        self.recipients: list[Recipient] = []
        #: Classes that have steps and name no state: bases of others, or mistakes.
        self.stateless: list[type] = []
        self._by_message: dict[type[Message], tuple[Recipient, ...]] = {}
        self._by_name: dict[str, Recipient] = {}

    def add(self, recipient: Recipient) -> None:
        self.recipients.append(recipient)
        self.changed()

    def changed(self) -> None:
        """Forget what was derived; a step has been added, or a recipient."""
        self._by_message = {}
        self._by_name = {}

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
        """The handler or workflow of this stored name or alias; the first that has it."""
        if not self._by_name:
            by_name: dict[str, Recipient] = {}
            for recipient in reversed(self.recipients):
                by_name.update(dict.fromkeys(recipient.aliases, recipient))
            by_name.update((recipient.name, recipient) for recipient in reversed(self.recipients))
            self._by_name = by_name  # whole: other threads may be asking
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
