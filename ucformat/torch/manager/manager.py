"""`Manager`: the checkpoints of one training run, saved when due, kept as told, and found again after a failure."""

from __future__ import annotations

import logging
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Self

from ucformat.errors import UcformatError, UsageError
from ucformat.schema.manifest import MOST_COMMITS, LineageDoc
from ucformat.storage.url import open_store
from ucformat.torch.comm.group import TIMEOUT, group_of
from ucformat.torch.loading.load import load
from ucformat.torch.manager.restore import restore_newest
from ucformat.torch.manager.signals import Signals, any_rank_bits
from ucformat.torch.manager.steps import folder_of, list_steps
from ucformat.torch.saving.asynchronous import async_save
from ucformat.torch.saving.save import save

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future
    from os import PathLike
    from types import TracebackType

    import torch.distributed as dist

    from ucformat.checkpoint import Checkpoint
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.load import LoadReport
    from ucformat.torch.manager.restore import Mode
    from ucformat.torch.manager.retention import Keep, RunRetention
    from ucformat.torch.saving.background import SaveHandle
    from ucformat.torch.saving.save import Saved

__all__ = ["Manager"]

_log = logging.getLogger("ucformat")

_STOP, _FORCE, _DUE, _FAILED = 1, 2, 4, 8  # what ranks send each other at a step


