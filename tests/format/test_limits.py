"""What a writer commits, every reader opens: documents are parsed again before they replace anything."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ucformat
import ucformat.torch
from tests.fakes import FakeSource, random_array, same
from tests.tiers import rounds
from ucformat.checkpoint import Checkpoint
from ucformat.errors import UcformatError, UsageError
from ucformat.format import sidecar as sidecar_module
from ucformat.format.digest import encoded
from ucformat.format.extents import extent_problems
from ucformat.format.sidecar import Columns, Sidecar
from ucformat.schema.documents import CatalogDoc, MetricDoc
from ucformat.schema.limits import MAX_BITS, MAX_DEPTH, MAX_INTEGER, check_json
from ucformat.schema.manifest import SidecarDoc
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
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


@pytest.mark.parametrize(
    "value", ["x\ud800", {"\udfff": 1}, nested(300)], ids=["text", "key", "depth"]
)
def test_objects_that_exceed_a_limit(value: Any, tmp_path: Path) -> None:
    ucformat.torch.save(STATE, tmp_path / "a")
    before = (tmp_path / "a" / "manifest.json").read_bytes()
    with pytest.raises(UcformatError):
        ucformat.torch.save({**STATE, "o": value}, tmp_path / "a", overwrite=True)
    with pytest.raises(UcformatError):
        ucformat.torch.save(
            {**STATE, "o": ucformat.torch.PerRank(value)}, tmp_path / "a", overwrite=True
        )
    assert (tmp_path / "a" / "manifest.json").read_bytes() == before


def test_the_deepest_values_come_back(tmp_path: Path) -> None:
    config, value = nested(MAX_DEPTH - 2), nested(41, (1, 2))
    ucformat.torch.save({**STATE, "o": value}, tmp_path / "a", config=config)
    assert ucformat.open(tmp_path / "a").manifest.config == config
    state = {**STATE, "o": nested(41, (0, 0))}
    assert ucformat.torch.load(state, tmp_path / "a")
    assert state["o"] == value


TEXT = st.text(max_size=4)  # lone surrogates included
LONG = st.builds(lambda text, count: text * count, st.text(max_size=3), st.integers(100, 100_000))
LEAVES = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | TEXT
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)
ARRAYS = {("w", "weight"): random_array((2,), "float32")}


@given(
    st.dictionaries(TEXT, VALUES, max_size=3),
    st.dictionaries(TEXT, st.floats(), max_size=3),
    TEXT,
    st.integers(0, 260),
    st.booleans(),
    TEXT | LONG,
    TEXT | LONG,
    st.sampled_from(["safetensors", None]),
)
@settings(max_examples=rounds(60, 150), deadline=None)
def test_whatever_is_committed_opens(
    config: dict[str, Any],
    metrics: dict[str, float],
    run: str,
    levels: int,
    deep: bool,
    name: str,
    state: str,
    weights: Literal["safetensors"] | None,
) -> None:
    """By a conversion, whose values go all the ways that those of a manifest go."""
    source = MemoryStore("limits-source")
    arrays = {**ARRAYS, (name, state): random_array((2,), "float32", 1)}
    try:
        ck = Checkpoint(
            FakeSource.write(source, arrays, objects={"o": nested(levels) if deep else config})
        )
    except UcformatError:  # a view of it has no such name
        return
    place = MemoryStore("limits")
    ucformat.convert(
        Checkpoint(FakeSource.write(MemoryStore("limits-first"), ARRAYS)), place, overwrite=True
    )
    before = place.read("manifest.json")
    try:
        ucformat.convert(
            ck, place, run=run, config=config, metrics=metrics, overwrite=True, weights=weights
        )
    except UcformatError:
        assert place.read("manifest.json") == before
    again = ucformat.open(place)
    assert again.objects is not None
    assert place.read("manifest.json") == before or same(
        again[name, state].read(), arrays[name, state]
    )
    json.loads(place.read("manifest.json"))


@given(TEXT, TEXT)
def test_documents_of_the_catalog_are_parsed_again(run: str, key: str) -> None:
    metric = MetricDoc(value=1.0, measured=datetime.now(UTC))
    doc = CatalogDoc(id="x", catalog="c", revision=1).model_copy(
        update={"run": run, "metrics": {key: metric}}
    )
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
    assert json.loads(json.dumps(value, ensure_ascii=False).encode()) == value or "nan" in repr(
        value
    )


def with_columns(
    count: int, block: tuple[int, int], tensors: int
) -> tuple[SidecarDoc, TensorTable, Sidecar]:
    """A sidecar's entry, tensors of bytes, and the sidecar, whose blocks grow from a small one on."""
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
    sidecar = Sidecar(columns, (f"data/{'0' * 20}/rank0.bin",), np.ones(tensors, np.int64), None)
    return doc, table, sidecar


def test_blocks_that_overlap_are_refused_before_anything_is_read() -> None:
    assert "rank0.bin overlap" in next(extent_problems(*with_columns(8, (0, 64), 1))).reason
    for count in (2, 1):
        assert not list(extent_problems(*with_columns(1, (0, 1 << 20), count)))


def test_one_block_of_many_tensors_is_bounded_by_the_file() -> None:
    assert not list(extent_problems(*with_columns(1, (0, 4 << 20), 32)))
    assert (
        "far more than it has" in next(extent_problems(*with_columns(1, (0, 4 << 20), 33))).reason
    )


def wrong_column(name: str) -> Any:
    """An encoder that makes a mistake in one column."""
    pack = sidecar_module._pack

    def packed(column: Any, column_name: str) -> bytes:
        return pack(column + (1 << 61 if column_name == name else 0), column_name)

    return packed


def test_a_sidecar_that_no_reader_accepts_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes one parses it again."""
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    source = ucformat.open(tmp_path / "model.safetensors")
    ways: list[Callable[[str], object]] = [
        lambda to: ucformat.torch.save(STATE, tmp_path / to, overwrite=True, form="packed"),
        lambda to: ucformat.torch.save(STATE, tmp_path / to, overwrite=True, form="safetensors"),
        lambda to: ucformat.convert(source, tmp_path / to, overwrite=True, weights="safetensors"),
        lambda to: ucformat.convert(
            source, tmp_path / to, overwrite=True, virtual=True, unprotected=True
        ),
    ]
    for number, way in enumerate(ways):
        way(f"{number}")
    before = {path: path.read_bytes() for path in tmp_path.glob("*/manifest.json")}
    assert len(before) == len(ways)
    for number, column in [
        (0, "described"),
        *((n, c) for n in (1, 2, 3) for c in ("tensor", "offset")),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(sidecar_module, "_pack", wrong_column(column))
            with pytest.raises(UsageError, match="the sidecar would exceed the limits"):
                ways[number](f"{number}")
    assert {path: path.read_bytes() for path in before} == before
