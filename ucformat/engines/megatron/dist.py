"""Megatron's distributed checkpoints (`dist_checkpointing`, format `torch_dist`), read in place.

A folder with `metadata.json`, a PyTorch DCP checkpoint, and `common.pt`: values that are the same
on every rank.
"""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, Any

from ucformat.engines.megatron.flat_states import add_flat_states
from ucformat.engines.megatron.folder import (
    COMMON,
    CONFIG,
    Arguments,
    backend_of,
    built_by_megatron,
)
from ucformat.engines.megatron.names import (
    Bucket,
    Member,
    StateKey,
    groups_by_rule,
    name_of,
    split_state_key,
)
from ucformat.engines.megatron.stacked import (
    StackedTensor,
    UnstackedPart,
    add_tensor,
    original_shapes,
    unstacked,
)
from ucformat.errors import IntegrityError, MissingData, UnsupportedError
from ucformat.geometry.tensor import Key, TensorList
from ucformat.reading.readable import CheckpointMetadata, LazyMapping, LazySequence
from ucformat.sources.distcp.metadata import Items, read_metadata
from ucformat.sources.distcp.opened import plain_value
from ucformat.sources.index import TensorIndex
from ucformat.sources.pickle.file import TorchFile
from ucformat.sources.pickle.stand_ins import StoredTensor
from ucformat.sources.values import to_json
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucformat.engines.megatron.folder import MegatronFolder, MegatronOptions
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent
    from ucformat.reading.readable import FileRecord
    from ucformat.storage.base import Store

_SHARD = re.compile(r"(.+)/shard_([\d.]*)_([\d.]*)", re.DOTALL)
_EXTRA = "_extra_state"
_NOT_OURS = ("optimizer", "args", "iteration")