class Manager:
    """Saves a run's checkpoints below one folder, each as `step-00001000`, and restores the newest that is whole.

        with Manager("s3://bucket/run7", every=1000, keep=3) as manager:
            report = manager.restore_latest(state)
            for step in range(1 if report is None else report.step + 1, steps + 1):
                train()
                manager.save(step, state)
                if manager.stopping:
                    break

    All ranks make one and call the same methods with the same arguments. Each checkpoint notes as its parent the one
    before it, or the one that was loaded; that alone keeps no checkpoint from being deleted.

    A signal of `signals` is noted at the next `should_save` or `save` of any rank: that `save` then saves on all ranks,
    whether due or not, returns when it is committed, and `stopping` is true from then on. For this the ranks exchange
    one byte at every such call (with `signals=()` and `every` in steps they do not).

    Args:
        url: the folder, or prefix in an object store, of the run.
        every: when a checkpoint is due: at steps divisible by this, or this long after the last one began; by default
            at every call of `save`.
        keep: which checkpoints stay, after every commit (docs/retention.md): a number of the last; rules, as
            `{"last": 3, "every": 1000, "best": {"metric": "val_loss", "count": 2, "mode": "min"}}`; or a policy, as a
            mapping or a file. The newest always stays. Without a `grace`, which a policy has, bytes are free at once.
            With a catalog, it judges and deletes, and of this folder's checkpoints only; without one, the checkpoints
            in the folder are judged. Failures are warnings. By default nothing is deleted.
        run: the name of the run, for the catalog.
        config: the configuration of the training, plain JSON values.
        form: `zarr` or `packed`, as for `save`.
        asynchronous: save in the background; at most one save is under way.
        overwrite: replace what lies at a step's place. Otherwise that is a Conflict, but for steps beyond the one that
            was restored: what was found damaged there is replaced, and beside what was not the new one is saved.
        replicas: as for `save`.
        chunk_bytes: as for `save`.
        shard_bytes: as for `save`.
        signals: those that ask to save and stop; handlers that were there are called too.
        group: the ranks that take part (default: all).
        timeout: seconds after which an unresponsive rank is considered dead, also between calls of `save`.
    """

    def __init__(
        self,
        url: str | PathLike[str],
        *,
        every: int | timedelta | None = None,
        keep: Keep | None = None,
        run: str | None = None,
        config: Mapping[str, Any] | None = None,
        form: Literal["zarr", "packed"] = "zarr",
        asynchronous: bool = False,
        overwrite: bool = False,
        replicas: Literal["equal", "first"] = "equal",
        chunk_bytes: int | None = None,
        shard_bytes: int | None = None,
        signals: Sequence[int] = (signal.SIGTERM,),
        group: dist.ProcessGroup | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        if every is not None and (every <= timedelta(0) if isinstance(every, timedelta) else every < 1):
            raise UsageError(f"every={every!r} is no interval", hint="give a number of steps from 1 on, or a timedelta")
        self.url = open_store(url).url
        self._every, self._asynchronous, self._overwrite = every, asynchronous, overwrite
        self._keeper = None if keep is None else _keeper(self.url, keep)
        self._options: dict[str, Any] = {"run": run, "config": config, "form": form, "replicas": replicas}
        self._options |= {"chunk_bytes": chunk_bytes, "shard_bytes": shard_bytes}
        self._group, self._timeout = group, timeout
        self._talks = bool(signals) or isinstance(every, timedelta)
        self._signals = Signals(signals)
        self._begun = time.monotonic()
        self._stopping = self._ended = False  # asked to stop; saved for that
        self._asked: tuple[int, bool] | None = None  # what `should_save` answered last
        self._at: int | None = None  # the step that was saved or restored last
        self._parent: LineageDoc | None = None
        self._commits: int | None = None  # the greatest count in this folder, once it was looked at
        self._last: Saved | None = None
        self._flying: _PendingSave | None = None
        self._beyond: set[int] = set()  # steps that lie there and were left behind by going back
        self._damaged: frozenset[str] = frozenset()  # places that may be replaced then
        self._pool = ThreadPoolExecutor(1, "ucformat-keep")
        self._kept: Future[list[str]] | None = None

    @property
    def stopping(self) -> bool:
        """Whether some rank was asked to stop, as of the last `should_save` or `save`; the same on all ranks."""
        return self._stopping

    @property
    def last(self) -> Saved | None:
        """The last checkpoint that this manager committed: bytes and seconds of this rank."""
        self._poll()
        return self._last

    def should_save(self, step: int) -> bool:
        """Whether `save` of this step will save; all ranks ask, and get the same answer.

        Raises:
            UcformatError: the save in the background failed.
        """
        due = self._decide(step, force=False)
        self._asked = (step, due)
        return due

    def save(
        self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None, force: bool = False
    ) -> Saved | SaveHandle | None:
        """Save if it is due, or forced, or the training is to stop; None if it is not.

        A save in the background gives its handle; the last one, before the training stops, is never in the background.
        A step that was just saved (or restored) stands already, and is not saved again.

        Raises:
            UcformatError: a rank failed, or the save in the background did; nothing of it is committed.
            Conflict: there is a checkpoint of this step already.
        """
        asked, self._asked = self._asked, None
        due = asked[1] or force if asked is not None and asked[0] == step else self._decide(step, force=force)
        if not due:
            return None
        ending = self._stopping and not self._ended
        try:
            self._settle()
        except UcformatError as error:
            if not ending:
                raise
            _log.warning("the save in the background failed, and is made up for by the last one: %s", error.message)
        if step == self._at and (ending or not self._overwrite):
            self._ended = self._ended or ending
            return self._last
        ranks = self._ranks()
        if self._commits is None:
            self._commits = ranks.gather_scatter(None, lambda _: [list_steps(self.url).commits] * ranks.size, None, int)
        url, overwrite = self._place(step)
        first = not ranks.rank
        lineage = () if self._parent is None else (self._parent,)
        self._commits = max(self._commits, *(edge.commits or 0 for edge in lineage), 0)
        options = {**self._options, "group": self._group, "timeout": self._timeout}
        options |= {"step": step, "metrics": metrics, "lineage": lineage, "overwrite": overwrite}
        options["after"] = self._commits
        self._begun = time.monotonic()
        if self._asynchronous and not ending:
            handle = async_save(state, url, **options)
            self._flying, self._at = _PendingSave(handle, step, first=first), step
            return handle
        saved = save(state, url, **options)
        self._at, self._ended = step, self._ended or ending
        self._committed(saved, step, first=first)
        return saved

    def restore_latest(self, state: Mapping[str, Any], *, verify: Mode = "full", **options: Any) -> LoadReport | None:
        """Load the newest checkpoint that is whole, on all ranks the same; None if there is no checkpoint.

        Newest is what was committed last, by the count that checkpoints have, whatever clocks said; where training went
        back, that need not be the highest step. What was deleted in the catalog is not seen. What is damaged is skipped
        with a warning that names it; a place that cannot be read is an error, and no reason to go back.

        `verify="full"` reads every byte once before anything is loaded, each rank an equal part of it, and finds every
        flipped bit: it costs about as much as loading on all ranks together without replicas. `verify="quick"` reads
        documents and asks for sizes, which finds what is missing or truncated; then whole chunks are read and checked
        while loading, and if one is damaged, the next older checkpoint is loaded over what was loaded of this one.

        Args:
            state: as given to `load`.
            verify: `full` or `quick`.
            options: others of `load`: strict, rename, cast, trust, threads, broadcast_group, progress.

        Raises:
            IntegrityError: there are checkpoints, but each is damaged; parts of one may have been loaded.
            StateMismatch: the checkpoint does not fit the state.
        """
        if verify not in ("full", "quick"):
            raise UsageError(f"verify={verify!r} is not known", hint='"full" or "quick"')
        self._settle()
        options |= {"group": self._group, "timeout": self._timeout}
        found = restore_newest(self.url, state, verify, self._ranks(), options)
        if found is None:
            return None
        self._at, self._beyond, self._damaged = found.step.step, set(found.beyond), found.damaged
        self._parent, self._commits = found.report.lineage, found.commits
        return found.report

    def load(self, state: Mapping[str, Any], url: str | PathLike[str] | Checkpoint, **options: Any) -> LoadReport:
        """Load any checkpoint, also of another run, on all ranks the same, and note it as the parent of the next save.

        Args:
            state: as given to `ucformat.torch.load`.
            url: the checkpoint, or a reference to one.
            options: others of `ucformat.torch.load`, but for group and timeout.

        Raises:
            StateMismatch: the checkpoint does not fit the state.
        """
        self._settle()
        report = load(state, url, **options, group=self._group, timeout=self._timeout)
        self._parent = report.lineage
        return report

    def wait(self) -> Saved | None:
        """Wait until what is under way is committed, and what need not stay is deleted; the last that was committed.

        Raises:
            UcformatError: the save in the background failed.
        """
        if self._flying is not None:
            try:
                self._flying.handle.wait()
            except Exception:
                self._flying.told = True
                raise
        self._poll()
        if self._kept is not None:
            self._kept.result()
        return self._last

    def close(self) -> None:
        """Wait for what is under way, and put the handlers of signals back."""
        try:
            self.wait()
        finally:
            self._signals.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except UcformatError as failure:
            if error is None:
                raise
            _log.warning("the save in the background failed, too: %s", failure.message)

    def _ranks(self) -> Group:
        return group_of(self._group, self._timeout, f"Manager {self.url}")

    def _decide(self, step: int, *, force: bool) -> bool:
        """Whether a step is to be saved; the ranks agree."""
        self._poll()
        ranks = self._ranks()
        talks = self._talks and ranks.size > 1
        bits = _STOP * self._signals.caught | _FORCE * force
        if isinstance(self._every, timedelta) and not ranks.rank:
            bits |= _DUE * (time.monotonic() - self._begun >= self._every.total_seconds())
        if talks or ranks.size == 1:
            bits |= _FAILED * (self._flying is not None and self._flying.failed)
        if talks:
            bits = any_rank_bits(ranks, bits)
        self._stopping = self._stopping or bool(bits & _STOP)
        if self._stopping and not self._ended:
            return True
        if bits & _FAILED:
            self._settle()
        if bits & _FORCE:
            return True
        if step == self._at:
            return False
        if isinstance(self._every, timedelta):
            return bool(bits & _DUE)
        return self._every is None or step % self._every == 0

    def _poll(self) -> None:
        """Take note of a save in the background that was committed meanwhile."""
        flying = self._flying
        if flying is not None and not flying.noted and flying.handle.committed:
            flying.noted = True
            self._committed(flying.handle.wait(), flying.step, first=flying.first)

    def _settle(self) -> None:
        """Wait for the save in the background; its failure on any rank is raised on all, unless all were told."""
        flying, self._flying = self._flying, None
        if flying is None:
            return
        failure: Exception | None = None
        try:
            saved = flying.handle.wait()
        except Exception as error:  # noqa: BLE001 - told to all ranks
            failure = error
        else:
            if not flying.noted:
                self._committed(saved, flying.step, first=flying.first)
        told = [failure] if failure is not None and not flying.told else []
        everybody = self._ranks().all_gather((failure is not None, told), tuple[bool, list[BaseException]])
        if any(failed for failed, _ in everybody):
            self._at = None
        untold = [e for _, errors in everybody for e in errors]
        if untold:
            raise failure or untold[0]

    def _place(self, step: int) -> tuple[str, bool]:
        """Where to save, and whether to replace what lies there."""
        if self._overwrite or step not in self._beyond:
            return f"{self.url}/{folder_of(step)}", self._overwrite
        from ucformat.torch.manager.retention import free_place

        ranks = self._ranks()
        place: tuple[str, bool] = ranks.gather_scatter(
            None, lambda _: [free_place(self.url, step, self._damaged)] * ranks.size, None, tuple[str, bool]
        )
        return place

    def _committed(self, saved: Saved, step: int, *, first: bool) -> None:
        """Take note of a commit, and begin to delete what need not stay."""
        self._last = saved
        self._commits = min((self._commits or 0) + 1, MOST_COMMITS)
        self._parent = LineageDoc(kind="resume", url=saved.url, id=saved.id, commits=self._commits)
        self._beyond.discard(step)
        if self._keeper is not None and first:
            self._kept = self._pool.submit(self._keeper.apply, saved.url, step)


def _keeper(root: str, keep: Keep) -> RunRetention:
    from ucformat.torch.manager.retention import RunRetention, policy_of  # and with it, sqlalchemy

    return RunRetention(root, policy_of(keep))


@dataclass(slots=True)
class _PendingSave:
    """A save in the background. `first` says that this was rank 0; `told`, that its failure was raised here."""

    handle: SaveHandle
    step: int
    first: bool
    noted: bool = False
    told: bool = False

    @property
    def failed(self) -> bool:
        return self.handle.done and not self.handle.committed and not self.told
