"""A checkpoint of ZeRO 3 whose optimizer was on NVMe, kept in `tests/data/deepspeed`."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.sources.suite import SourceSuite, kept
from ucformat.engines.deepspeed import swap
from ucformat.engines.deepspeed.source import DeepSpeed
from ucformat.errors import IntegrityError, MissingData, UnsupportedError
from ucformat.reading.stand_ins import AttributedTensor
from ucformat.storage.local import LocalStore
from ucformat.testing.reading import read_tensor
from ucformat.testing.sources import Sample

if TYPE_CHECKING:
    from pathlib import Path

SWAPPED = "global_step3/offloaded_tensors/rank01"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return shutil.copytree(kept("deepspeed", "z3-nvme").checkpoint, tmp_path / "copy")


class TestKept(SourceSuite):
    @pytest.fixture
    def sample(self) -> Sample:
        made = kept("deepspeed", "z3-nvme")
        trained = {n for s, n in made.truth if s == "exp_avg"}
        truth = {(s, n): v for (s, n), v in made.truth.items() if s != "weight" or n not in trained}
        tensors = DeepSpeed().open(LocalStore(made.checkpoint)).metadata.tensor_list.tensors
        names = [n for n in dict.fromkeys(info.name for info in tensors) if n in trained]
        shapes = {n: v[1] for (_, n), v in truth.items()}
        groups = [[n for n in names if (len(shapes[n]) > 1) == big] for big in (True, False)]
        steps = frozenset(("step", n) for n in trained)
        return Sample(made.folder, "ckpt", "deepspeed", truth, {}, groups, 3, steps)


def test_swap_files_that_belong_to_no_tensor_are_told_of(copy: Path) -> None:
    """DeepSpeed once named them by addresses in memory, so that those of earlier runs stayed (DeepSpeed 4416)."""
    shutil.copy(copy / SWAPPED / "0_3.tensor.swp", copy / SWAPPED / "140213.tensor.swp")
    files = DeepSpeed().open(LocalStore(copy)).metadata.files
    assert f"{SWAPPED}/0_3.tensor.swp" in files
    assert f"{SWAPPED}/140213.tensor.swp" not in files


@pytest.mark.parametrize("what", ["0_3.tensor.swp", "exp_avg_sq-8_11.tensor.swp", ""])
def test_a_missing_swap_file_is_named(copy: Path, what: str) -> None:
    (copy / SWAPPED / what).unlink() if what else shutil.rmtree(copy / SWAPPED)
    with pytest.raises(MissingData, match=f"offloaded_tensors/rank01/{what}"):
        DeepSpeed().open(LocalStore(copy))


def test_a_swap_file_that_was_cut_short(copy: Path) -> None:
    path = copy / SWAPPED / "exp_avg-0_3.tensor.swp"
    path.write_bytes(path.read_bytes()[:64])
    source = DeepSpeed().open(LocalStore(copy))
    tensors = source.metadata.tensor_list.tensors
    info = next(i for i in tensors if (i.name, i.state) == ("embed.weight", "exp_avg"))
    with pytest.raises(IntegrityError, match="has 64 bytes"):
        read_tensor(source, info)


def test_a_master_that_names_the_file_of_a_state_is_refused() -> None:
    folder = swap.SwapFolder("", {"exp_avg-0_3.tensor.swp": 1024})
    tensor = AttributedTensor("0", "float32", (0,), (1,), 0, 0, {"ds_id": "exp_avg-0_3"})
    assert folder.restored(tensor, 256, "exp_avg", "it").shape == (256,)
    for state in ("master", "exp_avg_sq"):
        with pytest.raises(UnsupportedError, match="does not say in which swap file"):
            folder.restored(tensor, 256, state, "it")


def test_tensors_that_do_not_say_where_they_are_are_refused(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older files, or of programs that copy tensors to save them."""
    monkeypatch.setattr(swap, "_ID", "other")
    with pytest.raises(UnsupportedError, match="does not say in which swap file") as caught:
        DeepSpeed().open(LocalStore(copy))
    assert "offload_optimizer.device: cpu" in str(caught.value.hint)
