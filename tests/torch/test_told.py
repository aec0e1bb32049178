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
from ucformat.reading.readable import IntKey, Place
from ucformat.schema.manifest import LineageDoc
from ucformat.torch.comm.wire import decode, encode
from ucformat.torch.saving.assignment import Bundle, Claim, Fragment, Message, Shard
from ucformat.torch.saving.manifest import Listing, Note
from ucformat.torch.saving.plan import Part, Terms
from ucformat.torch.saving.save import Saved
from ucformat.torch.saving.worker import Answer, Beat, Buffer, Done, Failed, Forget, Order, Start

if TYPE_CHECKING:
    from pathlib import Path

FRAGMENTS = (Fragment(1, 2, 3, 4, BOX), Fragment(0, 0, 0, 0, Box((), ())))
LISTING = Listing(
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
    places=(None, Place(("optim", 1), ("x",), flattened=True)),
    stall=0.25,
)

TOLD: list[tuple[Any, Any]] = [
    ((Claim(INFO, (BOX, BOX), (("m", 1),)), Claim(INFO, ())), tuple[Claim, ...]),
    (Part((INFO,), ((1, 2),), (Bundle((Shard(1, (0, 1), FRAGMENTS),)),), (Message(1, 0, FRAGMENTS),)), Part | None),
    (Terms("s3://x", "zarr", True, None, 7, "first"), Terms),
    (LISTING, Listing),
    (Note(3, None, {"loss": 0.5}, {"a": {"b": []}}, (LineageDoc(kind="resume", url="u", id=None),)), Note),
    (Start(1, (("10.0.0.1", 1234), ("::1", 5)), b"s" * 32, 7, 30.0), Start),
    *((order, Order) for order in (Buffer(0, 4096), Forget(3), Failed(2, "no memory"))),
    *((answer, Answer) for answer in (Beat(), Done(1, Saved("u", "id", 3, 0.5, 1.5), whole=True))),
    (Note(lineage=(LineageDoc(kind="resume", url="u"),)), Note),
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


@pytest.mark.parametrize("kind", [Order, Answer, Start, Terms, Part | None, tuple[Claim, ...]], ids=str)
def test_pickles_are_refused_and_not_run(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(IntegrityError):
        decode(pickle.dumps(Attack(tmp_path / "ran")), kind)
    assert not (tmp_path / "ran").exists()


def test_an_error_of_a_writer_is_told_with_its_words() -> None:
    found = decode(encode(Done(1, Conflict("x", hint="y"), whole=False), Answer), Answer).outcome
    assert (type(found), found.message, found.hint) == (Conflict, "x", "y")


def test_a_plan_is_smaller_than_its_pickle() -> None:
    boxes = tuple(Box((7 * i, 0), (7, 4096)) for i in range(10_000))
    claims = (Claim(TensorInfo("w", "weight", "float32", (70_000, 4096)), boxes),)
    assert len(encode(claims, tuple[Claim, ...])) < 0.8 * len(pickle.dumps(claims, 5))
