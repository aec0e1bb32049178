"""`Tier`: a place that is nearer to the training than the url of its run, and what is kept there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ucformat.errors import UnsupportedError, UsageError
from ucformat.settings import local_path
from ucformat.storage.url import open_store, path_text, split_url

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

__all__ = ["Tier", "check_tiers"]


@dataclass(frozen=True, slots=True)
class Tier:
    """A place where a `Manager` has checkpoints of its run, besides the url of the run.

    The first tier is the fastest: a folder that each node has for itself, in its memory or on its
    disk. Each rank writes its file there, and copies go to other nodes. Every further tier, and the
    url of the run, is one place for all nodes with whole checkpoints, which are copied from the
    first tier in the background.

    Attributes:
        url: the first tier's is a path, the same on each node: `/dev/shm/run7`.
        every: the steps that are saved there: those divisible by this number (default: all that
            are saved).
        keep: how many of the latest checkpoints stay there (default: of the first tier 2; of
            others all).
        replicas: how many other nodes have a copy of each node's files; in the first tier only.

    Raises:
        UsageError: a number is too small.
    """

    url: str | PathLike[str]
    every: int | None = None
    keep: int | None = None
    replicas: int = 0

    def __post_init__(self) -> None:
        path_text(self.url)
        for name, least in (("every", 1), ("keep", 1), ("replicas", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise UsageError(f"{name} must be a whole number, at least {least}, not {value!r}")


def check_tiers(tiers: Sequence[Tier], url: str, every: object) -> int | None:
    """Check the tiers of a run.

    Args:
        url: that of the run.
        every: when a checkpoint is due there.

    Returns:
        the same, as a number of steps.

    Raises:
        UsageError: they contradict each other.
        UnsupportedError: the first one is no folder of a node, or a slower one has replicas.
    """
    first, *slower = tiers
    scheme, path = split_url(first.url)
    if scheme not in ("", "file"):
        raise UnsupportedError(
            f"the first tier {first.url} is no local folder",
            hint="give each node's memory or disk, such as /dev/shm/run7, and this as a later tier "
            "or as the url of the run",
        )
    for tier in slower:
        if tier.replicas:
            raise UnsupportedError(
                f"the tier {tier.url} has whole checkpoints in one place: replicas={tier.replicas} is "
                "for the first tier only"
            )
    if every is not None and not isinstance(every, int):
        raise UnsupportedError(
            f"every={every!r} is not supported with tiers, whose checkpoints are copied by their steps",
            hint="every= a number of steps",
        )
    urls = [str(local_path(path)), *(open_store(tier.url).url for tier in slower), url]
    if twice := next((u for n, u in enumerate(urls) if u in urls[:n]), None):
        raise UsageError(f"{twice} is given as two tiers", hint="each tier is a place of its own")
    steps = [first.every or 1, *(tier.every or first.every or 1 for tier in slower)]
    steps.append(every or first.every or 1)
    for before, after in pairwise(steps):
        if after % before:
            raise UsageError(
                f"every={after} is not divisible by the every={before} of the tier before it",
                hint="a slower tier is filled from the first one, so it can only have its steps",
            )
    return every
