"""Untrusted regular expressions, compiled only if matching takes bounded work.

`re` backtracks: it tries one way of matching after another, and there may be exponentially many.
`(a+)+b` on a name of 40 letters does not end in practice. So the ways are counted before a pattern
is used, as an upper bound over all names, and a pattern with too many is rejected (ADR 0022).

A bound is a polynomial (c0, c1, c2, …): Σ c_d · C(n + d, d) for a name of n characters. Its degree
d is the number of repeats of variable length, because there are C(n + d, d) ways to give d repeats
lengths that add up to at most n. So the bounds of a sequence multiply, and those of alternatives
add up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from re import _constants as op  # opcodes of `re`'s parser
from re import _parser as parser
from typing import Any

from ucformat.errors import LayoutError

_MAX_PATTERN = 1000  # characters of a pattern
_MIN_NAME = 200  # characters of a name that every pattern must accept
_MAX_STEPS = 60_000_000  # of matching one name, at most: some tenths of a second
_MAX_EXPANDED = 1 << 16  # characters of a name that a template produces

_Bound = tuple[int, ...]
_Head = tuple[
    int, int
]  # a bit set of the characters that may follow, and the number of nodes that check for them
_ONE: _Bound = (1,)
_OTHER = 1 << 128  # every non-ASCII character
_ANY = _OTHER | (1 << 128) - 1
_ALL = 1 << 129 | _ANY
_END: _Head = (1 << 129, 1)  # after a pattern: the end of the name
_OPEN: _Head = (_ALL, 1)

_REPEATS = {op.MAX_REPEAT: "", op.MIN_REPEAT: "?", op.POSSESSIVE_REPEAT: "+"}
_CLASSES = {
    op.CATEGORY_DIGIT: "\\d", op.CATEGORY_NOT_DIGIT: "\\D", op.CATEGORY_SPACE: "\\s", op.CATEGORY_NOT_SPACE: "\\S",
    op.CATEGORY_WORD: "\\w", op.CATEGORY_NOT_WORD: "\\W",
}  # fmt: skip
_HINT = (
    "make each repeat end clearly: `[^.]+` instead of `.*` before a dot, `(?:[^.]+\\.)*` instead of `(?:.*\\.)*`, "
    "alternatives with different first characters; or write a glob, or several patterns"
)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression, and the length of the longest name it accepts, in characters (None: any)."""

    regex: re.Pattern[str]
    longest: int | None = None

    @property
    def groups(self) -> int:
        """Number of capturing groups."""
        return self.regex.groups

    def match(self, name: str) -> re.Match[str] | None:
        """The match of the beginning of a name, or None."""
        return self.regex.match(self._checked(name))

    def fullmatch(self, name: str) -> re.Match[str] | None:
        """The match of a whole name, or None."""
        return self.regex.fullmatch(self._checked(name))

    def _checked(self, name: str) -> str:
        if self.longest is None or len(name) <= self.longest:
            return name
        raise LayoutError(
            f"the name {name[:80]}… has {len(name)} characters; the pattern {_short(self.regex.pattern)} accepts at "
            f"most {self.longest}, because a longer name may take too long",
            hint=_HINT,
        )


def is_regex(pattern: str) -> bool:
    """Whether a pattern is spelled `/regex/`."""
    return len(pattern) > 2 and pattern[0] == pattern[-1] == "/"


def compile_regex(pattern: str) -> Pattern:
    """Compile `/regex/`, as `compile_pattern` does without the slashes."""
    return compile_pattern(pattern[1:-1])


