"""What a disk may hold after a power failure: the model that the package's text states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.power.recorder import contents, tree
from ucformat.storage.base import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tests.power.recorder import Call, Disk, Name, Tree

__all__ = ["after", "lies", "visible"]


def after(disk: Disk, calls: Sequence[Call], *, lies: int = -1) -> Iterator[tuple[str, Tree]]:
    """What may be found if the power fails after these calls, each with how it came.

    Args:
        disk: what there was before.
        calls: in their order.
        lies: the number of a sync that returned and did nothing.
    """
    last: dict[int, int] = {}  # when each file and folder was last synced
    for at, call in enumerate(calls):
        if call.synced >= 0 and at != lies:
            last[call.synced] = at
    names = dict(disk.names)
    pending: list[Call] = []
    for at, call in enumerate(calls):
        if call.names and all(at < last.get(folder, -1) for folder, _ in call.names):
            _apply(names, [call])
        elif call.names:
            pending.append(call)
    full = contents(disk, calls)
    lost = contents(
        disk, [c for at, c in enumerate(calls) if c.node < 0 or at < last.get(c.node, -1)]
    )
    files = [n for n in full if full[n] != lost.get(n, b"")]
    zeros = full | _chosen(files, contents(disk, calls, {n: last.get(n, 0) for n in full}))
    half = full | {n: _half(lost.get(n, b""), full[n]) for n in files}
    bare = full | {n: lost.get(n, b"") for n in files}

    def found(some: Iterable[Call], data: Mapping[int, bytes]) -> Tree:
        now = dict(names)
        _apply(now, some)
        return tree(disk, now, data)

    yield "nothing that was not synced", found((), bare)
    yield "all", found(pending, full)
    yield "contents alone", found((), full)
    for how, data in (("empty", bare), ("zeros", zeros), ("half", half)):
        yield f"names alone, contents {how}", found(pending, data)
        for file in files:
            yield f"all, the content of {file} {how}", found(pending, full | {file: data[file]})
    for file in files:
        yield f"names, and the content of {file} alone", found(pending, bare | {file: full[file]})
    for one in pending:
        others = [c for c in pending if c is not one]
        for what, data in (("with contents", full), ("contents empty", bare)):
            yield f"{one} alone, {what}", found([one], data)
            yield f"all but {one}, {what}", found(others, data)


def lies(calls: Sequence[Call]) -> Iterator[int]:
    """The numbers of all syncs."""
    return (at for at, call in enumerate(calls) if call.synced >= 0)


def visible(found: Tree) -> frozenset[tuple[str, bytes]]:
    """What tells apart what anybody sees: all files but the hidden ones.

    What is hidden is removed, unread; a folder that holds nothing is as good as none.
    """
    return frozenset(
        (p, d) for p, d in found.items() if d is not None and f"/{HIDDEN}" not in f"/{p}"
    )


def _apply(names: dict[Name, int], calls: Iterable[Call]) -> None:
    for call in calls:
        for name, node in call.names.items():
            if node is None:
                names.pop(name, None)
            else:
                names[name] = node


def _chosen(files: Iterable[int], data: Mapping[int, bytes]) -> dict[int, bytes]:
    return {n: data[n] for n in files}


def _half(old: bytes, new: bytes) -> bytes:
    """As much of what was written as half of what was added."""
    return new[: min(len(old), len(new)) + abs(len(new) - len(old)) // 2]
