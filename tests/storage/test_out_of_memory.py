"""Where memory ends in what reads from a place, that is said, and nothing else is made of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from ucformat.errors import UcformatError
from ucformat.storage.error_mapping import map_object_error, retry
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from pathlib import Path


def end(*_: object, **__: object) -> None:
    raise MemoryError


def test_a_request_to_an_object_store_is_not_repeated() -> None:
    with pytest.raises(MemoryError), mock.patch.object(time, "sleep", side_effect=AssertionError):
        retry("read", "s3://b/k", end, 60)


def test_an_upload_that_ends_so_says_so() -> None:
    assert "MemoryError" in map_object_error(MemoryError(), "write", "s3://b/k").message


def test_what_fsspec_reads(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="fsspec is missing: pip install fsspec")
    (tmp_path / "x").write_bytes(b"x")
    store = open_store(f"local://{tmp_path}")
    with mock.patch.object(type(store._fs), "info", end), pytest.raises(MemoryError):  # type: ignore[attr-defined]
        store.info("x")
    with mock.patch("ucformat.storage.fsspec_store.FsspecStore", end), pytest.raises(MemoryError):
        open_store(f"local://{tmp_path}")


def test_registering_one_of_many_tells_it_of_that_one() -> None:
    from ucformat.jobs.run import naming_place  # which loads NumPy

    with (
        pytest.raises(
            UcformatError, match=r"a/b: out of memory\n.*hint: run it on a machine with more memory"
        ),
        naming_place("a/b"),
    ):
        end()
