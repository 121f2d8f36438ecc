"""A graph as SVG, with classes and SVG attributes alone, for pages with a strict CSP."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _

from django_workflows.graph.layout import Layout, Pair, lay_out
from django_workflows.graph.shape import Edge, Graph, Kind, Mark, Node, lasting, short

MARGIN = 16.0
LINE = 15.0
#: Mean width of a character, in the sizes of the title and of the other lines.
TITLE_CHARACTER, CHARACTER = 8.0, 6.1
WIDEST = 30
STYLES = Path(__file__).parent.parent / "static" / "django_workflows" / "graph.css"

TIMES = "\N{MULTIPLICATION SIGN}"
SIGNS = {Mark.DONE: "✓", Mark.WAITING: "…", Mark.FAILED: "✗"}


def as_svg(graph: Graph, *, standalone: bool = False) -> SafeString:
    """The drawing. Its colours are in graph.css, which a standalone one brings along."""
    texts = {key: lines_of(node) for key, node in graph.nodes.items()}
    sizes = {key: size_of(graph.nodes[key], texts[key]) for key in graph.nodes}
    edges = together(graph)
    layout = lay_out(sizes, list(edges))
    labels = Labels(layout, sizes)
    lines = [line_of(pair, graph, edges[pair], layout) for pair in layout.lines]
    loops = [loop_of(key, layout, sizes) for key in sizes if (key, key) in edges]
    boxes = [
        box_of(node, texts[key], layout.boxes[key], sizes[key]) for key, node in graph.nodes.items()
    ]
    said = [labels.place(pair, label_of(graph, edges[pair])) for pair in edges]
    width = labels.right - labels.left + 2 * MARGIN
    height = layout.height + 2 * MARGIN
    view = f"{labels.left - MARGIN:.1f} {-MARGIN:.1f} {width:.1f} {height:.1f}"
    name = "workflows-" + sha256(repr((graph.workflow, graph.instance_id)).encode()).hexdigest()[:8]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="workflows-graph" role="img" '
        f'aria-labelledby="{name}-title {name}-desc" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="{view}">',
        f'<title id="{name}-title">{text(title_of(graph))}</title>',
        f'<desc id="{name}-desc">{text(described(graph))}</desc>',
        f"<style>{STYLES.read_text()}</style>" if standalone else "",
        *lines,
        *loops,
        *boxes,
        *said,
        "</svg>",
    ]
    return mark_safe("\n".join(part for part in parts if part))  # noqa: S308  escaped by text()


def text(value: str) -> str:
    """The text escaped, without what XML cannot hold."""
    kept = "".join(
        " " if unicodedata.category(c) in ("Cc", "Cs", "Cn") or c in "\ufffe\uffff" else c
        for c in value
    )
    return str(escape(kept))


def cut(value: str, length: int = WIDEST) -> str:
    return value if len(value) <= length else value[: length - 1] + "…"


# Boxes


def lines_of(node: Node) -> list[str]:
    """What stands in a box: its name, its messages, its figures."""
    if node.kind == Kind.OUTSIDE:
        return [_("outside")]
    names = [short(message) for message in node.messages]
    more = [_("and %(count)d more") % {"count": len(names) - 3}] if len(names) > 4 else []
    shown = [_("on %(message)s") % {"message": name} for name in names[: 3 if more else 4]]
    return [cut(node.title), *(cut(line, WIDEST + 4) for line in (*shown, *more)), figures_of(node)]


def figures_of(node: Node) -> str:
    found = [f"{node.handled:,}{TIMES}" if node.handled else ""]
    found.append(lasting(node.seconds) if node.handled else "")
    found.append(_("%(count)d waiting") % {"count": node.waiting} if node.waiting else "")
    found.append(_("%(count)d failed") % {"count": node.failed} if node.failed else "")
    return " · ".join(part for part in found if part) or _("not seen")


def size_of(node: Node, lines: list[str]) -> tuple[float, float]:
    if node.kind == Kind.OUTSIDE:
        return len(lines[0]) * CHARACTER + 24, 24.0
    width = max(len(lines[0]) * TITLE_CHARACTER + 20, *(len(one) * CHARACTER for one in lines[1:]))
    return max(width + 24, 110.0), len(lines) * LINE + 12


def box_of(
    node: Node, lines: list[str], middle: tuple[float, float], size: tuple[float, float]
) -> str:
    (x, y), (width, height) = middle, size
    left, top = x - width / 2, y - height / 2
    classes = f"wg-box wg-{node.kind}" + (f" wg-{node.mark}" if node.mark else "")
    classes += " wg-here" if node.is_here else ""
    classes += "" if node.handled or node.failed or node.waiting or node.mark else " wg-unseen"
    if node.kind == Kind.OUTSIDE:
        classes = "wg-box wg-outside"
    radius = {Kind.STEP: 8, Kind.OUTSIDE: 12}.get(node.kind, 1)
    parts = [
        f'<g class="{classes}"><title>{text(told(node))}</title>',
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{radius}"/>',
    ]
    if node.kind == Kind.WORKFLOW:
        parts.append(
            f'<rect x="{left + 3:.1f}" y="{top + 3:.1f}" width="{width - 6:.1f}" '
            f'height="{height - 6:.1f}" rx="1"/>'
        )
    start = top + 19 if node.kind != Kind.OUTSIDE else y + 4
    for i, line in enumerate(lines):
        kind = "wg-title" if i == 0 and node.kind != Kind.OUTSIDE else "wg-text"
        parts.append(
            f'<text class="{kind}" x="{x:.1f}" y="{start + i * LINE:.1f}" '
            f'text-anchor="middle">{text(line)}</text>'
        )
    if sign := "●" if node.is_here and node.mark == Mark.DONE else SIGNS.get(node.mark):
        parts.append(
            f'<text class="wg-sign" x="{left + width - 11:.1f}" y="{top + 17:.1f}" '
            f'text-anchor="middle">{sign}</text>'
        )
    return "".join(parts) + "</g>"


# Edges


def together(graph: Graph) -> dict[Pair, list[Edge]]:
    """The edges of each pair of boxes, which are drawn as one line."""
    found: dict[Pair, list[Edge]] = defaultdict(list)
    for edge in graph.edges.values():
        found[edge.source, edge.target].append(edge)
    return dict(found)


def classes_of(edges: list[Edge]) -> str:
    classes = ["wg-line"]
    if all(edge.undoes for edge in edges):
        classes.append("wg-undoes")
    if all(edge.is_declared for edge in edges):
        classes.append("wg-unseen")
    if any(edge.is_taken for edge in edges):
        classes.append("wg-taken")
    return " ".join(classes)


def line_of(pair: Pair, graph: Graph, edges: list[Edge], layout: Layout) -> str:
    """A curve through the points, vertical at each, and an arrowhead."""
    points = layout.lines[pair]
    (x, y), up = points[-1], pair in layout.turned
    tip = -7.0 if up else 7.0
    points = [*points[:-1], (x, y - tip)]
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        bend = (y1 - y0) / 2
        path += f"C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}"
    return (
        f'<g class="{classes_of(edges)}"><title>'
        f"{text(' '.join(sentence(graph, edge) for edge in edges))}</title>"
        f'<path d="{path}" fill="none"/>'
        f'<path class="wg-tip" d="M{x:.1f} {y:.1f}l-4.5 {-tip * 1.2:.1f}h9z"/></g>'
    )


def loop_of(key: str, layout: Layout, sizes: dict[str, tuple[float, float]]) -> str:
    """The line of a box to itself, on its right."""
    x, y = layout.boxes[key][0] + sizes[key][0] / 2, layout.boxes[key][1]
    return (
        f'<g class="wg-line"><path d="M{x:.1f} {y - 8:.1f}c24 -8 24 24 7 16" fill="none"/>'
        f'<path class="wg-tip" d="M{x:.1f} {y + 8:.1f}l8.4 -4.5v9z"/></g>'
    )


def label_of(graph: Graph, edges: list[Edge]) -> list[str]:
    """What stands at a line: how often and how long; the message where the box has several."""
    lines = []
    for edge in edges:
        target = graph.nodes[edge.target]
        named = target.kind == Kind.WORKFLOW or len(target.messages) > 1 or len(edges) > 1
        figures = [f"{edge.count:,}{TIMES}"] if edge.count else []
        figures += [lasting(edge.seconds)] if edge.seconds is not None else []
        name = cut(short(edge.message), 22) if named else ""
        if line := f"{name} {' · '.join(figures)}".strip():
            lines.append(line)
    if len(lines) > 3:
        lines[2:] = [_("and %(count)d more") % {"count": len(lines) - 2}]
    return lines


class Labels:
    """Puts texts at lines where they cover neither each other nor a box, as far as can be."""

    def __init__(self, layout: Layout, sizes: dict[str, tuple[float, float]]) -> None:
        self.layout, self.sizes = layout, sizes
        self.taken = [
            (
                x - sizes[key][0] / 2,
                y - sizes[key][1] / 2,
                x + sizes[key][0] / 2,
                y + sizes[key][1] / 2,
            )
            for key, (x, y) in layout.boxes.items()
        ]
        self.left, self.right = 0.0, layout.width

    def place(self, pair: Pair, lines: list[str]) -> str:
        if not lines:
            return ""
        width, height = max(map(len, lines)) * 5.6 + 4, len(lines) * 12.0
        tries = [
            (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            for x, y in self.spots(pair, width)
        ]
        area = min(tries, key=lambda area: sum(_overlap(area, other) for other in self.taken))
        self.taken.append(area)
        self.left, self.right = min(self.left, area[0]), max(self.right, area[2])
        x = (area[0] + area[2]) / 2
        behind = (
            f'<rect class="wg-behind" x="{area[0]:.1f}" y="{area[1]:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}"/>'
        )
        return behind + "".join(
            f'<text class="wg-label" x="{x:.1f}" y="{area[1] + 9.5 + i * 12:.1f}" '
            f'text-anchor="middle">{text(line)}</text>'
            for i, line in enumerate(lines)
        )

    def spots(self, pair: Pair, width: float) -> list[tuple[float, float]]:
        """Where the label could be: along the line's first and last part, or beside a loop."""
        if pair[0] == pair[1]:
            x, y = self.layout.boxes[pair[0]]
            return [(x + self.sizes[pair[0]][0] / 2 + 24 + width / 2, y)]
        points = self.layout.lines[pair]
        found = []
        for i in dict.fromkeys((0, (len(points) // 2 - 1) // 2 * 2, len(points) - 2)):
            (x0, y0), (x1, y1) = points[i], points[i + 1]
            for share in (0.5, 0.4, 0.6, 0.3, 0.7):
                ease = share * share * (3 - 2 * share)
                found.append((x0 + (x1 - x0) * ease, y0 + (y1 - y0) * share))
        return found


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0)


# In words


def title_of(graph: Graph) -> str:
    if graph.instance_id is None:
        return _("The workflow %(name)s") % {"name": graph.workflow}
    return _("%(name)s, and where %(id)s is") % {"name": graph.workflow, "id": graph.instance_id}


def described(graph: Graph) -> str:
    """The whole drawing in words, for those who do not see it."""
    nodes = [told(node) for node in graph.nodes.values() if node.kind != Kind.OUTSIDE]
    return " ".join([*nodes, *(sentence(graph, edge) for edge in graph.edges.values())])


MARKED = {
    Mark.DONE: "the instance has been here",
    Mark.WAITING: "the instance waits for it",
    Mark.FAILED: "it failed for the instance",
}


def told(node: Node) -> str:
    words = [f"{node.kind.capitalize()} {node.title}"]
    if node.messages:
        words.append(f"on {', '.join(node.messages)}")
    words.append(figures_of(node))
    if node.is_here:
        words.append("the instance is here")
    elif node.mark:
        words.append(MARKED[node.mark])
    return "; ".join(words) + "."


def sentence(graph: Graph, edge: Edge) -> str:
    """One edge in words."""
    source, target = graph.nodes[edge.source].title, graph.nodes[edge.target].title
    said = f"{edge.message} goes from {source} to {target}"
    if edge.count:
        said += f", {edge.count:,} times"
    if edge.seconds is not None:
        said += f", handled after {lasting(edge.seconds)}"
    return said + (", to undo." if edge.undoes else ".")
