"""Anything may be said and done in any order: what is protected stays, and names are where a simple model has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.catalog.manifests import BEGIN, manifest, packed_over
from ucformat.catalog.changes import SettledLog
from ucformat.catalog.deletion import begin_purge, end_purge
from ucformat.catalog.labels import ANY
from ucformat.catalog.models import Base, Identity
from ucformat.catalog.refs import Ref, resolve
from ucformat.catalog.retention import load_policy
from ucformat.catalog.stamp import make_stamp
from ucformat.errors import Conflict, NotFound, PermissionDenied
from ucformat.schema.manifest import LineageDoc

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog
    from ucformat.schema.manifest import Manifest

KEEP = [
    {"last": 1},
    {"last": 2, "every": 2},
    {"best": {"metric": "m", "count": 2, "mode": "min"}},
    {"every": 3},
    {"younger": "2h"},
]
HOURS = st.sampled_from([0, 0, 0, 1, 12]).map(lambda h: timedelta(hours=h))
NUMBERS = st.integers(0, 5)
RARELY = st.integers(0, 5).map(lambda n: n == 0)
ALIASES = st.sampled_from(["best", "last", "run/x"])
VALUES = st.sampled_from([0.0, 1.0, 1.5, 2.0, float("nan"), float("inf"), float("-inf")])


@dataclass
class Known:
    """What the model knows of a checkpoint."""

    id: str
    kind: str
    state: str = "committed"
    tags: set[str] = field(default_factory=set)
    holds: dict[int, datetime | None] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    needs: set[int] = field(default_factory=set)
    purge_after: datetime | None = None


class Catalogs(RuleBasedStateMachine):
    """A catalog, and beside it a model of it."""

    catalog: Catalog

    def __init__(self) -> None:
        super().__init__()
        self.now = BEGIN + timedelta(days=100)
        self.clock = patch("ucformat.catalog.stamp.now", lambda: self.now)
        self.clock.start()
        self.others: Any = patch("ucformat.catalog.stamp.CLOCKS", [])
        self.others.start()
        with self.catalog.database.writing() as c:
            for table in reversed(Base.metadata.sorted_tables):
                if table.name != Identity.__tablename__:
                    c.execute(table.delete())
        self.known: dict[int, Known] = {}
        self.made: dict[int, tuple[Manifest, str, set[int]]] = {}
        self.aliases: dict[str, int] = {}
        self.moves: dict[str, list[int | None]] = {}
        self.log = SettledLog()
        self.position = self.catalog.settled(self.log)
        self.seen: dict[str, dict[str, set[str]]] = {"aliases": {}, "runs": {}}

    def teardown(self) -> None:
        self.clock.stop()
        self.others.stop()

    # The model

    def protected(self, number: int) -> bool:
        known = self.known[number]
        return bool(
            number in self.aliases.values()
            or known.tags
            or any(until is None or until > self.now for until in known.holds.values())
            or any(
                number in k.needs and k.state in ("committed", "deleted", "purging")
                for k in self.known.values()
            )
        )

    def alive(self, number: int) -> bool:
        return number in self.known and self.known[number].state == "committed"

    def refused(self, number: int, act: Any) -> bool:
        """Do it; whether it was refused, as it must be of what is not alive."""
        if number not in self.known:
            with pytest.raises(NotFound):
                act(manifest(number).id)
            return True
        if not self.alive(number):
            with pytest.raises(PermissionDenied):
                act(self.known[number].id)
            return True
        return False

    # What happens

    @initialize(
        needs=st.lists(st.none() | NUMBERS, min_size=4, max_size=6), foreign=st.none() | NUMBERS
    )
    def begin(self, needs: list[int | None], foreign: int | None) -> None:
        for number, needed in enumerate(needs):
            self.record(number, number == foreign, needed, number % 2 == 0)

    @rule(number=NUMBERS, foreign=RARELY, needs=st.none() | NUMBERS, by_id=st.booleans())
    def record(self, number: int, foreign: bool, needs: int | None, by_id: bool) -> None:
        kind = "deepspeed" if foreign else "ucformat"
        more: dict[str, Any] = {}
        if needs is not None and needs < number:
            more["sidecar"] = packed_over(f"/r/{needs}")
            if by_id:
                more["lineage"] = (
                    LineageDoc(kind="reshard", url=f"/r/{needs}", id=manifest(needs).id),
                )
        needed = {needs} if needs is not None and more else set()
        first = (manifest(number, "run", number, **more), kind, needed)
        made, kind, needed = self.made.setdefault(number, first)  # of an id there is one checkpoint
        found = self.catalog.record(made, f"/r/{number}", kind=kind)
        if number not in self.known:
            self.known[number] = Known(found.id, kind, needs=needed)
        elif self.known[number].state == "purged":
            self.known[number].state = "committed"
            self.known[number].purge_after = None

    @rule(span=st.integers(0, 12))
    def wait(self, span: int) -> None:
        self.now += timedelta(hours=span, microseconds=1)

    @rule(name=ALIASES, number=NUMBERS, expect=st.sampled_from([ANY, None]) | NUMBERS)
    def alias(self, name: str, number: int, expect: Any) -> None:
        if isinstance(expect, int) and expect not in self.known:
            expect = ANY
        old = self.known[expect].id if isinstance(expect, int) else expect
        if self.refused(number, lambda id_: self.catalog.alias(name, id_, expect=old)):
            return
        here = self.aliases.get(name)
        if expect is not ANY and here != expect:
            with pytest.raises(Conflict):
                self.catalog.alias(name, self.known[number].id, expect=old)
            return
        self.catalog.alias(name, self.known[number].id, expect=old)
        self.aliases[name] = number
        if here != number:
            self.moves.setdefault(name, []).append(number)

    @rule(name=ALIASES)
    def unalias(self, name: str) -> None:
        if name not in self.aliases:
            with pytest.raises(NotFound):
                self.catalog.unalias(name)
            return
        self.catalog.unalias(name)
        del self.aliases[name]
        self.moves[name].append(None)

    @rule(number=NUMBERS, tag=st.sampled_from("ab"), really=RARELY)
    def tag(
        self, number: int, tag: str, really: bool = True
    ) -> None:  # a tag ends all that could happen
        if really and not self.refused(number, lambda id_: self.catalog.tag(id_, tag)):
            self.catalog.tag(self.known[number].id, tag)
            self.known[number].tags.add(tag)

    @rule(number=NUMBERS, span=st.none() | st.integers(1, 20).map(lambda h: timedelta(hours=h)))
    def hold(self, number: int, span: timedelta | None) -> None:
        if not self.refused(number, lambda id_: self.catalog.hold(id_, "why", span)):
            made = self.catalog.hold(self.known[number].id, "why", span)
            self.known[number].holds[made] = None if span is None else self.now + span

    @rule(number=NUMBERS, one=st.booleans())
    def release(self, number: int, one: bool) -> None:
        if number in self.known:
            holds = self.known[number].holds
            which = min(holds, default=0) if one else None
            assert self.catalog.release(self.known[number].id, which) == (
                bool(holds) if one else len(holds)
            )
            self.known[number].holds = {k: v for k, v in holds.items() if one and k != which}

    @rule(number=NUMBERS, value=VALUES)
    def metric(self, number: int, value: float) -> None:
        if not self.refused(number, lambda id_: self.catalog.metric(id_, {"m": value})):
            self.catalog.metric(self.known[number].id, {"m": value})
            self.known[number].metrics["m"] = value

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=2, unique=True), grace=HOURS)
    def delete(self, numbers: list[int], grace: timedelta) -> None:
        numbers = [n for n in numbers if n in self.known]
        ids = [self.known[n].id for n in numbers]
        if any(
            not self.alive(n) or self.protected(n) or self.known[n].kind != "ucformat"
            for n in numbers
        ):
            with pytest.raises(PermissionDenied):
                self.catalog.delete(*ids, grace=grace)
            return
        self.catalog.delete(*ids, grace=grace)
        for n in numbers:
            self.known[n].state, self.known[n].purge_after = "deleted", self.now + grace

    @rule(number=NUMBERS)
    def restore(self, number: int) -> None:
        if number in self.known and self.known[number].state == "deleted":
            self.catalog.restore(self.known[number].id)
            self.known[number].state, self.known[number].purge_after = "committed", None
        elif number in self.known:
            with pytest.raises(PermissionDenied):
                self.catalog.restore(self.known[number].id)

    @rule(
        keep=st.sampled_from(KEEP),
        scope=st.sampled_from([None, "step < 4"]),
        late=RARELY,
        grace=HOURS,
    )
    def retain(self, keep: Any, scope: str | None, late: bool, grace: timedelta) -> None:
        more = {} if scope is None else {"scope": scope}
        policy = load_policy(
            {"version": 1, "keep": keep, "grace": f"{grace // timedelta(hours=1)}h", **more}
        )
        plan = self.catalog.retain(policy)
        deleted = {n for n, k in self.known.items() if k.id in {r.id for r in plan.delete}}
        assert not any(self.protected(n) or not self.alive(n) for n in deleted)
        assert {self.known[n].kind for n in deleted} <= {"ucformat"}
        if late and deleted:
            self.tag(min(deleted), "a")
            with pytest.raises(Conflict):
                self.catalog.retain(policy, apply=plan.id)
            return
        assert self.catalog.retain(policy, apply=plan.id).id == plan.id
        for n in deleted:
            self.known[n].state, self.known[n].purge_after = "deleted", self.now + grace

    @rule(number=NUMBERS, planned=st.booleans(), end=st.booleans())
    def purge(self, number: int, planned: bool, end: bool) -> None:
        """As `gc` does, without storage, whether it was planned or not; it may be killed between the two."""
        if number not in self.known:
            return
        known = self.known[number]
        may = known.state == "deleted" and known.kind == "ucformat" and not self.protected(number)
        may = may and known.purge_after is not None and known.purge_after <= self.now
        if planned:
            assert (known.id in {r.id for r in self.catalog.purgeable().purge}) == may
        with self.catalog.database.writing() as c:
            serial = resolve(c, Ref(known.id, id=known.id))
            urls = begin_purge(c, serial, make_stamp())
        assert urls == ([f"/r/{number}"] if may or known.state == "purging" else None)
        if urls is not None:
            known.state = "purging"
            if end:
                with self.catalog.database.writing() as c:
                    end_purge(c, serial, make_stamp())
                known.state = "purged"

    # What always holds

    @invariant()
    def all_is_as_the_model_says(self) -> None:
        found = {e.id: e for e in self.catalog.find(deleted=True)}
        assert set(found) == {k.id for k in self.known.values()}
        for number, known in self.known.items():
            entry = found[known.id]
            assert (entry.state, entry.kind, entry.purge_after) == (
                known.state,
                known.kind,
                known.purge_after,
            )
            assert set(entry.tags) == known.tags
            assert {h.id for h in entry.holds} == {
                k for k, until in known.holds.items() if until is None or until > self.now
            }
            assert repr(entry.metrics) == repr(known.metrics)
            assert entry.urls == (() if known.state == "purged" else (f"/r/{number}",))
            assert set(entry.aliases) == {a for a, n in self.aliases.items() if n == number}

    @invariant()
    def aliases_are_where_they_were_moved_to(self) -> None:
        assert {a.name: a.id for a in self.catalog.aliases()} == {
            a: self.known[n].id for a, n in self.aliases.items()
        }
        for name, moves in self.moves.items():
            history = self.catalog.alias_history(name)
            assert [m.version for m in history] == list(range(1, len(moves) + 1))
            targets = [None if n is None else self.known[n].id for n in moves]
            assert [m.target for m in history] == targets
            assert [m.source for m in history] == [None, *targets[:-1]]
        assert {a.name: a.version for a in self.catalog.aliases()} == {
            a: len(self.moves[a]) for a in self.aliases
        }

    @invariant()
    def who_follows_the_log_sees_what_moves(self) -> None:
        changes = self.catalog.changes(self.position, self.catalog.settled(self.log), most=10_000)
        self.position = changes.position
        here: dict[str, dict[str, set[str]]] = {"aliases": {}, "runs": {}}
        for alias in self.catalog.aliases():
            here["aliases"][alias.name] = {alias.id}
        for line in self.catalog.lines():
            here["runs"].setdefault(line.run, set()).add(line.head.id)
        told = {"aliases": {*changes.aliases}, "runs": {r for r, m in changes.runs.items() if m}}
        for kind, names in here.items():
            before = self.seen[kind]
            moved = {n for n in {*names, *before} if names.get(n) != before.get(n)}
            assert moved <= told[kind]
        self.seen = here

    @invariant()
    def what_is_protected_is_there(self) -> None:
        held = {
            n
            for n, k in self.known.items()
            if any(u is None or u > self.now for u in k.holds.values())
        }
        for number in {
            *self.aliases.values(),
            *(n for n, k in self.known.items() if k.tags),
            *held,
        }:
            assert self.catalog.get(self.known[number].id).state == "committed"


def test_anything_in_any_order(catalog: Catalog) -> None:
    machine = type("OnThisCatalog", (Catalogs,), {"catalog": catalog})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=18 if settings().derandomize else 60,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
