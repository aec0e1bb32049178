"""A clock that is wrong ends no grace: the one of this host is changed here, the others are the real ones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from tests.catalog.acts import put
from ucformat.catalog import stamp
from ucformat.catalog.deletion import begin_purge
from ucformat.catalog.refs import parse_ref, resolve
from ucformat.cli.main import ucp
from ucformat.schema.documents import CatalogDoc

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog

DAY = timedelta(days=1)
URL = "/data/run7/1"


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this host's clock wrong by so many days."""

    def set_clock(days: float) -> None:
        monkeypatch.setattr(stamp, "now", lambda: datetime.now(UTC) + days * DAY)

    return set_clock


def begins(catalog: Catalog) -> bool:
    """Whether a purge begins, whatever was planned."""
    with catalog.database.writing() as c:
        return begin_purge(c, resolve(c, parse_ref("run7@1")), stamp.make_stamp()) is not None


@pytest.mark.parametrize("clock", ["the database's clock", "the time since boot"])
@pytest.mark.parametrize(("deleted", "purged"), [(0, 30), (-30, 0), (-400, 4000)])
def test_a_clock_that_jumps_ahead_ends_no_grace(
    catalog: Catalog,
    wrong: Any,
    monkeypatch: pytest.MonkeyPatch,
    clock: str,
    deleted: int,
    purged: int,
) -> None:
    if clock.startswith("the database"):
        if catalog.database.sqlite:
            pytest.skip(
                "needs PostgreSQL, as the other half of these has it: SQLite has no clock of its own"
            )
        monkeypatch.setattr(stamp, "CLOCKS", stamp.CLOCKS[:1])
    else:
        monkeypatch.setattr(stamp, "CLOCKS", stamp.CLOCKS[1:])
    put(catalog, 1)
    wrong(deleted)
    catalog.delete("run7@1")
    wrong(purged)
    plan = catalog.purgeable()
    assert plan.purge == ()
    [waiting] = plan.wait
    assert waiting.until is not None
    assert 6.9 * DAY < waiting.until - stamp.now() < 7 * DAY
    can, why = waiting.reasons
    assert can == "can be restored"
    assert why.startswith(f"clocks disagree: it was deleted {purged - deleted} days, 0:00:")
    assert f", 0:00:0{why.rpartition(':0')[2][0]} ago by {clock}" in why
    assert not begins(catalog)
    wrong(purged + 8)
    real = stamp.clocks
    monkeypatch.setattr(
        stamp, "clocks", lambda c: {name: t + 8 * 86400 for name, t in real(c).items()}
    )
    assert [row.step for row in catalog.purgeable().purge] == [1]


def test_gc_says_that_clocks_disagree(
    catalog: Catalog, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "UCP_CATALOG", catalog.database.engine.url.render_as_string(hide_password=False)
    )
    put(catalog, 1)
    catalog.delete("run7@1")
    wrong(30)
    shown = CliRunner().invoke(ucp, ["gc", "--apply", "--json"])
    assert shown.exit_code == 0, shown.output
    assert "clocks disagree: it was deleted 30 days, 0:00:" in shown.stdout
    assert catalog.get("run7@1").state == "deleted"


def test_what_a_document_said_to_be_deleted_has_its_grace_too(catalog: Catalog, wrong: Any) -> None:
    entry = put(catalog, 1)
    now = datetime.now(UTC)
    doc = CatalogDoc(id=entry.id, catalog="another", revision=5, deleted=now, purge_after=now)
    catalog.import_document(entry.id, doc, URL)
    assert catalog.get("run7@1").state == "deleted"
    wrong(30)
    assert catalog.purgeable().purge == ()
    assert not begins(catalog)


def test_after_another_boot_only_the_other_clocks_tell(
    catalog: Catalog, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(catalog, 1)
    catalog.delete("run7@1")
    monkeypatch.setattr(
        stamp, "CLOCKS", [stamp.CLOCKS[0], lambda _: iter([("the time since boot another", 10.0)])]
    )
    wrong(30)
    assert (catalog.purgeable().purge == ()) == (not catalog.database.sqlite)


def test_a_deletion_of_which_only_the_host_knows_goes_by_it(
    catalog: Catalog, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(catalog, 1)
    with monkeypatch.context() as patch:
        patch.setattr(stamp, "CLOCKS", [])
        catalog.delete("run7@1")
    assert catalog.purgeable().purge == ()
    wrong(8)
    assert len(catalog.purgeable().purge) == 1
