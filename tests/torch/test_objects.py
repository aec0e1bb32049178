"""Plain values of a training state: as JSON and back, exactly, and never running code unasked."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from datetime import date
from enum import Enum, Flag, IntEnum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from ucformat.errors import IntegrityError, UnsafeError, UnsupportedError
from ucformat.torch.state.objects import decode, encode, like

floats = st.floats(allow_nan=True, width=64)
keys = st.text(max_size=4) | st.integers() | st.sampled_from(["$int:3", "$set", "$", "$$x", "3"])
odd_keys = (
    keys
    | st.none()
    | st.floats(allow_nan=False)
    | st.booleans()
    | st.tuples(st.integers(), st.text(max_size=2))
)
hashables = (
    st.integers() | st.text(max_size=4) | st.booleans() | st.tuples(st.integers(), st.integers())
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | floats
    | st.text()
    | st.binary(max_size=9)
    | st.complex_numbers()
)

TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
]  # fmt: skip
NUMPY_DTYPES = ["?", "u1", "<i4", ">i4", "<i8", "<f2", "<f4", ">f8", "<c8"]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    nbytes = math.prod(shape) * dtype.itemsize
    bits = np.frombuffer(bytearray(draw(st.binary(min_size=nbytes, max_size=nbytes))), np.uint8)
    if dtype is torch.bool:
        bits &= 1
    out: torch.Tensor = torch.empty(shape, dtype=dtype)
    if nbytes:
        out.reshape(-1).view(torch.uint8)[...] = torch.from_numpy(bits)
    return out


def numpy_scalar(value: Any) -> Any:
    return st.sampled_from([np.float32, np.float64, np.float16]).map(lambda t: t(value))


leaves = st.one_of(
    scalars,
    tensors(),
    st.sampled_from(TORCH_DTYPES),
    st.sampled_from(NUMPY_DTYPES).flatmap(
        lambda d: arrays(d, array_shapes(min_dims=0, min_side=0, max_side=3))
    ),
    st.sets(hashables, max_size=3),
    st.frozensets(st.integers(), max_size=3),
    st.builds(slice, st.none() | st.integers(), st.integers(), st.none() | st.integers()),
    st.floats(width=16).flatmap(numpy_scalar),
    st.integers(-100, 100).map(np.int16) | st.booleans().map(np.bool_),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(odd_keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(list, d)),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type and, bit for bit, in value."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and bytes_of(a) == bytes_of(b)
        )  # fmt: skip
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, float | np.floating):
        return bool(a == b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return [key_of(k) for k in a] == [key_of(k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def key_of(key: Any) -> Any:
    return (type(key), key)


def bytes_of(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def stored(value: Any) -> Any:
    """As it comes out of a file."""
    return json.loads(json.dumps(encode(value), allow_nan=False))


@given(values)
def test_with_a_template_every_value_comes_back_exactly(value: Any) -> None:
    assert same(decode(stored(value), value), value)


@given(values)
def test_without_a_template_only_default_dictionaries_become_plain_ones(value: Any) -> None:
    lost: list[str] = []
    assert same(decode(stored(value), lost=lost), with_dicts(value))
    assert bool(lost) == ("collections.defaultdict" in json.dumps(stored(value)))


def with_dicts(value: Any) -> Any:
    if isinstance(value, dict):
        kind = OrderedDict if type(value) is OrderedDict else dict
        return kind((k, with_dicts(v)) for k, v in value.items())
    return type(value)(map(with_dicts, value)) if isinstance(value, list | tuple) else value


@given(values)
def test_a_template_of_another_structure_breaks_nothing(value: Any) -> None:
    for template in (
        None,
        3,
        [1, (2,)],
        {"a": (1,)},
        (),
        np.zeros(2),
        torch.zeros(2),
        torch.float32,
        slice(1),
    ):
        found = decode(stored(value), template)
        assert same(decode(stored(found), found), found)


@given(values)
def test_values_are_json_of_the_strict_kind(value: Any) -> None:
    text = json.dumps(encode(value), allow_nan=False)
    assert encode(decode(json.loads(text), value)) == json.loads(text)


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    "value",
    [
        Point(1, (2, torch.ones(2))),
        torch.Size([2, 3]),
        [{"a": (1,)}, {"a": (2,)}],
        {"betas": (0.9, 0.95), "groups": [{"dtype": torch.bfloat16}]},
        {((1, 2), 3): {4}, "x": {(5, (6,)), frozenset({7})}},
        {"$opaque": "gASVBQAAAAAAAABLAS4=", "$class": 1, "$ref": [2]},
        {"inner": {"$opaque": 3}},
        np.float32("nan"),
        np.array(["a", "bc"]),
        np.str_("x"),
        np.dtype(">i4"),
        np.complex64(1 - 2j),
        ml_dtypes.bfloat16(1.5),
        np.array([1.5, -2], ml_dtypes.float8_e5m2),
        torch.device("cuda", 1),
        torch.strided,
        [Point(1, 2), (frozenset({(1, 2)}), np.int8(3))],
        bytearray(b"ab"),
        float("-inf"),
        complex("nan+infj"),
        -0.0,
        2**80,
    ],
    ids=str,
)
def test_further_values_come_back(value: Any) -> None:
    assert same(decode(stored(value), value), value)
    assert same(decode(stored(value)), value)


def test_a_named_tuple_is_made_of_a_class_that_is_imported_and_has_the_same_fields() -> None:
    data = stored(Point(1, (2,)))
    assert same(decode(data), Point(1, (2,)))
    for name, fields in (
        (data["$class"], ["x", "z"]),
        ("no.such.Point", ["x", "y"]),
        ("builtins.open", ["x", "y"]),
    ):
        lost: list[str] = []
        other = data | {"$class": name, "$fields": fields}
        assert same(decode(other, lost=lost), (1, (2,)))
        assert lost == [f"{name}, which is not that of the program's value; it is a tuple"]
        assert same(decode(other, Point(0, 0), lost=lost), Point(1, (2,)))
        assert len(lost) == 1


class Phase(IntEnum):
    WARMUP = 1
    DECAY = 2


class Split(StrEnum):
    TRAIN = "train"


class Shape(Enum):
    SQUARE = (1, 1)


class Flags(Flag):
    A = 1
    B = 2


class Name(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "not what it is"


class Rate(float):
    pass


class Steps(list[int]):
    pass


class Table(dict[str, Any]):
    pass


class Mask(frozenset[int]):
    pass


DERIVED = [Name("x"), Rate(0.1), Steps([1, 2]), Table(a=(1,)), Mask({1}), {Name("k"): 1}]
ENUMS = [
    Phase.DECAY,
    Split.TRAIN,
    Shape.SQUARE,
    Flags.A | Flags.B,
    {Phase.DECAY: 1, "x": [Split.TRAIN]},
    (Phase.DECAY,),
]
PYTHONS = [OrderedDict(b=1, a=[2]), Counter("aab"), {np.float64(1.5): 2}]


@pytest.mark.parametrize("value", [*DERIVED, *ENUMS, *PYTHONS], ids=repr)
def test_a_value_of_a_derived_class_comes_back_in_it(value: Any) -> None:
    lost: list[str] = []
    found = decode(stored(value), value, lost=lost)
    assert same(found, value)
    assert [type(k) for k in found] == [type(k) for k in value] if isinstance(value, dict) else True
    assert not lost


@pytest.mark.parametrize("value", [*ENUMS, *PYTHONS], ids=repr)
def test_python_s_classes_and_imported_enumerations_need_no_template(value: Any) -> None:
    lost: list[str] = []
    assert same(decode(stored(value), lost=lost), value)
    assert not lost


@pytest.mark.parametrize("value", DERIVED, ids=repr)
def test_a_value_whose_class_the_program_does_not_have_there_is_told(value: Any) -> None:
    data = stored(value)
    for template in (None, 1, "x", [3], {"a": 1}, Phase.DECAY):
        lost: list[str] = []
        found = decode(data, template, lost=lost)
        assert found == value
        assert not isinstance(found, type(value)) or type(value) is dict
        assert len(lost) == 1


def test_members_that_the_program_s_enumeration_lacks_are_told() -> None:
    lost: list[str] = []
    assert same(decode(stored(Phase.DECAY) | {"$value": 3}, Phase.WARMUP, lost=lost), 3)
    assert same(
        decode(stored(Phase.DECAY) | {"$class": "no.such.Phase"}, Phase.WARMUP, lost=lost), 2
    )
    assert [line.partition(",")[0] for line in lost] == [
        f"{Phase.__module__}.Phase",
        "no.such.Phase",
    ]


def test_a_value_of_a_derived_class_with_attributes_is_a_pickle() -> None:
    rate = Rate(1.0)
    rate.warmup = 3  # type: ignore[attr-defined]
    with pytest.raises(UnsafeError):
        decode(stored({"a": [rate]}), {"a": [rate]})
    assert decode(stored(rate), trust=True).warmup == 3


def test_a_number_is_not_rounded_to_the_type_of_the_template() -> None:
    assert same(decode(0.1, np.float32(0)), 0.1)
    assert same(decode(300, np.int8(0)), 300)
    assert same(decode(1e300, np.float16(0)), 1e300)
    assert same(decode(0.5, np.float32(0)), np.float32(0.5))


@pytest.mark.parametrize("dtype", ["O", "V8", "f4,i4", "no", "M8[x]", "(2,)O"])
def test_an_array_of_objects_or_of_no_dtype_is_damage(dtype: str) -> None:
    for data in ({"$class": "numpy.ndarray", "$args": [dtype, [1]], "$items": {"$bytes": "AAAAAAAAAAA="}},
                 {"$class": "numpy.dtype", "$args": [dtype]}):  # fmt: skip
        with pytest.raises(IntegrityError, match="NumPy dtype"):
            decode(data)


def test_without_a_template() -> None:
    value = {
        "a": (1, [np.arange(3, dtype=np.int16)]),
        "t": torch.bfloat16,
        "s": np.float32(0.5),
        3: {"x"},
    }
    found = decode(stored(value))
    assert same(found, value)


def test_a_longer_value_is_like_the_last_of_its_template() -> None:
    assert decode([[1, 2], [3], [4]], [(0,)]) == [(1, 2), (3,), (4,)]
    assert decode([[1], [2]], ()) == ([1], [2])
    assert decode([1, 2, 3], Point(0, 0)) == (1, 2, 3)
    assert like({"a": [1], "b": [2]}, {"a": ()}, []) == {"a": (1,), "b": [2]}


def test_a_default_dictionary_keeps_its_factory() -> None:
    template: dict[str, list] = defaultdict(list, {"old": [1]})
    found = decode({"new": [2]}, template)
    assert found == {"new": [2]}
    assert found["other"] == []
    assert template == {"old": [1]}


def test_what_is_read_may_be_changed() -> None:
    array = decode(stored(np.zeros(3)), np.ones(3))
    array += 1
    tensor = decode(stored(torch.zeros(3)))
    tensor += 1
    assert array.tolist() == tensor.tolist() == [1, 1, 1]


def test_tensors_of_any_strides_and_parameters() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for tensor in (
        base.t(),
        base[1:, ::2],
        base[1:2, 1:2],
        torch.nn.Parameter(base),
        base.requires_grad_(),
    ):
        assert same(decode(stored(tensor)), tensor.detach().clone())


OPAQUE = [
    date(2026, 1, 2),
    Path("/a"),
    Exception("x"),
    {date(2026, 1, 2): 1},
    {date(2026, 1, 2)},
    np.array([None]),
    len,
]


@pytest.mark.parametrize("value", OPAQUE, ids=repr)
def test_what_has_no_json_form_needs_trust(value: Any) -> None:
    data = stored({"deep": [value, 1]})
    assert set(data["deep"][0]) == {"$opaque"}
    with pytest.raises(UnsafeError, match="is a pickle, which could run code") as caught:
        decode(data)
    assert "trust=True" in str(caught.value)
    found = decode(data, {"deep": [value]}, trust=True)["deep"]
    assert found[1] == 1
    assert repr(found[0]) == repr(value)
    assert type(found[0]) is type(value)


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def test_a_pickle_runs_nothing_without_trust(tmp_path: Path) -> None:
    for depth in (
        [Malicious(tmp_path / "ran")],
        {(1, 2): Malicious(tmp_path / "ran")},
        Malicious(tmp_path / "ran"),
    ):
        data = stored(depth)
        for template in (None, depth, [depth], {"a": 1}):
            with pytest.raises(UnsafeError):
                decode(data, template)
    assert not (tmp_path / "ran").exists()
    decode(data, trust=True)
    assert (tmp_path / "ran").exists()


def test_a_pickle_of_a_class_that_is_gone() -> None:
    with pytest.raises(UnsupportedError, match="cannot be loaded: ModuleNotFoundError") as caught:
        decode({"$opaque": "Y25vX3N1Y2hfbW9kdWxlClgKLg=="}, trust=True)
    assert caught.value.hint is not None


def test_what_cannot_be_kept_at_all_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="a function has no JSON form and cannot be pickled"):
        encode({"f": lambda: 1}, "key")
    holds_itself: list = []
    holds_itself.append(holds_itself)
    with pytest.raises(UnsupportedError, match="schedule contains itself"):
        encode(holds_itself, "schedule")
    with pytest.raises(UnsupportedError, match="nested too deeply"):
        encode(json.loads("[" * 300 + "]" * 300))
