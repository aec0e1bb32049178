"""What people say of checkpoints, in whatever words, on SQLite and on PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from tests.catalog.acts import actions, purge, put, rows
from tests.catalog.manifests import manifest, tensor
from ucformat.catalog.labels import ANY
from ucformat.catalog.models import RunRow
from ucformat.errors import Conflict, NotFound, PermissionDenied, UsageError
from ucformat.schema.manifest import LineageDoc

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.catalog.conftest import Clock
    from ucformat.catalog.catalog import Catalog

NAN, INF = float("nan"), float("inf")


HOSTILE = [
    "plain",
    'it\'s "quoted" \\ and; drop table run; --',
    "%_%",
    "${jndi} {braces} :colon %s ?",
    "new\nline\ttab\r",
    "é 名前 🦔 \u202e",
    "a\0b",
    "half \ud83e",
    "x" * 10_000,
]


class TestHostileText:
    @pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
    def test_any_text_is_kept(self, catalog: Catalog, text: str) -> None:
        kept = text.replace("\0", "\ufffd").replace("\ud83e", "\ufffd")
        value = text.replace("\ud83e", "\ufffd")  # no manifest has the half of a character in these
        doc = manifest(
            1,
            text,
            5,
            metrics={text: 1.0},
            config={value: {"x": [value, NAN, -INF, None, "\0"]}},
            layout={value: value},
            producer={"engine.name": text, text: text},
            tensors=(tensor(text), tensor(text, "master")),
            lineage=(LineageDoc(kind="resume", url=f"s3://b/{text}", id=text),),
        )
        catalog.record(doc, "/data/1")
        for _ in range(2):  # and is the same when it comes again
            entry = catalog.record(doc, "/data/1", run=text)
        assert (entry.run, entry.engine, entry.metrics) == (kept, kept, {kept: 1.0})
        assert entry.topology == {kept: kept}
        assert entry.producer == {"engine.name": kept, kept: kept}
        assert entry.config == {
            kept: {"x": [kept, {"$float": "nan"}, {"$float": "-inf"}, None, "\ufffd"]}
        }
        assert [t.name for t in catalog.tensors("/data/1")] == [kept, kept]
        assert rows(catalog, RunRow) == 1
        catalog.note("/data/1", f"n {text}")
        catalog.hold("/data/1", f"r {text}")
        catalog.verified(
            "/data/1",
            url=f"/x/{text}",
            ok=False,
            bytes_verified=1,
            bytes_unverified=2,
            problems=[text],
        )
        entry = catalog.get("/data/1")
        assert [n.text for n in entry.notes] == [f"n {kept}"]
        assert [h.reason for h in entry.holds] == [f"r {kept}"]
        assert entry.verified is not None
        assert entry.verified.problems == (kept,)
        assert catalog.events("/data/1")
        assert [e.parent for e in catalog.lineage("/data/1").edges] == [f"s3://b/{kept}"]
        if text == kept:  # else such an id is refused
            parent = catalog.record(manifest(text), "/data/2")
            assert [e.parent for e in catalog.lineage("/data/1").edges] == [parent.id]

    @pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
    def test_words_are_printable_and_found_again(self, catalog: Catalog, text: str) -> None:
        put(catalog, 1)
        acts: list[Callable[[], object]] = [
            lambda: catalog.alias(text, "run7@1"),
            lambda: catalog.tag("run7@1", text),
            lambda: catalog.metric("run7@1", {text: 1.0}),
        ]
        if not text.isprintable():
            for act in acts:
                with pytest.raises(UsageError, match="printable"):
                    act()
            return
        for act in acts:
            act()
        entry = catalog.get(f"alias:{text}")
        assert (entry.aliases, entry.tags, entry.metrics) == ((text,), (text,), {text: 1.0})

    @pytest.mark.parametrize("word", ["", " ", " a", "a ", "a\n", "\0"])
    def test_words_have_no_blanks_at_their_ends(self, catalog: Catalog, word: str) -> None:
        put(catalog, 1)
        with pytest.raises(UsageError, match="cannot be an alias"):
            catalog.alias(word, "run7@1")
        with pytest.raises(UsageError, match="cannot be a tag"):
            catalog.tag("run7@1", "good", word)
        with pytest.raises(UsageError, match="cannot be a metric"):
            catalog.metric("run7@1", {"a": 1, word: 1})
        entry = catalog.get("run7@1")
        assert (entry.aliases, entry.tags, entry.metrics) == ((), (), {})

    @pytest.mark.parametrize("url", ["/data/a\0b", "/data/\udce9", "s3://b/\ud83e"])
    def test_a_place_that_could_not_be_found_again_is_refused(
        self, catalog: Catalog, url: str
    ) -> None:
        with pytest.raises(UsageError, match="place is not text"):
            put(catalog, 1, url)
        with pytest.raises(UsageError, match="id is not text"):
            catalog.record(manifest(f"a{url}"), "/data/1")
        assert catalog.count() == 0

    def test_numbers_beyond_any_bound_are_refused(self, catalog: Catalog) -> None:
        for step in ((1 << 62) + 1, -(1 << 70)):
            with pytest.raises(ValidationError, match="step"):
                manifest(1, step=step)
        for doc in (
            manifest(1).model_copy(update={"step": 1 << 63}),
            manifest(1, tensors=(tensor(shape=(1 << 62,)),)),
        ):
            with pytest.raises(UsageError, match="fit into 64 bits"):
                catalog.record(doc, "/data/1")
        assert catalog.record(manifest(1, step=1 << 62), "/data/1").step == 1 << 62

    def test_a_time_without_a_zone_is_utc(self, catalog: Catalog) -> None:
        entry = put(
            catalog, 1, created=datetime.fromisoformat("2026-01-01T05:00:00"), metrics={"a": 1}
        )
        assert entry.created == datetime(2026, 1, 1, 5, tzinfo=UTC)
        entry = put(catalog, 2, created=datetime.fromisoformat("2026-01-01T05:00:00.123456+02:00"))
        assert entry.created == datetime(2026, 1, 1, 3, 0, 0, 123456, tzinfo=UTC)


class TestAliases:
    @pytest.fixture(autouse=True)
    def filled(self, catalog: Catalog) -> None:
        for step in (1, 2, 3):
            put(catalog, step)

    def where(self, catalog: Catalog) -> list[tuple[str, str, int]]:
        return [(a.name, a.id, a.version) for a in catalog.aliases()]

    def test_they_move_and_their_history_stays(self, catalog: Catalog, clock: Clock) -> None:
        one, two = (manifest(n).id for n in (1, 2))
        catalog.alias("best", "run7@1")
        begun = clock.now
        clock.wait(hours=1)
        catalog.alias("best", "run7@2")
        catalog.alias("best", "run7@2")
        assert self.where(catalog) == [("best", two, 2)]
        assert catalog.get("run7@1").aliases == ()
        assert catalog.get("run7@2").aliases == ("best",)
        catalog.unalias("best")
        assert self.where(catalog) == []
        catalog.alias("best", "run7@1")
        assert self.where(catalog) == [("best", one, 4)]
        moves = catalog.alias_history("best")
        assert [(m.version, m.source, m.target) for m in moves] == [
            (1, None, one),
            (2, one, two),
            (3, two, None),
            (4, None, one),
        ]
        assert [m.moved for m in moves] == [begun] + [clock.now] * 3
        assert {m.who for m in moves} == {catalog.who}
        assert catalog.alias_history("nobody") == []
        assert actions(catalog, "run7@2")[1:] == ["alias", "alias"]

    def test_they_move_only_from_where_they_are_expected(self, catalog: Catalog) -> None:
        catalog.alias("best", "run7@1", expect=None)
        for expect in (None, "run7@2"):
            with pytest.raises(Conflict, match="points to"):
                catalog.alias("best", "run7@3", expect=expect)
            with pytest.raises(Conflict):
                catalog.alias("best", "run7@1", expect=expect)
            with pytest.raises(Conflict, match="points to"):
                catalog.unalias("best", expect=expect)
        with pytest.raises(Conflict, match="does not exist, and was expected to point to"):
            catalog.alias("new", "run7@3", expect="run7@1")
        with pytest.raises(NotFound):
            catalog.alias("best", "run7@3", expect="run7@99")
        assert self.where(catalog) == [("best", manifest(1).id, 1)]
        catalog.alias("best", "run7@2", expect="alias:best")
        catalog.alias("best", "run7@3", expect=manifest(2).id)
        catalog.alias("best", "run7@1", expect=ANY)
        catalog.unalias("best", expect="run7@1")
        with pytest.raises(NotFound, match="no alias 'best'"):
            catalog.unalias("best")
        assert [m.version for m in catalog.alias_history("best")] == [1, 2, 3, 4, 5]

    def test_latest_is_no_alias(self, catalog: Catalog) -> None:
        with pytest.raises(UsageError, match="latest"):
            catalog.alias("latest", "run7@1")

    def test_they_point_to_nothing_that_is_deleted(self, catalog: Catalog) -> None:
        catalog.delete("run7@1")
        with pytest.raises(PermissionDenied, match="is deleted") as caught:
            catalog.alias("best", "run7@1")
        assert "restore" in str(caught.value.hint)
        assert self.where(catalog) == []


class TestWhatPeopleSay:
    @pytest.fixture(autouse=True)
    def filled(self, catalog: Catalog) -> None:
        for step in (1, 2):
            put(catalog, step)

    def test_tags_stay_for_ever(self, catalog: Catalog, clock: Clock) -> None:
        catalog.tag("run7@1", "b", "a", "b")
        catalog.tag("run7@1", "a")
        catalog.tag("run7@2", "a")
        assert (catalog.get("run7@1").tags, catalog.get("run7@2").tags) == (("a", "b"), ("a",))
        assert actions(catalog, "run7@1") == ["record", "tag"]
        assert catalog.events("run7@1", 1)[0].detail == {"tags": ["b", "a"]}

    def test_holds_end_with_their_time_or_when_released(
        self, catalog: Catalog, clock: Clock
    ) -> None:
        first = catalog.hold("run7@1", "paper", until=timedelta(days=2))
        second = catalog.hold("run7@1", "eval", until=clock.now + timedelta(days=5))
        third = catalog.hold("run7@1", "for ever")
        held = catalog.get("run7@1").holds
        assert [(h.id, h.reason) for h in held] == [
            (first, "paper"),
            (second, "eval"),
            (third, "for ever"),
        ]
        assert [h.until for h in held] == [
            clock.now + timedelta(days=2),
            clock.now + timedelta(days=5),
            None,
        ]
        clock.wait(days=2)
        assert [h.id for h in catalog.get("run7@1").holds] == [second, third]
        assert catalog.release("run7@2", third) == 0
        assert catalog.release("run7@1", third) == 1
        assert catalog.release("run7@1", third) == 0
        with pytest.raises(PermissionDenied, match="held until 2026-04-16: eval"):
            catalog.delete("run7@1")
        clock.wait(days=3)
        catalog.delete("run7@1")
        assert actions(catalog, "run7@1") == ["record", "hold", "hold", "hold", "release", "delete"]

    def test_a_hold_of_what_is_deleted_meanwhile_can_be_released(
        self, catalog: Catalog, clock: Clock
    ) -> None:
        catalog.hold("run7@1", "why", until=timedelta(days=1))
        clock.wait(days=1)
        catalog.delete("run7@1")
        assert catalog.release("run7@1") == 1

    def test_a_hold_has_a_reason_and_an_end_to_come(self, catalog: Catalog, clock: Clock) -> None:
        for reason, until, message in (
            (" ", None, "needs a reason"),
            ("why", timedelta(0), "would have expired"),
            ("why", clock.now - timedelta(1), "would have expired"),
            ("why", datetime.fromisoformat("2099-01-01"), "no time zone"),
        ):
            with pytest.raises(UsageError, match=message):
                catalog.hold("run7@1", reason, until=until)
        assert catalog.get("run7@1").holds == ()

    def test_notes(self, catalog: Catalog, clock: Clock) -> None:
        catalog.note("run7@1", "first")
        clock.wait(seconds=1)
        catalog.note("run7@1", "second\nline")
        catalog.note("run7@1", "first")
        found = catalog.get("run7@1").notes
        assert [(n.text, n.who) for n in found] == [
            (t, catalog.who) for t in ("first", "second\nline", "first")
        ]
        assert found[1].created - found[0].created == timedelta(seconds=1)
        with pytest.raises(UsageError, match="empty"):
            catalog.note("run7@1", "\n")

    def test_the_last_verification_counts(self, catalog: Catalog, clock: Clock) -> None:
        assert catalog.get("run7@1").verified is None
        catalog.verified(
            "run7@1",
            url="/data/1/",
            ok=False,
            bytes_verified=1 << 40,
            bytes_unverified=0,
            problems=["bad"] * 500,
        )
        found = catalog.get("run7@1").verified
        assert found is not None
        assert (found.ok, found.url, found.bytes_verified, len(found.problems)) == (
            False,
            "/data/1",
            1 << 40,
            100,
        )
        assert catalog.events(limit=1)[0].detail == {"ok": False, "problems": 500}
        catalog.verified(
            "run7@1", url="/data/1", ok=True, bytes_verified=5, bytes_unverified=6, tool="t"
        )
        found = catalog.get("run7@1").verified
        assert found is not None
        assert (found.at, found.ok, found.bytes_unverified, found.problems, found.tool) == (
            clock.now,
            True,
            6,
            (),
            "t",
        )

    def test_nothing_is_said_of_what_is_gone(self, catalog: Catalog) -> None:
        catalog.delete("run7@1", grace=timedelta(0))
        for state in ("deleted", "purged"):
            for act in (
                lambda: catalog.tag(manifest(1).id, "x"),
                lambda: catalog.hold(manifest(1).id, "x"),
                lambda: catalog.note(manifest(1).id, "x"),
                lambda: catalog.metric(manifest(1).id, {"x": 1}),
                lambda: catalog.alias("x", manifest(1).id),
            ):
                with pytest.raises(PermissionDenied, match=f"is {state}"):
                    act()
            if state == "deleted":
                purge(catalog, "run7@1")
        assert actions(catalog, manifest(1).id) == ["record", "delete", "purge", "purged"]

    def test_events_are_listed_the_newest_first(self, catalog: Catalog) -> None:
        for i in range(5):
            catalog.note("run7@1", str(i))
        assert [e.action for e in catalog.events(limit=3)] == ["note"] * 3
        assert len(catalog.events("run7@1")) == 6
        assert len(catalog.events()) == 7
        assert [e.id for e in catalog.events("run7@2")] == [manifest(2).id]

    def test_listeners_hear_what_changed_and_what_is_said_again(
        self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heard: list[Any] = []

        def listen(told: Catalog, serials: frozenset[int]) -> None:
            assert told is catalog
            heard.append(serials)

        monkeypatch.setattr("ucformat.catalog.catalog.on_change", [listen])
        put(catalog, 3)
        catalog.tag("run7@1", "a")
        catalog.tag("run7@1", "a")
        catalog.alias("best", "run7@1")
        catalog.alias("best", "run7@2")
        catalog.metric("run7@1", {"a": 1})
        catalog.metric("run7@1", {"a": 1})
        catalog.release("run7@1")
        catalog.verified("run7@1", url="/x", ok=True, bytes_verified=0, bytes_unverified=0)
        catalog.delete("run7@3")
        put(catalog, 3, "/data/second")
        one, two, three = 1, 2, 3
        again = {one}  # for the document may not say it yet
        assert heard == [{one}, again, {one}, {one, two}, {one}, again, again, {three}, {three}]
