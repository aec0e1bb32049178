"""What an export to DeepSpeed needs to know about the engine that loads it: stage, ranks, precision, flat buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucformat.config_files import read_config_file
from ucformat.errors import UnsupportedError, UsageError
from ucformat.exporters.base import ExportOptions, option
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.layout import Layout
    from ucformat.geometry.tensor import TensorInfo

#: The precisions of an engine.
DTYPES = ("float32", "bfloat16", "float16")
#: The stage of ZeRO that partitions parameters.
ZERO3 = 3
_SUB_GROUP = 10**9  # elements: DeepSpeed's default of `sub_group_size`


@dataclass(frozen=True, kw_only=True)
class UniversalOptions(ExportOptions):
    """The options of `DeepSpeedUniversalExporter`."""

    config: Mapping[str, Any] | str | None = option(
        None,
        "path",
        "the DeepSpeed configuration (JSON) of the engine that is to load the checkpoint: stage, precision, loss "
        "scale; by default what the source recorded",
    )
    stage: int | None = option(None, "number", "the ZeRO stage; by default that of `config`, or of the source")
    dtype: str | None = option(
        None, "text", "the precision of the engine: `float32`, `bfloat16` or `float16`; by default that of the weights"
    )
    tag: str | None = option(
        None, "text", "the name of the folder below the destination; `global_step<step>` by default"
    )
    step: int | None = option(None, "number", "the number of training steps, if the source does not record it")
    buffers: Sequence[str] | None = option(
        None,
        "names",
        "the names of the module's buffers, which the optimizer does not tell from frozen parameters; `none` if there "
        "are none",
    )

    def __post_init__(self) -> None:
        if isinstance(self.config, str | Path):
            object.__setattr__(self, "config", read_config_file(Path(self.config), "DeepSpeed configuration"))
        if isinstance(self.buffers, str):
            object.__setattr__(self, "buffers", self.buffers.split(","))
        if self.buffers is not None:
            object.__setattr__(self, "buffers", tuple(name for name in self.buffers if name != "none"))
        if self.stage not in (None, 0, 1, 2, 3):
            raise UsageError(f"ZeRO has the stages 0 to 3, not {self.stage}")
        if self.dtype not in (None, *DTYPES):
            raise UsageError(f"an engine trains in {', '.join(DTYPES)}, not in {self.dtype!r}")
        if self.step is not None and self.step < 0:
            raise UsageError(f"step must not be negative, but is {self.step}")
        if self.tag is not None and (not self.tag.strip() or "\n" in self.tag):
            raise UsageError("a tag is a line of text")
        if self.tag is not None:
            check_key(self.tag)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions(UniversalOptions):
    """The options of `DeepSpeedExporter`."""

    world: int | None = option(
        None, "number", "the number of ranks: data-parallel times tensor-parallel; by default that of the source"
    )
    tp: int | None = option(None, "number", "the number of tensor-parallel ranks, for which `layout` is needed")
    layout: Layout | Mapping[str, Any] | str | None = option(  # noqa: RUF009 - it makes a field
        None,
        "layout",
        "how parameters are sharded over tensor-parallel ranks: rules over the axis `tp`, or the preset `llama`",
    )
    ep: int | None = option(
        None,
        "number",
        "the number of expert-parallel ranks (`ep_size` of the layers) of a model with experts of deepspeed.moe; by "
        "default that of the source",
    )
    weights_only: bool = option(False, "flag", "write no optimizer; load it with `load_module_only=True`")
    fused: bool = option(
        False,
        "flag",
        "at stage 0 in 16 bits: the optimizer is DeepSpeed's FusedAdam, which has one flat tensor for each group",
    )

    def __post_init__(self) -> None:
        UniversalOptions.__post_init__(self)
        for name, value in (("world", self.world), ("tp", self.tp), ("ep", self.ep)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that is to load a checkpoint.

    Attributes:
        settings: its configuration; what it leaves out has DeepSpeed's default.
    """

    stage: int
    dp: int
    tp: int
    dtype: str
    tag: str
    step: int
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, options: UniversalOptions, source: Checkpoint, weights: Sequence[TensorInfo]) -> Engine:
        """The engine that the options describe, or else the one that saved the source."""
        layout = source.metadata.layout
        settings = settings_of(options, source)
        zero = zero_of(settings)
        recorded = layout.get("zero") if options.config is None else zero.get("stage", 0)
        stage = recorded if options.stage is None else options.stage
        if not isinstance(stage, int):
            raise UsageError(
                "the source does not tell the ZeRO stage of the engine",
                hint="pass stage (--stage) or config (--config)",
            )
        dp, tp = _ranks(options, layout) if isinstance(options, DeepSpeedOptions) else (1, 1)
        step = options.step if options.step is not None else source.metadata.step
        if step is None:
            raise UsageError("the source does not record the number of training steps", hint="pass step (--step)")
        dtype = options.dtype or _dtype(options, settings, layout, weights)
        if isinstance(options, DeepSpeedOptions):
            _refuse(stage, dtype, settings)
        return cls(stage, dp, tp, dtype, options.tag or f"global_step{step}", step, settings)

    @property
    def prefix(self) -> str:
        """How the names of optimizer files begin."""
        return "bf16_zero_pp_rank_" if self.dtype == "bfloat16" else "zero_pp_rank_"

    @property
    def sub_group_size(self) -> int:
        """Elements of each rank after which ZeRO 3 begins another flat group."""
        size = zero_of(self.settings).get("sub_group_size")
        return int(size) if isinstance(size, int | float) else _SUB_GROUP

    def flag(self, name: str) -> bool:
        """Whether an option of `zero_optimization` is set."""
        return zero_of(self.settings).get(name) is True


