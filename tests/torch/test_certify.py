"""Certificates: what all ranks hold is what was saved, or they say what is not, and where."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ucformat
from tests.tiers import rounds
from tests.torch.ranks import Ranks
from tests.torch.running import run
from tests.torch.specs import LAYOUTS, RECIPES
from ucformat.errors import NotCertified, StateMismatch, UsageError
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import TensorInfo
from ucformat.torch import Certificate, Manager, Rng, certify, load, save
from ucformat.torch.loading import certify as module

if TYPE_CHECKING:
    from pathlib import Path

RANKS = Ranks("tests.torch.certify_program")
State = dict[str, Any]


def training(*, seed: int = 0, steps: int = 2) -> State:
    """A small training that has done some steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(steps):
        model(torch.randn(4, 7)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": Rng(),
        "done": steps,
    }


def texts(certificate: Certificate, verdict: str) -> list[str]:
    return [str(entry) for entry in getattr(certificate, verdict)]


@pytest.fixture(params=["zarr", "packed", "safetensors"])
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    url = str(tmp_path / "ck")
    save(training(), url, form=request.param, step=2)
    return url


def test_a_restored_training_is_certified(saved: str) -> None:
    state = training(seed=1, steps=0)
    report = load(state, saved, certify=True)
    certificate = report.certificate
    assert certificate
    assert {(e.name, e.state) for e in certificate.equal} == set(ucformat.open(saved).tensors)
    assert all(e.ranks == (0,) for e in certificate.equal)
    assert certificate.values > 10
    assert (certificate.left, certificate.step) == (0, 2)
    assert certificate.checked() is certificate


