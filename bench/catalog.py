"""A full catalog on SQLite and on PostgreSQL, and MLflow on SQLite beside it.

`python -m bench.catalog [--checkpoints N] [--tensors N] [--runs N] [--virtual N] [--rounds N]
[--without-mlflow] [--keep FOLDER]`. By default 10,000 checkpoints of 1,000 tensors, each with its
digest, in a folder that is removed afterwards; with `--keep`, the databases stay in a folder, and
are not filled again. Everything is warm: each question is asked once before it is timed, then the
engines take turns. PostgreSQL, on the same machine, syncs every commit.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import tempfile
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from bench.catalog_fill import LRS, Plan, fill, made, manifest
from bench.common import OUT, ROOT, median, ours, run, table
from tests.catalog.databases import running_postgres
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.models import CheckpointRow, Digest
from ucformat.catalog.retention import load_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

BEST = 50  # of the checkpoints that the filter takes
LARGE = 10  # times as many tensors as usual, in what is recorded
FILTER = f"config.optimizer.lr = {LRS[1]} and metric.val_loss < 2.1 and tag = 'good'"
SORT = "metric.val_loss"
MLFLOW_FILTER = f"params.`optimizer.lr` = '{LRS[1]}' and metrics.val_loss < 2.1 and tags.good = '1'"
# milliseconds
ASKED = {
    "find": 100,
    "best": 100,
    "newest": 100,
    "retain": 100,
    "gc": 1000,
    "holding": 50,
    "lineage": 500,
    "new": 1000,
    "next": 50,
}
LABELS = {
    "find": "`find`: configuration, metric and tag, sorted, 50 of {hits}",
    "ls": "the same by the command `ucp ls`",
    "best": "`find`: the best by a metric",
    "newest": "`find`: the newest 20",
    "matching": "`find`: the newest 20 of {hits}",
    "retain": "`retain`, planned: one run, {kept} checkpoints",
    "gc": "`gc`, planned: {deleted} deleted checkpoints, {virtual} virtual ones",
    "holding": "`holding` of a tensor that one checkpoint has",
    "frozen": "`holding` of a tensor that {frozen} checkpoints share",
    "lineage": "`lineage` over {depth} steps",
    "new": "`record` of {large} tensors of a new structure",
    "next": "`record` of the next step of that run",
}


@dataclass
class Bench:
    """One engine's catalog, and the milliseconds that were measured on it."""

    catalog: Catalog
    url: str
    plan: Plan
    filled: float
    times: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, list[float]] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def timed(self, what: str, call: Callable[[], Any]) -> Any:
        """Call, and note how long it took, and how long the processor worked in this process."""
        begun, spent = time.perf_counter(), time.process_time()
        found = call()
        self.times.setdefault(what, []).append((time.perf_counter() - begun) * 1e3)
        self.processor.setdefault(what, []).append((time.process_time() - spent) * 1e3)
        return found

    def round(self) -> None:
        """Ask and record everything once."""
        catalog, plan, number = self.catalog, self.plan, next(self.numbers)
        best = self.timed("find", lambda: catalog.find(FILTER, sort=SORT, limit=BEST))
        self.found["find"] = [e.name for e in best]

        run = f"run{number % plan.runs:02}"
        best = {"metric": "val_loss", "count": 2, "mode": "min"}
        policy = load_policy(
            {"version": 1, "scope": f"run = '{run}'", "keep": {"last": 3, "best": best}}
        )
        assert len(self.timed("best", lambda: catalog.find(sort=SORT, limit=1))) == 1
        assert len(self.timed("newest", lambda: catalog.find(limit=20))) == 20
        assert self.timed("matching", lambda: catalog.find(FILTER, limit=20))
        planned = self.timed("retain", lambda: catalog.retain(policy))
        self.found["kept"] = len(planned.keep) + len(planned.delete) + len(planned.untouched)
        self.found["deleted"] = len(self.timed("gc", catalog.purgeable).purge)

        one, frozen = self._digests(1 + number)
        if one is not None:
            assert len(self.timed("holding", lambda: catalog.holding(one))) == 1
        self.found["frozen"] = len(self.timed("frozen", lambda: catalog.holding(frozen)))

        last = f"run{plan.runs - 1:02}@latest"
        tree = self.timed("lineage", lambda: catalog.lineage(last, depth=1000))
        self.found["depth"] = len(tree.nodes) - 1

        begin, structure = replace(next(made(plan)), run=100 + number), f"new{uuid.uuid4().hex}"
        for what, step in (("new", 0), ("next", 1)):
            document = manifest(replace(begin, step=step), LARGE * plan.tensors, structure)
            entry = self.timed(what, lambda m=document: catalog.record(m, f"/large/{m.id}"))  # type: ignore[misc]
            assert entry.tensors == LARGE * plan.tensors
            self.found[what] = entry.tensors

    def command(self) -> None:
        """Ask by the command line, a whole process."""
        OUT.mkdir(parents=True, exist_ok=True)
        command = [
            ours(),
            "-m",
            "ucformat.cli",
            "ls",
            FILTER,
            "--sort",
            SORT,
            "-n",
            str(BEST),
            "--catalog",
            self.url,
        ]
        self.times.setdefault("ls", []).append(run(command).seconds * 1e3)

    def _digests(self, position: int) -> tuple[str | None, str]:
        """Of one checkpoint: the digest at a position, which no other one has, and of the first tensor, which stays.

        The first is None if there are not so many tensors.
        """
        with self.catalog.database.reading() as c:
            last = sa.select(CheckpointRow.digest_block, CheckpointRow.serial).where(
                CheckpointRow.serial == self.plan.checkpoints
            )
            block, serial = c.execute(last).one()
            chosen = sa.select(Digest.position, Digest.digest).where(
                Digest.block == block, Digest.checkpoint == serial
            )
            digests = dict(c.execute(chosen.where(Digest.position.in_((0, position)))).all())
        return digests.get(position), digests[0]


