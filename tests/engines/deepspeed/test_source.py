from __future__ import annotations

import json
import math
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines import make_deepspeed
from tests.engines.deepspeed.conftest import CHOSEN, matrix
from ucformat.engines.deepspeed.source import DeepSpeed
from ucformat.errors import (
    IntegrityError,
    MissingData,
    NotFound,
    TensorNotFound,
    UcformatError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from ucformat.geometry.tensor import Key
from ucformat.sources.opening import open_source
from ucformat.sources.pickle.file import TorchFile
from ucformat.storage.local import LocalStore
from ucformat.testing.reading import Counting, read_tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engines import Made
    from ucformat.sources.base import OpenSource

pytestmark = pytest.mark.engine

UNCLEAR = "z0-unclear"
ALL = [
    (world, spec["name"])
    for world, specs in CHOSEN.items()
    for spec in specs
    if spec["name"] != UNCLEAR
]
Chosen = "Callable[[int, str], Made]"


def opened(folder: Path, **options: Any) -> OpenSource:
    source = DeepSpeed(**options)
    assert source.find(LocalStore(folder))
    return source.open(LocalStore(folder))


def check(made: Made, source: OpenSource, zero: int) -> None:
    """All that the engine had is there, bit for bit, and nothing else but what the client state held."""
    truth = made.truth
    frozen = set(made.facts["frozen"]) | {"idle.nothing"}
    if zero == 3:  # the weight of a trained parameter is nowhere but in its master
        trained = {n for s, n in truth if s == "master"}
        assert not trained & frozen
        truth = {(s, n): v for (s, n), v in truth.items() if s != "weight" or n not in trained}
    infos = {
        (i.state, i.name): i
        for i in source.metadata.tensor_list.tensors
        if "client_state" not in i.name
    }
    assert infos.keys() == truth.keys()
    for key, (dtype, shape, data) in truth.items():
        assert (infos[key].dtype, infos[key].shape) == (dtype, shape), key
        assert read_tensor(source, infos[key]) == data, key


@pytest.mark.parametrize(("world", "name"), ALL)
def test_every_tensor_is_the_engines_bit_for_bit(
    chosen: Callable[[int, str], Made], world: int, name: str
) -> None:
    made = chosen(world, name)
    spec = next(s for s in CHOSEN[world] if s["name"] == name)
    source = open_source(LocalStore(made.checkpoint))
    assert source is not None
    check(made, source, spec["zero"])
    facts = source.metadata
    assert facts.layout.items() >= {"zero": spec["zero"], "dp": world}.items()
    assert (facts.step, facts.engine) == (3, {"name": "deepspeed", "version": "0.19.8"})
    assert dict(facts.aliases) == made.facts["tied"]
    assert set(facts.files) == {"latest"} | {
        f"global_step3/{p.name}" for p in (made.checkpoint / "global_step3").iterdir()
    }
    json.dumps(facts.objects, allow_nan=False)


@pytest.mark.parametrize(("world", "name"), ALL)
def test_optimizer_groups_keep_their_own_hyper_parameters(
    chosen: Callable[[int, str], Made], world: int, name: str
) -> None:
    made = chosen(world, name)
    facts = opened(made.checkpoint).metadata
    wanted = [[n for n in group if n != "idle.nothing"] for group in made.facts["groups"]]
    found = [[n for n in group["params"] if n != "idle.nothing"] for group in facts.groups]
    if "round" in name:  # there the flat order is another one
        wanted, found = [sorted(g) for g in wanted], [sorted(g) for g in found]
    assert found == wanted
    for g, names in enumerate(found):
        assert {facts.tensor_list.groups[n] for n in names} == {g}
    if "elastic" not in name:  # those files hold no hyper-parameters
        for group, hyper in zip(facts.groups, made.facts["hyper"], strict=True):
            assert group["lr"] == hyper["lr"]
            assert group["weight_decay"] == hyper["weight_decay"]
            assert hyper.keys() <= group.keys()


@pytest.mark.matrix
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_whole_product_is_bit_exact(shared: Path, world: int, zero: int) -> None:
    specs = [spec for spec in matrix() if spec["zero"] == zero]
    for made in make_deepspeed(specs, world, shared / f"matrix-{world}-{zero}").values():
        check(made, opened(made.checkpoint), zero)


def test_client_state_is_kept_with_its_tensors(chosen: Callable[[int, str], Made]) -> None:
    source = opened(chosen(4, "z1-client").checkpoint)
    client = source.metadata.objects["client_state"]
    assert client["iteration"] == 3
    assert client["nan"] == {"$float": "nan"}
    assert client["$int:5"] == {"of": [1, 2]}
    assert client["rng"]["$tensor"]["shape"] == [64]
    assert client["ema"] == {"decay": 0.9, "big.weight": {"$ref": "client_state.ema.big.weight"}}
    info = next(
        i for i in source.metadata.tensor_list.tensors if i.name == "client_state.ema.big.weight"
    )
    assert (info.shape, info.dtype, len(read_tensor(source, info))) == (
        (200, 300),
        "float32",
        240_000,
    )
    assert source.metadata.objects["optimizer"]["loss_scaler"]["$class"].endswith("LossScaler")
    assert source.metadata.objects["lr_scheduler"] == {"last_batch_iteration": 2}


@pytest.mark.parametrize(
    ("world", "name"), [(2, "z3-counted"), (3, "z0-counted"), (4, "z2-round-counted")]
)
def test_plain_optimizer_state_is_kept_by_group(
    chosen: Callable[[int, str], Made], world: int, name: str
) -> None:
    for group in opened(chosen(world, name).checkpoint).metadata.groups:
        assert group["state"] == {"step": 3}


def test_what_ranks_saved_differently_is_kept_for_each(chosen: Callable[[int, str], Made]) -> None:
    source = opened(chosen(3, "z3-client").checkpoint)
    ranks = source.metadata.objects["rank"]
    assert ranks.keys() == {"1", "2"}
    assert ranks["1"]["client_state"].keys() == {"rng", "own"}  # the shared average is stored once
    names = {i.name for i in source.metadata.tensor_list.tensors if "client_state" in i.name}
    assert names == {
        "client_state.ema.big.weight",
        "client_state.own",
        "rank1.client_state.own",
        "rank2.client_state.own",
    }


def test_opening_reads_kilobytes_and_the_first_rank_alone(
    chosen: Callable[[int, str], Made],
) -> None:
    store = Counting(LocalStore(chosen(3, "z1-aligned").checkpoint))
    source = DeepSpeed().open(store)
    touched = {key for key in store.bytes if "optim" in key}
    assert {re.sub(r".*rank_(\d)_mp.*", r"\1", key) for key in touched} == {"0"}
    last = next(i for i in reversed(source.metadata.tensor_list.tensors) if i.state == "exp_avg")
    assert {e.file for e in source.extents(last.key)} <= set(source.metadata.files)
    assert max(store.bytes.values()) < 200_000
    assert max(store.requests.values()) < 40


def test_a_tag_folder_opens_by_itself(chosen: Callable[[int, str], Made]) -> None:
    made = chosen(2, "z1")
    source = opened(made.checkpoint / "global_step3")
    check(made, source, 1)


def test_an_unknown_tensor_is_not_found(chosen: Callable[[int, str], Made]) -> None:
    source = opened(chosen(2, "z1").checkpoint)
    with pytest.raises(TensorNotFound, match="exp_avg, exp_avg_sq, master, step, weight"):
        source.extents(Key("embed.weight", "momentum_buffer"))


class TestNamesOfNumberedStates:
    """ZeRO 0 numbers the optimizer's states; which parameter each is may be unclear."""

    def test_unclear_is_refused(self, chosen: Callable[[int, str], Made]) -> None:
        with pytest.raises(UsageError, match=r"numbered(.|\n)*options=\{'groups': \[\["):
            opened(chosen(2, UNCLEAR).checkpoint)

    def test_the_caller_can_name_them(self, chosen: Callable[[int, str], Made]) -> None:
        made = chosen(2, UNCLEAR)
        groups = [[n for n in g if n != "idle.nothing"] for g in made.facts["groups"]]
        check(made, opened(made.checkpoint, groups=groups), 0)

    def test_wrong_names_are_refused(self, chosen: Callable[[int, str], Made]) -> None:
        made = chosen(2, UNCLEAR)
        groups = [
            [n.replace("blocks.1", "blocks.0") for n in g if n != "idle.nothing"]
            for g in made.facts["groups"]
        ]
        with pytest.raises(UsageError, match="cannot be the optimizer entry"):
            opened(made.checkpoint, groups=groups)


class TestDamage:
    """A folder in which something is missing, superfluous or swapped is never read wrongly."""

    @pytest.fixture
    def folder(self, chosen: Callable[[int, str], Made], tmp_path: Path) -> Path:
        return self.copy(chosen(3, "z1-aligned"), tmp_path)

    @pytest.fixture
    def stage3(self, chosen: Callable[[int, str], Made], tmp_path: Path) -> Path:
        return self.copy(chosen(3, "z3-hpz"), tmp_path)

    def copy(self, made: Made, tmp_path: Path) -> Path:
        return shutil.copytree(made.checkpoint, tmp_path / "copy")

    def part(self, folder: Path, rank: int, kind: str = "optim") -> Path:
        return next(
            (folder / "global_step3").glob(f"*zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")
        )

    def read_all(self, folder: Path) -> None:
        source = opened(folder)
        for info in source.metadata.tensor_list.tensors:
            for _ in source.extents(info.key):
                pass

    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_a_missing_rank(self, folder: Path, rank: int) -> None:
        path = self.part(folder, rank)
        path.unlink()
        with pytest.raises(MissingData, match=path.name):
            opened(folder)

    @pytest.mark.parametrize("kind", ["model", "optim"])
    def test_a_missing_rank_of_stage_3(self, stage3: Path, kind: str) -> None:
        path = self.part(stage3, 2, kind)
        path.unlink()
        with pytest.raises(MissingData, match=path.name):
            opened(stage3)

    def test_no_optimizer_states(self, folder: Path) -> None:
        for rank in range(3):
            self.part(folder, rank).unlink()
        with pytest.raises(MissingData, match="saved by 3"):
            opened(folder)

    def test_a_rank_too_many(self, folder: Path) -> None:
        path = self.part(folder, 2)
        shutil.copy(path, path.with_name(path.name.replace("rank_2_mp", "rank_3_mp")))
        with pytest.raises(IntegrityError, match="rank_3_mp"):
            opened(folder)

    def test_files_of_two_precisions(self, folder: Path) -> None:
        path = self.part(folder, 2)
        shutil.copy(path, path.with_name(path.name.removeprefix("bf16_")))
        with pytest.raises(IntegrityError, match="are both present"):
            opened(folder)

    def test_swapped_ranks(self, folder: Path) -> None:
        one, two = self.part(folder, 1), self.part(folder, 2)
        data = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(data)
        with pytest.raises(IntegrityError, match=r"rank_[12]_mp"):
            self.read_all(folder)

    def test_a_truncated_file(self, folder: Path) -> None:
        path = self.part(folder, 1)
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(IntegrityError, match=path.name):
            self.read_all(folder)

    @pytest.mark.parametrize("fixture", ["folder", "stage3"])
    def test_ranks_that_disagree_on_the_step(
        self, request: pytest.FixtureRequest, fixture: str
    ) -> None:
        folder: Path = request.getfixturevalue(fixture)
        path = self.part(folder, 1)
        file = TorchFile(LocalStore(path.parent), path.name)
        state = file.value["optimizer_state_dict"]
        inner = state.get("base_optimizer_state") or state["optimizer_state_dict"]
        extent = next(file.whole(inner["state"][0]["step"]))
        data = bytearray(path.read_bytes())
        data[extent.offset] ^= 1
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match=f"{path.name}(.|\n)*step"):
            self.read_all(folder)

    def test_a_tag_that_is_gone(self, folder: Path) -> None:
        (folder / "latest").write_text("global_step9")
        with pytest.raises(NotFound, match="global_step9"):
            opened(folder)

    def test_a_tag_that_leaves_the_folder(self, folder: Path) -> None:
        (folder / "latest").write_text("../elsewhere")
        with pytest.raises(UnsafeError, match="elsewhere"):
            opened(folder)

    def test_several_tags_and_no_latest(self, folder: Path) -> None:
        (folder / "latest").unlink()
        shutil.copytree(folder / "global_step3", folder / "global_step4")
        with pytest.raises(UsageError, match="global_step3, global_step4"):
            opened(folder)

    def test_one_tag_and_no_latest(self, folder: Path) -> None:
        (folder / "latest").unlink()
        self.read_all(folder)

    @pytest.mark.parametrize(
        ("name", "what"),
        [
            ("expert_0_mp_rank_00_model_states.pt", "expert"),
        ],
    )
    def test_what_is_not_yet_read(self, folder: Path, name: str, what: str) -> None:
        path = folder / "global_step3" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        with pytest.raises(UnsupportedError, match=what):
            opened(folder)

    @pytest.mark.parametrize(
        "name",
        [
            "mp_rank_01_model_states.pt",
            "layer_0_expert_1_mp_rank_01_model_states.pt",
            "expp_rank_0_mp_rank_01_optim_states.pt",
            "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt",
            "layer_00-model_states.pt",
            "layer_00-model_00-model_states.pt",
        ],
    )
    def test_files_of_another_model_parallelism(self, folder: Path, name: str) -> None:
        (folder / "global_step3" / name).touch()
        with pytest.raises(
            IntegrityError, match=r"does not belong|is a pipeline's|mp_rank_01"
        ) as caught:
            opened(folder)
        assert caught.value.hint


def test_other_places_are_not_deepspeeds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert not DeepSpeed().find(LocalStore(tmp_path))
    assert open_source(LocalStore(tmp_path)) is None


def test_errors_survive_the_pool(chosen: Callable[[int, str], Made], tmp_path: Path) -> None:
    folder = shutil.copytree(chosen(3, "z3-hpz").checkpoint, tmp_path / "copy")
    for path in (folder / "global_step3").glob("*rank_2_mp*model*"):
        path.write_bytes(b"")
    with pytest.raises(UcformatError, match="rank_2_mp"):
        opened(folder)


def test_flat_ranges_make_few_extents(chosen: Callable[[int, str], Made]) -> None:
    source = opened(chosen(4, "z1-round-aligned").checkpoint)
    for info in source.metadata.tensor_list.tensors:
        extents = list(source.extents(info.key))
        assert len(extents) <= 4 * max(1, 2 * len(info.shape) - 1)
        assert sum(e.box.size for e in extents) == math.prod(info.shape)
