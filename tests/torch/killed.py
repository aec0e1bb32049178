"""Runs a program that is killed: `-m tests.torch.killed WHEN N SCRIPT ARGUMENTS`.

When it commits for the n-th time, `before` it, with all files of the checkpoint there except for
the manifest, or `after` it, when nobody has been told. Where another process writes, `begun` is as
soon as the n-th save has begun. Any other word is the name of a method, `module:Class.method`, at
whose n-th call the program dies.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucformat.schema import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Callable

_BEGUN = "ucformat.torch.saving.background:BackgroundWriter.save"
_COMMITS = (
    "ucformat.storage.local:LocalStore.put_if_absent",
    "ucformat.storage.local:LocalStore.replace",
)


def _die_at(
    method: str, number: int, counts: Callable[..., bool] = lambda *_: True, *, after: bool = False
) -> None:
    """Have this process killed at, or after, the n-th call that counts of a method."""
    module, _, path = method.partition(":")
    name, _, attribute = path.partition(".")
    owner = getattr(importlib.import_module(module), name)
    call, count = getattr(owner, attribute), 0

    @wraps(call)
    def counted(*args: Any, **more: Any) -> Any:
        nonlocal count
        count += (now := counts(*args))
        dying = now and count == number
        if dying and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        done = call(*args, **more)
        if dying:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    setattr(owner, attribute, counted)


def main(when: str, number: str, script: str, *arguments: str) -> None:
    """Run the script."""
    if when in ("before", "after"):
        for method in _COMMITS:
            _die_at(
                method,
                int(number),
                lambda _, key, *__: bool(key == MANIFEST),
                after=when == "after",
            )
    else:
        _die_at(_BEGUN if when == "begun" else when, int(number), after=when == "begun")
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
