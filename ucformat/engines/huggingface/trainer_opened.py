"""Directories of Hugging Face's Trainer and Accelerate, read in place."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from ucformat.engines.huggingface.safetensors import choose
from ucformat.engines.huggingface.trainer_folder import missing_files
from ucformat.errors import (
    IntegrityError,
    MissingData,
    NotACheckpoint,
    NotFound,
    UcformatError,
    UsageError,
    option_text,
)
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import CheckpointMetadata, FileRecord
from ucformat.reading.stand_ins import OpaqueFile
from ucformat.reading.values import to_json
from ucformat.sources.base import with_options
from ucformat.sources.index import Group, IndexedSource, PrefixedSource, TensorIndex
from ucformat.sources.model_files import ModelFiles, find_assets, read_json
from ucformat.sources.pickle.file import TorchFile, TorchZip, open_file
from ucformat.sources.pickle.optimizer import Module, Optimizer, add_optimizer, is_optimizer
from ucformat.sources.registry import SOURCES
from ucformat.sources.safetensors import OpenSafetensors
from ucformat.sources.torch_save import OpenTorchSave, choose_files
from ucformat.storage.concurrency import map_io
from ucformat.storage.wrappers import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from ucformat.engines.huggingface.trainer_folder import FolderFiles
    from ucformat.sources.base import OpenSource
    from ucformat.storage.base import Info, Store


# The engine's tensors in a directory of Trainer or Accelerate: DeepSpeed's, FSDP's, or files of
# models and optimizers.
#
# If the directory has both an engine's checkpoint and a copy of its weights (`model.safetensors`
# next to a DeepSpeed folder), the copy is not read.
#
# safetensors files sort parameters by name, but an optimizer numbers its states in the order of the
# module's parameters. That order is known for some `FAMILIES`;
# `tests/sources/test_huggingface_order.py` compares it with transformers' models.


_LLAMA = (
    "model", "embed_tokens", "layers", "self_attn", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm",
    "mlp", "gate_proj", "up_proj", "down_proj", "input_layernorm", "post_attention_layernorm",
    "pre_feedforward_layernorm", "post_feedforward_layernorm", "norm", "lm_head", "weight", "bias",
)  # fmt: skip
_GPT2 = (
    "transformer", "wte", "wpe", "h", "ln_1", "attn", "c_attn", "ln_2", "mlp", "c_fc", "c_proj", "ln_f", "lm_head",
    "weight", "bias",
)  # fmt: skip

#: `model_type` of a configuration -> the parts of names, in the order in which modules register
#: them; and the class.
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
    """Sort names in the order of the module, if it is of a known family; otherwise None."""
    if "config.json" not in present:
        return None
    try:
        config: Any = read_json(store, "config.json")
    except UcformatError:
        return None
    if not isinstance(config, dict) or config.get("auto_map"):  # it has its own code
        return None
    kind, classes = config.get("model_type"), config.get("architectures")
    parts, of_family = FAMILIES.get(kind, ((), "")) if isinstance(kind, str) else ((), "")
    return sort_names(names, parts) if parts and classes == [of_family] else None


def sort_names(names: Sequence[str], parts: Sequence[str]) -> list[str] | None:
    """Sort names part by part, numbers by value, others as in `parts`; None if one has another."""
    rank = {part: i for i, part in enumerate(parts)}
    keys: dict[str, tuple[int, ...]] = {}
    for name in names:
        split = name.split(".")
        ranks = (int(p) if re.fullmatch(r"\d{1,6}", p) else rank.get(p) for p in split)
        keys[name] = tuple(n for n in ranks if n is not None)
        if len(keys[name]) != len(split):
            return None
    return sorted(names, key=keys.__getitem__)


_HINT = "copy all files of the folder again; if one is left out on purpose, open the others by themselves"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The caller's options for the engine's checkpoints.

    Attributes:
        allow: further packages whose pickled classes become inert stand-ins.
        groups: the parameter names of each group, by the name of an optimizer (`optimizer`,
            `optimizer_1`).
        part: whether shards of a model may be missing.
    """

    allow: tuple[str, ...] = ()
    groups: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    optimizer: bool = True
    part: bool = False

    def for_optimizer(self, optimizer: str) -> dict[str, Any]:
        """The options for the checkpoint that contains an optimizer."""
        groups = {"groups": self.groups[optimizer]} if optimizer in self.groups else {}
        return {**self.values, **groups, **({"allow": self.allow} if self.allow else {})}


@dataclass(slots=True)
class EngineFiles:
    """Everything found in the engine's files except the tensors, which are in the contents."""

    described: dict[str, str] = field(default_factory=dict)
    sources: list[OpenSource] = field(default_factory=list)
    # files of torch.save that belong to none of the sources
    zips: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # files without checksums
    files: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None


