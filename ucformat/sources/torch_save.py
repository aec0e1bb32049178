"""Files of `torch.save`, read in place: state dicts of modules and optimizers, alone or in a dictionary.

A file contains `model.state_dict()` itself, or `{"model": …, "optimizer": …, "epoch": 3}` with any
keys, or what Lightning writes (`state_dict`, `optimizer_states`). A module's state dict is
recognised by its values: mostly tensors by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UnsupportedError, UsageError, first_names
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import CheckpointMetadata, IntKey
from ucformat.reading.stand_ins import Inert, LocalPart, StoredTensor
from ucformat.reading.values import to_json
from ucformat.sources.index import IndexedSource, TensorIndex
from ucformat.sources.model_files import BIN_INDEX, complete_shards, file_sets
from ucformat.sources.parts import part_by_content, part_by_shapes, parts_of_one
from ucformat.sources.pickle.allowed import PARTS
from ucformat.sources.pickle.file import TorchFile, TorchZip
from ucformat.sources.pickle.optimizer import Module, Optimizer, add_optimizer, is_optimizer
from ucformat.sources.registry import all_sources

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.reading.readable import FileRecord, StatePath
    from ucformat.sources.model_files import FileSet, ModelFiles

_MAX_DEPTH = 3  # levels below the top at which state dicts are looked for
_MAX_NODES = 5_000_000
_MAIN_NAMES = ("model", "state_dict", "model_state_dict", "module", "net")
_REMOVED = object()


@dataclass(slots=True)
class Parts:
    """The state dicts of a file by path (`""`: the whole file), and everything else in `rest`.

    `places` has the same paths with keys and positions; None if a key is neither text nor an
    integer.
    """

    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    places: dict[str, StatePath | None] = field(default_factory=dict)
    rest: Any = None

    @property
    def main(self) -> str | None:
        """The path of the module whose names have no prefix: the only one, or the only one with a usual name."""
        if len(self.modules) == 1:
            return next(iter(self.modules))
        usual = [path for path in self.modules if path in _MAIN_NAMES]
        if len(usual) != 1:
            return None
        other_prefixes = tuple(f"{path}." for path in self.modules if path != usual[0])
        return (
            None
            if any(name.startswith(other_prefixes) for name in self.modules[usual[0]])
            else usual[0]
        )

    def prefixes(self) -> Iterator[tuple[str, str]]:
        """The path of each module, the main one first, and the prefix of its names."""
        main = self.main
        for path in sorted(self.modules, key=lambda p: p != main):
            yield path, "" if path == main else f"{path}."


def _is_module(value: Any) -> bool:
    """Whether it is a module's state dict: mostly tensors by name, at least one with dims and not of integers."""
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        return False
    tensors = [v for v in value.values() if isinstance(v, StoredTensor)]
    return (
        2 * len(tensors) >= len(value)
        and any(t.shape and not t.dtype.startswith(("bool", "int", "uint")) for t in tensors)
        and not any(
            isinstance(v, dict | list | tuple) and not k.endswith("_extra_state")
            for k, v in value.items()
        )
    )


def _find_parts(value: Any) -> Parts:
    """Split the value of a file into state dicts and the rest."""
    parts = Parts()
    walk = _Walk(parts)
    rest = walk.prune(value, "", (), 0)
    parts.rest = {} if rest is _REMOVED else rest
    # tensors among too many values to be recognised as a state dict
    if not parts.modules and isinstance(value, dict):
        tensors = {
            k: v for k, v in value.items() if isinstance(k, str) and isinstance(v, StoredTensor)
        }
        if _is_module(tensors):
            parts.modules[""], parts.places[""] = tensors, ()
            parts.rest = {k: v for k, v in parts.rest.items() if k not in tensors}
    return parts


