"""Files of `torch.save`, read in place: state dicts of modules and optimizers, alone or in a dictionary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, Refused, UsageError
from ucformat.reading.facts import Facts
from ucformat.sources.contents import Contents
from ucformat.sources.model_files import present, read_weight_map
from ucformat.sources.shards import check_index, check_shards
from ucformat.sources.stand_ins import Inert, StoredTensor
from ucformat.sources.torch_file import TorchFile
from ucformat.sources.torch_optimizer import Module, Optimizer, add_optimizer
from ucformat.sources.torch_parts import Parts, find_parts
from ucformat.sources.torch_zip import TorchZip
from ucformat.sources.values import to_json
from ucformat.storage.waiting import map_waiting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Key
    from ucformat.reading.readable import Record
    from ucformat.storage.base import Store

__all__ = ["OpenTorchSave"]

_STEPS = ("global_step", "step", "iteration")
_WHAT = "save the state dict instead: torch.save(model.state_dict(), path)"


class OpenTorchSave:
    """One opened file of torch.save, or the shards of one."""

    kind = "torch_save"

    def __init__(
        self,
        store: Store,
        keys: Sequence[str],
        index: str | None,
        allow: tuple[str, ...],
        groups: Mapping[str, Sequence[Sequence[str]]],
        assets: Sequence[str],
        folder: str = "",
    ) -> None:
        self.store, self.contents = store, Contents()
        files, metadata = _open_shards(store, keys, index, allow)
        self._keys = [f.key for f in files]
        aliases: dict[str, str] = {}
        objects: dict[str, Any] = {"index": to_json(metadata)} if metadata else {}
        engine, step = {"name": "pytorch"}, None
        if len(files) > 1 or index is not None:
            for file in files:
                aliases |= _add_module(_flat(file), "", file, self.contents)
        else:
            (file,) = files
            parts = _parts(file)
            stored: dict[StoredTensor, str] = {}
            for path, prefix in parts.prefixes():
                aliases |= _add_module(parts.modules[path], prefix, file, self.contents, stored)
            objects |= self._values(file, parts, groups)
            engine, step = _engine(file.value), _step(file.value)
        self.facts = Facts(
            roster=self.contents.roster(),
            aliases=aliases,
            objects=objects,
            assets=tuple(assets),
            groups=tuple(group.json() for group in self.contents.groups),
            step=step,
            engine=engine,
            files=tuple(([index] if index else []) + self._keys),
            folder=folder,
        )

    def _values(self, file: TorchFile, parts: Parts, groups: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, Any]:
        """The optimizers, and everything that is no state dict as JSON."""
        main = parts.main
        modules = [
            Module.of({n: (t.dtype, t.shape) for n, t in parts.modules[path].items()}, prefix, main=path == main)
            for path, prefix in parts.prefixes()
        ]
        unnamed = []
        for path, value in parts.optimizers.items():
            optimizer = Optimizer.parse(value, path, file)
            if not add_optimizer(optimizer, modules, self.contents, groups.get(path)):
                unnamed.append(path)

        def spill(path: str, tensor: StoredTensor) -> str:
            return self.contents.add_large(path, file, tensor)

        objects = to_json(parts.rest, read=file.read, spill=spill)
        if not isinstance(objects, dict) or "$dict" in objects:
            objects = {"value": objects}
        return {**objects, **({"unnamed": unnamed} if unnamed else {})}

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """Where the bytes of a tensor lie: in one file, as its strides say."""
        return self.contents.extents(key, within, self.store.url)

    def records(self) -> Iterator[Record]:
        """Every record of the zip files."""
        for key in self._keys:
            yield from TorchZip(self.store, key).records()


def _open_shards(
    store: Store, keys: Sequence[str], index: str | None, allow: tuple[str, ...] = ()
) -> tuple[list[TorchFile], dict[str, Any]]:
    """The files, those that the index names where there is one, and what it says besides; both agree."""
    weight_map: dict[str, str] = {}
    metadata: dict[str, Any] = {}
    if index is not None:
        weight_map, metadata = read_weight_map(store, index)
        keys = check_index(weight_map, index, present(store, weight_map))
    files = map_waiting(lambda key: TorchFile(store, key, allow=allow), keys)
    if index is not None:
        check_shards(weight_map, index, {f.key: _flat(f) for f in files})
    return files, metadata


def _add_module(
    tensors: Mapping[str, StoredTensor],
    prefix: str,
    file: TorchFile,
    contents: Contents,
    stored: dict[StoredTensor, str] | None = None,
) -> dict[str, str]:
    """The tensors of a state dict; one that is stored in the same place as an earlier one becomes its alias.

    Returns the aliases. `stored` are the tensors of the same file that were added before.
    """
    first = {} if stored is None else stored
    aliases = {}
    for name, tensor in tensors.items():
        if tensor.size and first.setdefault(tensor, prefix + name) != prefix + name:
            aliases[prefix + name] = first[tensor]
        else:
            contents.add_whole(prefix + name, "weight", file, tensor)
    return aliases


def _flat(file: TorchFile) -> dict[str, StoredTensor]:
    """The tensors of a file that is one shard of a module."""
    if not isinstance(file.value, dict) or not all(
        isinstance(n, str) and isinstance(t, StoredTensor) for n, t in file.value.items()
    ):
        raise IntegrityError(f"{file.key} is one of several shards, and holds something else than tensors by name")
    return file.value


def _parts(file: TorchFile) -> Parts:
    """The parts of a file, which must have a state dict."""
    if isinstance(file.value, Inert):
        raise Refused(f"{file.key} holds a whole {file.value.name}, not a state dict", hint=_WHAT)
    parts = find_parts(file.value)
    if not parts.modules and not parts.optimizers:
        raise UsageError(f"{file.key} holds no state dict of a module or an optimizer", hint=_WHAT)
    return parts


def _step(value: Any) -> int | None:
    found = (value.get(k) for k in _STEPS) if isinstance(value, dict) else ()
    return next((n for n in found if type(n) is int), None)


def _engine(value: Any) -> dict[str, str]:
    version = value.get("pytorch-lightning_version") if isinstance(value, dict) else None
    return {"name": "pytorch"} if version is None else {"name": "lightning", "version": str(version)}
