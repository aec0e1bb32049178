"""Many rows at once are the rows that one at a time would be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.catalog.manifests import manifest, tensor
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.models import storable_text
from ucformat.catalog.rows import insert_rows
from ucformat.errors import UcformatError

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8) | st.text(
    "\\N\t\r\n. ", max_size=6
)
rows = st.lists(st.tuples(texts, texts, st.none() | texts), min_size=0, max_size=5)


@settings(max_examples=60)
@given(written=rows)
def test_any_text_arrives_as_it_was(database_url: str, written: list[Any]) -> None:
    with Catalog(database_url) as catalog, catalog.database.writing() as c:
        c.exec_driver_sql("delete from tensor")
        c.exec_driver_sql("delete from tensor_set")
        c.exec_driver_sql("insert into tensor_set (id, hash) values (1, 'h')")
        full = [
            (1, i, name, state, "float32", "4", chunk, None, 2**40)
            for i, (name, state, chunk) in enumerate(written)
        ]
        names = (
            "tensor_set_id",
            "position",
            "name",
            "state",
            "dtype",
            "shape",
            "chunk",
            "shard",
            "nbytes",
        )
        insert_rows(c, "tensor", names, full)
        found = c.exec_driver_sql(f"select {', '.join(names)} from tensor order by position").all()  # noqa: S608
        assert [tuple(r) for r in found] == full


def test_names_that_no_database_takes_are_recorded_all_the_same(database_url: str) -> None:
    names = ["a\tb", "a\nb", "a\\b", "\\N", "", "a\0b", "ü\r"]
    with Catalog(database_url) as catalog:
        entry = catalog.record(
            manifest(1, tensors=tuple(tensor(n, content=n) for n in names)), "/data/1"
        )
        found = catalog.tensors(entry.id)
    assert [t.name for t in found] == [storable_text(n) for n in names]
    assert [t.digest for t in found] == [tensor(n, content=n).digest for n in names]


def test_what_the_database_refuses_is_an_error_of_ours(database_url: str) -> None:
    with (
        Catalog(database_url) as catalog,
        pytest.raises(UcformatError, match=r"(?i)unique|primary"),
        catalog.database.writing() as c,
    ):
        insert_rows(
            c, "digest", ("block", "digest", "checkpoint", "position"), [(1, "x", 1, 1)] * 2
        )