class _Walk:
    """Removes state dicts from nested dictionaries and lists; values may be shared, or contain themselves."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.nodes = parts, 0

    def prune(self, value: Any, path: str, place: StatePath | None, depth: int) -> Any:
        """The value without the state dicts in it; `_REMOVED` if nothing of it is left."""
        if not isinstance(value, dict | list):
            return value
        self.nodes += len(value)
        if self.nodes > _MAX_NODES:
            raise UnsupportedError("the file holds too many values to be a checkpoint")
        if isinstance(value, dict) and is_optimizer(value):
            self.parts.optimizers[path or "optimizer"] = value
            self.parts.places[path or "optimizer"] = place
            return self._unless_empty(
                {k: v for k, v in value.items() if k not in ("state", "param_groups")}
            )
        if isinstance(value, dict) and _is_module(value):
            self.parts.modules[path] = {
                k: v for k, v in value.items() if isinstance(v, StoredTensor)
            }
            self.parts.places[path] = place
            return self._unless_empty(
                {k: v for k, v in value.items() if not isinstance(v, StoredTensor)}
            )
        if depth == _MAX_DEPTH:
            return value
        if isinstance(value, list):
            items: list[Any] = [
                self.prune(v, _joined(path, i), None if place is None else (*place, i), depth + 1)
                for i, v in enumerate(value)
            ]
            all_removed = items and all(v is _REMOVED for v in items)
            return _REMOVED if all_removed else [None if v is _REMOVED else v for v in items]
        pruned = {
            k: self.prune(v, _joined(path, k), _below(place, k), depth + 1)
            for k, v in value.items()
        }
        left = {k: v for k, v in pruned.items() if v is not _REMOVED}
        return left if left or not pruned else _REMOVED

    @staticmethod
    def _unless_empty(rest: dict[Any, Any]) -> Any:
        return rest or _REMOVED


def _joined(path: str, part: object) -> str:
    return f"{path}.{part}" if path else str(part)


def _below(place: StatePath | None, key: Any) -> StatePath | None:
    """The place of an item of a dictionary."""
    if place is None or type(key) not in (str, int):
        return None
    return (*place, IntKey(key) if isinstance(key, int) else key)


_STEPS = ("global_step", "step", "iteration")
_STATE_DICT_HINT = "save the state dict instead: torch.save(model.state_dict(), path)"


class OpenTorchSave(IndexedSource):
    """An opened file of torch.save, or the shards of one model; `part` as in `OpenSource`."""

    kind = "torch_save"

    def __init__(
        self,
        model: ModelFiles,
        allow: tuple[str, ...],
        groups: Mapping[str, Sequence[Sequence[str]]],
    ) -> None:
        self.store, self.contents = model.store, TensorIndex()
        opened = model.open(lambda key: TorchFile(model.store, key, allow=(*allow, PARTS)), _flat)
        files, self.part = opened.opened, opened.part
        self._keys = [file.key for file in files]
        aliases: dict[str, str] = {}
        objects: dict[str, Any] = {}
        if opened.metadata:
            objects["index"] = to_json(opened.metadata)
        engine, step = {"name": "pytorch"}, None
        if len(files) > 1 or model.index is not None or self.part:
            for file in files:
                aliases |= _add_module(_flat(file), "", (), file, self.contents)
        else:
            (file,) = files
            local, content = _take_local(file), part_by_content(file.value)
            self.part = local if local or content is None else content
            parts = _parts(file)
            stored: dict[StoredTensor, str] = {}
            for path, prefix in parts.prefixes():
                place = parts.places[path]
                aliases |= _add_module(
                    parts.modules[path], prefix, place, file, self.contents, stored
                )
            objects |= self._values(file, parts, groups)
            engine, step = _engine(file.value), _step(file.value)
            if self.part is None:
                self.part = part_by_shapes(
                    model.store, {k.name: i.shape for k, i in self.contents.infos.items()}
                )
        self.metadata = CheckpointMetadata(
            tensor_list=self.contents.tensor_list(),
            unreadable=self.contents.unreadable,
            aliases=aliases,
            objects=objects,
            assets=tuple(model.assets),
            groups=tuple(group.json() for group in self.contents.groups),
            paths=self.contents.paths,
            places=tuple(self.contents.places),
            step=step,
            engine=engine,
            files=opened.files,
            folder=model.folder,
        )

    def _values(
        self, file: TorchFile, parts: Parts, groups: Mapping[str, Sequence[Sequence[str]]]
    ) -> dict[str, Any]:
        """Add the optimizers; return everything that is not a state dict as JSON."""
        main = parts.main
        modules = [
            Module.of(
                {n: (t.dtype, t.shape) for n, t in parts.modules[path].items()},
                prefix,
                main=path == main,
            )
            for path, prefix in parts.prefixes()
        ]
        unnamed = []
        for path, value in parts.optimizers.items():
            optimizer = Optimizer.parse(value, path, file, parts.places[path])
            if not add_optimizer(optimizer, modules, self.contents, groups.get(path)):
                unnamed.append(path)
        objects = self.contents.json_of(file, parts.rest, exact=True)
        if not isinstance(objects, dict) or "$dict" in objects:
            objects = {"value": objects}
        return {**objects, **({"unnamed": unnamed} if unnamed else {})}

    def records(self) -> Iterator[FileRecord]:
        """List every record of the zip files."""
        for key in self._keys:
            yield from TorchZip(self.store, key).records()


def _add_module(
    tensors: Mapping[str, StoredTensor],
    prefix: str,
    place: StatePath | None,
    file: TorchFile,
    contents: TensorIndex,
    stored: dict[StoredTensor, str] | None = None,
) -> dict[str, str]:
    """Add the tensors of a state dict; one at the same location as an earlier one becomes its alias."""
    first = {} if stored is None else stored
    aliases = {}
    for name, tensor in tensors.items():
        if (
            # Tensors without elements may be at one location without being tied.
            tensor.size
            and tensor.readable
            and first.setdefault(tensor, prefix + name) != prefix + name
        ):
            aliases[prefix + name] = first[tensor]
        else:
            contents.add_whole(prefix + name, "weight", file, tensor)
        if place is not None:
            key = Key(aliases.get(prefix + name, prefix + name), "weight")
            contents.paths[key] = (*contents.paths.get(key, ()), (*place, name))
    return aliases


def _take_local(file: TorchFile) -> str | None:
    """Replace what is shared by ranks in a file by what its own has; returns what the file is then a part of."""
    local_parts: list[LocalPart] = []
    seen: set[int] = set()
    waiting = [file.value]
    while waiting:
        value = waiting.pop()
        if not isinstance(value, dict | list) or id(value) in seen:
            continue
        seen.add(id(value))
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(item, LocalPart):
                local_parts.append(item)
                value[key] = item.tensor
            else:
                waiting.append(item)
    if any(not part.whole for part in local_parts):
        return "what one rank has of tensors that are sharded over several (DTensor, ShardedTensor)"
    return "" if local_parts else None


def _flat(file: TorchFile) -> dict[str, StoredTensor]:
    """The tensors of a file that is one shard of a module."""
    if not isinstance(file.value, dict) or not all(
        isinstance(n, str) and isinstance(t, StoredTensor) for n, t in file.value.items()
    ):
        raise IntegrityError(
            f"{file.key} is one of several shards, and holds something other than tensors by name"
        )
    return file.value


def _parts(file: TorchFile) -> Parts:
    """The parts of a file, which must contain a state dict."""
    if isinstance(file.value, Inert):
        raise UnsupportedError(
            f"{file.key} holds a whole {file.value.name}, not a state dict", hint=_STATE_DICT_HINT
        )
    parts = _find_parts(file.value)
    if not parts.modules and not parts.optimizers:
        raise UsageError(
            f"{file.key} holds no state dict of a module or an optimizer", hint=_STATE_DICT_HINT
        )
    return parts


def _step(value: Any) -> int | None:
    values = (value.get(k) for k in _STEPS) if isinstance(value, dict) else ()
    return next((n for n in values if type(n) is int), None)


def _engine(value: Any) -> dict[str, str]:
    programs = (s.program(value) for s in all_sources()) if isinstance(value, dict) else ()
    return next(filter(None, programs), {"name": "pytorch"})


_RANK_FILE = re.compile(r"consolidated\.(\d+)\.pth")


def choose_files(names: Sequence[str], url: str, *, part: bool = False) -> FileSet:
    """Choose the checkpoint among the files of a folder.

    Returns:
        the files, and the key of their index or None.
    """
    parts = [n for n in names if _RANK_FILE.fullmatch(n)]
    if len(parts) > 1:
        raise UnsupportedError(
            f"{url} holds a model sharded across {len(parts)} ranks ({parts[0]} to {parts[-1]}), "
            "and no file says how",
            hint=(
                "convert it with the tool of its authors (for Llama: transformers' "
                "convert_llama_weights_to_hf.py)"
            ),
        )
    sets = file_sets(names, BIN_INDEX)
    usual = [n for n in sets if n.startswith("pytorch_model") or n == "adapter_model.bin"]
    chosen = list(sets) if len(sets) == 1 else usual
    if len(chosen) != 1:
        if (error := parts_of_one(sets, url)) is not None:
            raise error
        raise UsageError(
            f"{url} holds several files of torch.save: {first_names(sets, 10)}",
            hint=f"open one of them: {url}/{next(iter(sets))}",
        )
    files, index = sets[chosen[0]]
    return complete_shards(files, part=part), index
