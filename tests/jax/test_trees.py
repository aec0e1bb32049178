"""Trees of arrays come back as they were, under any sharding; what cannot is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.jax.running import run_jax

if TYPE_CHECKING:
    from pathlib import Path


def test_whatever_is_saved_comes_back(tmp_path: Path) -> None:
    run_jax("trees_program", "comes_back", tmp_path)


def test_what_cannot_be_saved_or_loaded_is_named(tmp_path: Path) -> None:
    run_jax("trees_program", "is_refused", tmp_path)
