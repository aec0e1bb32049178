"""Checkpoints of `deepspeed.moe` that DeepSpeed wrote, kept in `tests/data/deepspeed`."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.sources.suite import SourceSuite, kept
from ucformat.engines.deepspeed.autoep import StackedLayer
from ucformat.engines.deepspeed.experts import Experts
from ucformat.engines.deepspeed.source import DeepSpeed
from ucformat.errors import (
    AmbiguousLayout,
    IntegrityError,
    MissingData,
    UcformatError,
    UnsupportedError,
)
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Key
from ucformat.storage.local import LocalStore
from ucformat.testing.reading import Counting, read_tensor
from ucformat.testing.sources import Sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ALONE = ("ep2-dp4-z1", "ep2-dp4-z2", "ep2-z0", "ep2-dp4-z0-bf16", "ep1-dp2-z1")
#: In pipelines, cut by tensor parallelism, and whole across its ranks.
PARALLEL = ("pp2-ep2-dp2-z1", "pp2-ep2-z0", "tp2-ep2-dp2-z1", "tp2-ep2-z0", "tp2-ep2-across-z1",
            "tp2-ep4-across-z0")  # fmt: skip
#: Stacked by AutoEP.
STACKED = ("autoep2-dp4-z1", "autoep2-z0-bf16", "autoep2-dp4-z3")
NAMES = ALONE + PARALLEL + STACKED
TAG = "global_step3"


def opened(name: str, **options: Any) -> Any:
    return DeepSpeed(**options).open(LocalStore(kept("deepspeed", name).checkpoint))


def expert_of(name: str) -> int | None:
    found = re.search(r"deepspeed_experts\.(\d+)\.", name)
    return int(found[1]) if found else None


def groups_of(
    spec: dict[str, Any], names: list[str], shapes: dict[str, tuple[int, ...]]
) -> list[list[str]]:
    """As DeepSpeed makes them: for each group of the caller one of the rest, then one of experts.

    These are in the order of stages, under ZeRO of tensor-parallel ranks that have experts of their
    own, and of expert-parallel ranks.
    """
    cut = [[n for n in names if (len(shapes[n]) > 1) == big] for big in (True, False)]
    cut = cut if spec.get("groups") == 2 else [names]
    if "auto" in spec:
        stacks = [[n for n in g if ".experts." in n] for g in cut]
        return [[n for n in g if ".experts." not in n] for g in cut] + [g for g in stacks if g]
    experts = [[n for n in g if expert_of(n) is not None] for g in cut]
    lanes = spec.get("tp", 1) if spec.get("across") and spec["zero"] else 1
    local = 4 // spec["ep"]
    ranks = sorted(range(spec["ep"]), key=lambda rank: rank % lanes)
    stages = [("1.", "0."), ("3.",)] if "pp" in spec else [("",)]
    dealt = [
        [
            n
            for stage in stages
            for rank in ranks
            for n in g
            if n.startswith(stage) and (expert_of(n) or 0) // local == rank
        ]
        for g in experts
    ]
    return [*([n for n in g if expert_of(n) is None] for g in cut), *dealt]


def expected(name: str) -> Sample:
    made = kept("deepspeed", name)
    truth = made.truth
    shapes = {n: v[1] for (_, n), v in truth.items()}
    trained = {n for s, n in truth if s == "exp_avg"}
    if made.facts["spec"]["zero"] == 3:  # which keeps no weights of what is trained
        truth = {(s, n): v for (s, n), v in truth.items() if s != "weight" or n not in trained}
    order = list(
        dict.fromkeys(
            i.name
            for i in DeepSpeed().open(LocalStore(made.checkpoint)).metadata.tensor_list.tensors
        )
    )
    # AutoEP's own routers come after what the program has
    names = sorted(trained, key=lambda n: (".router." in n, order.index(n)))
    groups = groups_of(made.facts["spec"], names, shapes)
    steps = frozenset(("step", n) for n in trained)
    return Sample(made.folder, "ckpt", "deepspeed", truth, {}, groups, 3, steps)


@pytest.mark.front("ep*", "autoep2-dp4-z[13]", "pp2-ep2-dp2-z1", "tp2-ep2-across-z1")
class TestKept(SourceSuite):
    @pytest.fixture(params=NAMES)
    def sample(self, request: pytest.FixtureRequest) -> Sample:
        return expected(request.param)


@pytest.mark.parametrize(
    "name",
    ["pp2-ep2-z0", "tp2-ep2-dp2-z1", "tp2-ep2-z0", "tp2-ep4-across-z0", "autoep2-z0-bf16"],
)
def test_the_others_are_the_engines_bit_for_bit(name: str) -> None:
    """Of which the rest is of the second tier."""
    source = opened(name)
    found = {
        (info.state, info.name): read_tensor(source, info)
        for info in source.metadata.tensor_list.tensors
        if info.state != "step"
    }
    assert found == {key: data for key, (_, _, data) in expected(name).truth.items()}


@pytest.mark.parametrize("name", NAMES)
def test_degrees(name: str) -> None:
    spec = kept("deepspeed", name).facts["spec"]
    layout = opened(name).metadata.layout
    tp, pp = spec.get("tp", 1), spec.get("pp", 1)
    assert (layout["zero"], layout["ep"]) == (spec["zero"], spec["ep"])
    assert (layout["dp"], layout.get("tp", 1), layout.get("pp", 1)) == (
        spec["world"] // tp // pp,
        tp,
        pp,
    )


def test_experts_stand_where_the_module_has_them() -> None:
    names = list(
        dict.fromkeys(
            i.name for i in opened("ep2-dp4-z2").metadata.tensor_list.tensors if i.state == "weight"
        )
    )
    gate = names.index("moe.1.deepspeed_moe.gate.wg.weight")
    assert [expert_of(n) for n in names[gate + 1 : gate + 13]] == [
        e for e in range(4) for _ in range(3)
    ]
    assert names[gate + 13].startswith(
        "moe.1.mlp."
    )  # the residual expert, which is no expert of any rank


def test_only_the_holders_of_an_expert_are_opened() -> None:
    store = Counting(LocalStore(kept("deepspeed", "ep2-dp4-z1").checkpoint))
    source = DeepSpeed().open(store)
    store.bytes.clear()
    name = "moe.0.deepspeed_moe.experts.deepspeed_experts.3.up.weight"
    read_tensor(
        source, next(i for i in source.metadata.tensor_list.tensors if i.key == Key(name, "master"))
    )
    assert {re.sub(r".*rank_(\d)_mp.*", r"\1", key) for key in store.bytes} <= {"1", "3"}


class TestWhoHoldsWhat:
    """Against the groups that DeepSpeed's docstrings list for 16 ranks."""

    def test_experts_before_data(self) -> None:
        experts = Experts(16)
        assert [list(experts.holders(2, k)) for k in range(2)] == [
            list(range(0, 16, 2)),
            list(range(1, 16, 2)),
        ]
        assert [experts.place(2, r) for r in (0, 1, 2, 15)] == [0, 0, 1, 7]

    def test_data_before_experts(self) -> None:
        experts = Experts(16, data_first=True)
        assert [list(experts.holders(2, k)) for k in range(2)] == [
            list(range(8)),
            list(range(8, 16)),
        ]
        assert [experts.place(2, r) for r in (0, 7, 8, 15)] == [0, 7, 0, 7]


