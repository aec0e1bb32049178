from __future__ import annotations

import builtins
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ucformat.errors import UnsafeError, UnsupportedError, UsageError
from ucformat.storage.fsspec_store import FsspecStore
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store, split_url
from ucformat.testing.stores import put

if TYPE_CHECKING:
    import os


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("a/b", ("", "a/b")),
        (Path("/a/b"), ("", "/a/b")),
        (Path("s3://not/a/url"), ("", "s3:/not/a/url")),
        ("file:///a%20b/c", ("file", "/a b/c")),
        ("FILE://localhost/a", ("file", "/a")),
        ("memory://x/y", ("memory", "x/y")),
        ("s3://bucket/a%20b", ("s3", "bucket/a%20b")),
        ("simplecache::s3://bucket/k", ("simplecache::s3", "bucket/k")),
    ],
)
def test_splits(place: str | os.PathLike[str], expected: tuple[str, str]) -> None:
    assert split_url(place) == expected


def test_paths_and_file_urls_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(LocalStore(tmp_path / "a b"), "f", b"abc")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in (
        "a b",
        "./a b/",
        tmp_path / "a b",
        str(tmp_path / "a b"),
        "~/a b",
        (tmp_path / "a b").as_uri(),
    ):
        store = open_store(place)
        assert isinstance(store, LocalStore)
        assert (store.read("f"), store.url) == (b"abc", str(tmp_path / "a b"))


def test_memory_is_one_place_by_name() -> None:
    store = open_store("memory://test_url/run/")
    assert isinstance(store, MemoryStore)
    assert store.url == "memory://test_url/run"
    put(store, "f", b"abc")
    assert open_store("memory://test_url").read("run/f") == b"abc"
    store.delete("f")


def test_other_schemes_go_through_fsspec(tmp_path: Path) -> None:
    store = open_store(f"local://{tmp_path}")
    assert isinstance(store, FsspecStore)
    (tmp_path / "f").write_bytes(b"abc")
    assert LocalStore(tmp_path).read("f") == b"abc"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("", "no place"),
        ("memory://", "needs a name"),
        ("file://host/a", "not a file url of this machine"),
        ("file://a", "not a file url"),
        ("nosuch://x", r"unknown scheme 'nosuch'"),
    ],
)
def test_what_names_no_place_is_a_usage_error(place: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_store(place)


def test_memory_does_not_climb() -> None:
    with pytest.raises(UnsafeError):
        open_store("memory://a/../b")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> object:
        if name in ("ossfs", "dropboxdrivefs"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        UnsupportedError, match=r"(?s)oss://b/k needs the package ossfs.*pip install ossfs"
    ):
        open_store("oss://b/k")
    with pytest.raises(UnsupportedError, match=r"pip install dropboxdrivefs"):
        open_store("dropbox://b/k")
