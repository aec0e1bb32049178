"""DCP checkpoints that we write, read by PyTorch itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader

import ucformat
from tests.exporters.reading import differences, globals_of, state_of
from tests.fakes import ODD, FakeSource, random_array, same
from tests.sources.suite import DATA
from tests.tiers import rounds
from tests.torch.ranks import Ranks
from ucformat.checkpoint import Checkpoint
from ucformat.errors import IntegrityError, UnsupportedError, UsageError
from ucformat.exporters.pickle import ALLOWED, Global
from ucformat.exporters.registry import EXPORTERS
from ucformat.jobs.export import export
from ucformat.storage.local import LocalStore
from ucformat.testing import ExporterSuite

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning"
)  # without ranks
KEPT = sorted(p.name for p in (DATA / "dcp").iterdir() if (p / "ckpt" / ".metadata").exists())
PROGRAM = Ranks("tests.engines.pytorch.export_program")
GROUPS = (
    {"params": ["embed.weight"], "lr": 0.1, "betas": [0.9, 0.95], "state": {"step": 7}},
    {"params": ["norm.bias"], "lr": 0.2, "betas": [0.9, 0.95], "state": {"step": 7}},
)
#: Of a model whose parameters are those of the groups.
STATES = {
    ("weight", "embed.weight"): random_array((5, 3), "bfloat16", 1),
    ("weight", "norm.bias"): random_array((3,), "bfloat16", 2),
    **{
        (state, name): random_array(shape, "float32", seed)
        for seed, state in enumerate(("master", "exp_avg", "exp_avg_sq"), 3)
        for name, shape in (("embed.weight", (5, 3)), ("norm.bias", (3,)))
    },
}


def fake(folder: Path, arrays: Any = None, **facts: Any) -> Checkpoint:
    arrays = {(name, state): a for (state, name), a in STATES.items()} if arrays is None else arrays
    return Checkpoint(FakeSource.write(LocalStore(folder), arrays, **facts))


class TestDcp(ExporterSuite):
    kind = "dcp"

    def load(self, place: Path) -> dict[tuple[str, str], Any]:
        FileSystemReader(place).read_metadata()  # what follows raises no Exception if there is none
        state = state_of(place, place.with_name(f"{place.name}.loaded"))
        weights = {(name, "weight"): t.numpy() for name, t in state["model"].items()}
        states = {
            (name, state): t.numpy()
            for name, found in state.get("optim", {}).get("state", {}).items()
            for state, t in found.items()
        }
        return weights | states


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("how", ["direct", "universal"])
def test_what_came_from_dcp_goes_back_as_it_was(name: str, how: str, tmp_path: Path) -> None:
    source = DATA / "dcp" / name / "ckpt"
    middle = source if how == "direct" else ucformat.convert(source, tmp_path / "universal").url
    done = export(middle, tmp_path / "dcp", "dcp", max_item_bytes=100, max_file_bytes=5000)
    assert done.left_out == ()
    assert done.verified
    before, after = (FileSystemReader(f).read_metadata() for f in (source, tmp_path / "dcp"))
    beside = after.planner_data.keys() - before.planner_data.keys()
    assert {name: after.planner_data[name] for name in before.planner_data} == before.planner_data
    assert bool(beside) == (source / "meta.pt").exists(), (
        "what Lightning keeps in a file of its own is exported, too"
    )
    assert after.version == before.version
    first_state, second_state = (
        state_of(source, tmp_path / "a"),
        state_of(tmp_path / "dcp", tmp_path / "b"),
    )
    for name in {path.partition(".")[0] for path in beside}:
        del second_state[name]
    assert differences(first_state, second_state) == []
    found = {Global(*g) for g in globals_of(tmp_path / "dcp")}
    assert found <= ALLOWED
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 1
    again, first = ucformat.open(tmp_path / "dcp"), ucformat.open(source)
    assert first.tensors.items() <= again.tensors.items()
    assert again.metadata.groups == first.metadata.groups
    if not beside:
        assert again.tensors == first.tensors
        assert dict(again.objects) == dict(first.objects)


@pytest.mark.parametrize(
    "how",
    [
        {"tied": False, "experts": 1, "dtype": "float32", "flat": False},
        {"tied": True, "experts": 3, "dtype": "bfloat16", "flat": True},
    ],
    ids=["dense", "tied-moe-bf16-flat"],
)
def test_fsdp2_resumes_at_other_world_sizes(how: dict[str, Any], tmp_path: Path) -> None:
    (truth, losses), *_ = PROGRAM.run("train", 2, tmp_path / "train", **how)
    export(
        tmp_path / "train" / "dcp", tmp_path / "out", "dcp", max_item_bytes=90, max_file_bytes=3000
    )
    for world in (2, 3):
        found, after, values = PROGRAM.run(
            "resume", world, tmp_path / f"{world}", checkpoint=str(tmp_path / "out"), **how
        )[0]
        assert found == truth, [k for k in truth if found[k] != truth[k]]
        assert values == {"step": 2, "seen": [0, 1, 2], "note": ("a", None), "nested": [{"x": 1.5}]}
        stock = PROGRAM.run(
            "resume",
            world,
            tmp_path / f"{world}",
            checkpoint=str(tmp_path / "train" / "dcp"),
            **how,
        )[0]
        assert after == stock[1]
        if world == 2:
            assert after == losses


def test_names_are_those_that_get_state_dict_gives(tmp_path: Path) -> None:
    facts = {
        "groups": GROUPS,
        "aliases": {"head.weight": "embed.weight"},
        "objects": {"sched": {"last": 3}},
    }
    export(
        fake(tmp_path / "src", **facts),
        tmp_path / "out",
        "dcp",
        states=["master", "exp_avg", "exp_avg_sq"],
    )
    model = torch.nn.ParameterDict({"x": torch.zeros(5, 3), "y": torch.zeros(3)})
    optimizer = torch.optim.AdamW([{"params": [model["x"]]}, {"params": [model["y"]]}])
    for p in model.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    names = ["embed.weight", "norm.bias"]
    groups = [
        {**{k: v for k, v in g.items() if k != "params"}, "params": [n]}
        for g, n in zip(optimizer.state_dict()["param_groups"], names, strict=True)
    ]
    for group in groups:
        del group["weight_decay"], group["eps"]  # which the source does not have
    state = {
        "model": {
            **dict(zip(names, model.values(), strict=True)),
            "head.weight": torch.zeros(5, 3),
        },
        "optim": {
            "state": {
                n: dict(optimizer.state[p]) for n, p in zip(names, model.values(), strict=True)
            },
            "param_groups": groups,
        },
        "sched": {"last": 0},
    }
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state["sched"] == {"last": 3}
    assert torch.equal(state["model"]["head.weight"], state["model"]["embed.weight"])
    for name in names:
        assert same(state["model"][name].detach().numpy(), STATES["master", name])
        assert same(state["optim"]["state"][name]["exp_avg_sq"].numpy(), STATES["exp_avg_sq", name])
        assert state["optim"]["state"][name]["step"].item() == 7
    first, second = state["optim"]["param_groups"]
    assert (first["params"], first["lr"], first["betas"]) == (["embed.weight"], 0.1, (0.9, 0.95))
    assert (second["params"], second["lr"], second["decoupled_weight_decay"]) == (
        ["norm.bias"],
        0.2,
        True,
    )


def test_tied_names_share_their_bytes(tmp_path: Path) -> None:
    source = fake(tmp_path / "src", aliases={"head.weight": "embed.weight"})
    export(source, tmp_path / "out", "dcp")
    stored = {
        k.fqn: v for k, v in FileSystemReader(tmp_path / "out").read_metadata().storage_data.items()
    }
    assert stored["model.head.weight"] == stored["model.embed.weight"]


def test_the_layout_of_torchtitan(tmp_path: Path) -> None:
    options: Any = {"model_key": "", "optimizer_key": "optimizer", "flat_optimizer": True}
    source = DATA / "dcp" / "wrapped-bf16" / "ckpt"
    export(source, tmp_path / "out", "dcp", **options)
    keys = FileSystemReader(tmp_path / "out").read_metadata().planner_data
    first = ucformat.open(source)
    name = next(k.name for k in first.tensors if k.state == "exp_avg")
    assert keys[name] == (name,)
    assert keys[f"optimizer.state.{name}.exp_avg"] == ("optimizer", f"state.{name}.exp_avg")
    assert keys[f"optimizer.param_groups.{name}.lr"] == ("optimizer", f"param_groups.{name}.lr")
    again = ucformat.open(tmp_path / "out")
    assert {k: again[k][...].tobytes() for k in again.tensors if k in first.tensors} == {
        k: first[k][...].tobytes() for k in first.tensors
    }


def test_a_cast_keeps_the_layout(tmp_path: Path) -> None:
    source = DATA / "dcp" / "titan" / "ckpt"
    export(source, tmp_path / "out", "dcp", cast="float64")
    keys = [FileSystemReader(f).read_metadata().planner_data for f in (source, tmp_path / "out")]
    assert keys[0] == keys[1]


def test_a_state_of_torch_save_whose_parameters_are_numbered(tmp_path: Path) -> None:
    """The paths of its states have integers, of which DCP makes texts."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "ddp.pt")
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    stock = FileSystemReader(tmp_path / "stock").read_metadata()
    ucformat.convert(tmp_path / "ddp.pt", tmp_path / "universal")
    for source in ("ddp.pt", "universal"):
        out = tmp_path / f"of-{source}"
        export(ucformat.open(tmp_path / source), out, "dcp")
        assert FileSystemReader(out).read_metadata().planner_data == stock.planner_data
        again = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters()).state_dict()
        again["state"] = {
            n: {k: torch.zeros_like(v) for k, v in s.items()}
            for n, s in state["optimizer"]["state"].items()
        }
        dcp.load({"optimizer": again}, checkpoint_id=out, no_dist=True)
        for number, states in state["optimizer"]["state"].items():
            assert all(torch.equal(again["state"][number][k], v) for k, v in states.items())


