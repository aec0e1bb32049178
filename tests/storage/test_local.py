from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.patience import PATIENCE
from ucformat.errors import (
    Conflict,
    NotFound,
    PermissionDenied,
    UcformatError,
    UnsafeError,
    UnsupportedError,
)
from ucformat.storage import local, local_files, strided
from ucformat.storage.base import content_version
from ucformat.storage.folders import with_parents
from ucformat.storage.local import LocalStore
from ucformat.testing.stores import keys, put

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(ucformat.__file__).parents[1]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def spawn(code: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def open_files(below: Path) -> int:
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += fd.readlink().is_relative_to(below)
    return found


def failing(monkeypatch: pytest.MonkeyPatch, function: str, code: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, function, fail)


RACE = """
import sys, time, pathlib
from ucformat.errors import Conflict
from ucformat.storage.local import LocalStore
root, act, me = sys.argv[1], sys.argv[2], sys.argv[3].encode()
store = LocalStore(root)
version = store.read_versioned("f")[1] if act == "replace" else ""
print("ready", flush=True)
while not pathlib.Path(root, "go").exists():
    time.sleep(0.001)
try:
    store.put_if_absent("d/f", me * 5000) if act == "put" else store.replace("f", me * 5000, version)
    print("won", flush=True)
except Conflict:
    print("lost", flush=True)
"""


@pytest.mark.parametrize(("act", "key"), [("put", "d/f"), ("replace", "f")])
def test_one_of_many_processes_wins(store: LocalStore, tmp_path: Path, act: str, key: str) -> None:
    put(store, "f", b"first")
    racers = [spawn(RACE, tmp_path, act, i) for i in range(8)]
    assert [r.stdout.readline() for r in racers if r.stdout] == ["ready\n"] * 8
    put(store, "go")
    said = [r.communicate(timeout=PATIENCE)[0] for r in racers]
    assert sorted(said) == ["lost\n"] * 7 + ["won\n"]
    assert store.read(key) == str(said.index("won\n")).encode() * 5000


def test_a_killed_writer_leaves_nothing_to_see(store: LocalStore, tmp_path: Path) -> None:
    code = """
import signal, sys
from ucformat.storage.local import LocalStore
out = LocalStore(sys.argv[1]).create("data/x/f")
out.write(bytes(10_000_000))
print("ready", flush=True)
signal.pause()
"""
    writer = spawn(code, tmp_path)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert keys(store) == []
    assert [p.stat().st_size for p in tmp_path.rglob("*.tmp")] == [10_000_000]
    store.delete_prefix("data")
    assert list(tmp_path.iterdir()) == []


def test_open_files_are_few_and_closed_with_the_store(store: LocalStore, tmp_path: Path) -> None:
    for i in range(300):
        put(store, f"d/{i}", b"%d" % i)
    store.flush()
    assert open_files(tmp_path) == 0
    buffer = memoryview(bytearray(1))
    for i in range(300):
        store.read_into(f"d/{i}", 0, [buffer])
    assert open_files(tmp_path) == 128
    reader = LocalStore(tmp_path)
    reader.read_into("d/1", 0, [buffer])
    del reader
    assert open_files(tmp_path) == 128
    store.delete("d/299")
    assert open_files(tmp_path) == 127
    store.delete_prefix("d")
    assert open_files(tmp_path) == 0


def test_a_file_replaced_while_it_is_opened_is_not_kept(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "f", b"old")
    buffer = memoryview(bytearray(3))
    opened = local_files.OpenFile

    def slowly(path: str, folder: local_files.Descriptor | None) -> local_files.OpenFile:
        file = opened(path, folder)
        put(store, "f", b"new")
        return file

    monkeypatch.setattr(local, "OpenFile", slowly)
    store.read_into("f", 0, [buffer])
    monkeypatch.undo()
    store.read_into("f", 0, [buffer])
    assert bytes(buffer) == b"new"


def test_short_reads_are_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(1000)
    put(store, "f", data)
    preadv = os.preadv
    monkeypatch.setattr(strided, "NATIVE", False)
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset)
    )
    target = [bytearray(n) for n in (5, 0, 300, 7, 14, 100)]
    store.read_into("f", 3, [memoryview(t) for t in target])
    assert b"".join(target) == data[3:429]


# --- durability


