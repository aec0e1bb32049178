"""Optimizer groups by Megatron's rule: which parameters are in which, or that the rule does not tell."""

from __future__ import annotations

from typing import Any

import pytest

from ucformat.engines.megatron.names import Member, groups_by_rule

MEMBERS = [Member("a.weight", 2), Member("a.bias", 1)]
DECAYED, UNDECAYED = {"wd_mult": 1.0, "lr": 0.1}, {"wd_mult": 0.0, "lr": 0.1}


def test_vectors_are_not_decayed() -> None:
    groups = groups_by_rule([DECAYED, UNDECAYED], MEMBERS, lambda value: value)
    assert groups is not None
    assert [list(group.names) for group in groups] == [["a.weight"], ["a.bias"]]


@pytest.mark.parametrize("odd", [{"lr_mult": 0.5}, {"is_decoupled_lr": True}])
def test_groups_of_another_rule_are_not_told(odd: dict[str, Any]) -> None:
    assert groups_by_rule([DECAYED, {**UNDECAYED, **odd}], MEMBERS, lambda value: value) is None
    assert groups_by_rule([], MEMBERS, lambda value: value) is None
