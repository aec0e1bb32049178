"""A state of several models: what an optimizer holds has the names of its own model's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
import ucformat.torch as ucf

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.checkpoint import Checkpoint


def trained(names: tuple[str, str], seed: int) -> dict[str, Any]:
    """Two models of equal parameter names, trained a step at different rates."""
    torch.manual_seed(seed)
    state: dict[str, Any] = {}
    for i, name in enumerate(names):
        model = torch.nn.Linear(3, 2 + i)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (i + seed))
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        state |= {name: model, f"{name}_optimizer": optimizer}
    return state


def everything(state: dict[str, Any]) -> list[Any]:
    models = [m for m in state.values() if isinstance(m, torch.nn.Module)]
    optimizers = [o for o in state.values() if isinstance(o, torch.optim.Optimizer)]
    held: list[Any] = [p.tolist() for m in models for p in m.parameters()]
    held += [v.tolist() for o in optimizers for s in o.state.values() for v in s.values()]
    return held + [g["lr"] for o in optimizers for g in o.param_groups]


def keys(ck: Checkpoint) -> set[str]:
    return {f"{k.state}/{k.name}" for k in ck.tensors}


@pytest.mark.parametrize(
    ("names", "prefixes"),
    [(("actor", "critic"), ("actor.", "critic.")), (("model", "critic"), ("", "critic."))],
)
def test_each_goes_by_its_own_names(
    tmp_path: Path, names: tuple[str, str], prefixes: tuple[str, str]
) -> None:
    first, second = trained(names, 1), trained(names, 2)
    assert everything(first) != everything(second)
    ucf.save(first, tmp_path / "both")
    ck = ucformat.open(tmp_path / "both")
    states = ("weight", "step", "exp_avg", "exp_avg_sq")
    assert keys(ck) == {f"{s}/{p}{n}" for s in states for p in prefixes for n in ("weight", "bias")}
    assert [list(g.params) for g in ck.manifest.groups] == [
        [f"{p}weight", f"{p}bias"] for p in prefixes
    ]
    report = ucf.load(second, tmp_path / "both", strict=True)
    assert everything(second) == everything(first)
    assert report.tensors == 16


def test_one_of_them_alone(tmp_path: Path) -> None:
    both = trained(("actor", "critic"), 1)
    ucf.save(both, tmp_path / "both")
    other = trained(("model", "unused"), 2)
    alone = {"model": other["model"], "optimizer": other["model_optimizer"]}
    ucf.load(alone, tmp_path / "both", rename={r"actor\.(.*)": r"\1"})
    assert everything(alone) == everything({k: v for k, v in both.items() if k.startswith("actor")})
    assert all(
        torch.equal(a, b)
        for a, b in zip(alone["model"].parameters(), both["actor"].parameters(), strict=True)
    )


def test_a_model_without_an_optimizer_changes_no_names(tmp_path: Path) -> None:
    state = trained(("model", "reference"), 1)
    del state["reference_optimizer"]
    ucf.save(state, tmp_path / "both")
    names = {k.name for k in ucformat.open(tmp_path / "both").tensors}
    assert names == {"weight", "bias", "reference.weight", "reference.bias"}
