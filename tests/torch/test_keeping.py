"""Which checkpoints of a run stay."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
import ucformat.torch
from tests.torch.runs import data_file, fill, folders, manager_of, names, restored, state_at
from ucformat.catalog.catalog import Catalog
from ucformat.errors import IntegrityError, UcformatError, UsageError
from ucformat.torch import Manager
from ucformat.torch.manager import retention
from ucformat.torch.manager.retention import policy_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# --- keeping, without a catalog


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (2, [50, 60]),
        ({"last": 1, "every": 20}, [20, 40, 60]),
        ({"best": {"metric": "loss", "count": 2, "mode": "min"}}, [10, 20, 60]),
        ({"keep": {"younger": "1h"}, "grace": "3d"}, [10, 20, 30, 40, 50, 60]),
    ],
)
def test_the_folder_keeps_what_the_rules_say(tmp_path: Path, keep: Any, left: list[int]) -> None:
    with manager_of(tmp_path, keep=keep) as manager:
        for step in range(10, 70, 10):
            manager.save(step, state_at(step), metrics={"loss": step / 3})
    assert folders(tmp_path) == names(*left)
    assert restored(tmp_path)[0] == 60


def test_a_rule_that_keeps_nothing_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rule = {"metric": "los", "count": 1, "mode": "min"}
    with manager_of(tmp_path, keep={"last": 1, "best": rule}) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step), metrics={"loss": 1.0})
    assert caplog.text.count("the rule keeps nothing: best of its run by min los") == 1


def test_only_what_is_ours_goes(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3)
    ucformat.torch.save(state_at(1), tmp_path / "by-hand")
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    (tmp_path / "step-2").mkdir()
    with manager_of(tmp_path, keep=1) as manager:
        manager.save(4, state_at(4))
    assert folders(tmp_path) == ["by-hand", "step-00000001", "step-00000004", "step-2"]
    assert folders(tmp_path / "step-00000001") == ["notes.txt"]
    assert ucformat.verify(tmp_path / "by-hand")


def test_what_a_catalog_protects_stays_without_it(tmp_path: Path) -> None:
    place = tmp_path / "run"
    fill(place, 1, 2, 3, 4, 5)
    with Catalog(str(tmp_path / "theirs.db")) as catalog:
        entries = [
            catalog.record(ucformat.open(place / n).manifest, str(place / n))
            for n in names(1, 2, 3, 4)
        ]
        catalog.tag(entries[0].id, "released")
        catalog.hold(entries[1].id, "paper")
        catalog.alias("best", entries[2].id)
        catalog.note(entries[3].id, "a note protects nothing")
    with manager_of(place, keep=1) as manager:
        manager.save(6, state_at(6))
    assert folders(place) == names(1, 2, 3, 6)


def test_an_interrupted_removal_is_ended_by_the_next_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr("ucformat.jobs.removal.bury", killed)
        with manager_of(tmp_path, keep=1) as manager:
            for step in (1, 2):
                manager.save(step, state_at(step))
    assert (tmp_path / "step-00000001" / "tombstone.json").exists()
    assert restored(tmp_path)[0] == 2
    with manager_of(tmp_path, keep=2) as manager:
        manager.save(3, state_at(3))
    assert folders(tmp_path) == names(2, 3)


def test_failures_to_delete_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> None:
        raise UcformatError("not allowed here")

    monkeypatch.setattr(retention, "remove", refused)
    with manager_of(tmp_path, keep=1) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step))
    assert "not allowed here" in caplog.text
    assert folders(tmp_path) == names(1, 2)


def test_what_keep_may_be(tmp_path: Path) -> None:
    assert policy_of(3).keep[0].last[0].count == 3
    assert policy_of(3).grace == timedelta(0)
    assert policy_of({"every": 5}).keep[-1].last[0].count == 1  # the newest always stays
    by_part = policy_of([{"last": 2, "states": "weight"}, {"every": 7}])
    assert [(k.states, bool(k.last)) for k in by_part.keep] == [
        *((("weight",), True), ((), False), ((), True)),  # the newest whole
    ]
    assert policy_of({"keep": {"last": {"count": 3, "group": "all"}}}).grace == timedelta(days=7)
    (tmp_path / "p.yaml").write_text("version: 1\nkeep: {every: 7}\n")
    assert policy_of(tmp_path / "p.yaml").keep[0].every == 7
    with pytest.raises(UsageError, match="lats"):
        policy_of({"lats": 3})
    with pytest.raises(UsageError, match="need a catalog"):
        Manager(tmp_path, keep={"last": 1, "where": "step > 1"})


# --- keeping, by a catalog


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    """A catalog that the settings name."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    with Catalog() as opened:
        yield opened


