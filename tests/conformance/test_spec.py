"""What docs/spec.md says in numbers, tables and rules is so; rules are followed here sentence by sentence."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from crc32c import crc32c
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from ucformat.format.arrays import array_json
from ucformat.format.chunking import Grid
from ucformat.geometry.tensor import Key
from ucformat.schema import ITEMSIZE, ZARR_DTYPES
from ucformat.schema.manifest import AttemptDoc, LineageDoc, Manifest, SourceFileDoc
from ucformat.schema.tensors import KindDoc, TensorDoc, TensorTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

TEXT = (Path(__file__).parents[2] / "docs" / "spec.md").read_text()
EXAMPLE = TEXT[TEXT.index("## 11. An example in bytes") : TEXT.index("## 12.")]
VECTORS = json.loads((Path(__file__).parent / "cases" / "vectors.json").read_text())


def block(label: str) -> bytes:
    """The bytes that the example gives under a label, on one line or several."""
    found = re.search(rf"^{label} +((?:[0-9a-f]{{2}}[ \n]+)+)", EXAMPLE, re.MULTILINE)
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


def test_the_placed_checksum_of_the_example() -> None:
    name = "0123456789abcdef0123/rank0.bin"
    placed = crc32c(name.encode() + struct.pack("<Q", 64) + struct.pack("<2f", 1, 2))
    assert f"checksum `{placed.to_bytes(4, 'little').hex(' ')}`" in EXAMPLE
    assert f"the {len(name)} bytes `{name}`" in EXAMPLE


def test_the_column_of_the_example() -> None:
    values = [64, 320, 320, 256]
    differences = [b - a for a, b in zip([0, *values], values, strict=False)]
    assert f"differences {' '.join(map(str, differences))}\n" in EXAMPLE
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
    table = re.findall(r"^\| (\d+) \| (`.*`.*) \|(.*) \|$", TEXT, re.MULTILINE)
    zarr, others = (
        {
            name: int(size)
            for size, *kinds in table
            for name in re.findall("`([a-z0-9_]+)`", kinds[column])
        }
        for column in (0, 1)
    )
    assert zarr == ZARR_DTYPES
    assert zarr | others == ITEMSIZE
    assert not zarr.keys() & others.keys()


def rows(section: str) -> dict[str, tuple[str, str]]:
    """Of a table with the columns `required` and `null` what each member has."""
    text = TEXT[TEXT.index(section) :]
    found = re.findall(r"^\| (`[^|]+`) \| (yes|no) \| (yes|no) \|", text, re.MULTILINE)
    return {
        name: (required, null)
        for names, required, null in found
        for name in re.findall("`([a-z_]+)`", names)
    }


def test_members_of_the_manifest() -> None:
    said, schema = rows("## 6. Manifest"), Manifest.model_json_schema()
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
        (AttemptDoc, "### Attempts", "### Committing"),
        (SourceFileDoc, "*Virtual checkpoints.*", "## 8."),
    ],
)
def test_members_of_other_documents(document: type[BaseModel], section: str, until: str) -> None:
    text = TEXT[TEXT.index(section) :]
    table = re.findall(r"^\| (`[^|]+`) \|", text[: text.index(until)], re.MULTILINE)
    said = {name for names in table for name in re.findall("`([a-z_]+)`", names)}
    assert said == set(document.model_fields)


def test_kinds_of_lineage() -> None:
    (said,) = re.findall(r"`kind` \((.*?)\)", TEXT)
    assert re.findall("`([a-z]+)`", said) == list(
        LineageDoc.model_fields["kind"].annotation.__args__  # type: ignore[union-attr]
    )


def chunk_of(shape: Sequence[int], itemsize: int, target: int, most: int) -> list[int]:
    """Section 3, sentence by sentence."""
    e = [max(1, n) for n in shape]
    total = math.prod(e) * itemsize
    if len(e) >= 2 and total > target:
        floor = max(itemsize, target // 16)
        g = [n if n <= most else math.gcd(n, most) for n in e]
        if e[-1] <= most or total // math.prod(g) < floor:
            g = [math.gcd(n, most) for n in e]
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


@pytest.mark.parametrize(
    "v", VECTORS["grids"], ids=lambda v: f"{v['dtype']}-{v['shape']}-{v['target']}"
)
def test_grids_as_the_text_has_them(v: dict[str, Any]) -> None:
    size = ITEMSIZE[v["dtype"]]
    assert chunk_of(v["shape"], size, v["target"], 16) == v["chunk"]
    assert shard_of(v["shape"], v["chunk"], size, v["limit"]) == v["shard"]
    if "tile" in v:
        assert chunk_of(v["shape"], size, 1 << 20, 8) == v["tile"]


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
