"""Pipelines: the weights of a `PipelineModule` lie in a file for each layer, which does not say whose layer it is.

DeepSpeed names the parameters of layer 3 `3.…`, those of a tied module `tied_modules.KEY.…`, whichever layer it is. A
layer's file holds them under their names in the layer, and a tied module stands in the file of each of its layers that
is a module (a layer that only applies a function to it has none). Under ZeRO 1 `param_shapes` of the stages tells which
layer is whose, and which tied module. Under ZeRO 0 see `numbered`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.errors import IntegrityError, MissingData
from ucformat.sources.pickle.stand_ins import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.sources.deepspeed.model import ModelStates
    from ucformat.sources.pickle.file import TorchFile

__all__ = ["Layer", "adopt_layers", "layers_of", "same_bytes"]

_NAME = re.compile(r"(\d{1,6})\.(.+)", re.DOTALL)
_TIED = "tied_modules."


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
                f"{files[number].key} holds a {type(value).__name__} where a layer's tensors should be"
            )
        out.append(Layer(number, files[number], {n: t for n, t in value.items() if isinstance(t, StoredTensor)}))
    return out


class _Told:
    """What the stages' files tell of their layers."""

    def __init__(self, models: Sequence[ModelStates]) -> None:
        self.stage_of: dict[int, int] = {}  # by layer
        self.tied: dict[str, dict[str, tuple[int, ...]]] = {}  # key -> name in the module -> shape
        self.holders: dict[str, list[int]] = {}  # key -> stages
        for stage, model in enumerate(models):
            for name in (*model.described, *sorted(model.buffers)):
                layer = _NAME.fullmatch(name)
                if layer and self.stage_of.setdefault(int(layer[1]), stage) != stage:
                    raise IntegrityError(
                        f"{name} is in {model.key} and in {models[self.stage_of[int(layer[1])]].key}, of two pipeline "
                        "stages",
                        hint="files of different saves are mixed in one folder",
                    )
                if name.startswith(_TIED):
                    self._add_tied(stage, name, model.described.get(name))
        self._known = sorted(self.stage_of)
        self._last = len(models) - 1

    def _add_tied(self, stage: int, name: str, shape: tuple[int, ...] | None) -> None:
        key, _, rest = name.removeprefix(_TIED).partition(".")
        if shape is not None:
            self.tied.setdefault(key, {})[rest] = shape
        if stage not in self.holders.setdefault(key, []):
            self.holders[key].append(stage)

    def place(self, layer: Layer) -> tuple[int, str | None]:
        """The stage of a layer, and the key of the tied module that it is, if any."""
        if layer.number in self.stage_of:
            return self.stage_of[layer.number], None
        at = bisect_right(self._known, layer.number)
        before = self.stage_of[self._known[at - 1]] if at else 0
        key = _tied_key(layer, self.tied)
        if key is None:
            return before, None
        after = self.stage_of[self._known[at]] if at < len(self._known) else self._last
        return next((s for s in self.holders[key] if before <= s <= after), self.holders[key][0]), key


def adopt_layers(models: Sequence[ModelStates], layers: Sequence[Layer]) -> None:
    """Give the stages of one tensor-parallel rank the tensors of their layers; MissingData names what is not there."""
    told = _Told(models)
    _check_all_there(models, layers, told.stage_of, told.tied)
    copies: dict[str, Layer] = {}
    for layer in layers:
        stage, key = told.place(layer)
        if key is not None:
            _check_tied(key, copies.setdefault(key, layer), layer)
        prefix = f"{layer.number}." if key is None else f"{_TIED}{key}."
        for name, tensor in layer.tensors.items():
            if prefix + name not in models[stage].module:
                models[stage].adopt(prefix + name, tensor, layer.file)


def _check_tied(key: str, first: Layer, other: Layer) -> None:
    """The layers of a tied module hold the same."""
    differing = [n for n in first.tensors if not same_bytes(first, other, n)]
    if differing:
        raise IntegrityError(
            f"{_TIED}{key}.{differing[0]}: {first.file.key} and {other.file.key} should hold the same, and do not",
            hint="files of different saves are mixed in one folder",
        )


def same_bytes(one: Layer, other: Layer, name: str) -> bool:
    """Whether two layers hold the same tensor of this name, by the checksums of the files, where these have any."""
    a, b = one.tensors.get(name), other.tensors.get(name)
    if a is None or b is None or (a.dtype, a.shape, a.strides) != (b.dtype, b.shape, b.strides):
        return False
    if (a.offset, a.numel) != (b.offset, b.numel):
        return one.file.read(a) == other.file.read(b)
    sums = one.file.crc32(a), other.file.crc32(b)
    return sums[0] == sums[1] if all(sums) else one.file.read(a) == other.file.read(b)


def _tied_key(layer: Layer, tied: Mapping[str, Mapping[str, tuple[int, ...]]]) -> str | None:
    """The tied module that a layer is which no stage knows by its number; None where it is none."""
    fitting = [
        key
        for key, shapes in tied.items()
        if all(name in layer.tensors and layer.tensors[name].shape == shape for name, shape in shapes.items())
    ]
    if len(fitting) > 1:
        raise IntegrityError(
            f"{layer.file.key} may be any of the tied modules {', '.join(fitting)}: they have the same names",
            hint="such pipelines are not yet read; please report this checkpoint",
        )
    return fitting[0] if fitting else None


def _check_all_there(
    models: Sequence[ModelStates],
    layers: Sequence[Layer],
    stage_of: Mapping[int, int],
    tied: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> None:
    """Every layer that a stage speaks of has its file, and every tied module that of one of its layers."""
    there = {layer.number for layer in layers}
    like = layers[0].file.key if layers else models[0].key.rpartition("/")[0] + "/layer_00-model_states.pt"
    missing = [re.sub(r"layer_\d+", f"layer_{n:02d}", like) for n in sorted(stage_of) if n not in there]
    if missing:
        raise MissingData(
            f"{', '.join(missing[:10])} is missing: {models[stage_of[min(set(stage_of) - there)]].key} speaks of "
            "parameters of the layer",
            hint="copy all files of the tag folder; each stage wrote its own, perhaps to its node's disk",
        )
    unknown = [layer for layer in layers if layer.number not in stage_of]
    for key in tied:
        if not any(_tied_key(layer, {key: tied[key]}) for layer in unknown):
            raise MissingData(
                f"no layer's file holds the tied module {key} of {models[0].key}",
                hint="the file of its first layer is missing; copy all files of the tag folder",
            )
