"""What `Manager` does with tiers."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.torch.ranks import Ranks
from tests.torch.runs import state_at
from tests.torch.tiers.acts import ACTS
from ucformat.errors import Conflict, UnsupportedError
from ucformat.format.digest import with_own_digest
from ucformat.torch import Increments, Manager, Tier
from ucformat.torch.tiers.tiers import Tiers

if TYPE_CHECKING:
    from pathlib import Path


def test_two_nodes(tmp_path: Path) -> None:
    done = Ranks("tests.torch.tiers.acts").run("act", 2, tmp_path)
    assert done == [[one.__name__ for one in ACTS]] * 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"increments": Increments()}, r"increments=.* is not supported with tiers"),
        ({"base": True}, "base=True is not supported with tiers"),
        ({"patch": True, "base": True}, "is not supported with tiers"),
        ({"form": "zarr"}, "form='zarr' is not supported with tiers"),
        ({"overwrite": True}, "overwrite=True is not supported with tiers"),
        ({"every": timedelta(minutes=1)}, "is not supported with tiers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(UnsupportedError, match=text):
        Manager(tmp_path / "home", tiers=[Tier(tmp_path / "fast")], signals=(), **options)
    assert list(tmp_path.iterdir()) == []


def test_what_was_saved_without_tiers_is_restored_with_them(tmp_path: Path) -> None:
    """In another form, too; and the reverse."""
    with Manager(tmp_path / "home", signals=()) as plain:
        plain.save(1, state_at(1))
    tiers = [Tier(tmp_path / "fast")]
    with Manager(tmp_path / "home", tiers=tiers, every=3, signals=()) as tiered:
        state = state_at(0)
        report = tiered.restore_latest(state)
        assert report is not None
        assert state["progress"]["step"] == 1
        for step in (2, 3, 4):
            tiered.save(step, state_at(step))
    with Manager(tmp_path / "home", signals=()) as plain:
        report = plain.restore_latest(state)
        assert report is not None
        assert report.step == 3
    with Manager(tmp_path / "home", tiers=tiers, every=3, signals=()) as tiered:
        report = tiered.restore_latest(state)
        assert report is not None
        assert report.step == 4


def test_the_catalog_has_the_places_where_all_of_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One checkpoint with two places; none of the fast tier, of which each node has a part."""
    import ucformat

    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    middle, home = tmp_path / "middle", tmp_path / "home"
    tiers = [Tier(tmp_path / "fast"), Tier(middle)]
    with Manager(home, tiers=tiers, run="r", signals=()) as manager:
        saved = manager.save(1, state_at(1))
    with ucformat.Catalog(str(tmp_path / "catalog.db")) as catalog:
        entry = catalog.get("r@1")
        assert entry.id == saved.id  # type: ignore[union-attr]
        assert sorted(entry.urls) == [str(home / "step-00000001"), str(middle / "step-00000001")]
    assert ucformat.verify("r@1")


def test_the_home_keeps_what_its_policy_says(tmp_path: Path) -> None:
    with Manager(tmp_path / "home", keep=1, tiers=[Tier(tmp_path / "fast")], signals=()) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step))
            manager.wait()
    assert [p.name for p in (tmp_path / "home").iterdir()] == ["step-00000003"]


def test_one_process_copies_to_several_tiers_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its threads are no ranks, and need not tell their calls apart."""
    tiers = [Tier(tmp_path / "fast"), Tier(tmp_path / "middle")]
    with Manager(tmp_path / "home", tiers=tiers, signals=()) as manager:
        for step in range(1, 6):
            manager.save(step, state_at(step), force=True)
    names = [f"step-{step:08d}" for step in range(1, 6)]
    assert [sorted(p.name for p in (tmp_path / t).iterdir()) for t in ("middle", "home")] == [
        names
    ] * 2
    assert caplog.text == ""


@pytest.mark.parametrize("change", ["gone", "linked"])
def test_a_file_that_is_gone_or_leads_out_is_not_filled_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """No incomplete checkpoint is committed, and what a link leads to outside is not copied."""
    fill = Tiers._fill

    def change_and_fill(self: Tiers, *arguments: Any) -> None:
        (file,) = (tmp_path / "fast").rglob("rank-00000.bin")
        file.rename(tmp_path / "outside")
        if change == "linked":
            file.symlink_to(tmp_path / "outside")
        fill(self, *arguments)

    monkeypatch.setattr(Tiers, "_fill", change_and_fill)
    with Manager(tmp_path / "home", tiers=[Tier(tmp_path / "fast")], signals=()) as manager:
        manager.save(1, state_at(1))
    assert "step 1 was not saved at" in caplog.text
    assert not (tmp_path / "home" / "step-00000001" / "manifest.json").exists()


def test_checkpoints_of_a_later_version_are_not_removed(tmp_path: Path) -> None:
    tiers = [Tier(tmp_path / "fast", keep=1)]
    with Manager(tmp_path / "home", tiers=tiers, every=100, signals=()) as manager:
        manager.save(1, state_at(1))
    manifest = tmp_path / "fast" / "step-00000001" / "manifest.json"
    document = json.loads(manifest.read_bytes())
    document |= {"version": document["version"] + 1}
    del document["digest"]
    manifest.write_bytes(with_own_digest(json.dumps(document).encode()))
    before = manifest.read_bytes()
    with Manager(tmp_path / "home", tiers=tiers, every=100, signals=()) as manager:
        for step in (2, 3):
            manager.save(step, state_at(step))
        with pytest.raises(Conflict, match="step 1 exists"):
            manager.save(1, state_at(1))
    assert manifest.read_bytes() == before
    assert list(manifest.parent.rglob("rank-00000.bin"))
