"""Reads pickles and executes nothing: rebuilds plain values, lazy tensors and stand-ins, and refuses the rest.

It is not a subclass of `pickle.Unpickler`, which resolves extension codes from a cache of live
objects, sizes its memo by an index in the file, and calls the globals that it finds. Here, an
opcode without a meaning is an error; memory and time are proportional to the size of the file,
because the copies and hashes of values that are stored once and used often are limited; and every
failure is an error of this package that names the file.

It reads protocols 2 to 5, as torch.save writes them (2 by default). The opcodes are those that
Python's `pickletools` describes. Those that only make plain values, and the stack and the memo, are
in `ucformat/_native_pickle.c`, or else by `interpret_in_python`; here is what calls, states, keys, globals
and persistent ids mean.
"""

from __future__ import annotations

import math
import reprlib
import struct
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UcformatError, UnsafeError, UnsupportedError
from ucformat.reading.stand_ins import (
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
from ucformat.schema import ITEMSIZE
from ucformat.schema.limits import FREE_READS, MOST_READS
from ucformat.sources.pickle.allowed import checked_key, dtype_text, resolve, sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


# The opcodes of pickles in Python: what `ucformat/_native_pickle.c` does where it was built.
#
# Both make plain values themselves, and call a function for everything else:
# `ucformat/sources/pickle/unpickler.py` has them. For any bytes, both make the same value, or raise
# the same error.


def interpret_in_python(
    data: bytes, meaning: object, calls: tuple[Callable[..., Any], ...], damaged: type[Exception], /
) -> Any:
    """Interpret a pickle.

    Args:
        calls: for each opcode that does not only make a plain value, and for those that are
            refused, the function that decides; it gets `meaning` and the values that the opcode
            takes from the stack, and returns the one to put there.
    """
    return _Machine(data, meaning, calls, damaged).run()


_NUMBERS = {form: struct.Struct("<" + form) for form in "HiIQ"}


class _Machine:
    """The stack, cut at each mark, and the memo."""

    def __init__(
        self,
        data: bytes,
        meaning: object,
        calls: tuple[Callable[..., Any], ...],
        damaged: type[Exception],
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
        # Without a newline, more bytes than there are: then `take` raises the error.
        return self.take(stop + 1 - self.at if stop >= 0 else self.end + 1)[:-1].decode()

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self, n: int) -> list[Any]:
        start = len(self.stack) - n
        if start < 0:
            raise self.damaged("its pickle takes more values than there are")
        items = self.stack[start:]
        del self.stack[start:]
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
            raise self.damaged(
                f"its pickle refers to value {index} of the memo, which it never stored"
            )
        self.push(self.memo[index])

    def keep(self, index: int) -> None:
        (value,) = self.pop(1)
        if index >= self.at:  # numbers are given in turn
            raise self.damaged(
                f"its pickle stores value {index} of the memo, but has fewer values so far"
            )
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


try:
    from ucformat._native import interpret
except ImportError:
    interpret = interpret_in_python


def unpickle(
    data: bytes,
    *,
    file: str,
    storage_nbytes: Callable[[str], int],
    allow: tuple[str, ...] = (),
    exact: bool = False,
) -> Any:
    """Read the value in a pickle of torch.save.

    Args:
        storage_nbytes: gives the bytes of a storage by its key.
        exact: NumPy scalars, byte arrays and `torch.Size` keep their types.
    """
    try:
        return interpret(
            data, _Meaning(len(data), storage_nbytes, allow, exact=exact), _CALLS, IntegrityError
        )
    except UcformatError as error:
        raise type(error)(f"{file}: {error.message}", hint=error.hint) from error
    except MemoryError:  # the limits make sure that the size of the file justifies it
        raise
    except Exception as error:
        raise IntegrityError(
            f"{file}: its pickle cannot be read ({type(error).__name__}: {error})",
            hint="the file is damaged or was not written by torch.save",
        ) from error


_MAX_NAME = 1000  # characters of the name of a global
# Limits that grow with the file, each with a minimum for small ones:
_COPIES_PER_BYTE, _MIN_COPIES = 8, 1 << 20  # items that calls may copy, per byte of the file
# possible hash collisions, per byte of the file
_COLLISIONS_PER_BYTE, _MIN_COLLISIONS = (64, 1 << 24)
_MAX_REPEATED = 256 << 20  # bytes of tensors that repeat elements (stride 0), in addition to these
_MAX_SMALL = 1024
_HASH_OF_ADDRESS: Any = object.__hash__
_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset, PurePosixPath)


