"""No statement of the product reads a whole table that grows: each is explained by both databases."""

from __future__ import annotations

import re
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

import ucformat
from tests.catalog.acts import purge, put
from tests.catalog.manifests import made_from, manifest
from tests.catalog.rows import policy
from tests.catalog.test_dependents import needing
from ucformat.catalog import retention as retention_rows
from ucformat.catalog import search
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.changes import SettledLog
from ucformat.catalog.document import compose
from ucformat.catalog.models import Base
from ucformat.catalog.recording import Found
from ucformat.catalog.refs import parse_ref, resolve
from ucformat.catalog.tracked import TrackedValues
from ucformat.cli.main import ucp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Statements = dict[str, Any]

#: Tables that have a row for each catalog, run, launch, configuration, structure or alias.
SMALL = {"catalog", "run", "launch", "continuation", "config", "tensor_set", "tensor", "alias"}
GROWING = set(Base.metadata.tables) - SMALL
BEST = {"metric": "loss", "count": 1, "mode": "min"}
OF_RUN = policy({"last": 1, "best": BEST}, scope="run = 'run7'")
FILTERS = (
    "run = 'run7' and metric.loss < 3 and tag = 'good'",
    "config.lr = 0.1 and metric.loss < 3",
    "step = 3 and run = 'run7'",
)
#: Statements that may read a table, and why.
WHOLE = {
    r"FROM event LEFT OUTER JOIN checkpoint .* ORDER BY event.id DESC": "stops at the limit, from the end",
    r"FROM metric \nWHERE metric.name = [^\n]+\n LIMIT": "stops at the first; PostgreSQL knows that there are many",
    r"SELECT checkpoint.serial( AS serial)? \nFROM checkpoint ?\n LIMIT": "stops at the limit",
    r"max\((checkpoint.digest_block|event.id)\)": "the end of an index",
    r"FROM reached|AS reached": "PostgreSQL cannot estimate the length of a lineage; see the figures of the benchmark",
    r"^SELECT count\(\*\) AS count_1 \nFROM checkpoint \nWHERE \S+ = [^\n]+$": "`ucp ls` says how many there are",
    r"^select state, count\(\*\) from checkpoint group by state$": "`ucp catalog info` counts all",
}


@contextmanager
def executed() -> Iterator[Statements]:
    """The statements of all catalogs meanwhile, each with the parameters that it had first."""
    seen: Statements = {}

    def note(
        _c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool
    ) -> None:
        seen.setdefault(statement, parameters[0] if isinstance(parameters, list) else parameters)

    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)


def scanned_by_sqlite(connection: sa.Connection, statement: str, parameters: Any) -> set[str]:
    """The growing tables that SQLite would read from one end to the other."""
    plan = [
        row[-1] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
    ]
    scans = [
        found[1]
        for step in plan
        if (found := re.match(r"SCAN (\w+?)(?:_\d+)?(?: USING .*)?$", step))
    ]
    return {name for name in scans if name in GROWING}


def scanned_by_postgresql(connection: sa.Connection, statement: str, parameters: Any) -> set[str]:
    """The growing tables that PostgreSQL would read in full, one after the other or by an index without a condition."""
    plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", parameters).scalar_one()
    nodes, found = [plan[0]["Plan"]], set()
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", ())
        scans = (
            node["Node Type"] in ("Seq Scan", "Index Scan", "Index Only Scan")
            and "Index Cond" not in node
        )
        if scans and node["Relation Name"] in GROWING:
            found.add(node["Relation Name"])
    return found


