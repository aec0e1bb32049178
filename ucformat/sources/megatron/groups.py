"""Which parameters an optimizer group has, where the checkpoint does not list them.

Megatron's distributed checkpoints keep the hyper-parameters of the groups, and of no group its parameters. Megatron's
own rule tells them: biases and vectors have no weight decay (`wd_mult` 0), and experts under expert parallelism are
groups of their own. Groups that were made by another rule stay as they are among the objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ucformat.sources.contents import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Member", "groups_by_rule", "is_expert"]


class Member(NamedTuple):
    """A trained parameter."""

    name: str
    ndim: int


def is_expert(name: str) -> bool:
    """Whether a parameter is one expert's."""
    return ".experts." in name


def groups_by_rule(
    raw: Sequence[dict[str, Any]], members: Sequence[Member], json: Callable[[Any], Any]
) -> list[Group] | None:
    """The groups with their parameters in the order of the module; None where Megatron's rule does not tell them."""
    if any(g.get("lr_mult", 1.0) != 1.0 or g.get("is_decoupled_lr") for g in raw) or not raw:
        return None
    expert_groups = any(g.get("is_expert_parallel") for g in raw)
    out: dict[int, Group] = {}
    for experts in (False, True):
        mine = [(i, g) for i, g in enumerate(raw) if bool(g.get("is_expert_parallel")) is experts]
        theirs = [m for m in members if (expert_groups and is_expert(m.name)) is experts]
        by_decay = {g.get("wd_mult", 1.0): i for i, g in mine}
        if len(by_decay) < len(mine) or not by_decay.keys() <= {0.0, 1.0}:
            return None
        names: dict[int, list[str]] = {i: [] for i, _ in mine}
        for m in theirs:
            plain = m.ndim == 1 or m.name.endswith(".bias")
            at = by_decay.get(0.0 if plain and 0.0 in by_decay else 1.0)
            if at is None or (plain and 0.0 not in by_decay and len(by_decay) > 1):
                return None
            names[at].append(m.name)
        for i, g in mine:
            out[i] = Group(names[i], json({k: v for k, v in g.items() if k != "params"}))
    return [out[i] for i in sorted(out)]
