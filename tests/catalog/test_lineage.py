"""Lineage: every step once, nearest first, whatever the graph; links; and lineage as text."""

from __future__ import annotations

import re
from collections import deque
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.catalog.manifests import made_from, manifest, packed_over
from ucformat.catalog import lineage
from ucformat.catalog.database import Database
from ucformat.catalog.lineage import (
    Lineage,
    LineageEdge,
    LineageNode,
    add_link,
    load_lineage,
    render_dot,
    render_mermaid,
    render_tree,
)
from ucformat.catalog.models import AliasRow, CheckpointRow, Edge, Event, TensorSet
from ucformat.catalog.recording import Found, record_all
from ucformat.catalog.stamp import Stamp
from ucformat.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.schema.manifest import Manifest

NOW = datetime(2026, 6, 1, tzinfo=UTC)
STAMP = Stamp("somebody@somewhere", NOW)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()


def put(database: Database, *manifests: Manifest) -> list[int]:
    """Record checkpoints at `/r/<step>`; their serials."""
    with database.writing() as c:
        return [
            serial
            for m in manifests
            for serial in record_all(c, [Found(m, f"/r/{m.step}", run=m.run)], STAMP)
        ]


def ask(
    database: Database, serial: int, direction: Any = "up", depth: int | None = None
) -> Lineage:
    with database.reading() as c:
        return load_lineage(c, serial, direction, depth, NOW)


def link(database: Database, child: int, parent: str, kind: str = "finetune") -> bool:
    with database.writing() as c:
        return add_link(c, child, parent, kind, STAMP)


def bare(
    database: Database, ids: Sequence[str], edges: Sequence[tuple[int, int | str]]
) -> list[int]:
    """Checkpoints with nothing in them, and edges from child to parent (a text: a place that is unknown)."""
    values = {
        "kind": "ucformat",
        "state": "committed",
        "created": NOW,
        "recorded": NOW,
        "tensors": 0,
        "nbytes": 0,
    }
    more: dict[str, Any] = {
        "producer": {},
        "topology": {},
        "digest_block": 0,
        "document_revision": 0,
        "document_written": 0,
    }
    with database.writing() as c:
        structure = c.execute(
            sa.insert(TensorSet).values(hash=ids[0]).returning(TensorSet.id)
        ).scalar_one()
        rows = [{"id": i, "tensor_set_id": structure, **values, **more} for i in ids]
        c.execute(sa.insert(CheckpointRow), rows)
        found = c.execute(
            sa.select(CheckpointRow.id, CheckpointRow.serial).where(
                CheckpointRow.tensor_set_id == structure
            )
        )
        known = {r.id: r.serial for r in found}
        serials = [known[i] for i in ids]
        lines = [
            {
                "child": serials[child],
                "parent": None if isinstance(parent, str) else serials[parent],
                "parent_id": None,
                "parent_url": parent if isinstance(parent, str) else f"/at/{number}",
                "kind": "resume",
                "depends": False,
            }
            for number, (child, parent) in enumerate(edges)
        ]
        if lines:
            c.execute(sa.insert(Edge), lines)
    return serials


graphs = st.integers(1, 7).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.lists(
            st.tuples(st.integers(0, n - 1), st.integers(0, n - 1) | st.sampled_from(["/x", "/y"])),
            unique=True,
            max_size=14,
        ),
    )
)
made = iter(range(1 << 30))


@settings(max_examples=100)
@given(
    graph=graphs,
    up=st.booleans(),
    depth=st.none() | st.integers(0, 5) | st.integers(60, 70),
    counted=st.sampled_from([1, 2, 64]),
)
def test_every_step_is_there_once_whatever_the_graph(
    database: Database,
    graph: tuple[int, list[tuple[int, int | str]]],
    up: bool,
    depth: int | None,
    counted: int,
) -> None:
    n, edges = graph
    names = [f"{next(made):032x}" for _ in range(n)]
    serials = bare(database, names, edges)
    with mock.patch.multiple(lineage, _NEAR=counted, _FAR=2 * counted):
        found = ask(database, serials[0], "up" if up else "down", depth)

    distances: dict[int | str, int] = {0: 0}
    queue: deque[int | str] = deque([0])
    expected = set()
    while queue:
        near = queue.popleft()
        if distances[near] == depth:
            continue
        for child, parent in edges:
            here, there = (child, parent) if up else (parent, child)
            if here == near and isinstance(near, int):
                expected.add((child, parent))
                if there not in distances:
                    distances[there] = distances[near] + 1
                    queue.append(there)

    def key(x: int | str) -> str:
        return x if isinstance(x, str) else names[x]

    assert found.root == names[0]
    assert {k: node.distance for k, node in found.nodes.items()} == {
        key(x): d for x, d in distances.items()
    }
    assert sorted((e.child, e.parent) for e in found.edges) == sorted(
        (key(a), key(b)) for a, b in expected
    )
    near_first = [found.nodes[e.child if up else e.parent].distance for e in found.edges]
    assert near_first == sorted(near_first)
    assert [n.distance for n in found.nodes.values()] == sorted(distances.values())
    assert render_tree(found)[0].startswith(names[0][:12])
    assert len(render_tree(found)) == 1 + len(found.edges)


