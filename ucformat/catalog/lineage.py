"""Lineage: the graph of a checkpoint's ancestors or descendants, rendered as a tree, in Mermaid or in Graphviz."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa

from ucformat.catalog.launches import link_launches
from ucformat.catalog.models import CheckpointRow, Edge, Location, RunRow
from ucformat.catalog.refs import parse_ref, resolve, same_place
from ucformat.catalog.rows import event, insert_if_absent, lock_names, pages, serial_at, serial_of
from ucformat.errors import NotFound, UsageError
from ucformat.schema import LINEAGE_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import CTE, Connection, Row

    from ucformat.catalog.stamp import Stamp
    from ucformat.schema.manifest import Manifest


# Edges of the lineage, as they are recorded from the manifest of a child, from a document or by a
# link.


def parent_names(manifest: Manifest) -> Iterator[str]:
    """The ids of the parents that a manifest names, or their places if it has no id."""
    return (p.id or same_place(p.url) for p in manifest.lineage)


def insert_edges(connection: Connection, serial: int, manifest: Manifest, url: str) -> None:
    """Record the edges of the lineage that a manifest has, and one for each place whose files it needs."""
    roots = () if manifest.sidecar is None else manifest.sidecar.roots
    outside = [r for r in map(same_place, roots) if not _below(r, url)]
    parents = [(p, same_place(p.url)) for p in manifest.lineage]
    for parent, place in parents:
        depends = any(_below(r, place) or _below(place, r) for r in outside)
        insert_edge(
            connection, serial, parent.kind, place, parent.id, depends=depends, how=parent.how
        )
    for root in outside:
        if not any(_below(root, place) or _below(place, root) for _, place in parents):
            insert_edge(connection, serial, "convert", root, None, depends=True)


def insert_edge(
    connection: Connection,
    serial: int,
    kind: str,
    parent_url: str,
    parent_id: str | None,
    *,
    depends: bool,
    how: Mapping[str, Any] | None = None,
) -> bool:
    """Record an edge of the lineage, linked to the parent if that is recorded; unknown kinds are ignored.

    Args:
        parent_id: the parent's id (None: the parent is whatever checkpoint is at the place).
    """
    if kind not in LINEAGE_KINDS:  # of a later version, or of a vendor
        return False
    parent_url = same_place(parent_url)
    lock_names(connection, parent_id or parent_url)
    values = {
        "parent": (
            serial_at(connection, parent_url)
            if parent_id is None
            else serial_of(connection, parent_id)
        ),
        "parent_id": parent_id,
        "depends": depends,
        "how": dict(how) if how else None,
    }
    keys = {"child": serial, "kind": kind, "parent_url": parent_url}
    return insert_if_absent(connection, Edge, keys, values, Edge.id) is not None


def _below(url: str, root: str) -> bool:
    """Whether a url is `root` or below it."""
    root = root.rstrip("/")
    return url.rstrip("/") == root or url.startswith(f"{root}/")


Direction = Literal["up", "down"]

_NEAR, _FAR = 64, 1024  # steps that the first query counts, and that one counts at most
_LOCK = 0x7563666C  # PostgreSQL's advisory lock while a link is added: "ucfl"


@dataclass(frozen=True, slots=True)
class LineageNode:
    """A checkpoint, `distance` steps from the root; of one that is not in the catalog, only the url is known."""

    id: str | None
    name: str
    url: str | None
    state: str | None
    kind: str | None
    run: str | None
    step: int | None
    created: datetime | None
    distance: int


@dataclass(frozen=True, slots=True)
class LineageEdge:
    """An edge between the keys of two nodes; with `depends`, the child needs the parent's files.

    `how` tells more of how the child was made, such as the method and the weight of the parent.
    """

    child: str
    parent: str
    kind: str
    depends: bool
    how: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The kind, and in parentheses what `how` tells: `average (weight 0.25)`."""
        words = (
            str(v) if k in ("method", "role") else f"{k} {v}"
            for k, v in self.how.items()
            if v != self.kind
        )
        details = ", ".join(words)
        return f"{self.kind} ({details})" if details else self.kind


