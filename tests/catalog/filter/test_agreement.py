"""Both engines find what plain Python finds, whatever the filter, and in the same order."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from tests.catalog.filter.reference import matches, ordered
from tests.catalog.filter.strategies import SUBJECTS, atoms_of, filters, sorts
from tests.catalog.filter.world import NOW, WORLDS
from ucformat.catalog import search
from ucformat.catalog.filter.compile import compile_filter, compile_sort
from ucformat.catalog.filter.parse import parse
from ucformat.catalog.filter.syntax import unparse
from ucformat.catalog.models import CheckpointRow
from ucformat.catalog.search import NEWEST, find_serials
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from ucformat.catalog.filter.syntax import Node, Sort

seeds = st.sampled_from(list(WORLDS))
EXAMPLES = {"metric": 120, "paths": 60, "found": 300}


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_comparison_is_what_python_says(worlds: dict[int, Connection], name: str) -> None:
    outcomes = Counter[bool]()

    @settings(max_examples=EXAMPLES.get(name, 30))
    @given(atoms_of(SUBJECTS[name]), seeds)
    def check(atom: Node, seed: int) -> None:
        condition = compile_filter(atom, now=NOW).label("found")
        expected = {row.serial: matches(row, atom) for row in WORLDS[seed]}
        said = {
            r.serial: r.found for r in worlds[seed].execute(select(CheckpointRow.serial, condition))
        }
        assert said == expected  # so none of them is NULL
        outcomes.update(expected.values())

    check()
    assert outcomes[True] > 50
    assert outcomes[False] > 50


def test_every_filter_is_what_python_says(worlds: dict[int, Connection]) -> None:
    chosen = Counter[bool]()

    @settings(max_examples=300)
    @given(filters, seeds)
    def check(node: Node, seed: int) -> None:
        expected = {row.serial for row in WORLDS[seed] if matches(row, node)}
        for each in (False, True):
            query = select(CheckpointRow.serial).where(
                compile_filter(parse(unparse(node)), now=NOW, each=each)
            )
            assert set(worlds[seed].scalars(query)) == expected
        chosen[0 < len(expected) < len(WORLDS[seed])] += 1

    check()
    assert chosen[True] > 30, "too many filters take all or nothing"


def test_every_order_is_what_python_says(worlds: dict[int, Connection]) -> None:
    @settings(max_examples=200)
    @given(sorts, seeds)
    def check(sort: Sort, seed: int) -> None:
        query = select(CheckpointRow.serial).order_by(*compile_sort(sort))
        assert list(worlds[seed].scalars(query)) == ordered(WORLDS[seed], sort)

    check()


def test_the_first_of_any_search_are_those_of_all(worlds: dict[int, Connection]) -> None:
    """However many are tested in the order of an index before all that match are looked for."""
    partly = Counter[bool]()

    @settings(max_examples=300)
    @given(
        st.one_of(st.just(""), filters.map(unparse)),
        st.one_of(
            st.sampled_from([NEWEST, "metric.loss", "-metric.loss", "metric.loss,-step"]),
            sorts.map(str),
        ),
        st.integers(0, 6),
        st.integers(0, 3),
        st.sampled_from([(1, 3), (2, 8), (1_000, 20_000)]),
        st.booleans(),
        seeds,
    )
    def check(
        where: str,
        sort: str,
        limit: int,
        offset: int,
        walked: tuple[int, int],
        deleted: bool,
        seed: int,
    ) -> None:
        def found(count: int | None, skipped: int) -> list[int]:
            more: Any = {"sort": sort, "limit": count, "offset": skipped, "deleted": deleted}
            return find_serials(worlds[seed], where, NOW, **more)

        try:
            every = found(None, 0)
        except UsageError:  # no checkpoint has such a metric
            return
        with mock.patch.object(search, "_WALKED", walked):
            assert found(limit, offset) == every[offset : offset + limit]
        partly[limit + offset < len(every)] += 1

    check()
    assert partly[True] > 30
