"""What is removed is what was shown."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ucformat
from ucformat.errors import Conflict
from ucformat.jobs.gc import collect

if TYPE_CHECKING:
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
