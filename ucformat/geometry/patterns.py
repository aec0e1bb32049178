"""Regular expressions that are not ours, compiled only where trying them takes bounded work.

`re` tries one way of matching after the other, and there may be exponentially many: `(a+)+b` on a name of 40 letters
takes for ever. So the ways are counted before a pattern is used, as a bound for the worst of names, and what has too
many is refused (ADR 0022).

A bound is a polynomial (c0, c1, c2, …): Σ c_d · C(n + d, d) for a name of n characters. Its degree d counts the repeats
whose lengths are free, for there are C(n + d, d) ways to give d of them lengths that sum up to at most n. So what comes
one after the other multiplies, and alternatives add up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from re import _constants as op  # as the parser of `re` names what it finds
from re import _parser as parser
from typing import Any

from ucformat.errors import LayoutError

__all__ = ["Pattern", "compile_pattern", "compile_regex", "expand", "is_regex"]

_MAX_PATTERN = 1000  # characters of a pattern
_MIN_NAME = 200  # characters of a name that any pattern can be tried on
_MAX_STEPS = 60_000_000  # of trying a pattern on one name, at most: some tenths of a second
_MAX_EXPANDED = 1 << 16  # characters of a name that a template makes

_Bound = tuple[int, ...]
_Head = tuple[int, int]  # the characters that may come next, and at how many places of the pattern to look for that
_ONE: _Bound = (1,)
_OTHER = 1 << 128  # any character that is not of ASCII
_ANY = _OTHER | (1 << 128) - 1
_ALL = 1 << 129 | _ANY
_END: _Head = (1 << 129, 1)  # what follows a pattern: the end of the name
_OPEN: _Head = (_ALL, 1)

_REPEATS = {op.MAX_REPEAT: "", op.MIN_REPEAT: "?", op.POSSESSIVE_REPEAT: "+"}
_CLASSES = {
    op.CATEGORY_DIGIT: "\\d", op.CATEGORY_NOT_DIGIT: "\\D", op.CATEGORY_SPACE: "\\s", op.CATEGORY_NOT_SPACE: "\\S",
    op.CATEGORY_WORD: "\\w", op.CATEGORY_NOT_WORD: "\\W",
}  # fmt: skip
_HINT = (
    "say where each repeat ends: `[^.]+` instead of `.*` before a dot, `(?:[^.]+\\.)*` instead of `(?:.*\\.)*`, "
    "alternatives that begin differently; or write a glob, or several patterns"
)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression, and how long a name it may be tried on: `longest` characters, None for any."""

    regex: re.Pattern[str]
    longest: int | None = None

    @property
    def groups(self) -> int:
        """How many groups capture."""
        return self.regex.groups

    def match(self, name: str) -> re.Match[str] | None:
        """The match of the beginning of a name; LayoutError where the name is too long for the pattern."""
        if self.longest is not None and len(name) > self.longest:
            raise self._too_long(name)
        return self.regex.match(name)

    def fullmatch(self, name: str) -> re.Match[str] | None:
        """The match of a whole name; LayoutError where the name is too long for the pattern."""
        if self.longest is not None and len(name) > self.longest:
            raise self._too_long(name)
        return self.regex.fullmatch(name)

    def _too_long(self, name: str) -> LayoutError:
        return LayoutError(
            f"the name {name[:80]}… has {len(name)} characters; the pattern {_short(self.regex.pattern)} is tried on "
            f"{self.longest} at most, for it may take too long",
            hint=_HINT,
        )


def is_regex(pattern: str) -> bool:
    """Whether a pattern is spelled `/regex/`."""
    return len(pattern) > 2 and pattern[0] == pattern[-1] == "/"


def compile_regex(pattern: str) -> Pattern:
    """The regex of `/regex/`; LayoutError where it is none, or takes too much work."""
    return compile_pattern(pattern[1:-1])


