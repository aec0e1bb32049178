"""What coverage-guided fuzzing tries: each target reads bytes, and returns, or raises an error of ours.

Whatever else it raises is a finding, also that two ways to read the same do not agree: a tensor
whole and in parts, our reader and the peer's own, what was parsed and what is parsed of its own
text.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import zlib
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
from pydantic import ValidationError

from tests.fakes import manifest_file, same
from tests.fuzz import test_pickles, test_shards, test_tile_indexes, test_zarr_documents
from tests.fuzz.fuzzing import Files, files_below
from tests.fuzz.test_layouts import use as use_layout
from tests.fuzz.test_tiles import decode_between_others
from tests.fuzz.test_torch_zip import NAME, PLAIN, Member, zipped
from tests.fuzz.test_universal import rebuilt
from tests.golden.test_golden import HERE
from tests.sources.suite import DATA
from ucformat.catalog.filter.compile import compile_filter
from ucformat.catalog.filter.parse import parse
from ucformat.catalog.filter.syntax import unparse
from ucformat.catalog.retention import load_policy
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import UcformatError
from ucformat.format.digest import bytes_digest, with_own_digest
from ucformat.format.structure import parse_manifest
from ucformat.geometry.layout import Layout
from ucformat.schema import MANIFEST
from ucformat.schema.documents import CatalogDoc, TombstoneDoc
from ucformat.schema.manifest import Manifest
from ucformat.schema.policy import Policy
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.schedules.world import Snapshot, World

__all__ = ["CORPUS", "REFUSED", "TARGETS", "leave"]

CORPUS = Path(__file__).parent / "corpus"
_SMALL = 1 << 16  # bytes of a tensor that is read
_SOME = 4  # tensors of a checkpoint that are read
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def compare(
    files: Files, changed: Files, theirs: Callable[[], Mapping[str, Any]] | None = None
) -> None:
    """Open a checkpoint with some files changed, and read each tensor whole, in halves, and as others read it."""
    ck = open_checkpoint(_stored(files, changed))
    other: Mapping[str, Any] = {}
    for number, (name, state) in enumerate(ck.tensors):
        tensor = ck[name, state]
        if number == _SOME:
            break
        if tensor.nbytes > _SMALL:
            continue
        with suppress(UcformatError):
            whole = tensor.read()
            _compare_parts(tensor, whole)
            if theirs is not None:
                with suppress(Exception):  # what others refuse is theirs to know
                    other, theirs = theirs(), None
            if name in other and state == "weight":
                assert same(np.asarray(other[name]), whole), (
                    f"{name} differs from what its own library reads"
                )
    for look in (
        lambda: list(ck.metadata.groups),
        lambda: ck.objects,
        lambda: ck.id,
        ck.files,
        lambda: dict(ck.assets),
    ):
        with suppress(UcformatError):
            look()


@cache
def _store(name: str) -> MemoryStore:
    return MemoryStore(name)


def _stored(files: Files, changed: Files) -> MemoryStore:
    """A store with these files, of which most are there from the time before."""
    store, wanted = _store(f"fuzz-{id(files)}"), {**files, **changed}
    there = {info.key for info in store.list()}
    for key in there - wanted.keys() | there & (_CHANGED.get(store, set()) | changed.keys()):
        store.delete(key)
        there.discard(key)
    for key in wanted.keys() - there:
        store.put_if_absent(key, wanted[key])
    _CHANGED[store] = set(changed)
    return store


_CHANGED: dict[MemoryStore, set[str]] = {}


def _compare_parts(tensor: Any, whole: Any) -> None:
    for dim, length in enumerate(whole.shape):
        at = length // 2
        for part in (slice(None, at), slice(at, None)):
            index = (slice(None),) * dim + (part,)
            with suppress(UcformatError):
                assert same(tensor[index], np.ascontiguousarray(whole[index])), (
                    f"{tensor} in parts differs"
                )


# our own


@cache
def _golden(name: str) -> Files:
    """A small checkpoint of ours, of the first few tensors."""
    return files_below(HERE / "v1" / name)


def manifest(data: bytes) -> None:
    """The manifest of an array and of a packed checkpoint, under the right digest of its own."""
    data = with_own_digest(data)
    found = parse_manifest(data, MANIFEST)
    assert Manifest.model_validate_json(found.model_dump_json()) == found
    compare(_golden("packed" if found.sidecar else "arrays"), {MANIFEST: data})


def sidecar(data: bytes) -> None:
    """A sidecar whose columns are not compressed yet; the manifest has the digest of what is made of it."""
    files = _golden("packed")
    document = json.loads(files[MANIFEST])
    made = _compressed(data)
    document["sidecar"] |= {"digest": bytes_digest(made), "nbytes": len(made)}
    compare(files, {document["sidecar"]["path"]: made, MANIFEST: manifest_file(document)})


def _compressed(data: bytes) -> bytes:
    """The sidecar with its columns compressed, if it is one of which the columns are known."""
    try:
        at = 8 + int.from_bytes(data[:8], "little")
        header, columns = json.loads(data[8:at]), b""
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                packed = zlib.compress(data[at + begin : at + end], 1)
                offsets = [len(columns), len(columns) + len(packed)]
                header[name] = {"dtype": "U8", "shape": [len(packed)], "data_offsets": offsets}
                columns += packed
        return rebuilt(header, columns)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return data


def uncompressed(data: bytes) -> bytes:
    """The sidecar with its columns not compressed."""
    at = 8 + int.from_bytes(data[:8], "little")
    header, columns = json.loads(data[8:at]), b""
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            column = zlib.decompress(data[at + begin : at + end])
            header[name] = {**entry, "data_offsets": [len(columns), len(columns) + len(column)]}
            columns += column
    return rebuilt(header, columns)


_LEFT = ExitStack()  # with which the world ends


@cache
def _world() -> tuple[World, Snapshot]:
    """A store with checkpoints and catalogs that know them; it takes the place of the real ones until `leave`."""
    from tests.schedules.commands import first_world
    from tests.schedules.world import World

    data = _LEFT.enter_context(tempfile.TemporaryDirectory())
    _LEFT.enter_context(patch.dict(os.environ, {"UCP_CATALOG": "none", "XDG_DATA_HOME": data}))
    world = _LEFT.enter_context(World())
    return world, first_world(world)[0]


def leave() -> None:
    """Give back to this process what targets took the place of."""
    _LEFT.close()
    _world.cache_clear()


def _beside(key: str, data: bytes, *commands: str) -> None:
    """Put a document into the world, and let commands run: what the owner has must be there afterwards."""
    from tests.schedules.commands import COMMANDS
    from tests.schedules.world import CATALOGS

    world, first = _world()
    world.restore(first)
    before = {k: f.data for k, f in world.files.items() if k.startswith(("w/t/p/", "w/src/"))}
    said = [
        world.rows("one", f"select * from {table} order by 1, 2")  # noqa: S608
        for table in ("alias", "tag", "hold")
    ]
    world.files[key] = type(next(iter(world.files.values())))(
        data, world.version(), world.time.timestamp()
    )
    errors = []
    for command in commands:
        actor = world.actor(command, COMMANDS[command].work, CATALOGS[0], first.time - first.time)
        actor.advance()
        errors.append(actor.error)
    for kept, content in before.items():
        if kept != key and not kept.endswith("ucformat-catalog.json"):
            assert kept in world.files, f"{kept} was removed"
            assert world.files[kept].data == content, f"{kept} was changed"
    for table, rows in zip(("alias", "tag", "hold"), said, strict=True):
        now = world.rows("one", f"select * from {table} order by 1, 2")  # noqa: S608
        assert all(row in now for row in rows), f"{table} lost {rows}"
    for error in errors:
        if error is not None:
            raise error


def document(data: bytes) -> None:
    """What lies beside a checkpoint of somebody else's, when its tree is registered and gc runs."""
    CatalogDoc.model_validate_json(data)
    _beside("w/u/p/ucformat-catalog.json", data, "register-copies", "gc")


