"""In what two checkpoints differ, without reading a tensor."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.catalog.manifests import digest, manifest, tensor
from ucformat.catalog.database import Database
from ucformat.catalog.diff import MISSING, Changed, Diff, TensorChange, diff
from ucformat.catalog.labels import add_metrics
from ucformat.catalog.recording import Found, record_all
from ucformat.catalog.stamp import Stamp
from ucformat.schema.limits import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.schema.tensors import TensorDoc

NOW = datetime(2026, 6, 1, tzinfo=UTC)
NAN, INF = float("nan"), float("inf")
made = iter(range(1, 1 << 30))


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()


def put(database: Database, **values: Any) -> int:
    number = next(made)
    found = manifest(number, step=number, **values)
    with database.writing() as c:
        [serial] = record_all(c, [Found(found, f"/r/{number}", run="r")], Stamp("me", NOW))
        return serial


def compare(database: Database, a: dict[str, Any], b: dict[str, Any]) -> Diff:
    """The difference of two checkpoints that are alike but for what is given."""
    alike = {"tensors": (tensor(),)}
    one, other = (put(database, **(alike | values)) for values in (a, b))
    with database.reading() as c:
        return diff(c, one, other, NOW)


def changed(database: Database, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    found = compare(database, {"config": a}, {"config": b}).config
    return [(c.path, c.a, c.b) for c in found]


def test_a_checkpoint_is_equal_to_itself(database: Database) -> None:
    serial = put(
        database,
        config={"a": [1, {}]},
        metrics={"loss": NAN},
        producer={"python": "3"},
        layout={"dp": 2},
    )
    with database.reading() as c:
        found = diff(c, serial, serial, NOW)
    assert found.equal
    assert found.a.id == found.b.id
    assert found.tensors.same == 1


def test_equal_but_for_what_tells_them_apart(database: Database) -> None:
    found = compare(database, {}, {})
    assert found.equal
    assert (found.a.step, found.b.step) == (found.a.step, (found.a.step or 0) + 1)
    assert found.a.id != found.b.id


@pytest.mark.parametrize(
    ("part", "a", "b", "expected"),
    [
        ("config", {"lr": 1}, {"lr": 2}, Changed("lr", 1, 2)),
        ("metrics", {"loss": 1.0}, {"loss": NAN}, None),
        ("producer", {"python": "3.11"}, {}, Changed("python", "3.11", MISSING)),
        ("topology", {"zero": {"dp": 2}}, {"zero": {"dp": 4}}, Changed("zero.dp", 2, 4)),
    ],
)
def test_any_difference_is_one(
    database: Database, part: str, a: dict[str, Any], b: dict[str, Any], expected: Changed | None
) -> None:
    key = {"topology": "layout"}.get(part, part)
    found = compare(database, {key: a}, {key: b})
    assert not found.equal
    assert found.tensors.equal
    for other in ("config", "topology", "producer", "metrics"):
        assert len(getattr(found, other)) == (other == part)
    if expected is not None:
        assert getattr(found, part) == (expected,)


def test_values_that_are_missing_are_not_null(database: Database) -> None:
    assert changed(database, {"a": None, "b": 1}, {"b": None}) == [
        ("a", None, MISSING),
        ("b", 1, None),
    ]
    assert changed(database, {}, {"a": None}) == [("a", MISSING, None)]
    assert changed(database, {"a": None}, {"a": None}) == []
    assert copy.deepcopy(MISSING) is MISSING
    assert repr(MISSING) == "MISSING"


def test_numbers_are_compared_as_numbers_and_truth_as_truth(database: Database) -> None:
    assert changed(database, {"a": 1, "b": 100}, {"a": 1.0, "b": 1e2}) == []
    assert changed(database, {"a": 1, "b": 0.0}, {"a": True, "b": False}) == [
        ("a", 1, True),
        ("b", 0.0, False),
    ]
    assert changed(database, {"a": "1"}, {"a": 1}) == [("a", "1", 1)]
    assert changed(database, {"a": NAN, "b": INF}, {"a": NAN, "b": INF}) == []
    assert changed(database, {"a": NAN}, {"a": -INF}) == [
        ("a", {"$float": "nan"}, {"$float": "-inf"})
    ]


def test_paths_are_those_of_filters_and_none_stands_for_two(database: Database) -> None:
    a = {"a": {"b": 1}, "betas": [0.9, 0.99], "in": 1, "ü-x": 1, "": 1, 'say "hi"': 1}
    b = {"a.b": 1, "betas": [0.9, 0.95, 0], "in": 2, "ü-x": 2, "": 2, 'say "hi"': 2}
    assert changed(database, a, b) == [
        ('""', 1, 2),
        ("a.b", 1, MISSING),
        ('"a.b"', MISSING, 1),
        ("betas.1", 0.99, 0.95),
        ("betas.2", MISSING, 0),
        ('"in"', 1, 2),
        ('"say ""hi"""', 1, 2),
        ('"ü-x"', 1, 2),
    ]
    assert changed(database, {"a": [1]}, {"a": {"0": 1}}) == [
        ("a.0", 1, MISSING),
        ("a.0", MISSING, 1),
    ]


