"""Described tensors against files that are laid out by listing the boxes of all ranks."""

from __future__ import annotations

import json
import zlib
from dataclasses import fields
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from tests.geometry.test_distribution import distributed
from ucformat.errors import IntegrityError, LayoutError
from ucformat.format.chunking import Tiling
from ucformat.format.described import ALIGNMENT, Described, DescribedRow, FileOrder, packed_file
from ucformat.format.extents import blocks_of
from ucformat.format.sidecar import Columns, decode, encode_columns
from ucformat.geometry.box import Box
from ucformat.geometry.distribution import Cut, Distribution, RankMesh
from ucformat.geometry.tensor import FileRun, TensorInfo, single_extents
from ucformat.schema.tensors import TensorDoc, TensorTable


@st.composite
def described(draw: st.DrawFn) -> tuple[list[TensorInfo], list[DescribedRow]]:
    """Tensors, some of one kind, and their rows in the order of files."""
    infos: list[TensorInfo] = []
    rows: list[DescribedRow] = []
    for shape, d in draw(st.lists(distributed(), min_size=1, max_size=4)):
        dtype = draw(st.sampled_from(["uint8", "float32"]))
        tile = tuple(draw(st.integers(1, 8)) for _ in shape)
        for _ in range(draw(st.integers(1, 3))):
            rows.append(DescribedRow(len(infos), d, draw(st.integers(0, d.copies - 1)), tile))
            infos.append(TensorInfo(f"t{len(infos)}", "weight", dtype, shape))
    kinds: dict[object, list[DescribedRow]] = {}
    order = FileOrder()
    for row in sorted(rows, key=lambda r: order(infos[r.tensor], r.distribution)):
        flat = row.distribution.flat is not None
        kinds.setdefault(
            (flat, None if flat else (row.tile, row.distribution, infos[row.tensor].dtype)), []
        ).append(row)
    return infos, [row for same in kinds.values() for row in same]


@given(described(), st.data())
def test_offsets_are_those_of_files_written_in_order(
    case: tuple[list[TensorInfo], list[DescribedRow]], data: st.DataObject
) -> None:
    infos, rows = case
    found = Described(rows, infos, "data/x")
    expected: dict[int, set[tuple[int, Box, int]]] = {}
    ends: dict[int, int] = {}
    for row in rows:
        info, d = infos[row.tensor], row.distribution
        for coordinate in product(*map(range, d.mesh.sizes)):
            rank = int(d.mesh.ranks[coordinate])
            end = ends.setdefault(rank, 0)
            if d.copy_of(coordinate) == row.writer:
                for box in d.boxes(info.shape, coordinate):
                    expected.setdefault(row.tensor, set()).add((rank, box, end))
                    end += -(-Tiling(row.tile, info.itemsize).nbytes(box) // ALIGNMENT) * ALIGNMENT
            ends[rank] = end
    assert found.ranks.tolist() == sorted(ends)
    assert found.files == [packed_file("data/x", rank) for rank in sorted(ends)]
    for number, info in enumerate(infos):
        assert set(found.stored(number)) == expected.get(number, set())
        start = tuple(data.draw(st.integers(0, n)) for n in info.shape)
        within = Box(
            start,
            tuple(data.draw(st.integers(0, n - a)) for n, a in zip(info.shape, start, strict=True)),
        )
        met = {s for s in expected.get(number, ()) if s[1].intersect(within) is not None}
        assert set(found.stored(number, within)) == met
        tiles = {e.box for e in single_extents(found.extents(number, within))}
        tiling = Tiling(rows[[r.tensor for r in rows].index(number)].tile, info.itemsize)
        assert tiles == {
            t for _, box, _ in met for t in tiling.boxes(box) if t.intersect(within) is not None
        }
        runs = [
            tiles
            for run in found.file_runs(number, within)
            for tiles in (
                map(run.tiles, range(len(run.files))) if isinstance(run, FileRun) else [run]
            )
        ]
        assert {
            (e.file, e.box, e.offset) for e in single_extents(runs) if e.box.intersect(within)
        } == {
            (packed_file("data/x", rank), tile, at)
            for rank, box, offset in met
            for at, tile in tiling.placed(box, offset)
            if tile.intersect(within)
        }


FOUR = RankMesh((4,), 0, (1,))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([DescribedRow(0, Distribution(FOUR), 4, (8,))], "replica that does not exist"),
        ([DescribedRow(0, Distribution(FOUR), -1, (8,))], "replica that does not exist"),
        ([DescribedRow(0, Distribution(FOUR, (Cut(1, 0),)), 0, (8,))], "cannot be distributed"),
        ([DescribedRow(0, Distribution(FOUR), 0, (0,))], "tiles of the shape"),
        ([DescribedRow(0, Distribution(FOUR), 0, (1, 1))], "tiles of the shape"),
        ([DescribedRow(2, Distribution(FOUR), 0, (1,))], "too many tiles"),
        ([DescribedRow(3, Distribution(FOUR), 0, (1 << 40,))], "too many, or too large"),
        (
            [DescribedRow(0, Distribution(RankMesh((1 << 21,), 0, (1,))), 0, (8,))],
            "cannot be distributed",
        ),
        ([DescribedRow(0, Distribution(FOUR), 0, (8,))] * 2, "described twice"),
        (
            [
                DescribedRow(0, Distribution(FOUR, flat=0, part=2), 0, (8,)),
                DescribedRow(1, Distribution(FOUR), 0, (8,)),
            ],
            "order of files",
        ),
        (
            [
                DescribedRow(0, Distribution(FOUR), 0, (8,)),
                DescribedRow(2, Distribution(FOUR), 0, (1 << 22,)),
                DescribedRow(1, Distribution(FOUR), 0, (8,)),
            ],
            "order of files",
        ),
    ],
)
def test_impossible_rows_are_refused(rows: list[DescribedRow], reason: str) -> None:
    infos = [
        TensorInfo(f"t{n}", "weight", "uint8", (size,))
        for n, size in enumerate((8, 8, 1 << 22, 1 << 58))
    ]
    with pytest.raises(LayoutError, match=reason):
        Described(rows, infos, "data/x")


