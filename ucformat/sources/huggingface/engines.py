"""The engine's tensors in a directory of Trainer or Accelerate: DeepSpeed's, FSDP's, or files of models and optimizers.

Where an engine keeps the weights and a copy of them was exported beside it (`model.safetensors` next to a DeepSpeed
folder), the engine's count and the copy is not read.

safetensors files sort parameters by name, and an optimizer's states are numbered in the order of the module. That order
is known for some `FAMILIES`; `tests/sources/test_huggingface_order.py` compares it with the models of transformers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, MissingData, UcformatError, UnsupportedError, UsageError
from ucformat.sources.base import with_options
from ucformat.sources.dcp import Dcp
from ucformat.sources.deepspeed import DeepSpeed
from ucformat.sources.index import Group, PrefixedSource, TensorIndex
from ucformat.sources.model_files import read_json
from ucformat.sources.pickle.file import TorchFile
from ucformat.sources.pickle.optimizer import Module, Optimizer, add_optimizer, is_optimizer
from ucformat.sources.safetensors import choose
from ucformat.sources.safetensors.opened import OpenSafetensors
from ucformat.sources.torch_save import choose_files
from ucformat.sources.torch_save.opened import OpenTorchSave
from ucformat.storage.wrappers import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from ucformat.sources.base import OpenSource
    from ucformat.sources.huggingface.folder import Contained
    from ucformat.storage.base import Store

__all__ = ["FAMILIES", "Engine", "Told", "open_engine", "sort_names"]

_LLAMA = (
    *("model", "embed_tokens", "layers", "self_attn", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
    *("mlp", "gate_proj", "up_proj", "down_proj", "input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm", "norm", "lm_head", "weight", "bias"),
)
_GPT2 = (
    *("transformer", "wte", "wpe", "h", "ln_1", "attn", "c_attn", "ln_2", "mlp", "c_fc", "c_proj", "ln_f", "lm_head"),
    *("weight", "bias"),
)

#: `model_type` of a configuration -> parts of names, in the order in which modules register them; the class.
FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "llama": (_LLAMA, "LlamaForCausalLM"),
    "mistral": (_LLAMA, "MistralForCausalLM"),
    "qwen2": (_LLAMA, "Qwen2ForCausalLM"),
    "qwen3": (_LLAMA, "Qwen3ForCausalLM"),
    "gemma": (_LLAMA, "GemmaForCausalLM"),
    "gemma2": (_LLAMA, "Gemma2ForCausalLM"),
    "gpt2": (_GPT2, "GPT2LMHeadModel"),
}


def _module_order(store: Store, present: Container[str], names: Sequence[str]) -> list[str] | None:
    """The names in the order of the module, where its configuration names a family that is known; else None."""
    if "config.json" not in present:
        return None
    try:
        config: Any = read_json(store, "config.json")
    except UcformatError:
        return None
    if not isinstance(config, dict) or config.get("auto_map"):  # code of its own
        return None
    kind, classes = config.get("model_type"), config.get("architectures")
    known = FAMILIES.get(kind) if isinstance(kind, str) else None
    if known is None or classes != [known[1]]:
        return None
    return sort_names(names, known[0])


def sort_names(names: Sequence[str], parts: Sequence[str]) -> list[str] | None:
    """Names sorted part by part: numbers by value, others as in `parts`; None where one has another part."""
    rank = {part: i for i, part in enumerate(parts)}
    keys: dict[str, tuple[int, ...]] = {}
    for name in names:
        found = [int(p) if re.fullmatch(r"\d{1,6}", p) else rank.get(p) for p in name.split(".")]
        keys[name] = tuple(n for n in found if n is not None)
        if len(keys[name]) != len(found):
            return None
    return sorted(names, key=keys.__getitem__)


_COPY = "copy all files of the folder again; if one is left out on purpose, open the others by themselves"


@dataclass(frozen=True, slots=True)
class Told:
    """What the caller says that the files do not: the options of what lies inside."""

    allow: tuple[str, ...] = ()
    groups: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)  # by the name of an optimizer
    options: Mapping[str, Any] = field(default_factory=dict)

    def of(self, optimizer: str) -> dict[str, Any]:
        """The options of the engine's checkpoint that holds this optimizer."""
        groups = {"groups": self.groups[optimizer]} if optimizer in self.groups else {}
        return {**self.options, **groups, **({"allow": self.allow} if self.allow else {})}


