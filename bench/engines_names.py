"""The names of the model of `bench.engines` in pipelines of DeepSpeed."""

from __future__ import annotations

LAYERS = 2

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
