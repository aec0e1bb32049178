"""`Manager`: saves the checkpoints of a training run when due, deletes old ones, and restores the newest intact one."""

from __future__ import annotations

import logging
import math
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from ucformat.errors import UcformatError, UnsupportedError, UsageError, check_keywords
from ucformat.schema import MANIFEST
from ucformat.storage.base import exists
from ucformat.storage.url import open_store
from ucformat.torch.comm.group import TIMEOUT, group_of
from ucformat.torch.loading.load import load
from ucformat.torch.manager.deltas import CollectedDeltas
from ucformat.torch.manager.increments import Increments, choose_base
from ucformat.torch.manager.preemption import Notice
from ucformat.torch.manager.restore import RunFolder, restore_newest
from ucformat.torch.manager.steps import (
    RunContents,
    Signals,
    continued_here,
    folder_of,
    list_steps,
    read_step,
)
from ucformat.torch.saving.asynchronous import async_save
from ucformat.torch.saving.background import kill_writer
from ucformat.torch.saving.deltas import Deltas
from ucformat.torch.saving.handles import saved_by
from ucformat.torch.saving.options import RunArguments, SaveOptions, TrainingLaunch
from ucformat.torch.saving.save import save
from ucformat.torch.saving.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from os import PathLike
    from types import TracebackType

    import torch

    from ucformat.checkpoint import Checkpoint
    from ucformat.torch.comm.bulk import Links
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.load import LoadReport
    from ucformat.torch.manager.restore import Mode, RunPlaces
    from ucformat.torch.manager.retention import Keep, RunRetention
    from ucformat.torch.manager.steps import RunStep
    from ucformat.torch.saving.handles import SaveHandle
    from ucformat.torch.saving.options import SaveArguments
    from ucformat.torch.saving.save import Saved
    from ucformat.torch.state.changed import ChangedRows
    from ucformat.torch.tiers.recovery import Survivors
    from ucformat.torch.tiers.tier import Tier
    from ucformat.torch.tiers.tiers import Tiers

__all__ = ["Manager"]

_log = logging.getLogger("ucformat")

_STOP, _FORCE, _DUE, _FAILED = 1, 2, 4, 8  # bits that ranks exchange at a step