def tombstone(data: bytes) -> None:
    """A tombstone in the folder of a checkpoint that stands, and in one beside it, when gc runs."""
    TombstoneDoc.model_validate_json(data)
    _beside("w/t/p/tombstone.json", data, "gc")
    _beside("w/t/tombstone.json", data, "gc")


def policy(data: bytes) -> None:
    """A policy file."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(data)
        file.flush()
        found = load_policy(file.name)
    assert Policy.model_validate_json(found.model_dump_json(exclude_defaults=True)) == found


def query(data: bytes) -> None:
    """The text of a filter."""
    node = parse(data.decode("utf-8", "surrogateescape"))
    text = unparse(node)
    assert parse(text) == node, text
    str(compile_filter(node, now=NOW))


def layout(data: bytes) -> None:
    """A layout file."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(data)
        file.flush()
        use_layout(Layout.load(Path(file.name)))


# those of others

_NONE: Files = {}


def unpickled(data: bytes) -> None:
    """A pickle."""
    test_pickles.read(data)


def torch_zip(data: bytes) -> None:
    """A file of `torch.save`, of which the pickle is this."""
    whole = zipped([Member("archive/data.pkl", data), *PLAIN[1:]])

    def theirs() -> Mapping[str, Any]:
        import torch

        found = torch.load(io.BytesIO(whole), weights_only=True)
        return {name: t.numpy() for name, t in found.items()}

    compare(_NONE, {NAME: whole}, theirs)


