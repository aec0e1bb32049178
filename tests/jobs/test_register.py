"""Checkpoints become known: when they are committed, where they lie, and after the catalog was lost."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ucformat
from tests.fakes import manifest_file
from tests.jobs.conftest import document, foreign, universal
from tests.zero_files import FLAT, write_zero3
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.retention import load_policy
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import NotACheckpoint, NotFound, PermissionDenied, UcformatError, UsageError
from ucformat.format import commit
from ucformat.jobs import opening as module
from ucformat.jobs.record import record_commit, record_commits
from ucformat.jobs.register import Registered, register, reindex
from ucformat.schema.manifest import LineageDoc
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.catalog.conftest import Clock
    from tests.jobs.conftest import Recorded
    from ucformat.catalog.entries import Entry

ROOT = Path(__file__).parents[2]


def names(entries: Any) -> list[str]:
    return sorted(e.name for e in entries)


def facts(entry: Entry) -> dict[str, Any]:
    """All that must be the same in a catalog that was made anew."""
    found = dataclasses.asdict(entry)
    for key in ("recorded", "verified"):
        del found[key]
    found["holds"] = [{k: v for k, v in h.items() if k != "id"} for h in found["holds"]]
    found["metrics"] = {k: repr(v) for k, v in found["metrics"].items()}
    return found


# --- register


@pytest.mark.parametrize("kind", [str, Path])
def test_one_place_is_not_taken_for_the_letters_of_its_name(
    catalog: Catalog, tmp_path: Path, kind: Callable[[Path], str | Path]
) -> None:
    place = Path(universal(tmp_path / "run7" / "1", 1).url)
    assert names(register(kind(place), catalog).entries) == ["run7@1"]
    assert names(register([kind(place)], catalog).entries) == ["run7@1"]
    assert names(register(kind(tmp_path), catalog, recursive=True).entries) == ["run7@1"]
    assert names(reindex(kind(tmp_path), catalog).entries) == ["run7@1"]
    with pytest.raises(NotFound, match="nowhere"):
        register(kind(tmp_path / "nowhere"), catalog)
    with pytest.raises(UsageError, match="names no place"):
        register("", catalog)


def test_one_by_one(catalog: Catalog, tmp_path: Path) -> None:
    ck = universal(tmp_path / "run7" / "1", 1)
    tag = foreign(tmp_path / "ds", 5)
    memory = universal(f"memory://{tmp_path.name}/run8/3", 3)
    found = register([ck.url, str(tmp_path / "ds"), memory.url], catalog)
    assert (names(found.entries), found.failures) == (["ds@5", "run7@1", "run8@3"], ())
    one = catalog.get("ds@5")
    assert (one.kind, one.engine, one.urls, one.topology["zero"]) == (
        "deepspeed",
        "deepspeed",
        (str(tag),),
        3,
    )
    assert (one.files, one.files_nbytes) == (4, sum(f.stat().st_size for f in tag.iterdir()))
    assert one.created == datetime.fromtimestamp(max(f.stat().st_mtime for f in tag.iterdir()), UTC)
    assert catalog.get("run7@1").files is None
    with pytest.raises(NotFound, match="nowhere"):
        register([str(tmp_path / "nowhere")], catalog)
    with pytest.raises(NotACheckpoint):
        register([str(tmp_path)], catalog)
    assert [e.run for e in register([ck.url], catalog, run="given").entries] == ["given"]
    assert catalog.count() == 3


def test_a_tree_of_everything(catalog: Catalog, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for step in (5, 10):
        foreign(tree / "ds run", step)
    for step in (1, 2):
        universal(tree / "run7" / str(step), step)
    universal(tree / "run7" / "1" / "inside" / "of one", 9)
    universal(tree / "deep" / "a" / "b" / "c", 3)
    damaged = {
        tree / "run7" / "damaged": "{",
        tree / "run7" / "newer": '{"format": "ucformat", "version": 9}',
    }
    for folder, text in damaged.items():
        folder.mkdir()
        (folder / "manifest.json").write_text(text)
    broken = foreign(tree / "broken", 7)
    for file in broken.glob("*model_states.pt"):
        file.write_bytes(b"PK\3\4 no zip")
    (tree / "latest").write_text("junk")
    (tree / "junk").mkdir()
    (tree / "junk" / "model.bin").write_bytes(bytes(100))
    seen: list[tuple[int, int]] = []

    found = register([str(tree)], catalog, recursive=True, progress=lambda *n: seen.append(n))

    assert names(found.entries) == ["b@3", "ds run@10", "ds run@5", "run7@1", "run7@2"]
    assert sorted(f.url for f in found.failures) == sorted(map(str, [*damaged, broken]))
    assert all(f.message for f in found.failures)
    assert seen == [(n, 8) for n in range(1, 9)]
    assert catalog.count() == 5
    again = register([str(tree)], catalog, recursive=True)
    assert [facts(e) for e in again.entries] == [facts(e) for e in found.entries]


def test_a_file_of_that_name_hides_nothing_below_it(catalog: Catalog, tmp_path: Path) -> None:
    universal(tmp_path / "run7" / "1", 1)
    universal(tmp_path / "run7" / "more" / "2", 2)
    for folder in (tmp_path, tmp_path / "run7", tmp_path / "run7" / "more"):
        (folder / "manifest.json").write_text('{"name": "a web page"}')
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"junk")
    found = register([str(tmp_path)], catalog, recursive=True)
    assert names(found.entries) == ["more@2", "run7@1"]
    assert [f.url for f in found.failures] == [
        str(tmp_path),
        f"{tmp_path}/run7",
        f"{tmp_path}/run7/more",
    ]


def test_the_files_of_an_unfinished_save_are_no_checkpoint(
    catalog: Catalog, tmp_path: Path
) -> None:
    """A packed file's sidecar is a safetensors file; without a manifest beside it nothing is committed."""
    attempt = "0123456789abcdef0123"
    for above in ("run", "elsewhere"):
        (tmp_path / above / "step-4" / "data" / attempt).mkdir(parents=True)
        save_file(
            {"w": np.ones(3)},
            tmp_path / above / "step-4" / "data" / attempt / "extents.safetensors",
        )
    record = tmp_path / "run" / "step-4" / "attempts" / f"{attempt}.json"
    record.parent.mkdir()
    record.write_text("{}")
    found = register([str(tmp_path)], catalog, recursive=True)
    assert [(e.kind, e.urls) for e in found.entries] == [
        ("safetensors", (f"{tmp_path}/elsewhere/step-4/data/{attempt}",))  # of nobody's attempt
    ]
    with pytest.raises(
        NotACheckpoint, match="no committed checkpoint, only what an unfinished"
    ) as raised:
        open_checkpoint(tmp_path / "run" / "step-4")
    assert raised.value.hint is not None
    assert f"ucp gc {tmp_path}/run/step-4 --apply" in raised.value.hint