def test_what_has_no_place_is_named(tmp_path: Path) -> None:
    objects = {
        "ok": 1,
        "model": {"code": {"$opaque": "gASVAA=="}},
        "loss": {"$class": "os.system", "$args": ["ls"]},
    }
    done = export(
        fake(tmp_path / "src", groups=GROUPS, objects=objects),
        tmp_path / "out",
        "dcp",
        states="weight",
    )
    assert set(done.left_out) == {
        *(f"{state} of 2 tensors" for state in ("master", "exp_avg", "exp_avg_sq")),
        "the value model.code: a value of the form $opaque is not written to a pickle",
        "the value loss: an instance of os.system is not written to a pickle",
        "the optimizer groups",
    }
    assert b"system" not in b"".join(p.read_bytes() for p in (tmp_path / "out").glob("*.distcp"))


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "float32", "shape": [9], "data": "AAAA"},
        {"dtype": "Size", "shape": [], "data": ""},
    ],
)
def test_a_tensor_of_a_value_that_is_none(tensor: Any, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="tensor of shape"):
        export(fake(tmp_path / "src", objects={"x": {"$tensor": tensor}}), tmp_path / "out", "dcp")


def test_two_entries_of_one_name(tmp_path: Path) -> None:
    source = fake(tmp_path / "src", objects={"model": {"embed.weight": 1}})
    with pytest.raises(UnsupportedError, match="two entries of the target would be"):
        export(source, tmp_path / "out", "dcp")


