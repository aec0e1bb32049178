"""The two interpreters of pickles, in C and in Python: of any bytes both make one value, or raise one error."""

from __future__ import annotations

import gc
import pickle
import pickletools
import struct
import sys
import tracemalloc
from collections import Counter
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.fuzzing import mutated
from tests.fuzz.test_pickles import CORPUS, HOSTILE, opcode_sequences
from tests.sources.interpreters import INTERPRETERS, NATIVE, agree, compiled, needs_native
from tests.sources.suite import DATA
from tests.sources.torch_files import glob, integer, pickled, text
from ucformat.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Callable

_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 80), 1 << 80)
    | st.integers(-(1 << 2100), 1 << 2100)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
_keys = (
    st.integers(-(1 << 40), 1 << 40)
    | st.text(max_size=9)
    | st.tuples(st.integers(-9, 1 << 40), st.text(max_size=3))
)
_values = st.recursive(
    _scalars
    | st.builds(bytearray, st.binary(max_size=9))
    | st.sets(_keys, max_size=4)
    | st.frozensets(_keys),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(_keys, inner, max_size=5)
        | inner.map(lambda value: [value, value, (value,)])
    ),
    max_leaves=30,
)
_SHORT = [
    *(bytes([code]) for code in b"(012N\x88]})\x8fltd\x91\x85\x86\x87aesu\x90R\x81\x92b\x93Q\x94"),
    *(b"h\x00", b"j\x01\0\0\0", b"q\x00", b"q\x02", b"r\x07\0\0\0", b"K\x05", b"U\x01a"),
    *(glob("deepspeed.x", "C"), glob("collections", "OrderedDict"), b"\x80\x03", b"\x80\x01"),
]


@needs_native
@given(_values, st.integers(0, 5), st.booleans())
@settings(max_examples=300)
def test_pickles_of_values(value: Any, protocol: int, optimized: bool) -> None:
    data = pickle.dumps(value, protocol)
    error = agree(pickletools.optimize(data) if optimized else data)
    assert protocol < 2 or not error


@needs_native
@given(mutated(CORPUS))
@settings(max_examples=600)
def test_mutated_pickles(data: bytes) -> None:
    agree(data)


@needs_native
@given(opcode_sequences)
@settings(max_examples=600)
def test_sequences_of_opcodes(body: bytes) -> None:
    agree(b"\x80\x02N(" + body + b".")


@needs_native
def test_all_short_sequences_of_opcodes() -> None:
    """And all that they leave on the stack."""
    errors = Counter(agree(b"(" + b"".join(parts) + b"l.") for parts in product(_SHORT, repeat=3))
    assert errors[""] > 4000
    assert len(errors) > 40


@needs_native
def test_every_opcode_and_number() -> None:
    errors = Counter(
        agree(
            b"(N"
            + bytes([opcode])
            + number.to_bytes(8, "little", signed=True)[:width]
            + rest
            + b"l."
        )
        for opcode in range(256)
        for number in (
            0,
            1,
            2,
            5,
            6,
            127,
            128,
            255,
            1 << 31,
            (1 << 31) - 1,
            -1,
            -(1 << 31),
            1 << 62,
        )
        for width in (1, 2, 4, 8)
        for rest in (b"abcde\xff", b"a\nb\n")
    )
    assert errors[""] > 200
    assert sum("which torch.save does not write" in error for error in errors) > 150