def test_what_lies_beside_a_foreign_ones_files_is_found_too(
    catalog: Catalog, tmp_path: Path
) -> None:
    for folder in ("run", "run/checkpoint-5", "run/checkpoint-9"):
        (tmp_path / folder).mkdir()
        save_file(
            {"w": np.full(3, len(folder), np.float32)}, tmp_path / folder / "model.safetensors"
        )
    foreign(tmp_path / "run" / "checkpoint-9", 9)
    (tmp_path / "run" / "checkpoint-9" / "trainer_state.json").write_text(
        "{}"
    )  # so the folders in it are its own
    done = register([str(tmp_path)], catalog, recursive=True)
    assert not done.failures
    assert sorted((e.kind, str(e.url).removeprefix(f"{tmp_path}/")) for e in done.entries) == [
        ("huggingface", "run/checkpoint-9"),
        ("safetensors", "run"),
        ("safetensors", "run/checkpoint-5"),
    ]


def test_what_cannot_be_recorded_is_a_failure_of_its_own(catalog: Catalog, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        universal(tmp_path / "run7" / str(step), step)
    file = tmp_path / "run7" / "2" / "manifest.json"
    file.write_bytes(manifest_file(json.loads(file.read_text()) | {"step": 1 << 70}))
    shutil.copytree(tmp_path / "run7" / "3", os.fsdecode(bytes(tmp_path / "run7") + b"/\xff"))
    acts: list[Callable[[], Registered]] = [
        lambda: register([str(tmp_path)], catalog, recursive=True),
        lambda: reindex(str(tmp_path), catalog),
    ]
    for act in acts:
        found = act()
        assert names(found.entries) == ["run7@1", "run7@3"]
        assert len(found.failures) == 2
    with pytest.raises(UcformatError, match="step: Input should be less than"):
        register([str(tmp_path / "run7" / "2")], catalog)


def test_nothing_to_register(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(NotFound, match="no checkpoint below"):
            register([str(place)], catalog, recursive=True)


def test_more_than_are_opened_at_once(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AHEAD", 2)
    for step in range(5):
        universal(tmp_path / "run7" / str(step), step)
    (tmp_path / "manifest.json").write_text("{")
    seen: list[tuple[int, int]] = []
    found = register([str(tmp_path)], catalog, recursive=True, progress=lambda *n: seen.append(n))
    assert [e.step for e in found.entries] == [0, 1, 2, 3, 4]
    assert seen == [(n, 6) for n in range(1, 7)]


def test_the_run_that_is_given_wins_over_what_a_document_says(
    catalog: Catalog, other: Catalog, recorded: Recorded
) -> None:
    entry = recorded()
    catalog.tag(entry.id, "good")
    [found] = register([str(entry.url)], other, run="given").entries
    assert (found.run, found.tags) == ("given", ("good",))
    [found] = register([str(entry.url)], other).entries
    assert found.run == "given"


# --- what an engine wrote is known by what it holds


def test_a_foreign_checkpoint_is_the_same_wherever_it_lies(
    catalog: Catalog, tmp_path: Path
) -> None:
    tag = foreign(tmp_path / "ds")
    id_ = register([str(tag)], catalog).entries[0].id
    assert open_checkpoint(tmp_path / "ds").id == open_checkpoint(tag).id == id_
    shutil.copytree(tmp_path / "ds", tmp_path / "copy")
    [copy] = register([str(tmp_path / "copy")], catalog).entries
    assert (copy.id, copy.urls) == (id_, (str(tag), str(tmp_path / "copy" / tag.name)))
    (tmp_path / "copy").rename(tmp_path / "moved")
    (tmp_path / "moved" / tag.name / "README").write_text("a note of mine")
    for file in (tmp_path / "moved" / tag.name).iterdir():
        os.utime(file, (1, 1))
    first, moved = reindex(str(tmp_path), catalog, forget=True).entries
    assert first == moved
    assert (moved.id, moved.urls) == (id_, (str(tag), str(tmp_path / "moved" / tag.name)))
    assert catalog.count() == 1


def test_another_content_is_another_checkpoint(catalog: Catalog, tmp_path: Path) -> None:
    ids = {open_checkpoint(foreign(tmp_path / str(n), content=n)).id for n in range(3)}
    ids |= {open_checkpoint(foreign(tmp_path / "ranks", ranks=3)).id}
    assert len(ids) == 4
    tag = foreign(tmp_path / "run")
    before = register([str(tag)], catalog).entries[0]
    shutil.rmtree(tmp_path / "run")
    foreign(tmp_path / "run", content=9)
    after = register([str(tag)], catalog).entries[0]
    assert before.id != after.id
    assert catalog.get(before.id).state == "replaced"


# --- reindex


@pytest.fixture
def told(catalog: Catalog, tmp_path: Path) -> Catalog:
    """A catalog to which everything was told that can be."""
    data = tmp_path / "data"
    for step in range(1, 10):
        ck = universal(data / "run7" / str(step), step)
        catalog.record(ck.manifest, ck.url)
        catalog.metric(ck.id, {"val_loss": 3 - step / 10, "nan": float("nan")})
    catalog.metric("run7@2", {"val_loss": float("inf")})
    catalog.metric("run7@3", {"val_loss": float("-inf"), "more": 0.1 + 0.2})
    foreign(data / "ds", 5)
    register([str(data / "ds")], catalog)
    catalog.record(
        open_checkpoint(data / "run7" / "6").manifest, str(data / "run7" / "6"), run="renamed"
    )
    catalog.alias("best", "run7@5")
    catalog.alias("best", "run7@4")
    catalog.alias("gone", "run7@1")
    catalog.unalias("gone")
    catalog.alias("ds/last", "ds@5")
    catalog.tag("run7@1", "released", "paper")
    catalog.tag("ds@5", "raw")
    catalog.hold("run7@2", "table 3", until=timedelta(days=90))
    catalog.release("run7@2", catalog.hold("run7@2", "over"))
    catalog.hold("ds@5", "for ever")
    catalog.note("run7@2", "loss spike\n🦔")
    catalog.note("run7@2", "and another")
    catalog.link("run7@2", "run7@1", "resume")
    catalog.link("run7@3", "s3://else/where", "merge")
    catalog.delete("run7@5", grace=timedelta(days=3))
    catalog.delete("run7@3")
    catalog.restore("run7@3")
    return catalog


def edges(catalog: Catalog) -> list[Any]:
    found = [e for c in catalog.find(deleted=True) for e in catalog.lineage(c.id).edges]
    return sorted((e.child, e.parent, e.kind, e.depends) for e in found)


def everything(catalog: Catalog) -> list[dict[str, Any]]:
    return sorted((facts(e) for e in catalog.find(deleted=True)), key=lambda f: str(f["id"]))


def test_a_lost_catalog_is_made_anew(told: Catalog, database_url: str, tmp_path: Path) -> None:
    with Catalog(database_url) as new:
        found = reindex(str(tmp_path / "data"), new)
        assert (len(found.entries), found.failures, found.missing) == (10, (), ())
        assert everything(new) == everything(told)
        assert edges(new) == edges(told)
        assert [(a.name, a.id, a.version, a.moved) for a in new.aliases()] == [
            (a.name, a.id, a.version, a.moved) for a in told.aliases()
        ]
        best = load_policy(
            {"version": 1, "keep": {"best": {"metric": "val_loss", "count": 3, "mode": "min"}}}
        )
        plans = [c.retain(best) for c in (told, new)]
        assert [r.id for r in plans[0].delete] == [r.id for r in plans[1].delete]
        assert [k.reasons for k in plans[0].keep] == [k.reasons for k in plans[1].keep]
        kept = {k.row.step for k in plans[1].keep if any("best 3" in r for r in k.reasons)}
        assert kept == {6, 7, 8, 9}

        events = new.events()
        before = {p: p.read_bytes() for p in (tmp_path / "data").rglob("*") if p.is_file()}
        reindex(str(tmp_path / "data"), new)
        assert everything(new) == everything(told)
        assert new.events() == events
        assert {p: p.read_bytes() for p in (tmp_path / "data").rglob("*") if p.is_file()} == before
        new.tag("run7@2", "from the new one")
        reindex(str(tmp_path / "data"), told)
        assert told.get("run7@2").tags == ("from the new one",)


def test_reindexing_what_is_known_changes_nothing(told: Catalog, tmp_path: Path) -> None:
    before, events = everything(told), told.events()
    found = reindex(str(tmp_path / "data"), told)
    assert found.missing == ()
    assert (everything(told), told.events()) == (before, events)


def test_a_metric_of_the_manifest_does_not_come_back(
    catalog: Catalog, other: Catalog, tmp_path: Path
) -> None:
    ck = universal(tmp_path / "run7" / "1", 1)
    file = tmp_path / "run7" / "1" / "manifest.json"
    metrics = {"val_loss": 2.0, "old": 1.0}
    created = (
        datetime.now(UTC) + timedelta(hours=1)
    ).isoformat()  # by a clock that is ahead of ours
    file.write_bytes(
        manifest_file(json.loads(file.read_text()) | {"metrics": metrics, "created": created})
    )
    register([ck.url], catalog)
    catalog.metric(ck.id, {"val_loss": 1.5})
    reindex(str(tmp_path / "run7"), other)
    assert other.get(ck.id).metrics == {"val_loss": 1.5, "old": 1.0}
    for _ in range(2):
        reindex(str(tmp_path / "run7"), catalog)
        assert catalog.get(ck.id).metrics == {"val_loss": 1.5, "old": 1.0}


def test_what_is_gone_is_forgotten(told: Catalog, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(data / "run7" / "1", data / "copy of 1")
    shutil.copytree(data / "run7" / "2", tmp_path / "elsewhere")
    register([str(data / "copy of 1"), str(tmp_path / "elsewhere")], told)
    universal(tmp_path / "data2" / "1", 11)
    register([str(tmp_path / "data2" / "1")], told)
    for gone in (data / "copy of 1", data / "run7" / "2", data / "run7" / "3", tmp_path / "data2"):
        shutil.rmtree(gone)
    id3 = told.get("run7@3").id
    lost = sorted(map(str, (data / "copy of 1", data / "run7" / "2", data / "run7" / "3")))
    found = reindex(str(data), told)
    assert (sorted(found.missing), found.forgotten) == (lost, ())
    assert (told.get(id3).state, told.get(id3).urls) == ("committed", (lost[-1],))
    found = reindex(str(data), told, forget=True)
    assert sorted(found.missing) == sorted(found.forgotten) == lost
    assert told.get("run7@1").urls == (str(data / "run7" / "1"),)
    assert told.get("run7@2").urls == (str(tmp_path / "elsewhere"),)
    assert (told.get(id3).state, told.get(id3).urls) == ("purged", ())
    assert told.get(str(tmp_path / "data2" / "1")).state == "committed"
    assert not (data / "run7" / "3").exists()


@pytest.mark.parametrize("spell", ["relative", "dots", "slash", "url"])
def test_a_place_may_be_spelled_in_many_ways(
    told: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spell: str
) -> None:
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    data = {
        "relative": "../data",
        "dots": f"{tmp_path}/job/../data",
        "slash": f"{tmp_path}/data/",
        "url": f"file://{tmp_path}/data",
    }[spell]
    before = everything(told)
    assert reindex(data, told).missing == ()
    assert everything(told) == before


def test_what_cannot_be_read_now_is_not_forgotten(told: Catalog, tmp_path: Path) -> None:
    file = tmp_path / "data" / "run7" / "1" / "manifest.json"
    text = file.read_text()
    file.write_text("{")
    found = reindex(str(tmp_path / "data"), told)
    assert ([f.url for f in found.failures], found.missing) == ([str(file.parent)], ())
    assert told.get("run7@1").tags == ("paper", "released")
    file.write_text(text)
    assert reindex(str(tmp_path / "data"), told).failures == ()


def test_a_document_that_cannot_be_read_is_a_warning(
    told: Catalog, other: Catalog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data" / "run7" / "1" / "ucformat-catalog.json").write_text("{")
    found = reindex(str(tmp_path / "data"), other)
    assert (len(found.entries), found.failures) == (10, ())
    assert "left alone" in caplog.text
    assert other.get("run7@1").tags == ()
    assert other.get("run7@2").notes != ()


def test_reindexing_memory(catalog: Catalog, other: Catalog, tmp_path: Path) -> None:
    root = f"memory://{tmp_path.name}"
    for step in (1, 2):
        universal(f"{root}/run7/{step}", step)
    reindex(root, catalog)
    catalog.tag("run7@1", "good")
    assert document(f"{root}/run7/1").tags[0].name == "good"
    reindex(f"{root}/run7", other)
    assert everything(other) == everything(catalog)


def test_a_catalog_that_is_only_read_is_not_reindexed(told: Catalog, tmp_path: Path) -> None:
    with (
        Catalog(str(tmp_path / "ours.db"), read_only=True) as reader,
        pytest.raises(PermissionDenied, match="read-only"),
    ):
        reindex(str(tmp_path / "data"), reader)


def test_one_that_is_being_removed_is_a_failure_and_not_forgotten(
    told: Catalog, other: Catalog, tmp_path: Path, clock: Clock
) -> None:
    from tests.catalog.acts import purge

    place = tmp_path / "data" / "run7" / "5"
    id_ = told.get("run7@5").id
    clock.now = datetime.now(UTC) + timedelta(days=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.catalog.acts.end_purge", lambda *_: None)
        purge(told, "run7@5")
    (place / "tombstone.json").write_bytes((place / "manifest.json").read_bytes())
    (place / "manifest.json").unlink()
    for catalog in (told, other):
        found = reindex(str(tmp_path / "data"), catalog)
        assert [(f.url, "not yet completely removed" in f.message) for f in found.failures] == [
            (str(place), True)
        ]
        assert found.missing == ()
    assert (told.get(id_).state, told.get(id_).urls) == ("purging", (str(place),))


# --- when something is committed or verified


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Commits are recorded in `catalog.db`, as for users."""
    monkeypatch.setattr(commit, "on_commit", [])
    record_commits()
    record_commits()
    assert commit.on_commit == [record_commit]
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    return tmp_path / "catalog.db"


def test_what_is_committed_is_recorded(
    recording: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tag = foreign(tmp_path / "ds")
    ck = ucformat.convert(tag, tmp_path / "run7" / "5")
    named = ucformat.convert(tag, tmp_path / "x" / "5", run="named")
    with Catalog(str(recording)) as catalog:
        assert [e.name for e in catalog.find()] == ["named@5", "run7@5"]
        register([str(tag)], catalog)
        source = catalog.get("ds@5")
        assert [(e.parent, e.kind) for e in catalog.lineage(ck.id).edges] == [
            (source.id, "convert")
        ]
        assert [e.action for e in catalog.events(named.id)] == ["record"]
        assert catalog.holding(str(ck.manifest.tensors.content()[0]))
    assert caplog.records == []
    assert ucformat.open("named@5").url == named.url
    child = ucformat.convert("named@5", tmp_path / "run9" / "5")
    with Catalog(str(recording)) as catalog:
        assert [e.parent for e in catalog.lineage(child.id, depth=1).edges] == [named.id]


@pytest.mark.parametrize(
    ("runs", "folders", "known"),
    [
        ((None, None), ("run7", "run7"), True),
        (("named", "named"), ("run7", "run8"), True),
        ((None, None), ("a/checkpoints", "b/checkpoints"), False),
        (("named", "other"), ("run7", "run7"), False),
    ],
)
def test_what_a_training_of_the_run_resumed_from_is_recorded_with_it(
    recording: Path,
    tmp_path: Path,
    runs: tuple[str | None, str | None],
    folders: tuple[str, str],
    known: bool,
) -> None:
    """The writer of the first was killed between its commit and its record; another training's is left alone."""
    places = [f"{tmp_path}/{folder}/{step}" for step, folder in enumerate(folders, 1)]
    first, second = (universal(tmp_path / f"made-{i}", i).manifest for i in range(2))
    first = first.model_copy(update={"run": runs[0]})
    edge = LineageDoc(kind="reshard", url=places[0], id=first.id)
    second = second.model_copy(update={"run": runs[1], "lineage": (edge,)})
    recording.unlink()
    Path(places[0]).mkdir(parents=True)
    (Path(places[0]) / "manifest.json").write_bytes(
        manifest_file(first.model_dump(mode="json", by_alias=True))
    )
    record_commit(places[1], second)
    with Catalog(str(recording)) as catalog:
        assert {e.id for e in catalog.find()} == ({first.id, second.id} if known else {second.id})
        assert [e.parent for e in catalog.lineage(second.id, depth=1).edges] == [
            first.id if known else places[0]
        ]
    shutil.rmtree(places[0])
    record_commit(places[1], second)  # also where it is gone by now


def test_what_is_verified_is_noted(recording: Path, tmp_path: Path) -> None:
    tag = foreign(tmp_path / "ds")
    ucformat.convert(tag, tmp_path / "run7" / "5")
    ucformat.verify("run7@5").raise_if_damaged()
    ucformat.verify(tag)  # which the catalog does not know
    with Catalog(str(recording)) as catalog:
        found = catalog.get("run7@5").verified
        assert found is not None
        assert (found.ok, found.url, found.problems) == (True, str(tmp_path / "run7" / "5"), ())
        assert found.bytes_verified > 0
        assert catalog.count() == 1
        register([str(tag)], catalog)
    shard = next(p for p in (tmp_path / "run7" / "5" / "data").rglob("0") if p.is_file())
    shard.write_bytes(bytes(len(shard.read_bytes())))
    assert not ucformat.verify(tmp_path / "run7" / "5")
    assert ucformat.verify(tag)
    with Catalog(str(recording)) as catalog:
        found = catalog.get("run7@5").verified
        assert found is not None
        assert not found.ok
        assert found.problems
        assert catalog.get("ds@5").verified is not None


def away(tmp_path: Path, how: str) -> str:
    """A catalog that cannot be used."""
    file = tmp_path / "bad.db"
    if how == "no folder":
        file.write_text("")
        return str(file / "catalog.db")
    if how == "a folder":
        file.mkdir()
    elif how == "damaged":
        file.write_bytes(b"SQLite format 3\0" + os.urandom(5000))
    elif how == "no database":
        file.write_bytes(os.urandom(5000))
    elif how == "nobody listens":
        return "postgresql://nobody@127.0.0.1:1/none"
    elif how == "unknown":
        return "mysql://x/y"
    else:
        with Catalog(str(file)) as made, made.database.writing() as c:
            c.exec_driver_sql("update ucformat_version set version_num = 'future'")
    return str(file)


AWAY = ("no folder", "a folder", "damaged", "no database", "nobody listens", "unknown", "newer")


@pytest.mark.parametrize("how", AWAY)
def test_a_catalog_that_is_away_makes_no_save_fail(
    recording: Path,
    tmp_path: Path,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("UCP_CATALOG", away(tmp_path, how))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ck = universal(tmp_path / "run7" / "1", 1)
        ucformat.verify(ck).raise_if_damaged()
    first, *others = caplog.records
    assert (first.name, first.levelname) == ("ucformat", "WARNING")
    assert f"{ck.url} is committed, but not in the catalog" in first.getMessage()
    assert f"ucp reindex {ck.url}" in first.getMessage()
    assert "\n" not in first.getMessage()
    if how == "no folder":  # there is no catalog to which a verification could matter
        assert others == []
    else:
        assert "verification" in others[-1].getMessage()
    assert open_checkpoint(ck.url).id == ck.id
    with Catalog(str(recording)) as catalog:
        assert names(reindex(ck.url, catalog).entries) == ["run7@1"]


def test_settings_that_cannot_be_read_make_no_save_fail(
    recording: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("UCP_CATALOG")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ucformat.toml").write_text("catalog =")
    universal(tmp_path / "run7" / "1", 1)
    assert "ucformat.toml" in caplog.text
    assert len(caplog.records) == 1


def test_a_script_that_makes_warnings_errors_still_saves(tmp_path: Path) -> None:
    """Its own process, as users run it: only the message of logging is seen, once."""
    foreign(tmp_path / "ds")
    code = f"import ucformat; print(ucformat.convert({str(tmp_path / 'ds')!r}, {str(tmp_path / 'run7/5')!r}).id)"
    for url in ("postgresql://nobody@127.0.0.1:1/none", "/proc/none/catalog.db"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "UCP_CATALOG": url}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert open_checkpoint(tmp_path / "run7" / "5").id == done.stdout.strip()
        assert done.stderr.count("not in the catalog") == 1
        assert len(done.stderr.splitlines()) == 1
        shutil.rmtree(tmp_path / "run7")


def test_switched_off_nothing_of_the_catalog_is_loaded(tmp_path: Path) -> None:
    foreign(tmp_path / "ds")
    code = (
        "import sys, ucformat\n"
        f"ucformat.verify(ucformat.convert({str(tmp_path / 'ds')!r}, {str(tmp_path / 'run7/5')!r}))\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'sqlalchemy', 'alembic', 'psycopg', 'lark'}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "UCP_CATALOG": "none"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_stores_that_are_not_ours_are_recorded_by_their_url(
    recording: Path, tmp_path: Path
) -> None:
    ck = ucformat.convert(foreign(tmp_path / "ds"), LocalStore(tmp_path / "run7" / "5"))
    with Catalog(str(recording)) as catalog:
        assert catalog.get(f"{tmp_path}/run7/5").id == ck.id


@pytest.mark.parametrize("other", ["trainer_state.json", "config.json", "adapter_config.json"])
def test_documents_tell_saves_of_equal_tensors_apart(
    tmp_path: Path, catalog: Catalog, other: str
) -> None:
    """Steps and metrics, and the model's configuration, are what makes one of them another one; a copy is the same."""
    for name, value in (("checkpoint-1", 1), ("checkpoint-2", 2)):
        arrays = {("w", state): np.arange(6, dtype=np.float32) for state in FLAT}
        write_zero3(tmp_path / name, arrays, 2)
        log = [{"step": value, "eval_loss": 1 / value}]
        documents = {"trainer_state.json": {"global_step": 1, "log_history": []}, "config.json": {}}
        documents |= {other: {"global_step": value, "log_history": log}}
        for file, content in documents.items():
            (tmp_path / name / file).write_text(json.dumps(content))
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "copies" / "checkpoint-2")
    done = register(tmp_path, catalog, recursive=True)
    assert not done.failures
    assert len(set(done.ids)) == 2
    copy = catalog.get(str(tmp_path / "copies" / "checkpoint-2"))
    assert (
        copy.id
        == catalog.get(str(tmp_path / "checkpoint-2")).id
        != catalog.get(str(tmp_path / "checkpoint-1")).id
    )
    assert [len(entry.urls) for entry in (copy, catalog.get(str(tmp_path / "checkpoint-1")))] == [
        2,
        1,
    ]
    (tmp_path / "checkpoint-2" / "latest").write_text("global_step5\n")
    (tmp_path / "checkpoint-2" / "notes.txt").write_text("good")
    assert open_checkpoint(tmp_path / "checkpoint-2").id == copy.id


def test_a_step_that_is_given_counts_or_is_an_error(tmp_path: Path, catalog: Catalog) -> None:
    """It names a checkpoint whose files have none, also one that is recorded; what files have is not overruled."""
    place = tmp_path / "run" / "checkpoint-5"
    place.mkdir(parents=True)
    save_file({"w": np.ones(3, np.float32)}, place / "model.safetensors")
    assert [e.step for e in register(place, catalog).entries] == [5]
    assert [e.step for e in register(place, catalog, step=7).entries] == [7]
    assert [e.step for e in register(place, catalog).entries] == [7]
    other = foreign(tmp_path / "ds", 9)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"the files of .*global_step9 have the step 9, not 7"):
            register(other, catalog, step=7)
        assert [e.step for e in register(other, catalog, step=9).entries] == [9]
    assert catalog.count("") == 2
