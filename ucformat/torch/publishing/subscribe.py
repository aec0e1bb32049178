"""`subscribe`: keeps the model of a program at the newest version of a channel."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from ucformat.errors import UcformatError, check_keywords
from ucformat.schema.documents import VersionDoc
from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.loading.arguments import LoadOptions, RestoreArguments
from ucformat.torch.loading.certify import certify_state
from ucformat.torch.loading.load import load_state
from ucformat.torch.loading.share import open_together, read_shared
from ucformat.torch.publishing.channel import Channel, named
from ucformat.torch.publishing.patches import CurrentVersion, PatchFill

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from os import PathLike
    from typing import Any

    import torch
    import torch.distributed as dist

    from ucformat.checkpoint import Checkpoint
    from ucformat.reading.execute import ReadOptions
    from ucformat.torch.certificate import Certificate
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.match import Matched
    from ucformat.torch.loading.read import ReadAmount

__all__ = ["Subscription", "Update", "subscribe"]

_TRIES = 5  # newer versions that are published while one is loaded
_LEAST_WAIT, _MOST_WAIT = 0.02, 1.0  # seconds between two looks at a channel
_ROUND_S = 60  # for which rank 0 looks before all ranks meet


@dataclass(frozen=True, slots=True)
class Update:
    """A version that the state has now, verified by the fingerprints of all its tensors.

    `url` and `id` are those of its checkpoint. `whole` says why it was loaded whole: `"first"`, or
    what was wrong after an update; it is empty if only what changed was read. `nbytes` are the
    bytes of tensors that this rank read from storage, `seconds` the duration on this rank.
    """

    version: int
    url: str
    id: str
    whole: str
    nbytes: int
    seconds: float
    certificate: Certificate


class Subscription:
    """The versions of a channel, for the state of a program on any number of ranks, in any layout.

        subscription = subscribe("s3://bucket/policy")
        while serving:
            if subscription.update(model) is not None:
                print("serving version", subscription.version)
            serve()

    Use the state only between calls of `update`, which changes it in place.
    """

    def __init__(
        self,
        channel: str | PathLike[str],
        *,
        group: dist.ProcessGroup | None = None,
        **arguments: Unpack[RestoreArguments],
    ) -> None:
        check_keywords("subscribe", arguments, RestoreArguments)
        self._channel = Channel(channel)
        self._options = replace(LoadOptions.of("report", arguments), complete=True)
        self._group, self._timeout = group, arguments.get("timeout", TIMEOUT)
        self._current: CurrentVersion | None = None
        self._is_changed = False  # whether the last `update` has changed the state

    @property
    def url(self) -> str:
        """The place of the channel."""
        return self._channel.url

    @property
    def version(self) -> int | None:
        """The version that the state has, as of the last `update`; None: none that was verified."""
        return None if self._current is None else self._current.version

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for a version that the state does not have; all ranks call this together.

        Args:
            timeout: seconds (default: no limit).

        Returns:
            The number of the newest version; None if the time is over.
        """
        end = None if timeout is None else time.monotonic() + timeout

        def look(_: object) -> tuple[bool, VersionDoc | None]:
            begun, pause = time.monotonic(), _LEAST_WAIT
            while True:
                newest = self._new()
                now = time.monotonic()
                is_over = end is not None and now >= end
                if newest is not None or is_over or now - begun >= _ROUND_S:
                    return is_over, newest
                time.sleep(min(pause, _ROUND_S if end is None else end - now))
                pause = min(2 * pause, _MOST_WAIT)

        with self._ranks("wait") as ranks:
            while True:
                is_over, newest = ranks.combine(
                    None, then=look, answer_kind=tuple[bool, VersionDoc | None]
                )
                if newest is not None:
                    return int(newest.number)
                if is_over:
                    return None

    def update(self, state: torch.nn.Module | Mapping[str, Any]) -> Update | None:
        """Bring a state to the newest version, in place; all ranks call this together.

        From the version that the state has, each rank reads the patches of its own parts alone, all of
        them before it changes anything. Tensors to which none lead are read, if they differ. The first
        time, and if the state has become another one meanwhile, the version is loaded whole.

        Args:
            state: a model, or a state as for `load`: the same one every time.

        Returns:
            None if the state has the newest version, or nothing has been published.

        Raises:
            StateMismatch: the version does not fit the state.
            UcformatError: no version could be loaded, or a rank failed. If the state has been changed,
                the message says so, and `version` is None; else the state has the version that it had.
        """
        begun = time.monotonic()
        self._is_changed = False
        whole = "" if self._current is not None else "first"
        with self._ranks("update") as ranks:
            for tries in range(_TRIES):
                newest = self._agreed(ranks, self._new)
                if newest is None:
                    return None
                try:
                    return self._load(named(state), newest, whole, ranks, begun)
                except UcformatError as error:
                    try:  # another one may have taken its place, and it may be removed
                        is_newest = self._agreed(ranks, self._channel.newest) == newest
                    except UcformatError:
                        raise self._told(error, newest) from error
                    is_over = is_newest and (whole or not self._is_changed)
                    if is_over or tries == _TRIES - 1:
                        raise self._told(error, newest) from error
                    if self._current is None:
                        whole = whole or error.message
        raise AssertionError  # unreachable: the last try returns or raises

    def _load(
        self, state: Mapping[str, Any], newest: VersionDoc, whole: str, ranks: Group, begun: float
    ) -> Update:
        """Load a version, `whole` for a reason, and verify it."""
        current = None if whole else self._current
        ck = open_together(
            self._channel.place(newest), ranks, () if current is None else current.known
        )
        with ranks.sharing_errors():
            self._channel.check(newest, ck.manifest)
        fill = self._fill_whole if current is None else PatchFill(current, ranks, self._begin)
        report = load_state(state, ck, ranks, self._options, fill)
        certificate = certify_state(state, ck, ranks, self._options, record=False).checked()
        self._current = CurrentVersion(
            newest.number,
            ck.id,
            ck.metadata.fingerprints,
            frozenset((ck.id, *(base.id for base in ck.manifest.bases))),
        )
        seconds = time.monotonic() - begun
        return Update(newest.number, ck.url, ck.id, whole, report.nbytes, seconds, certificate)

    def _begin(self) -> None:
        """Note that the state is about to be changed."""
        self._current, self._is_changed = None, True

    def _fill_whole(
        self,
        ck: Checkpoint,
        matched: Sequence[Matched],
        ranks: Group,
        replicas: dist.ProcessGroup | None,
        options: ReadOptions,
    ) -> ReadAmount:
        """See Fill."""
        self._begin()
        return read_shared(ck, matched, ranks, replicas, options)

    def _told(self, error: UcformatError, version: VersionDoc) -> UcformatError:
        """An error that says what has become of the state."""
        if not self._is_changed:
            return error
        return UcformatError(
            f"the state is not to be used, since version {version.number} of {self.url} was loaded only in "
            f"part: {error.message}",
            hint="call update again, which loads the newest version whole; if that cannot be loaded, "
            "publish another one",
        )

    def _new(self) -> VersionDoc | None:
        """The newest version, if the state does not have it."""
        newest = self._channel.newest()
        is_current = (
            newest is not None and self._current is not None and newest.id == self._current.id
        )
        return None if is_current else newest

    def _agreed(self, ranks: Group, look: Callable[[], VersionDoc | None]) -> VersionDoc | None:
        """What rank 0 sees."""
        version: VersionDoc | None = ranks.combine(
            None, then=lambda _: look(), answer_kind=VersionDoc | None
        )
        return version

    def _ranks(self, call: str) -> AbstractContextManager[Group]:
        return group_for_call(call, self.url, self._group, self._timeout)


def subscribe(
    channel: str | PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    **arguments: Unpack[RestoreArguments],
) -> Subscription:
    """Subscribe to the versions of a channel, to which nothing need have been published yet.

    Args:
        channel: the place that the publisher has.
        group: the ranks that take part (default: all).
        arguments: those of `RestoreArguments`, by keyword, as for `load`; `certify` has no effect,
            since every version is verified.
    """
    return Subscription(channel, group=group, **arguments)
