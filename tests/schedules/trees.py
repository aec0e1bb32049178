"""Checkpoints that are based on each other, in two folders of the world of schedules, and a model of what each holds.

What is done to them runs as an actor (`world.py`), so a fault can befall it at any of its calls,
and it can be killed before any of them. The model knows the bits of every tensor of every place;
what a checkpoint is based on is read in its manifest.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import ucformat
from tests.schedules.world import CATALOGS, Actor, World
from ucformat.catalog.catalog import Catalog
from ucformat.errors import NotACheckpoint, UcformatError
from ucformat.format.bases import place_of_base
from ucformat.format.structure import read_manifest
from ucformat.jobs.gc import collect
from ucformat.schema import CATALOG_DOCUMENT, MANIFEST, NEEDED_BY
from ucformat.settings import using
from ucformat.storage.url import open_store
from ucformat.torch import save

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from ucformat.schema.manifest import Manifest

__all__ = ["CATALOG", "FOREVER", "PLACES", "ROOT", "Bits", "Known", "Trees", "Trouble", "bits_of"]

CATALOG = CATALOGS[0]
ROOT = "memory://w"
PLACES = tuple(f"{ROOT}/{place}" for place in ("t/0", "t/1", "t/2", "t/3", "u/0", "u/1"))
FOREVER = timedelta(days=60)  # longer than any grace

#: The states in the catalog of what is deleted, and still there.
_DELETED = ("deleted", "thinned")

#: The bits of tensors, by name and state.
Bits = dict[tuple[str, str], bytes]

#: What befalls an actor: a fault, or `kill`, and at which of the calls that it can befall.
Trouble = tuple[str, int] | None


def state_of(values: tuple[int, int, int]) -> dict[str, Any]:
    """What a training has: each of the values tells what some of its tensors hold."""
    frozen, small, row = values
    table = torch.arange(24, dtype=torch.float32).reshape(8, 3)
    table[row % 8] += row
    half = (torch.arange(128, dtype=torch.float32).reshape(16, 8) * (1 + small / 64)).bfloat16()
    model = {
        "frozen": torch.arange(40, dtype=torch.float64).reshape(5, 8) + frozen,
        "half": half,
        "table": table,
        "count": torch.tensor(small),
        "none": torch.zeros((0, 4), dtype=torch.int8),
    }
    moments = {"half": {"exp_avg": half.float() / 3}, "table": {"exp_avg": table / 7 + small}}
    groups = [{"params": ["half", "table"], "lr": 0.1}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}


def bits_of(values: tuple[int, int, int]) -> Bits:
    """The bits of all tensors of `state_of`."""
    state = state_of(values)
    tensors = {(name, "weight"): tensor for name, tensor in state["model"].items()}
    for name, moments in state["optimizer"]["state"].items():
        tensors |= {(name, moment): tensor for moment, tensor in moments.items()}
    return {
        key: tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        for key, tensor in tensors.items()
    }


def changed_rows(before: Bits, now: Bits) -> torch.Tensor:
    """Which of the eight rows of the table, or of its moments, have other bits."""
    changed = torch.zeros(8, dtype=torch.bool)
    for key in [key for key in before.keys() & now.keys() if key[0] == "table"]:
        old, new = (np.frombuffer(bits[key], np.uint8).reshape(8, -1) for bits in (before, now))
        changed |= torch.from_numpy((old != new).any(axis=1))
    return changed


@dataclass(frozen=True)
class Known:
    """What the model knows of a place that has a checkpoint."""

    bits: Bits
    deleted: bool = False  # in the catalog: its files stay until they are collected

    def without(self, state: str) -> Known:
        """The same with no tensors of a state."""
        return replace(self, bits={key: b for key, b in self.bits.items() if key[1] != state})


class Trees:
    """The world, and the model of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.known: dict[str, Known] = {}
        self._numbers = count(1)
        self._checked: object = None
        #: Whether something that was interrupted was not done again: the catalog may not know of it.
        self.interrupted = False

    # What is there

    @contextmanager
    def user(self) -> Iterator[None]:
        """The settings of the one who looks."""
        with using(catalog=CATALOG, roots=ROOT):
            yield

    def manifest(self, place: str) -> Manifest | None:
        """The manifest at a place."""
        try:
            return read_manifest(open_store(place))[0]
        except NotACheckpoint:
            return None

    def bases(self, place: str) -> dict[str, str]:
        """The places of the bases of a checkpoint, and their ids."""
        manifest = self.manifest(place)
        docs = () if manifest is None else manifest.bases
        return {place_of_base(place, doc.url): doc.id for doc in docs}

    def beside(self, place: str) -> set[str]:
        """The places of the bases that are beside a checkpoint wherever that is."""
        with self.user():
            manifest = self.manifest(place)
            urls = [] if manifest is None else [doc.url for doc in manifest.bases]
            return {place_of_base(place, url) for url in urls if url.startswith("../")}

    def needed(self, place: str) -> bool:
        """Whether any checkpoint that is there, perhaps deleted in the catalog, is based on this one."""
        return any(place in self.bases(other) for other in self.known)

    def any_needed(self, places: Collection[str]) -> bool:
        """Whether one of these is needed."""
        with self.user():
            return any(map(self.needed, places))

    def copies(self, place: str) -> set[str]:
        """The places of a checkpoint."""
        manifest = self.manifest(place)
        assert manifest is not None
        return {
            p
            for p in self.known
            if (found := self.manifest(p)) is not None and found.id == manifest.id
        }

    def read(self, place: str) -> Bits | None:
        """The bits of the checkpoint at a place; None if there is none.

        Raises:
            UcformatError: there is one that cannot be read.
        """
        if self.manifest(place) is None:
            return None
        ck = ucformat.open(place)
        assert isinstance(ck.objects, dict)
        return {
            (info.name, info.state): ck[info.name, info.state].read().tobytes()
            for info in ck.tensors.values()
        }

    # What is done

    def play(self, work: Callable[[], Any], trouble: Trouble = None) -> Actor:
        """Let an actor do this, to its end or that of its own."""

        def run() -> None:
            with using(catalog=CATALOG, roots=ROOT):
                work()

        self.world.time += timedelta(minutes=1)
        self.world.trace.clear()
        actor = Actor(f"a{next(self._numbers)}", run)
        if trouble is not None and trouble[0] == "kill":
            actor.advance(trouble[1])
            actor.kill()
        else:
            if trouble is not None:
                actor.expect(*trouble)
            actor.advance()
        self.world.room = None
        self.world.full.clear()
        return actor

    def do(
        self,
        work: Callable[[], Any],
        results: Mapping[str, Known | None],
        *,
        on: str | None = None,
        allowed: bool = True,
        trouble: Trouble = None,
        collect_first: bool = False,
    ) -> None:
        """Do something, look at what came of it, and do it again if anything befell it.

        Args:
            results: what then is at the places that it changes.
            on: the base of what is written.
            allowed: whether it succeeds, or fails and changes nothing.
            collect_first: whether leftovers are collected before it is done again.
        """
        before = {place: self.known.get(place) for place in results}
        actor = self.play(work, trouble)
        disturbed = actor.killed or bool(actor.struck)
        if disturbed:
            assert actor.error is None or isinstance(actor.error, UcformatError), repr(actor.error)
            self._observe(before, results)
            self.interrupted = True
            self.check()
            if collect_first:
                self.collect()
                if on is not None and on not in self.known:  # it was deleted
                    allowed = allowed and self.known.get(next(iter(results))) in results.values()
            actor = self.play(work)
            self.interrupted = actor.error is not None
        if allowed and "needed by" in str(actor.error):  # by what was interrupted: until gc has run
            self.collect()
            actor = self.play(work)
        error = actor.error
        if error is not None and not isinstance(error, UcformatError):
            raise error
        if allowed:
            self._observe(before, results)
            done = all(self.known.get(place) == known for place, known in results.items())
            if not done or (error is not None and not disturbed):
                raise AssertionError(f"not done: {error!r}") from error
        else:
            assert error is not None or (disturbed and collect_first), "it was to be refused"
            if not disturbed:
                self._observe(before, before)
            else:
                self._observe(before, results if error is None else before)
        if self.interrupted:
            self.reindex()
        self.check()

    def reindex(self) -> None:
        """Have the catalog record what is there."""

        def work() -> None:
            with Catalog() as catalog:
                for tree in ("t", "u"):
                    found = ucformat.reindex(f"{ROOT}/{tree}", catalog)
                    if found.failures:
                        raise UcformatError("; ".join(map(str, found.failures)))

        actor = self.play(work)
        if actor.error is not None:
            raise actor.error
        self.interrupted = False
        self.check()

    def delete(
        self,
        work: Callable[[], Any],
        copies: Collection[str],
        *,
        thin: bool = False,
        trouble: Trouble = None,
        collect_first: bool = False,
    ) -> None:
        """Delete the copies of a checkpoint in the catalog, with `thin` also if it is needed."""
        allowed = thin or not self.any_needed(copies)
        actor = self.play(work, trouble)
        disturbed = actor.killed or bool(actor.struck)
        self._learn_deleted()
        if disturbed:
            self.interrupted = True
            self.check()
            if collect_first:
                self.collect()
                allowed = thin or not self.any_needed(set(copies) & set(self.known))
            actor = self.play(work)
            self.interrupted = False
            self._learn_deleted()
        gone = not set(copies) & set(self.known)
        if allowed and not disturbed and actor.error is not None:
            raise actor.error
        deleted = gone or all(self.known[p].deleted for p in copies)
        # where dependents cannot be listed it is deleted, and gc finds them before it removes any file
        as_expected = deleted == allowed or (deleted and disturbed)
        assert as_expected, f"deleted: {deleted}, allowed: {allowed}: {actor.error!r}"
        self.check()

    def restore(self) -> None:
        """Restore what is deleted in the catalog."""

        def work() -> None:
            with Catalog() as catalog:
                catalog.restore(*(e.id for e in catalog.find(deleted=True) if e.state == "deleted"))

        actor = self.play(work)
        if actor.error is not None:
            raise actor.error
        self._learn_deleted()
        self.check()

    def read_elsewhere(self) -> None:
        """Read the first folder at another place, as if it had been moved there, and move it back."""
        files, here, there = self.world.files, "w/t/", "w/moved/"
        with self.user():
            homes = [p for p in self.known if p.startswith(f"memory://{here}")]
            inside = [p for p in homes if self._moves(p)]
        moved = {key: file for key, file in files.items() if key.startswith(here)}
        for key in moved:
            files[there + key.removeprefix(here)] = files.pop(key)
        with self.user():
            for place in inside:
                bits = self.read(place.replace(here, there))
                assert bits == self.known[place].bits, f"{place} holds other bits elsewhere"
        for key in [key for key in files if key.startswith(there)]:
            del files[key]
        files.update(moved)

    def _moves(self, place: str) -> bool:
        """Whether all that a checkpoint depends on is found beside it wherever that is."""
        bases = set(self.bases(place))
        return bases <= self.beside(place) and all(map(self._moves, bases))

    def retain(
        self, work: Callable[[], Any], *, trouble: Trouble = None, collect_first: bool = False
    ) -> None:
        """Apply a policy, which may delete checkpoints in the catalog and drop the moments of others."""
        for befalls in (trouble, None):
            before = dict(self.known)
            with self.user():
                may_go = {p for p in self.known if not self.any_needed(self.copies(p))}
            actor = self.play(work, befalls)
            disturbed = actor.killed or bool(actor.struck)
            if (
                actor.error is not None
                and not disturbed
                and "as its `bases`" not in str(actor.error)
            ):
                raise actor.error
            self._observe(before, {p: k.without("exp_avg") for p, k in before.items()})
            self._learn_deleted()
            self.interrupted = disturbed
            touched = {p for p, k in before.items() if self.known[p] != k}
            assert touched <= may_go, f"{touched - may_go} are needed"
            self.check()
            if not disturbed:
                break
            if collect_first:
                self.collect()

    def _learn_deleted(self) -> None:
        """Find out what the catalog calls deleted."""
        with self.user(), Catalog() as catalog:
            deleted = {
                url for e in catalog.find(deleted=True) if e.state in _DELETED for url in e.urls
            }
        for place, known in self.known.items():
            self.known[place] = replace(known, deleted=place in deleted)

    def _observe(
        self, before: Mapping[str, Known | None], results: Mapping[str, Known | None]
    ) -> None:
        """Find out which of the two is at each place; it must be one of them, bit for bit."""
        for place, was in before.items():
            with self.user():
                bits = self.read(place)
            for known in (results[place], was):
                if bits == (None if known is None else known.bits):
                    break
            else:
                raise AssertionError(f"{place} holds neither what it held nor what it was to hold")
            if known is None:
                self.known.pop(place, None)
            else:
                self.known[place] = known

    def collect(self, trouble: Trouble = None, *, thin: bool = False) -> None:
        """Let gc run when all grace is over; what the catalog calls deleted goes, unless it is needed.

        Args:
            thin: of what is needed only that stays.
        """
        self.world.time += FOREVER
        with self.user():
            deleted = [place for place, known in self.known.items() if known.deleted]
            free = {p for p in deleted if not self.any_needed(self.copies(p))}
        interrupted = self.interrupted
        for befalls in (trouble, None):
            actor = self.play(partial(collect_all, thin=thin), befalls)
            disturbed = actor.killed or bool(actor.struck)
            if actor.error is not None and not disturbed:
                raise actor.error
            with self.user():
                for place in [place for place in deleted if self.manifest(place) is None]:
                    self.known.pop(place, None)
                for place in set(deleted) & set(self.known) if thin else ():
                    self._learn_remnant(place)
            self.interrupted = interrupted or disturbed
            self.check()
            self.world.time += FOREVER
            if not disturbed:
                break
        if free & set(self.known):  # what was interrupted needed them, and is collected after them
            self.world.time += FOREVER
            if (error := self.play(partial(collect_all, thin=thin)).error) is not None:
                raise error
            with self.user():
                left = {place for place in free if self.manifest(place) is not None}
            assert not left, f"{left} are deleted, nobody needs them, and they were not purged"
            self.known = {p: known for p, known in self.known.items() if p not in free}
            self.check()

    def _learn_remnant(self, place: str) -> None:
        """Find out what is left of a deleted checkpoint: what others need, with the bits that it had."""
        bits, known = self.read(place), self.known[place]
        assert bits is not None
        assert bits.items() <= known.bits.items(), f"{place} holds other bits"
        self.known[place] = replace(known, bits=bits)

    # What always holds

    def check(self) -> None:
        """Every checkpoint that is to be there reads bit for bit, verifies, and its bases know of it."""
        state = (self.world.digest(), self.world.digest(CATALOG))
        now = (state, self.interrupted, dict(self.known))
        if now == self._checked:
            return
        with self.user():
            there = {
                f"memory://{key.removesuffix(f'/{MANIFEST}')}"
                for key in self.world.files
                if key.endswith(f"/{MANIFEST}")
                and self.manifest(f"memory://{key.removesuffix(f'/{MANIFEST}')}")
            }
            assert there == set(self.known), f"{there ^ set(self.known)}"
            for place, known in self.known.items():
                assert self.read(place) == known.bits, f"{place} holds other bits"
                report = ucformat.verify(place)
                assert report, f"{place}: {report}"
                self._check_bases(place)
            if not self.interrupted:
                self._check_catalog()
        self._checked = now

    def _check_bases(self, place: str) -> None:
        manifest = self.manifest(place)
        assert manifest is not None
        for base, made in self.bases(place).items():
            found = self.manifest(base)
            assert found is not None, f"the base {base} of {place} is gone"
            assert found.id == made, f"the base {base} of {place} is another one now"
            key = f"{base}/{NEEDED_BY}/{manifest.id}.json".removeprefix("memory://")
            assert key in self.world.files, f"{base} does not know that {place} needs it"

    def _check_catalog(self) -> None:
        """What the catalog calls live is there, and known; and nothing else is."""
        with Catalog() as catalog:
            entries = catalog.find(deleted=True)
        listed = {url: e for e in entries if e.state in ("committed", *_DELETED) for url in e.urls}
        for url, entry in listed.items():
            manifest = self.manifest(url)
            assert manifest is not None, (
                f"the catalog has {entry.id} at {url}, and nothing is there"
            )
            assert manifest.id == entry.id, f"the catalog has {entry.id} at {url}: {manifest.id}"
            assert (entry.state in _DELETED) == self.known[url].deleted, (url, entry.state)
        assert set(listed) == set(self.known), f"{set(listed) ^ set(self.known)}"

    def left(self) -> list[str]:
        """Files that belong to nothing, once gc has run."""
        homes = {}
        with self.user():
            for place in self.known:
                manifest = self.manifest(place)
                assert manifest is not None
                homes[place.removeprefix("memory://")] = manifest
        left = []
        for key in self.world.files:
            home = next((p for p in homes if key.startswith(f"{p}/")), None)
            if home is None:
                if not key.endswith("/README"):
                    left.append(key)
                continue
            attempt = homes[home].attempt
            rest = key.removeprefix(f"{home}/")
            own = tuple(f"{kind}/{attempt}/" for kind in ("data", "objects", "assets"))
            if rest.startswith(f"{NEEDED_BY}/"):
                dependent = rest.removeprefix(f"{NEEDED_BY}/").removesuffix(".json")
                if not any(
                    m.id == dependent and f"memory://{home}" in self.bases(f"memory://{p}")
                    for p, m in homes.items()
                ):
                    left.append(key)
            elif not (
                rest in (MANIFEST, CATALOG_DOCUMENT, f"attempts/{attempt}.json")
                or rest.startswith(own)
            ):
                left.append(key)
        return left


def put(place: str, values: tuple[int, int, int], step: int, **more: Any) -> None:
    """Save a state."""
    save(state_of(values), place, run="r", step=step, chunk_bytes=64, **more)


def collect_all(*, thin: bool) -> None:
    """`ucp gc --apply` of both trees."""
    with Catalog() as catalog:
        found = collect(catalog, (f"{ROOT}/t", f"{ROOT}/u"), thin=thin, apply=True)
    if found.failures:
        raise UcformatError("; ".join(found.failures))
