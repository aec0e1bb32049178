"""Materialising: the same checkpoint as arrays, at another place or in its own, whenever it is stopped."""

from __future__ import annotations

import random
import shutil
import threading
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.fakes import ODD, FakeSource, random_array, same
from tests.jobs.forks import Forks
from tests.packed import FACTS, OBJECTS, write_packed
from tests.storage.faulty import FaultyStore
from ucformat.checkpoint import Checkpoint
from ucformat.errors import (
    ChecksumError,
    Conflict,
    MissingData,
    NotACheckpoint,
    NotFound,
    UcformatError,
    UnsupportedError,
    UsageError,
)
from ucformat.geometry.tensor import Key, single_extents
from ucformat.jobs.materialize import is_packed
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.wrappers import RecordingStore, WrappedStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes import Arrays


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A packed checkpoint."""
    write_packed(LocalStore(tmp_path / "packed"), ODD)
    return tmp_path / "packed"


def folders(place: Path) -> set[str]:
    """The attempts that have anything at a place."""
    found = {p.name for kind in ("data", "objects", "assets") for p in (place / kind).glob("*")}
    return found | {p.stem for p in (place / "attempts").glob("*.json")}


def holds(ck: Checkpoint, arrays: Arrays = ODD) -> bool:
    return set(ck.tensors) == set(arrays) and all(same(ck[k][...], a) for k, a in arrays.items())


class TestInPlace:
    """Without a destination."""

    @pytest.mark.parametrize("sizes", [(64, 256), (None, None)])
    def test_all_of_it_stays_but_the_packed_files(
        self, place: Path, sizes: tuple[int | None, int | None]
    ) -> None:
        before = ucformat.open(place)
        truth = ucformat.convert(
            place, MemoryStore(f"truth-{sizes[0]}"), None, *sizes, overwrite=True
        )
        assert is_packed(before)
        ck = ucformat.materialize(place, None, *sizes)
        assert holds(ck)
        assert holds(ucformat.open(place))
        assert same(ck["head.weight"][...], ODD["embed.weight", "weight"])
        old, new = before.manifest, ck.manifest
        changed = {
            "attempt",
            "digest",
            "grid",
            "tensors",
            "requires",
            "sidecar",
            "objects",
            "assets",
            "producer",
            "verified",
        }
        assert new.model_dump(exclude=changed) == old.model_dump(exclude=changed)
        assert new.producer["ucformat"] == ucformat.__version__
        assert [new.producer[k] for k in ("engine.name", "torch")] == ["fake", "2.13.0"]
        assert new.sidecar is None
        assert ck.objects == OBJECTS
        assert dict(ck.assets) == {"a/b.txt": b"asset"}
        assert [t.digest for t in new.tensors] == [t.digest for t in truth.manifest.tensors]
        assert folders(place) == {new.attempt}
        assert list(place.rglob("*.bin")) == []
        report = ucformat.verify(place)
        assert report
        assert report.bytes_unverified == 0

    def test_arrays_are_left_as_they_are(self, place: Path) -> None:
        first = ucformat.materialize(place)
        files = {p: p.stat().st_mtime_ns for p in place.rglob("*")}
        again = ucformat.materialize(place, workers=3)
        assert again.manifest == first.manifest
        assert {p: p.stat().st_mtime_ns for p in place.rglob("*")} == files

    def test_a_foreign_checkpoint_is_refused(self, tmp_path: Path) -> None:
        source = Checkpoint(FakeSource.write(LocalStore(tmp_path / "fake"), ODD))
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UnsupportedError, match="checkpoint of fake") as caught:
            ucformat.materialize(source)
        assert "DST" in str(caught.value.hint)
        assert sorted(tmp_path.rglob("*")) == before

    def test_a_place_that_cannot_replace_is_refused_before_much_is_written(
        self, place: Path
    ) -> None:
        class NoReplace(WrappedStore):
            def replace(self, key: str, data: bytes, version: str) -> str:
                raise UnsupportedError(f"{self.url} cannot replace a file")

        before = {p: p.stat().st_mtime_ns for p in place.rglob("*") if p.is_file()}
        with pytest.raises(UnsupportedError, match="rewritten in place") as caught:
            ucformat.materialize(ucformat.open(NoReplace(LocalStore(place))))
        assert "DST" in str(caught.value.hint)
        assert {p: p.stat().st_mtime_ns for p in place.rglob("*") if p.is_file()} == before

    def test_one_that_was_opened_before_it_became_arrays(self, place: Path) -> None:
        early = ucformat.open(place)
        first = ucformat.materialize(place)
        assert ucformat.materialize(early).manifest == first.manifest
        assert ucformat.materialize(early, chunk_bytes=64).manifest == first.manifest
        assert folders(place) == {first.manifest.attempt}
        with pytest.raises(MissingData):
            early["table"][...]

    def test_one_that_was_opened_before_it_was_replaced(self, place: Path, tmp_path: Path) -> None:
        early = ucformat.open(place)
        other = Checkpoint(
            FakeSource.write(MemoryStore("other"), {("w", "weight"): random_array((3,), "int8")})
        )
        new = ucformat.convert(other, place, overwrite=True)
        with pytest.raises(Conflict, match="was replaced or deleted"):
            ucformat.materialize(early)
        assert ucformat.open(place).id == new.id
        assert folders(place) == {new.manifest.attempt}
        shutil.rmtree(place)
        with pytest.raises(NotFound):
            ucformat.materialize(early)

    @pytest.mark.front("False")
    @pytest.mark.parametrize("alike", [True, False])
    def test_several_at_once_all_end_well(self, tmp_path: Path, alike: bool) -> None:
        for round_ in range(6):
            where = tmp_path / str(round_)
            packed = write_packed(LocalStore(where), ODD)
            made: list[Checkpoint] = []
            failed: list[Exception] = []
            barrier = threading.Barrier(3)

            def work(
                k: int,
                where: Path = where,
                made: list[Checkpoint] = made,
                failed: list[Exception] = failed,
                barrier: threading.Barrier = barrier,
            ) -> None:
                barrier.wait()
                try:
                    made.append(
                        ucformat.materialize(
                            where, None, 1024, 4096 if alike else 4096 << k, workers=1
                        )
                    )
                except Exception as error:  # noqa: BLE001 - shown below
                    failed.append(error)

            threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert failed == []
            assert {(ck.id, ck.manifest.attempt) for ck in made} == {
                (packed.id, made[0].manifest.attempt)
            }
            assert holds(ucformat.open(where))
            assert ucformat.verify(where)
            assert folders(where) == {made[0].manifest.attempt}

    @pytest.mark.parametrize("name", ["embed.weight", "table"])
    def test_a_damaged_packed_file_is_not_made_into_arrays(self, place: Path, name: str) -> None:
        ck = ucformat.open(place)
        extent = next(
            e
            for e in ck.source.extents(next(k for k in ck.tensors if k.name == name))
            if e.box.size
        )
        file = place / extent.file
        data = bytearray(file.read_bytes())
        data[extent.offset] ^= 1
        file.write_bytes(data)
        for dst in (None, MemoryStore(f"damaged-{name}")):
            with pytest.raises(ChecksumError, match=name.replace(".", r"\.")) as caught:
                ucformat.materialize(place, dst)
            assert extent.file in caught.value.message
        data[extent.offset] ^= 1
        file.write_bytes(data)
        assert holds(ucformat.materialize(place))

    def test_checksums_that_follow_their_blocks_and_none_at_all(self, tmp_path: Path) -> None:
        from tests.golden.make import make_packed, tensors

        ck = make_packed(LocalStore(tmp_path / "golden"))
        assert holds(ck, tensors())
        assert holds(ucformat.materialize(ck), tensors())
        make_packed(LocalStore(tmp_path / "damaged"))
        key = next(k for n, k in enumerate(ck.tensors) if n % 3 == 1)  # whose checksums follow
        packed = ucformat.open(tmp_path / "damaged")
        extent = next(iter(packed.source.extents(key)))
        file = tmp_path / "damaged" / extent.file
        data = bytearray(file.read_bytes())
        data[extent.offset] ^= 1
        file.write_bytes(data)
        with pytest.raises(ChecksumError, match="crc32c differs"):
            ucformat.materialize(packed)

    def test_the_catalog_hears_of_it_and_names_still_lead_to_it(
        self, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
        before = ucformat.open(place)
        with ucformat.Catalog() as catalog:
            catalog.record(before.manifest, before.url)
            catalog.alias("best", before.id)
            catalog.hold(before.id, "ours")
        ck = ucformat.materialize("alias:best")
        assert not is_packed(ck)
        assert ucformat.open("alias:best").manifest == ck.manifest
        assert ucformat.open("run7@1700").manifest == ck.manifest
        copy = ucformat.materialize(ck, tmp_path / "copy")
        with ucformat.Catalog() as catalog:
            entry = catalog.get("alias:best")
            assert (entry.state, entry.url, len(entry.holds)) == ("committed", ck.url, 1)
            assert catalog.get(copy.id).state == "committed"


class TestElsewhere:
    """With a destination."""

    def test_a_new_checkpoint_that_says_what_it_was_made_from(
        self, place: Path, tmp_path: Path
    ) -> None:
        before = ucformat.open(place)
        ck = ucformat.materialize(place, tmp_path / "arrays", 64, 256)
        assert holds(ck)
        assert ucformat.verify(ck)
        old, new = before.manifest, ck.manifest
        assert new.id != old.id
        assert new.lineage[:-1] == old.lineage == FACTS["lineage"]
        assert (new.lineage[-1].kind, new.lineage[-1].url, new.lineage[-1].id) == (
            "convert",
            str(place),
            old.id,
        )
        changed = {
            "digest",
            "grid",
            "id",
            "created",
            "attempt",
            "tensors",
            "requires",
            "sidecar",
            "objects",
            "assets",
            "producer",
            "lineage",
            "verified",
        }
        assert new.model_dump(exclude=changed) == old.model_dump(exclude=changed)
        assert new.producer["torch"] == "2.13.0"
        assert ck.objects == OBJECTS
        assert dict(ck.assets) == {"a/b.txt": b"asset"}
        assert ucformat.open(place).manifest == old
        assert holds(ucformat.open(place))
        truth = ucformat.convert(place, tmp_path / "converted", None, 64, 256)
        assert [t.digest for t in new.tensors] == [t.digest for t in truth.manifest.tensors]

    def test_a_committed_place_is_a_conflict_unless_overwritten(
        self, place: Path, tmp_path: Path
    ) -> None:
        first = ucformat.materialize(place, tmp_path / "arrays")
        with pytest.raises(Conflict, match="already holds"):
            ucformat.materialize(place, tmp_path / "arrays")
        second = ucformat.materialize(place, tmp_path / "arrays", overwrite=True)
        assert second.id != first.id
        assert folders(tmp_path / "arrays") == {second.manifest.attempt}

    def test_arrays_and_foreign_checkpoints_are_converted(
        self, place: Path, tmp_path: Path
    ) -> None:
        first = ucformat.materialize(place, tmp_path / "arrays")
        again = ucformat.materialize(first, tmp_path / "again", 64)
        assert holds(again)
        assert [p.id for p in again.manifest.lineage] == [
            "before",
            ucformat.open(place).id,
            first.id,
        ]
        engine = {"name": "fake", "version": "1"}
        source = Checkpoint(
            FakeSource.write(LocalStore(tmp_path / "fake"), ODD, engine=engine, step=3)
        )
        made = ucformat.materialize(source, tmp_path / "foreign")
        truth = ucformat.convert(source, tmp_path / "converted")
        changed = {"id", "created", "digest", "attempt", "tensors", "objects"}
        assert made.manifest.model_dump(exclude=changed) == truth.manifest.model_dump(
            exclude=changed
        )
        assert [t.digest for t in made.manifest.tensors] == [
            t.digest for t in truth.manifest.tensors
        ]

    @pytest.mark.parametrize("wrong", ["chunk_bytes", "shard_bytes", "workers"])
    def test_sizes_of_nothing_are_wrong(self, place: Path, wrong: str) -> None:
        with pytest.raises(UsageError, match=wrong):
            ucformat.materialize(place, **{wrong: 0})  # type: ignore[arg-type]
        assert is_packed(ucformat.open(place))


@pytest.mark.parametrize("registered", [False, True])
def test_progress_counts_what_is_written_and_files_that_are_compared_first(
    registered: bool, place: Path, tmp_path: Path
) -> None:
    total, source = sum(a.nbytes for a in ODD.values()), ucformat.open(place)
    more = 0
    if registered:
        source = ucformat.convert(place, tmp_path / "virtual", virtual=True, checksums=True)
        assert source.manifest.sidecar is not None
        more = sum(doc.nbytes for doc in source.manifest.sidecar.sources)
        assert more >= total
    seen: list[tuple[int, int]] = []
    ucformat.materialize(
        source, tmp_path / "arrays", progress=lambda done, total: seen.append((done, total))
    )
    assert {t for _, t in seen} == {total + more}
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert seen[-1][0] == total + more


def packed_of_two_megabytes(store: LocalStore, shared: bool) -> Arrays:
    """A packed checkpoint whose blocks are shared by extents, or which training saved: each block is an extent."""
    arrays = {
        ("a", "weight"): random_array((501, 777), "float32", 1),
        ("b", "master"): random_array((77, 3001), "float32", 2),
        ("c", "weight"): random_array((4096,), "int8", 3),
    }
    if shared:
        write_packed(store, arrays, block_bytes=1 << 16)
        return arrays
    import torch

    from ucformat.torch.saving.save import save

    tensors = {name: torch.from_numpy(a.copy()) for (name, _), a in arrays.items()}
    save(tensors, store.url, form="packed")
    return {(key[0], "weight"): a for key, a in arrays.items()}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_byte_is_read_once_and_compared_as_it_passes(
    shared: bool, workers: int, tmp_path: Path
) -> None:
    where = tmp_path / "packed"
    arrays = packed_of_two_megabytes(LocalStore(where), shared)
    store = RecordingStore(LocalStore(where))
    source = ucformat.open(store)
    assert is_packed(source)
    files = {str(p.relative_to(where)): p for p in where.rglob("*.bin")}
    store.clear()
    ck = ucformat.materialize(source, tmp_path / "arrays", workers=workers)
    read = sum(r.nbytes for r in store.reads if r.file in files)
    total = sum(p.stat().st_size for p in files.values())
    assert 0.98 * total <= read <= 1.02 * total
    assert holds(ck, arrays)
    assert ck.manifest.verified is not None
    assert (ck.manifest.verified.default, ck.manifest.verified.but) == (True, ())

    for key in arrays:
        extent = list(single_extents(source.source.extents(Key(*key))))[-1]
        file = where / extent.file
        data = bytearray(file.read_bytes())
        data[extent.last] ^= 1
        file.write_bytes(data)
        for dst in (None, tmp_path / "damaged"):
            for attempts in tmp_path.rglob(
                "finished"
            ):  # of what was compared before it was damaged
                shutil.rmtree(attempts)
            with pytest.raises(ChecksumError, match=rf"{key[0]} \({key[1]}\)") as caught:
                ucformat.materialize(where, dst, workers=workers)
            assert extent.file in caught.value.message
        assert is_packed(ucformat.open(where))
        with pytest.raises(NotACheckpoint):
            ucformat.open(tmp_path / "damaged")
        taken = ucformat.materialize(where, tmp_path / "taken", overwrite=True, verify=False)
        assert not holds(taken, arrays)
        data[extent.last] ^= 1
        file.write_bytes(data)
    assert holds(ucformat.materialize(where), arrays)


@pytest.mark.matrix
def test_a_failure_at_any_write_leaves_it_whole_and_the_next_run_completes(tmp_path: Path) -> None:
    arrays = {k: a for k, a in ODD.items() if k[0] in ("embed.weight", "norm.bias", "empty")}

    def make(name: str, fail: int | None = None) -> tuple[Path, FaultyStore]:
        write_packed(LocalStore(tmp_path / name), arrays)
        return tmp_path / name, FaultyStore(LocalStore(tmp_path / name), fail_write=fail, dead=True)

    _, whole = make("whole")
    ucformat.materialize(ucformat.open(whole), None, 128, 2048, workers=1)
    last = whole.writes
    assert last > 60
    seen = set()
    for n in sorted({*range(1, last, 7), *range(last - 8, last + 1)}):
        where, store = make(f"fail{n}", n)
        packed = ucformat.open(where)
        try:
            ucformat.materialize(ucformat.open(store), None, 128, 2048, workers=1)
        except UcformatError as error:
            assert "No space left" in error.message  # noqa: PT017 - or it is done, and what it replaced stays
            failed = True
        else:
            failed = False
        left = ucformat.open(where)
        assert is_packed(left) == failed
        assert holds(left, arrays), n
        assert left.id == packed.id
        seen.add(is_packed(left))
        ck = ucformat.materialize(where, None, 128, 2048)
        assert not is_packed(ck)
        assert holds(ck, arrays), n
        assert ucformat.verify(ck)
        if is_packed(left):
            assert folders(where) == {ck.manifest.attempt}
    assert seen == {True, False}


WORK = """
import ucformat
ucformat.materialize, ucformat.open
def work(where):
    ucformat.materialize(where, None, 4096, 1 << 18)
