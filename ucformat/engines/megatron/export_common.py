"""The values of a Megatron checkpoint: those in `common.pt`, with the optimizer groups, and those of single ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from struct import pack
from typing import TYPE_CHECKING, Any, Literal

from ucformat.engines.megatron.names import is_expert
from ucformat.errors import UnsupportedError
from ucformat.exporters.pickle import ALLOWED, Global, Instance
from ucformat.exporters.values import constant, value_of
from ucformat.geometry.tensor import Key
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

_SHARDING = "fully_reshardable"

#: How the state dict of the torch optimizer lies in that of Megatron's: inside that of the
#: distributed optimizer, or of the one for 16-bit parameters, or alone.
Wrapped = Literal["distributed", "mixed_precision", "plain"]
_NAMESPACE = Global("argparse", "Namespace")
#: Classes of values that Megatron's own list of safe classes has, by the names that a source gives.
_CLASSES = {
    f"{module}.{name}": Global(module, name)
    for module, name in (
        ("megatron.core.transformer.enums", "AttnBackend"),
        ("megatron.core.transformer.enums", "CudaGraphScope"),
        ("megatron.core.enums", "ModelType"),
        ("megatron.core.rerun_state_machine", "RerunMode"),
        ("megatron.core.rerun_state_machine", "RerunState"),
        ("megatron.core.rerun_state_machine", "RerunDiagnostic"),
        ("signal", "Signals"),
    )
}
ALLOWED |= {_NAMESPACE, *_CLASSES.values()}

_AT = re.compile(r"\d+(\.\d+)*")
# keys of a group that groups are not compared by
_NOT_SHARED = ("params", "state", "step", "is_expert_parallel")
_OURS = ("optimizer", "args", "iteration", "content_metadata")


@dataclass
class Common:
    """The values of `common.pt`, and what has no place in it."""

    values: dict[str, Any]
    left: list[str] = field(default_factory=list)


def common_of(
    source: Checkpoint,
    infos: Sequence[TensorInfo],
    *,
    trained: Collection[str],
    prefixes: Mapping[bool, str],
    wrapped: Wrapped,
) -> Common:
    """The values that all ranks share."""
    common = Common({"checkpoint_version": 3.0})
    if source.metadata.step is not None:
        common.values["iteration"] = source.metadata.step
    for name, data in source.objects.items():
        if (name not in _OURS or not is_megatron(source)) and not _is_sharded(source, data):
            _add(common, name, data)
    args = source.objects.get("args")
    if isinstance(args, dict) and is_megatron(source):
        found = Common({})
        for name, data in args.items():
            _add(found, name, data, "args.")
        common.values["args"] = Instance(_NAMESPACE, found.values)
        common.left += found.left
    about = source.objects.get("content_metadata")
    known = (
        {k: v for k, v in about.items() if isinstance(v, bool | str)}
        if isinstance(about, dict)
        else {}
    )
    known.pop("distrib_optim_sharding_type", None)
    if trained:
        common.values["optimizer"] = _optimizers(source, infos, trained, prefixes, wrapped)
        if wrapped == "distributed":
            known["distrib_optim_sharding_type"] = _SHARDING
        known["chained_optim_avoid_prefix"] = not any(prefixes.values())
    elif source.metadata.groups:
        common.left.append("the optimizer groups")
    common.values["content_metadata"] = known
    return common


def objects_of(source: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """The values of single ranks, layers and experts, by their keys; and what cannot be written."""
    found = Common({})
    for name, data in source.objects.items():
        if not _is_sharded(source, data):
            continue
        indices = [tuple(map(int, at.split("."))) for at in data]
        sizes = ".".join(str(max(at) + 1) for at in zip(*indices, strict=True))
        for at, value in data.items():
            _add(found, f"{name.removesuffix(' (sharded)')}/shard_{at}_{sizes}", value)
    return found.values, found.left


def _is_sharded(source: Checkpoint, data: Any) -> bool:
    """Whether a value of Megatron's is one for each shard, by the shard."""
    is_map = isinstance(data, Mapping) and bool(data)
    return is_map and is_megatron(source) and all(map(_AT.fullmatch, data))


def is_megatron(source: Checkpoint) -> bool:
    """Whether a checkpoint came from Megatron, perhaps by a conversion."""
    return source.metadata.engine.get("name") == "megatron-core"


def has_distributed_optimizer(source: Checkpoint) -> bool:
    """Whether the optimizer of a Megatron checkpoint is the distributed one; of other sources true."""
    args = source.objects.get("args") if is_megatron(source) else None
    return not isinstance(args, dict) or args.get("use_distributed_optimizer") is not False


def _add(common: Common, name: str, data: Any, below: str = "") -> None:
    try:
        common.values[name] = _value(data)
    except UnsupportedError as error:
        common.left.append(f"the value {below}{name}: {error.message}")


