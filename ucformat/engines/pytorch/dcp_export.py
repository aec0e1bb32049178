"""Checkpoints of torch.distributed.checkpoint (DCP), as `dcp.load`, FSDP2 programs and torchtitan load them.

Entries have the names under which the source's program kept them, if they are recorded. Otherwise
they are those of the state `{"model": get_model_state_dict(…), "optim":
get_optimizer_state_dict(…)}` and of the values beside it.
"""

from __future__ import annotations

import struct
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from ucformat.engines.pytorch.export_options import HYPER
from ucformat.errors import UnsupportedError
from ucformat.exporters.base import Span, Target, left_out
from ucformat.exporters.distcp import ItemFiles, TensorEntry, ValueEntry, save_id_of
from ucformat.exporters.pickle import SavedTensor, Storage
from ucformat.exporters.values import constant, key_of, value_of
from ucformat.geometry.box import row_major
from ucformat.geometry.tensor import Key, Piece
from ucformat.reading.readable import IntKey
from ucformat.reading.state_names import GROUPS, dotted
from ucformat.reading.values import is_special

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.engines.pytorch.export_options import DcpOptions
    from ucformat.exporters.distcp import Entry
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.readable import GroupPlace, StatePath

_PARAMETER = ("weight", "master")
_PLAIN = ("params", "state")  # keys of a group that are not hyper-parameters


def plan_target(source: Checkpoint, infos: Sequence[TensorInfo], options: DcpOptions) -> Target:
    """Plan the files of a DCP checkpoint."""
    state = _DcpEntries(source, infos, options)
    items = ItemFiles(state.entries.values(), options, state.aliases)
    metadata = items.metadata(state.paths, save_id_of(source, infos, options))
    # All values count as exported here, since `state.left` names those that are not.
    not_exported = left_out(source, state.kept, values=source.objects, groups=True)
    return Target((*items.files(), metadata), (*not_exported, *state.left))


def elements(info: TensorInfo, box: Box) -> Storage:
    """The elements of a box of a tensor."""
    pieces = ((info, Piece(box, 0, row_major(box.shape))),) if box.size else ()
    return Storage(Span(info.dtype, box.size, pieces))


class _DcpEntries:
    """The entries of the program's state."""

    def __init__(
        self, source: Checkpoint, infos: Sequence[TensorInfo], options: DcpOptions
    ) -> None:
        self.entries: dict[str, Entry] = {}
        self.paths: dict[str, StatePath] = {}
        self.aliases: dict[str, str] = {}
        self.kept: list[TensorInfo] = []
        self.left: list[str] = []
        self._source, self._options = source, options
        self._infos = {info.key: info for info in infos}
        keys = (options.model_key, options.optimizer_key)
        keys_given = options.flat_optimizer or any(key is not None for key in keys)
        self._recorded: Mapping[Key, tuple[StatePath, ...]] = (
            {} if keys_given else source.metadata.paths
        )
        self._model = _path("model" if options.model_key is None else options.model_key)
        self._optimizer = _path("optim" if options.optimizer_key is None else options.optimizer_key)
        self._beside = _beside_model(source.metadata.paths) if keys_given else set()
        values = list(_leaves(source.objects, (), _lists(source.metadata.paths)))
        references = {d["$ref"] for _, d in values if _is(d, "$ref")}
        self._referenced = set() if self._recorded else references
        self._add_tensors()
        self._add_aliases()
        for path, data in values:
            self._add_value(path, data)
        self._add_groups()

    def _put(self, path: StatePath, entry: Entry) -> None:
        if entry.name in self.entries:
            raise UnsupportedError(
                f"two entries of the target would be {entry.name}",
                hint="rename one by a view, or choose other keys: --model-key, --optimizer-key",
            )
        self.entries[entry.name], self.paths[entry.name] = entry, _as_flattened(path)

    def _add_tensors(self) -> None:
        for key, info in self._infos.items():
            paths = self._paths_of(key)
            if paths is None:
                continue
            self.kept.append(info)
            if not paths:  # it is written where a value refers to it
                continue
            self._put(paths[0], _entry(dotted(paths[0]), info))
            for path in paths[1:]:
                self._alias(path, dotted(paths[0]))

    def _paths_of(self, key: Key) -> Sequence[StatePath] | None:
        """The paths of a tensor; None if it has no place."""
        name, state = key
        if key in self._recorded:
            return self._recorded[key]
        if key in self._beside:
            return self._source.metadata.paths[key]
        if state.endswith(".padding"):
            return None
        if state == "weight" and name in self._referenced:
            return ()
        if state == "weight" or (state == "master" and Key(name, "weight") not in self._infos):
            return ((*self._model, name),)
        return (self._state_path(name, state),)

    def _state_path(self, name: str, state: str) -> StatePath:
        if self._options.flat_optimizer:
            return (*self._optimizer, f"state.{name}.{state}")
        return (*self._optimizer, "state", name, state)

    def _alias(self, path: StatePath, stored: str) -> None:
        name = dotted(path)
        if name not in self.entries and name not in self.aliases:
            self.aliases[name], self.paths[name] = stored, _as_flattened(path)

    def _add_aliases(self) -> None:
        """The further names of tied weights, which a model's state dict lists, too."""
        for alias, stored in self._source.aliases.items():
            name = dotted((*self._model, stored))
            if name in self.entries and not self._recorded:
                self._alias((*self._model, alias), name)

    def _add_value(self, path: StatePath, data: Any) -> None:
        name = dotted(path)
        try:
            value = value_of(data, self._referred)
            if isinstance(value, SavedTensor) and _is(data, "$tensor"):
                self._put(path, _constant(name, value))
            elif _is(data, "$ref"):
                self._put(path, _entry(name, self._referred(data["$ref"])))
            else:
                self._put(path, ValueEntry(name, value))
        except UnsupportedError as error:
            if name in self.entries:
                raise
            self.left.append(f"the value {name}: {error.message}")

    def _referred(self, name: str) -> TensorInfo:
        info = self._infos.get(Key(name, "weight"))
        if info is None:
            raise UnsupportedError(f"it holds the tensor {name}, which is not exported")
        return info

    def _add_groups(self) -> None:
        metadata = self._source.metadata
        trained = {key.name for key in self._infos if key.state not in _PARAMETER}
        if not metadata.groups:
            if trained and not self._recorded:  # readers recognize an optimizer by its groups
                stored = dict.fromkeys(key.name for key in self._infos)
                names = [name for name in stored if name in trained]
                self._add_group(self._optimizer, 0, {"params": names}, {}, None)
            return
        if not trained and any(key.state not in _PARAMETER for key in self._source.tensors):
            self.left.append("the optimizer groups")
            return
        numbers: dict[StatePath, int] = {}
        for index, group in enumerate(metadata.groups):
            place = metadata.places[index] if self._recorded and metadata.places else None
            if place is None and self._recorded:
                continue  # its entries are values
            root = self._optimizer if place is None else place.path
            number = numbers[root] = numbers.get(root, -1) + 1
            options = {k: v for k, v in group.items() if k not in _PLAIN}
            if place is None:
                options = self._completed(options, group["params"])
                self._add_steps(group, trained)
            self._add_group(root, number, group, options, place)

    def _completed(self, options: dict[str, Any], params: Sequence[str]) -> dict[str, Any]:
        """With the further hyper-parameters of the class, if the states are Adam's."""
        if isinstance(betas := options.get("betas"), list):
            options["betas"] = {"$tuple": betas}
        if not any(Key(name, "exp_avg_sq") in self._infos for name in params):
            return options
        defaults = dict(HYPER[self._options.optimizer])
        defaults["amsgrad"] = any(Key(name, "max_exp_avg_sq") in self._infos for name in params)
        return options | {k: v for k, v in defaults.items() if k not in options}

    def _add_steps(self, group: Mapping[str, Any], trained: set[str]) -> None:
        """Add the step of each parameter as a tensor, where the source has a number for the group."""
        step = (group.get("state") or {}).get("step", group.get("step"))
        for name in group["params"]:
            path = self._state_path(name, "step")
            mine = step.get(name) if isinstance(step, dict) and not is_special(step) else step
            if name not in trained or dotted(path) in self.entries or mine is None:
                continue
            value = value_of(mine, self._referred)
            if type(value) in (int, float):
                value = constant("float32", (), struct.pack("<f", value))
            if isinstance(value, SavedTensor):
                self._put(path, _constant(dotted(path), value))

    def _add_group(
        self,
        root: StatePath,
        number: int,
        group: Mapping[str, Any],
        options: dict[str, Any],
        place: GroupPlace | None,
    ) -> None:
        names = group["params"] if place is None else place.names
        if self._options.flat_optimizer if place is None else place.flattened:
            for name in names:
                for key, value in options.items():
                    self._add_value((*root, f"{GROUPS}.{name}.{key}"), value)
            return
        values = {"params": list(names), **options}
        for path, value in _leaves(values, (*root, GROUPS, number), set()):
            self._add_value(path, value)


