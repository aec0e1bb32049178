"""A run as one array for each tensor, along the steps of its checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from ucformat.errors import TensorNotFound, UsageError
from ucformat.geometry.tensor import Key
from ucformat.runs.members import choose_members, open_members
from ucformat.runs.tensor import RunTensor, choose_steps, steps_text
from ucformat.storage.url import as_strings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from os import PathLike

    from ucformat.checkpoint import Checkpoint
    from ucformat.reading.plan import Verify
    from ucformat.runs.members import Member
    from ucformat.zarr_store.run_store import RunStore

__all__ = ["Run", "open_run"]


def open_run(
    place: str | PathLike[str],
    *,
    head: str | None = None,
    leave_out: int | str | Iterable[int | str] = (),
    roots: str | PathLike[str] | Iterable[str | PathLike[str]] = (),
    options: Mapping[str, Any] | None = None,
    lossy: bool = False,
) -> Run:
    """Open the checkpoints of a training run as one array for each tensor, along their steps.

    The checkpoints are those on the path of the training to its newest one: where it was set back
    and saved steps again, the newer ones. Those that the catalog has deleted are left out.
    `Run.left_out` tells which there are besides, and why.

    Args:
        place: the name of a run in the catalog, or a path or url of a folder with its checkpoints,
            which ucformat or a known engine wrote. An existing path takes precedence.
        head: the id of the checkpoint with which the path ends, or the beginning of the id
            (default: the newest of the run).
        leave_out: steps, or names of folders or ids of checkpoints, that are no part of it, such as
            damaged ones, or those of unknown steps.
        roots: as in `ucformat.open`.
        options: facts that the files of foreign checkpoints lack, as in `ucformat.open`.
        lossy: allow to read tensors that were encoded with loss (default: that is an error).

    Raises:
        NotFound: there is no such run, or it has no checkpoints.
        UsageError: the run has several lines that do not continue each other, or several
            checkpoints at one step of which none is the newer; or `leave_out` names none of it.
        IntegrityError: a checkpoint is damaged; the message names its step.
    """
    at = as_strings(roots)
    chosen = choose_members(place, head, leave_out, at, options)

    def opened_members(members: Sequence[Member]) -> list[Checkpoint]:
        checkpoints = open_members(members, at, options)
        return [ck.with_lossy() for ck in checkpoints] if lossy else checkpoints

    opened = _OpenedMembers(opened_members)
    return Run(chosen.place, chosen.members, chosen.left_out, opened)


class _OpenedMembers:
    """The checkpoints of a run's members, each opened once, when it is first asked for."""

    def __init__(self, open_all: Callable[[Sequence[Member]], list[Checkpoint]]) -> None:
        self._open_all = open_all
        self._checkpoints: dict[str, Checkpoint] = {}  # by id
        self._lock = threading.Lock()

    def __call__(self, members: Sequence[Member]) -> list[Checkpoint]:
        with self._lock:
            new = [m for m in members if m.id not in self._checkpoints]
            if new:
                opened = self._open_all(new)
                self._checkpoints |= {m.id: ck for m, ck in zip(new, opened, strict=True)}
            return [self._checkpoints[m.id] for m in members]