#: So many rows in each table that PostgreSQL prefers an index where there is one.
ROWS = 3000
GROW = """
insert into run (name, created) select 'other' || g, now() from generate_series(1, 60) g;
insert into checkpoint (id, run_id, step, created, digest_block, {columns})
  select md5(g::text), {run} + g % 60, g, k.created + g * interval '1 minute', 1 + g / 100, {of_first}
  from checkpoint k, generate_series(1, {rows}) g where k.serial = {first};
create temporary view other as select * from checkpoint where kind = 'other';
insert into metric (checkpoint, name, value, measured) select serial, 'loss', serial, created from other;
insert into location (checkpoint, url, seen) select serial, '/other/' || serial, created from other;
insert into tag (checkpoint, name, created, who) select serial, 'rare' || serial, created, 'me' from other;
insert into note (checkpoint, text, created, who) select serial, 'text', created, 'me' from other;
insert into hold (checkpoint, reason, created, who, released) select serial, 'why', created, 'me', created from other;
insert into form (checkpoint, manifest) select serial, 'digest' from other;
insert into event (at, who, action, checkpoint, detail) select created, 'me', 'record', serial, '{{}}' from other;
insert into alias_claim (checkpoint, name, document_url, version, moved)
  select serial, 'name', '/other', 1, created from other;
insert into untag (checkpoint, name, removed, who, reason) select serial, 'tag', created, 'me', 'why' from other;
insert into verification (checkpoint, url, at, ok, bytes_verified, bytes_unverified, problems, tool)
  select serial, '/other', created, true, 1, 1, '[]', 'test' from other;
insert into certificate (checkpoint, url, at, ok, document)
  select serial, '/other', created, true, '{{}}' from other;
insert into edge (child, parent, parent_url, kind, depends)
  select serial, serial - 1, '/other/' || serial - 1, 'resume', false from other;
insert into alias_move (name, version, target, moved, who)
  select 'other' || serial, 1, serial, created, 'me' from other;
insert into digest (block, digest, checkpoint, position)
  select digest_block, 'xxh3:' || md5(serial::text), serial, 0 from other;
update checkpoint set kind = 'ucformat' where kind = 'other';
drop view other;
"""


def grow(catalog: Catalog) -> None:
    """Add rows of other runs, on PostgreSQL."""
    own = {"serial", "id", "run_id", "step", "created", "digest_block", "document_due"}
    names = [c for c in Base.metadata.tables["checkpoint"].columns.keys() if c not in own]  # noqa: SIM118
    with catalog.database.engine.connect() as c, c.begin():
        run = c.exec_driver_sql("select max(id) + 1 from run").scalar_one()
        first = c.exec_driver_sql("select min(serial) from checkpoint").scalar_one()
        of_first = ", ".join("'other'" if name == "kind" else f"k.{name}" for name in names)
        text = GROW.format(
            columns=", ".join(names), of_first=of_first, run=run, first=first, rows=ROWS
        )
        c.exec_driver_sql(text.replace("%", "%%"))
    with catalog.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as c:
        c.exec_driver_sql("VACUUM ANALYZE")


def check(catalog: Catalog, seen: Statements) -> None:
    """Explain what was executed."""
    explain = scanned_by_sqlite if catalog.database.sqlite else scanned_by_postgresql
    explained, problems = 0, []
    for statement, parameters in seen.items():
        if not re.match(r"\s*(SELECT|WITH|UPDATE|DELETE)\b", statement, re.IGNORECASE):
            continue
        if not any(re.search(rf"\b{table}\b", statement) for table in GROWING):
            continue
        with catalog.database.engine.connect() as c, c.begin():
            scanned = explain(c, statement, parameters)
        explained += 1
        if scanned and not any(re.search(allowed, statement, re.DOTALL) for allowed in WHOLE):
            problems.append((scanned, statement))
    assert not problems, "\n".join(f"{tables}: {statement}" for tables, statement in problems)
    assert explained


@pytest.fixture
def filled(catalog: Catalog) -> Catalog:
    """A catalog with rows in every table."""
    base = put(catalog, 0, run="base")
    needing(catalog, str(base.url), range(1001, 1004))
    parent = None
    for step in range(10):
        doc = manifest(100 + step, step=step, metrics={"loss": float(step)}, config={"lr": 0.1})
        lineage = () if parent is None else made_from(parent, "resume", f"/data/run7/{step - 1}")
        parent = doc.model_copy(update={"lineage": lineage})
        catalog.record(parent, f"/data/run7/{step}", listing="x")
        catalog.tag(doc.id, "good")
    catalog.alias("best", "run7@3")
    catalog.hold("run7@4", "paper")
    catalog.note("run7@4", "a note")
    catalog.untag("run7@8", "good", reason="test")
    catalog.untag("run7@9", "good", reason="test")
    if not catalog.database.sqlite:  # SQLite chooses without looking at the number of rows
        grow(catalog)
    return catalog


def apply_retention(catalog: Catalog) -> None:
    catalog.retain(OF_RUN, apply=catalog.retain(OF_RUN).id)


def find(catalog: Catalog) -> None:
    for where in ("", *FILTERS):
        for sort in ("newest", "metric.loss", "-step"):
            for limit in (1, 3):
                if where or sort != "-step":  # an order without an index reads all, in any database
                    catalog.find(where, sort=sort, limit=limit)


