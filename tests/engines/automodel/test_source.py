"""Folders of NeMo AutoModel, as its checkpointer writes them with PyTorch, against the training's own tensors."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
import ucformat.torch
from tests.sources.suite import SourceSuite
from tests.torch.ranks import Ranks
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import (
    IntegrityError,
    MissingData,
    NotACheckpoint,
    UcformatError,
    UnsupportedError,
)
from ucformat.testing import truth
from ucformat.testing.sources import Sample, read_whole

if TYPE_CHECKING:
    from pathlib import Path

RANKS = Ranks("tests.engines.automodel.save_ranks")
PLACE = "epoch_0_step_2"


def made(folder: Path, form: str, world: int = 2) -> Sample:
    """A checkpoint of two ranks, and what was in the training."""
    place = folder / "checkpoints" / PLACE
    place.mkdir(parents=True)
    arrays = RANKS.run("save", world, folder / "ranks", place=str(place), form=form)[0]
    expected: dict[Any, Any] = {}
    for key, array in arrays.items():
        state, _, name = key.partition("/")
        expected |= truth({name: array}, state)
    trained = [list(dict.fromkeys(name for state, name in expected if state == "exp_avg"))]
    return Sample(folder / "checkpoints", PLACE, "automodel", expected, {}, trained, 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return made(tmp_path_factory.mktemp("automodel"), "safetensors")


@pytest.fixture
def copy(saved: Sample, tmp_path: Path) -> Path:
    shutil.copytree(saved.path, tmp_path / PLACE)
    return tmp_path / PLACE


class TestAutomodel(SourceSuite):
    most_read = 9.0
    more_read = 1 << 16
    cyclic = True
    outranked = frozenset({"torch_save"})

    @pytest.fixture
    def sample(self, saved: Sample) -> Sample:
        return saved


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["torch_save", "adapter"])
def test_other_forms(form: str, tmp_path: Path) -> None:
    """DCP's own files; and adapters, whose states have AutoModel's names and weights those of PEFT."""
    sample = made(tmp_path, form)
    ck = sample.open()
    assert read_whole(ck) == sample.truth
    assert {*ck.metadata.groups[0]["params"]} == {*(sample.groups or [[]])[0]}
    assert any("lora_magnitude_vector" in name for name in ck.names()) == (form == "adapter")
    assert ck.metadata.step == 2


def test_its_values(saved: Sample) -> None:
    ck = saved.open()
    assert ck.objects["step_scheduler"] == {"step": 2, "epoch": 0}
    assert ck.objects["sched"]["last_epoch"] == 1
    assert ck.objects["losses"] == {"train_loss": 0.5}
    assert "config.yaml" in ck.assets
    alone = ucformat.open(saved.path, options={"optimizer": False, "part": False})
    assert {key.state for key in alone.tensors} == {"weight"}


def test_a_save_that_was_interrupted(copy: Path) -> None:
    """AutoModel's own resume skips folders with its marker; the newest may be one."""
    (copy / ".incomplete").touch()
    with pytest.raises(MissingData, match="not saved to its end") as error:
        open_checkpoint(copy)
    assert "LATEST" in (error.value.hint or "")


def test_shards_of_the_last_rank_are_missing(copy: Path) -> None:
    """No file of safetensors tells how many there were, but the states' shapes do."""
    for path in (copy / "model").glob("shard-00002-*"):
        path.unlink()
    with pytest.raises(IntegrityError, match=r"has the shape .* in model, and its exp_avg"):
        open_checkpoint(copy)
    with pytest.raises(NotACheckpoint, match="nothing tells how many saved"):
        ucformat.open(copy, options={"optimizer": False})


def test_no_state_tells_the_shape_of_a_frozen_weight(tmp_path: Path) -> None:
    """One rank's file does not tell whether others had more rows; states tell it of trained weights alone."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    sample = made(tmp_path, "safetensors", world=1)
    assert read_whole(open_checkpoint(sample.path)) == sample.truth
    (path,) = (sample.path / "model").glob("shard-00001-*")
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata())
    places = json.loads(metadata["DCP_SHARDING_INFO"])
    places["frozen"] = {"saved_offsets": [0, 0]}
    metadata["DCP_SHARDING_INFO"] = json.dumps(places)
    save_file({**tensors, "frozen": torch.ones(2, 3)}, path, metadata)
    with pytest.raises(NotACheckpoint, match="nothing tells how many saved"):
        open_checkpoint(sample.path)
    assert "frozen" in ucformat.open(sample.path, options={"part": False}).names()


def test_states_of_parameters_that_are_called_otherwise(copy: Path) -> None:
    """Weights of AutoModel's own models are renamed for Hugging Face; the optimizer's states are not."""
    shutil.rmtree(copy / "model")
    (copy / "model").mkdir()
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"other.weight": np.ones(3, "float32")}, copy / "model" / "model.safetensors")
    with pytest.raises(
        UnsupportedError, match="states of parameters that model does not have"
    ) as e:
        open_checkpoint(copy)
    assert "optimizer" in (e.value.hint or "")
    ck = ucformat.open(copy, options={"optimizer": False})
    assert list(ck.names()) == ["other.weight"]


def test_the_folder_of_a_run_names_its_checkpoints(saved: Sample) -> None:
    with pytest.raises(UcformatError, match=PLACE):
        open_checkpoint(saved.folder)
    (saved.folder / "LATEST").symlink_to(PLACE)
    assert open_checkpoint(saved.folder / "LATEST").metadata.step == 2
    (saved.folder / "LATEST").unlink()


def test_without_weights(copy: Path) -> None:
    shutil.rmtree(copy / "model")
    with pytest.raises(MissingData, match="has no weights"):
        open_checkpoint(copy)


def test_it_goes_on_in_a_plain_training(saved: Sample, tmp_path: Path) -> None:
    """As docs/sources/automodel.md says: what AutoModel saved is loaded, and saved again by ucformat."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    state = {"model": model, "optimizer": optimizer}
    for url in (saved.path, tmp_path / "ours"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        report = ucformat.torch.load(state, url)
        assert report.step == 2
        for name, parameter in model.named_parameters():
            assert parameter.detach().numpy().tobytes() == saved.truth["weight", name][2]
            moment = optimizer.state[parameter]["exp_avg_sq"]
            assert moment.numpy().tobytes() == saved.truth["exp_avg_sq", name][2]
        assert optimizer.param_groups[0]["lr"] == 0.005
        if url == saved.path:
            ucformat.torch.save(state, tmp_path / "ours", step=2)
