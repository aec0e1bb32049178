"""Compile filters and sort orders to SQL on `models.Checkpoint`, with the same results on SQLite and PostgreSQL.

Conditions are true or false, never NULL. A comparison first searches the small or indexed table of
its key, then the checkpoints that refer to the rows found.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, false, not_, or_, select, true

from ucformat.catalog.entries import Kind
from ucformat.catalog.filter.check import (
    Names,
    check,
    check_known,
    instant,
    paths_of,
    resolve,
    used_names,
)
from ucformat.catalog.filter.documents import document_order, document_test
from ucformat.catalog.filter.expressions import (
    OPERATORS,
    by_code_point,
    compare_float,
    compare_integer,
    float_in,
    integer_in,
    like,
)
from ucformat.catalog.filter.parse import parse, parse_sort
from ucformat.catalog.filter.syntax import (
    Age,
    And,
    Boolean,
    Compare,
    In,
    IsNull,
    Like,
    Not,
    Number,
    Or,
    SizeLiteral,
    Text,
)
from ucformat.catalog.models import (
    Base,
    CheckpointRow,
    Config,
    Digest,
    Hold,
    Metric,
    RunRow,
    TensorRow,
    Verification,
)
from ucformat.catalog.rows import all_blocks, unindexed
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sqlalchemy import ColumnElement, Connection, Select

    from ucformat.catalog.entries import EntryKey
    from ucformat.catalog.filter.check import KeyTarget
    from ucformat.catalog.filter.documents import DocumentValue
    from ucformat.catalog.filter.syntax import Atom, Node, Sort, Value

    Lift = Callable[[ColumnElement[bool]], ColumnElement[bool]]


@dataclass(frozen=True)
class KeyColumn:
    """The column of a key; `lift` turns a condition on it into one on checkpoints that is never NULL."""

    column: Any
    lift: Lift


def _stored(key: EntryKey) -> tuple[Any, Any]:
    """The column of a key, and the one by which its table refers to checkpoints; None for other tables."""
    name, column = key.place
    table = Base.metadata.tables[name]
    return table.c[column], table.c.get("checkpoint")


def column_of(target: KeyTarget, *, each: bool = False) -> KeyColumn:
    """The column of a key, except of `hold` and of paths into documents; `each` as for `compile_filter`."""

    def owned(owner: Any, *conditions: ColumnElement[bool]) -> Lift:
        if each:
            return lambda c: (
                select(owner).where(owner == CheckpointRow.serial, *conditions, c).exists()
            )
        return lambda c: CheckpointRow.serial.in_(select(owner).where(*conditions, c))

    column, owner = _stored(target.key)
    match target.root:
        case "run":
            run = unindexed(CheckpointRow.run_id) if each else CheckpointRow.run_id
            return KeyColumn(column, lambda c: _and_there(run, run.in_(select(RunRow.id).where(c))))
        case "metric":
            return KeyColumn(column, owned(owner, Metric.name == target.path[0]))
        case "verified":
            return KeyColumn(column, _last_verified)
        case "tensor" if target.path == ("digest",):
            return KeyColumn(column, _with_digest)
        case "tensor":
            structure = (
                unindexed(CheckpointRow.tensor_set_id) if each else CheckpointRow.tensor_set_id
            )
            return KeyColumn(
                column, lambda c: structure.in_(select(TensorRow.tensor_set_id).where(c))
            )
        case _ if target.key.many:
            return KeyColumn(column, owned(owner))
    return KeyColumn(column, lambda c: _and_there(column, c))


def document_column(target: KeyTarget, *, each: bool = False) -> KeyColumn:
    """The column of the JSON document that a key points into; `each` as for `compile_filter`."""
    column, _ = _stored(target.key)
    if target.root != "config":
        return KeyColumn(column, lambda c: c)
    config: Any = unindexed(CheckpointRow.config_id) if each else CheckpointRow.config_id
    return KeyColumn(column, lambda c: _and_there(config, config.in_(select(Config.id).where(c))))


def is_held(now: datetime) -> ColumnElement[bool]:
    """Whether a checkpoint has a hold that is neither released nor expired."""
    active = Hold.released.is_(None), or_(Hold.until.is_(None), Hold.until > now)
    return CheckpointRow.serial.in_(select(Hold.checkpoint).where(*active))


def _and_there(column: Any, condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """False instead of NULL where the column is NULL."""
    return and_(column.is_not(None), condition)


def _last_verified(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    later = Verification.__table__.alias().c
    after = or_(
        later.at > Verification.at, and_(later.at == Verification.at, later.id > Verification.id)
    )
    superseded = select(later.id).where(later.checkpoint == Verification.checkpoint, after).exists()
    return CheckpointRow.serial.in_(
        select(Verification.checkpoint).where(condition, not_(superseded))
    )


def _with_digest(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """One index search for each block, if the condition names the digest."""
    return CheckpointRow.serial.in_(
        select(Digest.checkpoint).where(Digest.block.in_(all_blocks()), condition)
    )


_FIRST, _LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def compile_filter(node: Node, *, now: datetime, each: bool = False) -> ColumnElement[bool]:
    """Compile a filter to a condition for `select(Checkpoint).where(…)`.

    Args:
        each: whether the query chooses a few checkpoints by something else, and tests each of them
            (default: the database is to find the checkpoints by this condition, with an index if it
            has one).
    """
    if now.tzinfo is None:
        raise UsageError("the time of a filter needs a time zone", hint="such as datetime.now(UTC)")
    check(node)
    return _condition(node, now, negated=False, each=each)


def compile_rows(node: Node, *, now: datetime) -> Select[Any] | None:
    """The query for the checkpoints that a comparison finds by an index; None if it has none."""
    if not isinstance(node, Compare | In) or _is_opposite(node):
        return None
    target = resolve(node.key)
    equal = isinstance(node, In) or node.operator == "="
    if not target.key.indexed or not (equal or target.root == "metric"):
        return None
    column, owner = _stored(target.key)
    if owner is not None:
        named = (Metric.name == target.path[0],) if target.root == "metric" else ()
        return select(owner).where(*named, _on_column(column, target.kind, node, now))
    return select(CheckpointRow.serial).where(_atom(node, now, each=False))


def _condition(node: Node, now: datetime, *, negated: bool, each: bool) -> ColumnElement[bool]:
    """The condition without `NOT (…)` and with the deepest operands first, for the stack of SQLite's parser."""
    match node:
        case Not(inner):
            return _condition(inner, now, negated=not negated, each=each)
        case And(nodes) | Or(nodes):
            join = and_ if isinstance(node, And) is not negated else or_
            deepest_first = sorted(nodes, key=lambda n: getattr(n, "depth", 0), reverse=True)
            return join(*(_condition(n, now, negated=negated, each=each) for n in deepest_first))
        case _:
            holds = _atom(node, now, each=each)
            return not_(holds) if _is_opposite(node) is not negated else holds


