"""What people say of checkpoints: aliases, tags, holds, metrics, notes, and which of them lie beside the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from ucformat.catalog.models import Alias, AliasMove, Checkpoint, Hold, Metric, Note, Tag, Untag
from ucformat.catalog.recording import stored_metric
from ucformat.catalog.rows import event, insert_if_absent, lock, take_turns
from ucformat.errors import Conflict, NotFound, PermissionDenied, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from ucformat.catalog.stamp import Stamp

__all__ = [
    "ANY",
    "AliasEntry",
    "MoveEntry",
    "add_hold",
    "add_metrics",
    "add_note",
    "add_tags",
    "alias_history",
    "alias_target",
    "aliases",
    "move_alias",
    "record_untag",
    "release_holds",
    "remove_alias",
    "remove_tags",
    "set_tag",
]

_MICROSECOND = timedelta(microseconds=1)  # the least that times differ by


class _Any:
    """Whatever the alias points to now."""

    def __repr__(self) -> str:
        return "ANY"


ANY: Final = _Any()


@dataclass(frozen=True, slots=True)
class AliasEntry:
    """An alias and the id of the checkpoint that it points to."""

    name: str
    id: str
    version: int
    moved: datetime


@dataclass(frozen=True, slots=True)
class MoveEntry:
    """One move of an alias, from a checkpoint's id to another's; None where it did not or does not exist."""

    name: str
    version: int
    source: str | None
    target: str | None
    moved: datetime
    who: str


def move_alias(
    connection: Connection, name: str, target: int, expect: int | _Any | None, stamp: Stamp
) -> tuple[int, ...]:
    """Point an alias to a checkpoint, if it points to `expect` now (None: if there is none). The checkpoints touched.

    Raises:
        Conflict: it points to another one.
    """
    check_label("an alias", name)
    if name == "latest":
        raise UsageError("`latest` means the last step of a run, and cannot be an alias", hint="choose another name")
    found = _alias(connection, name)
    _check_expected(connection, name, None if found is None else found.checkpoint, expect)
    if found is not None and found.checkpoint == target:
        connection.execute(sa.update(Alias).where(Alias.name == name).values(document_url=None))
        return ()
    version = _next_version(connection, name) if found is None else found.version + 1
    values = {"checkpoint": target, "version": version, "moved": stamp.now, "document_url": None}
    if found is None:
        connection.execute(sa.insert(Alias).values(name=name, **values))
    else:
        connection.execute(sa.update(Alias).where(Alias.name == name).values(**values))
    source = None if found is None else found.checkpoint
    _note_move(connection, name, version, source, target, stamp)
    return (target,) if source is None else (source, target)


def remove_alias(connection: Connection, name: str, expect: int | _Any | None, stamp: Stamp) -> tuple[int, ...]:
    """Remove an alias, if it points to `expect`; its history stays. The checkpoints touched."""
    found = _alias(connection, name)
    if found is None:
        raise NotFound(f"there is no alias {name!r}", hint="`ucp alias list` shows those there are")
    _check_expected(connection, name, found.checkpoint, expect)
    connection.execute(sa.delete(Alias).where(Alias.name == name))
    _note_move(connection, name, found.version + 1, found.checkpoint, None, stamp)
    return (found.checkpoint,)


def alias_target(connection: Connection, name: str) -> int | None:
    """The checkpoint that an alias points to, and will point to until the transaction ends or moves it itself."""
    found = _alias(connection, name)
    return None if found is None else int(found.checkpoint)


def _alias(connection: Connection, name: str) -> Any:
    take_turns(connection, f"alias {name}")
    return connection.execute(sa.select(Alias.__table__).where(Alias.name == name)).one_or_none()


def _check_expected(connection: Connection, name: str, found: int | None, expect: int | _Any | None) -> None:
    if expect is ANY or found == expect:
        return
    now = "does not exist" if found is None else f"points to {_id(connection, found)}"
    wanted = "not exist" if expect is None else f"point to {_id(connection, int(str(expect)))}"
    raise Conflict(
        f"the alias {name!r} {now}, and was expected to {wanted}",
        hint="look again, and decide anew where it shall point",
    )


def _id(connection: Connection, serial: int) -> str:
    return connection.execute(sa.select(Checkpoint.id).where(Checkpoint.serial == serial)).scalar_one()


def _next_version(connection: Connection, name: str) -> int:
    return 1 + (connection.scalar(sa.select(sa.func.max(AliasMove.version)).where(AliasMove.name == name)) or 0)


def _note_move(
    connection: Connection, name: str, version: int, source: int | None, target: int | None, stamp: Stamp
) -> None:
    connection.execute(
        sa.insert(AliasMove).values(
            name=name, version=version, source=source, target=target, moved=stamp.now, who=stamp.who
        )
    )
    event(connection, "alias", stamp.who, stamp.now, target or source, name=name, removed=target is None)


def aliases(connection: Connection) -> list[AliasEntry]:
    """All aliases, by name."""
    rows = connection.execute(
        sa.select(Alias.name, Checkpoint.id, Alias.version, Alias.moved)
        .join(Checkpoint, Checkpoint.serial == Alias.checkpoint)
        .order_by(Alias.name)
    )
    return [AliasEntry(*r) for r in rows]


def alias_history(connection: Connection, name: str) -> list[MoveEntry]:
    """The moves of an alias, the first one first."""
    source, target = Checkpoint.__table__.alias(), Checkpoint.__table__.alias()
    rows = connection.execute(
        sa.select(AliasMove.name, AliasMove.version, source.c.id, target.c.id, AliasMove.moved, AliasMove.who)
        .outerjoin(source, source.c.serial == AliasMove.source)
        .outerjoin(target, target.c.serial == AliasMove.target)
        .where(AliasMove.name == name)
        .order_by(AliasMove.version)
    )
    return [MoveEntry(*r) for r in rows]


def add_tags(
    connection: Connection, serial: int, tags: Sequence[str], stamp: Stamp, *, permanent: bool = False
) -> bool:
    """Put tags on a checkpoint, or make those that it bears permanent; whether anything is new."""
    new = []
    for tag in tags:
        check_label("a tag", tag)
        here = (Untag.checkpoint == serial, Untag.name == tag)
        removed = connection.scalar(sa.select(Untag.removed).where(*here))
        created = stamp.now if removed is None else max(stamp.now, removed + _MICROSECOND)  # by whatever clock
        if set_tag(connection, serial, tag, created, stamp.who, permanent=permanent):
            new.append(tag)
    if new:
        event(connection, "tag", stamp.who, stamp.now, serial, tags=new, **({"permanent": True} if permanent else {}))
    return bool(new)


def set_tag(
    connection: Connection,
    serial: int,
    tag: str,
    created: datetime,
    who: str,
    *,
    permanent: bool,
    document_url: str | None = None,
) -> bool:
    """Put a tag on a checkpoint, or make it permanent, or our own if a document said it; whether anything changed."""
    keys = {"checkpoint": serial, "name": tag}
    values = {"created": created, "who": who, "permanent": permanent, "document_url": document_url}
    changed = insert_if_absent(connection, Tag, keys, values, Tag.name) is not None
    here = (Tag.checkpoint == serial, Tag.name == tag)
    if not changed and document_url is None:
        ours = sa.update(Tag).where(*here, Tag.document_url.is_not(None)).values(document_url=None)
        changed = connection.execute(ours).rowcount > 0
    if permanent:
        lasting = sa.update(Tag).where(*here, Tag.permanent == sa.false()).values(permanent=True)
        changed = connection.execute(lasting).rowcount > 0 or changed
    connection.execute(sa.delete(Untag).where(Untag.checkpoint == serial, Untag.name == tag))
    return changed


def remove_tags(connection: Connection, serial: int, tags: Sequence[str], reason: str, stamp: Stamp) -> None:
    """Take tags off a checkpoint: all of them or none.

    Raises:
        NotFound: it does not bear one of them.
        PermissionDenied: one is permanent.
    """
    if not reason.strip():
        raise UsageError("taking a tag off needs a reason", hint="say why, for those who look for the tag later")
    lock(connection, [serial])
    found = connection.execute(sa.select(Tag.name, Tag.permanent, Tag.created).where(Tag.checkpoint == serial)).all()
    borne = {r.name: r for r in found}
    for tag in tags:
        if tag not in borne:
            has = f"its tags are {', '.join(sorted(borne))}" if borne else "it has no tag"
            raise NotFound(f"the checkpoint does not bear the tag {tag!r}", hint=has)
        if borne[tag].permanent:
            raise PermissionDenied(
                f"the tag {tag!r} is permanent: it stays on the checkpoint for ever", hint="that was asked for"
            )
    for tag in dict.fromkeys(tags):
        record_untag(connection, serial, tag, max(stamp.now, borne[tag].created), stamp.who, reason)
    event(connection, "untag", stamp.who, stamp.now, serial, tags=list(dict.fromkeys(tags)), reason=reason)


def record_untag(
    connection: Connection,
    serial: int,
    tag: str,
    removed: datetime,
    who: str,
    reason: str,
    document_url: str | None = None,
) -> None:
    """Take a tag off a checkpoint if it bears it, and keep in mind that it was."""
    connection.execute(sa.delete(Tag).where(Tag.checkpoint == serial, Tag.name == tag))
    connection.execute(sa.delete(Untag).where(Untag.checkpoint == serial, Untag.name == tag))
    values = {"removed": removed, "who": who, "reason": reason, "document_url": document_url}
    connection.execute(sa.insert(Untag).values(checkpoint=serial, name=tag, **values))


def add_hold(connection: Connection, serial: int, reason: str, until: datetime | None, stamp: Stamp) -> int:
    """Keep a checkpoint from being deleted; the hold's number."""
    if not reason.strip():
        raise UsageError("a hold needs a reason", hint="say why it must be kept, for those who find it later")
    if until is not None and until.tzinfo is None:
        raise UsageError(f"{until.isoformat()} says no time zone", hint="give the time one, UTC for instance")
    if until is not None and until <= stamp.now:
        raise UsageError(f"a hold until {until.isoformat()} would be over already", hint="give a time to come")
    values = {"reason": reason, "until": until, "created": stamp.now, "who": stamp.who}
    number = connection.execute(sa.insert(Hold).values(checkpoint=serial, **values).returning(Hold.id)).scalar_one()
    event(connection, "hold", stamp.who, stamp.now, serial, hold=number, reason=reason)
    return int(number)


