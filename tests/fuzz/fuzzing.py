"""What every fuzz test shares: how bytes and documents are damaged, and the property that is asserted of a reader.

A reader of a hostile file returns, or raises an error of ours; it takes less than two seconds of
processor time; and what it allocates is at most a constant and so many bytes for each byte of the
file.
"""

from __future__ import annotations

import signal
import time
import tracemalloc
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from tests.sources.suite import DATA
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import UcformatError
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "DATA",
    "HOSTILE",
    "Files",
    "Hang",
    "bounded",
    "changed",
    "exhaust",
    "files_below",
    "harmless",
    "mutated",
    "nested",
    "open_files",
    "stored",
]

Files = dict[str, bytes]

SECONDS = 2.0
CONSTANT = (
    192 << 20
)  # bytes that any reader may allocate: decoded chunks are kept, buffers are reused
FACTOR = 400  # and for each byte of its input: an empty Python set is 216 bytes, and one byte of a pickle makes it
_READ = 1 << 20  # bytes of a tensor that is read whole


class Hang(BaseException):
    """A reader took too long; no `except Exception` may swallow it."""


@contextmanager
def bounded(
    nbytes: int, *, constant: int = CONSTANT, factor: int = FACTOR, seconds: float = SECONDS
) -> Iterator[None]:
    """Fails where the block takes more processor time, or allocates more for an input of `nbytes`."""

    def stop(_signal: int, _frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, stop)
    threads = _threads()
    tracemalloc.start()
    signal.setitimer(signal.ITIMER_PROF, seconds)
    late = False
    try:
        yield
    except Hang:
        late = True
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        _, peak = tracemalloc.get_traced_memory()
        _threads_end(threads)
        tracemalloc.stop()
    assert not late, f"more than {seconds} seconds for an input of {nbytes} bytes"
    assert peak <= constant + factor * nbytes, (
        f"{peak} bytes were allocated for an input of {nbytes}"
    )


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _threads_end(before: int) -> None:
    """Let TensorStore's threads end: where they free memory while tracemalloc stops, the process crashes."""
    for _ in range(50):  # those of its pool stay, and do nothing
        time.sleep(0.002)
        if _threads() <= before:
            return


def harmless(act: Callable[[], object], nbytes: int, **limits: Any) -> bool:
    """Assert the property of `act`, which reads `nbytes` of input; whether it raised no error at all."""
    with bounded(nbytes, **limits), suppress(UcformatError):
        act()
        return True
    return False


# bytes

_BOUNDARIES = sorted(
    {
        0,
        1,
        2,
        7,
        8,
        255,
        256,
        *(2**n + d for n in (15, 16, 31, 32, 40, 62, 63, 64) for d in (-1, 0, 1)),
    }
)
_WIDTHS = (1, 2, 4, 8)


@st.composite
def mutated(draw: st.DrawFn, corpus: Sequence[bytes], most: int = 4) -> bytes:
    """One of these byte strings after some edits: flips, cuts, repeats, splices, numbers at their boundaries."""
    data = bytearray(draw(st.sampled_from(corpus)))
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(1, 1 + min(64, len(data))))
        match draw(
            st.sampled_from(
                ("flip", "set", "number", "add", "cut", "delete", "repeat", "splice", "move")
            )
        ):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "set" if data:
                data[at] = draw(st.integers(0, 255))
            case "number":
                width, order = (
                    draw(st.sampled_from(_WIDTHS)),
                    draw(st.sampled_from(("little", "big"))),
                )
                value = draw(st.sampled_from(_BOUNDARIES)) % (1 << 8 * width)
                data[at : at + width] = value.to_bytes(width, order)
            case "add":  # a length field that is a little off
                width = draw(st.sampled_from(_WIDTHS))
                value = int.from_bytes(data[at : at + width], "little") + draw(st.integers(-2, 2))
                data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
            case "cut":
                del data[at:]
            case "delete":
                del data[at : at + length]
            case "repeat":
                data[at:at] = data[at : at + length] * draw(st.sampled_from((1, 2, 50)))
            case "splice":
                other = draw(st.sampled_from(corpus))
                begin = draw(st.integers(0, max(0, len(other) - 1)))
                data[at : at + length] = other[begin : begin + length]
            case "move":
                part = data[at : at + length]
                del data[at : at + length]
                to = draw(st.integers(0, len(data)))
                data[to:to] = part
    return bytes(data)