@lru_cache(1024)
def compile_pattern(regex: str) -> Pattern:
    """Compile a regular expression whose work is bounded.

    Args:
        regex: the pattern in the syntax of `re`, at most 1000 characters.
    """
    if len(regex) > _MAX_PATTERN:
        raise LayoutError(
            f"the pattern {_short(regex)} has {len(regex)} characters; at most {_MAX_PATTERN} are allowed",
            hint="split it into several patterns",
        )
    try:
        tree = parser.parse(regex)
        compiled = re.compile(regex)
        work = _Count(regex).seq(tree, tree.state.flags, _END)[1]
    except (re.error, OverflowError, RecursionError) as e:
        raise LayoutError(f"{_short(regex)} is not a regular expression: {e}") from e
    longest = _MIN_NAME
    while longest < 1 << 20 and _value(work, longest * 5 // 4) <= _MAX_STEPS:
        longest = longest * 5 // 4
    return Pattern(compiled, longest)


def expand(match: re.Match[str], template: str) -> str:
    """Replace the group references of a template by the groups of a match."""
    if len(template) + template.count("\\") * len(match[0]) > _MAX_EXPANDED:
        raise LayoutError(
            f"the template {_short(template)} may produce a name of more than {_MAX_EXPANDED} characters "
            f"from {_short(match[0])}",
            hint="write a shorter template",
        )
    try:
        return match.expand(template)
    except (re.error, IndexError) as e:
        raise LayoutError(f"the template {_short(template)} does not fit its pattern: {e}") from e


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "…")


