"""LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors` (or `.bin`).

What the files ask for is computed or refused, and nothing is ignored: of each option of the configuration it is known
that it is applied here, or that it does not change the merged weights, or it must be off.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import Conflict, IntegrityError, NotACheckpoint, UnsupportedError, UsageError
from ucformat.geometry.box import Box
from ucformat.geometry.patterns import compile_pattern
from ucformat.geometry.tensor import Key
from ucformat.jobs.combine.formulas import low_rank
from ucformat.jobs.combine.methods import REAL, Method, Operand, wide
from ucformat.schema.values import loads

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.jobs.combine.formulas import Block

__all__ = ["Lora"]

CONFIG = "adapter_config.json"

_PREFIX = "base_model.model."
_APPLIED = {"peft_type", "r", "lora_alpha", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern"}
#: What only says how the adapter was trained, or what it holds, which its tensors tell.
_OF_TRAINING = {
    *("auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
}
#: Initialisations that leave the base as it is; others train an adapter of a changed base.
_PLAIN_INIT = {"gaussian", "orthogonal", "eva"}
_HALVES = {".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_embedding_A": "a", ".lora_embedding_B": "b"}
_NAMED = 5
_MOST = 1e30  # lora_alpha


@dataclass(frozen=True, slots=True)
class _Update:
    """What an adapter adds to a tensor: `scaling * B A`, or the transpose of that."""

    input: int
    a: TensorInfo
    b: TensorInfo
    scaling: float
    transposed: bool


class Lora(Method):
    """`formulas.low_rank`, of the base and one or more adapters.

    Attributes:
        weights: the weights of the adapters.
    """

    name = "lora"
    has_base = True

    def __init__(self, sources: Sequence[Checkpoint], weights: Sequence[float]) -> None:
        self.weights = tuple(weights)
        self._updates: dict[Key, list[_Update]] = {}
        self._replaced: dict[Key, tuple[int, TensorInfo]] = {}
        for n, (adapter, weight) in enumerate(zip(sources[1:], weights, strict=True), 1):
            self._add(sources[0], n, adapter, weight)

    def document(self) -> dict[str, Any]:
        """See Method."""
        return {"weights": self.weights}

    def roles(self) -> list[dict[str, Any]]:
        """See Method."""
        return [{"role": "base"}, *({"role": "adapter", "weight": w} for w in self.weights)]

    def about(self) -> dict[str, Any]:
        """See Method."""
        return {"method": self.name}

    def operands(self, inputs: Sequence[TensorInfo], box: Box) -> Sequence[Operand]:
        """See Method."""
        (info,) = inputs
        of, held = self._replaced.get(info.key, (0, info))
        found = [Operand(of, held, box)]
        for u in self._updates.get(info.key, ()):
            ranks = u.a.shape[0]
            of_a, of_b = (0, 1) if u.transposed else (1, 0)  # the dims of the box
            found.append(Operand(u.input, u.a, Box((0, box.start[of_a]), (ranks, box.shape[of_a]))))
            found.append(Operand(u.input, u.b, Box((box.start[of_b], 0), (box.shape[of_b], ranks))))
        return found

    def combine(self, info: TensorInfo, box: Box, piece: Box, arrays: Sequence[NDArray[Any]], known: Any) -> Block:  # noqa: ARG002
        """See Method."""
        base, *halves = arrays
        (block,) = wide(box, piece, [base])
        updates = self._updates.get(info.key, ())
        if not updates:
            return block
        block = block.reshape(box.shape)
        rows, columns = (slice(a - b, a - b + n) for a, b, n in zip(box.start, piece.start, box.shape, strict=True))
        for u, a, b in zip(updates, halves[::2], halves[1::2], strict=True):
            if u.transposed:
                a, b = b.T, a.T  # noqa: PLW2901 - of the transpose A' = Bᵀ and B' = Aᵀ
            low_rank(block, a[:, columns].astype(np.float64), b[rows].astype(np.float64), u.scaling)
        return block.reshape(-1)

    # --- the files of an adapter

    def _add(self, base: Checkpoint, n: int, adapter: Checkpoint, weight: float) -> None:
        config = _Config.read(adapter)
        halves: dict[str, dict[str, TensorInfo]] = {}
        strange: list[str] = []
        for name in adapter.names():
            key = Key(name, "weight")
            if not name.startswith(_PREFIX) or key not in adapter.tensors:
                raise UnsupportedError(
                    f"{adapter.home}: {name} is no tensor of an adapter, whose names begin with {_PREFIX}",
                    hint="save the adapter with PEFT's save_pretrained",
                )
            info, inner = adapter.tensors[key], name.removeprefix(_PREFIX)
            half = next((suffix for suffix in _HALVES if inner.endswith(suffix)), None)
            if half is not None:
                kind = "embedding" if "embedding" in half else ""
                halves.setdefault(inner.removesuffix(half), {})[_HALVES[half] + kind] = info
            elif re.search(r"\.lora_", inner):
                what = "DoRA (lora_magnitude_vector)" if "lora_magnitude_vector" in inner else "this kind of adapter"
                raise UnsupportedError(
                    f"{adapter.home}: {name} cannot be merged: {what} is not supported",
                    hint="merge it with PEFT's merge_and_unload",
                )
            else:
                target = _target(base, inner.replace(".base_layer.", "."))
                if target is None:
                    strange.append(name)
                else:
                    self._replace(base, adapter, n, info, target, weight)
        updates = {}
        for module, found in halves.items():
            target = _target(base, f"{module}.weight")
            if target is None:
                strange += [info.name for info in found.values()]
            else:
                updates[target] = config.update(n, adapter, module, found, base.tensors[target], weight)
        if strange:
            more = f" and {len(strange) - _NAMED} more" if len(strange) > _NAMED else ""
            raise UsageError(
                f"{base.home} has no tensors for {', '.join(strange[:_NAMED])}{more} of {adapter.home}",
                hint="give the base that the adapter was trained on; a view (--view) renames its tensors",
            )
        config.check_square(updates, base)
        for target, update in updates.items():
            tied = [alias for alias, name in base.aliases.items() if name == target.name]
            if tied:
                raise UnsupportedError(
                    f"{adapter.home} changes {target.name}, to which {', '.join(tied)} is tied in {base.home}",
                    hint="a view (--view) with the step `untie` separates them",
                )
            self._updates.setdefault(target, []).append(update)

    def _replace(
        self, base: Checkpoint, adapter: Checkpoint, n: int, info: TensorInfo, target: Key, weight: float
    ) -> None:
        if info.shape != base.tensors[target].shape:
            raise UsageError(
                f"{adapter.home}: {info.name} has the shape {info.shape}, but {target.name} of the base "
                f"has {base.tensors[target].shape}",
                hint="give the base that the adapter was trained on",
            )
        if weight != 1:
            raise UsageError(
                f"{adapter.home} replaces {target.name} of the base, and its weight is {weight:g}",
                hint="only adapters that replace no tensor of the base can be scaled",
            )
        if target in self._replaced:
            raise Conflict(f"several adapters replace {target.name} of the base", hint="merge one of them")
        self._replaced[target] = (n, info)


@dataclass(frozen=True, slots=True)
class _Config:
    """What of `adapter_config.json` is applied."""

    home: str
    rank: int
    alpha: float
    rank_stabilised: bool
    transposed: bool
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]

    @classmethod
    def read(cls, adapter: Checkpoint) -> _Config:
        if CONFIG not in adapter.assets:
            raise NotACheckpoint(
                f"{adapter.home} has no {CONFIG}, so it is not an adapter of PEFT",
                hint="give the folder that PEFT's save_pretrained has written",
            )
        where = f"{adapter.home}/{CONFIG}"
        try:
            found = loads(adapter.assets[CONFIG])
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{where} is not valid JSON: {error}") from None
        if not isinstance(found, dict):
            raise IntegrityError(f"{where} is not a JSON object")
        if found.get("peft_type") != "LORA":
            raise UnsupportedError(
                f"{where}: an adapter of the type {found.get('peft_type')!r} cannot be merged, only LORA",
                hint="merge it with PEFT's merge_and_unload",
            )
        init = found.get("init_lora_weights", True)
        unsupported = [
            k for k, v in found.items() if k not in _APPLIED | _OF_TRAINING and v not in (None, False, {}, [])
        ]
        if not (isinstance(init, bool) or init in _PLAIN_INIT):
            unsupported.append(f"init_lora_weights={init!r}")
        if unsupported:
            raise UnsupportedError(
                f"{where}: {', '.join(sorted(unsupported))} cannot be merged",
                hint="merge it with PEFT's merge_and_unload",
            )
        ranks, alphas = found.get("rank_pattern") or {}, found.get("alpha_pattern") or {}
        if not all(type(v) is int and v > 0 for v in (found.get("r"), *_values(ranks))) or not all(
            type(v) in (int, float) and abs(v) < _MOST for v in (found.get("lora_alpha"), *_values(alphas))
        ):
            raise IntegrityError(f"{where}: r, lora_alpha, rank_pattern or alpha_pattern is not what PEFT writes")
        flags = found.get("use_rslora", False), found.get("fan_in_fan_out", False)
        return cls(where, found["r"], found["lora_alpha"], bool(flags[0]), bool(flags[1]), ranks, alphas)

    def update(
        self, n: int, adapter: Checkpoint, module: str, found: Mapping[str, TensorInfo], of: TensorInfo, weight: float
    ) -> _Update:
        """What is added to a tensor of the base."""
        embedding = "aembedding" in found or "bembedding" in found
        wanted = ("aembedding", "bembedding") if embedding else ("a", "b")
        if set(found) != set(wanted):
            names = ", ".join(info.name for info in found.values())
            raise IntegrityError(
                f"{adapter.home} has not both halves of the adapter of {module}, but {names}",
                hint="copy the adapter again",
            )
        a, b = (found[half] for half in wanted)
        rank = _matching(self.ranks, module, self.rank)
        if len(a.shape) != 2 or len(b.shape) != 2 or len(of.shape) != 2:
            raise UnsupportedError(
                f"{adapter.home}: the adapter of {module} is not one of a linear layer or an embedding",
                hint="merge it with PEFT's merge_and_unload",
            )
        product, shapes = (b.shape[0], a.shape[1]), f"{a.shape} and {b.shape}"
        if a.shape[0] != rank or b.shape[1] != rank:
            raise IntegrityError(
                f"{self.home}: the rank of {module} is {rank}, but its tensors have the shapes {shapes}"
            )
        if of.shape not in (product, product[::-1]) or (embedding and of.shape != product[::-1]):
            raise UsageError(
                f"{adapter.home}: the adapter of {module} has the shapes {shapes}, "
                f"but {of.name} of the base has {of.shape}",
                hint="give the base that the adapter was trained on",
            )
        if of.dtype not in REAL:
            raise UnsupportedError(
                f"{of.name} of the base has the dtype {of.dtype}, to which no adapter can be added",
                hint="give the base before it was quantized",
            )
        square = product[0] == product[1]
        transposed = embedding or (self.transposed if square else of.shape != product)
        alpha = _matching(self.alphas, module, self.alpha)
        return _Update(n, a, b, weight * alpha / (math.sqrt(rank) if self.rank_stabilised else rank), transposed)

    def check_square(self, updates: Mapping[Key, _Update], base: Checkpoint) -> None:
        """Raise UsageError if nothing tells whether the square tensors are stored transposed."""
        linear = {k: u for k, u in updates.items() if not u.a.name.endswith("lora_embedding_A")}
        square = [k.name for k in linear if len(set(base.tensors[k].shape)) == 1]
        others = [k.name for k, u in linear.items() if k.name not in square and u.transposed != self.transposed]
        if square and others:
            raise UnsupportedError(
                f"{self.home}: fan_in_fan_out is {json.dumps(self.transposed)}, but not so for {others[0]}; for "
                f"{square[0]}, which is square, nothing tells",
                hint="merge it with PEFT's merge_and_unload",
            )


def _target(base: Checkpoint, name: str) -> Key | None:
    """The tensor of a base that is merged by default, by its name or that of a tensor to which it is tied."""
    name = base.aliases.get(name, name)
    return next((key for state in ("weight", "master") if (key := Key(name, state)) in base.tensors), None)


def _values(of: Any) -> Iterable[Any]:
    return of.values() if isinstance(of, dict) else [None]


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that the name of a module ends with."""
    for pattern, value in patterns.items():
        if compile_pattern(f"(.*\\.)?({pattern})").fullmatch(module):
            return value
    return default
