"""Checkpoints of `deepspeed.moe` that DeepSpeed wrote, kept in `tests/data/deepspeed`."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.sources.suite import SourceSuite, kept
from ucformat.engines.deepspeed.experts import Experts
from ucformat.engines.deepspeed.source import DeepSpeed
from ucformat.errors import IntegrityError, MissingData, UcformatError, UnsupportedError
from ucformat.geometry.tensor import Key
from ucformat.storage.local import LocalStore
from ucformat.testing.reading import Counting, read_tensor
from ucformat.testing.sources import Sample

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("ep2-dp4-z1", "ep2-dp4-z2", "ep2-z0", "ep2-dp4-z0-bf16", "ep1-dp2-z1")
TAG = "global_step3"


def opened(name: str, **options: Any) -> Any:
    return DeepSpeed(**options).open(LocalStore(kept("deepspeed", name).checkpoint))


def expert_of(name: str) -> int | None:
    found = re.search(r"deepspeed_experts\.(\d+)\.", name)
    return int(found[1]) if found else None


def groups_of(
    spec: dict[str, Any], names: list[str], shapes: dict[str, tuple[int, ...]]
) -> list[list[str]]:
    """As DeepSpeed makes them: for each group of the caller one of the rest, then one of experts, rank after rank."""
    cut = [[n for n in names if (len(shapes[n]) > 1) == big] for big in (True, False)]
    cut = cut if spec.get("groups") == 2 else [names]
    experts = [[n for n in g if expert_of(n) is not None] for g in cut]
    local = 4 // spec["ep"]
    dealt = [
        [n for rank in range(spec["ep"]) for n in g if (expert_of(n) or 0) // local == rank]
        for g in experts
    ]
    return [*([n for n in g if expert_of(n) is None] for g in cut), *dealt]


def expected(name: str) -> Sample:
    made = kept("deepspeed", name)
    shapes = {n: v[1] for (_, n), v in made.truth.items()}
    trained = {n for s, n in made.truth if s == "exp_avg"}
    order = list(
        dict.fromkeys(
            i.name
            for i in DeepSpeed().open(LocalStore(made.checkpoint)).metadata.tensor_list.tensors
        )
    )
    groups = groups_of(made.facts["spec"], sorted(trained, key=order.index), shapes)
    steps = frozenset(("step", n) for n in trained)
    return Sample(made.folder, "ckpt", "deepspeed", made.truth, {}, groups, 3, steps)


class TestKept(SourceSuite):
    @pytest.fixture(params=NAMES)
    def sample(self, request: pytest.FixtureRequest) -> Sample:
        return expected(request.param)


@pytest.mark.parametrize("name", NAMES)
def test_degrees(name: str) -> None:
    spec = kept("deepspeed", name).facts["spec"]
    layout = opened(name).metadata.layout
    assert (layout["zero"], layout["dp"], layout["ep"]) == (spec["zero"], spec["world"], spec["ep"])


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

    def test_autoep_is_refused_by_name(self, copy: Path) -> None:
        import torch

        path = copy / TAG / "mp_rank_00_model_states.pt"
        value = torch.load(path, weights_only=False)
        torch.save({**value, "ds_autoep_layers": [{"expert_key_prefix": "x.experts"}]}, path)
        with pytest.raises(UnsupportedError, match="AutoEP"):
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
