"""Combining on a Dask cluster, under torchrun and in parts, between places of an object store: the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("distributed", reason="pip install 'ucformat[dask]'")

import ucformat
from tests.jobs.combine.reference import saved
from tests.jobs.combine.test_lora import adapter, low_rank
from tests.jobs.dask_cluster import ROOT, cluster
from tests.patience import PATIENCE
from ucformat.errors import NotFinished
from ucformat.jobs import tasks
from ucformat.jobs.combine.combining import plan_merge
from ucformat.jobs.combine.job import CombineJob
from ucformat.jobs.shards import WriteOptions
from ucformat.jobs.tasks import batches
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.s3 import Bucket
    from ucformat.checkpoint import Checkpoint

pytestmark = pytest.mark.filterwarnings("default")  # of the libraries that Dask loads

SIZES: dict[str, Any] = {"chunk_bytes": 2048, "shard_bytes": 1 << 14}
METHODS: dict[str, dict[str, Any]] = {
    "average": {"weights": [1, 2, 4]},
    "task-arithmetic": {"scale": 0.7},
    "slerp": {"t": 0.3},
    "ties": {"density": 0.3},
    "dare": {"density": 0.5, "seed": 1},
    "lora": {},
}


@pytest.fixture(scope="module")
def inputs(bucket: Bucket) -> list[str]:
    """Three models on S3, of several shards each."""
    rng = np.random.default_rng(0)
    shapes = {"q.weight": (200, 90), "k.weight": (150, 64), "norm": (33,)}
    found = []
    for dtype in ("float32", "float16", "float32"):
        tensors = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        found.append(str(saved(bucket.place(), {**tensors, "ids": np.arange(9000)})))
    return found


@pytest.fixture(scope="module")
def adapted(bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An adapter on S3."""
    folder, place = tmp_path_factory.mktemp("lora") / "adapter", bucket.place()
    adapter(folder, low_rank("q", 200, 90))
    for file in folder.iterdir():
        bucket.client.put_object(
            Bucket=bucket.name, Key=f"{place.split('/', 3)[3]}/{file.name}", Body=file.read_bytes()
        )
    return place


@pytest.fixture(scope="module")
def workers(bucket: Bucket) -> Iterator[str]:
    """A Dask cluster of two workers, which have the bucket's endpoint and keys in their environment."""
    del bucket
    with cluster(2) as (address, _):
        yield f"dask://{address}"


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send several batches of such small tensors to the workers."""
    monkeypatch.setattr(tasks, "_LEAST_BYTES", 1 << 12)


def combine(
    method: str, inputs: list[str], adapted: str, target: str, **options: Any
) -> Checkpoint:
    options = {**METHODS[method], **SIZES, **options}
    if method == "average":
        return ucformat.average(inputs, target, **options)
    if method == "slerp":
        return ucformat.merge(method, inputs[:2], target, **options)
    return ucformat.merge(
        method, [adapted] if method == "lora" else inputs[1:], target, base=inputs[0], **options
    )


def content(ck: Checkpoint) -> dict[str, bytes]:
    """The files of the tensors by their names, without that of the attempt."""
    store, folder = open_store(ck.url), f"data/{ck.manifest.attempt}"
    return {f.key.removeprefix(folder): store.read(f.key) for f in store.list(folder)}


def same(one: Checkpoint, other: Checkpoint) -> None:
    files = content(one)
    assert files == content(other)
    assert len(files) > 12
    assert one.manifest.lineage == other.manifest.lineage
    assert one.manifest.verified == other.manifest.verified


@pytest.mark.front("ties")
@pytest.mark.parametrize("method", METHODS)
def test_on_dask_and_in_parts(
    method: str, inputs: list[str], adapted: str, workers: str, bucket: Bucket
) -> None:
    whole = combine(method, inputs, adapted, bucket.place())
    same(whole, combine(method, inputs, adapted, bucket.place(), on=workers))
    target = bucket.place()
    for part in (2, 0, 1):
        with pytest.raises(NotFinished):
            combine(method, inputs, adapted, target, on=f"part:{part}/3")
    same(whole, combine(method, inputs, adapted, target, on="commit"))


@pytest.mark.matrix
def test_workers_are_killed(inputs: list[str], bucket: Bucket) -> None:
    whole = combine("ties", inputs, "", bucket.place())
    with cluster(3) as (address, pids):
        killed = threading.Event()

        def progress(done: int, total: int) -> None:
            if done and not killed.is_set():
                killed.set()
                os.kill(pids[0], signal.SIGKILL)
            assert done <= total

        made = combine(
            "ties", inputs, "", bucket.place(), on=f"dask://{address}", progress=progress
        )
    assert killed.is_set()
    same(whole, made)
    ucformat.verify(made).raise_if_damaged()


def test_under_torchrun(inputs: list[str], bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")
    program = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "ucformat",
    ]
    target = bucket.place()
    words = [
        "merge",
        *inputs[1:],
        target,
        "--method",
        "ties",
        "--base",
        inputs[0],
        "--density",
        "0.3",
    ]
    done = subprocess.run(
        [sys.executable, *program, *words, "--chunk-bytes", "2048", "--shard-bytes", "16384"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "UCP_CATALOG": "none"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, "rank 0 alone reports"
    same(combine("ties", inputs, "", bucket.place()), ucformat.open(target))


@pytest.mark.parametrize(("method", "together"), [("ties", True), ("task-arithmetic", False)])
def test_a_tensor_that_is_read_whole_is_in_one_batch(
    method: str, together: bool, inputs: list[str]
) -> None:
    planned = plan_merge(method, inputs[1:], {"base": inputs[0]})
    with CombineJob(
        planned.combination, MemoryStore("none"), "0" * 20, WriteOptions(512, 1024)
    ) as job:
        found = list(batches(job, 10**6))
        assert sorted(n for batch in found for n in batch) == list(range(job.count))
        tensors = [{job.shard(n)[0].info.key for n in batch} for batch in found]
        keys = [key for of_batch in tensors for key in of_batch if key.name == "q.weight"]
        assert (len(keys) == 1) == together
