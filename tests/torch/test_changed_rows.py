"""Rows that a trainer marks as changed: patches without reading the base, and marks that are wrong are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ucformat
import ucformat.torch
from ucformat.errors import UsageError
from ucformat.torch import ChangedRows, Increments, Manager, save

if TYPE_CHECKING:
    from pathlib import Path

ROWS, WIDTH = 40_000, 16


class Recommender(nn.Module):
    """Two tables, and a layer above them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(1000, WIDTH, sparse=True)
        self.top = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.emb(ids).sum(1) + self.bag(ids % 1000))


def train(model: Recommender, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    torch.manual_seed(seed)
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.randint(ROWS, (20, 5))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def optimizers_of(model: Recommender) -> list[torch.optim.Optimizer]:
    tables = [*model.emb.parameters(), *model.bag.parameters()]
    return [torch.optim.SparseAdam(tables), torch.optim.AdamW(model.top.parameters())]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async"])
@pytest.mark.parametrize("policy", ["one-shot", "consecutive"])
@pytest.mark.front("one-shot-async", "consecutive-save")
def test_a_hook_marks_the_rows_that_changed(
    policy: Any, asynchronous: bool, tmp_path: Path
) -> None:
    model = Recommender()
    optimizers = optimizers_of(model)
    rows = ChangedRows(model)
    state = {"model": model, "tables": optimizers[0], "top": optimizers[1]}
    with Manager(
        tmp_path,
        increments=Increments(policy, patch=True),
        asynchronous=asynchronous,
        verify_changed=True,
        form="packed",
    ) as manager:
        for step in range(1, 5):
            train(model, optimizers, step)
            manager.save(step, state, changed=rows)
            manager.wait()
            assert manager.last is not None
            if step == 1:
                whole = manager.last.nbytes
            else:
                assert manager.last.nbytes < whole / 20
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    for place in tmp_path.glob("step-*"):
        assert ucformat.verify(place).problems == ()
    again = Recommender()
    others = optimizers_of(again)
    for table in others[0].param_groups[0]["params"]:
        table.data.zero_()
    with Manager(tmp_path) as manager:
        manager.restore_latest({"model": again, "tables": others[0], "top": others[1]})
    assert all(torch.equal(expected[k], v) for k, v in again.state_dict().items())
    ours = optimizers[0].state_dict()["state"][0]["exp_avg"]
    assert torch.equal(others[0].state_dict()["state"][0]["exp_avg"], ours)


def test_masks_are_taken_without_reading_the_base(tmp_path: Path) -> None:
    table = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    save({"model": {"emb": table}}, tmp_path / "1", form="packed", base=True)
    for file in (tmp_path / "1").glob("data/*/rank*.bin"):  # but for its index
        data = bytearray(file.read_bytes())
        data[: 1 << 20] = bytes(1 << 20)
        file.write_bytes(data)
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[::999] = True
    table[mask] += 1
    arguments: Any = {"base": tmp_path / "1", "patch": True, "changed": {"emb": mask}}
    done = save({"model": {"emb": table}}, tmp_path / "2", **arguments)
    assert done.nbytes < table.nbytes / 100
    table[ROWS - 1] += 1  # in a tile of which no row is marked
    mask[20_000:] = False
    with pytest.raises(UsageError, match=r"emb \(weight\): rows in 20000:25000 changed since"):
        save({"model": {"emb": table}}, tmp_path / "3", **arguments)
    assert not (tmp_path / "3" / "manifest.json").exists()


def test_marks_are_verified_on_request(tmp_path: Path) -> None:
    table = torch.randn(100, 4)
    save({"model": {"emb": table}}, tmp_path / "1", form="packed")
    mask = torch.zeros(100, dtype=torch.bool)
    mask[7] = True
    table[7:9] += 1
    with pytest.raises(UsageError, match=r"emb \(weight\): rows in 8:9 changed"):
        save(
            {"model": {"emb": table}},
            tmp_path / "2",
            base=True,
            patch=True,
            changed={"emb": mask},
            verify_changed=True,
        )


def test_masks_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    state = {"model": {"emb": torch.zeros(4, 2)}}
    for changed, said in (
        ({"other": torch.ones(4, dtype=torch.bool)}, "no such tensor"),
        ({"emb": torch.ones(3, dtype=torch.bool)}, "a bool for each of the 4 rows"),
        ({"emb": torch.ones(4)}, "a bool for each of the 4 rows"),
    ):
        with pytest.raises(UsageError) as error:
            save(state, tmp_path / "1", base=True, changed=changed)
        assert said in f"{error.value.message} {error.value.hint}"
    with pytest.raises(UsageError, match=r"no nn\.Embedding"):
        ChangedRows(nn.Linear(2, 2))


def test_a_hook_that_was_closed_marks_nothing() -> None:
    model = Recommender()
    rows = ChangedRows(model)
    rows.close()
    model(torch.tensor([[1, 2]]))
    assert not any(map(any, rows.end().rows.values()))
