"""Checkpoints of engines, exported from their files directly and from a universal checkpoint, hold the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.sources.suite import DATA
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.jobs.convert import convert
from ucformat.jobs.export import export
from ucformat.testing.sources import read_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: One of each: dense, tied, experts, bf16, odd sizes, several kinds of parallelism.
SAMPLES = [
    "bytecheckpoint/fsdp2/ckpt",
    "dcp/fsdp2-uneven/ckpt",
    "dcp/tp-strided/ckpt",
    "deepspeed/ep2-dp4-z0-bf16/ckpt",
    "deepspeed/pp2-z1-bf16opt/ckpt",
    "deepspeed/tp2-dp2-z3/ckpt",
    "deepspeed/tp2-z2-tied/ckpt",
    "huggingface/trainer_bf16/ckpt",
    "megatron/ep2-moe/sharded",
    "megatron/pp2-bf16-tied/classic",
]


def _bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


def of_torch(place: Path) -> dict[str, Any]:
    return {name: _bits(tensor) for name, tensor in torch.load(place, weights_only=True).items()}


def of_npz(place: Path) -> dict[str, Any]:
    with np.load(place) as found:
        arrays = {
            n: a.view(ml_dtypes.bfloat16) if a.dtype == np.uint16 else a for n, a in found.items()
        }
    return {
        name: (array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()
    }


def of_orbax(place: Path) -> dict[str, Any]:
    return {
        name: data
        for (state, name), data in read_whole(open_checkpoint(place)).items()
        if state == "weight"
    }


KINDS: dict[str, tuple[str, dict[str, Any], Callable[[Path], dict[str, Any]]]] = {
    "torch": ("out.pt", {}, of_torch),
    "npz": ("out.npz", {"raw": True}, of_npz),
}


def weights(ck: Checkpoint) -> dict[str, Any]:
    found = {
        name: (ck[name].info.dtype, ck[name].shape, ck[name].read().tobytes())
        for name in _weighted(ck)
    }
    return found | {alias: found[name] for alias, name in ck.aliases.items() if name in found}


def _weighted(ck: Checkpoint) -> list[str]:
    return [name for name in ck if {"weight", "master"} & set(ck.states(name))]


@pytest.mark.parametrize("sample", SAMPLES)
def test_weights_are_the_same(sample: str, tmp_path: Path) -> None:
    source = open_checkpoint(DATA / sample)
    expected = weights(source)
    convert(source, tmp_path / "universal")
    for place in (source, tmp_path / "universal"):
        for kind, (name, options, read) in KINDS.items():
            export(place, tmp_path / name, kind, overwrite=True, **options)
            assert read(tmp_path / name) == expected, kind


@pytest.mark.parametrize("sample", SAMPLES)
def test_all_states_are_the_same_in_orbax(sample: str, tmp_path: Path) -> None:
    source = open_checkpoint(DATA / sample)
    expected = read_whole(source)
    convert(source, tmp_path / "universal")
    for place in (source, open_checkpoint(tmp_path / "universal")):
        out = tmp_path / f"out-{place.kind}"
        export(place, out, "orbax")
        found = read_whole(open_checkpoint(out))
        placed = {key: data for key, data in expected.items() if not key[0].endswith(".padding")}
        assert {key: found[key] for key in placed} == placed
