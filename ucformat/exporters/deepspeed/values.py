"""Values of a checkpoint as the pickles of DeepSpeed hold them; objects are only made of the classes named here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import UnsupportedError, UsageError
from ucformat.exporters.pickle import ALLOWED, Call, Global, Instance
from ucformat.exporters.values import value_of
from ucformat.geometry.tensor import Key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.exporters.deepspeed.options import Engine
    from ucformat.geometry.tensor import TensorInfo

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_STATIC, _DYNAMIC = Global(_SCALERS, "LossScaler"), Global(_SCALERS, "DynamicLossScaler")
_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_ADDRESS = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_SIZE = Global("torch", "Size")
ALLOWED.update((_STATIC, _DYNAMIC, _STAGE, _ADDRESS))

_KEPT = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
#: The settings of a dynamic loss scaler with DeepSpeed's defaults, and their names in a configuration.
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
        found = {k: self(v) for k, v in group.items() if k not in ("params", "state")}
        return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}


def scale_of(engine: Engine, recorded: Any) -> dict[str, Any]:
    """The loss scale: `dynamic`, and the fields of the scaler."""
    if engine.dtype != "float16":
        return {"dynamic": False, "cur_scale": 1.0}
    found = recorded if isinstance(recorded, dict) else {}
    found = found.get("loss_scaler", found)
    found = found.get("$state", {}) if "$class" in found else found
    settings = engine.settings.get("fp16")
    settings = settings if isinstance(settings, dict) else {}
    dynamic = bool(found.get("dynamic") or found.get("dynamic_loss_scale"))
    if "cur_scale" not in found:
        if not settings:
            raise UsageError(
                "the source does not record a loss scale, which an engine in float16 has",
                hint="pass config (--config), a configuration with the section `fp16`",
            )
        dynamic = not settings.get("loss_scale")
        found = {"cur_scale": 2.0 ** settings.get("initial_scale_power", 16) if dynamic else settings["loss_scale"]}
    if not dynamic:
        return {"dynamic": False, "cur_scale": found["cur_scale"]}
    out = {"dynamic": True, "cur_iter": 0, "last_overflow_iter": -1}
    for name, (default, key) in _SETTINGS.items():
        out[name] = found.get(name, settings.get(key, default))
    out["cur_hysteresis"] = out["delayed_shift"]
    return out | {name: found[name] for name in _KEPT if name in found}


def loss_scaler(scale: Mapping[str, Any]) -> Instance:
    """DeepSpeed's object for a loss scale."""
    if not scale["dynamic"]:
        return Instance(_STATIC, {"cur_scale": scale["cur_scale"], "dynamic": False})
    fields = ("cur_scale", "dynamic", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "min_scale",
              "delayed_shift", "cur_hysteresis", "consecutive_hysteresis", "raise_error_at_min_scale")  # fmt: skip
    return Instance(_DYNAMIC, {f: scale[f] for f in fields} | {"dtype": Global("torch", "float16")})
