"""One of the many that work on a catalog at once: does what comes, and notes what it tries and what the catalog said.

Each worker appends lines of JSON to its own file: `try` before a call, `did` when it returned,
`due` when it was refused for a reason that is due (somebody else was quicker), `error` for anything
else, which nobody should ever see.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from tests.catalog.manifests import manifest, tensor
from tests.patience import PATIENCE
from ucformat.catalog.catalog import Catalog
from ucformat.errors import Conflict, NotFound, PermissionDenied, UcformatError
from ucformat.schema.manifest import LineageDoc

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Barrier
    from pathlib import Path

    from ucformat.schema.manifest import Manifest

__all__ = ["POSTS", "PROCESSES", "Task", "made", "post", "shared", "work"]

#: Makes processes that have loaded this module already.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])

_GONE = (PermissionDenied, NotFound)  # it is deleted, or not there yet
_MOVED = (Conflict, *_GONE)
POSTS = 16  # checkpoints that are there from the beginning, and that all workers speak of


@dataclass(frozen=True)
class Task:
    """What one worker is to do.

    `turns` are how many things it does, None: until it is killed; after `dies` of them it kills
    itself in the middle of a transaction.
    """

    url: str
    number: int
    workers: int
    turns: int | None
    notes: Path
    dies: int | None = None


def post(number: int) -> Manifest:
    """One of the checkpoints that are there from the beginning."""
    return manifest(number, run="posts", step=number)


def made(worker: int, number: int) -> Manifest:
    """What a worker records: with run, configuration and structure that the others need at about the same time.

    Its parent is what the worker before it records at about the same time.
    """
    lineage = (
        (LineageDoc(kind="resume", url="/nowhere", id=_id(worker - 1, number)),) if worker else ()
    )
    return _manifest(_id(worker, number), number, f"run{worker % 3}", lineage)


def shared(number: int) -> Manifest:
    """What several workers record at about the same time."""
    return _manifest(_id("shared", number), number, "shared", ())


def _id(*words: Any) -> str:
    return hashlib.sha256(repr(words).encode()).hexdigest()[:32]


def _manifest(id_: str, number: int, run: str, lineage: tuple[LineageDoc, ...]) -> Manifest:
    tensors = tuple(tensor(f"layer{i}", content=(id_, i)) for i in range(3 + number // 5))
    config = {"optimizer": {"lr": 10.0 ** -(1 + number % 4)}, "generation": number // 3}
    metrics = {"val_loss": 1 / (1 + number)}
    return manifest(
        id_,
        run=f"{run}.{number // 10}",
        step=number,
        tensors=tensors,
        config=config,
        metrics=metrics,
        lineage=lineage,
    )


def work(task: Task, barrier: Barrier) -> None:
    """Do what is to be done; the exit status is 1 if the catalog said what it should not."""
    worker = _Worker(task)
    barrier.wait(PATIENCE)
    try:
        worker.run()
    except BaseException:  # noqa: BLE001 - whatever it is, the test shows it
        worker.note("error", text=traceback.format_exc())
        sys.exit(1)


class _Worker:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._random = random.Random(task.number)
        self._file = os.open(task.notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._mine: list[str] = []
        self._holds: list[tuple[str, int]] = []
        self._turn = 0

    def note(self, what: str, **values: Any) -> None:
        """Append a line: what is written is there, whoever is killed."""
        os.write(self._file, (json.dumps({"what": what, **values}) + "\n").encode())

    def run(self) -> None:
        turns = (
            [self._count] * 3
            + [self._record] * 3
            + [self._record_shared, self._move, self._move, self._point]
        )
        turns += [
            self._tag,
            self._metric,
            self._metric,
            self._hold,
            self._release,
            self._delete,
            self._look,
        ]
        catalog = self._open()
        while self._task.turns is None or self._turn < self._task.turns:
            self._turn += 1
            if self._random.random() < 0.02:
                catalog.close()
                catalog = self._open()
            self._random.choice(turns)(catalog)
        catalog.close()

    def _open(self) -> Catalog:
        catalog = Catalog(self._task.url)
        if self._task.dies is not None:
            for moment in ("before_cursor_execute", "after_cursor_execute"):
                sa.event.listen(catalog.database.engine, moment, self._die)
        return catalog

    def _die(self, connection: Any, *_: Any) -> None:
        late = self._turn > (self._task.dies or 0)
        if late and connection.info.get("writing") and self._random.random() < 0.2:
            os.kill(os.getpid(), signal.SIGKILL)

    def _do(
        self, call: Callable[[], Any], due: tuple[type[UcformatError], ...], **values: Any
    ) -> Any:
        """Call, between two lines; None where what is due was raised."""
        self.note("try", **values)
        try:
            found = call()
        except due as error:
            self.note("due", error=type(error).__name__, **values)
            return None
        number = {"number": found} if isinstance(found, int) else {}
        self.note("did", **values, **number)
        return True if found is None else found

    def _some(self) -> str:
        """A checkpoint that is there from the beginning, or one that this worker or another may have recorded."""
        if self._random.random() < 0.4:
            return post(self._random.randrange(POSTS)).id
        return self._recorded()

    def _recorded(self) -> str:
        worker = self._random.choice(
            [self._task.number, self._random.randrange(self._task.workers)]
        )
        return _id(worker, self._random.randrange(1 + len(self._mine)))

    # What there is to do

    def _record(self, catalog: Catalog) -> None:
        number, worker = len(self._mine), self._task.number
        found, url = made(worker, number), f"/data/{worker}/{number}"
        self._do(
            lambda: catalog.record(found, url),
            (),
            do="record",
            id=found.id,
            url=url,
            of=[worker, number],
        )
        self._mine.append(found.id)

    def _record_shared(self, catalog: Catalog) -> None:
        number = self._turn // 4
        found, url = shared(number), f"/data/shared/{number}/{self._task.number % 2}"
        self._do(
            lambda: catalog.record(found, url),
            (),
            do="record",
            id=found.id,
            url=url,
            of=["shared", number],
        )

    def _count(self, catalog: Catalog) -> None:
        """Move the alias `counter` from one post to the next: no two may do so from the same one."""
        try:
            old = catalog.get("alias:counter")
        except NotFound:
            old = None
        new = post(0 if old is None else (int(old.step or 0) + 1) % POSTS).id
        self._move_if(catalog, "counter", None if old is None else old.id, new)

    def _move(self, catalog: Catalog) -> None:
        name = self._random.choice(["best", "good"])
        old = next((a.id for a in catalog.aliases() if a.name == name), None)
        if old is not None and self._random.random() < 0.2:
            said = {"name": name, "source": old, "target": None}
            self._do(lambda: catalog.unalias(name, expect=old), _MOVED, do="move", **said)
        elif (new := self._some()) != old:
            self._move_if(catalog, name, old, new)

    def _move_if(self, catalog: Catalog, name: str, old: str | None, new: str) -> None:
        said = {"name": name, "source": old, "target": new}
        self._do(lambda: catalog.alias(name, new, expect=old), _MOVED, do="move", **said)

    def _point(self, catalog: Catalog) -> None:
        new = self._some()
        self._do(lambda: catalog.alias("any", new), _GONE, do="point", name="any", target=new)

    def _tag(self, catalog: Catalog) -> None:
        ref, name = self._some(), f"tag{self._random.randrange(4)}"
        self._do(lambda: catalog.tag(ref, name), _GONE, do="tag", id=ref, name=name)

    def _metric(self, catalog: Catalog) -> None:
        ref, name, value = self._some(), f"loss{self._task.number}", self._random.random()
        self._do(
            lambda: catalog.metric(ref, {name: value}),
            _GONE,
            do="metric",
            id=ref,
            name=name,
            value=value,
        )

    def _hold(self, catalog: Catalog) -> None:
        ref = self._some()
        number = self._do(lambda: catalog.hold(ref, "stress"), _GONE, do="hold", id=ref)
        if number is not None:
            self._holds.append((ref, number))

    def _release(self, catalog: Catalog) -> None:
        if self._holds:
            ref, hold = self._holds.pop(self._random.randrange(len(self._holds)))
            done = self._do(lambda: catalog.release(ref, hold), (), do="release", id=ref, hold=hold)
            assert done == 1, done

    def _delete(self, catalog: Catalog) -> None:
        ref = self._recorded()
        if (
            self._do(lambda: catalog.delete(ref), _GONE, do="delete", id=ref)
            and self._random.random() < 0.5
        ):
            self._do(lambda: catalog.restore(ref), _GONE, do="restore", id=ref)

    def _look(self, catalog: Catalog) -> None:
        catalog.find(sort="-step", limit=5)
        catalog.lineage(post(0).id)
        if self._mine:
            found = catalog.get(self._mine[-1])
            assert found.tensors == len(catalog.tensors(found.id))
