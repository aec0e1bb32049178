"""Fingerprints: as the specification defines them, the sum of those of any parts, and another after any change."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucformat.geometry import fingerprint
from ucformat.geometry.box import Box
from ucformat.geometry.fingerprint import NO_ELEMENTS, fingerprint_of, text_of, total
from ucformat.schema import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Elements = NDArray[np.generic]

SPECIFICATION = (Path(__file__).parents[2] / "docs/spec/format.md").read_text()
VECTORS = re.findall(
    r"^\| `(\w+)` \| (\[.*?\]) \| (.*?) \| `([0-9a-f]{32})` \|$", SPECIFICATION, re.MULTILINE
)
MODULUS = 1 << 64
SIZES = [1, 2, 4, 8, 16]


IMPLEMENTATIONS = [
    pytest.param(
        "native",
        marks=pytest.mark.skipif(
            not fingerprint.NATIVE,
            reason="ucformat._native was not built (it needs x86-64 Linux and a C compiler): pip install -e .",
        ),
    ),
    "python",
]


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True, scope="module")
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(fingerprint, "NATIVE", False)
        yield request.param


def splitmix64(seed: int) -> int:
    x = (seed + 0x9E3779B97F4A7C15) % MODULUS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ x >> 27) * 0x94D049BB133111EB % MODULUS
    return x ^ x >> 31


def key_parts(number: int, lane: int) -> tuple[int, int]:
    """The factors of a word's key, as the specification says."""
    block, place = divmod(number, 1024)
    within = splitmix64((-1 - 2 * place - lane) % MODULUS) % 2**32 | 1
    return within, splitmix64(2 * block + lane) | 1


def as_specified(data: bytes, itemsize: int) -> str:
    """The fingerprint of a tensor with these bytes."""
    nbytes = min(itemsize, 4)
    words = [int.from_bytes(data[i : i + nbytes], "little") for i in range(0, len(data), nbytes)]
    lanes = (
        sum(math.prod(key_parts(n, lane)) * word for n, word in enumerate(words)) % MODULUS
        for lane in (0, 1)
    )
    return "".join(f"{lane:016x}" for lane in lanes)


def whole(elements: Elements) -> str:
    return text_of(fingerprint_of(elements, elements.shape, Box.whole(elements.shape)))


def elements_of(data: bytes, itemsize: int, shape: tuple[int, ...]) -> Elements:
    array: Elements = np.frombuffer(data, f"V{itemsize}").reshape(shape)
    return array


def spelled(text: str, dtype: str, count: int) -> bytes:
    """The bytes of the elements that a row of the specification describes."""
    itemsize = ITEMSIZE[dtype]
    if text == "the bits `(i + 1) c`":
        (c,) = re.findall(r"Let `c` be `(0x[0-9a-f]+)`", SPECIFICATION)
        values = ((i + 1) * int(c, 16) % 256**itemsize for i in range(count))
        return b"".join(value.to_bytes(itemsize, "little") for value in values)
    if text.startswith("-0.0, and NaN"):
        bits = [0x80000000, *(int(b, 16) for b in re.findall(r"`(0x\w+)`", text))]
        return np.array(bits, "<u4").tobytes()
    if dtype == "bool":
        return np.array([word == "true" for word in text.split(", ")]).tobytes()
    return np.array([float(word) for word in text.split(", ")], dtype).tobytes()


@pytest.mark.parametrize(("dtype", "shape", "text", "expected"), VECTORS)
def test_the_vectors_of_the_specification(dtype: str, shape: str, text: str, expected: str) -> None:
    sizes = tuple(json.loads(shape))
    data = spelled(text, dtype, math.prod(sizes))
    assert as_specified(data, ITEMSIZE[dtype]) == expected
    assert whole(elements_of(data, ITEMSIZE[dtype], sizes)) == expected


def test_the_specification_has_vectors_of_every_size() -> None:
    assert {ITEMSIZE[dtype] for dtype, *_ in VECTORS} == set(SIZES)


