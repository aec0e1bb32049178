"""`ucp cache`: where the cache is, how large it is, and its removal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.cli.conftest import object_of
from ucformat.storage.cache.folder import CacheEntry, CacheFolder

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.cli.conftest import Run


def test_it_is_shown_and_cleared(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("UCP_CACHE", str(cache))
    CacheFolder(str(cache), 1 << 30).write(CacheEntry(b"one"), bytes(100_000))
    found = object_of(run("cache", "--json").stdout)
    assert (found["path"], found["entries"], found["limit"]) == (str(cache), 1, 64 << 30)
    assert 100_000 < found["bytes"] < 120_000
    assert f"  folder    {cache}\n  entries   1\n  size      " in run("cache").stdout
    assert object_of(run("cache", "--clear", "--json").stdout)["entries"] == 0
    assert int(run("cache", "-q").stdout) < 20_000


def test_there_is_none(run: Run) -> None:
    assert "no cache is configured" in run("cache", code=2).stderr


def test_one_that_others_can_read_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    monkeypatch.setenv("UCP_CACHE", str(tmp_path / "cache"))
    assert "others may read or write" in run("cache", code=6).stderr
