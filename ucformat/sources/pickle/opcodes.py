"""The opcodes of pickles in Python: what `ucformat/_native_pickle.c` does where it was built.

Both make plain values themselves, and call a function for everything else: `ucformat/sources/pickle/unpickler.py` has
them. For any bytes, both make the same value, or raise the same error.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def interpret(data: bytes, meaning: object, calls: tuple[Callable[..., Any], ...], damaged: type[Exception], /) -> Any:
    """Interpret a pickle.

    Args:
        calls: for each opcode that does not only make a plain value, and for those that are refused, the function that
            decides; it gets `meaning` and the values that the opcode takes from the stack, and returns the one to put
            there.
    """
    return _Machine(data, meaning, calls, damaged).run()


_NUMBERS = {form: struct.Struct("<" + form) for form in "HiIQ"}


class _Machine:
    """The stack, cut at each mark, and the memo."""

    def __init__(
        self, data: bytes, meaning: object, calls: tuple[Callable[..., Any], ...], damaged: type[Exception]
    ) -> None:
        self.data, self.at, self.end = data, 0, len(data)
        self.meaning, self.calls, self.damaged = meaning, calls, damaged
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks below each mark
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        while True:
            opcode = self.take(1)[0]
            if opcode == 0x2E:  # STOP
                return self.pop(1)[0]
            action = _PLAIN.get(opcode)
            if action is not None:
                action(self)
            else:
                self.call(opcode, _TAKEN.get(opcode, 0))

    def take(self, n: int) -> bytes:
        start = self.at
        if start + n > self.end:
            raise self.damaged("its pickle ends in the middle of a value")
        self.at = start + n
        return self.data[start : self.at]

    def number(self, form: str) -> int:
        if form == "B":  # most numbers are one byte
            return self.take(1)[0]
        layout = _NUMBERS[form]
        return int(layout.unpack(self.take(layout.size))[0])

    def counted(self, form: str) -> bytes:
        return self.take(self.number(form))

    def line(self) -> str:
        stop = self.data.find(b"\n", self.at)
        return self.take(stop + 1 - self.at if stop >= 0 else self.end + 1)[:-1].decode()

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self, n: int) -> list[Any]:
        at = len(self.stack) - n
        if at < 0:
            raise self.damaged("its pickle takes more values than there are")
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def pop_one(self) -> None:
        if self.stack or not self.below:
            self.pop(1)
        else:
            self.pop_to_mark()

    def pop_to_mark(self) -> list[Any]:
        if not self.below:
            raise self.damaged("its pickle ends a list of values that it did not begin")
        items, self.stack = self.stack, self.below.pop()
        return items

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def call(self, opcode: int, n: int) -> None:
        self.push(self.calls[opcode](self.meaning, *self.pop(n)))

    def call_with_list(self, opcode: str, n: int) -> None:
        """Call with the values above the mark, and `n` values below it."""
        items = self.pop_to_mark()
        self.push(self.calls[ord(opcode)](self.meaning, *self.pop(n), items))

    def append(self, items: list[Any]) -> None:
        (target,) = self.pop(1)
        if type(target) is list:
            target.extend(items)
            self.push(target)
        else:
            self.push(self.calls[ord("e")](self.meaning, target, items))

    def set_item(self) -> None:
        target, *pair = self.pop(3)
        self.push(self.calls[ord("u")](self.meaning, target, pair))

    def append_one(self) -> None:
        target, value = self.pop(2)
        self.push(target)
        self.append([value])

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise self.damaged(f"its pickle refers to value {index} of the memo, which it never stored")
        self.push(self.memo[index])

    def keep(self, index: int) -> None:
        (value,) = self.pop(1)
        if index >= self.at:  # numbers are given in turn
            raise self.damaged(f"its pickle stores value {index} of the memo, but has fewer values so far")
        self.memo[index] = value
        self.push(value)


def _twice(machine: _Machine) -> None:
    machine.stack += machine.pop(1) * 2


#: Opcodes that make or move plain values.
_PLAIN: dict[int, Callable[[_Machine], object]] = {
    ord(code): action
    for code, action in {
        "\x95": lambda m: m.take(8),
        "(": _Machine.mark,
        "0": _Machine.pop_one,
        "1": _Machine.pop_to_mark,
        "2": _twice,
        "N": lambda m: m.push(None),
        "\x88": lambda m: m.push(True),
        "\x89": lambda m: m.push(False),
        "J": lambda m: m.push(m.number("i")),
        "K": lambda m: m.push(m.number("B")),
        "M": lambda m: m.push(m.number("H")),
        "\x8a": lambda m: m.push(int.from_bytes(m.counted("B"), "little", signed=True)),
        "\x8b": lambda m: m.push(int.from_bytes(m.counted("I"), "little", signed=True)),
        "G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
        "X": lambda m: m.push(m.counted("I").decode()),
        "\x8c": lambda m: m.push(m.counted("B").decode()),
        "\x8d": lambda m: m.push(m.counted("Q").decode()),
        "U": lambda m: m.push(m.counted("B").decode("latin1")),
        "T": lambda m: m.push(m.counted("I").decode("latin1")),
        "B": lambda m: m.push(m.counted("I")),
        "C": lambda m: m.push(m.counted("B")),
        "\x8e": lambda m: m.push(m.counted("Q")),
        "\x96": lambda m: m.push(bytearray(m.counted("Q"))),
        "]": lambda m: m.push([]),
        "}": lambda m: m.push({}),
        ")": lambda m: m.push(()),
        "\x8f": lambda m: m.push(set()),
        "l": lambda m: m.push(m.pop_to_mark()),
        "t": lambda m: m.push(tuple(m.pop_to_mark())),
        "\x85": lambda m: m.push(tuple(m.pop(1))),
        "\x86": lambda m: m.push(tuple(m.pop(2))),
        "\x87": lambda m: m.push(tuple(m.pop(3))),
        "a": _Machine.append_one,
        "e": lambda m: m.append(m.pop_to_mark()),
        "s": _Machine.set_item,
        "u": lambda m: m.call_with_list("u", 1),
        "\x90": lambda m: m.call_with_list("\x90", 1),
        "d": lambda m: m.call_with_list("d", 0),
        "\x91": lambda m: m.call_with_list("\x91", 0),
        "\x80": lambda m: m.calls[0x80](m.meaning, m.number("B")),
        "c": lambda m: m.push(m.calls[ord("c")](m.meaning, m.line(), m.line())),
        "h": lambda m: m.recall(m.number("B")),
        "j": lambda m: m.recall(m.number("I")),
        "q": lambda m: m.keep(m.number("B")),
        "r": lambda m: m.keep(m.number("I")),
        "\x94": lambda m: m.keep(len(m.memo)),
    }.items()
}
#: Other opcodes: how many values they take from the stack.
_TAKEN = {ord("Q"): 1, ord("R"): 2, ord("b"): 2, 0x81: 2, 0x93: 2, 0x92: 3}