@st.composite
def tensors(draw: st.DrawFn) -> Elements:
    """Elements in memory that is row-major, transposed, a slice, or backwards."""
    itemsize = draw(st.sampled_from(SIZES))
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 40, 1100]), max_size=3).map(tuple))
    shape = shape if math.prod(shape) <= 20_000 else shape[:1]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    array = rng.integers(0, 256, (*shape, itemsize), np.uint8).view(f"V{itemsize}")[..., 0]
    order = draw(st.permutations(range(array.ndim)))
    if array.ndim:  # `ascontiguousarray` would add a dim
        array = np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))
    steps = [draw(st.sampled_from([1, 1, 2, -1])) for _ in shape]
    return array[tuple(slice(None, None, step) for step in steps)]


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover a tensor once."""
    edges = [
        sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) if n else [0, 0]
        for n in shape
    ]
    dims = [list(itertools.pairwise(e)) for e in edges]
    return [
        Box(tuple(a for a, _ in cut), tuple(b - a for a, b in cut))
        for cut in itertools.product(*dims)
    ]


@given(st.data())
def test_it_is_the_sum_of_those_of_any_parts(data: st.DataObject) -> None:
    array = data.draw(tensors())
    expected = as_specified(array.tobytes(), array.itemsize)
    assert whole(array) == expected
    cut = [
        fingerprint_of(array[tuple(map(slice, b.start, b.stop))], array.shape, b)
        for b in data.draw(parts(array.shape))
    ]
    assert text_of(total(cut)) == expected


@given(st.sampled_from(SIZES), st.integers(0, 2**61 - 3000), st.integers(0, 2**32))
def test_a_part_anywhere_in_a_huge_tensor(itemsize: int, start: int, seed: int) -> None:
    data = np.random.default_rng(seed).bytes(2500 * itemsize)
    array, count = elements_of(data, itemsize, (2500,)), max(1, itemsize // 4)
    sums = fingerprint_of(array, (2**61,), Box((start,), (2500,)))
    words = np.frombuffer(data, f"<u{min(itemsize, 4)}")
    for lane in (0, 1):
        keys = (math.prod(key_parts(start * count + n, lane)) for n in range(len(words)))
        assert sums[lane] == sum(k * int(w) for k, w in zip(keys, words, strict=True)) % MODULUS


def test_nothing_and_zeros() -> None:
    assert whole(np.empty((0, 5), np.float32)) == whole(np.zeros(5000)) == text_of(NO_ELEMENTS)
    assert total([]) == NO_ELEMENTS


def test_no_change_of_one_element_can_keep_it() -> None:
    """Keys are odd; and of the two words of an element no differences cancel out in both lanes."""
    table = [[key_parts(n, lane)[0] for n in range(1024)] for lane in (0, 1)]
    assert all(len(set(lane)) == 1024 for lane in table)  # so no swap within a block is missed
    assert all(key % 2 for lane in table for key in lane)
    for n in range(0, 1024, 2):
        (a, b), (c, d) = (lane[n : n + 2] for lane in table)
        determinant = a * d - b * c
        assert determinant
        # Differences below 2^32 times keys below 2^32 are below 2^65 when they are added up, so
        # they are 0 modulo 2^64 only as one of these numbers.
        for p, q in itertools.product((-MODULUS, 0, MODULUS), repeat=2):
            x, y = p * d - q * b, a * q - c * p
            fits = not (x % determinant or y % determinant)
            size = max(abs(x // determinant), abs(y // determinant))
            assert (p, q) == (0, 0) or not fits or size >= 2**32


def changed(rng: np.random.Generator, array: NDArray[Any], how: str) -> bool:
    """Change an array of unsigned integers in place; whether it is another one."""
    i, j = (int(k) for k in rng.integers(0, array.size, 2))
    if how == "flip":  # a bit of an element
        array[i] ^= array.dtype.type(1 << int(rng.integers(8 * array.itemsize)))
        return True
    if how == "swap":
        array[i], array[j] = array[j], array[i]
        return bool(array[i] != array[j])
    before = array.copy()  # how == "move": an element, and those between are shifted
    kept = np.delete(array, i)
    array[:] = np.insert(kept, j, before[i])
    return bool((before != array).any())


@pytest.mark.parametrize(
    "trials", [2000, pytest.param(85_000, marks=pytest.mark.matrix)], ids=["few", "many"]
)
@pytest.mark.parametrize("how", ["flip", "swap", "move"])
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8"])
def test_any_change_changes_it(dtype: str, how: str, trials: int, implementation: str) -> None:
    """A million of them in all: of random elements, and of those of which most bits are equal."""
    rng = np.random.default_rng([ord(c) for c in dtype + how])
    array = rng.integers(0, 2 ** (8 * np.dtype(dtype).itemsize - 1), 3000, dtype)
    array[1000:] = array[:2][rng.integers(0, 2, 2000)]
    last = whole(array)
    for _ in range(trials if implementation == "native" else trials // 40):
        if changed(rng, array, how):
            assert whole(array) != last
            last = whole(array)
