"""What a checkpoint that was loaded is to those that are saved afterwards: the edges of a training that goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.jobs.record import lineage_to
from ucformat.torch.match import PARAMETER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.checkpoint import Checkpoint
    from ucformat.schema.manifest import LineageDoc

__all__ = ["edge_of", "holds_training"]

_DEGREES = {"zero": 0, "tp": 1, "pp": 1, "ep": 1}  # what engines note in their own files, and what it is if unsaid


def holds_training(ck: Checkpoint) -> bool:
    """Whether a checkpoint is of a training at all, which has groups even where it made no step yet."""
    return bool(ck.manifest.groups) or any(key.state not in PARAMETER for key in ck.tensors)


def edge_of(ck: Checkpoint, now: Mapping[str, Any], *, continues: bool) -> LineageDoc:
    """A `finetune` unless the training goes on, then a `resume`, or a `reshard` if it was saved under another layout.

    Args:
        ck: what was loaded.
        now: the layout under which it was loaded, as a save notes it, with the number of ranks as `world`.
        continues: whether the training goes on: some rank loaded state of an optimizer.
    """
    before = ck.facts.layout
    if "world" in before:  # noted by a save in a training loop, which says all
        other = dict(before) != dict(now)
    else:  # by an engine's own files
        other = any(before[k] != now.get(k, _unsaid(k, now)) for k in before.keys() & {*_DEGREES, "dp"})
    kind = ("reshard" if other else "resume") if continues else "finetune"
    return lineage_to(ck, kind)


def _unsaid(degree: str, now: Mapping[str, Any]) -> int:
    return _DEGREES[degree] if degree in _DEGREES else int(now["world"])
