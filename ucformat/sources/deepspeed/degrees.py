"""How many ranks of each kind of parallelism saved a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.errors import IntegrityError, MissingData
from ucformat.sources.deepspeed.folder import check_world

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.sources.deepspeed.folder import Files
    from ucformat.sources.deepspeed.model import ModelStates

__all__ = ["Degrees"]

_MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class Degrees:
    """Pipeline stages, tensor-parallel ranks of each, data-parallel ranks (sequence-parallel ones too) of those."""

    pp: int
    tp: int
    dp: int

    @classmethod
    def of(cls, files: Files, model: ModelStates, *, others: Sequence[ModelStates] | None = None) -> Degrees:
        """From what the first model states file says, or the files' names; checked against each other.

        `others`: the model states of all model-parallel ranks of a folder of the universal format, which has no
        optimizer's files and no layers'. The ranks of one pipeline stage have parameters of the same names.

        MissingData names the files that are not there, IntegrityError those that are too many.
        """
        pp, tp, mp = model.dims
        in_names = len(next(iter(files.layers.values()))) if files.layers else None
        if pp is None or tp is None:  # before DeepSpeed 0.18 no file says so
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
        if max(pp, tp, dp) > _MOST or pp * tp * dp > _MOST:
            raise IntegrityError(f"{model.key} says that {pp} x {tp} x {dp} ranks saved it")
        wanted = dp if files.zero3 or model.param_shapes is not None else None
        check_world(files, pp * tp, wanted, optims=others is None)
        if others is None:
            _check_layers(files, model)
        if in_names is not None and in_names != tp:
            raise IntegrityError(
                f"{model.key} says that {tp} tensor-parallel ranks saved it, but each layer has {in_names} files",
                hint="files of different saves are mixed in one folder",
            )
        return cls(pp, tp, dp)

    def label(self, pp: int, tp: int, dp: int = 0) -> str:
        """What a rank is called by its place; nothing for the first."""
        if not (pp or tp or dp):
            return ""
        if self.pp == self.tp == 1:
            return str(dp)
        parts = [f"{name}{at}" for name, at, n in (("pp", pp, self.pp), ("tp", tp, self.tp)) if n > 1]
        return ".".join([*parts, *([f"dp{dp}"] if dp else [])])


def _check_layers(files: Files, model: ModelStates) -> None:
    """A pipeline has files of layers, and nothing else has."""
    if model.in_layers and not files.layers:
        raise MissingData(
            f"{model.key} is a pipeline's, but none of its layers (layer_*-model_states.pt) is there",
            hint="copy all files of the tag folder; each stage wrote its own, perhaps to its node's disk",
        )
    if files.layers and not model.in_layers:
        raise IntegrityError(
            f"{next(iter(files.layers.values()))[0]} is a pipeline's, but {model.key} is none's",
            hint="files of different saves are mixed in one folder; move those that you do not want elsewhere",
        )
