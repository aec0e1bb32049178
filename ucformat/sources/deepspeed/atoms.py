"""The atoms of DeepSpeed's universal format: a small file for each state of each parameter, `zero/NAME/STATE.pt`.

What an atom holds depends on who wrote it (DeepSpeed 0.19.8):

- ZeRO 1 and 2, and ZeRO 3 with tensor parallelism: a dictionary, whose `param` is the whole tensor (`cat_dim`,
  `sub_param_shape`, `vocab_tensor`, … say how it was put together), with `sub_param_shape` in the shape of a view
- ZeRO 3 else: a flat tensor; its shape is in the model states alone
- `step.pt`: a number, or a tensor of no dims

DeepSpeed's converter joins along dim 0 every parameter that no pattern matches, replicas too: to a tensor of twice
their rows. Such atoms are split again. The model states have the shapes of the ranks' parts; each part then counts as
one of the rank's tensors as in any checkpoint, and its sharding is inferred as there.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, MissingData, UnsupportedError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.geometry.view import Part, View
from ucformat.schema import ITEMSIZE
from ucformat.sources.pickle.file import TorchFile
from ucformat.sources.pickle.stand_ins import StoredTensor
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ucformat.geometry.tensor import Extent
    from ucformat.sources.deepspeed.patterns import TensorParallelInfo
    from ucformat.sources.deepspeed.ranks import Slice
    from ucformat.sources.index import Locate
    from ucformat.sources.tp_merge.sharding import Shapes
    from ucformat.storage.base import Store

Shape = tuple[int, ...]

_ATOM = re.compile(r"zero/(.+)/([^/]+)\.pt", re.DOTALL)
_FRAGMENT = re.compile(r"tmp/(.+)/\d+/[^/]+\.\d+", re.DOTALL)
_STATES = {"fp32": "master"}
_MAX_LISTED = 10


@dataclass(frozen=True, slots=True)
class Atom:
    """One file: a tensor in a state, or a plain value. The open file is not kept, because there are thousands."""

    file: str
    state: str
    value: Any  # for a plain value
    dtype: str = ""
    shape: Shape = ()
    locate: Locate = lambda _: iter(())
    bare: bool = False  # a dictionary of nothing but the tensor: an untrained one, out of the weights


def atom_names(prefix: str, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Find the atoms of each parameter.

    Returns:
        the key of each atom, by parameter and by the state in the file's name.
    """
    names = list(names)
    found: dict[str, dict[str, str]] = {}
    for match in filter(None, map(_ATOM.fullmatch, names)):
        found.setdefault(match[1], {})[match[2]] = prefix + match[0]
    waiting = sorted({match[1] for match in map(_FRAGMENT.fullmatch, names) if match} - found.keys())
    without = [name for name, states in found.items() if "fp32" not in states]
    if waiting or without:
        absent = waiting or without
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise MissingData(
            f"{prefix}zero/{absent[0]}/fp32.pt{more} is missing: the conversion to DeepSpeed's universal format did "
            "not finish, or files were lost",
            hint="run ds_to_universal.py again; or convert the original checkpoint with ucformat, which needs no such "
            "step",
        )
    return found


def read_atoms(
    store: Store, keys: Mapping[str, Mapping[str, str]], shapes: Mapping[str, Shape], allow: tuple[str, ...]
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
    known = _STATES.get(state, state)
    if isinstance(value, dict):
        tensor = value.get("param")
        if not isinstance(tensor, StoredTensor):
            raise IntegrityError(f"{file.key} is not an atom: a dictionary without a tensor `param`")
        if state == "fp32" and expected is not None and tensor.shape != expected:
            tensor = _of_shape(file, tensor, expected, view="sub_param_shape" in value)
        elif "sub_param_shape" in value and expected is not None and tensor.size == math.prod(expected):
            tensor = _of_shape(file, tensor, expected, view=True)
        return _atom(file, known, tensor, bare=value.keys() == {"param"})
    if isinstance(value, StoredTensor):
        if len(value.shape) == 1 and state != "step":
            if expected is None:
                raise UnsupportedError(
                    f"{file.key} is a flat tensor of {value.size} elements, and no model states beside it record "
                    f"the shape of {name}",
                    hint="put the *_model_states.pt of the checkpoint that was converted into the folder again",
                )
            value = _of_shape(file, value, expected, view=True)
        return _atom(file, known, value)
    if isinstance(value, int | float):
        return Atom(file.key, known, value)
    raise IntegrityError(f"{file.key} holds a {type(value).__name__} where a tensor or a number should be")


def _atom(file: TorchFile, state: str, tensor: StoredTensor, *, bare: bool = False) -> Atom:
    extents = tuple(file.whole(tensor)) if tensor.dtype in ITEMSIZE else ()  # else it is unreadable
    return Atom(file.key, state, None, tensor.dtype, tensor.shape, lambda _: iter(extents), bare)


def _of_shape(file: TorchFile, tensor: StoredTensor, shape: Shape, *, view: bool) -> StoredTensor:
    """The tensor in another shape, if the number of elements is the same and `view` allows it."""
    if view and tensor.size == math.prod(shape) and (not tensor.size or tensor.strides == row_major(tensor.shape)):
        return replace(tensor, shape=shape, strides=row_major(shape))
    raise IntegrityError(
        f"{file.key} has the shape {list(tensor.shape)}, but the model states beside it record {list(shape)}",
        hint="DeepSpeed's converter joins the parts of every parameter along dim 0 if no pattern describes how "
        "they are cut (--inject_missing_state), or files of different conversions are mixed; convert the original "
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
            held = tuple(of.model.described.get(name, ()) for of in slices)
            if name in keys and name not in parts and info.is_default(name) and _joinable(held):
                parts[name] = slices, held
    atoms = read_atoms(store, {name: keys[name] for name in parts}, {}, allow)
    taken: dict[str, list[Atom]] = {}
    for name, found in atoms.items():
        slices, held = parts[name]
        whole = (sum(shape[0] for shape in held), *held[0][1:])
        tensors = [atom for atom in found if atom.value is None and atom.shape]
        if any(atom.shape != whole for atom in tensors):
            continue  # not joined so: cut short, in the shape of a view, or out of the weights
        taken[name] = found
        for atom in tensors:
            at = 0
            for of, shape in zip(slices, held, strict=True):
                box = Box((at, *[0] * (len(shape) - 1)), shape)
                of.contents.add(name, atom.state, atom.dtype, shape, partial(_part, name, atom, box))
                at += shape[0]
    return taken


def _joinable(shapes: Shapes) -> bool:
    """Whether parts of these shapes can be joined along dim 0."""
    return all(shapes) and len({shape[1:] for shape in shapes}) == 1


def _part(name: str, atom: Atom, of: Box, within: Box | None) -> Iterator[Extent]:
    """The extents of a box of an atom, as boxes of that box."""
    info = TensorInfo(name, atom.state, atom.dtype, of.shape)
    view = View(info, ((Key(name, atom.state), Part.aligned(Box.whole(of.shape), of)),))
    return view.extents(lambda _key, box: atom.locate(box), within)
