"""How much tensors are, as commands, pages and notebooks tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.geometry.tensor import TensorInfo


def by_state(infos: Iterable[TensorInfo]) -> list[dict[str, Any]]:
    """The amounts of the tensors of each state, in the order of the first of each."""
    states: dict[str, dict[str, Any]] = {}
    for info in infos:
        empty = {"state": info.state, "tensors": 0, "elements": 0, "bytes": 0, "dtypes": []}
        add_tensor(states.setdefault(info.state, empty), info)
    return list(states.values())


def add_tensor(amounts: dict[str, Any], info: TensorInfo) -> None:
    """Count a tensor, its elements and bytes, and list its dtype."""
    amounts["tensors"] += 1
    amounts["elements"] += info.size
    amounts["bytes"] += info.nbytes
    if info.dtype not in amounts["dtypes"]:
        amounts["dtypes"].append(info.dtype)


def parameters(infos: Iterable[TensorInfo]) -> int:
    """The number of parameters, each counted in one state: its weight, or else its master weight."""
    sizes: dict[str, int] = {}
    for info in infos:
        if info.state == "weight":
            sizes[info.name] = info.size
        elif info.state == "master":
            sizes.setdefault(info.name, info.size)
    return sum(sizes.values())
