"""What the parts of an AutoModel checkpoint are called, and what a caller can say of them."""

from __future__ import annotations

from dataclasses import dataclass

from ucformat.sources.base import option
from ucformat.sources.distcp import ItemOptions

MODEL, OPTIM = "model", "optim"
SCHEDULER, LOSSES, INCOMPLETE = "step_scheduler.pt", "losses.json", ".incomplete"


@dataclass(frozen=True, kw_only=True)
class AutomodelOptions(ItemOptions):
    """The options of `Automodel`."""

    optimizer: bool = option(
        default=True, how="flag", text="whether to read the optimizer's states"
    )