def _as_flattened(path: StatePath) -> StatePath:
    """The path as DCP's planner records it, with texts for integers that are keys."""
    return tuple(str(part) if isinstance(part, IntKey) else part for part in path)


def _path(key: str) -> tuple[str, ...]:
    return (key,) if key else ()


def _entry(name: str, info: TensorInfo) -> TensorEntry:
    return TensorEntry(name, info.dtype, info.shape, partial(elements, info), str(info.key))


def _constant(name: str, value: SavedTensor) -> TensorEntry:
    storage = value.storage
    return TensorEntry(name, storage.span.dtype, value.shape, lambda _: storage, name, whole=True)


def _is(data: Any, form: str) -> bool:
    return isinstance(data, dict) and set(data) == {form}


def _beside_model(paths: Mapping[Key, tuple[StatePath, ...]]) -> set[Key]:
    """The tensors that their names, which are paths, show outside of model and optimizers."""
    weights = [key for key in paths if key.state == "weight"]
    named = {key for key in weights if dotted(paths[key][0]) == key.name}
    return named if len(named) < len(weights) else set()


def _lists(paths: Mapping[Key, tuple[StatePath, ...]]) -> set[StatePath]:
    """The paths of lists that contain tensors."""
    every = chain(*paths.values())
    return {path[:i] for path in every for i, part in enumerate(path) if type(part) is int}


def _leaves(data: Any, path: StatePath, lists: set[StatePath]) -> Iterator[tuple[StatePath, Any]]:
    """The values that DCP saves as entries, since it flattens dictionaries and lists of them."""
    if _is(data, "$dict"):
        for key, inner in data["$dict"]:
            yield from _leaves(inner, (*path, str(key)), lists)
    elif not isinstance(data, str | list) and hasattr(data, "items") and not is_special(data):
        for text, inner in data.items():
            key = key_of(text)
            yield from _leaves(inner, (*path, key if path in lists else str(key)), lists)
    elif isinstance(data, list) and _is_flattened(data):
        for i, inner in enumerate(data):
            yield from _leaves(inner, (*path, i), lists)
    else:
        yield path, data


def _is_flattened(data: list[Any]) -> bool:
    return any(
        (isinstance(v, dict) and (not is_special(v) or _is(v, "$tensor") or _is(v, "$ref")))
        or (isinstance(v, list) and _is_flattened(v))
        for v in data
    )