def test_equal_tensors_are_not_read(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = training()
    load(state, saved)

    def refuse(_: Any, matched: Any, *__: Any) -> None:
        assert not matched

    monkeypatch.setattr(module, "read_staged", refuse)
    assert certify(state, saved)


def test_nothing_is_changed_by_looking(saved: str) -> None:
    state = training(seed=1, steps=0)
    before = {k: v.clone() for k, v in state["model"].state_dict().items()}
    certificate = certify(state, saved)
    assert not certificate
    assert all(torch.equal(v, before[k]) for k, v in state["model"].state_dict().items())
    assert not state["optimizer"].state
    assert (state["done"], state["scheduler"].last_epoch) == (0, 0)


def test_each_kind_of_difference_is_told(saved: str) -> None:
    state = training()
    load(state, saved)
    model, optimizer = state["model"], state["optimizer"]
    with torch.no_grad():
        model[0].weight[3, 4] += 1
    optimizer.state[model[1].weight]["exp_avg"].zero_()
    del optimizer.state[model[1].bias]
    state["scheduler"].last_epoch = 7
    optimizer.param_groups[0]["lr"] = 3.0
    torch.rand(1)
    state["more"] = torch.zeros(2)
    certificate = certify(state, saved)
    assert not certificate
    assert [e[:3] for e in certificate.different] == [
        ("0.weight", "weight", (0,)),
        ("1.weight", "exp_avg", (0,)),
        ("the hyper-parameter lr of group 0 of optimizer", "", (0,)),
        ("the object scheduler", "", (0,)),
        ("the per-rank value rng", "", (0,)),
    ]
    assert "the element at [3, 4] is" in certificate.different[0].detail
    assert "15 elements differ" in certificate.different[1].detail
    assert [e[:3] for e in certificate.missing] == [("more", "weight", (0,))]
    assert [e[:2] for e in certificate.uninitialised] == [
        ("1.bias", state) for state in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert certificate.unexpected == ()
    with pytest.raises(NotCertified, match=r"0\.weight \(weight\) on rank 0: the element") as info:
        certificate.checked()
    assert info.value.certificate is certificate
    assert "never initialised: 1.bias (exp_avg)" in str(info.value)


def test_what_no_rank_holds_is_told_and_may_be_left(tmp_path: Path) -> None:
    state = {**training(), "ema": {"average": torch.randn(3)}}
    save(state, tmp_path / "ck")
    del state["ema"]
    certificate = certify(state, tmp_path / "ck")
    assert [e[:2] for e in certificate.unexpected] == [("ema.average", "weight")]
    assert certify(state, tmp_path / "ck", leave="ema")
    with pytest.raises(NotCertified, match=r"held by no rank: ema\.average"):
        load(state, tmp_path / "ck", certify=True)
    assert load(state, tmp_path / "ck", certify=True, leave="ema")


def test_there_must_be_something_to_compare(saved: str) -> None:
    with pytest.raises(UsageError, match="no rank has anything in its state"):
        certify({}, saved)


def test_generators_of_a_rank_that_was_not_there(tmp_path: Path) -> None:
    for certified, lines in RANKS.run("an_additional_rank", 2, tmp_path):
        assert certified
        assert lines == ["the per-rank value rng on rank 1: it differs"]


@pytest.mark.parametrize("wrong", [0, 1])
def test_ranks_that_are_wrong_about_their_parts(tmp_path: Path, wrong: int) -> None:
    """Both hold, they say, the same half: it is as it was saved, and yet nobody holds the other."""
    for lines in RANKS.run("wrong_place", 2, tmp_path, wrong=wrong):
        assert lines == ["w (weight): no rank holds some of its elements"]


def test_states_of_parameters_that_the_optimizer_does_not_have(saved: str) -> None:
    state = training()
    load(state, saved)
    state["optimizer"] = torch.optim.AdamW(state["model"][1].parameters())
    certificate = certify(state, saved)
    assert [e.name for e in certificate.unexpected if e.state] == ["0.bias"] * 3 + ["0.weight"] * 3
    assert [e.name for e in certificate.uninitialised] == ["1.bias"] * 3 + ["1.weight"] * 3


def test_weights_alone(saved: str) -> None:
    state = {"model": training(seed=1)["model"]}
    report = load(state, saved, certify=True)
    assert report.certificate
    assert len(report.certificate.equal) == 4
    assert report.certificate.left == len(ucformat.open(saved).tensors) - 4


def test_a_cast_is_told_and_compared_after_it(tmp_path: Path) -> None:
    save({"model": {"a": torch.randn(40, 30), "b": torch.randn(3)}}, tmp_path / "ck")
    state = {"model": {"a": torch.zeros(40, 30, dtype=torch.bfloat16), "b": torch.zeros(3)}}
    report = load(state, tmp_path / "ck", cast=True, certify=True)
    assert report.certificate
    [entry] = report.certificate.cast
    assert str(entry) == "a (weight) on rank 0: it is bfloat16, in the checkpoint float32"
    certificate = certify(state, tmp_path / "ck")
    assert not certificate
    assert not certificate.different
    state["model"]["a"][7, 8] += 1
    certificate = certify(state, tmp_path / "ck", cast=True)
    assert [e.name for e in certificate.different] == ["a"]
    assert not certificate


def test_zeros_of_other_signs_differ(tmp_path: Path) -> None:
    save({"model": {"a": torch.zeros(3)}}, tmp_path / "ck")
    certificate = certify({"model": {"a": -torch.zeros(3)}}, tmp_path / "ck")
    assert "the bytes 00000080, in the checkpoint the bytes 00000000" in str(
        certificate.different[0]
    )


def test_shapes_that_differ(tmp_path: Path) -> None:
    save({"model": {"a": torch.zeros(3)}}, tmp_path / "ck")
    certificate = certify({"model": {"a": torch.zeros(4)}}, tmp_path / "ck")
    assert texts(certificate, "different") == [
        "a (weight) on rank 0: it is [4], in the checkpoint [3]"
    ]


def test_files_of_others_are_compared_without_fingerprints(tmp_path: Path) -> None:
    state = training()
    torch.save({"model": state["model"].state_dict()}, tmp_path / "ck.pt")
    assert certify({"model": state["model"]}, tmp_path / "ck.pt")
    with torch.no_grad():
        state["model"][1].bias[2] = 0.5
    assert "[2] is 0.5" in str(certify({"model": state["model"]}, tmp_path / "ck.pt").different[0])


def test_the_catalog_tells(tmp_path: Path, saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ucformat.catalog.catalog import Catalog

    database = str(tmp_path / "catalog.db")
    monkeypatch.setenv("UCP_CATALOG", database)
    state = training(seed=1)
    with Catalog(database) as catalog:
        catalog.record(ucformat.open(saved).manifest, saved)
        assert not certify(state, saved)
        load(state, saved, certify=True)
        entry = catalog.get(saved)
        assert entry.certified is not None
        assert entry.certified.ok
        assert entry.certified.document["layout"] == {"world": 1}
        assert [e.detail["ok"] for e in catalog.events(saved) if e.action == "certify"] == [
            True,
            False,
        ]


def test_a_manager_certifies_by_one_option(tmp_path: Path) -> None:
    state = training()
    with Manager(tmp_path, certify=True, signals=()) as manager:
        manager.save(2, state)
        report = manager.restore_latest(training(seed=1, steps=0))
    assert report is not None
    assert report.certificate


def test_a_fault_of_the_program_does_not_restore_an_older_checkpoint(tmp_path: Path) -> None:
    """A hook that runs after the load changes a weight: nothing is wrong with the checkpoint."""
    state = training()
    with Manager(tmp_path, certify=True, signals=()) as manager:
        manager.save(1, state)
        manager.save(2, state)

        def halved(module: torch.nn.Module, _: Any) -> None:
            with torch.no_grad():
                module.bias.mul_(0.5)

        state["model"][1].register_load_state_dict_post_hook(halved)
        with pytest.raises(NotCertified, match=r"step-00000002:\n  different: 1\.bias \(weight\)"):
            manager.restore_latest(state)


def test_a_background_writer_must_write_what_training_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ucformat.torch import async_save
    from ucformat.torch.saving import background

    stage = background.stage

    def staged_wrongly(state: Any, buffer: Any, pool: Any) -> Any:
        tensors, slots = stage(state, buffer, pool)
        start, _ = slots[0]
        buffer.memory[start + 5] ^= 1
        return tensors, slots

    monkeypatch.setattr(background, "stage", staged_wrongly)
    for form in ("zarr", "packed", "safetensors"):
        url = tmp_path / form
        async_save(training(), url, form=form).wait()
        handle = async_save(training(), tmp_path / f"{form}2", form=form, certify=True)
        with pytest.raises(NotCertified, match=r"not what the ranks held .*: 0\.weight \(weight\)"):
            handle.wait()
        assert not (tmp_path / f"{form}2" / "ucformat.json").exists()


def test_strict_says_what_must_be_complete(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(2), "b": torch.ones(2)}}, tmp_path / "ck")
    state: State = {
        "model": {"a": torch.zeros(2), "c": torch.zeros(2)},
        "epoch": 0,
    }
    with pytest.raises(StateMismatch, match=r"missing: c \(weight\)"):
        load(state, tmp_path / "ck")
    with pytest.raises(StateMismatch, match=r"missing: c \(weight\)") as info:
        load(state, tmp_path / "ck", strict="weights")
    assert "epoch" not in str(info.value)
    report = load(state, tmp_path / "ck", strict=["a"], leave="b")
    assert "c (weight)" in report.missing
    assert "the object epoch" in report.missing
    assert state["model"]["a"].tolist() == [1, 1]
    del state["model"]["c"]
    assert load(state, tmp_path / "ck", strict="weights", leave="b")


def test_names_must_be_a_pattern(tmp_path: Path) -> None:
    for names in ({"layers": 3}, {"*.*": 1}, {"layers.*": "x"}, {"layers.*": True}):
        with pytest.raises(UsageError, match="is not a pattern with one star and a number"):
            save(training(), tmp_path / "ck", names=names)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"gives 0\.weight the number -1"):
        save(training(), tmp_path / "ck", names={"*": -1})


