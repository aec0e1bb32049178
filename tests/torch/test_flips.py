"""Whichever bit of a checkpoint's files is flipped, `verify` finds it (docs/security.md, rule 12)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
from tests.fakes import FakeSource, random_array
from tests.zero_files import FLAT, write_zero3
from ucformat.checkpoint import Checkpoint
from ucformat.errors import ChecksumError, IntegrityError, UcformatError
from ucformat.storage.local import LocalStore
from ucformat.torch import save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STATE = {
    "model": {"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(5), "c": torch.ones(())},
    "progress": {"step": 3},
}
ARRAYS = {
    ("w", "weight"): random_array((5, 3), "float32"),
    ("w", "exp_avg"): random_array((2,), "bfloat16"),
}


def converted(folder: Path, place: Path) -> None:
    source = LocalStore(folder / "source")
    with source.create("vocab.txt") as out:
        out.write(b"a\nb\n")
    facts: dict[str, Any] = {"assets": ("vocab.txt",), "objects": {"a": [1, True]}, "step": 3}
    ucformat.convert(
        Checkpoint(FakeSource.write(source, ARRAYS, **facts)), place, chunk_bytes=32, shard_bytes=64
    )


def virtual(folder: Path, place: Path) -> None:
    arrays = {("w", state): random_array((4, 3), "float32", i) for i, state in enumerate(FLAT)}
    ucformat.convert(write_zero3(folder / "run", arrays, 2), place, virtual=True)


FORMS: dict[str, Callable[[Path, Path], object]] = {
    "zarr": lambda _, place: save(STATE, place, chunk_bytes=32, shard_bytes=64),
    "packed": lambda _, place: save(STATE, place, form="packed"),
    "encoded": lambda _, place: save(STATE, place, form="packed", codec="blosc"),
    "converted": converted,
    "virtual": virtual,
}


def exit_code(place: Path) -> int:
    """As `ucp verify` gives it."""
    try:
        return 0 if ucformat.verify(place, 1) else ChecksumError.exit_code
    except UcformatError as error:
        return error.exit_code


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("form", FORMS)
def test_every_flipped_bit_is_found(form: str, every: int, tmp_path: Path) -> None:
    """But for the record of the attempt, which is not the checkpoint's: a copy has another one."""
    place = tmp_path / "ck"
    FORMS[form](tmp_path, place)
    assert exit_code(place) == 0
    files = [f for f in sorted(place.rglob("*")) if f.is_file() and f.parent.name != "attempts"]
    assert len(files) > 2
    missed, at = [], 0
    for file in files:
        whole = file.read_bytes()
        first, at = at, (at - 8 * len(whole)) % every
        for bit in range(first, 8 * len(whole), every):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            if (code := exit_code(place)) != IntegrityError.exit_code:
                missed.append((str(file.relative_to(place)), bit // 8, bit % 8, code))
        file.write_bytes(whole)
    assert missed == []
    assert exit_code(place) == 0
