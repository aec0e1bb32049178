"""Any nesting of mappings and lists comes back under its names and in its types, whatever saves and whatever loads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import ucformat
import ucformat.torch as ucf
from ucformat.format import arrays as small
from ucformat.reading.state_names import dotted

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

State = dict[str, Any]


def _stock(state: State, url: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(url), no_dist=True)


def _converted(state: State, url: Path) -> None:
    _stock(state, url.with_name("stock-first"))
    ucformat.convert(url.with_name("stock-first"), url)


def _mixed(state: State, url: Path) -> None:
    """Scalars and pairs are packed, as in a checkpoint that has many small tensors, other tensors are arrays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "MOST_SMALL_ARRAYS", 0)
        patch.setattr(small, "SMALL_BYTES", 9)
        ucf.save(state, url)


WRITERS: dict[str, Callable[[State, Path], Any]] = {
    "Writer": lambda state, url: dcp.save(state, storage_writer=ucf.Writer(url), no_dist=True),
    "packed": lambda state, url: dcp.save(
        state, storage_writer=ucf.Writer(url, form="packed"), no_dist=True
    ),
    "save": ucf.save,
    "mixed": _mixed,
    "stock": _stock,
    "converted": _converted,
}
READERS: dict[str, Callable[[State, Path], Any]] = {
    "Reader": lambda state, url: dcp.load(state, storage_reader=ucf.Reader(url), no_dist=True),
    "load": ucf.load,
}


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, dict):
        return bool(a.keys() == b.keys()) and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def blank(value: Any) -> Any:
    """The same nesting with nothing in it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {k: blank(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(blank, value))
    return None


def check(state: State, writers: Any = WRITERS, readers: Any = READERS) -> None:
    for writer in writers:
        with tempfile.TemporaryDirectory() as folder:
            url = Path(folder) / "ck"
            WRITERS[writer](state, url)
            for reader in readers:
                found = blank(state)
                READERS[reader](found, url)
                assert same(found, state), (writer, reader, found)


W = torch.arange(1.0, 3.0)


def optim(*names: str, scale: float = 1.0) -> State:
    return {
        "state": {n: {"exp_avg": W * scale, "step": torch.tensor(3.0)} for n in names},
        "param_groups": [{"params": list(names), "lr": 0.5 * scale, "betas": (0.9, 0.99)}],
    }


STATES: dict[str, State] = {
    "a policy": {"policy": {"w": W}},
    "a network": {"network": {"w": W, "b": W + 1}, "step": 3},
    "an average": {"ema": {"w": W}},
    "a student": {"student": {"w": W}, "optimizer": optim("w")},
    "generators": {"rng": {"cpu": torch.arange(5, dtype=torch.uint8)}},
    "a list": {"l": [W, W + 1]},
    "lists": {"l": [[W, [W + 1, {"x": W + 2, "y": 5}]], None, [1, [2]], []]},
    "names that would meet": {"model": {"w": W, "ema.w": W + 1}, "w": W + 2, "ema": {"w": W + 3}},
    "a state called weight": {"model": {"w": W}, "optim": {"state": {"w": {"weight": W + 1}}, "param_groups": [1]}},
    "two optimizers": {"G": {"w": W}, "D": {"w": W + 1}, "g_opt": optim("w"), "d_opt": optim("w", scale=2.0)},
    "two of one": {"model": {"w": W}, "one": optim("w"), "two": optim("w", scale=2.0)},
    "actor and critic": {n: {"model": {"w": W * i}, "optim": optim("w", scale=i)} for i, n in enumerate("ac", 2)},
    "twins": {"a": {"w": W}, "b": {"w": W + 1}, "x": optim("w"), "y": optim("w", scale=2.0)},
    "numbers": {"net": {"w": W}, "optim": {"state": {"0": {"exp_avg": W}}, "param_groups": [{"params": [0], "lr": 1}]}},
    "flat": {"model": {"a.b": W}, "optim": {"state.a.b.exp_avg": W, "param_groups.a.b.lr": 0.5}},
    "plain states": {"model": {"w": W}, "optim": {"state": {"w": {"step": 4}}, "param_groups": [{"params": ["w"]}]}},
    "no groups": {"model": {"w": W}, "optim": {"state": {}, "param_groups": []}},
    "odd groups": {"optim": {"param_groups": {"a": W, "b": 2}}, "param_groups.x": 1, "param_groups": 3},
    "rates": {"m": {"w": W}, "o": {"param_groups": [{"params": ["w"], "lr": torch.tensor(0.5), "x": {"y": [1]}}]}},
    "names in groups": {"o": {"param_groups": [{"params": ["w"], "param_names": ["w"], "lr": 1}]}},
    "dots and dollars": {"a.b": {"c.d": W, "$x": 1, "$int:3": 2, "": 7}, "$y": W, ".": 1, "3": {"4": W}},
    "empties": {"a": {}, "b": [], "c": [{}, {"x": 1}, {}], "d": {"e": {}}, "f": [{"g": {}, "h": 1}], "i": W[:0]},
    "tuples": {"t": (1, (2, [3])), "u": [(1,), {"v": ()}]},
    "tensors in tuples": {"t": (W, 5), "u": [(W, {"x": W + 1, "y": 2})]},
    "scalars": {"step": torch.tensor(7), "deep": {"loss": torch.tensor(0.5, dtype=torch.bfloat16)}, "none": None},
    "bytes": {"b": b"\x80\x04N.", "s": {"b": b""}},
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("state", STATES)
def test_what_is_saved_comes_back(state: str, writer: str) -> None:
    check(STATES[state], [writer])


@pytest.mark.parametrize("writer", ["Writer", "stock", "converted"])
@pytest.mark.parametrize("state", [s for s in STATES if "tuples" not in s])
def test_the_metadata_lists_the_names_that_were_saved(
    state: str, writer: str, tmp_path: Path
) -> None:
    _stock(STATES[state], tmp_path / "stock")
    WRITERS[writer](STATES[state], tmp_path / "ck")
    found = ucf.Reader(tmp_path / "ck").read_metadata().state_dict_metadata
    expected = dcp.FileSystemReader(tmp_path / "stock").read_metadata().state_dict_metadata
    assert {*found} == {*expected}


def test_a_placeholder_is_no_value(tmp_path: Path) -> None:
    """FSDP1 asks for all entries of an optimizer, with a text in the place of each that is no tensor."""
    WRITERS["Writer"]({"model": {"w": W}, "optim": optim("w")}, tmp_path / "ck")
    asked = {f"optim.param_groups.0.{option}": "<bytes_io>" for option in ("params", "lr", "betas")}
    READERS["Reader"](asked, tmp_path / "ck")
    assert [*asked.values()] == [["w"], 0.5, (0.9, 0.99)]


WORDS = [
    "model",
    "net",
    "policy",
    "ema",
    "optim",
    "state",
    "param_groups",
    "params",
    "lr",
    "weight",
    "exp_avg",
    "w",
    "0",
]
keys = st.sampled_from(WORDS) | st.text("ab.0$é_ ", max_size=4)
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = draw(st.integers(0, 1 << 20))
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) + values).to(
        draw(st.sampled_from(DTYPES))
    )


plain = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
leaves = st.deferred(lambda: tensors() | plain)
values = st.recursive(
    leaves,
    lambda inner: (
        st.dictionaries(keys, inner, max_size=4)
        | st.lists(inner, max_size=3)
        | st.lists(plain, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


def has_empty(value: Any, in_list: bool = False) -> bool:
    """Whether a list holds an empty dictionary, of which DCP itself saves nothing, or the whole is one."""
    if isinstance(value, dict):
        return (in_list and not value) or any(has_empty(v, in_list) for v in value.values())
    return isinstance(value, list) and any(has_empty(v, True) for v in value)


def entries(value: Any, path: tuple[Any, ...] = ()) -> list[str]:
    """The names of all that may be an entry."""
    inner: Any = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [dotted(path), *(name for k, v in inner for name in entries(v, (*path, k)))]


states = st.dictionaries(keys, values, min_size=1, max_size=4).filter(lambda s: not has_empty(s))


@given(states)
@settings(
    max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
def test_any_state_comes_back_all_ways_round(state: State) -> None:
    assume(len(set(found := entries(state))) == len(found))
    check(state, WRITERS.keys() - {"packed"})
