"""What docs/spec says in numbers, tables and rules is so; rules are followed here sentence by sentence."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np
import pytest
from crc32c import crc32c
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from tests.format.test_encoded import Tiles
from ucformat.format.arrays import array_json
from ucformat.format.chunking import Grid, Tiling
from ucformat.format.described import Described, DescribedRow
from ucformat.format.encoded import EncodedStore
from ucformat.format.sidecar import describe
from ucformat.format.tile_index import read_index
from ucformat.geometry.box import Box
from ucformat.geometry.distribution import Cut, Distribution, RankMesh
from ucformat.geometry.fingerprint import fingerprint_of
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.schema import ITEMSIZE, LINEAGE_KINDS, ZARR_DTYPES, ZARR_EXTENSIONS
from ucformat.schema.documents import DescribedDoc
from ucformat.schema.limits import (
    MAX_ARRAY_DIMS,
    MAX_BASES,
    MAX_BITS,
    MAX_CHAIN,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_EDGE,
    MAX_INTEGER,
    MAX_RANKS,
    MAX_SHARDS,
    MAX_SPAN,
    MAX_TEXT,
    MAX_TILE_BYTES,
    MAX_TILES,
    MOST_COMMITS,
)
from ucformat.schema.manifest import (
    FEATURES,
    FORMAT_MINOR,
    AttemptDoc,
    Manifest,
    SourceFileDoc,
)
from ucformat.schema.tensors import KindDoc, TensorDoc, TensorTable
from ucformat.storage.base import ENCODED
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

DOCS = Path(__file__).parents[2] / "docs" / "spec"
TEXT, PROTOCOL, PROVENANCE = (
    (DOCS / f"{name}.md").read_text() for name in ("format", "protocol", "provenance")
)
EXAMPLE = TEXT[TEXT.index("## 8. An example in bytes") : TEXT.index("## 9.")]
PACKED = TEXT[TEXT.index("### An example in bytes") : TEXT.index("## 4.")]
COLUMN = TEXT[TEXT.index("*An example.*") : TEXT.index("## 8.")]
VECTORS = json.loads((Path(__file__).parent / "cases" / "vectors.json").read_text())


def block(label: str) -> bytes:
    """The bytes that the example gives under a label, on one line or several."""
    found = re.search(rf"^{label} +((?:[0-9a-f]{{2}}[ \n]+)+)", COLUMN, re.MULTILINE)
    assert found is not None, label
    return bytes.fromhex(found[1])


def test_the_shard_of_the_example() -> None:
    parts = re.findall(
        r"^(?:chunk \d|its CRC|index) +((?:[0-9a-f]{2}[ \n]+)+)", EXAMPLE, re.MULTILINE
    )
    shard = b"".join(map(bytes.fromhex, parts))
    chunks = [struct.pack("<2f", 1, 2), struct.pack("<2f", 3, 0)]
    index = struct.pack("<4Q", 0, 12, 12, 12)
    assert shard == b"".join(p + struct.pack("<I", crc32c(p)) for p in (*chunks, index))
    assert f"has {len(shard)} bytes" in EXAMPLE
    for chunk in chunks:
        assert f"`{xxh3_128_hexdigest(chunk)}`" in EXAMPLE
    head = b'{"dtype":"float32","shape":[3],"chunk":[2]}\n'
    assert f"`{head.decode().strip()}`" in EXAMPLE
    assert f"`xxh3:{xxh3_128_hexdigest(head + b''.join(map(xxh3_128_digest, chunks)))}`" in EXAMPLE


def test_the_packed_files_of_the_example() -> None:
    a = np.array([1, 2, 3], "<f4")
    mesh, name = RankMesh((2,), 0, (1,)), "data/0123456789abcdef0123"
    described = Described(
        [DescribedRow(0, Distribution(mesh, (Cut(0, 0),)), 0, Tiling.of((3,), 4).tile)],
        [TensorInfo("ü", "weight", "float32", (3,))],
        name,
    )
    shown = re.findall(r"^tile +([0-9a-f ]+)\nits CRC +([0-9a-f ]+)$", PACKED, re.MULTILINE)
    for rank, box, offset in described.stored(0):
        tile, crc = map(bytes.fromhex, shown[rank])
        assert (tile, offset) == (a[box.start[0] : box.stop[0]].tobytes(), 0)
        assert crc32c(
            f"{name[5:]}/rank-{rank:05}.bin".encode() + bytes(8) + tile
        ) == int.from_bytes(crc, "little")
        size = f"rank-{rank:05}.bin` has 12" if rank == 0 else "and `rank-00001.bin` 8"
        assert size in PACKED
        assert len(tile + crc) == (12, 8)[rank]
    (text,) = re.findall(r"^described +(\{.*\})$", PACKED, re.MULTILINE)
    assert DescribedDoc.model_validate_json(text) == describe(described)
    assert f"the {len(name[5:]) + 15} bytes `{name[5:]}/rank-00000.bin`" in PACKED


def test_the_encoded_file_of_the_example() -> None:
    shown = TEXT[
        TEXT.index("*The bytes of an encoded file.*") : TEXT.index("### Described tensors")
    ]
    parts = re.findall(
        r"^(?:tile|its CRC|entry|trailer) +((?:[0-9a-f]{2}[ \n]+)+)", shown, re.MULTILINE
    )
    store, file = MemoryStore("example"), "data/0123456789abcdef0123/rank-00000.bin"
    with store.create(file) as out:
        out.write(b"".join(map(bytes.fromhex, parts)))
    a = np.array([1, 2, 3], "<f4")
    image = read_index(store, file, Tiles())
    assert image.fingerprint(0) == fingerprint_of(a, (3,), Box((0,), (3,)))
    plain = EncodedStore(store, lambda *_: image).read(ENCODED + file)
    assert plain[:-4] == a.tobytes()
    place = b"0123456789abcdef0123/rank-00000.bin" + bytes(8)
    assert plain[-4:] == crc32c(place + plain[:-4]).to_bytes(4, "little")


def test_the_column_of_the_example() -> None:
    values = [64, 320, 320, 256]
    differences = [b - a for a, b in zip([0, *values], values, strict=False)]
    assert f"differences {' '.join(map(str, differences))}\n" in COLUMN
    words = [struct.pack("<Q", d % 2**64) for d in differences]
    assert block("by bytes") == bytes(w[k] for k in range(8) for w in words)
    assert zlib.decompress(block("as zlib")) == block("by bytes")


def test_the_document_of_the_example() -> None:
    (shown,) = re.findall(r"```json\n(.*?)\n```", TEXT, re.DOTALL)
    assert shown.encode() == array_json(Key("ü", "weight"), "float32", Grid((3,), (2,), (4,), 4))


def test_the_checksum_that_is_named() -> None:
    assert f"`0x{crc32c(b'123456789'):08X}`" in TEXT


def test_the_ending_has_as_many_bytes_as_it_says() -> None:
    (shown,) = re.findall(r"```\n(,⏎.*?)\n```", TEXT)
    assert len(shown.replace("⏎", "\n").replace("…", "0" * 64).encode()) == 88


def test_dtypes() -> None:
    table = re.findall(r"^\| (\d+) \| (`.*`.*?) \|(.*?) \|(.*) \|$", TEXT, re.MULTILINE)
    core, extensions, others = (
        {
            name: int(size)
            for size, *kinds in table
            for name in re.findall("`([a-z0-9_]+)`", kinds[column])
        }
        for column in (0, 1, 2)
    )
    zarr = core | extensions
    assert zarr == ZARR_DTYPES
    assert extensions == ZARR_EXTENSIONS
    assert zarr | others == ITEMSIZE
    assert not zarr.keys() & others.keys()


def rows() -> dict[str, tuple[str, str]]:
    """Of the tables with the columns `required` and `null` what each member has."""
    text = TEXT[TEXT.index("## 6. Manifest") :] + PROVENANCE
    found = re.findall(r"^\| (`[^|]+`) \| (yes|no) \| (yes|no) \|", text, re.MULTILINE)
    return {
        name: (required, null)
        for names, required, null in found
        for name in re.findall("`([a-z_]+)`", names)
    }


def test_members_of_the_manifest() -> None:
    said, schema = rows(), Manifest.model_json_schema()
    assert set(said) == set(schema["properties"])
    for name, (required, null) in said.items():
        kinds = [k.get("type") for k in schema["properties"][name].get("anyOf", ())]
        if name not in (
            "format",
            "version",
            "digest",
        ):  # which are asked for before the document is parsed
            assert (required == "yes") == (name in schema["required"]), name
            assert (null == "yes") == ("null" in kinds), name


def test_members_of_the_table() -> None:
    section = TEXT[TEXT.index("### Tensors") : TEXT.index("### Objects")]
    lines = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    columns, kind = (
        {name for line in lines if len(line) == cells for name in re.findall("`([a-z]+)`", line[0])}
        for cells in (3, 2)
    )
    assert columns == set(TensorTable.model_fields)
    assert kind == set(KindDoc.model_fields)


def test_the_table_of_the_example() -> None:
    (shown,) = re.findall(r'```\n "tensors": (\{.*?\n \}),\n "digest"', EXAMPLE, re.DOTALL)
    digest, path = (
        "xxh3:23c183416aa2335ed6cbc2dd2f80cb1a",
        "data/0123456789abcdef0123/weight/%C3%BC",
    )
    doc = TensorDoc("ü", "weight", "float32", (3,), (2,), (4,), digest, path, (("model", "ü"),))
    assert TensorTable.of([doc]).as_json().decode() == shown
    assert f"`{path}`" in EXAMPLE


@pytest.mark.parametrize(
    ("document", "section", "until"),
    [
        (AttemptDoc, "## 2. Attempts", "## 3. Committing"),
        (SourceFileDoc, "*Virtual checkpoints.*", "*An example.*"),
    ],
)
def test_members_of_other_documents(document: type[BaseModel], section: str, until: str) -> None:
    both = TEXT + PROTOCOL
    text = both[both.index(section) :]
    table = re.findall(r"^\| (`[^|]+`) \|", text[: text.index(until)], re.MULTILINE)
    said = {name for names in table for name in re.findall("`([a-z_]+)`", names)}
    assert said == set(document.model_fields)


def test_kinds_of_lineage() -> None:
    (said,) = re.findall(r"`kind` \((.*?)\)", PROVENANCE)
    assert tuple(re.findall("`([a-z]+)`", said)) == LINEAGE_KINDS


def test_limits() -> None:
    table = TEXT[TEXT.index("### Limits") : TEXT.index("### Errors")]
    for what, limit in {
        "nesting": f"{MAX_DEPTH} levels",
        "a name": f"{MAX_TEXT:,} characters",
        "integers with": f"2^{MAX_INTEGER.bit_length() - 1}",
        "integers in": f"{MAX_BITS:,} bits",
        "dimensions": f"{MAX_DIMS}, {MAX_ARRAY_DIMS}",
        "an edge": f"2^{MAX_EDGE.bit_length() - 1}",
        "shards": f"{MAX_SHARDS:,}",
        "ranks": f"2^{MAX_RANKS.bit_length() - 1}",
        "bases": f"{MAX_BASES:,}; {MAX_CHAIN}",
        "tiles": f"2^{MAX_TILES.bit_length() - 1}",
        "bytes of a tile": f"2^{MAX_TILE_BYTES.bit_length() - 1}",
        "offsets": f"2^{MAX_SPAN.bit_length() - 1}",
        "`commits`": f"2^{MOST_COMMITS.bit_length()} ",
    }.items():
        (row,) = re.findall(rf"^\| {what}.*$", table, re.MULTILINE)
        assert limit in row


def test_features() -> None:
    table = TEXT[TEXT.index("### Profiles") : TEXT.index("### Limits")]
    assert {*re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE)} == FEATURES
    assert f"This text has the number {FORMAT_MINOR}" in TEXT


def chunk_of(shape: Sequence[int], itemsize: int, target: int, most: int = 16) -> list[int]:
    """Section 4, sentence by sentence."""
    e = [max(1, n) for n in shape]
    total = math.prod(e) * itemsize
    if len(e) >= 2 and total > target:
        floor = max(itemsize, target // 16)
        row, c, g = min(256, target // 4096), [math.gcd(n, most) for n in e], list[int]()
        for d, n in enumerate(e):
            index = math.prod(e[d + 1 :]) * itemsize
            while c[d] > 1 and n // c[d] * index < row:
                c[d] //= 2
            g.append(n if n <= most and index >= row else c[d])
        if e[-1] <= most or total // math.prod(g) < floor:
            g = c
        while total // math.prod(g) < floor and any(x > 1 for x in g):
            largest = [d for d in range(len(g)) if g[d] == max(g)]
            g[largest[0] if max(g) == 16 else largest[-1]] //= 2
        e = [n // x for n, x in zip(e, g, strict=True)]
    for d in range(len(e)):
        inner = math.prod(e[d + 1 :]) * itemsize
        if e[d] * inner <= target:
            break
        f = math.ceil(e[d] / max(1, target // inner))
        even = [k for k in range(f, 4 * f + 1) if e[d] % k == 0]
        e[d] = e[d] // even[0] if even else math.ceil(e[d] / f)
    return e


def shard_of(shape: Sequence[int], chunk: Sequence[int], itemsize: int, limit: int) -> list[int]:
    n, b, t = (
        [math.ceil(max(1, s) / c) for s, c in zip(shape, chunk, strict=True)],
        math.prod(chunk) * itemsize,
        [1] * len(chunk),
    )
    for d in reversed(range(len(chunk))):
        parts = math.ceil(n[d] / max(1, limit // b))
        t[d] = math.ceil(n[d] / parts)
        b *= t[d]
        if parts > 1:
            break
    return [c * k for c, k in zip(chunk, t, strict=True)]


def test_grids_as_the_text_has_them() -> None:
    for v in VECTORS["grids"]:
        size = ITEMSIZE[v["dtype"]]
        assert chunk_of(v["shape"], size, v["target"]) == v["chunk"], v
        assert shard_of(v["shape"], v["chunk"], size, v["limit"]) == v["shard"], v
        if "tile" in v:
            assert chunk_of(v["shape"], size, 1 << 20) == v["tile"], v


def folders_of(names: Sequence[str]) -> list[str]:
    """Section 5, *Folders*."""
    plain = [quote(n, safe="").replace("~", "%7E") for n in names]
    plain = ["%2E" + p[1:] if p.startswith(".") else p for p in plain]
    out = []
    for name, p in zip(names, plain, strict=True):
        clash = [q.lower() for q in plain].count(p.lower()) > 1
        if (
            p
            and len(p) <= 200
            and p.lower() not in ("c", "zarr.json")
            and not p.startswith("__")
            and not clash
        ):
            out.append(p)
            continue
        head = p[:183].rstrip("%")
        head = "_%5F" + head[2:] if head.startswith("__") else head
        out.append(f"{head}~{hashlib.sha256(name.encode()).hexdigest()[:16]}")
    return out


def test_folders_as_the_text_has_them() -> None:
    for v in VECTORS["folders"]:
        assert folders_of(v["names"]) == v["folders"]
