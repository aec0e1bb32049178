"""GGUF files again, of a checkpoint that was made of them: the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

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
from ucformat.geometry.tensor import Key
from ucformat.schema import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.exporters.base import Part
    from ucformat.geometry.tensor import TensorInfo

_HINT = (
    "only what was opened as GGUF files is exported to them, with all of its tensors; make one of "
    "another model with llama.cpp's convert_hf_to_gguf.py, from an export to safetensors"
)


@dataclass(frozen=True, kw_only=True)
class GgufOptions(ExportOptions):
    """The options of `GgufExporter`."""

    name: str | None = option(
        None, "text", "the name of the file; by default, that of the file that was opened"
    )

    def __post_init__(self) -> None:
        if self.name is not None and (not self.name.endswith(".gguf") or "/" in self.name):
            raise UsageError(
                f"{self.name!r} is not the name of a .gguf file",
                hint="choose one such as model.gguf",
            )


class GgufExporter(Exporter):
    """Plans the files that a checkpoint was opened from, by their headers, which are among its tensors."""

    kind = "gguf"
    title = "GGUF"
    summary = "The GGUF files that a checkpoint was made of."
    dtypes = ITEMSIZE
    endings = (".gguf",)
    options_type = GgufOptions

    @property
    def one_file(self) -> bool:
        """Whether the target is a file."""
        return self.options.name is not None

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter; reads the headers, of which there is one for each file."""
        from ucformat.engines.gguf.header import read_header
        from ucformat.engines.gguf.opened import HEADER, HEADER_STATE, VALUES

        values = source.objects.get(VALUES)
        recorded = values.get("files") if isinstance(values, dict) else None
        headers = [i for i in infos if i.state == HEADER_STATE and i.name.startswith(HEADER)]
        if not headers or not isinstance(recorded, dict):
            raise UnsupportedError("there is no header of a GGUF file", hint=_HINT)
        if self.options.name is not None and len(headers) > 1:
            raise UsageError(
                f"the model is split into {len(headers)} files, which cannot be called "
                f"{self.options.name}",
                hint="export it to a folder",
            )
        rest = {info.key: info for info in infos if info not in headers}
        files = []
        for info in headers:
            about = recorded.get(info.name)
            data = source[info.name, info.state].read().tobytes()
            nbytes = about.get("nbytes") if isinstance(about, dict) else None
            if not isinstance(nbytes, int):
                raise UnsupportedError(f"the size of the file of {info.name} is lost", hint=_HINT)
            header = read_header(partial(_first, data), nbytes, info.name)
            parts: list[Part] = [Span.whole(info)]
            end = header.start
            for entry in sorted(header.entries, key=lambda e: (e.start, e.nbytes)):
                tensor = rest.pop(Key(entry.name, entry.state), None)
                if tensor is None or (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
                    raise UnsupportedError(
                        f"the file has {entry.name} ({entry.state}, {entry.dtype or 'unknown'}, "
                        f"{list(entry.shape)}), and the checkpoint "
                        + ("has not" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"),
                        hint=_HINT,
                    )
                parts += [bytes(entry.start - end), Span.whole(tensor)]
                end = entry.start + entry.nbytes
            parts.append(bytes(nbytes - end))
            key = self.options.name or _file_name(about)
            files.append(TargetFile.of(key, *filter(_has_bytes, parts), last=info is headers[0]))
        if rest:
            raise UnsupportedError(
                f"{next(iter(rest))} is in no GGUF file that the checkpoint was opened from",
                hint=_HINT,
            )
        files.sort(key=lambda file: file.last)
        return Target(tuple(files), left_out(source, infos, values=(VALUES, "model_config")))


def _first(data: bytes, count: int) -> bytes:
    return data[:count]


def _has_bytes(part: Any) -> bool:
    return bool(len(part)) if isinstance(part, bytes) else bool(part.nbytes)


def _file_name(about: Any) -> str:
    """The name of the file that was opened."""
    name = about.get("file") if isinstance(about, dict) else None
    if not isinstance(name, str) or "/" in name or not name.endswith(".gguf"):
        raise UnsupportedError("the name of the GGUF file is lost", hint=_HINT)
    return name
