"""The lines of a run: launches that do not continue each other are kept, named and listed apart, in every catalog."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from zlib import crc32

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.catalog.acts import put
from tests.catalog.manifests import BEGIN, manifest
from tests.catalog.rows import policy, row
from tests.tiers import rounds
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.lines import contradictions, lines
from ucformat.cli.main import ucp
from ucformat.errors import NotFound, UsageError
from ucformat.schema.manifest import LaunchDoc, LineageDoc, Manifest

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.catalog.entries import Entry

A, B, C = ("a" * 32, "b" * 32, "c" * 32)


def launch(name: str, **continues: int) -> LaunchDoc:
    return LaunchDoc(id=name[0] * 32, continues={k * 32: n for k, n in continues.items()})


def saved(
    catalog: Catalog, of: LaunchDoc, folder: str, *steps: int, first: int = 1, **more: Any
) -> list[Entry]:
    """A launch saves steps, and counts from `first`."""
    more = {"created": BEGIN + timedelta(hours=first)} | more
    numbers = [crc32(f"{folder}/{step}".encode()) % 10**4 for step in steps]
    return [
        put(catalog, number, f"/data/{folder}/{step}", step=step, launch=of, commits=count, **more)
        for number, step, count in zip(
            numbers, steps, range(first, first + len(steps)), strict=True
        )
    ]


def kept(catalog: Catalog, count: int = 1) -> set[tuple[str | None, int | None]]:
    plan = catalog.retain(policy({"last": count}))
    return {(k.row.places[0].split("/")[2], k.row.step) for k in plan.keep}


class TestTwoLaunches:
    """The second has nothing to do with the first, but the name of its run."""

    @pytest.fixture(autouse=True)
    def two(self, catalog: Catalog) -> None:
        saved(catalog, launch("a"), "first", 1, 2, 3, 4)
        saved(catalog, launch("b"), "second", 1, 2, created=BEGIN - timedelta(hours=1))

    def test_each_keeps_its_last(self, catalog: Catalog) -> None:
        assert kept(catalog) == {("first", 4), ("second", 2)}
        assert kept(catalog, 2) == {("first", 3), ("first", 4), ("second", 1), ("second", 2)}
        best = catalog.retain(policy({"best": {"metric": "m", "count": 1, "mode": "min"}}))
        assert len(best.delete) == 6
        assert best.contradictions == catalog.retain(policy({"last": 1})).contradictions == ()

    def test_latest_is_an_error_that_lists_both_and_the_ways_to_choose(
        self, catalog: Catalog
    ) -> None:
        with pytest.raises(UsageError) as caught:
            catalog.get("run7@latest")
        for word in (
            "2 lines",
            "step 4",
            "step 2",
            "launch aaaaaaaa",
            "launch bbbbbbbb",
            "/data/first/4",
            "/data/second/2",
        ):
            assert word in caught.value.message
        assert "launch:ID@latest" in str(caught.value.hint)
        assert "folder:PLACE@latest" in str(caught.value.hint)
        assert (
            catalog.get("launch:aaaa@latest").step
            == catalog.get("folder:/data/first@latest").step
            == 4
        )
        assert (
            catalog.get("launch:bbbb@latest").step
            == catalog.get("folder:/data/second/@latest").step
            == 2
        )
        assert (
            catalog.get("launch:bbbb@1").url
            == catalog.get("folder:/data/second@1").url
            == "/data/second/1"
        )
        with pytest.raises(UsageError, match="2 lines"):
            catalog.get("folder:/data@latest")

    @pytest.mark.parametrize(
        "ref",
        [
            "launch:zz@latest",
            "launch:aaaa",
            "folder:/data/first",
            "folder:@latest",
            "launch:aaaa@x",
        ],
    )
    def test_references_that_say_too_little(self, catalog: Catalog, ref: str) -> None:
        with pytest.raises(UsageError):
            catalog.get(ref)

    @pytest.mark.parametrize("ref", ["launch:dddd@latest", "launch:aaaa@9", "folder:/other@latest"])
    def test_references_to_nothing(self, catalog: Catalog, ref: str) -> None:
        with pytest.raises(NotFound):
            catalog.get(ref)

    def test_a_link_makes_one_line(self, catalog: Catalog) -> None:
        catalog.link("launch:bbbb@1", "launch:aaaa@4", "resume")
        assert catalog.get("run7@latest").url == "/data/second/2"
        assert kept(catalog) == {("first", 4), ("second", 2)}  # 4 is the highest step

    def test_they_are_listed(self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(
            "UCP_CATALOG", catalog.database.engine.url.render_as_string(hide_password=False)
        )
        listed = CliRunner().invoke(ucp, ["ls", "--runs"])
        assert listed.exit_code == 0, listed.output
        assert [line.split()[:3] for line in listed.output.splitlines()[1:]] == [
            ["run7", "aaaaaaaa", "run7@4"],
            ["run7", "bbbbbbbb", "run7@2"],
        ]
        assert "/data/second" in listed.output
        assert "bbbbbbbb" in CliRunner().invoke(ucp, ["ls"]).output
        assert "was committed after" not in CliRunner().invoke(ucp, ["ls"]).stderr


class TestContinued:
    def test_a_resumed_launch_continues_the_line(self, catalog: Catalog) -> None:
        saved(catalog, launch("b", a=2), "second", 3, 4, first=3)  # recorded before its origin
        saved(catalog, launch("a"), "first", 1, 2)
        assert catalog.get("run7@latest").url == "/data/second/4"
        assert kept(catalog) == {("second", 4)}

    def test_one_from_the_middle_is_a_fork(self, catalog: Catalog) -> None:
        saved(catalog, launch("a"), "first", 1, 2, 3, 4)
        saved(catalog, launch("b", a=2), "second", 3, 4, first=3, created=BEGIN - timedelta(days=1))
        with pytest.raises(UsageError, match="2 lines"):
            catalog.get("run7@latest")
        assert kept(catalog) == {("first", 4), ("second", 4)}
        assert kept(catalog, 3) == {
            ("first", 2),
            ("first", 3),
            ("first", 4),
            ("second", 3),
            ("second", 4),
        }
        [warning] = catalog.retain(
            policy({"last": 1})
        ).contradictions  # before its origin, by its clock
        assert warning.startswith("run7@4 was committed after run7@")

    def test_what_it_left_behind_in_its_folder_is_in_its_line(self, catalog: Catalog) -> None:
        saved(catalog, launch("a"), "first", 1, 2, 3, 4)
        saved(catalog, launch("b", a=4), "first", 6, first=5)
        assert catalog.get("run7@latest").step == 6
        assert kept(catalog) == {("first", 6)}

    def test_a_launch_in_between_may_be_gone(self, catalog: Catalog) -> None:
        saved(catalog, launch("a"), "first", 1, 2)
        saved(catalog, launch("c", a=2, b=4), "third", 5, first=5)
        assert catalog.get("run7@latest").step == 5

    def test_an_origin_is_a_head_again_if_nothing_that_continues_it_is_left(
        self, catalog: Catalog
    ) -> None:
        saved(catalog, launch("a"), "first", 1, 2)
        [only] = saved(catalog, launch("b", a=2), "second", 3, first=3)
        catalog.delete(only.id)
        assert catalog.get("run7@latest").step == 2

    def test_launches_that_claim_each_other_are_both_kept(self, catalog: Catalog) -> None:
        saved(catalog, launch("a", b=9), "first", 1, 2)
        saved(catalog, launch("b", a=9), "second", 1, 2)
        assert kept(catalog) == {("first", 2), ("second", 2)}
        saved(catalog, launch("d", e=9), "d", 1)
        saved(catalog, launch("e", f=9), "e", 1)
        saved(catalog, launch("f", d=9), "f", 1)
        assert {("d", 1), ("e", 1), ("f", 1)} <= kept(catalog)


class TestWithoutLaunches:
    def test_folders_are_lines(self, catalog: Catalog) -> None:
        for folder, steps in (("first", (1, 2, 3)), ("second", (1, 2))):
            for step in steps:
                put(
                    catalog,
                    crc32(f"{folder}/{step}".encode()) % 10**4,
                    f"/data/{folder}/{step}",
                    step=step,
                    created=BEGIN,
                )
        assert kept(catalog) == {("first", 3), ("second", 2)}
        with pytest.raises(UsageError, match="2 lines"):
            catalog.get("run7@latest")
        assert catalog.get("folder:/data/first@latest").step == 3

    @pytest.mark.parametrize("late", [False, True])
    def test_an_edge_from_the_last_continues_a_folder(self, catalog: Catalog, late: bool) -> None:
        edge = LineageDoc(kind="resume", url="/data/first/2", id=manifest(2).id)
        child = manifest(3, step=3, launch=launch("a"), commits=1, lineage=(edge,))
        parents = [(manifest(n, step=n), f"/data/first/{n}") for n in (1, 2)]
        for made, place in (
            [(child, "/data/second/3"), *parents] if late else [*parents, (child, "/data/second/3")]
        ):
            catalog.record(made, place)
        assert catalog.get("run7@latest").step == 3
        assert kept(catalog) == {("first", 2), ("second", 3)}  # 2 is the last without a count

    def test_a_conversion_is_the_same_step_again(self, catalog: Catalog) -> None:
        parents = [manifest(n, step=n) for n in (1, 2)]
        for n, made in enumerate(parents, 1):
            catalog.record(made, f"/data/first/{n}", kind="deepspeed")
        edge = LineageDoc(kind="convert", url="/data/first/2", id=parents[1].id)
        done = catalog.record(manifest(5, step=2, lineage=(edge,)), "/out/2")
        assert catalog.get("run7@latest").id == done.id


def test_counts_go_on_from_the_whole_run(catalog: Catalog) -> None:
    assert catalog.commits("run7") == 0
    entries = saved(catalog, launch("a"), "first", 1, 2, 3, 4)
    catalog.delete(entries[3].id)
    assert catalog.commits("run7") == 4


def test_no_false_clocks_between_lines() -> None:
    one = [row(n, commits=n, launch=A, created=BEGIN + timedelta(hours=n)) for n in range(1, 5)]
    two = [
        row(10 + n, commits=n, launch=B, created=BEGIN - timedelta(hours=9 - n))
        for n in range(1, 9)
    ]
    assert contradictions([*one, *two], lambda r: r.id) == []
    three = row(20, commits=9, launch=C, continues={A: 4, B: 8}, created=BEGIN)
    assert len(contradictions([*one, *two, three], lambda r: r.id)) == 1
    assert [head.serial for head, _ in lines([*one, *two, three])] == [20]


# --- launches, resumes, copies and several catalogs, against a model


@dataclass
class Known:
    """A launch, as the model knows it: where it saves, and the checkpoints that it knew to be behind it."""

    doc: LaunchDoc
    folder: int
    behind: frozenset[str]
    commits: int
    step: int
    made: list[str] = field(default_factory=list)


class Launches(RuleBasedStateMachine):
    """Launches save into folders; each catalog has seen some of it, by its own order, and copies of it."""

    urls: tuple[str, str]

    def __init__(self) -> None:
        super().__init__()
        self.catalogs = [Catalog(url) for url in self.urls]
        self.run = f"run-{uuid4().hex}"
        self.launches: list[Known] = []
        self.manifests: dict[str, Manifest] = {}
        self.behind: dict[str, frozenset[str]] = {}  # of each checkpoint, all that it continues
        self.places: dict[str, str] = {}
        self.seen: list[set[str]] = [set(), set()]
        self.clock = random.Random(1)

    def teardown(self) -> None:
        for catalog in self.catalogs:
            catalog.close()

    def _start(self, folder: int, origin: str | None) -> None:
        """As `Manager`: it lists its folder, and continues all that is there."""
        here = [i for i, place in self.places.items() if f"/{folder}/" in place]
        behind = frozenset(here).union(*(self.behind[i] for i in here))
        continues: dict[str, int] = {}
        for i in [*here, *([origin] if origin else [])]:
            of = self.manifests[i]
            assert of.launch is not None
            for name, count in of.launch.after(of.commits).items():
                continues[name] = max(count, continues.get(name, 0))
        if origin:
            behind |= {origin} | self.behind[origin]
        known = [self.manifests[i] for i in here + ([origin] if origin else [])]
        commits = max((m.commits or 0 for m in known), default=0)
        step = (self.manifests[origin].step or 0) if origin else 0
        self.launches.append(
            Known(LaunchDoc(id=uuid4().hex, continues=continues), folder, behind, commits, step)
        )

    @initialize()
    def first(self) -> None:
        self._start(0, None)
        self.save(0)

    @rule(folder=st.integers(0, 3))
    def start(self, folder: int) -> None:
        self._start(folder, None)

    @rule(folder=st.integers(0, 3), origin=st.integers(0, 99))
    def resume(self, folder: int, origin: int) -> None:
        self._start(folder, [*self.manifests][origin % len(self.manifests)])

    @rule(number=st.integers(0, 99))
    def save(self, number: int) -> None:
        launch = self.launches[number % len(self.launches)]
        if any(o.folder == launch.folder for o in self.launches[self.launches.index(launch) + 1 :]):
            return  # a folder has one training at a time
        launch.commits += 1
        launch.step += 1
        created = BEGIN + timedelta(hours=self.clock.randrange(-99, 99))
        made = manifest(
            uuid4().hex,
            self.run,
            launch.step,
            launch=launch.doc,
            commits=launch.commits,
            created=created,
        )
        self.manifests[made.id] = made
        self.behind[made.id] = launch.behind | frozenset(launch.made)
        self.places[made.id] = f"/{self.run}/{launch.folder}/{made.id}"
        launch.made.append(made.id)

    @rule(
        which=st.integers(0, 1),
        numbers=st.lists(st.integers(0, 99), max_size=6),
        copied=st.booleans(),
    )
    def record(self, which: int, numbers: list[int], copied: bool) -> None:
        ids = [*self.manifests]
        for i in (ids[n % len(ids)] for n in numbers):
            self.catalogs[which].record(
                self.manifests[i], f"/copy{self.places[i]}" if copied else self.places[i]
            )
            self.seen[which].add(i)

    @invariant()
    def lines_are_those_of_the_model(self) -> None:
        for catalog, seen in zip(self.catalogs, self.seen, strict=True):
            of_launch = {i: self.manifests[i].launch.id for i in seen}  # type: ignore[union-attr]
            heads = {i for i in seen if not any(i in self.behind[o] for o in seen)}
            of_run = f"run = '{self.run}'"
            assert {line.head.id for line in catalog.lines(of_run)} == heads
            assert len({of_launch[i] for i in heads}) == len(heads)
            plan = catalog.retain(policy({"last": 1}, scope=of_run))
            assert heads <= {k.row.id for k in plan.keep}
            deleted = {r.id for r in plan.delete}
            assert all(any(i in self.behind[h] for h in heads) for i in deleted)
            if len(heads) == 1:
                assert {catalog.get(f"{self.run}@latest").id} == heads
            elif heads:
                with pytest.raises(UsageError, match=f"{len(heads)} lines"):
                    catalog.get(f"{self.run}@latest")


@pytest.mark.front("sqlite")
@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_launches_against_a_model(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if engine == "sqlite":
        urls = (f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db")
    else:
        server = request.getfixturevalue("postgres_server")
        urls = (server.fresh_catalog(), server.fresh_catalog())
    machine = type("Machine", (Launches,), {"urls": urls})
    examples = rounds(5, 12) if engine == "sqlite" else 3
    chosen = settings(
        max_examples=examples,
        stateful_step_count=15,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)