# documents


def nested(depth: int, leaf: Any = 0) -> Any:
    """Lists in lists."""
    for _ in range(depth):
        leaf = [leaf]
    return leaf


#: Values that do not belong where they are put.
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 7, 63, 64, 65, 255, 2**31, 2**32, 2**53 + 1, 2**62, 2**63, 2**64, -(2**63)),
    *(10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", " ", "a", "0", "-1", "9" * 5000, "\ud800", "\0", "../x", "/etc/passwd", "a/../../b", "é", "x" * 5000, "NaN"),
    *("memory://x", "file:///etc", "s3://b/k", "://", "$float", "$int:1", "roots/0/x", "roots/-1/x", "float32", "F32"),
    *([], {}, [0], [-1], [[]], [None], [2**62] * 3, [0] * 100, {"": ""}, {"a": {"a": {}}}, {"$float": "x"}, nested(60)),
)  # fmt: skip


def _places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    inner = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, value in inner:
        yield from _places(value, (*at, key))


def _changed(document: Any, at: tuple[Any, ...], value: Any, *, drop: bool) -> Any:
    if not at:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    if drop and len(at) == 1:
        del copy[at[0]]
    else:
        copy[at[0]] = _changed(copy[at[0]], at[1:], value, drop=drop)
    return copy


@st.composite
def changed(draw: st.DrawFn, document: Any, most: int = 3, values: Sequence[Any] = HOSTILE) -> Any:
    """A JSON document of which some parts were dropped, or replaced by hostile values, neighbours or doubles."""
    for _ in range(draw(st.integers(1, most))):
        places = list(_places(document))
        at = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(("value", "value", "other", "drop", "double")))
        if kind == "other":
            value = document
            for part in draw(st.sampled_from(places)):
                value = value[part]
            if len(str(value)) > 100_000:
                continue
        elif kind == "double":
            inner = document
            for part in at:
                inner = inner[part]
            value = inner * 2 if isinstance(inner, list | str) and len(inner) < 1000 else [inner]
        else:
            value = draw(st.sampled_from(values))
        if not at and kind == "drop":
            continue
        document = _changed(document, at, value, drop=kind == "drop")
    return document


# checkpoints


def files_below(folder: Path) -> Files:
    """Every file below a folder, by its path in it."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def stored(files: Mapping[str, bytes]) -> MemoryStore:
    """A store with these files; those with names that no store takes are left out."""
    store = MemoryStore(uuid.uuid4().hex)
    for key, data in files.items():
        with suppress(UcformatError):
            store.put_if_absent(key, data)
    return store


def exhaust(ck: Checkpoint) -> None:
    """Look at all that an opened checkpoint tells, and read its small tensors; each part may be an error of ours."""
    for look in (
        lambda: list(ck.metadata.groups),
        lambda: ck.metadata.step,
        lambda: ck.objects,
        lambda: ck.manifest.model_dump_json(),  # noqa: PLW0108 - `manifest` may raise
        lambda: ck.id,
        ck.files,
        lambda: list(ck.source.records()) if hasattr(ck.source, "records") else (),
        lambda: dict(ck.assets),
        lambda: repr(ck),
    ):
        with suppress(UcformatError):
            look()
    for name, state in list(ck.tensors)[:8]:
        tensor = ck[name, state]
        with suppress(UcformatError):
            tensor.plan()
            if tensor.nbytes <= _READ:
                tensor.read()


def open_files(files: Mapping[str, bytes]) -> Checkpoint:
    """Open a checkpoint of these files, and look at all of it."""
    store = stored(files)
    try:
        ck = open_checkpoint(store)
        exhaust(ck)
    finally:
        for info in list(store.list()):
            store.delete(info.key)
    return ck
