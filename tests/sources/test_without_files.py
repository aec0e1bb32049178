"""Checkpoints of which files are missing, or only stand-ins of files are there: the weights, or what to do about it."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.cli.conftest import object_of, run
from tests.fakes import same
from ucformat.catalog.catalog import Catalog
from ucformat.errors import MissingData, NotACheckpoint, NotFound, UnsupportedError, UsageError
from ucformat.jobs.register import register

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.cli.conftest import Run

__all__ = ["run"]  # the fixture

DATA = Path(__file__).parents[1] / "data"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 1234567\n"


def copied(tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(DATA / name, tmp_path / name.rpartition("/")[2]))


def weights(place: Path, **options: Any) -> dict[str, NDArray[Any]]:
    ck = ucformat.open(place, options=options)
    return {name: ck[name, "weight"][...] for name, state in ck.tensors if state == "weight"}


def hint(error: pytest.ExceptionInfo[Any]) -> str:
    return str(error.value.hint)


class TestOptimizerFiles:
    """Those that are gone, or incomplete."""

    @pytest.mark.parametrize(
        "name", ["tp2-dp2-z1", "tp2-z2-tied", "pp2-z1-bf16opt", "ep2-dp4-z2", "ep2-z0"]
    )
    def test_of_deepspeed_the_weights_are_whole(self, tmp_path: Path, name: str) -> None:
        place = copied(tmp_path, f"deepspeed/{name}") / "ckpt"
        whole = weights(place)
        files = sorted(place.rglob("*optim_states.pt"))
        files[0].unlink()  # the first rank's
        for _ in range(2):
            with pytest.raises(MissingData, match=r"optim_states\.pt.* is missing") as error:
                ucformat.open(place)
            assert "options={'optimizer': False}" in hint(error)
            found = weights(place, optimizer=False)
            assert found.keys() == whole.keys()
            assert all(same(found[n], whole[n]) for n in whole)
            for file in files[1:]:
                file.unlink(missing_ok=True)
        ck = ucformat.open(place, options={"optimizer": False})
        assert {state for _, state in ck.tensors} == {"weight"}
        made = ucformat.convert(ck, tmp_path / "made")
        assert all(same(made[n][...], whole[n]) for n in whole)

    @pytest.mark.parametrize(
        ("name", "file"),
        [("tp2-dp2-z1", "mp_rank_01_model"), ("tp2-dp2-z3", "rank_1_mp_rank_01_optim")],
    )
    def test_of_files_that_hold_weights_nothing_is_promised(
        self, tmp_path: Path, name: str, file: str
    ) -> None:
        place = copied(tmp_path, f"deepspeed/{name}") / "ckpt"
        for path in place.rglob(f"*{file}_states.pt"):
            path.unlink()
        with pytest.raises(MissingData, match=r"_states\.pt is missing") as error:
            ucformat.open(place)
        assert "the weights are whole" not in hint(error)

    def test_of_deepspeed_alone_they_are_no_checkpoint(self, tmp_path: Path) -> None:
        place = copied(tmp_path, "deepspeed/tp2-dp2-z1") / "ckpt"
        for path in place.rglob("*_model_states.pt"):
            path.unlink()
        with pytest.raises(MissingData, match="has no model states") as error:
            ucformat.open(place)
        assert "the save did not finish" in hint(error)

    def test_a_checkpoint_that_has_them_is_opened_without(self) -> None:
        for name in ("tp2-z0", "tp2-dp2-z1", "universal-tp2"):
            ck = ucformat.open(DATA / "deepspeed" / name / "ckpt", options={"optimizer": False})
            assert {state for _, state in ck.tensors} <= {"weight", "master"}
            assert not ck.metadata.groups

    def test_of_zero_3_they_hold_the_weights(self, tmp_path: Path) -> None:
        place = copied(tmp_path, "deepspeed/tp2-dp2-z3") / "ckpt"
        next(place.rglob("*optim_states.pt")).unlink()
        with pytest.raises(MissingData, match="is missing") as error:
            ucformat.open(place)
        assert "optimizer" not in hint(error).replace("optimizer's", "")
        with pytest.raises(
            UsageError, match="ZeRO 3, which stores the weights in the optimizer's files"
        ):
            ucformat.open(place, options={"optimizer": False})

    def test_of_the_universal_format_the_fp32_copies_are_whole(self, tmp_path: Path) -> None:
        place = copied(tmp_path, "deepspeed/universal-tp2") / "ckpt"
        whole = ucformat.open(place)
        masters = {n: whole[n, "master"][...] for n, state in whole.tensors if state == "master"}
        next(place.rglob("optimizer_state.pt")).unlink()
        next(place.rglob("exp_avg.pt")).unlink()
        with pytest.raises(MissingData, match=r"optimizer_state\.pt is missing") as error:
            ucformat.open(place)
        assert "'optimizer': False" in hint(error)
        found = ucformat.open(place, options={"optimizer": False})
        assert {n for n, state in found.tensors if state == "master"} == masters.keys()
        assert all(same(found[n, "master"][...], masters[n]) for n in masters)

    @pytest.mark.parametrize("name", ["trainer_zero2", "trainer", "trainer_fsdp"])
    def test_in_a_directory_of_trainer(self, tmp_path: Path, name: str) -> None:
        place = copied(tmp_path, f"huggingface/{name}") / "ckpt"
        whole = weights(place)
        for file in [
            *place.rglob("*optim_states.pt"),
            *place.glob("optimizer.*"),
            *place.glob("optimizer_0/*"),
        ]:
            file.unlink()
        found = weights(place, optimizer=False)
        assert found.keys() == whole.keys()
        assert all(same(found[n], whole[n]) for n in whole)
        if name != "trainer_fsdp":
            with pytest.raises(MissingData, match="missing") as error:
                ucformat.open(place)
            assert "'optimizer': False" in hint(error)


def test_latest_without_its_folder(tmp_path: Path) -> None:
    place = copied(tmp_path, "huggingface/trainer_zero2") / "ckpt"
    (tag,) = (p for p in place.iterdir() if p.is_dir())
    shutil.rmtree(tag)
    with pytest.raises(NotFound, match="there is no such folder") as error:
        ucformat.open(place)
    assert "for the weights in model.safetensors" in hint(error)
    shutil.copytree(place, tmp_path / "empty")
    (tmp_path / "empty" / "model.safetensors").unlink()
    for options in ({}, {"optimizer": False}):
        with pytest.raises(NotFound, match="there is no such folder") as error:
            ucformat.open(tmp_path / "empty", options=options)
        assert "for the weights in" not in hint(error)
    ck = ucformat.open(place, options={"optimizer": False})
    assert (ck.metadata.step, ck.kind) == (3, "huggingface")
    alone = ucformat.open(place / "model.safetensors")
    assert all(same(ck[name][...], alone[name][...]) for name in alone)
    for file in place.iterdir():
        if file.name not in ("latest", "model.safetensors"):
            file.unlink()
    with pytest.raises(NotFound, match="there is no such folder") as error:
        ucformat.open(place)
    assert f"for weights alone open {place}/model.safetensors" in hint(error)


class TestFilesOfTrainer:
    """Those that it always writes, and without which everything else can be read."""

    @pytest.mark.parametrize(
        "name", ["trainer", "trainer_bf16", "trainer_fsdp", "trainer_zero2", "trainer_adapter"]
    )
    def test_they_are_named(
        self, tmp_path: Path, name: str, run: Run, caplog: pytest.LogCaptureFixture
    ) -> None:
        place = copied(tmp_path, f"huggingface/{name}") / "ckpt"
        assert not ucformat.open(place).missing
        (place / "trainer_state.json").unlink()
        assert ucformat.open(place).missing == ("trainer_state.json",)
        for file in [*place.glob("scheduler.pt"), *place.glob("rng_state*")]:
            file.unlink()
        here = ("trainer_state.json", "scheduler.pt", "rng_state.pth")
        wanted = (
            here[:1] if name == "trainer_zero2" else here
        )  # whose engine has the optimizer and its scheduler
        assert ucformat.open(place).missing == wanted
        shown = run("show", place)
        assert all(f"missing   {file}" in shown.stdout for file in wanted)
        assert object_of(run("show", place, "--json").stdout)["missing"] == list(wanted)
        made = ucformat.convert(place, tmp_path / "made")
        assert ", ".join(wanted) in caplog.text
        assert not made.missing
        if name != "trainer_zero2":
            assert ucformat.open(place, options={"optimizer": False}).missing == wanted

    def test_without_an_optimizer_there_is_neither_scheduler_nor_generator(
        self, tmp_path: Path
    ) -> None:
        place = copied(tmp_path, "huggingface/trainer") / "ckpt"
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):  # as with `save_only_model`
            (place / name).unlink()
        assert not ucformat.open(place).missing

    @pytest.mark.parametrize("name", ["accelerate", "accelerate_fsdp_full", "accelerate_two"])
    def test_accelerate_writes_what_it_is_given(self, tmp_path: Path, name: str) -> None:
        place = copied(tmp_path, f"huggingface/{name}") / "ckpt"
        for file in place.glob("scheduler*"):
            file.unlink()
        assert not ucformat.open(place).missing


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("megatron/tp2-dp2-flat/sharded", "."),
        ("bytecheckpoint/fsdp/ckpt", "global_step_2"),
        ("dcp/titan/ckpt", "."),
        ("huggingface/trainer_fsdp/ckpt", "."),
    ],
)
def test_metadata_of_dcp_that_is_gone(tmp_path: Path, name: str, place: str) -> None:
    folder = copied(tmp_path, name)
    for file in list(folder.rglob(".metadata")):
        file.unlink()
    with pytest.raises(MissingData, match=r"\.metadata") as error:
        ucformat.open(folder / place)
    assert "its name begins with a dot" in hint(error)


def test_metadata_of_the_model_that_is_gone(tmp_path: Path) -> None:
    place = copied(tmp_path, "bytecheckpoint/fsdp") / "ckpt" / "global_step_2"
    (place / "model" / ".metadata").unlink()
    with pytest.raises(
        MissingData, match=r"model/\.metadata is missing or damaged; each step has a model"
    ) as error:
        ucformat.open(place)
    assert "can be opened separately" in hint(error)


class TestPointersOfGitLfs:
    def test_every_format(self, tmp_path: Path) -> None:
        shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
        folders = [["model.safetensors"], ["pytorch_model.bin"], ["model.pt"], ["weights"], shards]
        folders += [["mp_rank_00_model_states.pt"], ["iter_0000001/mp_rank_00/model_optim_rng.pt"]]
        folders += [["global_step5/mp_rank_00_model_states.pt"], [".metadata", "__0_0.distcp"]]
        for n, files in enumerate(folders):
            for file in files:
                (tmp_path / str(n) / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / str(n) / file).write_text(POINTER)
            index = {"weight_map": {"a": shards[0], "b": shards[1]}}
            if files is shards:
                (tmp_path / str(n) / "model.safetensors.index.json").write_text(json.dumps(index))
            places = [tmp_path / str(n)]
            places += (
                [tmp_path / str(n) / "model.safetensors.index.json"] if files is shards else []
            )
            places += (
                [tmp_path / str(n) / files[0]] if len(files) == 1 and "/" not in files[0] else []
            )
            for place in places:
                with pytest.raises(
                    MissingData, match=f"pointers of Git LFS instead of files: {files[0]}"
                ) as error:
                    ucformat.open(place)
                assert "git lfs pull" in hint(error)


class TestNamesOfTorchSave:
    def test_files_without_an_ending(self, tmp_path: Path) -> None:
        for name in ("checkpoint", "state.pkl", "weights.v2", "model.pt.best", "best model"):
            (tmp_path / name).mkdir()
            torch.save({"w": torch.ones(2, 3)}, tmp_path / name / name)
            assert ucformat.open(tmp_path / name / name).names() == ["w"], name
            if name != "weights.v2":
                assert ucformat.open(tmp_path / name).names() == ["w"], name
        torch.save({"w": torch.ones(2)}, tmp_path / "old", _use_new_zipfile_serialization=False)
        with pytest.raises(UnsupportedError, match=r"before version 1\.6"):
            ucformat.open(tmp_path / "old")
        torch.save(
            {"w": torch.ones(2, 3)}, tmp_path / "state.pkl" / "model.pt"
        )  # which goes before those without one
        assert ucformat.open(tmp_path / "state.pkl").metadata.files == ("model.pt",)
        with zipfile.ZipFile(tmp_path / "other", "w") as archive:
            archive.writestr("top/data.txt", "no")
        with pytest.raises(NotACheckpoint, match="is a file, and no checkpoint"):
            ucformat.open(tmp_path / "other")

    def test_a_tree_is_searched_for_them(self, tmp_path: Path) -> None:
        for name in (
            "a/model.pt",
            "b/ckpt.pth",
            "c/e1.pt",
            "c/e2.pt",
            "d/model_rank_0.pt",
            "e/optimizer.pt",
            "z/w/fp32.pt",
        ):
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            torch.save(
                {"w": torch.full((2, 3), len(name)), name: torch.ones(1, 1)}, tmp_path / name
            )
        shutil.copytree(DATA / "megatron" / "tp2-tied" / "classic", tmp_path / "m")
        (tmp_path / "m" / "latest_checkpointed_iteration.txt").unlink()
        shutil.copytree(DATA / "deepspeed" / "universal-z1", tmp_path / "u")
        with Catalog(str(tmp_path / "catalog.db")) as catalog:
            done = register(tmp_path, catalog, recursive=True)
            found = {Path(str(e.url)).relative_to(tmp_path).as_posix() for e in done.entries}
        assert found == {"a", "b", "m/iter_0000002", "u", "u/ckpt/global_step3"}
        failed = {Path(f.url).name: f.message for f in done.failures}
        assert failed.keys() == {"c", "d"}
        assert "several files of torch.save: e1.pt, e2.pt" in failed["c"]
        assert "only a part of a checkpoint: rank 0" in failed["d"]


def test_a_pipeline_without_the_files_of_its_layers(tmp_path: Path) -> None:
    place = copied(tmp_path, "deepspeed/pp2-z1-bf16opt") / "ckpt"
    for file in place.rglob("layer_*"):
        file.unlink()
    with pytest.raises(MissingData, match="the files of its layers") as error:
        ucformat.open(place)
    assert "each stage wrote its own" in hint(error)
