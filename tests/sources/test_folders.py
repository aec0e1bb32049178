"""The folders that users of a tool name: each opens, or the error says which one to open."""

from __future__ import annotations

import pickle
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
from tests.sources.suite import DATA, kept
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import MissingData, NotACheckpoint
from ucformat.testing.sources import read_whole

if TYPE_CHECKING:
    from pathlib import Path

SHARDED = "sharded/iter_0000002"


def test_an_iteration_of_megatron_without_its_metadata_json(tmp_path: Path) -> None:
    """`common.pt` is read all the same: the step, the arguments and the schedulers are in it."""
    shutil.copytree(DATA / "megatron" / "tp2-dp2-full" / SHARDED, tmp_path / "iter_0000002")
    whole = open_checkpoint(tmp_path / "iter_0000002")
    (tmp_path / "iter_0000002" / "metadata.json").unlink()
    for place in ("iter_0000002", ""):
        ck = open_checkpoint(tmp_path / place)
        assert (ck.kind, ck.metadata.step) == ("megatron", 2)
        assert ck.objects == whole.objects
        assert read_whole(ck) == read_whole(whole)
    (tmp_path / "iter_0000002" / "common.pt").unlink()
    (tmp_path / "iter_0000002" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(MissingData, match=r"common\.pt is missing"):
        open_checkpoint(tmp_path / "iter_0000002")


def _wrapped(name: Any) -> Any:
    """The key under which NeMo stores a tensor: its model is wrapped."""
    if not isinstance(name, str):
        return name
    found = re.fullmatch(
        r"(optimizer\.state\.[^.]+\.)?((?:embedding|decoder|output_layer)\..+)", name
    )
    return name if found is None else f"{found[1] or ''}module.{found[2]}"


def test_nemo(tmp_path: Path) -> None:
    place, made = tmp_path / "checkpoints" / "model--step=2", kept("megatron", "tp2-dp2-full")
    shutil.copytree(made.folder / SHARDED, place / "weights")
    meta = pickle.loads((place / "weights" / ".metadata").read_bytes())  # noqa: S301
    meta.state_dict_metadata = {_wrapped(k): v for k, v in meta.state_dict_metadata.items()}
    meta.planner_data = {
        _wrapped(k): tuple(map(_wrapped, path)) for k, path in (meta.planner_data or {}).items()
    }
    meta.storage_data = {
        type(index)(_wrapped(index.fqn), index.offset, index.index): v
        for index, v in meta.storage_data.items()
    }
    if mcore := getattr(meta, "mcore_data", None):
        meta.mcore_data = {_wrapped(k): v for k, v in mcore.items()}
    (place / "weights" / ".metadata").write_bytes(pickle.dumps(meta))
    (place / "context" / "nemo_tokenizer").mkdir(parents=True)
    (place / "context" / "io.json").write_text("{}")
    (place / "context" / "nemo_tokenizer" / "tokenizer.json").write_bytes(b"{" + bytes(2 << 20))
    ck = open_checkpoint(place)
    truth = {k: v for k, v in made.truth.items() if k[0] != "step"}
    assert (ck.kind, ck.home) == ("megatron", str(place))
    assert read_whole(ck) == truth
    assert set(ck.assets) == {"context/io.json", "context/nemo_tokenizer/tokenizer.json"}
    assert not ck.unread
    converted = ucformat.convert(ck, tmp_path / "converted")
    assert len(converted.assets["context/nemo_tokenizer/tokenizer.json"]) == 1 + (2 << 20)
    with pytest.raises(
        NotACheckpoint, match="these folders in it seem to be: model--step=2/weights"
    ):
        open_checkpoint(place.parent)


@pytest.mark.parametrize("steps", [("step-9", "step-10"), ("step-10",)])
def test_torchtitan_and_others_name_the_newest_step(tmp_path: Path, steps: tuple[str, ...]) -> None:
    for step in steps:
        shutil.copytree(DATA / "dcp" / "titan" / "ckpt", tmp_path / "checkpoint" / step)
    with pytest.raises(NotACheckpoint, match=f"seem to be: {', '.join(steps)}") as error:
        open_checkpoint(tmp_path / "checkpoint")
    assert error.value.hint is not None
    assert error.value.hint.startswith(
        f"open one of them: {tmp_path}/checkpoint/step-10; or record"
    )
    assert open_checkpoint(tmp_path / "checkpoint" / "step-10").kind == "dcp"


def test_verl(tmp_path: Path) -> None:
    actor = tmp_path / "run" / "global_step_20" / "actor"
    actor.mkdir(parents=True)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("20")
    for rank in range(2):
        for what in ("model", "extra_state"):
            torch.save({"w": torch.ones(2, 2)}, actor / f"{what}_world_size_2_rank_{rank}.pt")
    assert open_checkpoint(actor).metadata.step == 20
    with pytest.raises(NotACheckpoint, match="seem to be: global_step_20/actor"):
        open_checkpoint(tmp_path / "run")
    shutil.copytree(DATA / "huggingface" / "trainer" / "ckpt", actor / "huggingface")
    assert open_checkpoint(actor / "huggingface").kind == "huggingface"
    shutil.copytree(
        DATA / "megatron" / "tp2-dp2-full" / SHARDED,
        tmp_path / "run" / "global_step_20/critic/dist_ckpt",
    )
    with pytest.raises(NotACheckpoint, match="global_step_20/critic/dist_ckpt"):
        open_checkpoint(tmp_path / "run")
    assert (
        open_checkpoint(tmp_path / "run" / "global_step_20" / "critic" / "dist_ckpt").kind
        == "megatron"
    )


def test_lightning_with_deepspeed(tmp_path: Path) -> None:
    """Its strategy gives DeepSpeed the path as the save folder, and `checkpoint` as the tag."""
    made = DATA / "deepspeed" / "tp2-dp2-z1" / "ckpt"
    shutil.copytree(made / "global_step3", tmp_path / "epoch=1.ckpt" / "checkpoint")
    (tmp_path / "epoch=1.ckpt" / "latest").write_text("checkpoint")
    ck = open_checkpoint(tmp_path / "epoch=1.ckpt")
    assert ck.home == f"{tmp_path}/epoch=1.ckpt/checkpoint"
    assert read_whole(ck) == read_whole(open_checkpoint(made))


@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_the_project_of_accelerate(tmp_path: Path, place: str) -> None:
    for name in ("checkpoint_2", "checkpoint_10"):
        shutil.copytree(
            DATA / "huggingface" / "accelerate" / "ckpt", tmp_path / "checkpoints" / name
        )
    with pytest.raises(NotACheckpoint, match="seem to be: ") as error:
        open_checkpoint(tmp_path / place)
    assert error.value.hint is not None
    assert error.value.hint.startswith(
        f"open one of them: {tmp_path}/checkpoints/checkpoint_10; or record"
    )
