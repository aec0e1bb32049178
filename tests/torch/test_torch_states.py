"""PyTorch's further kinds of trainings: several stages on a rank, Muon, shards of columns, context parallel."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
from tests.torch.ranks import Ranks
from tests.torch.torch_program import (
    AFTER,
    BEFORE,
    Wide,
    adamw,
    attending,
    low_bit_state,
    muon_state,
    plain,
    train,
    train_attending,
    train_low_bit,
)
from ucformat.errors import UsageError
from ucformat.torch import StateParts, load, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NEEDS_TORCHAO = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs torchao: pip install torchao"
)
RANKS = Ranks("tests.torch.torch_program")
State = dict[str, Any]


def one(folder: Path, make: Callable[[int], State]) -> list[float]:
    """Save what one process has trained; its next losses."""
    state = make(0)
    train(state, BEFORE)
    save(state, folder / "one", certify=True)
    return train(state, AFTER)


def into_one(place: Path, make: Callable[[int], State]) -> list[float]:
    """The losses of one process that goes on from what ranks have saved."""
    state = make(1)
    assert load(state, place, strict=True, certify=True)
    return train(state, AFTER)


def adam_state(seed: int) -> State:
    model = plain(seed)
    return {"model": model, "optimizer": adamw(model), "done": 0}


@pytest.mark.parametrize(
    ("one_optimizer", "cut"),
    [
        (False, False),
        (True, False),
        pytest.param(False, True, marks=pytest.mark.matrix, id="cut"),
    ],
)
def test_several_stages_on_a_rank(tmp_path: Path, one_optimizer: bool, cut: bool) -> None:
    """Interleaved1F1B: stages 0 and 2 on a rank, 1 and 3 on the other; `cut`: with FSDP2 in each stage."""
    reference = one(tmp_path, adam_state)
    results = RANKS.run(
        "interleaved", 4 if cut else 2, tmp_path, one_optimizer=one_optimizer, cut=cut
    )
    finishing = [r for r in results if r[0]]
    assert finishing
    for expected, found, from_one, _ in finishing:
        assert found == expected
        assert expected == pytest.approx(reference, rel=1e-5)
        assert from_one == pytest.approx(reference, rel=1e-5)
    assert into_one(tmp_path / "stages", adam_state) == pytest.approx(reference, rel=1e-5)
    names = {key.name for key in ucformat.open(tmp_path / "stages").tensors}
    assert names == set(plain().state_dict())


def test_parts_that_name_one_entry_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two parts of model have the entry"):
        save({"model": StateParts([plain(), plain()])}, tmp_path / "ck")
    assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize("combined", [False, True])
def test_muon_for_matrices_beside_adamw(tmp_path: Path, combined: bool) -> None:
    def make(seed: int) -> State:
        return muon_state(plain(seed), combined=combined)

    reference = one(tmp_path, make)
    for expected, found, from_one in RANKS.run("muon", 2, tmp_path, combined=combined):
        assert found == expected
        assert expected == pytest.approx(reference, rel=1e-3)
        assert from_one == pytest.approx(reference, rel=1e-3)
    assert into_one(tmp_path / "cut", make) == pytest.approx(reference, rel=1e-3)
    ck = ucformat.open(tmp_path / "cut")
    assert set(ck.states("layers.0.up.weight")) == {"weight", "momentum_buffer"}
    assert {"weight", "exp_avg"} <= set(ck.states("layers.0.up.bias"))
    matrices = ["layers.0.up.weight", "layers.0.down.weight"]
    (group,) = (g for g in ck.manifest.groups if "momentum" in g.options)
    assert list(group.params)[:2] == matrices


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_shards_of_columns_and_of_both(tmp_path: Path, ranks: int) -> None:
    """`Shard(1)` under FSDP2 on 2 ranks; FSDP2 over tensor parallelism on 2 x 2, both uneven."""

    def make(seed: int) -> State:
        torch.manual_seed(seed)
        model = Wide()
        return {"model": model, "optimizer": adamw(model), "done": 0}

    reference = one(tmp_path, make)
    for expected, found, from_one in RANKS.run("matrices", ranks, tmp_path):
        assert found == expected
        assert expected == pytest.approx(reference, rel=1e-5)
        assert from_one == pytest.approx(reference, rel=1e-5)
    assert into_one(tmp_path / "cut", make) == pytest.approx(reference, rel=1e-5)


@NEEDS_TORCHAO
def test_weights_that_torchao_casts_in_the_all_gather(tmp_path: Path) -> None:
    """They are saved as what is inside, which a plain model takes under another name."""
    for equal, said in RANKS.run("float8", 2, tmp_path):
        assert equal
        assert "0.weight is a WeightWith" in said.replace("torchao.float8.fsdp_utils.", "")
        assert "in the checkpoint it is not" in said


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_context_parallelism(tmp_path: Path, ranks: int) -> None:
    """What PyTorch cuts along the sequence, in place or not, is whole in the checkpoint, or refused."""

    def make(seed: int) -> State:
        model = attending(seed)
        return {"model": model, "optimizer": adamw(model), "done": 0}

    state = make(0)
    train_attending(state, BEFORE)
    save(state, tmp_path / "one", certify=True)
    reference = train_attending(state, AFTER)
    for result in RANKS.run("context", ranks, tmp_path):
        for losses in result["losses"]:
            assert losses == pytest.approx(reference, rel=1e-5)
        *inside, after = result["refused"]
        for said in inside:
            assert "model.angles may be a part that context_parallel has cut" in said
        assert "model.angles" in after
    again = make(1)
    assert load(again, tmp_path / "cut", strict=True, certify=True)
    assert torch.equal(again["model"].angles, state["model"].angles)
    assert train_attending(again, AFTER) == pytest.approx(reference, rel=1e-5)
    assert not (tmp_path / "inside").exists()


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_states_in_8_bits(tmp_path: Path, library: str) -> None:
    """Whole ones go on from their codes, in any number of processes; those of FSDP1's cuts are refused by name."""
    pytest.importorskip(library, reason=f"needs {library}: pip install {library}")
    kinds = ["ddp", "orig"] if library == "bitsandbytes" else ["ddp", "orig", "fsdp2"]
    results = RANKS.run("low_bit", 2, tmp_path, library=library, kinds=kinds)
    for result in results:
        refused = result.pop("orig")
        assert "optimizer.state.0.weight" in refused
        assert "FSDP1" in refused
        for expected, resumed in result.values():
            assert resumed == expected
    assert not (tmp_path / "orig").exists()
    for kind in results[0]:
        state = low_bit_state(1, library, "one")
        assert load(state, tmp_path / kind, strict=True, certify=True)
        assert train_low_bit(state, AFTER) == results[0][kind][0]
    codes = {k for k, t in ucformat.open(tmp_path / "ddp").tensors.items() if t.dtype == "uint8"}
    assert {key.name for key in codes} == {"0.weight", "2.weight"}


def test_plain_states_of_sharded_parameters_are_refused(tmp_path: Path) -> None:
    """They are this rank's shards; equal ones, such as zeros, would pass for replicas of whole tensors."""
    for result in RANKS.run("low_bit", 2, tmp_path, library="local", kinds=["fsdp2"]):
        assert "0.weight.average is a plain tensor of the shape [64, 64]" in result["fsdp2"]
    assert not (tmp_path / "fsdp2").exists()
