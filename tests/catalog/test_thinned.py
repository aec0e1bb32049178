"""Policies that keep only some states, of checkpoints in storage, on each database."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.fakes import FakeSource, random_array, same
from ucformat.catalog.retention import load_policy
from ucformat.checkpoint import Checkpoint
from ucformat.errors import Conflict, UcformatError
from ucformat.format.thinned import state_bytes
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.catalog.catalog import Catalog

POLICY = load_policy(
    {
        "version": 1,
        "keep": [{"last": 1}, {"every": 20, "states": ["weight"]}],
    }
)


def arrays(step: int) -> dict[tuple[str, str], Any]:
    """Of `only` just the master is stored."""
    keys = [("a", s) for s in ("weight", "master", "exp_avg")] + [("only", "master")]
    return {key: random_array((5, 7), "float32", step + i) for i, key in enumerate(keys)}


def whole(root: Path, catalog: Catalog, *steps: int) -> dict[int, str]:
    """Checkpoints of a run at `root/<step>`; their ids by step."""
    ids = {}
    for step in steps:
        store = MemoryStore(f"thinned-{uuid.uuid4().hex}")
        source = Checkpoint(FakeSource.write(store, arrays(step), step=step))
        ck = ucformat.convert(source, root / str(step), run="r")
        ids[step] = catalog.record(ck.manifest, ck.url).id
    return ids


def test_a_plan_thins_and_deletes(catalog: Catalog, tmp_path: Path) -> None:
    ids = whole(tmp_path, catalog, 10, 20, 30, 40)
    catalog.metric(ids[20], {"loss": 0.5})
    plan = catalog.retain(POLICY)
    assert [(t.row.id, t.states) for t in plan.thin] == [(ids[20], ("weight",))]
    assert plan.thin[0].row.states == state_bytes(ucformat.open(tmp_path / "20").manifest.tensors)
    assert plan.thin[0].row.states == {"weight": 280, "master": 140, "exp_avg": 140}
    assert [r.id for r in plan.delete] == [ids[10], ids[30]]
    assert [(r.kept, r.dropped, r.deleted) for r in plan.runs] == [(560 + 280, 280, 1120)]
    assert ucformat.open(tmp_path / "20").id == ids[20]

    assert catalog.retain(POLICY, apply=plan.id) == plan
    left = ucformat.open(tmp_path / "20")
    truth = arrays(20)
    assert {*left.tensors} == {("a", "weight"), ("only", "master")}
    assert all(same(left[key][...], truth[key]) for key in left.tensors)
    assert str(left.dropped["exp_avg"]).endswith(f"(plan {plan.id})")
    entry = catalog.get("r@20")
    assert (entry.id, entry.nbytes, dict(entry.metrics)) == (left.id, 280, {"loss": 0.5})
    assert catalog.get(ids[20]).state == "replaced"
    assert {catalog.get(ids[n]).state for n in (10, 30)} == {"deleted"}
    assert ucformat.open(tmp_path / "40").id == ids[40]
    again = catalog.retain(POLICY)
    assert (again.thin, again.delete) == ((), ())


def test_what_has_changed_is_not_thinned(catalog: Catalog, tmp_path: Path) -> None:
    ids = whole(tmp_path, catalog, 20, 40)
    plan = catalog.retain(POLICY)
    catalog.tag(ids[20], "x")
    with pytest.raises(Conflict, match="has changed"):
        catalog.retain(POLICY, apply=plan.id)
    assert catalog.retain(POLICY).thin == ()
    catalog.untag(ids[20], "x", reason="why not")
    other = catalog.retain(load_policy({"version": 1, "keep": [{"last": 1}]}))
    with pytest.raises(Conflict, match="has changed"):
        catalog.retain(POLICY, apply=other.id)
    assert ucformat.open(tmp_path / "20").id == ids[20]


def test_one_that_cannot_be_thinned_hinders_no_other(catalog: Catalog, tmp_path: Path) -> None:
    ids = whole(tmp_path, catalog, 10, 20, 40, 60)
    (shard,) = (tmp_path / "20").glob("data/*/weight/a/c/0/0")
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)
    plan = catalog.retain(POLICY)
    with pytest.raises(
        UcformatError, match=r"1 of 2 checkpoints were not thinned: r@20: .*a \(weight\)"
    ):
        catalog.retain(POLICY, apply=plan.id)
    assert ucformat.open(tmp_path / "20").id == ids[20]
    assert "exp_avg" in ucformat.open(tmp_path / "40").dropped
    assert catalog.get(ids[10]).state == "deleted"


def test_one_with_several_locations_stays_whole(catalog: Catalog, tmp_path: Path) -> None:
    ids = whole(tmp_path, catalog, 20, 40)
    ucformat.copy(tmp_path / "20", tmp_path / "copy")
    catalog.record(ucformat.open(tmp_path / "copy").manifest, str(tmp_path / "copy"))
    (first, _) = catalog.retain(POLICY).keep
    assert (first.row.id, first.reasons[-1]) == (ids[20], "whole: it has several locations")


def test_what_an_interrupted_call_has_thinned_is_recorded(catalog: Catalog, tmp_path: Path) -> None:
    ids = whole(tmp_path, catalog, 20, 40)
    left = ucformat.thin(tmp_path / "20", ["exp_avg", "master"])  # that is all it did
    assert catalog.get(ids[20]).state == "committed"
    plan = catalog.retain(POLICY)
    assert [t.row.id for t in plan.thin] == [ids[20]]
    catalog.retain(POLICY, apply=plan.id)
    assert ucformat.open(tmp_path / "20").id == left.id == catalog.get("r@20").id
    assert catalog.get(ids[20]).state == "replaced"
    assert catalog.retain(POLICY).thin == ()
