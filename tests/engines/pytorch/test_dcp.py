"""`torch.distributed.checkpoint` with our storage: what is saved, what loads, and what is refused."""

from __future__ import annotations

import inspect
import json
import pickle
import threading
from concurrent.futures import Future
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.testing._internal.distributed.checkpoint_utils import Rot13Example

import ucformat
import ucformat.torch as ucf
from tests.patience import PATIENCE
from tests.torch.models import ModelSpec, Net, build_net
from ucformat.catalog.catalog import Catalog
from ucformat.errors import Conflict, StateMismatch, UnsupportedError, UsageError
from ucformat.format.shard import write_shard
from ucformat.jobs.documents import write_documents
from ucformat.torch.saving.options import SaveOptions
from ucformat.torch.saving.save import save_local
from ucformat.torch.state.local import LocalState, local_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

SPELLINGS = ("nested", "flat")


class Small:
    """A tiny trained model with two groups, one of them with its own learning rate."""

    def __init__(self, seed: int, *, swapped: bool = False) -> None:
        spec = ModelSpec(vocab=11, hidden=6, heads=2, head_dim=3, inner=5, layers=1, seed=seed)
        self.model: Net = build_net(spec)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "lr": 0.01 * (seed + 1)},
            {"params": others, "lr": 0.5, "betas": (0.5, 0.6)},
        ]
        self.optimizer = torch.optim.AdamW(groups[::-1] if swapped else groups)
        self.model(torch.arange(4)[None]).square().sum().backward()
        self.optimizer.step()

    def state(self, spelling: str) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=spelling == "flat")
        model, optim = get_state_dict(self.model, self.optimizer, options=options)
        return {
            "model": model,
            "optim": optim,
            "step": 7,
            "notes": {"rate": 0.1, "of": ["a", None], "at": (1, [2])},
        }

    def restore(self, state: dict[str, Any], spelling: str) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=spelling == "flat")
        dicts = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
        set_state_dict(self.model, self.optimizer, options=options, **dicts)

    def held(self) -> dict[str, Any]:
        """All tensors and hyper-parameters by the names of the parameters."""
        names = {id(p): n for n, p in self.model.named_parameters()}
        out: dict[str, Any] = dict(self.model.state_dict())
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                out |= {f"{names[id(p)]}/{k}": v for k, v in self.optimizer.state[p].items()}
                out |= {
                    f"{names[id(p)]}/group/{k}": v
                    for k, v in group.items()
                    if k not in ("params", "param_names")
                }
        return out


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k] for k, v in a.items()
    )


def save(state: dict[str, Any], url: Path, **options: Any) -> ucformat.Checkpoint:
    dcp.save(state, storage_writer=ucf.Writer(url, **options))
    return ucformat.open(url)


def load(state: dict[str, Any], url: Path, planner: Any = None, **options: Any) -> ucf.Reader:
    reader = ucf.Reader(url, **options)
    dcp.load(state, storage_reader=reader, planner=planner)
    return reader


def failure_of(url: Path, state: dict[str, Any], **options: Any) -> Any:
    """What a load fails of, which DCP wraps."""
    with pytest.raises(CheckpointException) as caught:
        load(state, url, **options)
    return caught.value.failures[0][0]