class Manager:
    """Saves the checkpoints of a run in one folder, each as `step-00001000`, and restores the newest intact one.

        with Manager("s3://bucket/run7", every=1000, keep=3) as manager:
            report = manager.restore_latest(state)
            for step in range(1 if report is None else report.step + 1, steps + 1):
                train()
                manager.save(step, state)
                if manager.stopping:
                    break

    All ranks create a manager and call the same methods with the same arguments. Each checkpoint
    records its launch, and the checkpoint that was loaded as its parent; this alone does not
    protect a checkpoint from deletion.

    When a rank has received one of `signals`, the next `save` saves on all ranks, whether due or
    not, returns when the checkpoint is committed, and `stopping` is true from then on. For this the
    ranks exchange one byte in every call of `should_save` or `save` (except with `signals=()` and
    `every` in steps).

    Args:
        url: the folder, or prefix in an object store, of the run.
        every: when a checkpoint is due: at steps divisible by this number, or this long after the
            last save began (default: at every call of `save`).
        keep: which checkpoints to keep after each commit (docs/retention.md): the number of latest
            ones; rules, as `{"last": 3, "every": 1000, "best": {"metric": "val_loss", "count": 2,
            "mode": "min"}}`; or a policy, as a mapping or the path of a file. The newest is always
            kept. Files are deleted at once, unless a policy has a `grace`. With a catalog, the
            policy is applied through it, to checkpoints in this folder only. Failures are logged as
            warnings. By default nothing is deleted.
        asynchronous: save in the background, at most one checkpoint at a time.
        increments: save what changed since an earlier checkpoint of the run, which is chosen by this
            policy (docs/guides/save_less.md). Those that others are based on are kept by `keep`.
        tiers: nearer places, the fastest first, which save more often and from which `url` is filled
            (docs/guides/tiers.md): `[Tier("/dev/shm/run7", every=10, replicas=1)]`. Checkpoints are
            packed. `keep` is then for `url`, and `every` a multiple of the tiers'.
        signals: those that ask to save and stop; handlers that were installed before are called
            too.
        arguments: those of `RunArguments`, by keyword, as for `save`. By default a checkpoint of
            the same step raises Conflict, except for steps after the restored one: there a damaged
            checkpoint is replaced, and an intact one is kept beside the new. The `timeout` is also
            that between calls of `save`.

    Raises:
        UsageError: `every` is not positive, or `keep` is not a valid policy; or `increments` are
            given together with `base` or `patch`; or tiers contradict each other.
        UnsupportedError: with tiers, an argument that is not possible there.
    """

    def __init__(
        self,
        url: str | PathLike[str],
        *,
        every: int | timedelta | None = None,
        keep: Keep | None = None,
        asynchronous: bool = False,
        increments: Increments | None = None,
        tiers: Sequence[Tier] = (),
        signals: Sequence[int] = (signal.SIGTERM,),
        **arguments: Unpack[RunArguments],
    ) -> None:
        check_keywords("Manager.__init__", arguments, RunArguments)
        if every is not None and (
            every <= timedelta(0) if isinstance(every, timedelta) else every < 1
        ):
            raise UsageError(
                f"every={every!r} is not positive", hint="pass a number of steps, or a timedelta"
            )
        partial = arguments.get("partial")
        self._is_partial = partial is not None
        if isinstance(partial, Window) and every not in (None, 1):
            raise UsageError(
                f"a window has a checkpoint of each step, and every={every!r} leaves some out, so that none "
                "would be complete",
                hint="every=1, or partial=Experts(…)",
            )
        self._deltas = CollectedDeltas(partial) if isinstance(partial, Deltas) else None
        if self._deltas is not None and increments is not None:
            raise UsageError(
                "deltas have a chain of their own, and increments are given, too",
                hint="leave increments out; Deltas(max_chain=…, full=…) says when everything is saved",
            )
        if self._deltas is not None and every is not None:
            raise UsageError(
                f"deltas are saved in batches of steps, and every={every!r} is given, too",
                hint="leave every out: Deltas(batch=…, full=…) says when",
            )
        if partial is not None and increments is None:
            increments = Increments(max_chain=partial.max_chain)
        elif partial is not None and increments is not None and increments.policy != "consecutive":
            raise UsageError(
                f"partial saves are each based on the one before, and increments are {increments.policy!r}",
                hint='Increments("consecutive"), or leave increments out',
            )
        if increments is not None:
            arguments = _with_index(arguments)
        self.url = open_store(url).url
        self._tiers = _make_tiers(self, tiers, every, increments, arguments) if tiers else None
        if self._tiers is not None:
            arguments, every = {**arguments, "form": "packed"}, self._tiers.every
        self._overwrite = SaveOptions.of(self.url, arguments).overwrite  # checks all of them
        self._every, self._asynchronous, self._arguments = every, asynchronous, arguments
        self._retention = None if keep is None else _make_retention(self.url, keep, tiers)
        self._group = arguments.get("group")
        self._timeout = arguments.get("timeout", TIMEOUT)
        self._exchanges_bits = bool(signals) or isinstance(every, timedelta)
        self._signals = Signals(signals)
        self._notice: Notice | None = None
        self._links: Links | None = None  # over which ranks decide and save
        self._last_begun = time.monotonic()
        self._stopping = self._saved_for_stop = False
        # the last step given to `should_save`, and the answer
        self._decided: tuple[int, bool] | None = None
        self._last_step: int | None = None  # the step that was saved or restored last
        self._launch = TrainingLaunch()
        # the checkpoints in this folder when the launch began
        self._listed: RunContents | None = None
        self._places: RunPlaces | None = None  # those that were listed
        self._begun = False  # whether the launch has saved
        self._last: Saved | None = None
        self._pending: _PendingSave | None = None
        self._increments = increments
        # on rank 0, the committed checkpoints of the run; None: not listed yet
        self._bases: list[RunStep] | None = None
        # the ids of those from which this training's experts come
        self._ancestors: set[str] = set()
        self._later_steps: set[int] = set()  # steps after the restored one that hold a checkpoint
        self._damaged_urls: frozenset[str] = frozenset()  # those of them that may be replaced
        # one thread: a policy is applied after one commit at a time
        self._pool = ThreadPoolExecutor(1, "ucformat-keep")
        self._retention_job: Future[list[str]] | None = None

    @property
    def stopping(self) -> bool:
        """Whether any rank has received a signal, as of the last `should_save` or `save`; the same on all ranks."""
        return self._stopping

    @property
    def last(self) -> Saved | None:
        """The last checkpoint that this manager committed, or None."""
        self._poll()
        return self._last

    def on_preemption(self, seconds: float = 110.0) -> None:
        """Bound all that follows a signal by the time until the process is killed; all ranks call this.

        The next `save` then saves, as without this, and nothing waits for longer than the time after
        the first rank has received a signal: not for a save in the background, nor for ranks that
        are slow or dead. At its end the call that waits raises, and what is not committed by then is
        not there. Old checkpoints are not deleted any more.

        Args:
            seconds: from the signal on. Leave some seconds of what the scheduler gives (120 s on
                spot instances, `--signal=TERM@120` of SLURM) to the program itself.
        """
        if seconds <= 0:
            raise UsageError(f"seconds={seconds:g} is not positive", hint="such as seconds=110")
        if not self._signals.numbers:
            raise UsageError(
                "this manager waits for no signal, so it would not learn of a preemption",
                hint="create it in the main thread, with signals=(signal.SIGTERM,)",
            )
        before, self._notice = self._notice, Notice(seconds, self._expire)
        self._signals.then = self._notice.receive
        if before is not None:
            before.close()
        if self._signals.caught:
            self._notice.receive()

    def should_save(self, step: int) -> bool:
        """Check whether `save` would save this step; all ranks call it, and get the same answer.

        Args:
            step: the training step.

        Raises:
            UcformatError: the save in the background failed.
        """
        due = self._decide(step, force=False)
        self._decided = (step, due)
        return due or self._deltas is not None  # which `save` collects in each step

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        changed: Mapping[str, Any] | ChangedRows | None = None,
        tokens: Mapping[str, Sequence[int]] | None = None,
        deltas: Mapping[str, torch.Tensor] | None = None,
        force: bool = False,
    ) -> Saved | SaveHandle | None:
        """Save a checkpoint if it is due, if forced, or if the training is to stop.

        Args:
            step: the training step.
            state: as for `ucformat.torch.save`.
            metrics: numbers to record in the catalog: `{"val_loss": 2.1}`.
            changed: with increments, which rows changed since the base was saved, as for `save`.
                Only `ChangedRows` knows which checkpoint that is.
            tokens: with `partial`, how many tokens each expert was given, as for `save`.
            deltas: with `partial=Deltas(…)`, what this step applied, by name, in every step; it is copied,
                and saved when the batch is full.
            force: save even if no checkpoint is due.

        Returns:
            None if nothing was due; else the committed checkpoint, or with `asynchronous` a handle.
            The last save before the training stops is never in the background. A step that was just
            saved or restored is not saved again.

        Raises:
            UcformatError: a rank failed, or the save in the background failed; that checkpoint is
                not committed.
            Conflict: a checkpoint of this step exists.
        """
        self._collect(step, deltas, force=force)
        if not self._is_due(step, force=force):
            return None
        ending = self._stopping and not self._saved_for_stop
        try:
            self._settle(ending=ending)
        except UcformatError as error:
            if not ending:
                raise
            _log.warning(
                "the save in the background failed; the last checkpoint replaces it: %s",
                error.message,
            )
        if self._tiers is not None:
            self._tiers.settle()
        if step == self._last_step and (ending or not self._overwrite):
            self._saved_for_stop = self._saved_for_stop or ending
            return self._last
        ranks = self._ranks()
        self._begin(ranks)
        url, overwrite = self._destination(step)
        first = not ranks.rank
        arguments: SaveArguments = {
            **self._arguments,
            "deltas": cast("Any", deltas),  # which are refused, if they were not collected
            **self._choose_base(ranks, step),
            **self._launch.next_save(),
            "step": step,
            "metrics": metrics,
            "changed": changed,
            "tokens": tokens,
            "overwrite": overwrite,
        }
        if self._tiers is not None:
            arguments["times"] = self._tiers.times(ranks)
        self._last_begun = time.monotonic()
        if self._asynchronous and not ending:
            handle = async_save(state, url, **arguments)
            self._pending = _PendingSave(handle, step, first=first)
            self._last_step = step
            if self._tiers is not None:
                self._tiers.copy(handle, step, everywhere=force)
            return handle
        saved = save(state, url, **arguments)
        self._last_step, self._saved_for_stop = step, self._saved_for_stop or ending
        self._committed(saved, step, first=first)
        if self._tiers is not None:
            self._tiers.copy(saved, step, everywhere=force or ending)
            if ending:
                self._tiers.wait()
        return saved

    def restore_latest(
        self,
        state: Mapping[str, Any],
        *,
        verify: Mode = "full",
        step_fn: Callable[..., Any] | None = None,
        **options: Any,
    ) -> LoadReport | None:
        """Load the newest intact checkpoint, the same one on all ranks.

        The newest is the one committed last, by the commit counts of the checkpoints, not by
        clocks; if the training was set back to an earlier step, it is not always the one of the
        highest step. Checkpoints that were deleted in the catalog are ignored. A damaged one is
        skipped with a warning. A storage that cannot be read is an error.

        Args:
            state: as for `ucformat.torch.load`.
            verify: `full` reads and checks every byte before anything is loaded, an equal part on
                each rank, which costs about as much as loading without replicas. `quick` reads the
                metadata and compares the sizes of files, which finds missing and truncated files,
                and checks whole chunks while loading; if one is damaged, the next older checkpoint
                is loaded over what was loaded.
            step_fn: replays a checkpoint of a window, or of deltas, as for `replay`. Without, gradients
                are applied, and of a window older tensors are loaded as they are.
            options: other arguments of `load`, except `group` and `timeout`.

        Returns:
            the report of the load, or None if there is no checkpoint.

        Raises:
            IntegrityError: all checkpoints are damaged; parts of one may have been loaded.
            StateMismatch: the checkpoint does not fit the state.
        """
        if verify not in ("full", "quick"):
            raise UsageError(f"verify={verify!r} is not supported", hint='"full" or "quick"')
        self._settle()
        options = self._load_options(options)
        ranks = self._ranks()
        places = self._run_places(ranks)
        try:
            merged = None if self._deltas is None else self._deltas.merged
            restored = restore_newest(places, state, verify, ranks, options, step_fn, merged)
        finally:
            places.close()
        if restored is None:
            return None
        self._last_step, self._later_steps, self._damaged_urls = (
            restored.step.step,
            set(restored.later_steps),
            restored.damaged,
        )
        self._launch.begin(restored.report)
        self._listed, self._places, self._begun = restored.listed, places, False
        self._bases, self._ancestors = None, _ancestors_of(restored.report)
        if self._deltas is not None:
            self._deltas.begin(restored.whole)
        return restored.report

    def load(
        self, state: Mapping[str, Any], url: str | PathLike[str] | Checkpoint, **options: Any
    ) -> LoadReport:
        """Load any checkpoint, of this or another run, and record it as the parent of the next saves.

        Args:
            state: as for `ucformat.torch.load`.
            url: a checkpoint or a reference to one, the same on all ranks.
            options: other arguments of `ucformat.torch.load`, except `group` and `timeout`.

        Raises:
            StateMismatch: the checkpoint does not fit the state.
        """
        self._settle()
        report = load(state, url, **self._load_options(options))
        self._launch.begin(report)
        self._listed, self._begun, self._bases = None, False, None
        self._ancestors = _ancestors_of(report)
        if self._deltas is not None:
            self._deltas.begin(None)
        return report

    def wait(self) -> Saved | None:
        """Wait until the save in the background is committed and old checkpoints are deleted.

        Returns:
            the last committed checkpoint, or None.

        Raises:
            UcformatError: the save in the background failed.
        """
        if self._pending is not None:
            try:
                self._pending.handle.wait()
            except Exception:
                self._pending.raised = True
                raise
        self._poll()
        if self._tiers is not None:
            self._tiers.wait()
        if self._retention_job is not None:
            self._retention_job.result()
        return self._last

    def close(self) -> None:
        """Wait for the save in the background, and restore the signal handlers.

        Raises:
            UcformatError: the save in the background failed.
        """
        try:
            self.wait()
        finally:
            if self._tiers is not None:
                self._tiers.close()
            self._signals.close()
            if self._notice is not None:
                self._notice.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except UcformatError as failure:
            if error is None:
                raise
            _log.warning("the save in the background failed too: %s", failure.message)

    def _load_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a load: those of the call, and what holds for the whole run."""
        run: dict[str, Any] = {
            key: self._arguments[key] for key in ("names", "certify") if key in self._arguments
        }
        return dict(**run | dict(options), group=self._group, timeout=self._timeout)

    def _ranks(self) -> Group:
        if self._notice is not None and self._notice.left <= 0:
            raise self._late()
        return group_of(self._group, self._timeout, f"Manager {self.url}")

    def _collect(
        self, step: int, deltas: Mapping[str, torch.Tensor] | None, *, force: bool
    ) -> None:
        """Copy the deltas of a step, if they are saved; the last step may be saved again without."""
        if self._deltas is not None and (deltas is not None or step != self._last_step):
            self._deltas.add(step, deltas, force=force)

    def _is_due(self, step: int, *, force: bool) -> bool:
        """Whether to save a step, as `should_save` has said, if it was asked."""
        decided, self._decided = self._decided, None
        if decided is not None and decided[0] == step:
            return decided[1] or force
        return self._decide(step, force=force)

    def _decide(self, step: int, *, force: bool) -> bool:
        """Whether to save a step; the same on all ranks."""
        self._poll()
        ranks = self._ranks()
        bits = _STOP * self._signals.caught | _FORCE * force
        if isinstance(self._every, timedelta) and not ranks.rank:
            bits |= _DUE * (time.monotonic() - self._last_begun >= self._every.total_seconds())
        if self._exchanges_bits or ranks.size == 1:
            bits |= _FAILED * (self._pending is not None and self._pending.failed)
            notice, self._links = self._notice, ranks.links
            left = math.inf if notice is None else notice.left
            bits, left = ranks.combine((bits, left), _joined, tuple[int, float])
            if notice is not None and left < math.inf:
                notice.receive(left)
        self._stopping = self._stopping or bool(bits & _STOP)
        if self._stopping and not self._saved_for_stop:
            return True
        if bits & _FAILED:
            self._settle()
        if bits & _FORCE:
            return True
        if step == self._last_step:
            return False
        if self._deltas is not None:
            return self._deltas.is_due(step)
        if isinstance(self._every, timedelta):
            return bool(bits & _DUE)
        return self._every is None or step % self._every == 0

    def _expire(self) -> None:
        """Let all fail that this rank waits for."""
        kill_writer(self._links)
        if self._tiers is not None:
            self._tiers.stop(self._late())
        if self._links is not None:
            self._links.end(self._late())

    def _late(self) -> UcformatError:
        assert self._notice is not None  # noqa: S101 - it has ended
        return UcformatError(
            f"{self._notice.seconds:g} s after the signal, ranks or the storage were not done: what they "
            "were saving is not committed",
            hint="the next start continues from the last checkpoint before it",
        )

    def _poll(self) -> None:
        """Record a save in the background that was committed in the meantime."""
        pending = self._pending
        if pending is not None and not pending.recorded and pending.handle.committed:
            pending.recorded = True
            self._committed(saved_by(pending.handle), pending.step, first=pending.first)

    def _settle(self, *, ending: bool = False) -> None:
        """Wait for the save in the background; a failure that was not raised yet is raised on all ranks.

        Args:
            ending: for no longer than half of the time after the signal, so that the last save has the other
                half.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        failure: Exception | None = None
        try:
            seconds = self._notice.left / 2 if ending and self._notice is not None else None
            saved = saved_by(pending.handle, seconds)
        except TimeoutError:
            kill_writer(self._links)
            failure = UcformatError(
                f"{pending.handle.url} was not written in half of the time after the signal"
            )
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            failure = error
        else:
            if not pending.recorded:
                self._committed(saved, pending.step, first=pending.first)
        own_failures = [failure] if failure is not None and not pending.raised else []
        kind = tuple[bool, list[BaseException]]
        merged = lambda a, b: (a[0] or b[0], (a[1] + b[1])[:1])  # noqa: E731 - short
        failed, unraised = self._ranks().combine((failure is not None, own_failures), merged, kind)
        # so that this step may be saved again
        if failed:
            self._last_step = None
        if unraised:
            raise failure or unraised[0]

    def _begin(self, ranks: Group) -> None:
        """Before the first save of a launch: count on from all that is known, and see what it leaves behind."""
        if self._begun:
            return
        if self._listed is None and self._tiers is None:
            self._listed = ranks.combine(
                None, then=lambda _: list_steps(self.url), answer_kind=RunContents
            )
        elif self._listed is None:
            self._places = self._run_places(ranks)
            self._listed = self._places.list(ranks)
        assert self._listed is not None  # noqa: S101 - it was set
        run = self._arguments.get("run")
        commits = ranks.combine(None, then=lambda _: _known_commits(self.url, run), answer_kind=int)
        self._launch.commits = max(self._launch.commits, self._listed.commits, commits)
        self._launch.continues |= continued_here(self._listed.steps)
        if self._tiers is not None:
            self._tiers.begin(cast("Survivors", self._places), ranks)
        self._listed, self._places, self._begun = None, None, True

    def _run_places(self, ranks: Group) -> RunPlaces:
        return RunFolder(self.url) if self._tiers is None else self._tiers.survivors(ranks)

    def _destination(self, step: int) -> tuple[str, bool]:
        """Where to save, and whether to replace an existing checkpoint."""
        if self._tiers is not None:
            folder = self._tiers.destination(step, self._later_steps, self._ranks())
            return self._tiers.url_of(folder), False
        if self._overwrite or step not in self._later_steps:
            return f"{self.url}/{folder_of(step)}", self._overwrite
        from ucformat.torch.manager.retention import free_place

        free = lambda _: free_place(self.url, step, self._damaged_urls)  # noqa: E731 - short
        return self._ranks().combine(None, then=free, answer_kind=tuple[str, bool])  # type: ignore[no-any-return]

    def _choose_base(self, ranks: Group, step: int) -> SaveArguments:
        """On which checkpoint of the run the next one is based, and how; all ranks call this."""
        increments = self._increments
        deltas = self._deltas
        if increments is None:
            return {}

        def choose(_: None) -> str:
            if deltas is not None and (deltas.first is None or deltas.is_whole_due(step)):
                return ""
            if self._retention_job is not None:  # which may be removing some
                self._retention_job.result()
            if self._bases is None:
                self._bases = list(list_steps(self.url).steps)
            bases = [
                s
                for s in self._bases
                if s.url not in self._damaged_urls and s.step not in self._later_steps
            ]
            while bases:
                chosen = choose_base(increments, step, bases)
                # others may be those of a training that was given up
                if chosen is not None and self._is_partial and chosen.id not in self._ancestors:
                    return ""
                if chosen is not None and deltas is not None and chosen.step + 1 != deltas.first:
                    return ""  # the save of the steps between failed
                if chosen is None or exists(open_store(chosen.url), MANIFEST):
                    return "" if chosen is None else chosen.url
                bases.remove(chosen)
            return ""

        url: str = ranks.combine(None, then=choose, answer_kind=str)
        based: SaveArguments = {"base": url, "patch": increments.patch} if url else {"base": False}
        if deltas is not None:
            based["deltas"] = deltas.take(step, whole=not url)
        return based

    def _committed(self, saved: Saved, step: int, *, first: bool) -> None:
        """Record a commit, and start to delete old checkpoints in the background."""
        self._last = saved
        self._launch.recorded()
        self._ancestors.add(saved.id)
        if self._bases is not None:
            self._bases = [s for s in self._bases if s.url != saved.url]
            self._bases.insert(0, read_step(saved.url, step))
        self._later_steps.discard(step)
        if first and self._tiers is None:
            self._retain(saved.url, step)

    def _retain(self, url: str, step: int) -> None:
        """Start to delete old checkpoints at the url of the run, where another one is committed."""
        ends_in_time = self._notice is not None and self._stopping
        if self._retention is not None and not ends_in_time:
            self._retention_job = self._pool.submit(self._retention.apply, url, step)


