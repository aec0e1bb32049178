"""What a writer commits, every reader opens: documents are parsed again before they replace anything."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
import ucformat.torch
from tests.fakes import FakeSource, random_array
from ucformat.checkpoint import Checkpoint
from ucformat.errors import UcformatError, UsageError
from ucformat.format.encoding import encoded
from ucformat.format.extents import extent_problems
from ucformat.format.sidecar import Columns, Sidecar
from ucformat.schema.documents import CatalogDoc, MetricDoc
from ucformat.schema.limits import MAX_BITS, MAX_DEPTH, MAX_INTEGER, check_json
from ucformat.schema.manifest import Manifest, SidecarDoc
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

STATE = {"model": {"w": torch.ones(3)}}


def nested(levels: int, leaf: Any = 1) -> Any:
    """As many dictionaries, one in another."""
    for _ in range(levels):
        leaf = {"a": leaf}
    return leaf


OVER: list[dict[str, Any]] = [
    {"config": nested(MAX_DEPTH + 8)},
    {"config": nested(250)},
    {"config": nested(2000)},
    {"config": {"a": "x\ud800"}},
    {"config": {"\udfff": 1}},
    {"config": {"a": 1 << (MAX_BITS + 1)}},
    {"config": {"a": {1: "x", "1": "y"}}},
    {"config": {"a": {(1, 2): "x"}}},
    {"metrics": {"loss\ud800": 1.0}},
    {"run": "a\udc80"},
    {"step": MAX_INTEGER + 1},
    {"step": 1 << 70},
]


@pytest.mark.parametrize("more", OVER, ids=[*map(str, range(len(OVER)))])
def test_what_exceeds_a_limit_replaces_nothing(more: dict[str, Any], tmp_path: Path) -> None:
    ucformat.torch.save(STATE, tmp_path / "a", step=1)
    before = (tmp_path / "a" / "manifest.json").read_bytes()
    with pytest.raises(UsageError):
        ucformat.torch.save(STATE, tmp_path / "a", overwrite=True, **more)
    assert (tmp_path / "a" / "manifest.json").read_bytes() == before
    assert ucformat.open(tmp_path / "a").metadata.step == 1


@pytest.mark.parametrize("value", ["x\ud800", {"\udfff": 1}, nested(300)], ids=["text", "key", "depth"])
def test_objects_that_exceed_a_limit(value: Any, tmp_path: Path) -> None:
    ucformat.torch.save(STATE, tmp_path / "a")
    before = (tmp_path / "a" / "manifest.json").read_bytes()
    with pytest.raises(UcformatError):
        ucformat.torch.save({**STATE, "o": value}, tmp_path / "a", overwrite=True)
    with pytest.raises(UcformatError):
        ucformat.torch.save({**STATE, "o": ucformat.torch.PerRank(value)}, tmp_path / "a", overwrite=True)
    assert (tmp_path / "a" / "manifest.json").read_bytes() == before


def test_the_deepest_values_come_back(tmp_path: Path) -> None:
    config, value = nested(MAX_DEPTH), nested(190, (1, 2))
    ucformat.torch.save({**STATE, "o": value}, tmp_path / "a", config=config)
    assert ucformat.open(tmp_path / "a").manifest.config == config
    state = {**STATE, "o": nested(190, (0, 0))}
    assert ucformat.torch.load(state, tmp_path / "a")
    assert state["o"] == value


TEXT = st.text(max_size=4)  # lone surrogates included
LEAVES = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | TEXT
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
ARRAYS = {("w", "weight"): random_array((2,), "float32")}


@given(
    st.dictionaries(TEXT, VALUES, max_size=3),
    st.dictionaries(TEXT, st.floats(), max_size=3),
    TEXT,
    st.integers(0, 260),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_committed_opens(
    config: dict[str, Any], metrics: dict[str, float], run: str, levels: int, deep: bool
) -> None:
    """By a conversion, whose values go all the ways that those of a manifest go."""
    source = MemoryStore("limits-source")
    ck = Checkpoint(FakeSource.write(source, ARRAYS, objects={"o": nested(levels) if deep else config}))
    place = MemoryStore("limits")
    ucformat.convert(Checkpoint(FakeSource.write(MemoryStore("limits-first"), ARRAYS)), place, overwrite=True)
    before = place.read("manifest.json")
    try:
        ucformat.convert(ck, place, run=run, config=config, metrics=metrics, overwrite=True)
    except UcformatError:
        assert place.read("manifest.json") == before
    again = ucformat.open(place)
    assert again.objects is not None
    json.loads(place.read("manifest.json"))


@given(TEXT, TEXT)
def test_documents_of_the_catalog_are_parsed_again(run: str, key: str) -> None:
    metric = MetricDoc(value=1.0, measured=datetime.now(UTC))
    doc = CatalogDoc(id="x", catalog="c", revision=1).model_copy(update={"run": run, "metrics": {key: metric}})
    try:
        data = encoded(doc)
    except UsageError:
        return
    assert CatalogDoc.model_validate_json(data) == doc


@given(VALUES)
def test_what_passes_the_check_is_the_same_in_json(value: Any) -> None:
    try:
        check_json(value, "it")
    except ValueError:
        return
    json.dumps(value).encode().decode()
    assert json.loads(json.dumps(value, ensure_ascii=False).encode()) == value or "nan" in repr(value)


def with_columns(count: int, block: tuple[int, int], tensors: int) -> tuple[Any, Any]:
    """A manifest of tensors of a byte each, and a sidecar whose extents have blocks that grow from a small one on."""
    table = TensorTable.of(TensorDoc(f"t{n}", "weight", "uint8", (count,)) for n in range(tensors))
    rows = range(count * tensors)
    lists = {
        "tensor": [n // count for n in rows],
        "file": [0 for _ in rows],
        "offset": [n % count for n in rows],
        "block_offset": [block[0] for _ in rows],
        "block_nbytes": [block[1] + n % count for n in rows],
        "crc32c": [0 for _ in rows],
        "start": [n % count for n in rows],
        "shape": [1 for _ in rows],
        "strides": [1 for _ in rows],
    }
    columns = Columns(**{name: np.array(values, np.int64) for name, values in lists.items()})
    doc = SidecarDoc(path="data/x/extents.safetensors", nbytes=1, digest="sha256:" + "0" * 64)
    manifest = Manifest(id="x", attempt="0" * 20, created=datetime.now(UTC), tensors=table, sidecar=doc)
    return manifest, Sidecar(columns, (f"data/{'0' * 20}/rank0.bin",), np.ones(tensors, np.int64), None)


def test_blocks_that_overlap_are_refused_before_anything_is_read() -> None:
    manifest, sidecar = with_columns(8, (0, 64), 1)
    assert "rank0.bin overlap" in next(extent_problems(manifest, sidecar)).reason
    for count in (2, 1):
        manifest, sidecar = with_columns(1, (0, 1 << 20), count)
        assert not list(extent_problems(manifest, sidecar))


def test_one_block_of_many_tensors_is_bounded_by_the_file() -> None:
    manifest, sidecar = with_columns(1, (0, 4 << 20), 60)
    assert not list(extent_problems(manifest, sidecar))
    manifest, sidecar = with_columns(1, (0, 4 << 20), 65)
    assert "of far more bytes than it has" in next(extent_problems(manifest, sidecar)).reason
