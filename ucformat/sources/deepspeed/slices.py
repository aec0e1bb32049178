"""One model-parallel rank of a checkpoint: what its files hold, in the coordinates of its local tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucformat.errors import IntegrityError, Refused
from ucformat.sources.deepspeed.contents import zero_options
from ucformat.sources.deepspeed.replicas import LocalContents
from ucformat.sources.deepspeed.zero0 import read_zero0
from ucformat.sources.deepspeed.zero3 import Zero3, add_frozen
from ucformat.sources.deepspeed.zero12 import Zero12

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.sources.deepspeed.experts import Experts
    from ucformat.sources.deepspeed.model import ModelStates

__all__ = ["Slice", "read_slice", "read_weights"]


@dataclass(slots=True)
class Slice:
    """The tensors of one pipeline stage as one tensor-parallel rank holds them."""

    models: list[ModelStates]  # one, or under ZeRO 3 one for each data-parallel rank
    label: str  # "" of the first
    contents: LocalContents
    aliases: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)  # parameters whose values are in no file
    stage: int = 0
    degrees: tuple[int, ...] = ()  # expert-parallel ranks of each optimizer group

    @property
    def model(self) -> ModelStates:
        """The first data-parallel rank's."""
        return self.models[0]


def read_slice(
    models: list[ModelStates],
    optims: tuple[str, ...],
    label: str,
    allow: tuple[str, ...],
    *,
    zero3: bool,
    shared: dict[str, str] | None,
    names: Sequence[Sequence[str]] | None,
    experts: Experts | None = None,
) -> Slice:
    """Read one model-parallel rank's files.

    `shared`: the tied names that the first rank's file tells; `names`: the parameters of each optimizer group.
    """
    out, placeholders = read_weights(models, label, zero3=zero3, shared=shared)
    model, contents = out.model, out.contents
    if zero_options(model.value).get("mics_shard_size", -1) not in (-1, 0, None):
        raise Refused(f"{model.key}: DeepSpeed checkpoints with MiCS are not yet read")
    if not zero3 and model.param_shapes is None and optims:
        raise Refused(
            f"{optims[0]} is there, but {model.key} has no `param_shapes`: a BF16_Optimizer without ZeRO, perhaps; "
            "such checkpoints are not yet read"
        )
    if zero3:
        Zero3(model, optims, allow, contents)
    elif model.param_shapes is not None:
        zero = Zero12(model, optims, allow, contents, experts)
        out.stage, out.degrees = zero.stage, tuple(zero.degrees)
    else:
        read_zero0(model, names, contents)
    found = {key.name for key in contents.infos}
    out.lost = [name for name in placeholders if name not in found]
    return out


def read_weights(
    models: list[ModelStates], label: str, *, zero3: bool, shared: dict[str, str] | None
) -> tuple[Slice, list[str]]:
    """What the model states files of one model-parallel rank hold, and the names of empty placeholders in them."""
    model = models[0]
    contents = LocalContents(f"{label}." if label else "")
    out = Slice(models, label, contents, model.aliases(zero3=zero3, shared=shared), stage=3 if zero3 else 0)
    if not zero3:
        return out, _add_weights(out)
    placeholders = _add_buffers(out)
    add_frozen(models, contents)
    return out, placeholders


def _add_weights(of: Slice) -> list[str]:
    """The module's tensors, each once."""
    model = of.model
    for name, tensor in model.module.items():
        if name not in of.aliases:
            of.contents.add_whole(name, "weight", model.home(name), tensor)
    for alias, name in of.aliases.items():
        if name not in model.module and name not in model.described:
            raise IntegrityError(f"{model.key}: {alias} is tied to {name}, which is not in the checkpoint")
    return []


def _add_buffers(of: Slice) -> list[str]:
    """The buffers of a ZeRO 3 module, as rank 0 has them; returns the names of its empty placeholders."""
    model = of.model
    described = model.described.keys() | model.frozen_shapes.keys()
    placeholders = []
    for name, tensor in model.module.items():
        if name in model.buffers or (tensor.size and name not in described and name not in of.aliases):
            of.contents.add_whole(name, "weight", model.file, tensor)
        elif name not in of.aliases:
            placeholders.append(name)
    return placeholders