def purgeable(catalog: Catalog) -> None:
    catalog.delete("run7@8", grace=timedelta(0))
    [row] = catalog.purgeable().purge
    purge(catalog, row.id)


def restore(catalog: Catalog) -> None:
    catalog.delete("run7@8")
    catalog.restore("run7@8")


def document(catalog: Catalog) -> None:
    with catalog.database.reading() as c:
        doc = compose(c, resolve(c, parse_ref("run7@3")), "/data/run7/3")
    catalog.import_document(doc.id, doc.model_copy(update={"catalog": "other"}), "/data/run7/3")


def record(catalog: Catalog) -> None:
    new = manifest(5000, step=50, metrics={"loss": 1.0}, config={"lr": 0.2})
    for place in (
        "/data/new",
        "/data/copy",
        "/data/run7/5",
    ):  # new, elsewhere, and in place of another one
        catalog.record(new, place)
    catalog.record(
        manifest(5001, step=51), "/engine/1", kind="deepspeed", run="given", files=(1, 2)
    )
    catalog.record(manifest(5001, step=51), "/engine/1", kind="deepspeed", run="another")


#: A use of each public method.
METHODS: dict[str, Callable[[Catalog], Any]] = {
    "add_tracked": lambda c: c.add_tracked(
        "mlflow", {c.get("run7@1").id: TrackedValues({"loss": 9.0}, {"run": "a"})}
    ),
    "alias": lambda c: c.alias("best", "run7@5"),
    "alias_history": lambda c: c.alias_history("best"),
    "aliases": lambda c: c.aliases(),
    "beginnings": lambda c: c.beginnings("run7"),
    "certified": lambda c: c.certified(
        "run7@1",
        url="/data/run7/1",
        ok=True,
        document={"layout": {"world": 1}, "counts": {}, "may_cast": False},
    ),
    "changes": lambda c: c.changes(0, c.settled(SettledLog()), most=3),
    "commits": lambda c: c.commits("run7"),
    "contradiction": lambda c: c.contradiction(manifest(103, step=7), "/data/run7/3"),
    "count": lambda c: [c.count(where) for where in FILTERS],
    "count_few": lambda c: [c.count_few(where) for where in FILTERS],
    "delete": lambda c: c.delete("run7@8"),
    "diff": lambda c: c.diff("run7@1", "run7@2"),
    "events": lambda c: (c.events(), c.events("run7@1")),
    "excess_rights": lambda c: c.excess_rights(),
    "find": find,
    "lines": lambda c: c.lines("run = 'run7'"),
    "curves": lambda c: [
        c.curves("run7", where, most=most) for where in ("", "tag = 'good'") for most in (3, 30)
    ],
    "page": lambda c: [
        c.page(where, sort=sort, limit=2, offset=offset, counted=3)
        for where in ("", *FILTERS, "tag = 'good' and run in ('run7')")
        for sort in ("newest", "metric.loss")
        for offset in (0, 2)
    ],
    "forget": lambda c: c.forget(c.places("/data/run7/9")),
    "between": lambda c: c.between("run7", 1, 5),
    "get": lambda c: [
        c.get(ref)
        for ref in (
            "run7@3",
            "run7@latest",
            "folder:/data/run7@latest",
            "alias:best",
            c.get("run7@1").id[:8],
            "/data/run7/1",
        )
    ],
    "with_ids": lambda c: c.with_ids([c.get("run7@1").id, "absent"]),
    "hold": lambda c: c.hold("run7@1", "why", timedelta(1)),
    "holding": lambda c: c.holding(next(t.digest for t in c.tensors("run7@1") if t.digest)),
    "import_document": document,
    "lineage": lambda c: (c.lineage("run7@9"), c.lineage("run7@1", "down", depth=100)),
    "link": lambda c: c.link("run7@5", "/data/run7/0", "finetune"),
    "listings": lambda c: c.listings("/data"),
    "metric": lambda c: c.metric("run7@1", {"loss": 9.0}),
    "note": lambda c: c.note("run7@1", "text"),
    "places": lambda c: c.places("/data"),
    "protections": lambda c: (
        c.protections(c.get("run7@1").id, "/data/run7/1"),
        c.protections("none", "/data/base"),
    ),
    "purgeable": purgeable,
    "record": record,
    "record_all": lambda c: c.record_all(
        [Found(manifest(n, step=n), f"/data/many/{n}") for n in range(6000, 6010)]
    ),
    "release": lambda c: c.release("run7@4"),
    "restore": restore,
    "retain": apply_retention,
    "series": lambda c: (
        c.series({"run7": "loss", "base": "loss"}),
        c.series({"run7": "loss"}, "tag = 'good'", most=3),
    ),
    "runs": lambda c: [
        c.runs(),
        c.runs(metric="loss", limit=2),
        c.runs("run = 'run7' and step > 3", metric="loss", mode="max"),
    ],
    "sql": lambda c: c.sql("select id from checkpoint limit 1", trust_role=True),
    "settled": lambda c: c.settled(SettledLog()),
    "tag": lambda c: c.tag("run7@8", "kept"),
    "tensors": lambda c: c.tensors("run7@1"),
    "unalias": lambda c: c.unalias("best"),
    "untag": lambda c: c.untag("run7@1", "good", reason="why"),
    "verified": lambda c: c.verified(
        "run7@1", url="/data/run7/1", ok=True, bytes_verified=1, bytes_unverified=0
    ),
}
#: Methods that may read all that the user asks for, or that ask the database about its roles alone.
ASKED = {"sql", "excess_rights"}


