"""What manifests record of how long ranks took to save and to load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
from ucformat.errors import UcformatError
from ucformat.storage import error_mapping
from ucformat.torch import Manager
from ucformat.torch.saving.manifest import RankReport

if TYPE_CHECKING:
    from pathlib import Path


def state() -> dict[str, Any]:
    model = torch.nn.Linear(64, 64)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}


@pytest.mark.parametrize("form", ["zarr", "packed"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_saves_and_the_load_before_them(tmp_path: Path, form: Any, *, asynchronous: bool) -> None:
    with Manager(tmp_path, form=form, asynchronous=asynchronous) as manager:
        assert manager.restore_latest(state()) is None
        manager.save(1, state())
    with Manager(tmp_path, form=form, asynchronous=asynchronous) as manager:
        report = manager.restore_latest(state())
        assert report is not None
        for step in (2, 3):
            manager.save(step, state())
            manager.wait()
    first, second, third = (
        ucformat.open(tmp_path / f"step-{step:08d}").manifest for step in (1, 2, 3)
    )
    for manifest in (first, second, third):
        (writer,) = manifest.writers
        copied = ["copy"] if asynchronous else []
        assert list(writer.phases) == [*copied, "plan", "write", "sync", "commit"]
        assert writer.phases["write"] + writer.phases["sync"] == pytest.approx(writer.seconds)
        assert writer.phases.get("copy", writer.stall) == writer.stall
        assert writer.retries == 0
    assert first.lineage == ()
    ((reader,), (), ()) = [second.lineage[0].readers, third.lineage[0].readers, ()]
    assert (reader.rank, reader.nbytes) == (0, report.nbytes)
    assert list(reader.phases) == ["plan", "read", "put"]
    assert sum(reader.phases.values()) == pytest.approx(reader.seconds) == report.seconds
    assert report.lineage.readers == (reader,)


def test_repeated_requests_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_mapping, "_FIRST", 0.0)
    failures = [TimeoutError(), TimeoutError()]

    def request() -> str:
        if failures:
            raise failures.pop()
        return "done"

    before = int(error_mapping.retries)
    assert error_mapping.retry("read", "s3://b/k", request, 60) == "done"
    assert int(error_mapping.retries) - before == 2
    with pytest.raises(UcformatError):
        error_mapping.retry("read", "s3://b/k", lambda: 1 / 0, 60)  # not transient
    assert int(error_mapping.retries) - before == 2


def test_only_rank_0_commits() -> None:
    phases = RankReport(1, b"", 8, 2.0, 0.5, 0.0, 0.25, 0.5, 3).doc(0.1).phases
    assert phases == {"plan": 0.25, "write": 1.5, "sync": 0.5}
    phases = RankReport(0, b"", 8, 2.0, 0.5, 0.5, 0.25, 0.5).doc(0.1).phases
    assert phases == {"copy": 0.5, "plan": 0.25, "write": 1.5, "sync": 0.5, "commit": 0.1}
