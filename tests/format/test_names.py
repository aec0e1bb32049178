"""Folder names are safe and tell names apart, whatever the names."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from ucformat.format.arrays import folder_names

NAMES = st.lists(
    st.text(st.characters(codec="utf-8"), max_size=300)
    | st.sampled_from(["A", "a", "c", "zarr.json", "__x", "..", ""]),
    unique=True,
)


@given(NAMES)
def test_folders_are_safe_and_distinct_even_where_case_is_ignored(names: list[str]) -> None:
    folders = folder_names(names)
    assert list(folders) == names
    assert len({f.lower() for f in folders.values()}) == len(names)
    for folder in folders.values():
        assert re.fullmatch(r"[A-Za-z0-9_%~-][A-Za-z0-9._%~-]*", folder)
        assert len(folder) <= 200
        assert folder.lower() not in {"c", "zarr.json"}
        assert not folder.startswith("__")


def test_ordinary_names_stay_as_they_are() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    assert folder_names([name]) == {name: name}


def test_a_name_keeps_its_folder_whatever_stands_beside_it_unless_they_collide() -> None:
    assert folder_names(["a", "b"])["a"] == folder_names(["a", "a/b", "zarr.json"])["a"] == "a"
    both = folder_names(["Weight", "weight"])
    assert both == folder_names(["weight", "Weight"])
    assert all("~" in f for f in both.values())
