"""Moments that are saved with loss: within the bound that is recorded, and never without being told."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import ucformat
import ucformat.torch
from tests.torch.ranks import Ranks
from ucformat.errors import IntegrityError, UnsupportedError, UsageError
from ucformat.format import arrays
from ucformat.geometry.tensor import Key
from ucformat.jobs import patch_files
from ucformat.jobs.compare import compare
from ucformat.schema.manifest import LOSSY
from ucformat.torch import Manager, load, save

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = Ranks("tests.torch.lossy_program")
INT8 = {"exp_avg*": "int8-blockwise"}


class Training:
    """A small model that learns a function of random numbers."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, first: int, steps: int) -> float:
        """Train, and return the mean loss of the last ten steps."""
        losses: list[float] = []
        for step in range(first, first + steps):
            torch.manual_seed(step)
            x = torch.randn(16, 32)
            y = x[:, :4] - x[:, 4:8]
            loss = (self.model(x) - y).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return sum(losses[-10:]) / 10

    def moment(self, name: str) -> torch.Tensor:
        moment: torch.Tensor = self.optimizer.state[self.model[0].weight][name]
        return moment


@pytest.fixture(scope="module")
def trained() -> Training:
    training = Training()
    training.train(0, 20)
    return training


@pytest.mark.parametrize("form", ["packed", "zarr"])
def test_moments_are_within_the_bound(form: Any, trained: Training, tmp_path: Path) -> None:
    place = tmp_path / "1"
    encode = {"exp_avg": "int8-blockwise", "exp_avg_sq": "adaptive:3"}
    save(trained.state, place, form=form, encode=encode, certify=True)
    ck = ucformat.open(place)
    assert LOSSY in ck.manifest.requires
    assert {(key.state, loss.encoding) for key, loss in ck.lossy.items()} == {
        ("exp_avg", "int8-blockwise"),
        ("exp_avg_sq", "adaptive-3bit"),
    }
    with ucformat.open(place, lossy=True) as allowed:
        for name in ("exp_avg", "exp_avg_sq"):
            stored = pickle.loads(pickle.dumps(allowed))["0.weight", name].read()  # noqa: S301
            exact = trained.moment(name).numpy()
            wrong, bound = np.abs(stored - exact).max(), ck.lossy[Key("0.weight", name)]
            assert 0.99 * bound.absolute <= wrong <= bound.absolute
            nonzero = exact != 0
            relative = np.abs(stored - exact)[nonzero] / np.abs(exact[nonzero])
            assert 0.99 * bound.relative <= relative.max() <= bound.relative
    assert (ck["0.weight"][...] == trained.model[0].weight.detach().numpy()).all()
    assert ucformat.verify(place)
    assert ucformat.torch.certify(trained.state, place).different  # the moments


def test_every_way_to_read_is_told(trained: Training, tmp_path: Path) -> None:
    place, other = tmp_path / "step-00000001", Training(1)
    save(trained.state, place, encode=INT8, step=1)
    ck, key = ucformat.open(place), ("0.weight", "exp_avg")
    told = "exp_avg.*int8-blockwise, off by up to"
    layout = ucformat.Layout.parse(
        {"version": 1, "mesh": {"tp": 1}, "rules": [{"match": "*", "place": ["replicate"]}]}
    )
    for read in (
        lambda: load(other.state, place),
        lambda: Manager(tmp_path).restore_latest(other.state),
        lambda: ck[key][...],
        ck[key].plan,
        lambda: ck.plan(layout, 0),
        ck.view([{"drop": "2.weight"}])[key].read,
        lambda: ucformat.export(ck, tmp_path / "export", "dcp"),
    ):
        with pytest.raises(UnsupportedError, match=told):
            read()
    before = other.model[0].weight.detach().clone()
    assert not torch.equal(before, trained.model[0].weight)
    # exact ones need no permission
    ck.plan(layout, 0, "weight")
    ucformat.export(ck, tmp_path / "weights", "npy")
    load({"model": other.model}, place)
    Manager(tmp_path).restore_latest(other.state, lossy=True)
    assert torch.equal(other.model[0].weight, trained.model[0].weight)
    ucformat.export(ucformat.open(place, lossy=True), tmp_path / "export", "dcp")


