"""A graph as text: Mermaid, DOT and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from django_workflows.graph.drawing import figures_of, label_of
from django_workflows.graph.shape import Edge, Graph, Kind, Mark, Node, short

MERMAID_SHAPES = {
    Kind.OUTSIDE: ("([", "])"),
    Kind.STEP: ("(", ")"),
    Kind.HANDLER: ("[", "]"),
    Kind.WORKFLOW: ("[[", "]]"),
}
MERMAID_CLASSES = (
    "classDef done stroke:#2e7d32,stroke-width:2px",
    "classDef waiting stroke:#0277bd,stroke-width:2px,stroke-dasharray:5 3",
    "classDef failed stroke:#c62828,stroke-width:3px",
    "classDef here stroke-width:4px",
)
DOT_COLOURS = {Mark.DONE: "#2e7d32", Mark.WAITING: "#0277bd", Mark.FAILED: "#c62828"}


def as_mermaid(graph: Graph) -> str:
    """A flowchart for Mermaid, which GitHub and GitLab draw."""
    ids = {key: f"n{i}" for i, key in enumerate(graph.nodes)}
    lines = ["flowchart TD"]
    for node in graph.nodes.values():
        opened, closed = MERMAID_SHAPES[node.kind]
        shown = "<br/>".join(_mermaid(line) for line in _lines(node))
        lines.append(f'    {ids[node.key]}{opened}"{shown}"{closed}')
    for edge in graph.edges.values():
        dashed = edge.undoes or edge.is_declared
        arrow = "==>" if edge.is_taken else "-.->" if dashed else "-->"
        label = _mermaid(_label(graph, edge))
        lines.append(f'    {ids[edge.source]} {arrow}|"{label}"| {ids[edge.target]}')
    for node in graph.nodes.values():
        for name in (*([str(node.mark)] if node.mark else []), *(["here"] if node.is_here else [])):
            lines.append(f"    class {ids[node.key]} {name}")
    if graph.instance_id is not None:
        lines += [f"    {line}" for line in MERMAID_CLASSES]
    return "\n".join(lines) + "\n"


def as_dot(graph: Graph) -> str:
    """A digraph for Graphviz."""
    lines = [
        f"digraph {_quoted(graph.workflow)} {{",
        '    node [shape=box, fontname="sans-serif", fontsize=11];',
        '    edge [fontname="sans-serif", fontsize=9];',
    ]
    for node in graph.nodes.values():
        style = ["rounded"] if node.kind == Kind.STEP else []
        options = {"label": "\n".join(_lines(node))}
        if node.kind == Kind.OUTSIDE:
            options["shape"] = "oval"
        if node.kind == Kind.WORKFLOW:
            options["peripheries"] = "2"
        if node.mark:
            options |= {"color": DOT_COLOURS[node.mark], "penwidth": "4" if node.is_here else "2"}
        if style:
            options["style"] = ",".join(style)
        lines.append(f"    {_quoted(node.key)} [{_options(options)}];")
    for edge in graph.edges.values():
        options = {"label": _label(graph, edge)}
        if edge.undoes or edge.is_declared:
            options["style"] = "dashed"
        if edge.is_taken:
            options["penwidth"] = "2"
        lines.append(f"    {_quoted(edge.source)} -> {_quoted(edge.target)} [{_options(options)}];")
    return "\n".join([*lines, "}"]) + "\n"


def as_json(graph: Graph) -> str:
    """Everything that is known, as one JSON object."""
    found: dict[str, Any] = asdict(graph)
    found["nodes"] = list(found["nodes"].values())
    found["edges"] = list(found["edges"].values())
    return json.dumps(found, default=str, indent=2) + "\n"


def _lines(node: Node) -> list[str]:
    if node.kind == Kind.OUTSIDE:
        return [node.title]
    return [node.title, *(f"on {short(name)}" for name in node.messages), figures_of(node)]


def _label(graph: Graph, edge: Edge) -> str:
    label = label_of(graph, [edge])
    return (
        label[0]
        if label and label[0].startswith(short(edge.message))
        else " ".join([short(edge.message), *label])
    )


def _mermaid(text: str) -> str:
    """The text with everything that could mean something to Mermaid, or HTML, as an entity."""
    return "".join(c if c.isalnum() or c in " _.,-" else f"#{ord(c)};" for c in text)


def _options(options: dict[str, str]) -> str:
    return ", ".join(f"{name}={_quoted(value)}" for name, value in options.items())


def _quoted(text: str) -> str:
    """A string of DOT. A backslash would begin an escape, so it is doubled."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped.encode(errors="replace").decode()}"'