class TestHurt:
    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        return shutil.copytree(kept("deepspeed", "ep2-z0").checkpoint, tmp_path / "copy")

    def test_a_missing_expert_is_named(self, copy: Path) -> None:
        (copy / TAG / "layer_0_expert_3_mp_rank_00_model_states.pt").unlink()
        with pytest.raises(MissingData, match="layer_0_expert_3_mp_rank_00"):
            DeepSpeed().open(LocalStore(copy))

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_missing_optimizer_is_named(self, copy: Path, rank: int) -> None:
        (copy / TAG / f"expp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
        with pytest.raises(MissingData, match=f"expp_rank_{rank}_mp_rank_00"):
            DeepSpeed().open(LocalStore(copy))

    def test_an_expert_too_many(self, copy: Path) -> None:
        shutil.copy(
            *(copy / TAG / f"layer_0_expert_{e}_mp_rank_00_model_states.pt" for e in (3, 4))
        )
        with pytest.raises(IntegrityError, match=r"expert_4(.*)does not belong"):
            DeepSpeed().open(LocalStore(copy))

    def test_an_experts_file_under_another_number(self, copy: Path) -> None:
        shutil.copy(
            *(copy / TAG / f"layer_0_expert_{e}_mp_rank_00_model_states.pt" for e in (2, 1))
        )
        with pytest.raises(IntegrityError, match="not a tensor of expert 1"):
            DeepSpeed().open(LocalStore(copy))

    @pytest.mark.parametrize("layer", [0, 1])
    def test_experts_of_a_layer_that_are_those_of_another(self, tmp_path: Path, layer: int) -> None:
        """A single one of the first, or all of the second."""
        import torch

        copy = shutil.copytree(kept("deepspeed", "ep2-dp4-z2").checkpoint, tmp_path / "copy")
        for expert in range(4) if layer else (2,):
            path = copy / TAG / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
            value = torch.load(path, weights_only=False)
            torch.save(
                {k.replace(f"moe.{layer}.", f"moe.{1 - layer}."): v for k, v in value.items()}, path
            )
        with pytest.raises(
            IntegrityError,
            match=f"the files of layer {layer}'s experts, .* hold several layers' or",
        ):
            DeepSpeed().open(LocalStore(copy))

    def test_ranks_that_disagree_on_what_all_hold(self, copy: Path) -> None:
        import torch

        path = copy / TAG / "expp_rank_1_mp_rank_00_optim_states.pt"
        value = torch.load(path, weights_only=False)
        value["optimizer"]["state"][0]["exp_avg"][0] += 1
        torch.save(value, path)
        source = DeepSpeed().open(LocalStore(copy))
        info = next(i for i in source.metadata.tensor_list.tensors if i.state == "exp_avg")
        with pytest.raises(IntegrityError, match=r"expp_rank_0(.*)expp_rank_1"):
            read_tensor(source, info)

    def test_a_rank_missing_under_zero_1(self, tmp_path: Path) -> None:
        copy = shutil.copytree(kept("deepspeed", "ep2-dp4-z1").checkpoint, tmp_path / "copy")
        (copy / TAG / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink()
        with pytest.raises(MissingData, match="rank_3"):
            DeepSpeed().open(LocalStore(copy))

    def test_an_absurd_number_of_experts(self, copy: Path) -> None:
        import torch

        path = copy / TAG / "mp_rank_00_model_states.pt"
        value = torch.load(path, weights_only=False)
        torch.save({**value, "num_experts": [10**15]}, path)
        with pytest.raises(MissingData, match="and more is missing"):
            DeepSpeed().open(LocalStore(copy))
        torch.save({**value, "num_experts": "many"}, path)
        with pytest.raises(IntegrityError, match="num_experts"):
            DeepSpeed().open(LocalStore(copy))

    @pytest.mark.parametrize(
        ("name", "file"),
        [
            ("tp2-ep2-dp2-z1", "layer_0_expert_3_mp_rank_01_model_states.pt"),
            ("tp2-ep2-dp2-z1", "mp_rank_01_model_states.pt"),  # DeepSpeed 5157
            ("pp2-ep2-z0", "expp_rank_1_mp_rank_01_optim_states.pt"),
            ("tp2-ep4-across-z0", "expp_rank_3_mp_rank_01_optim_states.pt"),
            ("pp2-ep2-dp2-z1", "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"),
        ],
    )
    def test_a_file_of_another_model_parallel_rank_is_missed(
        self, tmp_path: Path, name: str, file: str
    ) -> None:
        copy = shutil.copytree(kept("deepspeed", name).checkpoint, tmp_path / "copy")
        (copy / TAG / file).unlink()
        with pytest.raises(MissingData, match=file):
            DeepSpeed().open(LocalStore(copy))

    def test_an_expert_that_one_of_the_ranks_would_have_is_missed(self, tmp_path: Path) -> None:
        checkpoint = kept("deepspeed", "tp2-ep2-across-z1").checkpoint
        copy = shutil.copytree(checkpoint, tmp_path / "copy")
        (copy / TAG / "layer_1_expert_2_mp_rank_01_model_states.pt").unlink()
        with pytest.raises(MissingData, match=r"layer_1_expert_2_mp_rank_\*_model_states.pt"):
            DeepSpeed().open(LocalStore(copy))

    def test_ranks_that_hold_unequal_shares_of_whole_experts_are_refused(
        self, tmp_path: Path
    ) -> None:
        """DeepSpeed 0.19.8 saves so where the tensor-parallel ranks do not divide the expert-parallel ones."""
        checkpoint = kept("deepspeed", "tp2-ep2-across-z1").checkpoint
        copy = shutil.copytree(checkpoint, tmp_path / "copy")
        for file in (copy / TAG).glob("layer_*_expert_*_mp_rank_01_*"):
            file.rename(file.with_name(file.name.replace("mp_rank_01", "mp_rank_00")))
        with pytest.raises(UnsupportedError, match="whole experts of which the 2 tensor-parallel"):
            DeepSpeed().open(LocalStore(copy))

    def test_whole_experts_of_another_rank_are_not_taken_for_its_own(self, tmp_path: Path) -> None:
        checkpoint = kept("deepspeed", "tp2-ep2-across-z1").checkpoint
        copy = shutil.copytree(checkpoint, tmp_path / "copy")
        for layer in range(2):
            first, second = ((copy / TAG / f"layer_{layer}_expert_{e}_mp_rank_0{r}_model_states.pt")
                             for e, r in ((1, 0), (3, 1)))  # fmt: skip
            first.rename(first.with_name(first.name.replace("mp_rank_00", "mp_rank_01")))
            second.rename(second.with_name(second.name.replace("mp_rank_01", "mp_rank_00")))
        with pytest.raises(IntegrityError, match=r"has states of .* of which .* has no weight"):
            DeepSpeed().open(LocalStore(copy))

    def test_experts_of_a_rank_that_is_none(self, copy: Path) -> None:
        name = "layer_0_expert_3_mp_rank_0{}_model_states.pt"
        shutil.copy(copy / TAG / name.format(0), copy / TAG / name.format(1))
        with pytest.raises(IntegrityError, match="saved by 1 model-parallel ranks"):
            DeepSpeed().open(LocalStore(copy))

    def test_experts_that_no_pattern_describes_are_not_joined_by_rows(self, tmp_path: Path) -> None:
        """Megatron-DeepSpeed's patterns are those of its dense layers, and no pattern means dim 0 there."""
        import torch

        copy = shutil.copytree(kept("deepspeed", "tp2-ep2-dp2-z1").checkpoint, tmp_path / "copy")
        for rank in range(2):
            path = copy / TAG / f"mp_rank_0{rank}_model_states.pt"
            value = torch.load(path, weights_only=False)
            maps = value["universal_checkpoint_info"]["affine_map"]["params"]
            for name in [name for name in maps if "down" in name and "experts" in name]:
                del maps[name]
            for key, lists in value["universal_checkpoint_info"].items():
                if isinstance(lists, list):
                    kept_ones = [
                        p for p in lists if "down" not in str(p) or "experts" not in str(p)
                    ]
                    value["universal_checkpoint_info"][key] = kept_ones
            torch.save(value, path)
        with pytest.raises(AmbiguousLayout, match=r"experts\.0\.down\.weight"):
            DeepSpeed().open(LocalStore(copy))

    def test_expert_files_whose_tensors_share_a_storage(self, copy: Path) -> None:
        """As DeepSpeed wrote them once: each file with the storage of all experts (DeepSpeed 2389)."""
        import torch

        names = [f"layer_0_expert_{e}_mp_rank_00_model_states.pt" for e in range(4)]
        values = [torch.load(copy / TAG / name, weights_only=False) for name in names]
        every = torch.cat([t.flatten() for value in values for t in value.values()])
        start = 0
        for name, value in zip(names, values, strict=True):
            for key, tensor in value.items():
                value[key] = every[start : start + tensor.numel()].view(tensor.shape)
                start += tensor.numel()
            torch.save(value, copy / TAG / name)
        source, truth = DeepSpeed().open(LocalStore(copy)), kept("deepspeed", "ep2-z0").truth
        for info in source.metadata.tensor_list.tensors:
            if info.state == "weight":
                assert read_tensor(source, info) == truth["weight", info.name][2]

    @pytest.mark.parametrize("name", ["tp2-ep4-across-z0", "pp2-ep2-z0", "tp2-ep2-dp2-z1"])
    def test_weights_are_read_without_the_optimizer(self, tmp_path: Path, name: str) -> None:
        """Which DeepSpeed itself once could not (DeepSpeed 2737)."""
        made = kept("deepspeed", name)
        copy = shutil.copytree(made.checkpoint, tmp_path / "copy")
        for file in (copy / TAG).glob("*optim_states.pt"):
            file.unlink()
        source = DeepSpeed(optimizer=False).open(LocalStore(copy))
        found = {i.name: read_tensor(source, i) for i in source.metadata.tensor_list.tensors}
        assert found == {n: data for (s, n), (_, _, data) in made.truth.items() if s == "weight"}


class TestStacked:
    """Experts of AutoEP."""

    def hurt(self, folder: Path, name: str, key: str, change: Callable[[Any], Any]) -> Path:
        """A copy with another entry in the model states of every rank."""
        import torch

        copy = shutil.copytree(kept("deepspeed", name).checkpoint, folder / "copy")
        for path in (copy / TAG).glob("*mp_rank_00_model_states.pt"):
            value = torch.load(path, weights_only=False)
            if key in value or key == "folding":
                torch.save({**value, key: change(value.get(key))}, path)
        return copy

    def test_a_part_of_a_stack_opens_the_files_of_its_experts_alone(self) -> None:
        store = Counting(LocalStore(kept("deepspeed", "autoep2-dp4-z1").checkpoint))
        source = DeepSpeed().open(store)
        for key, files in (
            (Key("moe.1.experts.w2", "weight"), {"layer_1_expert_2_mp_rank_00_model_states.pt"}),
            (
                Key("moe.1.experts.w2", "exp_avg"),
                {f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (1, 3)},
            ),
        ):
            extents = list(source.extents(key, Box((2, 3, 0), (1, 4, 15))))
            assert {extent.file.removeprefix(f"{TAG}/") for extent in extents} <= files

    @pytest.mark.parametrize("rows", [0, 2, 1 << 60])
    def test_stacks_of_other_numbers_of_experts(self, rows: int) -> None:
        experts = Experts(4, stacked={"moe.experts.w1": StackedLayer("moe.experts", 8, 2)})
        assert experts.degree_of({"moe.experts.w1": (4, 3)}, {}, 2, "file") == 2
        with pytest.raises(IntegrityError, match=f"have {rows} experts each"):
            experts.degree_of({"moe.experts.w1": (rows, 3)}, {}, 2, "file")

    def test_ranks_that_hold_experts_in_another_order_are_refused(self, tmp_path: Path) -> None:
        """As DeepSpeed's descriptions may say (DeepSpeed 8544), so that ranks in order would be mixed up."""

        def turned(layers: Any) -> Any:
            for layer in layers:
                layer["expert_placement"]["ranks"][0]["experts"] = [0, 2]
                layer["expert_placement"]["ranks"][1]["experts"] = [1, 3]
            return layers

        for name in STACKED:
            copy = self.hurt(tmp_path / name, name, "ds_autoep_layers", turned)
            with pytest.raises(UnsupportedError, match="order of their numbers"):
                DeepSpeed().open(LocalStore(copy))

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"num_experts": 5}, "no usable 'ds_autoep_layers'"),
            ({"ep_size": 4, "num_local_experts": 1, "expert_placement": None}, "expert-parallel"),
            ({"expert_key_prefix": 3}, "no usable 'ds_autoep_layers'"),
            (  # numbers of which there are lists would fill the memory
                {"num_experts": 1 << 40, "ep_size": 1, "num_local_experts": 1 << 40},
                "no usable 'ds_autoep_layers'",
            ),
            ({"checkpoint_format": "of another kind"}, "in the format 'of another kind'"),
            (
                {"checkpoint_format": "zero3_partitioned", "checkpoint_format_version": 2},
                "version 2",
            ),
        ],
    )
    def test_layers_that_are_not_understood(
        self, tmp_path: Path, change: dict[str, Any], says: str
    ) -> None:
        def changed(layers: Any) -> Any:
            return [{**layer, **change} for layer in layers]

        copy = self.hurt(tmp_path, "autoep2-dp4-z1", "ds_autoep_layers", changed)
        with pytest.raises(UcformatError, match=says):
            DeepSpeed().open(LocalStore(copy))

    def test_autotp_beside_it_is_refused(self, tmp_path: Path) -> None:
        copy = self.hurt(tmp_path, "autoep2-dp4-z1", "folding", lambda _: {"version": 1})
        with pytest.raises(UnsupportedError, match="AutoEP together with AutoTP"):
            DeepSpeed().open(LocalStore(copy))

    def test_files_of_other_ranks_are_refused(self, tmp_path: Path) -> None:
        """Under ZeRO 3 each file says which ranks share a group: here those of data before experts."""
        copy = shutil.copytree(kept("deepspeed", "autoep2-dp4-z3").checkpoint, tmp_path / "copy")
        one, two = ((copy / TAG / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt") for r in (1, 2))
        one.rename(copy / "one")
        two.rename(one)
        (copy / "one").rename(two)
        source = DeepSpeed().open(LocalStore(copy))
        tensors = source.metadata.tensor_list.tensors
        info = next(i for i in tensors if i.key == Key("moe.0.experts.w1", "master"))
        with pytest.raises(UnsupportedError, match=r"group 1 is sharded across the ranks \[2, 3\]"):
            read_tensor(source, info)

    def test_an_expert_of_another_shape(self, tmp_path: Path) -> None:
        import torch

        copy = shutil.copytree(kept("deepspeed", "autoep2-dp4-z1").checkpoint, tmp_path / "copy")
        path = copy / TAG / "layer_0_expert_3_mp_rank_00_model_states.pt"
        value = torch.load(path, weights_only=False)
        value["moe.0.experts.w1.3"] = value["moe.0.experts.w1.3"][1:]
        torch.save(value, path)
        with pytest.raises(IntegrityError, match=r"moe\.0\.experts\.w1\.3 in .* that of the first"):
            DeepSpeed().open(LocalStore(copy))


def test_optimizer_files_that_say_nothing(tmp_path: Path) -> None:
    """Before 2025 DeepSpeed wrote them under ZeRO 1 and 2, too."""
    import torch

    sample = expected("ep2-dp4-z1")
    copy = shutil.copytree(sample.path, tmp_path / "copy")
    for rank in range(2):
        torch.save({"optimizer": None}, copy / TAG / f"expp_rank_{rank}_mp_rank_00_optim_states.pt")
    source = DeepSpeed().open(LocalStore(copy))
    for (state, name), (_, _, data) in sample.truth.items():
        assert (
            read_tensor(
                source,
                next(i for i in source.metadata.tensor_list.tensors if i.key == Key(name, state)),
            )
            == data
        )


@pytest.mark.parametrize(
    "change",
    [
        {"buffer_names": [[]]},
        {"param_shapes": 3},
        {"shared_params": {"a": 1}},
        {"optimizer": {"state": {}, "param_groups": 5}},
        {"optimizer": {"state": {0: 1}, "param_groups": [{"params": [0]}]}},
        {"optimizer": {"state": {}, "param_groups": [{"params": [{}]}]}},
    ],
)
def test_hostile_values_end_in_errors_of_ours(tmp_path: Path, change: dict[str, Any]) -> None:
    import torch

    copy = shutil.copytree(kept("deepspeed", "ep2-z0").checkpoint, tmp_path / "copy")
    for name in ("mp_rank_00_model_states.pt", "expp_rank_1_mp_rank_00_optim_states.pt"):
        path = copy / TAG / name
        value = torch.load(path, weights_only=False)
        torch.save({**value, **change}, path)
    with pytest.raises(UcformatError):
        DeepSpeed().open(LocalStore(copy))
