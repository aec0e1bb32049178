"""References to checkpoints, with one grammar for Python and the command line, and the places of checkpoints.

a place        a path or url: anything with `://`, or that begins with `/`, `./`, `../` or `~`
run7@1000      the checkpoint of a run at a step
run7@latest    its newest one, of the only line of the run (`catalog.lines`)
launch:3f2a@1000, launch:3f2a@latest    of a launch, by its id or the beginning of one
folder:PLACE@1000, folder:PLACE@latest    of those at places below a folder
run7@best      the target of the alias `run7/best`, else of the alias `best` if that is a checkpoint of this run
alias:best     the target of an alias
d829318292     an id, or the beginning of one, at least four characters
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import sqlalchemy as sa

from ucformat.catalog.launches import load_families, select_newest_of_launches
from ucformat.catalog.lines import all_continued, contradiction, heads, launch_label
from ucformat.catalog.models import AliasRow, CheckpointRow, Launch, Location, RunRow
from ucformat.catalog.rows import lock, pages, serial_at, serial_of, starts_with, unindexed
from ucformat.errors import NotFound, PermissionDenied, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection

    from ucformat.catalog.lines import PlacedInLaunch

_log = logging.getLogger("ucformat")
_PREFIXES = ("alias:", "launch:", "folder:")
_ID = re.compile(r"[0-9a-f]{4,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference, parsed: a place, alias or id, or a run, launch or folder `at` a step, `latest` or an alias."""

    text: str
    place: str | None = None
    alias: str | None = None
    id: str | None = None
    run: str | None = None
    launch: str | None = None
    folder: str | None = None
    at: int | str | None = None


def is_place(text: str) -> bool:
    """Whether a reference can only be a path or a url."""
    if text.startswith(_PREFIXES):
        return False
    return "://" in text or text.startswith(("/", "./", "../", "~")) or text in (".", "..")


def parse_ref(text: str) -> Ref:
    """Parse a reference; text that is no other kind of reference is a place."""
    if not text:
        raise UsageError(
            "an empty reference names no checkpoint",
            hint="write run@step, alias:name, an id, or a path",
        )
    if is_place(text):
        return Ref(text, place=same_url(text))
    if text.startswith("alias:"):
        if not text[6:]:
            raise UsageError(
                "`alias:` lacks the name of the alias",
                hint="write alias:best; `ucp alias list` shows all",
            )
        return Ref(text, alias=text[6:])
    run, at, which = text.rpartition("@")
    step = int(which) if re.fullmatch(r"\d{1,18}", which, re.ASCII) else which
    if text.startswith(_PREFIXES):
        kind, _, name = run.partition(":")
        if not name or (which != "latest" and not isinstance(step, int)):
            hint = (
                "write launch:ID@latest, launch:ID@1000, folder:PLACE@latest or folder:PLACE@1000"
            )
            raise UsageError(
                f"{text!r} does not say which checkpoint of a launch or folder", hint=hint
            )
        if kind == "folder":
            return Ref(text, folder=same_url(name), at=step)
        if not _ID.fullmatch(name):
            raise UsageError(
                f"{name!r} is no id of a launch, nor the beginning of one", hint=_LINES
            )
        return Ref(text, launch=name, at=step)
    if at and run and which:
        return Ref(text, run=run, at=step)
    if _ID.fullmatch(text):
        return Ref(text, id=text)
    return Ref(text, place=same_url(text))


def same_url(place: str) -> str:
    """Normalize a place to an absolute path, or a url without a slash at the end."""
    scheme, separator, rest = place.partition("://")
    if separator and scheme.lower() != "file":
        return place.rstrip("/")
    path = unquote(f"/{rest.partition('/')[2]}") if separator else place
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111 - links stay as they are written


def same_place(url: str) -> str:
    """A url in a document, normalized by `same_url`; a relative path is left as it is."""
    return same_url(url) if url.lower().startswith(("/", "file://")) else url.rstrip("/") or url


def parent_name(url: str) -> str | None:
    """The name of the parent folder."""
    parts = (
        [p for p in url.partition("://")[2].split("/") if p]
        if "://" in url
        else [p for p in url.split("/") if p]
    )
    return parts[-2] if len(parts) > 1 else None