@dataclass(frozen=True, slots=True)
class Lineage:
    """The nodes that are reached from `root`, and the edges to them, nearest first.

    A node's key is the checkpoint's id, or the url of one that is not in the catalog. Parents are
    in the order in which they were recorded, children oldest first.
    """

    root: str
    direction: Direction
    nodes: Mapping[str, LineageNode]
    edges: tuple[LineageEdge, ...]

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from ucformat.drawing import card

        way = "Ancestors" if self.direction == "up" else "Descendants"
        title = f"{way} of {self.nodes[self.root].name}"
        return card(title, {"edges": len(self.edges)}, text="\n".join(render_tree(self)))


def load_lineage(
    connection: Connection,
    serial: int,
    direction: Direction,
    depth: int | None,
    now: datetime,  # noqa: ARG001 - as in other queries
) -> Lineage:
    """Load the lineage of a checkpoint."""
    if direction not in ("up", "down"):
        raise UsageError(
            f"{direction!r} is not a direction of lineage", hint="it is `up` or `down`"
        )
    if depth is not None and depth < 0:
        raise UsageError(
            f"the depth of a lineage cannot be {depth}", hint="leave it out for all of it"
        )
    up = direction == "up"
    start = connection.execute(
        sa.select(*_NODE)
        .select_from(CheckpointRow)
        .outerjoin(RunRow)
        .where(CheckpointRow.serial == serial)
    ).one()
    steps = _steps(connection, serial, depth, up=up)
    keys, root = {serial: start.id}, start.id
    nodes = {root: _node(start, 0)}
    edges: list[LineageEdge] = []
    queue = deque([serial])
    while queue:
        near = queue.popleft()
        distance = nodes[keys[near]].distance + 1
        if depth is not None and distance > depth:
            break
        rows = steps.get(near, [])
        for r in rows if up else sorted(rows, key=lambda r: (r.created, r.id)):
            key = r.id or r.parent_url
            if key not in nodes:
                nodes[key] = _node(r, distance)
                if r.id:
                    keys[r.serial] = key
                    queue.append(r.serial)
            child, parent = (keys[near], key) if up else (key, keys[near])
            edges.append(LineageEdge(child, parent, r.edge_kind, r.depends, r.how or {}))
    return Lineage(root, direction, nodes, tuple(edges))


def add_link(connection: Connection, serial: int, parent: str, kind: str, stamp: Stamp) -> bool:
    """Record that a checkpoint was made from another.

    Args:
        parent: a reference, or a place that is not in the catalog.
    """
    if kind not in LINEAGE_KINDS:
        raise UsageError(
            f"{kind!r} is not a kind of lineage", hint=f"the kinds are {', '.join(LINEAGE_KINDS)}"
        )
    ref = parse_ref(parent)
    try:
        parent_serial = resolve(connection, ref)
    except NotFound:
        if ref.place is None:
            raise
        new = insert_edge(connection, serial, kind, ref.place, None, depends=False)
    else:
        new = _link(connection, serial, parent_serial, ref.place, kind)
    if new:
        link_launches(connection, Edge.child == serial)
        event(connection, "link", stamp, serial, parent=parent, kind=kind)
    return new


def _link(connection: Connection, serial: int, parent: int, place: str | None, kind: str) -> bool:
    # two concurrent links could close a cycle that neither sees
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
    walk = _walk(connection, [parent], None, up=True)
    if (
        parent == serial
        or connection.scalar(sa.select(walk.c.far).where(walk.c.far == serial).limit(1)) is not None
    ):
        raise UsageError(
            "a checkpoint cannot be made from itself, or from one of its descendants",
            hint="`ucp lineage --down` shows its descendants",
        )
    same_link = sa.select(Edge.id).where(
        Edge.child == serial, Edge.parent == parent, Edge.kind == kind
    )
    if connection.scalar(same_link.limit(1)) is not None:
        return False
    parent_row = connection.execute(
        sa.select(CheckpointRow.id, _URL).where(CheckpointRow.serial == parent)
    ).one()
    # The edge of this url may lead to another parent, which was at the place before.
    urls = (place or parent_row.url or parent_row.id, parent_row.id)
    return any(
        insert_edge(connection, serial, kind, url, parent_row.id, depends=False) for url in urls
    )


