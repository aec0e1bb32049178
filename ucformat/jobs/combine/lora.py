"""LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors` (or `.bin`).

What the files ask for is computed or refused, and nothing is ignored: of each option of the
configuration it is known that it is applied here, or that it does not change the merged weights, or
it must be off.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import (
    Conflict,
    IntegrityError,
    NotACheckpoint,
    UnsupportedError,
    UsageError,
    first_names,
)
from ucformat.geometry.box import Box
from ucformat.geometry.patterns import compile_pattern
from ucformat.geometry.tensor import Key
from ucformat.jobs.combine.formulas import low_rank
from ucformat.jobs.combine.methods import REAL, Method, Operand, wide
from ucformat.jobs.combine.outputs import is_scaled, scaled_modules
from ucformat.reading.values import references
from ucformat.schema.values import loads

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.jobs.combine.formulas import Block

CONFIG = "adapter_config.json"

_PREFIX = "base_model.model."
_APPLIED = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
}
#: What only says how the adapter was trained, or what it holds, which its tensors tell.
_OF_TRAINING = {
    *(
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
    ),
    *(
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
    ),
    *(
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "modules_to_save",
        "peft_version",
    ),
    *("qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
}
#: Options by which an adapter may have no tensors of a module that target_modules names.
_NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")
#: Initialisations that leave the base as it is; others train an adapter of a changed base.
_PLAIN_INIT = {"gaussian", "orthogonal", "eva"}
_HALF = re.compile(
    r"(?P<module>.+)\.lora_(?:(?P<half>[AB])(?:\.(?P<adapter>[^.]+))?\.weight|"
    r"embedding_(?P<embedding>[AB])(?:\.(?P<adapter_of_embedding>[^.]+))?)"
)
_SAVED_MODULE = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
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
    """`formulas.low_rank`, of the base and one or more adapters."""

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
        number, stored = self._replaced.get(info.key, (0, info))
        operands = [Operand(number, stored, box)]
        for u in self._updates.get(info.key, ()):
            ranks = u.a.shape[0]
            of_a, of_b = (0, 1) if u.transposed else (1, 0)  # the dims of the box
            operands.append(
                Operand(u.input, u.a, Box((0, box.start[of_a]), (ranks, box.shape[of_a])))
            )
            operands.append(
                Operand(u.input, u.b, Box((box.start[of_b], 0), (box.shape[of_b], ranks)))
            )
        return operands

    def combine(
        self,
        info: TensorInfo,
        box: Box,
        piece: Box,
        arrays: Sequence[NDArray[Any]],
        prepared: Any,  # noqa: ARG002
    ) -> Block:
        """See Method."""
        base, *halves = arrays
        (block,) = wide(box, piece, [base])
        updates = self._updates.get(info.key, ())
        if not updates:
            return block
        block = block.reshape(box.shape)
        rows, columns = (
            slice(a - b, a - b + n)
            for a, b, n in zip(box.start, piece.start, box.shape, strict=True)
        )
        for u, a, b in zip(updates, halves[::2], halves[1::2], strict=True):
            if u.transposed:
                a, b = b.T, a.T  # noqa: PLW2901 - of the transpose A' = Bᵀ and B' = Aᵀ
            low_rank(block, a[:, columns].astype(np.float64), b[rows].astype(np.float64), u.scaling)
        return block.reshape(-1)

    # --- the files of an adapter

    def _add(self, base: Checkpoint, n: int, adapter: Checkpoint, weight: float) -> None:
        config = _Config.read(adapter)
        tensors = _AdapterTensors.of(adapter, config)
        strange: list[str] = []
        for name, info in tensors.replaced.items():
            target = _target(base, name)
            if target is None:
                strange.append(info.name)
            else:
                self._replace(base, adapter, n, info, target, weight)
        halves, scaled = tensors.halves, scaled_modules(base)
        updates = {}
        for module, halves_of_module in halves.items():
            target = _target(base, f"{module}.weight")
            if target is None:
                strange += [info.name for info in halves_of_module.values()]
            else:
                info = base.tensors[target]
                updates[target] = config.update(
                    n,
                    adapter,
                    module,
                    halves_of_module,
                    info,
                    weight,
                    scaled=is_scaled(info, scaled),
                )
        if strange:
            raise UsageError(
                f"{base.home} has no tensors for {first_names(strange, _NAMED)} of {adapter.home}",
                hint=(
                    "give the base that the adapter was trained on; a view (--view) renames its "
                    "tensors"
                ),
            )
        if not updates:
            raise IntegrityError(
                f"{adapter.home} has no tensors of LoRA: its target_modules, "
                f"{json.dumps(config.targets)}, matched no "
                "module, or its tensors were not saved",
                hint=f"look at target_modules in {CONFIG}, and save the adapter again",
            )
        config.check_square(updates, base)
        config.check_whole(base, adapter, {key.name for key in updates}, tensors.replaced)
        for target, update in updates.items():
            _check_untied(base, adapter, target)
            self._updates.setdefault(target, []).append(update)

    def _replace(
        self,
        base: Checkpoint,
        adapter: Checkpoint,
        n: int,
        info: TensorInfo,
        target: Key,
        weight: float,
    ) -> None:
        if info.shape != base.tensors[target].shape:
            raise UsageError(
                f"{adapter.home}: {info.name} has the shape {info.shape}, but {target.name} of "
                "the base "
                f"has {base.tensors[target].shape}",
                hint="give the base that the adapter was trained on",
            )
        if weight != 1:
            raise UsageError(
                f"{adapter.home} replaces {target.name} of the base, and its weight is {weight:g}",
                hint="only adapters that replace no tensor of the base can be scaled",
            )
        _check_untied(base, adapter, target)
        if target in self._replaced:
            raise Conflict(
                f"several adapters replace {target.name} of the base", hint="merge one of them"
            )
        self._replaced[target] = (n, info)


@dataclass(frozen=True, slots=True)
class _AdapterTensors:
    """The tensors of an adapter.

    PEFT's `save_pretrained` writes them without the name of the adapter, and nothing else: tensors
    that are not of LoRA replace some of the base. An engine saves the whole model, in which they
    have that name, beside the frozen base.

    Attributes:
        halves: those of each module, by which half they are.
        replaced: those that replace tensors of the base, by the names of these.
    """

    halves: dict[str, dict[str, TensorInfo]]
    replaced: dict[str, TensorInfo]

    @classmethod
    def of(cls, adapter: Checkpoint, config: _Config) -> _AdapterTensors:
        """Find them by their names."""
        tensors = cls({}, {})
        others: dict[str, TensorInfo] = {}
        adapters: set[str | None] = set()
        for name, info in _weights(adapter).items():
            inner = name.removeprefix(_PREFIX)
            if inner == name:
                raise UnsupportedError(
                    f"{adapter.home}: {name} is no tensor of an adapter, whose names begin with "
                    f"{_PREFIX}",
                    hint="save the adapter with PEFT's save_pretrained",
                )
            if half := _HALF.fullmatch(inner):
                kind = (
                    half["half"].lower()
                    if half["half"]
                    else f"{half['embedding'].lower()}embedding"
                )
                adapters.add(half["adapter"] or half["adapter_of_embedding"])
                tensors.halves.setdefault(half["module"], {})[kind] = info
            elif saved := _SAVED_MODULE.fullmatch(inner):
                adapters.add(saved["adapter"])
                tensors.replaced[f"{saved['module']}.{saved['rest']}"] = info
            elif ".lora_" in inner:
                what = (
                    "DoRA (lora_magnitude_vector)"
                    if "lora_magnitude_vector" in inner
                    else "this kind of adapter"
                )
                raise UnsupportedError(
                    f"{adapter.home}: {name} cannot be merged: {what} is not supported",
                    hint="merge it with PEFT's merge_and_unload",
                )
            else:
                others[inner] = info
        if len(adapters) > 1:
            names = ", ".join(sorted(name or "one without a name" for name in adapters))
            raise UsageError(
                f"{adapter.home} holds several adapters: {names}",
                hint="save one of them with PEFT's save_pretrained",
            )
        whole_model = any(adapters)
        for name, info in others.items():
            if not whole_model or config.trains(name, tensors.halves):
                tensors.replaced[name.replace(".base_layer.", ".")] = info
            elif adapter.states(info.name) != ["weight"]:
                raise UnsupportedError(
                    f"{adapter.home}: {info.name} was trained, and is no part of the adapter by "
                    f"{CONFIG}",
                    hint="save the whole model: merge the adapter with PEFT's merge_and_unload",
                )
        return tensors


def _weights(adapter: Checkpoint) -> dict[str, TensorInfo]:
    """The weights of the model, by name, without tensors of values such as a random number generator's state."""
    of_values = set(references(dict(adapter.objects)))
    weights = {}
    for name in adapter.names():
        states = [state for state in ("weight", "master") if (name, state) in adapter.tensors]
        if not states or name in of_values:
            continue
        weights[name] = info = adapter.tensors[Key(name, states[0])]
        if not info.size:
            raise IntegrityError(
                f"{adapter.home}: {name} has the shape {info.shape}, and no elements",
                hint="under ZeRO-3 a model is saved so if its parameters are not gathered: give the folder of the "
                "engine's checkpoint, or save the adapter again",
            )
    return weights


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
    targets: Any
    saved: tuple[str, ...]
    narrowed: bool
    bias: str

    @classmethod
    def read(cls, adapter: Checkpoint) -> _Config:
        if CONFIG not in adapter.assets:
            raise NotACheckpoint(
                f"{adapter.home} has no {CONFIG}, so it is not an adapter of PEFT",
                hint="give the folder that PEFT's save_pretrained has written",
            )
        where = f"{adapter.home}/{CONFIG}"
        try:
            document = loads(adapter.assets[CONFIG])
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{where} is not valid JSON: {error}") from None
        if not isinstance(document, dict):
            raise IntegrityError(f"{where} is not a JSON object")
        if document.get("peft_type") != "LORA":
            raise UnsupportedError(
                f"{where}: an adapter of the type {document.get('peft_type')!r} cannot be merged, "
                "only LORA",
                hint="merge it with PEFT's merge_and_unload",
            )
        init = document.get("init_lora_weights", True)
        unsupported = [
            k
            for k, v in document.items()
            if k not in _APPLIED | _OF_TRAINING and v not in (None, False, {}, [])
        ]
        if not (isinstance(init, bool) or init in _PLAIN_INIT):
            unsupported.append(f"init_lora_weights={init!r}")
        if unsupported:
            raise UnsupportedError(
                f"{where}: {', '.join(sorted(unsupported))} cannot be merged",
                hint="merge it with PEFT's merge_and_unload",
            )
        ranks, alphas = document.get("rank_pattern") or {}, document.get("alpha_pattern") or {}
        if not all(
            type(v) is int and v > 0 for v in (document.get("r"), *_values(ranks))
        ) or not all(
            type(v) in (int, float) and abs(v) < _MOST
            for v in (document.get("lora_alpha"), *_values(alphas))
        ):
            raise IntegrityError(
                f"{where}: r, lora_alpha, rank_pattern or alpha_pattern is not what PEFT writes"
            )
        bias = document.get("bias", "none")
        if bias not in ("none", "all", "lora_only"):
            raise IntegrityError(f"{where}: the bias {bias!r} is not what PEFT writes")
        return cls(
            where,
            rank=document["r"],
            alpha=document["lora_alpha"],
            rank_stabilised=bool(document.get("use_rslora", False)),
            transposed=bool(document.get("fan_in_fan_out", False)),
            ranks=ranks,
            alphas=alphas,
            targets=document.get("target_modules"),
            saved=tuple(document.get("modules_to_save") or ()),
            narrowed=any(document.get(option) for option in _NARROWING),
            bias=bias,
        )

    def trains(self, name: str, modules: Container[str]) -> bool:
        """Whether a tensor of the whole model that is not of LoRA is trained with the adapter, as PEFT decides."""
        module, _, own = name.replace(".base_layer.", ".").rpartition(".")
        if ".original_module." in name or own != "bias":
            return False
        return self.bias == "all" or (self.bias == "lora_only" and module in modules)

    def update(
        self,
        n: int,
        adapter: Checkpoint,
        module: str,
        halves: Mapping[str, TensorInfo],
        target: TensorInfo,
        weight: float,
        *,
        scaled: bool,
    ) -> _Update:
        """What is added to a tensor of the base, which must not be `scaled`: quantized to float8."""
        embedding = "aembedding" in halves or "bembedding" in halves
        wanted = ("aembedding", "bembedding") if embedding else ("a", "b")
        if set(halves) != set(wanted):
            names = ", ".join(info.name for info in halves.values())
            raise IntegrityError(
                f"{adapter.home} has not both halves of the adapter of {module}, but {names}",
                hint="copy the adapter again",
            )
        a, b = (halves[half] for half in wanted)
        rank = _matching(self.ranks, module, self.rank)
        if len(a.shape) != 2 or len(b.shape) != 2 or len(target.shape) != 2:
            raise UnsupportedError(
                f"{adapter.home}: the adapter of {module} is not one of a linear layer or an "
                "embedding",
                hint="merge it with PEFT's merge_and_unload",
            )
        product, shapes = (b.shape[0], a.shape[1]), f"{a.shape} and {b.shape}"
        if a.shape[0] != rank or b.shape[1] != rank:
            raise IntegrityError(
                f"{self.home}: the rank of {module} is {rank}, but its tensors have the shapes "
                f"{shapes}"
            )
        if target.shape not in (product, product[::-1]) or (
            embedding and target.shape != product[::-1]
        ):
            raise UsageError(
                f"{adapter.home}: the adapter of {module} has the shapes {shapes}, "
                f"but {target.name} of the base has {target.shape}",
                hint="give the base that the adapter was trained on",
            )
        if target.dtype not in REAL or scaled:
            raise UnsupportedError(
                f"{target.name} of the base has the dtype "
                f"{target.dtype}{' and a scale' if scaled else ''}, to which no "
                "adapter can be added",
                hint="give the base before it was quantized",
            )
        square = product[0] == product[1]
        transposed = embedding or (self.transposed if square else target.shape != product)
        alpha = _matching(self.alphas, module, self.alpha)
        return _Update(
            n,
            a,
            b,
            weight * alpha / (math.sqrt(rank) if self.rank_stabilised else rank),
            transposed,
        )

    def check_whole(
        self,
        base: Checkpoint,
        adapter: Checkpoint,
        updated: Container[str],
        replaced: Container[str],
    ) -> None:
        """Raise IntegrityError if the adapter lacks tensors that the configuration asks for and the base has."""
        lacking = []
        for name in base.names():
            module, _, own = name.rpartition(".")
            if name in replaced or name in updated:
                continue
            is_bias = own == "bias" and len(base[name].shape) == 1
            trained = is_bias and (
                self.bias == "all" or (self.bias == "lora_only" and f"{module}.weight" in updated)
            )
            targeted = own == "weight" and not self.narrowed and _ends_with(module, self.targets)
            if trained or targeted or any(_is_inside(module, saved) for saved in self.saved):
                lacking.append(name)
        if lacking:
            raise IntegrityError(
                f"{adapter.home} has no tensors for {first_names(lacking, _NAMED)} of the base, "
                "which "
                f"target_modules, modules_to_save or bias of {CONFIG} name",
                hint=(
                    "copy the adapter again, or save it again; if it is whole, correct the "
                    "configuration"
                ),
            )

    def check_square(self, updates: Mapping[Key, _Update], base: Checkpoint) -> None:
        """Raise UsageError if nothing tells whether the square tensors are stored transposed."""
        linear = {k: u for k, u in updates.items() if not u.a.name.endswith("lora_embedding_A")}
        square = [k.name for k in linear if len(set(base.tensors[k].shape)) == 1]
        others = [
            k.name
            for k, u in linear.items()
            if k.name not in square and u.transposed != self.transposed
        ]
        if square and others:
            raise UnsupportedError(
                f"{self.home}: fan_in_fan_out is {json.dumps(self.transposed)}, but not so for "
                f"{others[0]}; for "
                f"{square[0]}, which is square, nothing tells",
                hint="merge it with PEFT's merge_and_unload",
            )


