from __future__ import annotations

import json
import pickletools
import random
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ucformat.torch
from tests.engines.pytorch.test_torch_save import Net, trained
from tests.fakes import ODD, FakeSource
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import Conflict, UcformatError, UnsupportedError, UsageError
from ucformat.exporters.base import Span
from ucformat.exporters.pickle import ALLOWED, SavedTensor, Storage
from ucformat.exporters.zip_file import torch_archive
from ucformat.jobs.convert import convert
from ucformat.jobs.export import export, plan_export
from ucformat.reading.readable import GroupPlace, path_from_json
from ucformat.storage.local import LocalStore
from ucformat.testing import ExporterSuite

if TYPE_CHECKING:
    from pathlib import Path


def equal(a: Any, b: Any, path: str = "") -> None:
    """Assert that two states are equal, tensors bit for bit, and of the same types."""
    assert type(a) is type(b) or {type(a), type(b)} == {dict, OrderedDict}, (path, a, b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert _bits(a) == _bits(b), path
    elif isinstance(a, dict):
        assert {(type(k), k) for k in a} == {(type(k), k) for k in b}, path
        for key in a:
            equal(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            equal(x, y, f"{path}[{i}]")
    else:
        assert a == b or (a != a and b != b), (path, a, b)


def _bits(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def loaded(path: Path) -> Any:
    """What `torch.load` reads, which allows no more than tensors and plain values."""
    return torch.load(path, weights_only=True)


class TestTorch(ExporterSuite):
    kind, name = "torch", "model.pt"

    def load(self, place: Path) -> dict[tuple[str, str], Any]:
        return {(name, "weight"): tensor.numpy() for name, tensor in loaded(place).items()}


def whole() -> dict[str, Any]:
    net, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "step": 17,
        "best": float("nan"),
        "loss": torch.tensor(0.5),
        "values": (
            1,
            [2.5, None, True],
            {"a": "b", 3: -(2**80), (1, "x"): 4},
            {1, 2},
            1 + 2j,
            b"\0\xff",
        ),
        "dtype": torch.bfloat16,
        "rng": {"cpu": torch.get_rng_state(), "cuda": [torch.ones(2)]},
        "large": [torch.randn(200, 100), {"w": (torch.randn(200, 100), "x")}],
        "$odd": {"$x": 1},
    }


def lightning() -> dict[str, Any]:
    net, optimizer = trained(named=True)
    return {
        "epoch": 1,
        "global_step": 2,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"net.{k}": v for k, v in net.state_dict().items()},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
    }


def two_groups() -> dict[str, Any]:
    net = Net()
    named = list(net.named_parameters())
    groups = [
        {"params": [p for _, p in named[:3]], "lr": 0.1},
        {"params": [p for _, p in named[3:]], "lr": 0.2},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1)
    net(torch.randint(11, (5,))).square().mean().backward()
    optimizer.step()
    return {"net": net.state_dict(), "opts": [optimizer.state_dict()]}


def stateless() -> dict[str, Any]:
    net = Net()
    return {
        "model": net.state_dict(),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1).state_dict(),
        "step": 3,
    }


STATES = {f.__name__: f for f in (whole, lightning, two_groups, stateless)}
STATES["flat"] = lambda: dict(trained()[0].state_dict())


class TestAWholeState:
    @pytest.fixture(params=STATES)
    def state(self, request: pytest.FixtureRequest, tmp_path: Path) -> Any:
        state = STATES[request.param]()
        torch.save(state, tmp_path / "source.pt")
        return state

    def test_it_comes_back(self, state: Any, tmp_path: Path) -> None:
        done = export(tmp_path / "source.pt", tmp_path / "out.pt", "torch", nested=True)
        assert not done.left_out
        equal(loaded(tmp_path / "out.pt"), state)

    def test_it_comes_back_through_a_universal_checkpoint(self, state: Any, tmp_path: Path) -> None:
        convert(tmp_path / "source.pt", tmp_path / "universal")
        export(tmp_path / "universal", tmp_path / "out.pt", "torch", nested=True)
        equal(loaded(tmp_path / "out.pt"), state)

    def test_our_source_finds_the_same(self, state: Any, tmp_path: Path) -> None:
        export(tmp_path / "source.pt", tmp_path / "out.pt", "torch", nested=True)
        a, b = open_checkpoint(tmp_path / "source.pt"), open_checkpoint(tmp_path / "out.pt")
        assert a.tensors == b.tensors
        assert dict(a.objects) == dict(b.objects)
        assert list(a.metadata.groups) == list(b.metadata.groups)
        assert a.aliases == b.aliases


