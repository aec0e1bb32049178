"""Plays a schedule, and says what is wrong with what came of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.schedules.commands import (
    COMMANDS,
    COPY,
    DELETING,
    GONE,
    LONG,
    NEXT,
    NOW,
    TREES,
    first_world,
    parse_actor,
    run_world,
)
from tests.schedules.training import FAST, HOME, MIDDLE, arrays, replay_at, same
from tests.schedules.world import CATALOGS, FAULTS, ROOTS, Call, World
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.models import Base
from ucformat.errors import (
    Conflict,
    NotACheckpoint,
    NotFound,
    PermissionDenied,
    UcformatError,
    UnsupportedError,
)
from ucformat.format.bases import place_of_base
from ucformat.format.structure import read_manifest
from ucformat.jobs.gc import collect
from ucformat.references import open_reference
from ucformat.schema import CATALOG_DOCUMENT, MANIFEST, NEEDED_BY
from ucformat.schema.documents import NeededByDoc
from ucformat.settings import using
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tests.schedules.training import Content
    from tests.schedules.world import Actor, Outcome, Snapshot

__all__ = ["Played", "Player", "Step", "parse", "text_of"]


_NEXT = "next"  # who launches the training of a run when all else is done
_OUTCOMES = 10_000  # that are remembered at once
_ASKED = 300_000  # calls of looking at checkpoints that are


@dataclass(frozen=True, slots=True)
class Step:
    """An actor makes so many calls, or (None) all that are left, or is killed.

    Or a fault is to befall it: at its call of this number (None is 1) from here on, of those that
    it can befall.
    """

    actor: str
    calls: int | None = None
    kill: bool = False
    fault: str = ""

    def __str__(self) -> str:
        if self.fault:
            return f"{self.actor}%{self.fault}{self.calls or ''}"
        return (
            f"!{self.actor}"
            if self.kill
            else self.actor
            if self.calls is None
            else f"{self.actor}:{self.calls}"
        )


def parse(text: str) -> tuple[Step, ...]:
    """The schedule that a text says: `resume:12 gc:7 !resume gc`, or `resume%eio12`."""
    steps = []
    for word in text.split():
        found = re.fullmatch(r"(!?)([^:!%]+)(?::([0-9]+)|%([a-z]+)([0-9]+)?)?", word)
        if found is None or (found[4] and (found[1] or found[4] not in FAULTS)):
            raise ValueError(
                f"{word!r} is no step: write ACTOR, ACTOR:CALLS, !ACTOR or ACTOR%FAULT; there are {', '.join(FAULTS)}"
            )
        parse_actor(found[2])
        number = found[3] or found[5]
        steps.append(
            Step(found[2], None if number is None else int(number), bool(found[1]), found[4] or "")
        )
    return tuple(steps)


def text_of(steps: Sequence[Step]) -> str:
    """As `parse` reads it."""
    return " ".join(map(str, steps))


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a schedule: the calls of all actors in order, and what is wrong."""

    steps: tuple[Step, ...]
    trace: tuple[Call, ...]
    complaints: tuple[str, ...]
    struck: bool = False  # whether a fault befell anybody

    def __str__(self) -> str:
        return f"{text_of(self.steps)}\n  " + "\n  ".join(self.complaints)


class _Asked:
    """What is asked of the store next, by who was answered all this before; or, at the end, what he found."""

    def __init__(self) -> None:
        self.call: tuple[str, str] | None = None
        self.then: dict[bytes, _Asked] = {}
        self.problem: Exception | None = None


@dataclass(frozen=True, slots=True)
class _First:
    """What schedules begin with, the contents of its checkpoints by their ids, and their commits."""

    world: Snapshot
    contents: Mapping[str, tuple[Content, ...]]
    commits: tuple[tuple[str, str, str], ...]


