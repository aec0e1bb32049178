"""Saves of some experts at a time: what is stored are the tensors of the steps that are recorded, and it is told."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ucformat
import ucformat.torch
from tests.torch.moe import Model, digests, train
from tests.torch.ranks import Ranks
from ucformat.errors import Conflict, NotCertified, StateMismatch, UnsupportedError, UsageError
from ucformat.jobs.increments import Base
from ucformat.schema.manifest import STEPS
from ucformat.torch import Experts, Manager, Window, async_save, load, save
from ucformat.torch.comm.merging import bits_of
from ucformat.torch.saving import background
from ucformat.torch.saving.experts import ExpertNames, PartialSave, left_tensors
from ucformat.torch.saving.options import SaveOptions
from ucformat.torch.saving.save import save_local
from ucformat.torch.state import memory
from ucformat.torch.state.local import local_state

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PROGRAM = Ranks("tests.torch.partial_program")


class Training:
    """A mixture of experts on one rank, and what it had at each step."""

    def __init__(self, experts: int = 4, seed: int = 1) -> None:
        self.model = Model(experts, seed=seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.step, self.at = 0, dict[int, dict[tuple[str, str], str]]()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            train(self.model, self.optimizer, self.step)
            self.at[self.step] = digests(self.model, self.optimizer)

    def save(self, folder: Path, **arguments: Any) -> Any:
        given = {"partial": Experts()} | arguments
        return save(self.state, folder / str(self.step), step=self.step, **given)


def steps_of(place: Path, names: tuple[str, ...] = ("up", "down")) -> dict[tuple[int, int], int]:
    """The step of each expert of a checkpoint, by layer and number."""
    ck = ucformat.open(place)
    step = ck.manifest.step
    assert step is not None
    out: dict[tuple[int, int], int] = {}
    for key in ck.tensors:
        parts = key.name.split(".")
        if "experts" in parts:
            at = int(parts[1]), int(parts[3])
            assert out.setdefault(at, ck.older.get(key, step)) == ck.older.get(key, step)
    return out


@pytest.mark.front("packed-2-4-4")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("to", [1, 2, 4])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("form", ["zarr", "packed"])
def test_each_degree_loads_the_tensors_of_the_recorded_steps(
    form: str, degree: int, to: int, ranks: int, tmp_path: Path
) -> None:
    """Of 64 experts, on ranks that each have a part of them, or on replicas of these."""
    if ranks < to:
        pytest.skip(f"{ranks} ranks have no expert-parallel degree of {to}")
    given = PROGRAM.run("saved", degree, tmp_path, degree=degree, form=form)
    at: dict[int, dict[tuple[str, str], str]] = {}
    for at_steps, _ in given:
        for step, own in at_steps.items():
            at.setdefault(step, {}).update(own)
    written = [sum(nbytes) for nbytes in zip(*(n for _, n in given), strict=True)]
    assert max(written[1:]) < written[0] / 3
    ck = ucformat.open(tmp_path / "3")
    assert set(ck.older.values()) == {1, 2}
    assert STEPS in ck.manifest.requires
    ucformat.verify(ck).raise_if_damaged()
    for own, positive, older in PROGRAM.run("loaded", ranks, tmp_path, step=3, degree=to):
        assert not positive
        assert older == {tuple(k): 3 - step for k, step in ck.older.items()}
        for key, digest in own.items():
            assert digest == at[3 - older.get(key, 0)][key], key


def test_experts_take_turns_and_a_restart_goes_on(tmp_path: Path) -> None:
    training = Training()
    training.train(3)  # so that each has its moments
    for _ in range(6):
        training.train()
        training.save(tmp_path)
        if training.step == 6:
            restarted = Training(seed=5)
            assert load(restarted.state, tmp_path / "6", strict_step=False)
            restarted.step, training = 6, restarted
    assert steps_of(tmp_path / "7") == {
        (0, 0): 5, (0, 1): 6, (0, 2): 7, (0, 3): 4,
        (1, 1): 5, (1, 2): 6, (1, 3): 7, (1, 0): 4,  # layers begin at different experts
    }  # fmt: skip
    assert steps_of(tmp_path / "9") == {
        (0, 0): 9, (0, 1): 6, (0, 2): 7, (0, 3): 8,
        (1, 1): 9, (1, 2): 6, (1, 3): 7, (1, 0): 8,
    }  # fmt: skip
    ck = ucformat.open(tmp_path / "9")
    assert [base.url for base in ck.manifest.bases] == [
        "../8",
        "../7",
        "../6",
    ]  # straight to owners


def test_nothing_is_taken_for_what_it_is_not(tmp_path: Path) -> None:
    training = Training()
    for _ in range(2):
        training.train()
        training.save(tmp_path)
    place = tmp_path / "2"
    other = Training(seed=3)
    report = load(other.state, place)
    assert not report
    assert set(report.older.values()) == {1}
    assert not report.problems.inexact
    before = Training(seed=4)
    for refusing in ({"strict_step": True}, {"strict": True}):
        with pytest.raises(StateMismatch, match="older, by 1 to 1 steps"):
            load(before.state, place, **refusing)  # type: ignore[arg-type]
    assert digests(before.model, before.optimizer) == digests(*Training(seed=4).state.values())
    with pytest.raises(NotCertified, match=r"older than the checkpoint: layers\.0\.experts"):
        load(other.state, place, certify=True)
    certificate = load(other.state, place, strict_step=False, certify=True).certificate
    assert certificate
    assert {entry[:2] for entry in certificate.older} == {tuple(key) for key in report.older}
    live = ucformat.torch.certify(
        training.state, place, strict_step=False
    )  # newer than what is stored
    assert not live
    assert {e.name for e in live.different} == {
        key.name for key in report.older if "experts" in key.name
    }
    name = next(iter(report.older)).name
    with pytest.raises(
        UnsupportedError, match="as they were at step 1, and the checkpoint is of step 2"
    ):
        ucformat.open(place)[name][...]
    with pytest.raises(UnsupportedError, match="older=True"):
        ucformat.torch.state_dict(place)
    with pytest.raises(UnsupportedError, match="older"):
        ucformat.export(place, tmp_path / "exported", "safetensors")
    with pytest.raises(UnsupportedError, match="older"):
        ucformat.average([tmp_path / "1", ucformat.open(place, older=True)], tmp_path / "mean")
    exported = ucformat.open(place, older=True)
    ucformat.export(exported, tmp_path / "exported", "safetensors")


@pytest.mark.parametrize("how", ["materialize", "compact", "convert", "copy", "view", "patch"])
def test_what_is_made_of_it_has_the_steps(how: str, tmp_path: Path) -> None:
    training = Training()
    for _ in range(2):
        training.train()
        training.save(tmp_path, form="packed")
    place, made = tmp_path / "2", tmp_path / "made"
    want = dict(ucformat.open(place).older)
    assert want
    if how == "materialize":
        made = place
        ucformat.materialize(place)
    elif how == "compact":
        made = place
        ucformat.compact(place)
        assert not ucformat.open(made).manifest.bases
    elif how == "convert":
        ucformat.convert(place, made)
    elif how == "copy":
        ucformat.copy(place, made)
    elif how == "patch":
        ucformat.patch(tmp_path / "1", place, made)
    else:
        ucformat.convert(ucformat.open(place, view=[{"drop": ["*.router"]}]), made)
    assert dict(ucformat.open(made).older) == want
    loaded = Training(seed=7)
    load(loaded.state, made, strict=False)
    at = digests(loaded.model, loaded.optimizer)
    assert all(at[key] == training.at[1][key] for key in want)


def test_an_expert_with_other_tensors_is_saved(tmp_path: Path) -> None:
    """As one that no token had reached when the base was saved, so that it had no moments there."""
    training = Training(experts=16)
    training.train()
    training.save(tmp_path)
    first = {key[0] for key in training.at[1] if key[1] == "exp_avg" and "experts" in key[0]}
    training.train(5)
    later = {
        key[0] for key in training.at[6] if key[1] == "exp_avg" and "experts" in key[0]
    } - first
    assert later
    training.save(tmp_path, partial=Experts(k=1))
    older = ucformat.open(tmp_path / "6").older
    assert {key.name for key in older}.isdisjoint(later)
    loaded = Training(experts=16, seed=2)
    load(loaded.state, tmp_path / "6", strict_step=False, certify=True)
    steps = {key: 1 if key in older else 6 for key in digests(loaded.model, loaded.optimizer)}
    assert digests(loaded.model, loaded.optimizer) == {
        key: training.at[step][key] for key, step in steps.items()
    }


def test_what_the_program_has_no_more_is_not_taken_from_the_base(tmp_path: Path) -> None:
    training = Training()
    training.train(2)
    training.save(tmp_path)
    for layer in training.model.layers:
        del layer.experts["3"]
    training.step = 3
    save({"model": training.model}, tmp_path / "3", step=3, partial=Experts())
    ck = ucformat.open(tmp_path / "3")
    assert not any(".experts.3." in key.name for key in ck.tensors)
    assert not ck.older  # without their moments the others are saved, too
    assert load({"model": training.model}, tmp_path / "3")


def test_choice_by_load_and_the_share_of_lost_tokens(tmp_path: Path) -> None:
    training = Training()
    layer = ("layers.0.experts", "layers.1.experts")

    def counts(*numbers: int) -> dict[str, list[int]]:
        return {name: list(numbers) for name in layer}

    def saved(partial: Experts, tokens: Mapping[str, list[int]], **more: Any) -> Any:
        training.train()
        training.save(tmp_path, partial=partial, tokens=tokens, **more)
        return ucformat.open(tmp_path / str(training.step)).manifest.experts

    training.train(2)
    whole = saved(Experts(choose="load"), counts(10, 10, 10, 10))
    assert whole.lost == 0
    by_load = saved(Experts(choose="load"), counts(11, 30, 20, 15))
    assert [step for (n, _), step in sorted(steps_of(tmp_path / "4").items()) if n == 0] == [
        3,
        4,
        3,
        3,
    ]
    assert by_load.lost == pytest.approx((1 + 10 + 5) / 76)
    assert by_load.layers[layer[0]].stored == (10, 30, 10, 10)
    bounded = saved(Experts(choose="load", max_lost=0.02), counts(12, 30, 20, 15))
    assert bounded.lost == pytest.approx(
        2 / 77 / 2
    )  # of one layer; one more expert would be too many
    by_turn = saved(Experts(max_lost=0.5), counts(20, 40, 20, 15))
    assert by_turn.lost <= 10 / 95
    lineage = [load(Training(seed=2).state, tmp_path / "6", strict_step=False).lineage]
    resumed = saved(Experts(k=4), counts(21, 41, 21, 16), lineage=lineage)
    before, after = (r.layers[layer[0]] for r in (by_turn, resumed))
    gone = sum(before.held) - sum(before.stored)  # what was older is lost for good
    assert gone > 0
    assert sum(after.seen) - sum(after.stored) == gone
    assert after.stored == after.held
    with pytest.raises(UsageError, match=r"is 20, and was 21 in the base"):
        saved(Experts(choose="load"), counts(20, 41, 21, 16))
    with pytest.raises(
        UsageError, match=r"has 3 counts of 'layers\.0\.experts', which has 4 experts"
    ):
        saved(Experts(choose="load"), counts(30, 50, 30))
    assert saved(Experts(), None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["whole", "resumed", "uncounted"])
def test_lost_tokens_stay_lost_where_everything_is_saved(how: str, tmp_path: Path) -> None:
    training = Training()
    layer = "layers.0.experts"

    def saved(count: int, **more: Any) -> Any:
        training.train()
        tokens = {f"layers.{n}.experts": [count] * 4 for n in range(2)}
        training.save(tmp_path, **({"tokens": tokens} | more))
        return ucformat.open(tmp_path / str(training.step)).manifest.experts

    training.train(2)
    saved(10)
    saved(20)  # one expert of each layer has learned of 20, the others of 10
    lineage = [load(Training(seed=2).state, tmp_path / "4", strict_step=False).lineage]
    if how == "resumed":  # and the first save after that is whole
        record = saved(30, lineage=lineage, base=False)
    else:
        again = saved(25, lineage=lineage)
        assert sorted(again.layers[layer].held) == [15, 15, 15, 25]
        if how == "uncounted":
            saved(0, lineage=lineage, tokens=None)
        record = saved(30, lineage=lineage, **({"base": False} if how == "whole" else {}))
    assert not ucformat.open(tmp_path / str(training.step)).older
    assert sorted(record.layers[layer].held) == [20, 20, 20, 30]
    assert record.layers[layer].stored == record.layers[layer].held
    assert record.lost == pytest.approx(30 / 120)


def test_counts_that_the_base_lacks_save_everything(tmp_path: Path) -> None:
    training = Training()
    training.train(3)
    training.save(tmp_path)
    training.train()
    tokens = {f"layers.{n}.experts": [1, 2, 3, 4] for n in range(2)}
    training.save(tmp_path, partial=Experts(choose="load"), tokens=tokens)
    assert not ucformat.open(tmp_path / "4").older


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_does_not_touch_what_is_left(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither copied, nor compared, nor written: the memory of experts that are left is not there."""
    training = Training()
    training.train(3)
    training.save(tmp_path)
    training.train()
    seen: set[str] = set()

    whole = {t.data_ptr() for t in training.model.state_dict().values()}
    copied_to_host, copy_all = memory.copied_to_host, background._copy_all

    def copied(tensors: Any) -> Any:
        tensors = list(tensors)
        seen.update(str(t.data_ptr()) for t in tensors)
        return copied_to_host(tensors)

    def copied_all(state: Any, *rest: Any) -> Any:
        seen.update(str(t.tensor.data_ptr()) for t in state.tensors)
        return copy_all(state, *rest)

    monkeypatch.setattr(memory, "copied_to_host", copied)
    monkeypatch.setattr(background, "_copy_all", copied_all)
    call: Any = async_save if asynchronous else save
    done = call(training.state, tmp_path / "4", step=4, partial=Experts())
    if asynchronous:
        done.wait()
    older = ucformat.open(tmp_path / "4").older
    live = training.model.state_dict()
    assert seen
    assert {str(live[key.name].data_ptr()) for key in older if key.state == "weight"}.isdisjoint(
        seen
    )
    assert len(whole) == len(live)