class OpenDist:
    """One opened distributed checkpoint."""

    kind = "megatron"
    part = ""  # there is a file for each of the ranks that the files record

    def __init__(self, store: Store, place: MegatronFolder, how: MegatronOptions) -> None:
        self.store, self._how = store, how
        folder, allow, stacked = place.folder, how.allow, how.stacked
        below = f"{folder}/" if folder else ""
        meta = read_metadata(store, f"{below}.metadata", allow=allow)
        self._items = Items(store, meta, allow)
        if not exists(store, below + COMMON):
            raise MissingData(
                f"{below}{COMMON} is missing; it holds the values that are the same on every rank",
                hint="the save did not finish, or the file was not copied: copy it from where it was saved",
            )
        self._common = TorchFile(store, below + COMMON, allow=allow)
        values = self._common.value
        if not isinstance(values, dict):
            raise IntegrityError(f"{below}{COMMON} holds no dictionary")
        self.values: dict[Any, Any] = values
        self.args = Arguments.of(values.get("args"), how.vocab_size, below + COMMON)
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
        numbers = LazyMapping(
            lambda: {name: i for i, group in enumerate(groups) for name in group["params"]}
        )
        self.metadata = CheckpointMetadata(
            tensor_list=TensorList(self.contents.tensor_list().tensors, numbers),
            unreadable=self.contents.unreadable,
            groups=groups,
            objects=LazyMapping(guarded(self._objects)),
            aliases=self._aliases(),
            assets=place.context or (),
            step=step,
            layout=self._layout(),
            engine={"name": "megatron-core", "format": backend},
            files=(*filter(None, [place.tracker]), *files, meta.file, *meta.files),
            save_id=meta.save_id,
            folder=folder if place.context is None else "",
        )

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """Where the bytes of a tensor are; opens the items that hold them, if they are not yet open."""
        return self.contents.extents(key, within, self.store.url)

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
        found: dict[Key, dict[int | None, UnstackedPart]] = {}
        order: dict[str, None] = {}
        trained = []
        for fqn in meta.tensors:
            parsed = split_state_key(fqn)
            if not self._how.optimizer and not (parsed and parsed == StateKey(fqn, "weight")):
                continue
            if isinstance(parsed, Bucket):
                self.buckets.append((parsed, fqn))
                continue
            if parsed is None:
                raise UnsupportedError(
                    f"{meta.file}: {fqn} is an optimizer's tensor that ucformat does not know",
                    hint="save with --dist-ckpt-optim-fully-reshardable, and report this checkpoint",
                )
            for key, half, part in self._unstack(fqn, parsed, shapes.get(fqn), stacked=stacked):
                if half in found.setdefault(key, {}):
                    raise IntegrityError(f"{meta.file}: {fqn} and another entry both map to {key}")
                found[key][half] = part
                order.setdefault(key.name)
                trained += [key] if key.state != "weight" else []
        lost = next((k for k in trained if Key(k.name, "weight") not in found), None)
        if lost is not None:
            raise IntegrityError(
                f"{meta.file} has {lost}, but no such weight", hint="files of two saves are mixed"
            )
        for name in order:
            for key in [Key(name, s) for s in dict.fromkeys(k.state for k in found)]:
                if key in found:
                    halves = found[key]
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
        rows = self.args.rows(key.name, tensor.shape[0]) if tensor.shape else 0
        add_tensor(self.contents, tensor, rows if tensor.shape else 0)

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

    def _aliases(self) -> dict[str, str]:
        """The tied output layer, if the arguments record one."""
        word, out = "embedding.word_embeddings.weight", "output_layer.weight"
        return (
            {out: word}
            if self.args.tied and word in self.weights and out not in self.weights
            else {}
        )

    def _layout(self) -> dict[str, Any]:
        degrees = {
            "tp": self.args.degree("tensor_model_parallel_size"),
            "pp": self.args.degree("pipeline_model_parallel_size"),
            "ep": self.args.degree("expert_model_parallel_size"),
        }
        out: dict[str, Any] = {axis: n for axis, n in degrees.items() if n is not None}
        kinds = {v.get("param_state_sharding_type") for v in self._optimizers()} - {None}
        return out | (
            {"optimizer": kind} if len(kinds) == 1 and isinstance(kind := kinds.pop(), str) else {}
        )

    def _optimizers(self) -> list[dict[Any, Any]]:
        """The entry of each optimizer in `common.pt`."""
        found = self.values.get("optimizer")
        if not isinstance(found, dict):
            return []
        chained = [v for k, v in found.items() if isinstance(k, int) and isinstance(v, dict)]
        return chained or [found]

    def _raw_groups(self) -> list[dict[str, Any]]:
        """The optimizer groups of all optimizers, as stored."""
        out: list[dict[str, Any]] = []
        sharded = [
            k
            for k in self._items.meta.values
            if re.search(r"dp_group_idx_\d+\.optimizer/shard_", k)
        ]
        if sharded:
            files = self._items.values(sharded)
            by_chain: dict[str, list[Any]] = {}
            for key in sharded:
                by_chain.setdefault(key.split("optimizer.", 1)[0], []).append(
                    _unwrapped(files[key].value)
                )
            for inner in by_chain.values():
                out += _groups(inner[0])
            return out
        for optimizer in self._optimizers():
            out += _groups(optimizer.get("optimizer", optimizer))
        return out

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer groups with their parameters; none if Megatron's rule does not determine these."""
        trained = {
            k.name
            for k in self.contents.infos
            if k not in ((w := Key(k.name, "weight")), w.padding)
        }
        members = [
            Member(k.name, len(i.shape))
            for k, i in self.contents.infos.items()
            if k.state == "weight" and k.name in trained
        ]

        return [
            group.json() for group in groups_by_rule(self._raw_groups(), members, self._json) or ()
        ]

    def _objects(self) -> dict[str, Any]:
        """All values other than tensors: those of `common.pt`, and the sharded objects by key and shard."""
        out = {str(k): self._json(v, str(k)) for k, v in self.values.items() if k not in _NOT_OURS}
        if self.args.values:
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
            key, at = (match[1], match[2]) if match else (fqn, "0")
            if value is not None or not key.endswith(_EXTRA):
                sharded.setdefault(key, {})[at] = value
        for key, shards in sharded.items():
            out[key if key not in out else f"{key} (sharded)"] = shards
        return out

    def _json(self, value: Any, path: str = "") -> Any:
        return to_json(value, read=self._common.read, path=path)


def _unwrapped(value: Any) -> Any:
    """A sharded object without the list of length 1 that contains it."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _groups(value: Any) -> list[dict[str, Any]]:
    found = value.get("param_groups") if isinstance(value, dict) else None
    return [g for g in found if isinstance(g, dict)] if isinstance(found, list) else []
