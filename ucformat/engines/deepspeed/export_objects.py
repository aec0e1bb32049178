"""The values beside tensors in what is written: counters, schedulers, client state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.engines.deepspeed.export_model import ZERO3, outside
from ucformat.engines.deepspeed.model_states import ENGINE_KEYS, SCALER, TENSOR_KEYS, scaler_of
from ucformat.errors import UnsupportedError, UsageError
from ucformat.exporters.base import left_out
from ucformat.exporters.pickle import ALLOWED, Call, Global, Instance
from ucformat.exporters.values import value_of, whole
from ucformat.geometry.tensor import Key
from ucformat.reading.values import references, unkey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.engines.deepspeed.export_model import TargetEngine, TrainedModel
    from ucformat.geometry.tensor import TensorInfo


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
    def of(cls, model: TrainedModel, engine: TargetEngine) -> Values:
        """The values of a checkpoint; tensors that belong to them are taken from the model."""
        source, out = model.source, cls()
        infos = (info for states in model.by_name.values() for info in states.values())
        decode = ValueDecoder({info.key: info for info in infos})
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
                for inner, inner_value in value.items():
                    out._put(part, f"{key}.{inner}", unkey(inner), inner_value, decode)
            else:
                part = out.engine if key in _COPIED else out.client
                out._put(part, key, key, value, decode)
        has_scheduler = isinstance(engine.settings.get("scheduler"), Mapping)
        if out.engine.get("lr_scheduler") is None and has_scheduler:
            # of every scheduler of DeepSpeed
            out.engine["lr_scheduler"] = {"last_batch_iteration": engine.step - 1}
        if engine.settings:
            out._put(out.engine, "ds_config", "ds_config", dict(engine.settings), decode)
        out._take_ranks(model, engine, decode)
        out.used |= decode.used
        model.placed_in_client |= set(references(source.objects))
        out._take_outside(model)
        model.placed_in_client |= {key.name for key in out.used}
        return out

    def _put(
        self, part: dict[Any, Any], label: str, key: Any, value: Any, decode: ValueDecoder
    ) -> None:
        """Add a value, or note that it has no place."""
        if part is self.client and key in ENGINE_KEYS | TENSOR_KEYS:
            self.missing.append(f"the value {label}, a name of DeepSpeed's own")
        else:
            try:
                part[key] = decode(value)
            except UnsupportedError as error:
                self.missing.append(f"the value {label}: {error.message}")
        self._named.add(label)

    def _take_ranks(self, model: TrainedModel, engine: TargetEngine, decode: ValueDecoder) -> None:
        """Add the client states of further ranks, if these write files as before."""
        by_rank, layout = model.source.objects.get("rank"), model.source.metadata.layout
        before = (layout.get("zero"), 1, layout.get("dp"))
        if not isinstance(by_rank, dict) or engine.stage != ZERO3:
            return
        of_ranks = all(r.isdigit() and v.keys() == {"client_state"} for r, v in by_rank.items())
        if (engine.stage, engine.tp, engine.dp) != before or not of_ranks:
            return
        self._named.add("rank")
        for rank, values in by_rank.items():
            part = self.ranks[int(rank)] = {}
            for key, value in values["client_state"].items():
                self._put(part, f"rank.{rank}.{key}", unkey(key), value, decode)

    def _take_outside(self, model: TrainedModel) -> None:
        """Add tensors that are not the model's to the client state, at their paths."""
        used = {key.name for key in self.used}
        weights = (n for n, states in model.by_name.items() if states.keys() == {"weight"})
        names = [name for name in weights if name not in used]
        for name, (*path, last) in outside(model.source, model.trained, names).items():
            info = model.by_name[name]["weight"]
            container: Any = self.client
            for key in path:
                container = container.setdefault(key, {}) if isinstance(container, dict) else None
            is_own = not path and last in ENGINE_KEYS | TENSOR_KEYS
            if isinstance(container, dict) and last not in container and not is_own:
                container[last] = whole(info)
                self.used[info.key] = info
            else:
                self.missing.append(f"the tensor {name}, which is not the model's")
                model.placed_in_client.add(name)

    def left_out(self, model: TrainedModel, infos: Mapping[Key, TensorInfo]) -> tuple[str, ...]:
        """What of the source has no place in the target."""
        exported = list((self.used | dict(infos)).values())
        left = left_out(model.source, exported, values=self._named, groups=bool(model.groups))
        return (*left, *self.missing)

    def counters(self, engine: TargetEngine, rank: int) -> Iterator[tuple[str, Any]]:
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