def safetensors(data: bytes) -> None:
    """A safetensors file."""
    from safetensors.numpy import load

    compare(_NONE, {"model.safetensors": data}, lambda: load(data))


def dcp(data: bytes) -> None:
    """The metadata of a PyTorch DCP checkpoint."""
    compare(_data("dcp/sgd-hf/ckpt"), {".metadata": data})


@cache
def _data(name: str) -> Files:
    return files_below(DATA / name)


_ZARR = test_zarr_documents.with_documents(test_zarr_documents.V3, test_zarr_documents.CHUNKS_V3)


def zarr(data: bytes) -> None:
    """The document of a Zarr array; its first byte says of which: plain, compressed, or of sharded chunks."""
    name = ("plain", "packed", "sharded")[data[0] % 3 if data else 0]
    changed = {f"{name}/zarr.json": data[1:]}
    compare(_ZARR, changed, lambda: {name: _by_zarr({**_ZARR, **changed}, name)})


def _by_zarr(files: Files, name: str) -> Any:
    import zarr as peer
    from zarr.core.buffer import default_buffer_prototype

    make = default_buffer_prototype().buffer.from_bytes
    store = peer.storage.MemoryStore({key: make(data) for key, data in files.items()})
    return peer.open_array(store, path=name, mode="r")[...]


def ocdbt(data: bytes) -> None:
    """A node of Orbax's OCDBT, under the right checksum."""
    compare(test_zarr_documents.OCDBT, test_zarr_documents.with_node(data, packed=False))


def tile(data: bytes) -> None:
    """An encoded tile, after a byte each for its encoding, the size of its elements, and their number."""
    kind, itemsize, count = (*data[:3], 0, 0, 0)[:3]
    decode_between_others(kind, data[3:], 1 << itemsize % 5, count)


def shard(data: bytes) -> None:
    """A shard of compressed chunks but for its checksums."""
    compare(test_shards.compressed(), test_shards.with_shard(data))


def tile_index(data: bytes) -> None:
    """An encoded packed file but for its checksums."""
    compare(test_tile_indexes.encoded(), test_tile_indexes.with_file(data))


#: What an input that is none is refused with; whatever else is raised is a finding.
REFUSED = (UcformatError, ValidationError)

TARGETS: dict[str, Callable[[bytes], None]] = {
    "manifest": manifest,
    "sidecar": sidecar,
    "document": document,
    "tombstone": tombstone,
    "policy": policy,
    "filter": query,
    "layout": layout,
    "pickle": unpickled,
    "torch": torch_zip,
    "safetensors": safetensors,
    "dcp": dcp,
    "zarr": zarr,
    "ocdbt": ocdbt,
    "tile": tile,
    "shard": shard,
    "tile_index": tile_index,
}
