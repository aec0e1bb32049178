"""`async_save`: training waits for a copy to host memory alone; another process writes it and commits."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.saving.background import background_writer
from ucformat.torch.saving.manifest import SaveMetadata
from ucformat.torch.saving.plan import SaveOptions
from ucformat.torch.state.local import local_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from os import PathLike

    import torch.distributed as dist

    from ucformat.schema.manifest import LineageDoc
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.background import SaveHandle
    from ucformat.torch.state.local import LocalState

__all__ = ["async_save", "async_save_local", "in_queue_order"]


class _Queue:
    """Saves of several threads, one after another: in the order in which rank 0 drew their numbers."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._drawn = self._ended = 0
        self.broken = False

    def draw(self) -> int:
        """The next number."""
        with self._change:
            self._drawn += 1
            return self._drawn - 1

    def wait_for(self, number: int) -> None:
        """Wait until all before this one ended."""
        with self._change:
            self._change.wait_for(lambda: self._ended >= number or self.broken)

    def end(self, *, broken: bool = False) -> None:
        """Let the next one begin; where the ranks lost each other, all."""
        with self._change:
            self._ended += 1
            self.broken = self.broken or broken
            self._change.notify_all()


_alone = _Queue()


@contextmanager
def in_queue_order(ranks: Group) -> Iterator[None]:
    """Begin a save when those before it have begun, in one order on all ranks, as their writers do."""
    turns: _Queue = ranks.memory.setdefault("turns", _Queue()) if ranks.size > 1 else _alone
    try:
        number = ranks.gather_scatter(None, lambda _: [turns.draw()] * ranks.size, None, int)
    except Exception:
        if not ranks.whole:
            turns.end(broken=True)
        raise
    turns.wait_for(number)
    try:
        yield
    finally:
        turns.end()


def async_save(
    state: Mapping[str, Any],
    url: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    metrics: Mapping[str, float] | None = None,
    config: Mapping[str, Any] | None = None,
    form: Literal["zarr", "packed"] = "zarr",
    overwrite: bool = False,
    lineage: Sequence[LineageDoc] = (),
    after: int | None = None,
    replicas: Literal["equal", "first"] = "equal",
    chunk_bytes: int | None = None,
    shard_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
    in_flight: int = 1,
) -> SaveHandle:
    """Save as `save` does, but return as soon as the state is copied to host memory; all ranks call it together.

    The copy goes to memory that is kept from save to save (the first one allocates it, and starts a process for each
    rank). At most `in_flight` saves are under way, each with memory of its own: one more waits for the oldest.

    Raises:
        UcformatError: an earlier save of this kind failed, and some rank had not asked for its outcome; or the state
            of some rank cannot be saved. Every rank gets the same error.
    """
    begun = time.monotonic()
    with group_for_call(group, timeout, "async_save", url) as ranks:
        with ranks.sharing_errors():
            options = SaveOptions(str(url), form, overwrite, replicas, chunk_bytes, shard_bytes)
            metadata = SaveMetadata.of(step, run, metrics, config, lineage, after)
            held = local_state(state)
        with in_queue_order(ranks):
            return background_writer(ranks, in_flight).save(held, options, metadata, begun)


def async_save_local(
    state: LocalState,
    options: SaveOptions,
    metadata: SaveMetadata,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
    in_flight: int = 1,
) -> SaveHandle:
    """`async_save` of what this rank holds, whatever engine it was collected from."""
    begun = time.monotonic()
    with group_for_call(group, timeout, "async_save", options.url) as ranks, in_queue_order(ranks):
        return background_writer(ranks, in_flight).save(state, options, metadata, begun)
