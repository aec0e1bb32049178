"""`async_save`: training waits only for a copy to host memory; another process writes the checkpoint and commits it."""

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
    """Serializes the saves of several threads, in the order in which rank 0 took their numbers."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._drawn = self._ended = 0
        self.broken = False

    def take_number(self) -> int:
        """Take the next number."""
        with self._change:
            self._drawn += 1
            return self._drawn - 1

    def wait_for(self, number: int) -> None:
        """Wait until all saves with lower numbers have ended."""
        with self._change:
            self._change.wait_for(lambda: self._ended >= number or self.broken)

    def end(self, *, broken: bool = False) -> None:
        """Let the next save begin; if the group is broken, all of them."""
        with self._change:
            self._ended += 1
            self.broken = self.broken or broken
            self._change.notify_all()


_single_process = _Queue()


@contextmanager
def in_queue_order(ranks: Group) -> Iterator[None]:
    """Begin saves of several threads one after another, in the same order on all ranks.

    Args:
        ranks: the group.
    """
    queue: _Queue = ranks.cache.setdefault("turns", _Queue()) if ranks.size > 1 else _single_process
    try:
        number = ranks.gather_scatter(None, lambda _: [queue.take_number()] * ranks.size, None, int)
    except Exception:
        if not ranks.intact:
            queue.end(broken=True)
        raise
    queue.wait_for(number)
    try:
        yield
    finally:
        queue.end()


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
    """Save a training state in the background; all ranks call this together.

    Returns as soon as the state is copied to host memory, so that training may change it. A process of each rank,
    which the first call starts, writes the checkpoint and commits it. The host memory is reused by later saves.

    Args:
        state: as for `save`.
        url: as for `save`.
        step: as for `save`.
        run: as for `save`.
        metrics: as for `save`.
        config: as for `save`.
        form: as for `save`.
        overwrite: as for `save`.
        lineage: as for `save`.
        after: as for `save`.
        replicas: as for `save`.
        chunk_bytes: as for `save`.
        shard_bytes: as for `save`.
        group: as for `save`.
        timeout: as for `save`.
        in_flight: how many saves may be in flight at once, each with host memory for a copy of the state; another one
            waits for the oldest.

    Returns:
        a handle, whose `wait` returns when the checkpoint is committed.

    Raises:
        UsageError: an argument is invalid, or the state cannot be saved.
        UcformatError: an earlier `async_save` failed, and its error was not retrieved from the handle on some rank.
            Every rank gets the same error.
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
    """Save the local state of this rank in the background; see `async_save`.

    Args:
        state: of this rank, collected from any engine.
        options: of the save, the same on all ranks.
        metadata: of the checkpoint, the same on all ranks.
        group: as for `save`.
        timeout: as for `save`.
        in_flight: as for `async_save`.
    """
    begun = time.monotonic()
    with group_for_call(group, timeout, "async_save", options.url) as ranks, in_queue_order(ranks):
        return background_writer(ranks, in_flight).save(state, options, metadata, begun)
