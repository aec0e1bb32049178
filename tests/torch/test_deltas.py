"""Deltas: what is replayed is bit for bit what the training had, under every layout; what cannot be is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
from tests.torch.delta_program import State, Training
from tests.torch.ranks import Ranks
from ucformat.errors import (
    IntegrityError,
    MissingData,
    NotCertified,
    StateMismatch,
    UcformatError,
    UsageError,
)
from ucformat.format.digest import with_own_digest
from ucformat.schema import MANIFEST
from ucformat.schema.manifest import LaunchDoc
from ucformat.torch import (
    DeltaCosts,
    Deltas,
    Experts,
    Manager,
    gradients,
    load,
    merge_deltas,
    replay,
    save,
    tune_deltas,
)
from ucformat.torch.loading.deltas import GradientSteps
from ucformat.torch.manager.tuning import wasted_share

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROGRAM = Ranks("tests.torch.delta_program")


def check(having: State, truth: State) -> None:
    assert having.keys() == truth.keys()
    for key, tensor in truth.items():
        assert torch.equal(having[key], tensor), key


@pytest.mark.front("packed-fsdp2-tp2", "zarr-tp2-fsdp3", "packed-plain2-plain1")
@pytest.mark.parametrize(
    "target", [("plain", 1), ("fsdp", 3), ("tp", 2)], ids=lambda t: f"{t[0]}{t[1]}"
)
@pytest.mark.parametrize(
    "source", [("plain", 2), ("fsdp", 2), ("tp", 2)], ids=lambda t: f"{t[0]}{t[1]}"
)
@pytest.mark.parametrize("form", ["packed", "zarr"])
def test_a_replay_is_exact_under_each_layout(
    form: str, source: tuple[str, int], target: tuple[str, int], tmp_path: Path
) -> None:
    given = {"layout": source[0], "steps": 17, "batch": 5, "form": form}
    truth = PROGRAM.run("saved", source[1], tmp_path, **given)[0]
    # tensor-parallel layers add up in another order, and the mean of three equal gradients is rounded
    further = 0 if "tp" in (source[0], target[0]) or target[1] == 3 else 2
    asked: dict[str, Any] = {"layout": target[0], "steps": [2, 7, 17], "further": further}
    for outcome in PROGRAM.run("replayed", target[1], tmp_path, **asked):
        for step, (positive, at, kind, having) in outcome.items():
            assert positive
            assert at == step
            assert kind in ("resume", "reshard")
            for later, state in enumerate(having, step):
                check(state, truth[later])


def trained(folder: Path, steps: int, batch: int = 3, **arguments: Any) -> tuple[Training, State]:
    """Train on one rank, and save everything at step 1, and each batch of deltas after it."""
    training = Training(sparse=arguments.pop("sparse", False))
    deltas = dict[int, dict[str, torch.Tensor]]()
    for step in range(1, steps + 1):
        deltas[step] = {name: d.clone() for name, d in training.train(step).items()}
        if step == 1 or len(deltas) == batch:
            given: dict[str, Any] = {"partial": Deltas(), "form": "packed"} | arguments
            after = None if step == 1 else deltas
            save(training.state, folder / str(step), step=step, **given, deltas=after)
            deltas = {}
    return training, training.whole()


@pytest.mark.parametrize("form", ["packed", "zarr"])
def test_sparse_deltas(form: str, tmp_path: Path) -> None:
    _, truth = trained(tmp_path, 10, sparse=True, form=form)
    fresh = Training(seed=4)
    assert replay(tmp_path / "10", fresh.state)
    check(fresh.whole(), truth)


def test_sparse_deltas_of_any_count_on_two_ranks(tmp_path: Path) -> None:
    truth = PROGRAM.run("saved", 2, tmp_path, layout="plain", steps=8, batch=3, sparse=True)[0]
    for outcome in PROGRAM.run("replayed", 2, tmp_path, layout="fsdp", steps=[8], further=0):
        positive, _, _, having = outcome[8]
        assert positive
        check(having[0], truth[8])


def test_all_that_has_no_deltas_is_saved_if_it_changed(tmp_path: Path) -> None:
    trained(tmp_path, 7)
    ck = ucformat.open(tmp_path / "7")
    weights = {key.name for key in ck.tensors if key.state == "weight"}
    older = {key.name for key in ck.older if key.state == "weight"}
    assert older == {f"{n}.{part}" for n in (0, 1, 3) for part in ("weight", "bias")} | {"4.weight"}
    assert "5.weight" in weights - older, "a frozen weight is as it was"
    assert {"3.running_mean", "3.num_batches_tracked"} <= weights - older
    assert all(step == 1 for step in ck.older.values())
    assert not [key for key in ck.older if key.state.startswith("delta.")]
    stored = {t.name for t in ck.manifest.tensors if not t.is_referenced}
    assert "5.weight" not in stored, "it is referenced"


def test_checkpoints_do_not_grow_with_their_chain(tmp_path: Path) -> None:
    trained(tmp_path, 28)
    sizes = [(tmp_path / str(step) / MANIFEST).stat().st_size for step in (7, 28)]
    assert sizes[1] < sizes[0] + 100
    bases = [ucformat.open(tmp_path / str(step)).manifest.bases for step in (7, 28)]
    assert [len(b) for b in bases] == [2, 2]


def test_fixed_tensors_are_neither_compared_nor_saved(tmp_path: Path) -> None:
    training = Training()
    training.train(1)
    save(training.state, tmp_path / "1", step=1, partial=Deltas())
    applied = training.train(2)
    partial = Deltas(fixed=("5.*", "3.*"))
    save(training.state, tmp_path / "2", step=2, partial=partial, deltas={2: applied})
    older = {key.name for key in ucformat.open(tmp_path / "2").older}
    assert {"5.weight", "5.bias", "3.running_mean"} <= older


def test_loads_that_do_not_replay_are_refused_or_told(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    fresh = Training(seed=3)
    before = fresh.whole()
    with pytest.raises(StateMismatch, match="step"):
        load(fresh.state, tmp_path / "4", strict_step=True)
    check(fresh.whole(), before)
    report = load(fresh.state, tmp_path / "4")
    assert not report
    assert set(report.older.values()) == {3}


def test_a_wrong_replay_is_found(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    fresh = Training(seed=3)
    state = {**fresh.state}
    del state["scheduler"]  # so the learning rates are others
    with pytest.raises(NotCertified, match="was not repeated"):
        replay(tmp_path / "4", state, leave="scheduler")


@pytest.mark.parametrize("how", ["decay", "clamp", "skipped", "average"])
def test_what_steps_do_besides_is_found(how: str, tmp_path: Path) -> None:
    """Weights of two dims alone differ; a row of each is compared."""
    training = Training()
    state = {**training.state, "average": {"w": torch.zeros(5, 7)}}
    training.train(1)
    save(state, tmp_path / "1", step=1, partial=Deltas(fixed=("average.*",)))
    applied = training.train(2)
    with torch.no_grad():
        if how == "decay":
            training.model[0].weight *= 0.999
        if how == "clamp":
            training.model[4].weight.clamp_(-0.1, 0.1)
        if how == "skipped":
            applied["0.weight"].zero_()
        if how == "average":
            state["average"]["w"] += 1
    partial = Deltas(fixed=("average.*",))
    save(state, tmp_path / "2", step=2, partial=partial, deltas={2: applied})
    fresh = Training(seed=3)
    with pytest.raises(NotCertified, match="average" if how == "average" else "weight"):
        replay(tmp_path / "2", {**fresh.state, "average": {"w": torch.zeros(5, 7)}})


def test_rows_that_are_checked_change_from_batch_to_batch(tmp_path: Path) -> None:
    trained(tmp_path, 10)
    checked = [ucformat.open(tmp_path / str(n)).manifest.deltas for n in (4, 7, 10)]
    assert all(deltas is not None for deltas in checked)
    assert len({deltas.checked["0.weight"] for deltas in checked if deltas}) > 1


@pytest.mark.parametrize("form", ["packed", "zarr"])
def test_a_chain_is_certified_while_it_is_saved(form: str, tmp_path: Path) -> None:
    _, truth = trained(tmp_path, 7, form=form, certify=True)
    fresh = Training(seed=4)
    assert replay(tmp_path / "7", fresh.state, certify=True)
    check(fresh.whole(), truth)


def test_parameters_that_are_added_need_a_whole_save(tmp_path: Path) -> None:
    training = Training()
    with Manager(tmp_path, partial=Deltas(batch=1)) as manager:
        for step in (1, 2):
            manager.save(step, training.state, deltas=training.train(step))
        training.model[5].requires_grad_(requires_grad=True)
        training.optimizer.add_param_group({"params": training.model[5].parameters()})
        applied = training.train(3)
        with pytest.raises(UsageError, match=r"5\.bias, 5\.weight"):
            manager.save(3, training.state, deltas=applied)
        training.train(4)
        assert manager.save(4, training.state, force=True)
        manager.save(5, training.state, deltas=training.train(5))
    fresh = Training(seed=2)
    fresh.model[5].requires_grad_(requires_grad=True)
    fresh.optimizer.add_param_group({"params": fresh.model[5].parameters()})
    assert replay(tmp_path / "step-00000005", fresh.state)
    check(fresh.whole(), training.whole())


def test_deltas_do_not_lead_from_another_training(tmp_path: Path) -> None:
    training = Training()
    training.train(1)
    with Manager(tmp_path / "a", partial=Deltas()) as manager:
        manager.save(1, training.state)
    applied = training.train(2)
    with pytest.raises(UsageError, match="not of this training"):
        save(
            training.state,
            tmp_path / "2",
            step=2,
            partial=Deltas(),
            base=tmp_path / "a" / "step-00000001",
            deltas={2: applied},
            launch=LaunchDoc(id="0" * 32),
        )


@pytest.mark.parametrize(
    ("scheduler", "optimizer", "says"),
    [
        (torch.optim.lr_scheduler.ReduceLROnPlateau, torch.optim.AdamW, "ReduceLROnPlateau"),
        (None, torch.optim.LBFGS, "LBFGS"),
    ],
)
def test_steps_that_need_more_than_gradients(scheduler: Any, optimizer: Any, says: str) -> None:
    layer = torch.nn.Linear(2, 2)
    state: dict[str, Any] = {"model": layer, "optimizer": optimizer(layer.parameters())}
    if scheduler is not None:
        state["scheduler"] = scheduler(state["optimizer"])
    with pytest.raises(UsageError, match=f"{says} needs more"):
        GradientSteps(state)


def test_a_function_of_the_user_applies_updates(tmp_path: Path) -> None:
    """Low-rank updates of one weight, as names that are no parameters."""
    layer = torch.nn.Linear(6, 5)
    save({"model": layer}, tmp_path / "0", step=0, partial=Deltas())
    deltas: dict[int, dict[str, torch.Tensor]] = {}

    def apply(_: int, parts: Any) -> None:
        with torch.no_grad():
            layer.weight += parts["weight.left"] @ parts["weight.right"]

    for step in (1, 2, 3):
        deltas[step] = {"weight.left": torch.randn(5, 1), "weight.right": torch.randn(1, 6)}
        apply(step, deltas[step])
    save({"model": layer}, tmp_path / "3", step=3, partial=Deltas(), deltas=deltas)
    assert "weight" in {key.name for key in ucformat.open(tmp_path / "3").older}
    want = layer.weight.clone()
    steps: list[int] = []

    def noted(step: int, parts: Any) -> None:
        steps.append(step)
        apply(step, parts)

    with torch.no_grad():
        layer.weight.zero_()
    report = replay(tmp_path / "3", {"model": layer}, noted)
    assert report
    assert steps == [1, 2, 3]
    assert torch.equal(layer.weight, want)
    with pytest.raises(UsageError, match="no optimizer"):
        replay(tmp_path / "3", {"model": layer})


SHARED = torch.zeros(2)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"deltas": {4: {}}}, "step 4"),  # one is left out
    ({"deltas": {2: {}, 4: {}}}, "steps 2, 4"),
    ({"deltas": {2: {}}}, "checkpoint of step 3"),
    ({"deltas": {}}, "none"),
    ({"deltas": {2: {"a": 1}, 3: {}}}, "not tensors by name"),
    ({"deltas": {2: {"a": torch.zeros(2)}, 3: {"a": torch.zeros(3)}}}, "differ in"),
    ({"deltas": {2: {}, 3: {}}, "partial": None}, "without partial=Deltas"),
    ({"deltas": {2: {}, 3: {}}, "partial": Experts()}, "without partial=Deltas"),
    ({"deltas": {2: {}, 3: {}}, "base": False}, "no checkpoint that the deltas"),
    ({"deltas": {"2": {}, "3": {}}}, "none"),
    ({"deltas": [{}, {}]}, "none"),
    ({"deltas": {2: {"a": SHARED}, 3: {"a": SHARED}}}, "are one tensor"),
    ({"deltas": {2: {}, 3: {}}, "encode": {"exp_avg": "bf16"}}, "encode"),
]


@pytest.mark.parametrize(("given", "says"), REFUSED)
def test_what_cannot_be_replayed_is_refused(
    given: dict[str, Any], says: str, tmp_path: Path
) -> None:
    training = Training()
    training.train(1)
    save(training.state, tmp_path / "1", step=1, partial=Deltas())
    arguments = {"step": 4 if 4 in given["deltas"] else 3, "partial": Deltas()} | given
    with pytest.raises(UsageError, match=says):
        save(training.state, tmp_path / "next", **arguments)
    assert not (tmp_path / "next" / MANIFEST).exists()


def change_manifest(folder: Path, change: Callable[[Any], object]) -> None:
    """Change a manifest, with the digest of what it has then."""
    manifest = folder / MANIFEST
    doc = json.loads(manifest.read_text())
    change(doc)
    del doc["digest"]
    manifest.write_bytes(with_own_digest(json.dumps(doc).encode()))


def test_a_base_with_older_tensors_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    change_manifest(tmp_path / "4", lambda doc: doc.pop("deltas"))
    training = Training()
    with pytest.raises(UsageError, match="earlier steps"):
        save(training.state, tmp_path / "5", step=5, partial=Deltas(), deltas={5: {}})


def test_ranks_with_different_deltas_are_refused(tmp_path: Path) -> None:
    for kind, text in PROGRAM.run("differing", 2, tmp_path):
        assert kind == "UsageError"
        assert "0.weight (delta.2)" in text
    assert not (tmp_path / "2" / MANIFEST).exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(first=3), "has other steps"),
        (lambda d: d.update(last=10**15), "has deltas of steps"),
        (lambda d: d.update(last=8), "has deltas of steps"),
        (lambda d: d.update(first=9), "has deltas of steps"),
        (lambda d: d.update(since=5), "after 5"),
        (lambda d: d.update(after="0" * 32), "none of its bases"),
        (lambda d: d.update(partial={"0.weight": [9]}), "none of its deltas"),
        (lambda d: d.update(partial={"0.weight": [6, 5]}), "none of its deltas"),
        (lambda d: d.update(partial={"0.weight": [6]}), "has other steps"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    change: Any, says: str, tmp_path: Path
) -> None:
    trained(tmp_path, 7)
    change_manifest(tmp_path / "7", lambda doc: change(doc["deltas"]))
    with pytest.raises(IntegrityError, match=says):
        ucformat.open(tmp_path / "7")


def test_indices_beyond_the_tensor_are_refused(tmp_path: Path) -> None:
    training = Training()
    training.train(1)
    save(training.state, tmp_path / "1", step=1, partial=Deltas())
    indices = torch.tensor([[3], [4]])
    delta = torch.sparse_coo_tensor(indices, torch.ones(1), (9, 9), check_invariants=True)
    save(training.state, tmp_path / "2", step=2, partial=Deltas(), deltas={2: {"0.weight": delta}})
    smaller = {"shape": [2, 2]}
    change_manifest(tmp_path / "2", lambda doc: doc["deltas"]["sparse"]["0.weight"].update(smaller))
    with pytest.raises(IntegrityError, match=r"0\.weight of step 2"):
        replay(tmp_path / "2", Training().state, lambda *_: None)


@pytest.mark.parametrize("gone", ["1", "4"])
def test_a_chain_of_which_a_checkpoint_is_gone(gone: str, tmp_path: Path) -> None:
    trained(tmp_path, 7)
    (tmp_path / gone / MANIFEST).unlink()
    with pytest.raises(MissingData):
        replay(tmp_path / "7", Training().state)


class TestManager:
    """Batches, whole saves, restarts and last saves of `Manager`."""

    @staticmethod
    def run(folder: Path, steps: int, **arguments: Any) -> dict[int, State]:
        training, at = Training(), dict[int, State]()
        given: Any = {"form": "packed", "partial": Deltas(batch=4, full=15)} | arguments
        with Manager(folder, **given) as manager:
            report = manager.restore_latest(training.state)
            first = (report.step or 0) + 1 if report is not None else 1
            at[first - 1] = training.whole()
            for step in range(first, first + steps):
                applied = training.train(step)
                manager.save(step, training.state, deltas=applied)
                at[step] = training.whole()
        return at

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_restarts_go_on_exactly(self, asynchronous: bool, tmp_path: Path) -> None:
        training, truth = Training(), dict[int, State]()
        truth[0] = training.whole()
        for step in range(1, 45):
            training.train(step)
            truth[step] = training.whole()
        begun = []
        for _ in range(3):
            at = self.run(tmp_path, 14, asynchronous=asynchronous)
            begun.append(min(at))
            for step, state in at.items():
                check(state, truth[step])
        assert begun == [0, 13, 24]
        kinds = {
            int(path.parent.name[-8:]): ucformat.open(path.parent).manifest.deltas is not None
            for path in tmp_path.glob(f"step-*/{MANIFEST}")
        }
        assert [step for step in sorted(kinds) if not kinds[step]] == [1, 16, 31]

    def test_each_step_needs_its_deltas(self, tmp_path: Path) -> None:
        training = Training()
        with Manager(tmp_path, partial=Deltas(batch=4)) as manager:
            training.train(1)
            assert manager.save(1, training.state)
            with pytest.raises(UsageError, match="step 2 has no deltas"):
                manager.save(2, training.state)
            manager.save(2, training.state, deltas={})
            with pytest.raises(UsageError, match="do not follow"):
                manager.save(4, training.state, deltas={})

    def test_the_last_save_has_the_steps_since_the_batch(self, tmp_path: Path) -> None:
        training = Training()
        with Manager(tmp_path, partial=Deltas(batch=8)) as manager:
            for step in range(1, 6):
                manager.save(step, training.state, deltas=training.train(step), force=step == 5)
        fresh = Training(seed=2)
        with Manager(tmp_path, partial=Deltas(batch=8)) as manager:
            report = manager.restore_latest(fresh.state)
        assert report is not None
        assert report.step == 5
        check(fresh.whole(), training.whole())

    def test_after_a_save_that_failed_everything_is_saved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its deltas are lost, so no later ones lead from an earlier checkpoint to what comes."""
        training = Training()
        with Manager(tmp_path, partial=Deltas(batch=2)) as manager:
            for step in range(1, 4):
                manager.save(step, training.state, deltas=training.train(step))
            with monkeypatch.context() as broken:
                broken.setattr("ucformat.torch.manager.manager.save", self.fail)
                manager.save(4, training.state, deltas=training.train(4))
                with pytest.raises(UcformatError, match="no space"):
                    manager.save(5, training.state, deltas=training.train(5))
            for step in (6, 7):
                manager.save(step, training.state, deltas=training.train(step))
        steps = sorted(int(place.name[-8:]) for place in tmp_path.glob("step-*"))
        assert steps == [1, 3, 7]
        assert ucformat.open(tmp_path / "step-00000007").manifest.deltas is None
        fresh = Training(seed=2)
        assert load(fresh.state, tmp_path / "step-00000007")
        check(fresh.whole(), training.whole())

    @staticmethod
    def fail(*_: Any, **__: Any) -> Any:
        raise UcformatError("no space is left", hint="free some")

    def test_should_save_is_true_in_each_step(self, tmp_path: Path) -> None:
        training = Training()
        with Manager(tmp_path, partial=Deltas(batch=2)) as manager:
            for step in range(1, 6):
                applied = training.train(step)
                assert manager.should_save(step)
                manager.save(step, training.state, deltas=applied)
        assert len(list(tmp_path.glob("step-*"))) == 3

    def test_deltas_without_a_policy_are_refused(self, tmp_path: Path) -> None:
        training = Training()
        with (
            Manager(tmp_path) as manager,
            pytest.raises(UsageError, match="without partial=Deltas"),
        ):
            manager.save(1, training.state, deltas=training.train(1))

    @pytest.mark.parametrize(
        "wrong", [{"fixed": "ema.*"}, {"batch": 2.5}, {"batch": "3"}, {"full": 0}]
    )
    def test_attributes_that_are_none_are_refused(self, wrong: Any) -> None:
        with pytest.raises(UsageError):
            Deltas(**wrong)

    def test_every_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="every"):
            Manager(tmp_path, every=5, partial=Deltas())


