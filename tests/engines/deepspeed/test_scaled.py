"""Affine maps whose parts are held times a factor: a checkpoint of AutoTP, its parameters scaled as the map says."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ucformat
from tests.modules import module_of
from tests.sources.suite import DATA
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import UnsupportedError
from ucformat.testing.sources import read_whole

NORM, ROWS = "model.norm.weight", "model.layers.0.self_attn.o_proj.weight"
MADE = DATA / "deepspeed" / "tp2-z0" / "ckpt"


def scaled(tmp_path: Path, name: str, factors: dict[int, float], change: Any = None) -> Path:
    """The checkpoint with the parts of a parameter times a factor, by rank."""
    folder = tmp_path / "scaled"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(MADE, folder)
    for rank, path in enumerate(sorted(folder.rglob("mp_rank_*"))):
        state = torch.load(path, weights_only=False)
        tensor = state["module"][name]
        if change is not None:
            change(tensor)
        state["module"][name] = tensor * factors[rank]
        maps = state["universal_checkpoint_info"]["affine_map"]["params"]
        ranks = next(v for k, v in maps.items() if k.replace("\\", "").strip("^$") == name)["ranks"]
        for number, part in ranks.items():
            for piece in part["pieces"]:
                piece["scale"] = factors[number]
        torch.save(state, path)
    return folder


@pytest.mark.parametrize("name", [NORM, ROWS])
@pytest.mark.parametrize("factor", [0.5, 2.0**-10, 4.0])
def test_powers_of_two_are_undone(name: str, factor: float, tmp_path: Path) -> None:
    folder = scaled(tmp_path, name, {0: factor, 1: factor})
    ck, whole = open_checkpoint(folder), open_checkpoint(MADE)
    assert ck[name].read().tobytes() == whole[name].read().tobytes()
    assert ck[name][3:9].tobytes() == whole[name][3:9].tobytes()
    with pytest.raises(UnsupportedError, match=f"{name} .*is scaled"):
        ck[name, "exp_avg"].read()
    states = [{"drop": [name], "states": ["exp_avg", "exp_avg_sq"]}]
    viewed = ucformat.open(folder, view=states)
    ucformat.convert(viewed, tmp_path / "made", overwrite=True)
    made = read_whole(open_checkpoint(tmp_path / "made"))
    expected = read_whole(ucformat.open(MADE, view=states))
    assert made == expected


@pytest.mark.parametrize(
    "factors",
    [{0: 1 / 3, 1: 1 / 3}, {0: 0.5, 1: 0.25}, {0: -2.0, 1: -2.0}, {0: math.inf, 1: math.inf}],
)
def test_others_are_refused(factors: dict[int, float], tmp_path: Path) -> None:
    ck = open_checkpoint(scaled(tmp_path, ROWS, factors))
    with pytest.raises(UnsupportedError, match="the same power of two"):
        ck[ROWS].read()
    assert ck[NORM].read().size


def test_a_value_that_was_lost_is_refused(tmp_path: Path) -> None:
    """What is stored would be beyond float32 without the factor."""

    def change(tensor: torch.Tensor) -> None:
        tensor[2] = 3e38

    ck = open_checkpoint(scaled(tmp_path, NORM, {0: 0.5, 1: 0.5}, change))
    assert ck[NORM].read()[2] == torch.tensor(3e38)
    folder = scaled(tmp_path, NORM, {0: 1.0, 1: 1.0}, change)
    for path in folder.rglob("mp_rank_*"):
        state = torch.load(path, weights_only=False)
        for pattern, entry in state["universal_checkpoint_info"]["affine_map"]["params"].items():
            if "norm" in pattern and "layers" not in pattern:
                for part in entry["ranks"].values():
                    part["pieces"][0]["scale"] = 0.5
        torch.save(state, path)
    with pytest.raises(UnsupportedError, match="not exactly a float32"):
        open_checkpoint(folder)[NORM].read()


def test_it_is_what_deepspeed_makes_of_it(tmp_path: Path) -> None:
    """Its own class joins the parts; no version up to 0.19.8 writes a scale."""
    place = "deepspeed/lib/python3*/site-packages/deepspeed/checkpoint/affine.py"
    path = next((Path(__file__).parents[3] / ".engines").glob(place), None)
    if path is None:
        pytest.skip("needs DeepSpeed: make .engines/deepspeed/.installed")
    affine = module_of(path)
    folder = scaled(tmp_path, ROWS, {0: 0.125, 1: 0.125})
    states = [torch.load(p, weights_only=False) for p in sorted(folder.rglob("mp_rank_*"))]
    maps = states[0]["universal_checkpoint_info"]["affine_map"]["params"]
    entry = next(value for pattern, value in maps.items() if "o_proj" in pattern)
    parts = {rank: state["module"][ROWS] for rank, state in enumerate(states)}
    whole = affine.ParamAffineMap.from_dict(entry).rebuild(parts)
    assert open_checkpoint(folder)[ROWS].read().tobytes() == whole.numpy().tobytes()
