"""All that ranks, and their writers, tell each other comes back as it was; of whatever else comes, nothing runs."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest

from tests.torch.attack import Attack
from tests.torch.test_wire import BOX, INFO, comes_back, tried
from ucformat.errors import Conflict, IntegrityError
from ucformat.format.structure import Problem
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Piece, TensorInfo
from ucformat.jobs.run import Report
from ucformat.reading.readable import GroupPlace, IntKey
from ucformat.schema.manifest import LineageDoc
from ucformat.torch.comm.connections import TreeNode
from ucformat.torch.comm.wire import decode, encode
from ucformat.torch.saving.manifest import SaveMetadata, StateInfo
from ucformat.torch.saving.options import SaveOptions
from ucformat.torch.saving.save import Saved
from ucformat.torch.saving.statement import Description, Exceptions, ListedTensor, Row, WriteItem
from ucformat.torch.saving.worker import (
    Command,
    Heartbeat,
    JobDone,
    MapBuffer,
    Reply,
    StagingFailed,
    UnmapBuffer,
    WorkerStart,
)

if TYPE_CHECKING:
    from pathlib import Path

LISTING = StateInfo(
    tensors=(
        (INFO, (Piece(BOX, 3, (4, 1)), Piece(BOX, 0, (1, 1), "flat"))),
        (TensorInfo("e", "step", "int64", ()), ()),
    ),
    objects={"seed": {"$int:1": [1, 2]}},
    ranks={},
    groups=({"params": ["model.w"], "lr": 0.1}, {"params": []}),
    aliases={"a": "b"},
    layout={"world": 2},
    engine={"name": "torch"},
    paths={INFO.key: (("model", 0, IntKey(0), "w"), ())},
    places=(None, GroupPlace(("optim", 1), ("x",), flattened=True)),
    stall=0.25,
)

TOLD: list[tuple[Any, Any]] = [
    ((WriteItem(INFO, (BOX, BOX), (("m", 1),)), WriteItem(INFO, ())), tuple[WriteItem, ...]),
    (
        Description(None, (), (Row(INFO, -1, weight=True), Row(INFO, -1)), ((BOX, BOX), ())),
        Description,
    ),
    (
        Exceptions(
            "small", (INFO.key,), {}, {b"d": (1,)}, {}, (ListedTensor(INFO, (BOX,), (3,)),), ("s",)
        ),
        Exceptions | None,
    ),
    (
        SaveOptions("s3://x", "zarr", True, "first", None, 7, encode={"s": "adaptive:3"}),
        SaveOptions,
    ),
    (LISTING, StateInfo),
    (
        SaveMetadata(
            3, None, {"loss": 0.5}, {"a": {"b": []}}, (LineageDoc(kind="resume", url="u", id=None),)
        ),
        SaveMetadata,
    ),
    (WorkerStart(TreeNode(1, 5, 0, (2, 3)), ("10.0.0.1", 1234), b"s" * 32, 7, 30.0), WorkerStart),
    *(
        (order, Command)
        for order in (MapBuffer(0, 4096), UnmapBuffer(3), StagingFailed(2, "no memory"))
    ),
    *(
        (answer, Reply)
        for answer in (Heartbeat(), JobDone(1, Saved("u", "id", 3, 0.5, 1.5), intact=True))
    ),
    (SaveMetadata(lineage=(LineageDoc(kind="resume", url="u"),)), SaveMetadata),
    (Report("u", "ucformat", 1, 2, 3, (Problem("c/0", "damaged", "w (weight)"),), ("v",)), Report),
]


@pytest.mark.parametrize(("value", "kind"), TOLD, ids=repr)
def test_what_is_told_comes_back(value: Any, kind: Any) -> None:
    comes_back(value, kind)


@pytest.mark.parametrize(("value", "kind"), TOLD, ids=repr)
def test_no_changed_byte_does_anything(value: Any, kind: Any) -> None:
    told = encode(value, kind)
    for at in range(len(told)):
        tried(told[:at] + bytes([told[at] ^ 1]) + told[at + 1 :], kind)


@pytest.mark.parametrize(
    "kind",
    [Command, Reply, WorkerStart, SaveOptions, Exceptions | None, tuple[WriteItem, ...]],
    ids=str,
)
def test_pickles_are_refused_and_not_run(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(IntegrityError):
        decode(pickle.dumps(Attack(tmp_path / "ran")), kind)
    assert not (tmp_path / "ran").exists()


def test_an_error_of_a_writer_is_told_with_its_words() -> None:
    found = decode(encode(JobDone(1, Conflict("x", hint="y"), intact=False), Reply), Reply).outcome
    assert (type(found), found.message, found.hint) == (Conflict, "x", "y")


def test_a_plan_is_smaller_than_its_pickle() -> None:
    boxes = tuple(Box((7 * i, 0), (7, 4096)) for i in range(10_000))
    items = (WriteItem(TensorInfo("w", "weight", "float32", (70_000, 4096)), boxes),)
    assert len(encode(items, tuple[WriteItem, ...])) < 0.8 * len(pickle.dumps(items, 5))
