"""Pieces of SQL that SQLite and PostgreSQL spell differently, and that mean the same on both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Boolean, Text, literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement
    from sqlalchemy.sql.compiler import SQLCompiler

__all__ = ["by_code_point", "by_engine", "like"]


class _ByEngine(FunctionElement[Any]):
    """Two spellings of one expression, in this order: for SQLite, and for PostgreSQL."""

    name = "by_engine"
    inherit_cache = True


class _ByCodePoint(FunctionElement[str]):
    """Text that is compared and ordered by code point, whatever the database's collation."""

    name = "by_code_point"
    type = Text()
    inherit_cache = True


class _Like(FunctionElement[bool]):
    """Whether text matches a pattern, in this order: the text, the pattern of LIKE, the pattern of GLOB."""

    name = "like"
    type = Boolean()
    inherit_cache = True


def by_engine(sqlite: ColumnElement[Any], postgresql: ColumnElement[Any]) -> ColumnElement[Any]:
    """The first on SQLite, the second on PostgreSQL."""
    both = _ByEngine(sqlite, postgresql)
    both.type = sqlite.type
    return both


def by_code_point(text: ColumnElement[str]) -> ColumnElement[str]:
    """Text that `<` and ORDER BY take by code point."""
    return _ByCodePoint(text)


def like(text: ColumnElement[str], pattern: str) -> ColumnElement[bool]:
    """Whether text matches a pattern; upper and lower case differ, as LIKE does not see on SQLite, but GLOB does."""
    return _Like(text, literal(pattern, Text), literal(_glob(pattern), Text))


def _glob(pattern: str) -> str:
    made = []
    rest = iter(pattern)
    for c in rest:
        taken = next(rest) if c == "\\" else None
        if taken is None and c in "%_":
            made.append("*" if c == "%" else "?")
        else:
            plain = taken or c
            made.append(f"[{plain}]" if plain in "*?[" else plain)
    return "".join(made)


@compiles(_ByEngine)
def _by_engine(element: _ByEngine, compiler: SQLCompiler, **kw: Any) -> str:
    sqlite, postgresql = element.clauses
    return f"({compiler.process(postgresql if compiler.dialect.name == 'postgresql' else sqlite, **kw)})"


@compiles(_ByCodePoint)
def _by_code_point(element: _ByCodePoint, compiler: SQLCompiler, **kw: Any) -> str:
    collation = ' COLLATE "C"' if compiler.dialect.name == "postgresql" else ""
    return f"({compiler.process(element.clauses, **kw)}){collation}"


@compiles(_Like)
def _like(element: _Like, compiler: SQLCompiler, **kw: Any) -> str:
    text, pattern, glob = element.clauses
    spelled = compiler.process(text, **kw)
    if compiler.dialect.name == "postgresql":
        return f'(({spelled}) COLLATE "C" LIKE {compiler.process(pattern, **kw)})'
    return f"(({spelled}) GLOB {compiler.process(glob, **kw)})"
