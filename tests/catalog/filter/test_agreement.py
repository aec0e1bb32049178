"""Both engines find what plain Python finds, whatever the filter, and in the same order."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from tests.catalog.filter.reference import matches, ordered
from tests.catalog.filter.strategies import SUBJECTS, atoms_of, filters, sorts
from tests.catalog.filter.world import NOW, WORLDS
from ucformat.catalog.filter import compile_filter, compile_sort, parse, unparse
from ucformat.catalog.models import Checkpoint

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from ucformat.catalog.filter import Node, Sort

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
        said = {r.serial: r.found for r in worlds[seed].execute(select(Checkpoint.serial, condition))}
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
        query = select(Checkpoint.serial).where(compile_filter(parse(unparse(node)), now=NOW))
        assert set(worlds[seed].scalars(query)) == expected
        chosen[0 < len(expected) < len(WORLDS[seed])] += 1

    check()
    assert chosen[True] > 30, "too many filters take all or nothing"


def test_every_order_is_what_python_says(worlds: dict[int, Connection]) -> None:
    @settings(max_examples=200)
    @given(sorts, seeds)
    def check(sort: Sort, seed: int) -> None:
        query = select(Checkpoint.serial).order_by(*compile_sort(sort))
        assert list(worlds[seed].scalars(query)) == ordered(WORLDS[seed], sort)

    check()
