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
from functools import lru_cache, reduce
from itertools import zip_longest
from math import comb
from operator import or_
from typing import Literal

from ucformat.errors import LayoutError

_MAX_PATTERN = 1000  # characters of a pattern
_MIN_NAME = 200  # characters of a name that every pattern must accept
_MAX_STEPS = 60_000_000  # of matching one name, at most: some tenths of a second
_MAX_EXPANDED = 1 << 16  # characters of a name that a template produces

_Bound = tuple[int, ...]
# a bit set of the characters that may follow, and the number of nodes that check for them
_Head = tuple[int, int]
_ONE: _Bound = (1,)
_OTHER = 1 << 128  # every non-ASCII character
_ANY = _OTHER | (1 << 128) - 1
_ALL = 1 << 129 | _ANY
_END: _Head = (1 << 129, 1)  # after a pattern: the end of the name
_OPEN: _Head = (_ALL, 1)

_QUANTIFIER = re.compile(r"(?:([*+?])|\{(?=[\d,])(\d*)(?:(,)(\d*))?\})([?+]?)")
_ESCAPE = re.compile(
    r"\\(?:[0-3][0-7]{2}|0[0-7]?|[1-9]\d?|x..|u.{4}|U.{8}|N\{[^}]*\}|.)", re.DOTALL
)
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^]\\])*\]", re.DOTALL)
_ONE_CHAR = re.compile(".", re.DOTALL)
_PLAIN = re.compile(r"[^\\.]|\\[^a-zA-Z0-9]|\[(?!\^)(?:[^\\]|\\[^a-zA-Z0-9])*\]")
_OPENING = re.compile(
    r"\((?:\?(?:P<\w+>|(#[^)]*\)|[aiLmsux]+\))|(P=\w+\)|\(\w+\))|([=!]|<[=!])|(>)|([aiLmsu]*)(?:-([ims]+))?:))?"
)
_HINT = (
    "make each repeat end clearly: `[^.]+` instead of `.*` before a dot, `(?:[^.]+\\.)*` instead "
    "of `(?:.*\\.)*`, "
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
            f"the name {name[:80]}… has {len(name)} characters; the pattern "
            f"{_short(self.regex.pattern)} accepts at "
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
    """Compile a regular expression whose work is bounded."""
    if len(regex) > _MAX_PATTERN:
        raise LayoutError(
            f"the pattern {_short(regex)} has {len(regex)} characters; at most {_MAX_PATTERN} "
            "are allowed",
            hint="split it into several patterns",
        )
    try:
        compiled = re.compile(regex)
        work = _Count(regex).seq(parse(regex, compiled.flags), _END)[1]
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
            f"the template {_short(template)} may produce a name of more than {_MAX_EXPANDED} "
            "characters "
            f"from {_short(match[0])}",
            hint="write a shorter template",
        )
    try:
        return match.expand(template)
    except (re.error, IndexError) as e:
        raise LayoutError(f"the template {_short(template)} does not fit its pattern: {e}") from e


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "…")


@dataclass(frozen=True, slots=True, eq=False)
class RegexNode:
    """A part of a regular expression.

    Attributes:
        text: its source.
        chars: of a single character, those that it may be, as a bit set.
        options: the alternatives inside.
        mode: of a repeat: empty, `?` (lazy) or `+` (possessive).
    """

    kind: Literal["char", "group", "atomic", "look", "anchor", "reference", "repeat"]
    text: str
    chars: int = 0
    options: tuple[tuple[RegexNode, ...], ...] = ()
    low: int = 1
    high: int | None = 1
    mode: str = ""


def parse(regex: str, flags: int) -> tuple[RegexNode, ...]:
    """Parse a pattern that `re` has compiled with these flags."""
    if flags & re.VERBOSE:
        raise LayoutError(
            f"the pattern {_short(regex)} has the flag x", hint="write it without spaces"
        )
    return _Parser(regex).options(flags)


