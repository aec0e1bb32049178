"""Checkpoints as Megatron-DeepSpeed's GPT lays them out, of any tensors, mesh and ZeRO stage, without running it.

Megatron-DeepSpeed needs CUDA, so its files are written here: `module` nested as its language model
nests it, or a file for each layer of a pipeline; the flat groups of ZeRO 1 and 2, the cut groups of
ZeRO 3; the vocabulary padded; its patterns in `universal_checkpoint_info`. The mesh is pipeline
stages x tensor-parallel ranks x data-parallel ranks.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from tests.zero_files import partition

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["FLAT", "PAPER_SOURCES", "Model", "gpt", "write"]

FLAT = ("master", "exp_avg", "exp_avg_sq")

#: The sources of the paper's table: tensor-, pipeline-, data-parallel ranks, ZeRO stage,
#: sequence-parallel ranks.
PAPER_SOURCES = (
    (1, 1, 2, 1, 2),
    (1, 1, 4, 3, 1),
    (2, 1, 1, 1, 1),
    (2, 1, 2, 1, 1),
    (2, 2, 1, 1, 1),
    (1, 2, 2, 1, 1),
    (2, 2, 2, 1, 1),
)

Arrays = dict[tuple[str, str], Any]  # (name, state) -> array


@dataclass
class Model:
    """Logical tensors in fp32, in the order of the module, and how they are cut over tensor-parallel ranks.

    `cuts`: name -> `replicate`, `column`, `row`, `swiglu`, `mean` (each rank has values of its own,
    drawn around the tensor's), or the widths of sub-parameters along dim 0, for each of them one
    for each rank. `stages`: the pipeline stages of each name.
    """

    arrays: Arrays
    cuts: dict[str, Any]
    vocabulary: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    pipe: bool = False
    layers: dict[str, int] = field(default_factory=dict)  # the file of each name; pipelines alone
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.arrays))


def gpt(
    *, hidden: int = 12, heads: int = 3, kv: int = 3, inner: int = 18, layers: int = 2, vocab: int = 29, seq: int = 7,
    swiglu: bool = False, untied: bool = False, pipe: bool = False, seed: int = 0,
) -> Model:  # fmt: skip
    """A GPT's tensors under Megatron-DeepSpeed's names, and its patterns."""
    rng = np.random.default_rng(seed)
    size, up = hidden // heads, inner * (2 if swiglu else 1)
    embed = "1." if untied else "tied_modules.embed."
    top = embed if pipe else "language_model.embedding."
    shapes: dict[str, tuple[int, ...]] = {top + "word_embeddings.weight": (vocab, hidden)}
    shapes[top + "position_embeddings.weight"] = (seq, hidden)
    cuts: dict[str, Any] = {
        top + "word_embeddings.weight": "column",
        top + "position_embeddings.weight": "replicate",
    }
    at = dict.fromkeys(shapes, 1)
    for i in range(layers):
        of = f"{i + 2}." if pipe else f"language_model.encoder.layers.{i}."
        layer: list[tuple[str, tuple[int, ...], str]] = [
            ("input_layernorm.weight", (hidden,), "replicate"),
            ("input_layernorm.bias", (hidden,), "replicate"),
            ("self_attention.query_key_value.weight", ((heads + 2 * kv) * size, hidden), "column"),
            ("self_attention.query_key_value.bias", ((heads + 2 * kv) * size,), "column"),
            ("self_attention.dense.weight", (hidden, hidden), "row"),
            ("self_attention.dense.bias", (hidden,), "replicate"),
            ("post_attention_layernorm.weight", (hidden,), "replicate"),
            ("post_attention_layernorm.bias", (hidden,), "replicate"),
            ("mlp.dense_h_to_4h.weight", (up, hidden), "swiglu" if swiglu else "column"),
            ("mlp.dense_h_to_4h.bias", (up,), "swiglu" if swiglu else "column"),
            ("mlp.dense_4h_to_h.weight", (hidden, inner), "row"),
            ("mlp.dense_4h_to_h.bias", (hidden,), "replicate"),
        ]
        for name, shape, cut in layer:
            shapes[of + name], cuts[of + name], at[of + name] = shape, cut, i + 2
    last = f"{layers + 2}." if pipe else "language_model.encoder.final_layernorm."
    for name in ("weight", "bias"):
        shapes[last + name], cuts[last + name], at[last + name] = (hidden,), "replicate", layers + 2
    vocabulary = [top + "word_embeddings.weight"]
    if untied:
        head = f"{layers + 3}.lm_head.weight" if pipe else "language_model.output_layer.weight"
        shapes[head], cuts[head], at[head] = (vocab, hidden), "column", layers + 3
        vocabulary.append(head)
    arrays: Arrays = {}
    for name, shape in shapes.items():
        for state in FLAT:
            arrays[name, state] = rng.standard_normal(shape).astype(np.float32)
    return Model(arrays, cuts, tuple(vocabulary), (), pipe, at, _patterns(pipe, untied, swiglu))


def _patterns(pipe: bool, untied: bool, swiglu: bool) -> dict[str, Any]:
    """What `UniversalCheckpointInfo` of Megatron-DeepSpeed's gpt_model.py says, unescaped as there."""
    of = "" if pipe else "language_model.encoder.layers."
    top = ("" if untied else "tied_modules.embed.") if pipe else "language_model.embedding."
    vocabulary = [
        r"\d+.word_embeddings.weight" if pipe and untied else top + "word_embeddings.weight"
    ]
    if untied:
        vocabulary.append(r"\d+.lm_head.weight" if pipe else "language_model.output_layer.weight")
    norms = [r"\d+.input_layernorm", r"\d+.post_attention_layernorm"]
    position = (
        r"\d+.position_embeddings.weight" if pipe and untied else top + "position_embeddings.weight"
    )
    final = (
        [r"\d+.weight", r"\d+.bias"]
        if pipe
        else [f"language_model.encoder.final_layernorm.{n}" for n in ("weight", "bias")]
    )
    return {
        "universal_checkpoint_version": 0.2,
        "vocabulary_parameter_patterns": vocabulary,
        "pipeline_replicated_parameter_patterns": [*vocabulary, position] if pipe and not untied else [],
        "tp_replicated_parameter_patterns": [
            *(of + norm + end for norm in norms for end in (".weight", ".bias")),
            *final,
            position,
            of + r"\d+.self_attention.dense.bias",
            of + r"\d+.mlp.dense_4h_to_h.bias",
        ],
        "parameter_with_row_parallelism_patterns": [
            of + r"\d+.mlp.dense_4h_to_h.weight",
            of + r"\d+.self_attention.dense.weight",
        ],
        "parameter_with_2_sub_params_cat_dim_0": [of + r"\d+.mlp.dense_h_to_4h." + n for n in ("weight", "bias")]
        if swiglu
        else [],
    }  # fmt: skip


def write(
    folder: Path, model: Model, *, tp: int = 1, pp: int = 1, dp: int = 1, zero: int = 1, sp: int = 1, step: int = 3,
    divisible: int = 4, dtype: str = "bfloat16", info: bool = True, groups: int = 2, nested: bool = True,
    args: Mapping[str, Any] | None = None,
) -> Arrays:  # fmt: skip
    """Write `folder/global_step<step>` and `latest`; returns all that must be read of it, by (state, name).

    `divisible`: the vocabulary is padded to a multiple of that times `tp`. `info`: whether the
    files say how they are cut. Weights are the masters, rounded to `dtype`. `nested`: whether
    `module` is, as Megatron-DeepSpeed leaves it. `args`: Megatron's arguments, which go into the
    client state.
    """
    tag = folder / f"global_step{step}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    writer = _Writer(tag, model, tp, pp, dp * sp, zero, step, divisible, dtype, groups)
    writer.nested, writer.args = nested, args
    for p in range(pp):
        for t in range(tp):
            writer.rank(p, t, info=info)
    return writer.truth()


class _Writer:
    nested = True
    args: Mapping[str, Any] | None = None

    def __init__(
        self, tag: Path, model: Model, tp: int, pp: int, dp: int, zero: int, step: int, divisible: int, dtype: str,
        groups: int,
    ) -> None:  # fmt: skip
        self.tag, self.model, self.tp, self.pp, self.dp, self.zero, self.step = (
            tag,
            model,
            tp,
            pp,
            dp,
            zero,
            step,
        )
        self.dtype, self.groups, self.unit = dtype, groups, divisible * tp
        self.original = max(
            (model.arrays[n, "master"].shape[0] for n in model.vocabulary), default=0
        )
        self.full = {key: self._padded(*key) for key in model.arrays}
        last = max(model.layers.values(), default=0)
        self.stage = {
            n: min(pp - 1, (at - 1) * pp // max(1, last)) for n, at in model.layers.items()
        }

    def _padded(self, name: str, state: str) -> Any:
        a = self.model.arrays[name, state]
        if name not in self.model.vocabulary:
            return a
        extra = np.random.default_rng(len(name) + len(state)).standard_normal(
            (-len(a) % self.unit, *a.shape[1:])
        )
        return np.concatenate([a, extra.astype(np.float32)])

    def local(self, name: str, state: str, t: int) -> Any:
        """What one tensor-parallel rank holds."""
        a, cut = self.full[name, state], self.model.cuts[name]
        if cut == "mean":
            return a + np.float32(t)
        if cut == "replicate" or self.tp == 1:
            return a
        if cut in ("column", "row"):
            return np.array_split(a, self.tp, 0 if cut == "column" else 1)[t]
        halves = np.split(a, 2) if cut == "swiglu" else []
        if halves:
            return np.concatenate([np.split(h, self.tp)[t] for h in halves])
        parts, at = [], 0
        for widths in cut:
            begin = at + sum(widths[:t])
            parts.append(a[begin : begin + widths[t]])
            at += sum(widths)
        return np.concatenate(parts)

    def truth(self) -> Arrays:
        out: Arrays = {}
        for (name, state), a in self.model.arrays.items():
            frozen = name in self.model.frozen
            values = {} if frozen else {state: self.full[name, state]}
            if state == "master" and (frozen or self.zero < 3):
                values["weight"] = self._rounded(self.full[name, state])
            for kind, value in values.items():
                out[kind, name] = value[: len(a)] if a.ndim else value
                if len(value) > len(a):
                    out[f"{kind}.padding", name] = value[len(a) :]
        return out

    def _rounded(self, a: Any) -> Any:
        return a.astype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)

    def rank(self, p: int, t: int, *, info: bool) -> None:
        """The files of one model-parallel rank."""
        model, m = self.model, p * self.tp + t
        tied = {n for n in model.names if n.startswith("tied_modules.") and (p in (0, self.pp - 1))}
        mine = [n for n in model.names if not model.pipe or self.stage[n] == p or n in tied]
        shapes = {n: self.local(n, "master", t).shape for n in mine if n not in model.frozen}
        names = [
            [n for n in shapes if self.groups == 1 or (len(shapes[n]) > 1) == big]
            for big in (True, False)
        ]
        groups = [{n: shapes[n] for n in group} for group in names[: self.groups] if group]
        weights = self._weights(mine, groups, t)
        if model.pipe:
            self._layers(mine, weights, p, t)
        for r in range(self.dp if self.zero == 3 else 1):
            self._model_states(m, r, t, mine, groups, weights, info=info)
        flat = self._cut if self.zero == 3 else self._join
        for r in range(self.dp):
            self._save(
                f"zero_pp_rank_{r}_mp_rank_{m:02d}_optim",
                {"optimizer_state_dict": flat(groups, r, t)},
                bf16=True,
            )

    def _weights(
        self, mine: Sequence[str], groups: Sequence[Mapping[str, Any]], t: int
    ) -> dict[str, Any]:
        """The module's tensors: views of one buffer for each group, as ZeRO 1 and 2 make them."""
        out = {n: _tensor(self._rounded(self.local(n, "master", t))) for n in mine}
        for shapes in groups if self.zero < 3 else []:
            flat = torch.cat([out[n].reshape(-1) for n in shapes])
            flat = torch.cat([flat, torch.zeros(-len(flat) % (2 * self.dp), dtype=flat.dtype)])
            at = 0
            for n in shapes:
                size = out[n].numel()
                out[n] = flat[at : at + size].view(out[n].shape)
                at += size
        return out

    def _layers(self, mine: Sequence[str], weights: Mapping[str, Any], p: int, t: int) -> None:
        for number in sorted({self.model.layers[n] for n in mine}):
            inside = [n for n in mine if self.model.layers[n] == number and self.stage[n] == p]
            layer = {
                re.sub(r"^(tied_modules\.[^.]+|\d+)\.", "", n): weights[n].clone() for n in inside
            }
            if layer:
                torch.save(layer, self.tag / f"layer_{number:02d}-model_{t:02d}-model_states.pt")

    def _model_states(
        self, m: int, r: int, t: int, mine: Sequence[str], groups: Sequence[Mapping[str, Any]],
        weights: Mapping[str, Any], *, info: bool,
    ) -> None:  # fmt: skip
        model, frozen = self.model, [n for n in mine if n in self.model.frozen]
        held = {
            n: torch.empty(0, dtype=w.dtype) if self.zero == 3 else w for n, w in weights.items()
        }
        fragments = {n: _part(weights[n].reshape(-1), r, self.dp) for n in frozen}
        value: dict[str, Any] = {
            "module": None if model.pipe else _nested(held) if self.nested else held,
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [{n: torch.Size(s) for n, s in group.items()} for group in groups],
            "frozen_param_shapes": {n: weights[n].shape for n in frozen}
            if self.zero == 3
            else None,
            "shared_params": {},
            "frozen_param_fragments": fragments if self.zero == 3 else None,
            "lr_scheduler": None,
            "skipped_steps": 0,
            "global_steps": self.step,
            "global_samples": 8 * self.step,
            "dp_world_size": self.dp,
            "mp_world_size": self.pp * self.tp,
            "ds_config": {"zero_optimization": {"stage": self.zero}},
            "ds_version": "0.16.0",
            "iteration": self.step,
            "tokens": 100 + t,
        }
        if self.args is not None:
            value["args"] = Namespace(**self.args)
        if info:
            value["universal_checkpoint_info"] = {
                **model.info,
                "original_vocab_size": self.original,
            }
        if self.zero == 3:
            self._save(f"zero_pp_rank_{r}_mp_rank_{m:02d}_model", value, bf16=False)
        else:
            self._save(f"mp_rank_{m:02d}_model", value, bf16=False)

    def _join(self, groups: Sequence[Mapping[str, Any]], r: int, t: int) -> dict[str, Any]:
        """ZeRO 1 and 2: a partition of each group's flat buffer."""
        masters, states, paddings, mappings = [], {}, [], []
        for g, shapes in enumerate(groups):
            held = {}
            total = sum(int(np.prod(s)) for s in shapes.values())
            whole = -(-total // (2 * self.dp)) * 2 * self.dp
            size = whole // self.dp
            padding = min(size, max(0, (r + 1) * size - total))
            for state in FLAT:
                flat = np.concatenate([self.local(n, state, t).reshape(-1) for n in shapes])
                held[state] = np.pad(flat, (0, whole - total), constant_values=np.float32(1e30))[
                    r * size : (r + 1) * size
                ]
            masters.append(_tensor(held["master"][: size - padding]))
            step = torch.tensor(float(self.step))
            states[g] = {"step": step, **{s: _tensor(held[s]) for s in FLAT[1:]}}
            paddings.append(padding)
            mappings.append(_slices(shapes, r * size, (r + 1) * size))
        return {
            "loss_scaler": None,
            "clip_grad": 1.0,
            "base_optimizer_state": {"state": states, "param_groups": self._hyper(len(groups))},
            "single_partition_of_fp32_groups": masters,
            "zero_stage": self.zero,
            "group_paddings": paddings,
            "partition_count": [self.dp] * len(groups),
            "param_slice_mappings": mappings,
        }

    def _cut(self, groups: Sequence[Mapping[str, Any]], r: int, t: int) -> dict[str, Any]:
        """ZeRO 3: each parameter's part, joined."""
        masters, states = [], {}
        for g, shapes in enumerate(groups):
            arrays = {(n, s): self.local(n, s, t) for n in shapes for s in FLAT}
            held = {s: _tensor(partition(arrays, shapes, s, r, self.dp)) for s in FLAT}
            masters.append(held["master"])
            states[g] = {"step": torch.tensor(float(self.step)), **{s: held[s] for s in FLAT[1:]}}
        inner = {"state": states, "param_groups": self._hyper(len(groups))}
        return {
            "zero_stage": 3,
            "partition_count": self.dp,
            "overflow": False,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": masters,
        }

    def _hyper(self, count: int) -> list[dict[str, Any]]:
        return [
            {"lr": 1e-3, "weight_decay": (0.01, 0.0)[g], "betas": (0.9, 0.95), "params": [g]}
            for g in range(count)
        ]

    def _save(self, name: str, value: Any, *, bf16: bool) -> None:
        prefix = "bf16_" if bf16 and self.dtype == "bfloat16" else ""
        with _fragment_address():
            torch.save(value, self.tag / f"{prefix}{name}_states.pt")


def _tensor(a: Any) -> Any:
    a = np.ascontiguousarray(a)
    return (
        torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
        if a.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(a.copy())
    )


def _part(flat: Any, r: int, ranks: int) -> Any:
    size = -(-len(flat) // ranks)
    return torch.cat([flat, torch.zeros(size * ranks - len(flat), dtype=flat.dtype)])[
        r * size : (r + 1) * size
    ].clone()


def _nested(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """As `state_dict_for_save_checkpoint` nests the language model: its parts, and the embedding's parts."""
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        depth = (
            3
            if parts[:2] == ["language_model", "embedding"]
            else 2
            if parts[0] == "language_model"
            else 0
        )
        into = out
        for part in parts[:depth]:
            into = into.setdefault(part, {})
        into[".".join(parts[depth:])] = tensor
    return out


class fragment_address:  # noqa: N801 - DeepSpeed's name
    """A stand-in for DeepSpeed's own class, pickled under its name."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


fragment_address.__module__ = "deepspeed.utils.tensor_fragment"


def _slices(shapes: Mapping[str, Any], low: int, high: int) -> dict[str, Any]:
    out, at = {}, 0
    for name, shape in shapes.items():
        begin, end = max(at, low), min(at + int(np.prod(shape)), high)
        if begin < end:
            out[name] = fragment_address(end - begin, begin - low)
        at += int(np.prod(shape))
    return out


@contextmanager
def _fragment_address() -> Iterator[None]:
    """Let pickle find the class where it says that it is."""
    names = ("deepspeed", "deepspeed.utils", "deepspeed.utils.tensor_fragment")
    before = {name: sys.modules.get(name) for name in names}
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].fragment_address = fragment_address  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
