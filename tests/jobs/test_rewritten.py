"""A source that is written anew while it is read makes no checkpoint: it would be a mixture of two versions."""

from __future__ import annotations

import os
import uuid
import warnings
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ucformat
import ucformat.torch
from tests.fakes import ODD, random_array
from tests.packed import write_packed
from tests.zero_files import FLAT, write_zero3
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import Conflict, MissingData, NotACheckpoint, NotFound
from ucformat.jobs.materialize import materialize
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.s3 import Bucket
    from ucformat.storage.base import Checksums, Info, Store


A, B = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))


class Meddling(WrappedStore):
    """Does something once, just before the read (of a file, if `key` names one) that `when` counts."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.act: Callable[[], None] | None = None
        self.key: str | None = None
        self.reads = 0
        self.when = 0
        self.looks: list[str] = []

    def _count(self, key: str) -> None:
        self.reads += self.key in (None, key)
        if self.act is not None and self.reads >= self.when:
            act, self.act = self.act, None
            act()

    def arm(self, when: int, act: Callable[[], None], key: str | None = None) -> None:
        self.reads, self.when, self.act, self.key = 0, when, act, key

    def info(self, key: str) -> Info:
        self.looks.append(key)
        return super().info(key)

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        self._count(key)
        super().read_into(key, offset, buffers, crcs)

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        self._count(key)
        super().read_rows(key, offset, step, rows)


def old(folder: Path) -> None:
    """Let files be of yesterday, so that whatever is written now is seen to be later."""
    for file in folder.rglob("*"):
        os.utime(file, ns=(10**18, 10**18))


def in_place(path: Path) -> None:
    """Write other bytes of the same number into the same file, and let it look as old as before."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x55
    was = path.stat()
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def by_rename(path: Path) -> None:
    """Put another file of the same size and time in its place, while this one is open."""
    was = path.stat()
    new = path.with_name("new")
    new.write_bytes(path.read_bytes())
    os.utime(new, ns=(was.st_atime_ns, was.st_mtime_ns))
    new.rename(path)


def write(path: Path) -> None:
    path.write_text("global_step6")


def removed(path: Path) -> None:
    path.unlink()


REWRITES = [in_place, by_rename, removed]


def safetensors(folder: Path) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir()
    for n, file in (("a", A), ("b", B)):
        save_file(
            {f"{n}{k}": random_array((64, 64), "float32", k) for k in range(3)}, folder / file
        )
    old(folder)
    return folder


def opened(folder: Path) -> tuple[Checkpoint, Meddling]:
    store = Meddling(LocalStore(folder))
    return open_checkpoint(store), store


def nothing_opens(place: Path) -> bool:
    with pytest.raises((NotACheckpoint, NotFound)):
        ucformat.open(place)
    return True


@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("when", [1, 2, 5])
def test_a_conversion_of_a_rewritten_file_commits_nothing(
    rewrite: Callable[[Path], None], when: int, tmp_path: Path
) -> None:
    folder = safetensors(tmp_path / "src")
    ck, store = opened(folder)
    file = folder / A
    store.arm(when, lambda: rewrite(file))
    gone = f"|{A} does not exist" if rewrite is removed else ""
    with pytest.raises(
        (Conflict, MissingData, NotFound),
        match=f"{A} changed since the checkpoint was opened{gone}",
    ):
        ucformat.convert(ck, tmp_path / "dst", workers=1)
    assert store.act is None
    assert nothing_opens(tmp_path / "dst")


