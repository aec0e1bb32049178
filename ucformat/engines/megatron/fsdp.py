"""Megatron-FSDP's checkpoints (format `fsdp_dtensor`), read in place: a PyTorch DCP checkpoint with Megatron's state.

`model` has the parameters by name, perhaps with `module.` of the wrappers in front; `optimizer` has
`state` by such names, and in `param_to_group_meta` the hyper-parameters of each parameter; `args`,
`iteration` and others are values. Both halves of a gated projection are stored separately, under
`…_w` and `…_v`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ucformat.engines.megatron.folder import Arguments, built_by_megatron
from ucformat.engines.megatron.names import MASTER, split_half, unwrapped
from ucformat.engines.megatron.stacked import StackedTensor, UnstackedPart, add_tensor, unstacked
from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.geometry.tensor import Key, TensorList
from ucformat.reading.readable import CheckpointMetadata, LazyMapping, LazySequence
from ucformat.sources.distcp.metadata import Items
from ucformat.sources.distcp.opened import nested_objects, plain_value, shared_value
from ucformat.sources.index import Group, TensorIndex
from ucformat.sources.pickle.stand_ins import OpaqueFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucformat.engines.megatron.folder import MegatronFolder, MegatronOptions
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent
    from ucformat.reading.readable import FileRecord
    from ucformat.sources.distcp.metadata import Metadata
    from ucformat.storage.base import Store

_OPTIMIZER, _STATE, _GROUP = "optimizer", "state", "param_to_group_meta"
_OWN = ("args", "iteration")

Path = tuple[Any, ...]


def is_fsdp(meta: Metadata) -> bool:
    """Whether a DCP checkpoint has the state of Megatron-FSDP, and not another program's."""
    roots = {path[0] for path in meta.paths.values()}
    return "model" in roots and (
        "checkpoint_version" in roots or any(_split(p, _GROUP) for p in meta.paths.values())
    )


def _split(path: Path, part: str) -> tuple[str, Path] | None:
    """The parameter of an optimizer's entry below `state` or `param_to_group_meta`, and the rest of its path."""
    if path[0] != _OPTIMIZER or part not in path[1:3]:
        return None
    at = path.index(part, 1)
    return (unwrapped(str(path[at + 1])), path[at + 2 :]) if len(path) > at + 2 else None


