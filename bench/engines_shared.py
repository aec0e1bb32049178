"""What the programs of `bench.engines` share: the sizes of the model, the steps, and its names under each engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

LAYERS, HIDDEN, HEADS, GROUPS, WIDTH, VOCAB = 2, 8, 4, 2, 10, 32
BEFORE, AFTER = 2, 2  # steps: before a save, and after a save or load

#: The names of the pipeline's parameters as patterns, and those of the whole model.
PIPELINE_NAMES = {
    r"0\.(.*)": r"embedding.\1",
    **{rf"{n + 1}\.(.*)": rf"decoder.layers.{n}.\1" for n in range(LAYERS)},
    rf"{LAYERS + 1}\.(final_layernorm.*)": r"decoder.\1",
    rf"{LAYERS + 1}\.(output_layer.*)": r"\1",
}
#: The names of the whole model as patterns, and those of the pipeline's parameters.
NAMES_IN_PIPELINE = {
    r"embedding\.(.*)": r"0.\1",
    **{rf"decoder\.layers\.{n}\.(.*)": rf"{n + 1}.\1" for n in range(LAYERS)},
    r"decoder\.(final_layernorm.*)": rf"{LAYERS + 1}.\1",
    r"(output_layer.*)": rf"{LAYERS + 1}.\1",
}
#: The beginnings of the names of all parameters, also in pipelines.
PARAMETERS = ["embedding.", "decoder.", "output_layer.", *(f"{n}." for n in range(LAYERS + 2))]
#: What a checkpoint of JAX is for the other engines.
FROM_JAX: list[Mapping[str, Any]] = [
    {"give": "opt_state.0.count", "to": "params.*", "state": "step", "dtype": "float32"},
    {"rename_states": {"mu": "exp_avg", "nu": "exp_avg_sq"}},
    {"rename": r"/params\.(.*)/", "to": r"\1"},
]
#: What a checkpoint of another engine is for JAX, but for the number of steps.
TO_JAX: list[Mapping[str, Any]] = [
    {"rename_states": {"exp_avg": "mu", "exp_avg_sq": "nu"}},
    {"rename": "/(.*)/", "to": r"params.\1"},
]
COUNT_FOR_JAX = {"gather": "*", "state": "step", "into": "opt_state.0.count", "dtype": "int32"}
