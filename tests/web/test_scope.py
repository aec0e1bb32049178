"""A client sees what its token's filter allows, whatever it asks for."""

from __future__ import annotations

import json
import shutil
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import numpy as np
import pytest

import ucformat
from tests.catalog.acts import put
from tests.exporters.sources import opened
from tests.web.serving import Client, bearer, serving, token
from ucformat.catalog.catalog import Catalog
from ucformat.errors import UsageError
from ucformat.settings import using
from ucformat.web.library import Access, Library, NoRepository

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOME = Access("somebody", "run = 'open'")


@pytest.fixture
def library(tmp_path: Path) -> Library:
    catalog = Catalog(f"sqlite:///{tmp_path}/catalog.db")
    for n in range(4):
        metrics = {"loss": 1.0} if n else {"secret_metric": 1.0}
        config = {"lr": 0.1} if n else {"secret": {"path": 1}}
        put(catalog, n, run="open" if n else "secret", metrics=metrics, config=config)
    return Library(catalog)


def test_no_filter_leads_out_of_a_scope(library: Library) -> None:
    assert len(library.entries(SOME)) == 3
    assert len(library.entries(SOME, "step >= 0 or step < 9")) == 3
    for where in ("step > 99) or (step >= 0", "step > 99) or (run = 'secret'", "step = 0 )", "("):
        with pytest.raises(UsageError) as caught:
            library.entries(SOME, where)
        assert "'open'" not in str(caught.value)


@pytest.mark.parametrize("limit", ["scope", "runs"])
def test_names_of_hidden_checkpoints_are_as_those_of_none(library: Library, limit: str) -> None:
    access = SOME
    if limit == "runs":
        assert library.catalog is not None
        library, access = Library(library.catalog, runs=["open"]), Access()
    for key in ("metric.secret_metric", "metric.secret_metri", "config.secret.path", "config.none"):
        assert library.entries(access, f"{key} = 1") == []
        assert len(library.entries(access, f"{key} is null")) == 3
        assert [e.step for e in library.entries(access, sort=f"-{key},step")] == [1, 2, 3]
    for options in ({"where": "secret_metric = 1"}, {"sort": "secret_metric"}, {"sort": "secret"}):
        with pytest.raises(UsageError) as caught:
            library.entries(access, **options)
        assert "metric.secret_metric" not in f"{caught.value.message} {caught.value.hint}"
    with pytest.raises(UsageError, match="where files are"):
        library.entries(access, "url like '/data/%'")
    with pytest.raises(UsageError) as caught:  # who sees all is helped
        library.entries(Access("all"), "metric.secret_metri = 1") if limit == "scope" else Library(
            library.catalog
        ).entries(Access(), "metric.secret_metri = 1")
    assert caught.value.hint == "did you mean metric.secret_metric?"


def test_no_error_quotes_a_scope(library: Library) -> None:
    access = Access("somebody", "run = 'open' and (metric.nowhere is null or step = 7)")
    assert len(library.entries(access)) == 3  # whose own unknown names are no error
    deep = "not (" * 31 + "step = 9" + ")" * 31
    told = []
    for where in (deep, f"not ({deep})", f"not (not ({deep}))", " or ".join(["step = 1"] * 500)):
        with suppress(UsageError):
            library.entries(access, where)
            continue
        with pytest.raises(UsageError) as caught:
            library.entries(access, where)
        told.append(f"{caught.value.message} {caught.value.hint}")
    assert told
    assert not [text for text in told if "nowhere" in text or "'open'" in text]


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Catalog]:
    """Steps 1 and 2 of the run a, and two of step 3, and the run b, of which the files of step 1 are gone."""
    url = f"sqlite:///{tmp_path}/catalog.db"
    with using(catalog=url), closing(Catalog(url)) as catalog:
        for place, run, step in (("one/1", "a", 1), ("2", "a", 2), ("3", "a", 3), ("4", "a", 3)):
            array = np.full((3, 4), int(place[-1]), "f4")
            ucformat.convert(
                opened({("w", "weight"): array}), tmp_path / "files" / place, run=run, step=step
            )
        for step in (1, 2):
            array = np.full((3, 4), 10 + step, "f4")
            ucformat.convert(
                opened({("w", "weight"): array}),
                tmp_path / "files" / f"b{step}",
                run="b",
                step=step,
            )
        catalog.alias("best", "a@2")
        catalog.alias("seen", "a@1")
        catalog.tag("b@1", "shown")
        shutil.rmtree(tmp_path / "files" / "b1")
        yield catalog