class Mlflow:
    """MLflow in a process of its own, filled with as much."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        subprocess.run(["bash", str(ROOT / "bench/install_mlflow.sh")], check=True)
        told = os.environ.get("UCFORMAT_MLFLOW_PYTHON", str(ROOT / ".engines/mlflow/bin/python"))
        command = [told, str(ROOT / "bench/catalog_mlflow.py"), str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.times: dict[str, list[float]] = {}
        self.filled = self._tell([_for_mlflow(m) for m in made(plan)])["seconds"]

    def ask(self, what: str) -> list[str]:
        """Search; the names of what was found."""
        said = self._tell(
            {"what": what, "where": MLFLOW_FILTER, "by": "metrics.val_loss", "limit": BEST}
        )
        self.times.setdefault(what, []).append(said["seconds"] * 1e3)
        return list(said["found"])

    def _tell(self, words: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _for_mlflow(one: Any) -> dict[str, Any]:
    params = {
        f"{part}.{key}": str(v) for part, values in one.config.items() for key, v in values.items()
    }
    return {
        "name": one.name,
        "step": one.step,
        "created": int(one.created.timestamp() * 1000),
        "params": params,
        "metrics": dict(one.metrics),
        "tags": dict.fromkeys(one.tags, "1"),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=int, default=Plan.checkpoints)
    parser.add_argument("--tensors", type=int, default=Plan.tensors)
    parser.add_argument("--runs", type=int, default=Plan.runs)
    parser.add_argument("--virtual", type=int, default=Plan.virtual)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--without-mlflow", action="store_true")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    plan = Plan(given.checkpoints, given.tensors, given.runs, given.virtual)
    with contextlib.ExitStack() as stack:
        if given.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ucp-bench-")))
            server = stack.enter_context(running_postgres())
            postgres = server.fresh()
        else:
            folder = given.keep.absolute()
            folder.mkdir(parents=True, exist_ok=True)
            server = stack.enter_context(running_postgres(folder / "postgres"))
            postgres = server.lasting("bench")
        benches = {
            name: stack.enter_context(filled(url, plan))
            for name, url in (
                ("SQLite", f"sqlite:///{folder}/catalog.db"),
                ("PostgreSQL", postgres),
            )
        }
        sync(server.url)
        mlflow = (
            None
            if given.without_mlflow
            else stack.enter_context(contextlib.closing(Mlflow(folder, plan)))
        )
        measure(list(benches.values()), mlflow, given.rounds)
        report(plan, benches, mlflow, given.rounds)


@contextlib.contextmanager
def filled(url: str, plan: Plan) -> Iterator[Bench]:
    """A full catalog."""
    with Catalog(url) as catalog:
        begun = time.perf_counter()
        if catalog.empty:
            fill(catalog, plan)
        yield Bench(catalog, url, plan, time.perf_counter() - begun)


def sync(url: sa.URL) -> None:
    """Let PostgreSQL sync again, as it does unless it is told not to."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.execute(sa.text("alter system reset fsync"))
        connection.execute(sa.text("select pg_reload_conf()"))
        connection.execute(sa.text("checkpoint"))


