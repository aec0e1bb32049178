"""What the core does with checkpoints, over a real HTTP endpoint that speaks S3: once each, as on a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import ucformat
import ucformat.torch
from tests.fakes import ODD, Arrays, FakeSource, random_array, same
from tests.packed import OBJECTS, write_packed
from tests.reading.test_rank import ARRAYS as MODEL
from tests.reading.test_rank import GROUPS, layout, reference
from tests.s3 import set_environment
from tests.s3_files import serving_files
from tests.zero_files import FLAT, write_zero3
from ucformat.checkpoint import Checkpoint
from ucformat.errors import Conflict, IntegrityError, NotACheckpoint, NotFound
from ucformat.storage.clouds import Options
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.objects import BUDGET, ObjectStore
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3 import Bucket

FACTS: dict[str, Any] = {
    "groups": ({"params": ["embed.weight"], "lr": 0.1}, {"params": ["norm.bias"], "lr": 0.2}),
    "aliases": {"head.weight": "embed.weight"},
    "objects": {"scheduler": {"last": 3}, "nan": {"$float": "nan"}},
    "step": 17,
}
SIZES: dict[str, Any] = {"chunk_bytes": 256, "shard_bytes": 4096}


def holds(ck: Checkpoint) -> bool:
    return set(ck.tensors) == set(ODD) and reads(ck, ODD)


def reads(ck: Checkpoint, arrays: Arrays) -> bool:
    return all(same(ck[k][...], a) for k, a in arrays.items())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A foreign checkpoint on a disk."""
    return Checkpoint(FakeSource.write(LocalStore(tmp_path_factory.mktemp("source")), ODD, **FACTS))


@pytest.fixture(scope="module")
def placed(source: Checkpoint, bucket: Bucket) -> str:
    """A universal checkpoint on S3, which no test changes."""
    return ucformat.convert(source, bucket.place("run7/17"), **SIZES).url


def folders(bucket: Bucket, place: str) -> set[str]:
    """The attempts that have anything at a place."""
    below = [
        k.removeprefix(place.split("/", 3)[3]).split("/")[1:]
        for k in bucket.keys(place.split("/", 3)[3])
    ]
    return {parts[1].removesuffix(".json") for parts in below if len(parts) > 1}


def data_of(bucket: Bucket, ck: Checkpoint) -> list[str]:
    """The keys of its shards."""
    prefix = ck.url.split("/", 3)[3]
    return [
        k
        for k in bucket.keys(f"{prefix}/data/{ck.manifest.attempt}")
        if not k.endswith("zarr.json")
    ]