class Run(Mapping[str, RunTensor]):
    """The checkpoints of a run, in order of steps.

    `run[name]` is a lazy array of a tensor along all steps, in state `weight`, or `master` where
    only that is stored; `run[name, state]` in another. A checkpoint is opened when it is first
    needed, and once.
    """

    def __init__(
        self,
        url: str,
        members: Sequence[Member],
        left_out: Mapping[str, str],
        opened: _OpenedMembers,
    ) -> None:
        self.url = url
        self._members = {cast("int", m.step): m for m in members}
        self.left_out: Mapping[str, str] = MappingProxyType(dict(left_out))
        self._opened = opened

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of its checkpoints, in ascending order."""
        return tuple(self._members)

    def checkpoint(self, step: int) -> Checkpoint:
        """The checkpoint of a step."""
        return self.checkpoints(choose_steps(self.steps, step, self.url))[0]

    def checkpoints(self, steps: Sequence[int] | None = None) -> list[Checkpoint]:
        """The checkpoints of some steps (None: of all)."""
        return self._opened([self._members[s] for s in (self.steps if steps is None else steps)])

    def select(self, steps: int | slice | Iterable[int]) -> Run:
        """The same run with some of its steps.

        Args:
            steps: the number of a step, several of them, or a slice of numbers of steps, of which
                those are taken that there are: `slice(1000, 2000, 100)`.

        Raises:
            OutOfBounds: there is no such step.
        """
        if isinstance(steps, slice | int):
            chosen = choose_steps(self.steps, steps, self.url)
        else:
            chosen = sorted({s for n in steps for s in choose_steps(self.steps, n, self.url)})
        if not chosen:
            raise UsageError(f"{self.url}: no step is selected", hint="name one or more of them")
        members = [self._members[step] for step in chosen]
        return Run(self.url, members, self.left_out, self._opened)

    def names(self) -> list[str]:
        """Names of the tensors that any of the checkpoints stores."""
        return list(dict.fromkeys(name for ck in self.checkpoints() for name in ck.names()))

    def states(self, name: str) -> list[str]:
        """The states in which any of the checkpoints stores a tensor.

        Args:
            name: the tensor's name or alias.
        """
        there = [ck for ck in self.checkpoints() if name in ck.names() or name in ck.aliases]
        if not there:
            self._newest().states(name)  # raises
        return list(dict.fromkeys(state for ck in there for state in ck.states(name)))

    def _newest(self) -> Checkpoint:
        return self.checkpoint(self.steps[-1])

    def __getitem__(self, key: str | tuple[str, str]) -> RunTensor:
        try:
            tensor = self._newest()[key]
        except TensorNotFound:  # an earlier checkpoint may have it
            there = (ck for ck in reversed(self.checkpoints()) if key in ck)
            earlier = next(there, None)
            if earlier is None:
                raise
            tensor = earlier[key]
        return RunTensor(self, Key(key if isinstance(key, str) else key[0], tensor.state))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def __contains__(self, key: object) -> bool:
        return any(key in ck for ck in self.checkpoints())

    def __repr__(self) -> str:
        left = f"; {len(self.left_out)} left out" if self.left_out else ""
        return f"<ucformat.Run {self.url}: steps {steps_text(self.steps)}{left}>"

    def _ipython_key_completions_(self) -> list[str]:
        """The names that IPython and Jupyter offer after `run[`."""
        return self.names()

    def zarr_store(
        self, names: str | Iterable[str] | None = None, *, verify: Verify = "whole"
    ) -> RunStore:
        """A read-only store for zarr-python (extra `zarr`), with an array along all steps for each tensor.

        It has a group for each state, and in it the arrays and a coordinate `step`. A chunk is of
        one step, and read when it is asked for.

        Args:
            names: only these tensors (None: all). They must be the same in dtype and shape at all
                steps.
            verify: which checksums to verify, as for `Tensor.read`.

        Raises:
            UsageError: some tensors are not in all steps, or not in one dtype and shape.
        """
        from ucformat.zarr_store.run_store import RunStore  # with zarr, which is slow to import

        return RunStore(self, None if names is None else as_strings(names), verify=verify)

    @property
    def recipe(self) -> tuple[object, ...]:
        """The same for runs of the same checkpoints."""
        return tuple((m.step, m.id, m.url) for m in self._members.values())

    def __reduce__(self) -> tuple[Callable[..., Run], tuple[Any, ...]]:
        """As what opens its checkpoints again, one by one when they are needed: the same ones in any process."""
        members = [
            replace(member, origin=ck.__reduce__())
            for member, ck in zip(self._members.values(), self.checkpoints(), strict=True)
        ]
        return _reopened, (self.url, members, dict(self.left_out))


def _reopened(url: str, members: Sequence[Member], left_out: Mapping[str, str]) -> Run:
    opened = _OpenedMembers(lambda some: open_members(some, (), None))
    return Run(url, members, left_out, opened)
