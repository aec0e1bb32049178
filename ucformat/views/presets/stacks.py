"""Megatron's parameters by layer and expert, and stacked under one name for all, as its distributed checkpoints are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ucformat.views.presets.numbers import Numbers

__all__ = ["stack", "unstack"]

Steps = list[dict[str, Any]]


def stack(_: Numbers) -> Steps:
    """One tensor for all experts, and all layers."""
    return [
        {"stack": r"/(.*\.experts)\.local_experts\.(?P<i>\d+)\.(.*)/", "into": r"\1.experts.\3"},
        {"stack": r"/((?:.*\.)?layers)\.(?P<i>\d+)\.(.*)/", "into": r"\1.\3"},
    ]


def unstack(_: Numbers) -> Steps:
    """The reverse."""
    return [
        {"unstack": r"/((?:.*\.)?layers)\.(?!\d+\.)(.*)/", "into": r"\1.{i}.\2"},
        {"unstack": r"/(.*\.experts)\.experts\.(?!\d+\.)(.*)/", "into": r"\1.local_experts.{i}.\2"},
    ]