class TestOpen:
    def test_whole_tensors_bit_for_bit(self, placed: str, source: Checkpoint) -> None:
        ck = ucformat.open(placed)
        assert holds(ck)
        assert same(np.asarray(ck["head.weight"]), ODD["embed.weight", "weight"])
        assert (ck.objects, ck.metadata.step) == (source.objects, 17)
        assert [dict(g) for g in ck.metadata.groups] == [dict(g) for g in FACTS["groups"]]

    @pytest.mark.parametrize("key", [k for k, a in ODD.items() if a.ndim])
    def test_slices_bit_for_bit(self, placed: str, key: tuple[str, str]) -> None:
        tensor, a = ucformat.open(placed)[key], ODD[key]
        ends = [slice(n // 3, n - n // 4) for n in a.shape]
        for index in (
            (ends[0],),
            (..., ends[-1]),
            tuple(ends),
            (slice(None, None, 2),),
            (slice(0, 0),),
        ):
            assert same(tensor[index], np.ascontiguousarray(a[index])), index
        if a.size:
            assert same(np.asarray(tensor[-1]), np.ascontiguousarray(a[-1]).reshape(a[-1].shape))
            assert same(tensor.read(verify="always"), a)

    def test_into_memory_of_the_callers(self, placed: str) -> None:
        space = np.zeros((422, 31), np.float32)
        out = space[::2, 1:]
        assert ucformat.open(placed)["embed.weight", "exp_avg"].read(out=out) is out
        assert same(np.ascontiguousarray(out), ODD["embed.weight", "exp_avg"])
        assert not space[1::2].any()

    def test_where_nothing_is(self, bucket: Bucket) -> None:
        with pytest.raises(NotFound, match="does not exist, or is empty"):
            ucformat.open(bucket.place())


class TestPlan:
    @pytest.fixture(autouse=True)
    def keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_environment(monkeypatch)

    def test_opening_takes_one_request_which_says_the_version(self, tmp_path: Path) -> None:
        source = Checkpoint(FakeSource.write(MemoryStore("one-request"), MODEL))
        ucformat.convert(source, tmp_path / "model", overwrite=True)
        with serving_files(tmp_path) as served:
            store = ObjectStore(served.url("model"), Options(endpoint=served.endpoint))
            served.counts()
            whole = ucformat.Layout({"tp": 1}, [{"match": "*", "place": ["replicate"]}])
            plan = ucformat.open(store).plan(whole, 0)
            assert served.counts().requests == 1
            manifest = tmp_path / "model" / "manifest.json"
            manifest.write_bytes(manifest.read_bytes() + b" ")
            with pytest.raises(Conflict, match=r"manifest\.json changed"):
                plan.execute()

    @pytest.mark.parametrize("sizes", [(64, 1024), (None, None)])
    def test_ranks_read_what_their_plans_say(
        self, tmp_path: Path, sizes: tuple[int | None, int | None]
    ) -> None:
        """As the endpoint counts it."""
        groups = tuple({"params": names, "lr": 0.1} for names in GROUPS)
        foreign = Checkpoint(
            FakeSource.write(MemoryStore(f"places-{sizes[0]}"), MODEL, ranks=5, groups=groups)
        )
        ucformat.convert(foreign, tmp_path / "model", chunk_bytes=sizes[0], shard_bytes=sizes[1])
        with serving_files(tmp_path) as served:
            ck = ucformat.open(ObjectStore(served.url("model"), Options(endpoint=served.endpoint)))
            for target, ranks in (
                ((1, 1, 4, 3, 1), (0, 3)),
                ((2, 2, 2, 1, 1), (1, 6)),
                ((1, 2, 2, 1, 1), (3,)),
            ):
                for rank in ranks:
                    served.counts()
                    plan = ck.plan(layout(*target), rank)
                    assert served.counts().requests == 0
                    found = plan.execute()
                    counts = served.counts()
                    assert counts.nbytes == plan.bytes_read
                    assert counts.requests == counts.reads + 1, "in the end a look at the manifest"
                    assert counts.reads <= plan.requests
                    assert all(same(found[key], a) for key, a in reference(target, rank).items())

    @pytest.mark.parametrize(("requests", "nbytes"), [(3, 1 << 20), (25, 1 << 20), (128, 1)])
    def test_no_more_requests_at_once_than_the_budget_allows(
        self, tmp_path: Path, requests: int, nbytes: int
    ) -> None:
        """Neither ranges of one file that are asked for together; a range larger than the budget goes alone."""
        arrays = {(f"w{k}", "weight"): random_array((64, 64), "float32", k) for k in range(6)}
        source = Checkpoint(FakeSource.write(MemoryStore("at-once"), arrays))
        ucformat.convert(source, tmp_path / "model", chunk_bytes=1024, overwrite=True)
        before = BUDGET.requests, BUDGET.nbytes
        with serving_files(tmp_path, latency=0.01) as served:
            ck = ucformat.open(ObjectStore(served.url("model"), Options(endpoint=served.endpoint)))
            plan = ck.plan(
                ucformat.Layout({"tp": 4}, [{"match": "*", "place": [{"shard": 1, "over": "tp"}]}]),
                2,
            )
            assert plan.requests > 50
            served.counts()
            BUDGET.set(requests, nbytes)
            try:
                found = plan.execute()
            finally:
                BUDGET.set(*before)
            counts = served.counts()
        assert all(same(found[key], np.ascontiguousarray(a[:, 32:48])) for key, a in arrays.items())
        assert (counts.reads, counts.nbytes) == (plan.requests, plan.bytes_read)
        assert counts.most <= (requests if nbytes > 1 else 10)
        assert counts.most > 2


class Interrupted(Exception):
    pass


class TestConvert:
    def test_from_a_disk_to_a_disk_and_between_buckets(
        self, placed: str, bucket: Bucket, tmp_path: Path
    ) -> None:
        down = ucformat.convert(placed, tmp_path / "down", **SIZES)
        across = ucformat.convert(placed, bucket.place(), **SIZES)
        first = ucformat.open(placed).manifest
        for ck in (down, across):
            assert holds(ck)
            assert ucformat.verify(ck)
            assert [t.digest for t in ck.manifest.tensors] == [t.digest for t in first.tensors]
            assert ck.manifest.lineage[-1].url == placed

    def test_overwrite_replaces_and_drops_the_old_attempt(
        self, placed: str, bucket: Bucket
    ) -> None:
        place = bucket.place()
        old = ucformat.convert(placed, place, states=["weight"])
        before = bucket.keys(place.split("/", 3)[3])
        with pytest.raises(Conflict, match="already holds the committed checkpoint"):
            ucformat.convert(placed, place)
        assert bucket.keys(place.split("/", 3)[3]) == before
        new = ucformat.convert(placed, place, overwrite=True)
        assert holds(ucformat.open(place))
        assert folders(bucket, place) == {new.manifest.attempt} != {old.manifest.attempt}

    def test_an_interrupted_one_is_not_seen_and_continues(
        self, source: Checkpoint, bucket: Bucket
    ) -> None:
        place = bucket.place()

        def stop(done: int, total: int) -> None:
            if done > total / 2:
                raise Interrupted

        with pytest.raises(Interrupted):
            ucformat.convert(source, place, workers=1, progress=stop, **SIZES)
        with pytest.raises(NotACheckpoint, match="interrupted"):
            ucformat.open(place)
        recorder = RecordingStore(source.store)
        inner, source.source.store = source.source.store, recorder
        try:
            ck = ucformat.convert(source, place, **SIZES)
        finally:
            source.source.store = inner
        assert recorder.nbytes < 0.6 * sum(a.nbytes for a in ODD.values())
        assert holds(ck)
        assert folders(bucket, place) == {ck.manifest.attempt}


class TestVerify:
    def test_finds_a_flipped_byte_and_a_missing_shard(
        self, source: Checkpoint, bucket: Bucket
    ) -> None:
        ck = ucformat.convert(source, bucket.place(), **SIZES)
        assert ucformat.verify(ck).bytes_unverified == 0
        flipped, *_, gone = data_of(bucket, ck)
        data = bytearray(bucket.client.get_object(Bucket=bucket.name, Key=flipped)["Body"].read())
        data[5] ^= 1
        bucket.client.put_object(Bucket=bucket.name, Key=flipped, Body=bytes(data))
        bucket.client.delete_object(Bucket=bucket.name, Key=gone)
        report = ucformat.verify(ck.url)
        assert not report
        start = len(ck.url.split("/", 3)[3]) + 1
        assert {p.file for p in report.problems} == {flipped[start:], gone[start:]}


class TestVirtual:
    @pytest.fixture
    def arrays(self) -> Arrays:
        shapes = {"embed": (37, 12), "up": (24, 12), "norm": (12,)}
        return {
            (n, s): random_array(shape, "float32", i)
            for i, (n, shape) in enumerate(shapes.items())
            for s in FLAT
        }

    def test_files_on_s3_are_read_in_place_until_they_change(
        self, arrays: Arrays, bucket: Bucket, tmp_path: Path
    ) -> None:
        write_zero3(tmp_path / "run", arrays, 3)
        files = {
            p.relative_to(tmp_path).as_posix(): p.read_bytes()
            for p in (tmp_path / "run").rglob("*.*")
        }
        files["run/latest"] = (tmp_path / "run" / "latest").read_bytes()
        place = bucket.place()
        for name, data in files.items():
            bucket.client.put_object(
                Bucket=bucket.name, Key=f"{place.split('/', 3)[3]}/{name}", Body=data
            )
        foreign = ucformat.open(f"{place}/run")
        assert foreign.kind == "deepspeed"
        assert reads(foreign, arrays)
        here = ucformat.convert(f"{place}/run", tmp_path / "virtual", virtual=True)
        there = ucformat.convert(f"{place}/run", bucket.place(), virtual=True, checksums=True)
        for ck in (here, there):
            assert reads(ck, arrays)
            assert ucformat.verify(ck)
        name = next(n for n in files if n.endswith("rank_1_mp_rank_00_optim_states.pt"))
        other = (
            files[name][:-1] + b"x"
        )  # of the same size, within the same second: the ETag alone tells
        bucket.client.put_object(
            Bucket=bucket.name, Key=f"{place.split('/', 3)[3]}/{name}", Body=other
        )
        for ck in (here, ucformat.open(there.url)):
            with pytest.raises(IntegrityError, match=r"rank_1_mp.*has changed"):
                reads(ck, arrays)


class TestPacked:
    def test_materialized_in_place(self, bucket: Bucket) -> None:
        packed = write_packed(open_store(bucket.place()), ODD)
        assert holds(packed)
        ck = ucformat.materialize(packed.url)
        assert (ck.id, dict(ck.objects)) == (packed.id, OBJECTS)
        assert holds(ucformat.open(ck.url))
        assert ucformat.verify(ck).bytes_unverified == 0
        assert folders(bucket, ck.url) == {ck.manifest.attempt}
        assert not [k for k in data_of(bucket, ck) if k.endswith(".bin")]


class TestTorch:
    @pytest.mark.parametrize("form", ["zarr", "packed"])
    def test_saved_and_loaded(self, form: Any, bucket: Bucket) -> None:
        def state() -> dict[str, Any]:
            model = torch.nn.Sequential(torch.nn.Linear(30, 41), torch.nn.Linear(41, 7))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            model(torch.rand(5, 30)).sum().backward()
            optimizer.step()
            return {"model": model, "optimizer": optimizer}

        place, saved, loaded = bucket.place(), state(), state()
        ucformat.torch.save(saved, place, step=7, form=form)
        with pytest.raises(Conflict):
            ucformat.torch.save(saved, place, step=7, form=form)
        ucformat.torch.load(loaded, ucformat.materialize(place) if form == "packed" else place)
        for a, b in zip(saved["model"].parameters(), loaded["model"].parameters(), strict=True):
            assert torch.equal(a, b)
            mine, theirs = (
                s["optimizer"].state[p]["exp_avg"] for s, p in ((saved, a), (loaded, b))
            )
            assert torch.equal(mine, theirs)
