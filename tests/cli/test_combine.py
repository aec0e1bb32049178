"""`ucp average` and `ucp merge`, and the guide to them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

import ucformat
from tests.cli.conftest import object_of
from tests.jobs.combine.reference import saved
from tests.jobs.combine.test_lora import adapter, low_rank

if TYPE_CHECKING:
    from tests.cli.conftest import Run

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "combine.md"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoints of the guide, in a catalog."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for step in (1000, 2000):
        w = rng.standard_normal((20, 30)).astype(np.float32)
        place = saved(tmp_path / "ckpt" / str(step), {"x.q.weight": w}, step=step)
        ucformat.convert(
            place, tmp_path / "run7" / str(step), run="run7", metrics={"val_loss": 3 - step / 1000}
        )
        with ucformat.Catalog() as catalog:
            catalog.metric(str(place), {"val_loss": 3 - step / 1000})
    (tmp_path / "base").mkdir()
    save_file(
        {"x.q.weight": rng.standard_normal((20, 30)).astype(np.float32)},
        tmp_path / "base" / "model.safetensors",
    )
    adapter(tmp_path / "adapter", low_rank("x.q", 20, 30))
    return tmp_path


def test_the_guide(models: Path, run: Run) -> None:
    text = GUIDE.read_text()
    (lines,) = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    commands = [line.removeprefix("$ ucp ").split() for line in lines.splitlines()]
    assert len(commands) == 10
    for command in commands:
        done = run(*command)
        assert done.exit_code == 0, done.stderr
    assert "average (weight 0.99, ema 0.99, step 1000)" in done.stdout
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "combine.md", "exec"), {})  # noqa: S102
    assert (models / "py-merged" / "manifest.json").exists()
    cli, python = (ucformat.open(place)["x.q.weight"][...] for place in ("weighted", "py-weighted"))
    assert np.array_equal(cli, python)


def test_what_it_prints(models: Path, run: Run) -> None:
    done = run(
        "average", "ckpt/1000", "ckpt/2000", "dst", "--json", "-s", "weight", "--take", "x.*"
    )
    found = object_of(done.stdout)
    assert (found["tensors"], found["bytes"]) == (1, 2400)
    assert found["id"] == ucformat.open("dst").id
    assert (
        run("average", "ckpt/1000", "ckpt/2000", "other", "-q").stdout.strip()
        == ucformat.open("other").id
    )
    edges = json.loads(run("lineage", "dst", "--json", "--depth", "1").stdout)["edges"]
    assert [e["how"] for e in edges] == [{"method": "average", "weight": 0.5}] * 2


def test_what_it_would_cost(models: Path, run: Run) -> None:
    of_two = object_of(
        run("average", "ckpt/1000", "ckpt/2000", "dst", "--dry-run", "--json").stdout
    )
    words = [
        "merge",
        "ckpt/1000",
        "ckpt/2000",
        "dst",
        "--method",
        "ties",
        "--base",
        "base",
        "--dry-run",
    ]
    of_ties = object_of(run(*words, "--json").stdout)
    assert of_ties["tasks"] == of_two["tasks"] == 1
    assert of_two["bytes_read"] >= 2 * 2400
    assert of_ties["bytes_read"] >= 3 * 3 * 2400
    assert of_ties["bytes_written"] == of_two["bytes_written"] >= 2400
    assert "1 task; nothing was done" in run(*words).stdout
    assert not (models / "dst").exists()
    assert (
        "needs a base"
        in run("merge", "ckpt/1000", "dst", "--method", "ties", "--dry-run", code=2).stderr
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["average", "ckpt/1000", "dst"], "two checkpoints or more"),
        (["average", "ckpt/1000", "ckpt/2000", "dst", "--weights", "1;2"], "not a list of numbers"),
        (["average", "ckpt/1000", "ckpt/2000", "dst", "--by", "metric.val_loss"], "--min or --max"),
        (
            ["merge", "ckpt/1000", "dst", "--method", "dare", "--base", "base", "--density", "0.5"],
            "--seed",
        ),
        (["merge", "ckpt/1000", "dst", "--method", "slerp"], "exactly two"),
    ],
)
def test_usage(models: Path, run: Run, words: list[str], message: str) -> None:
    done = run(*words, code=2)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (models / "dst").exists()


def test_a_view_of_all_inputs(models: Path, run: Run) -> None:
    (models / "view.yaml").write_text("version: 1\nview:\n  - {rename: '/x.(.*)/', to: 'y.\\1'}\n")
    done = run("average", "ckpt/1000", "ckpt/2000", "dst", "--view", "view.yaml")
    assert done.exit_code == 0, done.stderr
    assert ucformat.open("dst").names() == ["y.q.weight"]
