"""What the programs of `bench.engines` share: the sizes of the models, the steps, and their names under each engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LAYERS, HIDDEN, HEADS, GROUPS, WIDTH, VOCAB = 2, 8, 4, 2, 10, 32
EXPERTS, CHOSEN = 4, 2  # in each layer of the model of experts, and for each token
BEFORE, AFTER = 2, 2  # steps: before a save, and after a save or load

Steps = list[Mapping[str, Any]]


@dataclass(frozen=True)
class Names:
    """How a checkpoint of an engine becomes one under the names and shapes of the whole model, and the reverse.

    Attributes:
        view: the steps from the engine to the whole model.
        into: the steps from there to the engine.
        rename: what a load maps instead, from patterns of names of the whole model.
    """

    view: Steps = field(default_factory=list)
    into: Steps = field(default_factory=list)
    rename: Mapping[str, str] = field(default_factory=dict)


WHOLE = Names()

# The dense model has Megatron's names.

#: DeepSpeed's pipelines number their layers.
PIPELINE = Names(
    [
        {"rename": rf"/{name}/", "to": to}
        for name, to in {
            r"0\.(.*)": r"embedding.\1",
            **{rf"{n + 1}\.(.*)": rf"decoder.layers.{n}.\1" for n in range(LAYERS)},
            rf"{LAYERS + 1}\.(final_layernorm.*)": r"decoder.\1",
            rf"{LAYERS + 1}\.(output_layer.*)": r"\1",
        }.items()
    ],
    rename={
        r"embedding\.(.*)": r"0.\1",
        **{rf"decoder\.layers\.{n}\.(.*)": rf"{n + 1}.\1" for n in range(LAYERS)},
        r"decoder\.(final_layernorm.*)": rf"{LAYERS + 1}.\1",
        r"(output_layer.*)": rf"{LAYERS + 1}.\1",
    },
)
JAX = Names(
    [
        {"give": "opt_state.0.count", "to": "params.*", "state": "step", "dtype": "float32"},
        {"rename_states": {"mu": "exp_avg", "nu": "exp_avg_sq"}},
        {"rename": r"/params\.(.*)/", "to": r"\1"},
    ],
    [
        {"rename_states": {"exp_avg": "mu", "exp_avg_sq": "nu"}},
        {"rename": "/(.*)/", "to": r"params.\1"},
    ],
)
#: The number of steps, where each tensor has it.
COUNT_FOR_JAX = {"gather": "*", "state": "step", "into": "opt_state.0.count", "dtype": "int32"}

# The model of experts has the names of Hugging Face's Mixtral, whose experts are stacked.

_HEADS = {"heads": HEADS, "groups": GROUPS}
#: Each expert is apart, and so are no halves of gated projections.
MEGATRON = Names(
    [{"preset": "megatron-to-mixtral", "with": {**_HEADS, "fused": True}}],
    [{"preset": "mixtral-to-megatron", "with": {**_HEADS, "local": True}}],
)
_MLP = r"(model\.layers\.\d+\.mlp\.)"
#: DeepSpeed's AutoEP takes the halves of gated projections apart.
AUTOEP = Names(
    [
        {"rename": rf"/{_MLP}router\.gate\.weight/", "to": r"\1gate.weight"},
        {
            "fuse": rf"/{_MLP}experts\.w1/",
            "and": [r"\1experts.w3"],
            "into": r"\1experts.gate_up_proj",
            "dim": 1,
        },
        {"rename": rf"/{_MLP}experts\.w2/", "to": r"\1experts.down_proj"},
    ],
    [
        {"rename": rf"/{_MLP}gate\.weight/", "to": r"\1router.gate.weight"},
        {
            "split": rf"/{_MLP}experts\.gate_up_proj/",
            "into": [r"\1experts.w1", r"\1experts.w3"],
            "dim": 1,
        },
        {"rename": rf"/{_MLP}experts\.down_proj/", "to": r"\1experts.w2"},
    ],
)
_TURNED = {"transpose": "/.*\\.w[io](_[01])?/", "axes": [0, 2, 1]}
#: The model in JAX multiplies by the experts from the other side, as MaxText's does.
JAX_EXPERTS = Names(
    [
        *JAX.view,
        _TURNED,
        {
            "fuse": rf"/{_MLP}experts\.wi_0/",
            "and": [r"\1experts.wi_1"],
            "into": r"\1experts.gate_up_proj",
            "dim": 1,
        },
        {"rename": rf"/{_MLP}experts\.wo/", "to": r"\1experts.down_proj"},
    ],
    [
        {
            "split": rf"/{_MLP}experts\.gate_up_proj/",
            "into": [r"\1experts.wi_0", r"\1experts.wi_1"],
            "dim": 1,
        },
        {"rename": rf"/{_MLP}experts\.down_proj/", "to": r"\1experts.wo"},
        _TURNED,
        *JAX.into,
    ],
)
#: The beginnings of the names of all parameters, under any engine.
PARAMETERS = [
    *("embedding.", "decoder.", "output_layer.", "model.", "lm_head."),
    *(f"{n}." for n in range(LAYERS + 2)),
]
