"""The parallel degrees of a checkpoint: the numbers of its stages and ranks, and the labels of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.engines.deepspeed.folder import check_world, copy_hint
from ucformat.engines.deepspeed.slices import is_partitioned
from ucformat.errors import IntegrityError, MissingData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.engines.deepspeed.folder import TagFiles
    from ucformat.engines.deepspeed.model_states import ModelStates
    from ucformat.engines.deepspeed.zero import Slice

_MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class ParallelDegrees:
    """The numbers of stages, tensor-parallel ranks, and data- (and sequence-) parallel ranks."""

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
            others: for the universal format, the model states of all model-parallel ranks; ranks of
                one pipeline stage have parameters of the same names. None for other checkpoints.
        """
        pp, tp, mp = model.dims
        in_names = len(next(iter(files.layers.values()))) if files.layers else None
        if pp is None or tp is None:  # before DeepSpeed 0.18 no file has them
            there = mp or len(files.models)
            tp = in_names if in_names is not None else there
            if others is not None and model.in_layers:
                names = [tuple(other.described) for other in others]
                tp = next((i for i, each in enumerate(names) if each != names[0]), len(names))
            pp = there // tp
            if pp * tp != there:
                raise IntegrityError(
                    f"there are {there} model-parallel ranks and layers of {tp} tensor-parallel "
                    "ranks, which do not "
                    "divide them",
                    hint="files of different saves are mixed in one folder",
                )
        dp = model.world or (max(map(len, files.optims)) if files.optims else 1)
        if max(pp, tp, dp) > _MAX_RANKS or pp * tp * dp > _MAX_RANKS:
            raise IntegrityError(f"{model.key} records {pp} x {tp} x {dp} ranks")
        partitioned = model.param_shapes is not None or is_partitioned(model)
        expected_dp = dp if files.zero3 or (partitioned and optimizer) else None
        check_world(files, pp * tp, expected_dp, optims=others is None)
        if others is None:
            _check_layers(files, model)
        if in_names is not None and in_names != tp:
            raise IntegrityError(
                f"{model.key} records {tp} tensor-parallel ranks, but each layer has {in_names} "
                "files",
                hint="files of different saves are mixed in one folder",
            )
        return cls(pp, tp, dp)

    def label(self, pp: int, tp: int, dp: int = 0) -> str:
        """The label of a rank, such as `pp1.tp0`; empty for the first."""
        if not (pp or tp or dp):
            return ""
        if self.pp == self.tp == 1:
            return str(dp)
        axes = (("pp", pp, self.pp), ("tp", tp, self.tp))
        parts = [f"{name}{coordinate}" for name, coordinate, n in axes if n > 1]
        return ".".join([*parts, *([f"dp{dp}"] if dp else [])])

    def layout(self, stage: int | None) -> dict[str, Any]:
        """The stage of ZeRO and the degrees, in the form of manifests."""
        degrees = {axis: n for axis, n in (("tp", self.tp), ("pp", self.pp)) if n > 1}
        return {"zero": stage, "dp": self.dp, **degrees}


def models_by_label(
    degrees: ParallelDegrees, stages: Sequence[Sequence[Slice]]
) -> dict[str, ModelStates]:
    """The model states of all ranks, by their labels."""
    return {
        degrees.label(p, t, d) if d else rank_slice.label: model
        for p, slices in enumerate(stages)
        for t, rank_slice in enumerate(slices)
        for d, model in enumerate(rank_slice.models)
    }


def _check_layers(files: TagFiles, model: ModelStates) -> None:
    """Check that a pipeline has files of layers, and other checkpoints have none."""
    if model.in_layers and not files.layers:
        raise MissingData(
            f"{model.key} is a pipeline's, but the files of its layers (layer_*-model_states.pt) "
            "are missing",
            hint=copy_hint("stage"),
        )
    if files.layers and not model.in_layers:
        raise IntegrityError(
            f"{next(iter(files.layers.values()))[0]} is a pipeline's, but {model.key} is not",
            hint=(
                "files of different saves are mixed in one folder; move those that you do not "
                "want elsewhere"
            ),
        )