STACKED = "experts that are stacked in one tensor cannot be saved in part"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": None}, "has no step"),
        ({"step": 3}, "cannot take experts from .*3, which has step 3"),
        ({"step": 2}, "which has step 3"),
        ({"form": "safetensors"}, "is not possible with form"),
        ({"partial": Experts(choose="load")}, "there are no counts"),
        ({"partial": Experts(max_lost=0.1)}, "there are no counts"),
        (
            {"partial": Experts(pattern=r"(?P<layer>never)\.(?P<expert>\d+)")},
            "no tensor of the base has the name",
        ),
        ({"partial": Experts(pattern=r"(?P<layer>.*)\.(?P<expert>\w+)")}, "which is no number"),
        ({"tokens": {"layers.0.experts": [1, -2, 3, 4]}}, "no counts, or one out of range"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    training = Training()
    training.train(3)
    training.save(tmp_path)
    given: Any = {"step": 5, "partial": Experts()} | arguments
    with pytest.raises(UsageError, match=message):
        save(training.state, tmp_path / "new", **given)
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").rglob("*.bin"))
    assert not (tmp_path / "new" / "manifest.json").exists()


@pytest.mark.parametrize("what", ["step", "lineage"])
def test_ranks_that_would_choose_differently_are_refused(what: str, tmp_path: Path) -> None:
    """The step tells the place in a window, and the lineage which tokens experts have learned of."""
    for message in PROGRAM.run("differing", 2, tmp_path, what=what):
        assert "rank 1 saves with" in message
        assert f", {what} " in message


def test_a_base_that_was_replaced_under_its_id_is_refused(tmp_path: Path) -> None:
    """What is left of it is told by rows, which are others after a compaction or thinning in place."""
    training = Training()
    for _ in range(2):
        training.train()
        training.save(tmp_path)
    base = Base(ucformat.open(tmp_path / "2"), str(tmp_path / "3"))
    bits = bits_of(True for _ in base.manifest.tensors)
    partial = PartialSave(base.manifest.id, base.manifest.attempt, bits)
    assert len(left_tensors(base, partial)) == len(base.manifest.tensors)
    ucformat.compact(tmp_path / "2")
    compacted = Base(ucformat.open(tmp_path / "2"), str(tmp_path / "3"))
    assert compacted.manifest.id == partial.base
    with pytest.raises(Conflict, match="is no longer the checkpoint"):
        left_tensors(compacted, partial)


def test_a_manager_refuses_what_it_would_ignore(tmp_path: Path) -> None:
    training = Training()
    tokens = {"layers.0.experts": [1, 2, 3, 4]}
    for partial in (None, Window(steps=2)):
        with pytest.raises(UsageError, match="tokens"):
            save(training.state, tmp_path / "1", step=1, partial=partial, tokens=tokens)
    for every in (2, timedelta(seconds=1)):
        with pytest.raises(UsageError, match="each step"):
            Manager(tmp_path / "run", every=every, partial=Window(steps=2))
    with Manager(tmp_path / "run", every=1, partial=Window(steps=2)):
        pass
    assert not list(tmp_path.rglob("manifest.json"))


def test_experts_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    stacked = nn.ModuleDict({"experts": nn.ParameterDict({"w1": torch.zeros(4, 8, 8)})})
    with pytest.raises(UsageError, match=STACKED):
        save({"model": stacked}, tmp_path / "1", step=1, partial=Experts())
    one = nn.Linear(2, 2)
    tied = nn.ModuleDict({"experts": nn.ModuleList([one, one])})
    with pytest.raises(UsageError, match="is tied to"):
        save({"model": tied}, tmp_path / "1", step=1, partial=Experts())
    value = {"state": {"layers.0.experts.1.up": {"age": 3}}}
    with pytest.raises(
        UsageError, match=r"a value for layers\.0\.experts\.1\.up that is no tensor"
    ):
        save({"model": Model(4), "other": value}, tmp_path / "1", step=1, partial=Experts())
    for wrong in (
        {"k": 0},
        {"choose": "best"},
        {"max_lost": 1.0},
        {"pattern": "experts"},
        {"max_chain": 64},
    ):
        with pytest.raises(UsageError):
            Experts(**wrong)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.3.mlp.experts.17.gate_proj.weight", ("model.layers.3.mlp.experts", 17)),
        (
            "h.1.moe.deepspeed_moe.experts.deepspeed_experts.3.up.weight",
            ("h.1.moe.deepspeed_moe.experts", 3),
        ),
        (
            "decoder.layers.0.mlp.experts.local_experts.12.linear_fc1.weight",
            ("decoder.layers.0.mlp.experts", 12),
        ),
        ("decoder.layers.0.mlp.experts.linear_fc2.weight7", ("decoder.layers.0.mlp.experts", 7)),
        ("experts.0.w", ("experts", 0)),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", None),
        ("model.layers.3.mlp.shared_expert.0.weight", None),
        ("model.layers.3.mlp.gate.weight", None),
    ],
)
def test_the_usual_names(name: str, place: tuple[str, int] | None) -> None:
    assert ExpertNames(None).place(name) == place


