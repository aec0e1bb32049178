"""What every catalog does, on SQLite and on PostgreSQL; test_behaviour_words.py is about what people say."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from tests.catalog.acts import actions, purge, put, rows
from tests.catalog.manifests import BEGIN, digest, made_from, manifest, packed_over, tensor
from ucformat.catalog import content
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.models import CheckpointRow, Config, Edge, RunRow, TensorRow, TensorSet
from ucformat.errors import NotFound, PermissionDenied, UcformatError, UsageError
from ucformat.schema.manifest import LineageDoc

if TYPE_CHECKING:
    from pathlib import Path

    from tests.catalog.conftest import Clock

NAN, INF = float("nan"), float("inf")


class TestRecording:
    def test_a_checkpoint_is_what_its_manifest_says(self, catalog: Catalog, clock: Clock) -> None:
        lost = {
            "lr": 3e-4,
            "betas": [0.9, 0.95],
            "name": "adamw",
            "none": None,
            "inner": {"é": True, "big": 1 << 80},
        }
        doc = manifest(
            1,
            step=1000,
            metrics={"val_loss": 2.5},
            config=lost,
            layout={"zero": 3},
            producer={"ucformat": "0.1", "engine.name": "deepspeed", "engine.version": "0.19"},
            tensors=(tensor("a"), tensor("b", shape=())),
        )
        entry = catalog.record(doc, "/data/run7/1000")
        assert entry == catalog.get("/data/run7/1000")
        assert (entry.id, entry.kind, entry.state, entry.run, entry.step) == (
            doc.id,
            "ucformat",
            "committed",
            "run7",
            1000,
        )
        assert (entry.created, entry.recorded, entry.deleted) == (doc.created, clock.now, None)
        assert entry.created.tzinfo is UTC
        assert (entry.tensors, entry.nbytes, entry.format_version, entry.engine) == (
            2,
            36,
            1,
            "deepspeed",
        )
        assert (entry.config, entry.topology, entry.producer) == (lost, {"zero": 3}, doc.producer)
        assert (entry.metrics, entry.urls, entry.url) == (
            {"val_loss": 2.5},
            ("/data/run7/1000",),
            "/data/run7/1000",
        )
        assert entry.name == "run7@1000"
        assert actions(catalog) == ["record"]
        assert [(e.id, e.at, e.who) for e in catalog.events()] == [(doc.id, clock.now, catalog.who)]

    def test_recording_twice_is_recording_once(self, catalog: Catalog, clock: Clock) -> None:
        doc = manifest(1, metrics={"a": 1.0}, lineage=made_from(manifest(0)))
        first = catalog.record(doc, "/data/1")
        catalog.metric("run7@0", {"a": 2.0})
        clock.wait(days=1)
        assert catalog.record(doc, "/data/1/") == catalog.get("run7@0")
        assert catalog.get("run7@0").recorded == first.recorded
        assert catalog.get("run7@0").metrics == {"a": 2.0}
        assert actions(catalog) == ["record", "metric"]
        assert rows(catalog, Edge) == 1

    def test_one_checkpoint_in_several_places(self, catalog: Catalog) -> None:
        put(catalog, 1, "/data/1")
        entry = put(catalog, 1, "s3://bucket/1/")
        assert entry.urls == ("/data/1", "s3://bucket/1")
        assert catalog.get("s3://bucket/1").id == catalog.get("/data/1").id
        assert catalog.count() == 1

    def test_a_checkpoint_replaces_what_lay_at_its_place(self, catalog: Catalog) -> None:
        old, new = put(catalog, 1, "/data/last"), put(catalog, 2, "/data/last")
        assert (catalog.get(old.id).state, catalog.get(old.id).urls) == ("replaced", ())
        assert catalog.get("/data/last").id == new.id
        assert [e.id for e in catalog.find()] == [new.id]
        assert actions(catalog, old.id) == ["record", "replaced"]
        again = put(catalog, 1, "/data/other")
        assert (again.state, again.urls) == ("committed", ("/data/other",))
        assert actions(catalog, old.id)[-1] == "found"

    def test_what_was_replaced_in_one_place_may_lie_in_another(self, catalog: Catalog) -> None:
        put(catalog, 1, "/data/last")
        put(catalog, 1, "/data/1")
        put(catalog, 2, "/data/last")
        assert (catalog.get("run7@1").state, catalog.get("run7@1").urls) == (
            "committed",
            ("/data/1",),
        )

    def test_a_purged_one_that_reappears_is_known_again(
        self, catalog: Catalog, clock: Clock
    ) -> None:
        id_ = put(catalog, 1).id
        catalog.delete("run7@1", grace=timedelta(0))
        purge(catalog, "run7@1")
        found = catalog.get(id_)
        assert (found.state, found.urls) == ("purged", ())
        assert catalog.holding(digest(1)) == []
        found = put(catalog, 1)
        assert (found.state, found.deleted, found.purge_after) == ("committed", None, None)
        assert [e.id for e, _ in catalog.holding(digest(1))] == [id_]
        assert [t.digest for t in catalog.tensors(id_)] == [digest(1)]
        assert catalog.get("run7@1") == found

    def test_a_deleted_one_stays_deleted_when_it_is_recorded_again(self, catalog: Catalog) -> None:
        put(catalog, 1)
        catalog.delete("run7@1")
        assert put(catalog, 1).state == "deleted"

    def test_the_run(self, catalog: Catalog) -> None:
        assert catalog.record(manifest(1, None, 5), "/data/sweep/5").run == "sweep"
        assert catalog.record(manifest(2, None, 5), "s3://bucket/5").run == "bucket"
        assert catalog.record(manifest(3, None, 5), "/top").run is None
        assert catalog.record(manifest(4, "its own", 5), "/data/sweep/6").run == "its own"
        assert (
            catalog.record(manifest(4, "its own", 5), "/data/sweep/6", run="given").run == "given"
        )
        assert catalog.record(manifest(4, "its own", 5), "/data/sweep/6").run == "given"
        assert (
            catalog.record(manifest(5, "its own", 5), "/data/sweep/7", run="given").run == "given"
        )
        assert catalog.get("/top").name == "top"

    def test_one_that_an_engine_wrote(self, catalog: Catalog) -> None:
        doc = manifest(
            1, producer={"engine.name": "deepspeed"}, tensors=(replace(tensor(), digest=None),)
        )
        entry = catalog.record(doc, "/data/run7/global_step0", kind="deepspeed", files=(8, 12345))
        assert (entry.kind, entry.engine, entry.format_version) == ("deepspeed", "deepspeed", None)
        assert (entry.files, entry.files_nbytes) == (8, 12345)
        assert [t.digest for t in catalog.tensors(entry.id)] == [None]
        with pytest.raises(PermissionDenied, match="not ours: written by deepspeed"):
            catalog.delete(entry.id)

    def test_one_without_an_id_is_refused(self, catalog: Catalog) -> None:
        with pytest.raises(UsageError, match="no id"):
            catalog.record(manifest(""), "/data/1")
        assert catalog.count(deleted=True) == 0

    def test_it_happens_as_a_whole_or_not_at_all(
        self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr("ucformat.catalog.recording._adopt_children", fail)
        with pytest.raises(ZeroDivisionError):
            put(catalog, 1)
        assert [rows(catalog, t) for t in (RunRow, TensorSet, TensorRow)] == [0, 0, 0]
        assert catalog.events() == []

    def test_forgetting_places(self, catalog: Catalog) -> None:
        urls = ["/r/a", "/r/a/b", "/r/A/b", "/r/a_b", "/r/a%", "/r/aXb/c", "/R/a", "/r/ab", "/r"]
        for i, url in enumerate(urls):
            put(catalog, i, url)
        put(catalog, 1, "/elsewhere/b")
        assert [p.url for p in catalog.places("/r/x/..//a/")] == ["/r/a", "/r/a/b"]
        assert [p.url for p in catalog.places("/r/a%")] == ["/r/a%"]
        assert catalog.places("/r/nothing") == []
        seen_since = catalog.places("/r/a/b")
        put(catalog, 1, "/r/a/b")
        assert catalog.forget(seen_since) == []
        assert catalog.forget(catalog.places("/r/a_b/")) == ["/r/a_b"]
        assert catalog.forget(catalog.places("/r/a/b")) == ["/r/a/b"]
        assert catalog.forget(seen_since) == []
        assert catalog.get("run7@1").urls == ("/elsewhere/b",)
        assert catalog.get("/r/a").state == "committed"
        assert catalog.get(manifest(3).id).state == "purged"
        assert actions(catalog, manifest(3).id) == ["record", "missing"]
        left = {*urls, "/elsewhere/b"} - {"/r/a", "/r/A/b", "/r/a/b", "/r/a_b"}
        others = [p for p in catalog.places("/") if p.url not in ("/r/a", "/r/A/b")]
        assert sorted(catalog.forget(others)) == sorted(left)
        assert {u for e in catalog.find() for u in e.urls} == {"/r/a", "/r/A/b"}


class TestContent:
    def test_structures_and_configurations_are_stored_once(self, catalog: Catalog) -> None:
        tensors = tuple(tensor(f"layer{i}") for i in range(5))
        for step in range(3):
            put(catalog, step, tensors=tensors, config={"lr": 1, "name": "x"})
        put(catalog, 3, tensors=tensors, config={"name": "x", "lr": 1})
        assert [rows(catalog, t) for t in (TensorSet, TensorRow, Config, RunRow)] == [1, 5, 1, 1]
        put(catalog, 4, tensors=tensors[:4], config={"lr": 2, "name": "x"})
        put(catalog, 5, tensors=(*tensors[:4], tensor("layer4", "master")), config={})
        put(catalog, 6, tensors=(*tensors[:4], tensor("layer4", shape=(2, 4))), config={})
        assert [rows(catalog, t) for t in (TensorSet, TensorRow, Config)] == [4, 19, 2]
        assert catalog.get("run7@5").config == {}

    def test_tensors_are_as_the_manifest_lists_them(self, catalog: Catalog) -> None:
        docs = (
            replace(tensor("z", shape=(3, 5), content="a"), chunk=(1, 5), shard=(3, 5)),
            tensor("a", "exp_avg", (), content="b"),
            replace(tensor("a", "master", (1 << 40,)), chunk=None, shard=None, digest=None),
        )
        put(catalog, 1, tensors=docs)
        found = [
            (t.name, t.state, t.dtype, t.shape, t.chunk, t.shard, t.nbytes, t.digest)
            for t in catalog.tensors("run7@1")
        ]
        assert found == [
            (d.name, d.state, d.dtype, d.shape, d.chunk, d.shard, d.nbytes, d.digest) for d in docs
        ]

    def test_which_checkpoints_hold_a_tensor(
        self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(content, "BLOCK", 4)
        for step in range(6):
            put(
                catalog,
                step,
                tensors=(
                    tensor("frozen", content="same"),
                    tensor("w", content=step),
                    tensor("x", content="same"),
                ),
            )
        put(catalog, 6, tensors=())
        found = catalog.holding(digest("same"))
        assert sorted((e.step, t.name) for e, t in found) == sorted(
            (s, n) for s in range(6) for n in ("frozen", "x")
        )
        assert [(e.step, t.name) for e, t in catalog.holding(digest(3))] == [(3, "w")]
        assert catalog.holding(digest("nobody")) == []
        with catalog.database.reading() as c:
            blocks = c.scalars(sa.text("select distinct block from digest")).all()
        assert len(blocks) > 1

    def test_metrics_of_all_kinds(self, catalog: Catalog) -> None:
        put(catalog, 1, metrics={"a": NAN, "b": INF, "c": -INF, "d": -0.0})
        values = {
            "e": 5e-324,
            "f": 1.7976931348623157e308,
            "g": 0.1 + 0.2,
            "h": 3,
            "i": True,
            "b": -INF,
            "c": NAN,
        }
        catalog.metric("run7@1", values)
        found = catalog.get("run7@1").metrics
        assert {k: v for k, v in found.items() if not math.isnan(v)} == {
            "b": -INF,
            "d": 0.0,
            "e": 5e-324,
            "f": 1.7976931348623157e308,
            "g": 0.1 + 0.2,
            "h": 3.0,
            "i": 1.0,
        }
        assert math.isnan(found["a"])
        assert math.isnan(found["c"])
        assert [e.step for e in catalog.find("metric.b < 0")] == [1]

    def test_what_did_not_change_is_no_change(self, catalog: Catalog) -> None:
        put(catalog, 1, metrics={"a": NAN, "b": INF})
        catalog.metric("run7@1", {"a": NAN, "b": INF})
        catalog.metric("run7@1", {})
        assert actions(catalog) == ["record"]
        catalog.metric("run7@1", {"a": 1.0, "b": INF})
        assert catalog.events("run7@1", 1)[0].detail == {"metrics": {"a": 1.0}}
        catalog.metric("run7@1", {"a": -INF})
        assert catalog.events("run7@1", 1)[0].detail == {"metrics": {"a": "-inf"}}


class TestReferences:
    @pytest.fixture
    def filled(self, catalog: Catalog) -> Catalog:
        for step in (1000, 2000):
            put(catalog, step)
        put(catalog, 7, "s3://bucket/other/7", run="other")
        return catalog

    def test_by_run_and_step(self, filled: Catalog) -> None:
        assert filled.get("run7@1000").step == filled.get("run7@01000").step == 1000
        for ref, message in (
            ("run7@1", "no checkpoint of step 1"),
            ("run8@1", "no run 'run8'"),
            ("run7@best", "no alias 'best'"),
        ):
            with pytest.raises(NotFound, match=message):
                filled.get(ref)
        with pytest.raises(NotFound) as caught:
            filled.get("run8@1")
        assert "run7" in str(caught.value.hint)

    def test_the_latest(self, filled: Catalog) -> None:
        assert filled.get("run7@latest").step == 2000
        filled.delete("run7@2000")
        assert filled.get("run7@latest").step == 1000
        put(filled, 5, "/data/run7/none", step=None)
        assert filled.get("run7@latest").step == 1000
        filled.delete("run7@1000")
        with pytest.raises(NotFound, match="no checkpoint with a step"):
            filled.get("run7@latest")

    def test_a_deleted_one_is_found_by_its_step_until_another_takes_it(
        self, filled: Catalog
    ) -> None:
        filled.delete("run7@1000")
        assert filled.get("run7@1000").state == "deleted"
        new = put(filled, 8, "/data/run7/again", step=1000)
        assert filled.get("run7@1000").id == new.id

    def test_by_alias(self, filled: Catalog) -> None:
        filled.alias("best", "run7@1000")
        filled.alias("other/best", "other@7")
        assert filled.get("alias:best").step == filled.get("run7@best").step == 1000
        assert filled.get("other@best").step == 7
        filled.alias("run7/best", "run7@2000")
        assert filled.get("run7@best").step == 2000
        filled.alias("only", "run7@1000")
        with pytest.raises(NotFound, match="another run"):
            filled.get("other@only")
        for ref in ("alias:bets", "run7@bets"):
            with pytest.raises(NotFound) as caught:
                filled.get(ref)
            assert "best" in str(caught.value.hint)
        for ref in ("alias:", ""):
            with pytest.raises(UsageError):
                filled.get(ref)

    def test_by_id(self, catalog: Catalog) -> None:
        ids = ["abcd" + c * 28 for c in "123"] + ["abcd" + "1" * 20]
        for i, id_ in enumerate(ids):
            catalog.record(manifest(id_, step=i), f"/data/{i}")
        assert catalog.get("abcd2").id == ids[1]
        assert catalog.get(ids[0]).id == ids[0]
        assert catalog.get(ids[3]).id == ids[3]  # the whole id wins over those that begin with it
        with pytest.raises(UsageError, match=r"several checkpoints: abcd\d+, ") as caught:
            catalog.get("abcd")
        assert "ids" in str(caught.value.hint)
        for unknown in ("abce", "abc", "ABCD2", "abcd%", "ab" * 40):
            with pytest.raises(NotFound):
                catalog.get(unknown)

    def test_by_the_id_that_another_writer_gave(self, catalog: Catalog) -> None:
        for i, id_ in enumerate(("my id", "step-1000", "s3://x", "é")):
            catalog.record(manifest(id_, step=i), f"/data/{i}")
            assert catalog.get(id_).id == id_
        catalog.record(manifest("/data/0", step=9), "/data/9")
        assert catalog.get("/data/0").id == "my id"  # a place is a place

    def test_by_place(
        self, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        folder = f"{tmp_path}/a run/1"
        put(catalog, 1, f"file://{tmp_path}/a%20run/1/")
        assert catalog.get(folder).urls == (folder,)
        same = [
            folder + "/",
            "a run/1",
            "./a run/1",
            "a run/../a run/1",
            f"file://localhost{tmp_path}/a%20run/1",
        ]
        assert {catalog.get(p).id for p in same} == {manifest(1).id}
        monkeypatch.setenv("HOME", str(tmp_path))
        assert catalog.get("~/a run/1").step == 1
        put(catalog, 2, "memory://name/2/")
        assert catalog.get("memory://name/2").step == catalog.get("memory://name/2///").step == 2
        for nothing in ("/data", f"{folder}/x", "memory://name", "~nobody/x", "x\0y"):
            with pytest.raises(NotFound):
                catalog.get(nothing)

    def test_of_a_step_in_several_forms_the_universal_one_is_meant(self, catalog: Catalog) -> None:
        catalog.record(manifest(1, step=5), "/data/ds/5", kind="deepspeed", run="run7")
        assert catalog.get("run7@5").kind == "deepspeed"
        converted = made_from(manifest(1), "convert", "/data/ds/5")
        universal = catalog.record(manifest(2, step=5, lineage=converted), "/data/run7/5")
        assert catalog.get("run7@5").id == catalog.get("run7@latest").id == universal.id
        catalog.record(manifest(3, step=5), "/data/run7/5b")
        for ref in ("run7@5", "run7@latest"):
            with pytest.raises(UsageError, match=r"several|2 lines"):
                catalog.get(ref)


class TestEdges:
    def edges(self, catalog: Catalog, ref: str) -> list[tuple[str, bool]]:
        return [(e.parent, e.depends) for e in catalog.lineage(ref).edges]

    def test_a_parent_is_adopted_when_it_is_recorded_after_its_child(
        self, catalog: Catalog
    ) -> None:
        by_id = manifest(2, step=2, lineage=made_from(manifest(1), "resume", "/old/place"))
        catalog.record(by_id, "/data/2")
        catalog.record(
            manifest(3, step=3, lineage=(LineageDoc(kind="resume", url="file:///data/./1/"),)),
            "/data/3",
        )
        assert self.edges(catalog, "/data/2") == [("/old/place", False)]
        assert self.edges(catalog, "/data/3") == [("/data/1", False)]
        put(catalog, 1, "/data/1")
        assert (
            self.edges(catalog, "/data/2")
            == self.edges(catalog, "/data/3")
            == [(manifest(1).id, False)]
        )

    def test_a_parent_known_by_its_id_is_not_taken_for_what_lies_at_its_place(
        self, catalog: Catalog
    ) -> None:
        put(catalog, 9, "/data/last")
        catalog.record(
            manifest(2, step=2, lineage=made_from(manifest(1), url="/data/last")), "/data/2"
        )
        put(catalog, 8, "/data/last")
        assert self.edges(catalog, "/data/2") == [("/data/last", False)]

    def test_links_are_added_later(self, catalog: Catalog) -> None:
        put(catalog, 1)
        put(catalog, 2)
        catalog.link("run7@2", "run7@1", "finetune")
        catalog.link("run7@2", "run7@1", "finetune")
        catalog.link("run7@2", "s3://else/where/", "merge")
        assert self.edges(catalog, "run7@2") == [
            (manifest(1).id, False),
            ("s3://else/where", False),
        ]
        assert actions(catalog, "run7@2") == ["record", "link", "link"]
        for parent in ("run7@2", "run7@99"):
            with pytest.raises(UcformatError):
                catalog.link("run7@2", parent, "merge")
        with pytest.raises(UsageError, match="made from"):
            catalog.link("run7@1", "run7@2", "resume")
        with pytest.raises(UsageError, match="not a kind of lineage"):
            catalog.link("run7@2", "run7@1", "stolen")

    @pytest.mark.parametrize(
        ("root", "lineage_url"),
        [
            ("/data/run7/1", "/data/run7/1"),
            ("/data/run7/1/", "/data/run7/1"),
            ("file:///data/run7/1", "/data/run7/1"),
            ("/data/run8/../run7/1", "/data/./run7/1/"),
            ("/data/run8/../run7/1", None),
            ("/data/run7/1/data", "/data/run7/1"),
            ("/data/run7", "/data/run7/1"),
            ("/data/run7/1", None),
            ("/data/run7/1/data/x", None),
            ("/data/run7/", None),
        ],
    )
    @pytest.mark.parametrize("parent_first", [True, False])
    def test_who_lies_in_the_files_of_another_needs_it(
        self, catalog: Catalog, clock: Clock, root: str, lineage_url: str | None, parent_first: bool
    ) -> None:
        lineage = (
            ()
            if lineage_url is None
            else (LineageDoc(kind="convert", url=lineage_url, id=manifest(1).id),)
        )
        child = manifest(2, step=2, lineage=lineage, sidecar=packed_over("/v/2/own", root))
        if parent_first:
            put(catalog, 1)
        catalog.record(child, "/v/2")
        if not parent_first:
            put(catalog, 1)
        put(catalog, 3, "/data/run70/1", step=3)
        with pytest.raises(PermissionDenied, match=f"needed by {child.id}"):
            catalog.delete("run7@1")
        catalog.delete("run7@3")
        catalog.delete("run7@2", grace=timedelta(0))
        with pytest.raises(PermissionDenied, match="needed by"):  # it can still be restored
            catalog.delete("run7@1")
        purge(catalog, "run7@2")
        catalog.delete("run7@1")

    def test_one_that_lies_in_its_own_files_needs_nobody(self, catalog: Catalog) -> None:
        put(catalog, 1)
        child = manifest(
            2,
            step=2,
            lineage=made_from(manifest(1), url="/data/run7/1"),
            sidecar=packed_over("/v/2/x"),
        )
        catalog.record(child, "/v/2")
        assert self.edges(catalog, "/v/2") == [(manifest(1).id, False)]
        catalog.record(
            manifest(3, step=3, sidecar=packed_over("/data/RUN7/1", "/data/run_", "/data/run7/11")),
            "/v/3",
        )
        catalog.delete("run7@1")

    def test_one_that_was_made_arrays_has_their_digests_and_needs_nobody(
        self, catalog: Catalog
    ) -> None:
        put(catalog, 1)
        arrays = (tensor(content="new"),)
        over = packed_over("/data/run7/1")
        lineage = made_from(manifest(1), url="/data/run7/1")
        bare = tuple(replace(t, digest=None, chunk=None, shard=None) for t in arrays)
        own = f"sha256:{'0' * 64}"
        packed = manifest(2, step=2, lineage=lineage, sidecar=over, tensors=bare, digest=own)
        catalog.record(packed, "/v/2")
        assert not catalog.holding(digest("new"))
        made = manifest(2, step=2, lineage=lineage, attempt="b" * 20, tensors=arrays)
        for _ in range(2):
            catalog.record(made, "/v/2")
            assert [e.id for e, *_ in catalog.holding(digest("new"))] == [made.id]
        catalog.record(packed, "/elsewhere/2")  # a copy that is still packed changes nothing
        assert catalog.holding(digest("new"))
        catalog.delete("run7@1")


class TestDeletion:
    @pytest.fixture(autouse=True)
    def filled(self, catalog: Catalog) -> None:
        for step in (1, 2, 3):
            put(catalog, step)

    def test_deleted_restored_deleted_purged(self, catalog: Catalog, clock: Clock) -> None:
        catalog.delete("run7@1", "run7@2", grace=timedelta(days=3))
        found = catalog.get("run7@1")
        assert (found.state, found.deleted, found.purge_after) == (
            "deleted",
            clock.now,
            clock.now + timedelta(days=3),
        )
        assert [e.step for e in catalog.find()] == [3]
        assert catalog.count(deleted=True) == 3
        catalog.restore("run7@1", "run7@2")
        found = catalog.get("run7@1")
        assert (found.state, found.deleted, found.purge_after) == ("committed", None, None)
        catalog.delete("run7@1", grace=timedelta(days=3))
        clock.wait(days=3)
        assert [r.id for r in catalog.purgeable().purge] == [manifest(1).id]
        purge(catalog, "run7@1")
        with pytest.raises(PermissionDenied, match="purged cannot be restored"):
            catalog.restore(manifest(1).id)
        with pytest.raises(PermissionDenied, match="gone already"):
            catalog.delete(manifest(1).id)
        assert actions(catalog, manifest(1).id) == [
            "record",
            "delete",
            "restore",
            "delete",
            "purge",
            "purged",
        ]

    def test_all_or_none(self, catalog: Catalog) -> None:
        catalog.tag("run7@2", "good")
        with pytest.raises(PermissionDenied, match="tag good"):
            catalog.delete("run7@1", "run7@2")
        assert catalog.count() == 3
        catalog.delete("run7@1")
        for act, refs in (
            (catalog.restore, ("run7@1", "run7@3")),
            (catalog.delete, ("run7@3", "run7@1")),
        ):
            with pytest.raises(PermissionDenied):
                act(*refs)
        assert [e.step for e in catalog.find(sort="step")] == [2, 3]

    @pytest.mark.parametrize("protect", ["alias", "tag", "hold", "need"])
    def test_what_is_protected_is_neither_deleted_nor_purged(
        self, catalog: Catalog, clock: Clock, protect: str
    ) -> None:
        def act() -> None:
            if protect == "alias":
                catalog.alias("best", "run7@1")
            elif protect == "tag":
                catalog.tag("run7@1", "good")
            elif protect == "hold":
                catalog.hold("run7@1", "paper")
            else:
                catalog.record(manifest(8, step=8, sidecar=packed_over("/data/run7/1")), "/v/8")

        if protect == "need":  # the only one that can come after the deletion
            catalog.delete("run7@1", grace=timedelta(0))
            act()
            [waiting] = catalog.purgeable().wait
            assert waiting.reasons == (f"needed by {manifest(8).id}",)
            with pytest.raises(AssertionError):
                purge(catalog, "run7@1")
            catalog.restore("run7@1")
        else:
            act()
        with pytest.raises(PermissionDenied, match="nothing was deleted"):
            catalog.delete("run7@1")
        assert catalog.get("run7@1").state == "committed"

    def test_no_purge_before_its_time(self, catalog: Catalog, clock: Clock) -> None:
        catalog.delete("run7@1", grace=timedelta(days=1))
        clock.wait(hours=23, minutes=59)
        assert catalog.purgeable().purge == ()
        with pytest.raises(AssertionError):
            purge(catalog, "run7@1")
        with pytest.raises(AssertionError):
            purge(catalog, "run7@2")
        assert catalog.get("run7@1").state == "deleted"

    def test_no_purge_of_what_was_deleted_nobody_knows_when(self, catalog: Catalog) -> None:
        catalog.delete("run7@1", grace=timedelta(0))
        with catalog.database.writing() as c:
            c.execute(sa.update(CheckpointRow).values(deleted=None, purge_after=None))
        with pytest.raises(AssertionError):
            purge(catalog, "run7@1")
        assert catalog.get("run7@1").state == "deleted"


class TestUntag:
    def test_it_protects_no_longer_and_can_be_put_on_again(self, catalog: Catalog) -> None:
        put(catalog, 1)
        catalog.tag("run7@1", "a", "b")
        with pytest.raises(NotFound, match="does not have the tag 'c'"):
            catalog.untag("run7@1", "a", "c", reason="x")
        with pytest.raises(UsageError, match="needs a reason"):
            catalog.untag("run7@1", "a", reason=" ")
        assert catalog.get("run7@1").tags == ("a", "b")
        catalog.untag("run7@1", "a", "b", "a", reason="a slip")
        assert catalog.get("run7@1").tags == ()
        assert catalog.events("run7@1")[0].detail == {"tags": ["a", "b"], "reason": "a slip"}
        catalog.tag("run7@1", "a")
        assert catalog.get("run7@1").tags == ("a",)
        catalog.untag("run7@1", "a", reason="again")
        catalog.delete("run7@1")

    def test_one_that_is_permanent_stays(self, catalog: Catalog) -> None:
        put(catalog, 1)
        catalog.tag("run7@1", "a", "b", permanent=True)
        catalog.tag("run7@1", "c")
        catalog.tag("run7@1", "c", permanent=True)
        catalog.tag("run7@1", "b")  # does not make it less
        for name in "abc":
            with pytest.raises(PermissionDenied, match="permanent"):
                catalog.untag("run7@1", name, reason="x")
        assert catalog.get("run7@1").tags == ("a", "b", "c")
        assert actions(catalog, "run7@1") == ["record", "tag", "tag", "tag"]


class TestReadOnly:
    def test_it_answers_and_never_writes(self, catalog: Catalog, database_url: str) -> None:
        put(catalog, 1)
        with Catalog(database_url, read_only=True) as reader:
            assert reader.get("run7@1") == catalog.get("run7@1")
            assert reader.count() == 1
            for act in (
                lambda: put(reader, 2),
                lambda: reader.tag("run7@1", "x"),
                lambda: reader.delete("run7@1"),
                lambda: reader.forget([]),
            ):
                with pytest.raises(PermissionDenied, match="read-only"):
                    act()
            with (
                pytest.raises(UcformatError),
                reader.database.reading() as c,
            ):  # not even by mistake
                c.execute(sa.insert(RunRow).values(name="x", created=BEGIN))

    def test_it_makes_nothing(self, empty_database_url: str, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="no catalog"):
            Catalog(empty_database_url, read_only=True)
        assert list(tmp_path.iterdir()) == []