class OpenFsdp:
    """One opened checkpoint of Megatron-FSDP."""

    kind = "megatron"

    def __init__(
        self, store: Store, place: MegatronFolder, meta: Metadata, how: MegatronOptions
    ) -> None:
        self.store, self._items = store, Items(store, meta, how.allow)
        found = self._read([name for name in _OWN if name in meta.values])
        self.args = Arguments.of(found.get("args"), how.vocab_size, meta.file)
        self.contents = TensorIndex()
        self._values: dict[str, Path] = {}
        self._options: dict[str, tuple[str, str]] = {}
        self._plain: dict[str, tuple[str, str]] = {}
        self._sort_values(meta)
        self._fill(meta, optimizer=how.optimizer)
        guarded = built_by_megatron(store.url)
        groups: LazySequence[Mapping[str, Any]] = LazySequence(guarded(self._groups))
        numbers = LazyMapping(
            lambda: {name: i for i, group in enumerate(groups) for name in group["params"]}
        )
        degrees = {
            axis: self.args.degree(f"{name}_model_parallel_size") for axis, name in _DEGREES.items()
        }
        step = found.get("iteration")
        self.metadata = CheckpointMetadata(
            tensor_list=TensorList(self.contents.tensor_list().tensors, numbers),
            groups=groups,
            objects=LazyMapping(guarded(self._objects)),
            aliases=self._aliases(),
            step=step if type(step) is int else None,
            layout={axis: n for axis, n in degrees.items() if n is not None},
            engine={"name": "megatron-core", "format": "fsdp_dtensor"},
            files=(*filter(None, [place.tracker]), meta.file, *meta.files),
            save_id=meta.save_id,
            folder=place.folder,
        )

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """Where the bytes of a tensor are; opens the items that hold them, if they are not yet open."""
        return self.contents.extents(key, within, self.store.url)

    def records(self) -> Iterator[FileRecord]:
        """Every record of the archives of all items."""
        return self._items.records()

    def _read(self, fqns: list[str]) -> dict[str, Any]:
        files = self._items.values(fqns)
        return {
            fqn: None if isinstance(files[fqn], OpaqueFile) else files[fqn].value for fqn in fqns
        }

    def _sort_values(self, meta: Metadata) -> None:
        """Separate hyper-parameters, and states that are no tensors, from all other values."""
        for fqn in meta.values:
            path = meta.paths.get(fqn, (fqn,))
            if (option := _split(path, _GROUP)) is not None:
                self._options[fqn] = (split_half(option[0])[0], ".".join(map(str, option[1])))
            elif (state := _split(path, _STATE)) is not None:
                self._plain[fqn] = (split_half(state[0])[0], ".".join(map(str, state[1])))
            else:
                self._values[fqn] = path

    def _fill(self, meta: Metadata, *, optimizer: bool) -> None:
        """Add every tensor; the two halves of a gated projection become one."""
        parts: dict[Key, dict[int, UnstackedPart]] = {}
        for fqn in meta.tensors:
            path = meta.paths.get(fqn, (fqn,))
            state = _split(path, _STATE)
            if state is not None:
                if not optimizer:
                    continue
                name, kind = state[0], ".".join(map(str, state[1]))
                kind = "master" if kind in MASTER else kind
            elif str(path[0]).startswith("model") and len(path) > 1:
                name, kind = unwrapped(".".join(map(str, path[1:]))), "weight"
            elif path[0] == _OPTIMIZER:
                raise UnsupportedError(
                    f"{meta.file}: {fqn} is an optimizer's tensor that ucformat does not know",
                    hint="leave the optimizer out with the option optimizer=false, and report this checkpoint",
                )
            else:
                name, kind = ".".join(map(str, path)), "weight"
            whole, half = split_half(name)
            key = Key(whole, kind)
            if half in parts.setdefault(key, {}):
                raise IntegrityError(f"{meta.file}: {fqn} and another entry both map to {key}")
            parts[key][half] = UnstackedPart(StackedTensor(self._items, fqn, Key(name, kind)), ())
        for key in sorted(parts, key=lambda key: key.state != "weight"):
            if key.state != "weight" and (weight := Key(key.name, "weight")) not in parts:
                raise IntegrityError(
                    f"{meta.file} has {key}, but no such weight",
                    hint="files of two saves are mixed",
                )
            halves = [parts[key][half] for half in sorted(parts[key])]
            if (
                key.state != "weight"
                and len(halves) == 2
                and _is_whole(halves[0], parts[weight][0])
            ):
                # Megatron splits the moments alone, and saves others whole under both names
                halves = halves[:1]
            tensor = unstacked(key, halves)
            add_tensor(
                self.contents,
                tensor,
                self.args.rows(key.name, tensor.shape[0]) if tensor.shape else 0,
            )

    def _aliases(self) -> dict[str, str]:
        """The tied output layer, if the arguments record one."""
        word, out = (
            Key("embedding.word_embeddings.weight", "weight"),
            Key("output_layer.weight", "weight"),
        )
        tied = self.args.tied and word in self.contents.infos and out not in self.contents.infos
        return {out.name: word.name} if tied else {}

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer groups: parameters with equal hyper-parameters form one."""
        files = self._items.values([*self._options, *self._plain])
        options: dict[str, dict[str, Any]] = {}
        for fqn, (name, option) in self._options.items():
            options.setdefault(name, {})[option] = plain_value(files[fqn], fqn)
        groups: dict[str, Group] = {}
        for name, mine in options.items():
            groups.setdefault(json.dumps(mine, sort_keys=True), Group([], mine)).names.append(name)
        for group in groups.values():
            by_state: dict[str, dict[str, Any]] = {}
            for fqn, (name, state) in self._plain.items():
                if name in set(group.names):
                    by_state.setdefault(state, {})[name] = plain_value(files[fqn], fqn)
            group.state = {state: shared_value(values) for state, values in by_state.items()}
        return [group.json() for group in groups.values()]

    def _objects(self) -> Mapping[str, Any]:
        """All values but hyper-parameters and the optimizer's states, nested as in the program."""
        values = {fqn: path for fqn, path in self._values.items() if fqn != "iteration"}
        return nested_objects(values, self._items.values(values), self._items.meta.paths.values())


_DEGREES = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}


def _is_whole(half: UnstackedPart, weight: UnstackedPart) -> bool:
    """Whether what is stored under the name of one half has the rows of both."""
    return bool(weight.shape) and half.shape[:1] == (2 * weight.shape[0],)