def test_what_is_empty_is_a_value(database: Database) -> None:
    assert changed(database, {"a": {}}, {"a": []}) == [("a", {}, [])]
    assert changed(database, {"a": {}}, {}) == [("a", {}, MISSING)]
    assert changed(database, {"a": {"b": 1}}, {"a": 1}) == [("a", MISSING, 1), ("a.b", 1, MISSING)]


def test_a_configuration_nested_as_deep_as_a_manifest_allows(database: Database) -> None:
    depth = (MAX_DEPTH - 1) // 2

    def nested(value: int) -> dict[str, Any]:
        document: Any = value
        for _ in range(depth):
            document = {"k": [document]}
        return {"top": document}

    ((path, a, b),) = changed(database, nested(1), nested(2))
    assert (path, a, b) == ("top" + ".k.0" * depth, 1, 2)


keys = st.sampled_from(["a", "b", "c.d", "0", ""])
leaves = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, "", "x", NAN])
documents = st.dictionaries(
    keys,
    st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(keys, v, max_size=3)),
    max_size=3,
)


def oracle(a: Any, b: Any) -> int:
    """How many leaves differ, by walking both at once."""

    def container(x: Any) -> bool:
        return isinstance(x, dict | list) and bool(x)

    def items(x: Any) -> dict[Any, Any]:
        return dict(enumerate(x)) if isinstance(x, list) else x if isinstance(x, dict) else {}

    def leaves_in(x: Any) -> int:
        return sum(map(leaves_in, items(x).values())) if container(x) else 1

    if container(a) and container(b):
        left, right = items(a), items(b)
        if isinstance(a, list) is not isinstance(b, list):
            return leaves_in(a) + leaves_in(b)
        only = [left[k] for k in left.keys() - right.keys()] + [
            right[k] for k in right.keys() - left.keys()
        ]
        return sum(map(leaves_in, only)) + sum(
            oracle(left[k], right[k]) for k in left.keys() & right.keys()
        )
    if container(a) or container(b):
        return leaves_in(a) + leaves_in(b)
    alike = json.dumps(a) == json.dumps(b)
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return 0 if alike or (numbers and a == b) else 1


@settings(max_examples=60)
@given(a=documents, b=documents, near=st.booleans())
def test_as_many_changes_as_leaves_differ(database: Database, a: Any, b: Any, near: bool) -> None:
    b = {**a, **b} if near else b
    found = changed(database, a, b)
    top = {"k": a}, {"k": b}  # an empty document has no leaf of its own
    expected = (
        oracle(*top)
        if a and b
        else oracle(a, b)
        if not a and not b
        else sum(map(count_leaves, (a, b)))
    )
    assert len(found) == expected


def count_leaves(document: Any) -> int:
    return oracle({"k": document}, {"j": 0}) - 1 if document else 0


def test_metrics_that_are_not_numbers(database: Database) -> None:
    a, b = (
        {"nan": NAN, "inf": INF, "was": NAN, "gone": 1.0},
        {"nan": NAN, "inf": INF, "was": 1.0, "new": NAN},
    )
    found = compare(database, {"metrics": a}, {"metrics": b}).metrics
    assert [c.path for c in found] == ["gone", "new", "was"]
    assert found[0] == Changed("gone", 1.0, MISSING)
    assert found[2].b == 1.0


def test_metrics_measured_later_count(database: Database) -> None:
    one, other = (put(database, tensors=(tensor(),)) for _ in range(2))
    with database.writing() as c:
        add_metrics(c, one, {"eval/loss": 0.5}, Stamp("me", NOW))
    with database.reading() as c:
        assert diff(c, one, other, NOW).metrics == (Changed('"eval/loss"', 0.5, MISSING),)


# Tensors


def compare_tensors(database: Database, a: list[TensorDoc], b: list[TensorDoc]) -> Diff:
    return compare(database, {"tensors": tuple(a)}, {"tensors": tuple(b)})


def like(doc: TensorDoc, **change: Any) -> TensorDoc:
    return replace(doc, **change)


