"""The files of a model's folder: numbered shards, the index of the tensors in each shard, and assets."""

from __future__ import annotations

import json
import re
import reprlib
from dataclasses import dataclass
from itertools import compress, islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ucformat.errors import IntegrityError, MissingData, UcformatError, first_names, option_text
from ucformat.storage.base import check_key, exists
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ucformat.storage.base import Info, Store

T = TypeVar("T")
BIN_INDEX = ".bin.index.json"  # the ending of the index of shards of `torch.save`

#: The files of a checkpoint, and its index or None. With an index, the list is empty: the index
#: names the files.
FileSet = tuple[list[str], str | None]

_MAX_LISTED = 10_000  # files of a folder tree that are listed
_MAX_NBYTES = 64 << 20  # bytes of an asset, and of a JSON document that is read
_ASSET = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template|"
    r"(image_|video_)?preprocessor_config|processor_config|adapter_config|args|params|config_sentence_transformers)"
    r"\.json|(vocab|merges)\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model|chat_template\.jinja|README\.md|"
    r"(LICENSE|NOTICE)(\.md|\.txt)?|(modeling|configuration|tokenization|processing|image_processing)_\w+\.py|"
    r"additional_chat_templates/[^/]+\.jinja"
)
_ADAPTER = "adapter_config.json"
_TEXT_FILE = re.compile(r"[^/]+\.(json|txt|model|jinja|md|tiktoken)")
_NO_ASSET = re.compile(r".*\.index\.json|trainer_state\.json|model_index\.json")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model that are opened as a checkpoint.

    Attributes:
        named: their keys; none with an index, which names them.
        index: the key of the index of shards, if there is one.
        assets: the files to keep unchanged.
        folder: the key of the file that was opened by its name; empty for a folder.
        part: whether shards may be missing.
    """

    store: Store
    named: Sequence[str]
    index: str | None
    assets: Sequence[str] = ()
    folder: str = ""
    part: bool = False

    def open(
        self, open_file: Callable[[str], T], names: Callable[[T], Collection[str]]
    ) -> OpenedFiles[T]:
        """Open all files, and check that they and the index list the same tensors.

        Args:
            names: the names of the tensors in an opened file.
        """
        keys = list(self.named)
        weight_map: dict[str, str] = {}
        metadata: dict[str, Any] = {}
        if self.index is not None:
            weight_map, metadata = read_weight_map(self.store, self.index)
            present = _present_shards(self.store, weight_map)
            keys = _check_index(weight_map, self.index, present, part=self.part)
        opened = map_io(open_file, keys)
        if self.index is not None:
            by_key = zip(keys, map(names, opened), strict=True)
            _check_shards(weight_map, self.index, dict(by_key))
        files = tuple(([self.index] if self.index else []) + keys)
        return OpenedFiles(opened, files, metadata, _part_of_set(keys, weight_map, self.index))


@dataclass(frozen=True, slots=True)
class OpenedFiles(Generic[T]):
    """The opened files of one model.

    Attributes:
        opened: each of them.
        files: their keys, after that of the index.
        metadata: of the index.
        part: what they are a part of; None if all are there.
    """

    opened: list[T]
    files: tuple[str, ...]
    metadata: dict[str, Any]
    part: str | None


def _present_shards(store: Store, weight_map: Mapping[str, str]) -> set[str]:
    """Check which shards of an index exist."""
    shards = sorted({check_key(shard) for shard in weight_map.values()})
    return set(compress(shards, map_io(lambda shard: exists(store, shard), shards)))


def root_files(store: Store) -> dict[str, Info]:
    """List the files of a folder and its subfolders by key, at most the first ten thousand."""
    return {info.key: info for info in islice(store.list(), _MAX_LISTED)}


def find_assets(infos: Iterable[Info], taken: Iterable[str] = ()) -> tuple[str, ...]:
    """Find the files to keep unchanged: configuration, tokenizer, chat templates, model card, code.

    In a model's folder, which has a `config.json` or `adapter_config.json`, all other small text
    files are assets, too.
    """
    infos, used = list(infos), frozenset(taken)
    model = any(i.key in ("config.json", "adapter_config.json") for i in infos)
    return tuple(
        i.key
        for i in infos
        if i.size <= _MAX_NBYTES
        and i.key not in used
        and not _NO_ASSET.fullmatch(i.key)
        and (_ASSET.fullmatch(i.key) or (model and _TEXT_FILE.fullmatch(i.key)))
    )


def check_downloaded(store: Store, error: UcformatError | None = None, file: str = "") -> None:
    """Check that files that cannot be opened are not pointers of Git LFS, which was not asked to download them.

    Args:
        file: the name of the file that was to be opened, if it is no index (default: all of the
            folder).
    """
    try:
        infos = [store.info(file)] if file else list(root_files(store).values())
        small = [i for i in infos if len(_POINTER) <= i.size <= _MAX_POINTER][:_MAX_POINTERS]
        pointers = [i.key for i in small if store.read(i.key, 0, len(_POINTER)) == _POINTER]
    except UcformatError:  # plain HTTP, which has no folders
        return
    if pointers:
        raise MissingData(
            f"{store.url} holds pointers of Git LFS instead of files: "
            f"{first_names(pointers, _MAX_NAMED)}",
            hint="`git lfs install && git lfs pull` in the clone downloads the files themselves",
        ) from error


def file_assets(store: Store, key: str) -> tuple[str, ...]:
    """The assets of a single file that is opened by its name: of an adapter its configuration."""
    return (_ADAPTER,) if key.startswith("adapter_model.") and exists(store, _ADAPTER) else ()


def check_described(store: Store) -> None:
    """Check that no folder has files of DCP's ranks without the file that describes them."""
    keys = root_files(store)
    folders = sorted({key.rpartition("/")[0] for key in keys if key.endswith(".distcp")})
    for folder in folders:
        if (f"{folder}/.metadata" if folder else ".metadata") not in keys:
            where = f"{store.url}/{folder}" if folder else store.url
            raise MissingData(
                f"{where} has files of ranks, and no .metadata, which describes them",
                hint=(
                    "the save did not finish, or the file was not copied: its name begins with "
                    "a dot"
                ),
            )


