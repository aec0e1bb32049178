"""Runs a command once for each of its allocations, in a fork in which that one fails, and judges what comes of it."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import shutil
import sys
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.inline import Inline
from tests.memory.allocations import counted, failing
from tests.memory.commands import COMMANDS, NEW, Failed, contents, make_world
from ucformat.errors import (
    IntegrityError,
    NotFound,
    PermissionDenied,
    UcformatError,
    UnsupportedError,
)
from ucformat.schema import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["Found", "World"]

_PATIENCE = 60  # seconds after which a command is taken to hang
_EXACT = "exact"


@dataclass
class Found:
    """What came of a command in all these forks: how often each end, and what was wrong."""

    ends: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)

    def __add__(self, other: Found) -> Found:
        return Found(self.ends + other.ends, self.complaints + other.complaints)

    def __str__(self) -> str:
        ends = ", ".join(f"{n:,} {end}" for end, n in sorted(self.ends.items()))
        return f"{self.ends.total():,} allocations: {ends}; {len(self.complaints)} wrong"


class World:
    """The checkpoints that are read, in a folder, and the process that forks: it knows all modules, and has one thread.

    Args:
        root: the folder, empty; nothing of this process may lie in it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        _status, made = _fork(lambda: make_world(root))  # apart: it loads more than reading does
        assert made == "made"

    def fail(self, name: str, place: str, whose: str, every: int = 1) -> Found:
        """Have each allocation, or every so many-th, fail under a command.

        Args:
            name: the command.
            place: the checkpoint that it is given.
            whose: allocations by Python, or by NumPy.
            every: how many allocations further the next is that fails.
        """
        exact, allocations = self._prepared(name, place, whose)
        found = Found()
        for n in range(1, allocations + 1, every):
            end, wrong = self._once(name, place, whose, n, exact)
            found.ends[end] += 1
            if wrong:
                found.complaints.append(f"{name} {place}, allocation {n} by {whose}: {wrong}")
        return found

    def _prepared(self, name: str, place: str, whose: str) -> tuple[Any, int]:
        """What a command gives and leaves when nothing fails, and how many allocations it makes."""

        def act() -> Any:
            return COMMANDS[name](self.root / place)

        for module in self._fork(lambda: (act(), sorted(sys.modules))[1]):
            with suppress(ImportError):
                importlib.import_module(module)
        for module in list(sys.modules.values()):  # after the last import of one
            if getattr(module, "__name__", "").startswith("ucformat.") and hasattr(
                module, "ThreadPoolExecutor"
            ):
                vars(module)["ThreadPoolExecutor"] = Inline
        gc.collect()
        gc.freeze()
        return self._fork(lambda: (act(), self._left())), self._fork(lambda: counted(whose, act))

    def _once(
        self, name: str, place: str, whose: str, n: int, exact: tuple[Any, Any]
    ) -> tuple[str, str]:
        """How a command ends of which the n-th allocation fails, and what is wrong with that."""
        status, found = _fork(lambda: _attempt(lambda: COMMANDS[name](self.root / place), whose, n))
        if found is not None:
            end, gave, wrong = found
            if end == _EXACT and gave != exact[0]:
                wrong = f"it gives {gave!r}, not {exact[0]!r}"
        else:
            code = os.waitstatus_to_exitcode(status)
            end, wrong = f"signal {-code}", "" if code < 0 else "it does not end"
        if name == "convert":
            wrong = wrong or self._wrong_there(place, exact[1], done=end == _EXACT)
            shutil.rmtree(self.root / NEW, ignore_errors=True)
        return end, wrong

    def _wrong_there(self, place: str, exact: Any, *, done: bool) -> str:
        """What is wrong with what a conversion left, and with doing it again where nothing is committed."""
        if (self.root / NEW / MANIFEST).exists():
            return "" if _fork(self._left)[1] == exact else "what is committed is not whole"
        if done:
            return "it is done, and nothing is committed"
        _fork(lambda: COMMANDS["convert"](self.root / place))
        return "" if _fork(self._left)[1] == exact else "done again it is not whole"

    def _fork(self, act: Callable[[], Any]) -> Any:
        """What `act` gives in a process of its own; what it writes is removed."""
        _status, found = _fork(act)
        shutil.rmtree(self.root / NEW, ignore_errors=True)
        return found

    def _left(self) -> str | None:
        """What a conversion committed."""
        return contents(self.root / NEW) if (self.root / NEW / MANIFEST).exists() else None


def _attempt(act: Callable[[], Any], whose: str, n: int) -> tuple[str, Any, str]:
    """How a command ends, what it gives, and what is wrong with its error."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 2)  # where panics of Rust's are told of
    try:
        with failing(whose, n):
            found = act()
    except BaseException as error:  # noqa: BLE001 - a panic of Rust's is no Exception
        return _judged(error)
    return _EXACT, found, ""


def _judged(error: BaseException) -> tuple[str, Any, str]:
    kind = type(error).__name__
    if isinstance(error, MemoryError):
        return kind, None, ""
    if not isinstance(error, UcformatError | Failed):
        return f"{kind} of the interpreter", None, ""
    says = any(word in str(error) for word in ("memory", "MemoryError", "Unable to allocate"))
    if says and not isinstance(
        error, IntegrityError | NotFound | PermissionDenied | UnsupportedError
    ):
        return f"{kind} that says so", None, ""
    causes = list(_chain(error))[1:]
    if causes and not any(isinstance(cause, MemoryError) for cause in causes):
        return f"{kind} for what the interpreter made of it", None, ""
    return f"wrong {kind}", None, "".join(traceback.format_exception(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _fork(act: Callable[[], Any]) -> tuple[int, Any]:
    """How a process of its own ended, and what `act` gave there; None where it did not come to that."""
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(out)
        faulthandler.dump_traceback_later(_PATIENCE, exit=True, file=1)
        try:
            found = pickle.dumps(act())
            with os.fdopen(into, "wb") as file:
                file.write(found)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nothing may go on in this process
            traceback.print_exc()
        os._exit(2)
    os.close(into)
    with os.fdopen(out, "rb") as file:
        data = file.read()
    return os.waitpid(pid, 0)[1], pickle.loads(data) if data else None  # noqa: S301 - our own