def release_holds(connection: Connection, serial: int, stamp: Stamp, number: int | None = None) -> int:
    """End the holds on a checkpoint, or the one of this number; how many."""
    which = [Hold.checkpoint == serial, Hold.released.is_(None)]
    if number is not None:
        which.append(Hold.id == number)
    ended = connection.execute(sa.update(Hold).where(*which).values(released=stamp.now)).rowcount
    if ended:
        event(connection, "release", stamp.who, stamp.now, serial, holds=ended)
    return ended


def add_metrics(connection: Connection, serial: int, metrics: Mapping[str, float], stamp: Stamp) -> bool:
    """Write metrics of a checkpoint, in place of older ones of the same names; whether any changed."""
    changed = {}
    for name, value in sorted(metrics.items()):
        check_label("a metric", name)
        stored = stored_metric(value)
        row = {"value": stored, "measured": stamp.now, "document_url": None}
        keys = {"checkpoint": serial, "name": name}
        if insert_if_absent(connection, Metric, keys, row, Metric.name) is not None:
            changed[name] = stored
            continue
        new = sa.or_(Metric.value.is_distinct_from(stored), Metric.document_url.is_not(None))
        where = (Metric.checkpoint == serial, Metric.name == name, new)
        if connection.execute(sa.update(Metric).where(*where).values(**row)).rowcount:
            changed[name] = stored
    if changed:
        said = {n: v if v is None or abs(v) != float("inf") else str(v) for n, v in changed.items()}
        event(connection, "metric", stamp.who, stamp.now, serial, metrics=said)
    return bool(changed)


def add_note(connection: Connection, serial: int, text: str, stamp: Stamp) -> None:
    """Write something about a checkpoint."""
    if not text.strip():
        raise UsageError("the note is empty")
    connection.execute(sa.insert(Note).values(checkpoint=serial, text=text, created=stamp.now, who=stamp.who))
    event(connection, "note", stamp.who, stamp.now, serial)


def check_label(what: str, word: str) -> None:
    """UsageError unless the word can be a name: printable, and without blanks at its ends."""
    if not word or word != word.strip() or not word.isprintable():
        raise UsageError(f"{word!r} cannot be {what}", hint="write printable characters, without blanks at the ends")
