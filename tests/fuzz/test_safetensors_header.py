"""safetensors files and the indexes beside them: mutated, and headers that are nearly right."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
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
from tests.sources.suite import DATA
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import IntegrityError, UcformatError

CONSTANT = 48 << 20
INDEX = "model.safetensors.index.json"


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt", "c": "a"},
    "a": entry("F32", [2, 3], 0, 24),
    "b": entry("BF16", [4], 24, 32),
    "e": entry("F64", [0, 5], 32, 32),
    "s": entry("U8", [], 32, 33),
}
PLAIN = file_of(HEADER, bytes(range(33)))
SHARDS: Files = {
    "model-00001-of-00002.safetensors": file_of({"a": entry("F32", [2], 0, 8)}, bytes(8)),
    "model-00002-of-00002.safetensors": file_of(
        {"b": entry("I8", [3], 0, 3), "c": entry("I8", [1], 3, 4)}, bytes(4)
    ),
}
MAP: dict[str, Any] = {
    "metadata": {"total_size": 12},
    "weight_map": {
        n: f"model-0000{i}-of-00002.safetensors" for n, i in (("a", 1), ("b", 2), ("c", 2))
    },
}
CUT = files_below(DATA / "dcp/sgd-hf/hf")


def check(files: Files) -> bool:
    return harmless(lambda: open_files(files), sum(map(len, files.values())), constant=CONSTANT)


def test_what_is_changed_below_is_read() -> None:
    assert check({"model.safetensors": PLAIN})
    assert check({**SHARDS, INDEX: json.dumps(MAP).encode()})
    assert check(CUT)


@pytest.mark.matrix
@given(mutated([PLAIN, *SHARDS.values()]))
@settings(max_examples=200)
def test_mutated_files(data: bytes) -> None:
    check({"model.safetensors": data})


_OFFSETS = (
    *HOSTILE,
    [0, 24],
    [-1, 23],
    [24, 0],
    [8, 32],
    [0, 2**63],
    [2**64, 2**64 + 24],
    [24, 32],
    [0.0, 24.0],
)
_SHAPES = (
    *_OFFSETS,
    [2**31, 2**32],
    [2**62, 4],
    [0, 2**63 - 1],
    [1] * 64,
    [1] * 65,
    [-2, -3],
    [0, -1],
    [True, 6],
)
_DTYPES = ("F16", "I64", "F8_E8M0", "F4", "F6_E2M3", "F9", "f32", "BOOL", "C64")


@pytest.mark.matrix
@given(changed(HEADER, values=(*_SHAPES, *_DTYPES)), st.sampled_from((0, 33, 64)))
@settings(max_examples=200)
def test_headers_near_a_valid_one(header: Any, nbytes: int) -> None:
    with suppress(ValueError):
        check({"model.safetensors": file_of(header, bytes(nbytes))})


@pytest.mark.matrix
@given(mutated([json.dumps(HEADER).encode()]))
@settings(max_examples=120)
def test_headers_of_mutated_text(text: bytes) -> None:
    check({"model.safetensors": file_of(text, bytes(33))})


_FILES = (
    *(
        "../x.safetensors",
        "/etc/passwd",
        "a/../../b",
        "",
        ".",
        "..",
        "model-00003-of-00002.safetensors",
        INDEX,
    ),
    *(
        "./model-00001-of-00002.safetensors",
        "x/",
        "~/x",
        "file:///etc/passwd",
        "a\0b",
        "C:\\x",
        "//",
        "\ud800",
    ),
)


@pytest.mark.matrix
@given(changed(MAP, values=(*HOSTILE, *_FILES)))
@settings(max_examples=150)
def test_indexes_near_a_valid_one(document: Any) -> None:
    with suppress(ValueError):
        check({**SHARDS, INDEX: json.dumps(document).encode()})


@pytest.mark.matrix
@given(mutated([json.dumps(MAP).encode()]))
@settings(max_examples=60)
def test_mutated_indexes(text: bytes) -> None:
    check({**SHARDS, INDEX: text})


@pytest.mark.matrix
@given(st.sampled_from(sorted(CUT)), st.data())
@settings(max_examples=60)
def test_mutated_files_of_the_writer_that_cuts(name: str, draw: st.DataObject) -> None:
    check({**CUT, name: draw.draw(mutated([CUT[name]]))})


_LENGTH = int.from_bytes(next(iter(CUT.values()))[:8], "little")


@pytest.mark.matrix
@given(st.sampled_from(sorted(CUT)), st.data())
@settings(max_examples=60)
def test_offsets_of_pieces_near_valid_ones(name: str, draw: st.DataObject) -> None:
    length = int.from_bytes(CUT[name][:8], "little")
    header = json.loads(CUT[name][8 : 8 + length])
    told = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    with suppress(ValueError):
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(draw.draw(changed(told)))
        check({**CUT, name: file_of(header, CUT[name][8 + length :])})


DAMAGED: dict[str, bytes] = {
    "nothing": b"",
    "a length alone": bytes(8),
    "a length of 2**63": file_of(HEADER, length=1 << 63),
    "a length of 2**64 - 1": file_of(HEADER, length=(1 << 64) - 1),
    "lists in lists": file_of(b'{"a":' + b"[" * 200_000),
    "objects in objects": file_of(b'{"a":' * 200_000),
    "a shape of lists": file_of({"a": entry("F32", nested(500), 0, 0)}),
    "a key twice": file_of(b'{"a":' + json.dumps(HEADER["a"]).encode() + b',"a":' + json.dumps(HEADER["a"]).encode()
                           + b"}", bytes(24)),
    "a key twice, deep": file_of(b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "metadata twice": file_of(b'{"__metadata__":{},"__metadata__":{}}'),
    "a number of many digits": file_of(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}'),
    "NaN": file_of(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}'),
    "overlapping tensors": file_of({"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 4, 12)}, bytes(12)),
    "the same bytes twice": file_of({"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 0, 8)}, bytes(8)),
    "a hole": file_of({"a": entry("U8", [4], 4, 8)}, bytes(8)),
    "a size that overflows": file_of({"a": entry("F32", [1 << 32, 1 << 32], 0, 0)}),
    "a huge shape": file_of({"a": entry("F32", [1 << 40], 0, 1 << 42)}),
    "backwards": file_of({"a": entry("U8", [4], 8, 4)}, bytes(8)),
    "many dims": file_of({"a": entry("U8", [1] * 300_000, 0, 1)}, b"x"),
    "not text": file_of(b'{"\xff":{}}'),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_files_that_are_damaged_are_refused(what: str) -> None:
    def read() -> None:
        with pytest.raises(IntegrityError) as error:
            open_checkpoint(stored({"model.safetensors": DAMAGED[what]}))
        assert len(str(error.value)) < 2000

    assert harmless(read, len(DAMAGED[what]), constant=CONSTANT)


@pytest.mark.parametrize("name", _FILES)
def test_an_index_that_names_no_file_of_the_folder(name: str) -> None:
    document = {**MAP, "weight_map": {**MAP["weight_map"], "a": name}}
    with pytest.raises(UcformatError) as error:
        open_checkpoint(stored({**SHARDS, INDEX: json.dumps(document).encode()}))
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b"{", b"5", b"NaN", b"\xff", b'{"weight_map":' * 50_000, b"9" * 5000]
)
def test_an_index_that_is_none(text: bytes) -> None:
    with pytest.raises(IntegrityError) as error:
        open_checkpoint(stored({**SHARDS, INDEX: text}))
    assert len(str(error.value)) < 2000
