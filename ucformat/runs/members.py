"""The checkpoints of a run, by the catalog or in a folder, and which of them are on the path of its training."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.catalog.entries import Entry
from ucformat.catalog.filter.syntax import Text
from ucformat.catalog.launches import TRAINING
from ucformat.catalog.lines import folder_launch, line_to, lines, path_of
from ucformat.catalog.refs import is_place, parent_name, same_url
from ucformat.checkpoint import Checkpoint
from ucformat.errors import NotFound, UcformatError, UsageError, first_names
from ucformat.jobs.listing import search
from ucformat.jobs.opening import by_outermost
from ucformat.jobs.record import deleted_below, step_in_name
from ucformat.references import open_catalog, open_entry, open_place
from ucformat.schema import MANIFEST, TOMBSTONE
from ucformat.storage.concurrency import Cache, map_io
from ucformat.storage.url import open_store, path_text
from ucformat.storage.wrappers import WatchedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from os import PathLike

    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

    _Origin = Checkpoint | Entry | tuple[Callable[..., Checkpoint], tuple[Any, ...]]

_MAX_NAMED = 10  # checkpoints that an error names
_TILES_BYTES = 256 << 20  # of decoded tiles that the checkpoints of a run share


@dataclass(frozen=True)
class Member:
    """A checkpoint of a run; `step` is None where nothing tells it.

    `origin` is the checkpoint where it is open already, its entry in the catalog, which opens it,
    or a function that does so in another process, with its arguments.
    """

    id: str
    url: str
    run: str
    step: int | None
    kind: str
    created: datetime
    origin: _Origin
    commits: int | None = None
    launch: str | None = None
    continues: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        step = "no step" if self.step is None else f"step {self.step}"
        return f"{step}: {self.id[:12]}, {self.url}"


@dataclass(frozen=True)
class ChosenMembers:
    """The members on the path of a training, in order of steps, and what was left out, with the reason."""

    place: str
    members: tuple[Member, ...]
    left_out: Mapping[str, str]


class _LeaveOut:
    """What the caller leaves out: steps, and names or ids of checkpoints; each must be there."""

    def __init__(self, wanted: int | str | Iterable[int | str]) -> None:
        self._wanted = {wanted} if isinstance(wanted, int | str) else set(wanted)
        self._met: set[int | str] = set()

    def covers(self, url: str, step: int | None, id_: str = "") -> bool:
        """Whether a checkpoint is left out."""
        names = {step, url, url.rpartition("/")[2], id_} - {None, ""}
        met = {w for w in self._wanted if w in names or (_is_id(w) and id_.startswith(str(w)))}
        self._met |= met
        return bool(met)

    def check(self, place: str) -> None:
        """Check that there was everything that is left out."""
        if absent := sorted(self._wanted - self._met, key=str):
            raise UsageError(
                f"{place} has no checkpoint {absent[0]!r} to leave out",
                hint="leave_out takes steps, and ids, urls or names of folders",
            )


def _is_id(name: int | str) -> bool:
    return isinstance(name, str) and len(name) >= 4


def choose_members(
    place: str | PathLike[str],
    head: str | None,
    leave_out: int | str | Iterable[int | str],
    roots: tuple[str, ...],
    options: Mapping[str, Any] | None,
) -> ChosenMembers:
    """Find the checkpoints of a run, and choose those on the path to its newest one, or to another."""
    left, told = _LeaveOut(leave_out), dict[str, str]()
    text = path_text(place)
    if not isinstance(place, str) or is_place(text) or os.path.exists(text):  # noqa: PTH110 - never fails
        label = open_store(place).url
        members, began = _in_folder(label, left, told, roots, options)
    else:
        label = text
        members, began = _in_catalog(text, left, told)
    left.check(label)
    if unplaced := [m for m in members if m.step is None]:
        raise UsageError(
            f"{label} has checkpoints of unknown steps: {_listed(unplaced)}",
            hint=f"leave them out: leave_out=[{unplaced[0].id[:12]!r}, …]; or tell the catalog the "
            "step: `ucp register PLACE --step N`",
        )
    path = _path(label, _one_form(label, members), began, head)
    kept = {m.id for m in path}
    told |= {
        m.url: f"step {m.step} is not on the path to step {path[0].step}"
        for m in members
        if m.id not in kept
    }
    return ChosenMembers(label, tuple(reversed(path)), told)


def _path(
    label: str, members: Sequence[Member], began: Mapping[str | None, int], head: str | None
) -> list[Member]:
    """The path to the newest checkpoint, or to the one that `head` names; newest first."""
    if not members:
        raise NotFound(f"{label} has no checkpoints", hint="`ucp ls --runs` lists runs")
    if head is None:
        all_lines = lines(members)
        if len(all_lines) > 1:
            newest = [first for first, _ in all_lines]
            raise UsageError(
                f"{label} has {len(newest)} lines that do not continue each other; their newest "
                f"are\n  {_listed(newest, separator=chr(10) + '  ')}",
                hint=f"choose the one whose path you want: head={newest[0].id[:12]!r}",
            )
        return path_of(all_lines[0][1], began)
    fitting = [m for m in members if m.id.startswith(head)]
    if len(fitting) != 1:
        raise (UsageError if fitting else NotFound)(
            f"{label} has {'several checkpoints' if fitting else 'no checkpoint'} {head!r}",
            hint="head is the id of a checkpoint of the run, or its beginning: `ucp ls` lists them",
        )
    return path_of(line_to(members, fitting[0]), began)


def _one_form(label: str, members: Iterable[Member]) -> list[Member]:
    """One checkpoint of each that a launch has in several forms: the universal one."""
    forms: dict[tuple[str | None, int | None, int | None], list[Member]] = defaultdict(list)
    for member in {m.id: m for m in members}.values():
        forms[member.launch, member.step, member.commits].append(member)
    out = []
    for same in forms.values():
        universal = [m for m in same if m.kind == "ucformat"] or same
        if len(universal) > 1:
            raise UsageError(
                f"{label} has several checkpoints of step {same[0].step}: {_listed(universal)}",
                hint=f"leave out all but one: leave_out=[{universal[0].id[:12]!r}, …]",
            )
        out += universal
    return out


def _listed(members: Sequence[Member], separator: str = "; ") -> str:
    return first_names(members, _MAX_NAMED, separator)


# By the catalog


def _in_catalog(
    run: str, left: _LeaveOut, told: dict[str, str]
) -> tuple[list[Member], dict[str | None, int]]:
    with open_catalog(f"run {run!r}") as catalog:
        entries = catalog.find(f"run = {Text(run)}", sort="step")
        if not entries:
            raise NotFound(
                f"the catalog has no checkpoints of a run {run!r}, and there is no such folder",
                hint="`ucp ls --runs` lists runs",
            )
        began = catalog.beginnings(run)
    members = []
    for e in entries:
        url = e.url or e.id
        if left.covers(url, e.step, e.id):
            told[url] = "left out"
            continue
        launch = e.commits, e.launch, e.continues
        members.append(Member(e.id, url, run, e.step, e.kind, e.created, e, *launch))
    return members, began


# In a folder


def _in_folder(
    place: str,
    left: _LeaveOut,
    told: dict[str, str],
    roots: tuple[str, ...],
    options: Mapping[str, Any] | None,
) -> tuple[list[Member], dict[str | None, int]]:
    infos = list(open_store(place).list())
    keys = {info.key for info in infos}
    places = {}  # those of checkpoints, and whether they are universal
    for folder in by_outermost(f for f in search(infos) if f):
        url, universal = f"{place}/{folder}", f"{folder}/{MANIFEST}" in keys
        if f"{folder}/{TOMBSTONE}" in keys and not universal:
            told[url] = "deleted"
        elif left.covers(url, step_in_name(url)):
            told[url] = "left out"
        else:
            places[url] = universal
    if not places and not told:
        raise NotFound(
            f"there is no checkpoint below {place}",
            hint="a run is a folder of checkpoints, or the name of a run in the catalog; "
            "ucformat.open opens a single checkpoint",
        )

    watch = _sharing_tiles()

    def open_one(url: str) -> Checkpoint:
        with naming_step(step_in_name(url), url):
            return open_place(url, roots, None if places[url] else options, watch)

    deleted = deleted_below(place)
    members, began = [], dict[str | None, int]()
    for url, ck in zip(places, map_io(open_one, places), strict=True):
        manifest = ck.manifest
        step = step_in_name(url) if manifest.step is None else manifest.step
        is_deleted = ck.id in deleted or manifest.is_remnant
        if is_deleted or left.covers(url, step, ck.id):
            told[url] = "deleted" if is_deleted else "left out"
            continue
        members.append(_opened_member(ck, manifest, url, step))
        if (count := _beginning(url, manifest)) is not None:
            began[members[-1].launch] = count
    runs = sorted({m.run for m in members})
    if len(runs) > 1:
        raise UsageError(
            f"{place} has checkpoints of several runs: {first_names(runs, _MAX_NAMED)}",
            hint="name the folder of one of them, or record them (`ucp register -r`) and name the "
            "run",
        )
    return members, began


def _opened_member(ck: Checkpoint, manifest: Manifest, url: str, step: int | None) -> Member:
    name, continues = (
        (folder_launch(url), {})
        if manifest.launch is None
        else (manifest.launch.id, manifest.launch.continues)
    )
    about = (manifest.run or parent_name(url) or "", step, ck.kind, manifest.created)
    return Member(ck.id, url, *about, ck, manifest.commits, name, continues)


def _beginning(url: str, manifest: Manifest) -> int | None:
    """The count of commits of the checkpoint with which its launch began, if that was in the same folder."""
    beside = folder_launch(same_url(url))
    origins = (
        edge.commits
        for edge in manifest.lineage
        if edge.kind in TRAINING and folder_launch(same_url(edge.url)) == beside
    )
    return next(origins, None)


# Opening


@contextmanager
def naming_step(step: int | None, url: str) -> Iterator[None]:
    """Name the step in errors, and how to leave it out."""
    try:
        yield
    except UcformatError as error:
        name = url.rpartition("/")[2] if step is None else step
        named = copy(error)
        named.message = f"step {name}: {error.message}"
        named.args = (named.message,)
        leave_out = f"ucformat.run(…, leave_out=[{name!r}]) reads the others"
        named.hint = f"{error.hint}; {leave_out}" if error.hint else leave_out
        raise named from error


def _sharing_tiles() -> Callable[[Store], WatchedStore]:
    """Make stores that share tiles, so that a step finds those of the step that it is a patch of."""
    tiles = Cache[memoryview](_TILES_BYTES)
    return lambda store: WatchedStore(store, tiles)


def open_members(
    members: Sequence[Member], roots: tuple[str, ...], options: Mapping[str, Any] | None
) -> list[Checkpoint]:
    """Open members of a run, each once.

    Their stores share the tiles that are decoded.
    """
    watch = _sharing_tiles()

    def open_one(member: Member) -> Checkpoint:
        origin = member.origin
        if isinstance(origin, Checkpoint):
            return origin
        with naming_step(member.step, member.url):
            if isinstance(origin, tuple):
                reopen, recipe = origin
                return reopen(*recipe)
            its_options = None if member.kind == "ucformat" else options
            return open_entry(catalog, origin, str(member), roots, its_options, watch)[0]

    if not any(isinstance(m.origin, Entry) for m in members):
        return map_io(open_one, members)
    with open_catalog(f"run {members[0].run!r}") as catalog:
        return map_io(open_one, members)
