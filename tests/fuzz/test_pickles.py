"""Pickles: opcode by opcode, mutated, and made to cost more than they weigh; and what JSON is made of their values."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.fuzzing import bounded, harmless, mutated
from tests.sources.suite import DATA
from tests.sources.torch_files import (
    call,
    dictionary,
    glob,
    integer,
    pickled,
    storage,
    tensor,
    text,
    tuple_of,
)
from ucformat.errors import IntegrityError, UcformatError, UnsafeError, UnsupportedError
from ucformat.reading.stand_ins import Inert, StoredTensor
from ucformat.reading.values import to_json
from ucformat.sources.pickle.unpickler import unpickle

CONSTANT = 48 << 20


def load(data: bytes) -> Any:
    return unpickle(data, file="x.pt", storage_nbytes=lambda _: 16)


def read(data: bytes) -> None:
    """Unpickle, and make JSON of the value, as every source does of what is no tensor."""
    to_json(load(data), read=lambda t: bytes(min(t.nbytes, 1 << 20)))


def check(data: bytes) -> bool:
    return harmless(lambda: read(data), len(data), constant=CONSTANT)


_ARRAY = pickle.dumps(
    [{"a": (1, 2.5, b"x", "é", None, True), 3: {4}}, frozenset({1}), 1 << 70, complex(1, 2)], 4
)
CORPUS = (
    pickled(
        tuple_of(
            tensor(), call(glob("deepspeed.x", "T"), text("a")), integer(5), dictionary(a=tensor())
        )
    ),
    _ARRAY,
    (DATA / "dcp/sgd-hf/ckpt/.metadata").read_bytes()[:3000],
    pickle.dumps(list(range(300)), 2),
)

_number = st.integers(0, 255)
_texts = st.sampled_from(
    ("", "a", "storage", "torch", "os.system", "0", "cpu", "deepspeed.x", "builtins")
)
_globals = st.sampled_from((
    *(("builtins", n) for n in ("set", "dict", "list", "tuple", "int", "str", "bytearray", "slice", "getattr")),
    *(("collections", n) for n in ("OrderedDict", "Counter", "defaultdict", "deque")),
    *(("torch._utils", f"_rebuild_{n}") for n in ("tensor_v2", "tensor_v3", "parameter")),
    *(("datetime", n) for n in ("date", "datetime", "timedelta", "timezone")),
    *(("numpy.core.multiarray", "_reconstruct"), ("numpy.core.multiarray", "scalar"), ("numpy", "dtype")),
    *(("_codecs", "encode"), ("pathlib", "PosixPath"), ("torch", "Size"), ("torch", "float32"), ("deepspeed.x", "C")),
    *(("torch", "FloatStorage"), ("torch._tensor", "_rebuild_from_type_v2"), ("os", "system")),
))  # fmt: skip
_opcode = (
    st.sampled_from(
        [bytes([c]) for c in b"(012N\x88\x89]})\x8fldt\x91\x85\x86\x87aesu\x90\x93R\x81\x92bQ\x94."]
    )
    | st.builds(lambda n: b"K" + bytes([n]), _number)
    | st.builds(lambda n: b"h" + bytes([n]), st.integers(0, 9))
    | st.builds(lambda n: b"q" + bytes([n]), st.integers(0, 9))
    | st.builds(text, _texts)
    | st.builds(integer, st.integers(-(1 << 70), 1 << 70))
    | st.builds(lambda g: glob(*g), _globals)
    | st.builds(
        lambda g, a: call(glob(*g), *a),
        _globals,
        st.lists(st.sampled_from([b"N", b"]", b"}", b"h\x01"])),
    )
    | st.sampled_from(
        [
            tensor(),
            storage(),
            b"\x8b" + struct.pack("<i", 1 << 30),
            b"X\xff\xff\xff\x7f",
            b"G" + b"\x7f" * 8,
        ]
    )
)
opcode_sequences = st.lists(_opcode, max_size=40).map(b"".join)


@pytest.mark.matrix
@given(mutated(CORPUS))
@settings(max_examples=120)
def test_mutated_pickles(data: bytes) -> None:
    check(data)


@pytest.mark.matrix
@given(opcode_sequences)
@settings(max_examples=150)
def test_sequences_of_opcodes(body: bytes) -> None:
    check(b"\x80\x02N(" + body + b".")


def shared(step: bytes, times: int, first: bytes = b"]") -> bytes:
    """Begin with one value; each step finds the last one on the stack and under memo 0."""
    return pickled(first + b"q\x00" + (step + b"q\x00") * times)


MEGABYTE = text("x" * (1 << 20)) + b"q\x01"
MANY = b"](" + b"N" * (1 << 17) + b"eq\x01"
HOSTILE = {
    "text of what is shared": shared(b"h\x00\x86", 60) [:-1] + glob("builtins", "str") + b"h\x00\x85R.",
    "a path twice as long each time": pickled(
        text("a") + b"q\x00" + (glob("pathlib", "PosixPath") + b"h\x00h\x00\x86Rq\x00") * 60
    ),
    "text that is encoded again and again": pickled(
        MEGABYTE + b"0](" + (glob("_codecs", "encode") + b"h\x01\x85R") * 5000 + b"e"
    ),
    "a dictionary that is copied": pickled(
        b"}(" + b"".join(integer(i) + b"N" for i in range(20000)) + b"uq\x010]("
        + (glob("collections", "OrderedDict") + b"h\x01\x85R") * 5000 + b"e"
    ),
    "a list that is copied": pickled(MANY + b"0](" + (glob("builtins", "list") + b"h\x01\x85R") * 5000 + b"e"),
    "a size that is copied": pickled(
        b"](" + b"K\x01" * (1 << 17) + b"eq\x010](" + (glob("torch", "Size") + b"h\x01\x85R") * 5000 + b"e"
    ),
    "bytes that are copied": pickled(
        b"\x96" + struct.pack("<Q", 1 << 20) + bytes(1 << 20) + b"q\x010]("
        + (glob("builtins", "bytes") + b"h\x01\x85R") * 5000 + b"e"
    ),
    "a long name of a class": pickled(
        text("torch.nn." + "x" * (1 << 20)) + b"q\x01" + text("y") + b"q\x0200](" + b"h\x01h\x02\x93" * 100_000 + b"e"
    ),
    "a long tuple as a key": pickled(b"(" + b"N" * 100_000 + b"tq\x010}(" + b"h\x01N" * 100_000 + b"u"),
    "a long number as a key": pickled(
        b"\x8b" + struct.pack("<i", 1 << 19) + b"\x01" * (1 << 19) + b"q\x010}(" + b"h\x01N" * 100_000 + b"u"
    ),
    "numbers with one hash": pickled(
        b"}(" + b"".join(integer(k * ((1 << 61) - 1)) + b"N" for k in range(20_000)) + b"u"
    ),
    "an outside object that is shared": shared(b"h\x00\x86", 60)[:-1] + b"Q.",
    "an object in itself": pickled(
        glob("deepspeed.x", "C") + b")\x81q\x00" + b"}" + text("a") + b"h\x00h\x00\x86sb" + b"Q"
    ),
    "objects that are shared": shared(glob("deepspeed.x", "C") + b"h\x00h\x00\x86\x81", 60)[:-1] + b"Q.",
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_would_cost_more_than_it_weighs_is_refused(what: str) -> None:
    data = HOSTILE[what]
    with (
        bounded(len(data), constant=CONSTANT),
        pytest.raises((UnsafeError, UnsupportedError, IntegrityError)) as error,
    ):
        load(data)
    assert len(str(error.value)) < 2000


_LEAVES = {
    "lists": b"]",
    "bytes": b"\x96" + struct.pack("<Q", 1 << 16) + bytes(1 << 16),
    "sets": b"\x8f(" + b"".join(map(integer, range(50))) + b"\x90",
    "objects": glob("deepspeed.x", "C") + b")\x81",
}


@pytest.mark.parametrize("leaf", _LEAVES)
def test_values_that_are_shared_are_not_written_out(leaf: str) -> None:
    data = shared(b"h\x00\x86", 60, _LEAVES[leaf])
    value = load(data)
    with bounded(len(data), constant=256 << 20, seconds=6), pytest.raises(UnsupportedError):
        to_json(value)


def test_a_tensor_that_is_shared_is_not_written_out() -> None:
    value: Any = [StoredTensor("0", "float32", (1 << 14,), (1,), 0, 1 << 14)] * 1000
    with pytest.raises(UnsupportedError, match="too large"):
        to_json([value] * 100, read=lambda t: bytes(t.nbytes // 1000))


def test_a_number_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(UnsupportedError):
        to_json({"a": 1 << 20_000})


def test_what_an_error_shows_of_an_object_is_short() -> None:
    assert len(repr(Inert("x.C", (list(range(10_000)),), {"a": [1] * 10_000}))) < 100


@pytest.mark.parametrize("shape", [(-1,), (1 << 70,), (3,), (2, 2, 2), 5, (1.5,)])
def test_a_numpy_array_that_cannot_be(shape: Any) -> None:
    made = (
        call(glob("numpy.core.multiarray", "_reconstruct"))
        + tuple_of(integer(1), pickle.dumps(shape, 2)[2:-1], call(glob("numpy", "dtype"), text("f4")), b"\x89",
                   b"C\x10" + bytes(16))
        + b"b"
    )  # fmt: skip
    with pytest.raises(UcformatError):
        to_json(load(pickled(made)))
