from __future__ import annotations

import base64
import datetime as dt
import json
import math
import struct
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest

from ucformat.errors import UnsupportedError, UpgradeNeeded
from ucformat.reading.stand_ins import Dtype, Inert, InertClass, NdArray, StoredTensor
from ucformat.reading.values import from_json, to_json

SMALL = StoredTensor("0", "bfloat16", (2,), (1,), 0, 2)
LARGE = StoredTensor("1", "float32", (1 << 20,), (1,), 0, 1 << 20)


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            5,
            -1.5,
            "text",
            [],
            {},
            [1, [2, {"a": None}]],
            {"$a": 1, "$$b": 2, 3: 4, -5: {6: 7}},
        ),
        *(
            {"$float": "no"},
            {"$int:3": 1},
            b"\x00\xff",
            1 + 2j,
            {1, 2},
            slice(1, None, 2),
            math.inf,
            -math.inf,
        ),
        *({None: 1, (1, 2): 2, 1.5: 3}, {"$class": 1}, {"$ref": 2}, {"a": {"$dict": []}}),
    ],
)
def test_values_come_back(value: Any) -> None:
    encoded = to_json(value)
    assert from_json(json.loads(json.dumps(encoded, allow_nan=False))) == value


def test_not_a_number() -> None:
    assert to_json(math.nan) == {"$float": "nan"}
    assert math.isnan(from_json({"$float": "nan"}))


def test_one_way_forms() -> None:
    assert to_json((1, (2,))) == [1, [2]]
    assert to_json(PurePosixPath("/a")) == {"$path": "/a"}
    assert to_json(dt.datetime(2024, 1, 2, tzinfo=dt.UTC)) == {
        "$datetime": "2024-01-02T00:00:00+00:00"
    }
    assert to_json(dt.timedelta(seconds=90)) == {"$datetime": 90.0}
    assert to_json(Dtype("bfloat16")) == {"$dtype": "bfloat16"}
    assert to_json(InertClass("deepspeed.X")) == {"$class": "deepspeed.X"}
    thing = Inert("deepspeed.X", (1,), {"scale": math.inf}, [("a", 2)])
    assert to_json(thing) == {
        "$class": "deepspeed.X",
        "$args": [1],
        "$state": {"scale": {"$float": "inf"}},
        "$items": [["a", 2]],
    }
    assert to_json(Inert("x.Y")) == {"$class": "x.Y"}


def test_small_tensors_stay_inside() -> None:
    data = struct.pack("<HH", 0x3F80, 0xC000)
    encoded = to_json({"rng": SMALL}, read=lambda _: data)
    assert encoded["rng"]["$tensor"] == {
        "dtype": "bfloat16",
        "shape": [2],
        "data": base64.b64encode(data).decode(),
    }
    assert from_json(encoded)["rng"].tolist() == [1.0, -2.0]


def test_numpy_arrays() -> None:
    big_endian = NdArray(
        ">i4", (2, 2), np.array([[1, 2], [3, 4]], ">i4").tobytes("F"), fortran=True
    )
    assert from_json(to_json(big_endian)).tolist() == [[1, 2], [3, 4]]


def test_large_tensors_become_tensors_of_their_own() -> None:
    told = []

    def spill(path: str, tensor: StoredTensor) -> str:
        told.append((path, tensor))
        return path

    encoded = to_json({"ema": [{"layer.weight": LARGE}]}, spill=spill, path="client_state")
    assert encoded == {"ema": [{"layer.weight": {"$ref": "client_state.ema.0.layer.weight"}}]}
    assert told == [("client_state.ema.0.layer.weight", LARGE)]
    assert from_json(encoded) == encoded


def test_a_tensor_is_never_dropped() -> None:
    for value in (SMALL, LARGE):
        with pytest.raises(UnsupportedError, match=r"state\.a"):
            to_json({"a": value}, path="state")


def test_values_that_hold_themselves_or_share_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucformat.reading.values._MAX_NODES", 1000)
    ring: list[Any] = []
    ring.append(ring)
    laughs: Any = [1]
    for _ in range(64):
        laughs = [laughs, laughs]
    for value in (ring, laughs):
        with pytest.raises(UnsupportedError, match="too deeply or too large"):
            to_json(value)


def test_an_unknown_form_is_not_guessed() -> None:
    with pytest.raises(UpgradeNeeded, match="later"):
        from_json({"$later": 1})


def test_an_array_has_items_and_nothing_else_has() -> None:
    array = {
        "$class": "numpy.ndarray",
        "$args": [">i2", [2]],
        "$items": {"$bytes": base64.b64encode(b"\0\1\0\2").decode()},
    }
    assert from_json(array).tolist() == [1, 2]
    del array["$items"]
    number = {"$class": "numpy.float32", "$args": [1.5], "$items": [1]}
    for other in (array, number):
        assert from_json(other) == other
