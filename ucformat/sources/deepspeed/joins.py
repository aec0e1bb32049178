"""Atoms that DeepSpeed's converter joined along dim 0 because no pattern speaks of them, taken apart again.

It joins replicas so, too, to a tensor of twice their rows. The model states tell the shapes of the ranks' parts; each
part is then one of the rank's tensors as in any checkpoint, and how they lie is decided as there, by evidence.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ucformat.geometry.box import Box
from ucformat.geometry.local import Region, parts_of
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.geometry.view import View
from ucformat.sources.deepspeed.atoms import read_atoms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.geometry.tensor import Extent
    from ucformat.sources.deepspeed.atoms import Atom
    from ucformat.sources.deepspeed.patterns import Info
    from ucformat.sources.deepspeed.readings import Shapes
    from ucformat.sources.deepspeed.slices import Slice
    from ucformat.storage.base import Store

__all__ = ["take_apart"]


def take_apart(
    store: Store,
    stages: Sequence[Sequence[Slice]],
    info: Info,
    keys: Mapping[str, Mapping[str, str]],
    allow: tuple[str, ...],
) -> dict[str, list[Atom]]:
    """Give each rank its parts of the atoms that were joined for want of a pattern; returns these atoms by name."""
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
    view = View(info, tuple(parts_of((Region(of, Box.whole(of.shape)),), Key(name, atom.state))))
    return view.extents(lambda _key, _box: atom.extents, within)
