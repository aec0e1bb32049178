"""AutoModel's own Checkpointer saves universal checkpoints by the class of its page, and goes on from them.

`make .engines/automodel/.installed` installs it; `UCFORMAT_AUTOMODEL_PYTHON` names another
interpreter that has it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ucformat
from tests.engines.running import run_engine

pytestmark = [pytest.mark.matrix, pytest.mark.engine]


def test_its_checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved by two ranks, twice; loaded by two, bit for bit, and by one."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    for ranks in (2, 1):
        run_engine("automodel", ranks, "automodel/live_program.py", [str(tmp_path)])
    found, alone = (json.loads((tmp_path / f"found-{n}.json").read_text()) for n in (2, 1))
    assert found["class"] == "Checkpoints"
    assert found["step_2"] != found["step_4"]
    for place in ("step_2", "step_4"):
        assert len(found[place]) > 60
        assert found[f"{place} again"] == found[place]
        assert alone[f"{place} again"] == found[place]
    assert found["losses again"] == found["losses"]
    assert alone["losses again"] == pytest.approx(found["losses"], rel=1e-4)
    for part in ("model", "optim"):
        assert ucformat.verify(tmp_path / "step_4" / part)
