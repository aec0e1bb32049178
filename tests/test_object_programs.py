"""Programs and other people's readers at checkpoints on S3: `ucp`, TensorStore, zarr-python, and how much memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.fakes import Arrays, FakeSource, random_array, same
from tests.s3 import set_environment
from tests.s3_files import serving_files
from ucformat.checkpoint import Checkpoint
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from tests.s3 import Bucket

ROOT = Path(__file__).parents[1]
ARRAYS: Arrays = {
    ("w", "weight"): random_array((130, 70), "float32", 1),
    ("half", "weight"): random_array((65, 34), "bfloat16", 2),
    ("ids", "weight"): random_array((300,), "int64", 3),
}
LAYOUT = """\
version: 1
mesh: {tp: 2}
rules:
  - {match: w, place: [{shard: 0, over: tp}]}
  - {match: "*", place: [replicate]}
"""


@pytest.fixture(scope="module")
def placed(bucket: Bucket) -> Checkpoint:
    """A universal checkpoint on S3."""
    source = Checkpoint(FakeSource.write(MemoryStore("programs"), ARRAYS, step=17))
    return ucformat.convert(source, bucket.place("run8/17"), chunk_bytes=1024, shard_bytes=8192)


def program(*args: object, code: int = 0, **env: str) -> str:
    """What a process of this interpreter says."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def test_ucp(placed: Checkpoint, bucket: Bucket, tmp_path: Path) -> None:
    """Each command a process of its own."""

    def ucp(*args: object, code: int = 0) -> str:
        return program(
            "-m", "ucformat.cli", *args, code=code, UCP_CATALOG=str(tmp_path / "catalog.db")
        )

    def told(*args: object, code: int = 0) -> Any:
        return json.loads(ucp(*args, "--json", code=code))

    layout = tmp_path / "layout.yaml"
    layout.write_text(LAYOUT)
    assert told("register", placed.url)["checkpoints"][0]["urls"] == [placed.url]
    assert [c["urls"] for c in told("ls")["checkpoints"]] == [[placed.url]]
    assert placed.url in ucp("show", "run8@17")
    assert told("verify", "run8@17")["ok"] is True
    plan = placed.plan(ucformat.Layout.load(layout), 1)
    assert (
        told("plan", placed.url, "-l", layout, "-r", 1)["ranks"][0]["bytes_read"] == plan.bytes_read
    )
    ucp("get", placed.url, "w", "3:5, ::7", "-o", tmp_path / "w.npy")
    assert same(np.load(tmp_path / "w.npy"), np.ascontiguousarray(ARRAYS["w", "weight"][3:5, ::7]))
    ucp("convert", placed.url, bucket.place("there"), "-q")
    assert told("verify", f"s3://{bucket.name}/there")["ok"] is True
    ucp("show", bucket.place(), code=3)


def test_tensorstore_over_its_own_client(placed: Checkpoint, bucket: Bucket) -> None:
    ts = pytest.importorskip("tensorstore", reason="pip install 'ucformat[zarr]'")
    place = {
        "driver": "s3",
        "bucket": bucket.name,
        "endpoint": bucket.endpoint,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "environment"},
    }
    for doc in placed.manifest.tensors:
        path = f"{placed.url.split('/', 3)[3]}/{doc.path}/"
        found = ts.open({"driver": "zarr3", "kvstore": {**place, "path": path}}).result()
        assert same(np.asarray(found.read().result()), ARRAYS[doc.name, doc.state]), doc.name


def test_zarr_python_over_obstore(placed: Checkpoint, bucket: Bucket) -> None:
    zarr = pytest.importorskip("zarr", reason="pip install 'ucformat[zarr]'")
    from obstore.store import S3Store
    from zarr.storage import ObjectStore

    ucformat.register_zarr_dtypes()
    prefix = str(placed.zarr_url).split("/", 3)[3]
    options: dict[str, Any] = {"client_options": {"allow_http": True}, "region": "us-east-1"}
    store = ObjectStore(
        S3Store(bucket.name, prefix=prefix, endpoint=bucket.endpoint, **options), read_only=True
    )
    group = zarr.open_group(store, mode="r")
    for doc in placed.manifest.tensors:
        array = group[str(doc.path).removeprefix(f"data/{placed.manifest.attempt}/")]
        assert same(np.asarray(array[...]), ARRAYS[doc.name, doc.state]), doc.name
        assert same(np.asarray(array[7:40]), ARRAYS[doc.name, doc.state][7:40]), doc.name


READ = """
import json, sys
from pathlib import Path
import numpy as np
import ucformat
from ucformat.storage.objects import BUDGET

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

ck = ucformat.open(sys.argv[1])
ck["small"][...]
arrays = {n: np.full(ck[n].shape, 1, np.float32) for n in ("w", "v")}
before = peak()
for name, out in arrays.items():
    ck[name].read(out=out)
told = {"peak": peak() - before, "most": BUDGET.peak}
print(json.dumps({**told, "sums": [float(a.sum(dtype="f8")) for a in arrays.values()]}))
"""


def test_memory_stays_within_the_budget_for_what_is_ten_times_as_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of 160 MiB in one shard of tiles and one of rows, in a process that may have 16 MiB in flight."""
    set_environment(monkeypatch)
    budget, large = 16 << 20, np.random.default_rng(0).standard_normal((4096, 10240), np.float32)
    arrays = {
        ("w", "weight"): large,
        ("v", "weight"): large.reshape(-1),
        ("small", "weight"): large[0, :9],
    }
    source = Checkpoint(FakeSource.write(MemoryStore("budget"), arrays))
    ck = ucformat.convert(source, tmp_path / "large", shard_bytes=1 << 30)
    assert max(t.nbytes for t in ck.manifest.tensors) == 10 * budget
    with serving_files(tmp_path) as served:
        said = json.loads(
            program(
                "-c",
                READ,
                served.url("large"),
                UCP_ENDPOINT=served.endpoint,
                UCP_IN_FLIGHT=str(budget),
            )
        )
    assert said["sums"] == [float(large.sum(dtype="f8"))] * 2
    assert 0 < said["most"] <= budget
    assert said["peak"] <= budget + (24 << 20), (
        said
    )  # and what threads, connections and the allocator take
