"""Programs that must do the same in every process, in which the order of sets is another one each time."""

from __future__ import annotations

import os
import sys

__all__ = ["with_same_hashes"]


def with_same_hashes(module: str) -> None:
    """Begin this program, `python -m MODULE`, anew with the hashes of every other run, unless it has them."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])  # noqa: S606 - itself