class _Count:
    """Bounds the number of ways in which a pattern can match at one position, and of the steps to try them all.

    Both model the engine of `re`. `follow` is a superset of the characters that may come next.
    """

    def __init__(self, regex: str) -> None:
        self._regex = regex
        self._heads: dict[int, tuple[int, bool, int]] = {}

    def seq(self, nodes: Any, flags: int, follow: _Head) -> tuple[_Bound, _Bound]:
        """The ways and the steps of a sequence of nodes."""
        ways, work = _ONE, _ONE
        for node in reversed(list(nodes)):
            own_ways, steps = self._node(node, flags, follow)
            work = self._checked(_add(steps, _times(own_ways, work)), node)
            ways = self._checked(_times(own_ways, ways), node)
            chars, empty, checks = self._head(node, flags)
            follow = (chars | follow[0], checks + follow[1]) if empty else (chars, checks)
        return ways, work

    def _node(self, node: Any, flags: int, follow: _Head) -> tuple[_Bound, _Bound]:
        code, value = node
        if code in _REPEATS:
            return self._repeat(node, flags, follow)
        if code is op.SUBPATTERN:
            _, plus, minus, inner = value
            return self.seq(inner, (flags | plus) & ~minus, follow)
        if code is op.BRANCH:
            return self._branch(value[1], flags, follow)
        if code is op.ATOMIC_GROUP:
            return _ONE, self.seq(value, flags, _OPEN)[1]
        if code in (op.ASSERT, op.ASSERT_NOT):
            # It reads characters that other nodes read too, whereas `_times` assumes that each
            # reads its own.
            return _ONE, _times((3,), self.seq(value[1], flags, _OPEN)[1])
        if code in (op.GROUPREF, op.GROUPREF_EXISTS):
            raise self._too_much_work(
                node, "refers to an earlier group", "write out the alternatives of the group"
            )
        return _ONE, _ONE

    def _branch(self, options: Any, flags: int, follow: _Head) -> tuple[_Bound, _Bound]:
        total: _Bound = ()
        largest: _Bound = ()
        work: _Bound = (len(options),)
        seen, disjoint = 0, True
        for option in options:
            own_ways, steps = self.seq(option, flags, follow)
            chars, empty, _ = self._first(option, flags)
            chars |= follow[0] if empty else 0
            disjoint, seen = disjoint and not seen & chars, seen | chars
            total, largest, work = (
                _add(total, own_ways),
                _larger(largest, own_ways),
                _add(work, steps),
            )
        return largest if disjoint else total, work

    def _repeat(self, node: Any, flags: int, follow: _Head) -> tuple[_Bound, _Bound]:
        code, (low, high, inner) = node
        chars, empty, checks = self._first(inner, flags)
        next_follow = (
            _OPEN
            if empty or code is op.POSSESSIVE_REPEAT
            else (chars | follow[0], checks + follow[1])
        )
        own_ways, steps = self.seq(inner, flags, next_follow)
        steps = _add((1 + follow[1],), steps)
        exits_once = (
            not empty and not chars & follow[0]
        )  # the next character decides whether to repeat
        if high == 1 and code is not op.POSSESSIVE_REPEAT:
            return (own_ways if exits_once else _add(_ONE, own_ways)), steps
        repeats = (high + 1,) if high <= _MIN_NAME else (low + 1, 1) if empty else (0, 1)
        if code is op.POSSESSIVE_REPEAT:
            return _ONE, self._checked(_times(repeats, steps), node)
        if own_ways == _ONE and not empty:
            return (_ONE if exits_once else repeats), self._checked(_times(repeats, steps), node)
        if high > _MIN_NAME:
            raise self._too_much_work(
                node, "repeats a part that can match the same text in several ways", _HINT
            )
        ways: _Bound = (0,)
        work: _Bound = (0,)
        power = _ONE
        for i in range(high + 1):
            ways = _add(ways, power) if i >= low else ways
            work = self._checked(_add(work, _times(power, steps)), node)
            power = self._checked(_times(power, own_ways), node) if i < high else power
        return ways, work

    def _first(self, nodes: Any, flags: int) -> tuple[int, bool, int]:
        """The characters that nodes may begin with, whether they may be empty, and how many nodes check for them.

        All characters if they may be empty in several ways, or look ahead: then more work happens
        before they fail.
        """
        cached = self._heads.get(id(nodes))
        if cached is None:
            chars, empty, checks = 0, True, 1
            for node in nodes:
                more, empty, places = self._head(node, flags)
                chars, checks = chars | more, checks + places
                if not empty:
                    break
            self._heads[id(nodes)] = cached = chars, empty, checks
        return cached

    def _head(self, node: Any, flags: int) -> tuple[int, bool, int]:
        code, value = node
        if code in _REPEATS:
            chars, empty, checks = self._first(value[2], flags)
            return (_ALL, True, checks) if empty else (chars, value[0] == 0, checks + 1)
        if code is op.SUBPATTERN:
            return self._first(value[3], (flags | value[1]) & ~value[2])
        if code is op.ATOMIC_GROUP:
            return self._first(value, flags)
        if code is op.BRANCH:
            found = [self._first(option, flags) for option in value[1]]
            chars, empties, checks = 0, 0, 0
            for more, empty, places in found:
                chars, empties, checks = chars | more, empties + empty, checks + places
            return _ALL if empties > 1 else chars, empties > 0, checks
        if code is op.AT:
            return 0, True, 1
        if code in (op.ASSERT, op.ASSERT_NOT, op.GROUPREF, op.GROUPREF_EXISTS):
            return _ALL, True, 1
        return _chars(node, flags), False, 1

    def _checked(self, bound: _Bound, node: Any) -> _Bound:
        if _value(bound, _MIN_NAME) > _MAX_STEPS:
            raise self._too_much_work(node, "can match in too many ways", _HINT)
        return bound

    def _too_much_work(self, node: Any, why: str, hint: str) -> LayoutError:
        return LayoutError(
            f"the pattern {_short(self._regex)} may take too long: its part {_short(_spelled([node]))} {why}",
            hint=hint,
        )


def _add(a: _Bound, b: _Bound) -> _Bound:
    long, short = (a, b) if len(a) >= len(b) else (b, a)
    return tuple(x + (short[i] if i < len(short) else 0) for i, x in enumerate(long))


def _larger(a: _Bound, b: _Bound) -> _Bound:
    long, short = (a, b) if len(a) >= len(b) else (b, a)
    return tuple(max(x, short[i]) if i < len(short) else x for i, x in enumerate(long))


def _times(a: _Bound, b: _Bound) -> _Bound:
    out = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            out[i + j] += x * y
    return tuple(out)


