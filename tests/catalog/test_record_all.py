"""Recording many checkpoints at once leaves what recording one after the other leaves."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from tests.catalog.manifests import made_from, manifest
from tests.catalog.test_dependents import statements
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.models import CheckpointRow, Digest, Edge, Form, Location
from ucformat.catalog.recording import Found
from ucformat.errors import Conflict

if TYPE_CHECKING:
    from pathlib import Path


def state(catalog: Catalog) -> dict[str, Any]:
    """What a catalog has, without serials and times of recording."""
    with catalog.database.reading() as c:
        ids: dict[int | None, str | None] = dict(
            c.execute(sa.select(CheckpointRow.serial, CheckpointRow.id)).all()
        )
        ids[None] = None
        edges = c.execute(
            sa.select(
                Edge.child, Edge.parent, Edge.parent_id, Edge.parent_url, Edge.kind, Edge.depends
            )
        )
        places = c.execute(
            sa.select(Location.checkpoint, Location.url, Location.listing, Location.spared)
        )
        forms = c.execute(sa.select(Form.checkpoint, Form.manifest))
        digests = c.execute(sa.select(Digest.checkpoint, Digest.position, Digest.digest))
        return {
            "edges": sorted(str((ids[e.child], ids[e.parent], *e[2:])) for e in edges),
            "places": sorted(str((ids[p.checkpoint], *p[1:])) for p in places),
            "forms": sorted((ids[f.checkpoint], f.manifest) for f in forms),
            "digests": sorted((ids[d.checkpoint], *d[1:]) for d in digests),
            "events": Counter(
                (e.id, e.action, str(e.detail)) for e in catalog.events(limit=10_000)
            ),
            "entries": {
                e.id: (
                    e.kind,
                    e.state,
                    e.run,
                    e.step,
                    e.metrics,
                    e.config,
                    e.tensors,
                    e.nbytes,
                    e.files,
                )
                for e in catalog.find(deleted=True)
            },
        }


def scenario(seed: int) -> list[Found]:
    """Checkpoints, some of which come again, at places of which some are the same, made from one another."""
    pick = random.Random(seed)
    docs: list[Any] = []
    for number in range(12):
        metrics = {"loss": float(number)} if pick.random() < 0.5 else {}
        doc = manifest(number, step=number, metrics=metrics, config={"lr": pick.choice([0.1, 0.2])})
        parents = [p for p in docs if pick.random() < 0.2]
        lineage = tuple(
            edge for p in parents for edge in made_from(p, "resume", f"/data/run7/{p.step}")
        )
        docs.append(doc.model_copy(update={"lineage": lineage}))
    pick.shuffle(docs)
    found = []
    for doc in docs:
        kind: dict[str, Any] = {} if doc.step % 3 else {"kind": "deepspeed", "files": (2, 100)}
        for place in pick.sample(
            [f"/data/run7/{doc.step}", "/data/run7/1", "/data/copy/2", "/data/copy/3"], 2
        ):
            run = pick.choice([None, None, "given"])
            found.append(Found(doc, place, run=run, listing=pick.choice([None, "x"]), **kind))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_at_once_or_one_by_one(catalog: Catalog, tmp_path: Path, seed: int) -> None:
    found = scenario(seed)
    with Catalog(f"sqlite:///{tmp_path}/one-by-one.db") as other:
        for one in found:
            other.record_all([one])
        for at in range(0, len(found), size := 1 + seed * 3):
            catalog.record_all(found[at : at + size])
        assert state(catalog) == state(other)


def test_all_or_none(catalog: Catalog) -> None:
    first, second = manifest(1), manifest(2)
    with pytest.raises(Conflict, match="another checkpoint"):
        catalog.record_all(
            [
                Found(first, "/data/1"),
                Found(second, "/data/2"),
                Found(second.model_copy(update={"step": 9}), "/data/3"),
            ]
        )
    assert catalog.empty
    assert not catalog.events()


def test_the_number_of_statements_does_not_grow_with_the_checkpoints(catalog: Catalog) -> None:
    counts = []
    for numbers in (range(3), range(10, 60)):
        with statements(catalog) as seen:
            catalog.record_all([Found(manifest(n, step=n), f"/data/run7/{n}") for n in numbers])
        counts.append(len(seen))
    assert counts[1] <= counts[0]
