"""The commands that actors run, and the world that they find."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from safetensors.numpy import save as safetensors

import ucformat
from tests.schedules.training import (
    FAST,
    HOME,
    MIDDLE,
    arrays,
    fill_again,
    launch,
    replay,
    save_deltas,
    save_experts,
    save_step,
    save_window,
)
from tests.schedules.world import CATALOGS
from ucformat.catalog.catalog import Catalog
from ucformat.errors import Conflict, PermissionDenied, UcformatError
from ucformat.jobs.gc import collect
from ucformat.jobs.removal import discard
from ucformat.schema.policy import Policy
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.schedules.training import Content
    from tests.schedules.world import Snapshot, World

__all__ = [
    "COMMANDS",
    "DELETING",
    "KEEPERS",
    "NEXT",
    "TREES",
    "Command",
    "first_world",
    "parse_actor",
    "run_world",
]

ROOT = "memory://w"
SRC, NEW, PACKED, GONE, VIRTUAL, BASED, PATCHED, WEIGHTS, COPY = (
    f"{ROOT}/{p}" for p in ("src", "t/new", "t/p", "t/a", "t/v", "t/b", "t/c", "t/w", "u/p")
)
TREES = (f"{ROOT}/t", f"{ROOT}/u")  # where checkpoints lie: ours, and another user's
_STEP = "step-00000004"  # the newest checkpoint of a run with tiers
_OLD = tuple(f"{tier}/{_STEP}" for tier in (FAST, MIDDLE, HOME))
_NEW = tuple(f"{tier}/step-00000005" for tier in (FAST, MIDDLE, HOME))
GRACE, LONG = timedelta(days=7), timedelta(days=30)
NOW = timedelta(0)


class Failed(UcformatError):
    """What the command line says where a command did some of its work and not all."""


@dataclass(frozen=True, slots=True)
class Command:
    """What an actor does; `contents` are the steps of what it may commit, and the places those that it may take away.

    `replaces` are places of which it may commit a checkpoint in place of another; `deletes` those
    of which it deletes. With `tiers` it finds those of a run, too.
    """

    work: Callable[[], Any]
    contents: tuple[Content, ...] = ()
    replaces: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()
    tiers: bool = False


def _catalog(act: Callable[[Catalog], Any]) -> Callable[[], Any]:
    def work() -> None:
        with Catalog() as catalog:
            act(catalog)

    return work


def _retain(catalog: Catalog) -> None:
    policy = Policy.model_validate({"version": 1, "keep": {"where": ["step = 2"]}, "grace": "0s"})
    catalog.retain(policy, apply=catalog.retain(policy).id)


def _on_base(act: Callable[[], Any]) -> Callable[[], Any]:
    """Save on a base, unless that is done, and then do something with what was saved."""

    def work() -> None:
        with suppress(Conflict):
            save_step(1, BASED, base=PACKED)
        act()

    return work


def _fold() -> None:
    """Save a patch of what is a patch itself, unless that is done, and make it one of the first."""
    with suppress(Conflict):
        save_step(3, PATCHED, base=PACKED, patch=True)
    with suppress(Conflict):
        save_step(2, BASED, base=PATCHED, patch=True)
    ucformat.compact(BASED, fold=True)


def _keep_weights(catalog: Catalog) -> None:
    """Delete a checkpoint of which another one needs the weights, and have gc drop the rest."""
    with suppress(Conflict):
        ucformat.convert(PACKED, WEIGHTS, states="weight", base=PACKED)
    with suppress(PermissionDenied):  # it is deleted, and gc was interrupted
        catalog.delete(PACKED, grace=NOW, thin_needed=True)
    found = collect(catalog, [TREES[0]], thin=True, apply=True)
    _raise(found.failures)
    for reason in found.whole.values():  # as the command line says it
        logging.getLogger("ucformat").warning("%s", reason)


def _replay() -> None:
    """Save deltas, unless that is done, and replay them."""
    save_deltas(PACKED, BASED, PATCHED)
    replay(PATCHED)


def _cut(catalog: Catalog) -> None:
    """Save deltas of a step, unless that is done, and delete them."""
    save_deltas(PACKED, BASED)
    catalog.delete(BASED, grace=NOW)


def _register(place: str) -> Callable[[Catalog], Any]:
    return lambda c: _raise(ucformat.register([place], c, recursive=True).failures)


def _raise(failures: Any) -> None:
    if failures:
        raise Failed("; ".join(map(str, failures)))


COMMANDS: dict[str, Command] = {
    "convert": Command(lambda: ucformat.convert(SRC, NEW, run="r", chunk_bytes=8), contents=(2,)),
    "resume": Command(lambda: ucformat.convert(SRC, NEW, run="r"), contents=(2,)),
    "save": Command(lambda: save_step(3, NEW), contents=(3,)),
    "overwrite": Command(
        lambda: ucformat.convert(SRC, PACKED, run="r", overwrite=True),
        contents=(2,),
        replaces=(PACKED,),
    ),
    "copy": Command(lambda: ucformat.copy(PACKED, NEW), contents=(1,)),
    "virtual": Command(
        lambda: ucformat.convert(PACKED, VIRTUAL, run="r", virtual=True), contents=(1, 2)
    ),
    "based": Command(lambda: save_step(1, BASED, base=PACKED), contents=(1,)),
    "patch": Command(lambda: ucformat.patch(PACKED, SRC, BASED), contents=(2,)),
    "patched": Command(lambda: save_step(3, PATCHED, base=PACKED, patch=True), contents=(3,)),
    "fold": Command(_fold, contents=(2, 3)),
    "experts": Command(lambda: save_experts(PACKED, BASED), contents=((5, 1),)),
    "window": Command(lambda: save_window(PACKED, BASED, PATCHED), contents=(5, (6, 5), 6)),
    "deltas": Command(lambda: save_deltas(PACKED, BASED, PATCHED), contents=(1,)),
    "replay": Command(_replay, contents=(1,)),
    "cut": Command(_catalog(_cut), contents=(1,), deletes=(BASED,)),
    "compact": Command(_on_base(lambda: ucformat.compact(BASED)), contents=(1, 2)),
    "read": Command(_on_base(lambda: ucformat.convert(BASED, NEW)), contents=(1, 2)),
    "remnant": Command(_catalog(_keep_weights), contents=(1,), deletes=(PACKED, NEW)),
    "materialize": Command(lambda: ucformat.materialize(PACKED), contents=(1,)),
    "thin": Command(lambda: ucformat.thin(PACKED, "exp_avg"), contents=(1,), replaces=(PACKED,)),
    "register": Command(_catalog(_register(TREES[0]))),
    "register-copies": Command(_catalog(_register(TREES[1]))),
    "delete": Command(_catalog(lambda c: c.delete(PACKED, grace=NOW)), deletes=(PACKED, NEW)),
    "retain": Command(
        _catalog(_retain),
        deletes=(PACKED, NEW, VIRTUAL, BASED, PATCHED, WEIGHTS, *_OLD, *_NEW),
    ),
    "gc": Command(_catalog(lambda c: _raise(collect(c, [TREES[0]], apply=True).failures))),
    "reindex": Command(_catalog(lambda c: _raise(ucformat.reindex(TREES[0], c).failures))),
    "hold": Command(_catalog(lambda c: c.hold(PACKED, "ours"))),
    "launch": Command(lambda: launch(5), contents=(5,), deletes=_OLD, tiers=True),
    "restore": Command(launch, tiers=True),
    "fill": Command(lambda: fill_again(_STEP), contents=(4,), tiers=True),
    "drop": Command(lambda: discard(_OLD[1]), deletes=(_OLD[1],), tiers=True),
    "delete-step": Command(
        _catalog(lambda c: c.delete(_OLD[1], grace=NOW)), deletes=_OLD, tiers=True
    ),
}
#: The launch after all that happened.
NEXT = Command(lambda: launch(6), contents=(6,), deletes=(*_OLD, *_NEW), tiers=True)
#: Those that may take away the newest step of a run.
DELETING = ("retain", "delete-step")
#: Those that change a catalog and not only tell it.
KEEPERS = ("virtual", "register", "register-copies", "delete", "retain", "gc", "reindex", "hold")


def parse_actor(text: str) -> tuple[str, str, timedelta]:
    """The command, the catalog and the error of the clock of an actor: `gc`, `gc@2`, `gc+30` (days), `gc@2-30`."""
    found = re.fullmatch(r"([a-z]+(?:-[a-z]+)*)(?:@([123]))?([+-][0-9]+)?", text)
    if found is None or found[1] not in COMMANDS:
        raise ValueError(
            f"{text!r} is no actor; there are: {', '.join(COMMANDS)}, each with @2 or @3 and +DAYS or -DAYS"
        )
    return found[1], CATALOGS[int(found[2] or 1) - 1], timedelta(days=int(found[3] or 0))


def first_world(world: World) -> tuple[Snapshot, dict[str, tuple[Content, ...]]]:
    """Make what all schedules begin with; also the contents of each checkpoint by its id.

    `t/p` is packed, `t/a` was deleted longer ago than its grace, and a conversion to `t/new` was
    killed before its commit as long ago. `u/p` is a copy of `t/p` that belongs to the third
    catalog, and was deleted there. `src` is a model's safetensors file.
    """
    open_store(SRC).put_if_absent("model.safetensors", safetensors(arrays(2)))
    for tree in TREES:
        open_store(tree).put_if_absent(
            "README", b"not empty, so that nobody takes it for a disk that is not mounted"
        )
    _play(world, lambda: save_step(1, PACKED, form="packed"))
    _play(world, lambda: save_step(0, GONE))
    _play(world, lambda: ucformat.copy(PACKED, COPY), "three")
    _play(world, _catalog(lambda c: c.delete(GONE, grace=NOW)))
    _play(world, _catalog(lambda c: c.delete(COPY, grace=NOW)), "three")
    steps = zip(world.commits, (1, 0, 1), strict=True)
    contents: dict[str, tuple[Content, ...]] = {made: (step,) for (_, made, _), step in steps}
    before = len(world.commits)
    resumed = world.actor("", COMMANDS["resume"].work, CATALOGS[0], NOW)
    while not any(key.startswith("w/t/new/objects/") for key in world.files):
        resumed.advance(1)
    resumed.kill()
    assert len(world.commits) == before
    world.time += LONG
    return world.save(), contents


def run_world(world: World) -> Snapshot:
    """The same, and a run whose step 4 is in its two faster tiers; filling the slowest was killed."""
    launched = world.actor("", lambda: launch(4), CATALOGS[0], NOW)
    while not any(key.startswith("w/t/r/") and "/objects/" in key for key in world.files):
        launched.advance(1)
    launched.kill()
    world.time += LONG
    return world.save()


def _play(world: World, work: Callable[[], Any], catalog: str = CATALOGS[0]) -> None:
    actor = world.actor("", work, catalog, NOW)
    actor.advance()
    if actor.error is not None:
        raise actor.error