def test_options_are_checked() -> None:
    for options in (
        {"max_file_bytes": 0},
        {"max_item_bytes": -1},
        {"optimizer": "SGD"},
        {"shards": 1},
    ):
        with pytest.raises(UsageError):
            EXPORTERS["dcp"](**options)


def test_only_the_metadata_is_written_last(tmp_path: Path) -> None:
    source = fake(tmp_path / "src")
    target = EXPORTERS["dcp"]().target(source, list(source.tensors.values()))
    assert [f.key for f in target.files if f.last] == [".metadata"]
    assert target.files[-1].last


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=4).map(tuple),
            st.sampled_from(
                ["float32", "bfloat16", "bool", "int64", "float8_e4m3fn", "uint16", "complex64"]
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 300),
    st.integers(1, 3000),
)
@settings(max_examples=rounds(15, 100), deadline=None)
def test_any_shape_in_any_chunks(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[tuple[tuple[int, ...], str]],
    item: int,
    file: int,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    arrays = {
        (f"t{i}", "weight"): random_array(shape, dtype, i)
        for i, (shape, dtype) in enumerate(tensors)
    }
    source = fake(folder / "src", arrays)
    export(source, folder / "out", "dcp", max_item_bytes=item, max_file_bytes=file, model_key="")
    state = {
        n: torch.zeros(a.shape, dtype=getattr(torch, str(a.dtype))) for (n, _), a in arrays.items()
    }
    dcp.load(state, checkpoint_id=folder / "out", no_dist=True)
    for (name, _), a in arrays.items():
        assert state[name].reshape(-1).view(torch.uint8).numpy().tobytes() == a.tobytes()
    again = ucformat.open(folder / "out")
    assert all(same(np.asarray(again[n]), a) for (n, _), a in arrays.items() if a.size)


def test_every_dtype(tmp_path: Path) -> None:
    source = fake(tmp_path / "src", ODD)
    export(source, tmp_path / "out", "dcp")
    again = ucformat.open(tmp_path / "out")
    assert {tuple(k) for k in again.tensors} == set(ODD)
    assert all(same(np.asarray(again[k]), a) for k, a in ODD.items())


def test_known_scalars_beside_stored_ones(tmp_path: Path) -> None:
    """Their archives differ in size, and all have one dtype and shape."""
    arrays = {(f"s{i}", "weight"): random_array((), "float32", i) for i in range(3)}
    known = {
        f"k{i}": {"$tensor": {"dtype": "float32", "shape": [], "data": "AACAPw=="}}
        for i in range(3)
    }
    export(fake(tmp_path / "src", arrays, objects=known), tmp_path / "out", "dcp")
    found = state_of(tmp_path / "out", tmp_path / "state")
    assert [found[k].item() for k in known] == [1.0, 1.0, 1.0]
    assert all(same(found["model"][name].numpy(), a) for (name, _), a in arrays.items())
