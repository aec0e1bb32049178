"""The model of the paper's table, what becomes of it on each rank, and that once more as layouts of ucformat.

`expected` cuts, joins and pads with NumPy alone, as Megatron-DeepSpeed and DeepSpeed do it: nothing
of it goes through ucformat's geometry, which it is to prove.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.engines.deepspeed.megatron_deepspeed import FLAT, PAPER_SOURCES, Model, gpt, write
from ucformat.geometry.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "SOURCES",
    "TARGETS",
    "Degrees",
    "Truth",
    "expected",
    "layout",
    "needed",
    "to_gpt_model",
    "write_source",
]

Arrays = dict[tuple[str, str], Any]  # (name, state) -> array

HEADS, GROUPS, SIZE, INNER, LAYERS, VOCAB, SEQ = 4, 2, 3, 2050, 2, 27, 7
HIDDEN = HEADS * SIZE
# grouped-query attention: fewer rows of keys and values
QKV = (HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE)
FIRST_LAYERS = (0, 1)  # of the stages of two
DIVISIBLE = 4  # the vocabulary is padded to a multiple of this times TP, so to 28 or 32 rows
LAYER = "language_model.encoder.layers."
EMBEDDING, POSITIONS = (
    f"language_model.embedding.{n}_embeddings.weight" for n in ("word", "position")
)
FROZEN = f"{LAYER}1.mlp.dense_4h_to_h.weight"


class Degrees(NamedTuple):
    """A configuration of the paper: (TP, PP, DP(stage), SP)."""

    tp: int
    pp: int
    dp: int
    zero: int
    sp: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.sp

    def __str__(self) -> str:
        return (
            "×".join(map(str, (self.tp, self.pp, self.dp, self.sp)[: 3 + (self.sp > 1)]))
            + f" Z{self.zero}"
        )


SOURCES = tuple(Degrees(*given) for given in PAPER_SOURCES)
#: Of the paper's figure "Single source".
TARGETS = tuple(
    Degrees(*given)
    for given in (
        (1, 1, 1, 1, 1), (1, 1, 2, 3, 1), (1, 1, 2, 1, 2), (1, 1, 4, 2, 1), (1, 1, 4, 3, 1), (1, 2, 2, 1, 1),
        (2, 1, 1, 1, 1), (2, 1, 2, 1, 1), (2, 1, 2, 2, 1), (2, 2, 1, 1, 1), (2, 2, 2, 1, 1),
    )
)  # fmt: skip


def model(degrees: Degrees) -> Model:
    """The model: tied embeddings, a padded vocabulary, GQA, SwiGLU, norms, biases, one frozen parameter."""
    made = gpt(
        hidden=HIDDEN, heads=HEADS, kv=GROUPS, inner=INNER, layers=LAYERS, vocab=VOCAB, seq=SEQ, swiglu=True,
        pipe=degrees.pp > 1,
    )  # fmt: skip
    fused = [n for n in made.names if "query_key_value" in n]
    for name in fused:
        made.cuts[name] = [[n // degrees.tp] * degrees.tp for n in QKV]
    made.info["parameter_with_sub_params"] = [
        {
            "patterns": [f"^{n}$" for n in fused if n.endswith(end)],
            "shape": shape,
            "partition_dim": 0,
        }
        for end, shape in ((".weight", (QKV, HIDDEN)), (".bias", (QKV,)))
    ]
    made.frozen = tuple(n for n in made.names if to_gpt_model(n) == FROZEN)
    return made


def to_gpt_model(name: str) -> str:
    """What GPTModel calls a parameter of GPTModelPipe; its own names are unchanged."""
    first, _, rest = name.partition(".")
    if first == "tied_modules":
        return f"language_model.embedding.{rest.partition('.')[2]}"
    if not first.isdecimal():
        return name
    number = int(first) - 2
    return (
        f"language_model.encoder.final_layernorm.{rest}"
        if number == LAYERS
        else f"{LAYER}{number}.{rest}"
    )


@dataclass(frozen=True)
class Truth:
    """The logical tensors under GPTModel's names, in its order, as one source holds them."""

    arrays: Mapping[tuple[str, str], Any]
    padding: Mapping[tuple[str, str], Any]  # trained rows of the vocabulary's padding

    @cached_property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.arrays))

    @cached_property
    def groups(self) -> list[list[str]]:
        """The optimizer's: matrices, then vectors."""
        trained = [n for n in self.names if n != FROZEN]
        return [
            [n for n in trained if (self.arrays[n, "master"].ndim > 1) == big]
            for big in (True, False)
        ]

    @cached_property
    def ones(self) -> Truth:
        """Ones in place of every element: what is one on a rank is an element of a tensor, what is zero is not."""
        return Truth(
            {k: np.ones_like(a) for k, a in self.arrays.items()},
            {k: np.ones_like(a) for k, a in self.padding.items()},
        )

    @cached_property
    def shapes(self) -> frozenset[object]:
        """What says how many elements each rank holds."""
        return frozenset(
            (k, a.shape) for part in (self.arrays, self.padding) for k, a in part.items()
        )


