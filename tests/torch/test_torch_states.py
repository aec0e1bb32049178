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
    muon_state,
    plain,
    train,
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


def test_context_parallel_ranks_hold_what_data_parallel_ones_hold(tmp_path: Path) -> None:
    for expected, found in RANKS.run("context", 2, tmp_path):
        assert found == expected
    state = adam_state(1)
    assert load(state, tmp_path / "cut", strict=True, certify=True)
