"""Thinning: states are removed in place; what is kept stays bit for bit, whenever it is stopped."""

from __future__ import annotations

import random
import shutil
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.fakes import FakeSource, random_array, same
from tests.jobs.conftest import document
from tests.jobs.forks import Forks
from tests.packed import OBJECTS, write_packed
from tests.storage.faulty import FaultyStore
from ucformat.checkpoint import Checkpoint
from ucformat.errors import (
    ChecksumError,
    Conflict,
    MissingData,
    TensorNotFound,
    UcformatError,
    UnsupportedError,
    UsageError,
)
from ucformat.geometry.tensor import Key
from ucformat.jobs.thin import keep_tensors
from ucformat.storage.local import LocalStore
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.s3 import Bucket
    from ucformat.catalog.catalog import Catalog

ARRAYS = {
    (name, state): random_array(shape, dtype, i)
    for i, (name, shape, state, dtype) in enumerate(
        (name, shape, state, dtype)
        for name, shape in (("embed.weight", (61, 30)), ("norm.bias", (7,)))
        for state, dtype in (
            ("weight", "bfloat16"),
            ("master", "float32"),
            ("exp_avg", "float32"),
            ("exp_avg_sq", "float32"),
            ("step", "float32"),
        )
    )
}
ARRAYS["frozen", "weight"] = random_array((4, 24, 40), "float8_e4m3fn", 99)
MOMENTS = ("exp_avg", "exp_avg_sq")


def remaining(*dropped: str) -> dict[tuple[str, str], Any]:
    return {key: a for key, a in ARRAYS.items() if key[1] not in dropped}


def holds(ck: Checkpoint, arrays: dict[tuple[str, str], Any]) -> bool:
    return set(ck.tensors) == set(arrays) and all(same(ck[k][...], a) for k, a in arrays.items())


def folders(place: Path) -> set[str]:
    """The attempts that have anything at a place."""
    found = {p.name for kind in ("data", "objects", "assets") for p in (place / kind).glob("*")}
    return found | {p.stem for p in (place / "attempts").glob("*.json")}


def memory() -> str:
    return f"memory://thin-{uuid.uuid4().hex}"


def zarr(place: str, _beside: str) -> None:
    ucformat.convert(write_packed(open_store(memory()), ARRAYS), place, None, 512, 2048)


def blosc(place: str, _beside: str) -> None:
    packed = write_packed(open_store(memory()), ARRAYS)
    ucformat.convert(packed, place, None, 512, 2048, codec="blosc")


def safetensors(place: str, _beside: str) -> None:
    ucformat.convert(write_packed(open_store(memory()), ARRAYS), place, weights="safetensors")


def packed(place: str, _beside: str) -> None:
    write_packed(open_store(place), ARRAYS)


def virtual(place: str, beside: str) -> None:
    write_packed(open_store(beside), ARRAYS)
    ucformat.convert(beside, place, virtual=True, checksums=True)


FORMS = {
    "zarr": zarr,
    "blosc": blosc,
    "packed": packed,
    "safetensors": safetensors,
    "virtual": virtual,
}


