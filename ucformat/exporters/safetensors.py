"""safetensors files as Hugging Face's tools load them: shards, their index, configuration and tokenizer.

A model of one shard is `model.safetensors`; of several, `model-00001-of-00003.safetensors`, …, and
the index `model.safetensors.index.json` says which shard has which tensor. Within a file, tensors
with wide elements come first, as the safetensors library sorts them, so that every tensor is
aligned.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.errors import UnsupportedError, UsageError
from ucformat.exporters.adapter import adapter_names, is_wrapped
from ucformat.exporters.base import (
    Exporter,
    ExportOptions,
    Link,
    Span,
    Target,
    TargetFile,
    left_out,
    option,
    weights_of,
)
from ucformat.reading.readable import PART_OF
from ucformat.sources.model_files import find_assets
from ucformat.sources.safetensors import DTYPES, PACKED
from ucformat.storage.base import Info
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}
_ENDING = ".safetensors"
_MODEL = "model"  # the name of the files that loaders look for
_ALIGN = 8  # bytes: of the header, as the library pads it
_MAX_HEADER = 100_000_000
_SHARD_BYTES = 5_000_000_000  # the default of `save_pretrained` since 2023
#: Names of input embeddings, which transformers keeps of tied tensors.
_EMBEDDING = re.compile(
    r"(^|[._])(embed|embeddings?|embed_tokens|wte|shared|word_embeddings|tok_embeddings)([._]|$)"
)


@dataclass(frozen=True, kw_only=True)
class SafetensorsOptions(ExportOptions):
    """The options of `SafetensorsExporter`."""

    max_shard_bytes: int = option(
        _SHARD_BYTES,
        "size",
        "maximum size of a file, unless a single tensor is larger; 5 GB by default",
    )
    name: str = option(
        _MODEL,
        "text",
        "the name of the files without its ending; with it, of a single file; `model` by default",
    )
    assets: str | None = option(
        None,
        "path",
        "a folder whose config.json, tokenizer and similar files are used, before those of the checkpoint",
    )

    link: str | None = option(
        None,
        "link",
        "share the bytes of the checkpoint's own safetensors files instead of copying them, by reflinks, or with "
        "`hard` by hard links",
    )
    read_only: bool = option(
        False,
        "flag",
        "with hard links, remove the permission to write from the checkpoint's own files, so that nobody damages them",
    )

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise UsageError(f"max_shard_bytes must be at least 1, not {self.max_shard_bytes}")
        if self.link not in (None, "reflink", "hard"):
            raise UsageError(
                f"there are no links of the kind {self.link!r}", hint="there are: reflink, hard"
            )


class SafetensorsExporter(Exporter):
    """Plans safetensors files for Hugging Face."""

    kind = "safetensors"
    title = "safetensors (Hugging Face)"
    weights_only = True
    dtypes = _NAMES
    endings = (_ENDING,)
    options_type = SafetensorsOptions

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        if self.options.link is not None:
            return self._linked(source, infos)
        if self.one_file:
            name, most = self.options.name[: -len(_ENDING)], sum(i.nbytes for i in infos)
            files = files_of(infos, source.aliases, name, most, source.metadata.part_of)
            return Target(tuple(files), left_out(source, infos, part=True))
        if is_wrapped(info.name for info in infos):
            return self._adapter(source, infos)
        name, most = self.options.name, self.options.max_shard_bytes
        files = files_of(infos, source.aliases, name, most, source.metadata.part_of)
        assets = self._assets(source)
        last = (TargetFile.of(name, data, last=True) for name, data in assets.items())
        return Target((*files, *last), left_out(source, infos, assets=assets, part=True))

    def _adapter(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """The files of the adapter in the checkpoint of a model that PEFT has wrapped, without those of its base."""
        assets = self._assets(source)
        named = sorted(
            adapter_names(source, infos, assets).items(), key=lambda item: -item[1].itemsize
        )
        header = header_of(named, {"format": "pt"})
        name = "adapter_model" if self.options.name == _MODEL else self.options.name
        file = TargetFile.of(f"{name}{_ENDING}", header, *(Span.whole(info) for _, info in named))
        beside = {
            name: data
            for name, data in assets.items()
            if name not in ("config.json", "generation_config.json")
        }
        last = (TargetFile.of(name, data, last=True) for name, data in beside.items())
        return Target((file, *last), left_out(source, [info for _, info in named], assets=beside))

    def _linked(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """Links to the files of a source that are safetensors files already."""
        found = _own_files(source)
        whole = {
            info.key for info in weights_of(source.origin.metadata.tensor_list.placed().tensors)
        }
        if not found or source.steps or {info.key for info in infos} != whole:
            raise UnsupportedError(
                f"{source.url} has no safetensors files with exactly these tensors, so there is nothing to link",
                hint="leave out --link for a copy",
            )
        hard, read_only = self.options.link == "hard", self.options.read_only
        assets = self._assets(source)
        files = [
            TargetFile(
                name, size, tuple, last=name.endswith(".json"), link=Link(key, hard, read_only)
            )
            for name, (key, size) in found.items()
            if name not in assets
        ]
        last = [TargetFile.of(name, data, last=True) for name, data in assets.items()]
        left = left_out(
            source, infos, assets=assets, part=PART_OF in source.objects.get("metadata", {})
        )
        return Target((*sorted(files, key=lambda f: f.last), *last), left)

    def _assets(self, source: Checkpoint) -> dict[str, bytes]:
        """The files beside the tensors, by name."""
        from ucformat.views.model_config import (
            outdated,
        )  # with the documents of views, which the options do not need

        own = find_assets(Info(name, 0, "") for name in source.assets)
        wrong = outdated(
            source.viewed, source.assets, source.objects
        )  # of a sub-model, the whole model's sizes
        found = {name: source.assets[name] for name in own if name not in wrong}
        if self.options.assets is not None:
            store = open_store(self.options.assets)
            given = find_assets(store.list())
            if not given:
                raise UsageError(f"{store.url} has no config.json, tokenizer or similar file")
            found |= {name: store.read(name) for name in given}
        return found


def _own_files(source: Checkpoint) -> dict[str, tuple[str, int]]:
    """The safetensors files of which a source consists, with their keys and sizes, by the name that loaders expect.

    An index names its shards by their paths below its folder, so they keep them.
    """
    if source.foreign is not None:
        keys = source.metadata.files if source.kind == "safetensors" else ()
        return {key: (key, source.store.info(key).size) for key in keys}
    folder = source.universal.weights_folder if source.universal else None
    if folder is None:
        return {}
    return {i.key.removeprefix(f"{folder}/"): (i.key, i.size) for i in source.store.list(folder)}


def written_names(aliases: Mapping[str, str], infos: Sequence[TensorInfo]) -> dict[str, str]:
    """The name under which each tensor is written, by its stored name.

    Of tied tensors transformers keeps the input embedding, and ties the output layer to it when it
    loads.
    """
    names = {info.name: info.name for info in infos}
    for alias, stored in aliases.items():
        if stored in names and _EMBEDDING.search(alias) and not _EMBEDDING.search(names[stored]):
            names[stored] = alias
    return names


def files_of(
    infos: Sequence[TensorInfo],
    tied: Mapping[str, str],
    name: str = "model",
    most: int = _SHARD_BYTES,
    part_of: str = "",
) -> Iterator[TargetFile]:
    """The shards, and the index if there are several; a pure function of the arguments.

    Args:
        name: the name of the files without its ending (default: that which Hugging Face's tools
            look for).
        most: bytes of tensors in a file, unless a single one has more (default: 5 GB).
        part_of: what the checkpoint is only a part of (default: it is whole).
    """
    names = written_names(tied, infos)
    # Further names, and the written name for each, for `safetensors.torch.load_model`.
    aliases = {
        alias: names[stored]
        for alias, stored in tied.items()
        if stored in names and alias != names[stored]
    }
    aliases |= {stored: written for stored, written in names.items() if stored != written}
    shards = list(_shards(infos, most))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        key = (
            f"{name}.safetensors"
            if len(shards) == 1
            else f"{name}-{number:05}-of-{len(shards):05}.safetensors"
        )
        weight_map |= {names[info.name]: key for info in shard}
        held = {names[info.name] for info in shard}
        about = {
            **{alias: of for alias, of in aliases.items() if of in held},
            "format": "pt",
            **({PART_OF: part_of} if part_of else {}),
        }
        ordered = sorted(shard, key=lambda i: -i.itemsize)
        header = header_of([(names[i.name], i) for i in ordered], about)
        yield TargetFile.of(key, header, *map(Span.whole, ordered), last=len(shards) == 1)
    if len(shards) > 1:
        metadata = {
            "total_parameters": sum(i.size for i in infos),
            "total_size": sum(i.nbytes for i in infos),
        }
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        yield TargetFile.of(
            f"{name}.safetensors.index.json",
            json.dumps(index, indent=2).encode() + b"\n",
            last=True,
        )


def _shape(info: TensorInfo) -> list[int]:
    """The shape in the header, which counts values that are packed one by one."""
    values, elements = PACKED.get(info.dtype, (1, 1))
    if values > 1 and (not info.shape or info.shape[-1] % elements):
        raise UnsupportedError(
            f"{info.key} is {info.dtype} of shape {list(info.shape)}, and safetensors has only rows of whole groups "
            f"of {elements}",
            hint="leave the tensor out by a view with `drop` (--view)",
        )
    return (
        [*info.shape[:-1], info.shape[-1] * values // elements] if values > 1 else list(info.shape)
    )


def _shards(infos: Sequence[TensorInfo], most: int) -> Iterator[list[TensorInfo]]:
    """The tensors of each file, in order."""
    shard: list[TensorInfo] = []
    nbytes = 0
    for info in infos:
        if shard and nbytes + info.nbytes > most:
            yield shard
            shard, nbytes = [], 0
        shard.append(info)
        nbytes += info.nbytes
    yield shard


def header_of(tensors: Sequence[tuple[str, TensorInfo]], about: Mapping[str, str]) -> bytes:
    """The length and the header of a file, padded with spaces.

    Args:
        tensors: the names and tensors, in the order of their bytes.
    """
    entries: dict[str, object] = {"__metadata__": dict(about)}
    at = 0
    for name, info in tensors:
        if info.dtype not in _NAMES:
            raise UnsupportedError(
                f"{info.key} has the dtype {info.dtype}, which safetensors does not have",
                hint=f"it has {', '.join(_NAMES)}; cast it with --cast, or export other tensors",
            )
        if name == "__metadata__":
            raise UnsupportedError(
                "safetensors has no tensor of the name '__metadata__'", hint="rename it by a view"
            )
        offsets = [at, at + info.nbytes]
        entries[name] = {
            "dtype": _NAMES[info.dtype],
            "shape": _shape(info),
            "data_offsets": offsets,
        }
        at = offsets[1]
    data = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (-len(data) % _ALIGN)
    if len(data) > _MAX_HEADER:
        raise UnsupportedError(
            f"the header of a file would have {len(data):,} bytes, and safetensors allows {_MAX_HEADER:,}",
            hint="write smaller files: --max-shard-bytes",
        )
    return len(data).to_bytes(8, "little") + data
