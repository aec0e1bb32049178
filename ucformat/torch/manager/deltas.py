"""Which steps' deltas a manager has collected, and when it saves them, or everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.errors import UsageError
from ucformat.torch.state.deltas import copy_deltas

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from ucformat.torch.saving.deltas import Deltas


class CollectedDeltas:
    """The deltas of steps that are not saved yet.

    Attributes:
        whole: the step at which everything was saved, or restored; None: not yet.
    """

    def __init__(self, options: Deltas) -> None:
        self._options = options
        self._steps: dict[int, dict[str, torch.Tensor]] = {}
        self.whole: int | None = None

    @property
    def merged(self) -> str | None:
        """Where whole checkpoints are made of deltas."""
        return self._options.merged

    @property
    def first(self) -> int | None:
        """The first step that is not saved; None if there is none."""
        return min(self._steps, default=None)

    def is_due(self, step: int) -> bool:
        """Whether everything is saved at a step, or the batch that ends with it is full."""
        count = len(self._steps) + (step not in self._steps)
        return self.is_whole_due(step) or count >= self._options.batch

    def is_whole_due(self, step: int) -> bool:
        """Whether everything is saved at a step."""
        full = self._options.full
        return self.whole is None or (full is not None and step - self.whole >= full)

    def add(
        self, step: int, deltas: Mapping[str, torch.Tensor] | None, *, force: bool = False
    ) -> None:
        """Copy the deltas of a step; without, and if that is forced, everything is saved.

        Raises:
            UsageError: there are none, or the step does not follow the last one.
        """
        if deltas is None and force:
            self.whole, self._steps = None, {}
        if deltas is None and self.whole is None:
            return
        if deltas is None:
            raise UsageError(
                f"step {step} has no deltas, without which no later step can be replayed",
                hint="manager.save(step, state, deltas={name: tensor}) in each step; {} where a step applied "
                "none; or force=True, which saves everything",
            )
        last = max(self._steps, default=step - 1)
        if step not in (last, last + 1):
            raise UsageError(
                f"the deltas of step {step} do not follow those of step {last}",
                hint="call manager.save(step, state, deltas=…) in each step",
            )
        self._steps[step] = copy_deltas(step, deltas)

    def take(self, step: int, *, whole: bool) -> dict[int, dict[str, torch.Tensor]] | None:
        """Return them, and forget them; None if everything is saved instead."""
        steps, self._steps = self._steps, {}
        if whole:
            self.whole = step
        return None if whole else steps

    def begin(self, whole: int | None) -> None:
        """Begin after a load of a checkpoint of which everything was saved at a step (None: not here)."""
        self._steps, self.whole = {}, whole
