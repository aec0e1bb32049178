"""Folders of DeepSpeed's universal format: those that its converter made, and each form that an atom can have."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.sources.suite import SourceSuite, kept
from ucformat.checkpoint import open_checkpoint
from ucformat.engines.deepspeed.source import DeepSpeed
from ucformat.errors import IntegrityError, MissingData, NotFound, UcformatError, UnsupportedError
from ucformat.geometry.tensor import Key
from ucformat.storage.local import LocalStore
from ucformat.testing.reading import Counting, read_tensor
from ucformat.testing.sources import Sample

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("universal-z1", "universal-z2", "universal-z3", "universal-tp2", "universal-pp2",
         "universal-autoep2")  # fmt: skip
TAG = "global_step3"


def expected(name: str) -> Sample:
    """What is in the folder; not the weights that the converter does not copy, or that were in no file at all."""
    made = kept("deepspeed", name)
    spec, truth = made.facts["spec"], made.truth
    trained = {n for s, n in truth if s == "exp_avg"}
    if spec["zero"] == 3:
        truth = {(s, n): v for (s, n), v in truth.items() if s != "weight" or n not in trained}
    if spec.get("pp"):
        truth = {(s, n): v for (s, n), v in truth.items() if s != "weight"}
    if spec.get("ep"):
        truth = {(s, n): v for (s, n), v in truth.items() if s != "weight" or ".experts." not in n}
    order = list(dict.fromkeys(i.name for i in opened(name).metadata.tensor_list.tensors))
    shapes = {n: v[1] for (_, n), v in truth.items()}
    names = [n for n in order if n in trained]
    groups = [names]
    if spec.get("groups") == 2:
        groups = [[n for n in names if (len(shapes[n]) > 1) == big] for big in (True, False)]
    if spec.get("pp") or spec.get("ep"):
        groups = [list(g["params"]) for g in opened(name).metadata.groups]
        assert sorted(n for g in groups for n in g) == sorted(trained)
    steps = frozenset(("step", n) for n in trained)
    return Sample(made.folder, "ckpt", "deepspeed", truth, made.facts["tied"], groups, 3, steps)


def opened(name: str) -> Any:
    return DeepSpeed().open(LocalStore(kept("deepspeed", name).checkpoint))


@pytest.mark.front("universal-[zpt]*")
class TestKept(SourceSuite):
    most_read = 2.0

    @pytest.fixture(params=NAMES)
    def sample(self, request: pytest.FixtureRequest) -> Sample:
        return expected(request.param)

    def test_a_missing_file_is_an_error_or_does_not_matter(
        self, copy: Sample, tmp_path: Path
    ) -> None:
        """Of every kind of file one, because there are a hundred."""
        for path in _one_of_each(self.damageable(copy)):
            path.rename(tmp_path / "aside")
            self.hurt(copy, path, "is missing")
            (tmp_path / "aside").rename(path)

    def test_a_truncated_file_is_an_error_or_does_not_matter(self, copy: Sample) -> None:
        for path in _one_of_each(self.damageable(copy)):
            data = path.read_bytes()
            for keep in (0, len(data) // 3, len(data) - 1):
                path.write_bytes(data[:keep])
                self.hurt(copy, path, f"was cut to {keep} of {len(data)} bytes")
            path.write_bytes(data)


def _one_of_each(paths: list[Path]) -> list[Path]:
    return list(
        {
            (p.parent.parent.name if p.parent.parent.name == "zero" else "", p.name): p
            for p in paths
        }.values()
    )


def test_stacks_of_autoep_are_whole() -> None:
    """Whose momenta DeepSpeed's converter once left as one rank had them (DeepSpeed 8147)."""
    source, sample = opened("universal-autoep2"), expected("universal-autoep2")
    for info in source.metadata.tensor_list.tensors:
        if ".experts." in info.name and info.shape:
            assert info.shape[0] == 4
            assert read_tensor(source, info) == sample.truth[info.state, info.name][2]


