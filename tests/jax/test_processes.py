"""JAX processes save one checkpoint together, and each loads what its devices hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import ucformat
from tests.jax.running import run_jax

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = (16, 8, 8)


def check(place: Path) -> None:
    """Every array has the values that tell its name's position."""
    ck = ucformat.open(place)
    arrays = sorted(ck[n].read().ravel()[0] for n in ck if n.startswith("sharded."))
    assert arrays == list(range(len(arrays)))
    for name in ck:
        if name.startswith("sharded."):
            array = ck[name].read()
            assert (array - array.ravel()[0] == np.arange(1024.0).reshape(SHAPE)).all(), name
    assert ck["own"].read().tolist() == [0, 1, 2, 3, 4]
    assert ck.objects["step"] == 7
    assert ucformat.verify(place)


def test_two_processes_with_two_devices_each(tmp_path: Path) -> None:
    run_jax("processes_program", "first_tier", tmp_path, processes=2, devices=2)
    check(tmp_path / "zarr")
    check(tmp_path / "packed")


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["zarr", "packed", "safetensors"])
def test_other_processes_load_it(form: str, tmp_path: Path) -> None:
    run_jax("processes_program", "save_and_load", tmp_path, form, processes=4, devices=2)
    check(tmp_path / form)
    for processes, devices in ((1, 1), (2, 4)):
        run_jax("processes_program", "loads", tmp_path / form, processes=processes, devices=devices)


@pytest.mark.matrix
def test_a_process_that_dies(tmp_path: Path) -> None:
    run_jax("processes_program", "one_dies", tmp_path, processes=2, devices=1, kill=True)
