"""The weights of a checkpoint as plain tensors: which, of which state, in which dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import ucformat
import ucformat.torch
from tests.fakes import FakeSource, random_array
from ucformat.checkpoint import Checkpoint
from ucformat.errors import ChecksumError, TensorNotFound, UsageError
from ucformat.storage.memory import MemoryStore
from ucformat.torch import state_dict

if TYPE_CHECKING:
    from pathlib import Path

ARRAYS = {
    ("embed.weight", "weight"): random_array((11, 6), "bfloat16", 1),
    ("embed.weight", "master"): np.linspace(-3, 3, 66, dtype=np.float32).reshape(11, 6),
    ("embed.weight", "exp_avg"): random_array((11, 6), "float32", 2),
    ("layers.1.up", "weight"): np.linspace(0, 1, 20, dtype=np.float32).reshape(4, 5),
    ("layers.1.up", "master"): np.linspace(1, 2, 20, dtype=np.float32).reshape(4, 5),
    ("layers.10.up", "master"): np.linspace(5, 6, 20, dtype=np.float32).reshape(4, 5),
    ("layers.10.seen", "weight"): np.array(2**40 + 1, np.int64),
    ("layers.10.none", "weight"): np.empty((0, 3), np.float32),
    ("step", "exp_avg"): np.ones(3, np.float32),
}
NAMES = {
    "embed.weight",
    "layers.1.up",
    "layers.10.up",
    "layers.10.seen",
    "layers.10.none",
    "head.weight",
}


@pytest.fixture
def ck(tmp_path: Path) -> Checkpoint:
    """Universal, of two chunks and more for each matrix."""
    store = MemoryStore(tmp_path.name)
    foreign = Checkpoint(FakeSource.write(store, ARRAYS, aliases={"head.weight": "embed.weight"}))
    return ucformat.convert(foreign, tmp_path / "ck", chunk_bytes=64)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


def test_all_weights_come_as_stored(ck: Checkpoint, tmp_path: Path) -> None:
    found = state_dict(str(tmp_path / "ck"))
    assert set(found) == NAMES
    for name in NAMES - {"head.weight"}:
        expected = ARRAYS[(name, "weight") if (name, "weight") in ARRAYS else (name, "master")]
        assert (str(found[name].dtype), tuple(found[name].shape)) == (
            f"torch.{expected.dtype}",
            expected.shape,
        )
        assert bits(found[name]) == expected.tobytes()
    assert found["head.weight"] is found["embed.weight"]
    assert found["layers.10.seen"].item() == 2**40 + 1


def test_float32_is_taken_from_the_master_copy_and_other_dtypes_are_cast(ck: Checkpoint) -> None:
    full = state_dict(ck, dtype=torch.float32)
    assert bits(full["embed.weight"]) == ARRAYS["embed.weight", "master"].tobytes()
    assert bits(full["layers.1.up"]) == ARRAYS["layers.1.up", "master"].tobytes()
    assert full["layers.10.seen"].dtype == torch.int64  # no float: not cast
    half = state_dict(ck, dtype=torch.bfloat16)
    assert bits(half["embed.weight"]) == ARRAYS["embed.weight", "weight"].tobytes()
    assert torch.equal(
        half["layers.1.up"], torch.tensor(ARRAYS["layers.1.up", "weight"]).bfloat16()
    )
    assert half["layers.10.none"].dtype == torch.bfloat16
    assert half["head.weight"] is half["embed.weight"]
    with pytest.raises(UsageError, match=r"cannot be cast to torch\.int8"):
        state_dict(ck, dtype=torch.int8)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("layers.1", {"layers.1.up"}),
        ("layers.10.", {"layers.10.up", "layers.10.seen", "layers.10.none"}),
        ("layers.1.up", {"layers.1.up"}),
        ("*.up", {"layers.1.up", "layers.10.up"}),
        ("head.weight", {"head.weight"}),
        (["embed", "head.weight"], {"embed.weight", "head.weight"}),
        ((n for n in ["layers.10.seen"]), {"layers.10.seen"}),
        ([], set()),
    ],
)
def test_names_are_chosen_by_name_beginning_or_glob(
    ck: Checkpoint, names: Any, expected: set[str]
) -> None:
    assert set(state_dict(ck, names)) == expected


def test_a_name_that_fits_nothing_is_an_error_that_offers_the_nearest(ck: Checkpoint) -> None:
    with pytest.raises(TensorNotFound, match=r"no weight 'layers\.1\.upp'") as caught:
        state_dict(ck, ["embed.weight", "layers.1.upp"])
    assert "layers.1.up" in str(caught.value.hint)
    with pytest.raises(
        TensorNotFound, match="no weight 'step'"
    ):  # it has an optimizer's state only
        state_dict(ck, "step")


def test_only_what_is_asked_for_is_read(ck: Checkpoint, tmp_path: Path) -> None:
    for (name, state), _ in ARRAYS.items():
        if name != "layers.1.up" or state != "weight":
            for shard in (tmp_path / "ck").glob(f"data/*/{state}/{name}/c/**/*"):
                if shard.is_file():
                    shard.write_bytes(bytes(shard.stat().st_size))
    assert (
        bits(state_dict(ck, "layers.1.up")["layers.1.up"])
        == ARRAYS["layers.1.up", "weight"].tobytes()
    )
    with pytest.raises(ChecksumError, match="embed"):
        state_dict(ck, "embed")


def test_names_are_made_anew(ck: Checkpoint) -> None:
    found = state_dict(ck, "model", rename={r"layers\.(\d+)\.up": r"model.\1.up_proj"})
    assert set(found) == {"model.1.up_proj", "model.10.up_proj"}
    assert bits(found["model.1.up_proj"]) == ARRAYS["layers.1.up", "weight"].tobytes()


def test_a_saved_model_is_loaded_by_one_line(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.embed = torch.nn.Embedding(13, 4)
            self.head = torch.nn.Linear(4, 13, bias=False)
            self.head.weight = self.embed.weight

    trained, fresh = Tied(1), Tied(2)
    ucformat.torch.save({"model": trained, "seen": 5}, tmp_path / "packed", form="packed")
    found = state_dict(tmp_path / "packed", device="cpu", threads=1)
    assert found["embed.weight"] is found["head.weight"]
    fresh.load_state_dict(found)
    assert torch.equal(fresh.embed.weight, trained.embed.weight)
