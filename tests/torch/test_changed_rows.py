"""Rows that a trainer marks as changed: patches without reading the base, and marks that are wrong are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import ucformat
import ucformat.torch
from ucformat.errors import UsageError
from ucformat.format.chunking import Tiling
from ucformat.torch import ChangedRows, Increments, Manager, save
from ucformat.torch.state.local import local_state

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
    with pytest.raises(UsageError, match=r"emb \(weight\): rows in 20000:22500 changed since"):
        save({"model": {"emb": table}}, tmp_path / "3", **arguments)
    assert not (tmp_path / "3" / "manifest.json").exists()


def test_without_patches_only_tiles_without_marks_are_left_out(tmp_path: Path) -> None:
    table = torch.randn(ROWS, WIDTH)
    save({"model": {"emb": table}}, tmp_path / "1")  # as an array, which has no tiles
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[7] = True
    table[7] += 1
    changed = {"emb": mask}
    done = save(
        {"model": {"emb": table}}, tmp_path / "2", form="packed", base=True, changed=changed
    )
    (edge, _) = Tiling.of(tuple(table.shape), table.itemsize).tile
    assert done.nbytes == edge * WIDTH * table.itemsize < table.nbytes
    assert torch.equal(ucformat.open(tmp_path / "2")["emb"].torch(), table)


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
        ({"emb": torch.ones(4, dtype=torch.bool, device="meta")}, "has no data"),
        ("emb", "neither masks by name nor ChangedRows, but a str"),
    ):
        with pytest.raises(UsageError) as error:
            save(state, tmp_path / "1", base=True, changed=changed)  # type: ignore[arg-type]
        assert said in f"{error.value.message} {error.value.hint}"
    with pytest.raises(UsageError, match=r"no nn\.Embedding"):
        ChangedRows(nn.Linear(2, 2))


def test_a_hook_that_was_closed_marks_nothing() -> None:
    model = Recommender()
    rows = ChangedRows(model)
    rows.close()
    model(torch.tensor([[1, 2]]))
    assert not any(map(any, rows.end().rows))


class Language(nn.Module):
    """An embedding whose weight is that of the output, too, and of another embedding."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(1000, 8)
        self.other = nn.Embedding(1000, 8)
        self.other.weight = self.emb.weight

    def forward(self, ids: torch.Tensor, tied: bool) -> torch.Tensor:
        hidden = self.other(ids).sum(1)
        return hidden @ self.emb.weight.T if tied else hidden


def steps_and_saves(
    model: nn.Module, optimizer: Any, state: Any, folder: Path, *inputs: Any
) -> list[int]:
    """Train between saves on each other with the rows that a hook marks; the bytes of these."""
    rows = ChangedRows(model)
    amounts = []
    for step in range(3):
        saved = save(state, folder / str(step), form="packed", base=True, patch=True, changed=rows)
        amounts.append(saved.nbytes)
        expected = {k: v.clone() for k, v in model.state_dict().items()}
        for name, tensor in ucformat.torch.state_dict(folder / str(step)).items():
            if (own := name.removeprefix("critic.")) in expected and ("critic" in state) == (
                own != name
            ):
                assert torch.equal(tensor, expected[own]), (step, name)
        assert ucformat.verify(folder / str(step)).problems == ()
        optimizer.zero_grad()
        model(torch.tensor([[3 * step + 1, 500 + step]]), *inputs).square().sum().backward()
        optimizer.step()
    rows.close()
    return amounts


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {}),
    ],
)
def test_what_an_optimizer_changes_is_marked(
    optimizer: Any, options: dict[str, float], tmp_path: Path
) -> None:
    for tied in (False, True):
        model = Language()
        optimizers = optimizer(model.parameters(), lr=0.1, **options)
        state = {"model": model, "optimizer": optimizers}
        whole, *increments = steps_and_saves(model, optimizers, state, tmp_path / str(tied), tied)
        if not tied and not options and optimizer is not torch.optim.AdamW:
            assert max(increments) < whole / 20


def test_marks_are_those_of_the_model_whatever_it_is_called(tmp_path: Path) -> None:
    model, other = Language(), Language(1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)

    class Both(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return model(ids, tied=False) + 2 * other(2 * ids % 1000, tied=False)

    both = Both()
    rows = ChangedRows(other)
    for key in ("critic", "again"):
        state = {"model": model, key: other if key == "critic" else other.state_dict()}
        for step in range(3):
            place = tmp_path / key / str(step)
            save(state, place, form="packed", base=True, patch=True, changed=rows)
            found = ucformat.torch.state_dict(place)
            assert torch.equal(found["emb.weight"], model.emb.weight)
            assert torch.equal(found[f"{key}.emb.weight"], other.emb.weight)
            optimizer.zero_grad()
            both(torch.tensor([[step, 7 * step + 1]])).square().sum().backward()
            optimizer.step()
    with pytest.raises(UsageError, match=r"an embedding of 1,000 rows that is not in the state"):
        save({"model": model}, tmp_path / "without", base=True, patch=True, changed=rows)


def test_a_rank_that_does_not_know_the_base_marks_all_rows() -> None:
    model = Language()
    rows = ChangedRows(model)
    state = {"model": model}
    rows.find_names(state, local_state(state), {})
    assert rows.since("unknown") == {"emb.weight": b"\xff" * 125}


def test_a_gradient_in_the_memory_of_others_is_read_where_it_is() -> None:
    model = nn.Embedding(100, 4, _weight=torch.zeros(100, 4))
    rows = ChangedRows(model)
    flat = torch.zeros(1000)
    model.weight.grad = flat[200:600].view(100, 4)
    flat[:200] = 1
    flat[200 + 4 * 17 + 3] = -0.0
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    (marks,) = rows.end().rows
    assert np.unpackbits(np.frombuffer(marks, np.uint8)).nonzero()[0].tolist() == [17]
