"""A pickle machine that executes nothing: it rebuilds plain values, lazy tensors and stand-ins, and refuses the rest.

It is not a subclass of `pickle.Unpickler`, which resolves extension codes from a cache of live objects, sizes its memo
by an index in the file, and calls the globals that it finds. Here, an opcode that is not in the table below is an
error; memory and time are proportional to the size of the file, because the copies and hashes of values that are stored
once and used often are limited; and every failure is an error of this package that names the file.

It reads protocols 2 to 5, as torch.save writes them (2 by default). The opcodes are those that Python's `pickletools`
describes.
"""

from __future__ import annotations

import reprlib
import struct
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UcformatError, UnsafeError, UnsupportedError
from ucformat.schema import ITEMSIZE
from ucformat.sources.pickle.allowed import checked_key, dtype_text, resolve, sizes
from ucformat.sources.pickle.stand_ins import (
    Inert,
    InertClass,
    Maker,
    NdArray,
    NumpyDtype,
    Storage,
    StorageType,
    StoredTensor,
    Stream,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["unpickle"]


def unpickle(data: bytes, *, file: str, storage_nbytes: Callable[[str], int], allow: tuple[str, ...] = ()) -> Any:
    """Read the value in a pickle of torch.save.

    Args:
        data: the pickle.
        file: the name of the file, for messages.
        storage_nbytes: gives the bytes of a storage by its key.
        allow: further packages whose classes become inert stand-ins.

    Raises:
        UnsafeError: the pickle names a global that is not allowed, or expands to far more than its size.
        UnsupportedError: the pickle has another protocol, or values that are not supported.
        IntegrityError: the pickle is damaged.
    """
    try:
        return _Machine(data, storage_nbytes, allow).run()
    except UcformatError as error:
        raise type(error)(f"{file}: {error.message}", hint=error.hint) from error
    except MemoryError:  # the limits make sure that the size of the file justifies it
        raise
    except Exception as error:
        raise IntegrityError(
            f"{file}: its pickle cannot be read ({type(error).__name__}: {error})",
            hint="the file is damaged or was not written by torch.save",
        ) from error


_NUMBERS = {form: struct.Struct("<" + form) for form in "HiIQ"}
_MAX_NAME = 1000  # characters of the name of a global
# Limits that grow with the file, each with a minimum for small ones:
_COPIES_PER_BYTE, _MIN_COPIES = 8, 1 << 20  # items that calls may copy, per byte of the file
_COLLISIONS_PER_BYTE, _MIN_COLLISIONS = 64, 1 << 24  # possible hash collisions, per byte of the file
_VIEWED_PER_BYTE, _MIN_VIEWED = 64, 1 << 30  # bytes of tensors, per byte of their storages
_MAX_SMALL = 1024
_HASH_OF_ADDRESS: Any = object.__hash__
_HASHING = {"set", "frozenset", "dict", "OrderedDict", "Counter", "defaultdict"}
_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset, PurePosixPath)


