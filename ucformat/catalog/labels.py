"""Annotations of checkpoints: aliases, tags, holds, metrics and notes."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from ucformat.catalog.models import (
    AliasMove,
    AliasRow,
    CheckpointRow,
    Hold,
    Metric,
    Note,
    Tag,
    Untag,
    stored_metric,
)
from ucformat.catalog.rows import event, insert_if_absent, lock, lock_names
from ucformat.errors import Conflict, NotFound, PermissionDenied, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from ucformat.catalog.stamp import Stamp

_MICROSECOND = timedelta(microseconds=1)  # the resolution of times


class _Any:
    """The type of ANY: the alias may point anywhere, or not exist."""

    def __repr__(self) -> str:
        return "ANY"


ANY: Final = _Any()


def move_alias(
    connection: Connection, name: str, target: int, expect: int | _Any | None, stamp: Stamp
) -> tuple[int, ...]:
    """Point an alias to a checkpoint.

    Args:
        expect: the serial that it must point to now; None if it must not exist; ANY to skip the
            check.
    """
    _check_name("an alias", name)
    if name == "latest":
        raise UsageError(
            "`latest` means the last step of a run, and cannot be an alias",
            hint="choose another name",
        )
    alias = _alias(connection, name)
    _check_expected(connection, name, None if alias is None else alias.checkpoint, expect)
    if alias is not None and alias.checkpoint == target:
        connection.execute(
            sa.update(AliasRow).where(AliasRow.name == name).values(document_url=None)
        )
        return ()
    version = 1 + (last_version(connection, name) if alias is None else alias.version)
    values = {"checkpoint": target, "version": version, "moved": stamp.now, "document_url": None}
    if alias is None:
        connection.execute(sa.insert(AliasRow).values(name=name, **values))
    else:
        connection.execute(sa.update(AliasRow).where(AliasRow.name == name).values(**values))
    source = None if alias is None else alias.checkpoint
    _record_move(connection, name, version, source, target, stamp)
    return (target,) if source is None else (source, target)


def remove_alias(
    connection: Connection, name: str, expect: int | _Any | None, stamp: Stamp
) -> tuple[int, ...]:
    """Remove an alias, and keep its history; `expect` as for `move_alias`."""
    alias = _alias(connection, name)
    if alias is None:
        raise NotFound(f"there is no alias {name!r}", hint="`ucp alias list` shows all")
    _check_expected(connection, name, alias.checkpoint, expect)
    connection.execute(sa.delete(AliasRow).where(AliasRow.name == name))
    _record_move(connection, name, alias.version + 1, alias.checkpoint, None, stamp)
    return (alias.checkpoint,)


def alias_target(connection: Connection, name: str) -> int | None:
    """The serial of the target of an alias, which is locked; None if there is none."""
    alias = _alias(connection, name)
    return None if alias is None else int(alias.checkpoint)


def _alias(connection: Connection, name: str) -> Any:
    lock_names(connection, f"alias {name}")
    return connection.execute(
        sa.select(AliasRow.__table__).where(AliasRow.name == name)
    ).one_or_none()


def _check_expected(
    connection: Connection, name: str, target: int | None, expect: int | _Any | None
) -> None:
    if expect is ANY or target == expect:
        return
    now = "does not exist" if target is None else f"points to {_id(connection, target)}"
    wanted = "not exist" if expect is None else f"point to {_id(connection, int(str(expect)))}"
    raise Conflict(
        f"the alias {name!r} {now}, and was expected to {wanted}",
        hint="it was moved meanwhile: check its target, and try again if the move is still right",
    )


def _id(connection: Connection, serial: int) -> str:
    return connection.execute(
        sa.select(CheckpointRow.id).where(CheckpointRow.serial == serial)
    ).scalar_one()


def last_version(connection: Connection, name: str) -> int:
    """The version of the last move of an alias; 0 if there was none."""
    last = sa.select(sa.func.max(AliasMove.version)).where(AliasMove.name == name)
    return connection.scalar(last) or 0


def _record_move(
    connection: Connection,
    name: str,
    version: int,
    source: int | None,
    target: int | None,
    stamp: Stamp,
) -> None:
    connection.execute(
        sa.insert(AliasMove).values(
            name=name, version=version, source=source, target=target, moved=stamp.now, who=stamp.who
        )
    )
    detail = {"name": name, "version": version, "removed": target is None}
    event(connection, "alias", stamp, target or source, **detail)


def add_tags(
    connection: Connection,
    serial: int,
    tags: Sequence[str],
    stamp: Stamp,
    *,
    permanent: bool = False,
) -> bool:
    """Add tags to a checkpoint."""
    new = []
    for tag in tags:
        _check_name("a tag", tag)
        here = (Untag.checkpoint == serial, Untag.name == tag)
        removed = connection.scalar(sa.select(Untag.removed).where(*here))
        # clocks may differ
        created = stamp.now if removed is None else max(stamp.now, removed + _MICROSECOND)
        if set_tag(connection, serial, tag, created, stamp.who, permanent=permanent):
            new.append(tag)
    if new:
        event(
            connection, "tag", stamp, serial, tags=new, **({"permanent": True} if permanent else {})
        )
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
    """Add a tag to a checkpoint, or change an existing one to permanent or to this catalog's own.

    Args:
        document_url: the place of the document that it is from (None: this catalog).
    """
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


def remove_tags(
    connection: Connection, serial: int, tags: Sequence[str], reason: str, stamp: Stamp
) -> None:
    """Remove tags from a checkpoint, all of them or none."""
    if not reason.strip():
        raise UsageError("removing a tag needs a reason", hint="state why; the audit log keeps it")
    lock(connection, [serial])
    rows = connection.execute(
        sa.select(Tag.name, Tag.permanent, Tag.created).where(Tag.checkpoint == serial)
    ).all()
    present = {r.name: r for r in rows}
    for tag in tags:
        if tag not in present:
            has = f"its tags are {', '.join(sorted(present))}" if present else "it has no tags"
            raise NotFound(f"the checkpoint does not have the tag {tag!r}", hint=has)
        if present[tag].permanent:
            raise PermissionDenied(
                f"the tag {tag!r} is permanent and cannot be removed",
                hint="it was added with --permanent",
            )
    for tag in dict.fromkeys(tags):
        record_untag(
            connection, serial, tag, max(stamp.now, present[tag].created), stamp.who, reason
        )
    event(connection, "untag", stamp, serial, tags=list(dict.fromkeys(tags)), reason=reason)


def record_untag(
    connection: Connection,
    serial: int,
    tag: str,
    removed: datetime,
    who: str,
    reason: str,
    document_url: str | None = None,
) -> None:
    """Remove a tag from a checkpoint if it has it, and record the removal."""
    connection.execute(sa.delete(Tag).where(Tag.checkpoint == serial, Tag.name == tag))
    connection.execute(sa.delete(Untag).where(Untag.checkpoint == serial, Untag.name == tag))
    values = {"removed": removed, "who": who, "reason": reason, "document_url": document_url}
    connection.execute(sa.insert(Untag).values(checkpoint=serial, name=tag, **values))


def add_hold(
    connection: Connection,
    serial: int,
    reason: str,
    until: datetime | timedelta | None,
    stamp: Stamp,
) -> int:
    """Protect a checkpoint from deletion."""
    if not reason.strip():
        raise UsageError("a hold needs a reason", hint="state why the checkpoint must be kept")
    if isinstance(until, timedelta):
        until = stamp.now + until
    if until is not None and until.tzinfo is None:
        raise UsageError(f"{until.isoformat()} has no time zone", hint="add one, such as Z for UTC")
    if until is not None and until <= stamp.now:
        raise UsageError(
            f"a hold until {until.isoformat()} would have expired already",
            hint="give a future time",
        )
    values = {"reason": reason, "until": until, "created": stamp.now, "who": stamp.who}
    number = connection.execute(
        sa.insert(Hold).values(checkpoint=serial, **values).returning(Hold.id)
    ).scalar_one()
    event(connection, "hold", stamp, serial, hold=number, reason=reason)
    return int(number)


def release_holds(
    connection: Connection, serial: int, stamp: Stamp, number: int | None = None
) -> int:
    """Release holds on a checkpoint."""
    which = [Hold.checkpoint == serial, Hold.released.is_(None)]
    if number is not None:
        which.append(Hold.id == number)
    ended = connection.execute(sa.update(Hold).where(*which).values(released=stamp.now)).rowcount
    if ended:
        event(connection, "release", stamp, serial, holds=ended)
    return ended


def add_metrics(
    connection: Connection,
    serial: int,
    metrics: Mapping[str, float],
    stamp: Stamp,
    *,
    replace: bool = True,
) -> bool:
    """Set metrics of a checkpoint, replacing those with the same names if they may be."""
    changed = {}
    for name, value in sorted(metrics.items()):
        _check_name("a metric", name)
        stored = stored_metric(value)
        row = {"value": stored, "measured": stamp.now, "document_url": None}
        keys = {"checkpoint": serial, "name": name}
        if insert_if_absent(connection, Metric, keys, row, Metric.name) is not None:
            changed[name] = stored
            continue
        if not replace:
            continue
        new = sa.or_(Metric.value.is_distinct_from(stored), Metric.document_url.is_not(None))
        where = (Metric.checkpoint == serial, Metric.name == name, new)
        if connection.execute(sa.update(Metric).where(*where).values(**row)).rowcount:
            changed[name] = stored
    if changed:
        detail = {
            n: v if v is None or abs(v) != float("inf") else str(v) for n, v in changed.items()
        }
        event(connection, "metric", stamp, serial, metrics=detail)
    return bool(changed)


def add_note(connection: Connection, serial: int, text: str, stamp: Stamp) -> None:
    """Add a note to a checkpoint."""
    if not text.strip():
        raise UsageError("the note is empty")
    connection.execute(
        sa.insert(Note).values(checkpoint=serial, text=text, created=stamp.now, who=stamp.who)
    )
    event(connection, "note", stamp, serial)


def is_name(text: str) -> bool:
    """Whether a text may name a metric, tag or alias: it is printable, and neither begins nor ends with whitespace."""
    return bool(text) and text == text.strip() and text.isprintable()


def _check_name(kind: str, name: str) -> None:
    if not is_name(name):
        raise UsageError(
            f"{name!r} cannot be {kind}",
            hint="use printable characters, without spaces at the beginning or end",
        )