"""


@pytest.mark.matrix
def test_kill_9_at_any_instant_of_the_in_place_form(tmp_path: Path) -> None:
    shapes = {"embed": (211, 300), "a": (1200, 401), "b": (64, 64), "c": (7,), "d": (512, 257)}
    arrays = {
        (n, "weight"): random_array(s, "float32", i) for i, (n, s) in enumerate(shapes.items())
    }
    original = tmp_path / "original"
    write_packed(LocalStore(original), arrays, block_bytes=1 << 16)
    chance, whole, seen = random.Random(5), 0.0, []
    with Forks(WORK) as forks:
        for round_ in range(12):
            where = shutil.copytree(original, tmp_path / str(round_))
            if round_ == 0:  # let be, to see how long it takes
                assert forks.run(where)[0] == 0
                whole = forks.seconds
            else:
                forks.run(where, kill_after=chance.uniform(0, 1.1 * whole))
            left = ucformat.open(where)  # whatever it was doing
            assert holds(left, arrays)
            seen.append(is_packed(left))
            begun_by_it = folders(where) - {left.manifest.attempt}
            ck = ucformat.materialize(where, None, 4096, 1 << 18)
            assert not is_packed(ck)
            assert holds(ck, arrays)
            assert ck.id == left.id
            ucformat.verify(ck).raise_if_damaged()
            assert list(where.rglob(".ucf-*.tmp")) == []
            if is_packed(left):
                assert begun_by_it <= {ck.manifest.attempt}  # it was continued
                assert folders(where) == {ck.manifest.attempt}
            shutil.rmtree(where)
    assert any(seen)