def read_json(store: Store, key: str) -> Any:
    """Read a JSON document of at most 64 MiB."""
    size = store.info(key).size
    if size > _MAX_NBYTES:
        raise IntegrityError(
            f"{key} has {size:,} bytes, more than {_MAX_NBYTES:,}",
            hint="it is not the document that its name implies",
        )
    try:
        return json.loads(store.read(key).decode())
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{key} is not JSON ({error})") from error


def read_weight_map(store: Store, key: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Read an index of Hugging Face (`….index.json`).

    Returns:
        the file name of each tensor's shard, by tensor; and the metadata of the index.
    """
    index = read_json(store, key)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(v, str) for v in weight_map.values())
    ):
        raise IntegrityError(
            f"{key} has no usable `weight_map`, which gives the file of each tensor"
        )
    metadata = index.get("metadata")
    return weight_map, metadata if isinstance(metadata, dict) else {}


_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<total>\d{5,})(?P<suffix>\.\w+)")
_MAX_NAMED = 5
_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER = 1024  # bytes; such files have about 130
_MAX_POINTERS = 100  # files that are read to find them


def parse_shard_name(name: str) -> tuple[str, int, int] | None:
    """Parse the name of a shard.

    Returns:
        for `model-00002-of-00003.bin`, `("model-*-of-00003.bin", 2, 3)`: what the names of all
        shards share, the number of this one from 1, and how many there are; None if it is not the
        name of a shard.
    """
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return None
    return (
        f"{match['stem']}-*-of-{match['total']}{match['suffix']}",
        int(match["number"]),
        int(match["total"]),
    )


def complete_shards(names: Sequence[str], *, part: bool = False) -> list[str]:
    """Check that all shards of a set are present.

    Args:
        names: the names of a set's files, in any order; a single file need not be named as a shard.
    """
    if not names or parse_shard_name(names[0]) is None:
        return list(names)
    by_number, example, total = {}, "", 0
    for name in names:
        if parsed := parse_shard_name(name):
            by_number[parsed[1]], example, total = name, name, parsed[2]
    # The total is text in a file's name and may be any number, so do not count up to it.
    missing = [
        n for n in range(1, min(total, len(by_number) + _MAX_NAMED) + 1) if n not in by_number
    ]
    if (missing or len(by_number) != total) and not (part and missing):
        match = _NUMBERED.fullmatch(example)
        first = missing[0] if missing else 0
        name = (
            f"{match['stem']}-{first:05d}-of-{match['total']}{match['suffix']}"
            if match and missing
            else example
        )
        problem = "is missing" if missing else "does not belong to them"
        raise MissingData(
            f"{name} {problem}: {len(by_number)} of {total} shards are there",
            hint=f"copy all shards; each contains other tensors. {_part_hint()}",
        )
    return [by_number[n] for n in sorted(by_number)]


def file_sets(names: Iterable[str], index: str) -> dict[str, FileSet]:
    """Group the files of a folder into checkpoints.

    Returns:
        the files of each checkpoint, by the name of its index or only file, or what the names of
        its shards share.
    """
    names = list(names)
    sets: dict[str, FileSet] = {n: ([], n) for n in names if n.endswith(index)}
    stems = {n.removesuffix(index) for n in sets}
    for name in names:
        common = parse_shard_name(name) or (name, 1, 1)
        # otherwise, the index names its files
        if name not in sets and common[0].rpartition("-*-of-")[0] not in stems:
            sets.setdefault(common[0], ([], None))[0].append(name)
    return sets


def _check_index(
    weight_map: Mapping[str, str], index: str, present: Collection[str], *, part: bool
) -> list[str]:
    """The keys of the shards that are there, sorted; unless `part`, all must be."""
    shards = []
    for shard in dict.fromkeys(weight_map.values()):
        if shard in present:
            shards.append(shard)
        elif not (part and present):
            names = [n for n, s in weight_map.items() if s == shard]
            raise MissingData(
                f"{shard} is missing: according to {index}, it contains {_some(names)}",
                hint=(
                    "copy all shards that the index names; each contains other tensors. "
                    f"{_part_hint()}"
                ),
            )
    return sorted(shards)


def _part_of_set(
    keys: Sequence[str], weight_map: Mapping[str, str], index: str | None
) -> str | None:
    """What files are a part of: the shards that an index, or their own names, count; None if all are there.

    Args:
        weight_map: the file name of each tensor's shard, by tensor; empty without an index.
    """
    numbered = parse_shard_name(keys[0]) if keys and len(keys) > 1 else None
    total = len(set(weight_map.values())) if index else numbered[2] if numbered else len(keys)
    return (
        f"{len(keys)} of the {total} files of {index or 'a model'}" if len(keys) < total else None
    )


def _part_hint() -> str:
    return f"To open those that are there, as a part: {option_text('part', 'True', 'true')}"


def _check_shards(
    weight_map: Mapping[str, str], index: str, shards: Mapping[str, Collection[str]]
) -> None:
    """Check that an index and its shards list the same tensors."""
    listed: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        listed.setdefault(shard, set()).add(name)
    for shard, names in shards.items():
        expected = listed[shard]
        if lost := sorted(expected - set(names)):
            raise MissingData(
                f"{shard} lacks {_some(lost)}, which it contains according to {index}",
                hint=(
                    "files of different saves are mixed in one folder, or the index is another "
                    "model's"
                ),
            )
        if further := sorted(set(names) - expected):
            elsewhere = (
                f", which should be in {weight_map[further[0]]}" if further[0] in weight_map else ""
            )
            raise IntegrityError(
                f"{shard} contains {_some(further)}{elsewhere}, but {index} does not list it there",
                hint=(
                    "files of different saves are mixed in one folder, or the index is another "
                    "model's"
                ),
            )


def _some(names: list[str]) -> str:
    return first_names(map(reprlib.repr, names), _MAX_NAMED)
