"""Many processes speak of real checkpoints at once: what lies beside them agrees with the catalog in the end."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

import ucformat
from tests.catalog.stress import PROCESSES
from tests.patience import PATIENCE
from tests.zero_files import FLAT, write_zero3
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.document import compose, stale
from ucformat.jobs.documents import read_document, write_documents
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.catalog.entries import Entry
    from ucformat.schema.documents import CatalogDoc

WORKERS = 4
MOVES = 30


def test_documents_agree_with_the_catalog_in_the_end(database_url: str, tmp_path: Path) -> None:
    places = [str(_checkpoint(tmp_path, step)) for step in range(3)]
    with Catalog(database_url) as catalog:
        ids = [catalog.record(ucformat.open(p).manifest, p).id for p in places]
    workers = [PROCESSES.Process(target=_work, args=(database_url, ids, n)) for n in range(WORKERS)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(PATIENCE)
    assert [w.exitcode for w in workers] == [0] * WORKERS

    with Catalog(database_url) as catalog:
        write_documents(catalog, None)
        with catalog.database.reading() as c:
            assert stale(c, None) == []
        moves = {name: catalog.alias_history(name) for name in ("best", "last")}
        assert all(moves.values())
        entries = [catalog.get(i) for i in ids]
        documents = [_document(catalog, e) for e in entries]
    for entry, doc in zip(entries, documents, strict=True):
        assert {t.name for t in doc.tags} == set(entry.tags) == {f"tag{n}" for n in range(WORKERS)}
        assert {a.name for a in doc.aliases} == set(entry.aliases)
        assert {n: m.value for n, m in doc.metrics.items()} == entry.metrics
        assert {f"loss{n}" for n in range(WORKERS)} <= set(entry.metrics)
    assert sorted(a.name for doc in documents for a in doc.aliases) == ["best", "last"]

    with Catalog(str(tmp_path / "again.db")) as again:  # from storage alone
        for place, doc in zip(places, documents, strict=True):
            again.record(ucformat.open(place).manifest, place)
            again.import_document(doc.id, doc, place)
        found = [again.get(i) for i in ids]
    assert [(e.tags, e.aliases, e.metrics) for e in found] == [
        (e.tags, e.aliases, e.metrics) for e in entries
    ]


def _checkpoint(folder: Path, step: int) -> Path:
    arrays = {("w", state): np.full((4, 3), step, np.float32) for state in FLAT}
    source = write_zero3(folder / f"zero{step}", arrays, ranks=2, step=step)
    ucformat.convert(source, folder / f"universal{step}")
    return folder / f"universal{step}"


def _document(catalog: Catalog, entry: Entry) -> CatalogDoc:
    """The document beside a checkpoint, which says what the catalog says."""
    found = read_document(open_store(str(entry.url)))
    with catalog.database.reading() as c:
        serial = next(s for s in range(1, 10) if compose(c, s).id == entry.id)
        assert found == compose(c, serial)
    assert found is not None
    return found


def _work(url: str, ids: list[str], number: int) -> None:
    rng = random.Random(number)
    with Catalog(url) as catalog:
        for i in range(MOVES):
            catalog.alias(rng.choice(["best", "last"]), rng.choice(ids))
            if i < len(ids):
                catalog.tag(ids[i], f"tag{number}")
            catalog.metric(ids[i % len(ids)], {f"loss{number}": rng.random()})
