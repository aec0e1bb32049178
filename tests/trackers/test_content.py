"""Which value of a metric belongs to a step, and what is the same value."""

from __future__ import annotations

import math
import struct

import pytest

from ucformat.errors import IntegrityError
from ucformat.trackers.content import Series, TrackedContent, is_same, joined, param_value
from ucformat.trackers.protobuf import Message


def test_the_last_value_up_to_a_step() -> None:
    series = Series([(0, 1.0), (100, 2.0), (100, 3.0), (200, 4.0)])
    assert [series.last(step).kept for step in (-1, 0, 99, 100, 150, 500)] == [
        None,
        (0, 1.0),
        (0, 1.0),
        (100, 3.0),
        (100, 3.0),
        (200, 4.0),
    ]
    assert all(series.last(s).kept == series.last(s).dropped for s in range(-1, 300))


def test_a_restart_makes_a_difference_only_where_values_were_not_logged_again() -> None:
    series = Series([(100, 1.0), (195, 2.0), (295, 3.0), (200, 4.0), (290, 5.0)])
    assert series.last(100) == ((100, 1.0), (100, 1.0))
    assert series.last(290) == ((290, 5.0), (290, 5.0))
    assert series.last(300) == ((295, 3.0), (290, 5.0))


def test_parameters_that_are_text_become_what_python_prints_so() -> None:
    texts = {"1": 1, "-3": -3, "0.0003": 0.0003, "1e-05": 1e-5, "True": True, "None": None}
    assert {text: param_value(text) for text in texts} == texts
    assert type(param_value("1")) is int
    for text in ("007", "1_000", "1e-5", "0.30", "nan", "inf", "true", " 1", "", "[1, 2]", "²"):
        assert param_value(text) == text


def test_the_same_value_in_single_precision() -> None:
    single = struct.unpack("<f", struct.pack("<f", 0.1))[0]
    assert is_same(0.1, single, is_single=True)
    assert not is_same(0.1, single, is_single=False)
    assert not is_same(0.1000001, single, is_single=True)
    assert not is_same(1e300, math.inf, is_single=True)
    assert is_same(math.nan, math.nan, is_single=False)


def test_runs_that_continue_each_other() -> None:
    first = TrackedContent({"lr": 1, "a": 1}, {"loss": [(1, 1.0), (2, 2.0)]}, ignored={"x": 1})
    second = TrackedContent({"lr": 2, "b": 1}, {"loss": [(2, 3.0)]}, ignored={"x": 2})
    both = joined([first, second])
    assert both.params == {"lr": 2, "a": 1, "b": 1}
    assert both.metrics == {"loss": [(1, 1.0), (2, 2.0), (2, 3.0)]}
    assert both.ignored == {
        "x": 3,
        "parameters that a run which continues it has changed": 1,
    }


def test_a_message_of_too_many_fields() -> None:
    with pytest.raises(IntegrityError, match="more than 1,048,576 fields"):
        Message(b"\x0a\x00" * ((1 << 20) + 1))


@pytest.mark.parametrize(
    "data", [b"\x08", b"\x08" + b"\xff" * 11, b"\x0a\x05ab", b"\x0b", b"\x09abc"]
)
def test_messages_that_are_none(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        Message(data)


def test_numbers_of_messages() -> None:
    message = Message(b"\x08" + b"\xff" * 9 + b"\x01" + b"\x10\x96\x01")
    assert (message.integer(1), message.integer(2), message.integer(3)) == (-1, 150, 0)
    with pytest.raises(IntegrityError, match="another encoding"):
        message.text(1)