class _Machine:
    """The stack, the marks and the memo of one pickle."""

    def __init__(self, data: bytes, storage_nbytes: Callable[[str], int], allow: tuple[str, ...]) -> None:
        self.data, self.at, self.end = data, 0, len(data)
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.storage_nbytes, self.allow = storage_nbytes, allow
        self.storages: set[str] = set()
        self.views = _MIN_VIEWED
        self.copies = max(_MIN_COPIES, _COPIES_PER_BYTE * self.end)
        self.collisions = max(_MIN_COLLISIONS, _COLLISIONS_PER_BYTE * self.end)

    def run(self) -> Any:
        data, table = self.data, _OPCODES
        while True:
            opcode = data[self.at]
            self.at += 1
            if opcode == 0x2E:  # STOP
                return self.stack.pop()
            action = table.get(opcode)
            if action is None:
                raise UnsafeError(f"its pickle uses the opcode {bytes([opcode])!r}, which torch.save does not write")
            action(self)

    def take(self, n: int) -> bytes:
        start = self.at
        if n < 0 or start + n > self.end:
            raise IntegrityError("its pickle ends in the middle of a value")
        self.at = start + n
        return self.data[start : self.at]

    def number(self, form: str) -> int:
        if form == "B":  # most numbers are one byte
            value = self.data[self.at]
            self.at += 1
            return value
        layout = _NUMBERS[form]
        return int(layout.unpack(self.take(layout.size))[0])

    def line(self) -> str:
        stop = self.data.index(b"\n", self.at)
        return self.take(stop + 1 - self.at)[:-1].decode()

    def popped_to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    # objects and their contents

    def make(self, maker: Any, args: Any) -> Any:
        if not isinstance(args, tuple):
            raise IntegrityError("its pickle makes an object from something that is not a tuple")
        if isinstance(maker, InertClass):
            return Inert(maker.name, args)
        if not isinstance(maker, Maker):
            raise UnsafeError(f"its pickle calls a {type(maker).__name__}, which is not a class")
        self.copies -= sum(len(a if not isinstance(a, PurePosixPath) else str(a)) for a in args if type(a) in _SIZED)
        if self.copies < 0:
            raise UnsafeError("its pickle copies the same values far more often than any checkpoint needs")
        kind = maker.name.rpartition(".")[2]
        if kind in _HASHING:
            for a in args:
                if isinstance(a, list | tuple):
                    self.count_collisions([k[0] if type(k) in (list, tuple) and k else k for k in a], 0)
                elif isinstance(a, set | frozenset) or (isinstance(a, dict) and kind in ("set", "frozenset")):
                    self.count_collisions(a, 0)  # a dict that is copied to a dict compares no keys
        made = maker.make(*args)
        if isinstance(made, StoredTensor) and not any(a is made for a in args):
            self.views -= made.nbytes
            if self.views < 0:
                raise UnsafeError(
                    "its tensors share storages, or repeat elements, so often that they are far larger than the file"
                )
        return made

    def count_collisions(self, keys: Iterable[Any], held: int) -> None:
        """Limit keys that may all have the same hash: then each is compared with all `held` ones before it.

        Python hashes text with a secret of the process, objects by their address, and small non-negative integers do
        not collide; all other keys in a file can be chosen such that they do.
        """
        for n, key in enumerate(keys, held):
            kind = type(key)
            if kind is str or kind.__hash__ is _HASH_OF_ADDRESS:
                continue
            if kind is not int or not 0 <= key <= 2 * n + _MAX_SMALL:
                self.collisions -= n
        if self.collisions < 0:
            raise UnsafeError(
                "its pickle has more keys that are neither text, objects nor small numbers than any checkpoint needs"
            )

    def reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.make(self.stack[-1], args)

    def new_with_keywords(self) -> None:
        keywords, args = self.stack.pop(), self.stack.pop()
        made = self.make(self.stack[-1], args)
        if keywords:
            if not isinstance(made, Inert):
                raise UnsafeError("its pickle passes keywords to a plain class")
            made.args = (*made.args, keywords)
        self.stack[-1] = made

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Inert):
            target.state = state
        elif isinstance(target, NumpyDtype):
            target.order = state[1] if state[1] in "<>" else target.order
            if state[3] is not None or state[4] is not None:
                raise UnsupportedError("a numpy array of a structured dtype is not read")
        elif isinstance(target, NdArray):
            _, target.shape, dtype, target.fortran, target.data = state
            target.shape, target.dtype = sizes(target.shape, "shape"), dtype_text(dtype)
            if not isinstance(target.data, bytes):
                raise UnsafeError("a numpy array of Python objects is not read")
        elif isinstance(target, Stream):
            if not isinstance(state, tuple) or not state or not isinstance(state[0], bytes):
                raise IntegrityError("its pickle fills a file in memory with something other than bytes")
            target.data = state[0]
        elif not isinstance(target, dict | StoredTensor):  # attributes of a state dict or a parameter are not needed
            raise UnsafeError(f"its pickle sets the state of a {type(target).__name__}")

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Inert):
            target.items.extend(items)
        elif isinstance(target, list):
            target.extend(items)
        else:
            raise IntegrityError(f"its pickle appends to a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if len(items) % 2:
            raise IntegrityError("its pickle has a key without a value")
        if isinstance(target, Inert):
            target.items.extend(zip(items[::2], items[1::2], strict=True))
        elif isinstance(target, dict):
            self.count_collisions(items[::2], len(target))
            for i in range(0, len(items), 2):
                key = items[i]
                target[key if type(key) is str else checked_key(key)] = items[i + 1]
        else:
            raise IntegrityError(f"its pickle sets items of a {type(target).__name__}")

    def add_items(self) -> None:
        items = self.popped_to_mark()
        if not isinstance(self.stack[-1], set):
            raise IntegrityError("its pickle adds members to something other than a set")
        self.count_collisions(items, len(self.stack[-1]))
        self.stack[-1].update(map(checked_key, items))

    def dictionary(self) -> None:
        items = self.popped_to_mark()
        self.count_collisions(items[::2], 0)
        self.push({checked_key(k): v for k, v in zip(items[::2], items[1::2], strict=True)})

    def frozen_set(self) -> None:
        items = self.popped_to_mark()
        self.count_collisions(items, 0)
        self.push(frozenset(map(checked_key, items)))

    def tuple_of(self, n: int) -> None:
        if len(self.stack) < n:
            raise IntegrityError("its pickle takes more values than there are")
        items = tuple(self.stack[len(self.stack) - n :])
        del self.stack[len(self.stack) - n :]
        self.push(items)

    def pop_pair(self) -> list[Any]:
        value, key = self.stack.pop(), self.stack.pop()
        return [key, value]

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.popped_to_mark()

    # globals and storages

    def name_global(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise IntegrityError("its pickle names a global by something that is not text")
        if len(module) + len(name) > _MAX_NAME:
            raise UnsafeError(f"its pickle names a global of {len(module) + len(name)} characters")
        self.push(resolve(module, name, self.allow))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.name_global(module, name)

    def persistent(self) -> None:
        identity = self.stack.pop()
        if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
            raise UnsafeError(
                f"its pickle refers to an outside object {reprlib.repr(identity)}, which is not a storage"
            )
        _, kind, key, _, numel = identity[:5]
        if not isinstance(kind, StorageType) or not isinstance(key, str) or type(numel) is not int or numel < 0:
            raise IntegrityError(f"its pickle refers to a storage by {reprlib.repr(identity)}")
        nbytes = self.storage_nbytes(key)
        if numel * (ITEMSIZE[kind.dtype] if kind.dtype else 1) != nbytes:
            raise IntegrityError(
                f"the storage {key!r} should have {numel} elements of {kind.dtype}, but has {nbytes} bytes"
            )
        if key not in self.storages:
            self.storages.add(key)
            self.views += _VIEWED_PER_BYTE * nbytes
        self.push(Storage(key, kind.dtype, nbytes))

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise IntegrityError(f"its pickle refers to value {index} of the memo, which it never stored")
        self.push(self.memo[index])

    def keep(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []


def _text(machine: _Machine, form: str) -> None:
    machine.push(machine.take(machine.number(form)).decode())


def _bytes(machine: _Machine, form: str, kind: Callable[[bytes], Any] = bytes) -> None:
    machine.push(kind(machine.take(machine.number(form))))


def _long(machine: _Machine, form: str) -> None:
    machine.push(int.from_bytes(machine.take(machine.number(form)), "little", signed=True))


def _old_text(machine: _Machine, form: str) -> None:
    machine.push(machine.take(machine.number(form)).decode("latin1"))


#: Opcode -> action. Not in it, and so refused: extension codes, protocol 0, old-style instances, out-of-band buffers.
_OPCODES: dict[int, Callable[[_Machine], None]] = {
    ord(code): action
    for code, action in {
        "\x80": lambda m: _protocol(m.number("B")),
        "\x95": lambda m: _ignore(m.take(8)),
        "(": _Machine.mark,
        "0": _Machine.pop,
        "1": lambda m: _ignore(m.popped_to_mark()),
        "2": lambda m: m.push(m.stack[-1]),
        "N": lambda m: m.push(None),
        "\x88": lambda m: m.push(True),
        "\x89": lambda m: m.push(False),
        "J": lambda m: m.push(m.number("i")),
        "K": lambda m: m.push(m.number("B")),
        "M": lambda m: m.push(m.number("H")),
        "\x8a": lambda m: _long(m, "B"),
        "\x8b": lambda m: _long(m, "i"),
        "G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
        "X": lambda m: _text(m, "I"),
        "\x8c": lambda m: _text(m, "B"),
        "\x8d": lambda m: _text(m, "Q"),
        "U": lambda m: _old_text(m, "B"),
        "T": lambda m: _old_text(m, "i"),
        "B": lambda m: _bytes(m, "I"),
        "C": lambda m: _bytes(m, "B"),
        "\x8e": lambda m: _bytes(m, "Q"),
        "\x96": lambda m: _bytes(m, "Q", bytearray),
        "]": lambda m: m.push([]),
        "}": lambda m: m.push({}),
        ")": lambda m: m.push(()),
        "\x8f": lambda m: m.push(set()),
        "l": lambda m: m.push(m.popped_to_mark()),
        "d": _Machine.dictionary,
        "t": lambda m: m.push(tuple(m.popped_to_mark())),
        "\x91": _Machine.frozen_set,
        "\x85": lambda m: m.tuple_of(1),
        "\x86": lambda m: m.tuple_of(2),
        "\x87": lambda m: m.tuple_of(3),
        "a": lambda m: m.append([m.stack.pop()]),
        "e": lambda m: m.append(m.popped_to_mark()),
        "s": lambda m: m.set_items(m.pop_pair()),
        "u": lambda m: m.set_items(m.popped_to_mark()),
        "\x90": _Machine.add_items,
        "c": lambda m: m.name_global(m.line(), m.line()),
        "\x93": _Machine.stack_global,
        "R": _Machine.reduce,
        "\x81": _Machine.reduce,  # NEWOBJ: here the same as a call
        "\x92": _Machine.new_with_keywords,
        "b": _Machine.build,
        "Q": _Machine.persistent,
        "h": lambda m: m.recall(m.number("B")),
        "j": lambda m: m.recall(m.number("I")),
        "q": lambda m: m.keep(m.number("B")),
        "r": lambda m: m.keep(m.number("I")),
        "\x94": lambda m: m.keep(len(m.memo)),
    }.items()
}


def _protocol(version: int) -> None:
    if not 2 <= version <= 5:
        raise UnsupportedError(f"its pickle has protocol {version}; 2 to 5 are read")


def _ignore(_: object) -> None:
    """Drop a value."""
