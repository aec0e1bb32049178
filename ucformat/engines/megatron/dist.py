"""Megatron's distributed checkpoints (`dist_checkpointing`, format `torch_dist`), read in place.

A folder with `metadata.json`, a PyTorch DCP checkpoint, and `common.pt`: values that are the same
on every rank.
"""

from __future__ import annotations

import json
import re
from itertools import product
from typing import TYPE_CHECKING, Any

from ucformat.engines.megatron.flat_states import add_flat_states
from ucformat.engines.megatron.folder import (
    COMMON,
    CONFIG,
    MegatronArguments,
    backend_of,
    built_by_megatron,
)
from ucformat.engines.megatron.names import (
    LAYER,
    MASTER,
    Bucket,
    Member,
    StateKey,
    groups_by_rule,
    name_of,
    split_half,
    split_state_key,
    ungrouped,
    unwrapped,
)
from ucformat.engines.megatron.stacked import (
    StackedTensor,
    UnstackedPart,
    add_tensor,
    original_shapes,
    unstacked,
)
from ucformat.engines.megatron.vocabulary import FilesBeside
from ucformat.errors import IntegrityError, MissingData, UnsupportedError
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import CheckpointMetadata, LazyMapping, LazySequence
from ucformat.reading.stand_ins import OpaqueFile, StoredTensor
from ucformat.reading.values import to_json
from ucformat.sources.distcp.metadata import Items, read_metadata
from ucformat.sources.distcp.opened import nested_objects, plain_states, plain_value
from ucformat.sources.index import Group, IndexedSource, TensorIndex
from ucformat.sources.pickle.file import TorchFile
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ucformat.engines.megatron.folder import MegatronFolder, MegatronSourceOptions
    from ucformat.reading.readable import FileRecord
    from ucformat.sources.distcp.metadata import Metadata
    from ucformat.storage.base import Store

_SHARD = re.compile(r"(.+)/shard_([\d.]*)_([\d.]*)", re.DOTALL)
_EXTRA = "_extra_state"
_NOT_OURS = ("optimizer", "args", "iteration")


