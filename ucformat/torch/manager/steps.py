"""A run: the folders of its checkpoints, those that are committed, and the signals that ask it to stop."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Mapping
from dataclasses import field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ucformat.catalog.lines import newest_first
from ucformat.errors import IntegrityError, NotACheckpoint, UpgradeNeeded, UsageError
from ucformat.format.structure import read_manifest
from ucformat.format.thinned import state_bytes
from ucformat.schema import MANIFEST, TOMBSTONE
from ucformat.storage.concurrency import map_io
from ucformat.storage.url import open_store
from ucformat.torch.comm.wire import message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from ucformat.schema.manifest import Manifest

_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?", re.ASCII)


@message
class RunStep:
    """A committed checkpoint of a run, as its manifest describes it, without the tensors.

    `bases` are the ids of the checkpoints on which it is based, and `written` the bytes that the
    ranks wrote. `is_remnant` tells that it is deleted, and only what others need is left.
    """

    url: str
    step: int
    id: str
    created: datetime
    nbytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    commits: int | None = None
    launch: str | None = None
    continues: Mapping[str, int] = field(default_factory=dict)
    bases: tuple[str, ...] = ()
    written: int = 0
    states: Mapping[str, int] = field(default_factory=dict)  # bytes, as in `RetentionRow`
    is_remnant: bool = False

    @property
    def family(self) -> None:
        """None: the counts of a folder are comparable, since each launch has listed it."""

    @property
    def run(self) -> str:
        """Empty: all checkpoints of one folder belong to one run."""
        return ""


@message
class RunContents:
    """The checkpoints of a run, the newest first, and their greatest commit count.

    `unreadable` are those whose manifests cannot be read: url, step and reason. `being_purged` are
    the urls of checkpoints of which an interrupted purge has left files.
    """

    steps: tuple[RunStep, ...]
    unreadable: tuple[tuple[str, int, str], ...]
    being_purged: tuple[str, ...] = ()
    commits: int = 0


def folder_of(step: int, again: int = 0) -> str:
    """Return the name of a step's folder; names sort as steps do.

    Args:
        again: distinguishes several checkpoints of one step (0: the first).
    """
    if step < 0:
        raise UsageError(f"the training step {step} is negative", hint="steps count from 0")
    return f"step-{step:08d}" + (f".{again}" if again else "")


def step_of(folder: str) -> int | None:
    """The step of a folder's name; None for other names."""
    match = _FOLDER.fullmatch(folder)
    return int(match[1]) if match else None


def list_steps(root: str) -> RunContents:
    """List all files below `root`, and read the manifest of each committed checkpoint.

    Deleted ones of which only what others need is left are left out.
    """
    store = open_store(root)
    folders: dict[str, int] = {}
    being_purged: list[str] = []
    for info in store.list():
        folder, _, file = info.key.partition("/")
        step = step_of(folder)
        if file == MANIFEST and step is not None:
            folders[f"{store.url}/{folder}"] = step
        elif file == TOMBSTONE and step is not None:
            being_purged.append(f"{store.url}/{folder}")

    def read(url: str) -> RunStep | str | None:
        try:
            return read_step(url, folders[url])
        except NotACheckpoint:
            return None
        except (IntegrityError, UpgradeNeeded) as error:
            return error.message

    answers = dict(zip(folders, map_io(read, folders), strict=True))
    steps = newest_first(s for s in answers.values() if isinstance(s, RunStep) and not s.is_remnant)
    unreadable = tuple((u, folders[u], why) for u, why in answers.items() if isinstance(why, str))
    commits = max((s.commits for s in steps if s.commits is not None), default=0)
    return RunContents(tuple(steps), unreadable, tuple(being_purged), commits)


def read_step(url: str, step: int | None = None) -> RunStep:
    """Read the checkpoint of a step from its manifest, which tells the step if it is not known."""
    manifest, _ = read_manifest(open_store(url))
    return described_step(url, manifest, step)


def described_step(url: str, manifest: Manifest, step: int | None = None) -> RunStep:
    """The checkpoint of a step as its manifest describes it; see `read_step`."""
    launch = manifest.launch
    return RunStep(
        url,
        (manifest.step or 0) if step is None else step,
        manifest.id,
        manifest.created,
        manifest.tensors.nbytes,
        manifest.metrics,
        manifest.commits,
        launch=None if launch is None else launch.id,
        continues={} if launch is None else launch.continues,
        bases=tuple(base.id for base in manifest.bases),
        written=sum(writer.nbytes for writer in manifest.writers),
        states=state_bytes(manifest.tensors),
        is_remnant=manifest.is_remnant,
    )


def continued_here(steps: Sequence[RunStep]) -> dict[str, int]:
    """Return what a launch continues that is about to save where these checkpoints are, whichever of them it loaded.

    A folder has one training at a time, which counts on from all that is there.
    """
    launches: dict[str, int] = {}
    for step in steps:
        counts = (
            step.continues
            if step.launch is None
            else {**step.continues, step.launch: step.commits or 0}
        )
        for launch, count in counts.items():
            launches[launch] = max(count, launches.get(launch, 0))
    return {launch: count for launch, count in launches.items() if count}


_log = logging.getLogger("ucformat")


class Signals:
    """Records that a signal was received, and then calls the handler that was installed before.

    Handlers can only be installed in the main thread; in any other a warning is logged. In
    processes that are forked later (of a data loader), the handlers that were installed before take
    effect.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        self.caught = False
        self._pid = os.getpid()
        self._handler = self._handle  # one object, to compare with the installed handler
        self._before: dict[int, Any] = {}
        self.then: Callable[[], object] = lambda: None  # called in the handler
        if signals and threading.current_thread() is not threading.main_thread():
            names = ", ".join(signal.Signals(s).name for s in signals)
            _log.warning(
                "%s will end this process without a last save: the manager was not created in "
                "the main thread",
                names,
            )
            return
        for number in signals:
            self._before[number] = signal.signal(number, self._handler)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The signals that have a handler."""
        return tuple(self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        # a forked process: it acts as if the handler had never been installed
        if os.getpid() != self._pid:
            signal.signal(number, before if before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        repeated, self.caught = self.caught, True
        self.then()
        # The first Ctrl-C asks to save and stop; only the second one raises KeyboardInterrupt.
        if callable(before) and (repeated or before is not signal.default_int_handler):
            before(number, frame)

    def close(self) -> None:
        """Restore the previous handlers, except where another one has been installed since."""
        for number, before in self._before.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()
