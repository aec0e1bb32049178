"""AutoEP: the experts of a layer are stacked along dim 0 of three tensors, `….experts.w1`, `w2` and `w3`.

DeepSpeed (0.19) replaces a model's own layers of experts by such. Expert-parallel rank K of E holds
n/E of the n experts, and `param_shapes` and the optimizer have its part of each stack. `ds_autoep_layers`
in the model states lists the layers. Under ZeRO 0 to 2 there is a file of each expert, with
`….experts.w1.NUMBER`, …, as of `deepspeed.moe`, and so are the optimizers' files. Under ZeRO 3 the weights are
in the optimizer's files alone, and a stack is cut across the ranks that have the same experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEYS = ("ds_autoep_layers", "autoep_layers")
_FORMATS = {None: (None,), "per_expert_files": (None,), "zero3_partitioned": (1,)}
_MAX_EXPERTS = 1_000_000  # of a layer; names of files and tensors have six digits
#: The tensors of a layer.
TENSORS = ("w1", "w2", "w3")


@dataclass(frozen=True, slots=True)
class StackedLayer:
    """A layer of stacked experts.

    Attributes:
        prefix: that of its tensors' names.
        experts: how many all ranks have.
        degree: the number of expert-parallel ranks.
    """

    prefix: str
    experts: int
    degree: int

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its tensors."""
        return tuple(f"{self.prefix}.{tensor}" for tensor in TENSORS)


def stacked_layers(value: Mapping[str, Any], file: str) -> dict[int, StackedLayer]:
    """The layers of AutoEP that a model states file describes, by their number among layers of experts.

    Raises:
        UnsupportedError: ranks hold the experts in another order than that of their numbers, or
            AutoTP cuts the model, too.
    """
    recorded = next((value[key] for key in _KEYS if _describes(value.get(key))), None)
    if value.get(_KEYS[0]) and recorded is None:
        raise IntegrityError(f"{file} has no usable {_KEYS[0]!r}")
    if recorded and value.get("folding"):
        raise UnsupportedError(
            f"{file}: not yet read: experts of AutoEP together with AutoTP",
            hint="AutoEP alone is read, and AutoTP with experts of deepspeed.moe",
        )
    layers: dict[int, StackedLayer] = {}
    for entry in recorded or ():
        number, experts, local, degree = (
            entry.get(key)
            for key in ("moe_layer_id", "num_experts", "num_local_experts", "ep_size")
        )
        numbers = (number, experts, local, degree)
        usable = all(type(n) is int and 0 <= n <= _MAX_EXPERTS for n in numbers) and isinstance(
            entry.get("expert_key_prefix"), str
        )
        if not usable or local * degree != experts or not experts or number in layers:
            raise IntegrityError(f"{file} has no usable {_KEYS[0]!r}")
        form, version = entry.get("checkpoint_format"), entry.get("checkpoint_format_version")
        if version not in _FORMATS.get(form, ()):
            raise UnsupportedError(
                f"{file}: not yet read: experts of AutoEP in the format {form!r}, version {version!r}"
            )
        check_order(entry.get("expert_placement"), experts, degree, file)
        layers[number] = StackedLayer(entry["expert_key_prefix"], experts, degree)
    return layers


def _describes(entries: Any) -> bool:
    """Whether these are AutoEP's layers, not a value of the program's own."""
    return isinstance(entries, list) and all(
        isinstance(entry, dict) and "expert_key_prefix" in entry for entry in entries
    )


def check_order(placement: Any, experts: int, degree: int, where: str) -> None:
    """Check that ranks hold the experts in the order of their numbers.

    Args:
        placement: DeepSpeed's description; None of versions that knew no other order.
        where: the file or the module that has it.
    """
    if placement is None:
        return
    local = experts // degree
    ranks = [
        {"rank": rank, "experts": list(range(rank * local, (rank + 1) * local))}
        for rank in range(degree)
    ]
    if (
        not isinstance(placement, dict)
        or placement.get("version") != 1
        or placement.get("ranks") != ranks
    ):
        raise UnsupportedError(
            f"{where}: experts of AutoEP that ranks do not hold in the order of their numbers "
            "(`expert_placement`)",
            hint="DeepSpeed's own converter to its universal format knows them; that is read",
        )