@pytest.mark.parametrize("fails", [False, True])
def test_large_ranges_are_read_ahead_while_reads_are_slow(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    data = os.urandom(200_000)
    put(store, "a", data)
    asked = []

    def advise(fd: int, offset: int, nbytes: int, advice: int) -> None:
        asked.append((offset, nbytes, advice))
        if fails:
            raise OSError(errno.EINVAL, "not supported here")

    def read(offset: int, nbytes: int) -> None:
        out = bytearray(nbytes)
        store.read_into("a", offset, [memoryview(out)])
        assert out == data[offset : offset + nbytes]

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(local, "_CACHED", float("inf"))  # every read is slow
    read(0, 100_000)
    assert not asked
    read(1000, 100_000)
    read(0, 100)
    monkeypatch.setattr(local, "_CACHED", 0)  # the next is the last that is
    read(2000, 100_000)
    read(3000, 100_000)
    assert asked == [
        (1000, 100_000, os.POSIX_FADV_WILLNEED),
        (2000, 100_000, os.POSIX_FADV_WILLNEED),
    ]


def test_flush_syncs_each_file_and_the_folders_up_to_the_first_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    store = LocalStore(tmp_path / "new" / "root")
    put(store, "a/b/f")
    assert synced == [
        str(tmp_path.parent),
        str(tmp_path),
        str(tmp_path / "new"),
    ]  # the first: who made it may be dead
    synced.clear()
    store.flush()
    root = str(tmp_path / "new" / "root")
    assert sorted(synced[1:]) == [root, f"{root}/a", f"{root}/a/b"]
    synced.clear()
    store.flush()
    assert synced == []
    other = LocalStore(tmp_path / "new" / "root")
    other.adopt("a/b/f")
    other.flush()
    assert sorted(synced) == [
        str(tmp_path / "new"),
        root,
        f"{root}/a",
        f"{root}/a/b",
        f"{root}/a/b/f",
    ]
    synced.clear()
    store.put_if_absent("a/c", b"x")
    assert synced[1:] == [f"{root}/a", root]
    synced.clear()
    store.delete("a/b/f")
    store.delete_prefix("gone/long/ago")
    store.flush()
    assert synced == [f"{root}/a/b"]
    folders = ["a-b", "a/b/c", "a/d", "ab/a/b", "ab/c", "b"]  # in no order of walks
    for folder in folders:
        put(store, f"{folder}/f")
    synced.clear()
    store.flush()
    names = {f"{root}/{above}".rstrip("/") for f in folders for above in with_parents(f)}
    assert sorted(synced) == sorted([*names, *(f"{root}/{f}/f" for f in folders)])


def test_an_error_of_write_back_raises_until_the_file_is_written_anew(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "before")
    store.flush()
    failing(monkeypatch, "fsync", errno.EIO)
    for key in ("a/f", "a/g", "b/h"):
        put(store, key)
    with pytest.raises(UcformatError, match=r"cannot make durable .*/f: Input/output error"):
        store.flush()
    monkeypatch.undo()
    store.adopt("a/f")  # too late: what was lost stays lost
    with pytest.raises(UcformatError, match="a/f"):
        store.flush()
    put(store, "a/f")
    store.delete("a/g")
    with pytest.raises(UcformatError, match="b/h"):
        store.flush()
    store.delete_prefix("b")
    store.flush()


# --- what the operating system refuses


@pytest.mark.parametrize(
    ("code", "error", "hint"),
    [
        (errno.ENOSPC, UcformatError, "free some space"),
        (errno.EDQUOT, UcformatError, "free some space"),
        (errno.EACCES, PermissionDenied, "owner and the mode"),
        (errno.EROFS, PermissionDenied, "owner and the mode"),
        (errno.EIO, UcformatError, "Input/output"),
    ],
)
def test_a_write_that_fails_says_what_to_do_and_leaves_nothing(
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    error: type[UcformatError],
    hint: str,
) -> None:
    put(store, "d/g", b"old")
    acts: list[Callable[[], object]] = [
        lambda: put(store, "d/f"),
        lambda: store.put_if_absent("d/f", b"x"),
        lambda: store.replace("d/g", b"x", content_version(b"old")),
    ]
    for act in acts:
        with monkeypatch.context() as patch:
            failing(patch, "write", code)
            with pytest.raises(error, match=rf"(?s)cannot write .*/d/[fg].*{hint}"):
                act()
    assert keys(store) == ["d/g"]
    assert not list(tmp_path.rglob("*.tmp"))
    with monkeypatch.context() as patch:
        failing(patch, "open", code)
        with pytest.raises(error, match=rf"(?s)cannot read .*/d/g.*{hint}"):
            store.read("d/g")


def test_a_place_without_hard_links_is_refused(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
        failing(monkeypatch, "link", code)
        with pytest.raises(UnsupportedError, match=r"(?s)cannot be put if absent.*hard links"):
            store.put_if_absent("f", b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_link_whose_answer_got_lost_is_a_success(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def lossy(src: str, dst: str, **folders: Any) -> None:
        link(src, dst, **folders)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", lossy)
    store.put_if_absent("f", b"x")
    with pytest.raises(Conflict):
        store.put_if_absent("f", b"y")
    assert keys(store) == ["f"]


def test_a_folder_removed_under_a_stream_is_said_so(store: LocalStore) -> None:
    out = store.create("d/f")
    store.delete_prefix("d")
    with pytest.raises(NotFound, match="removed meanwhile"):
        out.close()


def test_files_and_folders_in_each_others_place(store: LocalStore) -> None:
    put(store, "d/f", b"x")
    with pytest.raises(PermissionDenied, match="a folder is where"):
        put(store, "d")
    with pytest.raises(PermissionDenied, match="a folder is where"):
        store.delete("d")
    with pytest.raises(PermissionDenied, match="a file is where"):
        put(store, "d/f/g")
    with pytest.raises(PermissionDenied, match="a file is where"):
        store.put_if_absent("d/f/g", b"")
    with pytest.raises(Conflict):
        store.put_if_absent("d", b"x")
    with pytest.raises(NotFound, match="does not exist"):
        store.read("d/f/g")
    with pytest.raises(UnsupportedError, match="too long"):
        put(store, "n" * 256)
    assert keys(store) == ["d/f"]


# --- symbolic links


def test_reads_through_links_and_writes_through_none(tmp_path: Path) -> None:
    outside = LocalStore(tmp_path / "blobs")
    put(outside, "sub/blob", b"abc")
    store = LocalStore(tmp_path / "root")
    put(store, "inside/f", b"x")
    root = tmp_path / "root"
    (root / "file").symlink_to(tmp_path / "blobs/sub/blob")
    (root / "folder").symlink_to(tmp_path / "blobs/sub")
    (root / "loop").symlink_to(root)
    (root / "broken").symlink_to(root / "nowhere")
    (root / "itself").symlink_to(root / "itself")
    os.mkfifo(root / "pipe")
    with pytest.raises(NotFound, match="not a file"):
        store.info("pipe")
    (root / "device").symlink_to("/dev/zero")
    for key in ("pipe", "device"):
        with pytest.raises(NotFound, match=f"{key} is not a file"):
            store.read_into(key, 0, [memoryview(bytearray(1))])
        with pytest.raises(NotFound, match=f"{key} is not a file"):
            store.read(key)
        with pytest.raises(NotFound, match=f"{key} is not a file"):
            store.adopt(key)
    assert (store.read("file"), store.read("folder/blob"), store.info("file").size) == (
        b"abc",
        b"abc",
        3,
    )
    assert keys(store) == ["file", "inside/f"]
    acts: list[Callable[[str], object]] = [
        store.create,
        store.delete,
        store.delete_prefix,
        lambda k: store.put_if_absent(k, b""),
        lambda k: store.replace(k, b"", content_version(b"abc")),
    ]
    for act in acts:
        with pytest.raises(
            UnsafeError, match=f"{root}/folder is a symbolic link, to {tmp_path}/blobs/sub"
        ):
            act("folder/blob")
        with pytest.raises(UnsafeError, match=f"{root}/loop is a symbolic link, to {root}"):
            act("loop/inside/f")
    store.delete_prefix("folder")
    store.delete("file")
    store.delete_prefix("loop")
    assert (keys(store), keys(outside)) == (["inside/f"], ["sub/blob"])
    assert outside.read("sub/blob") == b"abc"


READS: list[Callable[[LocalStore, str], object]] = [
    lambda store, key: store.read(key),
    lambda store, key: store.read_versioned(key),
    lambda store, key: store.read_into(key, 0, [memoryview(bytearray(1))]),
    lambda store, key: store.read_rows(key, 0, 1, [memoryview(bytearray(1))]),
]


def test_a_confined_store_reads_nothing_that_a_link_makes_one_elsewhere(tmp_path: Path) -> None:
    put(LocalStore(tmp_path / "else"), "sub/blob", b"abc")
    root = tmp_path / "root"
    put(LocalStore(root), "inside/f", b"x")
    (tmp_path / "root2").symlink_to(
        root
    )  # the root itself may be a link, and links may stay inside
    (root / "stays").symlink_to("inside/f")
    (root / "file").symlink_to(tmp_path / "else/sub/blob")
    (root / "folder").symlink_to(tmp_path / "else/sub")
    (root / "beside").symlink_to("../root-beside")
    put(LocalStore(tmp_path), "root-beside", b"abc")  # whose path begins as the root's
    asked: list[str] = []

    def nothing(path: str) -> bool:
        asked.append(path)
        return False

    for place in (root, tmp_path / "root2"):
        store = LocalStore(place).confined(nothing)
        assert store.read("inside/f") == store.read("stays") == b"x"
        assert asked == []
        for key in ("file", "folder/blob", "beside"):
            again = pickle.loads(pickle.dumps(store))  # noqa: S301
            with pytest.raises(UnsafeError, match="by a symbolic link that leads out of"):
                again.read(key)
            for act in READS:
                with pytest.raises(UnsafeError, match="by a symbolic link that leads out of"):
                    act(store, key)
        assert set(asked) == {str(tmp_path / "else/sub/blob"), str(tmp_path / "root-beside")}
        asked.clear()
    assert (
        LocalStore(root).confined(lambda path: path.endswith("/blob")).read("folder/blob") == b"abc"
    )


def test_what_bears_the_name_of_a_lock_is_neither_followed_nor_waited_for(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    version = store.put_if_absent("f", b"one")
    (tmp_path / "root" / ".ucf-lock").symlink_to(tmp_path / "made")
    with pytest.raises(UnsafeError, match=r"(?s)cannot lock .*ucf-lock.*it is a symbolic link"):
        store.replace("f", b"two", version)
    assert not (tmp_path / "made").exists()
    assert store.read("f") == b"one"
    os.mkfifo(tmp_path / "root" / ".ucf-0123456789abcdef.tmp")
    (tmp_path / "root" / ".ucf-1123456789abcdef.tmp").symlink_to(tmp_path / "else")
    store.sweep()


def test_pickles_as_its_root(store: LocalStore) -> None:
    put(store, "f", b"abc")
    assert pickle.loads(pickle.dumps(store)).read("f") == b"abc"  # noqa: S301


def test_many_closed_streams_do_not_run_out_of_descriptors(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def slow(fd: int) -> None:
        time.sleep(0.002)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    store._durability._max_open = 32
    most = 0
    for i in range(200):
        put(store, f"{i}")
        most = max(most, open_files(Path(store.url)))
    store.flush()
    assert most <= 66


def test_sweeping_removes_what_the_dead_left_and_nothing_of_the_living(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    living = store.create("a/living")
    living.write(b"x" * 100)
    dead = tmp_path / "a" / ".ucf-0123456789abcdef.tmp"
    dead.write_bytes(b"y" * 100)
    store.sweep()
    assert not dead.exists()
    living.close()
    assert store.read("a/living") == b"x" * 100


def test_pruning_removes_a_folder_that_holds_nothing_and_no_other(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    put(store, "a/b/f")
    store.delete("a/b/f")
    store.replace("d/e", b"two", store.put_if_absent("d/e", b"one"))
    store.delete("d/e")
    assert (tmp_path / "root" / "d" / ".ucf-lock").exists()
    living = store.create("w/living")
    living.write(b"x")
    (tmp_path / "root" / "link").symlink_to("a")
    for folder in ("a", "d", "w", ""):
        store.prune(folder)
    with pytest.raises(UnsafeError):
        store.prune("link/b")
    assert sorted(p.name for p in (tmp_path / "root").iterdir()) == ["a", "link", "w"]
    living.close()
    assert keys(store) == ["w/living"]
    store.delete("w/living")
    (tmp_path / "root" / "link").unlink()
    for folder in ("w", "a/b", "a", "", ""):
        store.prune(folder)
    assert list(tmp_path.iterdir()) == []