@pytest.mark.front("0")
@pytest.mark.parametrize("part", range(6))
def test_kills_at_random_instants(part: int, tmp_path: Path) -> None:
    """After `kill -9` of all ranks, each start finds a state that the training had, bit for bit."""
    found: list[tuple[int, State]] = []
    for seed in range(100 * part, 100 * part + 100):
        ranks, layout = 1 + seed % 2, "plain" if seed % 3 else "fsdp"
        PROGRAM.run("killed", ranks, tmp_path, seed=seed, layout=layout)
        kept = sorted(tmp_path.glob(f"restored-{seed}-*.pt"))
        assert len(kept) == ranks
        found += [(step, state) for step, state in map(torch.load, kept) if step]
        if len({step for step, _ in found}) == (10 if part else 2):
            break
    (truth,) = PROGRAM.run("trained", 1, tmp_path, steps=max(step for step, _ in found))
    for step, state in found:
        check(state, truth[step])


class TestMerging:
    """Whole checkpoints that are made of deltas beside a training."""

    @staticmethod
    def train(folder: Path, steps: int, merged: Path) -> tuple[Training, State]:
        training = Training(seed=5)
        partial = Deltas(batch=2, merged=str(merged))
        with Manager(folder / "run", form="packed", partial=partial) as manager:
            report = manager.restore_latest(training.state)
            first = (report.step or 0) + 1 if report is not None else 1
            for step in range(first, first + steps):
                manager.save(step, training.state, deltas=training.train(step))
        return training, training.whole()

    def test_a_replay_starts_from_it(self, tmp_path: Path) -> None:
        run, merged = tmp_path / "run", tmp_path / "merged"
        beside = Training(seed=6)
        _, truth = self.train(tmp_path, 5, merged)
        report = merge_deltas(run, merged, beside.state)
        assert report is not None
        assert report.step == 5
        check(beside.whole(), truth)
        assert merge_deltas(run, merged, beside.state) is None, "it was merged before"
        self.train(tmp_path, 6, merged)
        calls: list[int] = []
        fresh = Training(seed=7)
        steps = GradientSteps(fresh.state)

        def noted(step: int, deltas: Any) -> None:
            calls.append(step)
            steps(step, deltas)

        newest = max(run.glob("step-*"))
        assert merge_deltas(run, merged, fresh.state, noted)
        assert calls == list(range(6, 12)), "only the steps since"
        again = Training(seed=8)
        assert replay(newest, again.state)
        check(again.whole(), fresh.whole())
        ck = ucformat.open(max(merged.glob("step-*")))
        assert not ck.older
        assert not ck.manifest.bases, "it needs no other"
        loaded = Training(seed=9)
        assert load(loaded.state, ck)
        check(loaded.whole(), fresh.whole())

    def test_a_damaged_one_is_not_used(self, tmp_path: Path, caplog: Any) -> None:
        merged = tmp_path / "merged"
        _, truth = self.train(tmp_path, 5, merged)
        merge_deltas(tmp_path / "run", merged, Training().state)
        (data,) = merged.glob("step-*/data/*/*.bin")
        data.write_bytes(bytes(data.stat().st_size))
        fresh = Training(seed=8)
        partial = Deltas(batch=2, merged=str(merged))
        with Manager(tmp_path / "run", form="packed", partial=partial) as manager:
            assert manager.restore_latest(fresh.state)
        check(fresh.whole(), truth)
        assert "is not used" in caplog.text

    def test_one_of_another_run_is_refused(self, tmp_path: Path) -> None:
        training, _ = self.train(tmp_path, 5, tmp_path / "none")
        save(training.state, tmp_path / "other", step=3)
        with pytest.raises(UsageError, match="no whole checkpoint to which"):
            replay(tmp_path / "run" / "step-00000005", training.state, start=tmp_path / "other")

    def test_there_is_nothing_to_merge(self, tmp_path: Path) -> None:
        training = Training()
        save(training.state, tmp_path / "run" / "step-00000001", step=1)
        assert merge_deltas(tmp_path / "run", tmp_path / "merged", training.state) is None


