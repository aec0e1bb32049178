"""NumPy's files: an archive of all tensors (`npz`), or a folder with a file for each (`npy`).

`numpy.load(…, allow_pickle=False)` reads both. NumPy has no bfloat16 and no float8: they are an
error, unless they are cast or, with the option `raw`, written as unsigned integers with the same
bits.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from ucformat.errors import UnsupportedError, UsageError
from ucformat.exporters.base import (
    Exporter,
    ExportOptions,
    Span,
    Target,
    TargetFile,
    left_out,
    option,
)
from ucformat.schema import ITEMSIZE, ZARR_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

_ENDING = ".npy"
_INDEX = "index.json"
_MAX_FILE_NAME = 255  # bytes, on most file systems
_MAX_DIMS = 64  # of NumPy 2
_RAW = {1: "uint8", 2: "uint16", 4: "uint32"}


@dataclass(frozen=True, kw_only=True)
class NpyOptions(ExportOptions):
    """The options of `NpyExporter`."""

    raw: bool = option(
        default=False,
        how="flag",
        text=(
            "write dtypes that NumPy lacks (bfloat16, float8, …) as unsigned integers with the "
            "same bits"
        ),
    )


@dataclass(frozen=True, kw_only=True)
class NpzOptions(NpyOptions):
    """The options of `NpzExporter`."""

    name: str = option("model.npz", "text", "the name of the file; `model.npz` by default")

    def __post_init__(self) -> None:
        if not self.name.lower().endswith(NpzExporter.endings) or "/" in self.name:
            raise UsageError(
                f"{self.name!r} is not the name of an .npz file",
                hint="choose one such as model.npz",
            )


class NpzExporter(Exporter):
    """Plans an archive that `numpy.load` reads."""

    kind = "npz"
    title = "NumPy (npz)"
    summary = "One archive of NumPy."
    weights_only = True
    dtypes = ITEMSIZE
    endings = (".npz",)
    options_type = NpzOptions

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        from ucformat.exporters.zip_file import ZipArchive  # which the options do not need

        archive = ZipArchive()
        named = _named(source, infos)
        for name, info in named.items():
            if "\0" in name or (name.endswith(_ENDING) and name.removesuffix(_ENDING) in named):
                raise UnsupportedError(
                    f"{name!r} cannot be told from another name in an .npz archive",
                    hint="rename it by a view",
                )
            archive.add(name + _ENDING, _header(info, raw=self.options.raw), Span.whole(info))
        file = TargetFile.of(self.options.name, *archive.end(), last=True)
        return Target((file,), left_out(source, infos))


class NpyExporter(Exporter):
    """Plans a folder of files that `numpy.load` reads, and the list of their names.

    The file of a tensor has its name, escaped as in URLs; a number if that is too long, or the file
    of another tensor where case is ignored. `index.json` lists the file, dtype and shape of each
    tensor.
    """

    kind = "npy"
    title = "NumPy (npy)"
    summary = "A folder of NumPy files."
    weights_only = True
    dtypes = ITEMSIZE
    options_type = NpyOptions

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        files = []
        index: dict[str, dict[str, object]] = {}
        used: set[str] = set()
        for number, info in enumerate(infos):
            key = _file_name(info.name, number, used)
            header = _header(info, raw=self.options.raw)
            index[info.name] = {"file": key, "dtype": info.dtype, "shape": list(info.shape)}
            files.append(TargetFile.of(key, header, Span.whole(info)))
        index |= {name: index[info.name] for name, info in _named(source, infos).items()}
        text = json.dumps(
            {"format": "ucformat-npy-1", "tensors": index}, indent=1, ensure_ascii=False
        )
        files.append(TargetFile.of(_INDEX, text.encode(), last=True))
        return Target(tuple(files), left_out(source, infos))


def _named(source: Checkpoint, infos: Sequence[TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors by name, and by the further names of tied ones."""
    stored = {info.name: info for info in infos}
    return stored | {
        alias: stored[name] for alias, name in source.aliases.items() if name in stored
    }


def _file_name(name: str, number: int, used: set[str]) -> str:
    """The file of a tensor: its escaped name, or `%n` and its number, which no escaped name is."""
    text = quote(name, safe="")
    # `quote` keeps dots, and a file whose name begins with one is hidden.
    key = f"%2E{text[1:]}{_ENDING}" if text.startswith(".") else f"{text}{_ENDING}"
    # file systems may ignore case
    if not text or len(key) > _MAX_FILE_NAME or key.lower() in used:
        key = f"%n{number}{_ENDING}"
    used.add(key.lower())
    return key


def _header(info: TensorInfo, *, raw: bool) -> bytes:
    """What comes before the elements of a tensor in a file."""
    import numpy as np  # which the options do not need

    # those of ml_dtypes
    unknown = info.dtype not in ZARR_DTYPES or info.dtype.startswith(("bfloat", "float8"))
    if unknown and not raw:
        raise UnsupportedError(
            f"{info.key} has the dtype {info.dtype}, which NumPy does not have",
            hint=(
                "write its bits as unsigned integers (--raw); or, of floating point, cast it "
                "(--cast float32)"
            ),
        )
    if len(info.shape) > _MAX_DIMS:
        raise UnsupportedError(
            f"{info.key} has {len(info.shape)} dims, and NumPy has at most {_MAX_DIMS}"
        )
    dtype = np.dtype(_RAW[info.itemsize] if unknown else info.dtype)
    out = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype.newbyteorder("<"))
    np.lib.format.write_array_header_1_0(
        out, {"descr": descr, "fortran_order": False, "shape": info.shape}
    )
    return out.getvalue()
