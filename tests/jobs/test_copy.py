"""`ucformat.copy`: the same bytes under the same id, checked on the way, resumed, and known to the catalog."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.numpy import save_file

import ucformat
from tests.fakes import ODD, FakeSource, random_array, same
from tests.jobs.conftest import document, universal
from tests.packed import write_encoded, write_packed
from tests.storage.faulty import FaultyStore
from tests.zero_files import FLAT, write_zero3
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import (
    ChecksumError,
    Conflict,
    IntegrityError,
    MissingData,
    NotFound,
    UcformatError,
    UnsupportedError,
    UsageError,
)
from ucformat.format.digest import with_own_digest
from ucformat.format.structure import manifest_bytes
from ucformat.schema.tensors import TensorTable
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import RecordingStore, WrappedStore

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.catalog.catalog import Catalog
    from ucformat.storage.base import Store


def contents(store: Store) -> dict[str, bytes]:
    """All files of a place, but for the records of attempts, which say who wrote them."""
    return {i.key: store.read(i.key) for i in store.list() if not i.key.startswith("attempts/")}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """A checkpoint of arrays of all kinds, in several shards, with objects and tied tensors."""
    facts: dict[str, Any] = {
        "objects": {"scheduler": {"last": 3}},
        "aliases": {"head": "table"},
        "step": 7,
    }
    source = Checkpoint(FakeSource.write(MemoryStore(tmp_path.name), ODD, **facts))
    ucformat.convert(source, tmp_path / "src", chunk_bytes=256, shard_bytes=2048)
    return tmp_path / "src"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    write_packed(LocalStore(tmp_path / "packed"), ODD)
    return tmp_path / "packed"


@pytest.fixture
def encoded(tmp_path: Path) -> Path:
    write_encoded(LocalStore(tmp_path / "encoded"), ODD)
    return tmp_path / "encoded"


@pytest.fixture(params=["arrays", "packed", "encoded"])
def form(request: pytest.FixtureRequest, src: Path, packed: Path, encoded: Path) -> Path:
    """A checkpoint in each form."""
    return {"arrays": src, "packed": packed, "encoded": encoded}[request.param]


def files_of(ck: Path, pattern: str) -> list[Path]:
    return sorted(p for p in ck.glob(pattern) if p.is_file())


# --- what is copied


def test_to_the_byte(form: Path, tmp_path: Path) -> None:
    done = ucformat.copy(form, tmp_path / "dst")
    ck = ucformat.open(tmp_path / "dst")
    assert contents(LocalStore(tmp_path / "dst")) == contents(LocalStore(form))
    assert ck.id == ucformat.open(form).id == done.id
    assert (done.kept, done.already) == (0, False)
    assert done.files == len(contents(LocalStore(form))) - 1  # the manifest
    ucformat.verify(ck).raise_if_damaged()
    for key, a in ODD.items():
        assert same(ck[key][...], a)
    assert list(tmp_path.rglob(".ucf-*.tmp")) == []


@pytest.mark.front("packed")
def test_there_and_back_through_an_object_store(form: Path, tmp_path: Path, bucket: Any) -> None:
    place, other = bucket.place(), bucket.place()
    ucformat.copy(form, place)
    ucformat.copy(place, other)
    ucformat.copy(other, tmp_path / "back")
    assert contents(LocalStore(tmp_path / "back")) == contents(LocalStore(form))
    ucformat.verify(place).raise_if_damaged()


def test_a_file_of_many_parts_in_bounded_memory(tmp_path: Path, bucket: Any) -> None:
    arrays = {("w", "weight"): random_array((1 << 20, 5), "float32")}
    ucformat.convert(
        Checkpoint(FakeSource.write(MemoryStore("many-parts"), arrays)), tmp_path / "src"
    )
    place = bucket.place()
    done = ucformat.copy(tmp_path / "src", place)
    assert done.nbytes > 20 << 20
    assert contents(open_store(place)) == contents(LocalStore(tmp_path / "src"))


def test_the_progress_ends_with_all(form: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    done = ucformat.copy(form, tmp_path / "dst", workers=1, progress=lambda *a: seen.append(a))
    assert seen[-1] == (done.nbytes, done.nbytes)
    assert seen == sorted(seen)


def test_a_manifest_with_what_we_do_not_know_stays_as_it_is(src: Path, tmp_path: Path) -> None:
    file = src / "manifest.json"
    data = file.read_bytes().replace(b"{", b'{"from the future": [1],', 1)
    file.write_bytes(with_own_digest(data[: data.rindex(b",")] + b"}"))
    ucformat.copy(src, tmp_path / "dst")
    assert (tmp_path / "dst" / "manifest.json").read_bytes() == file.read_bytes()


def test_nothing_but_what_the_manifest_names(src: Path, tmp_path: Path) -> None:
    (src / "data" / "notes.txt").write_text("mine")
    (src / "attempts" / "other.json").write_text("{}")
    ucformat.copy(src, tmp_path / "dst")
    assert not list((tmp_path / "dst").rglob("notes.txt"))
    assert [p.stem for p in (tmp_path / "dst" / "attempts").iterdir()] == [
        ucformat.open(src).manifest.attempt
    ]


# --- what cannot be copied


def test_a_foreign_one_is_converted_instead(tmp_path: Path) -> None:
    save_file({"a": random_array((3,), "float32")}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="ucp convert SRC DST"):
        ucformat.copy(tmp_path / "model.safetensors", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_a_virtual_one_is_materialized_instead(tmp_path: Path) -> None:
    arrays = {("w", s): random_array((4, 6), "float32", i) for i, s in enumerate(FLAT)}
    ucformat.convert(write_zero3(tmp_path / "zero", arrays, 2), tmp_path / "virtual", virtual=True)
    with pytest.raises(UnsupportedError, match="ucp materialize SRC DST"):
        ucformat.copy(tmp_path / "virtual", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_a_view_is_converted_instead(src: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="through a view"):
        ucformat.copy(ucformat.open(src, view=[{"keep": "*"}]), tmp_path / "dst")
    with pytest.raises(UsageError, match="workers"):
        ucformat.copy(src, tmp_path / "dst", workers=0)
    with pytest.raises(NotFound):
        ucformat.copy(tmp_path / "nothing", tmp_path / "dst")


# --- what lies there


def test_again_there_is_nothing_to_do(form: Path, tmp_path: Path) -> None:
    ucformat.copy(form, tmp_path / "dst")
    store = FaultyStore(LocalStore(tmp_path / "dst"))
    done = ucformat.copy(form, store)
    assert done.already
    assert store.writes == 1  # a flush: whoever copied it may have been stopped before it lasted
    assert ucformat.copy(form, form).already


def test_another_one_is_a_conflict_unless_it_is_to_be_replaced(form: Path, tmp_path: Path) -> None:
    other = universal(tmp_path / "dst")
    with pytest.raises(Conflict, match=other.id) as error:
        ucformat.copy(form, tmp_path / "dst")
    assert "--overwrite" in str(error.value.hint)
    assert ucformat.open(tmp_path / "dst").id == other.id
    ucformat.verify(tmp_path / "dst").raise_if_damaged()
    ucformat.copy(form, tmp_path / "dst", overwrite=True)
    assert contents(LocalStore(tmp_path / "dst")) == contents(LocalStore(form))
    assert len(list((tmp_path / "dst" / "attempts").glob("*.json"))) == 1


def test_a_manifest_that_cannot_be_read_is_a_conflict(src: Path, tmp_path: Path) -> None:
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "manifest.json").write_text("no")
    with pytest.raises(Conflict, match="cannot read"):
        ucformat.copy(src, tmp_path / "dst")


def test_overwriting_the_same_one_repairs_it(form: Path, tmp_path: Path) -> None:
    ucformat.copy(form, tmp_path / "dst")
    wrong = files_of(tmp_path / "dst", "data/*/**/*")
    for file in (wrong[0], wrong[-1]):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    files_of(tmp_path / "dst", "objects/*/*")[0].unlink()
    done = ucformat.copy(form, tmp_path / "dst", overwrite=True)
    assert done.kept == done.files - 3
    assert contents(LocalStore(tmp_path / "dst")) == contents(LocalStore(form))
    assert ucformat.copy(form, tmp_path / "dst").already


def test_one_of_the_same_conversion_is_replaced_without_losing_its_files(tmp_path: Path) -> None:
    """Its attempt has the same name: what is dropped of the one must not be the other's."""
    first, twin = tmp_path / "first", tmp_path / "twin"
    source = Checkpoint(FakeSource.write(LocalStore(tmp_path / "fake"), ODD))
    for place in (first, twin):
        ucformat.convert(source, place, chunk_bytes=64)
    one, other = ucformat.open(first).manifest, ucformat.open(twin).manifest
    assert one.attempt == other.attempt
    with pytest.raises(Conflict, match=other.id):
        ucformat.copy(first, twin)
    ucformat.copy(first, twin, overwrite=True)
    assert contents(LocalStore(twin)) == contents(LocalStore(first))

    weight, *rest = one.tensors
    docs = TensorTable.of([replace(weight, digest="xxh3:" + "0" * 32), *rest])
    impostor = one.model_copy(update={"id": "e" * 32, "tensors": docs})
    (twin / "manifest.json").write_bytes(manifest_bytes(impostor))
    with pytest.raises(Conflict, match="different files with the same names"):
        ucformat.copy(first, twin, overwrite=True)