@pytest.fixture(params=FORMS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint in one of the forms."""
    FORMS[request.param](str(tmp_path / "it"), str(tmp_path / "beside"))
    return tmp_path / "it"


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """A checkpoint of arrays."""
    zarr(str(tmp_path / "arrays"), "")
    return tmp_path / "arrays"


class TestWhatIsLeft:
    """Of a checkpoint in any form."""

    def test_only_the_states_are_gone(self, place: Path, tmp_path: Path) -> None:
        before = ucformat.open(place)
        old = before.manifest
        ck = ucformat.thin(place, ["exp_avg*", "master"])
        kept = remaining("master", *MOMENTS)
        assert holds(ck, kept)
        again = ucformat.open(place)
        assert holds(again, kept)
        new = again.manifest
        assert new.id == ck.id != old.id
        assert new.lineage[:-1] == old.lineage
        edge = new.lineage[-1]
        assert (edge.kind, edge.id, edge.url) == ("thin", old.id, str(place))
        assert edge.how["dropped"] == [
            {"state": s, "tensors": 2, "nbytes": 4 * (61 * 30 + 7)} for s in ("master", *MOMENTS)
        ]
        files = ("attempt", "digest", "tensors", "sidecar", "objects", "assets", "requires")
        changed = {*files, "id", "lineage", "grid", "producer", "verified"}
        assert new.model_dump(exclude=changed) == old.model_dump(exclude=changed)
        assert again.objects == OBJECTS
        assert dict(again.assets) == {"a/b.txt": b"asset"}
        assert (
            dict(again.metadata.fingerprints.items()).items()
            >= {k: f for k, f in before.metadata.fingerprints.items() if k in kept}.items()
        )
        assert folders(place) == {new.attempt}
        report = ucformat.verify(place)
        assert report
        assert report.bytes_unverified == 0
        assert holds(ucformat.convert(place, tmp_path / "converted"), kept)

    def test_the_form_stays_except_the_packed_one(self, place: Path) -> None:
        before = ucformat.open(place)
        old, as_files = before.manifest, before.hf_url is not None
        ck = ucformat.thin(place, "exp_avg*")
        new = ck.manifest
        if old.sidecar is not None and old.sidecar.roots:
            assert new.sidecar is not None
            assert (new.requires, new.sidecar.roots, new.sidecar.sources) == (
                *(old.requires, old.sidecar.roots, old.sidecar.sources),
            )
            return
        assert (ck.hf_url is not None) == as_files
        in_files = {t.state for t in new.tensors if t.path is None}
        assert in_files == ({"weight"} if as_files else set())
        assert old.grid in (None, new.grid)
        assert {k.codec for k in new.tensors.kinds} == {k.codec for k in old.tensors.kinds}

    def test_twice_and_once_more(self, place: Path) -> None:
        ucformat.thin(place, "exp_avg*")
        ck = ucformat.thin(place, "master")
        assert holds(ck, remaining("master", *MOMENTS))
        assert [e.kind for e in ck.manifest.lineage][-2:] == ["thin", "thin"]
        assert {s: d.tensors for s, d in ck.dropped.items()} == {
            "exp_avg": 2,
            "exp_avg_sq": 2,
            "master": 2,
        }
        files = {p: p.stat().st_mtime_ns for p in place.rglob("*")}
        assert ucformat.thin(place, ["exp_avg*", "master"]).id == ck.id
        assert {p: p.stat().st_mtime_ns for p in place.rglob("*")} == files

    def test_what_was_dropped_is_told(self, place: Path, tmp_path: Path) -> None:
        ck = ucformat.thin(place, "exp_avg*")
        told = r"dropped by thin on \d{4}-\d\d-\d\d \(drop exp_avg\*\)"
        with pytest.raises(TensorNotFound, match=told):
            ck["norm.bias", "exp_avg"]
        with pytest.raises(UsageError, match=told):
            ucformat.convert(place, tmp_path / "x", states="exp_avg")
        with pytest.raises(UsageError, match=told):
            ucformat.export(place, tmp_path / "y.npz", "npz", states=["exp_avg"])
        layout = ucformat.Layout.parse(
            {"version": 1, "mesh": {"dp": 1}, "rules": [{"match": "*", "place": ["replicate"]}]}
        )
        with pytest.raises(UsageError, match=told):
            ck.plan(layout, 0, "exp_avg")

    def test_a_virtual_one_is_still_recorded_at_its_files(self, tmp_path: Path) -> None:
        virtual(str(tmp_path / "it"), str(tmp_path / "beside"))
        old = ucformat.open(tmp_path / "it").id
        ck = ucformat.thin(tmp_path / "it", "exp_avg*")
        assert [p.stem for p in (tmp_path / "beside/needed-by").glob("*.json")] == [ck.id] != [old]
        with pytest.raises(Conflict, match=f"needed by {ck.id}"):
            ucformat.thin(tmp_path / "beside", "exp_avg*")
        assert holds(ucformat.open(tmp_path / "beside"), ARRAYS)


class TestPatterns:
    """Which tensors a pattern drops."""

    @pytest.mark.parametrize("drop", ["*", ["[!x]*"]])
    def test_no_glob_drops_the_weight(self, arrays: Path, drop: Any) -> None:
        assert holds(
            ucformat.thin(arrays, drop), {k: a for k, a in ARRAYS.items() if k[1] == "weight"}
        )

    def test_its_name_drops_it(self, arrays: Path) -> None:
        assert holds(ucformat.thin(arrays, ["weight", "step"]), remaining("weight", "step"))

    def test_a_master_without_a_weight_is_the_weight(self, tmp_path: Path) -> None:
        stored = {k: a for k, a in ARRAYS.items() if k != ("norm.bias", "weight")}
        write_packed(LocalStore(tmp_path / "it"), stored)
        ck = ucformat.thin(tmp_path / "it", ["master", "exp*"])
        assert Key("norm.bias", "master") in ck.tensors
        assert Key("embed.weight", "master") not in ck.tensors
        assert same(ck["norm.bias"][...], ARRAYS["norm.bias", "master"])

    def test_what_is_not_there_is_an_error(self, arrays: Path) -> None:
        with pytest.raises(UsageError, match="'momentum'") as caught:
            ucformat.thin(arrays, ["exp_avg*", "momentum"])
        assert "exp_avg_sq" in str(caught.value.hint)
        with pytest.raises(UsageError, match="no tensor left"):
            ucformat.thin(arrays, ["*", "weight"])
        assert holds(ucformat.open(arrays), ARRAYS)

    def test_single_tensors_go_by_key(self, arrays: Path) -> None:
        keep = [Key(*key) for key in ARRAYS if key != ("norm.bias", "exp_avg")]
        ck = keep_tensors(ucformat.open(arrays), keep, "needed by x")
        assert set(ck.tensors) == set(keep)
        assert str(ck.dropped["exp_avg"]).endswith("(needed by x)")
        assert same(ck["embed.weight", "exp_avg"][...], ARRAYS["embed.weight", "exp_avg"])
        with pytest.raises(UsageError, match="no tensor left"):
            keep_tensors(ck, [], "x")


class TestRefused:
    """What is not thinned."""

    def test_a_foreign_checkpoint_and_a_view(self, arrays: Path, tmp_path: Path) -> None:
        source = Checkpoint(FakeSource.write(LocalStore(tmp_path / "fake"), ARRAYS))
        with pytest.raises(UnsupportedError, match="checkpoint of fake"):
            ucformat.thin(source, "exp_avg")
        with pytest.raises(UnsupportedError, match="a view"):
            ucformat.thin(ucformat.open(arrays).view([{"drop": "frozen"}]), "exp_avg")

    def test_a_damaged_weight(self, place: Path, tmp_path: Path) -> None:
        ck = ucformat.open(place)
        extent = next(e for e in ck.source.extents(Key("embed.weight", "weight")) if e.box.size)
        root = tmp_path / "beside" if extent.file.startswith("roots/") else place
        file = root / extent.file.removeprefix("roots/0/").removeprefix(".ucf-encoded/")
        whole = file.read_bytes()
        data = bytearray(whole)
        data[20 if "encoded" in extent.file else getattr(extent, "offset", 4)] ^= 1
        if root != place:
            return  # its bytes are not read
        file.write_bytes(data)
        with pytest.raises(ChecksumError, match=r"embed\.weight"):
            ucformat.thin(place, "exp_avg*")
        file.write_bytes(whole)
        assert holds(ucformat.open(place), ARRAYS)
        assert holds(ucformat.thin(place, "exp_avg*"), remaining(*MOMENTS))

    def test_one_that_is_kept(
        self, arrays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
        before = ucformat.open(arrays)
        acts: dict[str, Callable[[Catalog], object]] = {
            "tag good": lambda c: c.tag(before.id, "good"),
            "alias best": lambda c: c.alias("best", before.id),
            "held: ours": lambda c: c.hold(before.id, "ours"),
        }
        with ucformat.Catalog() as catalog:
            catalog.record(before.manifest, before.url)
            for act in acts.values():
                act(catalog)
        with pytest.raises(Conflict, match="is not thinned") as caught:
            ucformat.thin(arrays, "exp_avg*")
        assert all(why in caught.value.message for why in acts)
        monkeypatch.setenv("UCP_CATALOG", "none")  # the records beside it count
        with pytest.raises(Conflict, match="tag good"):
            ucformat.thin(arrays, "exp_avg*")
        assert holds(ucformat.open(arrays), ARRAYS)

    def test_one_that_was_opened_before_it_was_replaced(self, arrays: Path) -> None:
        early = ucformat.open(arrays)
        thinned = ucformat.thin(arrays, "exp_avg*")
        assert ucformat.thin(early, "exp_avg*").id == thinned.id
        with pytest.raises(Conflict, match="was replaced or deleted"):
            ucformat.thin(early, "step")
        with pytest.raises(MissingData):
            early["embed.weight", "exp_avg"][...]
        assert folders(arrays) == {thinned.manifest.attempt}

    def test_a_place_that_cannot_replace(self, arrays: Path) -> None:
        class NoReplace(WrappedStore):
            def replace(self, key: str, data: bytes, version: str) -> str:
                raise UnsupportedError(f"{self.url} cannot replace a file")

        before = {p: p.stat().st_mtime_ns for p in arrays.rglob("*") if p.is_file()}
        with pytest.raises(UnsupportedError, match="thinned in place"):
            ucformat.thin(ucformat.open(NoReplace(LocalStore(arrays))), "exp_avg*")
        assert {p: p.stat().st_mtime_ns for p in arrays.rglob("*") if p.is_file()} == before


def test_the_catalog_follows(arrays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    before = ucformat.open(arrays)
    with ucformat.Catalog() as catalog:
        catalog.record(before.manifest, before.url, run="other")
        catalog.metric(before.id, {"val_loss": 1.5, "mmlu": 0.5})
        catalog.note(before.id, "a note")
        ck = ucformat.thin(arrays, "exp_avg*")
        entry = catalog.get("other@1700")
        assert (entry.id, entry.state, entry.url) == (ck.id, "committed", str(arrays))
        assert dict(entry.metrics) == {"val_loss": 1.5, "mmlu": 0.5}
        assert [note.text for note in entry.notes] == ["a note"]
        assert entry.nbytes == sum(a.nbytes for a in remaining(*MOMENTS).values())
        assert catalog.get(before.id).state == "replaced"
        assert [e.kind for e in catalog.lineage(ck.id).edges if e.child == ck.id] == [
            "convert",
            "thin",
        ]
        assert document(arrays).id == ck.id
        assert "thin" in {e.action for e in catalog.events(ck.id)}
        before_that = ucformat.thin(arrays, "step")
        assert dict(catalog.get(before_that.id).metrics) == {"val_loss": 1.5, "mmlu": 0.5}


def test_in_an_object_store(bucket: Bucket) -> None:
    url = bucket.place()
    zarr(url, "")
    assert holds(ucformat.thin(url, "exp_avg*"), remaining(*MOMENTS))
    assert ucformat.verify(url)


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
def test_a_failure_at_any_write_leaves_it_whole_or_thinned(form: str, tmp_path: Path) -> None:
    def make(name: str, fail: int | None = None) -> tuple[Path, FaultyStore]:
        FORMS[form](str(tmp_path / name), str(tmp_path / f"{name}-beside"))
        return tmp_path / name, FaultyStore(LocalStore(tmp_path / name), fail_write=fail, dead=True)

    where, whole = make("whole")
    roots = lambda: [str(tmp_path)]  # noqa: E731
    from ucformat.checkpoint import open_checkpoint

    ucformat.thin(open_checkpoint(whole, roots=roots), "exp_avg*", workers=1)
    last = whole.writes
    assert last > 10
    seen = set()
    for n in sorted({*range(1, last, 5), *range(last - 8, last + 1)}):
        where, store = make(f"fail{n}", n)
        whole_id = ucformat.open(where).id
        try:
            ucformat.thin(open_checkpoint(store, roots=roots), "exp_avg*", workers=1)
        except UcformatError as error:
            assert "No space left" in error.message  # noqa: PT017 - or it is done, and what it replaced stays
        left = ucformat.open(where)
        thinned = left.id != whole_id
        assert holds(left, remaining(*MOMENTS) if thinned else ARRAYS), n
        seen.add(thinned)
        ck = ucformat.thin(where, "exp_avg*")
        assert holds(ck, remaining(*MOMENTS)), n
        assert ucformat.verify(ck)
        if thinned:
            assert ck.id == left.id
            with ucformat.Catalog(str(tmp_path / f"{n}.db")) as catalog:
                ucformat.collect(catalog, where, apply=True, grace=timedelta(0))
        assert folders(where) == {ck.manifest.attempt}
        assert holds(ucformat.open(where), remaining(*MOMENTS))
    assert seen == {True, False}


WORK = """
import ucformat
ucformat.thin, ucformat.open
def work(where):
    ucformat.thin(where, "exp_avg*")
"""


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["zarr", "packed"])
def test_kill_9_at_any_instant(form: str, tmp_path: Path) -> None:
    FORMS[form](str(tmp_path / "original"), "")
    chance, whole, seen = random.Random(5), 0.0, set()
    with Forks(WORK) as forks:
        for round_ in range(12):
            where = shutil.copytree(tmp_path / "original", tmp_path / str(round_))
            if round_ == 0:  # let be, to see how long it takes
                assert forks.run(where)[0] == 0
                whole = forks.seconds
            else:
                forks.run(where, kill_after=chance.uniform(0, 1.1 * whole))
            left = ucformat.open(where)
            thinned = bool(left.dropped)
            assert holds(left, remaining(*MOMENTS) if thinned else ARRAYS)
            seen.add(thinned)
            ck = ucformat.thin(where, "exp_avg*")
            assert holds(ck, remaining(*MOMENTS))
            ucformat.verify(ck).raise_if_damaged()
    assert False in seen


def test_what_an_interrupted_call_committed_is_recorded(
    arrays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    before = ucformat.open(arrays)
    with ucformat.Catalog() as catalog:
        catalog.record(before.manifest, before.url)
        with monkeypatch.context() as patch:
            patch.setattr("ucformat.format.commit.on_commit", [])  # it is killed after its commit
            left = ucformat.thin(arrays, MOMENTS)
        assert catalog.get(before.id).state == "committed"
        assert ucformat.thin(arrays, MOMENTS).id == left.id
        assert catalog.get(before.id).state == "replaced"
        assert catalog.get(left.id).urls == (left.url,)