def test_an_optimizer_loads_it_and_goes_on(tmp_path: Path) -> None:
    net, optimizer = trained()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "u")
    export(tmp_path / "u", tmp_path / "b.pt", "torch", nested=True)
    other = Net()
    again = torch.optim.AdamW(other.parameters())
    state = loaded(tmp_path / "b.pt")
    other.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    losses = []
    for model, optim in ((net, optimizer), (other, again)):
        torch.manual_seed(5)
        for _ in range(3):
            optim.zero_grad()
            loss = model(torch.randint(11, (5,))).square().mean()
            loss.backward()
            optim.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(-(2**40), 2**40), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(max_size=6), values, max_size=4))
def test_any_plain_values_come_back(tmp_path: Path, state: dict[str, Any]) -> None:
    state = {**state, "model": {"w": torch.arange(6.0)}}
    for name in ("index", "unnamed", "value"):  # names that sources use
        state.pop(name, None)
    torch.save(state, tmp_path / "a.pt")
    export(tmp_path / "a.pt", tmp_path / "b.pt", "torch", nested=True, overwrite=True)
    equal(loaded(tmp_path / "b.pt"), state)


class TestWeights:
    def test_every_dtype(self, tmp_path: Path) -> None:
        weights = {k: a for k, a in ODD.items() if k[1] == "weight"}
        weights["u", "weight"] = np.arange(5, dtype=np.uint64)
        source = Checkpoint(
            FakeSource.write(LocalStore(tmp_path / "s"), weights, aliases={"head": "embed.weight"})
        )
        done = export(source, tmp_path / "x/weights.pth", "torch")
        found = loaded(tmp_path / "x/weights.pth")
        assert list(found) == [*(n for n, _ in weights), "head"]
        for (name, _), array in weights.items():
            assert str(found[name].dtype) == f"torch.{array.dtype.name}"
            assert _bits(found[name]) == array.tobytes()
            assert tuple(found[name].shape) == array.shape
        assert found["head"].data_ptr() == found["embed.weight"].data_ptr()
        assert not done.left_out

    def test_what_is_left_out_is_told(self, tmp_path: Path) -> None:
        torch.save(whole(), tmp_path / "a.pt")
        left = export(tmp_path / "a.pt", tmp_path / "b.pt", "torch").left_out
        assert {
            "exp_avg of 7 tensors",
            "the hyper-parameters of the optimizer",
            "the value scheduler",
        } <= set(left)

    def test_several_states_need_a_nested_state(self, tmp_path: Path) -> None:
        torch.save(whole(), tmp_path / "a.pt")
        with pytest.raises(UsageError, match="several states"):
            export(tmp_path / "a.pt", tmp_path / "b.pt", "torch", states=["weight", "exp_avg"])
        with pytest.raises(UsageError, match=r"'x\.npz' is not the name of a file of torch\.save"):
            plan_export(tmp_path / "a.pt", "torch", name="x.npz")


def test_a_cast_keeps_the_nesting(tmp_path: Path) -> None:
    torch.save(lightning(), tmp_path / "a.pt")
    export(
        tmp_path / "a.pt", tmp_path / "b.pt", "torch", nested=True, states="weight", cast="float64"
    )
    found = loaded(tmp_path / "b.pt")
    assert found["state_dict"]["net.up.weight"].dtype == torch.float64
    assert found["epoch"] == 1


