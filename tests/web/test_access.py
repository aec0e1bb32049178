"""Who may see what, by which names, and what is refused."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ucformat
from tests.exporters.sources import opened, zero3
from tests.web.serving import Client, bearer, serving, token
from ucformat.catalog.catalog import Catalog
from ucformat.errors import UsageError
from ucformat.settings import using
from ucformat.web.access import load_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    """Two runs: a with steps 1 and 2, of which 1 has the alias a/best, and b with step 1."""
    url = f"sqlite:///{tmp_path}/catalog.db"
    with using(catalog=url):
        for run, step in (("a", 1), ("a", 2), ("b", 1)):
            array = np.full((3, 4), step, "f4")
            ucformat.convert(
                opened({("w", "weight"): array}), tmp_path / run / str(step), run=run, step=step
            )
        with Catalog(url) as catalog:
            catalog.alias("a/best", "a@1")
            yield catalog


def step_of(answer: bytes) -> float:
    return float(np.frombuffer(answer[-4:], "f4")[0])


def test_names_of_revisions(catalog: Catalog) -> None:
    with serving(catalog) as ask:
        names = {m["id"] for m in json.loads(ask("/api/models").body)}
        assert names == {"a", "b", "a/best"}
        for revision, step in {"main": 2, "latest": 2, "1": 1, "best": 1, "a%2Fbest": 1}.items():
            answer = ask(f"/a/resolve/{revision}/model.safetensors")
            assert step_of(answer.body) == step, revision
            commit = answer.headers["x-repo-commit"]
            again = ask(f"/ucformat/a/resolve/{commit}/model.safetensors")
            assert again.body == answer.body
            entry = catalog.get(commit[:32])
            assert ask(f"/{entry.id}/resolve/main/model.safetensors").body == answer.body
            assert ask(f"/b/resolve/{commit}/model.safetensors").status == 404
        assert step_of(ask("/a/best/resolve/main/model.safetensors").body) == 1
        refs = json.loads(ask("/api/models/a/refs").body)
        assert {t["name"] for t in refs["tags"]} == {"1", "2", "best"}
        other = "0" * 8
        assert ask(f"/a/resolve/{commit[:32]}{other}/model.safetensors").status == 404
        catalog.delete("a@2")
        assert step_of(ask("/a/resolve/main/model.safetensors").body) == 1
        assert ask("/a/resolve/2/model.safetensors").status == 404


def test_a_new_checkpoint_is_the_newest(catalog: Catalog, tmp_path: Path) -> None:
    with serving(catalog) as ask:
        assert step_of(ask("/b/resolve/latest/model.safetensors").body) == 1
        array = np.full((3, 4), 9, "f4")
        ucformat.convert(opened({("w", "weight"): array}), tmp_path / "b" / "9", run="b", step=9)
        assert step_of(ask("/b/resolve/latest/model.safetensors").body) == 9


def test_a_step_that_an_engine_wrote_again_is_not_the_recorded_one(tmp_path: Path) -> None:
    """Clients resume downloads by the size alone, so equal commits must have equal files."""
    url = f"sqlite:///{tmp_path}/catalog.db"
    place = tmp_path / "z"

    def save(seed: int) -> None:
        shutil.rmtree(place, ignore_errors=True)
        zero3(tmp_path / str(seed), seed)[0].rename(place)

    save(0)
    with Catalog(url) as catalog, serving(catalog) as ask:
        ucformat.register(place, catalog, run="z")
        before = ask("/z/resolve/5/model.safetensors")
        assert before.status == 200
        save(1)
        with suppress(http.client.IncompleteRead):  # the opened one has changed
            assert ask("/z/resolve/5/model.safetensors").status == 409
        answer = ask("/z/resolve/5/model.safetensors")
        assert (answer.status, b"written again" in answer.body) == (409, True)


def test_a_client_reads_what_it_was_told_of(catalog: Catalog, tmp_path: Path) -> None:
    """It asks for the size first, and `latest` may move before it reads, or goes on after a fault."""
    with serving(catalog) as ask:
        place = ask("/b/resolve/latest/model.safetensors", "HEAD").headers["location"]
        array = np.full((3, 4), 9, "f4")
        ucformat.convert(opened({("w", "weight"): array}), tmp_path / "b" / "9", run="b", step=9)
        assert step_of(ask(place).body) == 1
        assert step_of(ask("/b/resolve/latest/model.safetensors").body) == 9


def test_a_token_sees_what_its_filter_admits(catalog: Catalog) -> None:
    place = opened({("w", "weight"): np.zeros((3, 4), "f4")})
    tokens = [token("all"), token("of b", "run = 'b'"), token("late", expires=time.time() - 1)]
    with serving(catalog, {"p": place}, tokens=tokens) as ask:
        path = "/a/resolve/main/model.safetensors"
        assert ask(path).status == 401
        assert ask(path, **bearer("none")).status == 401
        assert ask(path, **bearer("late")).status == 401
        assert ask(path, **bearer("all")).status == 200
        answer = ask(path, **bearer("of b"))
        assert (answer.status, answer.headers["x-error-code"]) == (404, "RepoNotFound")
        entry = catalog.get("a@1")
        for name in (entry.id, "a%2Fbest", "p", "alias:a%2Fbest"):
            assert ask(f"/{name}/resolve/main/model.safetensors", **bearer("of b")).status == 404
        commit = f"{entry.id}{'0' * 8}"
        assert ask(f"/b/resolve/{commit}/model.safetensors", **bearer("of b")).status == 404
        assert ask(f"/b/resolve/{entry.id}/model.safetensors", **bearer("of b")).status == 404
        listed = json.loads(ask("/api/models", **bearer("of b")).body)
        assert [m["id"] for m in listed] == ["b"]
        assert ask("/p/resolve/main/model.safetensors", **bearer("all")).status == 200


def test_only_some_runs_are_served(catalog: Catalog) -> None:
    with serving(catalog, runs=["b"]) as ask:
        assert ask("/api/models/b").status == 200
        assert ask("/api/models/a").status == 404
        assert ask(f"/api/models/{catalog.get('a@1').id}").status == 404


@pytest.mark.parametrize(
    "name",
    ["%2Fetc%2Fpasswd", "..%2Fa%2F1", ".", "folder:%2F@1", "file:%2F%2F%2Fetc", "s3:%2F%2Fb"],
)
def test_no_client_names_a_path(catalog: Catalog, tmp_path: Path, name: str) -> None:
    with serving(catalog) as ask:
        place = str(tmp_path / "a" / "1").replace("/", "%2F")
        for asked in (name, place):
            for path in (
                f"/{asked}/resolve/main/model.safetensors",
                f"/api/models/{asked}",
                f"/v2/{asked}/tags/list",
                f"/v1/{asked}",
                f"/v1/{asked}/tensor/w",
                f"/v1/{asked}/zarr/zarr.json",
                f"/v1/{asked}/files/0/tensors",
                f"/ui/checkpoint.json/?ref={asked}",
                f"/ui/tree.json/?ref={asked}",
                f"/ui/tensor.json/?ref={asked}&name=w",
                f"/ui/plan.json/?ref={asked}&layout=0:2",
                f"/ui/run.json/?checkpoint={asked}",
                f"/ui/run.json/?ref={asked}",
                f"/ui/compare.json?a={asked}&b={asked}",
            ):
                assert ask(path).status == 404, path


def test_nothing_is_written(catalog: Catalog) -> None:
    with serving(catalog) as ask:
        for method in ("PUT", "DELETE", "PATCH"):
            assert ask("/api/models/a", method).status == 405
        assert ask("/api/models/a/paths-info/main", "POST", b"x" * (2 << 20)).status == 413
        assert (
            ask("/api/models/a/paths-info/main", "POST", b"paths=model.safetensors").status == 200
        )
        assert ask("/api/models/a/preupload/main", "POST", b"{}").status in (404, 405)


def test_a_deep_document_is_refused(catalog: Catalog) -> None:
    with serving(catalog) as ask:
        body = b"[" * 100_000
        answer = ask("/api/models/a/paths-info/main", "POST", body, content_type="application/json")
        assert (answer.status, json.loads(answer.body)["error"][-8:]) == (400, "not JSON")


def test_each_request_is_logged(tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("UCP_")}
    environ["UCP_CATALOG"] = f"sqlite:///{tmp_path}/c.db"
    Catalog(environ["UCP_CATALOG"]).close()
    for quiet in ((), ("--quiet",)):
        words = [sys.executable, "-m", "ucformat.cli", "serve", "--port", "0", *quiet]
        pipe = subprocess.PIPE
        with subprocess.Popen(words, env=environ, stdout=pipe, stderr=pipe, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().split()[0]
            assert Client(url)("/api/models/none%0A").status == 404
            server.terminate()
            _, told = server.communicate(timeout=60)
        lines = [line for line in told.splitlines() if "local GET" in line]
        assert len(lines) == (0 if quiet else 1), told
        assert all("'/api/models/none\\n' 404" in line for line in lines)


def test_a_page_of_a_stranger_cannot_ask(catalog: Catalog) -> None:
    with serving(catalog) as ask:
        assert ask("/api/models", Host="evil.example:8400").status == 421
        assert ask("/api/models", Host="127.0.0.1.evil.example").status == 421
        for host in ("localhost:8400", "127.0.0.2:8400", "[::1]:8400", "LOCALHOST"):
            assert ask("/api/models", Host=host).status == 200


def test_a_slow_rate_admits(catalog: Catalog) -> None:
    with serving(catalog, tokens=[token("slow", rate=0.01)]) as ask:
        statuses = [ask("/api/models", **bearer("slow")).status for _ in range(2)]
        assert statuses == [200, 429]


def test_a_rate(catalog: Catalog) -> None:
    with serving(catalog, tokens=[token("slow", rate=0.1)]) as ask:
        assert ask("/api/models", **bearer("slow")).status == 200
        answer = ask("/api/models", **bearer("slow"))
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")


def test_a_file_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    digest = hashlib.sha256(b"secret").hexdigest()
    file.write_text(
        f"[[token]]\nname = 'n'\nsha256 = '{digest}'\nwhere = \"run = 'a'\"\n"
        "expires = 2027-01-01T00:00:00Z\nrate = 2\n"
    )
    (loaded,) = load_tokens(str(file))
    assert (loaded.name, loaded.sha256, loaded.scope) == ("n", digest, "run = 'a'")
    assert (loaded.expires, loaded.rate) == (1798761600, 2)
    begun = f"[[token]]\nname = 'n'\nsha256 = '{digest}'\n"
    for text, message in (
        ("[[token]]\nsha256 = ''", "needs a name"),
        ("[[token]]\nname = 'n'\nsha256 = 'secret'", "needs `sha256`"),
        (f"[[token]]\nname = 'n'\nsha256 = '{digest}'\nscope = ''", "'scope'"),
        (f"[[token]]\nname = 'n'\nsha256 = '{digest}'\nwhere = 'run ='", "too early"),
        (f"{begun}where = 3", "'n' needs a filter"),
        (f"{begun}where = '{'not (' * 31}step = 1 or step = 2{')' * 31}'", "nests"),
        (f"{begun}expires = 2027-01-01", "'n' needs a time"),
        (f"{begun}expires = 2027-01-01T00:00:00", "'n' needs a time"),
        (f"{begun}expires = '2027-01-01'", "'n' needs a time"),
        (f"{begun}expires = 1", "'n' needs a time"),
        (f"{begun}rate = '5'", "'n' needs a number"),
        (f"{begun}rate = 0", "'n' needs a number"),
        (f"{begun}rate = nan", "'n' needs a number"),
        (f"{begun}rate = true", "'n' needs a number"),
        ("token = 3", "no token"),
        ("token = ['n']", "no token"),
        ("[", "tokens.toml"),
        ("", "no token"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=message):
            load_tokens(str(file))
