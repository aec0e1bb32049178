"""Every error ucformat raises on purpose.

    UcformatError                     exit code
    ├── UsageError      ValueError        2      a wrong argument, slice or reference
    │   ├── OutOfBounds IndexError               an index past the end of a dim
    │   ├── StateMismatch                        a training state that the checkpoint does not fit
    │   └── LayoutError                          a layout file or rule that cannot be applied
    │       ├── CoverageError                    a hole, or an overlap of unequal owners
    │       └── AmbiguousLayout                  files that can be read in two ways without an option
    ├── NotFound        LookupError       3      nothing is there
    │   ├── NotACheckpoint                       the place exists but holds no (committed) checkpoint
    │   └── TensorNotFound  KeyError             no such tensor or state in the checkpoint
    ├── Conflict        FileExistsError   4      another process committed, or changed what was read
    ├── IntegrityError                    5      bytes are missing, truncated or not what they should be
    │   ├── ChecksumError                        a stored checksum does not match the bytes
    │   ├── Inconsistent                         a manifest or sidecar that contradicts itself
    │   └── MissingData                          a file or part that must be there is not
    ├── NotCertified                      5      the state of a training is not the one that was saved
    ├── PermissionDenied PermissionError  6      the storage, the settings or the catalog do not allow it
    │   └── UnsafeError                          it would run code, or leave the folder of the checkpoint
    ├── UnsupportedError                  6      a format, value or operation that is not supported here
    ├── Uncertain                         1      no answer: it may or may not have been written
    ├── NotFinished                       0      this process has done its part of a job, which another one finishes
    └── UpgradeNeeded                     7      written by a newer ucformat

Each has a `hint`, what to do next, which `str()` shows on a line of its own; an IntegrityError
always has one. Messages and hints do not contain the secrets that this process knows
(docs/security.md, rule 10).
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ucformat.redacted import hide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Spelling = Callable[[str, str, str], str]

__all__ = [
    "AmbiguousLayout",
    "ChecksumError",
    "Conflict",
    "CoverageError",
    "Inconsistent",
    "IntegrityError",
    "LayoutError",
    "MissingData",
    "NotACheckpoint",
    "NotCertified",
    "NotFinished",
    "NotFound",
    "OutOfBounds",
    "PermissionDenied",
    "StateMismatch",
    "TensorNotFound",
    "UcformatError",
    "Uncertain",
    "UnsafeError",
    "UnsupportedError",
    "UpgradeNeeded",
    "UsageError",
    "option_text",
    "spelling_options",
]


def first_names(names: Iterable[object], most: int, separator: str = ", ") -> str:
    """List things in a message: `a, b and 3 more`, the first of them and how many others there are."""
    texts = list(map(str, names))
    others = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + others


def first_lines(lines: Sequence[str], most: int) -> list[str]:
    """Shorten a list of lines in a message to the first of them, and a line for how many others there are."""
    others = [f"and {len(lines) - most:,} more"] if len(lines) > most else []
    return [*lines[:most], *others]


class UcformatError(Exception):
    """Base class of all errors of ucformat; `exit_code` is the exit status of the command line.

    `in_base` is the place of the base in which the fault is; None if it is in none.
    """

    exit_code = 1
    usual_hint: str | None = None
    in_base: str | None = None

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = hide(message)
        super().__init__(self.message)
        self.args = (self.message,)  # subclasses of OSError have set them already
        self.hint = hide(hint) if hint else self.usual_hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    # keyword-only `hint` must survive a process boundary
    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(cls: type[UcformatError], message: str, hint: str | None) -> UcformatError:
    return cls(message, hint=hint)


class UsageError(UcformatError, ValueError):
    """A wrong argument, slice or reference."""

    exit_code = 2


class OutOfBounds(UsageError, IndexError):
    """An index past the end of a dim."""


class StateMismatch(UsageError):
    """A training state that the checkpoint does not fit."""


class LayoutError(UsageError):
    """A layout file or rule that cannot be applied."""


class CoverageError(LayoutError):
    """Pieces or extents leave a hole in a tensor, or overlap with unequal owners."""


class AmbiguousLayout(LayoutError):
    """Files that can be read in two ways; the hint shows the option that selects one."""


class NotFound(UcformatError, LookupError):
    """Nothing is there."""

    exit_code = 3


class NotACheckpoint(NotFound):
    """The place exists but holds no committed checkpoint that ucformat knows."""


class TensorNotFound(NotFound, KeyError):
    """The checkpoint holds no such tensor, or not in this state."""


class Conflict(UcformatError, FileExistsError):
    """Another process committed there, or changed what was read."""

    exit_code = 4


class IntegrityError(UcformatError):
    """Bytes are missing, truncated or not what they should be."""

    exit_code = 5
    usual_hint = "the checkpoint is damaged: restore the file from another copy, or save it again"


class ChecksumError(IntegrityError):
    """A stored checksum does not match the bytes that were read."""


class Inconsistent(IntegrityError):
    """A manifest or a sidecar that contradicts itself; `problems` lists all contradictions."""

    def __init__(
        self, message: str, *, hint: str | None = None, problems: tuple[object, ...] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.problems = problems

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(type(self), problems=self.problems, hint=self.hint), (self.message,))


class MissingData(IntegrityError):
    """A file, or a part of a tensor, that must be there is not."""


class NotCertified(UcformatError):
    """The state of a training is not the one that was saved; `certificate` tells what differs."""

    exit_code = 5
    certificate: Any = None


class PermissionDenied(UcformatError, PermissionError):
    """The storage, the settings or the rules of the catalog do not allow it."""

    exit_code = 6


class UnsafeError(PermissionDenied):
    """It would run code, read or write outside of the checkpoint's folder, or follow what cannot be trusted."""


