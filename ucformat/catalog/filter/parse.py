"""Parse filters and sort orders; errors point at the wrong character and list what is allowed there."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from fractions import Fraction
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast

from lark import Lark, Transformer, UnexpectedCharacters, UnexpectedToken, v_args

from ucformat.catalog.filter.check import Names, check, pointing_error
from ucformat.catalog.filter.syntax import (
    AGE_UNITS,
    MAX_LENGTH,
    SIZE_UNITS,
    Age,
    And,
    Boolean,
    Compare,
    In,
    IsNull,
    KeyPath,
    Like,
    Not,
    Number,
    Or,
    SizeLiteral,
    Sort,
    SortKey,
    Text,
    atoms,
)
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lark import Token

    from ucformat.catalog.filter.syntax import Node, Span, Value

_MAX_DIGITS = 320  # a longer number is too large or too fine for a float
_SIZES = {unit.upper(): size for unit, size in SIZE_UNITS.items()}

_VALUES = {"INT", "FLOAT", "AGE", "SIZE", "STRING", "TRUE", "FALSE"}
_WORDS = {
    "NAME": "a key",
    "INDEX": "an index",
    "_DOT": "a dot",
    "OPERATOR": "a comparison such as = or <",
    "_IN": "in",
    "_LIKE": "like",
    "_IS": "is",
    "_NULL": "null",
    "NOT": "not",
    "_COMMA": "a comma",
    "_AND": "and",
    "_OR": "or",
    "_LPAR": "(",
    "_RPAR": ")",
    "_COLON": ":",
    "DIRECTION": "asc or desc",
    "MINUS": "-",
    "$END": "the end",
}


def parse(text: str, names: Callable[[], Names] = Names) -> Node:
    """Parse a filter such as `step > 1000 and tag = 'good'`.

    Args:
        names: returns the metrics and configuration paths that exist, of which the error of an
            unknown key offers some.
    """
    node = cast("Node", _read(text, "filter"))
    check(node, text, names)
    return node


def parse_sort(text: str, names: Callable[[], Names] = Names) -> Sort:
    """Parse an order such as `-metric.val_loss,step` or `created:desc`; `names` as for `parse`."""
    sort = cast("Sort", _read(text, "sort"))
    check(sort, text, names)
    return sort


def _read(text: str, start: str) -> Node | Sort:
    if len(text) > MAX_LENGTH:
        raise UsageError(f"a filter has at most {MAX_LENGTH} characters, not {len(text)}")
    for i, c in enumerate(text):
        if c == "\0" or "\ud800" <= c <= "\udfff":
            raise pointing_error(
                "a filter cannot contain this character", text, (i, i + 1), hint=f"U+{ord(c):04X}"
            )
    try:
        return cast("Node | Sort", _lark().parse(text, start=start))
    except UnexpectedToken as e:
        if e.token.type == "$END":
            end = (len(text), len(text))
            raise pointing_error(
                "the text ends too early", text, end, hint=_expected(e.accepts)
            ) from None
        raise pointing_error(
            "this does not belong here", text, _at(e.token), hint=_hint(e, text)
        ) from None
    except UnexpectedCharacters as e:
        wrong = e.pos_in_stream or 0
        match text[wrong]:
            case "'" | '"':
                message, hint = "this quote is not closed", "double a quote to use it inside text"
            case "&" | "|" | "!" | "~" | "^":
                message, hint = "there is no such operator", "write and, or, not"
            case _:
                message, hint = "this does not belong here", _expected(e.allowed)
        raise pointing_error(message, text, (wrong, wrong + 1), hint=hint) from None
    except _Misfit as e:
        raise pointing_error(e.error.message, text, e.at, hint=e.error.hint) from None


@cache
def _lark() -> Lark:
    grammar = files("ucformat.catalog.filter").joinpath("grammar.lark").read_text(encoding="utf-8")
    return Lark(
        grammar,
        parser="lalr",
        start=["filter", "sort"],
        transformer=_ParsedTree(),
        maybe_placeholders=True,
    )


class _Misfit(Exception):
    """An error in one node of the tree, and its place in the text."""

    def __init__(self, error: UsageError, at: Span | None) -> None:
        super().__init__(error.message)
        self.error = error
        self.at = at


@v_args(inline=True)
class _ParsedTree(Transformer[Any, Any]):
    """Builds the tree while the text is parsed, without recursion."""

    def disjunction(self, *nodes: Node) -> Node:
        with _placed(_start(nodes[0])):
            return Or(nodes)

    def conjunction(self, *nodes: Node) -> Node:
        with _placed(_start(nodes[0])):
            return And(nodes)

    def negated(self, word: Token, node: Node) -> Node:
        with _placed(_at(word)):
            return Not(node)

    def compare(self, key: KeyPath, operator: Token, value: Value) -> Node:
        return Compare(key, {"==": "=", "<>": "!="}.get(operator, str(operator)), value)

    def member(self, key: KeyPath, negation: Token | None, *values: Value) -> Node:
        return In(key, values, negated=negation is not None)

    def like(self, key: KeyPath, negation: Token | None, pattern: Text) -> Node:
        with _placed(pattern.at):
            return Like(key, pattern, negated=negation is not None)

    def null(self, key: KeyPath, negation: Token | None) -> Node:
        return IsNull(key, negated=negation is not None)

    def sort(self, *keys: SortKey) -> Sort:
        with _placed(keys[-1].key.at):
            return Sort(keys)

    def by(self, minus: Token | None, key: KeyPath, direction: Token | None) -> SortKey:
        if minus is not None and direction is not None:
            with _placed(_at(direction)):
                raise UsageError(
                    "the direction is given twice", hint="write either a minus, or :asc or :desc"
                )
        return SortKey(
            key, minus is not None or (direction is not None and direction.lower() == "desc")
        )

    def key(self, *parts: Token) -> KeyPath:
        at = (_at(parts[0])[0], _at(parts[-1])[1])
        with _placed(at):
            return KeyPath(tuple(map(_unquoted, parts)), at=at)

    def text(self, token: Token) -> Text:
        return Text(_unquoted(token), at=_at(token))

    def integer(self, token: Token) -> Number:
        with _placed(_at(token)):
            return Number(int(_short(token)), at=_at(token))

    def real(self, token: Token) -> Number:
        with _placed(_at(token)):
            return Number(float(token), at=_at(token))

    def truth(self, token: Token) -> Boolean:
        return Boolean(token.lower() == "true", at=_at(token))

    def age(self, token: Token) -> Age:
        with _placed(_at(token)):
            micros = round(Fraction(_short(token)[:-1]) * AGE_UNITS[token[-1]] * 10**6)
            try:
                return Age(timedelta(microseconds=micros), at=_at(token))
            except OverflowError:
                raise UsageError("this age is too large", hint="ages go up to 999999999d") from None

    def size(self, token: Token) -> SizeLiteral:
        with _placed(_at(token)):
            number = _short(token).rstrip("kmgtibKMGTIB")
            return SizeLiteral(
                round(Fraction(number) * _SIZES[token[len(number) :].upper()]), at=_at(token)
            )


@contextmanager
def _placed(at: Span | None) -> Iterator[None]:
    """Errors raised inside refer to this place in the text."""
    try:
        yield
    except UsageError as e:
        raise _Misfit(e, at) from None


def _at(token: Token) -> Span:
    start = token.start_pos or 0
    return start, start + len(token)


def _start(node: Node) -> Span | None:
    return next(atoms(node)).key.at


def _short(token: Token) -> str:
    if len(token) > _MAX_DIGITS:
        raise UsageError(f"a number has at most {_MAX_DIGITS} digits")
    return str(token)


def _unquoted(token: Token) -> str:
    quote = token[0]
    return token[1:-1].replace(quote * 2, quote) if token.type == "STRING" else str(token)


def _expected(terminals: set[str] | None) -> str:
    expected = set(terminals or ())
    if expected == {"STRING"}:
        return "expected text in quotes"
    if expected >= _VALUES:
        return "expected a value: text in quotes, a number, true or false"
    *words, last = [word for name, word in _WORDS.items() if name in expected] or ["nothing more"]
    return f"expected {', '.join(words)}{' or ' * bool(words)}{last}"


def _hint(error: UnexpectedToken, text: str) -> str:
    token = error.token
    start = _at(token)[0]
    value = set(error.accepts or ()) >= _VALUES
    if value and token.type == "NAME":
        return f"put text in quotes: '{token}'"
    if value and token.type == "_NULL":
        return "to find missing values, write: KEY is null"
    if (
        token.type == "NAME"
        and text[start - 1 : start].isdigit()
        and "_AND" in (error.accepts or ())
    ):
        return f"the units of ages are {' '.join(AGE_UNITS)}, of sizes {' '.join(SIZE_UNITS)}"
    return _expected(error.accepts)
