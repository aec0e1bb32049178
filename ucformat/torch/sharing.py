"""Reads once what several ranks hold alike, and hands it on over their process group."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ucformat.geometry.box import Box
from ucformat.torch.devices import same_device, synchronize
from ucformat.torch.group import group_of, of_rank
from ucformat.torch.reading import Amount, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.reading.plan import Verify
    from ucformat.torch.group import Group
    from ucformat.torch.match import Matched

__all__ = ["read_shared"]

#: Bytes that each rank reads before these are handed on, while it reads the next.
_ROUND = 64 << 20
#: What a rank wants: of each tensor its boxes.
_Wants = list[tuple[str, tuple[Box, ...]]]


def read_shared(
    ck: Checkpoint,
    matched: Sequence[Matched],
    replicas: dist.ProcessGroup,
    timeout: float,
    verify: Verify = "whole",
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Amount:
    """Fill the targets; what all ranks of `replicas` want alike is read by one of them, balanced by bytes.

    Returns how much this rank read itself. The group must carry tensors of the targets' devices;
    what the ranks tell each other goes over connections of our own.
    """
    ranks = group_of(replicas, timeout, f"share {ck.url}")
    rank, size = ranks.rank, ranks.size
    wants = [(str(m.stored.key), tuple(p.box for p in m.target.pieces)) for m in matched]
    everybody: list[_Wants] = ranks.agree(wants, _Wants)
    common = set(everybody[0]).intersection(*map(set, everybody[1:]))
    alone = [m for m, want in zip(matched, wants, strict=True) if want not in common]
    order = {want: i for i, want in enumerate(everybody[0])}
    shared = sorted(
        ((m, order[want]) for m, want in zip(matched, wants, strict=True) if want in common and m.target.pieces),
        key=lambda found: found[1],
    )
    load = [0] * size
    dealt: list[tuple[Matched, int]] = []
    for m, _ in sorted(shared, key=lambda found: -found[0].target.nbytes):
        reader = min(range(size), key=lambda r: load[r])
        load[reader] += m.target.nbytes
        dealt.append((m, reader))
    rounds = list(_rounds(dealt, size))
    total = Amount()
    with ThreadPoolExecutor(1, "ucformat-share", same_device()) as pool:

        def begin(units: Sequence[tuple[Matched, int]]) -> Future[Amount]:
            return pool.submit(read, ck, [m for m, reader in units if reader == rank], verify, threads, progress)

        coming = [begin(rounds[0])] if rounds else []
        for number, units in enumerate(rounds):
            total = total.plus(_together(coming.pop(), ranks))
            coming += [begin(following) for following in rounds[number + 1 : number + 2]]
            for m, reader in units:
                _hand_on(m.target.tensor, reader, replicas)
    synchronize(m.target.tensor for m, _ in dealt)  # a broadcast of a device's tensor goes on after its call
    return total.plus(read(ck, alone, verify, threads, progress))


def _together(reading: Future[Amount], ranks: Group) -> Amount:
    """Wait until all ranks have read what they hand on next; what one of them failed of is raised on all."""
    error = reading.exception()
    errors = ranks.agree([] if error is None else [error], list[BaseException])
    first = next(((r, e[0]) for r, e in enumerate(errors) if e), None)
    if first is not None:
        raise error or of_rank(*first, len(errors))
    return reading.result()


def _rounds(dealt: Sequence[tuple[Matched, int]], size: int) -> Iterator[list[tuple[Matched, int]]]:
    units: list[tuple[Matched, int]] = []
    total = 0
    for m, reader in dealt:
        if units and total + m.target.nbytes > _ROUND * size:
            yield units
            units, total = [], 0
        units.append((m, reader))
        total += m.target.nbytes
    if units:
        yield units


def _hand_on(tensor: torch.Tensor, reader: int, replicas: dist.ProcessGroup) -> None:
    """Broadcast one local tensor, as bytes, for not every group carries every dtype."""
    dense = tensor if tensor.is_contiguous() else tensor.contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # a lone element may have any stride, of which no view is made
    dist.broadcast(flat.view(torch.uint8), group=replicas, group_src=reader)
    if dense is not tensor:
        tensor.copy_(dense)