class TestTuning:
    """The choice by the model of wasted time is the best one of all, and speeds are those that were recorded."""

    @settings(max_examples=60)
    @given(
        iteration=st.floats(0.01, 30),
        whole=st.floats(0, 100),
        batch=st.floats(0, 1),
        step=st.floats(0, 30),
        mtbf=st.floats(60, 1e6),
    )
    def test_nothing_is_better(
        self, iteration: float, whole: float, batch: float, step: float, mtbf: float
    ) -> None:
        costs = DeltaCosts(iteration, whole, batch, 60, step)
        chosen = tune_deltas(costs, mtbf, max_batch=12, max_chain=7)
        assert chosen.full is not None
        best = wasted_share(costs, mtbf, chosen.batch, chosen.full)
        for b in range(1, 13):
            for full in range(b, 8 * b + 1):
                assert best <= wasted_share(costs, mtbf, b, full) * (1 + 1e-9)

    def test_speeds_are_taken_from_a_run(self, tmp_path: Path) -> None:
        TestManager.run(tmp_path, 9)
        costs = DeltaCosts.measured(tmp_path, start=30)
        assert 0 < costs.iteration < 30
        assert costs.step == costs.iteration
        stalls = [
            max(w.stall for w in ucformat.open(place.parent).manifest.writers)
            for place in tmp_path.glob(f"step-*/{MANIFEST}")
        ]
        assert min(stalls) <= costs.batch <= max(stalls)
        chosen = tune_deltas(costs, 3600)
        with pytest.raises(MissingData, match="no save of everything"):
            DeltaCosts.measured(tmp_path / "empty", start=1)
        assert chosen.batch >= 1

    @pytest.mark.parametrize("wrong", [{"iteration": 0}, {"whole": -1}, {"step": float("nan")}])
    def test_numbers_that_are_none_are_refused(self, wrong: Any) -> None:
        right = {"iteration": 1, "whole": 1, "batch": 1, "start": 1, "step": 1}
        with pytest.raises(UsageError):
            DeltaCosts(**right | wrong)
        with pytest.raises(UsageError, match="mtbf"):
            tune_deltas(DeltaCosts(**right), 0)


def test_gradients_have_the_names_of_checkpoints() -> None:
    training = Training()
    training.train(1)
    assert gradients(training.state).keys() == {
        f"{layer}.{part}" for layer in (0, 1, 3) for part in ("weight", "bias")
    } | {"4.weight"}
