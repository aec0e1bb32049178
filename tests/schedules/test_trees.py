"""Checkpoints on bases, whatever is done to them and whatever befalls it: all that are live read bit for bit."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import ucformat
from tests.schedules.trees import PLACES, ROOT, Known, Trees, bits_of, changed_rows, put
from tests.schedules.world import FAULTS, World
from ucformat.catalog.catalog import Catalog
from ucformat.schema.policy import Policy
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.schedules.trees import Trouble
    from tests.schedules.world import Snapshot

Values = tuple[int, int, int]
NUMBER = st.integers(0, 5)
VALUES = st.tuples(*[st.integers(0, 2)] * 3)
CODEC = st.sampled_from([None, "blosc"])
HOW = st.fixed_dictionaries(
    {"form": st.sampled_from(["zarr", "packed"]), "codec": st.sampled_from([None, "blosc", "raw"])}
)
ON = st.fixed_dictionaries(dict.fromkeys(("patch", "changed", "verify_changed"), st.booleans()))
KEEP = st.sampled_from(
    [
        [{"last": 2}],
        [{"last": 2}, {"every": 1, "states": ["weight"]}],
        [{"every": 2}, {"every": 1, "states": ["weight"]}],
    ]
)
TROUBLE = st.none() | st.tuples(
    st.sampled_from(["kill", "kill", *FAULTS]), st.integers(1, 25) | st.integers(1, 150)
)
BEFALLS: Any = {"trouble": TROUBLE, "collect_first": st.booleans()}


class OnBases(RuleBasedStateMachine):
    """Checkpoints in two folders, and beside them what each holds."""

    world: World
    first: Snapshot

    def __init__(self) -> None:
        super().__init__()
        self.world.restore(self.first)
        self.trees = Trees(self.world)
        self.step = 0

    @property
    def known(self) -> dict[str, Known]:
        return self.trees.known

    def needed(self, place: str) -> bool:
        with self.trees.user():
            return self.trees.needed(place)

    def bases(self, place: str) -> dict[str, str]:
        with self.trees.user():
            return self.trees.bases(place)

    def pick(self, number: int, *, live: bool = True) -> str:
        """A place with a checkpoint that is not deleted, or with any."""
        places = sorted(p for p, k in self.known.items() if not (live and k.deleted))
        return places[number % len(places)]

    def vacant(self, number: int) -> str:
        """A place without a checkpoint."""
        places = [p for p in PLACES if p not in self.known]
        return places[number % len(places)]

    @property
    def any_live(self) -> bool:
        return any(not known.deleted for known in self.known.values())

    @property
    def room(self) -> bool:
        return self.any_live and len(self.known) < len(PLACES)

    # What writes checkpoints

    @initialize(values=VALUES, on=VALUES, how=HOW)
    def begin(self, values: Values, on: Values, how: dict[str, Any]) -> None:
        self._save(PLACES[0], values, {})
        self._save(PLACES[1], on, {**how, "base": PLACES[0]})

    @rule(place=NUMBER, values=VALUES, how=HOW, **BEFALLS)
    def save(self, place: int, values: Values, how: dict[str, Any], **befalls: Any) -> None:
        if len(self.known) < len(PLACES):
            self._save(self.vacant(place), values, how, **befalls)

    @precondition(lambda self: self.room)
    @rule(place=NUMBER, values=VALUES, base=NUMBER, on=ON, how=HOW, **BEFALLS)
    def save_on(
        self,
        place: int,
        values: Values,
        base: int,
        on: dict[str, bool],
        how: dict[str, Any],
        **befalls: Any,
    ) -> None:
        """Save on a base, and perhaps tell which rows of the table changed."""
        home = self.pick(base, live=False)
        more: dict[str, Any] = {"base": home, "patch": on["patch"]}
        if on["changed"]:
            rows = changed_rows(self.known[home].bits, bits_of(values))
            more |= {"changed": {"table": rows}, "verify_changed": on["verify_changed"]}
        self._save(self.vacant(place), values, {**how, **more}, **befalls)

    @precondition(lambda self: self.any_live)
    @rule(place=NUMBER, values=VALUES, base=st.none() | NUMBER, how=HOW, **BEFALLS)
    def overwrite(
        self, place: int, values: Values, base: int | None, how: dict[str, Any], **befalls: Any
    ) -> None:
        home = self.pick(place)
        on = {} if base is None else {"base": self.pick(base, live=False)}
        allowed = on.get("base") != home and not self.needed(home)
        self._save(home, values, {**how, **on, "overwrite": True}, allowed=allowed, **befalls)

    def _save(self, place: str, values: Values, how: dict[str, Any], **more: Any) -> None:
        self.step += 1
        step = self.step
        work = partial(put, place, values, step, **how)
        self.trees.do(work, {place: Known(bits_of(values))}, on=how.get("base"), **more)

    @precondition(lambda self: self.room)
    @rule(src=NUMBER, dst=NUMBER, base=st.none() | NUMBER, codec=CODEC, **BEFALLS)
    def convert(self, src: int, dst: int, base: int | None, codec: Any, **befalls: Any) -> None:
        source, place = self.pick(src), self.vacant(dst)
        on = None if base is None else self.pick(base, live=False)
        self.trees.do(
            lambda: ucformat.convert(source, place, run="r", chunk_bytes=64, base=on, codec=codec),
            {place: self.known[source]},
            on=on,
            **befalls,
        )

    @precondition(lambda self: self.room)
    @rule(base=NUMBER, src=NUMBER, dst=NUMBER, **BEFALLS)
    def patch(self, base: int, src: int, dst: int, **befalls: Any) -> None:
        on, source, place = self.pick(base, live=False), self.pick(src), self.vacant(dst)
        work = partial(ucformat.patch, on, source, place)
        self.trees.do(work, {place: self.known[source]}, on=on, **befalls)

    @precondition(lambda self: self.room)
    @rule(src=NUMBER, dst=NUMBER, with_bases=st.booleans(), **BEFALLS)
    def copy(self, src: int, dst: int, with_bases: bool, **befalls: Any) -> None:
        source, place = self.pick(src), self.vacant(dst)
        results: dict[str, Known | None] = {}
        allowed = self._copied(source, place, with_bases, results)
        self.trees.do(
            lambda: ucformat.copy(source, place, with_bases=with_bases),
            results,
            allowed=allowed,
            **befalls,
        )

    def _copied(
        self, src: str, dst: str, with_bases: bool, results: dict[str, Known | None]
    ) -> bool:
        """Whether a copy is possible, and what it makes."""
        results[dst] = self.known[src]
        todo, planned = [(src, dst)], {dst: ""}
        while todo:
            src, dst = todo.pop()
            beside = self.trees.beside(src)
            for base, made in self.bases(src).items():
                place = f"{dst.rpartition('/')[0]}/{base.rpartition('/')[2]}"
                place = place if base in beside else base
                with self.trees.user():
                    there = self.trees.manifest(place)
                if made in (planned.get(place), None if there is None else there.id):
                    continue
                if not with_bases or base not in beside or there is not None or place in planned:
                    return False
                planned[place], results[place] = made, self.known[base]
                todo.append((base, place))
        return True

    # What changes them in place

    @precondition(lambda self: self.any_live)
    @rule(place=NUMBER, **BEFALLS)
    def materialize(self, place: int, **befalls: Any) -> None:
        home = self.pick(place)
        self.trees.do(lambda: ucformat.materialize(home), {home: self.known[home]}, **befalls)

    @precondition(lambda self: self.any_live)
    @rule(place=NUMBER, fold=st.booleans(), **BEFALLS)
    def compact(self, place: int, fold: bool, **befalls: Any) -> None:
        home = self.pick(place)
        allowed = not fold or self._anchors(home) <= 1
        work = partial(ucformat.compact, home, fold=fold)
        self.trees.do(work, {home: self.known[home]}, allowed=allowed, **befalls)

    @precondition(lambda self: self.room)
    @rule(place=NUMBER, dst=NUMBER, fold=st.booleans(), **BEFALLS)
    def compact_to(self, place: int, dst: int, fold: bool, **befalls: Any) -> None:
        home, place_of_copy = self.pick(place), self.vacant(dst)
        allowed = bool(self.bases(home)) and (not fold or self._anchors(home) == 1)
        work = partial(ucformat.compact, home, place_of_copy, fold=fold)
        self.trees.do(work, {place_of_copy: self.known[home]}, allowed=allowed, **befalls)

    def _anchors(self, place: str) -> int:
        """The number of whole checkpoints that one depends on, by their ids."""
        found, todo = set(), [*self.bases(place).items()]
        while todo:
            base, made = todo.pop()
            below = self.bases(base).items()
            todo += below
            found |= set() if below else {made}
        return len(found)

    @precondition(lambda self: self.any_live)
    @rule(place=NUMBER, **BEFALLS)
    def thin(self, place: int, **befalls: Any) -> None:
        home = self.pick(place)
        thinned = self.known[home].without("exp_avg")
        if thinned == self.known[home]:
            return
        allowed = not self.needed(home)
        work = partial(ucformat.thin, home, "exp_avg")
        self.trees.do(work, {home: thinned}, allowed=allowed, **befalls)

    # What removes them

    @precondition(lambda self: self.any_live)
    @rule(place=NUMBER, thin=st.booleans(), **BEFALLS)
    def delete(self, place: int, thin: bool, **befalls: Any) -> None:
        with self.trees.user():
            home = self.pick(place)
            copies, manifest = self.trees.copies(home), self.trees.manifest(home)
        assert manifest is not None
        made = manifest.id

        def work() -> None:
            with Catalog() as catalog:
                catalog.delete(made, thin_needed=thin)

        self.trees.delete(work, copies, thin=thin, **befalls)

    @rule(keep=KEEP, **BEFALLS)
    def retain(self, keep: Any, **befalls: Any) -> None:
        policy = Policy.model_validate({"version": 1, "grace": "0s", "keep": keep})

        def work() -> None:
            with Catalog() as catalog:
                catalog.retain(policy, apply=catalog.retain(policy).id)

        self.trees.retain(work, **befalls)

    @rule(befalls=TROUBLE, thin=st.booleans())
    def collect(self, befalls: Trouble, thin: bool) -> None:
        self.trees.collect(befalls, thin=thin)
        assert self.trees.left() == []

    @precondition(lambda self: any(known.deleted for known in self.known.values()))
    @rule()
    def restore(self) -> None:
        self.trees.restore()

    # What only the catalog sees, and what it does not

    @rule()
    def reindex(self) -> None:
        self.trees.reindex()

    @rule()
    def move(self) -> None:
        self.trees.read_elsewhere()


@pytest.fixture
def machine() -> Iterator[type[OnBases]]:
    with World() as world:
        for tree in ("t", "u"):
            open_store(f"{ROOT}/{tree}").put_if_absent("README", b"this disk is mounted")
        yield type("InThisWorld", (OnBases,), {"world": world, "first": world.save()})


@pytest.mark.front("few")
@pytest.mark.parametrize("examples", [4, 150], ids=["few", "many"])
def test_whatever_is_done_to_them(machine: type[OnBases], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=10 if examples < 10 else 25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
