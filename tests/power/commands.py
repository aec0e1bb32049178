"""The commands that the power fails under, and the world that they find."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

import ucformat
from ucformat.catalog.catalog import Catalog
from ucformat.errors import UcformatError
from ucformat.jobs.documents import read_document
from ucformat.jobs.gc import collect
from ucformat.schema.policy import Policy
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["COMMANDS", "NOW", "Command", "arrays", "first_world"]

NOW = timedelta(0)
PACKED, ARRAYS, NEW, VIRTUAL, COPY = "t/packed", "t/arrays", "t/new", "t/virtual", "u/far/copy"


@dataclass(frozen=True, slots=True)
class Command:
    """A command that is given the root of the disk.

    `changes` are the steps of the checkpoints at each place before and after it, where that is not
    the same; `before` is done first, and lasts; `said` is what must be true when it has returned. A
    command that is `dying` is killed halfway, and lasts so, before it is done. It is repeated as
    `again`, if that is something else.
    """

    work: Callable[[Path], Any]
    changes: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)
    before: Callable[[Path], Any] | None = None
    said: Callable[[Path], bool] = lambda _: True
    dying: bool = False
    again: Callable[[Path], Any] | None = None


def arrays(step: int) -> dict[str, Any]:
    """The tensors of a step."""
    return {"w": np.arange(4, dtype=np.float32) + 100 * step}


def first_world(root: Path) -> dict[str, int]:
    """Make what all commands find; the steps of the checkpoints, by place."""
    (root / "t").mkdir()
    (root / "t/README").write_text(
        "not empty, so that nobody takes it for a disk that is not mounted"
    )
    source = root.parent / "src"
    source.mkdir()
    save_file(arrays(2), source / "model.safetensors")
    _save(1, root / PACKED, form="packed")
    _save(0, root / ARRAYS)
    return {PACKED: 1, ARRAYS: 0}


def _save(step: int, place: Path, **more: Any) -> None:
    import torch

    from ucformat.torch import save

    tensors = {name: torch.from_numpy(a) for name, a in arrays(step).items()}
    save({"model": tensors}, place, run="r", step=step, **more)


def _convert(root: Path, place: str = NEW, **more: Any) -> None:
    ucformat.convert(root.parent / "src", root / place, run="r", chunk_bytes=8, workers=1, **more)


def _virtual(root: Path) -> None:
    ucformat.convert(root / PACKED, root / VIRTUAL, run="r", virtual=True)


def _gc(root: Path) -> None:
    with Catalog() as catalog:
        found = collect(catalog, [str(root / "t")], apply=True, grace=NOW)
    if found.failures:
        raise UcformatError("; ".join(found.failures))


def _delete(root: Path, place: str) -> None:
    with Catalog() as catalog:
        if (root / place / "manifest.json").exists():
            try:
                catalog.delete(str(root / place), grace=NOW)
            except UcformatError as error:
                if not any(
                    said in str(error) for said in ("is not deleted: it is", "has no checkpoint")
                ):
                    raise
    _gc(root)


def _delete_when_full(root: Path, place: str) -> None:
    """Delete where nothing can be written."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch("ucformat.storage.local.write_all", full):
        _delete(root, place)


def _retain(root: Path) -> None:
    policy = Policy.model_validate({"version": 1, "keep": {"where": ["step = 1"]}, "grace": "0s"})
    with Catalog() as catalog:
        catalog.retain(policy, apply=catalog.retain(policy).id)
    _gc(root)


def _hold(root: Path) -> None:
    with Catalog() as catalog:
        catalog.hold(str(root / ARRAYS), "ours")


def _tag(root: Path) -> None:
    with Catalog() as catalog:
        catalog.tag(str(root / ARRAYS), "good")


def _tombs(root: Path) -> list[Path]:
    return [*root.rglob("tombstone.json")]


def _document(root: Path, place: str) -> Any:
    return read_document(open_store(str(root / place)))


COMMANDS: dict[str, Command] = {
    "save": Command(lambda r: _save(3, r / NEW), {NEW: (None, 3)}),
    "save-packed": Command(lambda r: _save(3, r / NEW, form="packed"), {NEW: (None, 3)}),
    "save-over": Command(lambda r: _save(3, r / ARRAYS, overwrite=True), {ARRAYS: (0, 3)}),
    "convert": Command(_convert, {NEW: (None, 2)}),
    "resume": Command(_convert, {NEW: (None, 2)}, dying=True),
    "overwrite": Command(lambda r: _convert(r, PACKED, overwrite=True), {PACKED: (1, 2)}),
    "copy": Command(lambda r: ucformat.copy(r / PACKED, r / COPY, workers=1), {COPY: (None, 1)}),
    "copy-arrays": Command(
        lambda r: ucformat.copy(r / ARRAYS, r / COPY, workers=1), {COPY: (None, 0)}
    ),
    "materialize": Command(lambda r: ucformat.materialize(r / PACKED, workers=1)),
    "virtual": Command(_virtual, {VIRTUAL: (None, 1)}),
    "delete": Command(
        lambda r: _delete(r, PACKED), {PACKED: (1, None)}, said=lambda r: not _tombs(r)
    ),
    "delete-when-full": Command(
        lambda r: _delete_when_full(r, ARRAYS),
        {ARRAYS: (0, None)},
        said=lambda r: not _tombs(r),
        again=lambda r: _delete(r, ARRAYS),  # there is some room by then
    ),
    "delete-virtual": Command(
        lambda r: _delete(r, VIRTUAL),
        {VIRTUAL: (1, None)},
        before=_virtual,
        said=lambda r: not _tombs(r),
    ),
    "retain": Command(_retain, {ARRAYS: (0, None)}),
    "gc": Command(_gc, before=_convert, dying=True),
    "hold": Command(
        _hold,
        said=lambda r: "ours" in {h.reason for h in getattr(_document(r, ARRAYS), "holds", ())},
    ),
    "tag": Command(
        _tag, said=lambda r: "good" in {t.name for t in getattr(_document(r, ARRAYS), "tags", ())}
    ),
}