#: Ways to ask for a checkpoint by a reference.
WAYS = (
    "/v1/{}",
    "/v1/{}/tensor/w",
    "/v1/{}/zarr/zarr.json",
    "/v1/{}/files/0/tensors",
    "/ui/checkpoint.json/{}",
    "/ui/checkpoint/{}",
    "/ui/tree.json/{}",
    "/ui/tensor.json/{}/w",
    "/ui/plan.json/{}?layout=0:2",
    "/ui/run.json/?checkpoint={}",
    "/ui/compare.json?a={}&b={}",
    "/api/models/{}",
    "/{}/resolve/main/model.safetensors",
    "/v2/{}/tags/list",
)


def refused(ask: Client, path: str, ref: str, **headers: Any) -> bytes:
    """The answer that there is nothing, in which the reference itself is left out."""
    answer = ask(path.replace("{}", quote(ref, safe="")), **headers)
    assert answer.status == 404, (path, ref, answer.body)
    headers_of_error = answer.headers.get("x-error-message", "").encode()
    body = answer.body + headers_of_error
    for spelled in (ref, json.dumps(ref)[1:-1], quote(ref, safe=""), quote(ref, safe="@:")):
        body = body.replace(spelled.encode(), b"REF")
    return body


def test_a_hidden_reference_is_as_none(stored: Catalog, tmp_path: Path) -> None:
    """Hidden aliases, runs, steps, launches, folders, ids and their beginnings, and what is ambiguous among them."""
    hidden = stored.get("a@2")
    assert hidden.launch is not None
    folder = str(tmp_path / "files")
    launch = next((e.launch for e in stored.find() if e.launch and "/" not in e.launch), "abcd")
    pairs = {
        "alias:best": "alias:none",
        "alias:bes": "alias:none",
        "a@2": "a@9",
        "a@3": "a@9",  # ambiguous
        "a@best": "a@none",
        hidden.id: "f" * 32,
        hidden.id[:6]: "f" * 6,
        f"launch:{launch[:6]}@latest": "launch:ffffff@latest",
        f"folder:{folder}@latest": "folder:/none@latest",
        f"folder:{folder}@1": "folder:/none@1",
        f"folder:{folder}/one@1": "folder:/none@1",  # in which there is only one, in sight
        "alias:": "alias:none",
    }
    with serving(stored, tokens=[token("t", "run = 'a' and step = 1")]) as ask:
        for way in WAYS:
            for ref, none in pairs.items():
                told = refused(ask, way, ref, **bearer("t"))
                assert told == refused(ask, way, none, **bearer("t")), (way, ref)
                for secret in (hidden.id[:6], folder, launch[:6], "did you mean", "ambiguous"):
                    assert secret.encode() not in told, (way, ref)
        for path in ("/v1/a@latest", "/v1/alias:seen", f"/v1/{stored.get('a@1').id[:7]}"):
            answer = ask(path, **bearer("t"))  # newest of those that are in sight
            assert (answer.status, json.loads(answer.body)["step"]) == (200, 1)
    with serving(stored) as ask:  # who sees all is helped
        assert b"did you mean best?" in ask("/v1/alias:bes").body
        assert b"write one of these ids" in ask("/v1/a@3").body


