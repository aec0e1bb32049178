"""What must hold of a catalog after many worked on it at once, whoever was killed."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from tests.catalog.stress import POSTS, made, post, shared
from ucformat.catalog.models import (
    AliasRow,
    CheckpointRow,
    Config,
    Digest,
    Edge,
    Event,
    Hold,
    Location,
    Metric,
    RunRow,
    Tag,
    TensorRow,
    TensorSet,
    canonical_hash,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from sqlalchemy import Connection

    from ucformat.catalog.catalog import Catalog

__all__ = ["Notes", "check"]


class Notes:
    """What the workers noted: what was said to be done, and what a worker that was killed may have done."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.did: list[dict[str, Any]] = []
        self.open: list[dict[str, Any]] = []
        self.due: list[dict[str, Any]] = []
        self.errors: list[str] = []
        for file in files:
            tried = None
            for line in map(json.loads, file.read_text().splitlines()):
                match line["what"]:
                    case "try":
                        tried = line
                    case "error":
                        self.errors.append(line["text"])
                    case what:
                        tried = None
                        (self.did if what == "did" else self.due).append(line)
            if tried is not None:
                self.open.append(tried)

    def done(self, do: str) -> list[dict[str, Any]]:
        """What was said to be done."""
        return [n for n in self.did if n["do"] == do]

    def maybe(self, do: str) -> list[dict[str, Any]]:
        """What may have been done, or not."""
        return [n for n in self.open if n["do"] == do]


def check(catalog: Catalog, notes: Notes) -> None:
    """Everything that must hold."""
    assert not notes.errors, f"{len(notes.errors)} errors, the first:\n{notes.errors[0]}"
    with catalog.database.reading() as c:
        _no_duplicates(c)
        _whole(c)
        _names_protect(c)
        _said(c, notes)
    _records(catalog, notes)
    for name in ("counter", "best", "good"):
        _moves(catalog, notes, name)
    _counted(catalog)
    _chain(catalog, "any")


def _no_duplicates(c: Connection) -> None:
    unique: list[tuple[Any, ...]] = [
        (RunRow.name,),
        (Config.hash,),
        (TensorSet.hash,),
        (CheckpointRow.id,),
        (Location.url,),
        (AliasRow.name,),
        (Tag.checkpoint, Tag.name),
        (Metric.checkpoint, Metric.name),
        (Edge.child, Edge.kind, Edge.parent_url),
    ]
    for columns in unique:
        query = sa.select(*columns).group_by(*columns).having(sa.func.count() > 1)
        assert c.execute(query).all() == [], columns
    recorded = (
        sa.select(Event.checkpoint).where(Event.action == "record").group_by(Event.checkpoint)
    )
    assert c.execute(recorded.having(sa.func.count() != 1)).all() == []
    assert c.scalar(sa.select(sa.func.count()).select_from(recorded.subquery())) == _number(
        c, CheckpointRow
    )


def _number(c: Connection, table: Any) -> int:
    return c.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()


def _whole(c: Connection) -> None:
    """No row without the rows that belong to it."""
    for r in c.execute(sa.select(Config.hash, Config.document)):
        assert r.hash == canonical_hash(r.document)
    sizes = dict(
        c.execute(
            sa.select(TensorRow.tensor_set_id, sa.func.count()).group_by(TensorRow.tensor_set_id)
        ).all()
    )
    digests = dict(
        c.execute(sa.select(Digest.checkpoint, sa.func.count()).group_by(Digest.checkpoint)).all()
    )
    for r in c.execute(
        sa.select(CheckpointRow.serial, CheckpointRow.tensor_set_id, CheckpointRow.tensors)
    ):
        assert sizes[r.tensor_set_id] == digests[r.serial] == r.tensors
    parent = CheckpointRow.__table__.alias()
    loose = sa.select(Edge.id, parent.c.serial).join(parent, parent.c.id == Edge.parent_id)
    assert c.execute(loose.where(Edge.parent.is_distinct_from(parent.c.serial))).all() == []