@dataclass(slots=True)
class Engine:
    """What was found of it, apart from the tensors, which are in the contents."""

    described: dict[str, str] = field(default_factory=dict)
    sources: list[OpenSource] = field(default_factory=list)
    zips: list[str] = field(default_factory=list)  # further files of torch.save
    unchecked: list[str] = field(default_factory=list)  # files without checksums
    files: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None


def open_engine(
    store: Store,
    found: Contained,
    infos: Mapping[str, Any],
    contents: TensorIndex,
    told: Told,
) -> Engine:
    """Add the engine's tensors to the contents.

    Raises:
        UsageError: what lies inside is not opened with an option that was told.
    """
    engine = Engine()
    if found.deepspeed:
        _add(with_options(DeepSpeed(), told.of("optimizer")).open(store), "", engine, contents)
        engine.described = _named(engine.sources[0])
    elif found.fsdp_models:
        _sharded(store, found, engine, contents, told)
    elif told.options:
        raise UsageError(
            f"{store.url} holds files of models and optimizers, which are not opened with the option "
            f"{next(iter(told.options))!r}",
            hint="their options are: allow, groups",
        )
    else:
        _whole(store, found, infos, engine, contents, told)
    return engine


def _named(source: OpenSource) -> dict[str, str]:
    metadata = source.metadata.engine
    return {"engine": metadata["name"], **({"engine_version": metadata["version"]} if metadata.get("version") else {})}


def _add(source: OpenSource, prefix: str, engine: Engine, contents: TensorIndex) -> None:
    """All that an opened checkpoint holds, its names behind a prefix."""
    metadata = source.metadata
    for info in metadata.tensor_list.tensors:
        contents.add(prefix + info.name, info.state, info.dtype, info.shape, partial(source.extents, info.key))
    engine.sources.append(source)
    engine.aliases |= {prefix + alias: prefix + name for alias, name in metadata.aliases.items()}
    engine.objects |= metadata.objects
    for group in metadata.groups:
        hyper = {k: v for k, v in group.items() if k != "params"}
        contents.groups.append(Group([prefix + n for n in group["params"]], hyper))
    engine.layout = {**engine.layout, **metadata.layout}
    engine.step = engine.step if engine.step is not None else metadata.step
    engine.files += metadata.files


def _sharded(store: Store, found: Contained, engine: Engine, contents: TensorIndex, told: Told) -> None:
    """FSDP's sharded state dicts: folders of PyTorch DCP, one for each model and each optimizer."""
    several = len(found.fsdp_models) > 1
    for folders in (found.fsdp_models, found.fsdp_optimizers):
        for number, folder in sorted(folders.items()):
            options = told.of(_optimizer(number))
            if folders is found.fsdp_models:  # which are without optimizers
                options = {k: v for k, v in options.items() if k not in ("groups", "owners")}
            below = PrefixStore(store, folder)
            if not Dcp().find(below):
                raise MissingData(
                    f"{folder} holds no checkpoint of PyTorch DCP",
                    hint="the save did not finish, or its `.metadata` was not copied; copy the whole folder again",
                )
            source = with_options(Dcp(), options).open(below)
            _add(PrefixedSource(source, store, folder), _prefix(number) if several else "", engine, contents)
    engine.described = {"engine": "fsdp"}


