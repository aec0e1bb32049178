from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ucformat.errors import UnsafeError
from ucformat.storage.local import LocalStore
from ucformat.storage.wrappers import PrefixStore
from ucformat.testing.stores import StoreTests

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.storage.base import Store


class TestBelow(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return PrefixStore(LocalStore(tmp_path), "a/b")


def test_its_keys_are_those_of_the_folder(tmp_path: Path) -> None:
    around = LocalStore(tmp_path)
    for key in ("x", "a/x", "ab/x", "a/deep/y"):
        around.put_if_absent(key, key.encode())
    below = PrefixStore(around, "a")
    assert below.url == f"{around.url}/a"
    assert [i.key for i in below.list()] == ["deep/y", "x"]
    assert [i.key for i in below.list("deep")] == ["deep/y"]
    assert below.read("x") == b"a/x"
    for key in ("../x", "/x", ""):
        with pytest.raises(UnsafeError, match="does not stay inside"):
            below.read(key)
    with pytest.raises(UnsafeError, match="does not stay inside"):
        PrefixStore(around, "../a")
