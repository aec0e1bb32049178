"""`reshard`: from memory to memory between layouts and ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.torch.ranks import KILLED, Ranks
from ucformat.storage import memory
from ucformat.torch import reshard

if TYPE_CHECKING:
    from pathlib import Path

RANKS = Ranks("tests.torch.tiers.live_program")


def test_between_layouts_and_ranks(tmp_path: Path) -> None:
    cases = {
        "fewer": ([0, 1, 2], "fsdp2", [0, 1], "tp"),
        "more": ([1], "whole", [0, 1, 2], "fsdp2"),
        "others": ([0, 1], "tp", [2], "whole"),
    }
    assert RANKS.run("between", 3, tmp_path, **cases) == [[], [], []]


@pytest.mark.matrix
def test_between_more_layouts_and_ranks(tmp_path: Path) -> None:
    cases = {
        f"{old}{len(olds)} to {new}{len(news)}": (olds, old, news, new)
        for olds, old in (([0, 1, 2, 3], "fsdp2"), ([2, 3], "tp"), ([3], "whole"))
        for news, new in (([0, 1, 2, 3], "fsdp2"), ([0, 1], "tp"), ([1], "whole"))
    }
    assert RANKS.run("between", 4, tmp_path, **cases) == [[], [], [], []]


def test_beside_a_manager_with_tiers(tmp_path: Path) -> None:
    assert RANKS.run("beside_tiers", 2, tmp_path) == [[], []]


def test_what_is_refused(tmp_path: Path) -> None:
    for own, other_shape, lacking in RANKS.run("refused", 2, tmp_path):
        assert "own has a value of each rank" in own
        assert "w (weight) is [5], in the checkpoint [4]" in other_shape
        assert "v" in lacking


def test_a_rank_that_dies(tmp_path: Path) -> None:
    first, second = RANKS.run("killed", 2, tmp_path)
    assert second == KILLED
    assert "rank 1" in first


def test_in_one_process() -> None:
    model, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    assert reshard({"model": model, "step": 7}, into := {"model": other, "step": 0})
    assert torch.equal(model.weight, other.weight)
    assert into["step"] == 7
    assert not [path for path in memory._FILES if "reshard" in path]