@pytest.mark.parametrize("rewrite", [in_place, by_rename])
def test_a_file_that_is_rewritten_between_opening_and_converting(
    rewrite: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = safetensors(tmp_path / "src")
    ck = ucformat.open(folder)
    rewrite(folder / B)
    with pytest.raises(Conflict, match=B):
        ucformat.convert(ck, tmp_path / "dst")
    with pytest.raises(Conflict, match=B):
        ucformat.convert(ck, tmp_path / "virtual", virtual=True)
    assert nothing_opens(tmp_path / "dst")
    anew = ucformat.convert(folder, tmp_path / "dst")
    assert ucformat.verify(anew)


def test_a_file_of_metadata_alone_is_compared_too(tmp_path: Path) -> None:
    arrays = {("w", s): random_array((8, 6), "float32", i) for i, s in enumerate(FLAT)}
    folder = write_zero3(tmp_path / "run", arrays, 2, 5)
    old(folder)
    ck, store = opened(folder)
    (states,) = folder.rglob("zero_pp_rank_1_mp_rank_00_model_states.pt")
    store.arm(1, lambda: by_rename(states))
    with pytest.raises(Conflict, match=states.name):
        ucformat.convert(ck, tmp_path / "dst")


def test_the_file_that_names_the_last_step_may_change_meanwhile(tmp_path: Path) -> None:
    arrays = {("w", s): random_array((8, 6), "float32", i) for i, s in enumerate(FLAT)}
    folder = write_zero3(tmp_path / "run", arrays, 2, 5)
    ck, store = opened(folder)
    store.arm(1, lambda: write(folder / "latest"))
    assert ucformat.verify(ucformat.convert(ck, tmp_path / "dst"))


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *product(("packed", "arrays"), ("convert", "materialize", "copy", "virtual")),
        ("packed", "in place"),  # arrays are left as they are
    ],
)
def test_universal_sources_are_compared_too(kind: str, how: str, tmp_path: Path) -> None:
    folder = tmp_path / "src"
    packed = write_packed(LocalStore(folder if kind == "packed" else tmp_path / "other"), ODD)
    if kind == "arrays":
        ucformat.convert(packed, folder)
    old(folder)
    ck, store = opened(folder)
    files = (
        f
        for f in (folder / "data").rglob("*")
        if f.is_file() and f.name.partition(".")[0] not in ("zarr", "extents")
    )
    victim = max(files, key=lambda f: f.stat().st_size)
    store.arm(1, lambda: by_rename(victim), victim.relative_to(folder).as_posix())
    acts: dict[str, Callable[[], Any]] = {
        "convert": lambda: ucformat.convert(ck, tmp_path / "dst", chunk_bytes=256),
        "materialize": lambda: materialize(ck, tmp_path / "dst"),
        "in place": lambda: materialize(ck),
        "copy": lambda: ucformat.copy(ck, tmp_path / "dst"),
        "virtual": lambda: ucformat.convert(ck, tmp_path / "dst", virtual=True, checksums=True),
    }
    with pytest.raises(Conflict, match=victim.name):
        acts[how]()
    assert store.act is None
    if how == "in place":
        assert ucformat.open(folder).id == ck.id
        assert ucformat.verify(folder)
    else:
        assert nothing_opens(tmp_path / "dst")


def test_a_virtual_checkpoint_is_compared_with_the_files_that_it_points_into(
    tmp_path: Path,
) -> None:
    folder = safetensors(tmp_path / "src")
    ck = ucformat.convert(folder, tmp_path / "virtual", virtual=True)
    file = folder / A
    ucformat.convert(ck, tmp_path / "one")

    def progress(done: int, total: int) -> None:
        if done == total:  # nothing is read any more
            in_place(file)

    with pytest.raises(Conflict, match=A):
        ucformat.convert(ck, tmp_path / "two", progress=progress)
    assert nothing_opens(tmp_path / "two")


def test_a_view_is_compared_with_the_files_below_it(tmp_path: Path) -> None:
    folder = safetensors(tmp_path / "src")
    ck, store = opened(folder)
    seen = ck.view([{"cast": "*", "dtype": "bfloat16"}])
    store.arm(3, lambda: in_place(folder / A))
    with pytest.raises(Conflict, match=A):
        ucformat.convert(seen, tmp_path / "dst", workers=1)


