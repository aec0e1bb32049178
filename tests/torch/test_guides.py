"""The programs of the guides run as they are printed, and do what the guides say."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ucformat
from tests.torch.running import fork

ROOT = Path(__file__).parents[2]
#: `make test` runs what `tests/torch/integrations` try of these libraries, and `make test-all`
#: their guides too.
of_an_integration = pytest.mark.matrix


def follow(page: str, folder: Path, **variables: str) -> list[str]:
    """Write the programs of a guide to a folder, and do there what its consoles say; what each command printed.

    A command that ends with `&` runs while the next one does.
    """
    text = (ROOT / "docs" / "guides" / page).read_text()
    for name, code in re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(code)
    lines = [
        line
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    with ThreadPoolExecutor() as pool:
        running = []
        for number, line in enumerate(lines):
            command = line.removeprefix("$ ").removesuffix(" &")
            log = folder / f"log-{number}.txt"
            running.append(pool.submit(run, command.split(), folder, log, **variables))
            if not line.endswith(" &"):
                running[-1].result()
        return [command.result() for command in running]


def run(words: list[str], folder: Path, log: Path, **variables: str) -> str:
    if words[0] == "torchrun":
        option, nproc, *script = words[1:]
        assert option == "--nproc-per-node"
        return fork(int(nproc), script, log, cwd=folder, PYTHONSAFEPATH="", **variables)
    script = {"ucp": ["-m", "ucformat.cli"], "python": []}[words[0]] + words[1:]
    return fork(0, script, log, cwd=folder, PYTHONSAFEPATH="", **variables)


def losses(text: str) -> dict[int, float]:
    """The losses that a program printed; not by lines, for all ranks write to one file, unbuffered ones in parts."""
    return {
        int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([-+.\de]+)", text)
    }


def goes_on(first: str, second: str, steps: range) -> None:
    """The second run has the losses of the first for these steps, and no others."""
    expected, found = losses(first), losses(second)
    assert list(found) == list(steps)
    assert [found[s] for s in steps] == pytest.approx([expected[s] for s in steps], rel=1e-5)
    assert len(set(expected.values())) == len(
        expected
    )  # that they fall proves that something is learned


def test_fsdp2(tmp_path: Path) -> None:
    first, second = follow("fsdp2.md", tmp_path)
    goes_on(first, second, range(5, 7))
    a, b = (ucformat.open(tmp_path / folder / "last") for folder in ("checkpoints", "other"))
    assert (
        a.metadata.step,
        a.manifest.run,
        a.manifest.layout["world"],
        b.manifest.layout["world"],
    ) == (
        6,
        "fsdp2",
        2,
        3,
    )
    assert a.tensors == b.tensors
    assert {k.state for k in a.tensors} == {"weight", "exp_avg", "exp_avg_sq", "step"}


def test_saving_less(tmp_path: Path) -> None:
    first, second, verified, shown = follow("save_less.md", tmp_path)
    nbytes = {
        int(step): int(n.replace(",", ""))
        for step, n in re.findall(r"step (\d+): ([\d,]+) bytes", first + second)
    }
    assert list(nbytes) == list(range(1, 13))
    whole = {1, 6, 11}  # after chains of four
    assert all((n > 2_000_000) == (step in whole) for step, n in nbytes.items())
    assert all(n < 200_000 for step, n in nbytes.items() if step not in whole)
    assert "step-00000011" in shown
    assert verified


def test_saving_some_experts(tmp_path: Path) -> None:
    first, second, shown, verified, *of_deltas = follow("sparse.md", tmp_path)
    nbytes = {
        int(step): int(n.replace(",", ""))
        for step, n in re.findall(r"step (\d+): ([\d,]+) bytes", first + second)
    }
    assert list(nbytes) == list(range(2, 25, 2))
    assert all(n < nbytes[2] for step, n in nbytes.items() if step > 2)
    assert nbytes[24] < nbytes[2] / 2
    assert re.search(r"restored step 12; experts are older by up to \d+ steps", second)
    assert re.search(r"older +\d+ tensors", shown)
    assert re.search(r"lost +\d+\.\d+ % of tokens", shown)
    assert "older than the checkpoint's step" in verified
    once, again, shown = of_deltas
    assert "trained up to step 50, saved" in once
    assert "trained up to step 100, saved" in again
    assert re.search(r"deltas +of steps 99 to 100, of a chain that begins with step 1", shown)


@pytest.mark.matrix
def test_trackers(tmp_path: Path) -> None:
    catalog = str(tmp_path / "catalog.db")
    _, dry, first, runs, again = follow("trackers.md", tmp_path, UCP_CATALOG=catalog)
    assert "4 of 4 checkpoints would be changed" in dry
    assert "4 of 4 checkpoints changed" in first
    assert re.search(r"run7 +4 +10 to 40 +0\.\d+ +40", runs)
    assert "0 of 4 checkpoints changed" in again


def test_fsdp2_and_tensor_parallelism(tmp_path: Path) -> None:
    first, second, _ = follow("fsdp2_tp.md", tmp_path)
    goes_on(first, second, range(5, 7))
    ck = ucformat.open(tmp_path / "checkpoints" / "4")
    assert ck.aliases == {"out.weight": "embed.weight"}
    assert (ck.manifest.layout["dp"], ck.manifest.layout["tp"]) == (2, 2)
    assert ck.manifest.sidecar is None


@of_an_integration
def test_hugging_face(tmp_path: Path) -> None:
    first, second, loop, again = follow("huggingface.md", tmp_path)
    expected, found = losses(first), losses(second)
    assert list(expected) == list(found) == list(range(1, 7))
    assert [found[s] for s in range(1, 5)] == [
        expected[s] for s in range(1, 5)
    ]  # of the checkpoint
    assert [found[s] for s in (5, 6)] == pytest.approx([expected[s] for s in (5, 6)], rel=1e-4)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoint-4", "checkpoint-6"]
    ck = ucformat.open(tmp_path / "run" / "checkpoint-6")
    assert (ck.manifest.config["learning_rate"], ck.manifest.layout["world"]) == (1e-3, 2)
    goes_on(loop, again, range(5, 7))
    assert ucformat.open(tmp_path / "loop" / "4").names() == ["0.weight", "1.weight", "1.bias"]


@of_an_integration
def test_lightning(tmp_path: Path) -> None:
    first, second = follow("lightning.md", tmp_path)
    goes_on(first, second, range(3, 5))  # of epochs
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == [
        "epoch=2.ckpt",
        "epoch=3.ckpt",
    ]


@of_an_integration
def test_torchtitan(tmp_path: Path) -> None:
    first, second = follow("torchtitan.md", tmp_path)
    goes_on(first, second, range(5, 7))
    for folder in ("run", "another"):
        kept = sorted(p.name for p in (tmp_path / folder).iterdir())
        assert kept[-1] == "step-00000006"


def test_the_calls_of_dcp(tmp_path: Path) -> None:
    first, second = follow("dcp.md", tmp_path)
    goes_on(first, second, range(5, 7))
    ck = ucformat.open(tmp_path / "run" / "4")
    assert (ck.manifest.layout["world"], list(ck.manifest.metrics)) == (2, ["loss"])


def test_the_loop_with_a_manager(tmp_path: Path) -> None:
    first, second = follow("training.md", tmp_path)
    used = [re.findall(r"step (\d+): rank \d used \[([\d, ]*)\]", text) for text in (first, second)]
    assert sorted(int(step) for step, _ in used[0]) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [int(step) for step, _ in used[1]] == [5, 6]
    kept = [taken for step, taken in used[0] if int(step) < 5] + [taken for _, taken in used[1]]
    numbers = [int(n) for taken in kept for n in taken.split(", ")]
    assert sorted(numbers) == list(range(24))
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]
    lineage = ucformat.open(tmp_path / "run" / "step-00000006").manifest.lineage
    assert [entry.kind for entry in lineage] == ["reshard"]  # from two ranks to one


def test_tiers(tmp_path: Path) -> None:
    first, second = follow("tiers.md", tmp_path)
    assert re.findall(r"begin with step (\d+)", first) == ["1", "1"]
    assert re.findall(r"begin with step (\d+)", second) == ["9"]

    def steps(folder: str) -> list[str]:
        return sorted(p.name for p in (tmp_path / folder).iterdir())

    assert steps("memory") == ["step-00000014", "step-00000016"]
    assert steps("run") == ["step-00000006", "step-00000012"]
    shutil.rmtree(tmp_path / "memory")
    third = fork(2, ["train.py"], tmp_path / "third.txt", cwd=tmp_path, PYTHONSAFEPATH="")
    assert re.findall(r"begin with step (\d+)", third) == ["13", "13"]


def test_publish(tmp_path: Path) -> None:
    trained, served = follow("publish.md", tmp_path)
    bases = re.findall(r"published version (\d+): a patch of (\w+)", trained)
    assert [base for _, base in bases] == ["None", *map(str, range(1, 9)), "None"]
    updates = re.findall(r"serving version (\d+): read (\d+) bytes (\w*)", served)
    assert [reason for *_, reason in updates] == ["first", *[""] * (len(updates) - 1)]
    assert updates[-1][0] == "10"
    assert len(list((tmp_path / "policy").glob("v-*"))) == 10  # of which the ninth is a patch


@pytest.mark.matrix  # `make test` runs tests/runs
def test_study(tmp_path: Path) -> None:
    pytest.importorskip("xarray", reason="pip install 'ucformat[test]'")
    _, studied, drift = follow("study.md", tmp_path)
    assert "(10, 64, 64) float32" in studied
    norms = re.findall(r"step (\d+): norm of the update ([\d.]+)", studied)
    assert [int(step) for step, _ in norms] == list(range(20, 101, 10))
    values = [float(value) for value in re.findall(r"\d+\.\d+", drift)]
    assert len(values) == 6
    assert values[0] < values[-1]
