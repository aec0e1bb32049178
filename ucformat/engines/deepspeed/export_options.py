"""The options of exports to DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucformat.config_files import read_config_file
from ucformat.errors import UsageError
from ucformat.exporters.base import ExportOptions, option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.geometry.layout import Layout


#: The precisions of an engine.
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class UniversalExportOptions(ExportOptions):
    """The options of `DeepSpeedUniversalExporter`."""

    config: Mapping[str, Any] | str | None = option(
        None,
        "path",
        "the DeepSpeed configuration (JSON) of the engine that is to load the checkpoint: stage, "
        "precision, loss "
        "scale; by default what the source recorded",
    )
    stage: int | None = option(
        None, "number", "the ZeRO stage; by default that of `config`, or of the source"
    )
    dtype: str | None = option(
        None,
        "text",
        "the precision of the engine: `float32`, `bfloat16` or `float16`; by default that of the "
        "weights",
    )
    tag: str | None = option(
        None, "text", "the name of the folder below the destination; `global_step<step>` by default"
    )
    step: int | None = option(
        None, "number", "the number of training steps, if the source does not record it"
    )
    buffers: Sequence[str] | None = option(
        None,
        "names",
        "the names of the module's buffers, which the optimizer does not tell from frozen "
        "parameters; `none` if there "
        "are none",
    )

    def __post_init__(self) -> None:
        if isinstance(self.config, str | Path):
            settings = read_config_file(Path(self.config), "DeepSpeed configuration")
            object.__setattr__(self, "config", settings)
        if self.buffers is not None:
            names = self.buffers.split(",") if isinstance(self.buffers, str) else self.buffers
            object.__setattr__(self, "buffers", tuple(name for name in names if name != "none"))
        if self.stage not in (None, 0, 1, 2, 3):
            raise UsageError(f"ZeRO has the stages 0 to 3, not {self.stage}")
        if self.dtype not in (None, *DTYPES):
            raise UsageError(f"an engine trains in {', '.join(DTYPES)}, not in {self.dtype!r}")
        if self.step is not None and self.step < 0:
            raise UsageError(f"step must not be negative, but is {self.step}")
        if self.tag is not None:
            from ucformat.storage.base import check_key  # which `ucp export --help` does not need

            if not self.tag.strip() or "\n" in self.tag:
                raise UsageError("a tag is a line of text")
            check_key(self.tag)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedExportOptions(UniversalExportOptions):
    """The options of `DeepSpeedExporter`."""

    world: int | None = option(
        None,
        "number",
        "the number of ranks: data-parallel times tensor-parallel; by default that of the source",
    )
    tp: int | None = option(
        None, "number", "the number of tensor-parallel ranks, for which `layout` is needed"
    )
    layout: Layout | Mapping[str, Any] | str | None = option(  # noqa: RUF009 - it makes a field
        None,
        "layout",
        "how parameters are sharded over tensor-parallel ranks: rules over the axis `tp`, or the "
        "preset `llama`",
    )
    ep: int | None = option(
        None,
        "number",
        "the number of expert-parallel ranks (`ep_size` of the layers) of a model with experts "
        "of deepspeed.moe; by "
        "default that of the source",
    )
    weights_only: bool = option(
        False, "flag", "write no optimizer; load it with `load_module_only=True`"
    )
    fused: bool = option(
        False,
        "flag",
        "at stage 0 in 16 bits: the optimizer is DeepSpeed's FusedAdam, which has one flat "
        "tensor for each group",
    )

    def __post_init__(self) -> None:
        UniversalExportOptions.__post_init__(self)
        for name, value in (("world", self.world), ("tp", self.tp), ("ep", self.ep)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
