"""Zarr and Orbax: documents that are mutated, or nearly right, and chunks, manifests and nodes that are mutated."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from contextlib import suppress
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.fuzzing import (
    HOSTILE,
    Files,
    changed,
    files_below,
    harmless,
    mutated,
    nested,
    open_files,
    stored,
)
from tests.fuzz.ocdbt_files import manifest_of, node_of, unpacked
from tests.sources.suite import DATA
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.engines.orbax.source import Zarr
from ucformat.errors import IntegrityError, UcformatError, UnsupportedError

CONSTANT = 192 << 20

BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
CRC, GZIP = {"name": "crc32c"}, {"name": "gzip", "configuration": {"level": 5}}
ZSTD = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
BLOSC = {
    "name": "blosc",
    "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 4},
}
TRANSPOSED = {"name": "transpose", "configuration": {"order": [1, 0]}}
SHARDS = {
    "name": "sharding_indexed",
    "configuration": {"chunk_shape": [2, 3], "codecs": [BYTES], "index_codecs": [BYTES, CRC]},
}


def array(shape: Any, chunks: Any, codecs: Any, **more: Any) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0,
        "codecs": codecs,
        **more,
    }


def array_v2(shape: Any, chunks: Any, compressor: Any, **more: Any) -> dict[str, Any]:
    return {"zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": "<f4", "compressor": compressor, "order": "C",
            "fill_value": 0, "filters": None, **more}  # fmt: skip


def checked(data: bytes) -> bytes:
    return data + crc32c(data).to_bytes(4, "little")


_DATA = bytes(range(24))
_INDEX = checked(struct.pack("<4Q", 0, 24, 24, 24))
Documents = dict[str, Any]
V3: Documents = {
    "zarr.json": {"zarr_format": 3, "node_type": "group", "attributes": {"note": [1, {"x": None}]}},
    "plain/zarr.json": array([4, 3], [2, 3], [BYTES, CRC]),
    "packed/zarr.json": array([2, 3], [2, 3], [TRANSPOSED, BYTES, GZIP]),
    "sharded/zarr.json": array([4, 3], [4, 3], [SHARDS]),
}
CHUNKS_V3: Files = {
    "plain/c/0/0": checked(_DATA),
    "plain/c/1/0": checked(_DATA),
    "packed/c/0/0": gzip.compress(_DATA),
    "sharded/c/0/0": _DATA * 2 + _INDEX,
}
V2: Documents = {
    ".zgroup": {"zarr_format": 2},
    ".zattrs": {"note": [1, {"x": None}]},
    "plain/.zarray": array_v2([4, 3], [2, 3], None),
    "packed/.zarray": array_v2([2, 3], [2, 3], {"id": "zlib", "level": 1}, order="F"),
    ".zmetadata": {
        "zarr_consolidated_format": 1,
        "metadata": {
            ".zgroup": {"zarr_format": 2},
            "plain/.zarray": array_v2([4, 3], [2, 3], None),
        },
    },
}
CHUNKS_V2: Files = {"plain/0.0": _DATA, "plain/1.0": _DATA, "packed/0.0": zlib.compress(_DATA)}
GROUPS: tuple[tuple[Documents, Files], ...] = ((V3, CHUNKS_V3), (V2, CHUNKS_V2))


def with_documents(documents: Documents, files: Files) -> Files:
    return {**files, **{name: json.dumps(doc).encode() for name, doc in documents.items()}}


def check(files: Files) -> bool:
    return harmless(lambda: open_files(files), sum(map(len, files.values())), constant=CONSTANT)


def test_what_is_changed_below_is_read() -> None:
    for documents, chunks in GROUPS:
        ck = open_files(with_documents(documents, chunks))
        assert set(ck.names()) >= {"plain", "packed"}


_SIZES = (
    [2, 3],
    [4, 3],
    [3, 2],
    [0, 3],
    [4, 2**62],
    [2**31, 2**31],
    [1] * 32,
    [1] * 33,
    [-4, 3],
    [4, 0],
    [2**20, 1],
)
_CODECS = (BYTES, CRC, GZIP, ZSTD, BLOSC, TRANSPOSED, SHARDS, "bytes", "zstd", "sharding_indexed",
           {"name": "vlen-utf8"}, {"name": "bytes", "configuration": {"endian": "big"}}, [BYTES], [BYTES] * 2,
           [BYTES, BLOSC, CRC], [BYTES, CRC, ZSTD], [BYTES] + [ZSTD] * 7, [SHARDS, CRC],
           [TRANSPOSED, SHARDS])  # fmt: skip
_DTYPES = (
    "float32",
    "bfloat16",
    "complex128",
    "bool",
    "<f4",
    ">f8",
    "|V2",
    "<c16",
    "string",
    "<M8[ns]",
    {"name": "bool"},
)
_VALUES = (*HOSTILE, *_SIZES, *_CODECS, *_DTYPES)


@pytest.mark.matrix
@given(st.sampled_from(GROUPS), st.booleans(), st.data())
@settings(max_examples=60)
def test_documents_near_valid_ones(
    group: tuple[Documents, Files], filled: bool, draw: st.DataObject
) -> None:
    documents, chunks = group
    name = draw.draw(st.sampled_from(sorted(documents)))
    changes = {name: draw.draw(changed(documents[name], values=_VALUES))}
    with suppress(ValueError):
        files = with_documents({**documents, **changes}, chunks)
        check(files)
        if filled:
            harmless(
                lambda: use(Checkpoint(Zarr(fill_missing=True).open(stored(files)))),
                5000,
                constant=CONSTANT,
            )


def use(ck: Checkpoint) -> None:
    for name in ck.names():
        with suppress(UcformatError):
            if ck[name].nbytes < 1 << 20:
                ck[name].read()


@pytest.mark.matrix
@given(st.sampled_from(GROUPS), st.data())
@settings(max_examples=80)
def test_mutated_files_of_a_group(group: tuple[Documents, Files], draw: st.DataObject) -> None:
    files = with_documents(*group)
    name = draw.draw(st.sampled_from(sorted(files)))
    check({**files, name: draw.draw(mutated([files[name]]))})


def test_a_document_of_many_kinds_of_nothing() -> None:
    for name in ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"):
        for text in (
            b"",
            b"[" * 100_000,
            b"5",
            b"NaN",
            b"\xff",
            b'{"a":' * 50_000,
            b"9" * 5000,
            b'{"zarr_format":3}',
        ):
            files = {**with_documents(V2, CHUNKS_V2), name: text}
            check(files)


# Orbax

OCDBT = files_below(DATA / "orbax/ocdbt_raw/ckpt")
PLAIN = files_below(DATA / "orbax/zarr3_files/ckpt")
_ROOT = next(key for key in OCDBT if key.startswith("d/"))
NODE, MANIFEST = unpacked(OCDBT[_ROOT]), unpacked(OCDBT["manifest.ocdbt"])
JSON = {
    key: json.loads(data) for key, data in PLAIN.items() if data[:1] == b"{" and key != "_sharding"
}


def with_node(body: bytes, *, packed: bool = True) -> Files:
    node = node_of(body, packed=packed)
    return {**OCDBT, _ROOT: node, "manifest.ocdbt": manifest_of(_ROOT, len(node))}


def test_what_is_changed_of_orbax_is_read() -> None:
    for files in (OCDBT, PLAIN, with_node(NODE), with_node(NODE, packed=False)):
        ck = open_checkpoint(stored(files))
        assert ck["params.embed"].read().shape == (74, 30)


@pytest.mark.matrix
@given(st.sampled_from(sorted(JSON)), st.data())
@settings(max_examples=20)
def test_documents_near_those_of_orbax(name: str, draw: st.DataObject) -> None:
    with suppress(ValueError):
        check({**PLAIN, name: json.dumps(draw.draw(changed(JSON[name], values=_VALUES))).encode()})


@pytest.mark.matrix
@given(
    st.sampled_from(sorted(k for k in OCDBT if k not in ("_sharding", "commit_success.txt"))),
    st.data(),
)
@settings(max_examples=25)
def test_mutated_files_of_orbax(name: str, draw: st.DataObject) -> None:
    check({**OCDBT, name: draw.draw(mutated([OCDBT[name]]))})


@pytest.mark.matrix
@given(mutated([NODE]), st.booleans())
@settings(max_examples=25)
def test_mutated_nodes_of_the_right_checksum(body: bytes, packed: bool) -> None:
    check(with_node(body, packed=packed))


@pytest.mark.matrix
@given(mutated([MANIFEST]), st.booleans())
@settings(max_examples=25)
def test_mutated_manifests_of_the_right_checksum(body: bytes, packed: bool) -> None:
    check({**OCDBT, "manifest.ocdbt": node_of(body, packed=packed, manifest=True)})


def test_documents_that_are_too_deep() -> None:
    doc = {**JSON["_METADATA"], "custom_metadata": nested(5000)}
    with suppress(RecursionError):
        text = json.dumps(doc).encode()
        with pytest.raises(IntegrityError):
            open_checkpoint(stored({**PLAIN, "_METADATA": text}))


def test_an_array_of_very_many_chunks_that_are_not_stored() -> None:
    key = "params.embed/zarr.json"
    grid = {"name": "regular", "configuration": {"chunk_shape": [1, 1]}}
    changes = {
        key: {**JSON[key], "shape": [1 << 20, 1], "chunk_grid": grid, "codecs": [BYTES]},
        "_METADATA": {**JSON["_METADATA"], "store_array_data_equal_to_fill_value": False},
    }
    files = with_documents(
        changes, {k: v for k, v in PLAIN.items() if not k.startswith("params.embed/c")}
    )

    def read() -> None:
        tensor = open_checkpoint(stored(files))["params.embed"]
        assert not tensor[:100].any()
        with pytest.raises(UnsupportedError, match="chunks"):
            tensor.plan()

    assert harmless(read, sum(map(len, files.values())), constant=CONSTANT)