def test_a_beginning_of_several_ids(library: Library) -> None:
    """An id is found by a beginning that other ids in sight do not have, whatever hidden ones have."""
    assert library.catalog is not None
    one, other = (put(library.catalog, n, run="open").id for n in (157, 251))
    begun = one[:4]
    assert other.startswith(begun)
    with pytest.raises(UsageError, match="several"):
        library.entry(begun, Access())
    assert library.entry(begun, Access("t", f"id = '{one}'")).id == one
    assert library.entry(begun, Access("t", f"id = '{other}'")).id == other
    with pytest.raises(NoRepository) as caught:
        library.entry(begun, SOME)
    assert other[:12] not in str(caught.value)


@pytest.mark.parametrize("limit", ["token", "runs"])
def test_no_answer_names_a_file(stored: Catalog, tmp_path: Path, limit: str) -> None:
    ids = [stored.get(ref).id for ref in ("b@1", "b@2")]
    manifest = tmp_path / "files" / "b2" / "manifest.json"
    assert manifest.exists()
    with pytest.raises(ucformat.errors.UcformatError):
        ucformat.open(tmp_path / "files" / "b1")
    place = str(tmp_path / "files" / "b2")
    sizes: Any = {"bytes_verified": 1, "bytes_unverified": 0}
    stored.verified("b@2", url=place, ok=False, problems=[f"{place}/data: torn"], **sizes)
    document = {"url": place, "counts": {"equal": 1}, "layout": {"world": 1}, "missing": [place]}
    stored.certified("b@2", url=place, ok=True, document=document)
    options: dict[str, Any] = (
        {"tokens": [token("t", "run = 'b'")]} if limit == "token" else {"runs": ["b"]}
    )
    headers = bearer("t") if limit == "token" else {}
    with serving(stored, **options) as ask:
        paths = [
            "/v1/checkpoints",
            "/v1/checkpoints?" + urlencode({"where": "url like '/%'"}),
            "/ui/list.json?" + urlencode({"columns": "url,launch,verified,name,run"}),
            "/ui/run.json/b",
            f"/ui/compare.json?a={ids[0]}&b={ids[1]}",
            "/api/models/b/commits/main",
            "/api/models/b/refs",
            "/v2/b/tags/list",
        ]
        for ref in (*ids, "b@1", "b@2"):
            for way in WAYS:
                paths.append(way.replace("{}", ref))
            paths += [
                f"/v1/{ref}/tensor/none",
                f"/ui/tensor.json/{ref}/none",
                f"/{ref}/resolve/main/none",
            ]
        answers = {path: ask(path, **headers) for path in paths}
        for path, answer in answers.items():
            told = answer.body + repr(answer.headers).encode()
            for secret in (str(tmp_path), "files/b1", "files/b2", "manifest.json"):
                assert secret.encode() not in told, (path, answer.body)
        data = json.loads(answers[f"/v1/{ids[1]}"].body)
        assert (data["catalog"]["urls"], data["catalog"]["launch"]) == ([], None)
        verified, certified = data["catalog"]["verified"], data["catalog"]["certified"]
        assert (verified["ok"], verified["url"], len(verified["problems"])) == (False, "", 1)
        assert certified["document"] == {"counts": {"equal": 1}, "layout": {"world": 1}}
        gone = json.loads(answers[f"/ui/checkpoint.json/{ids[0]}"].body)
        assert "cannot be read" in gone["problem"]["message"]
        assert gone["problem"]["hint"] is None
        assert answers[f"/v1/{ids[0]}"].status == 404
        missing = json.loads(answers[f"/v1/{ids[1]}/tensor/none"].body)
        assert "no such tensor" in missing["error"]


def test_what_the_catalog_learns_is_told(stored: Catalog) -> None:
    with serving(stored) as ask:
        assert json.loads(ask("/v1/b@2").body)["catalog"]["tags"] == []
        stored.tag("b@2", "later")
        assert json.loads(ask("/v1/b@2").body)["catalog"]["tags"] == ["later"]