def write_source(folder: Path, degrees: Degrees) -> Truth:
    """Write a checkpoint of the model as these ranks would; its truth."""
    tp, pp, dp, zero, sp = degrees
    made = model(degrees)
    written = write(folder, made, tp=tp, pp=pp, dp=dp, zero=zero, sp=sp, divisible=DIVISIBLE)
    arrays: Arrays = {}
    padding: Arrays = {}
    for name in made.names:
        for state in ("weight", *FLAT):
            key = (to_gpt_model(name), state)
            if (state, name) in written:
                arrays[key] = written[state, name]
            if (f"{state}.padding", name) in written:
                padding[key] = written[f"{state}.padding", name]
        if name not in made.frozen:
            arrays[to_gpt_model(name), "step"] = np.array(3, np.float32)
    return Truth(arrays, padding)


def expected(truth: Truth, degrees: Degrees, rank: int) -> Arrays:
    """What a rank holds, by (name, state), flat buffers by (`flat:<group>`, state)."""
    rest, t = divmod(rank, degrees.tp)
    rest, s = divmod(rest, degrees.sp)
    stage, d = divmod(rest, degrees.dp)
    # sequence-parallel ranks count as data-parallel ones
    ways, way = (degrees.dp * degrees.sp, d * degrees.sp + s)
    out: Arrays = {}
    for (name, state), a in truth.arrays.items():
        if not _on_stage(name, stage, degrees.pp):
            continue
        local = a if state == "step" else _local(truth, name, state, t, degrees.tp)
        if state not in FLAT and (degrees.zero < 3 or state == "step"):
            out[name, state] = local
        elif name == FROZEN:
            out[f"flat:{name}", state] = _part(local, way, ways)
    for state in (*FLAT, "weight") if degrees.zero == 3 else FLAT:
        for g, names in enumerate(truth.groups):
            held = [
                _local(truth, n, state, t, degrees.tp)
                for n in names
                if (n, state) in truth.arrays and _on_stage(n, stage, degrees.pp)
            ]
            if held and degrees.zero == 3:  # each parameter is cut, its parts joined
                out[f"flat:{g}", state] = np.concatenate([_part(a, way, ways) for a in held])
            elif held:  # joined, padded to whole partitions of an even number of elements, cut
                flat = np.concatenate([a.reshape(-1) for a in held])
                flat = np.concatenate([flat, np.zeros(-flat.size % (2 * ways), flat.dtype)])
                out[f"flat:{g}", state] = np.split(flat, ways)[way]
    return out


