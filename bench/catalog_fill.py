"""A full catalog for `bench/catalog.py`: many checkpoints of a few runs, each with a digest of every tensor.

The first step of each run is recorded as ever; the later ones are copies of its rows, inserted in
bulk, and their digests are made by the database.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.models import BLOCK, CheckpointRow, Edge, Event, Location, Metric, RunRow, Tag
from ucformat.schema.manifest import Manifest
from ucformat.schema.tensors import TensorDoc, TensorTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sqlalchemy import Connection

    from ucformat.catalog.catalog import Catalog

__all__ = ["LRS", "Made", "Plan", "fill", "made", "manifest", "own_row"]

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
LRS = (1e-4, 3e-4, 1e-3, 3e-3)
STATES = ("weight", "master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Plan:
    """How much there is to be: checkpoints of so many tensors each, of runs that take turns, and of virtual ones.

    One of a thousand is deleted.
    """

    checkpoints: int = 10_000
    tensors: int = 1_000
    runs: int = 20
    virtual: int = 0


@dataclass(frozen=True)
class Made:
    """What is said of one checkpoint, here and in MLflow."""

    number: int
    run: int
    step: int
    created: datetime
    config: Mapping[str, Any]
    metrics: Mapping[str, float]
    tags: tuple[str, ...]

    @property
    def name(self) -> str:
        """How people call it."""
        return f"run{self.run:02}@{self.step}"


def made(plan: Plan) -> Iterator[Made]:
    """All checkpoints, the oldest first."""
    for i in range(plan.checkpoints):
        turn, run = divmod(i, plan.runs)
        loss = 1.5 + 2.5 * math.exp(-4 * i / plan.checkpoints) + 0.05 * math.sin(i)
        metrics = {
            "val_loss": loss,
            "train_loss": loss - 0.1,
            "accuracy": 1 / loss,
            "grad_norm": 1 + math.cos(i),
            "tokens": 1e6 * turn,
        }
        tags = (*(("good",) if i % 7 == 0 else ()), *(("release",) if i % 101 == 0 else ()))
        yield Made(i, run, 100 * turn, BEGIN + timedelta(minutes=i), _config(run), metrics, tags)


def _config(run: int) -> dict[str, Any]:
    return {
        "optimizer": {
            "name": "adamw",
            "lr": LRS[run % len(LRS)],
            "beta1": 0.9,
            "beta2": 0.95,
            "weight_decay": 0.1,
        },
        "model": {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 128256, "dtype": "bfloat16"},
        "data": {"name": "web", "tokens": 10**12, "length": 8192, "shuffle": run},
        "train": {
            "batch": 1024,
            "micro": 4,
            "steps": 50_000,
            "warmup": 2000,
            "clip": 1.0,
            "seed": run,
        },
    }


def manifest(one: Made, tensors: int, structure: int | str) -> Manifest:
    """The manifest of a checkpoint with so many tensors, named by the structure that they are of."""
    docs = TensorTable.of(
        TensorDoc(
            name=f"model.{structure}.layers.{i // 36}.part{i // 4 % 9}.weight",
            state=STATES[i % 4],
            dtype="bfloat16" if i % 4 == 0 else "float32",
            shape=(4096, 1024),
            chunk=(512, 1024),
            shard=(4096, 1024),
            digest=f"xxh3:{uuid.uuid4().hex}",
        )
        for i in range(tensors)
    )
    return Manifest(
        id=uuid.uuid4().hex,
        attempt=uuid.uuid4().hex[:20],
        created=one.created,
        producer={"engine.name": "deepspeed", "engine.version": "0.19.8"},
        run=f"run{one.run:02}",
        step=one.step,
        config=dict(one.config),
        metrics=dict(one.metrics),
        layout={"mesh": {"dp": 64, "tp": 8}},
        tensors=docs,
    )


def fill(catalog: Catalog, plan: Plan) -> None:
    """Fill an empty catalog."""
    everything = list(made(plan))
    first = everything[: plan.runs]
    for one in first:
        catalog.record(manifest(one, plan.tensors, one.run % 4), _place(one))
    later = everything[plan.runs :]
    with catalog.database.writing() as c:
        _copy(c, plan, later)
        _say(c, plan, everything)
    for at in range(plan.runs, plan.checkpoints, per := max(1, BLOCK // plan.tensors)):
        with catalog.database.writing() as c:
            _digests(c, plan, range(at, min(at + per, plan.checkpoints)))
    with catalog.database.writing() as c:
        _virtual(c, plan, everything)
        c.execute(
            sa.update(CheckpointRow)
            .where(CheckpointRow.serial % 1000 == 501)
            .values(state="deleted", deleted=BEGIN)
        )
    if not catalog.database.sqlite:
        with catalog.database.writing() as c:
            _settle(c)


def own_row(row: Mapping[Any, Any]) -> dict[str, Any]:
    """The row of a checkpoint, without what the database computes."""
    columns = CheckpointRow.__table__.columns
    return {k: v for k, v in row.items() if k in columns and columns[k].computed is None}


def _place(one: Made) -> str:
    return f"/checkpoints/run{one.run:02}/step{one.step}"


def _copy(c: Connection, plan: Plan, later: list[Made]) -> None:
    """The rows of checkpoints, as those of the first step of their run; `serial` is one more than the number."""
    rows = (
        c.execute(
            sa.select(CheckpointRow.__table__, RunRow.name)
            .join(RunRow)
            .order_by(CheckpointRow.serial)
        )
        .mappings()
        .all()
    )
    assert [r["serial"] for r in rows] == list(range(1, plan.runs + 1))
    of_run = [own_row(r) for r in rows]
    block, per = of_run[-1]["digest_block"], max(1, BLOCK // plan.tensors)
    c.execute(
        sa.insert(CheckpointRow),
        [
            of_run[m.run]
            | {
                "serial": m.number + 1,
                "id": uuid.uuid4().hex,
                "step": m.step,
                "created": m.created,
                "recorded": m.created,
                "digest_block": block + 1 + k // per,
            }
            for k, m in enumerate(later)
        ],
    )


def _say(c: Connection, plan: Plan, everything: list[Made]) -> None:
    """What else is known of them: the first step of each run is recorded, and has its places, metrics and event."""
    later, who = everything[plan.runs :], "bench@bench"
    ids = dict(c.execute(sa.select(CheckpointRow.serial, CheckpointRow.id)).all())
    c.execute(
        sa.insert(Metric),
        [
            {"checkpoint": m.number + 1, "name": name, "value": value, "measured": m.created}
            for m in later
            for name, value in m.metrics.items()
        ],
    )
    c.execute(
        sa.insert(Tag),
        [
            {"checkpoint": m.number + 1, "name": t, "created": m.created, "who": who}
            for m in everything
            for t in m.tags
        ],
    )
    c.execute(
        sa.insert(Location),
        [{"checkpoint": m.number + 1, "url": _place(m), "seen": m.created} for m in later],
    )
    c.execute(
        sa.insert(Event),
        [
            {
                "at": m.created,
                "who": who,
                "action": "record",
                "checkpoint": m.number + 1,
                "detail": {"url": _place(m)},
            }
            for m in later
        ],
    )
    c.execute(
        sa.insert(Edge), [_edge(everything, plan, m, ids) for m in everything if m.step or m.run]
    )


def _edge(everything: list[Made], plan: Plan, one: Made, ids: Mapping[int, str]) -> dict[str, Any]:
    """From a step to the one before it, and from the first step of a run to the last of the run before."""
    if one.step:
        parent = everything[one.number - plan.runs]
    else:
        parent = max(
            (m for m in everything[-plan.runs :] if m.run == one.run - 1), key=lambda m: m.step
        )
    return {
        "child": one.number + 1,
        "parent": parent.number + 1,
        "parent_id": ids[parent.number + 1],
        "parent_url": _place(parent),
        "kind": "resume" if one.step else "finetune",
        "depends": False,
    }


def _virtual(c: Connection, plan: Plan, everything: list[Made]) -> None:
    """Checkpoints without a run whose bytes lie in the files of others."""
    like = own_row(
        c.execute(sa.select(CheckpointRow.__table__).where(CheckpointRow.serial == 1))
        .mappings()
        .one()
    )
    of = [
        (plan.checkpoints + 1 + n, everything[n * 97 % plan.checkpoints])
        for n in range(plan.virtual)
    ]
    if not of:
        return
    own = like | {"run_id": None, "step": None}
    c.execute(
        sa.insert(CheckpointRow),
        [own | {"serial": s, "id": uuid.uuid4().hex, "created": m.created} for s, m in of],
    )
    c.execute(
        sa.insert(Location),
        [{"checkpoint": s, "url": f"/virtual/{s}", "seen": m.created} for s, m in of],
    )
    edge = {"parent_id": None, "kind": "convert", "depends": True}
    edges = [edge | {"child": s, "parent": m.number + 1, "parent_url": _place(m)} for s, m in of]
    c.execute(sa.insert(Edge), edges)


def _digests(c: Connection, plan: Plan, numbers: range) -> None:
    """Of these checkpoints; the first tensor of a run never changes, all others do with every step."""
    positions = "with recursive p (value) as (select 0 union all select value + 1 from p where value + 1 < :tensors)"
    frozen, fresh = "printf('xxh3:%032x', k.run_id)", "'xxh3:' || lower(hex(randomblob(16)))"
    if c.dialect.name == "postgresql":
        frozen = "'xxh3:' || lpad(to_hex(k.run_id), 32, '0')"
        fresh = "'xxh3:' || replace(gen_random_uuid()::text, '-', '')"
    c.execute(
        sa.text(
            f"insert into digest (block, digest, checkpoint, position) {positions} select k.digest_block,"  # noqa: S608
            f" case when p.value = 0 then {frozen} else {fresh} end, k.serial, p.value"
            f" from checkpoint k, p where k.serial between :first and :last order by 1, 2"
        ),
        {"tensors": plan.tensors, "first": numbers.start + 1, "last": numbers.stop},
    )


def _settle(c: Connection) -> None:
    """What PostgreSQL would have done on the way: numbers go on after those that are taken, and tables are analyzed."""
    for table, column in (
        ("checkpoint", "serial"),
        ("edge", "id"),
        ("location", "id"),
        ("event", "id"),
    ):
        c.execute(
            sa.text(
                f"select setval(pg_get_serial_sequence('{table}', '{column}'), (select max({column}) from {table}))"  # noqa: S608
            )
        )
    c.execute(sa.text("analyze"))
