"""Pages say what their twins in JSON say, to those who may see it, and show hostile names as text."""

from __future__ import annotations

import json
import math
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import pytest

from tests.catalog.acts import put
from tests.catalog.test_plans import check, executed
from tests.web.markup import Page, parse
from tests.web.serving import Client, serving
from tests.web.test_access import bearer, token
from ucformat.catalog.catalog import Catalog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOSTILE = "<script>alert(1)</script>"
MARKS = "evil\u202egnp.exe"
LONG = "x" * 10_000


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """Runs with metrics and annotations, and one whose names are hostile."""
    folder = tmp_path_factory.mktemp("pages")
    with (
        pytest.MonkeyPatch.context() as patch,
        closing(Catalog(f"sqlite:///{folder}/c.db")) as catalog,
    ):
        patch.setattr("ucformat.catalog.catalog.on_change", [])
        for n in range(60):
            loss = float("nan") if n == 3 else 4 / (n + 1)
            metrics = {"loss": loss, "eval/bleu": float(n)}
            put(catalog, n, metrics=metrics, config={"optimizer": {"lr": 0.1}})
        for n, run in enumerate((HOSTILE, MARKS, LONG)):
            put(catalog, 100 + n, run=run, step=1, metrics={f"{HOSTILE}loss": 1.0})
        catalog.tag("run7@4", "good", "published")
        catalog.alias("best", "run7@5")
        yield catalog


def both(ask: Client, page: str, twin: str, **headers: str) -> tuple[Page, Any]:
    """A page and its twin."""
    shown, data = ask(page, **headers), ask(twin, **headers)
    assert (shown.status, data.status) == (200, 200), (shown.body, data.body)
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    policy = shown.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    document = parse(shown.body)
    assert any(address == twin for address, _ in document.links)
    return document, json.loads(data.body)


def test_the_list_shows_what_its_twin_says(catalog: Catalog) -> None:
    with serving(catalog) as ask:
        home = ask("/")
        assert (home.status, home.headers["location"]) == (307, "/ui/")
        page, data = both(ask, "/ui/", "/ui/list.json")
        head, *rows = page.rows
        assert head[1:-1] == [column["text"] for column in data["columns"]]
        assert len(rows) == len(data["checkpoints"]) == 50
        for row, checkpoint in zip(rows[3:], data["checkpoints"][3:], strict=True):
            assert row[1:-1] == checkpoint["cells"]
            assert checkpoint["name"] in row
        assert data["total"] == 63
        assert data["facets"]["run"]["run7"] == 60
        assert dict(data["series"]["run7"]["points"])[59] == 4 / 60
        assert 3 not in dict(data["series"]["run7"]["points"])
        further = next(address for address, text in page.links if text == "further")
        page, data = both(ask, further, further.replace("/ui/?", "/ui/list.json?"))
        assert [c["name"] for c in data["checkpoints"]] == [f"run7@{n}" for n in range(12, -1, -1)]
        assert any("loss=nan" in cell for row in page.rows for cell in row)


def test_a_filter_is_narrowed_and_ordered(catalog: Catalog) -> None:
    asked = {"where": "metric.loss < 1", "sort": "metric.loss", "columns": "step,metric.loss"}
    query = urlencode(asked)
    with serving(catalog) as ask:
        page, data = both(ask, f"/ui/?{query}", f"/ui/list.json?{query}")
        assert [c["cells"][0] for c in data["checkpoints"]][:3] == ["59", "58", "57"]
        narrower = next(address for address, text in page.links if text.startswith("good"))
        _, data = both(ask, narrower, narrower.replace("/ui/?", "/ui/list.json?"))
        assert data["where"] == "metric.loss < 1 and tag = 'good'"
        assert [c["name"] for c in data["checkpoints"]] == ["run7@4"]
        for offset in ("-1", "x", "9" * 30, "\u0663"):
            assert ask(f"/ui/list.json?{urlencode({'offset': offset})}").status == 200