def test_a_manager_goes_on_and_keeps_what_is_needed(tmp_path: Path) -> None:
    assert PROGRAM.run("managed", 2, tmp_path, degree=2, steps=6) == [None, None]
    run = tmp_path / "run"
    owners = {base.url for base in ucformat.open(run / "step-00000006").manifest.bases}
    assert all((run / url.removeprefix("../") / "manifest.json").exists() for url in owners)
    outcome = PROGRAM.run("managed", 1, tmp_path, degree=1, steps=2)
    assert outcome[0][:2] == (6, True)
    assert outcome[0][2] > 0
    assert ucformat.open(run / "step-00000007").older  # it went on with what was restored
    ucformat.verify(run / "step-00000008").raise_if_damaged()


def test_a_chain_ends_with_a_whole_checkpoint(tmp_path: Path) -> None:
    training = Training()
    training.train(3)
    partial = Experts(max_chain=2)
    with Manager(tmp_path, partial=partial) as manager:
        for _ in range(5):
            training.train()
            manager.save(training.step, training.state)
    has_older = [bool(ucformat.open(tmp_path / f"step-{n:08d}").older) for n in range(4, 9)]
    assert has_older == [False, True, True, False, True]


def test_a_manager_takes_nothing_from_a_training_that_was_given_up(tmp_path: Path) -> None:
    training = Training()
    training.train(3)
    with Manager(tmp_path / "run", partial=Experts()) as manager:
        for _ in range(3):
            training.train()
            manager.save(training.step, training.state)
    anew = Training(seed=8)
    anew.train(10)
    with Manager(tmp_path / "run", partial=Experts()) as manager:
        manager.save(20, anew.state)  # it has restored nothing
    assert not ucformat.open(tmp_path / "run" / "step-00000020").older
    weights = Training(seed=8)
    with Manager(tmp_path / "run", partial=Experts()) as manager:
        manager.load({"model": weights.model}, tmp_path / "run" / "step-00000020")
        weights.train()
        manager.save(21, weights.state)
    assert not ucformat.open(tmp_path / "run" / "step-00000021").older
    with pytest.raises(UsageError, match="increments are 'one-shot'"):
        Manager(tmp_path, partial=Experts(), increments=ucformat.torch.Increments("one-shot"))


def test_where_partial_saves_are_not_supported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="partial"):
        ucformat.torch.Publisher(tmp_path / "channel", partial=Experts())
    options = SaveOptions.of(str(tmp_path / "1"), {"partial": Experts()})
    with pytest.raises(UsageError, match="partial= is not supported here"):
        save_local(local_state({"model": Model(4)}), options)
    assert not (tmp_path / "1").exists()