def resolve(connection: Connection, ref: Ref) -> int:
    """Look up a reference."""
    if ref.alias is not None:
        return _alias(connection, ref.alias)
    if ref.run is not None:
        return _resolve_in_run(connection, ref, ref.run)
    if ref.launch is not None:
        query = (
            sa.select(Launch.id, Launch.name).where(starts_with(Launch.name, ref.launch)).limit(2)
        )
        launches = connection.execute(query).all()
        if len(launches) != 1:
            what = "several launches" if launches else "no launch"
            raise (UsageError if launches else NotFound)(
                f"the catalog has {what} {ref.launch!r}", hint=_LINES
            )
        return _resolve_at(
            connection,
            ref,
            CheckpointRow.launch_id == launches[0].id,
            f"the launch {launches[0].name!r}",
        )
    if ref.folder is not None:
        below = sa.select(Location.checkpoint).where(starts_with(Location.url, f"{ref.folder}/"))
        return _resolve_at(
            connection, ref, CheckpointRow.serial.in_(below), f"the folder {ref.folder!r}"
        )
    serial: int | None = None
    if ref.id is not None:
        serial = serial_of(connection, ref.text)
        matches = _rows(
            connection, sa.select(*_COLUMNS).where(starts_with(CheckpointRow.id, ref.id))
        )
        if serial is None and matches:
            return _only_match(ref, matches)
    if serial is None:
        serial = serial_at(connection, ref.place or same_url(ref.text))
    if serial is None:  # ids from other writers need not be hexadecimal
        serial = serial_of(connection, ref.text)
    if serial is None:
        named = (
            connection.scalar(sa.select(AliasRow.name).where(AliasRow.name == ref.text)) is not None
        )
        raise NotFound(
            f"the catalog has no checkpoint {ref.text!r}",
            hint=f"there is an alias of this name: alias:{ref.text}"
            if named
            else "`ucp ls` lists its checkpoints; `ucp register PLACE` records one",
        )
    return serial


def resolve_between(connection: Connection, run: str, first: int, last: int) -> list[int]:
    """Look up the committed checkpoints of a run at a range of steps.

    Returns:
        The serials of the checkpoints, in order of steps; of several at one step the universal one.
    """
    there = (
        CheckpointRow.run_id == _run_id(connection, run),
        CheckpointRow.step.between(first, last),
    )
    query = (
        sa.select(*_COLUMNS)
        .where(*there, unindexed(CheckpointRow.state) == "committed")
        .order_by(CheckpointRow.step)
    )
    by_step: dict[int, list[Any]] = {}
    for row in connection.execute(query):
        by_step.setdefault(row.step, []).append(row)
    if not by_step:
        raise NotFound(
            f"the run {run!r} has no checkpoint of the steps {first} to {last}",
            hint=f"`ucp ls \"run = '{run}'\"` lists its steps",
        )
    return [
        _only_match(Ref(f"{run}@{step}", run=run, at=step), rows) for step, rows in by_step.items()
    ]


def greatest_commits(connection: Connection, run: str) -> int:
    """The greatest count of commits of a run's checkpoints; 0 if none is known."""
    of_run = (
        CheckpointRow.run_id == sa.select(RunRow.id).where(RunRow.name == run).scalar_subquery()
    )
    return connection.scalar(sa.select(sa.func.max(CheckpointRow.commits)).where(of_run)) or 0


def resolve_committed(connection: Connection, ref: str, *others: int | None) -> int:
    """Look up a committed checkpoint, and lock it together with others to avoid deadlocks."""
    serial = resolve(connection, parse_ref(ref))
    state = lock(connection, {serial, *(o for o in others if o is not None)})[serial]
    if state != "committed":
        hint = "`ucp restore` restores it" if state == "deleted" else "its bytes are gone"
        raise PermissionDenied(f"the checkpoint {ref} is {state}", hint=hint)
    return serial


_COLUMNS = (
    CheckpointRow.serial,
    CheckpointRow.id,
    CheckpointRow.kind,
    CheckpointRow.state,
    CheckpointRow.step,
)


def _rows(connection: Connection, query: Any) -> Sequence[Any]:
    return connection.execute(query.order_by(CheckpointRow.serial).limit(100)).all()


def _alias(connection: Connection, name: str) -> int:
    serial = connection.scalar(sa.select(AliasRow.checkpoint).where(AliasRow.name == name))
    if serial is None:
        names = connection.scalars(sa.select(AliasRow.name)).all()
        raise NotFound(
            f"there is no alias {name!r}",
            hint=_nearest(name, names) or "`ucp alias list` shows all",
        )
    return serial