class _Meaning:
    """What the opcodes mean that do more than to make a plain value, and how much of it the file justifies."""

    def __init__(
        self,
        nbytes: int,
        storage_nbytes: Callable[[str], int],
        allow: tuple[str, ...],
        *,
        exact: bool = False,
    ) -> None:
        self.storage_nbytes, self.allow, self.exact = storage_nbytes, allow, exact
        self.storages: set[str] = set()
        self.tensors: set[StoredTensor] = set()
        self.views, self.repeats = FREE_READS, _MAX_REPEATED
        self.copies = max(_MIN_COPIES, _COPIES_PER_BYTE * nbytes)
        self.collisions = max(_MIN_COLLISIONS, _COLLISIONS_PER_BYTE * nbytes)

    def protocol(self, version: int) -> None:
        if not 2 <= version <= 5:
            raise UnsupportedError(f"its pickle has protocol {version}; 2 to 5 are read")

    def number(self, data: bytes) -> int:
        return int.from_bytes(data, "little", signed=True)

    # objects and their contents

    def make(self, maker: Any, args: Any) -> Any:
        if not isinstance(args, tuple):
            raise IntegrityError("its pickle makes an object from something that is not a tuple")
        # an `Inert`: a class in a class, which `getattr` names
        if isinstance(maker, InertClass | Inert):
            return Inert(maker.name, args)
        if not isinstance(maker, Maker):
            raise UnsafeError(f"its pickle calls a {type(maker).__name__}, which is not a class")
        for a in args:
            if type(a) in _SIZED:
                self.copies -= len(a if not isinstance(a, PurePosixPath) else str(a))
        if self.copies < 0:
            raise UnsafeError(
                "its pickle copies the same values far more often than any checkpoint needs"
            )
        if maker.hashes:
            self.count_copied_keys(maker, args)
        value = maker.make(*args)
        if isinstance(value, StoredTensor) and value not in self.tensors:
            self.count_views(value)
        return value

    def count_views(self, tensor: StoredTensor) -> None:
        """Limit the bytes of different tensors: any number of tied ones are read once."""
        self.tensors.add(tensor)
        distinct = math.prod(
            n for n, stride in zip(tensor.shape, tensor.strides, strict=True) if stride or not n
        )
        unit = ITEMSIZE.get(tensor.dtype, 0)
        self.views -= distinct * unit
        self.repeats -= (tensor.size - distinct) * unit
        if self.views < 0 or self.repeats < 0:
            raise UnsafeError(
                "its tensors share storages, or repeat elements, so often that they are far "
                "larger than the file"
            )

    def count_copied_keys(self, maker: Maker, args: tuple[Any, ...]) -> None:
        for a in args:
            if isinstance(a, list | tuple):
                self.count_collisions([k[0] if type(k) in (list, tuple) and k else k for k in a], 0)
            elif isinstance(a, set | frozenset) or (
                isinstance(a, dict) and maker.name.endswith("set")
            ):
                self.count_collisions(a, 0)  # a dict that is copied to a dict compares no keys

    def count_collisions(self, keys: Iterable[Any], earlier: int) -> None:
        """Limit keys that may all have the same hash: then each is compared with all `earlier` ones.

        Python hashes text with a secret of the process, objects by their address, and small
        non-negative integers do not collide; all other keys in a file can be chosen such that they
        do.
        """
        for n, key in enumerate(keys, earlier):
            kind = type(key)
            if kind is str or kind.__hash__ is _HASH_OF_ADDRESS:
                continue
            if kind is not int or not 0 <= key <= 2 * n + _MAX_SMALL:
                self.collisions -= n
        if self.collisions < 0:
            raise UnsafeError(
                "its pickle has more keys that are neither text, objects nor small numbers than "
                "any checkpoint needs"
            )

    def new_with_keywords(self, maker: Any, args: Any, keywords: Any) -> Any:
        value = self.make(maker, args)
        if keywords:
            if not isinstance(value, Inert):
                raise UnsafeError("its pickle passes keywords to a plain class")
            value.args = (*value.args, keywords)
        return value

    def build(self, target: Any, state: Any) -> Any:
        if isinstance(target, Inert):
            target.state = state
        elif isinstance(target, NumpyDtype):
            # NumPy's state: version, byte order, subarray, names and formats of fields, …
            target.order = state[1] if state[1] in "<>" else target.order
            if state[3] is not None or state[4] is not None:
                raise UnsupportedError("a numpy array of a structured dtype is not read")
            if target.code[:1] in "Mm":
                raise UnsupportedError("a numpy array of times is not read")
        elif isinstance(target, NdArray):
            _, target.shape, dtype, target.fortran, target.data = state
            target.shape, target.dtype = sizes(target.shape, "shape"), dtype_text(dtype)
            if not isinstance(target.data, bytes):
                raise UnsafeError("a numpy array of Python objects is not read")
        elif isinstance(target, Stream):
            if not isinstance(state, tuple) or not state or not isinstance(state[0], bytes):
                raise IntegrityError(
                    "its pickle fills a file in memory with something other than bytes"
                )
            target.data = state[0]
        elif not isinstance(
            target, dict | StoredTensor
        ):  # attributes of a state dict or a parameter are not needed
            raise UnsafeError(f"its pickle sets the state of a {type(target).__name__}")
        return target

    def append(self, target: Any, items: list[Any]) -> Any:
        if not isinstance(target, Inert):  # nor a list
            raise IntegrityError(f"its pickle appends to a {type(target).__name__}")
        target.items.extend(items)
        return target

    def set_items(self, target: Any, items: list[Any]) -> Any:
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
        return target

    def add_items(self, target: Any, items: list[Any]) -> Any:
        if not isinstance(target, set):
            raise IntegrityError("its pickle adds members to something other than a set")
        self.count_collisions(items, len(target))
        target.update(map(checked_key, items))
        return target

    def dictionary(self, items: list[Any]) -> dict[Any, Any]:
        self.count_collisions(items[::2], 0)
        return {checked_key(k): v for k, v in zip(items[::2], items[1::2], strict=True)}

    def frozen_set(self, items: list[Any]) -> frozenset[Any]:
        self.count_collisions(items, 0)
        return frozenset(map(checked_key, items))

    # globals and storages

    def name_global(self, module: Any, name: Any) -> Any:
        if not isinstance(module, str) or not isinstance(name, str):
            raise IntegrityError("its pickle names a global by something that is not text")
        if len(module) + len(name) > _MAX_NAME:
            raise UnsafeError(f"its pickle names a global of {len(module) + len(name)} characters")
        return resolve(module, name, self.allow, exact=self.exact)

    def persistent(self, identity: Any) -> Storage:
        if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
            raise UnsafeError(
                f"its pickle refers to an outside object {reprlib.repr(identity)}, which is not "
                "a storage"
            )
        _, kind, key, _, numel = identity[:5]
        if (
            not isinstance(kind, StorageType)
            or not isinstance(key, str)
            or type(numel) is not int
            or numel < 0
        ):
            raise IntegrityError(f"its pickle refers to a storage by {reprlib.repr(identity)}")
        nbytes = self.storage_nbytes(key)
        unit = ITEMSIZE.get(kind.dtype) if kind.dtype else 1
        if unit is not None and numel * unit != nbytes:
            raise IntegrityError(
                f"the storage {key!r} should have {numel} elements of {kind.dtype}, but has "
                f"{nbytes} bytes"
            )
        if key not in self.storages:
            self.storages.add(key)
            self.views += MOST_READS * nbytes
        return Storage(key, kind.dtype, nbytes)


def _refuse(opcode: int, _meaning: _Meaning) -> None:
    raise UnsafeError(
        f"its pickle uses the opcode {bytes([opcode])!r}, which torch.save does not write"
    )


_MEANINGS: dict[str, Callable[..., Any]] = {
    "\x80": _Meaning.protocol,
    "\x8a": _Meaning.number,
    "R": _Meaning.make,
    "\x81": _Meaning.make,  # NEWOBJ: here the same as a call
    "\x92": _Meaning.new_with_keywords,
    "b": _Meaning.build,
    "e": _Meaning.append,
    "u": _Meaning.set_items,
    "\x90": _Meaning.add_items,
    "d": _Meaning.dictionary,
    "\x91": _Meaning.frozen_set,
    "c": _Meaning.name_global,
    "\x93": _Meaning.name_global,
    "Q": _Meaning.persistent,
}
#: What each opcode means. Refused are extension codes, protocol 0, old-style instances and
#: out-of-band buffers.
_CALLS = tuple(_MEANINGS.get(chr(opcode), partial(_refuse, opcode)) for opcode in range(256))