class Player:
    """Plays schedules in one world, each from the same beginning.

    What is wrong is looked up where a schedule ended in a state in which another one ended before;
    so is what comes of settling an end, and what a checkpoint holds, where all that is asked for it
    is answered as before.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        first, contents = first_world(world)
        commits = tuple(world.commits)
        self._plain = _First(first, contents, commits)
        world.restore(first)
        run = run_world(world)
        made = {made: (4,) for _, made, _ in world.commits}
        self._of_run = _First(run, contents | made, (*commits, *world.commits))
        self._began_with = self._plain
        self._contents = dict(contents)
        self._known: dict[bytes, tuple[str, ...]] = {}
        self._outcomes: dict[object, Outcome] = {}  # of what was done to settle an end
        self._problems: dict[object, _Asked] = {}  # of what was looked at of a checkpoint
        self._asked = 0  # calls that these hold
        self._whole: dict[str, object] = {}  # what a command does that nothing befalls
        self.played = 0

    @property
    def states(self) -> int:
        """In how many states schedules ended."""
        return len(self._known)

    def play(self, steps: Sequence[Step]) -> Played:
        """Play a schedule, and say what is wrong with what came of it."""
        self.played += 1
        actors = self.run(steps)
        trace = tuple(self.world.trace)
        struck = any(actor.struck for actor in actors)
        return Played(tuple(steps), trace, self._complaints(actors), struck)

    def run(self, steps: Sequence[Step]) -> list[Actor]:
        """Play a schedule, and then let all who are left run to their ends, one after another."""
        has_tiers = any(COMMANDS[parse_actor(step.actor)[0]].tiers for step in steps)
        self._began_with = self._of_run if has_tiers else self._plain
        self.world.restore(self._began_with.world)
        actors = {step.actor: self._actor(step.actor) for step in steps}
        for step in steps:
            if step.fault:
                actors[step.actor].expect(step.fault, step.calls or 1)
            elif step.kill:
                actors[step.actor].kill()
            else:
                actors[step.actor].advance(step.calls)
        for actor in actors.values():
            actor.advance()
        return [*actors.values()]

    def _actor(self, name: str) -> Actor:
        command, catalog, skew = parse_actor(name)
        return self.world.actor(name, COMMANDS[command].work, catalog, skew)

    def _complaints(self, actors: Sequence[Actor]) -> tuple[str, ...]:
        ended, commits = self.world.save(), tuple(self.world.commits)
        ours = {
            a.name: UcformatError if isinstance(a.error, UcformatError) else repr(a.error)
            for a in actors
        }
        said = [(a.name, a.began, a.killed, ours[a.name], bool(a.struck), a.warned) for a in actors]
        state = b"".join(self._state()) + repr((commits, said)).encode()
        if state not in self._known:
            with using(catalog="none", roots=ROOTS):
                self._known[state] = tuple(dict.fromkeys(self._judge(actors, ended, commits)))
        return self._known[state]

    def _judge(
        self, actors: Sequence[Actor], ended: Snapshot, commits: Sequence[tuple[str, str, str]]
    ) -> Iterator[str]:
        """What is wrong at the end, and when what was stopped is repeated and gc has run, in either order."""
        for actor in actors:
            if actor.error is not None and not isinstance(actor.error, UcformatError):
                yield f"error {actor.name}: {actor.error!r}"
            if (
                len(actors) == 1
                and actor.struck
                and not (actor.error or actor.killed or actor.warned)
            ):
                yield from self._silent(actor, ended)
        self._contents = dict(self._began_with.contents)
        began = [a.name for a in actors if a.began]
        yield from self._broken(began)
        again = [a.name for a in actors if a.killed or a.error is not None]
        orders = (
            ((self._repeat, self._collect), (self._collect, self._repeat))
            if again
            else ((self._collect,),)
        )
        for order in orders:
            self.world.restore(ended)
            self.world.commits[:] = commits
            for settle in order:
                yield from settle(again, len(actors))
                yield from self._broken([*began, *again])
            if self._began_with is self._of_run:
                yield from self._launch_next([*began, *again])
                yield from self._broken([*began, *again, _NEXT])
            yield from self._left()

    def _silent(self, actor: Actor, ended: Snapshot) -> Iterator[str]:
        """Whether it said nothing of what befell it, and did not do all its work."""
        done = self._done()
        if actor.name not in self._whole:
            commits = tuple(self.world.commits)
            self.world.restore(self._began_with.world)
            self._actor(actor.name).advance()
            self._whole[actor.name] = self._done()
            self.world.restore(ended)
            self.world.commits[:] = commits
        if done != self._whole[actor.name]:
            yield f"silent {actor.name}: it succeeded, and did not do all"

    def _done(self) -> object:
        """What tells apart what commands did, but for what saves work later, or tells when an attempt was continued."""
        files = {key: f.data for key, f in self.world.files.items() if "/attempts/" not in key}
        tables = Base.metadata.sorted_tables
        asked = {
            t.name: ", ".join(f'"{c.name}"' for c in t.columns if c.name != "listing")
            for t in tables
        }
        queries = [f"select {columns} from {table}" for table, columns in asked.items()]  # noqa: S608 - our own
        return files, [[self.world.rows(name, q) for q in queries] for name in CATALOGS]

    def _state(self) -> tuple[bytes, ...]:
        return tuple(map(self.world.digest, (None, *CATALOGS)))

    def _repeat(self, names: Sequence[str], of: int) -> Iterator[str]:
        def repeat(name: str) -> Iterator[str]:
            actor = self._actor(name)
            actor.advance()
            if not _is_fine(actor.error, alone=of == 1):
                yield f"repeat {name}: {type(actor.error).__name__}: {actor.error}"

        def settled(name: str) -> tuple[str, ...]:
            return self._settled(parse_actor(name)[1], name, of == 1, partial(repeat, name))

        if len(names) == 1:
            yield from settled(names[0])
            return
        for name in [
            n for n in names if settled(n)
        ]:  # once more, when what another one had begun is done
            yield from settled(name)

    def _collect(self, _names: Sequence[str], _of: int) -> Iterator[str]:
        """Let gc of our catalogs run when all grace is over."""
        self.world.time += 3 * LONG  # also after what an actor began whose clock is ahead

        def gc(name: str) -> Iterator[str]:
            with Catalog(name) as catalog:
                found = collect(catalog, TREES, apply=True)
            for failure in found.failures:
                yield f"gc of catalog {name}: {failure}"

        for name in CATALOGS[:2]:
            yield from self._settled(name, "", False, partial(gc, name))

    def _launch_next(self, names: Sequence[str]) -> Iterator[str]:
        """Start the training of a run again: the newest step that its fast tier had is what it restores."""
        commits = [c for c in (*self._began_with.commits, *self.world.commits) if _is_of_run(c[0])]
        newest = [made for place, made, _ in commits if f"memory://{place}".startswith(FAST)][-1]
        places = {f"memory://{place}" for place, made, _ in commits if made == newest}
        may_go = any(parse_actor(name)[0] in DELETING for name in names)
        if all(self._problem(url, newest) for url in places) and not may_go:
            yield f"lost {newest}: it is whole in no tier"

        def launch() -> Iterator[str]:
            actor = self.world.actor(_NEXT, NEXT.work, CATALOGS[0], NOW)
            actor.advance()
            if actor.error is not None:
                yield f"next launch: {actor.error!r}"
                return
            begun = [m for place, m, who in self.world.commits if who == _NEXT]
            found = read_manifest(open_store(f"{FAST}/step-00000006"))[0]
            restored = [edge.id for edge in found.lineage]
            if found.id not in begun or (restored != [newest] and not may_go):
                yield f"next launch: {restored} was restored, not {newest}"

        yield from self._settled(CATALOGS[0], _NEXT, False, launch)

    def _settled(
        self, catalog: str, who: str, alone: bool, act: Callable[[], Iterable[str]]
    ) -> tuple[str, ...]:
        """Do this, or what it did to the same world before: to all that it asks, and it is asked that it asks no more.

        What comes of it is known by what the store and its catalog hold, the time, and the ids that
        it takes.
        """
        key = (alone, self.world.about(catalog, who))
        found = self._outcomes.get(key)
        if found is None:
            found = self.world.outcome(catalog, who, act)
            if len(self._outcomes) >= _OUTCOMES:
                del self._outcomes[next(iter(self._outcomes))]
            self._outcomes[key] = found
        else:
            self.world.come_out(catalog, who, found)
        return found.said

    def _broken(self, names: Sequence[str]) -> Iterator[str]:
        """What was committed, and nobody was to take away, and is not there bit for bit."""
        commands = {
            name: NEXT if name == _NEXT else COMMANDS[parse_actor(name)[0]] for name in names
        }
        may_go = {GONE, COPY, *(place for c in commands.values() for place in c.deletes)}
        last: dict[str, str] = {}
        for place, made, who in (*self._began_with.commits, *self.world.commits):
            url = f"memory://{place}"
            if last.get(url, made) != made and url not in (*may_go, *commands[who].replaces):
                yield f"replaced {url}: by {who}"
            last[url] = made
            if who:
                self._contents.setdefault(made, commands[who].contents)
        for url, made in last.items():
            problem = self._problem(url, made)
            if problem and not (url in may_go and isinstance(problem, NotACheckpoint)):
                yield f"lost {url}: {type(problem).__name__}: {problem}"
        for key in self.world.files:
            place, _, file = key.rpartition("/")
            if file == MANIFEST and f"memory://{place}" not in last:
                yield f"uncommitted {key}"
        yield from self._unheld()

    def _unheld(self) -> Iterator[str]:
        """What an alias, a tag or a hold of some catalog names, and is nowhere bit for bit.

        Other catalogs know it by the record beside it: until that is written, they may replace the
        checkpoint, and who says it is warned.
        """
        for name in CATALOGS:
            for made, urls in self.world.rows(name, _HELD):
                if all(self._problem(url, made) for url in (urls or "").split()):
                    yield f"held {urls}: the checkpoint {made} in catalog {name}"

    def _problem(self, url: str, checkpoint: str) -> Exception | None:
        """Why a checkpoint is not there bit for bit; not looked at again where the store answers as before."""
        world, contents = self.world, self._contents[checkpoint]
        if self._asked >= _ASKED:
            self._problems.clear()
            self._asked = 0
        known = self._problems.setdefault((url, checkpoint, contents), _Asked())
        at: _Asked | None = known
        while at is not None and at.call is not None:
            at = at.then.get(world.answer(*at.call))
        if at is not None and at is not known:
            return at.problem
        world.asked = []
        problem = self._look(url, checkpoint)
        for what, key, answer in world.asked:
            assert known.call in (None, (what, key)), "who is answered the same asks the same"
            known.call = (what, key)
            known = known.then.setdefault(answer, _Asked())
        self._asked += len(world.asked)
        known.problem, world.asked = problem, None
        return problem

    def _look(self, url: str, checkpoint: str) -> Exception | None:
        try:
            found = read_manifest(open_store(url))[0]
            if found.id != checkpoint:
                return NotACheckpoint(f"there is another one, {found.id}")
            ck = open_reference(url, older=True)
            held = {name: ck[name, "weight"][...] for name in arrays(0)}
            if not any(same(held, arrays(content)) for content in self._contents[checkpoint]):
                return AssertionError("its tensors have other bits")
            if found.bases and (found.window or found.deltas):
                replayed = replay_at(url)
                if replayed and not (
                    replayed[0] == found.step and same(replayed[1], arrays(replayed[0]))
                ):
                    return AssertionError("a replay of it gives other bits")
            assert isinstance(ck.objects, dict)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            error.__context__ = error.__cause__ = None  # of which it would keep all frames
            return error.with_traceback(None)
        return None

    def _left(self) -> Iterator[str]:
        """Files that belong to nothing."""
        homes: dict[str, str] = {}
        for key in self.world.files:
            place, _, file = key.rpartition("/")
            if file == MANIFEST:
                try:
                    homes[place] = read_manifest(open_store(f"memory://{place}"))[0].attempt
                except UcformatError:
                    continue
        for key in self.world.files:
            if key.startswith("w/src/") or key.endswith("/README"):
                continue
            home = next((p for p in homes if key.startswith(f"{p}/")), "")
            rest, attempt = key.removeprefix(f"{home}/"), homes.get(home)
            if home and rest.startswith(f"{NEEDED_BY}/") and self._needed(key):
                continue
            known = (MANIFEST, CATALOG_DOCUMENT, f"attempts/{attempt}.json")
            if not home or not (
                rest in known or re.match(f"(data|objects|assets)/{attempt}/", rest)
            ):
                yield f"left {key}"

    def _needed(self, key: str) -> bool:
        """Whether the checkpoint is there that is said to need files beside this document, or it is of a catalog."""
        doc = NeededByDoc.model_validate_json(self.world.files[key].data)
        if doc.reasons is not None:
            return True
        try:
            place = place_of_base(f"memory://{key.partition(f'/{NEEDED_BY}/')[0]}", doc.url)
            return (
                read_manifest(open_store(place))[0].id
                == doc.id
                == key.rpartition("/")[2].removesuffix(".json")
            )
        except UcformatError:
            return False


#: What a catalog says of a copy of a checkpoint that it saw in one form only (docs/security.md,
#: rule 1a).
_OTHER_FORM = "in another form than"

#: What a partial save says whose base is not the one that it was before, and what compacts it where it is a delta.
_OTHER_BASE = (
    "which has no step",
    "and the base is of step",
    "has deltas, which are applied",
    "there is no checkpoint that",
)

#: What a command that is repeated says where its work is done already.
_DONE = (
    "already holds the committed checkpoint",
    "is not deleted: it is deleted",
    "has no checkpoint",
)

#: The checkpoints that something names, and where they lie.
_HELD = """
    select c.id, group_concat(l.url, ' ') from checkpoint c left join location l on l.checkpoint = c.serial
    where c.serial in (
        select checkpoint from alias union select checkpoint from tag
        union select checkpoint from hold where released is null)
    and c.document_written = c.document_revision
    group by c.id
"""


def _is_of_run(place: str) -> bool:
    return f"memory://{place}".startswith((FAST, MIDDLE, HOME))


def _is_fine(error: BaseException | None, *, alone: bool) -> bool:
    """Whether a command that is repeated may end so: that of one who was alone only if its work is done."""
    if error is None:
        return True
    if alone:
        return any(said in str(error) for said in _DONE)
    return isinstance(
        error, Conflict | NotFound | NotACheckpoint | PermissionDenied | UnsupportedError
    ) or any(said in str(error) for said in (_OTHER_FORM, *_OTHER_BASE))