def test_tensors_that_came_and_went(database: Database) -> None:
    w, v, both = tensor("w"), tensor("v"), tensor("u")
    found = compare_tensors(
        database, [w, both, like(w, state="exp_avg")], [both, v, like(w, state="exp_avg_sq")]
    )
    t = found.tensors
    assert [(x.name, x.state) for x in t.added] == [("v", "weight"), ("w", "exp_avg_sq")]
    assert [(x.name, x.state) for x in t.removed] == [("w", "weight"), ("w", "exp_avg")]
    assert (t.changed, t.unknown, t.same) == ((), 0, 1)
    assert t.removed[0].digest == w.digest
    assert t.removed[0].shape == (4, 2)
    assert not t.equal
    assert not found.equal


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"shape": (8, 1)}, ("shape",)),
        ({"dtype": "int32"}, ("dtype",)),
        ({"digest": digest("other")}, ("digest",)),
        ({"digest": digest("other"), "shard": (8, 2)}, ("digest", "grid")),
        (
            {"shape": (8,), "chunk": (8,), "shard": (8,), "dtype": "int32"},
            ("shape", "dtype", "grid"),
        ),
        ({"shape": (), "chunk": (), "shard": ()}, ("shape", "grid")),
        ({"digest": None, "dtype": "int32"}, ("dtype",)),
    ],
)
def test_tensors_that_changed(
    database: Database, change: dict[str, Any], what: tuple[str, ...]
) -> None:
    a = tensor()
    found = compare_tensors(database, [a, tensor("z")], [tensor("z"), like(a, **change)])
    (c,) = found.tensors.changed
    assert isinstance(c, TensorChange)
    assert (c.name, c.state, c.aspects) == ("w", "weight", what)
    assert (c.a.shape, c.a.digest) == (a.shape, a.digest)
    assert c.b.shape == change.get("shape", (4, 2))
    assert (found.tensors.unknown, found.tensors.same) == (0, 1)
    assert not found.equal


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"digest": None}, {}),
        ({}, {"digest": None}),
        ({"digest": None}, {"digest": None}),
        ({}, {"digest": digest("other"), "chunk": (2, 2)}),
        ({"chunk": None, "shard": None, "digest": None}, {}),
        ({}, {"digest": "sha256:" + "0" * 64}),
    ],
)
def test_tensors_of_which_it_cannot_be_said(
    database: Database, a: dict[str, Any], b: dict[str, Any]
) -> None:
    found = compare_tensors(database, [like(tensor(), **a)], [like(tensor(), **b)])
    assert (found.tensors.changed, found.tensors.unknown, found.tensors.same) == ((), 1, 0)
    assert not found.tensors.equal
    assert not found.equal


def test_other_shards_of_the_same_chunks_are_the_same_tensor(database: Database) -> None:
    found = compare_tensors(database, [tensor()], [like(tensor(), shard=(8, 2))])
    assert found.tensors.same == 1
    assert found.equal


docs = st.builds(
    lambda shape, dtype, chunk, content: like(
        tensor(shape=shape, content=content),
        dtype=dtype,
        chunk=chunk,
        **({"digest": None} if content is None else {}),
    ),
    st.sampled_from([(4, 2), (8,), ()]),
    st.sampled_from(["float32", "int32"]),
    st.sampled_from([(4, 2), (2, 2), None]),
    st.sampled_from([None, 1, 2]),
)
tables = st.dictionaries(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["weight", "master"])), docs, max_size=6
)


@settings(max_examples=60)
@given(a=tables, b=tables)
def test_every_tensor_is_counted_once(
    database: Database, a: dict[Any, TensorDoc], b: dict[Any, TensorDoc]
) -> None:
    left, right = ([like(d, name=n, state=s) for (n, s), d in side.items()] for side in (a, b))
    t = compare_tensors(database, left, right).tensors
    assert [(x.name, x.state) for x in t.added] == [k for k in b if k not in a]
    assert [(x.name, x.state) for x in t.removed] == [k for k in a if k not in b]
    both = [k for k in a if k in b]
    assert len(t.changed) + t.unknown + t.same == len(both)

    def verdict(x: TensorDoc, y: TensorDoc) -> str:
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return "changed"
        if x.digest is None or y.digest is None:
            return "unknown"
        if x.digest == y.digest:
            return "same"
        return "changed" if x.chunk == y.chunk else "unknown"

    verdicts = {k: verdict(a[k], b[k]) for k in both}
    assert [(c.name, c.state) for c in t.changed] == [k for k in both if verdicts[k] == "changed"]
    assert t.same == list(verdicts.values()).count("same")


def test_twenty_thousand_tensors_take_seconds_not_minutes(database: Database) -> None:
    a = [tensor(f"layer.{i}", content=i) for i in range(10_000)]
    b = [like(d, digest=digest("new", d.name)) if i % 2 else d for i, d in enumerate(a)]
    serials = [
        put(database, tensors=tuple(side)) for side in (a, b, [like(d, chunk=(2, 2)) for d in b])
    ]
    with database.reading() as c:
        started = time.process_time()
        found = diff(c, serials[0], serials[1], NOW)
        taken = time.process_time() - started
        other = diff(c, serials[1], serials[2], NOW)
    assert (len(found.tensors.changed), found.tensors.same) == (5000, 5000)
    assert other.tensors.same == 10_000
    assert taken < 30  # 0.5 s; the bound only tells that it is not quadratic