def test_every_public_method_is_here() -> None:
    public = {
        name
        for name in dir(Catalog)
        if not name.startswith("_") and callable(getattr(Catalog, name))
    }
    assert public - {"close"} == set(METHODS)


@pytest.mark.parametrize("method", sorted(set(METHODS) - ASKED))
def test_no_method_reads_a_whole_table(filled: Catalog, method: str) -> None:
    with (
        executed() as seen,
        mock.patch.object(search, "_WALKED", (2, 5)),  # as if there were more checkpoints
        mock.patch.object(retention_rows, "_FEW", 1),
    ):
        METHODS[method](filled)
    check(filled, seen)


#: Commands of the catalog, in an order in which each has something to do.
COMMANDS = (
    "ls -n 3",
    "ls -n 3 --sort metric.loss",
    "ls 'run = ''run7''' -n 3",
    "ls 'run = ''run7''' -n 3 --plot metric.loss",
    "runs --metric loss",
    "diff run7@1 run7@2",
    "lineage run7@5",
    "lineage run7@1 --down",
    "tag run7@1 kept",
    "untag run7@1 good --reason why",
    "alias set best run7@2",
    "alias list",
    "alias log best",
    "metric run7@1 loss=4",
    "note run7@1 text",
    "hold run7@1 --reason why",
    "release run7@4",
    "link run7@5 run7@0 --kind finetune",
    "log",
    "log run7@1",
    "delete run7@8",
    "gc",
    "catalog info",
)


@pytest.mark.parametrize("line", COMMANDS)
def test_no_command_reads_a_whole_table(filled: Catalog, line: str, database_url: str) -> None:
    args = [a.replace("''", "'") for a in re.findall(r"'(?:[^']|'')*'|\S+", line)]
    args = [a[1:-1] if a.startswith("'") else a for a in args]
    with executed() as seen, mock.patch.object(search, "_WALKED", (2, 5)):
        result = CliRunner().invoke(ucp, [*args, "--catalog", database_url])
    assert result.exit_code == 0, result.output
    if seen := {s: p for s, p in seen.items() if not s.startswith("EXPLAIN")}:
        check(filled, seen)


def test_registering_reads_no_whole_table(catalog: Catalog, tmp_path: Path) -> None:
    from tests.jobs.conftest import foreign, universal

    for step in range(4):
        universal(tmp_path / "t" / "run7" / str(step), step)
        foreign(tmp_path / "t" / "ds", step)
    put(catalog, 99)
    if not catalog.database.sqlite:
        grow(catalog)
    with executed() as seen:
        for _ in range(2):
            ucformat.register(tmp_path / "t", catalog, recursive=True)
        ucformat.reindex(tmp_path / "t", catalog)
        ucformat.collect(catalog, [tmp_path / "t"])
    check(catalog, seen)


def test_a_scan_is_found(filled: Catalog) -> None:
    with executed() as seen, filled.database.reading() as c:
        c.exec_driver_sql("SELECT count(*) FROM note WHERE text = 'x'")
    with pytest.raises(AssertionError, match="note"):
        check(filled, seen)