def _is_opposite(atom: Atom) -> bool:
    match atom:
        case Compare(_, operator):
            return operator == "!="
        case IsNull(_, negated):
            return not negated
        case In(negated=negated) | Like(negated=negated):
            return negated


def _atom(atom: Atom, now: datetime, *, each: bool) -> ColumnElement[bool]:
    """The condition of a comparison without its negation."""
    target = resolve(atom.key)
    if target.root == "hold":
        return _truth(is_held(now), atom)
    if target.kind is Kind.JSON:
        source = document_column(target, each=each)
        return source.lift(
            document_test(source.column, target.path, lambda stored: _in_document(stored, atom))
        )
    source = column_of(target, each=each)
    return source.lift(_on_column(source.column, target.kind, atom, now))


def _truth(condition: ColumnElement[bool], atom: Atom) -> ColumnElement[bool]:
    match atom:
        case Compare(_, _, value):
            wanted = {value}
        case In(_, values):
            wanted = set(values)
        case _:
            return true()
    return or_(
        condition if Boolean(True) in wanted else false(),
        not_(condition) if Boolean(False) in wanted else false(),
    )


def _in_document(stored: DocumentValue, atom: Atom) -> ColumnElement[bool]:
    match atom:
        case Compare(_, "=" | "!=", value):
            return stored.among([value])
        case Compare(_, operator, value):
            return stored.compare(operator, value)
        case In(_, values):
            return stored.among(values)
        case Like(_, pattern):
            return stored.like(pattern.value)
        case IsNull():
            return stored.present()


def _on_column(column: Any, kind: Kind, atom: Atom, now: datetime) -> ColumnElement[bool]:
    match atom:
        case Compare(_, "=" | "!=", value):
            return _among(column, kind, [value], now)
        case Compare(_, operator, value):
            return _ordered(column, kind, operator, value, now)
        case In(_, values):
            return _among(column, kind, values, now)
        case Like(_, pattern):
            return like(column, pattern.value)
        case IsNull():
            there: ColumnElement[bool] = column.is_not(None)
            return there


def _among(column: Any, kind: Kind, values: Sequence[Value], now: datetime) -> ColumnElement[bool]:
    bounds = [_bound(kind, value, now) for value in values]
    if kind in {Kind.INTEGER, Kind.SIZE}:
        return integer_in(column, bounds)
    if kind is Kind.FLOAT:
        return float_in(column, bounds)
    equal: ColumnElement[bool] = column == bounds[0] if len(bounds) == 1 else column.in_(bounds)
    return equal


