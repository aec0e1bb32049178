"""Which checkpoint of a run the next one is based on, and when a whole one is due.

The policies are those of Check-N-Run (Eisenman et al., NSDI 2022), with the length, the age and the
bytes of a chain bounded besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.torch.manager.steps import RunStep

__all__ = ["Increments", "choose_base"]

Choice = Literal["consecutive", "one-shot", "intermittent"]


@dataclass(frozen=True, slots=True)
class Increments:
    """How a run saves what changed: against which checkpoint, and when it saves a whole one.

    An increment refers to its base for tensors that are equal, and with `patch` stores what differs
    in all others. A whole checkpoint, the anchor, is saved first, and again when one of the limits
    is reached.

    Attributes:
        policy: `consecutive` bases each checkpoint on the one before: increments are smallest, and
            a load applies the patches of all since the anchor. `one-shot` bases each on the anchor:
            a load applies one patch, but increments grow. `intermittent` is `one-shot`, with a new
            anchor when that is expected to be written in fewer bytes than the next increments.
        patch: store tensors that differ as patches where these are smaller; otherwise only tensors
            that are equal are saved from being written.
        max_chain: the most checkpoints that a load has to apply to an anchor.
        anchor_every: the training steps after which an anchor is due (default: no limit).
        anchor_bytes: the bytes of all increments since the anchor after which the next one is due
            (default: no limit).

    Raises:
        UsageError: a limit is not positive, or the policy is none of these.
    """

    policy: Choice = "consecutive"
    patch: bool = False
    max_chain: int = 8
    anchor_every: int | None = None
    anchor_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in get_args(Choice):
            listed = " or ".join(f'"{name}"' for name in get_args(Choice))
            raise UsageError(f"policy={self.policy!r} is not supported", hint=listed)
        for name in ("max_chain", "anchor_every", "anchor_bytes"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise UsageError(f"{name} must be at least 1, not {limit}")


def choose_base(increments: Increments, step: int, saved: Sequence[RunStep]) -> RunStep | None:
    """Choose the checkpoint on which that of a step is based; None if it is to be whole.

    The anchor is the newest checkpoint that is based on no other one of the run.

    Args:
        saved: the committed checkpoints of the run, the newest first.
    """
    by_id = {s.id: s for s in saved}
    count = next((n for n, s in enumerate(saved) if by_id.keys().isdisjoint(s.bases)), None)
    if count is None:
        return None
    anchor, written = saved[count], [s.written for s in reversed(saved[:count])]
    too_old = increments.anchor_every is not None and step - anchor.step >= increments.anchor_every
    too_many = increments.anchor_bytes is not None and sum(written) >= increments.anchor_bytes
    if too_old or too_many:
        return None
    if increments.policy == "consecutive":
        return saved[0] if _depth(saved[0], by_id) < increments.max_chain else None
    if increments.policy == "intermittent" and is_anchor_cheaper(anchor.written, written):
        return None
    return anchor


def _depth(step: RunStep, by_id: Mapping[str, RunStep]) -> int:
    """The number of checkpoints of the run that a load of one applies to an anchor."""
    depths: dict[str, int] = {}
    waiting = [step.id]
    while waiting:
        bases = [base for base in by_id[waiting[-1]].bases if base in by_id]
        if unknown := [base for base in bases if base not in depths]:
            waiting += unknown
        else:
            depths[waiting.pop()] = max((depths[base] + 1 for base in bases), default=0)
    return depths[step.id]


def is_anchor_cheaper(anchor: int, increments: Sequence[int]) -> bool:
    """Predict whether a whole checkpoint now costs less than as many further increments as there are.

    After an anchor, increments are expected to grow as they did after the last one; without, none
    is expected to be smaller than the last.

    Args:
        anchor: bytes that the last anchor was written in.
        increments: bytes of the increments since, the oldest first.
    """
    if not increments:
        return False
    return anchor + sum(increments[:-1]) <= len(increments) * increments[-1]