def needed(truth: Truth, degrees: Degrees) -> int:
    """The bytes of the tensors' elements that all ranks hold, flat buffers' padding not counted."""
    which = (truth.shapes, degrees)  # the values do not matter
    if which not in _NEEDED:
        held = (
            a for rank in range(degrees.ranks) for a in expected(truth.ones, degrees, rank).values()
        )
        _NEEDED[which] = sum(int(np.count_nonzero(a)) * int(a.itemsize) for a in held)
    return _NEEDED[which]


_NEEDED: dict[object, int] = {}


def _on_stage(name: str, stage: int, stages: int) -> bool:
    """Tied embeddings are in the first stage and in the last."""
    if stages == 1 or "embedding" in name:
        return True
    layer = int(name.removeprefix(LAYER).split(".")[0]) if name.startswith(LAYER) else LAYERS
    return (layer >= FIRST_LAYERS[1]) == (stage == 1)


def _local(truth: Truth, name: str, state: str, t: int, tp: int) -> Any:
    """A tensor-parallel rank's part."""
    a = truth.arrays[name, state]
    if name == EMBEDDING:
        rows = -len(a) % (DIVISIBLE * tp)
        spare = truth.padding.get((name, state), a[:0])
        # trained as many, or none
        spare = spare if len(spare) == rows else np.zeros((rows, *a.shape[1:]), a.dtype)
        return np.split(np.concatenate([a, spare]), tp)[t]
    if "query_key_value" in name:
        q, k, v = np.split(a, np.cumsum(QKV[:-1]))
        return np.concatenate([np.split(part, tp)[t] for part in (q, k, v)])
    if "dense_h_to_4h" in name:
        gate, up = np.split(a, 2)
        return np.concatenate([np.split(gate, tp)[t], np.split(up, tp)[t]])
    if name.endswith(("dense.weight", "dense_4h_to_h.weight")):
        return np.split(a, tp, axis=1)[t]
    return a


def _part(a: Any, way: int, ways: int) -> Any:
    """A data-parallel rank's part of one parameter under ZeRO 3."""
    size = -(-a.size // ways)
    return np.concatenate([a.reshape(-1), np.zeros(size * ways - a.size, a.dtype)])[
        way * size : (way + 1) * size
    ]


def layout(degrees: Degrees) -> Layout:
    """The same in ucformat's words."""
    tp, pp, dp, zero, sp = degrees
    flat: dict[str, Any] = {"flat": "optimizer", "over": ["dp", "sp"]}
    flat |= {"cut": "before_join"} if zero == 3 else {"group_pad": 2}
    column = {"shard": 0, "over": "tp"}
    return Layout.parse(
        {
            "version": 1,
            "mesh": {"pp": pp, "dp": dp, "sp": sp, "tp": tp},
            "stages": [
                {
                    "match": r"/language_model\.encoder\.layers\.(\d+)\..*/",
                    "place": [{"stage": list(FIRST_LAYERS[:pp]), "over": "pp"}],
                },
                {"match": [EMBEDDING, POSITIONS], "place": ["replicate"]},
                {"match": "*", "place": [{"stage": -1, "over": "pp"}]},
            ],
            "rules": [
                {"match": "*", "states": ["step"], "place": ["replicate"]},
                {"match": EMBEDDING, "place": [{**column, "pad_to": DIVISIBLE * tp}]},
                {"match": "*.query_key_value.*", "place": [{**column, "parts": list(QKV)}]},
                {"match": "*.dense_h_to_4h.*", "place": [{**column, "parts": [1, 1]}]},
                {
                    "match": ["*.dense.weight", "*.dense_4h_to_h.weight"],
                    "place": [{"shard": 1, "over": "tp"}],
                },
                {"match": "*", "place": ["replicate"]},
            ],
            "data": [
                {
                    "match": FROZEN,
                    "place": [{**flat, "flat": "tensor"} if zero == 3 else "replicate"],
                },
                {
                    "match": "*",
                    "states": [*FLAT, *(["weight"] if zero == 3 else [])],
                    "place": [flat],
                },
                {"match": "*", "place": ["replicate"]},
            ],
        }
    )
