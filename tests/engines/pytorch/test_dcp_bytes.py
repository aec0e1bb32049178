"""Values that are bytes, of the program or of somebody else: what comes back, and that none of it is ever run."""

from __future__ import annotations

import io
import pickle
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ucformat
import ucformat.torch as ucf
from ucformat.errors import UnsafeError

if TYPE_CHECKING:
    from collections.abc import Callable

    Save = Callable[[dict[str, Any], Path], object]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

WRITERS: dict[str, Save] = {
    "Writer": lambda state, place: dcp.save(state, storage_writer=ucf.Writer(place)),
    "packed": lambda state, place: dcp.save(state, storage_writer=ucf.Writer(place, form="packed")),
    "stock": lambda state, place: dcp.save(state, storage_writer=dcp.FileSystemWriter(place)),
    "save": ucf.save,
    "encoded": lambda state, place: dcp.save(
        state, storage_writer=ucf.Writer(place), planner=Encoding()
    ),
}


class Trap:
    """An object whose pickle makes a file when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


class Encoding(dcp.DefaultSavePlanner):
    """Encodes values itself."""

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - DCP's name
        return super().transform_object(write_item, object)


class Seen(dcp.DefaultLoadPlanner):
    """Looks at what it is given before it opens it."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, bytes] = {}

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.given[read_item.dest_index.fqn] = value.getvalue()
        super().load_bytes(read_item, value)


def trapped(tmp_path: Path) -> tuple[bytes, bytes, Path]:
    """A malicious pickle, alone and in a file of torch.save, and what would be there if one was opened."""
    mark = tmp_path / "it ran"
    file = io.BytesIO()
    torch.save(Trap(mark), file)
    return pickle.dumps(Trap(mark)), file.getvalue(), mark


def load(state: dict[str, Any], place: Path, planner: Any = None, **options: Any) -> None:
    dcp.load(state, storage_reader=ucf.Reader(place, **options), planner=planner)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_in_memory_comes_back_as_one_and_is_never_opened(
    tmp_path: Path, writer: str
) -> None:
    alone, file, mark = trapped(tmp_path)
    behind = io.BytesIO(b"not at its beginning")
    behind.seek(5)
    held = {"alone": alone, "file": file, "empty": b"", "behind": behind.getvalue()}
    streams: dict[str, Any] = {k: io.BytesIO(v) for k, v in held.items()} | {"behind": behind}
    WRITERS[writer](
        {"model": {"w": torch.ones(3)}, **streams, "deep": {"in": [io.BytesIO(alone), 1]}},
        tmp_path / "ck",
    )
    assert not mark.exists()
    for planner in (
        None,
        Seen(),
        dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    ):
        if isinstance(planner, dcp.DefaultLoadPlanner) and not planner.flatten_state_dict:
            state: dict[str, Any] = dict.fromkeys(held)
        else:
            state = {
                "model": {"w": torch.zeros(3)},
                **dict.fromkeys(held),
                "deep": {"in": [None, 0]},
            }
        load(state, tmp_path / "ck", planner)
        assert not mark.exists()
        assert {k: state[k].read() for k in held} == held
        assert {type(state[k]) for k in held} == {io.BytesIO}
        if "deep" in state:
            assert (state["deep"]["in"][0].getvalue(), state["deep"]["in"][1]) == (alone, 1)
            assert state["model"]["w"].tolist() == [1, 1, 1]
        if isinstance(planner, Seen):
            assert not set(held.values()) & set(
                planner.given.values()
            )  # nothing that a file holds, but our encoding
    state = {"model": {"w": torch.zeros(3)}, **dict.fromkeys(held)}
    ucf.load(state, tmp_path / "ck")
    assert {k: state[k].read() for k in held} == held
    assert not mark.exists()


def test_a_planner_may_hand_on_bytes_that_it_did_not_make(tmp_path: Path) -> None:
    alone, file, mark = trapped(tmp_path)

    class Passing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            held = self.lookup_object(write_item.index)
            return held if isinstance(held, io.BytesIO) else super().resolve_data(write_item)

    state = {"alone": io.BytesIO(alone), "file": io.BytesIO(file), "w": torch.ones(3), "n": 7}
    dcp.save(state, storage_writer=ucf.Writer(tmp_path / "ck"), planner=Passing())
    back: dict[str, Any] = {"alone": None, "w": torch.zeros(3), "n": 0}
    load(back, tmp_path / "ck")
    assert (back["alone"].getvalue(), back["w"].tolist(), back["n"]) == (alone, [1, 1, 1], 7)
    with pytest.raises(CheckpointException, match="trust=True"):
        load(
            {"file": None}, tmp_path / "ck"
        )  # what torch.save wrote of a class is opened by nobody unasked
    assert not mark.exists()


def test_a_stock_checkpoint_with_a_pickle_of_a_class_opens_and_loads_its_tensors(
    tmp_path: Path,
) -> None:
    _, _, mark = trapped(tmp_path)
    state = {"model": {"w": torch.arange(3.0)}, "step": Trap(mark), "third": Fraction(1, 3), "n": 7}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"))
    ck = ucformat.open(tmp_path / "stock")
    assert (ck.manifest.step, ck.objects["n"]) == (None, 7)
    for place in (
        tmp_path / "stock",
        Path(ucformat.convert(tmp_path / "stock", tmp_path / "ck").url),
    ):
        back: dict[str, Any] = {"model": {"w": torch.zeros(3)}, "n": 0}
        load(back, place)
        assert (back["model"]["w"].tolist(), back["n"]) == ([0, 1, 2], 7)
        plain = {"w": torch.zeros(3)}
        ucf.load(plain, place)
        assert plain["w"].tolist() == [0, 1, 2]
        with pytest.raises(CheckpointException) as caught:
            load({"third": None}, place)
        error = caught.value.failures[0][0]
        assert "trust=True" in str(error)
        assert "DeepSpeed" not in str(error)
        trusting: dict[str, Any] = {"third": None}
        load(trusting, place, trust=True)
        assert trusting["third"] == Fraction(1, 3)
    assert not mark.exists()


def test_a_hint_names_an_option_that_every_format_has(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "third": Fraction(1, 3)}, tmp_path / "x.pt")
    with pytest.raises(UnsafeError) as caught:
        ucformat.open(tmp_path / "x.pt")
    assert "'allow': ['fractions']" in str(caught.value.hint)
    assert "DeepSpeed" not in str(caught.value.hint)
    assert ucformat.open(tmp_path / "x.pt", options={"allow": ["fractions"]}).names() == ["w"]
