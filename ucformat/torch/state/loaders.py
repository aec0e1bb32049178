"""States of data loaders for another number of ranks: each sample is used once, whatever ranks load."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["deal_evenly"]

_HINT = "PerRank(loader, merge=function of all values, the rank and the number of ranks) for this loader"
# of torchdata's loaders: what goes on within a sampler, and what has state beside it
_SNAPSHOT, _MAIN, _WORKERS = "_snapshot", "_main_snapshot", "_worker_snapshots"
_SAMPLER, _SAMPLES, _BATCHES = "_sampler_iter_state", "samples_yielded", "_sampler_iter_yielded"
_STATE_OF_DATA = ("dataset_state", "fetcher_state")


def deal_evenly(values: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    """Return the state of a `StatefulDataLoader` on another number of ranks, for `PerRank(loader, deal_evenly)`.

    It is for loaders whose ranks take the samples of one order in turn, as PyTorch's
    `DistributedSampler` and torchdata's `StatefulDistributedSampler` deal them, with the same seed
    and epoch before and after. Ranks that have each used as many samples have together used the
    beginning of that order, and go on behind it. Samples that the sampler repeats to fill up the
    last batches are those of the new number of ranks.

    Args:
        values: the states of all ranks that saved, in order.
        rank: the rank that loads.
        ranks: how many load.

    Raises:
        UsageError: ranks have used different numbers of samples, their sum cannot be divided by
            `ranks`, or a state is not that of such a loader.
    """
    progress = [_progress(value, number) for number, value in enumerate(values)]
    if len(set(progress)) > 1:
        different = next(n for n, p in enumerate(progress) if p != progress[0])
        raise UsageError(
            f"rank {different} has used another number of samples than rank 0, so the samples that are left "
            "are not those behind one place of the order",
            hint=_HINT,
        )
    samples, batches = progress[0]
    used = samples * len(values)
    if used % ranks:
        raise UsageError(
            f"{len(values)} ranks have used {used:,} samples, which {ranks} ranks cannot have used evenly",
            hint=f"save after a step at which their number is divisible by {ranks}; or {_HINT}",
        )
    own, state = used // ranks, deepcopy(dict(values[rank % len(values)]))
    for place in (state, *_main(state)):
        if _SAMPLER in place:
            sampler = place[_SAMPLER]
            sampler[_SAMPLES] = own
            if "sampler_state" in sampler:
                sampler["sampler_state"]["yielded"] = own
        for key in (_BATCHES, "_num_yielded"):
            if key in place:
                place[key] = -(-own * batches // samples) if samples else 0
    if _SNAPSHOT in state:
        state[_SNAPSHOT]["_snapshot_step"] = _main(state)[0][_BATCHES]
    return state


def _main(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The state of the main process of a loader with workers."""
    return [state[_SNAPSHOT][_MAIN]] if _SNAPSHOT in state else []


def _progress(state: Any, rank: int) -> tuple[int, int]:
    """How many samples and batches a rank has used.

    Raises:
        UsageError: the state says that there is more to it than the number of samples.
    """
    try:
        workers = state[_SNAPSHOT][_WORKERS].values() if _SNAPSHOT in state else ()
        main = (_main(state) or [state])[0]
        sampler = main[_SAMPLER]
        stateful = [
            key
            for key in _STATE_OF_DATA
            if any(place.get(key) is not None for place in (main, *workers))
        ]
        if main.get("_index_sampler_state") is not None or sampler.keys() - {
            _SAMPLES,
            "sampler_state",
        }:
            stateful.append("a sampler that is not told by the number of samples")
        if sampler.get("sampler_state", {"yielded": sampler[_SAMPLES]}) != {
            "yielded": sampler[_SAMPLES]
        }:
            stateful.append("a sampler with another number of samples than the loader")
        if state.get("_steps_since_snapshot"):
            stateful.append(
                "batches since the last snapshot (snapshot_every_n_steps=1 avoids them)"
            )
        batches = main[_BATCHES]
        samples = sampler[_SAMPLES]
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(
            f"the value of rank {rank} is not the state of a StatefulDataLoader of torchdata with a sampler",
            hint=_HINT,
        ) from error
    if stateful:
        raise UsageError(
            f"the loader of rank {rank} has {stateful[0]}, which cannot be dealt to other ranks",
            hint=_HINT,
        )
    return samples, batches
