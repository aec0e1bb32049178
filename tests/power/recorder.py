"""Records what is done to the files below a folder, call by call."""

from __future__ import annotations

import os
import stat
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from ucformat.storage import strided

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["Call", "Disk", "Killed", "Name", "Recorder", "Tree", "contents", "tree"]

#: What lies below a folder: the content of each file by its path, and None for each folder.
Tree = dict[str, bytes | None]
#: A name in a folder, which is known by its number.
Name = tuple[int, str]

_ROOT = 0


class Killed(BaseException):
    """What is raised instead of a call to one that is killed there, and instead of all later ones."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that changed something, or synced it.

    `names` are what it made of names in folders: the number of a file or folder, or None where
    there is none any more. `data` is what it wrote at `offset` of the file `node`; None where it
    cut it to that size. `synced` is the number of a file or folder.
    """

    said: str
    names: Mapping[Name, int | None] = field(default_factory=dict)
    node: int = -1
    offset: int = 0
    data: bytes | None = None
    synced: int = -1

    def __str__(self) -> str:
        return self.said


class Disk:
    """The files and folders that there are, by number, and what they held at the beginning, which is durable."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders = {_ROOT}
        self.names: dict[Name, int] = {}
        self.data: dict[int, bytes] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        self.made = 0
        self._look(root, _ROOT)

    def _look(self, path: Path, number: int) -> None:
        found = path.lstat()
        self.numbers[found.st_dev, found.st_ino] = number
        if not stat.S_ISDIR(found.st_mode):
            self.data[number] = path.read_bytes()
            return
        self.folders.add(number)
        for below in sorted(path.iterdir()):
            self.names[number, below.name] = new = self.new()
            self._look(below, new)

    def new(self) -> int:
        """A number that nothing has yet."""
        self.made += 1
        return self.made


class Recorder:
    """Records the calls below `root` of all threads of this process, in their order, while `recording`.

    A call that it does not know escapes it; `now` tells what there should be, for that to be
    noticed.
    """

    def __init__(self, root: Path) -> None:
        self.disk = Disk(root)
        self.calls: list[Call] = []
        self.kill_at = -1  # the number of the call at which all is killed
        self.on_call: Callable[[], None] = lambda: None
        self._names = dict(self.disk.names)  # as they are now
        self._lock = threading.RLock()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """In the block, calls are recorded."""
        kinds: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "write": self._write,
            "pwrite": self._write,
            "ftruncate": self._truncate,
            "fsync": self._sync,
            "fdatasync": self._sync,
            "link": self._link,
            "rename": self._rename,
            "replace": self._rename,
            "unlink": self._remove,
            "remove": self._remove,
            "rmdir": self._remove,
            "mkdir": self._mkdir,
        }
        unknown = (
            "writev",
            "pwritev",
            "truncate",
            "posix_fallocate",
            "sendfile",
            "copy_file_range",
            "symlink",
        )
        functions: dict[str, Any] = {
            name: partial(kind, getattr(os, name)) for name, kind in kinds.items()
        }
        functions |= {name: partial(self._unknown, name) for name in unknown}
        with mock.patch.multiple(os, **functions), mock.patch.object(strided, "NATIVE", new=False):
            yield  # compiled code would write without these functions

    def now(self) -> Tree:
        """What all recorded calls should have made."""
        return tree(self.disk, self._names, contents(self.disk, self.calls))

    def _called(self, call: Call) -> None:
        self.calls.append(call)
        self._names.update({name: n for name, n in call.names.items() if n is not None})
        for name in (name for name, n in call.names.items() if n is None):
            self._names.pop(name, None)
        self.on_call()

    def _may_call(self) -> None:
        if self.kill_at >= 0 and len(self.calls) >= self.kill_at:
            self.kill_at = len(self.calls)  # nothing happens any more
            raise Killed

    def _name(self, path: Any, folder: int | None = None) -> Name | None:
        """The name that a path is; None where it lies elsewhere."""
        path = self._path(path, folder)
        if not path.startswith(f"{self.disk.root}/"):
            return None
        *folders, name = path.removeprefix(f"{self.disk.root}/").split("/")
        at = _ROOT
        for one in folders:
            at = self._names.get((at, one), -1)
        return at, name

    def _node(self, fd: int) -> int:
        found = os.fstat(fd)
        return self.disk.numbers.get((found.st_dev, found.st_ino), -1)

    def _path(self, path: Any, folder: int | None = None) -> str:
        """A path, which may be relative to a folder that is open, as an absolute one."""
        above = "" if folder is None else f"{Path(f'/proc/self/fd/{folder}').readlink()}/"
        return os.path.abspath(f"{above}{os.fspath(path)}")  # noqa: PTH100

    def _short(self, path: Any, folder: int | None = None) -> str:
        return self._path(path, folder).removeprefix(f"{self.disk.root}/")

    def _open(
        self,
        do: Callable[..., int],
        path: Any,
        flags: int,
        mode: int = 0o777,
        *,
        dir_fd: int | None = None,
    ) -> int:
        if not flags & (os.O_CREAT | os.O_TRUNC):
            return do(path, flags, mode, dir_fd=dir_fd)
        with self._lock:  # of names too: another thread may just be making the folder
            name = self._name(path, dir_fd)
            if name is None:
                return do(path, flags, mode, dir_fd=dir_fd)
            self._may_call()
            fd = do(path, flags, mode, dir_fd=dir_fd)
            if name not in self._names:
                found, number = os.fstat(fd), self.disk.new()
                self.disk.numbers[found.st_dev, found.st_ino] = number
                self._called(Call(f"create {self._short(path, dir_fd)}", {name: number}))
            elif flags & os.O_TRUNC:
                self._called(Call(f"truncate {self._short(path, dir_fd)}", node=self._names[name]))
            return fd

    def _write(self, do: Callable[..., int], fd: int, data: Any, *offset: int) -> int:
        node = self._node(fd)
        if node < 0:
            return do(fd, data, *offset)
        with self._lock:
            self._may_call()
            done = do(fd, data, *offset)
            at = offset[0] if offset else os.lseek(fd, 0, os.SEEK_CUR) - done
            self._called(
                Call(
                    f"write {done} to {node}",
                    node=node,
                    offset=at,
                    data=bytes(memoryview(data)[:done]),
                )
            )
            return done

    def _truncate(self, do: Callable[..., None], fd: int, size: int) -> None:
        node = self._node(fd)
        with self._lock:
            if node >= 0:
                self._may_call()
            do(fd, size)
            if node >= 0:
                self._called(Call(f"truncate {node}", node=node, offset=size))

    def _sync(self, do: Callable[..., None], fd: int) -> None:
        node = self._node(fd)
        if node < 0:
            return
        with self._lock:
            self._may_call()
            what = "folder" if node in self.disk.folders else "file"
            self._called(
                Call(
                    f"sync {what} {self._short(Path(f'/proc/self/fd/{fd}').readlink())}",
                    synced=node,
                )
            )

    def _link(self, do: Callable[..., None], src: Any, dst: Any, **more: Any) -> None:
        self._change(do, "link", src, dst, lambda old, new: {new: self._names[old]}, more)

    def _rename(self, do: Callable[..., None], src: Any, dst: Any, **more: Any) -> None:
        self._change(
            do, "rename", src, dst, lambda old, new: {new: self._names[old], old: None}, more
        )

    def _change(
        self,
        do: Callable[..., None],
        what: str,
        src: Any,
        dst: Any,
        change: Callable[[Name, Name], Mapping[Name, int | None]],
        more: dict[str, Any],
    ) -> None:
        folders = more.get("src_dir_fd"), more.get("dst_dir_fd")
        with self._lock:
            one, other = self._name(src, folders[0]), self._name(dst, folders[1])
            if one is None and other is None:
                return do(src, dst, **more)
            self._may_call()
            do(src, dst, **more)
            assert one is not None, src
            assert other is not None, dst
            said = f"{what} {self._short(src, folders[0])} {self._short(dst, folders[1])}"
            self._called(Call(said, change(one, other)))
        return None

    def _remove(self, do: Callable[..., None], path: Any, *, dir_fd: int | None = None) -> None:
        with self._lock:
            name = self._name(path, dir_fd)
            if name is None or name not in self._names:
                return do(path, dir_fd=dir_fd)
            self._may_call()
            do(path, dir_fd=dir_fd)
            self._called(Call(f"remove {self._short(path, dir_fd)}", {name: None}))
        return None

    def _mkdir(
        self, do: Callable[..., None], path: Any, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> None:
        with self._lock:
            name = self._name(path, dir_fd)
            if name is None:
                return do(path, mode, dir_fd=dir_fd)
            self._may_call()
            do(path, mode, dir_fd=dir_fd)
            found, number = os.stat(path, dir_fd=dir_fd), self.disk.new()
            self.disk.numbers[found.st_dev, found.st_ino] = number
            self.disk.folders.add(number)
            self._called(Call(f"mkdir {self._short(path, dir_fd)}", {name: number}))
        return None

    def _unknown(self, name: str, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"os.{name} is called, which is not recorded")


def tree(disk: Disk, names: Mapping[Name, int], data: Mapping[int, bytes]) -> Tree:
    """What is found below the root where these are the names, and these the contents."""
    below: dict[int, list[tuple[str, int]]] = {}
    for (folder, name), node in names.items():
        below.setdefault(folder, []).append((name, node))
    found: Tree = {}
    todo = [("", _ROOT)]
    while todo:
        path, folder = todo.pop()
        for name, node in below.get(folder, ()):
            if node in disk.folders:
                found[f"{path}{name}"] = None
                todo.append((f"{path}{name}/", node))
            else:
                found[f"{path}{name}"] = data.get(node, b"")
    return found


def contents(
    disk: Disk, calls: Sequence[Call], zeros_from: Mapping[int, int] | None = None
) -> dict[int, bytes]:
    """What each file holds after these calls; of what is written from a call of this number on, only zeros."""
    found = dict(disk.data)
    for at, call in enumerate(calls):
        if call.node < 0:
            continue
        old = found.get(call.node, b"")
        head = old[: call.offset].ljust(call.offset, b"\0")
        if call.data is None:
            found[call.node] = head
        else:
            zeros = zeros_from is not None and at >= zeros_from.get(call.node, 0)
            data = bytes(len(call.data)) if zeros else call.data
            found[call.node] = head + data + old[call.offset + len(data) :]
    return found