def test_marks_stay_with_the_values(trained: Training, tmp_path: Path) -> None:
    save(trained.state, tmp_path / "1", form="packed", encode=INT8)
    ck = ucformat.open(tmp_path / "1")
    copies = {
        "copied": ucformat.open(ucformat.copy(tmp_path / "1", tmp_path / "copied").url),
        "converted": ucformat.convert(ck, tmp_path / "converted"),
        "arrays": ucformat.materialize(ck, tmp_path / "arrays", codec="blosc"),
        "based": ucformat.convert(ck, tmp_path / "based", base=tmp_path / "1"),
    }
    viewed = ucformat.convert(ck.view([{"rename": "0.weight", "to": "a"}]), tmp_path / "viewed")
    for name, copied in copies.items():
        assert dict(copied.lossy) == dict(ck.lossy), name
        assert ucformat.verify(copied.url)
        assert not [d for d in compare(ck, copied) if not d.equal], name
        assert LOSSY in copied.manifest.requires
    assert viewed.lossy[Key("a", "exp_avg")] == ck.lossy[Key("0.weight", "exp_avg")]
    with pytest.raises(UnsupportedError, match="exp_avg"):
        ucformat.average([ck, tmp_path / "copied"], tmp_path / "average", states=["exp_avg"])


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.front("False")
def test_a_conversion_encodes_like_a_save(
    many: bool,
    trained: Training,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if many:  # small tensors are packed, and files have several tiles
        monkeypatch.setattr(arrays, "MOST_SMALL_ARRAYS", 3)
        monkeypatch.setattr(patch_files, "FILE_BYTES", 1 << 12)
    save(trained.state, tmp_path / "exact")
    exact = ucformat.open(tmp_path / "exact")
    encode = {"exp_avg": "int8-blockwise", "exp_avg_sq": "adaptive:100"}
    ck = ucformat.convert(exact, tmp_path / "lossy", encode=encode)
    save(trained.state, tmp_path / "saved", form="packed", encode=encode)
    assert dict(ck.lossy) == dict(ucformat.open(tmp_path / "saved").lossy)
    assert {key.state for key in ck.lossy} == {*encode}
    assert ucformat.verify(ck.url)
    assert ck.manifest.verified is not None
    for key in exact.tensors:
        if key not in ck.lossy:
            assert (ck[key].read() == exact[key].read()).all()
            assert ck[key].fingerprint == exact[key].fingerprint
    allowed = ck.with_lossy()
    for key, loss in ck.lossy.items():
        wrong = np.abs(allowed[key].read() - exact[key].read()).max()
        assert 0.99 * loss.absolute <= wrong <= loss.absolute
    resumed = Training(1)
    load(resumed.state, ck, lossy=True, certify=True)
    with pytest.raises(UsageError, match="encoded with loss already"):
        ucformat.convert(ck, tmp_path / "twice", encode=encode)
    with pytest.raises(UsageError, match="no state fits"):
        ucformat.convert(exact, tmp_path / "twice", encode={"exp_av": "int8-blockwise"})
    with pytest.raises(UsageError, match="beside safetensors"):
        ucformat.convert(exact, tmp_path / "twice", encode=encode, weights="safetensors")


def test_what_is_saved_after_a_lossy_base_is_exact(trained: Training, tmp_path: Path) -> None:
    """Also if the trainer says that no row changed: what the base has is not what it had."""
    save(trained.state, tmp_path / "1", form="packed", encode=INT8)
    save(trained.state, tmp_path / "2", form="packed", base=tmp_path / "1", patch=True)
    exact = ucformat.open(tmp_path / "2")
    assert not exact.lossy
    assert torch.equal(exact["0.weight", "exp_avg"].torch(), trained.moment("exp_avg"))
    save(trained.state, tmp_path / "3", base=tmp_path / "1", patch=True, encode=INT8)
    again = ucformat.open(tmp_path / "3")
    assert again.lossy == ucformat.open(tmp_path / "1").lossy
    assert sum(f.stat().st_size for f in (tmp_path / "3/data").rglob("*")) < 10_000  # all equal
    longer = Training()
    longer.train(0, 25)
    save(longer.state, tmp_path / "4", base=tmp_path / "1", patch=True, encode=INT8)
    assert ucformat.verify(tmp_path / "4")
    key = Key("0.weight", "exp_avg")
    with ucformat.open(tmp_path / "4", lossy=True) as changed:
        wrong = np.abs(changed[key].read() - longer.moment("exp_avg").numpy()).max()
        assert wrong <= changed.lossy[key].absolute


def test_weights_and_the_like_are_exact(trained: Training, tmp_path: Path) -> None:
    for pattern in ("weight", "*", "mast?r", "[vw]*"):
        with pytest.raises(UsageError, match="never encoded with loss"):
            save(trained.state, tmp_path / "no", encode={pattern: "int8-blockwise"})
    for codec in ("int8", "adaptive", "adaptive:0"):
        with pytest.raises(UsageError, match="no encoding with loss"):
            save(trained.state, tmp_path / "no", encode={"exp_avg": codec})
    with pytest.raises(UsageError, match="no state fits 'momentum_buffer'"):
        save(trained.state, tmp_path / "no", encode={"momentum_buffer": "int8-blockwise"})
    with pytest.raises(UsageError, match="several patterns"):
        save(trained.state, tmp_path / "no", encode={**INT8, "exp*": "adaptive:3"})
    assert not list(tmp_path.glob("no/*.json"))
    # before the first step there are no moments
    fresh = Training(1)
    with pytest.raises(UsageError, match="no encoding with loss"):
        save(fresh.state, tmp_path / "0", encode={"exp_avg": "int8"})
    save(fresh.state, tmp_path / "0", encode=INT8)
    load(fresh.state, tmp_path / "0")


def test_what_cannot_be_encoded_is_stored_as_it_is(tmp_path: Path) -> None:
    moments = {
        "nan": torch.tensor([1.0, float("nan")] * 500),
        "double": torch.randn(1000, dtype=torch.float64),
        "integers": torch.arange(1000),
        "zeros": torch.zeros(1000),
        "few": torch.ones(1),
        "scalar": torch.tensor(0.1),
        "lossy": torch.randn(1000),
    }
    state = {"optimizer": {"state": {n: {"exp_avg": t} for n, t in moments.items()}}}
    state["optimizer"]["param_groups"] = [{"params": list(moments)}]  # type: ignore[assignment]
    save(state, tmp_path / "1", encode=INT8)
    ck = ucformat.open(tmp_path / "1")
    assert [key.name for key in ck.lossy] == ["lossy"]
    for name, moment in moments.items():
        if name != "lossy":
            assert ck[name, "exp_avg"].read().tobytes() == moment.numpy().tobytes()


def test_a_mark_that_was_removed_is_found(trained: Training, tmp_path: Path) -> None:
    save(trained.state, tmp_path / "1", form="packed", encode=INT8)
    ck = ucformat.open(tmp_path / "1")
    table = ck.manifest.tensors
    kinds = [kind.model_copy(update={"lossy": None}) for kind in table.kinds]
    unmarked = ck.manifest.model_copy(
        update={"tensors": table.model_copy(update={"kinds": kinds, "bound": {}})}
    )
    from ucformat.format.universal import Universal
    from ucformat.storage.url import open_store

    opened = ucformat.Checkpoint(Universal(open_store(tmp_path / "1"), manifest=unmarked))
    with pytest.raises(IntegrityError, match="the manifest does not say so"):
        opened["0.weight", "exp_avg"].read()


def test_a_training_goes_on_nearly_as_it_would(tmp_path: Path) -> None:
    """From moments of 8 bits the loss stays within a percent of that of the exact ones."""
    training = Training()
    begin = training.train(0, 30)
    losses = {}
    for name, encode in {"exact": {}, **{c: {"exp_avg*": c} for c in ("int8-blockwise",)}}.items():
        save(training.state, tmp_path / name, encode=encode)
        resumed = Training(1)
        load(resumed.state, tmp_path / name, lossy=bool(encode))
        losses[name] = resumed.train(30, 40)
    assert losses["exact"] < 0.9 * begin
    assert losses["int8-blockwise"] == pytest.approx(losses["exact"], rel=0.01)


@pytest.mark.parametrize("form", ["packed", "zarr"])
@pytest.mark.front("packed")
def test_ranks_agree_on_the_bound(form: Any, tmp_path: Path) -> None:
    place = tmp_path / "1"
    wrong = PROGRAM.run("resumed", 2, place, form=form)
    assert wrong[0] == wrong[1]
    bounds = [loss.absolute for loss in ucformat.open(place).lossy.values()]
    changed = [w for w in wrong[0] if w]  # not those of a bias that is too small to become smaller
    assert len(bounds) == len(changed) == len(wrong[0]) - 2
    assert sorted(changed) == pytest.approx(sorted(bounds), rel=0.01)
    assert ucformat.verify(place)