class OpenDist(IndexedSource):
    """One opened distributed checkpoint."""

    kind = "megatron"
    part = ""  # there is a file for each of the ranks that the files record

    def __init__(self, store: Store, place: MegatronFolder, options: MegatronSourceOptions) -> None:
        self.store, self._options = store, options
        folder, allow, stacked = place.folder, options.allow, options.stacked
        below = f"{folder}/" if folder else ""
        meta = read_metadata(store, f"{below}.metadata", allow=allow)
        self._items = Items(store, meta, allow)
        if not exists(store, below + COMMON):
            raise MissingData(
                f"{below}{COMMON} is missing; it holds the values that are the same on every rank",
                hint=(
                    "the save did not finish, or the file was not copied: copy it from where it "
                    "was saved"
                ),
            )
        self._common = TorchFile(store, below + COMMON, allow=allow)
        values = self._common.value
        if not isinstance(values, dict):
            raise IntegrityError(f"{below}{COMMON} holds no dictionary")
        self.values: dict[Any, Any] = values
        self._beside = FilesBeside(store, folder, "")
        self.args = MegatronArguments.of(
            values.get("args"), options.vocab_size, below + COMMON, self._beside
        )
        self.local = self._is_local()
        self.contents = TensorIndex()
        self.buckets: list[tuple[Bucket, str]] = []
        self.weights: dict[str, list[UnstackedPart]] = {}
        self._fill(stacked=stacked)
        self._add_steps(stacked=stacked)
        backend = backend_of(store, folder) or ""
        files = (*([below + CONFIG] if exists(store, below + CONFIG) else []), below + COMMON)
        step = next(
            (n for name in ("iteration", "global_step") if type(n := values.get(name)) is int), None
        )
        # These are thousands of items, which are read when they are first needed.
        guarded = built_by_megatron(store.url)
        groups: LazySequence[Mapping[str, Any]] = LazySequence(guarded(self._groups))
        self.metadata = CheckpointMetadata(
            tensor_list=self.contents.tensor_list(groups),
            unreadable=self.contents.unreadable,
            groups=groups,
            objects=LazyMapping(guarded(self._objects)),
            aliases=_tied_output(self.args, self.weights),
            assets=place.context or self._beside.keys,
            step=step,
            layout=self._layout(),
            engine={"name": "megatron-core", "format": backend},
            files=(*filter(None, [place.tracker]), *files, meta.file, *meta.files),
            save_id=meta.save_id,
            folder=folder if place.context is None else "",
        )

    def records(self) -> Iterator[FileRecord]:
        """Every record of the archives of all items, and of `common.pt`."""
        yield from self._common.records()
        yield from self._items.records()

    def _is_local(self) -> bool:
        """Whether the model is of the local specification, whose norms have other names than the keys.

        Its linear layers have empty extra state; Transformer Engine's never do.
        """
        recorded = self.args.values.get("transformer_impl")
        if isinstance(recorded, str):
            return recorded == "local"
        meta = self._items.meta
        key = next(
            (k for k in meta.values if f"self_attention.linear_qkv.{_EXTRA}/shard_" in k), None
        )
        return key is not None and _unwrapped(self._items.values([key])[key].value) is None

    def _fill(self, *, stacked: bool) -> None:
        meta, shapes = self._items.meta, original_shapes(self._items.meta)
        parts: dict[Key, dict[int | None, UnstackedPart]] = {}
        order: dict[str, None] = {}
        trained = []
        for fqn in meta.tensors:
            parsed = split_state_key(fqn)
            if not self._options.optimizer and not (parsed and parsed == StateKey(fqn, "weight")):
                continue
            if isinstance(parsed, Bucket):
                self.buckets.append((parsed, fqn))
                continue
            if parsed is None:
                raise UnsupportedError(
                    f"{meta.file}: {fqn} is an optimizer's tensor that ucformat does not know",
                    hint=(
                        "save with --dist-ckpt-optim-fully-reshardable, and report this checkpoint"
                    ),
                )
            for key, half, part in self._unstack(fqn, parsed, shapes.get(fqn), stacked=stacked):
                if half in parts.setdefault(key, {}):
                    raise IntegrityError(f"{meta.file}: {fqn} and another entry both map to {key}")
                parts[key][half] = part
                order.setdefault(key.name)
                trained += [key] if key.state != "weight" else []
        lost = next((k for k in trained if Key(k.name, "weight") not in parts), None)
        if lost is not None:
            raise IntegrityError(
                f"{meta.file} has {lost}, but no such weight", hint="files of two saves are mixed"
            )
        for name in order:
            for key in [Key(name, s) for s in dict.fromkeys(k.state for k in parts)]:
                if halves := parts.get(key):
                    self._add(key, [halves[h] for h in sorted(halves, key=lambda h: h or 0)])
        if self.buckets:
            add_flat_states(self, self._items, self.buckets, stacked=stacked)

    def _unstack(
        self, fqn: str, parsed: StateKey, original: tuple[int, ...] | None, *, stacked: bool
    ) -> Iterator[tuple[Key, int | None, UnstackedPart]]:
        name = name_of(parsed.key, local=self.local)
        leading = 0 if stacked else name.leading
        stored = StackedTensor(self._items, fqn, Key(parsed.key, parsed.state), leading, original)
        if stacked:
            yield Key(parsed.key, parsed.state), None, UnstackedPart(stored, ())
            return
        for index in product(*map(range, stored.shape[:leading])):
            yield Key(name.at(index), parsed.state), name.half, UnstackedPart(stored, index)

    def _add(self, key: Key, parts: list[UnstackedPart]) -> None:
        tensor = unstacked(key, parts)
        if key.state == "weight":
            self.weights[key.name] = parts
        add_tensor(self.contents, tensor, self.args)

    def _add_steps(self, *, stacked: bool) -> None:
        """The step that all parameters of a torch optimizer share, if it is a tensor."""
        common = self._common
        if stacked:
            return
        inner = [o.get("optimizer", o) for o in self._optimizers()]
        states = [
            o["state"] for o in inner if isinstance(o, dict) and isinstance(o.get("state"), dict)
        ]
        steps = [s["common_step"] for s in states if "common_step" in s]
        tensors = [s for s in steps if isinstance(s, StoredTensor) and not s.shape]
        if not tensors or len({common.read(s) for s in tensors}) > 1:
            return
        for name in [k.name for k in self.contents.infos if k.state == "exp_avg"]:
            self.contents.add_whole(name, "step", common, tensors[0])

    def _layout(self) -> dict[str, Any]:
        out = self.args.layout()
        kinds = {v.get("param_state_sharding_type") for v in self._optimizers()} - {None}
        if len(kinds) == 1 and isinstance(kind := kinds.pop(), str):
            out["optimizer"] = kind
        return out

    def _optimizers(self) -> list[dict[Any, Any]]:
        """The entry of each optimizer in `common.pt`."""
        entry = self.values.get("optimizer")
        if not isinstance(entry, dict):
            return []
        chained = [v for k, v in entry.items() if isinstance(k, int) and isinstance(v, dict)]
        return chained or [entry]

    def _raw_groups(self) -> list[dict[str, Any]]:
        """The optimizer groups of all optimizers, as stored."""
        out: list[dict[str, Any]] = []
        entry = re.compile(r"dp_group_idx_\d+\.optimizer/shard_")
        sharded = [k for k in self._items.meta.values if entry.search(k)]
        if sharded:
            files = self._items.values(sharded)
            firsts: dict[str, Any] = {}
            for key in sharded:
                value = _unwrapped(files[key].value)
                firsts.setdefault(key.split("optimizer.", 1)[0], value)
            for inner in firsts.values():
                out += _groups_in(inner)
            return out
        for optimizer in self._optimizers():
            out += _groups_in(optimizer.get("optimizer", optimizer))
        return out

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer groups; none if Megatron's rule does not tell their parameters."""
        infos = self.contents.infos
        trained = {k.name for k in infos if k.state not in ("weight", "weight.padding")}
        weights = {k.name: i for k, i in infos.items() if k.state == "weight"}
        members = [Member(n, len(i.shape)) for n, i in weights.items() if n in trained]
        groups = groups_by_rule(self._raw_groups(), members, self._json)
        return [group.json() for group in groups or ()]

    def _objects(self) -> dict[str, Any]:
        """All values but tensors: of `common.pt`, and sharded objects by key and shard."""
        out = {str(k): self._json(v, str(k)) for k, v in self.values.items() if k not in _NOT_OURS}
        if self.args.file == self._beside.run:
            out["model_config"] = self._beside.model
        elif self.args.values:
            out["args"] = self._json(dict(self.args.values), "args")
        if optimizer := self._json(self.values.get("optimizer") or {}, "optimizer"):
            out["optimizer"] = optimizer
        keys = self._items.meta.values
        files = self._items.values(keys)
        sharded: dict[str, Any] = {}
        for fqn in keys:
            value = plain_value(files[fqn], fqn)
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
            match = _SHARD.fullmatch(fqn)
            key, shard = (match[1], match[2]) if match else (fqn, "0")
            if value is not None or not key.endswith(_EXTRA):
                sharded.setdefault(key, {})[shard] = value
        for key, shards in sharded.items():
            out[key if key not in out else f"{key} (sharded)"] = shards
        return out

    def _json(self, value: Any, path: str = "") -> Any:
        return to_json(value, read=self._common.read, path=path)