def _value(data: Any) -> Any:
    def refuse(name: str) -> TensorInfo:
        raise UnsupportedError(f"it holds the tensor {name}")

    return value_of(data, refuse, _CLASSES)


def _optimizers(
    source: Checkpoint,
    infos: Sequence[TensorInfo],
    trained: Collection[str],
    prefixes: Mapping[bool, str],
    wrapped: Wrapped,
) -> dict[Any, Any]:
    """The entry of the optimizer, or of each of several."""
    chained = len(prefixes) > 1
    step = _step(source, infos, trained)
    fused = not has_distributed_optimizer(source) and any(
        "step" in group for group in source.metadata.groups
    )
    in_groups = wrapped == "distributed" or fused
    groups = _groups(source, infos, trained, chained=chained, step=step if in_groups else None)
    shared = (
        {}
        if in_groups or step is None
        else {"common_step": constant("float32", (), pack("<f", step))}
    )
    saved = source.objects.get("optimizer")
    out: dict[int, dict[str, Any]] = {}
    for experts in prefixes:
        inner: dict[str, Any] = {
            "param_groups": [g for g in groups if not chained or g["is_expert_parallel"] is experts]
        }
        if wrapped != "distributed":
            inner["state"] = shared
        entry: dict[str, Any] = inner if wrapped == "plain" else {"optimizer": inner}
        if wrapped == "distributed":
            entry["param_state_sharding_type"] = _SHARDING
        if wrapped != "plain" and isinstance(saved, dict) and "grad_scaler" in saved:
            entry["grad_scaler"] = _value(saved["grad_scaler"])
        out[int(experts)] = entry
    return out if chained else out[0]


def _groups(
    source: Checkpoint,
    infos: Sequence[TensorInfo],
    trained: Collection[str],
    *,
    chained: bool,
    step: float | None,
) -> list[dict[str, Any]]:
    """The hyper-parameters of Megatron's groups: without weight decay are vectors and biases, experts may be apart.

    They contain the step only if it is given.
    """
    shapes = {i.name: i.shape for i in infos if i.state in ("weight", "master")}
    stored = [{k: v for k, v in g.items() if k not in _NOT_SHARED} for g in source.metadata.groups]
    number = {n: i for i, g in enumerate(source.metadata.groups) for n in g["params"]}
    members: dict[tuple[bool, float], list[str]] = {}
    for name in trained:
        if name not in number:
            raise UnsupportedError(
                f"{source.url} has states of {name}, but not the hyper-parameters of its optimizer",
                hint="export the weights alone: --state weight",
            )
        matrix = len(shapes[name]) > 1 and not name.endswith(".bias")
        members.setdefault((chained and is_expert(name), float(matrix)), []).append(name)
    out = []
    for (experts, decays), names in sorted(
        members.items(), key=lambda item: (item[0][0], -item[0][1])
    ):
        options = [stored[i] for i in sorted({number[n] for n in names})]
        if any(o != options[0] for o in options):
            raise UnsupportedError(
                f"{names[0]} and others that Megatron optimizes in one group have different hyper-parameters",
                hint="export the weights alone: --state weight",
            )
        group = {k: _value(v) for k, v in options[0].items()}
        if isinstance(group.get("betas"), list):
            group["betas"] = tuple(group["betas"])
        defaults = {
            "wd_mult": decays,
            "lr_mult": 1.0,
            "is_decoupled_lr": False,
            "default_config": True,
        }
        group = {**defaults, **group, "is_expert_parallel": experts}
        out.append(group if step is None else {**group, "step": step})
    return out


def _step(
    source: Checkpoint, infos: Sequence[TensorInfo], trained: Collection[str]
) -> float | None:
    """The step of the optimizer, which has one number; it is a scalar of each parameter in other programs."""
    found: dict[float, str] = {}
    for group in source.metadata.groups:
        step = (group.get("state") or {}).get("step", group.get("step"))
        for name in group["params"]:
            mine = step.get(name) if isinstance(step, dict) else step
            if name in trained and isinstance(mine, int | float):
                found.setdefault(float(mine), name)
    known = {info.key for info in infos}
    scalars = [key for name in trained if (key := Key(name, "step")) in known]
    for key, value in zip(
        scalars, map_io(lambda k: float(source[k.name, k.state][...]), scalars), strict=True
    ):
        found.setdefault(value, key.name)
    if len(found) > 1:
        (a, first), (b, second), *_ = found.items()
        raise UnsupportedError(
            f"{first} was optimized for {a:g} steps and {second} for {b:g}; Megatron's optimizer has one number",
            hint="export the weights alone: --state weight",
        )
    return next(iter(found), None)