def _names_protect(c: Connection) -> None:
    """Nothing is deleted that has an alias, a tag or a hold."""
    gone = sa.select(CheckpointRow.serial).where(CheckpointRow.state != "committed")
    for table, *where in ((AliasRow,), (Tag,), (Hold, Hold.released.is_(None))):
        assert (
            c.execute(sa.select(table.checkpoint).where(table.checkpoint.in_(gone), *where)).all()
            == []
        ), table


def _said(c: Connection, notes: Notes) -> None:
    """Tags, metrics, holds and places that were acknowledged are there, with the last value that was."""
    ids = dict(c.execute(sa.select(CheckpointRow.serial, CheckpointRow.id)).all())
    tags = {(ids[r.checkpoint], r.name) for r in c.execute(sa.select(Tag.checkpoint, Tag.name))}
    assert {(n["id"], n["name"]) for n in notes.done("tag")} <= tags

    metrics = {(ids[r.checkpoint], r.name): r.value for r in c.execute(sa.select(Metric.__table__))}
    last = {(n["id"], n["name"]): n["value"] for n in notes.done("metric")}
    maybe = {(n["id"], n["name"]): n["value"] for n in notes.maybe("metric")}
    for key, value in last.items():
        assert metrics[key] in (value, maybe.get(key, value)), key

    holds = {r.id: (ids[r.checkpoint], r.released) for r in c.execute(sa.select(Hold.__table__))}
    released = {n["hold"] for n in notes.done("release")}
    open_ = {n["hold"] for n in notes.maybe("release")}
    made_ = notes.done("hold")
    assert len({n["number"] for n in made_}) == len(made_)
    for n in made_:
        id_, when = holds[n["number"]]
        assert id_ == n["id"]
        assert n["number"] in open_ or (when is not None) == (n["number"] in released)
    assert 0 <= len(holds) - len(made_) <= len(notes.maybe("hold"))

    urls = {
        r.url: ids[r.checkpoint] for r in c.execute(sa.select(Location.url, Location.checkpoint))
    }
    for n in notes.done("record"):
        assert urls[n["url"]] == n["id"], n


def _records(catalog: Catalog, notes: Notes) -> None:
    """What was acknowledged to be recorded is there, just as its manifest says."""
    known = {e.id: e for e in catalog.find(deleted=True)}
    done = {n["id"]: n["of"] for n in notes.done("record")}
    maybe = {n["id"] for n in notes.maybe("record")}
    assert set(done) <= set(known) <= set(done) | maybe | {post(i).id for i in range(POSTS)}
    for id_, (worker, number) in done.items():
        manifest, found = shared(number) if worker == "shared" else made(worker, number), known[id_]
        assert (found.run, found.step, found.config) == (
            manifest.run,
            manifest.step,
            manifest.config,
        )
        assert manifest.metrics.items() <= found.metrics.items()
        told = [(t.name, t.digest) for t in manifest.tensors]
        assert [(t.name, t.digest) for t in catalog.tensors(id_)] == told


def _chain(catalog: Catalog, name: str) -> list[tuple[str | None, str | None]]:
    """The moves of an alias: numbered without a gap, each from where the one before it led, the last to where it is."""
    history = catalog.alias_history(name)
    assert [m.version for m in history] == list(range(1, len(history) + 1))
    sources = [None, *(m.target for m in history[:-1])]
    assert [m.source for m in history] == sources
    now = next((a for a in catalog.aliases() if a.name == name), None)
    last = history[-1].target if history else None
    assert (now.id if now else None) == last
    assert now is None or now.version == len(history)
    return [(m.source, m.target) for m in history]


def _moves(catalog: Catalog, notes: Notes, name: str) -> None:
    """Each move that was acknowledged is in the history exactly once, and nothing else is but what was open."""
    history = Counter(_chain(catalog, name))
    done = Counter((n["source"], n["target"]) for n in notes.done("move") if n["name"] == name)
    maybe = Counter((n["source"], n["target"]) for n in notes.maybe("move") if n["name"] == name)
    assert not done - history, "a move was lost"
    assert not history - done - maybe, "a move was made that nobody knows of"


def _counted(catalog: Catalog) -> None:
    """`counter` went from post to post, and left none out."""
    targets = [m.target for m in catalog.alias_history("counter")]
    assert targets == [post(i % POSTS).id for i in range(len(targets))]
    assert targets