_URL = (
    sa.select(Location.url)
    .where(Location.checkpoint == CheckpointRow.serial)
    .order_by(Location.id + 0)  # else PostgreSQL scans the index of ids for this checkpoint
    .limit(1)
    .correlate(CheckpointRow)
    .scalar_subquery()
    .label("url")
)
_NODE = (
    CheckpointRow.serial,
    CheckpointRow.id,
    CheckpointRow.state,
    CheckpointRow.kind,
    CheckpointRow.step,
    CheckpointRow.created,
    RunRow.name.label("run"),
    _URL,
)


_STEP = (
    Edge.id.label("edge"),
    Edge.child,
    Edge.parent,
    Edge.parent_url,
    Edge.kind.label("edge_kind"),
    Edge.depends,
    Edge.how,
)


def _steps(
    connection: Connection, serial: int, depth: int | None, *, up: bool
) -> dict[int, list[Row[Any]]]:
    """The edges that are reached in so many steps, by the checkpoint from which they lead on.

    A query counts some steps at a time: where ways of different lengths meet, it follows the rest
    of these once for each length.
    """
    steps: dict[int, list[Row[Any]]] = {}
    reached, last, walked = {serial}, [serial], 0
    most = _NEAR
    while last and walked != depth:
        further, most = None if depth is None else min(most, depth - walked), min(2 * most, _FAR)
        new: dict[int, list[Row[Any]]] = {}
        for page in pages(last):
            for r in _edges(connection, page, further, up=up):
                near = r.child if up else r.parent
                if near not in steps:
                    new.setdefault(near, []).append(r)
        steps |= {near: list({r.edge: r for r in rows}.values()) for near, rows in new.items()}
        if further is None:
            break
        walked += further
        for _ in range(further):
            neighbours = dict.fromkeys(
                r.serial for near in last for r in new.get(near, ()) if r.serial is not None
            )
            last = [far for far in neighbours if far not in reached]
            reached.update(last)
    return steps


def _walk(connection: Connection, serials: Sequence[int], depth: int | None, *, up: bool) -> CTE:
    """The edges that are reached from some checkpoints, and the checkpoints that they lead to.

    UNION drops edges that were reached before, so that cycles end and diamonds are followed once.
    """
    near, far = (Edge.child, Edge.parent) if up else (Edge.parent, Edge.child)
    counted = depth is not None
    distance = sa.literal_column("1", sa.Integer).label("distance")
    first = sa.select(Edge.id.label("edge"), far.label("far"), distance).where(near.in_(serials))
    walk = first.cte("walk", recursive=True)
    distance = (walk.c.distance + 1 if counted else walk.c.distance).label("distance")
    # without statistics, a join would read the whole table at every step
    if connection.dialect.name == "postgresql":
        next_ = (
            sa.select(Edge.id, far.label("far"))
            .where(near == walk.c.far)
            .offset(sa.literal_column("0"))
            .lateral()
        )
        further = sa.select(next_.c.id, next_.c.far, distance).join_from(walk, next_, sa.true())
    else:
        further = sa.select(Edge.id, far, distance).join(walk, near == walk.c.far)
    return walk.union(further.where(walk.c.distance < depth) if counted else further)


