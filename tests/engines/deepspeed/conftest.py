from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines import Made, make_deepspeed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

ROUND = {"round_robin_gradients": True}
ALIGN = {"parameter_alignment": True}
ELASTIC = {"elastic_checkpoint": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
OFFLOAD_ALL = {**OFFLOAD, "offload_param": {"device": "cpu"}}

#: World size -> configurations: every two values of any two of `AXES` meet in one of them.
CHOSEN: dict[int, list[dict[str, Any]]] = {
    1: [
        {"name": "alone-z1", "zero": 1, "dtype": "bf16", "optimizer": "rmsprop", "tied": True},
        {"name": "alone-z3", "zero": 3, "dtype": "fp16", "groups": 1, "freeze": "mix"},
    ],
    2: [
        {"name": "z1", "zero": 1, "tied": True},
        {
            "name": "z1-bf16opt-frozen",
            "zero": 1,
            "dtype": "bf16",
            "bf16_optimizer": True,
            "freeze": "up",
        },
        {
            "name": "z1-elastic-sgd",
            "zero": 1,
            "dtype": "fp16",
            "optimizer": "sgd",
            "zero_options": ELASTIC,
        },
        {
            "name": "z2-offload",
            "zero": 2,
            "dtype": "bf16",
            "groups": 1,
            "freeze": "up",
            "zero_options": OFFLOAD,
        },
        {
            "name": "z3-subgroups",
            "zero": 3,
            "dtype": "fp16",
            "tied": True,
            "zero_options": {"sub_group_size": 100},
        },
        {
            "name": "z3-counted",
            "zero": 3,
            "dtype": "bf16",
            "optimizer": "counted",
            "zero_options": {"sub_group_size": 60},
        },
        {"name": "z3-rmsprop", "zero": 3, "optimizer": "rmsprop", "groups": 1},
        {"name": "z0-adafactor", "zero": 0, "optimizer": "adafactor", "groups": 1, "tied": True},
        {"name": "z0-fused", "zero": 0, "dtype": "bf16", "fused": True, "freeze": "blocks.0"},
        {"name": "z0-unclear", "zero": 0, "dtype": "bf16", "freeze": "blocks.0"},
    ],
    3: [
        {"name": "z1-aligned", "zero": 1, "dtype": "bf16", "zero_options": ALIGN},
        {"name": "z1-adafactor", "zero": 1, "optimizer": "adafactor", "freeze": "norm"},
        {"name": "z2-round", "zero": 2, "zero_options": ROUND, "tied": True},
        {"name": "z2-round-bf16", "zero": 2, "dtype": "bf16", "groups": 1, "zero_options": ROUND},
        {"name": "z0-counted", "zero": 0, "optimizer": "counted", "tied": True},
        {"name": "z3-client", "zero": 3, "dtype": "bf16", "freeze": "up", "client": "tensors"},
        {"name": "z3-hpz", "zero": 3, "zero_options": {"zero_hpz_partition_size": 3}},
        {"name": "z0-fp16", "zero": 0, "dtype": "fp16", "tied": True, "named_groups": True},
        {"name": "z0-named", "zero": 0, "freeze": "up", "named_groups": True},
        {
            "name": "z2-sgd",
            "zero": 2,
            "dtype": "bf16",
            "optimizer": "sgd",
            "groups": 1,
            "tied": True,
        },
    ],
    4: [
        {
            "name": "z1-client",
            "zero": 1,
            "dtype": "fp16",
            "groups": 1,
            "tied": True,
            "client": "tensors",
        },
        {
            "name": "z1-round-aligned",
            "zero": 1,
            "dtype": "bf16",
            "zero_options": {**ROUND, **ALIGN},
        },
        {
            "name": "z1-bf16opt",
            "zero": 1,
            "dtype": "bf16",
            "bf16_optimizer": True,
            "tied": True,
            "groups": 1,
        },
        {
            "name": "z2-round-counted",
            "zero": 2,
            "dtype": "bf16",
            "optimizer": "counted",
            "zero_options": ROUND,
        },
        {"name": "z2-elastic", "zero": 2, "freeze": "blocks.0", "zero_options": ELASTIC},
        {"name": "z2-rmsprop", "zero": 2, "dtype": "fp16", "optimizer": "rmsprop", "groups": 1},
        {
            "name": "z3-offload",
            "zero": 3,
            "dtype": "bf16",
            "tied": True,
            "zero_options": OFFLOAD_ALL,
        },
        {"name": "z3-sgd", "zero": 3, "optimizer": "sgd", "groups": 1, "freeze": "mix"},
        {
            "name": "z0-bf16",
            "zero": 0,
            "dtype": "bf16",
            "freeze": "up",
            "tied": True,
            "optimizer": "rmsprop",
        },
        {"name": "z0-sgd", "zero": 0, "optimizer": "sgd", "groups": 1},
        {
            "name": "z2-adafactor",
            "zero": 2,
            "dtype": "fp16",
            "optimizer": "adafactor",
            "freeze": "up",
        },
        {"name": "z3-adafactor", "zero": 3, "dtype": "bf16", "optimizer": "adafactor"},
    ],
}


#: The options that the full matrix varies, on so many ranks.
AXES: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "dtype": ("fp32", "fp16", "bf16"),
    "optimizer": ("adamw", "sgd", "adafactor"),
    "groups": (1, 2),
    "tied": (False, True),
    "freeze": ("", "up"),
}
RANKS = (2, 3, 4)


def matrix() -> list[dict[str, Any]]:
    """The full product, save that a ZeRO 0 optimizer of fp32 is given named parameters where some are frozen."""
    found = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    for spec in found:
        spec["name"] = "-".join(str(v) or "none" for v in spec.values())
        spec["named_groups"] = (
            spec["zero"] == 0 and spec["dtype"] == "fp32" and bool(spec["freeze"])
        )
    return found


def pairs_that_never_meet(chosen: Iterable[tuple[int, str]]) -> list[str]:
    """Which two values of two options no configuration among these has together."""
    axes = {"ranks": RANKS, **AXES}
    missing = {
        ((a, x), (b, y))
        for (a, one), (b, other) in combinations(axes.items(), 2)
        for x in one
        for y in other
    }
    plain = {"dtype": "fp32", "optimizer": "adamw", "groups": 2, "tied": False, "freeze": ""}
    for ranks, name in chosen:
        spec = next(s for s in CHOSEN[ranks] if s["name"] == name)
        values = {"ranks": ranks} | {axis: spec.get(axis, plain.get(axis)) for axis in AXES}
        values["freeze"] = "up" if values["freeze"] else ""  # whichever they are
        missing -= set(combinations(values.items(), 2))
    return sorted(map(str, missing))


@pytest.fixture(scope="session")
def shared(common: Path) -> Path:
    """A folder that all test processes of this session see."""
    return common / "deepspeed"


@pytest.fixture(scope="session")
def chosen(shared: Path) -> Callable[[int, str], Made]:
    """`chosen(world, name)`: a checkpoint of the configurations above; the first call for a world makes them all."""
    return lambda world, name: make_deepspeed(CHOSEN[world], world, shared / str(world))[name]