def settings_of(options: UniversalOptions, source: Checkpoint) -> Mapping[str, Any]:
    """The engine's configuration: the given one, or the one that the source recorded; empty if there is none."""
    found = source.objects.get("ds_config") if options.config is None else options.config
    return found if isinstance(found, Mapping) else {}


def zero_of(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section `zero_optimization` of a configuration."""
    zero = settings.get("zero_optimization")
    return zero if isinstance(zero, Mapping) else {}


def _enabled(settings: Mapping[str, Any], section: str) -> bool:
    found = settings.get(section)
    return isinstance(found, Mapping) and found.get("enabled") is True


def _ranks(options: DeepSpeedOptions, layout: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of data-parallel and tensor-parallel ranks."""
    before = int(layout.get("tp", 1)) if "zero" in layout else None
    tp = options.tp or before or 1
    world = options.world
    if world is None and "zero" in layout and tp == before and isinstance(layout.get("dp"), int):
        world = layout["dp"] * tp
    if world is None:
        raise UsageError(
            "the source does not tell the number of ranks of the engine", hint="pass world (--world), as for torchrun"
        )
    if world % tp:
        raise UsageError(f"{world} ranks are not divided by {tp} tensor-parallel ones")
    return world // tp, tp


def _dtype(
    options: UniversalOptions, settings: Mapping[str, Any], layout: Mapping[str, Any], weights: Sequence[TensorInfo]
) -> str:
    """The precision: that of the given configuration, else of the weights."""
    configured = next(
        (dtype for s, dtype in (("bf16", "bfloat16"), ("fp16", "float16")) if _enabled(settings, s)), None
    )
    if options.config is not None:
        return configured or "float32"
    found = {info.dtype for info in weights} or {layout.get("weight_dtype", configured)}
    dtype = found.pop()
    if found or dtype not in DTYPES:
        kinds = " and ".join(sorted({str(d) for d in (dtype, *found) if d is not None}))
        what = f"the weights are {kinds}" if kinds else "no weights are stored"
        hint = "pass dtype (--dtype)"
        raise UsageError(f"{what}, which does not tell the precision of the engine", hint=hint)
    return str(dtype)


def _refuse(stage: int, dtype: str, settings: Mapping[str, Any]) -> None:
    """UnsupportedError for configurations whose files are others."""
    zero, types = zero_of(settings), settings.get("data_types")
    accumulated = types.get("grad_accum_dtype") if isinstance(types, Mapping) else None
    offload = zero.get("offload_optimizer")
    nvme = isinstance(offload, Mapping) and offload.get("device") == "nvme"
    found = {
        "fp32 gradients under ZeRO 1 (BF16_Optimizer)": stage == 1 and dtype == "bfloat16" and accumulated == "fp32",
        "elastic_checkpoint": stage in (1, 2) and zero.get("elastic_checkpoint") is True,
        "mics_shard_size": stage == 3 and zero.get("mics_shard_size", -1) not in (-1, 0, None),
        "an optimizer offloaded to NVMe": nvme,
    }
    for feature, is_set in found.items():
        if is_set:
            raise UnsupportedError(
                f"the files of a DeepSpeed engine with {feature} are not written",
                hint="change the configuration (config), or export to `deepspeed-universal`",
            )