@pytest.mark.parametrize(
    "where", ["step >", "metric.los < 1", "a = 'b", "step = 1) or (step = 2", "\0"]
)
def test_an_error_is_under_the_caret(catalog: Catalog, where: str) -> None:
    with serving(catalog) as ask:
        query = urlencode({"where": where})
        data = ask(f"/ui/list.json?{query}")
        assert data.status == 400
        error = json.loads(data.body)["error"]
        assert "^" in error["message"]
        page = parse(ask(f"/ui/?{query}").body)
        assert error["message"] in page.text
        assert error["hint"] in page.text
        where_input = next(v for _, v in page.elements if v.get("name") == "where")
        assert where_input["aria-describedby"] == "error"


@pytest.mark.parametrize(
    ("text", "offer"),
    [
        ("st", "step"),
        ("run = 'run7' and metric.l", "run = 'run7' and metric.loss"),
        ("bleu", 'metric."eval/bleu"'),
        ("(config.opt", "(config.optimizer.lr"),
        ("run = 'st", None),
        ("step > 1 ", None),
    ],
)
def test_keys_are_completed(catalog: Catalog, text: str, offer: str | None) -> None:
    with serving(catalog) as ask:
        query = urlencode({"where": text})
        offers = json.loads(ask(f"/ui/complete.json?{query}").body)["offers"]
        page = parse(ask(f"/ui/complete?{query}").body)
        assert [v["value"] for tag, v in page.elements if tag == "option"] == offers
        assert offers[:1] == [] if offer is None else offer in offers


def test_hostile_names_are_text(catalog: Catalog) -> None:
    with serving(catalog) as ask:
        answer = ask("/ui/")
        page = parse(answer.body)
        assert len(answer.body) < 300_000
        assert sum(tag == "script" for tag, _ in page.elements) == 1  # ours
        assert HOSTILE in page.text
        assert "\u202e" not in page.text
        assert "\\u202e" in page.text
        hostile = quote(HOSTILE)
        for path in (f"/ui/?where={hostile}", f"/ui/?sort={hostile}", f"/ui/?columns={hostile}"):
            assert HOSTILE in parse(ask(path).body).text


def test_a_token_sees_its_part(catalog: Catalog) -> None:
    tokens = [token("all"), token("some", "tag = 'good' or run = 'nothing'")]
    with serving(catalog, tokens=tokens) as ask:
        refused = ask("/ui/")
        assert refused.status == 401
        assert "Basic" in refused.headers["www-authenticate"]  # a browser then asks for it
        assert "Basic" not in ask("/api/models").headers["www-authenticate"]
        page, data = both(ask, "/ui/", "/ui/list.json", **bearer("some"))
        assert [c["name"] for c in data["checkpoints"]] == ["run7@4"]
        assert data["facets"] == {
            "run": {"run7": 1},
            "kind": {"ucformat": 1},
            "tag": {"good": 1, "published": 1},
        }
        assert "run7@5" not in page.text
        assert data["series"] == {}  # one point is no curve
        offers = ask("/ui/complete.json?where=metric", **bearer("some"))
        assert json.loads(offers.body)["offers"] == ['metric."eval/bleu"', "metric.loss"]
        query = urlencode({"where": "step > 99) or (step >= 0"})
        assert ask(f"/ui/list.json?{query}", **bearer("some")).status == 400
        basic = {"Authorization": "Basic OnNvbWU="}  # of `:some`
        assert json.loads(ask("/ui/list.json", **basic).body)["total"] == 1
        for wrong in ("Basic !", "Basic c29tZQ==", "Basic OmFsbA", "Bearer"):
            assert ask("/ui/", Authorization=wrong).status == 401


def test_no_page_reads_a_table(tmp_path: Path, catalog: Catalog) -> None:
    with serving(catalog) as ask:
        ask("/ui/")
        with executed() as seen:
            ask("/ui/")
            ask(f"/ui/?{urlencode({'where': chr(39).join(('run = ', 'run7', ''))})}")
            ask("/ui/complete?where=metric.l")
    assert len(seen) < 50
    check(catalog, seen)


def test_what_is_vendored() -> None:
    with serving() as ask:
        for name in ("page.css", "htmx.min.js", "icon.svg"):
            assert ask(f"/ui/static/{name}").status == 200
        for name in ("..%2fpages.py", "htmx.LICENSE", "%2e%2e/app.py"):
            assert ask(f"/ui/static/{name}").status == 404
        assert math.isclose(ask("/ui/").status, 200)
