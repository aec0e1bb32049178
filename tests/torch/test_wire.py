"""What ranks tell each other: all comes back as it was, whatever else comes is refused, and nothing is ever run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.torch.attack import Attack
from ucformat import errors
from ucformat.errors import Conflict, Inconsistent, IntegrityError, UcformatError, UsageError
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Key, Piece, TensorInfo
from ucformat.reading.readable import GroupPlace, IntKey, StatePath
from ucformat.schema.manifest import LineageDoc
from ucformat.torch.comm.wire import decode, encode, message

if TYPE_CHECKING:
    from collections.abc import Callable


@message
class Sample:
    """A field of each kind."""

    number: int
    half: float
    sure: bool
    text: str
    data: bytes
    word: Literal["a", "b"]
    when: datetime
    maybe: int | None
    either: str | int | IntKey
    pair: tuple[int, str]
    many: tuple[tuple[int, ...], ...]
    listed: list[bytes]
    some: frozenset[str]
    mapped: Mapping[Key, tuple[str, ...]]
    anything: Any


SAMPLE = Sample(
    -(1 << 63),
    float("inf"),
    True,
    "ä \ud800 \U0001f600",
    b"\x00\xff",
    "b",
    datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    None,
    IntKey(7),
    (1 << 62, ""),
    ((), (1,), (2, 3)),
    [b"", b"x" * 1000],
    frozenset({"p"}),
    {Key("w", "weight"): ("a", "a"), Key("", ""): ()},
    {"a": [1, 2.5, None, True, "\ud800", {"$int:3": 1 << 200}]},
)

INFO = TensorInfo("model.w", "exp_avg", "bfloat16", (3, 0, 5))
BOX = Box((1, 2), (3, 4))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (
            (INFO, Piece(BOX, 3, (4, 1)), GroupPlace(("optim", 1), ("x",), flattened=True)),
            tuple[TensorInfo, Piece, GroupPlace],
        ),
        (SAMPLE, Sample),
        (None, None),
        ([], list[int]),
        ([SAMPLE] * 3, list[Sample]),
        ([*range(-200, 200), 1 << 40], list[int]),
    ],
    ids=repr,
)
def test_what_is_told_comes_back(value: Any, kind: Any) -> None:
    comes_back(value, kind)


def comes_back(value: Any, kind: Any) -> None:
    told = encode(value, kind)
    found = decode(bytearray(told), kind)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)  # the types inside, too
    assert encode(found, kind) == told


Paths = tuple[StatePath, ...]


@given(
    st.lists(
        st.lists(st.text() | st.integers(-99, 99) | st.integers(0, 9).map(IntKey)).map(tuple)
    ).map(tuple)
)
def test_paths_come_back(paths: tuple[Any, ...]) -> None:
    found = decode(encode(paths, Paths), Paths)
    assert found == paths
    assert [[type(p) for p in path] for path in found] == [
        [type(p) for p in path] for path in paths
    ]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(5, dtype=np.uint32),
        np.zeros((2, 0, 3), ">f8"),
        np.array(True),
        np.array([1 + 2j], "c8"),
    ],
)
def test_arrays_come_back(array: NDArray[Any]) -> None:
    found = decode(encode(array, NDArray[np.uint32]), NDArray[np.uint32])
    assert (found.dtype, found.shape, found.tobytes()) == (
        array.dtype,
        array.shape,
        array.tobytes(),
    )


class Taken(Conflict):
    """An error of a program, of a kind of ours."""


@pytest.mark.parametrize(
    "name", [n for n in errors.__all__ if isinstance(getattr(errors, n), type)]
)
def test_every_error_of_ours_comes_back(name: str) -> None:
    found = decode(
        encode(getattr(errors, name)("what\nhappened", hint="do this"), BaseException),
        BaseException,
    )
    assert (type(found).__name__, found.message, found.hint) == (name, "what\nhappened", "do this")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (Taken("by me"), Conflict, "by me"),
        (Inconsistent("odd", problems=(object(),)), Inconsistent, "odd"),
        (OSError(28, "No space left"), UcformatError, "OSError: [Errno 28] No space left"),
        (KeyboardInterrupt(), UcformatError, "KeyboardInterrupt: "),
    ],
    ids=repr,
)
def test_other_errors_are_told_as_the_nearest_of_ours(
    error: BaseException, kind: type, text: str
) -> None:
    found = decode(encode(error, int | BaseException), int | BaseException)
    assert (type(found), found.message) == (kind, text)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ({"a": {"b": [1, object()]}}, Any, "a.b.1 cannot be sent to other ranks: it is a object"),
        (
            replace(SAMPLE, anything={"c": {"lr": np.float32(1)}}),
            Sample,
            "Sample.anything: c.lr cannot be sent",
        ),
        ({"path": Path("x")}, Any, "path cannot be sent to other ranks: it is a PosixPath"),
        ({1: "a"}, Mapping[str, str], "expected a string, got 1, a int"),
        (1.5, int, "expected an integer"),
        (1 << 63, int, "expected an integer of 64 bits"),
        ("x", float, "expected a number"),
        (object(), Sample, "expected a Sample, got a object"),
        (object(), int | None, "expected int | None, got a object"),
        (np.array([object()]), NDArray[np.uint32], "an array of object cannot be sent"),
        (1, None, "expected None, got a int"),
    ],
    ids=lambda p: p if isinstance(p, str) else "",  # values have addresses
)
def test_what_cannot_be_told_is_an_error_that_names_it(value: Any, kind: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        encode(value, kind)
    assert words in caught.value.message


@pytest.mark.parametrize(
    "kind", [Sample, Any, list[bytes], int | Sample, None, BaseException], ids=str
)
def test_pickles_are_refused_and_not_run(tmp_path: Path, kind: Any) -> None:
    file = tmp_path / "ran"
    with pytest.raises(
        IntegrityError, match="a message from another rank cannot be decoded"
    ) as caught:
        decode(pickle.dumps(Attack(file)), kind)
    assert caught.value.hint == (
        "check that all ranks make the same call with the same arguments, and run the same version of "
        "ucformat"
    )
    assert not file.exists()


KINDS: list[tuple[Any, Any]] = [
    (SAMPLE, Sample),
    ([None, None], list[None]),
    (np.arange(3), NDArray[np.int64]),
    (LineageDoc(kind="resume", url="u"), LineageDoc),
    (Conflict("x", hint="y"), BaseException),
]


@pytest.mark.parametrize(("value", "kind"), KINDS, ids=lambda v: getattr(v, "__name__", ""))
def test_every_changed_byte_is_refused_or_another_value(value: Any, kind: Any) -> None:
    """In every place; and every message that is cut short."""
    told = encode(value, kind)
    for at in range(len(told)):
        for byte in {told[at] ^ 1, told[at] ^ 0x80, 0, 0xFF, ord("q")}:
            tried(told[:at] + bytes([byte]) + told[at + 1 :], kind)
        with pytest.raises(IntegrityError):
            decode(told[:at], kind)
    with pytest.raises(IntegrityError):
        decode(told + b"\x00", kind)


@given(st.data())
def test_mutations(data: st.DataObject) -> None:
    value, kind = data.draw(st.sampled_from(KINDS))
    told = bytearray(encode(value, kind))
    for _ in range(data.draw(st.integers(1, 5))):
        a, b = (data.draw(st.integers(8, len(told))) for _ in range(2))
        told[a:b] = data.draw(st.binary(max_size=20))
    tried(bytes(told), kind)


def tried(told: bytes, kind: Any) -> None:
    try:
        found = decode(told, kind)
    except IntegrityError:
        return
    encode(found, kind)


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.replace(b"<i8", b"|O8"),
        lambda told: told.replace(b"<i8", b"<i9"),
    ],
    ids=["objects", "no dtype"],
)
def test_arrays_of_other_things_than_numbers_are_refused(change: Callable[[bytes], bytes]) -> None:
    told = encode(np.arange(3), NDArray[np.int64])
    with pytest.raises(IntegrityError):
        decode(change(told), NDArray[np.int64])


def test_one_kind_is_never_read_as_another() -> None:
    with pytest.raises(IntegrityError, match="it contains values of another kind"):
        decode(encode((1, "a"), tuple[int, str]), tuple[int, str, int])
