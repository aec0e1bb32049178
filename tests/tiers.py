"""The two tiers of the tests: `make test` runs the first, `make test-all` all.

A test marked `matrix` is of the second tier. Of the cases of a test marked `front`, those with one
of its ids (patterns as of file names) are of the first, the others of the second::

    @pytest.mark.front("2-*", "4-packed")
    @pytest.mark.parametrize("form", ["zarr", "packed"])
    @pytest.mark.parametrize("ranks", [2, 4, 8])
    def test_a_save(ranks: int, form: str) -> None: ...

What needs a PostgreSQL is of the second tier without being told.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["rounds", "set_tiers"]


def set_tiers(cases: Sequence[pytest.Item]) -> None:
    """Mark the cases of one test that are of the second tier.

    Raises:
        pytest.UsageError: one of the ids of the mark `front` is that of no case
    """
    ids = {item: _id(item) for item in cases}
    for item in cases:
        for mark in item.iter_markers("front"):
            stale = [p for p in mark.args if not any(fnmatchcase(i, p) for i in ids.values())]
            if stale:
                message = f"{item.nodeid}: no case has the id {stale[0]!r} of its mark `front`"
                raise pytest.UsageError(message)
            if not any(fnmatchcase(ids[item], pattern) for pattern in mark.args):
                item.add_marker("matrix")
        if "postgres_server" in getattr(item, "fixturenames", ()):
            item.add_marker("matrix")


def rounds(few: int, many: int) -> int:
    """How often to try what is left to chance: `few` times in `make test`, `many` in `make test-all`."""
    return few if settings().derandomize else many


def _id(item: pytest.Item) -> str:
    return (
        item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
    )
