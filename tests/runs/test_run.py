"""A tensor of a run is the stack of what its checkpoints hold, and is planned and read as little as that needs."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ucformat
from tests.fakes import Arrays, FakeSource, random_array, same
from tests.packed import write_packed
from tests.torch.runs import data_file, fill, state_at
from tests.zero_files import FLAT, write_zero3
from ucformat.checkpoint import Checkpoint
from ucformat.errors import ChecksumError, OutOfBounds, TensorNotFound, UsageError
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3 import Bucket
    from ucformat.runs.run import Run

STEPS = (3, 10, 20, 21, 40)
FORMS = ("arrays", "packed", "encoded", "packed", "arrays")
FROZEN = random_array((6, 4), "bfloat16", 99)


def arrays_at(step: int) -> Arrays:
    return {
        ("a", "weight"): random_array((7, 9, 5), "bfloat16", step),
        ("a", "exp_avg"): random_array((7, 9, 5), "float32", step + 1),
        ("frozen", "weight"): FROZEN,
        ("scalar", "weight"): random_array((), "float64", step),
        ("step", "weight"): random_array((3,), "int64", step),
        ("only.master", "master"): random_array((4,), "float32", step),
    }


def save(place: Path, step: int, arrays: Arrays, form: str = "arrays", chunk: int = 256) -> None:
    """A universal checkpoint in one of its forms."""
    if form == "packed":
        write_packed(LocalStore(place), arrays, block_bytes=chunk, step=step, run="run")
        return
    source = Checkpoint(FakeSource.write(MemoryStore(f"run-{place}"), arrays, step=step))
    codec: Literal["blosc"] | None = "blosc" if form == "encoded" else None
    ucformat.convert(source, place, chunk_bytes=chunk, shard_bytes=4 * chunk, codec=codec)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    for step, form in zip(STEPS, FORMS, strict=True):
        save(folder / f"step-{step}", step, arrays_at(step), form)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return ucformat.run(folder)


def labels() -> st.SearchStrategy[Any]:
    edges = st.none() | st.integers(0, 50)
    slices = st.builds(slice, edges, edges, st.none() | st.integers(1, 20))
    return slices | st.sampled_from(STEPS) | st.just(...)


def chosen(label: Any) -> list[int]:
    if isinstance(label, int):
        return [label]
    if label is ...:
        return list(STEPS)
    numbers = range(label.start or 0, 99 if label.stop is None else label.stop, label.step or 1)
    return [step for step in STEPS if step in numbers]


@settings(max_examples=60)
@given(label=labels(), rest=hnp.basic_indices((7, 9, 5), allow_newaxis=False), data=st.data())
def test_a_slice_is_the_stack_of_single_reads(
    run: Run, label: Any, rest: Any, data: st.DataObject
) -> None:
    rest = rest if isinstance(rest, tuple) else (rest,)
    if label is ... and Ellipsis in rest:
        label = slice(None)
    elif label is ...:
        rest += (slice(None),) * (3 - len(rest))
    index, steps = (label, *rest), chosen(label)
    t = run["a"]
    if not steps:
        with pytest.raises(OutOfBounds, match="has none of the steps"):
            t[index]
        return
    parts = [np.asarray(arrays_at(step)["a", "weight"][rest]) for step in steps]
    expected = parts[0] if isinstance(label, int) else np.stack(parts)
    assert same(t[index], np.ascontiguousarray(expected).reshape(expected.shape))
    plan = t.plan(index)
    assert (plan.shape, plan.nbytes) == (expected.shape, expected.nbytes)
    assert sorted([*plan.plans, *plan.same_as]) == steps

    order = data.draw(st.permutations(range(expected.ndim)))
    memory = np.zeros([expected.shape[dim] * 2 for dim in order], expected.dtype)
    taken: Any = (..., *(slice(None, None, data.draw(st.sampled_from([2, -2]))) for _ in order))
    out = memory[taken].transpose(np.argsort(order).tolist())
    assert t.read(index, out) is out
    assert out.tobytes() == expected.tobytes()
    out[...] = 0
    assert not any(memory.tobytes())  # what lies between stays as it is


def test_every_tensor_in_every_state(run: Run) -> None:
    assert run.steps == STEPS
    assert run.names() == list(run) == ["a", "frozen", "scalar", "step", "only.master"]
    assert run.states("a") == ["weight", "exp_avg"]
    for name, state in arrays_at(0):
        t = run[name, state]
        expected = np.stack([arrays_at(step)[name, state] for step in STEPS])
        assert (t.shape, t.ndim, t.size, len(t)) == (
            expected.shape,
            expected.ndim,
            expected.size,
            len(STEPS),
        )
        assert (t.dtype, t.nbytes, t.steps) == (expected.dtype, expected.nbytes, STEPS)
        assert same(t[...], expected)
        assert same(np.asarray(t), expected)
        assert same(t[10], np.asarray(expected[1]))
    assert run["a"].dtype == ml_dtypes.bfloat16
    assert run["only.master"].state == "master"
    assert "a" in run
    assert "exp_avg_sq" not in run.states("a")
    assert "b" not in run


def test_a_plan_tells_what_is_read_before_it_is(run: Run, folder: Path) -> None:
    plan = run["a", "exp_avg"].plan(np.s_[10:41:10, 0:2])
    assert set(plan.plans) == {10, 20, 40}
    assert plan.bytes_needed == plan.nbytes == 3 * 2 * 9 * 5 * 4
    assert plan.bytes_read == sum(p.bytes_read for p in plan.plans.values()) >= plan.bytes_needed
    assert plan.requests == sum(p.ranges for p in plan.plans.values())
    lines = str(plan).splitlines()
    assert lines[0] == "a (exp_avg): 3 steps, [3, 2, 9, 5], 1.1 KiB of memory"
    assert [line.split(":")[0] for line in lines[4:]] == ["  step 10", "  step 20", "  step 40"]


def test_a_long_plan_shows_its_ends(folder: Path) -> None:
    run = ucformat.run(folder)
    plan = run["a"].plan()
    long = ucformat.RunPlan("a", dict.fromkeys(range(100), plan.plans[3]), {}, (100, 7, 9, 5), 1)
    assert len(str(long).splitlines()) == 4 + 13
    assert "  … 88 more steps" in str(long)
    all_shown = dict.fromkeys(range(12), plan.plans[3])
    assert "more" not in str(ucformat.RunPlan("a", all_shown, {}, (12, 7, 9, 5), 1))


def test_a_tensor_that_did_not_change_is_read_once(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / "run" / f"step-{step}", step, arrays_at(step if step < 3 else 1))
    run = ucformat.run(tmp_path / "run")
    plan = run["frozen"].plan()
    assert (list(plan.plans), plan.same_as) == ([1], {2: 1, 3: 1})
    assert "not read    2 steps" in str(plan)
    assert run["a"].plan().same_as == {3: 1}
    # so what the later ones have of it is not looked at
    for file in (tmp_path / "run" / "step-2").rglob("frozen/c/**/*"):
        if file.is_file():
            file.unlink()
    assert same(run["frozen"][...], np.stack([FROZEN] * 3))
    assert same(run["a"][...], np.stack([arrays_at(s)["a", "weight"] for s in (1, 2, 1)]))


def test_only_the_chosen_checkpoints_are_opened(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    fill(tmp_path / "run7", *range(10, 60, 10))
    (tmp_path / "run7" / "step-00000030" / "manifest.json").write_text("{}")
    run = ucformat.run("run7")
    expected = np.stack([state_at(step)["model"]["a"].numpy() for step in (10, 20)])
    assert same(run["a"][:30], expected)
    with pytest.raises(Exception, match="step 30: ") as caught:
        run["a"][:40]
    assert "leave_out=[30]" in str(caught.value)
    whole = ucformat.run("run7", leave_out=[30])
    assert whole.steps == (10, 20, 40, 50)
    assert whole["a"].shape == (4, 33, 16)


def test_a_damaged_tensor_names_the_step(tmp_path: Path) -> None:
    fill(tmp_path / "run7", 1, 2, 3)
    file = data_file(tmp_path / "run7" / "step-00000002")
    file.write_bytes(bytes(64) + file.read_bytes()[64:])
    run = ucformat.run(tmp_path / "run7")
    (name,) = (n for n in run if f"/{n}/" in str(file))
    with pytest.raises(ChecksumError, match="step 2: ") as caught:
        run[name][...]
    assert "ucformat.run(…, leave_out=[2])" in str(caught.value)
    assert len(run.select([1, 3])[name][...]) == 2


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (15, "has no step 15\n  hint: .*near it are 10 and 20"),
        (-1, "has no step -1"),
        (slice(11, 20), "has none of the steps 11:20\n  hint: its steps are 3, 10, 20, 21, 40"),
        (slice(-3, None), "cannot select steps by -3:\n"),
        (slice(None, None, -1), "cannot select steps by ::-1\n"),
        (slice(0, 9, 0), "cannot select steps by 0:9:0\n"),
        ([10, 20], r"cannot select steps by \[10, 20\]"),
        (True, "cannot select steps by True"),
        ((3, 7), "index 7 is out of bounds for dim 0 of size 7"),
        ((3, 0, 0, 0, 0), "does not fit the shape"),
        ((..., 0, ...), "does not fit the shape"),
    ],
)
def test_what_is_no_index_is_an_error(run: Run, index: Any, said: str) -> None:
    for use in (run["a"].__getitem__, run["a"].plan):
        with pytest.raises(UsageError, match=said):
            use(index)


def test_an_array_that_does_not_fit_is_not_filled(run: Run) -> None:
    for out in (np.empty((5, 7, 9, 5), "float32"), np.empty((4, 7, 9, 5), ml_dtypes.bfloat16)):
        with pytest.raises(UsageError, match="needed is bfloat16"):
            run["a"].read(out=out)


def test_steps_of_which_a_tensor_differs_are_named(tmp_path: Path) -> None:
    shapes = {1: (2, 3), 2: (2, 3), 3: (4, 3), 4: (4, 3)}
    for step, shape in shapes.items():
        arrays = {("w", "weight"): random_array(shape, "float32", step)}
        if step % 2:
            arrays["odd", "weight"] = random_array((2,), "float32", step)
        save(tmp_path / "run" / str(step), step, arrays)
    run = ucformat.run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"float32 \[2, 3\] at 1, 2; float32 \[4, 3\] at 3, 4"):
        _ = run["w"].shape
    assert run["w"][3:].shape == run.select(slice(3, None))["w"].shape == (2, 4, 3)
    with pytest.raises(TensorNotFound, match=r"no odd \(weight\) at the steps 2, 4\n.*: 1, 3"):
        run["odd"][...]
    assert run.select([3, 1])["odd"].shape == (2, 2)
    with pytest.raises(TensorNotFound, match="'none'"):
        run["none"]
    with pytest.raises(TensorNotFound, match="'exp_avg'"):
        run["w", "exp_avg"]
    with pytest.raises(TensorNotFound):
        run.states("none")
    with pytest.raises(UsageError, match="no step is selected"):
        run.select([])


def test_a_run_of_an_engine(tmp_path: Path) -> None:
    expected = {}
    for step in (100, 200, 1000):
        arrays = {("a", s): random_array((4, 6), "float32", step + i) for i, s in enumerate(FLAT)}
        write_zero3(tmp_path / "run", arrays, 2, step)
        expected[step] = arrays
    run = ucformat.run(tmp_path / "run")
    assert run.steps == (100, 200, 1000)
    for state in FLAT:
        parts = np.stack([expected[s]["a", state] for s in run.steps])
        assert same(run["a", state][:, 1:3, ::2], np.ascontiguousarray(parts[:, 1:3, ::2]))
    assert not run["a"].plan().same_as  # nothing is recorded of what it holds


def test_a_run_in_an_object_store(bucket: Bucket, tmp_path: Path) -> None:
    fill(tmp_path / "run7", 5, 6, 7)
    local, remote = (
        open_store(tmp_path / "run7"),
        open_store(bucket.place("in-an-object-store/run7")),
    )
    for info in local.list():
        remote.put_if_absent(info.key, local.read(info.key))
    run = ucformat.run(remote.url)
    expected = np.stack([state_at(step)["model"]["b"].numpy() for step in (5, 6, 7)])
    assert same(run["b"][...], expected)
    assert same(run["b"][5:7, 3:9, 1], np.ascontiguousarray(expected[:2, 3:9, 1]))


def test_a_run_goes_to_other_processes(run: Run, folder: Path) -> None:
    again = pickle.loads(pickle.dumps(run.select(slice(10, 30))))  # noqa: S301
    assert again.steps == (10, 20, 21)
    assert again.recipe == run.select(slice(10, 30)).recipe
    assert same(again["a"][...], run["a"][10:30])
    assert repr(again) == f"<ucformat.Run {folder}: steps 10, 20, 21>"
    assert run.checkpoint(10) is run.checkpoints([10])[0]