def test_in_any_layout_the_rank_that_has_spoilt_an_element_is_named(tmp_path: Path) -> None:
    for rows in RANKS.run("spoilt", 4, tmp_path, rounds=rounds(12, 200)):
        assert rows[0] == (True, [], [])
        assert len(rows) > 10
        for positive, changed, found in rows[1:]:
            assert positive is not bool(changed)
            assert found == sorted(changed)


@pytest.mark.matrix
def test_what_ranks_alone_hold_that_do_not_take_part(tmp_path: Path) -> None:
    *found, none = RANKS.run("partly", 4, tmp_path)
    assert none == []
    for rows in found:
        assert rows == [(name, (), "no rank holds some of its elements") for name in ("1.1", "1.2")]


def test_a_rank_that_does_not_ask_for_something_hides_nothing(tmp_path: Path) -> None:
    for rows in RANKS.run("unlike", 2, tmp_path):
        refused, unexpected, positive, lacking = rows
        assert "unexpected: b (weight)" in refused
        assert "unexpected: the object notes.y" in refused
        assert set(unexpected) == {"b (weight)", "the object notes.y"}
        assert not positive
        assert lacking == ["b", "the object notes.y"]


@given(st.data())
def test_boxes_that_overlap_cover_what_they_have_together(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    boxes, covered = [], np.zeros(shape, np.bool_)
    for _ in range(data.draw(st.integers(0, 6))):
        start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        sizes = (data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
        boxes.append(Box(start, tuple(sizes)))
        covered[tuple(map(slice, boxes[-1].start, boxes[-1].stop))] = True
    info = TensorInfo("a", "weight", "float32", shape)
    assert module._covers(info, boxes) is bool(covered.all())


#: Of the layouts into which a checkpoint of FSDP2 and TP is loaded.
TARGETS = ("fsdp2-1", "fsdp2-2", "fsdp2-3", "tp-2", "pp-2-dp-2", "ddp-2")
SPOILT = {
    "element": [("layers.0.up.weight", "weight")],
    "moment": [("layers.0.up.weight", "exp_avg")],
    "layers": [("layers.0.up.weight", "weight"), ("layers.1.up.weight", "weight")],
}


@pytest.mark.front("tp-2", "fsdp2-2")
@pytest.mark.parametrize("layout", TARGETS)
def test_what_one_rank_has_spoilt_is_named_under_any_layout(
    tmp_path: Path, common: Path, layout: str
) -> None:
    world, laid = LAYOUTS[layout]
    recipe = {**RECIPES["bf16-adamw"], "model": {"layers": 2}}
    source = str(tmp_path / "ck")
    saver = {"actions": [{"train": 2}, {"save": source}], "layout": LAYOUTS["fsdp2-2-tp-2"][1]}
    run(4, [recipe | saver], tmp_path / "save")
    # of a pipeline the rank that has both layers, or for what is in the first one that has this
    rank = world - 1 if "pp" not in layout else 0
    jobs = []
    for what in SPOILT:
        if what == "layers" and "pp" in layout:
            continue  # each stage has one of them
        actions = [
            {"load": source},
            {"certify": source, "path": str(tmp_path / f"{what}-good.json")},
            {"spoil": what, "rank": rank},
            {"certify": source, "path": str(tmp_path / f"{what}-bad.json")},
        ]
        jobs.append(recipe | {"layout": laid, "actions": actions})
    run(world, jobs, tmp_path / "load")
    for what, keys in SPOILT.items():
        if what == "layers" and "pp" in layout:
            continue
        good, bad = (
            json.loads((tmp_path / f"{what}-{n}.json").read_text()) for n in ("good", "bad")
        )
        assert good["verdict"]
        assert good["layout"]["world"] == world
        assert not bad["verdict"]
        assert [(e["name"], e["state"], e["ranks"]) for e in bad["different"]] == [
            (*key, str(rank)) for key in keys
        ]
        assert bad["counts"]["equal"] == good["counts"]["equal"] - len(keys)
