"""Pipelines under ZeRO 0: nothing names the parameters of a stage, nor says which layers it has.

A stage's optimizer numbers its entries: first those of the tied modules, then those of its layers in order. Stages have
consecutive layers; so how many entries each has, and of which shapes, tells where the stages begin. A tied module is
found by its layers' equal bytes, or by the entries of a stage that has no file of it. Its key is in no file, so it is
called by its first layer.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from ucformat.errors import UsageError, option_text
from ucformat.sources.deepspeed.pipeline import Layer, same_bytes
from ucformat.sources.deepspeed.zero0 import entries_of
from ucformat.sources.pickle.optimizer import Candidate, Entry, match
from ucformat.sources.pickle.stand_ins import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.sources.deepspeed.model import ModelStates

__all__ = ["names_of_stages"]

_LOOK = 1024  # elements that tell whether a tensor is of one value

Names = list[list[str]]


def names_of_stages(
    models: Sequence[ModelStates], layers: Sequence[Layer], groups: Sequence[Sequence[str]] | None
) -> tuple[list[Sequence[Sequence[str]] | None], dict[str, str]]:
    """Give each stage of one tensor-parallel rank its layers' tensors.

    Returns the names of each stage's optimizer groups, where the caller gave them, and the tied names. UsageError where
    the stages cannot be told apart.
    """
    ties = _ties(layers)
    if groups is not None:
        names = _dealt(models, groups)
        for model, held in zip(models, names, strict=True):
            mine = {name.partition(".")[0] for group in held for name in group}
            _adopt(model, [layer for layer in layers if str(ties.get(layer.number, layer.number)) in mine], ties)
        _adopt_rest(models, layers, ties)
        return list(names), _aliases(layers, ties)
    ways = list(islice(_ways(models, layers, ties, 0, 0), 2))
    if len(ways) != 1:
        raise UsageError(
            f"{models[0].key}: {'no' if not ways else 'more than one'} way to deal the layers to the {len(models)} "
            "pipeline stages fits the entries of their optimizers, so these cannot be named",
            hint=f"name them: {option_text('groups')}, stage after stage",
        )
    for model, (first, last, extra) in zip(models, ways[0], strict=True):
        _adopt(model, [*_tied_first(layers, first, last, extra, ties)], ties)
    return [None] * len(models), _aliases(layers, ties)


def _ways(
    models: Sequence[ModelStates], layers: Sequence[Layer], ties: dict[int, int], stage: int, first: int
) -> Iterator[list[tuple[int, int, int | None]]]:
    """The ways to deal the layers from `first` on to the stages from `stage` on: (first, last, tied layer) of each."""
    if stage == len(models):
        if first == len(layers):
            yield []
        return
    entries = entries_of(models[stage])
    ends = [len(layers)] if stage == len(models) - 1 else range(first + 1, len(layers))
    for last in ends:
        inside = {ties.get(layer.number, layer.number) for layer in layers[first:last]}
        others = [i for i, layer in enumerate(layers) if layer.number not in inside]
        for extra in (None, *others):
            if _fits(models[stage], entries, [*_tied_first(layers, first, last, extra, ties)], ties):
                for rest in _ways(models, layers, ties, stage + 1, last):
                    yield [(first, last, extra), *rest]
                break


def _fits(model: ModelStates, entries: list[list[Entry]] | int, layers: Sequence[Layer], ties: dict[int, int]) -> bool:
    """Whether the parameters of these layers are the entries of a stage's optimizer, none left over."""
    found: dict[str, StoredTensor] = {}
    for layer in layers:
        for name, tensor in layer.tensors.items():
            whole = f"{ties.get(layer.number, layer.number)}.{name}"
            if f"{layer.number}.{name}" not in model.buffers:
                found.setdefault(whole, tensor)
    if isinstance(entries, int):
        return sum(t.size for t in found.values()) == entries
    if len(found) != sum(map(len, entries)):
        return False
    if match(entries, [Candidate(name, t.shape) for name, t in found.items()]) is not None:
        return True
    shapes = sorted(t.shape for t in found.values())
    return shapes == sorted(e.shape or () for group in entries for e in group)


def _tied_first(
    layers: Sequence[Layer], first: int, last: int, extra: int | None, ties: dict[int, int]
) -> Iterator[Layer]:
    """A stage's layers in the order of its parameters: tied modules, then the others."""
    tied = {*ties, *ties.values()} | ({layers[extra].number} if extra is not None else set())
    mine = [*([layers[extra]] if extra is not None else []), *layers[first:last]]
    yield from (layer for layer in mine if layer.number in tied)
    yield from (layer for layer in mine if layer.number not in tied)


def _adopt(model: ModelStates, layers: Sequence[Layer], ties: dict[int, int]) -> None:
    for layer in layers:
        for name, tensor in layer.tensors.items():
            whole = f"{ties.get(layer.number, layer.number)}.{name}"
            if whole not in model.module:
                model.adopt(whole, tensor, layer.file)


def _adopt_rest(models: Sequence[ModelStates], layers: Sequence[Layer], ties: dict[int, int]) -> None:
    """Layers of which no parameter is trained."""
    known = {name for model in models for name in model.module}
    rest = [x for x in layers if not any(f"{ties.get(x.number, x.number)}.{n}" in known for n in x.tensors)]
    _adopt(models[0], rest, ties)


def _dealt(models: Sequence[ModelStates], groups: Sequence[Sequence[str]]) -> list[Names]:
    """The caller's names, dealt to the stages: each takes of each group as many as its optimizer has entries."""
    at = [0] * len(groups)
    out: list[Names] = []
    for model in models:
        entries = entries_of(model)
        if isinstance(entries, int) or len(entries) > len(groups):
            raise UsageError(f"{model.key}: its optimizer has other groups than the {len(groups)} that are given")
        out.append([list(groups[g][at[g] : at[g] + len(group)]) for g, group in enumerate(entries)])
        for g, group in enumerate(entries):
            at[g] += len(group)
    if at != [len(group) for group in groups]:
        raise UsageError(
            f"{models[0].key}: {[len(g) for g in groups]} names are given for groups of {at} entries over all stages",
            hint="a tied module's parameters stand in each stage that has it, before those of its layers",
        )
    return out


def _ties(layers: Sequence[Layer]) -> dict[int, int]:
    """Layers that hold what an earlier one holds, and not just values that any new layer has: number -> number."""
    out: dict[int, int] = {}
    for i, layer in enumerate(layers):
        for earlier in layers[:i]:
            if earlier.number in out or not layer.tensors or earlier.form != layer.form:
                continue
            names = layer.tensors
            if all(same_bytes(earlier, layer, n) for n in names) and any(_varies(layer, n) for n in names):
                out[layer.number] = earlier.number
                break
    return out


def _varies(layer: Layer, name: str) -> bool:
    """Whether the first elements of a tensor are not all of one value."""
    tensor = layer.tensors[name]
    n = min(_LOOK, tensor.size, tensor.numel - tensor.offset)
    head = StoredTensor(tensor.storage, tensor.dtype, (n,), (1,), tensor.offset, tensor.numel)
    data = layer.file.read(head)
    return bool(n) and data != data[: len(data) // n] * n


def _aliases(layers: Sequence[Layer], ties: dict[int, int]) -> dict[str, str]:
    return {f"{x.number}.{n}": f"{ties[x.number]}.{n}" for x in layers if x.number in ties for n in x.tensors}