def test_a_state_without_paths_is_that_of_pytorchs_functions(tmp_path: Path) -> None:
    groups = ({"lr": 0.1, "params": ["embed.weight", "norm.bias"]},)
    source = FakeSource.write(LocalStore(tmp_path / "s"), ODD, groups=groups, objects={"step": 4})
    export(Checkpoint(source), tmp_path / "x.pt", "torch", nested=True)
    found = loaded(tmp_path / "x.pt")
    assert found.keys() == {"model", "optim", "step"}
    assert found["optim"]["param_groups"] == [{"params": ["embed.weight", "norm.bias"], "lr": 0.1}]
    assert found["optim"]["state"].keys() == {"embed.weight"}
    assert found["optim"]["state"]["embed.weight"].keys() == {"master", "exp_avg", "step"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_dcp_saved_comes_back(tmp_path: Path) -> None:
    net, optimizer = trained()
    state = {
        "model": net.state_dict(),
        "optim": optimizer.state_dict(),
        "epoch": 2,
        "list": [1, {"a": torch.ones(3)}],
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    export(tmp_path / "dcp", tmp_path / "x.pt", "torch", nested=True)
    equal(loaded(tmp_path / "x.pt"), state)


def test_what_we_saved_in_training_comes_back(tmp_path: Path) -> None:
    net, optimizer = trained()
    ucformat.torch.save(
        {"model": net, "optim": optimizer, "epoch": 2, "x": (1, "a")}, tmp_path / "u"
    )
    export(tmp_path / "u", tmp_path / "x.pt", "torch", nested=True)
    found = loaded(tmp_path / "x.pt")
    equal(found["model"], net.state_dict())
    assert found["epoch"] == 2
    assert found["x"] == (1, "a")
    assert found["optim"]["param_groups"][0]["betas"] == optimizer.param_groups[0]["betas"]
    equal(found["optim"]["state"]["up.weight"], dict(optimizer.state[net.up.weight]))


def test_values_without_a_place_are_named(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(3)},
        "fine": 1,
        "bad": {"a": 2, "when": slice(1, 2)},
        "list": [slice(1, 2)],
    }
    torch.save(state, tmp_path / "a.pt")
    done = export(tmp_path / "a.pt", tmp_path / "b.pt", "torch", nested=True)
    assert sorted(done.left_out) == ["the value bad.when (a slice)", "the value list[0] (a slice)"]
    equal(loaded(tmp_path / "b.pt"), {"model": state["model"], "fine": 1, "bad": {"a": 2}})


def test_tensors_whose_path_is_lost_are_listed(tmp_path: Path) -> None:
    torch.save(whole(), tmp_path / "a.pt")
    source = open_checkpoint(tmp_path / "a.pt")
    metadata = source.metadata
    paths = {k: p for k, p in metadata.paths.items() if k.name != "up.bias"}
    source.source.metadata = metadata.replace(paths=paths)
    with pytest.raises(UnsupportedError, match=r"up\.bias \(weight\), up\.bias \(step\)"):
        export(source, tmp_path / "b.pt", "torch", nested=True)
    assert not (tmp_path / "b.pt").exists()


def test_a_position_in_a_list_allocates_nothing(tmp_path: Path) -> None:
    source = FakeSource.write(LocalStore(tmp_path / "s"), ODD)
    metadata = source.metadata
    for position in (1, -1, 7, 2**31, 2**62, 10**30):
        paths = {
            key: (("list", n),) for n, key in enumerate(source.offsets, -2 if position < 0 else 0)
        }
        paths[next(iter(paths))] = (("list", position),)
        source.metadata = metadata.replace(paths=paths)
        with pytest.raises(
            UcformatError,
            match=r"does not record all items of the list list|where another value is",
        ):
            export(Checkpoint(source), tmp_path / "x.pt", "torch", nested=True)
    source.metadata = metadata.replace(
        paths={key: (("list", n),) for n, key in enumerate(reversed(list(source.offsets)))}
    )
    export(Checkpoint(source), tmp_path / "x.pt", "torch", nested=True)
    assert len(loaded(tmp_path / "x.pt")["list"]) == len(ODD)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict | list | tuple | set):
        return [
            leaf
            for v in (value.values() if isinstance(value, dict) else value)
            for leaf in _leaves(v)
        ]
    return [value]


parts = st.integers(-2, 3) | st.sampled_from(
    [
        "model",
        "optim",
        "state",
        "param_groups",
        "params",
        "1",
        "$int:1",
        "$int:--1",
        "$int:" + "1" * 5000,
        10**30,
        "²",
    ]
)
paths = st.lists(parts, max_size=5)
odd_values = st.recursive(
    st.none() | st.integers(0, 3) | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["$tuple", "$dict", "$set", "$ref", "$tensor", "$dtype", "params", "1"]
            ),
            inner,
        )
    ),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    st.lists(paths, min_size=len(ODD), max_size=len(ODD)),
    st.lists(
        st.tuples(paths, odd_values, st.lists(st.sampled_from(["0", "1", "a"]), max_size=2)),
        max_size=2,
    ),
    st.dictionaries(
        st.sampled_from(["model", "optim", "state", "value", "param_groups"]), odd_values
    ),
)
def test_paths_of_any_kind_end_in_an_error_or_in_a_state_with_all_tensors(
    tmp_path: Path,
    at: list[list[Any]],
    groups: list[tuple[list[Any], Any, list[str]]],
    objects: dict[str, Any],
) -> None:
    source = FakeSource.write(LocalStore(tmp_path / "s"), ODD, objects=objects)
    keys = source.offsets
    source.metadata = source.metadata.replace(
        paths={key: (path_from_json(path),) for key, path in zip(keys, at, strict=True) if path},
        groups=tuple({"params": ["a", "b"], "state": state} for _, state, _ in groups),
        places=tuple(GroupPlace(path_from_json(path), tuple(names)) for path, _, names in groups),
    )
    try:
        export(Checkpoint(source), tmp_path / "b.pt", "torch", nested=True, overwrite=True)
    except UcformatError:
        return
    tensors = [
        leaf for leaf in _leaves(loaded(tmp_path / "b.pt")) if isinstance(leaf, torch.Tensor)
    ]
    assert len({id(tensor) for tensor in tensors}) >= len(ODD)


