"""Sparse windows: full states of each group of tensors once, and else what a forward and backward pass need."""

from __future__ import annotations

import logging
from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ucformat.errors import UsageError
from ucformat.jobs.increments import row_alike
from ucformat.schema.limits import MAX_CHAIN
from ucformat.schema.manifest import WindowDoc
from ucformat.torch.comm.merging import bits_of
from ucformat.torch.comm.wire import message
from ucformat.torch.saving.experts import ExpertNames, HeldByRanks, rows_of_bits

if TYPE_CHECKING:
    from ucformat.schema.manifest import Manifest
    from ucformat.schema.tensors import TensorDoc
    from ucformat.torch.state.local import LocalState

__all__ = ["Window"]

_log = logging.getLogger("ucformat")


@message
class Window:
    """How a window of checkpoints, one of each step, shares the full states of groups of tensors.

    The `n`-th checkpoint of a window has the full states of the `n`-th group. Of later groups it has
    what a forward and a backward pass need, and of earlier ones nothing. `replay` makes one exact
    state of a whole window.

    Attributes:
        steps: how many checkpoints a window has, 2 to 63.
        groups: a list of globs of names for each checkpoint of a window; what none of them matches is
            saved full in each (default: experts are dealt to the groups by their numbers).
        pattern: as of `Experts`, for the default groups.
        update: globs of names of tensors that only updates need, such as master weights in a module
            of their own. All states but `weight` are taken for such.
        max_chain: as of `Experts`.

    Raises:
        UsageError: an attribute is out of range, or there are not as many groups as steps.
    """

    steps: int
    groups: tuple[tuple[str, ...], ...] = ()
    pattern: str | None = None
    update: tuple[str, ...] = ()
    max_chain: int = MAX_CHAIN - 1

    def __post_init__(self) -> None:
        if not 2 <= self.steps < MAX_CHAIN:
            raise UsageError(
                f"a window has 2 to {MAX_CHAIN - 1} checkpoints, not {self.steps}",
                hint="save everything in each step, or more of it",
            )
        if not 1 <= self.max_chain < MAX_CHAIN:
            raise UsageError(f"max_chain must be 1 to {MAX_CHAIN - 1}, not {self.max_chain}")
        if self.groups and len(self.groups) != self.steps:
            raise UsageError(f"{len(self.groups)} groups in a window of {self.steps} checkpoints")

    def document(self, at: int) -> WindowDoc:
        """What the checkpoint at a place in a window records."""
        return WindowDoc(
            steps=self.steps, at=at, groups=self.groups, pattern=self.pattern, update=self.update
        )


class Groups:
    """Tells of names which group of a window their tensors belong to.

    Args:
        window: the window, or what a checkpoint has recorded of it.
    """

    def __init__(self, window: Window | WindowDoc) -> None:
        self._window = window
        self._experts = ExpertNames(window.pattern)
        self._of: dict[str, int | None] = {}

    def of(self, name: str) -> int | None:
        """The group of a tensor; None if it is saved full in each checkpoint."""
        if name not in self._of:
            self._of[name] = self._find(name)
        return self._of[name]

    def place(self, name: str) -> object | None:
        """The same, as `ExpertNames.place`."""
        return self.of(name)

    def is_needed(self, name: str, state: str) -> bool:
        """Whether a forward and a backward pass need a tensor."""
        return state == "weight" and not any(fnmatchcase(name, g) for g in self._window.update)

    def _find(self, name: str) -> int | None:
        if self._window.groups:
            matching = (
                number
                for number, globs in enumerate(self._window.groups)
                if any(fnmatchcase(name, g) for g in globs)
            )
            return next(matching, None)
        place = self._experts.place(name)
        return None if place is None else place.expert % self._window.steps


class WindowSelection:
    """What of a base is left where it is, by the place of the next checkpoint in its window.

    Args:
        goes_on: whether the training was not restarted since the base: groups that were full before
            would be older in memory.
    """

    def __init__(
        self, window: Window, groups: Groups, base: Manifest, step: int, *, goes_on: bool
    ) -> None:
        self._window, self._groups, self.base = window, groups, base
        last = base.window
        self.at = 0
        if last is not None and last == window.document(last.at) and last.at + 1 < last.steps:
            if base.step == step - 1 and goes_on:
                self.at = last.at + 1
            elif base.step == step - 1:
                _log.warning(
                    "the training did not go on in memory from step %s, which was saved last: a window "
                    "begins anew with step %d",
                    *(base.step, step),
                )
            else:
                _log.warning(
                    "step %d does not follow step %s, which was saved last: a window begins anew, and "
                    "nothing can be replayed before it is complete",
                    *(step, base.step),
                )

    @property
    def document(self) -> WindowDoc:
        """What the checkpoint records."""
        return self._window.document(self.at)

    def held_by(self, local: LocalState) -> HeldByRanks:
        """What a rank holds of what the base has."""
        table = self.base.tensors
        alike = (row_alike(table, t.info) for t in local.tensors)
        rows = {row for row, _ in filter(None, alike)}
        return HeldByRanks(bits_of(row in rows for row in range(len(table))), b"")

    def leave(self, held: HeldByRanks) -> list[TensorDoc]:
        """The tensors of the base that stand for those that are not saved now.

        Raises:
            UsageError: a group has no tensors, or a glob matches none.
        """
        table = self.base.tensors
        sizes = Counter(self._groups.of(name) for name in table.names)
        empty = [n for n in range(self._window.steps) if not sizes[n]]
        if empty:
            raise UsageError(
                f"group {empty[0]} of the window has no tensors, of {self._window.steps} groups",
                hint="fewer steps, or groups=, whose globs match whole names",
            )
        globs = (*self._window.update, *(g for group in self._window.groups for g in group))
        if idle := [g for g in globs if not any(fnmatchcase(name, g) for name in table.names)]:
            raise UsageError(
                f"no tensor has a name like {idle[0]!r}, a glob of the window",
                hint="`ucp show --tensors` lists the names under which the base has them",
            )
        is_held = rows_of_bits(held.tensors, len(table))
        return [
            doc
            for doc, has_it in zip(table, is_held, strict=True)
            if has_it and not self._is_saved(doc.name, doc.state)
        ]

    def _is_saved(self, name: str, state: str) -> bool:
        group = self._groups.of(name)
        if group is None or group == self.at:
            return True
        return group > self.at and self._groups.is_needed(name, state)
