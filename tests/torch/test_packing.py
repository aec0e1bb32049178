"""The packed form: files of pieces, and the sidecar that says where each lies."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
from tests.fakes import random_array, same
from tests.torch.test_deal import agreed, shapes, slices, worlds
from ucformat.errors import ChecksumError
from ucformat.format import chunking
from ucformat.format.arrays import put_file
from ucformat.format.commit import begin, commit, new_id
from ucformat.format.described import packed_file
from ucformat.format.digest import bytes_digest
from ucformat.format.sidecar import encode_columns
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import TensorInfo, single_extents
from ucformat.schema.manifest import Manifest, SidecarDoc
from ucformat.schema.tensors import TILES, TensorDoc, TensorTable
from ucformat.storage.memory import MemoryStore
from ucformat.torch.saving.options import SaveOptions
from ucformat.torch.saving.plan import own_part
from ucformat.torch.saving.statement import WriteItem
from ucformat.torch.saving.write import TileOptions, packed_extents, write_packed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from tests.torch.test_deal import Claims
    from ucformat.checkpoint import Checkpoint
    from ucformat.torch.saving.options import Codec

count = iter(range(10**6))


def packed(
    items: Claims, arrays: Mapping[str, Any], name: str, codec: Codec | None = None
) -> tuple[Checkpoint, list[TensorInfo], MemoryStore]:
    """What the ranks of these items would save, written by each in turn."""
    store = MemoryStore(f"packing-{name}-{next(count)}")
    attempt = begin(store, {"packing": name}, overwrite=False)
    data = f"data/{attempt.id}"
    statements, plan = agreed(items)
    told, begins = 0, {}
    for rank, statement in enumerate(statements):
        part = own_part(statement, plan.exceptions, SaveOptions("", "packed"))
        begins[rank] = part.listed_at
        parts = []
        for item, piece in part.pieces:
            held = items[rank][item]
            box = held.boxes[piece]
            raw = arrays[held.info.name].view(f"V{held.info.itemsize}")  # elements have no dtype
            parts.append((held.info, box, raw[(..., *slices(box))]))
        written: list[int] = []
        write_packed(store, packed_file(data, rank), parts, written.append, TileOptions(codec))
        told += sum(written)
    infos = plan.packed.infos
    if codec != "blosc":
        assert told == sum(i.nbytes for i in infos)
    sidecar = encode_columns(*packed_extents(plan.packed, data, begins))
    doc = put_file(store, f"{data}/extents.safetensors", sidecar)
    tensors = TensorTable.of(TensorDoc(i.name, i.state, i.dtype, i.shape) for i in infos)
    manifest = Manifest(
        id=new_id(),
        attempt=attempt.id,
        created=datetime.now(UTC),
        requires=("packed",) if codec is None else ("packed", "codecs"),
        sidecar=SidecarDoc(path=doc.path, nbytes=doc.nbytes, digest=bytes_digest(sidecar)),
        tensors=tensors if codec is None else tensors.encoded(TILES),
    )
    commit(store, attempt, manifest)
    return ucformat.open(store), list(infos), store


@settings(max_examples=40)
@given(worlds(), st.sampled_from([1, 7, 64, 1 << 20]), st.sampled_from([None, "raw", "blosc"]))
def test_what_ranks_pack_opens_as_what_they_held(
    items: Claims, block: int, codec: Codec | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "TILE_BYTES", block)
        infos = {c.info.name: c.info for mine in items for c in mine}
        arrays = {n: random_array(i.shape, i.dtype, int(n[1:])) for n, i in infos.items()}
        ck, tensors, store = packed(items, arrays, "worlds", codec)
        assert set(ck) == set(infos)
        for name, a in arrays.items():
            assert same(ck[name][...], a)
        report = ucformat.verify(ck)
        assert report
        assert report.bytes_unverified == 0
        for info in tensors:
            for e in single_extents(ck.source.extents(info.key)):
                assert e.block is not None
                read = store if codec is None else ck.source.store
                stored = read.read(e.file, e.block.offset, e.block.nbytes + 4)
                place = "/".join(e.file.split("/")[-2:]).encode() + e.block.offset.to_bytes(
                    8, "little"
                )
                assert crc32c(place + stored[:-4]) == int.from_bytes(stored[-4:], "little")
                assert e.block.placed
                assert e.block.crc32c is None
                assert e.block.nbytes <= max(block, info.itemsize)


@given(
    st.lists(
        st.tuples(shapes, st.sampled_from(["uint8", "float32", "complex128"])),
        min_size=1,
        max_size=5,
    )
)
def test_pieces_begin_at_multiples_of_64_bytes(kinds: list[tuple[tuple[int, ...], str]]) -> None:
    store = MemoryStore(f"packing-aligned-{next(count)}")
    arrays = [random_array(shape, dtype, n) for n, (shape, dtype) in enumerate(kinds)]
    infos = [TensorInfo(str(n), "weight", dtype, shape) for n, (shape, dtype) in enumerate(kinds)]
    parts = [(i, Box.whole(i.shape), a) for a, i in zip(arrays, infos, strict=True)]
    write_packed(store, "f", parts, lambda _: None)
    data, at = store.read("f"), 0
    for a in filter(np.size, arrays):
        at = math.ceil(at / 64) * 64
        assert data[at : at + a.nbytes] == a.tobytes()
        at += a.nbytes + 4
    assert len(data) == at


def test_strided_memory_is_written_in_row_major_order() -> None:
    base = random_array((6, 10), "float32", 1)
    store = MemoryStore("packing-strided")
    info = TensorInfo("t", "weight", "float32", (10, 6))
    write_packed(store, "f", [(info, Box.whole(info.shape), base.T)], lambda _: None)
    data = base.T.tobytes()
    assert store.read("f") == data + crc32c(b"f" + bytes(8) + data).to_bytes(4, "little")


def test_a_rank_without_pieces_leaves_an_empty_file() -> None:
    store = MemoryStore("packing-empty")
    write_packed(store, "f", [], lambda _: None)
    assert store.read("f") == b""


def test_tiles_that_lie_elsewhere_are_found() -> None:
    """They bring their checksums along: those of another rank, of another save, and of other places in the file."""
    info = TensorInfo("t", "weight", "uint8", (8, 8))
    items = [[WriteItem(info, (Box((4 * r, 0), (4, 8)),))] for r in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "TILE_BYTES", 8)
        _, _, store = packed(items, {"t": random_array(info.shape, "uint8", 3)}, "elsewhere")
        _, _, other = packed(items, {"t": random_array(info.shape, "uint8", 4)}, "elsewhere-too")
    files, theirs = (
        sorted(f.key for f in s.list("data") if f.key.endswith(".bin")) for s in (store, other)
    )
    own, tile = store.read(files[0]), 8 + 4
    for wrong in (
        store.read(files[1]),
        other.read(theirs[0]),
        own[tile : 2 * tile] + own[:tile] + own[2 * tile :],
    ):
        assert len(wrong) == len(own)
        with store.create(files[0]) as out:
            out.write(wrong)
        with pytest.raises(ChecksumError):
            ucformat.open(store)["t"][:2]
        assert not ucformat.verify(store)
        with pytest.raises(ChecksumError):
            ucformat.copy(ucformat.open(store), MemoryStore(f"packing-copy-{next(count)}"))
        with pytest.raises(ChecksumError):
            ucformat.convert(ucformat.open(store), MemoryStore(f"packing-copy-{next(count)}"))


def test_a_changed_byte_is_found() -> None:
    info = TensorInfo("t", "weight", "float32", (100, 10))
    a = random_array(info.shape, "float32", 3)
    items = [[WriteItem(info, (Box((50 * r, 0), (50, 10)),))] for r in range(2)]
    ck, _, store = packed(items, {"t": a}, "changed")
    file = next(iter(ck.source.extents(info.key))).file
    data = bytearray(store.read(file))
    data[7] ^= 1
    with store.create(file) as out:
        out.write(bytes(data))
    with pytest.raises(ChecksumError):
        ucformat.open(store)["t"][...]
    assert not ucformat.verify(store)
