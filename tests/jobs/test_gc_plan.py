"""What is removed is what was shown."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ucformat
from ucformat.errors import Conflict
from ucformat.jobs import gc
from ucformat.jobs.gc import collect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.jobs.conftest import Recorded
    from ucformat.catalog.catalog import Catalog


def test_nothing_is_removed_if_more_was_deleted_since(catalog: Catalog, recorded: Recorded) -> None:
    first, second = recorded(1), recorded(2)
    catalog.delete(first.id, grace=timedelta(0))
    shown = collect(catalog).plan
    catalog.delete(second.id, grace=timedelta(0))

    with pytest.raises(Conflict, match="has changed"):
        collect(catalog, apply=True, expect=shown.id)

    for entry in (first, second):
        assert ucformat.open(str(entry.url))
    found = collect(catalog, apply=True, expect=collect(catalog).plan.id)
    assert set(found.purged) == {first.id, second.id}
    assert not any(Path(str(e.url)).exists() for e in (first, second))


def test_what_is_deleted_meanwhile_is_for_the_next_time(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has looked at the plan that it is in, nor asked others of it."""
    one, two = recorded(1), recorded(2)
    catalog.delete(one.id, grace=timedelta(0))
    real = gc.consult

    def consult(asked: Catalog, ids: Sequence[str]) -> dict[str, str]:
        catalog.delete(two.id, grace=timedelta(0))
        return real(asked, ids)

    monkeypatch.setattr(gc, "consult", consult)
    assert collect(catalog, apply=True, expect=collect(catalog).plan.id).purged == (one.id,)
    monkeypatch.undo()
    assert collect(catalog, apply=True).purged == (two.id,)
