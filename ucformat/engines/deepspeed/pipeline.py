"""Pipelines: the weights of a `PipelineModule` are in one file per layer, which does not name the layer's stage.

DeepSpeed names the parameters of layer 3 `3.…`, and those of a tied module `tied_modules.KEY.…`,
regardless of layer. A layer's file holds them under their names within the layer, and each layer
that is the tied module has a copy (a layer that only applies a function to it has none). Under ZeRO
1 `param_shapes` assigns layers and tied modules to stages.

Under ZeRO 0 nothing names the parameters or layers of a stage. A stage's optimizer numbers its
entries: first those of the tied modules, then those of its layers in order. Stages have consecutive
layers, so the number and shapes of the entries determine the boundaries of stages. A tied module is
found by its layers' equal bytes, or by the entries of a stage that has no file of it. No file has
its key, so it is named after its first layer.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from ucformat.engines.deepspeed.folder import copy_hint
from ucformat.engines.deepspeed.zero0 import entries_of
from ucformat.errors import IntegrityError, MissingData, UsageError, option_text
from ucformat.reading.stand_ins import StoredTensor
from ucformat.schema import ITEMSIZE
from ucformat.sources.pickle.optimizer import Candidate, Entry, match

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.engines.deepspeed.model_states import ModelStates
    from ucformat.sources.pickle.file import TorchFile

_NAME = re.compile(r"(\d{1,6})\.(.+)", re.DOTALL)
TIED = "tied_modules."


def tied_name(name: str) -> tuple[str, str] | None:
    """The key of the tied module of which this is a parameter, and the name in that; None of others."""
    if not name.startswith(TIED):
        return None
    key, _, inner = name.removeprefix(TIED).partition(".")
    return key, inner


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's file of one tensor-parallel rank, and the tensors in it."""

    number: int
    file: TorchFile
    tensors: dict[str, StoredTensor]

    @property
    def form(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each tensor."""
        return {name: (t.dtype, t.shape) for name, t in self.tensors.items()}


def layers_of(files: Mapping[int, TorchFile]) -> list[Layer]:
    """The layers of one tensor-parallel rank, in order."""
    out = []
    for number in sorted(files):
        value = files[number].value
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise IntegrityError(
                f"{files[number].key} holds a {type(value).__name__} instead of a layer's tensors"
            )
        tensors = {n: t for n, t in value.items() if isinstance(t, StoredTensor)}
        out.append(Layer(number, files[number], tensors))
    return out


class _StageLayers:
    """What the stages' files record of their layers."""

    def __init__(self, models: Sequence[ModelStates]) -> None:
        self.stage_of: dict[int, int] = {}  # by layer
        self.tied: dict[str, dict[str, tuple[int, ...]]] = {}  # key -> name in the module -> shape
        self.holders: dict[str, list[int]] = {}  # key -> stages
        for stage, model in enumerate(models):
            for name in (*model.described, *sorted(model.buffers)):
                layer = _NAME.fullmatch(name)
                if layer and self.stage_of.setdefault(int(layer[1]), stage) != stage:
                    raise IntegrityError(
                        f"{name} is in {model.key} and in "
                        f"{models[self.stage_of[int(layer[1])]].key}, of two pipeline "
                        "stages",
                        hint="files of different saves are mixed in one folder",
                    )
                if (tied := tied_name(name)) is not None:
                    self._add_tied(stage, *tied, model.described.get(name))
        self._numbers = sorted(self.stage_of)
        self._last = len(models) - 1

    def _add_tied(self, stage: int, key: str, inner: str, shape: tuple[int, ...] | None) -> None:
        if shape is not None:
            self.tied.setdefault(key, {})[inner] = shape
        if stage not in self.holders.setdefault(key, []):
            self.holders[key].append(stage)

    def place(self, layer: Layer) -> tuple[int, str | None]:
        """The stage of a layer, and the key of the tied module that it is, if any."""
        if layer.number in self.stage_of:
            return self.stage_of[layer.number], None
        index = bisect_right(self._numbers, layer.number)
        before = self.stage_of[self._numbers[index - 1]] if index else 0
        key = _tied_key(layer, self.tied)
        if key is None:
            return before, None
        after = self.stage_of[self._numbers[index]] if index < len(self._numbers) else self._last
        between = (stage for stage in self.holders[key] if before <= stage <= after)
        return next(between, self.holders[key][0]), key


def adopt_layers(models: Sequence[ModelStates], layers: Sequence[Layer]) -> None:
    """Give the stages of one tensor-parallel rank the tensors of their layers."""
    recorded = _StageLayers(models)
    _check_all_there(models, layers, recorded.stage_of, recorded.tied)
    copies: dict[str, Layer] = {}
    for layer in layers:
        stage, key = recorded.place(layer)
        if key is not None:
            _check_tied(key, copies.setdefault(key, layer), layer)
        prefix = f"{layer.number}." if key is None else f"{TIED}{key}."
        for name, tensor in layer.tensors.items():
            if prefix + name not in models[stage].module:
                models[stage].adopt(prefix + name, tensor, layer.file)


def _check_tied(key: str, first: Layer, other: Layer) -> None:
    """Check that the layers of a tied module have equal bytes."""
    differing = [n for n in first.tensors if not same_bytes(first, other, n)]
    if differing:
        raise IntegrityError(
            f"{TIED}{key}.{differing[0]}: {first.file.key} and {other.file.key} should be "
            "equal, but differ",
            hint="files of different saves are mixed in one folder",
        )


def same_bytes(one: Layer, other: Layer, name: str) -> bool:
    """Whether two layers hold the same tensor of a name, by checksums if there are any."""
    a, b = one.tensors.get(name), other.tensors.get(name)
    if a is None or b is None or (a.dtype, a.shape, a.strides) != (b.dtype, b.shape, b.strides):
        return False
    # A checksum is that of a whole storage, of which these are different parts.
    if (a.offset, a.numel) != (b.offset, b.numel):
        return one.file.read(a) == other.file.read(b)
    sums = one.file.crc32(a), other.file.crc32(b)
    return sums[0] == sums[1] if all(sums) else one.file.read(a) == other.file.read(b)


def _tied_key(layer: Layer, tied: Mapping[str, Mapping[str, tuple[int, ...]]]) -> str | None:
    """The tied module in a layer that no stage knows by its number; None if none."""
    own_shapes = {name: tensor.shape for name, tensor in layer.tensors.items()}
    fitting = [key for key, shapes in tied.items() if shapes.items() <= own_shapes.items()]
    if len(fitting) > 1:
        raise IntegrityError(
            f"{layer.file.key} may be any of the tied modules {', '.join(fitting)}: they have "
            "the same names",
            hint="such pipelines are not yet read; please report this checkpoint",
        )
    return fitting[0] if fitting else None


def _check_all_there(
    models: Sequence[ModelStates],
    layers: Sequence[Layer],
    stage_of: Mapping[int, int],
    tied: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> None:
    """Check that each layer of a stage has a file, and each tied module one."""
    there = {layer.number for layer in layers}
    example = f"{models[0].key.rpartition('/')[0]}/layer_00-model_states.pt"
    if layers:
        example = layers[0].file.key
    lost = sorted(stage_of.keys() - there)
    if missing := [re.sub(r"layer_\d+", f"layer_{n:02d}", example) for n in lost]:
        raise MissingData(
            f"{', '.join(missing[:10])} is missing: {models[stage_of[lost[0]]].key} has "
            "parameters of the layer",
            hint=copy_hint("stage"),
        )
    unknown = [layer for layer in layers if layer.number not in stage_of]
    for key in tied:
        if not any(_tied_key(layer, {key: tied[key]}) for layer in unknown):
            raise MissingData(
                f"no layer's file holds the tied module {key} of {models[0].key}",
                hint="the file of its first layer is missing; copy all files of the tag folder",
            )


_SAMPLE = 1024  # elements that are compared to find tensors of one repeated value

Names = list[list[str]]


def names_of_stages(
    models: Sequence[ModelStates], layers: Sequence[Layer], groups: Sequence[Sequence[str]] | None
) -> tuple[list[Sequence[Sequence[str]] | None], dict[str, str]]:
    """Give each stage of one tensor-parallel rank the tensors of its layers under ZeRO 0.

    Args:
        groups: the names of each optimizer group's parameters over all stages; None: they are
            derived.

    Returns:
        the names of each stage's optimizer groups (None: to be derived), and the stored name of
        each tied name.
    """
    ties = _ties(layers)
    if groups is not None:
        names = _names_by_stage(models, groups)
        for model, of_stage in zip(models, names, strict=True):
            numbers = {name.partition(".")[0] for group in of_stage for name in group}
            own_layers = [
                layer for layer in layers if str(ties.get(layer.number, layer.number)) in numbers
            ]
            _adopt(model, own_layers, ties)
        _adopt_rest(models, layers, ties)
        return list(names), _aliases(layers, ties)
    # Two are enough to know that the first is not the only one.
    splits = list(islice(_splits(models, layers, ties, 0, 0), 2))
    if len(splits) != 1:
        raise UsageError(
            f"{models[0].key}: {'no' if not splits else 'more than one'} way to assign the "
            f"layers to the {len(models)} "
            "pipeline stages fits the entries of their optimizers, so these cannot be named",
            hint=f"name them: {option_text('groups')}, stage after stage",
        )
    for model, (first, last, extra) in zip(models, splits[0], strict=True):
        _adopt(model, [*_tied_first(layers, first, last, extra, ties)], ties)
    return [None] * len(models), _aliases(layers, ties)


def _splits(
    models: Sequence[ModelStates],
    layers: Sequence[Layer],
    ties: dict[int, int],
    stage: int,
    first: int,
) -> Iterator[list[tuple[int, int, int | None]]]:
    """The ways to assign the layers left to the stages left: (first, last, tied layer) of each."""
    if stage == len(models):
        if first == len(layers):
            yield []
        return
    entries = entries_of(models[stage])
    ends = [len(layers)] if stage == len(models) - 1 else range(first + 1, len(layers))
    for last in ends:
        inside = {ties.get(layer.number, layer.number) for layer in layers[first:last]}
        outside = [
            i
            for i, layer in enumerate(layers)
            if layer.number not in inside and _has_parameters(models[stage], layer)
        ]
        rests: list[list[tuple[int, int, int | None]]] | None = None
        for extra in (None, *outside):
            mine = [*_tied_first(layers, first, last, extra, ties)]
            if _fits(models[stage], entries, mine, ties):
                # the same for each `extra`; the caller asks for two, to know that there is only one
                if rests is None:
                    rests = list(islice(_splits(models, layers, ties, stage + 1, last), 2))
                for remaining in rests:
                    yield [(first, last, extra), *remaining]


def _has_parameters(model: ModelStates, layer: Layer) -> bool:
    return any(f"{layer.number}.{name}" not in model.buffers for name in layer.tensors)


def _fits(
    model: ModelStates,
    entries: list[list[Entry]] | int,
    layers: Sequence[Layer],
    ties: dict[int, int],
) -> bool:
    """Whether these layers' parameters are exactly a stage's optimizer entries."""
    parameters: dict[str, StoredTensor] = {}
    for layer, name, tensor in _named(layers, ties):
        if f"{layer.number}.{name.partition('.')[2]}" not in model.buffers:
            parameters.setdefault(name, tensor)
    if isinstance(entries, int):
        return sum(t.size for t in parameters.values()) == entries
    if len(parameters) != sum(map(len, entries)):
        return False
    if match(entries, [Candidate(name, t.shape) for name, t in parameters.items()]) is not None:
        return True
    shapes = sorted(t.shape for t in parameters.values())
    return shapes == sorted(e.shape or () for group in entries for e in group)


def _tied_first(
    layers: Sequence[Layer], first: int, last: int, extra: int | None, ties: dict[int, int]
) -> Iterator[Layer]:
    """A stage's layers in the order of its parameters: tied modules, then the others."""
    tied = {*ties, *ties.values()} | ({layers[extra].number} if extra is not None else set())
    mine = [*([layers[extra]] if extra is not None else []), *layers[first:last]]
    yield from (layer for layer in mine if layer.number in tied)
    yield from (layer for layer in mine if layer.number not in tied)


def _named(
    layers: Sequence[Layer], ties: dict[int, int]
) -> Iterator[tuple[Layer, str, StoredTensor]]:
    """The tensors of layers by parameter; a tied module's have the first layer's name."""
    for layer in layers:
        for name, tensor in layer.tensors.items():
            yield layer, f"{ties.get(layer.number, layer.number)}.{name}", tensor


def _adopt(model: ModelStates, layers: Sequence[Layer], ties: dict[int, int]) -> None:
    for layer, name, tensor in _named(layers, ties):
        if name not in model.module:
            model.adopt(name, tensor, layer.file)


def _adopt_rest(
    models: Sequence[ModelStates], layers: Sequence[Layer], ties: dict[int, int]
) -> None:
    """Layers of which no parameter is trained."""
    adopted = {name for model in models for name in model.module}
    untrained = [x for x in layers if adopted.isdisjoint(n for _, n, _ in _named([x], ties))]
    _adopt(models[0], untrained, ties)


def _names_by_stage(models: Sequence[ModelStates], groups: Sequence[Sequence[str]]) -> list[Names]:
    """The caller's names by stage, each of which takes as many as its optimizer has entries."""
    starts = [0] * len(groups)
    out: list[Names] = []
    for model in models:
        entries = entries_of(model)
        if isinstance(entries, int) or len(entries) > len(groups):
            raise UsageError(
                f"{model.key}: its optimizer has other groups than the {len(groups)} that are given"
            )
        out.append(
            [list(groups[g][starts[g] : starts[g] + len(group)]) for g, group in enumerate(entries)]
        )
        for g, group in enumerate(entries):
            starts[g] += len(group)
    if starts != [len(group) for group in groups]:
        raise UsageError(
            f"{models[0].key}: {[len(g) for g in groups]} names are given for groups of {starts} "
            "entries over all stages",
            hint=(
                "a tied module's parameters are listed in each stage that has it, before those "
                "of its layers"
            ),
        )
    return out


def _ties(layers: Sequence[Layer]) -> dict[int, int]:
    """Layers that repeat an earlier one, and not just initial values: number -> number."""
    out: dict[int, int] = {}
    for i, layer in enumerate(layers):
        for earlier in layers[:i]:
            if earlier.number in out or not layer.tensors or earlier.form != layer.form:
                continue
            equal = all(same_bytes(earlier, layer, n) for n in layer.tensors)
            if equal and any(_varies(layer, n) for n in layer.tensors):
                out[layer.number] = earlier.number
                break
    return out


def _varies(layer: Layer, name: str) -> bool:
    """Whether the first elements of a tensor are not all of one value."""
    data = layer.file.read_head(layer.tensors[name], _SAMPLE)
    width = ITEMSIZE.get(layer.tensors[name].dtype, 1)
    return data != data[:width] * (len(data) // width)


def _aliases(layers: Sequence[Layer], ties: dict[int, int]) -> dict[str, str]:
    tied = [layer for layer in layers if layer.number in ties]
    return {f"{x.number}.{n}": f"{ties[x.number]}.{n}" for x in tied for n in x.tensors}