@given(described())
def test_they_survive_in_a_sidecar(case: tuple[list[TensorInfo], list[DescribedRow]]) -> None:
    infos, rows = case
    found = Described(rows, infos, "data/x")
    table = TensorTable.of(TensorDoc(i.name, i.state, i.dtype, i.shape) for i in infos)
    empty = {f.name: np.zeros(0, np.int64) for f in fields(Columns)}
    data = encode_columns(Columns(**empty), [], found)
    read = decode(data, table, "sidecar")
    assert read.described is not None
    assert read.described.rows == found.rows
    assert read.files == tuple(found.files)
    for number in range(len(infos)):
        assert read.extents(number) == tuple(found.extents(number))
    assert encode_columns(read.columns, [], read.described) == data
    expected = {
        (e.file, number, e.block)
        for number in range(len(infos))
        for e in single_extents(found.extents(number))
    }
    assert set(blocks_of(read)) == expected


def changed(doc: dict[str, Any], rows: dict[str, list[int]]) -> bytes:
    """A sidecar of one described tensor of 8 bytes on four ranks, with other metadata or columns."""
    columns = {
        "described": [0],
        "distribution": [0],
        "writer": [0],
        "position": [0],
        "described_tile": [8],
    } | rows
    meta = {
        "tensors": 1,
        "folder": "data/x",
        "meshes": [{"sizes": [4], "strides": [1]}],
        "distributions": [{"mesh": 0, "cuts": [[0, 0]]}],
        **doc,
    }
    names = (
        "tensor",
        "file",
        "offset",
        "block_offset",
        "block_nbytes",
        "crc32c",
        "start",
        "shape",
        "strides",
    )
    empty: dict[str, list[int]] = {name: [] for name in names}
    packed = {
        name: np.frombuffer(
            zlib.compress(np.array(c, "<i8").view(np.uint8).reshape(-1, 8).T.tobytes()), np.uint8
        )
        for name, c in (empty | columns).items()
    }
    told = {
        "format": "ucformat-extents",
        "extents": "0",
        "files": "[]",
        "described": json.dumps(meta),
    }
    data: bytes = save(packed, told)
    return data


TABLE = TensorTable.of([TensorDoc("w", "weight", "uint8", (8,))])


def test_a_sidecar_written_by_hand_is_read() -> None:
    found = decode(changed({}, {}), TABLE, "sidecar")
    assert [(e.file, e.box) for e in found.extents(0)] == [
        (packed_file("data/x", rank), Box((2 * rank,), (2,))) for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("doc", "rows"),
    [
        ({"folder": "data/../x"}, {}),
        ({"folder": "/data/x"}, {}),
        ({"tensors": 2}, {}),
        ({"tensors": -1}, {}),
        ({"tensors": 1 << 30}, {}),
        ({"more": 1}, {}),
        ({"meshes": []}, {}),
        ({"meshes": [{"sizes": [4], "strides": [0]}]}, {}),
        ({"meshes": [{"sizes": [4], "strides": [-1]}]}, {}),
        ({"meshes": [{"sizes": [4], "strides": [1 << 20]}]}, {}),
        ({"meshes": [{"sizes": [4], "strides": [1, 1]}]}, {}),
        ({"meshes": [{"sizes": [4], "ranks": [0, 1, 2]}]}, {}),
        ({"meshes": [{"sizes": [4], "ranks": [0, 1, 2, 2]}]}, {}),
        ({"meshes": [{"sizes": [4], "ranks": [0, 1, 2, 1 << 20]}]}, {}),
        ({"meshes": [{"sizes": [1 << 30, 1 << 30, 1 << 30], "strides": [1, 1, 1]}]}, {}),
        ({"meshes": [{"sizes": [0], "strides": [1]}]}, {}),
        ({"distributions": []}, {}),
        ({"distributions": [{"mesh": 1}]}, {}),
        ({"distributions": [{"mesh": 0, "cuts": [[1, 0]]}]}, {}),
        ({"distributions": [{"mesh": 0, "cuts": [[0, 1]]}]}, {}),
        ({"distributions": [{"mesh": 0, "cuts": [[0, 0], [0, 0]]}]}, {}),
        ({"distributions": [{"mesh": 0, "flat": 0}]}, {}),
        ({"distributions": [{"mesh": 0, "flat": 0, "part": 1}]}, {}),
        ({"distributions": [{"mesh": 0, "flat": 1, "part": 8}]}, {}),
        ({}, {"described": [1]}),
        ({}, {"described": [-1]}),
        ({}, {"distribution": [-1]}),
        ({}, {"distribution": [1]}),
        ({}, {"writer": [1]}),
        ({}, {"writer": [-1]}),
        ({}, {"position": [-1]}),
        ({}, {"position": [1]}),
        ({}, {"described_tile": [0]}),
        ({}, {"described_tile": []}),
    ],
)
def test_damaged_descriptions_are_refused(doc: dict[str, Any], rows: dict[str, list[int]]) -> None:
    with pytest.raises(IntegrityError):
        decode(changed(doc, rows), TABLE, "sidecar")
