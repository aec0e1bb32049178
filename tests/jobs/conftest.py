"""Small checkpoints, a catalog, and what lies beside them."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.catalog.conftest import (  # noqa: F401 - fixtures
    Clock,
    clock,
    database_url,
    engine_name,
    postgres_server,
    sqlite_catalog,
)
from tests.fakes import FakeSource, random_array
from tests.zero_files import FLAT, write_zero3
from ucformat.catalog.catalog import Catalog
from ucformat.checkpoint import Checkpoint
from ucformat.jobs.documents import read_document
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ucformat.catalog.entries import Entry
    from ucformat.schema.documents import CatalogDoc

    Recorded = Callable[..., Entry]


def universal(
    place: Path | str, step: int = 0, content: int | None = None, **more: Any
) -> Checkpoint:
    """A committed checkpoint of two tensors, which no catalog knows."""
    seed = step if content is None else content
    arrays = {
        ("w", "weight"): random_array((5, 7), "float32", seed),
        ("b", "weight"): random_array((3,), "int64", seed),
    }
    source = Checkpoint(
        FakeSource.write(MemoryStore(f"source-{uuid.uuid4().hex}"), arrays, step=step)
    )
    return ucformat.convert(source, str(place), chunk_bytes=64, **more)


def foreign(run: Path, step: int = 5, content: int = 0, ranks: int = 2) -> Path:
    """The tag folder of a DeepSpeed checkpoint of two tensors."""
    arrays = {
        (n, s): random_array((4, 6), "float32", content + i)
        for n in "ab"
        for i, s in enumerate(FLAT)
    }
    return write_zero3(run, arrays, ranks, step) / f"global_step{step}"


def document(place: Path | str | None) -> CatalogDoc:
    """What lies beside a checkpoint."""
    assert place is not None
    found = read_document(open_store(place))
    assert found is not None
    return found


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    """An empty catalog."""
    with Catalog(str(tmp_path / "ours.db")) as opened:
        yield opened


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Catalog]:
    """The empty catalog of another team."""
    with Catalog(str(tmp_path / "theirs.db")) as opened:
        yield opened


@pytest.fixture
def recorded(catalog: Catalog, tmp_path: Path) -> Recorded:
    """Commit and record a checkpoint `run7/<step>`."""

    def make(step: int = 1, place: Path | str | None = None, run: str = "run7") -> Entry:
        ck = universal(place or tmp_path / run / str(step), step)
        return catalog.record(ck.manifest, ck.url, run=None if run == "run7" else run)

    return make
