"""`async_save`: training waits only for a copy to host memory; another process writes the checkpoint and commits it."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from ucformat.torch.comm.group import group_for_call, is_live
from ucformat.torch.comm.wire import message
from ucformat.torch.saving.background import BackgroundWriter, close_writer, writers
from ucformat.torch.saving.handles import saved_by
from ucformat.torch.saving.partial import leave_parts
from ucformat.torch.saving.save import prepare, saving_group, with_tracked_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.handles import SaveHandle
    from ucformat.torch.saving.manifest import SaveMetadata
    from ucformat.torch.saving.options import SaveArguments, SaveOptions
    from ucformat.torch.state.local import LocalState

__all__ = ["async_save", "async_save_local"]


@message
class _WriterState:
    """The last generation of writing processes of which one is lost, the error of an earlier save, and this turn."""

    lost: int
    error: BaseException | None
    turn: int


class _Turns:
    """Serializes the saves of several threads, in the order in which rank 0 took their numbers."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._drawn = self._ended = 0
        self.broken = False
        # how often writing processes were started; this and the next, the same on all ranks
        self.generation = 0
        self.needed = False  # whether they have to be started again

    def take(self) -> int:
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


_single_process = _Turns()


@contextmanager
def background_writer(ranks: Group, in_flight: int) -> Iterator[BackgroundWriter]:
    """Use this rank's background writer for a group, when it has room for another save; all ranks call this.

    Saves of several threads begin one after another, in the same order on all ranks. If one rank
    has lost its process, all ranks start new ones, and an error of an earlier save is raised on
    all: all this takes one collective. The processes of groups that do not exist any more are
    closed.
    """
    turns = ranks.shared(_Turns) if ranks.size > 1 else _single_process
    for key, old in list(writers.items()):
        if key is not None and not is_live(key):
            close_writer(old)
    key = ranks.links if ranks.size > 1 else None
    generation, writer = turns.generation, writers.get(key)
    error: BaseException | None = None
    if writer is not None:
        try:
            writer.make_room(in_flight)
        except Exception as failed:  # noqa: BLE001 - raised on all ranks
            error = failed
    try:
        state: _WriterState = ranks.combine(
            _WriterState(-1 if writer is not None and writer.usable else generation, error, 0),
            lambda a, b: _WriterState(max(a.lost, b.lost), a.error or b.error, 0),
            _WriterState,
            lambda all_ranks: replace(all_ranks, turn=turns.take()),
            _WriterState,
        )
    except Exception:
        if not ranks.intact:
            turns.end(broken=True)
        raise
    turns.wait_for(state.turn)
    try:
        # unless another thread has started them since
        turns.needed = turns.needed or turns.generation <= state.lost
        if turns.needed and key in writers:
            close_writer(writers[key])
        if state.error is not None:
            raise error or state.error
        if turns.needed:
            turns.generation, turns.needed = turns.generation + 1, False
            writers[key] = BackgroundWriter(ranks)
        writers[key].wait_for_room(in_flight)  # other threads may have had their turns since
        yield writers[key]
    finally:
        turns.end()


def async_save(
    state: Mapping[str, Any],
    url: str | PathLike[str],
    *,
    in_flight: int = 1,
    **arguments: Unpack[SaveArguments],
) -> SaveHandle:
    """Save a training state in the background; all ranks call this together.

    Returns as soon as the state is copied to host memory, so that training may change it. A process
    of each rank, which the first call starts, writes the checkpoint and commits it. The host memory
    is reused by later saves.

    Args:
        state: as for `save`.
        url: as for `save`.
        in_flight: how many saves may be in flight at once, each with host memory for a copy of the
            state; another one waits for the oldest.
        arguments: as for `save`.

    Returns:
        a handle, whose `wait` returns when the checkpoint is committed.

    Raises:
        UsageError: an argument is invalid, or the state cannot be saved.
        UcformatError: an earlier `async_save` failed, and its error was not retrieved from the
            handle on some rank. Every rank gets the same error.
    """
    begun = time.monotonic()
    with saving_group(url, "async_save", arguments) as ranks:
        with ranks.sharing_errors():
            local, options, metadata, log = prepare(state, url, ranks, arguments)
        local, options, interval = with_tracked_rows(local, options, arguments, ranks)
        local, options, metadata = leave_parts(local, options, metadata, arguments, ranks)
        with background_writer(ranks, in_flight) as writer:
            handle = writer.save(local, options, metadata, begun)
        if interval is not None:
            interval.saved = lambda: saved_by(handle).id if handle.committed else None
        if log is not None:
            handle.then(lambda saved: log(saved.url))
        return handle


def async_save_local(state: LocalState, options: SaveOptions, metadata: SaveMetadata) -> SaveHandle:
    """Save the local state of this rank in the background; see `async_save`."""
    begun = time.monotonic()
    with (
        group_for_call("async_save", options.url) as ranks,
        background_writer(ranks, in_flight=1) as writer,
    ):
        return writer.save(state, options, metadata, begun)
