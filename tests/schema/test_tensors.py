"""The table of tensors: whatever goes in comes back, and what cannot be is refused."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import IntegrityError, UpgradeNeeded
from ucformat.format.arrays import folder_names
from ucformat.format.digest import with_own_digest
from ucformat.format.structure import manifest_bytes, parse_manifest
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.schema.manifest import Manifest
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.storage.memory import MemoryStore

DIGEST = "xxh3:" + "0" * 32
ARRAY = TensorDoc("a", "weight", "int8", (4,), (2,), (4,), DIGEST, "data/x/weight/a")

names = st.one_of(
    st.sampled_from(
        ["", "a", "a.b", "..", "c", "__x", "$int:3", '","', "\\", "ü", "a/b", "~", "é", "0", "\0"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
parts = st.one_of(names, st.integers(-(2**70), 2**70))


@st.composite
def docs(draw: st.DrawFn) -> TensorDoc:
    name, state = draw(names), draw(st.sampled_from(["weight", "exp_avg", "c", ""]))
    around = st.tuples(*[st.lists(parts, max_size=2).map(tuple)] * 2)
    inside = st.tuples(names, names).map(lambda pair: pair[0] + name + pair[1])
    path = st.one_of(
        st.lists(parts, max_size=3).map(tuple),
        st.tuples(around, inside).map(lambda x: (*x[0][0], x[1], *x[0][1])),
    )
    shape = draw(st.sampled_from([(), (4,), (0, 3)]))
    doc = TensorDoc(name, state, "int8", shape, at=tuple(draw(st.lists(path, max_size=2))))
    if not draw(st.booleans()):
        return doc
    grid = (1,) * len(doc.shape)
    folders = st.sampled_from(
        ["x", f"data/a/{state or 'x'}/{folder_names([name])[name]}", "data/%"]
    )
    return replace(doc, chunk=grid, shard=grid, digest=DIGEST, path=draw(folders))


@given(st.lists(docs(), max_size=8))
@settings(max_examples=200)
def test_whatever_goes_in_comes_back(listed: list[TensorDoc]) -> None:
    table = TensorTable.of(listed)
    manifest = Manifest(id="x", attempt="0" * 20, created=datetime.now(UTC), tensors=table)
    read = parse_manifest(manifest_bytes(manifest), "x").tensors
    for one in (table, read, manifest.as_read().tensors):
        assert list(one) == listed
        assert [one[n] for n in range(len(one))] == listed
        assert one == table
    assert table.nbytes == sum(t.nbytes for t in listed)
    for name in {t.name for t in listed} | {"absent"}:
        assert [listed[row] for row in read.rows(name)] == [t for t in listed if t.name == name]
    keys = [(t.name, t.state) for t in listed]
    assert read.repeated() == [n for n, key in enumerate(keys) if key in keys[:n]]
    assert all(read.row(*key) == keys.index(key) for key in keys)


def test_layers_share_names_kinds_and_paths() -> None:
    table = TensorTable.of(
        replace(
            ARRAY,
            name=f"w{n}",
            state=s,
            path=f"data/x/{s}/w{n}",
            at=(("optim", f"state.w{n}.{s}"), (s, f"w{n}")),
        )
        for n in range(50)
        for s in ("exp_avg", "exp_avg_sq")
    )
    assert (len(table.names), len(table.kinds), len(table.path), len(table.at)) == (50, 2, 0, 0)
    assert table.kinds[0].at == (("optim", ("state.", ".exp_avg")), ("exp_avg", ("", "")))
    text = table.as_json().decode()
    assert json.loads(text)["kinds"][0]["path"] == "data/x/exp_avg"
    assert (
        len(text.splitlines()) == 1 + (1 + 50 + 1) + (1 + 2 + 1) + 3 + 1
    )  # a line for each name, kind and column


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("name", [0]),
        ("name", [0, 2]),
        ("name", [0, -1]),
        ("name", [0, True]),
        ("name", [0, 1.0]),
        ("name", [0, "1"]),
        ("name", [0, 2**31]),
        ("name", [0, 2**80]),
        ("name", None),
        ("kind", [0, 1]),
        ("kind", [0, 0, 0]),
        ("kind", [None, 0]),
        ("names", ["a", "a"]),
        ("names", ["a", 1]),
        ("names", {"a": 1}),
        ("digest", [DIGEST]),
        ("digest", [DIGEST, DIGEST, DIGEST]),
        ("digest", [DIGEST, "xxh3:0"]),
        ("digest", [DIGEST, 5]),
        ("path", {"2": "x"}),
        ("path", {"-1": "x"}),
        ("path", {"01": "x"}),
        ("path", {"1.0": "x"}),
        ("path", {"9999999999": "x"}),
        ("path", {"1": "x y"}),
        ("path", {"1": None}),
        ("path", []),
        ("at", {"2": [["x"]]}),
        ("at", {"0": ["x"]}),
        ("at", {"0": [[["", ""]]]}),
        ("at", {"0": [[1.0]]}),
        ("kinds", [5]),
        ("kinds", [{"state": "weight", "dtype": "int8", "shape": [4], "at": [[["a", "b", "c"]]]}]),
        ("kinds", [{"state": "weight", "dtype": "int8", "shape": [-1]}]),
        ("kinds", [{"state": "weight", "dtype": "int8", "shape": [1.5]}]),
    ],
)
def test_what_cannot_be_is_damage(column: str, value: object) -> None:
    document = facts()
    document["tensors"][column] = value
    with pytest.raises(IntegrityError):
        opened(document)


def facts() -> dict[str, Any]:
    table = TensorTable.of([ARRAY, replace(ARRAY, name="b", path="data/x/weight/b")])
    manifest = Manifest(id="x", attempt="0" * 20, created=datetime.now(UTC), tensors=table)
    found: dict[str, Any] = json.loads(manifest_bytes(manifest))
    del found["digest"]
    assert len(opened(found)) == 2
    return found


def opened(document: Any) -> Checkpoint:
    return open_checkpoint(stored(with_own_digest(json.dumps(document).encode())))


def stored(manifest: bytes) -> MemoryStore:
    store = MemoryStore(f"tensors-{uuid4().hex}")
    store.put_if_absent("manifest.json", manifest)
    return store


def test_a_folder_of_a_tensor_that_is_no_array() -> None:
    with pytest.raises(ValidationError, match="no array has a folder"):
        TensorTable.model_validate(
            {
                "names": ["a"],
                "kinds": [{"state": "s", "dtype": "int8", "shape": []}],
                "name": [0],
                "kind": [0],
            }
            | {"path": {"0": "x"}}
        )


def test_a_digest_of_an_unknown_kind_is_of_a_later_version() -> None:
    document = facts()
    document["tensors"]["digest"][1] = "blake3:" + "0" * 64
    with pytest.raises(UpgradeNeeded, match=r"tensors\.digest\.1"):
        opened(document)


def test_a_later_version_is_recognised_before_the_table_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = with_own_digest(b'{\n "format": "ucformat",\n "version": 2,\n "tensors": 5\n}')
    with pytest.raises(UpgradeNeeded, match="version 2"):
        parse_manifest(data, "x")
    with pytest.raises(IntegrityError, match="does not match the digest"):
        parse_manifest(data.replace(b'"version": 2', b'"version": 3'), "x")
    last = json.dumps({"tensors": 5, "version": 2, "format": "ucformat"}).encode()  # another order
    with pytest.raises(UpgradeNeeded, match="version 2"):
        parse_manifest(with_own_digest(last), "x")


def test_a_name_with_a_word_that_json_does_not_have() -> None:
    named = replace(ARRAY, name="a NaN -Infinity", path="data/x/weight/n")
    manifest = Manifest(
        id="x", attempt="0" * 20, created=datetime.now(UTC), tensors=TensorTable.of([named])
    )
    assert list(parse_manifest(manifest_bytes(manifest), "x").tensors) == [named]


def test_entries_are_made_when_they_are_asked_for() -> None:
    n = 20_000
    table = TensorTable.of(
        replace(ARRAY, name=name, state=state, path=f"data/x/{state}/{name}")
        for name, state in ((f"layers.{k // 4}.weight", f"s{k % 4}") for k in range(n))
    )
    manifest = Manifest(id="x", attempt="0" * 20, created=datetime.now(UTC), tensors=table)
    store = stored(manifest_bytes(manifest))
    open_checkpoint(store)
    tracemalloc.start()
    try:
        ck = open_checkpoint(store)
        held = tracemalloc.get_traced_memory()[0]
        assert ck.tensors[Key("layers.7.weight", "s1")] == TensorInfo(
            "layers.7.weight", "s1", "int8", (4,)
        )
        assert (
            tracemalloc.get_traced_memory()[0] - held < 60 * n
        )  # an index of names, and no entries
    finally:
        tracemalloc.stop()
    assert held < 200 * n
    assert ck.states("layers.7.weight") == ["s0", "s1", "s2", "s3"]
    assert len(ck.tensors) == n
    assert len(ck) == n // 4
    assert Key("layers.7.weight", "s9") not in ck.tensors
    assert "layers.7.weight" not in ck.tensors  # type: ignore[comparison-overlap]
    infos = ck.metadata.tensor_list.tensors
    assert infos[-1] == infos[n - 1] == list(infos)[-1]
    assert tuple(infos[5:7]) == (infos[5], infos[6])
    with pytest.raises(IndexError):
        infos[n]
    assert dict(ck.tensors) == {i.key: i for i in infos}