def _edges(
    connection: Connection, serials: Sequence[int], depth: int | None, *, up: bool
) -> Sequence[Row[Any]]:
    """Each edge that is reached, in order of recording, and the checkpoint that it leads to."""
    walk = _walk(connection, serials, depth, up=up)
    reached = sa.select(walk.c.edge, walk.c.far).distinct().subquery("reached")
    return connection.execute(
        sa.select(*_STEP, *_NODE)
        .select_from(reached)
        .join(Edge, Edge.id == reached.c.edge)
        .outerjoin(CheckpointRow, CheckpointRow.serial == reached.c.far)
        .outerjoin(RunRow, RunRow.id == CheckpointRow.run_id)
        .order_by(Edge.id)
    ).all()


def _node(r: Row[Any], distance: int) -> LineageNode:
    if r.id is None:
        return LineageNode(None, r.parent_url, r.parent_url, None, None, None, None, None, distance)
    name = r.id[:12] if r.run is None or r.step is None else f"{r.run}@{r.step}"
    return LineageNode(r.id, name, r.url, r.state, r.kind, r.run, r.step, r.created, distance)


def render_tree(lineage: Lineage) -> list[str]:
    """Render a tree for terminals.

    Returns:
        A line for each edge. A line that begins with an arrow is the only edge from the line above,
        so that long chains stay narrow; a node that is reached again is only named, and marked
        `(above)`.
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
        label = f"{_printable(node.name)}  (above)" if again else _line(node)
        lines.append(
            f"{begin}{_printable(edge.label)}{' (depends)' if edge.depends else ''}  {label}"
        )
        if not again:
            shown.add(key)
            todo += _branches(steps.get(key, []), indent, arrow)
    return lines


def _branches(
    edges: Sequence[LineageEdge], indent: str, arrow: str
) -> list[tuple[str, str, LineageEdge]]:
    """The prefix of each edge's line and of the lines below it; the first edge last."""
    if len(edges) == 1:
        return [(indent + arrow, indent, edges[0])]
    last = len(edges) - 1
    lines = [("├─ ", "│  ") if i < last else ("└─ ", "   ") for i in range(len(edges))]
    return [
        (indent + here, indent + below, e) for (here, below), e in zip(lines, edges, strict=True)
    ][::-1]


def render_mermaid(lineage: Lineage) -> str:
    """Render a Mermaid flowchart, with arrows from parents to children, thick if the child needs the parent's files."""
    numbers = {key: f"n{i}" for i, key in enumerate(lineage.nodes)}
    lines = ["flowchart LR"]
    for key, node in lineage.nodes.items():
        label = "<br/>".join(map(_entities, _label(node)))
        lines.append(f'  {numbers[key]}["{label}"]')
    for e in lineage.edges:
        arrow = "==>" if e.depends else "-->"
        lines.append(f'  {numbers[e.parent]} {arrow}|"{_entities(e.label)}"| {numbers[e.child]}')
    return "\n".join(lines) + "\n"


def render_dot(lineage: Lineage) -> str:
    """Render a Graphviz digraph, with arrows from parents to children, bold if the child needs the parent's files."""
    numbers = {key: f"n{i}" for i, key in enumerate(lineage.nodes)}
    lines = ["digraph lineage {", "  rankdir=LR;", "  node [shape=box];"]
    for key, node in lineage.nodes.items():
        label = "\\n".join(map(_escaped, _label(node)))
        lines.append(f'  {numbers[key]} [label="{label}"];')
    for e in lineage.edges:
        style = ", style=bold" if e.depends else ""
        lines.append(
            f'  {numbers[e.parent]} -> {numbers[e.child]} [label="{_escaped(e.label)}"{style}];'
        )
    return "\n".join([*lines, "}"]) + "\n"


def _label(node: LineageNode) -> list[str]:
    """The name of a node, and its id, kind and state."""
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
    """Escape line breaks, control characters and changes of writing direction."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _entities(text: str) -> str:
    """Escape text for a quoted string of Mermaid, with special characters as numbers."""
    return "".join(c if c.isalnum() or c in " @./:-" else f"#{ord(c)};" for c in _printable(text))


def _escaped(text: str) -> str:
    """Escape text for a quoted string of DOT."""
    return _printable(text).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