class UnsupportedError(UcformatError):
    """A format, a value or an operation that ucformat, or this storage, does not support."""

    exit_code = 6


class Uncertain(UcformatError):
    """A write got no answer in time: it may or may not have been applied."""


class NotFinished(UcformatError):
    """This process has done its part of a job, and another process finishes it."""

    exit_code = 0


class UpgradeNeeded(UcformatError):
    """Written by a newer ucformat than this one."""

    exit_code = 7
    usual_hint = "pip install --upgrade ucformat"


def _python(name: str, value: str, _text: str) -> str:
    return f"ucformat.open(…, options={{{name!r}: {value}}})"


_spellings: list[Spelling] = [_python]


#: An example value of each option, in Python and on the command line.
_EXAMPLES = {
    "layout": ("ucformat.Layout.load(file)", "FILE"),
    "groups": ("[[names of the first optimizer group, in order], …]", "FILE"),
    "owners": ("{'optim': 'model', …}", "FILE"),
    "optimizer": ("False", "false"),
    "fill_missing": ("True", "true"),
    "part": ("True", "true"),
}


def option_text(name: str, value: str | None = None, text: str | None = None) -> str:
    """The text for a hint that shows how to give an option of a source, in Python or on the command line.

    Args:
        name: the option's name.
        value: its value in Python (default: an example).
        text: its value on the command line (default: an example, or the value in Python).
    """
    example = _EXAMPLES.get(name, ("…", value or "…"))
    return _spellings[-1](name, value or example[0], text or example[1])


@contextmanager
def spelling_options(spell: Spelling) -> Iterator[None]:
    """Format options in hints in another way inside the block, as the command line does.

    Args:
        spell: returns the text from an option's name, its value in Python, and its value on the
            command line.
    """
    _spellings.append(spell)
    try:
        yield
    finally:
        _spellings.remove(spell)


def check_keywords(function: str, given: Mapping[str, object], allowed: type) -> None:
    """Check the names of arguments that a function takes as a TypedDict.

    Raises:
        TypeError: the function has no such argument.
    """
    if unknown := given.keys() - allowed.__annotations__.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")


def refuse_arguments(function: str, given: Mapping[str, object], hints: Mapping[str, str]) -> None:
    """Refuse arguments that a function cannot take, where others like it do.

    Args:
        hints: what to do instead, by the name of the argument.

    Raises:
        UsageError: one of them is given.
    """
    for name, hint in hints.items():
        if given.get(name) is not None:
            raise UsageError(f"{function} does not take {name}", hint=hint)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Check an argument that is one of a few values, which 1 and True are not the same of.

    Raises:
        UsageError: it is something else.
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise UsageError(f"{name}={value!r} is not supported", hint=" or ".join(map(repr, choices)))