def test_pickles_name_nothing_else(tmp_path: Path) -> None:
    torch.save(whole(), tmp_path / "a.pt")
    export(tmp_path / "a.pt", tmp_path / "b.pt", "torch", nested=True)
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        data = archive.read("b/data.pkl")
    named = {
        str(arg)
        for op, arg, _ in pickletools.genops(data)
        if op.name in ("GLOBAL", "STACK_GLOBAL", "INST")
    }
    assert named <= {f"{g.module} {g.name}" for g in ALLOWED}


def test_a_checkpoint_is_not_replaced_by_a_file_of_its_own(tmp_path: Path) -> None:
    torch.save(whole(), tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()
    with pytest.raises(Conflict, match="a file of the source"):
        export(tmp_path / "a.pt", tmp_path / "a.pt", "torch", overwrite=True)
    assert (tmp_path / "a.pt").read_bytes() == before
    convert(tmp_path / "a.pt", tmp_path / "u")
    with pytest.raises(Conflict, match="universal checkpoint, in which an export writes nothing"):
        export(tmp_path / "a.pt", tmp_path / "u/a.pt", "torch")


def test_a_safetensors_file_is_written_alone(tmp_path: Path) -> None:
    net, _ = trained()
    (tmp_path / "m").mkdir()
    torch.save(net.state_dict(), tmp_path / "m/pytorch_model.bin")
    (tmp_path / "m/config.json").write_text("{}")
    done = export(tmp_path / "m", tmp_path / "x.safetensors", "safetensors", max_shard_bytes=1)
    assert {p.name for p in tmp_path.iterdir()} == {"m", "x.safetensors"}
    assert done.left_out == ("the asset config.json",)
    assert (
        open_checkpoint(tmp_path / "x.safetensors").tensors
        == open_checkpoint(tmp_path / "m").tensors
    )


@pytest.mark.matrix
def test_more_than_65535_tensors(tmp_path: Path) -> None:
    storage = Storage(Span("int8", 0, ()), b"")
    parts = torch_archive(
        {str(i): SavedTensor(Storage(storage.span, b""), (0,)) for i in range(65_600)}
    )
    data = b"".join(
        p if isinstance(p, bytes) else p.make(()) for p in parts if not isinstance(p, Span)
    )
    (tmp_path / "many.pt").write_bytes(data)
    assert len(loaded(tmp_path / "many.pt")) == 65_600


@pytest.mark.matrix
def test_more_than_four_gigabytes(tmp_path: Path) -> None:
    rng = random.Random(3)
    with (tmp_path / "large.safetensors").open("wb") as file:
        half = (1 << 31) + 1001
        a, b = (
            {"dtype": "U8", "shape": [half], "data_offsets": [at, at + half]} for at in (0, half)
        )
        header = json.dumps({"a": a, "b": b})
        file.write(len(header).to_bytes(8, "little") + header.encode())
        begin = file.tell()
        file.truncate(begin + 2 * half)
        spots = {rng.randrange(2 * half): rng.randrange(1, 256) for _ in range(100)}
        for spot, value in spots.items():
            file.seek(begin + spot)
            file.write(bytes([value]))
    export(tmp_path / "large.safetensors", tmp_path / "large.pt", "torch")
    found = torch.load(tmp_path / "large.pt", weights_only=True, mmap=True)
    for spot, value in spots.items():
        assert found["ab"[spot // half]][spot % half].item() == value
    parts = (
        found[name][at : at + (1 << 26)].numpy() for name in "ab" for at in range(0, half, 1 << 26)
    )
    assert sum(int(np.count_nonzero(part)) for part in parts) == len(spots)
