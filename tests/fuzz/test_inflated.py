"""Small files that stand for gigabytes: chunks of Zarr, and manifests and nodes of OCDBT.

What decodes them is no Python, so that memory is measured as the kernel sees it.
"""

from __future__ import annotations

import gzip
import struct
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numcodecs  # type: ignore[import-untyped]
import numpy as np
import pytest

from tests.fuzz.fuzzing import Files, bounded, files_below, open_files, stored
from tests.fuzz.ocdbt_files import leaf, manifest_of, node_of, number, table
from tests.fuzz.test_zarr_documents import (
    BLOSC,
    BYTES,
    CRC,
    GZIP,
    SHARDS,
    ZSTD,
    array,
    checked,
    with_documents,
)
from tests.sources.suite import DATA
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import ChecksumError, IntegrityError, UnsafeError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LARGE = 200 << 20  # what a few kilobytes stand for
MOST = 100 << 20  # what may be resident besides what was


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@contextmanager
def resident(most: int = MOST) -> Iterator[None]:
    """Fails where the memory of this process grows by more, if only for a moment."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the kernel does not let a process forget how large it was")
    before = _peak()
    yield
    grown = _peak() - before
    assert grown <= most, f"{grown:,} bytes more were resident"


@cache
def zeros(codec: str, nbytes: int = LARGE) -> bytes:
    """So many zero bytes, packed; blosc by the strongest that it has inside."""
    if codec == "gzip":
        return gzip.compress(bytes(nbytes), 1)
    if codec == "zstd":
        return bytes(numcodecs.zstd.compress(bytes(nbytes), 3))
    numcodecs.blosc.set_nthreads(1)
    return bytes(numcodecs.blosc.compress(bytes(nbytes), b"zstd", 5))


def chunk_of(codecs: list[Any], data: bytes, shape: tuple[int, int] = (2, 3)) -> Files:
    """A group with one array, which is this chunk."""
    return with_documents(
        {
            "zarr.json": {"zarr_format": 3, "node_type": "group"},
            "a/zarr.json": array(list(shape), list(shape), codecs),
        },
        {"a/c/0/0": data},
    )


_INNER = {**SHARDS, "configuration": {**SHARDS["configuration"], "codecs": [BYTES, BLOSC]}}  # type: ignore[dict-item]
_OUTER = {**SHARDS, "configuration": {**SHARDS["configuration"], "codecs": [_INNER]}}  # type: ignore[dict-item]
_TURNED = {"name": "transpose", "configuration": {"order": [0, 1]}}


def shard(content: bytes) -> bytes:
    return content + checked(struct.pack("<QQ", 0, len(content)))


CHUNKS: dict[str, tuple[list[Any], Callable[[], bytes]]] = {
    "zstd": ([BYTES, ZSTD], lambda: zeros("zstd")),
    "gzip": ([BYTES, GZIP], lambda: zeros("gzip")),
    "zstd in zstd": ([BYTES, ZSTD, ZSTD], lambda: bytes(numcodecs.zstd.compress(zeros("zstd")))),
    "zstd and a checksum": ([BYTES, ZSTD, CRC], lambda: checked(zeros("zstd"))),
    "a checksum in zstd": ([BYTES, CRC, ZSTD], lambda: zeros("zstd")),
    "blosc": ([BYTES, BLOSC], lambda: zeros("blosc")),
    "blosc and a checksum": ([BYTES, BLOSC, CRC], lambda: checked(zeros("blosc"))),
    "blosc and two checksums": ([BYTES, BLOSC, CRC, CRC], lambda: checked(checked(zeros("blosc")))),
    "blosc in zstd": ([BYTES, BLOSC, ZSTD], lambda: zeros("zstd")),
    "blosc in gzip": ([BYTES, BLOSC, GZIP], lambda: zeros("gzip")),
    "zstd in blosc": ([BYTES, ZSTD, BLOSC], lambda: zeros("blosc")),
    "a checksum in blosc": ([BYTES, CRC, BLOSC], lambda: zeros("blosc")),
    "blosc in a shard": ([_INNER], lambda: shard(zeros("blosc"))),
    "blosc in a shard in a shard": ([_OUTER], lambda: shard(shard(zeros("blosc")))),
    "blosc in a shard that is turned": ([_TURNED, _INNER], lambda: shard(zeros("blosc"))),
}


@pytest.mark.parametrize("what", CHUNKS)
def test_a_chunk_that_inflates_to_more_than_it_is(what: str) -> None:
    codecs, make = CHUNKS[what]
    files = chunk_of(codecs, make())
    tensor = open_checkpoint(stored(files))["a"]
    with (
        resident(),
        bounded(10_000),
        pytest.raises((IntegrityError, UnsafeError, UnsupportedError)) as error,
    ):
        tensor.read()
    assert "chunk [0, 0]" in str(error.value)


@pytest.mark.parametrize(
    "codecs", [[BYTES, BLOSC], [BYTES, BLOSC, CRC], [_TURNED, BYTES, BLOSC, CRC]]
)
def test_a_chunk_of_blosc_with_a_checksum_is_read(codecs: list[Any]) -> None:
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    data = bytes(numcodecs.blosc.compress(value.tobytes(), b"lz4", 5))
    data = checked(data) if CRC in codecs else data
    assert (open_checkpoint(stored(chunk_of(codecs, data)))["a"].read() == value).all()
    if CRC in codecs:
        with pytest.raises(ChecksumError, match="CRC-32C"):
            open_checkpoint(stored(chunk_of(codecs, data[:-1] + b"\0")))["a"].read()


def test_a_chunk_that_claims_to_be_huge() -> None:
    files = chunk_of([BYTES, ZSTD], zeros("zstd", 1 << 20), (1 << 20, 1 << 20))
    with resident(), pytest.raises(IntegrityError, match="too few"):
        open_checkpoint(stored(files))["a"][0, 0]


# OCDBT

FILES = files_below(DATA / "orbax/ocdbt_raw/ckpt")
_MANY = 200_000
_KEYS = [struct.pack(">I", i) for i in range(_MANY)]
_SHARED = [
    3 if i & 255 else 2 if i & 65535 else 1 for i in range(1, _MANY)
]  # bytes that are those of the key before


def frame(blocks: bytes, head: bytes = b"\x00\x58") -> bytes:
    """A frame of zstd that does not say how large it is."""
    return b"\x28\xb5\x2f\xfd" + head + blocks


def with_node(node: bytes) -> Files:
    return {**FILES, "d/root": node, "manifest.ocdbt": manifest_of("d/root", len(node))}


NODES: dict[str, Callable[[], bytes]] = {
    "zeros": lambda: node_of(bytes(LARGE)),
    "a table of many files": lambda: node_of(b"\0" + number(1 << 50) + bytes(LARGE)),
    "keys that differ in a byte": lambda: node_of(
        leaf([60_000] * 20_000, [b"x" * 60_000, *(k[1:] for k in _KEYS[1:20_001])], [b""] * 20_001)
    ),
    "very many keys": lambda: node_of(
        leaf(
            _SHARED,
            [_KEYS[0], *(key[n:] for key, n in zip(_KEYS[1:], _SHARED, strict=True))],
            [b""] * _MANY,
        )
    ),
    "a path that is repeated": lambda: node_of(
        b"\0"
        + table("x" * 60_000)
        + number(_MANY)
        + bytes(_MANY - 1)
        + b"\4" * _MANY
        + b"".join(_KEYS)
        + b"\1" * _MANY * 2
        + bytes(2 * _MANY)
    ),
    "blocks of one byte, repeated": lambda: raw_node(
        frame((((128 << 10) << 3 | 2).to_bytes(3, "little") + b"\0") * 3200)
    ),
    "a size of 2**62": lambda: raw_node(
        frame(b"\1\0\0", b"\xe0" + (1 << 62).to_bytes(8, "little"))
    ),
    "a block that is cut off": lambda: raw_node(frame(b"\xfc\xff\xff")),
    "a block of no kind": lambda: raw_node(frame(b"\7\0\0")),
    "two frames": lambda: raw_node(zeros("zstd", 100) * 2),
    "no frame": lambda: raw_node(b"\0" * 40),
    "nothing": lambda: raw_node(b""),
    "a name of no length": lambda: node_of(b"\0\1\xff"),
    "lengths that are too long": lambda: node_of(b"\0\1\xff\xff\xff\xff\xff\1"),
    "a key that is too long": lambda: node_of(b"\0\0\1\xff\xff\4"),
}


def raw_node(content: bytes) -> bytes:
    """A node whose packed content this is."""
    plain = node_of(content, packed=False)
    return plain[:13] + b"\1" + plain[14:]


@pytest.mark.parametrize("what", NODES)
def test_a_node_that_stands_for_too_much(what: str) -> None:
    files = with_node(NODES[what]())
    with (
        resident(),
        bounded(sum(map(len, files.values()))),
        pytest.raises(IntegrityError, match="d/root") as error,
    ):
        open_checkpoint(stored(files))
    assert len(str(error.value)) < 2000


def test_a_manifest_that_stands_for_too_much() -> None:
    files = {**FILES, "manifest.ocdbt": node_of(bytes(LARGE), manifest=True)}
    with resident(), pytest.raises(IntegrityError, match=r"manifest\.ocdbt"):
        open_checkpoint(stored(files))


def test_a_tree_that_names_one_node_in_many_spellings() -> None:
    """The base path of a data file and the rest of it may be cut anywhere."""
    path, entries = "d/node", 6
    inner = (
        b"\1"
        + number(entries)
        + bytes([0] * (entries - 1))
        + bytes([len(path)] * entries)
        + bytes(range(entries))
    )
    inner += path.encode() * entries
    keys = b"".join(bytes([97 + i]) for i in range(entries))
    inner += number(entries) + bytes(entries - 1) + b"\1" * entries + bytes(entries) + keys
    node = node_of(leaf([], [b"x"], [b"v"]))
    inner += (
        bytes(range(entries)) + bytes(entries) + number(len(node)) * entries + b"\1" * entries * 3
    )
    root = node_of(inner)
    files = {
        **FILES,
        "d/node": node,
        "d/root": root,
        "manifest.ocdbt": manifest_of("d/root", len(root), 1),
    }
    with pytest.raises(IntegrityError, match="comes back"):
        open_files(files)


def test_a_large_node_of_tensorstore_is_read(tmp_path: Path) -> None:
    """Of which zstd does not say how large it is."""
    import tensorstore as ts

    from ucformat.engines.orbax.ocdbt import read_ocdbt
    from ucformat.storage.local import LocalStore

    config = {"max_decoded_node_bytes": 100_000_000}
    kv = ts.KvStore.open(
        {"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": config}
    ).result()
    with ts.Transaction() as transaction:
        for i in range(20_000):
            kv.with_transaction(transaction)[f"params.layers.{i}.mlp/c/0/{i}"] = (
                b"%020d" % i + bytes(i % 200)
            )
    store = LocalStore(tmp_path)
    assert len(read_ocdbt(store, "", {i.key: i.size for i in store.list()})) == 20_000