def _tied_output(args: MegatronArguments, weights: Collection[str]) -> dict[str, str]:
    """The tied output layer, if the arguments record one."""
    word, out = "embedding.word_embeddings.weight", "output_layer.weight"
    return {out: word} if args.tied and word in weights and out not in weights else {}


def _unwrapped(value: Any) -> Any:
    """A sharded object without the list of length 1 that contains it."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _groups_in(value: Any) -> list[dict[str, Any]]:
    groups = value.get("param_groups") if isinstance(value, dict) else None
    return [g for g in groups if isinstance(g, dict)] if isinstance(groups, list) else []


# Megatron-FSDP's checkpoints (format `fsdp_dtensor`), read in place: a PyTorch DCP checkpoint with Megatron's state.
#
# `model` has the parameters by name, perhaps with `module.` of the wrappers in front; `optimizer` has
# `state` by such names, and in `param_to_group_meta` the hyper-parameters of each parameter; `args`,
# `iteration` and others are values. Both halves of a gated projection are stored separately, under
# `…_w` and `…_v`.


_OPTIMIZER, _STATE, _GROUP = "optimizer", "state", "param_to_group_meta"
_OWN_VALUES = ("args", "iteration")

Path = tuple[Any, ...]


def is_fsdp(meta: Metadata) -> bool:
    """Whether a DCP checkpoint has the state of Megatron-FSDP, and not another program's."""
    roots = {path[0] for path in meta.paths.values()}
    return "model" in roots and (
        "checkpoint_version" in roots or any(_split(p, _GROUP) for p in meta.paths.values())
    )


