"""The guide that continues a run of stock Trainer and DeepSpeed on another number of ranks, as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import engine

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "trainer_deepspeed.md").read_text()


@pytest.mark.engine
@pytest.mark.matrix  # it starts six programs that import both frameworks
def test_the_guide(tmp_path: Path) -> None:
    """On two ranks, and then on one: the loss goes on as it would have."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (lines,) = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    packages = engine("deepspeed").parents[1] / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{packages / 'site-packages'}",
        "PYTHONWARNINGS": "ignore",
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    losses = []
    for line in lines.splitlines():
        command = line.removeprefix("$ ").replace("torchrun", "python -m torch.distributed.run --standalone")
        command = command.replace("ucp ", "python -m ucformat.cli ")
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append([float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)])
    uninterrupted, *_, continued = losses
    assert len(continued) == 6
    assert continued == pytest.approx(uninterrupted, abs=1e-4)
