"""Combinations on a base: what equals the base is not written, and everything is what it would be without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.fakes import same
from tests.jobs.combine.reference import saved, source
from ucformat.errors import NotFinished, UnsupportedError, UsageError
from ucformat.jobs.combine.combining import plan_average, plan_merge
from ucformat.jobs.shards import WriteOptions

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.checkpoint import Checkpoint

SIZES: dict[str, Any] = {"chunk_bytes": 512, "shard_bytes": 4096}


def tensors(seed: int) -> dict[str, Any]:
    """A fine-tuned model: one tensor depends on the seed."""
    frozen, trained = np.random.default_rng(0), np.random.default_rng(seed)
    return {
        "frozen": frozen.standard_normal((60, 33)).astype(np.float32),
        "half": frozen.standard_normal(7).astype(np.float16),
        "ids": np.arange(5),
        "zeros": np.array([0.0, -0.0, 1.0], np.float32),
        "none": np.empty((0, 3), np.float32),
        "trained": trained.standard_normal((20, 33)).astype(np.float32),
    }


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """A base and two models that were fine-tuned from it."""
    return [str(saved(tmp_path / f"m{n}", tensors(n))) for n in range(3)]


def referenced(ck: Checkpoint) -> set[str]:
    again = ucformat.open(ck.url)
    ucformat.verify(again).raise_if_damaged()
    return {doc.name for doc in again.manifest.tensors if doc.is_referenced}


def content(ck: Checkpoint) -> dict[Any, Any]:
    again = ucformat.open(ck.url)
    return {key: (i.dtype, again[key].read().tobytes()) for key, i in again.tensors.items()}


FROZEN = {"frozen", "half", "ids", "none"}


def merge(models: list[str], dst: Path, method: str = "task-arithmetic", **more: Any) -> Checkpoint:
    return ucformat.merge(method, models[1:], dst, base=models[0], **SIZES, **more)


def test_average(models: list[str], tmp_path: Path) -> None:
    whole = ucformat.average(models, tmp_path / "whole", weights=[1, 2, 4], **SIZES)
    before = sorted(tmp_path.rglob("*"))
    planned = plan_average(models, {"weights": [1, 2, 4], "base": models[0]})
    cost = planned.estimate(tmp_path / "made", WriteOptions(**SIZES))
    assert sorted(tmp_path.rglob("*")) == before
    made = ucformat.average(models, tmp_path / "made", weights=[1, 2, 4], base=models[0], **SIZES)
    assert referenced(made) == {*FROZEN, "zeros"}
    assert content(made) == content(whole)
    assert [base.url for base in made.manifest.bases] == ["../m0"]
    assert not any(path.name == "frozen" for path in (tmp_path / "made" / "data").rglob("*"))
    # that of integers follows from the records; others are computed
    assert (cost.referenced, cost.bytes_referenced, cost.unread) == (1, 40, 4)


def test_merge(models: list[str], tmp_path: Path) -> None:
    """The sum of -0 and 0 is 0, so a tensor of which all inputs equal the base may differ from it."""
    whole = merge(models, tmp_path / "whole")
    made = merge(models, tmp_path / "made", increment=True)
    assert referenced(made) == FROZEN
    assert content(made) == content(whole)
    assert np.signbit(made["zeros"][...]).tolist() == [False, False, False]
    taken = merge(models, tmp_path / "taken", increment=True, take="zeros")
    assert referenced(taken) == {*FROZEN, "zeros"}
    cast = merge(models, tmp_path / "cast", increment=True, cast="float64")
    assert referenced(cast) == {"ids"}
    planned = plan_merge("ties", models[1:], {"base": models[0], "increment": True}, take="frozen")
    cost = planned.estimate(tmp_path / "x", WriteOptions())
    assert (cost.referenced, cost.bytes_referenced, cost.unread) == (2, 40 + 60 * 33 * 4, 3)


def test_sources_without_fingerprints(models: list[str], tmp_path: Path) -> None:
    sources = [source(tensors(n)) for n in (1, 2)]
    assert not any(ck.metadata.fingerprints for ck in sources)
    made = ucformat.average(sources, tmp_path / "made", base=models[0], **SIZES)
    assert referenced(made) == {*FROZEN, "zeros"}
    assert content(made) == content(ucformat.average(sources, tmp_path / "whole", **SIZES))


def test_parts_agree_on_what_is_referenced(models: list[str], tmp_path: Path) -> None:
    options = {**SIZES, "base": models[0]}
    for part in range(2):
        with pytest.raises(NotFinished):
            ucformat.average(models, tmp_path / "made", **options, on=f"part:{part}/2")
    made = ucformat.average(models, tmp_path / "made", **options, on="commit")
    assert referenced(made) == {*FROZEN, "zeros"}
    assert same(made["trained"][...], ucformat.average(models, tmp_path / "w")["trained"][...])


def test_what_must_be_equal_is_compared(models: list[str], tmp_path: Path) -> None:
    other = str(saved(tmp_path / "other", {**tensors(3), "ids": np.arange(1, 6)}))
    with pytest.raises(UsageError, match=r"ids .* differs between"):
        ucformat.average([models[0], other], tmp_path / "made", base=models[0])
    assert not (tmp_path / "made" / "manifest.json").exists()


def test_what_is_no_base(models: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="slerp takes no increment"):
        ucformat.merge("slerp", models[:2], tmp_path / "x", increment=True)
    with pytest.raises(UnsupportedError, match="on which none can be based"):
        ucformat.average(models, tmp_path / "x", base=source(tensors(0)))
    with pytest.raises(UsageError, match="opened through a view"):
        ucformat.average(
            models, tmp_path / "x", base=ucformat.open(models[0]).view([{"drop": "ids"}])
        )
    assert not (tmp_path / "x").exists()
