"""Megatron-Core beside the packages of `.venv`, for programs that need both; imported before their ranks are forked."""

from __future__ import annotations

import importlib
import sys
import warnings

from tests.engines import engine

sys.path.append(
    str(
        engine("megatron").parents[1]
        / "lib"
        / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        / "site-packages"
    )
)

warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")

for name in ("core.dist_checkpointing", "core.models.gpt", "core.optimizer"):
    importlib.import_module(f"megatron.{name}")