def test_a_node_says_what_is_known_of_it(database: Database) -> None:
    parent = manifest(1, step=10)
    child = manifest(2, step=20, lineage=made_from(parent, "resume", "/r/10"))
    serials = put(database, child, parent)  # the child first: it is linked when its parent comes
    found = ask(database, serials[0])
    assert found.root == child.id
    assert found.direction == "up"
    assert found.nodes[parent.id] == LineageNode(
        parent.id, "run7@10", "/r/10", "committed", "ucformat", "run7", 10, parent.created, 1
    )
    assert found.nodes[child.id].distance == 0
    assert found.edges == (LineageEdge(child.id, parent.id, "resume", depends=False),)
    down = ask(database, serials[1], "down")
    assert down.root == parent.id
    assert down.edges == found.edges
    assert ask(database, serials[1]).edges == ()


def test_what_is_gone_stays_in_the_lineage(database: Database) -> None:
    first = manifest(1, step=10)
    second = manifest(2, step=20, lineage=made_from(first, "resume"))
    serials = put(database, first, second)
    put(database, manifest(3, step=10))  # lies where the first one lay
    node = ask(database, serials[1]).nodes[first.id]
    assert (node.state, node.url, node.name) == ("replaced", None, "run7@10")


def test_unknown_parents_are_known_by_their_url(database: Database) -> None:
    stranger = made_from(manifest(99), "convert", "/strange/place/")
    serials = put(
        database,
        manifest(1, step=1, lineage=stranger),
        manifest(2, step=2, run=None, lineage=stranger),
    )
    found = ask(database, serials[0])
    assert found.nodes["/strange/place"] == LineageNode(
        None, "/strange/place", "/strange/place", None, None, None, None, None, 1
    )
    assert found.edges[0].parent == "/strange/place"
    assert (
        render_tree(ask(database, serials[1]))[1] == "← convert  /strange/place  not in the catalog"
    )


def test_edges_that_bytes_depend_on_are_told_apart(database: Database) -> None:
    parent = manifest(1, step=1)
    child = manifest(
        2, step=2, lineage=made_from(parent, "convert", "/r/1"), sidecar=packed_over("/r/1/data")
    )
    serials = put(database, parent, child)
    found = ask(database, serials[1])
    assert found.edges == (LineageEdge(child.id, parent.id, "convert", depends=True),)
    assert "convert (depends)" in render_tree(found)[1]
    assert "==>" in render_mermaid(found)
    assert "style=bold" in render_dot(found)


def test_parents_come_as_recorded_and_children_by_age(database: Database) -> None:
    parents = [manifest(i, step=i) for i in (3, 1, 2)]
    merged = manifest(
        9, step=9, lineage=tuple(d for p in parents for d in made_from(p, "merge", f"/r/{p.step}"))
    )
    serials = put(database, *parents, merged)
    assert [e.parent for e in ask(database, serials[-1]).edges] == [p.id for p in parents]
    base = manifest(20, step=20)
    children = [manifest(i, step=i, lineage=made_from(base, "finetune")) for i in (33, 31, 32)]
    serials = put(database, base, *children)
    assert [e.child for e in ask(database, serials[0], "down").edges] == [
        manifest(i).id for i in (31, 32, 33)
    ]


def test_a_ladder_of_diamonds_is_walked_once(database: Database) -> None:
    n = 60  # of 2^60 ways
    edges = [(2 * i + a, 2 * i + 2 + b) for i in range(n) for a in (0, 1) for b in (0, 1)]
    serials = bare(database, [f"{i:032x}" for i in range(2 * n + 2)], edges)
    for depth in (None, n, n + 10):
        found = ask(database, serials[0], depth=depth)
        assert len(found.nodes) == 2 * n + 1
        assert len(found.edges) == 4 * n - 2
        assert len(render_tree(found)) == 4 * n - 1


