"""Models that Accelerate shards by FSDP1 and FSDP2, and Trainer by DeepSpeed, go on as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torch.running import fork

pytestmark = pytest.mark.matrix  # programs that import everything, beside those of test_live.py
PROGRAM = Path(__file__).parent / "plugins_program.py"
MODULES = ("accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama")


def ran(folder: Path, *parts: str, **environment: Any) -> dict[str, Any]:
    """What the parts of the program found, the same on both ranks."""
    beside = ("tests.engines.beside",) if "deepspeed" in parts else ()  # before the others
    fork(
        2,
        [str(PROGRAM), str(folder), *parts],
        folder / "log.txt",
        (*beside, *MODULES),
        **environment,
    )
    found, second = (json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2))
    assert found == second
    return dict(found)


def test_plugins_of_accelerate(tmp_path: Path) -> None:
    """FSDP1 with and without original parameters, and FSDP2; each also goes on from FSDP1's checkpoint."""
    found = ran(tmp_path, "accelerate", ACCELERATE_USE_CPU="true")["accelerate"]
    expected = found["fsdp1"]["losses"]
    for result in found.values():
        assert result["kind"] == "FSDP"
        assert result["same"] == [True, True, True]
        assert result["losses"] == pytest.approx(expected, rel=1e-5)
        # neither those of flat parameters nor those of activation checkpointing (pytorch #124546)
        assert result["names"] == found["fsdp1"]["names"]
        assert not any("_wrapped" in name or "flat" in name for name in result["names"])
        # Accelerate's own resume of FSDP2 lacked `step` (accelerate #3971)
        assert result["states"] == ["exp_avg", "exp_avg_sq", "step", "weight"]


@pytest.mark.engine
def test_a_trainer_of_deepspeed(tmp_path: Path) -> None:
    """Under ZeRO 2, ZeRO 3 in bf16, and AutoTP, of which Trainer's own resume fails (DeepSpeed #7320)."""
    variables = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    found = ran(tmp_path, "deepspeed", **variables)["deepspeed"]
    for kind in ("zero 2", "zero 3", "autotp"):
        goes_on_bit_for_bit(found[kind])
        assert "config.json" in found[kind]["assets"]
        assert found[kind]["names"] == found["zero 2"]["names"]


def goes_on_bit_for_bit(result: dict[str, Any]) -> None:
    assert result["same"]
    assert result["count"] == 6
    assert result["rates"][0] == result["rates"][1]
    assert result["step"] == 4
