"""Has the power fail under a command after each call, and says what is wrong with what is found then."""

from __future__ import annotations

import gc
import os
import re
import shutil
import sqlite3
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

import numpy as np

import ucformat
from tests.inline import Inline
from tests.power.commands import COMMANDS, NOW, arrays, first_world
from tests.power.disk import after, lies, visible
from tests.power.recorder import Killed, Recorder
from ucformat.catalog.catalog import Catalog
from ucformat.errors import Conflict, NotACheckpoint, UcformatError
from ucformat.format.structure import read_manifest
from ucformat.jobs.dependents import unprotected
from ucformat.jobs.gc import collect
from ucformat.schema import CATALOG_DOCUMENT, MANIFEST, NEEDED_BY
from ucformat.settings import using
from ucformat.storage.base import HIDDEN
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.power.commands import Command
    from tests.power.recorder import Disk, Tree

__all__ = ["Bench", "Found"]

_DONE = "already holds the committed checkpoint"
_MODULES = ("ucformat.storage.local_files", "ucformat.storage.concurrency", "ucformat.jobs.run")


@dataclass
class Found:
    """What came of a command: its calls, the states that a disk may have then, those that differ, and what is wrong."""

    calls: int = 0
    states: int = 0
    judged: int = 0
    complaints: list[str] = field(default_factory=list)

    def __add__(self, other: Found) -> Found:
        return Found(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __str__(self) -> str:
        seen = f"{self.calls:,} calls, {self.states:,} states, {self.judged:,} that differ"
        return f"{seen}, {len(self.complaints)} wrong"


class Bench:
    """A disk below `folder` on which commands are run, and their power fails; there is one in a process at once."""

    def __init__(self, folder: Path) -> None:
        self.root = folder.resolve() / "disk"
        self._first, self._found, self._keep = (
            self.root.parent / name for name in ("first", "found", "keep")
        )
        self._ready: Command | None = None  # what it was made ready for
        self._catalog = self.root.parent / "catalog.db"
        self._open = ExitStack()

    def __enter__(self) -> Self:
        enter = self._open.enter_context
        home = self.root / "home"
        enter(
            mock.patch.dict(os.environ, {"XDG_DATA_HOME": str(home), "XDG_CONFIG_HOME": str(home)})
        )
        enter(using(catalog=f"sqlite:///{self._catalog}"))
        for name in _MODULES:  # so that a command makes the same calls each time
            enter(mock.patch.object(import_module(name), "ThreadPoolExecutor", Inline))
        home.mkdir(parents=True)
        self._steps = first_world(self.root)
        shutil.copytree(self.root, self._first)
        self._first_catalog = self._found_catalog = self._dump()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def fail(self, name: str, *, again: bool = True) -> Found:
        """Fail after each call of a command; without `again` it is not repeated in each state."""
        command, found = COMMANDS[name], Found()
        known: set[Any] = set()
        recorder, catalogs = self._record(command)
        found.calls = len(recorder.calls)
        for count in range(found.calls + 1):
            returned = count == found.calls
            states = after(recorder.disk, recorder.calls[:count])
            for how in self._unseen(
                found,
                known,
                states,
                recorder.disk,
                catalogs[count],
                also=(catalogs[count], returned),
            ):
                where = f"{name} {count}/{found.calls} ({recorder.calls[count - 1] if count else ''}): {how}"
                for wrong in self._judge(command, returned=returned, again=again):
                    found.complaints.append(f"{where}: {wrong}")
        return found

    def kill(self, name: str) -> Found:
        """Kill a command at each call, repeat it, and have the power fail when that has returned."""
        command, found = COMMANDS[name], Found()
        known: set[Any] = set()
        for count in range(1, len(self._record(command)[0].calls)):
            recorder, catalogs = self._record(command, kill_at=count)
            found.calls += len(recorder.calls)
            states = after(recorder.disk, recorder.calls)
            for how in self._unseen(found, known, states, recorder.disk, catalogs[-1]):
                for wrong in self._judge(command, returned=True, again=False):
                    found.complaints.append(f"{name}, killed at {count}, and again: {how}: {wrong}")
        return found

    def lie(self, name: str) -> Found:
        """Have one sync after the other do nothing, and the power fail when the command has returned."""
        command, found = COMMANDS[name], Found()
        known: set[Any] = set()
        recorder, catalogs = self._record(command)
        found.calls = len(recorder.calls)
        for at in lies(recorder.calls):
            states = after(recorder.disk, recorder.calls, lies=at)
            for how in self._unseen(found, known, states, recorder.disk, catalogs[-1]):
                for place, steps in self._expected(command).items():
                    step: object
                    try:
                        step = self._step(place)
                    except UcformatError:
                        continue  # it is noticed
                    except Exception as error:  # noqa: BLE001 - what anybody would see
                        step = repr(error)
                    if step not in {None, *steps}:
                        found.complaints.append(
                            f"{name}, {recorder.calls[at]} lost: {how}: {place} holds {step}"
                        )
        return found

    def _unseen(
        self,
        found: Found,
        known: set[Any],
        states: Iterable[tuple[str, Tree]],
        disk: Disk,
        catalog: bytes,
        also: tuple[Any, ...] = (),
    ) -> Iterator[str]:
        """Have the disk hold each state that is not `known`, by what is visible and `also`, and say how it came."""
        for how, tree in states:
            found.states += 1
            key = (visible(tree), also)
            if key not in known:
                known.add(key)
                found.judged += 1
                self._restore(tree, catalog, disk)
                yield how

    # The command

    def _record(self, command: Command, kill_at: int = -1) -> tuple[Recorder, list[bytes]]:
        """The calls of a command, and what the catalog holds after each; killed there, it is begun again."""
        self._start(command)
        shutil.rmtree(self._keep, ignore_errors=True)
        self._keep.mkdir()
        recorder = Recorder(self.root)
        for (folder, name), number in recorder.disk.names.items():
            if number not in recorder.disk.folders:
                os.link(_path(recorder.disk, folder, name), self._keep / str(number))
        catalogs = [self._dump()]
        # calls are recorded one after the other, of all threads
        version = sqlite3.connect(self._catalog, check_same_thread=False)
        try:
            self._work(command, kill_at, recorder, version, catalogs)
        finally:
            version.close()  # or the files of the catalog could not be put back
        catalogs[-1] = self._dump()
        now, real = recorder.now(), _read(self.root)
        assert now == real, f"calls escaped: {sorted(now.items() ^ real.items())}"
        return recorder, catalogs

    def _work(
        self,
        command: Command,
        kill_at: int,
        recorder: Recorder,
        version: sqlite3.Connection,
        catalogs: list[bytes],
    ) -> None:
        def note() -> None:
            changed = version.execute("pragma data_version").fetchone()
            catalogs.append(catalogs[-1] if changed == note.last else self._dump())  # type: ignore[attr-defined]
            note.last = changed  # type: ignore[attr-defined]

        note.last = version.execute("pragma data_version").fetchone()  # type: ignore[attr-defined]
        recorder.on_call = note
        with recorder.recording():
            if kill_at >= 0:
                recorder.kill_at = kill_at
                _killed(lambda: command.work(self.root))
                recorder.kill_at = -1
            _done(
                lambda: (command.again or command.work if kill_at >= 0 else command.work)(self.root)
            )

    def _start(self, command: Command) -> None:
        """Have the disk and the catalog as the command finds them."""
        if self._ready is not command:
            self._reset(self._first, self._first_catalog)
            if command.dying:
                self._half(command.before or command.work)
            elif command.before is not None:
                command.before(self.root)
            shutil.rmtree(self._found, ignore_errors=True)
            shutil.copytree(self.root, self._found)
            self._ready, self._found_catalog = command, self._dump()
        self._reset(self._found, self._found_catalog)

    def _half(self, work: Callable[[Path], Any]) -> None:
        """Do it until it is killed before it puts its objects."""
        recorder = Recorder(self.root)
        with recorder.recording():
            work(self.root)
        self._reset(self._first, self._first_catalog)
        once, recorder = recorder, Recorder(self.root)
        recorder.kill_at = next(
            i for i, c in enumerate(once.calls) if c.said.endswith("objects.json")
        )
        with recorder.recording():
            _killed(lambda: work(self.root))

    def _reset(self, folder: Path, catalog: bytes) -> None:
        shutil.rmtree(self.root)
        shutil.copytree(folder, self.root)
        self._load(catalog)

    def _dump(self) -> bytes:
        with sqlite3.connect(self._catalog) as connection:
            data = connection.serialize()
        connection.close()
        return data

    def _load(self, data: bytes) -> None:
        for end in ("-wal", "-shm"):
            Path(f"{self._catalog}{end}").unlink(missing_ok=True)
        self._catalog.write_bytes(data)

    def _restore(self, tree: Tree, catalog: bytes, disk: Disk) -> None:
        """Have the disk hold this; files that were there before are the very same."""
        shutil.rmtree(self.root)
        self.root.mkdir()
        for path, data in tree.items():  # a folder comes before what is in it
            at = self.root / path
            if data is None:
                at.mkdir()
                continue
            number = _number(disk, path)
            if disk.data.get(number) == data and not path.startswith("home/"):
                os.link(self._keep / str(number), at)
            else:
                at.write_bytes(data)
                at.chmod(0o600)
        self._load(catalog)

    # What is wrong

    def _expected(self, command: Command) -> dict[str, tuple[int | None, int | None]]:
        return {place: (step, step) for place, step in self._steps.items()} | dict(command.changes)

    def _judge(self, command: Command, *, returned: bool, again: bool) -> Iterator[str]:
        expected = self._expected(command)
        for place, (old, new) in expected.items():
            yield from self._wrong(place, {new} if returned else {old, new})
        if returned and not command.said(self.root):
            yield "what was said is not there"
        if again:
            try:
                _done(lambda: (command.again or command.work)(self.root))
            except Exception as error:  # noqa: BLE001 - what anybody would see
                yield f"repeat: {error!r}"
            for place, (_, new) in expected.items():
                yield from (f"repeat: {wrong}" for wrong in self._wrong(place, {new}))
            if not command.said(self.root):
                yield "repeat: what was said is not there"
        with Catalog() as catalog:
            failures = collect(catalog, [str(self.root / "t")], apply=True, grace=NOW).failures
        yield from (f"gc: {failure}" for failure in failures)
        if again or returned:
            for place, (_, new) in expected.items():
                yield from (f"gc: {wrong}" for wrong in self._wrong(place, {new}))
            yield from self._left()

    def _wrong(self, place: str, steps: set[int | None]) -> Iterator[str]:
        """What is wrong with a place that should hold one of these steps."""
        try:
            with using(catalog="none"):  # which is not to be told
                step = self._step(place)
                problems: list[object] = []
                if step is not None:
                    problems += ucformat.verify(self.root / place, workers=1).problems
                    problems += (
                        f"{root} is not told"
                        for root in unprotected(ucformat.open(self.root / place))
                    )
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            yield f"{place}: {type(error).__name__}: {error}"
            return
        if step not in steps:
            yield f"{place} holds {step}, not {steps}"
        yield from (f"{place}: {problem}" for problem in problems)

    def _step(self, place: str) -> int | None:
        """The step of the checkpoint at a place; None where there is none."""
        try:
            read_manifest(open_store(str(self.root / place)))
        except NotACheckpoint:
            return None
        ck = ucformat.open(self.root / place)
        held = {name: ck[name, "weight"][...] for name in arrays(0)}
        assert isinstance(ck.objects, dict)
        same = [
            s for s in range(4) if all(np.array_equal(held[n], a) for n, a in arrays(s).items())
        ]
        assert same, held
        return same[0]

    def _left(self) -> Iterator[str]:
        """Files that belong to nothing."""
        files = [p for p, d in _read(self.root).items() if d is not None and f"/{HIDDEN}" not in p]
        attempts: dict[str, str] = {}
        needed: list[str] = []
        for home in (p.removesuffix(f"/{MANIFEST}") for p in files if p.endswith(f"/{MANIFEST}")):
            with suppress(UcformatError):
                manifest = read_manifest(open_store(str(self.root / home)))[0]
                attempts[home] = manifest.attempt
                needed.append(f"{NEEDED_BY}/{manifest.id}.json")
        for path in files:
            home = next((h for h in attempts if path.startswith(f"{h}/")), "")
            rest, attempt = path.removeprefix(f"{home}/"), attempts.get(home)
            known = (MANIFEST, CATALOG_DOCUMENT, f"attempts/{attempt}.json")
            ours = rest in (*known, *needed) or re.match(
                f"(data|objects|assets)/{attempt}/|{NEEDED_BY}/[0-9a-f]{{32}}.json$", rest
            )
            if not (home and ours) and path != "t/README" and not path.startswith("home/"):
                yield f"left: {path}"


def _done(work: Callable[[], Any]) -> None:
    """Do what may be done already."""
    try:
        work()
    except Conflict as error:
        if _DONE not in str(error):
            raise


def _killed(work: Callable[[], Any]) -> None:
    """Do what is going to be killed; what it left in memory goes, too."""
    with mock.patch.object(sys, "unraisablehook"):
        try:
            work()
        except Killed:
            pass
        else:
            raise AssertionError("it was not killed")
        gc.collect()


def _read(root: Path) -> Tree:
    return {
        str(p.relative_to(root)): None if p.is_dir() else p.read_bytes() for p in root.rglob("*")
    }


def _path(disk: Disk, folder: int, name: str) -> Path:
    above = next((n for n, number in disk.names.items() if number == folder), None)
    return (disk.root if above is None else _path(disk, *above)) / name


def _number(disk: Disk, path: str) -> int:
    at = 0
    for name in path.split("/"):
        at = disk.names.get((at, name), -1)
    return at
