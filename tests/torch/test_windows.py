"""Sparse windows: what is replayed is bit for bit what the training had, under every expert-parallel degree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

import ucformat
from tests.torch.ranks import Ranks
from tests.torch.window_program import Training, window
from ucformat.errors import MissingData, NotCertified, UsageError
from ucformat.torch import Experts, Manager, Window, load, replay, save
from ucformat.torch.loading.replay import _complete

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = Ranks("tests.torch.window_program")


def joined(given: list[Any]) -> dict[int, dict[tuple[str, str], str]]:
    """What all ranks had at each step."""
    at: dict[int, dict[tuple[str, str], str]] = {}
    for at_steps, _ in given:
        for step, own in at_steps.items():
            at.setdefault(step, {}).update(own)
    return at


@pytest.mark.front("2-4")
@pytest.mark.parametrize("to", [1, 2, 4])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_replay_is_exact_under_each_degree(degree: int, to: int, tmp_path: Path) -> None:
    at = joined(PROGRAM.run("saved", degree, tmp_path, degree=degree, steps=10))
    for outcome in PROGRAM.run("replayed", to, tmp_path, degree=to, steps=[5, 9]):
        for step, (positive, having) in outcome.items():
            assert positive
            for later, own in enumerate(having, step):
                assert own == {key: at[later][key] for key in own}, (step, later)
            assert set().union(*having).issubset(at[step])


def trained(folder: Path, steps: int, **arguments: Any) -> tuple[Training, dict[int, Any]]:
    """Train on one rank, and save each step."""
    training, at = Training(), dict[int, Any]()
    for step in range(1, steps + 1):
        training.train(step)
        at[step] = training.digests()
        given: dict[str, Any] = {"partial": window(4), "form": "packed"} | arguments
        save(training.state, folder / str(step), step=step, **given)
    return training, at


@pytest.mark.front("packed-4")
@pytest.mark.parametrize("every", [4, 1])
@pytest.mark.parametrize("form", ["packed", "zarr"])
def test_each_checkpoint_of_a_run(form: str, every: int, tmp_path: Path) -> None:
    """The first is whole, then windows follow each other; of incomplete ones, steps are trained again."""
    _, at = trained(tmp_path, 10, form=form)
    manifests = {step: ucformat.open(tmp_path / str(step)).manifest for step in at}
    assert [m.window and m.window.at for m in manifests.values()] == [
        None,
        0,
        1,
        2,
        3,
        0,
        1,
        2,
        3,
        0,
    ]
    for step in range(1, 11, every):
        calls = list[int]()
        training = Training(seed=7)

        def once(number: int, training: Training = training, calls: list[int] = calls) -> None:
            calls.append(number)
            training.train(number)

        assert replay(tmp_path / str(step), training.state, once)
        assert training.digests() == at[step], step
        first = {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2, 7: 2, 8: 2, 9: 6, 10: 6}[step]
        assert calls == list(range(first + 1, step + 1))


def test_bytes_of_a_window(tmp_path: Path) -> None:
    trained(tmp_path, 5)
    written = [
        sum(w.nbytes for w in ucformat.open(tmp_path / str(n)).manifest.writers)
        for n in range(1, 6)
    ]
    assert (
        written[0] > written[1] > written[2] > written[3]
    )  # fewer and fewer weights of groups that follow
    older = ucformat.open(tmp_path / "4").older
    of = {
        int(k.name.split(".experts.")[1].split(".")[0]) % 4: set[tuple[bool, str, int]]()
        for k in older
    }
    for key, step in older.items():
        group = int(key.name.split(".experts.")[1].split(".")[0]) % 4
        of[group].add((key.name.startswith("layers."), key.state, step))
    assert {step for _, _, step in of[0]} == {2}
    assert {step for _, _, step in of[1]} == {3}
    assert (False, "weight", 2) in of[0]
    assert 2 not in of  # full in this one
    assert of[3] == {(True, s, 1) for s in ("weight", "exp_avg", "exp_avg_sq", "step")}


def test_groups_by_names(tmp_path: Path) -> None:
    """Everything is in a group, layers as a whole, so that each tensor is full once in a window."""
    groups = (("*layers.0.*",), ("*layers.1.*",))
    partial = Window(steps=2, groups=groups, update=("layers.*",))
    _, at = trained(tmp_path, 5, partial=partial)
    for step in (3, 5):
        training = Training(seed=7)
        replay(tmp_path / str(step), training.state, training.train)
        assert training.digests() == at[step]


def test_a_training_that_does_not_repeat_itself_is_found(tmp_path: Path) -> None:
    trained(tmp_path, 5)
    training = Training(seed=7)

    def other(step: int) -> None:
        training.train(step + (step == 4))

    with pytest.raises(NotCertified, match="the step before 4 was not repeated as when"):
        replay(tmp_path / "5", training.state, other)


@pytest.mark.parametrize(("wrong", "ref"), [(8, 9), (10, 11), (11, 11)])
def test_steps_after_the_last_window_are_compared(wrong: int, ref: int, tmp_path: Path) -> None:
    """What a checkpoint after a complete window has of its own step, in groups, too."""
    partial = Window(steps=2, groups=(("*layers.0.*",), ("*layers.1.*",)), update=("layers.*",))
    if ref == 11:
        partial = window(4)
    training, at = trained(tmp_path, ref, partial=partial)
    if ref == 9:  # the window of 8 and 9 is complete: 8 is the one in the middle of it
        ref = 8

    def other(step: int) -> None:
        training.train(step + (step == wrong))

    with pytest.raises(NotCertified, match=f"the step before {wrong} was not repeated as when"):
        replay(tmp_path / str(ref), training.state, other)
    assert replay(tmp_path / str(ref), training.state, training.train)
    assert training.digests() == at[ref]


def test_a_window_that_covers_everything_tells_that_nothing_is_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    partial = Window(steps=2, groups=(("*layers.0.*",), ("*layers.1.*",)), update=("layers.*",))
    trained(tmp_path, 4, partial=partial)
    for step, told in ((1, 0), (4, 0), (3, 1)):
        caplog.clear()
        training = Training(seed=7)
        assert replay(tmp_path / str(step), training.state, training.train, certify=True)
        assert caplog.text.count("tells whether the steps before it were repeated") == told, step


def test_a_replay_reports_the_lineage_of_what_was_asked_for(tmp_path: Path) -> None:
    """Not that of the checkpoint that was loaded last, which has fewer commits and may have another launch."""
    first = Training()
    with Manager(tmp_path, partial=window(4), form="packed") as manager:
        for step in range(1, 6):
            first.train(step)
            manager.save(step, first.state)
    second = Training(seed=7)
    with Manager(tmp_path, partial=window(4), form="packed") as manager:
        manager.restore_latest(second.state, strict_step=False)
        replay(tmp_path / "step-00000005", second.state, second.train)
        second.train(6)
        manager.save(6, second.state)
    place = tmp_path / "step-00000006"
    manifest, training = ucformat.open(place).manifest, Training(seed=8)
    report = replay(place, training.state, training.train)
    assert training.digests() == second.digests()
    assert (report.lineage.id, report.lineage.commits) == (manifest.id, manifest.commits)
    assert report.launch == manifest.launch
    assert report.lineage.kind == "resume"
    later = save(training.state, tmp_path / "7", step=7, lineage=[report.lineage])
    commits = ucformat.open(later.url).manifest.commits
    assert commits is not None
    assert manifest.commits is not None
    assert commits > manifest.commits


class Incomplete:
    """A checkpoint that is based on each one before it, of which none is the last of a window."""

    def __init__(self, below: list[Incomplete], looked_at: list[str]) -> None:
        self.manifest = SimpleNamespace(
            id=str(len(below)), step=len(below), window=window(4).document(1), bases=below
        )
        self.bases = self
        self._below, self._looked_at = below, looked_at

    def place(self, number: int) -> str:
        return str(number)

    def opened(self, number: int) -> Incomplete:
        self._looked_at.append(str(number))
        return self._below[number]


def test_a_chain_without_a_complete_window_is_searched_once() -> None:
    """Each checkpoint of it once, and not once for each path that leads to it."""
    chain, looked_at = list[Incomplete](), list[str]()
    for _ in range(16):
        chain.append(Incomplete(chain.copy(), looked_at))
    with pytest.raises(MissingData, match="no window up to 15 is complete"):
        _complete(cast("Any", chain[-1]), "15")
    assert len(looked_at) == 16 * 15 / 2


def test_what_cannot_be_replayed(tmp_path: Path) -> None:
    training, _ = trained(tmp_path, 3)
    training.train(4)
    training.train(5)
    save(training.state, tmp_path / "5", step=5, partial=window(4))  # 4 is not saved
    record = ucformat.open(tmp_path / "5").manifest.window
    assert record is not None
    assert record.at == 0
    anew = Training(seed=7)
    replay(tmp_path / "5", anew.state, anew.train)  # from 1, which is whole
    assert anew.digests() == training.digests()
    with pytest.raises(UsageError, match="strict_step is not an argument"):
        replay(tmp_path / "5", anew.state, anew.train, strict_step=False)
    assert not load(anew.state, tmp_path / "5")
    training.train(6)
    save(training.state, tmp_path / "6", step=6, partial=window(4))
    ucformat.compact(tmp_path / "6")  # after which nothing leads to the checkpoints before
    save(training.state, tmp_path / "7", step=7, partial=window(4), base=tmp_path / "6")
    for step in (6, 7):
        with pytest.raises(MissingData, match=r"no window up to .* is complete"):
            replay(tmp_path / str(step), anew.state, anew.train)
    training.train(8)
    save(training.state, tmp_path / "8", step=8, partial=Experts(), base=tmp_path / "5")
    with pytest.raises(UsageError, match="is not of a window"):
        replay(tmp_path / "8", anew.state, anew.train)


def places(folder: Path) -> dict[int, int | None]:
    """The place in its window of each checkpoint in a folder, by step."""
    manifests = [ucformat.open(path.parent).manifest for path in folder.glob("*/manifest.json")]
    return {m.step or 0: None if m.window is None else m.window.at for m in manifests}


@pytest.mark.parametrize("managed", [True, False])
def test_a_window_does_not_go_on_over_a_restart(managed: bool, tmp_path: Path) -> None:
    """Groups that were full before the restart are older in memory, so later ones make no exact whole of them."""

    def go_on(training: Training, first: int, last: int, *lineage: Any, manager: Any) -> None:
        for step in range(first, last + 1):
            training.train(step)
            if managed:
                manager.save(step, training.state)
            else:
                given: Any = {"partial": window(4), "form": "packed", "lineage": lineage}
                save(training.state, tmp_path / str(step), step=step, **given)

    with Manager(tmp_path, partial=window(4), form="packed") as manager:
        go_on(Training(), 1, 4, manager=manager)
    restarted = Training(seed=7)
    with Manager(tmp_path, partial=window(4), form="packed") as manager:
        if managed:
            manager.restore_latest(restarted.state, strict_step=False)
            go_on(restarted, 5, 8, manager=manager)
        else:
            report = load(restarted.state, tmp_path / "4", strict_step=False)
            go_on(restarted, 5, 8, report.lineage, manager=manager)
    assert places(tmp_path) == {1: None, 2: 0, 3: 1, 4: 2, 5: 0, 6: 1, 7: 2, 8: 3}
    newest = next(p for p in tmp_path.iterdir() if p.name.endswith("8"))
    anew = Training(seed=9)
    assert replay(newest, anew.state, anew.train)
    assert anew.digests() == restarted.digests()


def test_a_window_does_not_go_on_from_another_line_of_training(tmp_path: Path) -> None:
    _, _ = trained(tmp_path, 4)
    other = Training(seed=7)
    report = load(other.state, tmp_path / "3", strict_step=False)
    for step in (4, 5):
        other.train(step)
    given: Any = {"partial": window(4), "base": tmp_path / "4", "lineage": [report.lineage]}
    save(other.state, tmp_path / "5", step=5, form="packed", **given)
    assert places(tmp_path)[5] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 1}, "2 to 63 checkpoints"),
        ({"steps": 64}, "2 to 63 checkpoints"),
        ({"steps": 2, "groups": (("a",),)}, "1 groups in a window of 2"),
        ({"steps": 2, "max_chain": 0}, "max_chain"),
    ],
)
def test_windows_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Window(**arguments)


def test_a_group_without_tensors_is_refused(tmp_path: Path) -> None:
    training, _ = trained(tmp_path, 1)
    for partial in (window(9), Window(steps=2, groups=(("*",), ("nothing",)))):
        with pytest.raises(UsageError, match="of the window has no tensors"):
            save(training.state, tmp_path / "2", step=2, partial=partial)
    wrong = Window(steps=4, update=("master.*",))
    with pytest.raises(UsageError, match="no tensor has a name like"):
        save(training.state, tmp_path / "2", step=2, partial=wrong)
    assert not (tmp_path / "2").exists() or not list((tmp_path / "2").rglob("*.bin"))