@pytest.mark.parametrize(
    ("form", "saved", "loaded"), [*product(("zarr", "packed"), SPELLINGS, SPELLINGS)]
)
def test_a_state_comes_back_in_any_spelling(
    tmp_path: Path, form: str, saved: str, loaded: str
) -> None:
    source, target = Small(0), Small(1, swapped=True)
    save(source.state(saved), tmp_path / "ck", form=form)
    state = target.state(loaded) | {"step": 0, "notes": {"rate": 0.0, "of": [], "at": (0, [0])}}
    load(state, tmp_path / "ck")
    assert (state["step"], state["notes"]) == (7, source.state(saved)["notes"])
    target.restore(state, loaded)
    assert equal(target.held(), source.held())


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_it_writes_what_save_writes(tmp_path: Path, spelling: str) -> None:
    source = Small(0)
    facts: dict[str, Any] = {"step": 3, "run": "r", "metrics": {"loss": 1.5}, "config": {"lr": [1]}}
    ours = save(source.state(spelling), tmp_path / "dcp", **facts)
    state = {
        "model": source.model,
        "optim": source.optimizer,
        "step": 7,
        "notes": source.state("nested")["notes"],
    }
    ucf.save(state, tmp_path / "own", **facts)
    own = ucformat.open(tmp_path / "own")
    assert {t: ours[t.name, t.state][...].tobytes() for t in ours.tensors} == {
        t: own[t.name, t.state][...].tobytes() for t in own.tensors
    }
    assert dict(ours.tensors) == dict(own.tensors)
    assert {frozenset(g.params): g.options for g in ours.manifest.groups} == {
        frozenset(g.params): g.options for g in own.manifest.groups
    }
    assert ours.objects == own.objects
    for fact in (*facts, "producer", "aliases", "layout"):
        assert getattr(ours.manifest, fact) == getattr(own.manifest, fact), fact


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_it_loads_what_save_wrote(tmp_path: Path, spelling: str) -> None:
    source, target = Small(0), Small(1)
    ucf.save(
        {"net": source.model, "opt": source.optimizer, "step": 7, "notes": {"rate": 2.5}},
        tmp_path / "ck",
    )
    state = target.state(spelling)
    state = {"app": {"model": state["model"], "whatever": state["optim"]}, "notes": {"rate": 0.0}}
    reader = load(state, tmp_path / "ck")
    assert state["notes"] == {"rate": 2.5}
    target.restore({"model": state["app"]["model"], "optim": state["app"]["whatever"]}, spelling)
    assert equal(target.held(), source.held())
    assert reader.nbytes > 0


def test_weights_alone_in_any_place(tmp_path: Path) -> None:
    source = Small(0).model.state_dict()
    ck = save({"model": source}, tmp_path / "ck")
    for wrap in (lambda sd: sd, lambda sd: {"model": sd}, lambda sd: {"app": {"model": sd}}):
        target = Small(1).model.state_dict()
        load(wrap(target), tmp_path / "ck")
        assert equal(dict(target), dict(source))
    one = {"norm.weight": torch.zeros(6)}
    assert load(one, tmp_path / "ck", verify="never").nbytes == 24
    renamed = {"last.weight": torch.zeros(6)}
    load(renamed, tmp_path / "ck", rename={r"norm\.(.*)": r"last.\1"})
    assert torch.equal(renamed["last.weight"], source["norm.weight"])
    opened = {"norm.weight": torch.zeros(6)}
    dcp.load(opened, storage_reader=ucf.Reader(ck))
    assert torch.equal(opened["norm.weight"], one["norm.weight"])


def test_the_whole_state_without_a_template(tmp_path: Path) -> None:
    source = Small(0)
    state = source.state("nested") | {
        "stages": [{"done": True}, {"done": False}],
        "odd.key": {"$x": 1, "a.b": {}},
    }
    ck = save(state, tmp_path / "ck")
    found = _load_state_dict_from_keys(storage_reader=ucf.Reader(tmp_path / "ck"))
    assert equal(found["model"], dict(source.model.state_dict()))
    assert found["optim"]["state"].keys() == state["optim"]["state"].keys()
    assert [g["lr"] for g in found["optim"]["param_groups"]] == [
        g.options["lr"] for g in ck.manifest.groups
    ]
    assert [g["params"] for g in found["optim"]["param_groups"]] == [
        list(g.params) for g in ck.manifest.groups
    ]
    assert found["stages"] == state["stages"]
    assert found["odd.key"] == {"$x": 1}
    assert found["notes"] == {"rate": 0.1, "of": ["a", None], "at": (1, [2])}
    some = _load_state_dict_from_keys({"model"}, storage_reader=ucf.Reader(tmp_path / "ck"))
    assert some.keys() == {"model"}


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    net = build_net(
        ModelSpec(vocab=11, hidden=6, heads=2, head_dim=3, inner=5, layers=1, tied=True)
    )
    for form in ("zarr", "packed"):
        ck = save({"model": net.state_dict()}, tmp_path / form, form=form)
        assert ck.aliases == {"head.weight": "embed.weight"}
        assert "head.weight" not in ck.names()
        target = {k: torch.zeros_like(v) for k, v in net.state_dict().items()}
        load({"model": target}, tmp_path / form)
        assert equal(target, dict(net.state_dict()))