def _value(bound: _Bound, n: int) -> int:
    return sum(c * comb(n + d, d) for d, c in enumerate(bound) if c)


def _chars(node: Any, flags: int) -> int:
    """A superset of the characters that a single-character node matches."""
    code, value = node
    if code is op.ANY:
        return _ANY if flags & re.DOTALL else _ANY & ~(1 << 10)
    if code is op.NOT_LITERAL:
        return _ANY & ~_bit(value) | _OTHER
    negated = code is op.IN and value[0][0] is op.NEGATE
    chars = 0
    for kind, arg in value if code is op.IN else [node]:
        if kind is op.LITERAL:
            chars |= _bit(arg)
        elif kind is op.RANGE:
            low, high = arg
            chars |= (1 << min(high + 1, 128)) - (1 << min(low, 128)) | (
                _OTHER if high > 127 else 0
            )
        elif kind is op.CATEGORY:
            chars |= _category(arg, both=negated)
        elif kind is not op.NEGATE:
            return _ALL
    if negated:
        return _ANY & ~chars | _OTHER
    if flags & re.IGNORECASE:
        upper, lower = (((1 << 26) - 1) << start for start in (65, 97))
        if chars & _OTHER:
            return chars | upper | lower  # `\u017f` matches s too
        chars |= (
            (chars & upper) << 32
            | (chars & lower) >> 32
            | (_OTHER if chars & (upper | lower) else 0)
        )
    return chars


def _bit(char: int) -> int:
    return 1 << char if char < 128 else _OTHER


@lru_cache(32)
def _category(category: Any, *, both: bool) -> int:
    """The characters of a class with or without the flag ASCII: those in either, or only those in `both`."""
    found = [
        sum(1 << i for i in range(128) if re.match(_CLASSES[category], chr(i), flag))
        for flag in (re.UNICODE, re.ASCII)
    ]
    return found[0] & found[1] if both else found[0] | found[1] | _OTHER


def _spelled(nodes: Any) -> str:
    """The source of parsed nodes, for error messages."""
    out = []
    for code, value in nodes:
        if code is op.LITERAL:
            out.append(re.escape(chr(value)))
        elif code is op.NOT_LITERAL:
            out.append(f"[^{chr(value)}]")
        elif code is op.ANY:
            out.append(".")
        elif code is op.IN:
            out.append(
                _CLASSES[value[0][1]] if _is_class(value) else f"[{''.join(map(_member, value))}]"
            )
        elif code in _REPEATS:
            inner = _spelled(value[2])
            one = len(value[2]) == 1 and value[2][0][0] not in (*_REPEATS, op.BRANCH)
            out.append(
                (inner if one else f"(?:{inner})")
                + _quantifier(value[0], value[1])
                + _REPEATS[code]
            )
        elif code is op.SUBPATTERN:
            out.append(f"({'' if value[0] else '?:'}{_spelled(value[3])})")
        elif code is op.BRANCH:
            out.append("|".join(map(_spelled, value[1])))
        elif code is op.GROUPREF:
            out.append(f"\\{value}")
        elif code is op.AT:
            out.append("^" if value is op.AT_BEGINNING else "$" if value is op.AT_END else "\\b")
        else:
            out.append("(?…)")
    return "".join(out)


def _is_class(members: Any) -> bool:
    return len(members) == 1 and members[0][0] is op.CATEGORY


def _member(member: Any) -> str:
    kind, arg = member
    if kind is op.RANGE:
        return f"{chr(arg[0])}-{chr(arg[1])}"
    return "^" if kind is op.NEGATE else _CLASSES[arg] if kind is op.CATEGORY else chr(arg)


def _quantifier(low: int, high: Any) -> str:
    if high is op.MAXREPEAT:
        return "*" if low == 0 else "+" if low == 1 else f"{{{low},}}"
    return "?" if (low, high) == (0, 1) else f"{{{low},{high}}}"
