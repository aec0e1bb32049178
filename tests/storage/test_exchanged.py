"""Folders that somebody exchanges for symbolic links while a local store writes there (docs/security.md, rule 11a)."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tests.links import looks
from ucformat.errors import UcformatError
from ucformat.storage.base import content_version
from ucformat.storage.local import LocalStore
from ucformat.testing.stores import put

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OLD, NEW = b"old", b"new"
DEAD = ".ucf-0123456789abcdef.tmp"
CALLS = (
    "fsync",
    "link",
    "lstat",
    "mkdir",
    "open",
    "readlink",
    "rename",
    "rmdir",
    "scandir",
    "stat",
    "unlink",
    "write",
)
Content = dict[str, bytes]


def files(folder: Path) -> Content:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class World:
    """A store with files in `a/b`, and elsewhere the very same, to which a link is to lead."""

    def __init__(self, folder: Path) -> None:
        self.root, self.outside, self.away = folder / "root", folder / "outside", folder / "away"
        for at in (self.root, self.outside):
            (at / "a/b/x").mkdir(parents=True)
            for name in ("a/b/f", "a/b/g", "a/f", f"a/b/{DEAD}"):
                (at / name).write_bytes(OLD)
            (at / "a/b/x/.ucf-lock").touch()
        self.store = LocalStore(self.root)
        self.before = looks(self.outside)

    def exchange(self, folder: str) -> None:
        """Put a link in the place of a folder."""
        (self.root / folder).rename(self.away)
        (self.root / folder).symlink_to(self.outside / folder)

    def now(self, folder: str) -> Content:
        """What a store would see, had nobody exchanged the folder."""
        if not self.away.exists():
            return files(self.root)
        return files(self.root) | {
            f"{folder}/{name}": data for name, data in files(self.away).items()
        }


def write(store: LocalStore, key: str) -> None:
    put(store, key, NEW)
    store.flush()


def give_up(store: LocalStore) -> None:
    out = store.create("a/b/new")
    out.write(NEW)
    out.abort()


def adopt(store: LocalStore) -> None:
    store.adopt("a/b/f")
    store.flush()


def delete(store: LocalStore) -> None:
    store.delete("a/b/f")
    store.flush()


def delete_listed(store: LocalStore) -> None:
    for info in store.list("a"):
        store.delete(info.key)
    store.flush()


def _with(**changes: bytes) -> Callable[[Content], bool]:
    return lambda now: all(now.get(key.replace("_", "/")) == data for key, data in changes.items())


def _without(*keys: str) -> Callable[[Content], bool]:
    return lambda now: not any(key.startswith(gone) for key in now for gone in keys)


@dataclass
class Act:
    """What is done with a store, and whether it was; None where links may be passed over, or removed as such."""

    do: Callable[[LocalStore], object]
    done: Callable[[Content], bool] | None = None


ACTS = {
    "write": Act(lambda s: write(s, "a/b/new"), _with(a_b_new=NEW)),
    "write in place": Act(lambda s: write(s, "a/b/f"), _with(a_b_f=NEW)),
    "write below new folders": Act(lambda s: write(s, "a/b/y/z/new"), _with(a_b_y_z_new=NEW)),
    "give up": Act(give_up, lambda now: sum(key.endswith(".tmp") for key in now) == 1),
    "put": Act(lambda s: s.put_if_absent("a/b/new", NEW), _with(a_b_new=NEW)),
    "put below new folders": Act(lambda s: s.put_if_absent("a/b/y/new", NEW), _with(a_b_y_new=NEW)),
    "replace": Act(lambda s: s.replace("a/b/f", NEW, content_version(OLD)), _with(a_b_f=NEW)),
    "adopt": Act(adopt, _with(a_b_f=OLD)),
    "delete": Act(delete, _without("a/b/f")),
    "delete a folder": Act(lambda s: s.delete_prefix("a/b/x"), _without("a/b/x/")),
    "delete folders": Act(lambda s: s.delete_prefix("a")),
    "delete what is listed": Act(delete_listed),
    "prune": Act(lambda s: s.prune("a/b/x")),
    "sweep": Act(lambda s: s.sweep()),
}


@pytest.mark.parametrize("folder", ["a", "a/b"])
@pytest.mark.parametrize("name", ACTS)
def test_exchanged_before(tmp_path: Path, name: str, folder: str) -> None:
    world, act = World(tmp_path), ACTS[name]
    world.exchange(folder)
    told = None
    try:
        act.do(world.store)
    except UcformatError as error:
        told = error.message
    assert looks(world.outside) == world.before
    if act.done is not None:
        assert told is not None
    if told is not None:
        assert f"{world.root}/{folder} is a symbolic link, to {world.outside}/{folder}" in told


@pytest.mark.parametrize("folder", ["a", "a/b"])
@pytest.mark.parametrize("name", ACTS)
def test_exchanged_at_each_call(tmp_path: Path, name: str, folder: str) -> None:
    """An error says so, or it was too late, and what was to be done is done where the folder is by then."""
    act, at, calls, told = ACTS[name], 0, 1, 0
    while at < calls:
        (tmp_path / str(at)).mkdir()
        world = World(tmp_path / str(at))
        error, calls = _exchanged_at(at, world, act.do, folder)
        assert looks(world.outside) == world.before, at
        if error is not None:
            told += 1
            assert "symbolic link" in error.message, at
            assert str(world.root) in error.message, at
        elif act.done is not None:
            assert act.done(world.now(folder)), at
        at += 1
    assert calls > 3
    assert told > 1 or act.done is None


def _exchanged_at(
    at: int, world: World, act: Callable[[LocalStore], object], folder: str
) -> tuple[UcformatError | None, int]:
    """Exchange the folder before a call of this number; what it came to, and how many calls there were."""
    calls, lock = 0, threading.RLock()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal calls
            with lock:
                calls += 1
                if calls - 1 == at:
                    calls, before = (
                        at - 1_000_000,
                        calls,
                    )  # the calls of exchanging count for nothing
                    world.exchange(folder)
                    calls = before
            return function(*args, **more)

        return call

    error = None
    functions: dict[str, Any] = {name: counted(getattr(os, name)) for name in CALLS}
    with mock.patch.multiple(os, **functions):
        try:
            act(world.store)
        except UcformatError as caught:
            error = caught
    return error, calls
