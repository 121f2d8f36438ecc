"""What a graph of a workflow consists of, before it is drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from uuid import UUID


class Kind(StrEnum):
    """What a box stands for."""

    OUTSIDE = "outside"
    STEP = "step"
    HANDLER = "handler"
    WORKFLOW = "workflow"


class Mark(StrEnum):
    """What has become of a box for one instance; the later one wins."""

    NONE = ""
    DONE = "done"
    WAITING = "waiting"
    FAILED = "failed"


RANK = list(Mark)


@dataclass
class Node:
    """A step of the workflow, or what it exchanges messages with."""

    key: str
    kind: Kind
    title: str
    #: The messages that it is for, by stored name.
    messages: tuple[str, ...] = ()
    starts: bool = False
    handled: int = 0
    failed: int = 0
    waiting: int = 0
    #: Mean seconds of one run.
    seconds: float | None = None
    mark: Mark = Mark.NONE
    #: Whether the instance's last step was this one.
    is_here: bool = False

    def remember(self, mark: Mark) -> None:
        """Mark it, unless something more urgent has been marked."""
        self.mark = max(self.mark, mark, key=RANK.index)


@dataclass
class Edge:
    """A message on its way from one box to another."""

    source: str
    target: str
    message: str
    count: int = 0
    #: Mean seconds from when it was sent until it was handled, waits included.
    seconds: float | None = None
    undoes: bool = False
    #: Whether the declaration alone says so; nothing of the kind has been seen.
    is_declared: bool = False
    #: Whether it has gone this way for the instance.
    is_taken: bool = False


@dataclass
class Graph:
    """A workflow's boxes and what went between them, in a sample of the recent deliveries."""

    workflow: str
    title: str
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: dict[tuple[str, str, str], Edge] = field(default_factory=dict)
    instance_id: UUID | None = None
    #: Deliveries of this workflow that the figures are from, and since when they are.
    sampled: int = 0
    since: datetime | None = None

    def node(self, key: str, kind: Kind, title: str, messages: Iterable[str] = ()) -> Node:
        """The box of this key, made if need be, for these messages too."""
        node = self.nodes.setdefault(key, Node(key, kind, title))
        node.messages = tuple(dict.fromkeys((*node.messages, *messages)))
        return node

    def edge(self, source: str, target: str, message: str) -> Edge:
        """The edge between these boxes for this message, made if need be."""
        return self.edges.setdefault((source, target, message), Edge(source, target, message))


def add_mean(mean: float | None, count: int, other: float | None, other_count: int) -> float | None:
    """The mean of both, each with so many values."""
    if other is None or not other_count:
        return mean
    if mean is None or not count:
        return other
    return (mean * count + other * other_count) / (count + other_count)


def short(name: str) -> str:
    """A stored name without its app."""
    return name.rpartition(".")[2] or name


def lasting(seconds: float | None) -> str:
    """A span of time for a narrow place: 3 ms, 1.4 s, 5 min, 2.0 h, 3.1 d."""
    if seconds is None:
        return ""
    seconds = max(seconds, 0.0)  # by the clocks of two machines it may be less
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for limit, unit, size in ((60, "s", 1), (3600, "min", 60), (86_400, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400:.3g} d"