def _run_id(connection: Connection, run: str) -> int:
    run_id = connection.scalar(sa.select(RunRow.id).where(RunRow.name == run))
    if run_id is None:
        names = connection.scalars(sa.select(RunRow.name)).all()
        raise NotFound(
            f"the catalog has no run {run!r}",
            hint=_nearest(run, names) or "`ucp ls` lists checkpoints",
        )
    return int(run_id)


def _resolve_in_run(connection: Connection, ref: Ref, run: str) -> int:
    run_id = _run_id(connection, run)
    if isinstance(ref.at, int) or ref.at == "latest":
        return _resolve_at(connection, ref, CheckpointRow.run_id == run_id, f"the run {run!r}")
    scoped = connection.scalar(
        sa.select(AliasRow.checkpoint).where(AliasRow.name == f"{run}/{ref.at}")
    )
    if scoped is not None:
        return scoped
    serial = _alias(connection, str(ref.at))
    if (
        connection.scalar(sa.select(CheckpointRow.run_id).where(CheckpointRow.serial == serial))
        != run_id
    ):
        raise NotFound(
            f"the alias {ref.at!r} points to a checkpoint of another run than {run!r}",
            hint=(
                f"write alias:{ref.at}, or give the run an alias of its own: ucp alias set "
                f"{run}/{ref.at} REF"
            ),
        )
    return serial


def _resolve_at(connection: Connection, ref: Ref, these: ColumnElement[bool], name: str) -> int:
    """The checkpoint at a step of a run, launch or folder, or its newest."""
    if isinstance(ref.at, int):
        here = sa.select(*_COLUMNS).where(these, CheckpointRow.step == ref.at)
        matches = _rows(
            connection, here.where(unindexed(CheckpointRow.state).in_(("committed", "deleted")))
        )
        # a deleted one can be restored by its name
        matches = [r for r in matches if r.state == "committed"] or matches
        if not matches:
            hint = (
                f"`ucp ls \"run = '{ref.run}'\"` lists its steps"
                if ref.run
                else "`ucp ls --runs` lists runs"
            )
            raise NotFound(f"{name} has no checkpoint of step {ref.at}", hint=hint)
        return _only_match(ref, matches)
    there = (these, CheckpointRow.state == "committed", CheckpointRow.step.is_not(None))
    newest: dict[int | None, list[Any]] = {}
    for row in connection.execute(select_newest_of_launches(*there)):
        newest.setdefault(row.launch_id, []).append(row)
    if not newest:
        raise NotFound(f"{name} has no checkpoint with a step")
    launches = load_families(connection, list(newest))
    numbers: dict[str | None, int | None] = {
        launch: number for number, (launch, _, _) in launches.items()
    }
    tips: dict[str | None, PlacedInLaunch] = {
        launches[n][0]: _Tip(launches[n][0], rows[0].commits, rows[0].step)
        for n, rows in newest.items()
    }
    direct: dict[str | None, dict[str, int]] = {
        launch: continued for launch, _, continued in launches.values()
    }
    last = [numbers[h] for h in heads(tips, direct)]
    if len(last) > 1:
        raise _several_heads(connection, ref, name, [newest[n][0] for n in last], launches)
    behind: list[ColumnElement[bool]] = [CheckpointRow.launch_id.is_not_distinct_from(last[0])]
    for launch, most in all_continued(launches[last[0]][0], direct).items():
        behind.append(
            sa.and_(CheckpointRow.launch_id == numbers[launch], CheckpointRow.commits <= most)
        )
    _warn_of_clocks(connection, (*there, sa.or_(*behind)), newest[last[0]][0])
    return _only_match(ref, newest[last[0]])


@dataclass(frozen=True, slots=True)
class _Tip:
    """The newest checkpoint of a launch."""

    launch: str | None
    commits: int | None
    step: int


