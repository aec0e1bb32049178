"""Which checkpoint is the newest, whatever clocks said: in every catalog, in a plan, and in a run's folder."""

from __future__ import annotations

import random
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from tests.catalog.acts import put
from tests.catalog.manifests import BEGIN, manifest
from tests.catalog.rows import policy
from ucformat.catalog.lines import contradictions, newest_first
from ucformat.cli.main import ucp

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.schema.policy import Policy

HOUR = timedelta(hours=1)
SKEWS = [-1, 1, 24 * 3650, -24 * 3650]


def steps(found: list[Entry]) -> list[int | None]:
    return [e.step for e in found]


def last(count: int, **more: Any) -> Policy:
    return policy({"last": {"count": count, **more}})


@pytest.mark.parametrize("hours", SKEWS)
class TestClocks:
    """Steps 100, 200 and 300 were committed in this order; the clock of one was wrong by hours."""

    @pytest.fixture
    def run(self, catalog: Catalog, hours: int) -> Catalog:
        for count, step in enumerate((100, 200, 300), 1):
            wrong = hours if step == (200 if hours > 0 else 300) else 0
            created = BEGIN + timedelta(minutes=10 * count, hours=wrong)
            put(catalog, step, commits=count, created=created)
        return catalog

    def test_latest_is_what_was_committed_last(
        self, run: Catalog, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert run.get("run7@latest").step == 300
        newer, older = (run.get(f"run7@{step}").id[:12] for step in (300, 200))
        assert f"{newer} was committed after {older}, but created earlier" in caplog.text
        assert caplog.text.count("a clock was wrong") == 1

    def test_lists_are_in_their_order(self, run: Catalog) -> None:
        put(run, 7, run="other", created=BEGIN)
        newer = put(run, 8, run="other", created=BEGIN + 24 * 36500 * HOUR)
        found = run.find()
        assert [e.step for e in found if e.run == "run7"] == [300, 200, 100]
        assert found[0].id == newer.id
        assert steps(run.find(limit=2, offset=1)) == [300, 200]
        [text] = contradictions(found, lambda e: e.name)
        assert text.startswith("run7@300 was committed after run7@")

    @pytest.mark.parametrize("group", ["run", "all"])
    def test_last_keeps_what_was_committed_last(self, run: Catalog, group: str) -> None:
        plan = run.retain(last(1, group=group))
        assert 300 in {kept.row.step for kept in plan.keep}
        if group == "run":
            assert {row.step for row in plan.delete} == {100, 200}
        [text] = plan.contradictions
        assert text.startswith("run7@300 was committed after run7@200, but created earlier")

    def test_the_commands_say_so(
        self, run: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv(
            "UCP_CATALOG", run.database.engine.url.render_as_string(hide_password=False)
        )
        listed = CliRunner().invoke(ucp, ["ls", "-q"])
        assert listed.output.split()[:3] == [run.get(f"run7@{s}").id for s in (300, 200, 100)], (
            listed.output
        )
        assert "was committed after" in CliRunner().invoke(ucp, ["ls"]).stderr
        file = tmp_path / "policy.yaml"
        file.write_text("version: 1\nkeep: {last: 1}\n")
        kept = CliRunner().invoke(ucp, ["retain", "-p", str(file)])
        assert "run7@300 was committed after" in kept.stderr
        assert run.get("run7@latest").step == 300

    def test_a_manager_with_this_catalog_keeps_and_restores_it(
        self, catalog: Catalog, hours: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("torch", reason="torch is missing: pip install 'ucformat[torch]'")
        from tests.torch.runs import fill, folders, manager_of, names, restored, state_at
        from tests.torch.test_restoring import skew

        monkeypatch.setenv(
            "UCP_CATALOG", catalog.database.engine.url.render_as_string(hide_password=False)
        )
        skew(monkeypatch, 0)
        place = tmp_path / "run7"
        fill(place, 100)
        for step, wrong in ((200, max(0, hours)), (300, min(0, hours))):
            skew(monkeypatch, wrong)
            manager = manager_of(place, keep=2)
            manager.restore_latest(state_at(0))
            manager.save(step, state_at(step))
            manager.wait()
        assert folders(place) == names(200, 300)
        assert restored(place)[0] == catalog.get("run7@latest").step == 300
        assert steps(catalog.find("run = 'run7'")) == [300, 200]


class TestOrder:
    def test_of_a_training_that_went_back_the_newest_is_what_it_writes_now(
        self, catalog: Catalog
    ) -> None:
        for number, (step, count) in enumerate(((100, 1), (200, 2), (300, 3), (200, 4))):
            put(catalog, number, step=step, commits=count)
        assert catalog.get("run7@latest").commits == 4
        assert [e.commits for e in catalog.find()] == [4, 3, 2, 1]
        assert {kept.row.commits for kept in catalog.retain(last(1)).keep} == {
            4,
            3,
        }  # and the highest step

    def test_what_nobody_counted_stands_by_its_step(self, catalog: Catalog) -> None:
        put(catalog, 1, step=100, commits=1)
        put(catalog, 2, step=200, commits=2)
        put(catalog, 3, step=300)
        put(catalog, 4, step=100)  # converted since
        assert catalog.get("run7@latest").step == 300
        assert steps(catalog.find()) == [300, 200, 100, 100]
        assert contradictions(catalog.find(), attrgetter("id")) == []
        assert {kept.row.serial for kept in catalog.retain(last(1)).keep} == {2, 3, 4}

    def test_two_that_tie_are_not_told_apart_by_time(self, catalog: Catalog) -> None:
        put(catalog, 1, step=100, commits=1)
        put(catalog, 2, step=100, commits=1)
        with pytest.raises(Exception, match="several"):
            catalog.get("run7@latest")

    def test_the_database_orders_as_we_do(self, catalog: Catalog) -> None:
        """With an id for the last tie, which here is as the number is."""
        draw = random.Random(7)
        for number in range(150):
            made = manifest(
                f"{number:08d}",
                run=draw.choice(["a", "b", None]),
                step=draw.choice([None, *range(6)]),
                commits=draw.choice([None, None, 1, 2, 3, 4]),
                created=BEGIN + draw.randrange(10**6) * timedelta(seconds=1),
            )
            catalog.record(made, f"no-folder-{number}")
        found = catalog.find()
        assert [e.id for e in found] == [e.id for e in newest_first(found[::-1])]
        assert len(found) == 150
        assert catalog.find(limit=20, offset=10) == found[10:30]
