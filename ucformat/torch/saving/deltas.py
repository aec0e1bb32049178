"""Deltas: what a training applies in each step, saved in batches on a base, so that steps can be applied again."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING
from zlib import crc32

from ucformat.errors import UsageError, first_names
from ucformat.schema.limits import MAX_BATCH, MAX_CHAIN
from ucformat.schema.manifest import DeltasDoc, delta_state, is_delta
from ucformat.torch.comm.merging import bits_of
from ucformat.torch.comm.wire import message
from ucformat.torch.saving.experts import HeldByRanks, rows_of_bits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.schema.manifest import Manifest
    from ucformat.schema.tensors import TensorDoc
    from ucformat.torch.state.deltas import DeltaBatch
    from ucformat.torch.state.local import LocalShard, LocalState

__all__ = ["Deltas"]

_CHECKED = 64  # weights of which a checkpoint has a row


@message
class Deltas:
    """How a training saves what it applies in each step, its gradients or other updates.

    A delta checkpoint has the `deltas` of a batch of steps, and of its base all tensors that they
    change, as they were when everything was saved. `replay` applies the deltas since then again.

    Attributes:
        batch: of how many steps `Manager` saves the deltas at a time. Those that are not saved yet
            are lost with the process.
        full: after how many steps `Manager` saves everything (default: when the chain is as long as
            it may be). `tune_deltas` computes both.
        fixed: globs of names of tensors without deltas that are not saved, because they do not change
            or the replay makes them: frozen weights, a moving average. Others are saved if they have
            changed.
        merged: a folder in which `merge_deltas` makes whole checkpoints of the run beside the training,
            from which `Manager` starts replays.
        max_chain: how many delta checkpoints of `Manager` may follow each other before everything is
            saved, at most 63.

    Raises:
        UsageError: an attribute is out of range.
    """

    batch: int = 1
    full: int | None = None
    fixed: tuple[str, ...] = ()
    merged: str | None = None
    max_chain: int = MAX_CHAIN - 1

    def __post_init__(self) -> None:
        for name in ("batch", "full"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or not 1 <= number <= MAX_BATCH):
                raise UsageError(f"{name} must be a number from 1 to {MAX_BATCH:,}, not {number!r}")
        fixed: object = self.fixed
        if isinstance(fixed, str):
            raise UsageError(
                f"fixed={self.fixed!r} is one text, not several globs",
                hint=f"fixed=({self.fixed!r},)",
            )
        if not 1 <= self.max_chain < MAX_CHAIN:
            raise UsageError(f"max_chain must be 1 to {MAX_CHAIN - 1}, not {self.max_chain}")


class DeltaSelection:
    """What of a base stands for what a delta checkpoint does not save: all that its deltas change.

    Of some of these weights a row is saved, others in each checkpoint: a replay is compared with it.
    """

    def __init__(self, options: Deltas, batch: DeltaBatch, base: Manifest) -> None:
        self._fixed, self.base, self._batch = options.fixed, base, batch
        self._changed = ChangedNames(batch.names)
        if base.deltas is None and any(True for _ in base.tensors.older()):
            raise UsageError(
                "the base has tensors of earlier steps, and no deltas lead from these to its own",
                hint="save everything first, without deltas=",
            )
        if base.step is None or batch.first != base.step + 1:
            raise UsageError(
                f"the deltas begin with step {batch.first}, and the base is of step {base.step}",
                hint="give the deltas of each step after the base, or save everything: without deltas=",
            )

    @property
    def document(self) -> DeltasDoc:
        """What the checkpoint records."""
        before, batch = self.base.deltas, self._batch
        return DeltasDoc(
            since=batch.first - 1 if before is None else before.since,
            first=batch.first,
            last=batch.last,
            after=self.base.id,
            partial=dict(batch.partial),
            sparse=dict(batch.sparse),
            checked=self.checked,
        )

    @cached_property
    def checked(self) -> dict[str, int]:
        """The weights of which a row is saved, and its number."""
        first, table = self._batch.first, self.base.tensors
        left = [d for d in table if d.state == "weight" and self._is_left(d.name)]
        left.sort(key=lambda doc: crc32(f"{doc.name} {first}".encode()))
        rows = {doc.name: doc.shape[0] if len(doc.shape) > 1 else 1 for doc in left[:_CHECKED]}
        return {n: crc32(f"{first} {n}".encode()) % max(1, rows[n]) for n in rows}

    def check(self, local: LocalState) -> tuple[LocalShard, ...]:
        """The rows of this rank that are saved.

        Raises:
            UsageError: the optimizer has parameters that the base's has not.
        """
        from ucformat.torch.state.deltas import checked_part  # not above: the writer has no torch

        before = {name for group in self.base.groups for name in group.params}
        new = {name for group in local.groups for name in group["params"]} - before
        if new:
            raise UsageError(
                f"the optimizer has {first_names(sorted(new), 5)}, which it did not have when everything was saved",
                hint="save everything when parameters are added: without deltas=; Manager.save with force=True",
            )
        state = f"{delta_state(self._batch.first)}.check"
        return tuple(
            part
            for t in local.tensors
            if t.info.state == "weight" and t.info.name in self.checked
            if (part := checked_part(t, self.checked[t.info.name], state)).pieces
        )

    def held_by(self, local: LocalState) -> HeldByRanks:
        """Of which tensors of the base a rank saves another one, unless it is equal."""
        table, saved = self.base.tensors, set[int]()
        for t in local.tensors:
            row = table.row(*t.key)
            if row is None:
                continue
            doc = table[row]
            is_alike = (doc.stored_dtype, doc.shape) == (t.info.dtype, t.info.shape)
            if not (is_alike and self._is_left(doc.name)):
                saved.add(row)
        return HeldByRanks(bits_of(row in saved for row in range(len(table))), b"")

    def leave(self, held: HeldByRanks) -> list[TensorDoc]:
        """The tensors of the base that stand for those that no rank saves."""
        table = self.base.tensors
        is_saved = rows_of_bits(held.tensors, len(table))
        return [
            doc
            for doc, saved_now in zip(table, is_saved, strict=True)
            if not saved_now and not is_delta(doc.state)
        ]

    def _is_left(self, name: str) -> bool:
        return self._changed.has(name) or any(fnmatchcase(name, glob) for glob in self._fixed)


class ChangedNames:
    """Tells of names of parameters whether deltas change them: those of their names, and of parts of these."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names: set[str] = set()
        for name in names:
            parts = name.split(".")
            self._names.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))

    def has(self, name: str) -> bool:
        """Whether a parameter has a delta."""
        return name in self._names
