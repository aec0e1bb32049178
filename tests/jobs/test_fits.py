from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.fakes import FakeSource
from ucformat import Layout
from ucformat.checkpoint import Checkpoint
from ucformat.errors import LayoutError
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

ARRAYS = {
    (name, state): np.zeros(shape, np.float32)
    for name, shape in {"embed": (1003, 8), "up": (16, 8), "norm": (8,)}.items()
    for state in ("weight", "exp_avg")
}
EVEN: dict[str, Any] = {
    "match": ["embed", "up"],
    "place": [{"shard": 0, "over": "tp", "even": True}],
}
REST: dict[str, Any] = {"match": "*", "place": ["replicate"]}


@pytest.fixture
def ck() -> Checkpoint:
    return Checkpoint(FakeSource.write(MemoryStore("fits"), ARRAYS))


def test_what_fits_says_its_memory(ck: Checkpoint) -> None:
    fit = ucformat.fits(ck, Layout({"tp": 17}, [{**EVEN, "match": "embed"}, REST]))
    assert fit
    assert (fit.ranks, fit.tensors, fit.misfits) == (17, 3, ())
    assert fit.memory == (((59 + 16) * 8 + 8) * 8,) * 2


def test_uneven_ranks_hold_unequally(ck: Checkpoint) -> None:
    fit = ucformat.fits(
        ck, Layout({"tp": 4}, [{"match": "*", "place": [{"shard": 0, "over": "tp"}]}])
    )
    assert fit.memory == (((250 + 4) * 8 + 2) * 8, ((251 + 4) * 8 + 2) * 8)


def test_what_does_not_fit_is_named_with_its_rule_and_the_reason(ck: Checkpoint) -> None:
    fit = ucformat.fits(ck, Layout({"tp": 4}, [EVEN, REST]))
    (misfit,) = fit.misfits
    assert (misfit.name, misfit.states) == ("embed", ("weight", "exp_avg"))
    assert misfit.rules == ("rules[0] (match 'embed', 'up')",)
    assert "1003" in misfit.reason
    assert fit.memory is None
    assert not fit


def test_every_misfit_is_reported_at_once(ck: Checkpoint) -> None:
    rules = [{**EVEN, "match": "embed"}, {"match": "up", "place": [{"shard": 5, "over": "tp"}]}]
    assert [m.name for m in ucformat.fits(ck, Layout({"tp": 4}, rules)).misfits] == [
        "embed",
        "up",
        "norm",
    ]


def test_flat_buffers_of_optimizer_groups_fit_if_the_tensors_are_in_one() -> None:
    flat = [{"match": "*", "place": [{"flat": "optimizer", "over": "dp", "group_pad": 2}]}]
    layout = Layout({"dp": 2}, [REST], data=flat, renames=[("(.*)", r"module.\1")])
    groups = ({"params": ["embed", "norm"]}, {"params": ["up"]})
    every = Checkpoint(FakeSource.write(MemoryStore("fits-groups"), ARRAYS, groups=groups))
    assert ucformat.fits(every, layout).memory == (2 * 4 * (1004 * 8 + 128) // 2,) * 2
    some = Checkpoint(FakeSource.write(MemoryStore("fits-no-group"), ARRAYS, groups=groups[:1]))
    (misfit,) = ucformat.fits(some, layout).misfits
    assert (misfit.name, "in no optimizer group" in misfit.reason) == ("module.up", True)


def test_what_only_all_together_shows(ck: Checkpoint) -> None:
    layout = Layout(
        {"tp": 2}, [REST], data=[{"match": "*", "place": [{"flat": "all", "over": "tp"}]}]
    )
    assert ucformat.fits(ck, layout)
    mixed = Checkpoint(
        FakeSource.write(MemoryStore("mixed"), {**ARRAYS, ("x", "weight"): np.zeros(3, np.int64)})
    )
    (misfit,) = ucformat.fits(mixed, layout).misfits
    assert misfit.name == "all tensors together"


def test_rules_that_take_nothing_are_told(ck: Checkpoint) -> None:
    fit = ucformat.fits(ck, Layout({"tp": 2}, [{"match": "nobody", "place": ["replicate"]}, REST]))
    assert fit.unused == ("rules[0] (match 'nobody')",)
    assert fit.rules[1].names == ("embed", "up", "norm")


def test_the_view_of_a_layout_comes_first(ck: Checkpoint) -> None:
    view: list[dict[str, Any]] = [
        {"trim": "embed", "size": 1000},
        {"rename": "embed", "to": "tokens"},
    ]
    rules = [{**EVEN, "match": "tokens"}, REST]
    fit = ucformat.fits(ck, Layout({"tp": 4}, rules, view=view))
    assert fit
    assert [r.names for r in fit.rules[:2]] == [("embed",), ("embed",)]
    plan = ck.plan(Layout({"tp": 4}, rules, view=view), 3)
    assert plan.execute()["tokens", "weight"].shape == (250, 8)


def test_a_file_names_the_line(ck: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "l.yaml"
    path.write_text(
        "version: 1\nmesh: {tp: 4}\nrules:\n  - match: '*'\n    place: [{shard: 1, over: tp}]\n"
    )
    assert "rules[0], line 4" in str(ucformat.fits(ck, path).misfits[0])
    path.write_text(
        "version: 1\nmesh: {tp: 4}\nrules:\n  - match: '*'\n    place:\n      - {shard: x, over: tp}\n"
    )
    with pytest.raises(
        LayoutError, match=r"line 6, rules\[0\]\.place\[0\]\.shard\.shard: Input should be"
    ):
        Layout.load(path)