def test_numbers_for_names_and_tensors_for_rates(tmp_path: Path) -> None:
    """What an optimizer's own `state_dict` says: parameters by number, and a learning rate that is a tensor."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([p], lr=torch.tensor(0.25))
    p.grad = torch.ones(3)
    optimizer.step()
    ck = save({"optimizer": optimizer.state_dict()}, tmp_path / "ck")
    assert {str(k) for k in ck.tensors} >= {"optimizer.state.0.exp_avg (weight)"}
    assert ck.manifest.groups == ()
    fresh = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=torch.tensor(9.0))
    fresh.param_groups[0]["params"][0].grad = torch.zeros(3)
    fresh.step()
    state = {"optimizer": fresh.state_dict()}
    state["optimizer"]["state"] = {str(k): v for k, v in state["optimizer"]["state"].items()}
    load(state, tmp_path / "ck")
    group = state["optimizer"]["param_groups"][0]
    assert group["params"] == [0]
    assert group["betas"] == (0.9, 0.999)
    assert torch.equal(group["lr"], torch.tensor(0.25))
    assert torch.equal(state["optimizer"]["state"]["0"]["exp_avg"], optimizer.state[p]["exp_avg"])


def test_a_rate_is_what_the_program_has_for_it(tmp_path: Path) -> None:
    def optim(rate: Any) -> dict[str, Any]:
        return {
            "state": {"w": {"exp_avg": torch.zeros(2)}},
            "param_groups": [{"params": ["w"], "lr": rate}],
        }

    weights = {"w": torch.zeros(2)}
    for saved, wanted in (
        (0.5, torch.tensor(1.0)),
        (torch.tensor(0.5), 1.0),
        (torch.tensor(0.5), torch.tensor(1.0)),
    ):
        url = tmp_path / f"{type(saved).__name__}-{type(wanted).__name__}"
        save({"model": weights, "optim": optim(saved)}, url)
        state = {"model": weights, "optim": optim(wanted)}
        load(state, url)
        rate = state["optim"]["param_groups"][0]["lr"]
        assert type(rate) is type(wanted)
        assert rate == 0.5


def test_an_fp32_weight_is_read_from_the_master(tmp_path: Path) -> None:
    low, high = torch.full((4,), 1 / 3, dtype=torch.bfloat16), torch.full((4,), 1 / 3)
    save_local(
        LocalState((local_of("w", "weight", low), local_of("w", "master", high))),
        SaveOptions(str(tmp_path / "ck")),
    )
    for wanted in (low, high):
        state = {"model": {"w": torch.zeros_like(wanted)}}
        load(state, tmp_path / "ck")
        assert torch.equal(state["model"]["w"], wanted)


def test_all_that_has_another_dtype_is_told_at_once(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(2), "b": torch.ones(2)}, "n": torch.ones(2)}, tmp_path / "ck")
    target = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.float64)}
    state = {"model": target, "n": torch.zeros(2)}
    error = failure_of(tmp_path / "ck", state, cast=False)
    assert isinstance(error, StateMismatch)
    assert "a (weight) is bfloat16, in the checkpoint float32" in error.message
    assert "b (weight) is float64, in the checkpoint float32" in error.message
    assert "cast=False" in str(error.hint)
    assert not any(t.any() for t in (*target.values(), state["n"]))
    load(state, tmp_path / "ck")
    assert all(t.all() for t in (*target.values(), state["n"]))


def test_what_is_missing_and_what_may_be(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(2)}, "step": 3}, tmp_path / "ck")
    state: dict[str, Any] = {
        "model": {"a": torch.zeros(2), "b": torch.zeros(2)},
        "step": 0,
        "more": 5,
    }
    assert "Missing key in checkpoint state_dict: model.b" in str(
        failure_of(tmp_path / "ck", state)
    )
    assert "Size mismatch" in str(failure_of(tmp_path / "ck", {"model": {"a": torch.zeros(3)}}))
    load(state, tmp_path / "ck", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert state["model"]["a"].tolist() == [1, 1]
    assert (state["step"], state["more"]) == (3, 5)


def test_hyper_parameters_are_taken_where_the_names_meet_and_the_rest_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fine-tuning: the program has more parameters, other groups and more hyper-parameters than were saved."""
    groups = [
        {"params": ["a"], "lr": 0.5, "betas": (0.1, 0.2)},
        {"params": ["b"], "lr": 0.25, "betas": (0.3, 0.4)},
    ]
    weights = {"a": torch.ones(2), "b": torch.ones(2)}
    save({"model": weights, "optim": {"state": {}, "param_groups": groups}}, tmp_path / "ck")
    new = {"lr": 9.0, "betas": (0.0, 0.0), "fused": True}
    mine = [{"params": ["new"], **new}, {"params": ["b", "other"], **new}, {"params": ["a"], **new}]
    state = {"optim": {"state": {}, "param_groups": mine}}
    load(state, tmp_path / "ck")
    assert [g["lr"] for g in mine] == [9.0, 0.25, 0.5]
    assert [g["betas"] for g in mine] == [(0.0, 0.0), (0.3, 0.4), (0.1, 0.2)]
    assert [g["params"] for g in mine] == [["new"], ["b", "other"], ["a"]]
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    for kept in ("new: lr", "new: betas", "other: lr", "a: fused"):
        assert kept in told
    report = ucf.load({"optim": {"state": {}, "param_groups": mine}}, tmp_path / "ck", strict=False)
    assert report.missing == (
        "group 0 of optim: the hyper-parameters of new",
        "group 1 of optim: the hyper-parameters of other",
    )
    save({"model": weights, "optim": {"state": {}, "param_groups": groups}}, tmp_path / "clash")
    both = {"optim": {"state": {}, "param_groups": [{"params": ["a", "b"], "lr": 1.0}]}}
    assert "in groups with different values" in failure_of(tmp_path / "clash", both).message


