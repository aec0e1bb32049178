"""Pages of what policies delete, and of how long ranks saved, say what the commands and the manifests say."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import numpy as np
import pytest

import ucformat
from tests.catalog.acts import put
from tests.exporters.sources import opened
from tests.packed import write_packed
from tests.web.markup import parse
from tests.web.serving import bearer, serving, token
from tests.web.test_pages import HOSTILE, LONG, both
from ucformat.catalog.as_json import retention_data
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.retention import load_policy
from ucformat.errors import PermissionDenied
from ucformat.geometry.tensor import Key
from ucformat.jobs.gc import collect, collected_data, inspect_attempt
from ucformat.schema.manifest import WriterDoc
from ucformat.storage.url import open_store
from ucformat.web import keeping

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fakes import Arrays

POLICY: dict[str, Any] = {
    "version": 1,
    "scope": f"run in ('run7', '{HOSTILE}')",
    "keep": {"last": 2, "every": 5, "best": {"metric": "none", "count": 1, "mode": "min"}},
}


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """Steps 0 to 11, some protected, and deleted ones, of which one has outlived its grace."""
    with (
        pytest.MonkeyPatch.context() as patch,
        closing(Catalog(f"sqlite:///{tmp_path_factory.mktemp('keeping')}/c.db")) as catalog,
    ):
        patch.setattr("ucformat.catalog.catalog.on_change", [])
        for n in range(12):
            put(catalog, n)
        put(catalog, 20, run=HOSTILE, step=1)
        put(catalog, 21, run=LONG, step=1)
        catalog.alias("best", "run7@1")
        catalog.hold("run7@2", HOSTILE)
        catalog.delete("run7@6", grace=timedelta(0))
        catalog.delete("run7@7")
        yield catalog


def test_a_preview_is_that_of_the_commands(catalog: Catalog) -> None:
    before = (catalog.find(deleted=True), catalog.events())
    query = urlencode({"policy": json.dumps(POLICY)})
    with serving(catalog) as ask:
        page, data = both(ask, f"/ui/retention?{query}", f"/ui/retention.json?{query}")
        for address in (a for a, _ in page.links if not a.startswith("#")):
            assert ask(address).status == 200, address
    expected = json.loads(
        json.dumps(retention_data(catalog.retain(load_policy(POLICY)), applied=False))
    )
    counts = data["retain"].pop("counts")
    assert data["retain"] == expected
    assert counts["delete"] == len(expected["delete"]) == 4
    gc = json.loads(json.dumps(collected_data(collect(catalog), applied=False)))
    assert data["gc"].pop("counts") == {
        "thin": 0,
        "purge": 1,
        "waiting": 1,
        "resumed": 0,
        "failures": 0,
    }
    for rows in (gc["waiting"], data["gc"]["waiting"]):
        assert rows[0].pop("until") is not None  # by clocks that went on in between
    assert data["gc"] == gc
    deleted = {row["name"] for row in expected["delete"]}
    assert deleted == {"run7@3", "run7@4", "run7@8", "run7@9"}
    assert deleted <= {row[0] for row in page.rows}
    reasons = {row[0]: row[3] for row in page.rows if len(row) == 4}
    assert reasons["run7@1"] == "alias best"
    assert HOSTILE in reasons["run7@2"]
    assert "until" in reasons["run7@7"]
    assert expected["idle"][0] in page.text  # no checkpoint has that metric
    assert (catalog.find(deleted=True), catalog.events()) == before


@pytest.mark.parametrize(
    "policy",
    [
        "keep:",
        "[1]",
        "{version: 1, keep: {lats: 5}}",
        "{version: 9, keep: {last: 5}}",
        "version: 1\nversion: 1",
        "a: &a [*a]",
        "{version: 1, keep: {last: 1}, scope: 'step >'}",
        "[" * 4000,
        "/etc/passwd",
        "{version: 1, keep: {where: ['step > 1'" + ", 'step > 1'" * 100 + "]}}",
        "{version: 1, keep: [{every: 5}" + ", {every: 5}" * 100 + "]}",
        "x: [" + ", ".join(["&a [1,1,1,1,1,1,1,1,1,1]"] + ["*a"] * 1000) + "]",
        '{"version": 1, "keep": {"last": 1}, "keep": {"last": 1}}',
    ],
)
def test_a_policy_that_is_none_says_why(catalog: Catalog, policy: str) -> None:
    query = urlencode({"policy": policy})
    with serving(catalog) as ask:
        answer = ask(f"/ui/retention.json?{query}")
        assert answer.status == 400
        error = json.loads(answer.body)["error"]
        page = parse(ask(f"/ui/retention?{query}").body)
        assert error["message"] in page.text
        assert policy in page.text
        assert "root:" not in page.text


def test_json_with_tabs_is_a_policy(catalog: Catalog) -> None:
    query = urlencode({"policy": json.dumps(POLICY, indent="\t")})
    with serving(catalog) as ask:
        assert json.loads(ask(f"/ui/retention.json?{query}").body)["retain"] is not None


def test_what_is_gone_is_told(saved: Catalog, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "run7" / "4")
    query = urlencode({"policy": "{version: 1, keep: {last: 2}}"})
    with serving(saved) as ask:
        page, data = both(ask, f"/ui/retention?{query}", f"/ui/retention.json?{query}")
    assert "1 checkpoint no longer exists in storage" in data["gone"]
    assert data["gone"] in page.text


def test_a_long_plan_is_shortened(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_ROWS", 1)
    failures = {"failures": ["x", "y"], "resumed": ["a", "b", "c"]}
    data = keeping._shortened(failures | {"runs": [1, 2]})
    assert data == {
        "failures": ["x"],
        "resumed": ["a"],
        "runs": [1],
        "counts": {"runs": 2, "resumed": 3, "failures": 2},
    }


def test_who_sees_a_part_sees_no_preview(catalog: Catalog) -> None:
    with serving(catalog, tokens=[token("t", "run = 'run7' and step < 3")]) as ask:
        for path in (
            "retention",
            "retention.json",
            f"retention.json?{urlencode({'policy': '{}'})}",
        ):
            answer = ask(f"/ui/{path}", **bearer("t"))
            assert answer.status == 422
            assert b"run7" not in answer.body
    with serving(catalog, runs=["run7"]) as ask:
        assert ask("/ui/retention").status == 422
    with serving() as ask:
        assert ask("/ui/retention.json").status == 422


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Catalog]:
    """Four saves of 3 ranks, of which rank 1 is ever slower, and a conversion."""
    place = str(tmp_path / "c.db")
    with Catalog(place) as catalog:
        arrays: Arrays = {Key("embed.weight", "weight"): np.arange(12, dtype="f4")}
        for step in (1, 2, 3, 4):
            writers = tuple(
                WriterDoc(
                    rank=rank,
                    nbytes=1000 * (rank + 1),
                    seconds=0.5 * step if rank == 1 else 0.5,
                    stall=0.25 * rank,
                )
                for rank in range(3)
                if (rank, step) != (2, 1)  # one that is not listed
            )
            folder = tmp_path / "run7" / str(step)
            facts: dict[str, Any] = {"run": "run7", "step": step, "layout": {"world": 3}}
            write_packed(open_store(folder), arrays, writers=writers, **facts)
            ucformat.register(folder, catalog)
        write_packed(open_store(tmp_path / "run7" / "5"), arrays, run="run7", step=5, writers=())
        ucformat.register(tmp_path / "run7" / "5", catalog)
        yield catalog


def test_saves_are_those_of_the_manifests(saved: Catalog) -> None:
    with serving(saved) as ask:
        page, data = both(ask, "/ui/saves/run7", "/ui/saves.json/run7")
        assert [s["step"] for s in data["saves"]] == [1, 2, 3, 4]
        assert [s["seconds"] for s in data["saves"]] == [0.5, 1.0, 1.5, 2.0]
        assert [s["stall"] for s in data["saves"]] == [0.25, 0.5, 0.5, 0.5]
        assert data["saves"][3]["bytes_per_second"] == 6000 / 2
        assert (data["saves"][0]["ranks"], len(data["saves"][0]["writers"])) == (3, 2)
        assert [s["step"] for s in data["unrecorded"]] == [5]
        rows = {row[0]: row for row in page.rows if len(row) == 8}
        assert rows["run7@4"][7] == "1, 2.00 s"
        assert rows["run7@1"][2] == "2 of 3"
        cells = [v for tag, v in page.elements if tag == "rect" and v.get("class") == "heat"]
        assert len(cells) == 2 * 11  # the times of writing, and the stalls
        darkest = [i for i, v in enumerate(cells[:11]) if v["fill-opacity"] == "1.00"]
        assert darkest == [7]  # of rank 1 in the last save
        assert any(
            address == "/ui/saves/run7" for address, _ in parse(ask("/ui/run/run7").body).links
        )
        assert ask("/ui/saves/none").status == 404
    with serving(saved, tokens=[token("t", "step < 3")]) as ask:
        answer = ask("/ui/saves.json/run7", **bearer("t"))
        assert [s["step"] for s in json.loads(answer.body)["saves"]] == [1, 2]


def test_of_very_many_ranks_the_slowest_are_shown(tmp_path: Path) -> None:
    writers = tuple(
        WriterDoc(rank=rank, nbytes=1, seconds=float(rank), stall=0.0) for rank in range(100)
    )
    with Catalog(str(tmp_path / "c.db")) as catalog:
        arrays: Arrays = {Key("w", "weight"): np.arange(12, dtype="f4")}
        place = tmp_path / "run7" / "1"
        write_packed(open_store(place), arrays, writers=writers, run="run7", step=1)
        ucformat.register(place, catalog)
        with serving(catalog) as ask:
            page, data = both(ask, "/ui/saves/run7", "/ui/saves.json/run7")
    (save,) = data["saves"]
    assert [w["rank"] for w in save["writers"]] == list(range(36, 100))
    assert (save["other_writers"], save["bytes"]) == (36, 100)
    assert "36 more ranks" in page.text
    assert {row[0]: row[2] for row in page.rows if len(row) == 8}["run7@1"] == "100"


@pytest.mark.matrix
def test_saves_of_real_ranks(tmp_path: Path) -> None:
    from tests.torch.ranks import Ranks

    ranks = Ranks("tests.web.saving_program")
    for step in (1, 2):
        assert ranks.run("saved", 2, tmp_path, step=step) == [0, 1]
    with Catalog(str(tmp_path / "c.db")) as catalog:
        ucformat.register(tmp_path / "run9", catalog, recursive=True)
        with serving(catalog) as ask:
            _, data = both(ask, "/ui/saves/run9", "/ui/saves.json/run9")
    for save in data["saves"]:
        assert (save["ranks"], [w["rank"] for w in save["writers"]]) == (2, [0, 1])
        assert save["seconds"] > 0
        assert save["bytes"] >= 2 * 64 * 32 * 4


def test_a_conversion_is_seen_while_it_runs(tmp_path: Path) -> None:
    arrays = {(f"w{n}", "weight"): np.arange(1 << 16, dtype="f4") for n in range(8)}
    answers: list[dict[str, Any]] = []
    with Catalog(str(tmp_path / "c.db")) as catalog:
        ucformat.convert(opened(arrays), tmp_path / "run7" / "1", run="run7", step=1)
        ucformat.register(tmp_path / "run7" / "1", catalog)
        with serving(catalog) as ask:

            def look(done: int, total: int) -> None:
                if 0 < done < total:
                    answers.append(json.loads(ask("/ui/jobs.json").body))

            second = tmp_path / "run7" / HOSTILE.replace("/", "_")
            ucformat.convert(opened(arrays), second, progress=look, workers=1, shard_bytes=1 << 18)
            page, after = both(ask, "/ui/jobs", "/ui/jobs.json")
    (job,) = answers[-1]["jobs"]
    assert (job["url"], job["owner"]) == (str(second), f"{socket.gethostname()}:{os.getpid()}")
    assert (job["is_running"], job["replaces"]) == (True, False)
    assert 0 < job["bytes"] <= 8 << 18
    assert job["started"] <= job["written"]
    assert after["jobs"] == []
    assert after["folders"] == [str(tmp_path / "run7")]
    assert str(tmp_path / "run7") in page.text


def begun(place: Path) -> str:
    """Begin an attempt in a process that ends before it is committed."""
    program = (
        "import sys; from ucformat.format.commit import begin; from ucformat.storage.url import open_store\n"
        "print(begin(open_store(sys.argv[1]), {'place': sys.argv[1]}, overwrite=True).id)"
    )
    command = [sys.executable, "-c", program, str(place)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_what_was_interrupted_is_told(saved: Catalog, tmp_path: Path) -> None:
    new, old = begun(tmp_path / "run7" / "6"), begun(tmp_path / "run7" / "1")
    damaged = tmp_path / "run7" / "7" / "attempts" / f"{'0' * 20}.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    elsewhere = begun(tmp_path / "elsewhere")
    (tmp_path / "run7" / "link").symlink_to(tmp_path / "elsewhere")
    with serving(saved) as ask:
        page, data = both(ask, "/ui/jobs", "/ui/jobs.json")
        jobs = {job["attempt"]: job for job in data["jobs"]}
        assert jobs.keys() == {new, old}
        assert elsewhere not in jobs
        assert (jobs[new]["replaces"], jobs[old]["replaces"]) == (False, True)
        assert {job["is_running"] for job in data["jobs"]} == {False}
        assert page.text.count("interrupted,") == 1
        record = tmp_path / "run7" / "6" / "attempts" / f"{new}.json"
        document = json.loads(record.read_text())
        record.write_text(json.dumps(document | {"owner": f"{HOSTILE}:1"}))
        page, data = both(ask, "/ui/jobs", "/ui/jobs.json")
        assert {j["is_running"] for j in data["jobs"] if j["attempt"] == new} == {None}
        assert HOSTILE in page.text
    with serving(saved, tokens=[token("t", "step < 3")]) as ask:
        answer = ask("/ui/jobs.json", **bearer("t"))
        assert answer.status == 422
        assert str(tmp_path).encode() not in answer.body


def test_files_of_attempts_are_looked_at_up_to_a_number(
    saved: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = [begun(tmp_path / "run7" / name) for name in ("6", "8")]
    for name, attempt in zip(("6", "8"), attempts, strict=True):
        folder = tmp_path / "run7" / name / "data" / attempt / "many"
        folder.mkdir(parents=True)
        for n in range(9):
            (folder / str(n)).write_bytes(b"12345")
    with serving(saved) as ask:
        whole = json.loads(ask("/ui/jobs.json").body)
        assert whole["unread"] == []
        monkeypatch.setattr("ucformat.web.writing.FILES", 12)
        page, data = both(ask, "/ui/jobs", "/ui/jobs.json")
    assert {job["attempt"] for job in data["jobs"]} == {*attempts}
    assert sum(job["bytes"] for job in data["jobs"]) <= 12 * 5 < 18 * 5
    (told,) = data["unread"]
    assert "were looked at, so there are more bytes" in told["reason"]
    assert told["reason"] in page.text


def test_what_cannot_be_looked_at_is_told(
    saved: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = begun(tmp_path / "run7" / "6")
    looped = tmp_path / "run7" / "8" / "attempts"
    looped.parent.mkdir()
    looped.symlink_to(looped)
    of_another = tmp_path / "run7" / "9"
    of_another.mkdir()
    crowded = tmp_path / "run7" / "10"
    (crowded / "attempts").mkdir(parents=True)
    for n in range(101):
        (crowded / "attempts" / f"{n:020x}.json").write_text("{")
    stat = os.stat

    def denied(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path) == str(of_another / "attempts"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", denied)
    with serving(saved) as ask:
        page, data = both(ask, "/ui/jobs", "/ui/jobs.json")
    assert [job["attempt"] for job in data["jobs"]] == [seen]
    unread = {each["place"]: each["reason"] for each in data["unread"]}
    assert unread.keys() == {str(looped.parent), str(of_another), str(crowded)}
    assert unread[str(of_another)] == "Permission denied"
    assert "of its 101 attempts 100" in unread[str(crowded)]
    assert all(place in page.text for place in unread)


def test_a_folder_that_cannot_be_listed_is_told(
    saved: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ucformat.jobs.begun.os.scandir",
        lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")),
    )
    with serving(saved) as ask:
        _, data = both(ask, "/ui/jobs", "/ui/jobs.json")
    assert data["unread"] == [{"place": str(tmp_path / "run7"), "reason": "Input/output error"}]


def test_an_attempt_that_cannot_be_read_hides_no_other(
    saved: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "run7" / "6"
    other, unread = begun(place), "0" * 20
    record = (place / "attempts" / f"{other}.json").read_text()
    (place / "attempts" / f"{unread}.json").write_text(record.replace(other, unread))

    def failing(store: Any, attempt: str, *more: Any) -> Any:
        if attempt == unread:
            raise PermissionDenied("denied")
        return inspect_attempt(store, attempt, *more)

    monkeypatch.setattr("ucformat.jobs.begun.inspect_attempt", failing)
    with serving(saved) as ask:
        _, data = both(ask, "/ui/jobs", "/ui/jobs.json")
    assert [job["attempt"] for job in data["jobs"]] == [other]
    assert data["unread"] == [{"place": str(place), "reason": "denied"}]
