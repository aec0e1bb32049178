"""Checkpoints at random, as plain Python and as rows of a database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert

from ucformat.catalog.entries import KEYS, Kind
from ucformat.catalog.models import (
    AliasRow,
    Base,
    CheckpointRow,
    Config,
    Digest,
    Hold,
    Location,
    Metric,
    Note,
    RunRow,
    Tag,
    TensorRow,
    TensorSet,
    Verification,
)

if TYPE_CHECKING:
    from sqlalchemy import Engine, Insert

NOW = datetime(2026, 11, 8, 12, tzinfo=UTC)

#: Where collations, LIKE, quoting and JSON differ between the engines, or could.
TEXTS = [
    "", "a", "A", "b", "good", "Good", "GOOD", "a'b", 'a"b', "a\\b", "a%b", "a_b", "a*b", "a?b", "[a]", "a]b", "a\nb",
    " a", "a-b", "ab", "Z", "é", "e\u0301", "É", "ä", "ß", "ss", "İ", "日本", "\uff5e", "😀", "😀a", "--", ";", "1",
    "1.0", "0", "true", "null", "{}", "%", "_", "\\", "4096,1024", "1024", "%s", ":x", "a b",
]  # fmt: skip
INTEGERS = [0, 1, 2, -1, 7, 1000, 2**31, 2**53 - 1, 2**53, 2**53 + 1, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [
    0.0,
    1.0,
    2.0,
    -1.0,
    0.5,
    1e-4,
    3e-4,
    0.1,
    0.1 + 0.2,
    0.3,
    2.1,
    2.0**53,
    1e15,
    1e-300,
    5e-324,
    1e300,
    -7.25,
]
BIG = [2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**20, 1e20, 1e19, 10**300]
NAMES = [
    "lr", "a", "b", "a.b", "c", "0", "1", "01", "-1", "", "é", "日本", "😀", 'q"q', "q'q", "b\\b", "a b", "$", "#", "*",
    "[0]", "%s", ":x", "?",
]  # fmt: skip
METRICS = ["loss", "val_loss", "val/loss", "a.b", 'q"q', "é", "0"]
#: Values of columns that have no rule of their own.
ANY: dict[Kind | None, list[Any]] = {Kind.TEXT: TEXTS, Kind.INTEGER: INTEGERS}
TIMES = [NOW + timedelta(hours=h) for h in (-1000, -168, -36, -24, -1, 0, 1, 24)] + [
    NOW - timedelta(microseconds=1)
]


@dataclass(frozen=True)
class Structure:
    """The tensors that some checkpoints have in common."""

    serial: int
    tensors: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Row:
    """A checkpoint, and all that filters can ask of it."""

    serial: int
    scalars: dict[str, Any]
    config: int | None
    structure: Structure
    documents: dict[str, Any]
    tag: list[str]
    alias: list[str]
    url: list[str]
    note: list[str]
    metrics: dict[str, float | None]
    holds: list[tuple[datetime | None, datetime | None]]
    verifications: list[tuple[datetime, bool]]
    digests: list[str]


def random_document(random: Random, depth: int = 0) -> dict[str, Any]:
    """An object as configurations are, with names and values that are easily taken for others."""
    names = random.sample(NAMES, random.randint(0 if depth else 3, 7))
    return {name: _value(random, depth) for name in names}


def _value(random: Random, depth: int) -> Any:
    what = random.randrange(10)
    if depth < 2 and what < 3:
        return random_document(random, depth + 1)
    if depth < 3 and what == 3:
        return [_value(random, depth + 1) for _ in range(random.randint(0, 3))]
    if what == 4:
        return random.uniform(-3, 3) * 10 ** random.randint(-8, 4)
    return random.choice([*TEXTS, *INTEGERS, *FLOATS, *BIG, *[None, True, False] * 5])


def random_rows(random: Random, count: int) -> list[Row]:
    """Checkpoints that agree in many things, and miss many."""

    def some(values: list[Any], most: int) -> list[Any]:
        return random.sample(values, random.choice([0, 0, *range(1, most + 1)]))

    def maybe(value: Any) -> Any:
        return None if random.random() < 0.25 else value

    structures = [
        Structure(i, tuple(_tensor(random) for _ in range(random.randint(0, 4))))
        for i in range(1, 6)
    ]
    configs = [random_document(random) for _ in range(8)]
    urls = [f"/place{i}/{text}" for i in range(5) for text in TEXTS]
    aliases = [f"{text}{i}" for i in range(3) for text in TEXTS]
    for texts in (urls, aliases):
        random.shuffle(texts)
    rows = []
    for serial in range(1, count + 1):
        structure = random.choice(structures)
        config = maybe(random.randrange(len(configs)))
        created = random.choice(TIMES)
        scalars = {
            "id": f"{random.choice(TEXTS)}{serial}",
            "kind": random.choice(["ucformat", "deepspeed"]),
            "state": random.choice(["committed", "deleted", "purged"]),
            "run": maybe(random.choice(TEXTS)),
            "step": maybe(random.choice(INTEGERS)),
            "created": created,
            "age": NOW - created,
            "recorded": random.choice(TIMES),
            "deleted": maybe(random.choice(TIMES)),
            "size": random.choice([0, 1, 1000, 1024, 10**9, 2**53 + 1, 2**62]),
            "tensors": len(structure.tensors),
            "format_version": maybe(1),
            "engine": maybe(random.choice(TEXTS)),
        }
        for key in KEYS:
            if key.place[0] == "checkpoint" and key.kind in ANY:
                scalars.setdefault(key.name, maybe(random.choice(ANY[key.kind])))
        rows.append(
            Row(
                serial,
                scalars,
                config,
                structure,
                {
                    "config": {} if config is None else configs[config],
                    "topology": random_document(random),
                    "producer": random_document(random),
                },
                tag=some(TEXTS, 4),
                alias=[aliases.pop() for _ in range(random.choice([0, 0, 1, 2]))],
                url=[urls.pop() for _ in range(random.choice([0, 1, 2]))],
                note=some(TEXTS, 2),
                metrics={
                    name: maybe(
                        random.choice([*FLOATS, float("inf"), float("-inf"), random.uniform(0, 4)])
                    )
                    for name in some(METRICS, 4)
                },
                holds=[
                    (random.choice([None, *TIMES]), maybe(NOW))
                    for _ in range(random.choice([0, 0, 1, 2]))
                ],
                verifications=[
                    (random.choice(TIMES[:3]), random.random() < 0.5)
                    for _ in range(random.choice([0, 1, 2, 4]))
                ],
                digests=[random.choice(["xxh3:1", "xxh3:2", "a", "A"]) for _ in structure.tensors],
            )
        )
    return rows


def _tensor(random: Random) -> dict[str, Any]:
    return {
        "name": random.choice(TEXTS),
        "state": random.choice(["weight", "exp_avg"]),
        "dtype": random.choice(["float32", "bfloat16"]),
        "shape": random.choice(["", "4096", "4096,1024", "1024,4096"]),
        "size": random.choice([0, 4, 1024, 2**40]),
    }


#: The checkpoints of each database, by its seed.
WORLDS = {seed: random_rows(Random(seed), 50) for seed in (1, 2, 3)}


def store(engine: Engine, rows: list[Row]) -> None:
    """The rows in new tables of an empty database."""
    Base.metadata.create_all(engine)
    runs = {
        name: i
        for i, name in enumerate(
            sorted({r.scalars["run"] for r in rows if r.scalars["run"] is not None}), 1
        )
    }
    configs = {r.config: r.documents["config"] for r in rows if r.config is not None}
    with engine.begin() as connection:
        for structure in {r.structure.serial: r.structure for r in rows}.values():
            serial = structure.serial
            connection.execute(insert(TensorSet).values(id=serial, hash=str(serial)))
            for i, t in enumerate(structure.tensors):
                values = {k if k != "size" else "nbytes": v for k, v in t.items()}
                connection.execute(
                    insert(TensorRow).values(tensor_set_id=serial, position=i, **values)
                )
        for name, i in runs.items():
            connection.execute(insert(RunRow).values(id=i, name=name, created=NOW))
        for i, document in configs.items():
            connection.execute(insert(Config).values(id=i + 1, hash=str(i), document=document))
        for r in rows:
            connection.execute(_checkpoint(r, runs))
        for r in rows:
            for statement in _said(r):
                connection.execute(statement)


def _checkpoint(r: Row, runs: dict[str, int]) -> Insert:
    scalars = {k: v for k, v in r.scalars.items() if k not in {"run", "age", "size"}}
    return insert(CheckpointRow).values(
        serial=r.serial,
        run_id=runs.get(r.scalars["run"]),
        nbytes=r.scalars["size"],
        producer=r.documents["producer"],
        topology=r.documents["topology"],
        config_id=None if r.config is None else r.config + 1,
        tensor_set_id=r.structure.serial,
        digest_block=r.serial // 4,
        document_revision=0,
        document_written=0,
        **scalars,
    )


def _said(r: Row) -> list[Insert]:
    here: dict[str, Any] = {"checkpoint": r.serial}
    by: dict[str, Any] = {**here, "created": NOW, "who": "somebody"}
    verified: dict[str, Any] = {
        **here,
        "url": "",
        "bytes_verified": 0,
        "bytes_unverified": 0,
        "problems": [],
        "tool": "",
    }
    return [
        *(insert(Tag).values(name=name, **by) for name in r.tag),
        *(insert(Note).values(text=text, **by) for text in r.note),
        *(insert(AliasRow).values(name=name, version=1, moved=NOW, **here) for name in r.alias),
        *(insert(Location).values(url=url, seen=NOW, **here) for url in r.url),
        *(
            insert(Metric).values(name=name, value=value, measured=NOW, **here)
            for name, value in r.metrics.items()
        ),
        *(
            insert(Hold).values(reason="", until=until, released=released, **by)
            for until, released in r.holds
        ),
        *(insert(Verification).values(at=at, ok=ok, **verified) for at, ok in r.verifications),
        *(
            insert(Digest).values(block=r.serial // 4, digest=d, position=i, **here)
            for i, d in enumerate(r.digests)
        ),
    ]