def _split(path: Path, part: str) -> tuple[str, Path] | None:
    """The parameter of an optimizer's entry below a part, and the rest of its path."""
    if path[0] != _OPTIMIZER or part not in path[1:3]:
        return None
    index = path.index(part, 1)
    return (unwrapped(str(path[index + 1])), path[index + 2 :]) if len(path) > index + 2 else None


class OpenFsdp(IndexedSource):
    """One opened checkpoint of Megatron-FSDP."""

    kind = "megatron"

    def __init__(
        self, store: Store, place: MegatronFolder, meta: Metadata, options: MegatronSourceOptions
    ) -> None:
        self.store, self._items = store, Items(store, meta, options.allow)
        beside = FilesBeside(store, place.folder, "")
        own_values = self._read([name for name in _OWN_VALUES if name in meta.values])
        self.args = MegatronArguments.of(
            own_values.get("args"), options.vocab_size, meta.file, beside
        )
        self.contents = TensorIndex()
        self._values: dict[str, Path] = {}
        self._options: dict[str, tuple[str, str]] = {}
        self._plain: dict[str, tuple[str, str]] = {}
        self._sort_values(meta)
        self._fill(meta, optimizer=options.optimizer)
        self._check_layers(meta.file)
        guarded = built_by_megatron(store.url)
        groups: LazySequence[Mapping[str, Any]] = LazySequence(guarded(self._groups))
        step = own_values.get("iteration")
        weights = [key.name for key in self.contents.infos if key.state == "weight"]
        self.metadata = CheckpointMetadata(
            tensor_list=self.contents.tensor_list(groups),
            groups=groups,
            objects=LazyMapping(guarded(self._objects)),
            aliases=_tied_output(self.args, weights),
            assets=beside.keys,
            unreadable=self.contents.unreadable,
            step=step if type(step) is int else None,
            layout=self.args.layout(),
            engine={"name": "megatron-core", "format": "fsdp_dtensor"},
            files=(*filter(None, [place.tracker]), meta.file, *meta.files),
            save_id=meta.save_id,
            folder=place.folder,
        )

    def records(self) -> Iterator[FileRecord]:
        """Every record of the archives of all items."""
        return self._items.records()

    def _read(self, fqns: list[str]) -> dict[str, Any]:
        files = self._items.values(fqns)
        values = {fqn: files[fqn] for fqn in fqns}
        return {n: None if isinstance(f, OpaqueFile) else f.value for n, f in values.items()}

    def _sort_values(self, meta: Metadata) -> None:
        """Separate hyper-parameters, and states that are no tensors, from all other values."""
        for fqn in meta.values:
            path = meta.paths.get(fqn, (fqn,))
            if (option := _split(path, _GROUP)) is not None:
                self._options[fqn] = (_split_name(option[0])[0], ".".join(map(str, option[1])))
            elif (state := _split(path, _STATE)) is not None:
                self._plain[fqn] = (_split_name(state[0])[0], ".".join(map(str, state[1])))
            else:
                self._values[fqn] = path

    def _fill(self, meta: Metadata, *, optimizer: bool) -> None:
        """Add every tensor; the two halves of a gated projection become one."""
        parts: dict[Key, dict[int, UnstackedPart]] = {}
        for fqn in meta.tensors:
            path = meta.paths.get(fqn, (fqn,))
            state = _split(path, _STATE)
            if state is not None:
                if not optimizer:
                    continue
                name, kind = state[0], ".".join(map(str, state[1]))
                kind = "master" if kind in MASTER else kind
            elif str(path[0]).startswith("model") and len(path) > 1:
                name, kind = unwrapped(".".join(map(str, path[1:]))), "weight"
            elif path[0] == _OPTIMIZER:
                raise UnsupportedError(
                    f"{meta.file}: {fqn} is an optimizer's tensor that ucformat does not know",
                    hint=(
                        "leave the optimizer out with the option optimizer=false, and report "
                        "this checkpoint"
                    ),
                )
            else:
                name, kind = ".".join(map(str, path)), "weight"
            whole, half = _split_name(name)
            key = Key(whole, kind)
            if half in parts.setdefault(key, {}):
                raise IntegrityError(f"{meta.file}: {fqn} and another entry both map to {key}")
            parts[key][half] = UnstackedPart(StackedTensor(self._items, fqn, Key(name, kind)), ())
        for key in sorted(parts, key=lambda key: key.state != "weight"):
            if key.state != "weight" and (weight := Key(key.name, "weight")) not in parts:
                raise IntegrityError(
                    f"{meta.file} has {key}, but no such weight",
                    hint="files of two saves are mixed",
                )
            halves = [parts[key][half] for half in sorted(parts[key])]
            is_moment = key.state != "weight" and len(halves) == 2
            if is_moment and _is_whole(halves[0], parts[weight][0]):
                # Megatron splits the moments alone, and saves others whole under both names
                halves = halves[:1]
            tensor = unstacked(key, halves)
            add_tensor(self.contents, tensor, self.args)

    def _check_layers(self, file: str) -> None:
        """MissingData if stages have numbered their layers alike, so that one has replaced the other's."""
        layers = self.args.number("num_layers")
        stages = self.args.degree("pipeline_model_parallel_size") or 1
        matches = (LAYER.fullmatch(key.name) for key in self.contents.infos)
        numbers = {m[2] for m in matches if m is not None and m[1] == "decoder.layers"}
        if layers is not None and stages > 1 and len(numbers) < layers:
            raise MissingData(
                f"{file} has {len(numbers)} layers of a model of {layers} that was trained in {stages} "
                "stages: Megatron-FSDP numbers the layers of each stage from 0, so that the files "
                "have those of one stage, or of several mixed",
                hint=(
                    "the other layers are lost: save again with ucformat.torch.megatron.save, which "
                    "numbers them through all stages, or without pipeline parallelism"
                ),
            )

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer groups: parameters with equal hyper-parameters form one."""
        files = self._items.values([*self._options, *self._plain])
        options: dict[str, dict[str, Any]] = {}
        for fqn, (name, option) in self._options.items():
            options.setdefault(name, {})[option] = plain_value(files[fqn], fqn)
        groups: dict[str, Group] = {}
        for name, mine in options.items():
            groups.setdefault(json.dumps(mine, sort_keys=True), Group([], mine)).names.append(name)
        for group in groups.values():
            group.state = plain_states(group, self._plain, files)
        return [group.json() for group in groups.values()]

    def _objects(self) -> Mapping[str, Any]:
        """All values but hyper-parameters and the optimizer's states, nested as in the program."""
        values = {fqn: path for fqn, path in self._values.items() if fqn != "iteration"}
        return nested_objects(values, self._items.values(values), self._items.meta.paths.values())


def _split_name(name: str) -> tuple[str, int]:
    """The name of a parameter of the model, and the half of a gated projection."""
    whole, half = split_half(name)
    return ungrouped(whole), half


def _is_whole(half: UnstackedPart, weight: UnstackedPart) -> bool:
    """Whether what is stored under the name of one half is of both: a step, or the rows of both."""
    return not half.shape or (bool(weight.shape) and half.shape[:1] == (2 * weight.shape[0],))