@lru_cache(1024)
def compile_pattern(regex: str) -> Pattern:
    """A regular expression whose work is bounded.

    Raises:
        LayoutError: it is none (the cause is what `re` says), or may take too much work on names of 200 characters;
            then it says which part does, and how to write it instead.
    """
    if len(regex) > _MAX_PATTERN:
        raise LayoutError(
            f"the pattern {_short(regex)} has {len(regex)} characters; at most {_MAX_PATTERN} are taken",
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
    """What a template makes of a match; LayoutError where it does not fit the pattern, or makes a very long name."""
    if len(template) + template.count("\\") * len(match[0]) > _MAX_EXPANDED:
        raise LayoutError(
            f"the template {_short(template)} may make a name of more than {_MAX_EXPANDED} characters "
            f"of {_short(match[0])}",
            hint="write a shorter template",
        )
    try:
        return match.expand(template)
    except (re.error, IndexError) as e:
        raise LayoutError(f"the template {_short(template)} does not fit its pattern: {e}") from e


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "…")


class _Count:
    """In how many ways a pattern can match from one place on, and how many steps it takes to try them all.

    Both are as the engine of `re` does it. `follow` is what may come next, or more.
    """

    def __init__(self, regex: str) -> None:
        self._regex = regex
        self._heads: dict[int, tuple[int, bool, int]] = {}

    def seq(self, nodes: Any, flags: int, follow: _Head) -> tuple[_Bound, _Bound]:
        """The ways and the steps of what comes one after the other."""
        ways, work = _ONE, _ONE
        for node in reversed(list(nodes)):
            mine, steps = self._node(node, flags, follow)
            work = self._checked(_add(steps, _times(mine, work)), node)
            ways = self._checked(_times(mine, ways), node)
            chars, empty, looks = self._head(node, flags)
            follow = (chars | follow[0], looks + follow[1]) if empty else (chars, looks)
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
            # It looks at characters that others look at, too, where `_times` takes it that each has its own.
            return _ONE, _times((3,), self.seq(value[1], flags, _OPEN)[1])
        if code in (op.GROUPREF, op.GROUPREF_EXISTS):
            raise self._refused(node, "refers to an earlier group", "write out what the group may be")
        return _ONE, _ONE

    def _branch(self, options: Any, flags: int, follow: _Head) -> tuple[_Bound, _Bound]:
        total: _Bound = ()
        largest: _Bound = ()
        work: _Bound = (len(options),)
        seen, apart = 0, True
        for option in options:
            mine, steps = self.seq(option, flags, follow)
            chars, empty, _ = self._first(option, flags)
            chars |= follow[0] if empty else 0
            apart, seen = apart and not seen & chars, seen | chars
            total, largest, work = _add(total, mine), _larger(largest, mine), _add(work, steps)
        return largest if apart else total, work

    def _repeat(self, node: Any, flags: int, follow: _Head) -> tuple[_Bound, _Bound]:
        code, (least, most, inner) = node
        chars, empty, looks = self._first(inner, flags)
        again = _OPEN if empty or code is op.POSSESSIVE_REPEAT else (chars | follow[0], looks + follow[1])
        mine, steps = self.seq(inner, flags, again)
        steps = _add((1 + follow[1],), steps)
        leaves_once = not empty and not chars & follow[0]  # the next character says whether it goes on
        if most == 1 and code is not op.POSSESSIVE_REPEAT:
            return (mine if leaves_once else _add(_ONE, mine)), steps
        often = (most + 1,) if most <= _MIN_NAME else (least + 1, 1) if empty else (0, 1)
        if code is op.POSSESSIVE_REPEAT:
            return _ONE, self._checked(_times(often, steps), node)
        if mine == _ONE and not empty:
            return (_ONE if leaves_once else often), self._checked(_times(often, steps), node)
        if most > _MIN_NAME:
            raise self._refused(node, "repeats what can match the same text in several ways", _HINT)
        ways: _Bound = (0,)
        work: _Bound = (0,)
        power = _ONE
        for i in range(most + 1):
            ways = _add(ways, power) if i >= least else ways
            work = self._checked(_add(work, _times(power, steps)), node)
            power = self._checked(_times(power, mine), node) if i < most else power
        return ways, work

    def _first(self, nodes: Any, flags: int) -> tuple[int, bool, int]:
        """The characters that it may begin with, whether it may be empty, and at how many places to look for that.

        All characters where it may be empty in several ways, or looks ahead: then more is done before it fails.
        """
        known = self._heads.get(id(nodes))
        if known is None:
            chars, empty, looks = 0, True, 1
            for node in nodes:
                more, empty, places = self._head(node, flags)
                chars, looks = chars | more, looks + places
                if not empty:
                    break
            self._heads[id(nodes)] = known = chars, empty, looks
        return known

    def _head(self, node: Any, flags: int) -> tuple[int, bool, int]:
        code, value = node
        if code in _REPEATS:
            chars, empty, looks = self._first(value[2], flags)
            return (_ALL, True, looks) if empty else (chars, value[0] == 0, looks + 1)
        if code is op.SUBPATTERN:
            return self._first(value[3], (flags | value[1]) & ~value[2])
        if code is op.ATOMIC_GROUP:
            return self._first(value, flags)
        if code is op.BRANCH:
            found = [self._first(option, flags) for option in value[1]]
            chars, empties, looks = 0, 0, 0
            for more, empty, places in found:
                chars, empties, looks = chars | more, empties + empty, looks + places
            return _ALL if empties > 1 else chars, empties > 0, looks
        if code is op.AT:
            return 0, True, 1
        if code in (op.ASSERT, op.ASSERT_NOT, op.GROUPREF, op.GROUPREF_EXISTS):
            return _ALL, True, 1
        return _chars(node, flags), False, 1

    def _checked(self, bound: _Bound, node: Any) -> _Bound:
        if _value(bound, _MIN_NAME) > _MAX_STEPS:
            raise self._refused(node, "can match in too many ways", _HINT)
        return bound

    def _refused(self, node: Any, why: str, hint: str) -> LayoutError:
        return LayoutError(
            f"the pattern {_short(self._regex)} may take for ever: {_short(_spelled([node]))} in it {why}", hint=hint
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
    """The characters that one of a pattern may be, or more."""
    code, value = node
    if code is op.ANY:
        return _ANY if flags & re.DOTALL else _ANY & ~(1 << 10)
    if code is op.NOT_LITERAL:
        return _ANY & ~_bit(value) | _OTHER
    negated = code is op.IN and value[0][0] is op.NEGATE
    chars = 0
    for kind, what in value if code is op.IN else [node]:
        if kind is op.LITERAL:
            chars |= _bit(what)
        elif kind is op.RANGE:
            low, high = what
            chars |= (1 << min(high + 1, 128)) - (1 << min(low, 128)) | (_OTHER if high > 127 else 0)
        elif kind is op.CATEGORY:
            chars |= _category(what, least=negated)
        elif kind is not op.NEGATE:
            return _ALL
    if negated:
        return _ANY & ~chars | _OTHER
    if flags & re.IGNORECASE:
        upper, lower = (((1 << 26) - 1) << start for start in (65, 97))
        if chars & _OTHER:
            return chars | upper | lower  # `\u017f` is an s, too
        chars |= (chars & upper) << 32 | (chars & lower) >> 32 | (_OTHER if chars & (upper | lower) else 0)
    return chars


def _bit(char: int) -> int:
    return 1 << char if char < 128 else _OTHER


@lru_cache(32)
def _category(category: Any, *, least: bool) -> int:
    """The characters of a class as `re` has it with or without its flag ASCII: of either, or `least` of both."""
    found = [
        sum(1 << i for i in range(128) if re.match(_CLASSES[category], chr(i), flag)) for flag in (re.UNICODE, re.ASCII)
    ]
    return found[0] & found[1] if least else found[0] | found[1] | _OTHER


def _spelled(nodes: Any) -> str:
    """What was parsed, spelled again, for errors."""
    out = []
    for code, value in nodes:
        if code is op.LITERAL:
            out.append(re.escape(chr(value)))
        elif code is op.NOT_LITERAL:
            out.append(f"[^{chr(value)}]")
        elif code is op.ANY:
            out.append(".")
        elif code is op.IN:
            out.append(_CLASSES[value[0][1]] if _is_class(value) else f"[{''.join(map(_member, value))}]")
        elif code in _REPEATS:
            inner = _spelled(value[2])
            one = len(value[2]) == 1 and value[2][0][0] not in (*_REPEATS, op.BRANCH)
            out.append((inner if one else f"(?:{inner})") + _times_text(value[0], value[1]) + _REPEATS[code])
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
    kind, what = member
    if kind is op.RANGE:
        return f"{chr(what[0])}-{chr(what[1])}"
    return "^" if kind is op.NEGATE else _CLASSES[what] if kind is op.CATEGORY else chr(what)


def _times_text(least: int, most: Any) -> str:
    if most is op.MAXREPEAT:
        return "*" if least == 0 else "+" if least == 1 else f"{{{least},}}"
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"
