"""Starts a function of a program, with JAX, Orbax and optax beside the packages of `.venv`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from tests.engines import engine

sys.path.append(
    str(
        engine("orbax").parents[1]
        / "lib"
        / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        / "site-packages"
    )
)
if os.environ.get("WITHOUT_TORCH"):
    missing: Any = None
    sys.modules["torch"] = missing  # as if it were not installed

import jax

if __name__ == "__main__":
    program, function, address, count, number, *arguments = sys.argv[1:]
    if int(count) > 1:
        jax.distributed.initialize(address, num_processes=int(count), process_id=int(number))
    getattr(import_module(f"tests.jax.{program}"), function)(*arguments)