def open_engine(
    store: Store,
    files: FolderFiles,
    infos: Mapping[str, Any],
    contents: TensorIndex,
    options: EngineOptions,
) -> EngineFiles:
    """Open the engine's files, and add their tensors to the contents."""
    engine = EngineFiles()
    if files.deepspeed:
        source = _open_deepspeed(store, files, options)
        if source is None:
            _add_whole(store, files, infos, engine, contents, options)
        else:
            _add_source(source, "", engine, contents)
            engine.described = _engine_name(source)
    elif files.fsdp_models:
        _add_fsdp(store, files, engine, contents, options)
    elif options.values:
        raise UsageError(
            f"{store.url} holds files of models and optimizers, which are not opened with the "
            "option "
            f"{next(iter(options.values))!r}",
            hint="their options are: allow, groups",
        )
    else:
        _add_whole(store, files, infos, engine, contents, options)
    return engine


def _open_deepspeed(store: Store, files: FolderFiles, options: EngineOptions) -> OpenSource | None:
    """DeepSpeed's checkpoint; None if it is missing, and the weights beside it suffice."""
    values = options.for_optimizer("optimizer")
    if not options.optimizer:
        values["optimizer"] = False
    try:
        return with_options(SOURCES["deepspeed"](), values).open(store)
    except NotFound as error:
        if not files.models or isinstance(error, NotACheckpoint):
            raise
        if options.optimizer:
            raise NotFound(
                error.message,
                hint="it was moved or deleted, or the save did not finish; for the weights in "
                f"{files.models[min(files.models)][0]}: {option_text('optimizer')}",
            ) from error
        return None


def _engine_name(source: OpenSource) -> dict[str, str]:
    name, version = source.metadata.engine["name"], source.metadata.engine.get("version")
    return {"engine": name, "engine_version": version} if version else {"engine": name}


def _add_source(
    source: OpenSource, prefix: str, engine: EngineFiles, contents: TensorIndex
) -> None:
    """Add the contents of an opened checkpoint, with a prefix in front of all names."""
    metadata = source.metadata
    for info in metadata.tensor_list.tensors:
        locate = partial(source.extents, info.key)
        contents.add(prefix + info.name, info.state, info.dtype, info.shape, locate)
    for key, why in metadata.unreadable.items():
        contents.refuse(Key(prefix + key.name, key.state), why)
    engine.sources.append(source)
    engine.aliases |= {prefix + alias: prefix + name for alias, name in metadata.aliases.items()}
    engine.objects |= metadata.objects
    for group in metadata.groups:
        hyper = {k: v for k, v in group.items() if k != "params"}
        contents.groups.append(Group([prefix + n for n in group["params"]], hyper))
    engine.layout = {**engine.layout, **metadata.layout}
    engine.step = engine.step if engine.step is not None else metadata.step
    engine.files += metadata.files


def _add_fsdp(
    store: Store,
    files: FolderFiles,
    engine: EngineFiles,
    contents: TensorIndex,
    options: EngineOptions,
) -> None:
    """Add FSDP's sharded state dicts: folders of PyTorch DCP, one for each model and each optimizer."""
    several = len(files.fsdp_models) > 1
    for folders in (files.fsdp_models, files.fsdp_optimizers if options.optimizer else {}):
        for number, folder in sorted(folders.items()):
            inner = options.for_optimizer(_optimizer_path(number))
            if folders is files.fsdp_models:  # without optimizers
                inner = {k: v for k, v in inner.items() if k not in ("groups", "owners")}
            below = PrefixStore(store, folder)
            if not SOURCES["dcp"]().find(below):
                raise MissingData(
                    f"{folder} holds no checkpoint of PyTorch DCP",
                    hint=(
                        "the save did not finish, or its `.metadata` was not copied; copy the "
                        "whole folder again"
                    ),
                )
            source = with_options(SOURCES["dcp"](), inner).open(below)
            prefix = _prefix(number) if several else ""
            _add_source(PrefixedSource(source, store, folder), prefix, engine, contents)
    engine.described = {"engine": "fsdp"}