class _Parser:
    def __init__(self, regex: str) -> None:
        self._regex, self._at = regex, 0

    def options(self, flags: int) -> tuple[RegexNode, ...]:
        """What follows, up to the end of its group."""
        begin, options = self._at, [self._sequence(flags)]
        while self._regex.startswith("|", self._at):
            self._at += 1
            options.append(self._sequence(flags))
        if len(options) == 1:
            return options[0]
        prefix: list[RegexNode] = []  # `re` tries what all begin with once, too
        while all(options) and len({(o[0].kind, o[0].text) for o in options}) == 1:
            if options[0][0].kind not in ("char", "anchor"):
                break
            prefix.append(options[0][0])
            options = [o[1:] for o in options]
        text = self._regex[begin : self._at]
        single = [o[0] for o in options if len(o) == 1 and o[0].kind == "char"]
        if len(single) == len(options) and not any(n.text[:2] in (".", "[^") for n in single):
            chars = reduce(or_, (n.chars for n in single))  # as `re` does, one class
            return (*prefix, RegexNode("char", text, chars))
        return (*prefix, RegexNode("group", text, options=tuple(options)))

    def _sequence(self, flags: int) -> tuple[RegexNode, ...]:
        out: list[RegexNode] = []
        while self._at < len(self._regex) and self._regex[self._at] not in "|)":
            begin = self._at
            node = self._atom(flags)
            while node is not None and (match := _QUANTIFIER.match(self._regex, self._at)):
                self._at = match.end()
                sign, low, comma, high, mode = match.groups()
                least = int(low or 0)
                most = int(high) if high else None if comma else least
                bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign, (least, most))
                alone = node.kind != "group" or len(node.options) > 1
                inner, text = ((node,),) if alone else node.options, self._regex[begin : self._at]
                node = RegexNode("repeat", text, 0, inner, *bounds, mode)
            if node is not None:
                out.append(node)
        return tuple(out)

    def _atom(self, flags: int) -> RegexNode | None:
        begin, char = self._at, self._regex[self._at]
        if char == "(":
            return self._group(flags)
        match = {"\\": _ESCAPE, "[": _CLASS}.get(char, _ONE_CHAR).match(self._regex, begin)
        assert match is not None  # noqa: S101 - `re` has compiled it
        self._at, text = match.end(), match[0]
        if text in ("^", "$", "\\A", "\\Z", "\\b", "\\B"):
            return RegexNode("anchor", text)
        if re.fullmatch(r"\\[1-9]\d?", text):
            return RegexNode("reference", text)
        return RegexNode("char", text, _chars(text, flags))

    def _group(self, flags: int) -> RegexNode | None:
        begin, match = self._at, _OPENING.match(self._regex, self._at)
        assert match is not None  # noqa: S101 - `re` has compiled it
        nothing, reference, look, atomic, plus, minus = match.groups()
        self._at = match.end()
        if nothing or (reference and reference.startswith("P")):
            return RegexNode("reference", match[0]) if reference else None
        for letter in plus or "":
            flags |= getattr(re, letter.upper())
            if letter in "au":
                flags &= ~(re.UNICODE if letter == "a" else re.ASCII)
        for letter in minus or "":
            flags &= ~getattr(re, letter.upper())
        inside = self.options(flags)
        self._at += 1
        kind: Literal["reference", "look", "atomic", "group"] = (
            "reference" if reference else "look" if look else "atomic" if atomic else "group"
        )
        return RegexNode(kind, self._regex[begin : self._at], options=(inside,))


