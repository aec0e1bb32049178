"""DeepSpeed's universal format: what `ds_to_universal.py` and `hf_to_universal.py` wrote, read in place.

A folder (`latest_universal` beside it names it) with `zero/NAME/STATE.pt` for each parameter, see
`atoms`; `zero/optimizer_state.pt`, the rest of the first rank's optimizer file; and copies of the
model states files. These provide the weights (also of frozen parameters and buffers), the tied
names and the shapes.

For names that no optimizer had (buffers, frozen and tied parameters) ZeRO 1 and 2 convert an fp32
copy of the weight; it is omitted, because the weight is stored too. Weights of pipelines and of
experts are in files that the converter does not copy, so only their masters are available.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from ucformat.engines.deepspeed.degrees import ParallelDegrees, models_by_label
from ucformat.engines.deepspeed.folder import TagFiles, list_files
from ucformat.engines.deepspeed.model_states import (
    ModelStates,
    Objects,
    hyper_parameters,
    load_all,
    need,
    stage_of,
    state_of,
)
from ucformat.engines.deepspeed.opened import Merged, tensor_list
from ucformat.engines.deepspeed.resolver import ShardingResolver
from ucformat.engines.deepspeed.zero import Slice, read_weights
from ucformat.errors import IntegrityError, MissingData, UnsupportedError, first_names, option_text
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.geometry.view import BoxPair, View
from ucformat.reading.readable import CheckpointMetadata
from ucformat.reading.stand_ins import StoredTensor
from ucformat.reading.values import shared_value, to_json
from ucformat.schema import ITEMSIZE
from ucformat.sources.index import Group, IndexedSource, TensorIndex
from ucformat.sources.pickle.file import TorchFile, TorchZip
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ucformat.engines.deepspeed.folder import DeepSpeedSourceOptions
    from ucformat.engines.deepspeed.patterns import TensorParallelInfo
    from ucformat.geometry.tensor import Extent
    from ucformat.geometry.tp_sharding import Shapes
    from ucformat.reading.readable import FileRecord
    from ucformat.sources.index import Locate
    from ucformat.storage.base import Store


# The atoms of DeepSpeed's universal format: a small file for each state of each parameter,
# `zero/NAME/STATE.pt`.
#
# What an atom holds depends on who wrote it (DeepSpeed 0.19.8):
#
# - ZeRO 1 and 2, and ZeRO 3 with tensor parallelism: a dictionary, whose `param` is the whole tensor
#   (`cat_dim`, `sub_param_shape`, `vocab_tensor`, … say how it was put together), with
#   `sub_param_shape` in the shape of a view
# - ZeRO 3 else: a flat tensor; its shape is in the model states alone
# - `step.pt`: a number, or a tensor of no dims
#
# DeepSpeed's converter joins along dim 0 every parameter that no pattern matches, replicas too: to
# a tensor of twice their rows. Such atoms are split again. The model states have the shapes of the
# ranks' parts; each part then counts as one of the rank's tensors as in any checkpoint, and its
# sharding is inferred as there.


Shape = tuple[int, ...]

_ATOM = re.compile(r"zero/(.+)/([^/]+)\.pt", re.DOTALL)
_FRAGMENT = re.compile(r"tmp/(.+)/\d+/[^/]+\.\d+", re.DOTALL)
_STATES = {"fp32": "master"}


@dataclass(frozen=True, slots=True)
class Atom:
    """One file of thousands, which is not kept open: a tensor in a state, or a plain value."""

    file: str
    state: str
    value: Any  # for a plain value
    dtype: str = ""
    shape: Shape = ()
    locate: Locate = lambda _: iter(())
    # a dictionary of nothing but the tensor: an untrained one, out of the weights
    bare: bool = False


def atom_names(prefix: str, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The key of each atom, by parameter and by the state in the file's name."""
    names = list(names)
    atoms: dict[str, dict[str, str]] = {}
    for match in filter(None, map(_ATOM.fullmatch, names)):
        atoms.setdefault(match[1], {})[match[2]] = prefix + match[0]
    fragments = {match[1] for match in filter(None, map(_FRAGMENT.fullmatch, names))}
    waiting = sorted(fragments - atoms.keys())
    without = [name for name, states in atoms.items() if "fp32" not in states]
    if waiting or without:
        absent = waiting or without
        named = first_names((f"{prefix}zero/{name}/fp32.pt" for name in absent), 1)
        raise MissingData(
            f"{named} is missing: the conversion to DeepSpeed's universal format did "
            "not finish, or files were lost",
            hint="run ds_to_universal.py again; or convert the original checkpoint with ucformat, which needs no such "
            "step",
        )
    return atoms