def _ordered(
    column: Any, kind: Kind, operator: str, value: Value, now: datetime
) -> ColumnElement[bool]:
    bound = _bound(kind, value, now)
    if kind in {Kind.INTEGER, Kind.SIZE}:
        return compare_integer(column, operator, bound)
    if kind is Kind.FLOAT:
        return compare_float(column, operator, bound)
    if kind is Kind.AGE:
        operator = _MIRRORED[operator]  # a higher age is an earlier time
    compared: ColumnElement[bool] = OPERATORS[operator](
        by_code_point(column) if kind is Kind.TEXT else column, bound
    )
    return compared


def _bound(kind: Kind, value: Value, now: datetime) -> Any:
    """The value in the type of the column."""
    match value:
        case Age(span):
            return _ago(now, span)
        case SizeLiteral(nbytes):
            return nbytes
        case Text(text):
            return instant(text) if kind is Kind.TIME else text
        case Number() | Boolean():
            return value.value


def _ago(now: datetime, span: timedelta) -> datetime:
    try:
        return now.astimezone(UTC) - span
    except OverflowError:
        return _FIRST if span > timedelta(0) else _LAST


def compile_sort(sort: Sort) -> list[ColumnElement[Any]]:
    """Compile a sort order to expressions for `select(Checkpoint).order_by(*…)`.

    Returns:
        The expressions: missing values come last; ties are broken by the time of recording, newest
        first.
    """
    check(sort)
    ordered = []
    for by in sort.keys:
        target = resolve(by.key)
        down = by.descending is not (target.kind is Kind.AGE)  # a higher age is an earlier time
        ordered += [
            (value.desc() if down else value.asc()).nulls_last() for value in _sort_values(target)
        ]
    return [*ordered, CheckpointRow.serial.desc()]


def _sort_values(target: KeyTarget) -> list[ColumnElement[Any]]:
    match target.root:
        case "config":
            own = Config.id == CheckpointRow.config_id
            return document_order(
                Config.document,
                target.path,
                lambda value: select(value).where(own).correlate(CheckpointRow).scalar_subquery(),
            )
        case "topology" | "producer":
            return document_order(document_column(target).column, target.path)
        case "run":
            name = (
                select(RunRow.name)
                .where(RunRow.id == CheckpointRow.run_id)
                .correlate(CheckpointRow)
                .scalar_subquery()
            )
            return [by_code_point(name)]
        case "metric":
            named = Metric.checkpoint == CheckpointRow.serial, Metric.name == target.path[0]
            return [select(Metric.value).where(*named).correlate(CheckpointRow).scalar_subquery()]
        case _:
            column = column_of(target).column
            return [by_code_point(column) if target.kind is Kind.TEXT else column]


_SAMPLE = 200  # the newest configurations are searched for similar paths


def read_filter(connection: Connection, text: str) -> Node:
    """Parse a filter; some checkpoint has each metric and configuration path that it uses.

    In a catalog without metrics, or without configurations, any name is accepted.
    """
    node = parse(text, partial(_all_names, connection))
    _check_names(connection, node, text)
    return node


def read_sort(connection: Connection, text: str) -> Sort:
    """Parse an order, as `read_filter` does a filter."""
    sort = parse_sort(text, partial(_all_names, connection))
    _check_names(connection, sort, text)
    return sort


def _all_names(connection: Connection) -> Names:
    return Names(frozenset(_metrics(connection)), frozenset(_paths(connection)))


def _metrics(connection: Connection) -> Iterable[str]:
    return connection.scalars(select(Metric.name).distinct())


def _paths(connection: Connection) -> Iterator[tuple[str, ...]]:
    newest = select(Config.document).order_by(Config.id.desc()).limit(_SAMPLE)
    return chain.from_iterable(map(paths_of, connection.scalars(newest)))


def _check_names(connection: Connection, node: Node | Sort, text: str) -> None:
    used = used_names(node)
    metrics = {name for name in used.metrics if _has_metric(connection, name)}
    configs = {path for path in used.configs if _has_path(connection, path)}
    if metrics != used.metrics:
        metrics.update(_metrics(connection))
    if configs != used.configs:
        configs.update(_paths(connection))
    check_known(node, Names(frozenset(metrics), frozenset(configs)), text)


def _has_metric(connection: Connection, name: str) -> bool:
    return (
        connection.scalar(select(Metric.checkpoint).where(Metric.name == name).limit(1)) is not None
    )


def _has_path(connection: Connection, path: tuple[str, ...]) -> bool:
    named = document_test(Config.document, path, lambda stored: stored.named())
    return connection.scalar(select(Config.id).where(named).limit(1)) is not None