def test_a_thousand_steps_are_walked_in_two_statements(database: Database) -> None:
    n, length = 10_000, 1000
    serials = bare(
        database,
        [f"{i:032x}" for i in range(n)],
        [(i, i + 1) for i in range(n) if (i + 1) % length],
    )
    asked: list[str] = []
    sa.event.listen(database.engine, "before_cursor_execute", lambda *seen: asked.append(seen[2]))
    for direction, serial in (("up", serials[0]), ("down", serials[length - 1])):
        asked.clear()
        found = ask(database, serial, direction)
        assert (
            len([text for text in asked if text.lstrip().upper().startswith(("SELECT", "WITH"))])
            == 2
        )
        assert len(found.nodes) == length
        assert max(node.distance for node in found.nodes.values()) == length - 1
    assert len(ask(database, serials[0], depth=100).nodes) == 101


def test_a_direction_and_a_depth_that_are_none(database: Database) -> None:
    (serial,) = put(database, manifest(1))
    with pytest.raises(UsageError, match="not a direction"):
        ask(database, serial, "sideways")
    with pytest.raises(UsageError, match="cannot be -1"):
        ask(database, serial, depth=-1)


def test_a_link_is_made_once_however_the_parent_is_named(database: Database) -> None:
    parent, child = manifest(1, step=1), manifest(2, step=2)
    serials = put(database, parent, child)
    assert link(database, serials[1], "run7@1")
    for ref in ("run7@1", "/r/1", "/r/1/", "file:///r/1", parent.id, parent.id[:8]):
        assert not link(database, serials[1], ref), ref
    assert link(database, serials[1], "/r/1", "merge")
    found = ask(database, serials[1])
    assert [(e.parent, e.kind) for e in found.edges] == [
        (parent.id, "finetune"),
        (parent.id, "merge"),
    ]
    with database.reading() as c:
        events = c.execute(
            sa.select(Event.checkpoint, Event.detail).where(Event.action == "link")
        ).all()
    assert [(e.checkpoint, e.detail["kind"]) for e in events] == [
        (serials[1], "finetune"),
        (serials[1], "merge"),
    ]
    assert events[0].detail["parent"] == "run7@1"


def test_a_link_to_an_unknown_place_waits_for_it(database: Database) -> None:
    serials = put(database, manifest(1, step=1))
    assert link(database, serials[0], "/r/77/")
    assert not link(database, serials[0], "/r/77")
    assert ask(database, serials[0]).edges[0].parent == "/r/77"
    put(database, manifest(77, step=77))
    assert ask(database, serials[0]).edges[0].parent == manifest(77).id


@pytest.mark.parametrize("ref", ["run7@99", "nobody@1", "alias:best", "abcdef012345"])
def test_a_parent_that_is_neither_known_nor_a_place(database: Database, ref: str) -> None:
    (serial,) = put(database, manifest(1, step=1))
    with pytest.raises(NotFound):
        link(database, serial, ref)
    assert ask(database, serial).edges == ()


def test_links_that_would_close_a_circle_are_refused(database: Database) -> None:
    one, two, three = put(database, *(manifest(i, step=i) for i in (1, 2, 3)))
    assert link(database, two, "run7@1")
    assert link(database, three, "run7@2")
    for child, parent in ((one, "run7@1"), (one, "run7@2"), (one, "run7@3"), (two, "/r/3")):
        with pytest.raises(UsageError, match="cannot be made from itself"):
            link(database, child, parent)
    assert link(database, three, "run7@1")  # a second way is no circle
    assert ask(database, one).edges == ()


def test_a_place_that_held_another_parent_before(database: Database) -> None:
    first, child = manifest(1, step=5), manifest(2, step=6)
    serials = put(database, first, child)
    assert link(database, serials[1], "/r/5")
    second = manifest(3, step=5)
    put(database, second)
    assert link(database, serials[1], "/r/5")
    assert not link(database, serials[1], "/r/5")
    assert [e.parent for e in ask(database, serials[1]).edges] == [first.id, second.id]


def test_a_parent_that_lies_nowhere_any_more(database: Database) -> None:
    first, child = manifest(1, step=5), manifest(2, step=6)
    serials = put(database, first, child)
    put(database, manifest(3, step=5))
    with database.writing() as c:
        c.execute(
            sa.insert(AliasRow).values(name="old", checkpoint=serials[0], version=1, moved=NOW)
        )
    assert link(database, serials[1], "alias:old")
    assert not link(database, serials[1], first.id)
    assert [e.parent for e in ask(database, serials[1]).edges] == [first.id]


# As text


def node(key: str, distance: int = 1, **more: Any) -> LineageNode:
    values = {
        "url": None,
        "state": "committed",
        "kind": "ucformat",
        "run": None,
        "step": None,
        "created": NOW,
    }
    return LineageNode(id=key, distance=distance, **{"name": key, **values, **more})


