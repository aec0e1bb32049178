"""BF16_Optimizer without ZeRO: its flat groups are cut like those of ZeRO 1, and no file has `param_shapes`.

DeepSpeed 0.19.8 uses it for pipelines in bf16. The file of each data-parallel rank names the
parameters in its partition (`param_slice_mappings`: name -> place there, elements); all files of a
stage together name all of them, in order. Their shapes are those of the weights. `optimizer` in the
model states repeats what the file of rank 0 has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.engines.deepspeed.folder import copy_hint
from ucformat.engines.deepspeed.model_states import need
from ucformat.engines.deepspeed.pipeline import TIED, tied_name
from ucformat.errors import IntegrityError, MissingData
from ucformat.reading.stand_ins import Inert

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ucformat.engines.deepspeed.model_states import ModelStates
    from ucformat.engines.deepspeed.pipeline import Layer
    from ucformat.sources.pickle.file import TorchFile

    Sizes = list[dict[str, int]]  # by group, the elements of each parameter by name
    Shape = tuple[int, ...]

_MAPPINGS = "param_slice_mappings"


def is_partitioned(model: ModelStates) -> bool:
    """Whether the optimizer is a BF16_Optimizer that was saved without ZeRO."""
    optimizer = model.value.get("optimizer")
    return isinstance(optimizer, dict) and "base_optimizer_state" in optimizer


def describe(
    models: Sequence[ModelStates],
    optims: Sequence[Iterable[TorchFile]],
    layers: Sequence[Layer],
) -> None:
    """Give the stages of one tensor-parallel rank the shapes of their parameters, by group.

    Args:
        optims: the optimizer files of each stage, by data-parallel rank.
        layers: those of a pipeline; else none.
    """
    sizes = [_sizes(files) for files in optims]
    numbers = {name.partition(".")[0] for groups in sizes for group in groups for name in group}
    unnumbered = [layer for layer in layers if str(layer.number) not in numbers]
    by_number = {str(layer.number): layer for layer in layers}
    for model, groups in zip(models, sizes, strict=True):
        tied = _tied_shapes(groups, unnumbered, model.key) if layers else {}
        model.param_shapes = [
            {name: tied.get(name) or _shape(name, n, model, by_number) for name, n in group.items()}
            for group in groups
        ]


def _sizes(files: Iterable[TorchFile]) -> Sizes:
    """The parameters of each group in the partitions of all ranks, in order."""
    sizes: Sizes = []
    for file in files:
        state = need(file.value, "optimizer_state_dict", dict, file.key)
        mappings = need(state, _MAPPINGS, list, file.key)
        sizes = sizes or [{} for _ in mappings]
        if len(mappings) != len(sizes) or not all(isinstance(m, dict) for m in mappings):
            raise IntegrityError(
                f"{file.key} has no usable {_MAPPINGS!r}, or of another number of groups than that "
                "of the first rank",
                hint="files of different saves are mixed in one folder",
            )
        for group, mapping in zip(sizes, mappings, strict=True):
            for name, address in mapping.items():
                elements = address.get("numel") if isinstance(address, Inert) else None
                if type(elements) is not int or elements < 0 or not isinstance(name, str):
                    raise IntegrityError(f"{file.key} has no usable {_MAPPINGS!r}")
                group[name] = group.get(name, 0) + elements
    return sizes


def _shape(name: str, size: int, model: ModelStates, layers: Mapping[str, Layer]) -> Shape:
    """The shape of a parameter's weight, which has as many elements as the partitions have of it."""
    number, _, inner = name.partition(".")
    layer = layers.get(number)
    tensor = model.module.get(name) if layer is None else layer.tensors.get(inner)
    if tensor is None:
        raise MissingData(
            f"{name}: the optimizer of {model.key} has it, and no file has its weight",
            hint=copy_hint("stage") if layers else copy_hint(weights=True),
        )
    if tensor.size != size:
        raise IntegrityError(
            f"{name} has {tensor.size} elements ({list(tensor.shape)}), and the partitions of the "
            f"optimizer of {model.key} have {size}",
            hint="files of different saves are mixed in one folder",
        )
    return tensor.shape


def _tied_shapes(groups: Sizes, layers: Sequence[Layer], file: str) -> dict[str, Shape]:
    """The shapes of the parameters of tied modules: those in a layer that has all of them in these sizes."""
    by_key: dict[str, dict[str, int]] = {}
    for group in groups:
        for name, size in group.items():
            if (tied := tied_name(name)) is not None:
                key, inner = tied
                by_key.setdefault(key, {})[inner] = size
    shapes: dict[str, Shape] = {}
    for key, sizes in by_key.items():
        own = {
            tuple((inner, layer.tensors[inner].shape) for inner in sizes)
            for layer in layers
            if all(
                inner in layer.tensors and layer.tensors[inner].size == size
                for inner, size in sizes.items()
            )
        }
        if not own:
            raise MissingData(
                f"no layer's file holds the tied module {key} of {file} in the sizes that the "
                f"partitions of its optimizer have: {sizes}",
                hint=(
                    "the file of its first layer is missing, or files of different saves are mixed "
                    "in one folder; copy all files of the tag folder"
                ),
            )
        if len(own) > 1:
            raise IntegrityError(
                f"several layers may be the tied module {key} of {file}: they have as many "
                "elements in other shapes",
                hint="such pipelines are not yet read; please report this checkpoint",
            )
        shapes |= {f"{TIED}{key}.{inner}": shape for inner, shape in own.pop()}
    return shapes