def _joined(a: tuple[int, float], b: tuple[int, float]) -> tuple[int, float]:
    """The bits of any rank, and the least time that is left."""
    return a[0] | b[0], min(a[1], b[1])


def _with_index(arguments: RunArguments) -> RunArguments:
    """The arguments of saves that others are based on: packed files have an index of their tiles."""
    if arguments.get("base") or arguments.get("patch"):
        raise UsageError(
            "increments choose the base of each checkpoint",
            hint="leave out base; patch is an attribute of Increments",
        )
    if arguments.get("form") == "packed" and arguments.get("codec") is None:
        return {**arguments, "codec": "raw"}
    return arguments


def _ancestors_of(report: LoadReport) -> set[str]:
    """The checkpoint of which a program's experts are those, if all of it was restored."""
    restored = not report.left and not report.problems.lines(unexpected=True)
    return {report.id} if restored and report.lineage.kind in ("resume", "reshard") else set()


def _make_tiers(
    manager: Manager,
    tiers: Sequence[Tier],
    every: int | timedelta | None,
    increments: Increments | None,
    arguments: RunArguments,
) -> Tiers:
    from ucformat.torch.tiers.tiers import Tiers  # imports sqlalchemy

    if increments is not None:
        word = "partial" if arguments.get("partial") else "increments"
        raise UnsupportedError(
            f"{word}={arguments.get('partial') or increments!r} is not supported with tiers: what a "
            "checkpoint is based on may not survive",
            hint=f"leave out {word}, or tiers",
        )
    return Tiers(manager.url, tiers, every, arguments, manager._retain)  # noqa: SLF001 - its own


def _make_retention(root: str, keep: Keep, tiers: Sequence[Tier]) -> RunRetention:
    from ucformat.torch.manager.retention import RunRetention, policy_of  # imports sqlalchemy

    return RunRetention(root, policy_of(keep), [open_store(t.url).url for t in tiers[1:]])


def _known_commits(root: str, run: str | None) -> int:
    from ucformat.torch.manager.retention import known_commits  # imports sqlalchemy

    return known_commits(root, run)


@dataclass(slots=True)
class _PendingSave:
    """A save in the background: whether this is rank 0, whether its commit is recorded, and its failure was raised."""

    handle: SaveHandle
    step: int
    first: bool
    recorded: bool = False
    raised: bool = False

    @property
    def failed(self) -> bool:
        return self.handle.done and not self.handle.committed and not self.raised