def _target(base: Checkpoint, name: str) -> Key | None:
    """The tensor of a base that is merged by default, by its name or that of a tensor to which it is tied."""
    name = base.aliases.get(name, name)
    return next(
        (key for state in ("weight", "master") if (key := Key(name, state)) in base.tensors), None
    )


def _check_untied(base: Checkpoint, adapter: Checkpoint, target: Key) -> None:
    """UnsupportedError if another tensor, which the adapter leaves as it is, is tied to one that it changes."""
    tied = [alias for alias, name in base.aliases.items() if name == target.name]
    if tied:
        raise UnsupportedError(
            f"{adapter.home} changes {target.name}, to which {', '.join(tied)} is tied in "
            f"{base.home}",
            hint="a view (--view) with the step `untie` separates them",
        )


def _ends_with(module: str, names: Any) -> bool:
    """Whether a list of names has that of a module, or the end of it, as PEFT matches them; a regex has none."""
    return isinstance(names, list) and any(
        module == name or module.endswith(f".{name}") for name in names
    )


def _is_inside(module: str, name: str) -> bool:
    """Whether a module is that of a name, or inside it."""
    return f".{name}." in f".{module}."


def _values(patterns: Any) -> Iterable[Any]:
    return patterns.values() if isinstance(patterns, dict) else [None]


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that the name of a module ends with."""
    for pattern, value in patterns.items():
        if compile_pattern(f"(.*\\.)?({pattern})").fullmatch(module):
            return value
    return default