def test_the_tag_folder_itself_opens() -> None:
    tag = kept("deepspeed", "universal-z1").checkpoint / TAG
    assert open_checkpoint(tag).tensors.keys() == open_checkpoint(tag.parent).tensors.keys()


def test_a_native_checkpoint_beside_it_is_taken_first(tmp_path: Path) -> None:
    shutil.copytree(
        kept("deepspeed", "universal-z1").checkpoint / TAG, tmp_path / "step3_universal"
    )
    (tmp_path / "latest_universal").write_text("step3_universal")
    shutil.copytree(kept("deepspeed", "ep2-z0").checkpoint, tmp_path, dirs_exist_ok=True)
    assert open_checkpoint(tmp_path).metadata.layout["zero"] == 0
    assert open_checkpoint(tmp_path / "step3_universal").metadata.layout["universal"] is True


def test_frozen_parameters_and_buffers_are_there() -> None:
    """DeepSpeed's own loading of a universal checkpoint leaves both as they were initialised."""
    frozen = opened("universal-z3").metadata
    assert any("q_proj" in i.name and i.state == "weight" for i in frozen.tensor_list.tensors)
    assert "not_stored" not in frozen.objects
    states = {
        i.state for i in opened("universal-z2").metadata.tensor_list.tensors if "mlp.down" in i.name
    }
    assert states == {"weight"}  # the fp32 copy that the converter made of it is no master


def test_groups_keep_their_own_hyper_parameters() -> None:
    for name in ("universal-z1", "universal-z3"):
        assert [g["weight_decay"] for g in opened(name).metadata.groups] == [0.01, 0.0]


def test_steps_of_zero_3_come_from_the_optimizers_file() -> None:
    source = opened("universal-z3")
    infos = [i for i in source.metadata.tensor_list.tensors if i.state == "step"]
    assert infos
    assert {read_tensor(source, i) for i in infos} == {b"\x00\x00\x40\x40"}


