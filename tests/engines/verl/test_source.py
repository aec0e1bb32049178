"""What veRL's FSDP workers save, read in place, against the whole tensors of the training."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

import ucformat
import ucformat.torch
from tests.sources.suite import DATA, SourceSuite
from tests.torch.ranks import Ranks
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import (
    AmbiguousLayout,
    IntegrityError,
    MissingData,
    UnsupportedError,
)
from ucformat.testing import truth
from ucformat.testing.sources import Sample, read_whole

if TYPE_CHECKING:
    from pathlib import Path

RANKS = Ranks("tests.engines.verl.save_ranks", ("transformers",))
PLACE = "global_step_20/actor"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def made(folder: Path, world: int, **how: Any) -> Sample:
    """A checkpoint of so many ranks, and what was in the training."""
    (folder / "run" / PLACE).mkdir(parents=True)
    arrays = RANKS.run("save", world, folder / "ranks", place=str(folder / "run" / PLACE), **how)[0]
    (folder / "run" / "latest_checkpointed_iteration.txt").write_text("20")
    found: dict[Any, Any] = {}
    for key, array in arrays.items():
        state, _, name = key.partition("/")
        found |= truth({name: array}, state)
    aliases = {}
    if how.get("tied", True):
        found.pop(("weight", HEAD))
        aliases = {HEAD: EMBEDDING}
    trained = [list(dict.fromkeys(name for state, name in found if state == "exp_avg"))]
    return Sample(folder / "run", PLACE, "verl", found, aliases, trained, 20)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return made(tmp_path_factory.mktemp("verl"), 2)


@pytest.fixture
def copy(saved: Sample, tmp_path: Path) -> Path:
    """The checkpoint of two ranks, to be hurt."""
    shutil.copytree(saved.path, tmp_path / "actor")
    return tmp_path / "actor"


class TestVerl(SourceSuite):
    most_read = 9.0  # small archives are read in the search for their ends
    more_read = 1 << 12
    outranked = frozenset({"torch_save"})

    @pytest.fixture
    def sample(self, saved: Sample) -> Sample:
        return saved


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("world", "how"), [(1, {}), (3, {"tied": False}), (4, {"ddp": 2}), (8, {"tied": False})]
)
def test_every_number_of_ranks(world: int, how: dict[str, Any], tmp_path: Path) -> None:
    """Hybrid sharding, rows that do not divide, and ranks without any."""
    sample = made(tmp_path, world, **how)
    ck = sample.open()
    assert read_whole(ck) == sample.truth
    assert dict(ck.metadata.aliases) == sample.aliases
    assert [list(g["params"]) for g in ck.metadata.groups] == sample.groups


def test_it_goes_on_in_another_training(saved: Sample, tmp_path: Path) -> None:
    """In one process, without veRL; the file of Hugging Face is what `from_pretrained` takes."""
    from tests.engines.verl.save_ranks import model_of

    model = model_of(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    ucformat.torch.load({"model": model, "optimizer": optimizer}, saved.path)
    for name, parameter in model.named_parameters():
        assert parameter.detach().numpy().tobytes() == saved.truth["weight", name][2]
        moment = optimizer.state[parameter]["exp_avg"]
        assert moment.numpy().tobytes() == saved.truth["exp_avg", name][2]
    assert optimizer.param_groups[0]["lr"] == 0.005
    folder = str(saved.path / "huggingface")
    ucformat.export(saved.open(), tmp_path / "hf", "safetensors", assets=folder)
    served, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not told["missing_keys"]
    assert torch.equal(served.lm_head.weight, model.lm_head.weight)


def test_a_slice_opens_only_the_files_of_its_ranks(copy: Path) -> None:
    """The last rank's file is damaged, which the rows of the first do not notice."""
    (copy / "model_world_size_2_rank_1.pt").write_bytes(b"PK")
    ck = open_checkpoint(copy)
    rows = ck[EMBEDDING].shape[0] // 2
    assert ck[EMBEDDING][:rows].shape == (rows, 10)
    with pytest.raises(IntegrityError, match="rank_1"):
        ck[EMBEDDING].read()


def test_what_else_it_has(saved: Sample) -> None:
    ck = saved.open()
    assert ck.metadata.layout == {"fsdp": 2}
    assert ck.manifest.config["num_hidden_layers"] == 2
    assert ck.objects["lr_scheduler"]["last_epoch"] == 1
    assert ck.objects["fsdp_config"] == {"FSDP_version": 2, "world_size": 2}
    assert list(ck.objects["ranks"]["1"]) == ["rng"]
    assert "huggingface/config.json" in ck.assets
    assert not ck.unread