@needs_native
@pytest.mark.parametrize("whole", CORPUS)
def test_every_cut(whole: bytes) -> None:
    assert all(agree(whole[:stop]) for stop in range(0, len(whole), 1 + len(whole) // 500))


@needs_native
@pytest.mark.parametrize("what", HOSTILE)
def test_what_would_cost_more_than_it_weighs(what: str) -> None:
    assert agree(HOSTILE[what])


@needs_native
@pytest.mark.parametrize(
    "file", sorted(DATA.glob("dcp/**/.metadata")), ids=lambda f: f.relative_to(DATA).as_posix()
)
def test_metadata_of_pytorch(file: Any) -> None:
    assert not agree(file.read_bytes())


@pytest.mark.parametrize("interpret", INTERPRETERS)
class TestEach:
    def test_depth_is_no_matter(self, interpret: Callable[..., Any]) -> None:
        for body in (b"](" * 200_000, b"(" * 200_000 + b"t" * 200_000, b")" + b"\x85" * 200_000):
            value = interpret(pickled(body + b"e" * body.count(b"]")), None, _CALLS, ValueError)
            assert type(value) in (list, tuple)
            del value  # which does not recurse either

    def test_it_is_told_the_values_and_the_opcode(self, interpret: Callable[..., Any]) -> None:
        body = (
            b"N"
            + integer(1 << 70)
            + b"K\x05"
            + b"R"
            + b"K\x06"
            + b"\x92"
            + b"("
            + text("a")
            + b"Nu"
        )
        big = (
            (0x8A, (1 << 70).to_bytes(16, "little"))
            if interpret is compiled and NATIVE
            else 1 << 70
        )
        assert interpret(body + b".", "m", _CALLS, ValueError) == (
            ord("u"), (0x92, None, (ord("R"), big, 5), 6), ["a", None]
        )  # fmt: skip

    def test_a_number_in_the_memo_is_not_larger_than_what_was_read(
        self, interpret: Callable[..., Any]
    ) -> None:
        def memo(number: int) -> Any:
            return interpret(
                b"\x80\x02" + b"Nr" + struct.pack("<I", number) + b".", None, _CALLS, ValueError
            )

        assert memo(7) is None
        for number in (8, 9, 1 << 31, (1 << 32) - 1):
            tracemalloc.start()
            with pytest.raises(
                ValueError, match=rf"stores value {number} of the memo, but has fewer"
            ):
                memo(number)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 1 << 16

    def test_an_error_of_a_call_is_passed_on(self, interpret: Callable[..., Any]) -> None:
        def fail(*_: object) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            interpret(b"(NN\x91.", None, (fail,) * 256, ValueError)

    def test_nothing_of_what_is_refused_stays(self, interpret: Callable[..., Any]) -> None:
        """Neither memory, nor references to what the calls return, however a pickle ends."""
        token = object()
        calls = (lambda *_: token,) * 256
        whole = [
            b"("
            b"]("
            b"NNNq\x03" + glob("a", "b") + b"R\x94\x94" + b"}(" + text("x") + b"h\x03" + text("y"),
            b"\x8f(K\x01K\x02\x90q\x05}" + integer(5) + b"Ns" + b"](NNe" + b"))\x87b(NNd0(\x851",
            pickle.dumps(
                {"a": [1.5, "é", b"b", 1 << 70], 5: {1, 2}, "c": (1, (2, 3), bytearray(b"5"))}, 5
            ),
            b"\x80\x02" + text("long" * 100) + b"2\x86q\x02q\x02q\x02" + b"h\x02" * 100,
            b"(" + text("x") + b"X\x02\x00\x00\x00\xff\xff",
            HOSTILE["a size that is copied"][:9000],
        ]

        def all_cuts() -> None:
            for data in whole:
                for stop in range(min(len(data), 300)):
                    for end in (b".", b"", b"\xff", b"R.", b"u.", b"e.", b"t.", b"s.", b"h\x09."):
                        with suppress(IntegrityError, UnicodeDecodeError):
                            interpret(data[:stop] + end, None, calls, IntegrityError)

        all_cuts()
        gc.collect()
        tracemalloc.start()
        held = sys.getrefcount(token), sys.getrefcount(None), sys.getrefcount(calls)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(3):
            all_cuts()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert sys.getrefcount(token) == held[0]
        assert sys.getrefcount(calls) == held[2]
        assert abs(sys.getrefcount(None) - held[1]) < 50
        assert after - before < 1 << 14


#: Calls that return what they were given.
_CALLS = tuple(
    (lambda _meaning, *values, opcode=opcode: (opcode, *values)) for opcode in range(256)
)


@needs_native
def test_the_compiled_one_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match="function for each opcode"):
        compiled(b"N.", None, (), ValueError)
    with pytest.raises(TypeError):
        compiled(bytearray(b"N."), None, _CALLS, ValueError)  # type: ignore[arg-type]
