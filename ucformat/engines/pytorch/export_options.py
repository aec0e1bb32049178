"""The options of exports to the formats of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ucformat.errors import UsageError
from ucformat.exporters.base import DistcpOptions, ExportOptions, option

#: The hyper-parameters that PyTorch's optimizers have besides those that all programs store.
#: Loading requires each.
_ADAM: dict[str, Any] = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
}  # fmt: skip
HYPER = {name: {**_ADAM, "decoupled_weight_decay": name == "AdamW"} for name in ("Adam", "AdamW")}


@dataclass(frozen=True, kw_only=True)
class DcpOptions(DistcpOptions):
    """The options of `DcpExporter`."""

    model_key: str | None = option(
        None,
        "text",
        "the key of the model in the program's state, empty for none; `model` unless the source "
        "records it",
    )
    optimizer_key: str | None = option(
        None,
        "text",
        "the key of the optimizer in the program's state; `optim` unless the source records it",
    )
    flat_optimizer: bool = option(
        default=False, how="flag", text="write the optimizer as `flatten_optimizer_state_dict` does"
    )
    optimizer: str = option(
        "AdamW",
        "text",
        "the class of torch.optim whose hyper-parameters are added where the source has others: "
        "AdamW, Adam",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer not in HYPER:
            raise UsageError(
                f"no optimizer {self.optimizer!r} is known", hint=f"there are: {', '.join(HYPER)}"
            )


#: The endings of files of `torch.save`.
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, kw_only=True)
class TorchOptions(ExportOptions):
    """The options of `TorchExporter`."""

    name: str = option("model.pt", "text", "the name of the file; `model.pt` by default")
    nested: bool = option(
        default=False,
        how="flag",
        text="write the whole nested state of the program that saved, not the weights by name",
    )

    def __post_init__(self) -> None:
        if not self.name.lower().endswith(TORCH_ENDINGS) or "/" in self.name:
            raise UsageError(
                f"{self.name!r} is not the name of a file of torch.save",
                hint=f"its ending must be one of {', '.join(TORCH_ENDINGS)}",
            )
