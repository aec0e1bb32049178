"""DeepSpeed beside the packages of `.venv`, for programs that need both; imported before their ranks are forked.

Nothing is compiled: DeepSpeed would build an operator for its messages between CPUs at the first
start, in a folder that all programs of a user share. If one is killed meanwhile, its lock stays
there, and all others wait for ever.
"""

from __future__ import annotations

import sys

from tests.engines import engine

sys.path.append(
    str(
        engine("deepspeed").parents[1]
        / "lib"
        / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        / "site-packages"
    )
)

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does as well