def test_the_same_one_in_another_form_is_a_conflict(packed: Path, tmp_path: Path) -> None:
    ucformat.copy(packed, tmp_path / "dst")
    ucformat.materialize(packed)
    with pytest.raises(Conflict, match="in another form"):
        ucformat.copy(packed, tmp_path / "dst")
    ucformat.copy(packed, tmp_path / "dst", overwrite=True)
    assert contents(LocalStore(tmp_path / "dst")) == contents(LocalStore(packed))


def test_a_place_that_cannot_be_written_to(src: Path, tmp_path: Path) -> None:
    from ucformat.storage.fsspec_store import FsspecStore

    with pytest.raises(UnsupportedError, match="not written to"):
        ucformat.copy(src, FsspecStore(f"local://{tmp_path / 'dst'}"))


# --- damage


@pytest.mark.parametrize("how", ["bit", "short", "gone"])
@pytest.mark.parametrize(
    "pattern", ["data/*/weight/table/c/1/0", "data/*/weight/table/zarr.json", "objects/*/*"]
)
def test_a_damaged_source_is_not_committed(
    src: Path, tmp_path: Path, pattern: str, how: str
) -> None:
    (file,) = files_of(src, pattern)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(data if how == "bit" else data[:-3])
    with pytest.raises(IntegrityError) as error:
        ucformat.copy(src, tmp_path / "dst")
    assert file.name in error.value.message
    if pattern.startswith("data"):
        assert "table (weight)" in error.value.message
    assert "nothing is committed" in str(error.value.hint)
    if how == "gone":
        assert isinstance(error.value, MissingData)
    with pytest.raises(NotFound):
        ucformat.open(tmp_path / "dst")
    assert not files_of(tmp_path / "dst", pattern)
    assert list(tmp_path.rglob(".ucf-*.tmp")) == []