def measure(benches: list[Bench], mlflow: Mlflow | None, rounds: int) -> None:
    """So many rounds, in turns, after one that does not count."""
    for n in range(rounds + 1):
        for bench in benches:
            bench.round()
            if n < 6:
                bench.command()
        if mlflow is not None:
            for what in ("search_runs", "search_logged_models"):
                assert mlflow.ask(what) == benches[0].found["find"], what
        if not n:
            for each in (*benches, *((mlflow,) if mlflow else ())):
                each.times.clear()
            for bench in benches:
                bench.processor.clear()
    assert len({tuple(b.found["find"]) for b in benches}) == 1


def report(plan: Plan, benches: Mapping[str, Bench], mlflow: Mlflow | None, rounds: int) -> None:
    """Print the tables."""
    first = next(iter(benches.values()))
    words = {
        "hits": f"{first.catalog.count(FILTER):,}",
        "frozen": f"{first.found['frozen']:,}",
        "depth": f"{first.found['depth']:,}",
        "large": f"{first.found['new']:,}",
        "kept": f"{first.found['kept']:,}",
        "deleted": f"{first.found['deleted']:,}",
        "virtual": f"{plan.virtual:,}",
    }
    print(
        f"{plan.checkpoints:,} checkpoints of {plan.tensors:,} tensors, {rounds} rounds; filled in",
        end=" ",
    )
    print(", ".join(f"{b.filled:.0f} s ({name})" for name, b in benches.items()), end=".\n")
    print(f"Load average: {os.getloadavg()[0]:.1f}. Milliseconds, median (worst):\n")
    rows = [
        [
            LABELS[what].format(**words),
            f"< {ASKED[what]}" if what in ASKED else "",
            *(f"{median(b.times[what]):.1f} ({max(b.times[what]):.1f})" for b in benches.values()),
            f"{median(first.processor[what]):.1f}" if what in first.processor else "",
        ]
        for what in LABELS
        if what in first.times
    ]
    print(table(["", "target", *benches, f"{next(iter(benches))}, processor"], rows))
    if mlflow is None:
        return
    print(
        f"\nThe same query in MLflow on SQLite (equally many runs and logged models, {mlflow.filled:.0f} s to fill):\n"
    )
    rows = [
        [
            f"`{what}`",
            f"{median(times):.1f} ({max(times):.1f})",
            *(f"{median(times) / median(b.times['find']):.1f}" for b in benches.values()),
        ]
        for what, times in mlflow.times.items()
    ]
    print(table(["", "MLflow", *(f"÷ `find` on {name}" for name in benches)], rows))


if __name__ == "__main__":
    main()
