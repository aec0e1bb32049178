"""Files as `torch.save` writes them: an uncompressed zip archive of a pickle and the storages of its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.exporters.base import TargetFile
from ucformat.exporters.pickle import Storage, dump
from ucformat.exporters.zip_file import ZipArchive

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.exporters.base import Part


def torch_file(key: str, value: Any, *, last: bool = False) -> TargetFile:
    """A file of `torch.save`."""
    return TargetFile.of(key, *torch_archive(value, _top(key)), last=last)


def lazy_torch_file(
    key: str, make: Callable[[bool], Any], *, like: TargetFile | None = None, last: bool = False
) -> TargetFile:
    """A file of `torch.save` whose value is made when it is written, so that a plan need not hold those of all ranks.

    Args:
        make: returns the value; called with False when the file is planned, for which spans need no pieces.
        like: a planned file of the same size, so that the value is not made for the plan.
    """
    nbytes = torch_file(key, make(False)).nbytes if like is None else like.nbytes
    return TargetFile(key, nbytes, lambda: torch_archive(make(True), _top(key)), last, checksums=True)


def _top(key: str) -> str:
    """The folder in the archive, which PyTorch names after the file."""
    return key.rpartition("/")[2].partition(".")[0] or "archive"


def torch_archive(value: Any, top: str = "archive", spans: int = 0) -> tuple[Part, ...]:
    """The parts of an archive, which may be part of a larger file."""
    keys: dict[Storage, str] = {}
    pickled = dump(value, lambda storage: keys.setdefault(storage, str(len(keys))))
    archive = ZipArchive(spans)
    archive.add(f"{top}/data.pkl", pickled)
    archive.add(f"{top}/byteorder", b"little")
    for storage, key in keys.items():
        archive.add(f"{top}/data/{key}", storage.span if storage.data is None else storage.data)
    archive.add(f"{top}/version", b"3\n")
    return archive.end()