def test_the_catalog_decides_what_stays(tmp_path: Path, catalog: Catalog) -> None:
    place, other = tmp_path / "it's_100%", tmp_path / "it's_1000"
    fill(other, 1, 2)
    fill(place, 1, 2, 3, 4)
    entries = {e.step: e for e in catalog.find() if str(e.url).startswith(f"{place}/")}
    catalog.tag(entries[1].id, "released")
    catalog.alias("best", entries[2].id)
    catalog.hold(entries[3].id, "paper")
    with manager_of(place, keep={"last": 2, "where": "metric.loss < 1"}) as manager:
        manager.restore_latest(state_at(0))
        for step in (5, 6, 7, 8):
            manager.save(step, state_at(step), metrics={"loss": 0.5 if step == 5 else 1.5})
    assert folders(place) == names(1, 2, 3, 5, 7, 8)
    assert folders(other) == names(1, 2)
    assert catalog.get(entries[4].id).state == "purged"  # although 5 was resumed from it
    assert {e.action for e in catalog.events(entries[4].id)} >= {"delete", "purge", "purged"}
    assert restored(place)[0] == 8


def test_with_a_grace_bytes_stay_but_are_not_restored(tmp_path: Path, catalog: Catalog) -> None:
    place = tmp_path / "run"
    with manager_of(place, keep={"keep": {"last": 1}, "grace": "2d"}) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step))
    assert folders(place) == names(1, 2)
    (one,) = catalog.find("state = 'deleted'")
    assert one.step == 1
    data_file(place / "step-00000002").unlink()
    with pytest.raises(IntegrityError, match="are damaged") as caught:
        manager_of(place).restore_latest(state_at(0))
    assert "step-00000001" not in str(caught.value)
    catalog.restore(one.id)
    assert restored(place)[0] == 1


def test_copies_elsewhere_and_a_young_catalog_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import shutil

    place = tmp_path / "run"
    fill(place, 1, 2, 3)  # of which no catalog knows
    shutil.copytree(place / "step-00000001", tmp_path / "archive")
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "young.db"))
    with Catalog() as catalog:
        catalog.record(ucformat.open(tmp_path / "archive").manifest, str(tmp_path / "archive"))
        with manager_of(place, keep=1) as manager:
            manager.save(4, state_at(4))
        assert folders(place) == names(1, 4)
        assert ucformat.verify(tmp_path / "archive")
    assert caplog.text.count("it has another location too") == 1


def test_what_is_protected_is_not_replaced(tmp_path: Path, catalog: Catalog) -> None:
    place = tmp_path / "run"
    fill(place, 1, 2)
    data_file(place / "step-00000002").unlink()
    manager = manager_of(place)
    manager.restore_latest(state_at(0))
    (two,) = catalog.find("step = 2")
    assert two.verified is not None
    assert not two.verified.ok
    catalog.tag(two.id, "to be repaired")
    manager.save(2, state_at(2))
    assert folders(place) == [*names(1, 2), "step-00000002.2"]


def test_a_catalog_that_nobody_named_and_that_cannot_be_opened_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("UCP_CATALOG")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    monkeypatch.chdir(tmp_path)
    with manager_of(tmp_path / "run", keep=1) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step))
    assert folders(tmp_path / "run") == names(2)
    assert "is applied to" in caplog.text