# Values of a checkpoint as the pickles of DeepSpeed hold them; objects are only made of the classes
# named here.

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_STATIC, _DYNAMIC = Global(_SCALERS, "LossScaler"), Global(_SCALERS, "DynamicLossScaler")
_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_ADDRESS = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_SIZE = Global("torch", "Size")
ALLOWED.update((_STATIC, _DYNAMIC, _STAGE, _ADDRESS))

#: The settings of a dynamic loss scaler with DeepSpeed's defaults, and their names in a
#: configuration.
_SETTINGS: dict[str, tuple[Any, str]] = {
    "scale_factor": (2.0, ""),
    "scale_window": (1000, "loss_scale_window"),
    "min_scale": (1, "min_loss_scale"),
    "delayed_shift": (2, "hysteresis"),
    "consecutive_hysteresis": (False, "consecutive_hysteresis"),
    "raise_error_at_min_scale": (True, ""),
}


def size_of(shape: tuple[int, ...]) -> Call:
    """A `torch.Size`."""
    return Call(_SIZE, (shape,))


def stage_of(stage: int) -> Call:
    """The member of DeepSpeed's enumeration of ZeRO stages."""
    return Call(_STAGE, (stage,))


def address(start: int, numel: int) -> Instance:
    """A `fragment_address`: a parameter's place in the partition of a rank."""
    return Instance(_ADDRESS, {"numel": numel, "start": start})


class ValueDecoder:
    """Converts values from their JSON form."""

    def __init__(self, tensors: Mapping[Key, TensorInfo]) -> None:
        self._tensors = tensors
        self.used: dict[Key, TensorInfo] = {}

    def __call__(self, value: Any) -> Any:
        """The value."""
        return value_of(value, self._find)

    def _find(self, name: str) -> TensorInfo:
        info = self._tensors.get(Key(name, "weight"))
        if info is None:
            raise UnsupportedError(f"the tensor {name} is not exported")
        self.used[info.key] = info
        return info

    def hyper(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The hyper-parameters of an optimizer group, whose sequences are tuples, such as `betas`."""
        hyper = {k: self(v) for k, v in group.items() if k not in ("params", "state")}
        return {k: tuple(v) if isinstance(v, list) else v for k, v in hyper.items()}


def scale_of(engine: TargetEngine, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The loss scale: `dynamic`, and the fields of the scaler."""
    if engine.dtype != "float16":
        return {"dynamic": False, "cur_scale": 1.0}
    scaler, dynamic = scaler_of(recorded)
    settings = engine.settings.get("fp16")
    settings = settings if isinstance(settings, dict) else {}
    if "cur_scale" not in scaler:
        if not settings:
            raise UsageError(
                "the source does not record a loss scale, which an engine in float16 has",
                hint="pass config (--config), a configuration with the section `fp16`",
            )
        dynamic = not settings.get("loss_scale")
        scaler = {"cur_scale": settings.get("loss_scale")}
        if dynamic:
            scaler = {"cur_scale": 2.0 ** settings.get("initial_scale_power", 16)}
    if not dynamic:
        return {"dynamic": False, "cur_scale": scaler["cur_scale"]}
    out = {"dynamic": True, "cur_iter": 0, "last_overflow_iter": -1}
    for name, (default, key) in _SETTINGS.items():
        out[name] = scaler.get(name, settings.get(key, default))
    out["cur_hysteresis"] = out["delayed_shift"]
    return out | {name: scaler[name] for name in SCALER if name in scaler}


def loss_scaler(scale: Mapping[str, Any]) -> Instance:
    """DeepSpeed's object for a loss scale."""
    if not scale["dynamic"]:
        return Instance(_STATIC, {"cur_scale": scale["cur_scale"], "dynamic": False})
    fields = ("cur_scale", "dynamic", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "min_scale",
              "delayed_shift", "cur_hysteresis", "consecutive_hysteresis", "raise_error_at_min_scale")  # fmt: skip
    return Instance(_DYNAMIC, {f: scale[f] for f in fields} | {"dtype": Global("torch", "float16")})