def test_a_damaged_packed_file_is_not_committed(packed: Path, tmp_path: Path) -> None:
    (file,) = files_of(packed, "data/*/rank1.bin")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    with pytest.raises(
        ChecksumError, match=r"rank1.bin: crc32c differs \(block at byte \d+\) in \S+ \(\S+\)"
    ):
        ucformat.copy(packed, tmp_path / "dst")
    assert not files_of(tmp_path / "dst", "data/*/rank1.bin")
    file.write_bytes(data[:-5])
    with pytest.raises(IntegrityError, match="rank1"):
        ucformat.copy(packed, tmp_path / "dst")
    file.unlink()
    with pytest.raises(MissingData, match="rank1"):
        ucformat.copy(packed, tmp_path / "dst")
    with pytest.raises(NotFound):
        ucformat.open(tmp_path / "dst")


def test_whole_chunks_of_another_content_are_not_committed(src: Path, tmp_path: Path) -> None:
    names = [t.name for t in ucformat.open(src).manifest.tensors if t.name == "table"]
    assert names
    one, two = files_of(src, "data/*/weight/table/c/*/0")[:2]
    shutil.copy(one, two)
    with pytest.raises(IntegrityError, match=r"not those of the manifest, in table \(weight\)"):
        ucformat.copy(src, tmp_path / "dst")
    with pytest.raises(NotFound):
        ucformat.open(tmp_path / "dst")


def test_what_lies_at_the_destination_is_not_believed(src: Path, tmp_path: Path) -> None:
    """Left by an interrupted copy: whole, damaged, of another content, and of another size."""
    dst = tmp_path / "dst"
    ucformat.copy(src, dst)
    (dst / "manifest.json").unlink()
    shards = files_of(dst, "data/*/weight/table/c/*/0")
    shutil.copy(shards[0], shards[1])
    shards[2].write_bytes(shards[2].read_bytes()[:-1] + b"\0")
    shards[3].write_bytes(b"short")
    done = ucformat.copy(src, dst)
    assert 3 <= done.files - done.kept <= len(files_of(dst, "data/*/weight/table/c/*/*"))
    assert contents(LocalStore(dst)) == contents(LocalStore(src))


