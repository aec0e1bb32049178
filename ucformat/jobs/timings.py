"""How long ranks took to save a checkpoint, and to load the one before it, as its manifest records it."""

from __future__ import annotations

from heapq import nlargest
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.schema.manifest import Manifest, ReaderDoc, WriterDoc

_LISTED = 64  # ranks of a save: our writers record no more
# how much longer than the median of the recorded ranks a straggler took
_FACTOR, _SECONDS = 1.5, 0.1


def save_timings(manifest: Manifest) -> dict[str, Any] | None:
    """What a save recorded of its ranks, as JSON; None if it recorded none.

    Of more than 64 ranks, those that wrote longest are listed.
    """
    writers = manifest.writers
    if not writers:
        return None
    longest = sorted(nlargest(_LISTED, writers, key=lambda w: w.seconds), key=lambda w: w.rank)
    world = manifest.layout.get("world")
    ranks = world if isinstance(world, int) else None
    about = {"stall": max(writer.stall for writer in writers)}
    listed = [_rank_data(writer) | {"stall": writer.stall} for writer in longest]
    return (
        _totals(ranks, writers)
        | about
        | {"writers": listed, "other_writers": len(writers) - len(longest)}
    )


def load_timings(manifest: Manifest) -> list[dict[str, Any]]:
    """What the launch recorded of how it loaded the origins of this checkpoint, as JSON."""
    return [
        {"url": edge.url, "id": edge.id, "kind": edge.kind}
        | _totals(None, edge.readers)
        | {"readers": [_rank_data(reader) for reader in edge.readers]}
        for edge in manifest.lineage
        if edge.readers
    ]


def _totals(ranks: int | None, docs: Sequence[WriterDoc | ReaderDoc]) -> dict[str, Any]:
    """The bytes and seconds of all recorded ranks, and which of them are stragglers."""
    seconds = max(doc.seconds for doc in docs)
    nbytes = sum(doc.nbytes for doc in docs)
    usual = median(doc.seconds for doc in docs)
    least = max(usual * _FACTOR, usual + _SECONDS)
    return {
        "ranks": ranks,
        "bytes": nbytes,
        "seconds": seconds,
        "median_seconds": usual,
        "bytes_per_second": nbytes / seconds if seconds > 0 else None,
        "stragglers": [doc.rank for doc in docs if doc.seconds > least],
    }


def _rank_data(doc: WriterDoc | ReaderDoc) -> dict[str, Any]:
    return {
        "rank": doc.rank,
        "bytes": doc.nbytes,
        "seconds": doc.seconds,
        "phases": dict(doc.phases),
        "retries": doc.retries,
    }
