"""The files that stand in the folder of a model, beside its weights."""

from __future__ import annotations

import json
import re
from itertools import compress, islice
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError
from ucformat.storage.base import check_key, exists
from ucformat.storage.waiting import map_waiting

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ucformat.storage.base import Info, Store

__all__ = ["find_assets", "present", "read_json", "read_weight_map", "root_files"]

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
    return set(compress(shards, map_waiting(lambda shard: exists(store, shard), shards)))


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