def drawn(direction: Any, *edges: str) -> Lineage:
    """`ab` is an edge from child a to parent b."""
    keys = dict.fromkeys("".join(edges if direction == "up" else [e[::-1] for e in edges]))
    root = next(iter(keys))
    return Lineage(
        root,
        direction,
        {k: node(k) for k in keys},
        tuple(LineageEdge(e[0], e[1], "merge", depends=False) for e in edges),
    )


def shape(lineage: Lineage) -> list[str]:
    return [line.replace("  ucformat", "").replace("merge  ", "") for line in render_tree(lineage)]


def test_a_tree_names_again_what_it_has_shown() -> None:
    assert shape(drawn("up", "ab", "ac", "bd", "cd", "de")) == [
        "a",
        "├─ b",
        "│  ← d",
        "│  ← e",
        "└─ c",
        "   ← d  (above)",
    ]
    assert shape(drawn("up", "ab", "bc", "bd", "ca", "da")) == [
        "a",
        "← b",
        "├─ c",
        "│  ← a  (above)",
        "└─ d",
        "   ← a  (above)",
    ]
    assert shape(drawn("up", "aa")) == ["a", "← a  (above)"]
    assert shape(drawn("down", "ba", "ca", "db")) == ["a", "├─ b", "│  → d", "└─ c"]
    assert shape(Lineage("a", "up", {"a": node("a")}, ())) == ["a"]


def test_a_long_line_of_descent_stays_narrow() -> None:
    keys = [f"{i:012}" for i in range(5000)]
    edges = tuple(LineageEdge(a, b, "resume", depends=False) for a, b in pairwise(keys))
    lines = render_tree(Lineage(keys[0], "up", {k: node(k) for k in keys}, edges))
    assert len(lines) == 5000
    assert max(map(len, lines)) < 60


def test_a_tree_tells_what_is_gone() -> None:
    root = node("a" * 32, name="run7@3", state="purged", kind="deepspeed")
    assert render_tree(Lineage("a", "up", {"a": root}, ())) == [
        "run7@3  aaaaaaaaaaaa  deepspeed  purged"
    ]


NASTY = [
    'say "hi"',
    "back\\slash\\",
    "two\nlines",
    "\x1b[31mred\x1b[0m",
    "turned\u202earound",
    "]; end",
    "n0 --> n1",
    "<script>alert(1)</script>",
    "#quot; &quot; &amp;",
    "`code` _it_ **b**",
    "%%{init: {}}%%",
    "\\N\\G\\l",
    "{a|b}",
    "\ud800",
    "größe 模型",
    "",
]


@pytest.mark.parametrize("name", NASTY)
def test_no_name_breaks_a_picture(name: str) -> None:
    stranger = LineageNode(None, name, name, None, None, None, None, None, 1)
    nodes = {"x": node("x", 0, name=name, run=name, kind=name), name: stranger}
    found = Lineage("x", "up", nodes, (LineageEdge("x", name, name, depends=False),))
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)

    lines = render_tree(found)
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert lines[1] == f"← {plain}  {plain}  not in the catalog"

    lines = render_mermaid(found).splitlines()
    assert lines[0] == "flowchart LR"
    assert len(lines) == 4
    parsed = [re.fullmatch(r'  n[01]\["([^"]*)"\]', line) for line in lines[1:3]]
    parsed.append(re.fullmatch(r'  n1 -->\|"([^"]*)"\| n0', lines[3]))
    texts = [re.sub(r"#(\d+);", lambda m: chr(int(m[1])), m[1]) for m in parsed if m is not None]
    assert texts == [
        f"{plain}<br/>{'  '.join(t for t in ('x', plain) if t)}",
        f"{plain}<br/>not in the catalog",
        plain,
    ]
    for m in parsed:
        assert m is not None
        assert re.fullmatch(r"([\w @./:-]|#\d+;|<br/>)*", m[1])

    lines = render_dot(found).splitlines()
    assert lines[:3] == ["digraph lineage {", "  rankdir=LR;", "  node [shape=box];"]
    assert lines[-1] == "}"
    assert len(lines) == 7
    labels = [
        re.fullmatch(r'  n\d(?: -> n0)? \[label="((?:[^"\\]|\\.)*)"\];', line)
        for line in lines[3:6]
    ]
    raw = [m[1] for m in labels if m is not None]
    assert len(raw) == 3

    def unescape(text: str) -> str:
        assert not re.search(r"&(?!amp;)", text)
        return re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), text).replace("&amp;", "&")

    assert unescape(raw[2]) == plain
    assert unescape(raw[1]) == f"{plain}\nnot in the catalog"
    assert re.fullmatch(r'(?:[^\\]|\\[\\"])*', raw[2])
