"""Files of `torch.save`, read in place: state dicts of modules and optimizers, alone or in a dictionary."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, Refused, UsageError
from ucformat.facts import Facts
from ucformat.sources.contents import Contents
from ucformat.sources.deepspeed.folder import is_model_or_optimizer
from ucformat.sources.model_files import find_assets, present, read_weight_map, root_files
from ucformat.sources.options import groups_by_optimizer
from ucformat.sources.shards import check_index, check_shards, complete, numbered
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
    from ucformat.sources.base import Record
    from ucformat.storage.base import Store

__all__ = ["OpenTorchSave", "TorchSave", "choose_files"]

_NAMED = 10
_INDEX = ".bin.index.json"
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pth.tar")
_MODEL = re.compile(r"pytorch_model(-\d{5,}-of-\d{5,})?\.bin|adapter_model\.bin|consolidated\.\d+\.pth")
_CUT = re.compile(r"consolidated\.(\d+)\.pth")
_BESIDE = re.compile(
    r"(training_args|optimizer|scheduler|scaler|sampler|rng_state|random_states|dl_state_dict)[_\d]*\.\w+"
)
_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_STEPS = ("global_step", "step", "iteration")
_WHAT = "save the state dict instead: torch.save(model.state_dict(), path)"


class TorchSave:
    """How files of torch.save are recognised and opened: one by itself, or that of a folder.

    `allow` names packages of your own whose pickled classes become inert stand-ins instead of being refused. `groups`
    gives, by the path of an optimizer's state dict (`optimizer`), the parameters of each of its groups, in order; of
    one optimizer at that path the groups alone do.
    """

    kind = "torch_save"
    title = "torch.save"

    def __init__(
        self,
        *,
        allow: Sequence[str] = (),
        groups: Mapping[str, Sequence[Sequence[str]]] | Sequence[Sequence[str]] | None = None,
    ) -> None:
        self._allow, self._groups = tuple(allow), groups_by_optimizer(groups)

    def marks(self, name: str) -> bool:
        """Whether it is a model's file by its name."""
        return _MODEL.fullmatch(name) is not None or name.endswith((_INDEX, ".ckpt"))

    def find(self, store: Store) -> bool:
        """Whether the folder has a file of torch.save; reads the first bytes of such as may be one by their names."""
        return any(n.endswith(_INDEX) or self.find_file(store, n) for n in _candidates(root_files(store))[:_NAMED])

    def open(self, store: Store) -> OpenTorchSave:
        """Open the one checkpoint of a folder."""
        infos = root_files(store)
        keys, index = choose_files(
            [n for n in _candidates(infos) if n.endswith(_INDEX) or self.find_file(store, n)], store.url
        )
        return OpenTorchSave(store, keys, index, self._allow, self._groups, find_assets(infos.values(), keys))

    def find_file(self, store: Store, key: str) -> bool:
        """Whether it begins as torch's files do, or is called as a model's file."""
        if is_model_or_optimizer(key) or not key.endswith((*_SUFFIXES, _INDEX)):
            return False
        if self.marks(key):
            return True
        return store.read(key, 0, min(len(_LEGACY), store.info(key).size)).startswith((_ZIP, _LEGACY))

    def open_file(self, store: Store, key: str) -> OpenTorchSave:
        """Open a file alone, or an index with the shards that it names."""
        found = numbered(key)
        if found and found[2] > 1:
            raise Refused(
                f"{key} is one of {found[2]} shards of a checkpoint, not a whole one",
                hint="open the folder that it lies in",
            )
        if _CUT.fullmatch(key):
            choose_files([n for n in root_files(store) if _CUT.fullmatch(n)], store.url)
        index = key if key.endswith(_INDEX) else None
        return OpenTorchSave(store, [] if index else [key], index, self._allow, self._groups, (), folder=key)


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


def _candidates(names: Mapping[str, Any]) -> list[str]:
    """The files of a folder that may be its checkpoint, the most likely first."""
    own = [n for n in names if "/" not in n and n.endswith((*_SUFFIXES, _INDEX)) and not _BESIDE.fullmatch(n)]
    return sorted(own, key=lambda n: (not n.endswith(_INDEX), not _MODEL.fullmatch(n), n))


def choose_files(names: Sequence[str], url: str) -> tuple[list[str], str | None]:
    """The files of the one checkpoint, or its index; UsageError where it is not clear which is meant."""
    cut = [n for n in names if _CUT.fullmatch(n)]
    if len(cut) > 1:
        raise Refused(
            f"{url} holds a model cut over {len(cut)} ranks ({cut[0]} to {cut[-1]}), and no file says how",
            hint="convert it with the tool of its makers (for Llama: transformers' convert_llama_weights_to_hf.py)",
        )
    indexes = [n for n in names if n.endswith(_INDEX)]
    stems = {n.removesuffix(_INDEX) for n in indexes}
    sets: dict[str, list[str]] = {n: [] for n in indexes}
    for name in (n for n in names if n not in sets):
        found = numbered(name)
        common = found[0] if found else name
        if common.rpartition("-*-of-")[0] not in stems:
            sets.setdefault(common, []).append(name)
    usual = [n for n in sets if n.startswith("pytorch_model") or n == "adapter_model.bin"]
    chosen = list(sets) if len(sets) == 1 else usual
    if len(chosen) != 1:
        more = f" and {len(sets) - _NAMED} more" if len(sets) > _NAMED else ""
        raise UsageError(
            f"{url} holds several files of torch.save: {', '.join(list(sets)[:_NAMED])}{more}",
            hint=f"open the one that is meant: {url}/{next(iter(sets))}",
        )
    files = sets[chosen[0]]
    if not files:
        return [], chosen[0]
    return (complete(files) if numbered(files[0]) else files), None


def _step(value: Any) -> int | None:
    found = (value.get(k) for k in _STEPS) if isinstance(value, dict) else ()
    return next((n for n in found if type(n) is int), None)


def _engine(value: Any) -> dict[str, str]:
    version = value.get("pytorch-lightning_version") if isinstance(value, dict) else None
    return {"name": "pytorch"} if version is None else {"name": "lightning", "version": str(version)}
