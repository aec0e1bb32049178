"""`ucp doctor`: what a place can do, in words, as JSON, and as an exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.cli.conftest import object_of
from tests.s3 import CANARY

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run, Shell
    from tests.s3 import Bucket


def test_a_folder(run: Run, tmp_path: Path) -> None:
    text = run("doctor", tmp_path).stdout
    assert text.startswith(f"{tmp_path}\n  latency   ")
    assert "\n  ok       put if absent     an existing file is not overwritten" in text
    assert text.endswith(
        "\n  checkpoints there can be read\n  checkpoints can be saved there\n"
        "  overwrite=True (--overwrite) is safe there\n"
    )
    assert run("doctor", tmp_path, "-q").stdout == "ok\n"
    assert list(tmp_path.iterdir()) == []


def test_json(run: Run, tmp_path: Path) -> None:
    found = object_of(run("doctor", tmp_path, "--json").stdout)
    assert list(found) == [
        *(
            "url",
            "ok",
            "read_only",
            "can_read",
            "can_save",
            "can_overwrite",
            "endpoint",
            "region",
            "credentials",
        ),
        *("cache", "latency_ms", "mb_per_s", "write_mb_per_s"),
        *("disk_mb_per_s", "direct_mb_per_s", "reads_direct", "probes"),
    ]
    assert found["ok"] is True
    assert {p["status"] for p in found["probes"]} == {"ok"}
    assert list(found["probes"][0]) == ["name", "status", "text"]


def test_a_place_that_nobody_can_write_to(run: Run) -> None:
    found = object_of(run("doctor", "/proc/nowhere", "--json", code=1).stdout)
    assert (found["ok"], found["can_read"], found["can_save"]) == (False, None, False)
    assert run("doctor", "/proc/nowhere", "-q", code=1).stdout == "write\nranges\n"
    text = run("doctor", "/proc/nowhere", code=1).stdout
    assert "checkpoints cannot be saved there" in text
    assert "is not safe there" in text
    assert "it is unknown" in text


def test_read_only(run: Run, committed: Path, tmp_path: Path) -> None:
    before = sorted(committed.rglob("*"))
    assert "checkpoints there can be read\n" in run("doctor", committed, "--read-only").stdout
    assert sorted(committed.rglob("*")) == before
    found = object_of(run("doctor", tmp_path, "--read-only", "--json", code=1).stdout)
    assert (found["can_read"], found["can_save"], found["can_overwrite"]) == (None, None, None)


def test_a_url_that_is_none(run: Run) -> None:
    assert "unknown scheme" in run("doctor", "nonsense://x", code=2).stderr


def test_an_object_store_in_a_process_of_its_own(shell: Shell, bucket: Bucket) -> None:
    done = shell(f"ucp doctor {bucket.place()}")
    assert done.returncode == 0, done.stderr
    assert f"\n  endpoint  {bucket.endpoint}\n" in done.stdout
    assert "\n  keys from environment (AWS_ACCESS_KEY_ID)\n" in done.stdout
    assert CANARY not in done.stdout + done.stderr
    assert bucket.keys("ucf-doctor") == []