# --- interruptions


def test_only_what_is_missing_is_copied(form: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    whole = ucformat.copy(form, dst)
    (dst / "manifest.json").unlink()
    lost = files_of(dst, "data/*/**/*")[-1]
    lost.unlink()
    reads = RecordingStore(LocalStore(form))
    done = ucformat.copy(open_checkpoint(reads), dst)
    assert (done.files, done.kept) == (whole.files, whole.files - 1)
    big = {
        r.file
        for r in reads.reads
        if r.nbytes > 2048 and r.file.startswith("data/") and "extents" not in r.file
    }
    if form.name != "encoded":  # the indexes of all of its files, which are small, are read
        assert big <= {str(lost.relative_to(dst))}
    assert contents(LocalStore(dst)) == contents(LocalStore(form))


@pytest.mark.front("packed-False")
@pytest.mark.parametrize("dead", [False, True])
def test_each_write_fails_in_turn(form: Path, tmp_path: Path, dead: bool) -> None:
    counting = FaultyStore(MemoryStore(f"count-{tmp_path.name}-{dead}-{form.name}"))
    ucformat.copy(form, counting, workers=1)
    truth = contents(counting)
    stride = max(1, counting.writes // 40)
    steps = sorted(
        {*range(1, counting.writes, stride), *range(counting.writes - 4, counting.writes + 1)}
    )
    for step in steps:
        inner = MemoryStore(f"{step}-{tmp_path.name}-{dead}-{form.name}")
        store = FaultyStore(inner, fail_write=step, dead=dead)
        with suppress(UcformatError):
            ucformat.copy(form, store, workers=1)
        try:
            committed = open_checkpoint(inner)
        except NotFound:
            pass
        else:
            ucformat.verify(committed).raise_if_damaged()
        ucformat.copy(form, inner)
        assert contents(inner) == truth


@pytest.mark.matrix
def test_each_write_fails_in_turn_while_another_is_replaced(src: Path, tmp_path: Path) -> None:
    def place(name: str) -> MemoryStore:
        inner = MemoryStore(f"{name}-{tmp_path.name}")
        universal(inner.url, step=3)
        return inner

    counting = FaultyStore(place("count"))
    ucformat.copy(src, counting, overwrite=True, workers=1)
    steps = sorted(
        {
            *range(1, counting.writes, counting.writes // 20),
            *range(counting.writes - 9, counting.writes),
        }
    )
    for step in steps:
        inner = place(str(step))
        store = FaultyStore(inner, fail_write=step, dead=True)
        with suppress(UcformatError):
            ucformat.copy(src, store, overwrite=True, workers=1)
        standing = open_checkpoint(inner)
        ucformat.verify(standing).raise_if_damaged()
        ucformat.copy(src, inner, overwrite=True)
        ucformat.verify(inner).raise_if_damaged()
        assert open_checkpoint(inner).id == ucformat.open(src).id


def test_a_failed_read_is_no_replacement(src: Path, tmp_path: Path) -> None:
    store = FaultyStore(LocalStore(src), fail_read=12, dead=True)
    with pytest.raises(UcformatError, match="No space left"):
        ucformat.copy(open_checkpoint(store), tmp_path / "dst", workers=1)


def test_a_source_that_is_replaced_meanwhile(src: Path, tmp_path: Path) -> None:
    ck = ucformat.open(src)
    universal(src, overwrite=True)
    with pytest.raises(Conflict, match="replaced or deleted"):
        ucformat.copy(ck, tmp_path / "dst")

    class Replaced(WrappedStore):
        """Of which the files go when the first of them is read."""

        def read_into(self, key: str, offset: int, buffers: Any, crcs: Any = None) -> None:
            if self.inner.info("manifest.json"):
                universal(src, step=9, overwrite=True)
            super().read_into(key, offset, buffers, crcs)

    with pytest.raises(Conflict, match="replaced or deleted"):
        ucformat.copy(open_checkpoint(Replaced(LocalStore(src))), tmp_path / "dst", workers=1)
    with pytest.raises(NotFound):
        ucformat.open(tmp_path / "dst")


def test_files_that_go_before_the_commit(src: Path, tmp_path: Path) -> None:
    class Robbed(WrappedStore):
        """Where somebody, who lost to a third, removes the attempt when all of it is there."""

        robbed = False

        def list(self, prefix: str = "") -> Any:
            if (next(iter(self.inner.list("objects")), None)) is not None and not self.robbed:
                self.robbed = True
                self.inner.delete_prefix("data")
            return self.inner.list(prefix)

    inner = LocalStore(tmp_path / "dst")
    with pytest.raises(Conflict, match="was removed while"):
        ucformat.copy(src, Robbed(inner))
    ucformat.copy(src, inner)
    ucformat.verify(inner).raise_if_damaged()


def test_two_at_once_both_end_well(form: Path, tmp_path: Path) -> None:
    for round_ in range(8):
        found: list[Any] = []
        barrier = threading.Barrier(2)

        def work(
            place: Path = tmp_path / f"dst{round_}", found: list[Any] = found, b: Any = barrier
        ) -> None:
            b.wait()
            found.append(ucformat.copy(form, place).id)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert found == [ucformat.open(form).id] * 2
        assert contents(LocalStore(tmp_path / f"dst{round_}")) == contents(LocalStore(form))


# --- the catalog


def test_the_catalog_knows_one_place_more(
    tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "ours.db"))
    ck = universal(tmp_path / "run7" / "1", 1, run="run7")
    catalog.tag(ck.id, "good")
    done = ucformat.copy("run7@1", tmp_path / "far" / "away")
    entry = catalog.get("run7@1")
    assert entry.id == done.id
    assert set(entry.urls) == {str(tmp_path / "run7" / "1"), str(tmp_path / "far" / "away")}
    assert (entry.run, entry.tags) == ("run7", ("good",))
    assert len(catalog.find("")) == 1
    assert [t.name for t in document(tmp_path / "far" / "away").tags] == ["good"]
    shutil.rmtree(tmp_path / "run7")
    assert ucformat.open("run7@1").url == str(tmp_path / "far" / "away")


def test_a_copy_that_no_catalog_heard_of_is_told_again(
    tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    universal(tmp_path / "src")
    ucformat.copy(tmp_path / "src", tmp_path / "dst")
    assert catalog.find("") == []
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "ours.db"))
    assert ucformat.copy(tmp_path / "src", tmp_path / "dst").already
    (entry,) = catalog.find("")
    assert entry.urls == (str(tmp_path / "dst"),)


def test_what_is_known_of_it_goes_with_it(tmp_path: Path, catalog: Catalog, other: Catalog) -> None:
    for step in (1, 2):
        ck = universal(tmp_path / str(step), step)
        catalog.record(ck.manifest, ck.url, run="run7")
        catalog.note(ck.id, f"note{step}")
    catalog.tag(ck.id, "tag2")
    ucformat.copy(tmp_path / "1", tmp_path / "dst")
    assert [n.text for n in document(tmp_path / "dst").notes] == ["note1"]
    ucformat.copy(tmp_path / "2", tmp_path / "dst", overwrite=True)
    assert [n.text for n in document(tmp_path / "dst").notes] == ["note2"]
    assert [t.name for t in document(tmp_path / "dst").tags] == ["tag2"]
    with pytest.raises(Conflict, match="tag tag2"):  # which protects the copy, too
        ucformat.copy(tmp_path / "1", tmp_path / "dst", overwrite=True)
    ucformat.register([str(tmp_path / "dst")], other)
    assert other.get("run7@2").tags == ("tag2",)


def test_that_it_was_deleted_does_not(tmp_path: Path, catalog: Catalog) -> None:
    ck = universal(tmp_path / "src")
    catalog.record(ck.manifest, ck.url)
    catalog.delete(ck.id)
    assert document(tmp_path / "src").deleted is not None
    ucformat.copy(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst" / "ucformat-catalog.json").exists()


def test_what_an_interrupted_one_left_is_collected(
    form: Path, tmp_path: Path, catalog: Catalog
) -> None:
    place = tmp_path / "dst"
    with pytest.raises(UcformatError, match="No space left"):
        ucformat.copy(form, FaultyStore(LocalStore(place), fail_write=12, dead=True), workers=1)
    found = ucformat.collect(catalog, [str(place)], apply=True, grace=timedelta(0))
    assert [left.attempt for left in found.leftovers] == [ucformat.open(form).manifest.attempt]
    assert not [p for p in place.rglob("*") if p.is_file() and p.name != ".ucf-lock"]
    ucformat.copy(form, place)
    assert ucformat.collect(catalog, [str(place)], apply=True, grace=timedelta(0)).leftovers == ()
    ucformat.verify(place).raise_if_damaged()