def _add_whole(
    store: Store,
    files: FolderFiles,
    infos: Mapping[str, Any],
    engine: EngineFiles,
    contents: TensorIndex,
    options: EngineOptions,
) -> None:
    """Add models and optimizers that are each in files of their own."""
    models = {n: [f] for n, f in files.fsdp_whole.items()} or files.models
    optimizers = files.optimizers if options.optimizer else {}
    _check_complete(files, models, optimizer=options.optimizer)
    modules = []
    for number, names in sorted(models.items()):
        prefix = _prefix(number) if len(models) > 1 else ""
        source = _open_model(store, names, options)
        before = len(engine.objects)
        objects = source.metadata.objects
        _add_source(source, prefix, engine, contents)
        if len(models) > 1 and objects:  # each model has its own metadata
            earlier = dict(list(engine.objects.items())[:before])
            engine.objects = earlier | {_prefix(number) + k: v for k, v in objects.items()}
        weights = (i for i in source.metadata.tensor_list.tensors if i.state == "weight")
        tensors = {info.name: (info.dtype, info.shape) for info in weights}
        ordered = source.kind == "torch_save"
        if not ordered and (order := _module_order(store, infos, list(tensors))) is not None:
            tensors, ordered = {name: tensors[name] for name in order}, True
        modules.append(Module.of(tensors, prefix, ordered=ordered, main=len(models) == 1))
    engine.unchecked = [f for f in engine.files if f.endswith(".safetensors")]
    unnamed = []
    for number, key in optimizers.items():
        path = _optimizer_path(number)
        file = TorchFile(store, key, allow=options.allow)
        if not _add_optimizer(file, path, modules, contents, options.groups.get(path)):
            unnamed.append(path)
        engine.zips.append(key)
        engine.files.append(key)
    if unnamed:
        engine.objects["unnamed"] = unnamed
    if files.fsdp_whole:
        engine.described = {"engine": "fsdp"}


def _check_complete(files: FolderFiles, models: Mapping[int, Any], *, optimizer: bool) -> None:
    """MissingData if models or wanted optimizers are missing, which are numbered like schedulers."""
    kinds: dict[str, Mapping[int, Any]] = {"model": models}
    if optimizer:
        kinds["optimizer"] = files.optimizers
    for kind, numbers in kinds.items():
        if lost := sorted(set(range(max(numbers, default=-1) + 1)) - set(numbers)):
            raise MissingData(
                f"the {kind} number {lost[0]} is missing, and number {max(numbers)} is there",
                hint=_HINT,
            )
    if not models:
        raise MissingData(
            f"{next(iter(files.optimizers.values()))} is there, and no file of a model", hint=_HINT
        )
    if not optimizer:
        return
    matches = (re.fullmatch(r"scheduler(?:_(\d+))?", name) for name in files.values)
    schedulers = [int(m[1] or 0) for m in filter(None, matches)]
    if len(files.optimizers) <= max(schedulers, default=-1):
        raise MissingData(
            f"the optimizer of scheduler number {max(schedulers)} is missing: "
            f"{len(files.optimizers)} optimizers are "
            "there",
            hint=(
                "copy all files of the folder again; for the weights alone: "
                f"{option_text('optimizer')}"
            ),
        )


def _add_optimizer(
    file: TorchFile,
    path: str,
    modules: Sequence[Module],
    contents: TensorIndex,
    group_names: Sequence[Sequence[str]] | None,
) -> bool:
    if not is_optimizer(file.value):
        raise IntegrityError(
            f"{file.key} is not an optimizer's state dict",
            hint="it was saved by another program, or a newer version",
        )
    optimizer = Optimizer.parse(file.value, path, file)
    names = optimizer.recorded_names()
    if names is not None and any(names) and not any(m.find(names) for m in modules):
        first = next(n for group in names for n in group)
        raise MissingData(
            f"{file.key} has states of {first!r} and others, which no model here has", hint=_HINT
        )
    return add_optimizer(optimizer, modules, contents, group_names)


def _open_model(store: Store, names: Sequence[str], options: EngineOptions) -> OpenSource:
    """Open the files of one model, which are all of one kind."""
    part = options.part
    if any(".safetensors" in name for name in names):
        return OpenSafetensors(ModelFiles(store, *choose(names, store.url, part=part), part=part))
    files = choose_files(names, store.url, part=part)
    return OpenTorchSave(ModelFiles(store, *files, part=part), options.allow, {})


def _prefix(number: int) -> str:
    """The prefix of names in one of several models, as Accelerate names their files."""
    return f"model_{number}." if number else "model."


def _optimizer_path(number: int) -> str:
    """The name of one of several optimizers, as Accelerate names their files."""
    return f"optimizer_{number}" if number else "optimizer"


_RANK_FILE = re.compile(r"__(\d{1,9})_\d+\.distcp")
_NUMBER = re.compile(r"_\d+\.(?=\w+$)")  # in `rng_state_2.pth`


