"""safetensors files as Hugging Face's tools load them: shards, their index, configuration and tokenizer.

A model of one shard is `model.safetensors`; of several, `model-00001-of-00003.safetensors`, …, and
the index `model.safetensors.index.json` says which shard has which tensor. Within a file, tensors
with wide elements come first, as the safetensors library sorts them, so that every tensor is
aligned.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from ucformat.errors import UnsupportedError
from ucformat.exporters.base import Span, TargetFile
from ucformat.reading.readable import PART_OF
from ucformat.schema import SAFETENSORS_DTYPES, SAFETENSORS_PACKED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.geometry.tensor import TensorInfo

#: The names of dtypes in headers, by ours.
DTYPE_NAMES = {ours: theirs for theirs, ours in SAFETENSORS_DTYPES.items()}
MODEL = "model"  # the name of the files that loaders look for
_ALIGN = 8  # bytes: of the header, as the library pads it
_MAX_HEADER = 100_000_000
SHARD_BYTES = 5_000_000_000  # the default of `save_pretrained` since 2023
#: Names of input embeddings, which transformers keeps of tied tensors.
_EMBEDDING = re.compile(
    r"(^|[._])(embed|embeddings?|embed_tokens|wte|shared|word_embeddings|tok_embeddings)([._]|$)"
)


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
    most: int = SHARD_BYTES,
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
        names_in_shard = {names[info.name] for info in shard}
        about = {
            **{alias: target for alias, target in aliases.items() if target in names_in_shard},
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
    values, elements = SAFETENSORS_PACKED.get(info.dtype, (1, 1))
    if values > 1 and (not info.shape or info.shape[-1] % elements):
        raise UnsupportedError(
            f"{info.key} is {info.dtype} of shape {list(info.shape)}, and safetensors has only "
            "rows of whole groups "
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
    position = 0
    for name, info in tensors:
        if info.dtype not in DTYPE_NAMES:
            raise UnsupportedError(
                f"{info.key} has the dtype {info.dtype}, which safetensors does not have",
                hint=(
                    f"it has {', '.join(DTYPE_NAMES)}; cast it with --cast, or export other tensors"
                ),
            )
        if name == "__metadata__":
            raise UnsupportedError(
                "safetensors has no tensor of the name '__metadata__'", hint="rename it by a view"
            )
        offsets = [position, position + info.nbytes]
        entries[name] = {
            "dtype": DTYPE_NAMES[info.dtype],
            "shape": _shape(info),
            "data_offsets": offsets,
        }
        position = offsets[1]
    data = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (-len(data) % _ALIGN)
    if len(data) > _MAX_HEADER:
        raise UnsupportedError(
            f"the header of a file would have {len(data):,} bytes, and safetensors allows "
            f"{_MAX_HEADER:,}",
            hint="write smaller files: --max-shard-bytes",
        )
    return len(data).to_bytes(8, "little") + data
