"""Universal checkpoints: manifests, objects and sidecars that were made to do harm, under the right digests."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import manifest_file
from tests.fuzz.fuzzing import Files, changed, files_below, harmless, mutated, open_files, stored
from tests.golden.test_golden import HERE
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import IntegrityError, UcformatError
from ucformat.format.digest import bytes_digest, with_own_digest
from ucformat.format.mounted import is_below
from ucformat.format.sidecar import Sidecar, decode
from ucformat.jobs.verify import verify
from ucformat.schema.tensors import TensorTable

ARRAYS, PACKED = (files_below(HERE / "v1" / name) for name in ("arrays", "packed"))
SIDECAR = next(data for key, data in PACKED.items() if key.endswith("extents.safetensors"))
TENSORS = TensorTable.model_validate(json.loads(PACKED["manifest.json"])["tensors"])


def with_manifest(files: Files, document: Any) -> Files:
    with suppress(ValueError):  # a number of thousands of digits
        return {**files, "manifest.json": manifest_file(document)}
    return files


def check(files: Files) -> bool:
    return harmless(lambda: open_files(files), sum(map(len, files.values())))


@pytest.mark.matrix
@given(
    st.sampled_from([ARRAYS, PACKED]).flatmap(
        lambda f: st.tuples(st.just(f), changed(json.loads(f["manifest.json"])))
    )
)
@settings(max_examples=60)
def test_documents_near_a_manifest(case: tuple[Files, Any]) -> None:
    check(with_manifest(*case))


@pytest.mark.matrix
@given(mutated([ARRAYS["manifest.json"], PACKED["manifest.json"]]))
@settings(max_examples=40)
def test_mutated_manifests(data: bytes) -> None:
    check({**PACKED, "manifest.json": with_own_digest(data)})


def use(data: bytes) -> None:
    found: Sidecar = decode(data, TENSORS, "extents")
    for number in range(len(TENSORS)):
        found.extents(number)


def rebuilt(header: Any, columns: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + columns


_SIZE = 8 + int.from_bytes(SIDECAR[:8], "little")
HEADER = json.loads(SIDECAR[8:_SIZE])


@pytest.mark.matrix
@given(mutated([SIDECAR]))
@settings(max_examples=120)
def test_mutated_sidecars(data: bytes) -> None:
    harmless(lambda: use(data), len(data))


@pytest.mark.matrix
@given(changed(HEADER))
@settings(max_examples=120)
def test_sidecars_with_other_headers(header: Any) -> None:
    with suppress(ValueError):
        data = rebuilt(header, SIDECAR[_SIZE:])
        harmless(lambda: use(data), len(data))


@pytest.mark.matrix
@given(st.sampled_from([n for n in HEADER if n != "__metadata__"]), st.data())
@settings(max_examples=60)
def test_columns_of_other_numbers(name: str, draw: st.DataObject) -> None:
    """Each column may hold anything, rightly compressed."""
    columns, header, at = b"", dict(HEADER), 0
    for key, entry in HEADER.items():
        if key == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = SIDECAR[_SIZE + begin : _SIZE + end]
        if key == name:
            data = zlib.compress(draw.draw(mutated([zlib.decompress(data)])))
        header[key] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        columns, at = columns + data, at + len(data)
    whole = rebuilt(header, columns)
    harmless(lambda: use(whole), len(whole))


@pytest.mark.parametrize("files", ["[" * 100_000, "{", "5", "NaN", '["' + "x" * 100_000 + '", 5]'])
def test_files_that_are_no_list_of_names(files: str) -> None:
    header = {**HEADER, "__metadata__": {**HEADER["__metadata__"], "files": files}}
    with pytest.raises(UcformatError) as error:
        use(rebuilt(header, SIDECAR[_SIZE:]))
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize(
    "objects", [b"", b"[" * 100_000, b"[]", b"5", b"\xff", b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_objects_that_are_none(objects: bytes) -> None:
    manifest = json.loads(ARRAYS["manifest.json"])
    manifest["objects"] = {
        **manifest["objects"],
        "digest": bytes_digest(objects),
        "nbytes": len(objects),
    }
    files = with_manifest({**ARRAYS, manifest["objects"]["path"]: objects}, manifest)
    with pytest.raises(IntegrityError, match=r"JSON|objects"):
        open_checkpoint(stored(files)).objects  # noqa: B018


def test_a_shape_of_a_great_many_dims() -> None:
    manifest = json.loads(PACKED["manifest.json"])
    manifest["tensors"]["kinds"][0]["shape"] = [9] * 300_000
    with pytest.raises(IntegrityError, match="invalid shape"):
        open_files(with_manifest(PACKED, manifest))


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/a/../c",
        "https://h/a/%2e%2e/c",
        "a\0b",
        "",
        "s3://b/ab",
        "s3://b",
        "/",
        "file:///b/a",
    ],
)
def test_what_does_not_lie_below_a_root(url: str) -> None:
    assert not is_below(url, ["s3://b/a", "https://h/a"])
    assert is_below("s3://b/a/c", ["s3://b/a"])


@pytest.mark.parametrize(
    "file", ["roots/" + "9" * 5000 + "/x", "roots/-1/x", "roots//x", "roots/1", "roots/²/x"]
)
def test_files_below_no_root(file: str) -> None:
    manifest = json.loads(PACKED["manifest.json"])
    header = {**HEADER, "__metadata__": {**HEADER["__metadata__"]}}
    names = json.loads(header["__metadata__"]["files"])
    header["__metadata__"]["files"] = json.dumps([file] * len(names))
    data = rebuilt(header, SIDECAR[_SIZE:])
    doc = manifest["sidecar"]
    manifest["sidecar"] = {
        **doc,
        "digest": bytes_digest(data),
        "nbytes": len(data),
        "roots": ["/nowhere"],
        "sources": [{"path": file, "nbytes": 1}],
    }
    store = stored(with_manifest({**PACKED, doc["path"]: data}, manifest))
    with pytest.raises(UcformatError):
        open_checkpoint(store)
    assert not verify(store)
