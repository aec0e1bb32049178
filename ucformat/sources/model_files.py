"""The files of a model's folder: numbered shards, the index that says which tensor is in which, and assets."""

from __future__ import annotations

import json
import re
import reprlib
from itertools import compress, islice
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, MissingData
from ucformat.storage.base import check_key, exists
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ucformat.storage.base import Info, Store

__all__ = [
    "FileSet",
    "check_index",
    "check_shards",
    "complete",
    "file_sets",
    "find_assets",
    "numbered",
    "present",
    "read_json",
    "read_weight_map",
    "root_files",
]

#: The files of a checkpoint, and its index; where there is an index, it names the files.
FileSet = tuple[list[str], str | None]

_LOOK = 10_000  # files of a folder, and of those in it, that are looked at
_LARGEST = 64 << 20  # bytes of an asset, and of a JSON document that is read
_KNOWN = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template|"
    r"(image_|video_)?preprocessor_config|processor_config|adapter_config|args|params|config_sentence_transformers)"
    r"\.json|(vocab|merges)\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model|chat_template\.jinja|README\.md|"
    r"(LICENSE|NOTICE)(\.md|\.txt)?|(modeling|configuration|tokenization|processing|image_processing)_\w+\.py|"
    r"additional_chat_templates/[^/]+\.jinja"
)
_FURTHER = re.compile(r"[^/]+\.(json|txt|model|jinja|md|tiktoken)")
_OF_THE_ENGINE = re.compile(r".*\.index\.json|trainer_state\.json|model_index\.json")


def present(store: Store, weight_map: Mapping[str, str]) -> set[str]:
    """Those shards that an index names which are there."""
    shards = sorted({check_key(shard) for shard in weight_map.values()})
    return set(compress(shards, map_io(lambda shard: exists(store, shard), shards)))


def root_files(store: Store) -> dict[str, Info]:
    """The files of a folder, and of the folders in it, by key; of a very large tree the first ten thousand."""
    return {info.key: info for info in islice(store.list(), _LOOK)}


def find_assets(infos: Iterable[Info], taken: Iterable[str] = ()) -> tuple[str, ...]:
    """The files to keep as they are: configuration, tokenizer, chat templates, the model's card and code.

    Where a configuration marks the folder as a model's, all further small text files too. `taken` are no assets.
    """
    infos, used = list(infos), frozenset(taken)
    model = any(i.key in ("config.json", "adapter_config.json") for i in infos)
    return tuple(
        i.key
        for i in infos
        if i.size <= _LARGEST
        and i.key not in used
        and not _OF_THE_ENGINE.fullmatch(i.key)
        and (_KNOWN.fullmatch(i.key) or (model and _FURTHER.fullmatch(i.key)))
    )


def read_json(store: Store, key: str) -> Any:
    """A JSON document; IntegrityError where it is none."""
    size = store.info(key).size
    if size > _LARGEST:
        raise IntegrityError(f"{key} has {size:,} bytes, more than {_LARGEST:,}", hint="it is no such document")
    try:
        return json.loads(store.read(key).decode())
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{key} is not JSON ({error})") from error


def read_weight_map(store: Store, key: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The shard of each tensor, by name, and the metadata, from an index of Hugging Face (`….index.json`)."""
    index = read_json(store, key)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise IntegrityError(f"{key} has no usable `weight_map`, which gives the file of each tensor")
    metadata = index.get("metadata")
    return weight_map, metadata if isinstance(metadata, dict) else {}


_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<total>\d{5,})(?P<suffix>\.\w+)")
_SHOWN = 5


def numbered(name: str) -> tuple[str, int, int] | None:
    """Of `model-00002-of-00003.bin`: what all shards have in common, its number, and how many there are."""
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return None
    return f"{match['stem']}-*-of-{match['total']}{match['suffix']}", int(match["number"]), int(match["total"])


def complete(names: Sequence[str]) -> list[str]:
    """The only file of a set, or its shards in order; MissingData where one of them is not there."""
    if not names or numbered(names[0]) is None:
        return list(names)
    by_number, example, total = {}, "", 0
    for name in names:
        if found := numbered(name):
            by_number[found[1]], example, total = name, name, found[2]
    missing = [n for n in range(1, min(total, len(by_number) + _SHOWN) + 1) if n not in by_number]
    if missing or len(by_number) != total:
        match = _NUMBERED.fullmatch(example)
        first = missing[0] if missing else 0
        name = f"{match['stem']}-{first:05d}-of-{match['total']}{match['suffix']}" if match and missing else example
        what = "is missing" if missing else "does not belong to them"
        raise MissingData(
            f"{name} {what}: {len(by_number)} of {total} shards are there",
            hint="copy all shards; each holds other tensors",
        )
    return [by_number[n] for n in sorted(by_number)]


def file_sets(names: Iterable[str], index: str) -> dict[str, FileSet]:
    """The checkpoints among the files of a folder, by the name of their index or only file, or what their shards share.

    Args:
        names: those of the files, without folders.
        index: how the names of indexes end.
    """
    names = list(names)
    sets: dict[str, FileSet] = {n: ([], n) for n in names if n.endswith(index)}
    stems = {n.removesuffix(index) for n in sets}
    for name in names:
        common = numbered(name) or (name, 1, 1)
        if name not in sets and common[0].rpartition("-*-of-")[0] not in stems:  # else the index says which count
            sets.setdefault(common[0], ([], None))[0].append(name)
    return sets


def check_index(weight_map: Mapping[str, str], index: str, present: Collection[str], below: str = "") -> list[str]:
    """The shards that an index names, as keys, all there."""
    shards = []
    for shard in dict.fromkeys(weight_map.values()):
        key = check_key(f"{below}{shard}")
        if key not in present:
            names = [n for n, s in weight_map.items() if s == shard]
            raise MissingData(
                f"{key} is missing: {index} says that it holds {_some(names)}",
                hint="copy all shards that the index names; each holds other tensors",
            )
        shards.append(key)
    return sorted(shards)


def check_shards(weight_map: Mapping[str, str], index: str, shards: Mapping[str, Collection[str]]) -> None:
    """IntegrityError where an index and its shards (with the names in each) do not say the same."""
    listed: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        listed.setdefault(shard, set()).add(name)
    for shard, names in shards.items():
        wanted = listed.get(shard.rpartition("/")[2], set()) | listed.get(shard, set())
        if lost := sorted(wanted - set(names)):
            raise MissingData(
                f"{shard} lacks {_some(lost)}, which {index} says it holds",
                hint="files of different saves are mixed in one folder, or the index is another model's",
            )
        if further := sorted(set(names) - wanted):
            elsewhere = f", which should be in {weight_map[further[0]]}" if further[0] in weight_map else ""
            raise IntegrityError(
                f"{shard} holds {_some(further)}{elsewhere}, and {index} does not say so",
                hint="files of different saves are mixed in one folder, or the index is another model's",
            )


def _some(names: list[str]) -> Any:
    shown = ", ".join(reprlib.repr(n) for n in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
