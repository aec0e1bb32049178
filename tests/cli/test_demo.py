"""`ucp demo`: a run in a folder of its own, with commands that work where they are pasted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file

import ucformat
from ucformat.cli.demo_training import Training

if TYPE_CHECKING:
    from tests.cli.conftest import Run

#: What `pip install ucformat` does not install, and the C extension.
OPTIONAL = ("torch", "starlette", "uvicorn", "jinja2", "zarr", "tensorstore", "numcodecs", "boto3")
BARE = (
    f"import sys; sys.modules |= dict.fromkeys({(*OPTIONAL, 'ucformat._native')}); "
    "from ucformat.cli.main import main; main()"
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment whose user has a home without anything, and a catalog of his own."""
    (tmp_path / "home").mkdir()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("UCP_", "XDG_"))}
    return clean | {
        "HOME": str(tmp_path / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "UCP_CATALOG": str(tmp_path / "home" / "own.db"),
    }


def test_each_command_works_when_it_is_pasted(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = tmp_path / "it's here"
    done = subprocess.run(
        [sys.executable, "-c", BARE, "demo", str(folder), "--json"],
        env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert done.stderr == ""
    assert told["folder"] == str(folder)
    *steps, serve = told["steps"]
    assert serve["command"] == "pip install 'ucformat[web]' && ucp serve"
    assert {step["command"].split()[1] for step in steps} >= {
        *("register", "ls", "show", "get", "-c", "plan", "diff", "average", "verify", "export"),
    }
    script = "\n".join(["set -e", *told["prepare"], *(step["command"] for step in steps)])
    environ["UCP_CATALOG"] = str(tmp_path / "home" / "other.db")
    pasted = subprocess.run(
        ["bash"],
        check=False,
        input=script,
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert pasted.returncode == 0, pasted.stderr
    assert "bit for bit: True" in pasted.stdout
    for step in steps:  # the same is printed again, but of times
        if step["command"].split()[1] in ("get", "plan", "-c"):
            assert step["output"] in pasted.stdout
    assert list((tmp_path / "home").iterdir()) == [], "something of the user's was used"
    _check_values(folder)


def _check_values(folder: Path) -> None:
    """Each rank's file holds its part of what was trained, and the average is that of what is stored."""
    training, held = Training(), []
    for step in (20, 40, 60, 80):
        training.train(20)
        place = folder / "tiny" / f"global_step{step}"
        assert len(list(place.glob("*optim_states.pt"))) == 4
        held.append(ucformat.open(place)["lm_head.weight"].numpy())
        # not to the bit: the threads of BLAS differ
        assert np.allclose(held[-1], training.weights["lm_head.weight"], rtol=1e-3, atol=1e-3)
    exported = load_file(folder / "model" / "model.safetensors")["lm_head.weight"]
    mean = np.mean(np.stack(held[2:]).astype(np.float64), axis=0).astype(np.float32)
    assert exported.tobytes() == mean.tobytes()


def test_the_model_learns() -> None:
    training = Training()
    losses = [training.train(20) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 1


@pytest.mark.matrix
def test_people_are_told_each_step_and_it_is_served(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    pytest.importorskip("uvicorn", reason="needs pip install 'ucformat[web]'")
    command = [sys.executable, "-m", "ucformat.cli", "demo"]
    for name in ("ucp-demo", "ucp-demo-2"):
        done = subprocess.run(
            [*command, "--quiet"] if name == "ucp-demo-2" else command,
            env=environ, cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert (tmp_path / name / "catalog.db").exists()
        if name == "ucp-demo-2":
            assert done.stdout == f"{tmp_path / name}\n"
            continue
        assert f"\n  $ cd {tmp_path / name}\n  $ export UCP_CATALOG=" in done.stdout
        assert "\n  $ ucp serve\n  GET /tiny/resolve/main/model.safetensors: " in done.stdout
        assert done.stdout.index("$ ucp register") < done.stdout.index("What to try next")


def test_nothing_is_written_into_a_folder_that_is_not_empty(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("mine", "file"):
        result = run("demo", tmp_path / name, code=4)
        assert "is not an empty folder" in result.stderr
        assert "ucp demo DIR" in result.stderr
    assert [p.name for p in sorted(tmp_path.rglob("*"))] == ["file", "mine", "notes"]


def test_settings_are_trusted_whatever_the_umask(run: Run, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run("demo", tmp_path / "made")
    finally:
        os.umask(before)
    assert (tmp_path / "made" / "ucformat.toml").stat().st_mode & 0o077 == 0