def _whole(
    store: Store,
    found: Contained,
    infos: Mapping[str, Any],
    engine: Engine,
    contents: TensorIndex,
    told: Told,
) -> None:
    """Models and optimizers in files of their own."""
    models = {n: [f] for n, f in found.fsdp_whole.items()} or found.models
    _check_all_there(found, models)
    modules = []
    for number, names in sorted(models.items()):
        prefix = _prefix(number) if len(models) > 1 else ""
        source = _open_model(store, names, told.allow)
        before = len(engine.objects)
        objects = source.metadata.objects
        _add(source, prefix, engine, contents)
        if len(models) > 1 and objects:  # one model's metadata is not another's
            kept = dict(list(engine.objects.items())[:before])
            engine.objects = kept | {_prefix(number) + k: v for k, v in objects.items()}
        tensors = {i.name: (i.dtype, i.shape) for i in source.metadata.tensor_list.tensors if i.state == "weight"}
        ordered = source.kind == "torch_save"
        if not ordered and (order := _module_order(store, infos, list(tensors))) is not None:
            tensors, ordered = {name: tensors[name] for name in order}, True
        modules.append(Module.of(tensors, prefix, ordered=ordered, main=len(models) == 1))
    engine.unchecked = [f for f in engine.files if f.endswith(".safetensors")]
    unnamed = []
    for number, key in found.optimizers.items():
        path = _optimizer(number)
        file = TorchFile(store, key, allow=told.allow)
        if not _add_optimizer(file, path, modules, contents, told.groups.get(path)):
            unnamed.append(path)
        engine.zips.append(key)
        engine.files.append(key)
    if unnamed:
        engine.objects["unnamed"] = unnamed
    if found.fsdp_whole:
        engine.described = {"engine": "fsdp"}


def _check_all_there(found: Contained, models: Mapping[int, Any]) -> None:
    """MissingData where one file tells of another that is not there: they are numbered, and belong together."""
    for what, numbers in (("model", models), ("optimizer", found.optimizers)):
        if lost := sorted(set(range(max(numbers, default=-1) + 1)) - set(numbers)):
            raise MissingData(f"the {what} number {lost[0]} is missing, and number {max(numbers)} is there", hint=_COPY)
    if not models:
        raise MissingData(f"{next(iter(found.optimizers.values()))} is there, and no file of a model", hint=_COPY)
    schedulers = [int(m[1] or 0) for name in found.values if (m := re.fullmatch(r"scheduler(?:_(\d+))?", name))]
    if len(found.optimizers) <= max(schedulers, default=-1):
        raise MissingData(
            f"the optimizer of scheduler number {max(schedulers)} is missing: {len(found.optimizers)} optimizers are "
            "there",
            hint=_COPY,
        )


def _add_optimizer(
    file: TorchFile, path: str, modules: Sequence[Module], contents: TensorIndex, given: Sequence[Sequence[str]] | None
) -> bool:
    if not is_optimizer(file.value):
        raise IntegrityError(
            f"{file.key} holds no optimizer's state dict", hint="the file is of another program, or of a newer version"
        )
    optimizer = Optimizer.parse(file.value, path, file)
    told = optimizer.told()
    if told is not None and any(told) and not any(m.find(told) for m in modules):
        first = next(n for group in told for n in group)
        raise MissingData(f"{file.key} has states of {first!r} and others, which no model here has", hint=_COPY)
    return add_optimizer(optimizer, modules, contents, given)


def _open_model(store: Store, names: Sequence[str], allow: tuple[str, ...]) -> OpenSource:
    """One model's files, which are all of one kind."""
    if any(".safetensors" in name for name in names):
        return OpenSafetensors(store, *choose(names, store.url), ())
    if any("_rank" in name for name in names):
        raise UnsupportedError(f"{names[0]}: not yet read: FSDP's state dicts of each rank")
    keys, index = choose_files(names, store.url)
    return OpenTorchSave(store, keys, index, allow, {}, ())


def _prefix(number: int) -> str:
    """What the names of one of several models begin with: as Accelerate calls their files."""
    return f"model_{number}." if number else "model."


def _optimizer(number: int) -> str:
    """What one of several optimizers is called: as Accelerate calls their files."""
    return f"optimizer_{number}" if number else "optimizer"