class _Count:
    """Bounds the number of ways in which a pattern can match at one position, and of the steps to try them all.

    Both model the engine of `re`. `follow` is a superset of the characters that may come next.
    """

    def __init__(self, regex: str) -> None:
        self._regex = regex
        self._heads: dict[tuple[RegexNode, ...], tuple[int, bool, int]] = {}

    def seq(self, nodes: tuple[RegexNode, ...], follow: _Head) -> tuple[_Bound, _Bound]:
        """The ways and the steps of a sequence of nodes."""
        ways, work = _ONE, _ONE
        for node in reversed(nodes):
            own_ways, steps = self._node(node, follow)
            work = self._checked(_add(steps, _times(own_ways, work)), node)
            ways = self._checked(_times(own_ways, ways), node)
            chars, empty, checks = self._head(node)
            follow = (chars | follow[0], checks + follow[1]) if empty else (chars, checks)
        return ways, work

    def _node(self, node: RegexNode, follow: _Head) -> tuple[_Bound, _Bound]:
        match node.kind:
            case "repeat":
                return self._repeat(node, follow)
            case "group":
                return self._branch(node.options, follow)
            case "atomic":
                return _ONE, self.seq(node.options[0], _OPEN)[1]
            case "look":
                # It reads characters that other nodes read too, whereas `_times` assumes that each
                # reads its own.
                return _ONE, _times((3,), self.seq(node.options[0], _OPEN)[1])
            case "reference":
                raise self._too_much_work(
                    node, "refers to an earlier group", "write out the alternatives of the group"
                )
        return _ONE, _ONE

    def _branch(
        self, options: tuple[tuple[RegexNode, ...], ...], follow: _Head
    ) -> tuple[_Bound, _Bound]:
        if len(options) == 1:
            return self.seq(options[0], follow)
        total: _Bound = ()
        largest: _Bound = ()
        work: _Bound = (len(options),)
        earlier_chars, disjoint = 0, True
        for option in options:
            own_ways, steps = self.seq(option, follow)
            chars, empty, _ = self._first(option)
            chars |= follow[0] if empty else 0
            disjoint, earlier_chars = disjoint and not earlier_chars & chars, earlier_chars | chars
            total, largest = _add(total, own_ways), _larger(largest, own_ways)
            work = _add(work, steps)
        return largest if disjoint else total, work

    def _repeat(self, node: RegexNode, follow: _Head) -> tuple[_Bound, _Bound]:
        low, (inner,) = node.low, node.options
        high = node.high if node.high is not None else 1 << 32
        chars, empty, checks = self._first(inner)
        open_ended = empty or node.mode == "+"
        own_ways, steps = self.seq(
            inner, _OPEN if open_ended else (chars | follow[0], checks + follow[1])
        )
        steps = _add((1 + follow[1],), steps)
        # The next character decides whether to repeat.
        exits_once = not empty and not chars & follow[0]
        if high == 1 and node.mode != "+":
            return (own_ways if exits_once else _add(_ONE, own_ways)), steps
        repeats = (high + 1,) if high <= _MIN_NAME else (low + 1, 1) if empty else (0, 1)
        if node.mode == "+":
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

    def _first(self, nodes: tuple[RegexNode, ...]) -> tuple[int, bool, int]:
        """The characters that nodes may begin with, whether they may be empty, and how many nodes check for them.

        All characters if they may be empty in several ways, or look ahead: then more work happens
        before they fail.
        """
        if nodes not in self._heads:
            chars, empty, checks = 0, True, 1
            for node in nodes:
                node_chars, empty, places = self._head(node)
                chars, checks = chars | node_chars, checks + places
                if not empty:
                    break
            self._heads[nodes] = chars, empty, checks
        return self._heads[nodes]

    def _head(self, node: RegexNode) -> tuple[int, bool, int]:
        if node.kind in ("look", "reference"):
            return _ALL, True, 1
        if not node.options:
            return node.chars, node.kind == "anchor", 1
        heads = [self._first(option) for option in node.options]
        chars, checks, empties = 0, 0, sum(empty for _, empty, _ in heads)
        for option_chars, _, places in heads:
            chars, checks = chars | option_chars, checks + places
        if node.kind == "repeat":
            return (_ALL, True, checks) if empties else (chars, node.low == 0, checks + 1)
        return _ALL if empties > 1 else chars, empties > 0, checks

    def _checked(self, bound: _Bound, node: RegexNode) -> _Bound:
        if _value(bound, _MIN_NAME) > _MAX_STEPS:
            raise self._too_much_work(node, "can match in too many ways", _HINT)
        return bound

    def _too_much_work(self, node: RegexNode, why: str, hint: str) -> LayoutError:
        return LayoutError(
            f"the pattern {_short(self._regex)} may take too long: its part {_short(node.text)} "
            f"{why}",
            hint=hint,
        )


def _add(a: _Bound, b: _Bound) -> _Bound:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))


def _larger(a: _Bound, b: _Bound) -> _Bound:
    return tuple(max(x, y) for x, y in zip_longest(a, b, fillvalue=0))


def _times(a: _Bound, b: _Bound) -> _Bound:
    out = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            out[i + j] += x * y
    return tuple(out)


def _value(bound: _Bound, n: int) -> int:
    return sum(c * comb(n + d, d) for d, c in enumerate(bound) if c)


@lru_cache(1024)
def _chars(text: str, flags: int) -> int:
    """A superset of the characters that a part for a single character matches."""
    compiled = re.compile(text, flags & (re.IGNORECASE | re.DOTALL | re.ASCII))
    chars = sum(1 << i for i in range(128) if compiled.match(chr(i)))
    letters = chars & (((1 << 26) - 1) << 65 | ((1 << 26) - 1) << 97)
    folded = flags & re.IGNORECASE and letters  # `\u017f` matches s, too
    return chars if text.isascii() and _PLAIN.fullmatch(text) and not folded else chars | _OTHER
