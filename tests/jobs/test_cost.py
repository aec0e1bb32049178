"""What a job is said to cost is what it then does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ucformat
from tests.fakes import FakeSource
from tests.jobs.combine.test_lora import adapter, low_rank
from tests.jobs.test_parts import SIZES, source_of
from ucformat.checkpoint import Checkpoint
from ucformat.errors import UnsupportedError, UsageError
from ucformat.jobs.combine.combining import plan_average, plan_merge
from ucformat.jobs.cost import estimate_export
from ucformat.jobs.export import planned_job
from ucformat.jobs.shards import WriteOptions
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.profiles import Profile, keep_profile, profile_of
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.jobs.combine.combining import Planned


def data_of(place: Path) -> list[int]:
    """The sizes of the shards."""
    return [
        p.stat().st_size
        for p in (place / "data").rglob("*")
        if p.is_file() and p.name != "zarr.json"
    ]


@pytest.mark.parametrize("seed", range(4))
def test_convert(seed: int, tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", seed, scale=3)
    store = RecordingStore(LocalStore(source))
    ck = ucformat.open(store)
    cost = ucformat.estimate("convert", ck, tmp_path / "made", None, *SIZES.values())
    assert not (tmp_path / "made").exists()
    assert cost.seconds is None
    assert set(cost.unmeasured) == {str(source), str(tmp_path / "made")}
    store.clear()
    ucformat.convert(ck, tmp_path / "made", **SIZES)
    sizes = data_of(tmp_path / "made")
    assert (cost.tasks, cost.files, cost.bytes_written) == (len(sizes), len(sizes), sum(sizes))
    metadata = 700_000  # as of each opening
    assert cost.bytes_read <= store.nbytes <= cost.bytes_read + metadata
    assert cost.requests >= len(sizes) + sum(1 for r in store.reads if r.nbytes > 1920) // 2


def test_copy_materialize_and_verify(tmp_path: Path) -> None:
    ck = ucformat.convert(source_of(tmp_path / "src", 9), tmp_path / "one", **SIZES)
    cost = ucformat.estimate("copy", ck, tmp_path / "two")
    done = ucformat.copy(ck, tmp_path / "two")
    assert (cost.files, cost.bytes_read, cost.bytes_written) == (
        done.files,
        done.nbytes,
        done.nbytes,
    )
    assert ucformat.estimate("verify", ck).bytes_read == ucformat.verify(ck).bytes_verified
    assert (
        ucformat.estimate("materialize", ck, tmp_path / "three").tasks
        == ucformat.estimate("convert", ck, "x").tasks
    )


@pytest.mark.parametrize("method", ["average", "slerp", "ties", "lora"])
def test_combinations(method: str, tmp_path: Path) -> None:
    """What is read is what is said, as often as the method reads it; and nothing is written to find out."""
    rng = np.random.default_rng(0)
    shapes = {"q": (300, 400), "c": (7,)}
    stores = []
    for n in range(3):
        arrays = {
            (f"{name}.weight", "weight"): rng.standard_normal(s).astype("float32")
            for name, s in shapes.items()
        }
        arrays["ids", "weight"] = np.arange(50_000)
        ucformat.convert(
            Checkpoint(FakeSource.write(MemoryStore(f"cost-{n}"), arrays)),
            tmp_path / str(n),
            **SIZES,
        )
        stores.append(RecordingStore(LocalStore(tmp_path / str(n))))
    opened = [ucformat.open(store) for store in stores]
    planned: Planned
    if method == "average":
        planned = plan_average(opened, {"weights": [1, 2, 3]})
    elif method == "slerp":
        planned = plan_merge("slerp", opened[:2], {"t": 0.3})
    elif method == "ties":
        planned = plan_merge("ties", opened[1:], {"base": opened[0]}, take=["c*"])
    else:
        adapter(tmp_path / "adapter", low_rank("q", 300, 400))
        stores[1] = RecordingStore(LocalStore(tmp_path / "adapter"))
        planned = plan_merge("lora", [ucformat.open(stores[1])], {"base": opened[0]})
    how = WriteOptions(*SIZES.values())
    cost = planned.estimate(tmp_path / "made", how)
    assert not (tmp_path / "made").exists()
    assert set(cost.unmeasured) == {str(ck.url) for ck in planned.combination.sources} | {
        str(tmp_path / "made")
    }
    for store in stores:
        store.clear()
    planned.write(tmp_path / "made", how)
    sizes = data_of(tmp_path / "made")
    assert (cost.tasks, cost.files, cost.bytes_written) == (len(sizes), len(sizes), sum(sizes))
    read = sum(
        r.nbytes
        for store in stores
        for r in store.reads
        if "/data/" in f"/{r.file}" or "adapter_model" in r.file
    )
    assert cost.bytes_read <= read <= 1.05 * cost.bytes_read + 20_000


@pytest.mark.parametrize("seed", range(3))
def test_exports(seed: int, tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", seed, scale=3)
    store = RecordingStore(LocalStore(source))
    ck = ucformat.open(store)
    with planned_job(ck, tmp_path / "made", "safetensors", max_shard_bytes=100_000) as job:
        cost = estimate_export(job)
    assert not (tmp_path / "made").exists()
    store.clear()
    ucformat.export(ck, tmp_path / "made", "safetensors", max_shard_bytes=100_000)
    sizes = [p.stat().st_size for p in (tmp_path / "made").rglob("*") if p.is_file()]
    assert (cost.files, cost.bytes_written) == (len(sizes), sum(sizes))
    metadata = 700_000
    assert cost.bytes_read <= store.nbytes <= cost.bytes_read + metadata


def test_the_speed_of_the_nearest_place_above(tmp_path: Path) -> None:
    ck = ucformat.convert(source_of(tmp_path / "src", 10), tmp_path / "disk" / "one", **SIZES)
    assert ucformat.doctor(tmp_path / "disk")
    measured = profile_of(str(tmp_path / "disk"))
    assert measured is not None
    assert measured.write_mb_per_s
    keep_profile(str(tmp_path / "disk" / "fast"), Profile(0.0, 1e9, 1e9))
    slow = ucformat.estimate("copy", ck, tmp_path / "disk" / "two").seconds
    fast = ucformat.estimate("copy", ck, tmp_path / "disk" / "fast" / "two").seconds
    assert slow is not None
    assert fast is not None
    assert fast < slow
    assert profile_of(str(tmp_path / "diskette")) is None


def test_a_file_of_profiles_that_is_damaged_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    keep_profile("/a", Profile(1.0, 2.0))
    file = tmp_path / "ucformat" / "profiles.json"
    assert profile_of("/a/b") == Profile(1.0, 2.0)
    for content in ("{", "[]", json.dumps({"/a": 7}), json.dumps({"/a": {"speed": 1}})):
        file.write_text(content)
        assert profile_of("/a/b") is None


def test_what_is_no_job(tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", 11)
    with pytest.raises(UsageError, match="job='delete'"):
        ucformat.estimate("delete", source)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="destination"):
        ucformat.estimate("convert", source)
    with pytest.raises(UsageError, match="patch needs a base"):
        ucformat.estimate("patch", source, tmp_path / "two")
    with pytest.raises(UsageError, match="convert takes no fold"):
        ucformat.estimate("convert", source, tmp_path / "two", fold=True)
    with pytest.raises(UnsupportedError, match="not copied"):
        ucformat.estimate("copy", source, tmp_path / "two")
