"""What a job is said to cost is what it then does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.jobs.test_parts import SIZES, source_of
from ucformat.errors import UnsupportedError, UsageError
from ucformat.jobs.profiles import Profile, keep_profile, profile_of
from ucformat.storage.local import LocalStore
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from pathlib import Path


def data_of(place: Path) -> list[int]:
    """The sizes of the shards."""
    return [p.stat().st_size for p in (place / "data").rglob("*") if p.is_file() and p.name != "zarr.json"]


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
    assert (cost.files, cost.bytes_read, cost.bytes_written) == (done.files, done.nbytes, done.nbytes)
    assert ucformat.estimate("verify", ck).bytes_read == ucformat.verify(ck).bytes_verified
    assert ucformat.estimate("materialize", ck, tmp_path / "three").tasks == ucformat.estimate("convert", ck, "x").tasks


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


def test_a_file_of_profiles_that_is_damaged_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    keep_profile("/a", Profile(1.0, 2.0))
    file = tmp_path / "ucformat" / "profiles.json"
    assert profile_of("/a/b") == Profile(1.0, 2.0)
    for content in ("{", "[]", json.dumps({"/a": 7}), json.dumps({"/a": {"speed": 1}})):
        file.write_text(content)
        assert profile_of("/a/b") is None


def test_what_is_no_job(tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", 11)
    with pytest.raises(UsageError, match="no job"):
        ucformat.estimate("delete", source)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="destination"):
        ucformat.estimate("convert", source)
    with pytest.raises(UnsupportedError, match="not copied"):
        ucformat.estimate("copy", source, tmp_path / "two")
