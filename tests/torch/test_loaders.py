"""Data loaders on another number of ranks: each sample is used once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from ucformat.errors import UsageError
from ucformat.torch import deal_evenly
from ucformat.torch.state.objects import decode, encode

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")

SAMPLES = list(range(48))


def loader(
    sampler: type, rank: int, ranks: int, batch: int, workers: int
) -> StatefulDataLoader[int]:
    dealt = sampler(SAMPLES, num_replicas=ranks, rank=rank, shuffle=True, seed=3)
    return StatefulDataLoader(SAMPLES, batch_size=batch, sampler=dealt, num_workers=workers)


def numbers(batches: Any, most: int = 1000) -> list[int]:
    return [int(n) for _, batch in zip(range(most), batches, strict=False) for n in batch]


def use(loaders: list[StatefulDataLoader[int]], batches: int) -> tuple[list[int], list[Any]]:
    """Take batches of each; returns the samples, and the states as checkpoints have them."""
    used: list[int] = []
    for one in loaders:
        used += numbers(iter(one), batches)
    return used, [decode(encode(one.state_dict()), None) for one in loaders]


def check(sampler: type, before: int, now: int, batch: int, batches: int, workers: int = 0) -> None:
    used, states = use([loader(sampler, r, before, batch, workers) for r in range(before)], batches)
    assert len(used) == before * batches * batch
    left: list[int] = []
    for rank in range(now):
        one = loader(sampler, rank, now, batch, workers)
        one.load_state_dict(deal_evenly(states, rank, now))
        left += numbers(one)
    assert sorted(used + left) == SAMPLES


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([DistributedSampler, StatefulDistributedSampler]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
)
def test_each_sample_is_used_once(
    sampler: type, before: int, now: int, batch: int, batches: int
) -> None:
    if before * batch * batches % now:
        with pytest.raises(UsageError, match="cannot have used evenly"):
            check(sampler, before, now, batch, batches)
        return
    check(sampler, before, now, batch, batches)


@pytest.mark.parametrize("now", [1, 4])
def test_with_workers(now: int) -> None:
    check(StatefulDistributedSampler, 2, now, 2, 2, workers=2)


def test_what_is_not_known_is_refused() -> None:
    first, second = (loader(DistributedSampler, r, 2, 2, 0) for r in range(2))
    one, other = (use([x], n)[1][0] for x, n in ((first, 1), (second, 2)))
    with pytest.raises(UsageError, match="rank 1 has used another number of samples than rank 0"):
        deal_evenly([one, other], 0, 4)
    _, states = use([StatefulDataLoader(SAMPLES, 2, shuffle=True)], 1)
    with pytest.raises(UsageError, match="a sampler that is not told"):
        deal_evenly(states, 0, 2)
    with pytest.raises(UsageError, match="rank 0 is not the state of a StatefulDataLoader"):
        deal_evenly([{"step": 3}], 0, 2)
    with pytest.raises(UsageError, match="has dataset_state"):
        deal_evenly([one | {"dataset_state": {"at": 3}}], 0, 2)
