"""ZeRO engines load what FSDP2 with tensor parallelism saved, and hold what that held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engines.deepspeed.live.conftest import run_all
from tests.torch.running import run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

MODEL = {"vocab": 53, "hidden": 10, "heads": 2, "head_dim": 3, "inner": 17}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_engines_are_certified_against_another_layout(tmp_path: Path, world: int) -> None:
    """Each load of `train.py` is certified, and fails if the certificate is negative."""
    saved = tmp_path / "ck"
    actions = [{"train": 2}, {"save": str(saved)}]
    run(4, [{"model": MODEL, "layout": {"tp": 2}, "actions": actions}], tmp_path / "save")
    tasks = [
        {
            "name": f"zero{zero}-{dtype}",
            "zero": zero,
            "dtype": dtype,
            "cast": dtype == "bf16",
            "scheduler": False,
            "empty": False,
            "load": str(tmp_path),
            "what": saved.name,
        }
        for zero in (1, 3)
        for dtype in ("fp32", "bf16")
    ]
    run_all([(world, tasks)], tmp_path / "load")
