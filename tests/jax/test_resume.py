"""A training moves between JAX and PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.jax.running import run_jax

if TYPE_CHECKING:
    from pathlib import Path


def test_the_guide_and_what_it_claims(tmp_path: Path) -> None:
    run_jax("resume_program", "guide", tmp_path, torch=True)
