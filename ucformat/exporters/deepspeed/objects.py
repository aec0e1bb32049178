"""The values beside tensors: counters, schedulers and the client state of the checkpoint that is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.errors import UnsupportedError
from ucformat.exporters.base import left_out
from ucformat.exporters.deepspeed.model import outside
from ucformat.exporters.deepspeed.options import ZERO3
from ucformat.exporters.deepspeed.values import ValueDecoder, scale_of
from ucformat.exporters.values import whole
from ucformat.sources.deepspeed.model import ENGINE_KEYS, TENSOR_KEYS
from ucformat.sources.values import references, unkey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.exporters.deepspeed.model import TrainedModel
    from ucformat.exporters.deepspeed.options import Engine
    from ucformat.geometry.tensor import Key, TensorInfo

#: The version of DeepSpeed whose files are written.
VERSION = "0.19.8"
_COPIED = ("lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_samples")
#: Objects that describe the source's own files, and are written anew.
_RENEWED = ("global_steps", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_version",
            "ds_config", "buffer_names", "num_experts", "ds_autoep_layers")  # fmt: skip
#: Objects of DeepSpeed's checkpoints without a place in files of another layout.
_DROPPED = ("rank", "not_stored", "micro_steps", *sorted(ENGINE_KEYS - {*_COPIED, *_RENEWED}))
_OPTIMIZER = frozenset(
    ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "zero_stage", "partition_count", "ds_version",
     "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "base_optimizer_state_step")
)  # fmt: skip


@dataclass(slots=True)
class Values:
    """The values beside tensors.

    Attributes:
        engine: those under the names of DeepSpeed.
        extra: entries of the module that are not tensors.
        ranks: what differs in the client state of each further data-parallel rank, under ZeRO 3.
        overflow: whether the last step's gradients overflowed.
        clip_grad: the largest norm of gradients, if known.
        missing: what of them has no place.
    """

    engine: dict[str, Any] = field(default_factory=dict)
    client: dict[Any, Any] = field(default_factory=dict)
    extra: dict[Any, Any] = field(default_factory=dict)
    ranks: dict[int, dict[Any, Any]] = field(default_factory=dict)
    scale: dict[str, Any] = field(default_factory=dict)
    overflow: bool = False
    clip_grad: float | None = None
    used: dict[Key, TensorInfo] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    _named: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, model: TrainedModel, engine: Engine) -> Values:
        """The values of a checkpoint; tensors that belong to them are taken from the model."""
        source, out = model.source, cls()
        decode = ValueDecoder({info.key: info for held in model.by_name.values() for info in held.values()})
        objects = {k: v for k, v in source.objects.items() if k not in _DROPPED}
        optimizer = objects.pop("optimizer", None)
        recorded = optimizer if isinstance(optimizer, dict) else {}
        out.scale = scale_of(engine, recorded)
        out.overflow = recorded.get("overflow") is True
        configured = engine.settings.get("gradient_clipping")
        clip = recorded.get("clip_grad", configured) if model.options.config is None else configured
        out.clip_grad = clip if isinstance(clip, int | float) else None
        out._named |= {"optimizer", *_RENEWED}
        out.missing += [f"the value optimizer.{k}" for k in recorded if k not in _OPTIMIZER]
        for key, value in objects.items():
            if key in _RENEWED:
                continue
            if key in ("client_state", "module") and isinstance(value, dict):
                out._named.add(key)
                part = out.client if key == "client_state" else out.extra
                for inner, one in value.items():
                    out._put(part, f"{key}.{inner}", unkey(inner), one, decode)
            else:
                part = out.engine if key in _COPIED else out.client
                out._put(part, key, key, value, decode)
        if out.engine.get("lr_scheduler") is None and isinstance(engine.settings.get("scheduler"), Mapping):
            out.engine["lr_scheduler"] = {"last_batch_iteration": engine.step - 1}  # of every scheduler of DeepSpeed
        if engine.settings:
            out._put(out.engine, "ds_config", "ds_config", dict(engine.settings), decode)
        out._take_ranks(model, engine, decode)
        out.used |= decode.used
        model.placed_in_client |= set(references(source.objects))
        out._take_outside(model)
        model.placed_in_client |= {key.name for key in out.used}
        return out

    def _put(self, part: dict[Any, Any], label: str, key: Any, value: Any, decode: ValueDecoder) -> None:
        """Add a value, or note that it has no place."""
        if part is self.client and key in ENGINE_KEYS | TENSOR_KEYS:
            self.missing.append(f"the value {label}, a name of DeepSpeed's own")
        else:
            try:
                part[key] = decode(value)
            except UnsupportedError as error:
                self.missing.append(f"the value {label}: {error.message}")
        self._named.add(label)

    def _take_ranks(self, model: TrainedModel, engine: Engine, decode: ValueDecoder) -> None:
        """Add the client states of further ranks, if these write files of their own as they did before."""
        found, layout = model.source.objects.get("rank"), model.source.metadata.layout
        if not isinstance(found, dict) or (engine.stage, engine.tp, engine.dp) != (
            layout.get("zero"),
            1,
            layout.get("dp"),
        ):
            return
        if engine.stage != ZERO3 or any(not r.isdigit() or v.keys() != {"client_state"} for r, v in found.items()):
            return
        self._named.add("rank")
        for rank, values in found.items():
            part = self.ranks[int(rank)] = {}
            for key, value in values["client_state"].items():
                self._put(part, f"rank.{rank}.{key}", unkey(key), value, decode)

    def _take_outside(self, model: TrainedModel) -> None:
        """Add tensors that are not the model's to the client state, at their path in the program's state."""
        taken = {key.name for key in self.used}
        names = [n for n, held in model.by_name.items() if held.keys() == {"weight"} and n not in taken]
        for name, (*path, last) in outside(model.source, model.trained, names).items():
            info = model.by_name[name]["weight"]
            place: Any = self.client
            for key in path:
                place = place.setdefault(key, {}) if isinstance(place, dict) else None
            if isinstance(place, dict) and last not in place and (path or last not in ENGINE_KEYS | TENSOR_KEYS):
                place[last] = whole(info)
                self.used[info.key] = info
            else:
                self.missing.append(f"the tensor {name}, which is not the model's")
                model.placed_in_client.add(name)

    def left_out(self, model: TrainedModel, infos: Mapping[Key, TensorInfo]) -> tuple[str, ...]:
        """What of the source has no place in the target."""
        kept = list((self.used | dict(infos)).values())
        found = left_out(model.source, kept, values=self._named, groups=bool(model.groups))
        return (*found, *self.missing)

    def counters(self, engine: Engine, rank: int) -> Iterator[tuple[str, Any]]:
        """The entries of a model states file that are not tensors, in DeepSpeed's order."""
        for name in ("lr_scheduler", "data_sampler", "random_ltd"):
            yield name, self.engine.get(name)
        yield "skipped_steps", self.engine.get("skipped_steps", 0)
        yield "global_steps", engine.step
        if "global_samples" in self.engine:  # else the engine computes it from the steps
            yield "global_samples", self.engine["global_samples"]
        yield "dp_world_size", engine.dp
        yield "mp_world_size", engine.tp
        yield "checkpoint_parallel_dimensions", {"pp_degree": 1, "tp_degree": engine.tp}
        if "ds_config" in self.engine:
            yield "ds_config", self.engine["ds_config"]
        yield "ds_version", VERSION
        yield from (self.client | self.ranks.get(rank, {})).items()
