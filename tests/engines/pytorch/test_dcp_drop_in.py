"""What programs do with the stock classes of `torch.distributed.checkpoint`, done with ours: the same comes out."""

from __future__ import annotations

import io
from collections import namedtuple
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict,
    _load_state_dict_from_keys,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import ucformat.torch as ucf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore:Detected an existing checkpoint",
    "ignore:TypedStorage is deprecated",
    "ignore:Casting complex values",
)

STOCK = (dcp.FileSystemWriter, dcp.FileSystemReader)
OURS = (ucf.Writer, ucf.Reader)
Classes = tuple[Any, Any]


def state_of(seed: int) -> dict[str, Any]:
    """A trained model, and whatever else programs keep beside it."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.rand(5, 3)).sum().backward()
    optimizer.step()
    return {
        "net": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": {
            "last_epoch": seed,
            "base_lrs": [0.1, 0.2 + seed],
            "last": torch.tensor(float(seed)),
        },
        "history": [1.5, {"loss": seed}, torch.full((2,), float(seed)), [seed, [None, "x"]]],
        "blob": io.BytesIO(bytes([seed])),
        "raw": bytes([seed, 1]),
        "done": seed > 1,
        "pair": (seed, [2]),
        "a.b": {"c": seed},
        "empty": {},
        "nothing": [],
    }


def lines(value: Any, path: str = "") -> list[str]:
    """What can be compared of a value: each leaf by its path, with the types on the way, and all in order."""
    kind = f"{path}<{type(value).__name__}>"
    if isinstance(value, dict):
        return [kind, *(line for k, v in value.items() for line in lines(v, f"{kind}.{k!r}"))]
    if isinstance(value, list | tuple):
        return [kind, *(line for k, v in enumerate(value) for line in lines(v, f"{kind}[{k}]"))]
    if isinstance(value, set | frozenset):
        return [f"{kind} {sorted(map(repr, value))}"]
    if isinstance(value, torch.Tensor | np.ndarray):
        return [f"{kind} {value.dtype} {value.tolist()}"]
    return [f"{kind} {value.getvalue() if isinstance(value, io.BytesIO) else value!r}"]


def outcome(do: Callable[[Classes, Path], Any], classes: Classes, place: Path) -> list[str]:
    """What comes out, or the kind of the error."""
    try:
        return lines(do(classes, place))
    except CheckpointException as error:
        return [f"raises {type(next(iter(error.failures.values()))[0]).__name__}"]
    except (ValueError, KeyError, RuntimeError) as error:
        return [f"raises {type(error).__name__}"]


def saved(classes: Classes, place: Path, state: Any = None, planner: Any = None) -> None:
    dcp.save(
        state_of(1) if state is None else state, storage_writer=classes[0](place), planner=planner
    )


def loaded(classes: Classes, place: Path, state: Any, planner: Any = None) -> Any:
    dcp.load(state, storage_reader=classes[1](place), planner=planner)
    return state


def whole(classes: Classes, place: Path) -> Any:
    saved(classes, place)
    return loaded(classes, place, state_of(5))


def without_dist(classes: Classes, place: Path) -> Any:
    state = state_of(5)
    dcp.save(state_of(1), storage_writer=classes[0](place), no_dist=True)
    dcp.load(state, storage_reader=classes[1](place), no_dist=True)
    return state


def by_id(classes: Classes, place: Path) -> Any:
    out = []
    for n, where in enumerate((place / "path", f"{place}/text")):
        writer, reader = classes[0]("elsewhere"), classes[1]("elsewhere")
        dcp.save({"n": n, "w": torch.ones(2) * n}, checkpoint_id=where, storage_writer=writer)
        state = {"n": -1, "w": torch.zeros(2)}
        dcp.load(state, checkpoint_id=where, storage_reader=reader)
        out.append(
            [state, reader.checkpoint_id == where or str(reader.checkpoint_id) == str(where)]
        )
    return out


def part(classes: Classes, place: Path) -> Any:
    saved(classes, place)
    state = state_of(5)
    return loaded(classes, place, {k: state[k] for k in ("net", "scheduler", "done")})


def more(classes: Classes, place: Path) -> Any:
    saved(classes, place)
    return loaded(classes, place, {"net": state_of(2)["net"], "new": torch.zeros(2)})


def more_allowed(classes: Classes, place: Path) -> Any:
    saved(classes, place)
    state = {"net": state_of(2)["net"], "new": torch.zeros(2), "also": 3}
    return loaded(classes, place, state, dcp.DefaultLoadPlanner(allow_partial_load=True))


def of_another_shape(classes: Classes, place: Path) -> Any:
    saved(classes, place, {"w": torch.ones(3)})
    return loaded(classes, place, {"w": torch.zeros(4)})


def of_another_kind(classes: Classes, place: Path) -> Any:
    saved(classes, place, {"w": torch.ones(3), "n": 1})
    return loaded(classes, place, {"w": 0, "n": torch.zeros(3)})


def not_flat(classes: Classes, place: Path) -> Any:
    state = {"w": torch.ones(2), "deep": {"t": torch.ones(2), "n": 1}, "n": 3}
    saved(classes, place, state, dcp.DefaultSavePlanner(flatten_state_dict=False))
    back = {"w": torch.zeros(2), "deep": {"t": torch.zeros(2), "n": 0}, "n": 0}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    return loaded(classes, place, back, planner)


def shards_as_they_are(classes: Classes, place: Path) -> Any:
    saved(
        classes,
        place,
        None,
        dcp.DefaultSavePlanner(flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True),
    )
    return loaded(
        classes, place, state_of(5), dcp.DefaultLoadPlanner(flatten_sharded_tensors=False)
    )


def with_a_plan_that_is_kept(classes: Classes, place: Path) -> Any:
    class Kept(dcp.DefaultSavePlanner):  # the cache goes by the name of the class
        pass

    Kept.__name__ = f"Kept{classes[0].__name__}"
    out = []
    for n in (1, 2, 3):
        saved(classes, place / str(n), state_of(n), Kept(enable_plan_caching=True))
        out.append(loaded(classes, place / str(n), state_of(5)))
    return out


def all_that_is_there(classes: Classes, place: Path) -> Any:
    saved(classes, place)
    state: dict[str, Any] = {}
    _load_state_dict(state, classes[1](place), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return dict(sorted(traverse(state).items()))


def by_keys(classes: Classes, place: Path) -> Any:
    saved(classes, place)
    found = [
        _load_state_dict_from_keys(k, storage_reader=classes[1](place))
        for k in ("net", "scheduler.base_lrs")
    ]
    return [dict(sorted(traverse(f).items())) for f in found]


def by_absent_keys(classes: Classes, place: Path) -> Any:
    saved(classes, place)
    return _load_state_dict_from_keys({"model", "invented"}, storage_reader=classes[1](place))


def what_metadata_says(classes: Classes, place: Path) -> Any:
    saved(classes, place)
    return described(classes[1](place).read_metadata())


def described(meta: Any) -> Any:
    entries = {
        k: (type(v).__name__, tuple(getattr(v, "size", ())))
        for k, v in meta.state_dict_metadata.items()
    }
    paths = {k: tuple(v) for k, v in sorted((meta.planner_data or {}).items())}
    return dict(sorted(entries.items())), paths, meta.version


def what_metadata_says_of_packed_objects(classes: Classes, place: Path) -> Any:
    nested = {
        "a": {"b": 1},
        "odd": {1: 2},
        "list": [{"x": torch.ones(2)}, 3],
        "pair": (torch.ones(2), {"x": 1}),
    }
    state = {
        "w": torch.ones(2),
        "deep": nested,
        "in": [{"x": [1]}],
        "none": {},
        "n": 3,
        "plain": [1, [2]],
    }
    saved(classes, place, state, dcp.DefaultSavePlanner(flatten_state_dict=False))
    return dict.fromkeys(sorted(classes[1](place).read_metadata().state_dict_metadata))


def with_a_planner_that_packs(classes: Classes, place: Path) -> Any:
    """Two entries of the program are one of the checkpoint."""

    class Packing(dcp.DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, *args: Any, **options: Any) -> None:
            rest = {k: v for k, v in state_dict.items() if k not in ("a", "b")}
            super().set_up_planner(rest, *args, **options)
            self.state_dict["packed"] = {"a": state_dict["a"], "b": state_dict["b"]}
            self.mappings["packed"] = ("packed",)

    saved(
        classes, place, {"a": 1, "b": [{"c": 2}], "w": torch.ones(2), "deep": {"n": 1}}, Packing()
    )
    state: dict[str, Any] = {}
    _load_state_dict(state, classes[1](place), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return described(classes[1](place).read_metadata()), state


Pair = namedtuple("Pair", "first second")  # noqa: PYI024 - as programs have it


def odd_values() -> dict[str, Any]:
    return {
        "array": np.arange(6.0, dtype=np.float32).reshape(2, 3),
        "turned": np.arange(6).reshape(2, 3).T,
        "text": np.array(["a", "bc"]),
        "half": np.float16(1.5),
        "int": np.int64(7),
        "bool": np.bool_(True),
        "complex": np.complex64(1 + 2j),
        "str": np.str_("x"),
        "dtype": torch.bfloat16,
        "of numpy": np.dtype("float32"),
        "size": torch.Size([2, 3]),
        "frozen": frozenset([(1, 2), 3]),
        "set": {1, 2},
        "bytes": bytearray(b"x"),
        "device": torch.device("cuda", 1),
        "layout": torch.strided,
        "slice": slice(1, 2),
        "inside": (np.float32(1.5), [torch.Size([1]), {"k": np.zeros(2)}]),
    }


def types_that_a_program_does_not_say(classes: Classes, place: Path) -> Any:
    saved(classes, place, odd_values())
    return loaded(classes, place, dict.fromkeys(odd_values()))


def types_of_named_tuples(classes: Classes, place: Path) -> Any:
    saved(classes, place, {"pair": Pair(1, (2, Pair(3, None))), "w": torch.ones(1)})
    return loaded(classes, place, {"pair": None, "w": torch.zeros(1)})


def other_dtypes(classes: Classes, place: Path) -> Any:
    numbers = torch.tensor([0.0, 1.0, -1.0, 1.7, -2.5, 300.3, 1e5])
    state = {str(t): numbers.to(t) for t in DTYPES}
    saved(classes, place, state)
    return [loaded(classes, place, {k: torch.zeros(7, dtype=t) for k in state}) for t in DTYPES]


DTYPES = (
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
)


def in_the_background(classes: Classes, place: Path) -> Any:
    state = state_of(1)
    done = dcp.async_save(
        state,
        storage_writer=classes[0](place),
        async_checkpointer_type=AsyncCheckpointerType.THREAD,
    )
    state["net"]["0.weight"].zero_()
    (done.upload_completion if isinstance(done, AsyncSaveResponse) else done).result(120)
    return loaded(classes, place, state_of(5))


def traverse(state: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    traverse_state_dict(state, lambda path, value: out.update({".".join(map(str, path)): value}))
    return out


DOINGS = (
    *(
        whole,
        without_dist,
        by_id,
        part,
        more,
        more_allowed,
        of_another_shape,
        of_another_kind,
        not_flat,
    ),
    *(
        shards_as_they_are,
        with_a_plan_that_is_kept,
        all_that_is_there,
        by_keys,
        by_absent_keys,
        what_metadata_says,
    ),
    *(
        in_the_background,
        what_metadata_says_of_packed_objects,
        with_a_planner_that_packs,
        other_dtypes,
    ),
    *(types_that_a_program_does_not_say, types_of_named_tuples),
)


@pytest.mark.parametrize("do", DOINGS, ids=lambda do: do.__name__)
def test_ours_does_what_stock_does(tmp_path: Path, do: Callable[[Classes, Path], Any]) -> None:
    stock = outcome(do, STOCK, tmp_path / "stock")
    ours = outcome(do, OURS, tmp_path / "ours")
    assert ours == stock


@pytest.mark.parametrize(
    "do",
    [
        types_that_a_program_does_not_say,
        other_dtypes,
        what_metadata_says,
        what_metadata_says_of_packed_objects,
    ],
)
def test_our_reader_gives_back_what_the_stock_writer_wrote(
    tmp_path: Path, do: Callable[[Classes, Path], Any]
) -> None:
    stock = outcome(do, STOCK, tmp_path / "stock")
    assert outcome(do, (STOCK[0], OURS[1]), tmp_path / "ours") == stock
