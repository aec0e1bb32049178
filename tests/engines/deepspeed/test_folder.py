"""What is taken for a DeepSpeed checkpoint: the folder itself and those in it, not a whole tree."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.fakes import Arrays, random_array, same
from tests.zero_files import FLAT, write_zero3
from ucformat.engines.deepspeed.source import DeepSpeed
from ucformat.errors import IntegrityError, NotACheckpoint, UsageError
from ucformat.sources.opening import open_source
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

ARRAYS: Arrays = {("w", state): random_array((5, 3), "float32", i) for i, state in enumerate(FLAT)}


def test_the_save_folder_and_the_tag_folder_are_found_with_or_without_latest(
    tmp_path: Path,
) -> None:
    folder = write_zero3(tmp_path / "run", ARRAYS, ranks=2)
    for _ in range(2):
        for place in (folder, folder / "global_step5"):
            assert DeepSpeed().find(LocalStore(place))
            assert same(ucformat.open(place)["w"][...], ARRAYS["w", "master"])
        (folder / "latest").unlink(missing_ok=True)


@pytest.mark.parametrize("above", ["runs", "runs/more"])
def test_a_tree_that_holds_one_further_down_is_none_itself(tmp_path: Path, above: str) -> None:
    folder = write_zero3(tmp_path / above / "one", ARRAYS, ranks=1)
    (folder / "latest").unlink()
    assert not DeepSpeed().find(LocalStore(tmp_path))
    assert open_source(LocalStore(tmp_path)) is None
    with pytest.raises(
        NotACheckpoint, match=f"is no checkpoint itself.*: {above}/one/global_step5"
    ) as caught:
        ucformat.open(tmp_path)
    assert f"{above}/one/global_step5" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("count", "end"),
    [(2, "tag00, tag01"), (10, ", tag09"), (11, ", tag09 and 1 more"), (25, ", tag09 and 15 more")],
)
def test_so_many_tags_are_named_and_the_rest_counted(tmp_path: Path, count: int, end: str) -> None:
    for i in range(count):
        tag = tmp_path / f"tag{i:02}"
        tag.mkdir()
        (tag / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(UsageError, match="several DeepSpeed checkpoints") as caught:
        ucformat.open(tmp_path)
    assert caught.value.message.endswith(end)
    assert caught.value.hint


def test_a_file_of_one_rank_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(
        NotACheckpoint, match=r"one file of a DeepSpeed checkpoint\n.*open the folder"
    ):
        ucformat.open(tmp_path / "mp_rank_00_model_states.pt")


def test_flat_groups_of_another_model_are_refused(tmp_path: Path) -> None:
    """A file of each rank: the first is checked when the checkpoint is opened, the others when they are read."""
    longer: Arrays = {(n, s): random_array((7, 3), "float32", 9) for n, s in ARRAYS}
    other = write_zero3(tmp_path / "other", longer, ranks=2) / "global_step5"
    for rank in range(2):
        folder = write_zero3(tmp_path / f"run{rank}", ARRAYS, ranks=2)
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        shutil.copy(other / name, folder / "global_step5" / name)
        with pytest.raises(IntegrityError, match=rf"{name}: flat group 0 has shape \(11,\); .*8"):
            ucformat.open(folder)["w"].read()