class TestPublicTraps:
    def test_equal_parts_are_parts(self, saved: Sample) -> None:
        """EvolvingLMMs-Lab/lmms-engine#160: norms of ones were taken for replicas, and 7/8 of them dropped."""
        for step in ("weight", "exp_avg"):
            assert saved.open()["model.norm.weight", step].shape == (10,)

    def test_buffers_are_not_parts(self, saved: Sample) -> None:
        """verl-project/verl#7610: `torch.cat` of what every rank has whole, or a crash with a scalar."""
        ck = saved.open()
        assert ck["model.norm.table"].read().tolist() == [0, 1, 2]
        assert ck["model.norm.scale"].read() == np.float32(3)

    def test_buffers_that_differ_are_not_chosen_from(self, copy: Path) -> None:
        path = copy / "model_world_size_2_rank_1.pt"
        state = torch.load(path, weights_only=False)
        state["model.norm.table"] += 1
        torch.save(state, path)
        ck = open_checkpoint(copy)
        assert ck["model.norm.scale"].read() == np.float32(3)
        with pytest.raises(AmbiguousLayout, match=r"norm\.table is not sharded, and not the same"):
            ck["model.norm.table"].read()

    def test_one_rank_saves_plain_tensors(self, tmp_path: Path) -> None:
        """verl-project/verl#903: without other ranks, FSDP1 leaves the tensors as they are."""
        torch.save({"w": torch.ones(2)}, tmp_path / "model_world_size_1_rank_0.pt")
        ck = open_checkpoint(tmp_path)
        assert (ck.kind, ck["w"].read().tolist()) == ("verl", [1, 1])

    def test_a_rank_of_another_save_is_noticed(self, copy: Path) -> None:
        path = copy / "model_world_size_2_rank_1.pt"
        state = torch.load(path, weights_only=False)
        state["model.norm.weight"] = state[EMBEDDING]
        del state["model.norm.table"]
        torch.save(state, path)
        ck = open_checkpoint(copy)
        with pytest.raises(IntegrityError, match="not a part of the same tensor"):
            ck["model.norm.weight"].read()
        with pytest.raises(AmbiguousLayout, match="not the same in"):
            ck["model.norm.table"].read()

    def test_ranks_of_a_smaller_run_in_the_same_folder(self, copy: Path) -> None:
        torch.save({"w": torch.ones(2)}, copy / "model_world_size_1_rank_0.pt")
        assert EMBEDDING in open_checkpoint(copy).names()  # fsdp_config.json tells
        (copy / "fsdp_config.json").unlink()
        with pytest.raises(AmbiguousLayout, match="files of 1, 2 ranks"):
            open_checkpoint(copy)
        (copy / "fsdp_config.json").write_text(json.dumps({"world_size": 4}))
        with pytest.raises(AmbiguousLayout, match="says 4"):
            open_checkpoint(copy)

    @pytest.mark.parametrize("kind", ["model", "optim"])
    def test_a_rank_is_missing(self, kind: str, copy: Path) -> None:
        (copy / f"{kind}_world_size_2_rank_1.pt").unlink()
        with pytest.raises(MissingData, match=f"{kind}_world_size_2_rank_N.pt of the ranks 1"):
            open_checkpoint(copy)


def test_the_optimizer_of_fsdp1_is_refused_and_its_model_read(tmp_path: Path) -> None:
    sample = made(tmp_path, 2, fsdp1=True, tied=False)
    with pytest.raises(UnsupportedError, match=r"flat parameters") as error:
        sample.open()
    assert "optimizer" in (error.value.hint or "")
    ck = ucformat.open(sample.path, options={"optimizer": False})
    found = {key: value for key, value in read_whole(ck).items() if key[0] == "weight"}
    assert found == sample.truth


def test_names_are_given_where_nothing_tells_them(copy: Path) -> None:
    names = open_checkpoint(copy).metadata.groups[0]["params"]
    for rank in range(2):
        path = copy / f"optim_world_size_2_rank_{rank}.pt"
        state = torch.load(path, weights_only=False)
        state["param_groups"][0]["params"].pop()
        state["state"].popitem()
        torch.save(state, path)
    ck = open_checkpoint(copy)
    assert ck.objects["unnamed"] == ["optimizer"]
    assert "exp_avg" in {k.state for k in ck.tensors if k.name == "optimizer.0"}
    ck = ucformat.open(copy, options={"groups": [names[:-1]]})
    assert ck.metadata.groups[0]["params"] == names[:-1]


def test_the_megatron_backend(tmp_path: Path) -> None:
    """`dist_ckpt` beside `huggingface`, whose `config.json` tells the vocabulary."""
    sharded = DATA / "megatron" / "tp2-dp2-full" / "sharded" / "iter_0000002"
    shutil.copytree(sharded, tmp_path / "dist_ckpt")
    common = tmp_path / "dist_ckpt" / "common.pt"
    values = torch.load(common, weights_only=False)
    del values["args"]
    torch.save(values, common)
    transformers.GPT2Config(vocab_size=19).save_pretrained(tmp_path / "huggingface")
    ck = open_checkpoint(tmp_path)
    assert (ck.kind, ck["embedding.word_embeddings.weight"].shape[0]) == ("megatron", 19)
    assert "huggingface/config.json" in ck.assets