class TestUnfinished:
    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        return shutil.copytree(kept("deepspeed", "universal-z1").checkpoint, tmp_path / "copy")

    @pytest.mark.parametrize(
        ("gone", "said"),
        [
            ("mp_rank_00_model_states.pt", "mp_rank_00"),
            ("zero/optimizer_state.pt", "optimizer_state"),
            ("zero/model.norm.weight/fp32.pt", "zero/model.norm.weight/fp32.pt"),
            ("zero/model.norm.weight/exp_avg.pt", "lacks exp_avg.pt"),
            ("zero/model.norm.weight/step.pt", "lacks step.pt"),
            ("zero/model.norm.weight", "zero/model.norm.weight/fp32.pt"),
        ],
    )
    def test_what_is_missing_is_named(self, copy: Path, gone: str, said: str) -> None:
        path = copy / TAG / gone
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        with pytest.raises(MissingData, match=said):
            DeepSpeed().open(LocalStore(copy))

    def test_a_parameter_with_no_state_of_the_optimizer(self, copy: Path) -> None:
        folder = copy / TAG / "zero/model.norm.weight"
        for path in folder.iterdir():
            if path.name != "fp32.pt":
                path.unlink()
        with pytest.raises(
            MissingData, match=r"norm\.weight lacks exp_avg\.pt, exp_avg_sq\.pt, step\.pt, which"
        ):
            DeepSpeed().open(LocalStore(copy))

    def test_a_rank_of_zero_3(self, tmp_path: Path) -> None:
        copy = shutil.copytree(kept("deepspeed", "universal-z3").checkpoint, tmp_path / "copy")
        (copy / TAG / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
        with pytest.raises(MissingData, match="zero_pp_rank_1"):
            DeepSpeed().open(LocalStore(copy))

    def test_fragments_of_what_was_not_merged(self, copy: Path) -> None:
        fragment = copy / TAG / "tmp" / "model.extra.weight" / "0" / "fp32.00"
        fragment.parent.mkdir(parents=True)
        fragment.touch()
        with pytest.raises(MissingData, match=r"model\.extra\.weight/fp32\.pt(.*)did not finish"):
            DeepSpeed().open(LocalStore(copy))

    def test_fragments_alone(self, tmp_path: Path) -> None:
        fragment = tmp_path / TAG / "tmp" / "w" / "0" / "fp32.00"
        fragment.parent.mkdir(parents=True)
        fragment.touch()
        with pytest.raises(MissingData, match="did not finish"):
            open_checkpoint(tmp_path)

    def test_fragments_that_were_kept_do_not_matter(self, copy: Path) -> None:
        fragment = copy / TAG / "tmp" / "model.norm.weight" / "0" / "fp32.00"
        fragment.parent.mkdir(parents=True)
        fragment.touch()
        assert open_checkpoint(copy).tensors

    def test_a_folder_that_is_gone(self, copy: Path) -> None:
        (copy / TAG).rename(copy.parent / "aside")
        with pytest.raises(NotFound, match="latest_universal"):
            DeepSpeed().open(LocalStore(copy))


class TestForms:
    """Atoms as they may be, written by torch."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "latest_universal").write_text(TAG)
        return tmp_path

    def put(self, folder: Path, name: str, state: str, value: Any) -> None:
        import torch

        path = folder / TAG / "zero" / name / f"{state}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path)

    def test_what_hf_to_universal_writes(self, folder: Path) -> None:
        import torch

        weights = {"embed_tokens.weight": torch.randn(7, 3), "norm.weight": torch.randn(3)}
        for name, w in weights.items():
            more = {"cat_dim": 0} | ({"vocab_tensor": True} if "embed" in name else {})
            self.put(folder, name, "fp32", {"param": w, **more})
            for state in ("exp_avg", "exp_avg_sq"):
                self.put(folder, name, state, {"param": torch.zeros_like(w), **more})
        ck = open_checkpoint(folder)
        for name, w in weights.items():
            assert ck[name, "master"].read().tobytes() == w.numpy().tobytes()
            assert not ck[name, "exp_avg"].read().any()
        (folder / "latest_universal").unlink()
        with pytest.raises(MissingData, match="model_states"):
            open_checkpoint(folder)
        (folder / TAG / "source.txt").write_text("Huggingface checkpoint")
        assert open_checkpoint(folder / TAG).tensors.keys() == ck.tensors.keys()

    def test_stacked_experts_and_other_optimizers(self, folder: Path) -> None:
        import torch

        experts = {
            "param": torch.randn(4, 3, 2),
            "cat_dim": 0,
            "is_expert_param": True,
            "ep_num_experts": 4,
        }
        self.put(folder, "x.experts.w1", "fp32", experts)
        self.put(
            folder, "x.experts.w1", "momentum_buffer", {"param": torch.randn(4, 3, 2).bfloat16()}
        )
        self.put(folder, "x.experts.w1", "row_var", {"param": torch.randn(4, 3, 1)})
        ck = open_checkpoint(folder)
        shapes = {key.state: (info.dtype, info.shape) for key, info in ck.tensors.items()}
        assert shapes == {
            "master": ("float32", (4, 3, 2)),
            "momentum_buffer": ("bfloat16", (4, 3, 2)),
            "row_var": ("float32", (4, 3, 1)),
        }

    def test_a_vocabulary_cut_short_is_a_view_of_its_storage(self, folder: Path) -> None:
        import torch

        whole = torch.randn(8, 3)
        self.put(folder, "w", "fp32", {"param": whole[:5, :], "vocab_tensor": True})
        assert (
            open_checkpoint(folder)["w", "master"].read().tobytes() == whole[:5].numpy().tobytes()
        )

    def test_steps_that_are_numbers(self, folder: Path) -> None:
        import torch

        for name, step in (("a", 3), ("b", 3), ("c", 4)):
            self.put(folder, name, "fp32", {"param": torch.randn(2)})
            self.put(folder, name, "step", step)
        assert open_checkpoint(folder).metadata.groups[0]["state"] == {
            "step": {"a": 3, "b": 3, "c": 4}
        }
        self.put(folder, "c", "step", 3)
        assert open_checkpoint(folder).metadata.groups[0]["state"] == {"step": 3}

    def test_a_flat_tensor_without_model_states(self, folder: Path) -> None:
        import torch

        self.put(folder, "w", "fp32", torch.randn(6))
        with pytest.raises(UnsupportedError, match="shape of w"):
            open_checkpoint(folder)

    @pytest.mark.parametrize("value", [{"parma": 1}, "text", None, [1]])
    def test_what_is_no_atom(self, folder: Path, value: Any) -> None:
        self.put(folder, "w", "fp32", value)
        with pytest.raises(IntegrityError, match=r"zero/w/fp32\.pt"):
            open_checkpoint(folder)

    def test_a_name_that_climbs_out_of_the_folder(self, folder: Path) -> None:
        import torch

        self.put(folder, "..x/y", "fp32", {"param": torch.randn(2)})
        assert [i.name for i in open_checkpoint(folder).metadata.tensor_list.tensors] == ["..x/y"]


def test_what_the_converter_joined_wrongly_is_not_read(tmp_path: Path) -> None:
    """Without patterns it joins parts along dim 0, replicas too (`--inject_missing_state`)."""
    import torch

    copy = shutil.copytree(kept("deepspeed", "universal-tp2").checkpoint, tmp_path / "copy")
    path = copy / TAG / "zero" / "model.norm.weight" / "fp32.pt"
    param = torch.load(path, weights_only=True)["param"]
    torch.save({"param": torch.cat([param, param]), "cat_dim": 0}, path)
    with pytest.raises(IntegrityError, match="joins the parts"):
        DeepSpeed().open(LocalStore(copy))


def test_a_sub_parameter_in_the_shape_of_its_view(tmp_path: Path) -> None:
    import torch

    copy = shutil.copytree(kept("deepspeed", "universal-z1").checkpoint, tmp_path / "copy")
    name = "model.layers.0.self_attn.q_proj.weight"
    path = copy / TAG / "zero" / name / "fp32.pt"
    value = torch.load(path, weights_only=True)
    rows, columns = value["param"].shape
    torch.save({"param": value["param"].view(2, rows // 2, columns), "sub_param_shape": [2]}, path)
    assert (
        open_checkpoint(copy)[name, "master"].read().tobytes()
        == value["param"].detach().numpy().tobytes()
    )


def test_a_thousand_atoms_are_opened_by_few_bytes_each(tmp_path: Path) -> None:
    import torch

    (tmp_path / "latest_universal").write_text(TAG)
    big = torch.zeros(300, 300)
    for i in range(40):
        path = tmp_path / TAG / "zero" / f"w{i}" / "fp32.pt"
        path.parent.mkdir(parents=True)
        torch.save({"param": big}, path)
    store = Counting(LocalStore(tmp_path))
    source = DeepSpeed().open(store)
    assert len(source.metadata.tensor_list.tensors) == 40
    assert max(store.bytes.values()) < 110_000 < big.numel() * 4
    store.bytes.clear()
    list(source.extents(Key("w7", "master")))
    assert not store.bytes


def test_hostile_atoms_end_in_errors_of_ours(tmp_path: Path) -> None:
    copy = shutil.copytree(kept("deepspeed", "universal-z1").checkpoint, tmp_path / "copy")
    path = copy / TAG / "zero" / "optimizer_state.pt"
    import torch

    values: list[Any] = [
        None,
        [],
        {},
        {"param_groups": [{"params": ["x"]}]},
        {"param_groups": [1]},
        {"zero_stage": "x"},
    ]
    for value in values:
        torch.save(value, path)
        with pytest.raises(UcformatError):
            open_checkpoint(copy)
