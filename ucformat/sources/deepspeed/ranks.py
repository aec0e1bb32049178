"""The parallel degrees of a checkpoint, and the tensors in the files of one model-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucformat.errors import IntegrityError, MissingData, UnsupportedError
from ucformat.sources.deepspeed.contents import zero_options
from ucformat.sources.deepspeed.folder import check_world
from ucformat.sources.deepspeed.zero0 import read_zero0
from ucformat.sources.deepspeed.zero3 import Zero3, add_frozen
from ucformat.sources.deepspeed.zero12 import Zero12
from ucformat.sources.tp_merge.replicas import LocalContents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.sources.deepspeed.experts import Experts
    from ucformat.sources.deepspeed.folder import TagFiles
    from ucformat.sources.deepspeed.model import ModelStates
    from ucformat.sources.pickle.file import TorchFile


@dataclass(slots=True)
class Slice:
    """The tensors of one pipeline stage as one tensor-parallel rank holds them."""

    models: list[ModelStates]  # one, or under ZeRO 3 one for each data-parallel rank
    label: str  # "" for the first
    contents: LocalContents
    aliases: dict[str, str] = field(default_factory=dict)
    not_stored: list[str] = field(default_factory=list)  # parameters whose values are in no file
    stage: int = 0
    degrees: tuple[int, ...] = ()  # expert-parallel ranks of each optimizer group

    @property
    def model(self) -> ModelStates:
        """The first data-parallel rank's model states."""
        return self.models[0]


def read_slice(
    models: list[ModelStates],
    optims: tuple[str, ...],
    label: str,
    load: Callable[[str], TorchFile],
    *,
    zero3: bool,
    shared: dict[str, str] | None,
    names: Sequence[Sequence[str]] | None,
    experts: Experts | None = None,
    optimizer: bool = True,
) -> Slice:
    """Read one model-parallel rank's files.

    Args:
        shared: the tied names in the first rank's file; None if it has none.
        names: the names of each optimizer group's parameters, for ZeRO 0; None: they are derived.
    """
    out, placeholders = read_weights(models, label, zero3=zero3, shared=shared)
    model, contents = out.model, out.contents
    if zero_options(model.value).get("mics_shard_size", -1) not in (-1, 0, None):
        raise UnsupportedError(f"{model.key}: DeepSpeed checkpoints with MiCS are not yet read")
    if not zero3 and model.param_shapes is None and optims:
        raise UnsupportedError(
            f"{optims[0]} exists, but {model.key} has no `param_shapes`: a BF16_Optimizer without ZeRO, perhaps; "
            "such checkpoints are not yet read"
        )
    if not optimizer:
        stage = zero_options(model.value).get("stage")
        out.stage = stage if type(stage) is int and 0 <= stage < 3 else 0
    elif zero3:
        Zero3(model, optims, load, contents)
    elif model.param_shapes is not None:
        zero = Zero12(model, optims, load, contents, experts)
        out.stage, out.degrees = zero.stage, tuple(zero.degrees)
    else:
        read_zero0(model, names, contents)
    found = {key.name for key in contents.infos}
    out.not_stored = [name for name in placeholders if name not in found]
    return out


def read_weights(
    models: list[ModelStates], label: str, *, zero3: bool, shared: dict[str, str] | None
) -> tuple[Slice, list[str]]:
    """Read the model states files of one model-parallel rank.

    Args:
        shared: the tied names in the first rank's file; None if it has none.

    Returns:
        the rank's tensors, and the names of empty placeholders.
    """
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


_MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class ParallelDegrees:
    """The numbers of pipeline stages, tensor-parallel ranks, and data-parallel (including sequence-parallel) ranks."""

    pp: int
    tp: int
    dp: int

    @classmethod
    def of(
        cls,
        files: TagFiles,
        model: ModelStates,
        *,
        others: Sequence[ModelStates] | None = None,
        optimizer: bool = True,
    ) -> ParallelDegrees:
        """The degrees from the first model states file or the files' names, checked against each other.

        Args:
            others: for the universal format, the model states of all model-parallel ranks; ranks of one pipeline stage
                have parameters of the same names. None for other checkpoints.
        """
        pp, tp, mp = model.dims
        in_names = len(next(iter(files.layers.values()))) if files.layers else None
        if pp is None or tp is None:  # before DeepSpeed 0.18 no file has them
            there = mp or len(files.models)
            tp = in_names if in_names is not None else there
            if others is not None and model.in_layers:
                names = [tuple(of.described) for of in others]
                tp = next((i for i, of in enumerate(names) if of != names[0]), len(names))
            pp = there // tp
            if pp * tp != there:
                raise IntegrityError(
                    f"there are {there} model-parallel ranks and layers of {tp} tensor-parallel ranks, which do not "
                    "divide them",
                    hint="files of different saves are mixed in one folder",
                )
        dp = model.world or (max(map(len, files.optims)) if files.optims else 1)
        if max(pp, tp, dp) > _MAX_RANKS or pp * tp * dp > _MAX_RANKS:
            raise IntegrityError(f"{model.key} records {pp} x {tp} x {dp} ranks")
        wanted = dp if files.zero3 or (model.param_shapes is not None and optimizer) else None
        check_world(files, pp * tp, wanted, optims=others is None)
        if others is None:
            _check_layers(files, model)
        if in_names is not None and in_names != tp:
            raise IntegrityError(
                f"{model.key} records {tp} tensor-parallel ranks, but each layer has {in_names} files",
                hint="files of different saves are mixed in one folder",
            )
        return cls(pp, tp, dp)

    def label(self, pp: int, tp: int, dp: int = 0) -> str:
        """The label of a rank, such as `pp1.tp0`; empty for the first."""
        if not (pp or tp or dp):
            return ""
        if self.pp == self.tp == 1:
            return str(dp)
        parts = [f"{name}{at}" for name, at, n in (("pp", pp, self.pp), ("tp", tp, self.tp)) if n > 1]
        return ".".join([*parts, *([f"dp{dp}"] if dp else [])])


def _check_layers(files: TagFiles, model: ModelStates) -> None:
    """Check that a pipeline has files of layers, and other checkpoints have none."""
    if model.in_layers and not files.layers:
        raise MissingData(
            f"{model.key} is a pipeline's, but the files of its layers (layer_*-model_states.pt) are missing",
            hint="copy all files of the tag folder; each stage wrote its own, perhaps to its node's disk",
        )
    if files.layers and not model.in_layers:
        raise IntegrityError(
            f"{next(iter(files.layers.values()))[0]} is a pipeline's, but {model.key} is not",
            hint="files of different saves are mixed in one folder; move those that you do not want elsewhere",
        )