def _several_heads(
    connection: Connection,
    ref: Ref,
    name: str,
    tips: Sequence[Any],
    launches: Mapping[int | None, tuple[str | None, Any, Any]],
) -> UsageError:
    """The error that lists the heads of a run that has several lines."""
    urls = sa.select(Location.checkpoint, sa.func.min(Location.url)).group_by(Location.checkpoint)
    shown = Location.checkpoint.in_([r.serial for r in tips[:_SHOWN]])
    places: dict[int, str] = dict(connection.execute(urls.where(shown)).all())
    listed = [
        f"  step {r.step}: {r.id[:12]}, launch {launch_label(launches[r.launch_id][0])}, "
        f"{places.get(r.serial, 'gone')}"
        for r in tips[:_SHOWN]
    ]
    omitted = [f"  and {len(tips) - _SHOWN:,} more"] if len(tips) > _SHOWN else []
    text = f"{ref.text!r} is ambiguous: {name} has {len(tips)} lines that do not continue each other; their newest are"
    return UsageError("\n".join([text, *listed, *omitted]), hint=_CHOOSE)


_SHOWN = 10
_LINES = "`ucp ls --runs` lists runs and their launches"
_CHOOSE = (
    "choose a line by its launch or folder: launch:ID@latest, folder:PLACE@latest; or a "
    "checkpoint by its id. "
    "`ucp ls --runs` lists lines; `ucp link` records that one continues another"
)


def _warn_of_clocks(connection: Connection, there: tuple[Any, ...], newest: Any) -> None:
    """Log a warning if a checkpoint with fewer commits was created later than the newest."""
    older = (CheckpointRow.commits < newest.counted, CheckpointRow.created > newest.created)
    other = connection.execute(
        sa.select(CheckpointRow.id, CheckpointRow.created)
        .where(*there, *older)
        .order_by(CheckpointRow.created.desc())
        .limit(1)
    ).first()
    if newest.commits is not None and other is not None:
        _log.warning(
            "%s", contradiction(newest.id[:12], newest.created, other.id[:12], other.created)
        )


def _only_match(ref: Ref, matches: Sequence[Any]) -> int:
    """The only match; among several checkpoints of one step, the universal one."""
    if len(matches) > 1 and ref.run is not None:
        matches = [r for r in matches if r.kind == "ucformat"] or matches
    if len(matches) > 1:
        several = ", ".join(r.id[:12] for r in matches[:5]) + (
            " and more" if len(matches) > 5 else ""
        )
        raise UsageError(
            f"{ref.text!r} matches several checkpoints: {several}", hint="write one of these ids"
        )
    return int(matches[0].serial)


def _nearest(word: str, names: Sequence[str]) -> str | None:
    from difflib import get_close_matches

    near = get_close_matches(word, names, 3, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else None


@dataclass(frozen=True, slots=True)
class LocationEntry:
    """A place of a checkpoint (its serial), and when it was last recorded there."""

    url: str
    checkpoint: int
    seen: datetime


def locations(connection: Connection, root: str) -> list[LocationEntry]:
    """The recorded places at or below a root."""
    query = (
        sa.select(Location.url, Location.checkpoint, Location.seen)
        .where(_at_or_below(root))
        .order_by(Location.url)
    )
    return [LocationEntry(*row) for row in connection.execute(query)]


def _at_or_below(root: str) -> ColumnElement[bool]:
    root = root.rstrip("/")
    return sa.or_(Location.url == root, starts_with(Location.url, f"{root}/"))


def listings(connection: Connection, root: str) -> dict[str, tuple[str, str]]:
    """The recorded file listings of the checkpoints at or below a root.

    Returns:
        By url, the checkpoint's id and the hash of its file listing; places without a hash are left
        out.
    """
    query = (
        sa.select(Location.url, CheckpointRow.id, Location.listing)
        .join(CheckpointRow, CheckpointRow.serial == Location.checkpoint)
        .where(
            _at_or_below(root),
            Location.listing.is_not(None),
            unindexed(CheckpointRow.state).in_(("committed", "deleted")),
        )
    )
    return {
        url: (checkpoint, str(listing)) for url, checkpoint, listing in connection.execute(query)
    }


def places_of(connection: Connection, serials: Sequence[int]) -> dict[str, list[str]]:
    """The sorted places of checkpoints, by id; those without a place are left out."""
    urls: dict[str, list[str]] = {}
    places = sa.select(CheckpointRow.id, Location.url).join(
        Location, Location.checkpoint == CheckpointRow.serial
    )
    for page in pages(serials):
        some = places.where(Location.checkpoint.in_(page))
        for name, url in connection.execute(some.order_by(Location.url)):
            urls.setdefault(name, []).append(url)
    return urls
