"""Files as `torch.save` writes them: an uncompressed zip archive of a pickle and the storages of its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.exporters.base import TargetFile
from ucformat.exporters.pickle import Storage, dump
from ucformat.exporters.zip_file import ZipArchive

if TYPE_CHECKING:
    from ucformat.exporters.base import Part

__all__ = ["torch_archive", "torch_file"]


def torch_file(key: str, value: Any, *, last: bool = False) -> TargetFile:
    """A file of `torch.save`.

    Args:
        key: its path in the target.
        value: the value, with `SavedTensor` for tensors (see `pickle.dump`).
        last: as in `TargetFile`.

    Raises:
        UnsupportedError: the value contains something that is not written to a pickle.
    """
    return TargetFile.of(key, *torch_archive(value, key.rpartition("/")[2].partition(".")[0] or "archive"), last=last)


def torch_archive(value: Any, top: str = "archive", spans: int = 0) -> tuple[Part, ...]:
    """The parts of an archive, which may be part of a larger file.

    Args:
        value: as for `torch_file`.
        top: the name of the folder in the archive.
        spans: how many spans the file has before the archive.

    Raises:
        UnsupportedError: as for `torch_file`.
    """
    keys: dict[Storage, str] = {}
    pickled = dump(value, lambda storage: keys.setdefault(storage, str(len(keys))))
    archive = ZipArchive(spans)
    archive.add(f"{top}/data.pkl", pickled)
    archive.add(f"{top}/byteorder", b"little")
    for storage, key in keys.items():
        archive.add(f"{top}/data/{key}", storage.span if storage.data is None else storage.data)
    archive.add(f"{top}/version", b"3\n")
    return archive.end()
