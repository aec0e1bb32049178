from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.sources.suite import SourceSuite
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.engines.pytorch.source import TorchSave
from ucformat.errors import (
    IntegrityError,
    MissingData,
    NotACheckpoint,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from ucformat.sources.pickle.optimizer import Candidate, Entry, match
from ucformat.storage.local import LocalStore
from ucformat.testing.sources import Sample

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ucformat.testing.sources import Truth

STATES = ("step", "exp_avg", "exp_avg_sq")


class Net(torch.nn.Module):
    """A tied weight, a normalisation with buffers, a frozen layer and odd shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.up = torch.nn.Linear(6, 9)
        self.norm = torch.nn.BatchNorm1d(9)
        self.down = torch.nn.Linear(9, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.down(self.norm(self.up(self.embed(x)))))
        return out


def trained(**options: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(2)
    net = Net()
    parameters: Any = net.named_parameters() if options.pop("named", False) else net.parameters()
    optimizer = torch.optim.AdamW(list(parameters), **options)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randint(11, (5,))).square().mean().backward()
        optimizer.step()
    return net, optimizer


def plain(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


def truth_of(
    net: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, prefix: str = ""
) -> Truth:
    names = {id(p): n for n, p in net.named_parameters()}
    stored = net.state_dict()
    out = {("weight", prefix + n): plain(t) for n, t in stored.items() if n != "head.weight"}
    for p, states in (optimizer.state if optimizer else {}).items():
        out |= {(s, prefix + names[id(p)]): plain(t) for s, t in states.items()}
    return out


TIED = {"head.weight": "embed.weight"}
GROUPS = [
    ["embed.weight", "up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight", "down.bias"]
]


def saved(folder: Path, value: Any, name: str = "checkpoint.pt") -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(value, folder / name)
    return folder


class TestAFlatStateDict(SourceSuite):
    @pytest.fixture
    def sample(self, tmp_path: Path) -> Sample:
        net, _ = trained()
        return Sample(
            saved(tmp_path / "m", net.state_dict()),
            "checkpoint.pt",
            "torch_save",
            truth_of(net),
            TIED,
        )


class TestAModelsFolder(SourceSuite):
    most_read = 1.3

    @pytest.fixture
    def sample(self, tmp_path: Path) -> Sample:
        net, _ = trained()
        folder = saved(tmp_path / "m", net.state_dict(), "pytorch_model.bin")
        (folder / "config.json").write_text("{}")
        return Sample(folder, ".", "torch_save", truth_of(net), TIED)

    def test_small_files_beside_it_are_assets(self, sample: Sample) -> None:
        assert set(sample.open().assets) == {"config.json"}


class TestWithAnOptimizer(SourceSuite):
    @pytest.fixture
    def sample(self, tmp_path: Path) -> Sample:
        net, optimizer = trained()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        value = {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": 3,
            "step": 17,
            "best": float("nan"),
            "loss": torch.tensor(0.5),
            "rng": {"cpu": torch.get_rng_state(), "cuda": []},
        }
        folder = saved(tmp_path / "m", value)
        return Sample(
            folder, "checkpoint.pt", "torch_save", truth_of(net, optimizer), TIED, GROUPS, 17
        )

    def test_everything_else_is_an_object(self, sample: Sample) -> None:
        objects = sample.open().objects
        assert objects["epoch"] == 3
        assert objects["best"] == {"$float": "nan"}
        assert objects["loss"]["$tensor"]["shape"] == []
        assert objects["rng"]["cpu"]["$tensor"]["dtype"] == "uint8"
        assert objects["scheduler"]["step_size"] == 3
        assert sample.open().metadata.groups[0]["lr"] == 0.001


class TestLightning(SourceSuite):
    @pytest.fixture
    def sample(self, tmp_path: Path) -> Sample:
        net, optimizer = trained(named=True)
        value = {
            "epoch": 1,
            "global_step": 2,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": {f"net.{k}": v for k, v in net.state_dict().items()},
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [],
            "callbacks": {
                "ModelCheckpoint{}": {"best_model_score": torch.tensor(0.1), "best_k_models": {}}
            },
            "hyper_parameters": {"width": 6},
        }
        folder = saved(tmp_path / "m", value, "last.ckpt")
        truth = truth_of(net, optimizer, "net.")
        groups = [["net." + n for n in GROUPS[0]]]
        return Sample(
            folder, ".", "torch_save", truth, {"net.head.weight": "net.embed.weight"}, groups, 2
        )

    def test_who_wrote_it(self, sample: Sample) -> None:
        assert sample.open().metadata.engine == {"name": "lightning", "version": "2.6.6"}


class TestShards(SourceSuite):
    most_read = 1.3

    @pytest.fixture
    def sample(self, tmp_path: Path) -> Sample:
        net, _ = trained()
        folder, whole = tmp_path / "m", net.state_dict()
        parts = {
            "pytorch_model-00001-of-00002.bin": {k: v for k, v in whole.items() if k[0] in "eh"},
            "pytorch_model-00002-of-00002.bin": {
                k: v for k, v in whole.items() if k[0] not in "eh"
            },
        }
        for name, part in parts.items():
            saved(folder, part, name)
        weight_map = {k: name for name, part in parts.items() for k in part}
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
        return Sample(folder, ".", "torch_save", truth_of(net), TIED)

    def test_without_the_index(self, sample: Sample) -> None:
        (sample.folder / "pytorch_model.bin.index.json").unlink()
        assert len(sample.open()) == len(sample.truth)
        (sample.folder / "pytorch_model-00001-of-00002.bin").unlink()
        with pytest.raises(MissingData, match=r"pytorch_model-00001-of-00002\.bin is missing"):
            sample.open()

    def test_the_index_itself_opens_and_a_shard_does_not(self, sample: Sample) -> None:
        assert len(open_checkpoint(sample.folder / "pytorch_model.bin.index.json")) == len(
            sample.truth
        )
        with pytest.raises(NotACheckpoint, match="one of 2 shards"):
            open_checkpoint(sample.folder / "pytorch_model-00001-of-00002.bin")

    def test_an_index_that_disagrees(self, sample: Sample) -> None:
        path = sample.folder / "pytorch_model.bin.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["lost"] = "pytorch_model-00001-of-00002.bin"
        path.write_text(json.dumps(index))
        with pytest.raises(MissingData, match="lacks 'lost'"):
            sample.open()


def open_value(tmp_path: Path, value: Any, name: str = "checkpoint.pt") -> Checkpoint:
    return open_checkpoint(saved(tmp_path / "m", value, name) / name)


def test_tensors_that_are_not_contiguous_and_views_of_one_storage(tmp_path: Path) -> None:
    base = torch.arange(60.0).view(3, 4, 5)
    value = {"t": base.transpose(0, 2), "cut": base[1:, ::2], "row": base[1], "same": base[1]}
    ck = open_value(tmp_path, value)
    assert ck.aliases == {"same": "row"}
    for name in ("t", "cut", "row"):
        assert ck[name].read().tobytes() == value[name].contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64, torch.complex64]
)
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    value = {
        "w": torch.randn(5, 3).to(dtype),
        "count": torch.arange(3),
        "mask": torch.tensor([True, False]),
    }
    ck = open_value(tmp_path, value)
    for name, tensor in value.items():
        assert (ck[name].info.dtype, ck[name].read().tobytes()) == (
            plain(tensor)[0],
            plain(tensor)[2],
        )


class TestWhichNames:
    """The names of tensors in dictionaries, and of what optimizers hold."""

    def test_several_modules_keep_their_prefixes(self, tmp_path: Path) -> None:
        nets = {"G": torch.nn.Linear(3, 4), "D": torch.nn.Linear(4, 1)}
        optimizers = {
            k: torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for k, n in nets.items()
        }
        for key, net in nets.items():
            net(torch.ones(2, net.in_features)).sum().backward()
            optimizers[key].step()
        value = {k: n.state_dict() for k, n in nets.items()}
        value |= {f"opt{k}": o.state_dict() for k, o in optimizers.items()}
        ck = open_value(tmp_path, value)
        assert ck.names() == ["G.weight", "G.bias", "D.weight", "D.bias"]
        assert ck.states("D.bias") == ["weight", "momentum_buffer"]
        assert [list(g["params"]) for g in ck.metadata.groups] == [
            ["G.weight", "G.bias"],
            ["D.weight", "D.bias"],
        ]

    def test_one_optimizer_of_several_modules(self, tmp_path: Path) -> None:
        one, other = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
        optimizer = torch.optim.Adam([*one.parameters(), *other.parameters()])
        other(one(torch.ones(2, 3))).sum().backward()
        optimizer.step()
        value = {
            "a": one.state_dict(),
            "b": other.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        (group,) = open_value(tmp_path, value).metadata.groups
        assert list(group["params"]) == ["a.weight", "a.bias", "b.weight", "b.bias"]

    def test_an_average_beside_the_model(self, tmp_path: Path) -> None:
        net, optimizer = trained()
        average = {k: v.clone() for k, v in net.state_dict().items()}
        ck = open_value(
            tmp_path,
            {"ema": average, "model": net.state_dict(), "optimizer": optimizer.state_dict()},
        )
        assert list(ck.metadata.groups[0]["params"]) == GROUPS[0]
        assert "ema.up.weight" in ck.names()
        assert "unnamed" not in ck.objects

    @pytest.mark.parametrize("options", [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.1}])
    def test_what_is_not_certain_keeps_its_numbers(
        self, tmp_path: Path, options: Mapping[str, float]
    ) -> None:
        net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
        net[0].requires_grad_(requires_grad=False)
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], **options)
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        path = saved(
            tmp_path / "m", {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        )
        ck = open_checkpoint(path)
        assert ck.objects["unnamed"] == ["optimizer"]
        assert list(ck.metadata.groups[0]["params"]) == [f"optimizer.{i}" for i in range(4)]
        if "momentum" in options:
            third = optimizer.state[net[2].weight]["momentum_buffer"]
            assert ck["optimizer.2", "momentum_buffer"].read().tobytes() == third.numpy().tobytes()
        names = [["1.weight", "1.bias", "2.weight", "2.bias"]]
        told = Checkpoint(TorchSave(groups={"optimizer": names}).open(LocalStore(path)))
        assert [list(g["params"]) for g in told.metadata.groups] == names
        if "momentum" in options:
            assert told["2.weight", "momentum_buffer"].read().tobytes() == third.numpy().tobytes()
            with pytest.raises(UsageError, match=r"1\.bias cannot be the entry"):
                TorchSave(groups={"optimizer": [[*names[0][1::-1], *names[0][2:]]]}).open(
                    LocalStore(path)
                )
        with pytest.raises(UsageError, match="names are given"):
            TorchSave(groups={"optimizer": [["1.weight"]]}).open(LocalStore(path))

    @pytest.mark.parametrize("wrapped", ["", "module.", "module._orig_mod."])
    def test_names_that_the_optimizer_was_given(self, tmp_path: Path, wrapped: str) -> None:
        net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
        named = [(wrapped + n, p) for n, p in net.named_parameters()]
        optimizer = torch.optim.SGD(named[2:], lr=0.1, momentum=0.9)
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        ck = open_value(tmp_path, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
        assert list(ck.metadata.groups[0]["params"]) == ["1.weight", "1.bias", "2.weight", "2.bias"]

    @pytest.mark.parametrize("named", [True, False])
    def test_an_order_that_no_shape_contradicts(self, tmp_path: Path, *, named: bool) -> None:
        """Without names the order of the module is assumed, as torch does; in two groups of one shape it is unknown."""
        net = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(3)])
        back = list(net.named_parameters())[::-1]
        optimizer = torch.optim.SGD(back if named else [p for _, p in back], lr=0.1, momentum=0.9)
        value = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        order = ["2.weight", "1.weight", "0.weight"]
        ck = open_value(tmp_path, value)
        assert list(ck.metadata.groups[0]["params"]) == (order if named else order[::-1])
        told = open_checkpoint(tmp_path / "m" / "checkpoint.pt", options={"groups": [order]})
        assert list(told.metadata.groups[0]["params"]) == order
        groups = [{"params": [n]} for n in range(3)]
        value["optimizer"] = {
            "state": {n: {"m": torch.zeros(4, 4)} for n in range(3)},
            "param_groups": groups,
        }
        assert open_value(tmp_path, value).objects["unnamed"] == ["optimizer"]

    def test_an_optimizer_alone(self, tmp_path: Path) -> None:
        _, optimizer = trained()
        ck = open_value(tmp_path, optimizer.state_dict())
        assert ck.names() == [f"optimizer.{i}" for i in range(7)]

    def test_tensors_and_values_side_by_side(self, tmp_path: Path) -> None:
        values = {"epoch": 3, "note": {"a": [1]}, "more": {}, "name": "x", "z": 1}
        ck = open_value(tmp_path, {"w": torch.ones(2, 3), **values})
        assert ck.names() == ["w"]
        assert ck.objects == values


class TestWhatIsRefused:
    def test_files_of_before_torch_1_6(self, tmp_path: Path) -> None:
        torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        with pytest.raises(UnsupportedError, match=r"before version 1\.6") as error:
            open_checkpoint(tmp_path / "old.pt")
        assert "save it again" in str(error.value)

    def test_torchscript(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
            for name in ("data.pkl", "constants.pkl", "code/x.py"):
                archive.writestr(f"m/{name}", b"\x80\x02}.")
        with pytest.raises(UnsupportedError, match="TorchScript"):
            open_checkpoint(tmp_path / "m.pt")

    def test_a_whole_model(self, tmp_path: Path) -> None:
        with pytest.raises(
            UnsupportedError, match=r"holds a whole torch\.nn\.modules\.linear\.Linear"
        ):
            open_value(tmp_path, torch.nn.Linear(2, 2))
        with pytest.raises(UnsafeError, match=r"names tests\.engines"):
            open_value(tmp_path, Net())

    @pytest.mark.parametrize(
        "value", [{"a": 1}, [1], torch.ones(3), {"step": torch.tensor(3)}, None]
    )
    def test_what_holds_no_state_dict(self, tmp_path: Path, value: Any) -> None:
        with pytest.raises(UsageError, match="holds no state dict"):
            open_value(tmp_path, value)

    def test_several_files_in_a_folder(self, tmp_path: Path) -> None:
        for name in ("epoch=1.ckpt", "epoch=2.ckpt"):
            saved(tmp_path / "m", {"w": torch.ones(2)}, name)
        with pytest.raises(
            UsageError, match=r"several files of torch.save: epoch=1\.ckpt, epoch=2\.ckpt"
        ):
            open_checkpoint(tmp_path / "m")

    def test_a_model_cut_over_ranks(self, tmp_path: Path) -> None:
        for rank in range(2):
            saved(tmp_path / "m", {"w": torch.ones(2)}, f"consolidated.0{rank}.pth")
        with pytest.raises(UnsupportedError, match="sharded across 2 ranks"):
            open_checkpoint(tmp_path / "m")
        with pytest.raises(
            NotACheckpoint, match=r"one of 2 numbered files, such as consolidated\.01\.pth"
        ):
            open_checkpoint(tmp_path / "m" / "consolidated.00.pth")
        (tmp_path / "m" / "consolidated.01.pth").unlink()
        assert open_checkpoint(tmp_path / "m").names() == ["w"]

    def test_files_that_are_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "a.bin").write_bytes(b"\x7fELF" + bytes(100))
        for place in (tmp_path, tmp_path / "a.bin"):
            with pytest.raises(NotACheckpoint):
                open_checkpoint(place)
        (tmp_path / "b.ckpt").write_bytes(b"nothing")
        with pytest.raises(IntegrityError, match=r"is not a file of torch\.save"):
            open_checkpoint(tmp_path / "b.ckpt")

    def test_an_optimizer_that_contradicts_itself(self, tmp_path: Path) -> None:
        value = {"state": {5: {"m": torch.ones(2)}}, "param_groups": [{"params": [0, 1]}]}
        with pytest.raises(IntegrityError, match="states of 5"):
            open_value(tmp_path, value)
        with pytest.raises(IntegrityError, match="twice"):
            open_value(tmp_path, {"state": {}, "param_groups": [{"params": [0, 0]}]})


def test_parameters_in_no_order_are_told_apart_by_shapes() -> None:
    candidates = [Candidate("a", (2, 3)), Candidate("b", (3,)), Candidate("c", ())]
    assert match([[Entry((3,))], [Entry(()), Entry((2, 3))]], candidates, ordered=False) == [
        ["b"],
        ["c", "a"],
    ]
    assert match([[Entry((3,))]], [*candidates, Candidate("d", (3,))], ordered=False) is None