class Custom:
    """Nothing that JSON has."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    __hash__ = None  # type: ignore[assignment]


def test_pickled_objects_need_trust(tmp_path: Path) -> None:
    save({"w": torch.ones(2), "mine": Custom()}, tmp_path / "ck")
    state = {"w": torch.zeros(2), "mine": None}
    error = failure_of(tmp_path / "ck", state)
    assert isinstance(error, StateMismatch)
    assert "the object mine: the value is a pickle" in error.message
    assert not state["w"].any()
    load(state, tmp_path / "ck", trust=True)
    assert state["mine"] == Custom()


def test_a_value_does_not_silently_take_the_place_of_a_tensor(tmp_path: Path) -> None:
    save({"x": 3, "y": (torch.ones(2),)}, tmp_path / "ck")
    error = failure_of(tmp_path / "ck", {"x": torch.zeros(())})
    assert "the object x: a int cannot replace a Tensor" in str(error)
    state = {"y": (torch.zeros(2),)}
    load(state, tmp_path / "ck")
    assert torch.equal(state["y"][0], torch.ones(2))


def refusal(save: Callable[[], object]) -> Any:
    """What a save fails of, which DCP wraps."""
    with pytest.raises(CheckpointException) as caught:
        save()
    return caught.value.failures[0][0]


@pytest.mark.parametrize("form", ["zarr", "packed"])
def test_a_place_is_written_again_unless_told(tmp_path: Path, form: Any) -> None:
    for value in (1.0, 2.0):
        save({"w": torch.full((2,), value)}, tmp_path / "ck", form=form)
        assert ucformat.open(tmp_path / "ck")["w"][...].tolist() == [value, value]
    error = refusal(
        lambda: save({"w": torch.zeros(2)}, tmp_path / "ck", form=form, overwrite=False)
    )
    assert isinstance(error, Conflict)
    assert (
        "Checkpoint already exists" in error.message
    )  # by which programs know it of FileSystemWriter
    assert ucformat.open(tmp_path / "ck")["w"][...].tolist() == [2, 2]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_the_stock_writer_wrote_is_not_ours_to_replace(
    tmp_path: Path, overwrite: bool
) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "ck"))
    before = sorted(p.name for p in (tmp_path / "ck").iterdir())
    error = refusal(lambda: save({"w": torch.zeros(2)}, tmp_path / "ck", overwrite=overwrite))
    assert isinstance(error, Conflict)
    assert "Checkpoint already exists" in error.message
    assert sorted(p.name for p in (tmp_path / "ck").iterdir()) == before


def test_what_is_protected_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCP_CATALOG", f"sqlite:///{tmp_path}/catalog.db")
    first = save({"w": torch.ones(2)}, tmp_path / "ck")
    zeros = {"w": torch.zeros(2)}
    protect: list[tuple[Callable[[Catalog], object], Callable[[Catalog], object], str]] = [
        (lambda c: c.hold(first.id, "audit"), lambda c: c.release(first.id), "held: audit"),
        (lambda c: c.alias("best", first.id), lambda c: c.unalias("best"), "alias best"),
        (lambda c: c.tag(first.id, "paper"), lambda c: None, "tag paper"),
    ]
    for begin, end, why in protect:
        with Catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog:
            begin(catalog)
        assert why in refusal(lambda: save(zeros, tmp_path / "ck")).message
        with pytest.raises(Conflict, match=why):
            ucf.save(zeros, tmp_path / "ck", overwrite=True)
        assert ucformat.open(tmp_path / "ck").id == first.id
        with Catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog:
            end(catalog)
            write_documents(catalog)
    monkeypatch.setenv("UCP_CATALOG", "none")  # what is known of it lies beside it, too
    assert "tag paper" in refusal(lambda: save({"w": torch.zeros(2)}, tmp_path / "ck")).message


def test_the_arguments_of_the_stock_classes_are_taken(tmp_path: Path) -> None:
    ours, stock = (inspect.signature(c).parameters for c in (ucf.Writer, dcp.FileSystemWriter))
    for (name, mine), (named, theirs) in zip(ours.items(), stock.items(), strict=False):
        assert (name, mine.kind) == (named, theirs.kind)
        assert name == "path" or mine.default == theirs.default
    assert [*inspect.signature(ucf.Reader).parameters][:2] == [
        *inspect.signature(dcp.FileSystemReader).parameters
    ]
    formats = SerializationFormat
    for threads, form in product((1, 3), ("zarr", "packed")):
        where = tmp_path / f"{form}{threads}"
        options: Any = {"form": form, "shard_bytes": 64, "chunk_bytes": 32}
        writer = ucf.Writer(
            where, False, False, threads, 5, True, False, None, formats.TORCH_SAVE, **options
        )
        state = {f"t{i}": torch.arange(100.0) + i for i in range(4)}
        dcp.save(state, storage_writer=writer)
        back = {k: torch.zeros(100) for k in state}
        dcp.load(back, storage_reader=ucf.Reader(where, ExtensionRegistry()))
        assert equal(back, state)
        with pytest.raises(CheckpointException, match="already exists"):
            dcp.save(state, storage_writer=writer)


def test_threads_write_shards_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()
    gate = threading.Barrier(3, timeout=PATIENCE)

    def write(*args: Any) -> Any:
        if len(names) < 3:  # until so many threads have met
            names.add(threading.current_thread().name)
            gate.wait()
        return write_shard(*args)

    monkeypatch.setattr("ucformat.torch.saving.write.write_shard", write)
    state = {f"t{i}": torch.arange(100.0) + i for i in range(3)}
    save(state, tmp_path / "ck", thread_count=3)
    back = {k: torch.zeros(100) for k in state}
    load(back, tmp_path / "ck")
    assert equal(back, state)
    assert len(names) == 3


@pytest.mark.parametrize("cached", [False, True])
def test_the_writer_stages_what_is_saved_in_the_background(tmp_path: Path, cached: bool) -> None:
    writer = ucf.Writer(cache_staged_state_dict=cached)
    state = {"w": torch.zeros(3), "notes": {"n": 1}}
    held: set[int] = set()
    for step in (1, 2):
        state["w"].fill_(step)
        done = dcp.async_save(state, checkpoint_id=tmp_path / str(step), storage_writer=writer)
        state["w"].fill_(-1)  # training goes on
        assert isinstance(done, Future)
        done.result(60)
        if writer.state_dict_cache is not None:
            held.add(writer.state_dict_cache["w"].data_ptr())
        assert ucformat.open(tmp_path / str(step))["w"][...].tolist() == [step] * 3
    assert len(held) == cached  # the same memory again
    assert pickle.loads(pickle.dumps(writer)).state_dict_cache is None  # noqa: S301


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"_extensions": [Rot13Example()], "step": 3, "form": "packed"}, "no step, form"),
        ({"_extensions": [object()]}, "object"),
        ({"serialization_format": SerializationFormat.SAFETENSORS}, "SAFETENSORS"),
        ({"thread_count": 0}, "thread_count"),
    ],
)
def test_what_the_writer_cannot_do_is_refused_by_name(
    tmp_path: Path, options: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ucf.Writer(tmp_path, **options)


def test_the_checkpoint_id_of_dcp_is_the_place(tmp_path: Path) -> None:
    writer = ucf.Writer(form="packed")
    for step in (1, 2):
        dcp.save(
            {"w": torch.full((2,), float(step))},
            checkpoint_id=tmp_path / str(step),
            storage_writer=writer,
        )
        assert writer.saved is not None
        assert writer.saved.id == ucformat.open(tmp_path / str(step)).id
    reader = ucf.Reader(tmp_path / "1")
    state = {"w": torch.zeros(2)}
    dcp.load(state, checkpoint_id=tmp_path / "2", storage_reader=reader)
    assert state["w"].tolist() == [2, 2]
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=ucf.Writer())
    assert isinstance(caught.value.failures[0][0], UsageError)
    assert ucf.Writer.validate_checkpoint_id(tmp_path)
    assert not ucf.Writer.validate_checkpoint_id("abc://x")
    assert ucf.Reader.validate_checkpoint_id(tmp_path / "1")
    assert not ucf.Reader.validate_checkpoint_id(tmp_path)
    assert not ucf.Reader.validate_checkpoint_id("abc://x")


def test_a_place_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    assert "does not exist, or is empty" in str(
        failure_of(tmp_path / "none", {"w": torch.zeros(2)})
    )


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not supported"):
        ucf.Writer(tmp_path, form="tar")  # type: ignore[arg-type]
    for value, kind in ((ucf.PerRank(1), UsageError), (lambda: 0, UnsupportedError)):
        with pytest.raises(CheckpointException) as caught:
            save({"w": torch.ones(2), "x": value}, tmp_path / "ck")
        assert isinstance(caught.value.failures[0][0], kind)
    assert not (tmp_path / "ck" / "manifest.json").exists()


def test_a_writer_goes_to_another_process(tmp_path: Path) -> None:
    there = pickle.dumps(ucf.Writer(tmp_path / "ck", form="packed", step=4, config={"a": 1}))
    writer = pickle.loads(there)  # noqa: S301
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    manifest = ucformat.open(tmp_path / "ck").manifest
    assert (manifest.step, manifest.config, manifest.sidecar is not None) == (4, {"a": 1}, True)


class BytesPlanner(dcp.DefaultSavePlanner):
    """A planner that hands out bytes, and no live values."""

    @property
    def lookup_object(self) -> Any:
        raise AttributeError("lookup_object")

    def resolve_data(self, write_item: Any) -> Any:
        value = dcp.default_planner.find_state_dict_object(self.state_dict, write_item.index)
        return self.transform_object(write_item, value)


def test_a_planner_that_hands_out_bytes(tmp_path: Path) -> None:
    source = Small(0)
    dcp.save(
        source.state("nested"), storage_writer=ucf.Writer(tmp_path / "a"), planner=BytesPlanner()
    )
    other = save(source.state("nested"), tmp_path / "b")
    found = ucformat.open(tmp_path / "a")
    assert found.objects == other.objects
    assert found.manifest.groups == other.manifest.groups
    assert dict(found.tensors) == dict(other.tensors)


def test_the_metadata_are_few_and_lazy(tmp_path: Path) -> None:
    save(Small(0).state("nested"), tmp_path / "ck", chunk_bytes=16, shard_bytes=16)
    metadata = ucf.Reader(tmp_path / "ck").read_metadata()
    entries = metadata.state_dict_metadata
    assert len(entries["model.embed.weight"].chunks) == 1
    assert entries["embed.weight"].size == (11, 6)
    assert "optim.state.embed.weight.exp_avg" in entries
    assert "optim.state.embed.weight.momentum" not in entries
    assert "nothing" not in entries
    assert set(entries) == set(metadata.planner_data)
    assert json.dumps(sorted(map(str, entries)))


def test_saves_and_loads_have_ids_as_those_of_the_stock_classes(tmp_path: Path) -> None:
    writer, reader = ucf.Writer(tmp_path / "ck"), ucf.Reader(tmp_path / "ck")
    before = writer.save_id
    dcp.save({"a": torch.zeros(4)}, storage_writer=writer, no_dist=True)
    found = reader.read_metadata().storage_meta
    assert found is not None
    assert before is None
    assert found.save_id == writer.save_id == ucformat.open(tmp_path / "ck").id
    assert found.load_id == reader.load_id
    reader.reset()
    assert reader.load_id != found.load_id