@pytest.mark.parametrize("rewrite", [in_place, by_rename])
def test_loads_of_a_rewritten_file_fail(rewrite: Callable[[Path], None], tmp_path: Path) -> None:
    folder = safetensors(tmp_path / "src")
    names = [f"{n}{k}" for n in "ab" for k in range(3)]

    def load(ck: Checkpoint) -> None:
        ucformat.torch.load({n: torch.zeros(64, 64) for n in names}, ck)

    def read(ck: Checkpoint) -> None:
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(
            {n: torch.zeros(64, 64) for n in names},
            storage_reader=ucformat.torch.Reader(ck),
            no_dist=True,
        )

    def execute(ck: Checkpoint) -> None:
        ck.plan(ucformat.Layout({"dp": 1}, [{"match": "*", "place": ["replicate"]}]), 0).execute(
            threads=1
        )

    for act in (load, read, execute):
        act(ucformat.open(folder))
        ck, store = opened(folder)
        store.arm(2, lambda: rewrite(folder / B))
        with pytest.raises(
            (Conflict, CheckpointException), match=f"{B} changed .* the loaded values are invalid"
        ):
            act(ck)
        assert store.act is None


def test_a_store_that_was_used_before_reads_the_file_that_stands_there_now(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for content in (b"old", b"new"):
        (tmp_path / "made").write_bytes(content)
        (tmp_path / "made").rename(tmp_path / "f")
        store.info("f")
        found = bytearray(3)
        store.read_into("f", 0, [memoryview(found)])
        assert bytes(found) == content


def test_in_memory(tmp_path: Path) -> None:
    folder, name = safetensors(tmp_path / "src"), uuid.uuid4().hex
    inner = MemoryStore(name)

    def put(file: str) -> None:
        with inner.create(file) as out:
            out.write((folder / file).read_bytes())

    for file in folder.iterdir():
        put(file.name)
    store = Meddling(inner)
    ck = open_checkpoint(store)
    store.arm(2, lambda: put(A))
    with pytest.raises(Conflict, match=A):
        ucformat.convert(ck, MemoryStore(uuid.uuid4().hex))


def test_in_an_object_store(bucket: Bucket, tmp_path: Path) -> None:
    folder, place = safetensors(tmp_path / "src"), bucket.place()
    inner = open_store(place)

    def put(file: Path, data: bytes) -> None:
        with inner.create(file.name) as out:
            out.write(data)

    files = sorted(folder.iterdir())
    for file in files:
        put(file, file.read_bytes())
    store = Meddling(inner)
    ck = open_checkpoint(store)
    put(files[0], files[0].read_bytes())  # of the same content, and so the same tag
    ucformat.convert(ck, tmp_path / "same")
    assert store.looks.count(files[1].name) == 3, "for the plan, for the id, and before the commit"

    data = bytearray(files[1].read_bytes())
    data[-1] ^= 1
    put(files[1], bytes(data))
    with pytest.raises(Conflict, match=rf"{place}/{files[1].name}"):
        ucformat.convert(ck, tmp_path / "dst")
    with pytest.raises(Conflict, match=rf"{place}/{files[1].name}"):
        ucformat.torch.load({n: torch.zeros(64, 64) for n in ("a0", "b0")}, ck)
    assert nothing_opens(tmp_path / "dst")


def test_arrays_in_an_object_store(bucket: Bucket, tmp_path: Path) -> None:
    place = bucket.place()
    ucformat.convert(safetensors(tmp_path / "src"), place)
    store = Meddling(open_store(place))
    ck = open_checkpoint(store)
    (shard,) = [i for i in store.list("data") if "/a0/c" in i.key]

    def progress(done: int, total: int) -> None:
        if done == total:
            data = bytearray(store.read(shard.key))
            data[-1] ^= 1
            with store.create(shard.key) as out:
                out.write(data)

    with pytest.raises(Conflict, match=shard.key):
        ucformat.convert(ck, tmp_path / "dst", progress=progress)
    assert nothing_opens(tmp_path / "dst")