def _read_values(
    store: Store, files: FolderFiles, contents: TensorIndex, allow: tuple[str, ...]
) -> dict[str, Any]:
    """Read each file of values as an object of its name; values of each rank by rank."""
    items = [(name, name, key) for name, key in files.values.items()]
    items += [
        (name, f"{name}.{rank}", by_rank[rank])
        for name, by_rank in files.ranked.items()
        for rank in sorted(by_rank)
    ]
    objects: dict[str, Any] = {}
    if files.trainer_state:
        objects["trainer_state"] = to_json(read_json(store, "trainer_state.json"))
    opened = map_io(lambda item: open_file(store, item[2], allow=allow), items)
    for (name, path, _), file in zip(items, opened, strict=True):
        value = _to_json(file, path, contents)
        if name == path:
            objects[name] = value
        else:
            objects.setdefault(name, {})[path.rpartition(".")[2]] = value
    return objects


def _to_json(file: TorchFile | OpaqueFile, path: str, contents: TensorIndex) -> Any:
    """The value as JSON; a value without a JSON form is kept as an opaque pickle."""
    if isinstance(file, OpaqueFile):
        return to_json(file.opaque())
    return contents.json_of(file, file.value, path)


class OpenHuggingFace(IndexedSource):
    """An opened directory of Trainer or Accelerate."""

    kind = "huggingface"

    def __init__(
        self, store: Store, files: FolderFiles, infos: Mapping[str, Info], options: EngineOptions
    ) -> None:
        self.store, self.contents = store, TensorIndex()
        engine = open_engine(store, files, infos, self.contents, options)
        self._engine = engine
        self.part = next((part for s in engine.sources if (part := getattr(s, "part", None))), None)
        for name, by_rank in files.ranked.items():
            _check_ranks(name, by_rank, _world(engine))
        ranked = (f for by_rank in files.ranked.values() for f in by_rank.values())
        self._zips = [*engine.zips, *files.values.values(), *ranked]
        objects = {**engine.objects, **_read_values(store, files, self.contents, options.allow)}
        own_files = (["trainer_state.json"] if files.trainer_state else []) + self._zips
        keys = tuple(dict.fromkeys([*engine.files, *own_files]))
        assets = find_assets(infos.values(), keys)
        self.metadata = CheckpointMetadata(
            tensor_list=self.contents.tensor_list(),
            unreadable=self.contents.unreadable,
            missing=tuple(missing_files(files)),
            aliases=engine.aliases,
            objects=objects,
            assets=assets,
            groups=tuple(group.json() for group in self.contents.groups),
            step=_step(objects, engine),
            layout=engine.layout,
            engine=_engine(store, files, engine, assets),
            files=keys,
        )

    def records(self) -> Iterator[FileRecord]:
        """List every record of all files; a safetensors file is one, without a checksum."""
        for source in self._engine.sources:
            yield from source.records()
        for key in self._zips:
            yield from TorchZip(self.store, key).records()
        for key in self._engine.unchecked:
            yield FileRecord(key, key, self.store.info(key).size, None, int)


def _world(engine: EngineFiles) -> int:
    """The ranks that certainly wrote files of the engine."""
    layout = engine.layout
    matches = (_RANK_FILE.fullmatch(name.rpartition("/")[2]) for name in engine.files)
    ranks = [int(m[1]) for m in filter(None, matches)]
    degrees = [n for axis in ("dp", "tp", "pp") if type(n := layout.get(axis, 1)) is int]
    return max(prod(degrees), 1 + max(ranks, default=-1))


def _check_ranks(name: str, by_rank: Mapping[int, str], world: int) -> None:
    """MissingData if a rank's file is missing; one without a number was written by a single process."""
    example = by_rank[min(by_rank)]
    if not _NUMBER.search(example):
        return
    total = max(world, max(by_rank) + 1)
    if len(by_rank) < total:
        missing = next(rank for rank in range(total) if rank not in by_rank)
        raise MissingData(
            f"{_NUMBER.sub(f'_{missing}.', example)} is missing: {len(by_rank)} of {total} ranks "
            f"have a file of {name}",
            hint=(
                "copy it again from where it was saved; to open the checkpoint without any, "
                "move the others elsewhere"
            ),
        )


def _step(objects: Mapping[str, Any], engine: EngineFiles) -> int | None:
    """The step counted by Trainer, otherwise the engine's."""
    state = objects.get("trainer_state")
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if type(step) is int else engine.step


def _engine(
    store: Store, files: FolderFiles, engine: EngineFiles, assets: Sequence[str]
) -> dict[str, str]:
    """The program, its version according to the model's configuration, and the inner engine."""
    trainer = files.trainer_state or "training_args" in files.values
    out = {"name": "transformers" if trainer else "accelerate"}
    if "config.json" in assets:
        try:
            config = read_json(store, "config.json")
        except NotFound:
            config = None
        version = config.get("transformers_version") if isinstance(config, dict) else None
        if isinstance(version, str):
            out["version"] = version
    return {**out, **engine.described}