def read_atoms(
    store: Store,
    keys: Mapping[str, Mapping[str, str]],
    shapes: Mapping[str, Shape],
    allow: tuple[str, ...],
) -> dict[str, list[Atom]]:
    """Open all atoms concurrently, reading a few kilobytes of each."""

    def read(item: tuple[str, str, str]) -> Atom:
        name, state, key = item
        return _read(TorchFile(store, key, allow=allow), name, state, shapes.get(name))

    items = [(name, state, key) for name, states in keys.items() for state, key in _ordered(states)]
    out: dict[str, list[Atom]] = {name: [] for name in keys}
    for (name, _, _), atom in zip(items, map_io(read, items), strict=True):
        out[name].append(atom)
    return out


def _ordered(states: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(states.items(), key=lambda item: (item[0] != "fp32", item[0]))


def _read(file: TorchFile, name: str, state: str, expected: Shape | None) -> Atom:
    value = file.value
    name_of_state = _STATES.get(state, state)
    if isinstance(value, dict):
        tensor = value.get("param")
        if not isinstance(tensor, StoredTensor):
            raise IntegrityError(
                f"{file.key} is not an atom: a dictionary without a tensor `param`"
            )
        if state == "fp32" and expected is not None and tensor.shape != expected:
            tensor = _of_shape(file, tensor, expected, view="sub_param_shape" in value)
        elif (
            "sub_param_shape" in value
            and expected is not None
            and tensor.size == math.prod(expected)
        ):
            tensor = _of_shape(file, tensor, expected, view=True)
        return _atom(file, name_of_state, tensor, bare=value.keys() == {"param"})
    if isinstance(value, StoredTensor):
        if len(value.shape) == 1 and state != "step":
            if expected is None:
                raise UnsupportedError(
                    f"{file.key} is a flat tensor of {value.size} elements, and no model states "
                    "beside it record "
                    f"the shape of {name}",
                    hint=(
                        "put the *_model_states.pt of the checkpoint that was converted into "
                        "the folder again"
                    ),
                )
            value = _of_shape(file, value, expected, view=True)
        return _atom(file, name_of_state, value)
    if isinstance(value, int | float):
        return Atom(file.key, name_of_state, value)
    raise IntegrityError(
        f"{file.key} holds a {type(value).__name__} where a tensor or a number should be"
    )


def _atom(file: TorchFile, state: str, tensor: StoredTensor, *, bare: bool = False) -> Atom:
    extents = tuple(file.whole(tensor)) if tensor.dtype in ITEMSIZE else ()  # else it is unreadable
    return Atom(file.key, state, None, tensor.dtype, tensor.shape, lambda _: iter(extents), bare)


def _of_shape(file: TorchFile, tensor: StoredTensor, shape: Shape, *, view: bool) -> StoredTensor:
    """The tensor in another shape, if the number of elements is the same and `view` allows it."""
    is_dense = not tensor.size or tensor.strides == row_major(tensor.shape)
    if view and is_dense and tensor.size == math.prod(shape):
        return replace(tensor, shape=shape, strides=row_major(shape))
    raise IntegrityError(
        f"{file.key} has the shape {list(tensor.shape)}, but the model states beside it record "
        f"{list(shape)}",
        hint="DeepSpeed's converter joins the parts of every parameter along dim 0 if no pattern describes how "
        "they are cut (--inject_missing_state), or files of different conversions are mixed; "
        "convert the original "
        "checkpoint with ucformat",
    )


def take_apart(
    store: Store,
    stages: Sequence[Sequence[Slice]],
    info: TensorParallelInfo,
    keys: Mapping[str, Mapping[str, str]],
    allow: tuple[str, ...],
) -> dict[str, list[Atom]]:
    """Give each rank its parts of the atoms that were joined because no pattern matched."""
    parts: dict[str, tuple[Sequence[Slice], Shapes]] = {}
    for slices in stages if len(stages[0]) > 1 else ():
        for name in slices[0].model.described:
            shapes = tuple(rank_slice.model.described.get(name, ()) for rank_slice in slices)
            if name in keys and name not in parts and info.is_default(name) and _joinable(shapes):
                parts[name] = slices, shapes
    atoms = read_atoms(store, {name: keys[name] for name in parts}, {}, allow)
    split: dict[str, list[Atom]] = {}
    for name, states in atoms.items():
        slices, shapes = parts[name]
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        tensors = [atom for atom in states if atom.value is None and atom.shape]
        if any(atom.shape != whole for atom in tensors):
            continue  # not joined so: cut short, in the shape of a view, or out of the weights
        split[name] = states
        for atom in tensors:
            row = 0
            for rank_slice, shape in zip(slices, shapes, strict=True):
                box = Box((row, *[0] * (len(shape) - 1)), shape)
                locate = partial(_part, name, atom, box)
                rank_slice.contents.add(name, atom.state, atom.dtype, shape, locate)
                row += shape[0]
    return split


def _joinable(shapes: Shapes) -> bool:
    """Whether parts of these shapes can be joined along dim 0."""
    return all(shapes) and len({shape[1:] for shape in shapes}) == 1


def _part(name: str, atom: Atom, inside: Box, within: Box | None) -> Iterator[Extent]:
    """The extents of a box of an atom, as boxes of that box."""
    info = TensorInfo(name, atom.state, atom.dtype, inside.shape)
    view = View(info, ((info.key, BoxPair.aligned(Box.whole(inside.shape), inside)),))
    return view.extents(lambda _key, box: atom.locate(box), within)


_OPTIMIZER = "zero/optimizer_state.pt"
_LAID_OUT = frozenset(  # the flat buffers that the atoms were cut from, and rank 0's part of them under ZeRO 3
    ("param_groups", "group_paddings", "param_alignment_paddings", "fp32_flat_groups", "optimizer_state_dict",
     "ds_zero_partition_groups")
)  # fmt: skip


class OpenUniversal(IndexedSource):
    """One opened folder of the universal format."""

    kind = "deepspeed"
    part = ""  # it has no files of ranks

    def __init__(self, store: Store, tag: str, options: DeepSpeedSourceOptions) -> None:
        self.store = store
        prefix = f"{tag}/" if tag else ""
        names = [info.key.removeprefix(prefix) for info in store.list(tag)]
        keys = atom_names(prefix, names)
        self._optimizer = (
            f"{prefix}{_OPTIMIZER}" if _OPTIMIZER in names and options.optimizer else None
        )
        files = list_files(store, tag, universal=True)
        self._check_finished(prefix, names, files, optimizer=options.optimizer)
        self._degrees, self._stages, not_stored = _read_models(store, files, options)
        contents = self._add_weights(options, keys)
        self._add_atoms(keys, options, contents)
        stored = {key.name for key in contents.infos}
        not_stored = [name for name in not_stored if name not in stored]
        by_label = models_by_label(self._degrees, self._stages)
        objects = {}
        if by_label:
            objects = Objects(by_label, {"": contents.optimizer}, contents, not_stored).json()
        first = self._stages[0][0].model.value if self._stages else {}
        atoms = (key for states in keys.values() for key in states.values())
        self.metadata = CheckpointMetadata(
            tensor_list=tensor_list(self._stages, contents),
            unreadable=contents.unreadable,
            aliases=self._aliases(),
            objects=objects,
            groups=tuple(group.json() for group in contents.groups),
            step=step if isinstance(step := first.get("global_steps"), int) else None,
            layout=self._layout(),
            engine={"name": "deepspeed", "version": str(first.get("ds_version", ""))},
            files=(*files.all, *filter(None, [self._optimizer]), *atoms),
            means=self._means,
            folder=tag,
        )
        self._latest = files.latest

    def records(self) -> Iterator[FileRecord]:
        """Every record of the zip files; reads the directory of each."""
        for key in self.metadata.files:
            if key != self._latest:
                yield from TorchZip(self.store, key).records()

    def _check_finished(
        self, prefix: str, names: list[str], files: TagFiles, *, optimizer: bool
    ) -> None:
        """Check that the model states exist, which are copied last, unless a model was converted."""
        if files.models:
            if self._optimizer is None and optimizer:
                raise MissingData(
                    f"{prefix}{_OPTIMIZER} is missing: the conversion did not finish, or the "
                    "file was lost",
                    hint="run ds_to_universal.py again, or convert the original checkpoint with ucformat; for the "
                    f"weights and their fp32 copies alone: {option_text('optimizer')}",
                )
            return
        if self._optimizer is not None or not ("source.txt" in names or files.latest):
            raise MissingData(
                f"{prefix}mp_rank_00_model_states.pt (or zero_pp_rank_*_model_states.pt) is "
                "missing: the conversion to "
                "DeepSpeed's universal format did not finish, or files were lost",
                hint=(
                    "run ds_to_universal.py again, or convert the original checkpoint with ucformat"
                ),
            )

    def _add_weights(
        self, options: DeepSpeedSourceOptions, keys: dict[str, dict[str, str]]
    ) -> TensorIndex:
        """Add the tensors of the model states, and the atoms joined without a pattern."""
        self._means: Mapping[Key, tuple[Key, ...]] = {}
        self.contents = TensorIndex()
        self._split_atoms: dict[str, list[Atom]] = {}
        if self._stages:
            models = [model for rank_slice in chain(*self._stages) for model in rank_slice.models]
            resolver = ShardingResolver(
                models, self._degrees.tp, options.layout, options.vocab, options.cuts
            )
            self._split_atoms = take_apart(
                self.store, self._stages, resolver.info, keys, options.allow
            )
            merged = Merged(self.store, self._stages, resolver)
            self.contents, self._means = merged.contents, merged.means
        return self.contents

    def _add_atoms(
        self,
        keys: dict[str, dict[str, str]],
        options: DeepSpeedSourceOptions,
        contents: TensorIndex,
    ) -> None:
        """The atoms, with the groups that their parameters were in."""
        groups = list(chain(*(s[0].model.param_shapes or [] for s in self._stages)))
        trained = {name: shape for group in groups for name, shape in group.items()}
        weights = (info for key, info in contents.infos.items() if key.state == "weight")
        shapes = {info.name: info.shape for info in weights}
        if self._degrees.tp == 1:
            shapes |= trained
        missing = [name for name, shape in trained.items() if name not in keys and 0 not in shape]
        if missing:
            raise MissingData(
                f"{first_names((f'zero/{name}/fp32.pt' for name in missing), 1)} is missing: "
                f"the model states describe {len(trained)} trained parameters",
                hint=(
                    "the conversion did not finish, or files were lost; convert the original "
                    "checkpoint again"
                ),
            )
        alone = {n for n, states in keys.items() if states.keys() == {"fp32"}} - trained.keys()
        copies = alone & (shapes.keys() | self._aliases().keys()) if trained else set()
        remaining = keys.keys() - copies - self._split_atoms.keys()
        to_read = {name: states for name, states in keys.items() if name in remaining}
        read = read_atoms(self.store, to_read, shapes, options.allow) | self._split_atoms
        atoms = {name: read[name] for name in keys if name in read}
        for name, states in atoms.items():
            if len(states) == 1 and states[0].bare and Key(name, "weight") in contents.infos:
                continue  # never had a gradient, so the converter took the weight
            for atom in states:
                if not options.optimizer and atom.state != "master":
                    continue
                if atom.value is None and Key(name, atom.state) not in contents.infos:
                    contents.add(name, atom.state, atom.dtype, atom.shape, atom.locate)
        together: list[Iterable[str]] = [*groups] or [atoms]
        for names in together if options.optimizer else ():
            _check_alike({name: atoms[name] for name in names if name in atoms})
        state = (
            TorchFile(self.store, self._optimizer, allow=options.allow) if self._optimizer else None
        )
        self._zero = 3 if self._stages and self._stages[0][0].stage == 3 else None
        if state is not None:
            value = need({"state": state.value}, "state", dict, state.key)
            self._zero = stage_of(value.get("zero_stage", 1))
            self._add_groups(state, value, contents)
            contents.keep_scalars(state, {k: v for k, v in value.items() if k not in _LAID_OUT})
        if options.optimizer:
            self._add_plain(atoms, contents)

    def _add_groups(self, file: TorchFile, value: dict[str, Any], contents: TensorIndex) -> None:
        """The optimizer's groups, by the names of `param_shapes`; under ZeRO 3 also the states of no dims (`step`).

        Only the first stage's groups are recorded; those of other stages are joined to them if
        there are equally many.
        """
        hypers = need(value, "param_groups", list, file.key)
        members = [need(hyper, "params", list, file.key) for hyper in hypers]
        inner = value.get("optimizer_state_dict")
        by_entry = inner.get("state") if isinstance(inner, dict) else None
        numbers = sorted(i for i in chain(*members) if isinstance(i, int))
        for p, slices in enumerate(self._stages):
            flat = slices[0].model.param_shapes or []
            if numbers != list(range(len(flat))):
                if not p:
                    raise IntegrityError(
                        f"{file.key} has optimizer groups of {sum(map(len, members))} flat "
                        "groups, but "
                        f"{slices[0].model.key} describes {len(flat)}",
                        hint="files of different conversions are mixed in one folder",
                    )
                # whose hyper-parameters are lost
                contents.groups.extend(Group(list(shapes), {}) for shapes in flat)
                continue
            for g, (hyper, indices) in enumerate(zip(hypers, members, strict=True)):
                if not p:
                    contents.groups.append(Group([], hyper_parameters(hyper, file)))
                named = {name for group in contents.groups for name in group.names}
                mine = (name for i in indices for name in flat[i])
                contents.groups[g].names.extend(name for name in mine if name not in named)
                for i in indices:
                    states = state_of(by_entry, i, file.key) if isinstance(by_entry, dict) else {}
                    self._add_scalars(contents, contents.groups[g], file, states, flat[i])

    def _add_scalars(
        self,
        contents: TensorIndex,
        group: Group,
        file: TorchFile,
        states: dict[str, Any],
        names: Iterable[str],
    ) -> None:
        """States of a flat group that are not tensors along it, and so have no atoms."""
        for state, value in states.items():
            if not isinstance(value, StoredTensor):
                group.state[state] = to_json(value, read=file.read, path="state")
            elif not value.shape:
                for name in names:
                    if Key(name, state) not in contents.infos:
                        contents.add_whole(name, state, file, value)

    def _add_plain(self, atoms: dict[str, list[Atom]], contents: TensorIndex) -> None:
        """Add numbers (`step`) to the groups: one for all, or one for each name."""
        plain: dict[str, dict[str, Any]] = {}
        for name, atom in ((name, atom) for name, states in atoms.items() for atom in states):
            if atom.value is not None:
                plain.setdefault(name, {})[atom.state] = atom.value
        if plain and not contents.groups:
            contents.groups.append(Group(list(plain), {}))
        for group in contents.groups:
            mine = [plain[name] for name in group.names if name in plain]
            for state in dict.fromkeys(chain.from_iterable(mine)):
                values = {n: plain[n][state] for n in group.names if state in plain.get(n, {})}
                group.state[state] = shared_value(values, len(group.names))

    def _aliases(self) -> dict[str, str]:
        return {a: b for slices in self._stages for a, b in slices[0].aliases.items()}

    def _layout(self) -> dict[str, Any]:
        """As of the checkpoint that was converted."""
        if not self._stages:
            return {"universal": True}
        dtype = self._stages[0][0].weight_dtype(self._zero)
        return {"universal": True, **self._degrees.layout(self._zero), **dtype}


def _read_models(
    store: Store, files: TagFiles, options: DeepSpeedSourceOptions
) -> tuple[ParallelDegrees, list[list[Slice]], list[str]]:
    """The weights by stage and tensor-parallel rank, and the names of empty placeholders."""
    if not files.models:
        return ParallelDegrees(1, 1, 1), [], []
    rows = load_all(lambda key: TorchFile(store, key, allow=options.allow), files.models)
    models = [[ModelStates(file) for file in row] for row in rows]
    first = models[0][0]
    for model in chain(*models):
        model.join_stacks()
    degrees = ParallelDegrees.of(files, first, others=[row[0] for row in models])
    shared = first.aliases(zero3=files.zero3)
    stages: list[list[Slice]] = []
    not_stored: dict[str, None] = {}
    for p in range(degrees.pp):
        stages.append([])
        for t in range(degrees.tp):
            row, ties = models[p * degrees.tp + t], None if p else shared
            rank_slice, empty = read_weights(
                row, degrees.label(p, t), zero3=files.zero3, shared=ties
            )
            stages[p].append(rank_slice)
            not_stored.update(dict.fromkeys(empty))
    return degrees, stages, list(not_stored)


def _check_alike(group: Mapping[str, list[Atom]]) -> None:
    """Check that all trained parameters of a flat group have the same states."""
    trained = {name: atoms for name, atoms in group.items() if not _untrained(atoms)}
    by_name = {name: {atom.state for atom in atoms} for name, atoms in trained.items()}
    every = set().union(*by_name.values())
    for name, states in by_name.items():
        if states != every:
            file = group[name][0].file.rpartition("/")[0]
            raise MissingData(
                f"{file} lacks {', '.join(f'{state}.pt' for state in sorted(every - states))}, "
                "which other parameters "
                "of its optimizer group have",
                hint=(
                    "the conversion did not finish, or files were lost; convert the original "
                    "checkpoint again"
                ),
            )


def _untrained(atoms: list[Atom]) -> bool:
    return len(atoms) == 1 and atoms[0].state == "master" and (atoms[0].bare or 0 in atoms[0].shape)
