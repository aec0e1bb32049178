"""Lineage as text: a tree for terminals, Mermaid for documents, DOT for Graphviz. Names may hold anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.catalog.lineage import Lineage, LineageEdge, LineageNode

__all__ = ["dot", "mermaid", "tree"]


def tree(lineage: Lineage) -> list[str]:
    """A line for each step, branches indented; a node that is reached again is only named, and marked `(above)`.

    A line that begins with an arrow is the only step from the line above it, so that a long line of descent stays
    narrow.
    """
    arrow, up = ("← ", True) if lineage.direction == "up" else ("→ ", False)
    steps: dict[str, list[LineageEdge]] = {}
    for e in lineage.edges:
        steps.setdefault(e.child if up else e.parent, []).append(e)
    lines = [_line(lineage.nodes[lineage.root])]
    shown = {lineage.root}
    todo = _branches(steps.get(lineage.root, []), "", arrow)
    while todo:  # the last is the next line; no recursion: lineages are deeper than Python's stack
        begin, indent, edge = todo.pop()
        key = edge.parent if up else edge.child
        node = lineage.nodes[key]
        again = key in shown
        says = f"{_printable(node.name)}  (above)" if again else _line(node)
        lines.append(f"{begin}{_printable(edge.kind)}{' (depends)' if edge.depends else ''}  {says}")
        if not again:
            shown.add(key)
            todo += _branches(steps.get(key, []), indent, arrow)
    return lines


def _branches(edges: Sequence[LineageEdge], indent: str, arrow: str) -> list[tuple[str, str, LineageEdge]]:
    """How the line of each step begins, and how those below it do; the first step last."""
    if len(edges) == 1:
        return [(indent + arrow, indent, edges[0])]
    last = len(edges) - 1
    marks = [("├─ ", "│  ") if i < last else ("└─ ", "   ") for i in range(len(edges))]
    return [(indent + here, indent + below, e) for (here, below), e in zip(marks, edges, strict=True)][::-1]


def mermaid(lineage: Lineage) -> str:
    """A Mermaid flowchart, arrows from parents to children; thick where the child's bytes lie in the parent's files."""
    numbers = {key: f"n{i}" for i, key in enumerate(lineage.nodes)}
    lines = ["flowchart LR"]
    for key, node in lineage.nodes.items():
        label = "<br/>".join(map(_entities, _label(node)))
        lines.append(f'  {numbers[key]}["{label}"]')
    for e in lineage.edges:
        arrow = "==>" if e.depends else "-->"
        lines.append(f'  {numbers[e.parent]} {arrow}|"{_entities(e.kind)}"| {numbers[e.child]}')
    return "\n".join(lines) + "\n"


def dot(lineage: Lineage) -> str:
    """A digraph for Graphviz, arrows as in `mermaid`; bold where the child's bytes lie in the parent's files."""
    numbers = {key: f"n{i}" for i, key in enumerate(lineage.nodes)}
    lines = ["digraph lineage {", "  rankdir=LR;", "  node [shape=box];"]
    for key, node in lineage.nodes.items():
        label = "\\n".join(map(_escaped, _label(node)))
        lines.append(f'  {numbers[key]} [label="{label}"];')
    for e in lineage.edges:
        style = ", style=bold" if e.depends else ""
        lines.append(f'  {numbers[e.parent]} -> {numbers[e.child]} [label="{_escaped(e.kind)}"{style}];')
    return "\n".join([*lines, "}"]) + "\n"


def _label(node: LineageNode) -> list[str]:
    """What a node is called, and what is known of it."""
    if node.id is None:
        return [node.name, "not in the catalog"]
    short = node.id[:12]
    about = (
        "" if node.name == short else short,
        node.kind or "",
        "" if node.state == "committed" else node.state or "",
    )
    return [node.name, "  ".join(filter(None, about))]


def _line(node: LineageNode) -> str:
    return _printable("  ".join(_label(node)))


def _printable(text: str) -> str:
    """Without what breaks lines, steers a terminal or turns the writing around."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _entities(text: str) -> str:
    """For a quoted text of Mermaid: everything that could end it, or mean something in it, as a number."""
    return "".join(c if c.isalnum() or c in " @./:-" else f"#{ord(c)};" for c in _printable(text))


def _escaped(text: str) -> str:
    """For a quoted string of DOT, in which a backslash escapes and an ampersand begins an entity."""
    return _printable(text).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
