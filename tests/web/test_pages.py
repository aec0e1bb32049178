"""Pages say what their twins in JSON say, to those who may see it, and show hostile names as text."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlencode

import numpy as np
import pytest

import ucformat
from bench.catalog_fill import Plan, fill
from tests.catalog.acts import put
from tests.catalog.test_plans import check, executed
from tests.exporters.sources import Arrays, opened
from tests.web.markup import Page, parse
from tests.web.serving import Client, bearer, serving, token
from ucformat.catalog.catalog import Catalog
from ucformat.drawing import colour_of
from ucformat.errors import UcformatError
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import TensorInfo
from ucformat.jobs.compare import compare_values
from ucformat.settings import using
from ucformat.web import measuring, one_tensor, planning, sampling
from ucformat.web.sampling import Budget, read_sample, sampled_boxes

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
        config = {"optimizer": {"lr": 0.1}, "layers": [4, 8]}
        for n in range(60):
            loss = float("nan") if n == 3 else 4 / (n + 1)
            metrics = {"loss": loss, "eval/bleu": float(n)}
            put(catalog, n, metrics=metrics, config=config)
        for n, run in enumerate((HOSTILE, MARKS, LONG)):
            put(catalog, 100 + n, run=run, step=1, metrics={f"{HOSTILE}loss": 1.0})
        catalog.tag("run7@4", "good", "published")
        catalog.alias("best", "run7@5")
        yield catalog


def both(ask: Client, page: str, twin: str, **headers: Any) -> tuple[Page, Any]:
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
        columns = f"config.layers.{'1' * 5000},config.layers.1"
        answer = ask(f"/ui/list.json?{urlencode({'columns': columns})}")
        assert json.loads(answer.body)["checkpoints"][-1]["cells"] == ["-", "8"]
        for offset in ("-1", "x", "9" * 30, "9" * 5000, "\u0663"):
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
        basic: dict[str, Any] = {"Authorization": "Basic OnNvbWU="}  # of `:some`
        assert json.loads(ask("/ui/list.json", **basic).body)["total"] == 1
        for wrong in ("Basic !", "Basic c29tZQ==", "Basic OmFsbA", "Bearer"):
            assert ask("/ui/", Authorization=wrong).status == 401


def test_no_page_reads_a_table(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    # of which there are fewer here than are counted elsewhere
    monkeypatch.setattr("ucformat.web.listing._COUNTED", 20)
    monkeypatch.setattr("ucformat.web.listing._SAMPLED", 20)
    with serving(catalog) as ask:
        ask("/ui/")
        with executed() as seen:
            ask("/ui/")
            ask(f"/ui/?{urlencode({'where': chr(39).join(('run = ', 'run7', ''))})}")
            ask("/ui/complete?where=metric.l")
    assert len(seen) < 50
    check(catalog, seen)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """Checkpoints with files: two steps of a run, an increment, and one whose files are gone."""
    folder = tmp_path_factory.mktemp("stored")
    url = f"sqlite:///{folder}/c.db"
    with using(catalog=url), closing(Catalog(url)) as catalog:
        for step in (1, 2, 3):
            arrays: Arrays = {
                (f"model.layers.{n}.w", state): np.full((8, 4), n * step, "f4")
                for n in range(3)
                for state in ("weight", "exp_avg")
            }
            arrays[HOSTILE + "/..", "weight"] = np.zeros(3, "i8")
            arrays["..", "weight"] = np.zeros((), "f4")
            ucformat.convert(
                opened(arrays), folder / str(step), run="run7", step=step, chunk_bytes=32
            )
            catalog.metric(f"run7@{step}", {"loss": float("inf") if step == 2 else 1 / step})
        ucformat.convert(
            str(folder / "2"), folder / "4", base=str(folder / "2"), run="other", step=4
        )
        catalog.alias(f"run7/{HOSTILE}", "run7@2")
        catalog.note("run7@2", HOSTILE)
        catalog.hold("run7@2", MARKS)
        catalog.link("run7@2", "run7@1", "resume")
        shutil.rmtree(folder / "3")
        yield catalog


def test_a_checkpoint_shows_what_its_twin_says(stored: Catalog) -> None:
    entry = stored.get("run7@2")
    with serving(stored) as ask:
        page, data = both(ask, f"/ui/checkpoint/{entry.id}", f"/ui/checkpoint.json/{entry.id}")
        assert data["entry"]["metrics"] == {"loss": {"$float": "inf"}}
        for text in (entry.id, f"run7/{HOSTILE}", HOSTILE, "evil\\u202egnp.exe", entry.url):
            assert str(text) in page.text
        assert "\u202e" not in page.text
        needed = [text for text in data["protections"] if text.startswith("needed by")]
        assert needed == [f"needed by {stored.get('other@4').id}"]
        for text in data["protections"]:
            assert text.replace("\u202e", "\\u202e") in page.text
        assert {n["name"] for n in data["lineage"]["nodes"]} >= {"run7@1", "run7@2", "other@4"}
        assert {s["state"]: s["tensors"] for s in data["states"]} == {"weight": 5, "exp_avg": 3}
        assert data["parameters"] == 3 * 32 + 3 + 1
        assert data["storage"]["bytes"] == sum(f["bytes"] for f in data["storage"]["files"])
        files = [row[0] for row in page.rows if row and row[0].endswith("manifest.json")]
        assert len(files) == 1
        assert {"verify", "note"} & {e["action"] for e in data["events"]}
        for ref in ("run7@2", quote(f"alias:run7/{HOSTILE}", safe=""), entry.id[:9]):
            assert json.loads(ask(f"/ui/checkpoint.json/{ref}").body)["ref"] == entry.id


def test_the_tree_opens_branch_by_branch(stored: Catalog) -> None:
    ref = stored.get("run7@2").id
    with serving(stored) as ask:
        top = json.loads(ask(f"/ui/checkpoint.json/{ref}").body)["tree"]["nodes"]
        assert [(n["label"], n["tensors"]) for n in top if n["prefix"] == "model."] == [
            ("model", 6)
        ]
        _, data = both(
            ask, f"/ui/tree/{ref}?prefix=model.layers.", f"/ui/tree.json/{ref}?prefix=model.layers."
        )
        assert [n["bytes"] for n in data["tree"]["nodes"]] == [256] * 3
        part = ask(f"/ui/tree/{ref}?prefix=model.layers.0.", HX_Request="true")
        assert b"<html" not in part.body
        assert b"8 x 4" in part.body
        assert ask(f"/ui/tree/{ref}?prefix=none.").status == 404


def test_a_tensor_is_drawn_and_sampled(stored: Catalog) -> None:
    ref = stored.get("run7@2").id
    with serving(stored) as ask:
        name = f"{ref}/model.layers.2.w"
        query = urlencode({"state": "exp_avg", "layout": "0:3"})
        page, data = both(ask, f"/ui/tensor/{name}?{query}", f"/ui/tensor.json/{name}?{query}")
        assert (data["state"], data["shape"], data["bytes"]) == ("exp_avg", [8, 4], 128)
        assert [r["elements"] for r in data["ranks"]] == [12, 12, 8]
        chunks = data["picture"]["chunks"]
        assert sum(c["shape"][0] * c["shape"][1] for c in chunks) == 32
        assert {tuple(c["start"]) for c in chunks} == set(np.ndindex(8, 4))
        boxes = [(p["ranks"], p["start"], p["shape"]) for p in data["picture"]["pieces"]]
        assert boxes == [([0], [0, 0], [3, 4]), ([1], [3, 0], [3, 4]), ([2], [6, 0], [2, 4])]
        assert [row[1] for row in page.rows[1:]] == ["[0:3, 0:4]", "[3:6, 0:4]", "[6:8, 0:4]"]
        assert data["sample"]["elements"] == data["sample"]["of"] == 32
        numbers = data["sample"]["numbers"]
        assert (numbers["mean"], numbers["deviation"], numbers["zero"]) == (4.0, 0.0, 0)
        assert colours(page) == [colour_of(rank) for rank in range(3)]
        document = {
            "version": 1,
            "mesh": {"dp": 2, "tp": 2},
            "rules": [
                {"match": "model.*", "place": [{"shard": 1, "over": "tp"}]},
                {"match": "*", "place": ["replicate"]},
            ],
        }
        query = urlencode({"layout": json.dumps(document), "state": "weight"})
        data = json.loads(ask(f"/ui/tensor.json/{name}?{query}").body)
        assert [r["elements"] for r in data["ranks"]] == [16] * 4
        assert [p["ranks"] for p in data["picture"]["pieces"]] == [[0, 2], [1, 3]]
        wrong = (
            "9:2",
            "0:0",
            "0:9999",
            "x",
            "[]",
            "{}",
            '{"version": 1, "mesh": {"a": 1}}',
            "[" * 5000,
        )
        for layout in wrong:
            query = urlencode({"layout": layout})
            answer = ask(f"/ui/tensor.json/{name}?{query}")
            assert answer.status == 400
            error = json.loads(answer.body)["error"]
            assert error["message"] in parse(ask(f"/ui/tensor/{name}?{query}").body).text
        for path in (
            f"{ref}/none",
            f"{name}?state=none",
            "run7@3/model.layers.2.w",
            f"{ref}",
            "x/y",
        ):
            assert ask(f"/ui/tensor/{path}").status == 404


def colours(page: Page) -> list[str]:
    """The colours of what ranks hold, in the order in which it is drawn."""
    filled = [v for tag, v in page.elements if tag == "rect" and v.get("fill-opacity")]
    return [str(values["fill"]) for values in filled]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_plan_is_that_of_the_checkpoint(stored: Catalog, rank: int) -> None:
    entry = stored.get("run7@2")
    layout = {
        "version": 1,
        "mesh": {"tp": 3},
        "rules": [
            {"match": "model.*", "place": [{"shard": 0, "over": "tp"}]},
            {"match": "*", "place": ["replicate"]},
        ],
    }
    expected = ucformat.open(entry.urls[0]).plan(ucformat.Layout.parse(layout), rank, "weight")
    query = urlencode({"layout": json.dumps(layout), "rank": rank, "state": "weight"})
    with serving(stored) as ask:
        page, data = both(ask, f"/ui/plan/{entry.id}?{query}", f"/ui/plan.json/{entry.id}?{query}")
        plan = data["plan"]
        assert (data["rank"], data["ranks"], plan["tensors"]) == (rank, 3, len(expected.tensors))
        for name in ("bytes_needed", "bytes_read", "bytes_unverified", "requests", "memory"):
            assert plan[name] == getattr(expected, name)
        assert plan["amplification"] == expected.bytes_read / expected.bytes_needed
        assert {f["name"]: f["bytes"] for f in plan["files"]} == expected.files
        assert sum(t["bytes"] for t in data["tensors"]) == expected.bytes_needed
        assert {row[0]: row[2] for row in page.rows if len(row) == 5}["model.layers.1.w"] == (
            "[0:3, 0:4]" if rank == 0 else "[6:8, 0:4]"
        )
        assert colours(page) == [colour_of(rank)]
        drawn = next(a for a, text in page.links if text == "model.layers.2.w")
        again, data = both(ask, drawn, drawn.replace("/ui/plan/", "/ui/plan.json/"))
        assert (data["drawn"]["name"], data["drawn"]["state"]) == ("model.layers.2.w", "weight")
        assert data["drawn"]["picture"]["pieces"][0]["ranks"] == [rank]
        further = next((a for a, text in again.links if text == "rank 1"), "")
        assert json.loads(ask(further.replace("/plan/", "/plan.json/")).body)["rank"] == 1


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("x", "0"),
        ("0:2", "2"),
        ("0:2", "-1"),
        ("0:2", "\u0663"),
        ("0:2000000", "0"),
        ("[]", "0"),
        ("9:2", "0"),
    ],
)
def test_a_plan_that_is_none_says_why(stored: Catalog, layout: str, rank: str) -> None:
    with serving(stored) as ask:
        query = urlencode({"layout": layout, "rank": rank})
        answer = ask(f"/ui/plan.json/run7@2?{query}")
        assert answer.status == 400
        assert (
            json.loads(answer.body)["error"]["message"]
            in parse(ask(f"/ui/plan/run7@2?{query}").body).text
        )
        assert json.loads(ask("/ui/plan.json/run7@2").body)["plan"] is None
        assert ask("/ui/plan/run7@3").status == 404


def test_boxes_beyond_those_that_are_drawn_are_told(
    stored: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (one_tensor, planning):
        monkeypatch.setattr(module, "DRAWN", 1)
    entry = stored.get("run7@2")
    parts = [{"shard": 0, "over": "tp", "parts": [2, 2, 2, 2]}]
    rules = [{"match": "model.*", "place": parts}, {"match": "*", "place": ["replicate"]}]
    layout = {"version": 1, "mesh": {"tp": 2}, "rules": rules}
    name = "model.layers.1.w"
    query = urlencode(
        {"layout": json.dumps(layout), "tensor": name, "of": "weight", "state": "weight"}
    )
    with serving(stored) as ask:
        for kind, path, undrawn in (("plan", entry.id, 3), ("tensor", f"{entry.id}/{name}", 7)):
            page, data = both(ask, f"/ui/{kind}/{path}?{query}", f"/ui/{kind}.json/{path}?{query}")
            picture = (data["drawn"] if kind == "plan" else data)["picture"]
            assert (len(picture["pieces"]), picture["undrawn"]) == (1, undrawn)
            assert f"not drawn: {undrawn} more parts" in page.text


def test_tensors_of_hostile_names_have_pages(stored: Catalog) -> None:
    ref = stored.get("run7@2").id
    with serving(stored) as ask:
        todo, seen = [f"/ui/checkpoint/{ref}"], set()
        while todo:
            page = parse(ask(todo.pop()).body)
            for address, _ in page.links:
                if address.startswith("/ui/tensor/"):
                    seen.add(address)
                elif address.startswith("/ui/tree/"):
                    todo.append(address)
        names = {json.loads(ask(a.replace("/tensor/", "/tensor.json/")).body)["name"] for a in seen}
        assert names == {*(f"model.layers.{n}.w" for n in range(3)), f"{HOSTILE}/..", ".."}
        for address in seen:  # nothing that a browser would take for a folder
            assert not {".", ".."} & set(unquote(address.partition("?")[0]).split("/")[:5])


@pytest.mark.parametrize("dtype", ["f4", "u1"])
@pytest.mark.parametrize(
    "shape",
    [
        (1 << 21,),
        (3, 5, 1 << 19),
        (1 << 20, 3),
        (2, 1 << 12, 1 << 9),
        (7, 1),
        (),
        (0, 4),
        (70_000, 17, 2),
    ],
)
def test_a_sample_is_small_and_spread(shape: tuple[int, ...], dtype: str) -> None:
    info = TensorInfo("t", "weight", {"f4": "float32", "u1": "uint8"}[dtype], shape)
    boxes = list(sampled_boxes(info))
    whole = Box.whole(shape)
    size = sum(box.size for box in boxes)
    assert size * info.itemsize <= 1 << 20
    assert size == min(info.size, size)
    assert info.nbytes <= 1 << 20 or (len(boxes) == 16 and size * info.itemsize > 1 << 18)
    assert all(whole.contains(box) for box in boxes)
    assert not any(a.intersect(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_what_is_gone_is_told(stored: Catalog) -> None:
    with serving(stored) as ask:
        page, data = both(ask, "/ui/checkpoint/run7@3", "/ui/checkpoint.json/run7@3")
        assert data["problem"]["message"] in page.text
        assert data["states"][0]["tensors"]  # as the catalog has them
        for path in ("checkpoint/run7@9", "checkpoint/%2Fetc", "run/none", "checkpoint/", "run/"):
            answer = ask(f"/ui/{path}")
            assert answer.status in (400, 404)
            assert "alert" in {v.get("role") for _, v in parse(answer.body).elements}
            name, _, rest = path.partition("/")
            twin = ask(f"/ui/{name}.json/{rest}")
            assert (twin.status, "error" in json.loads(twin.body)) == (answer.status, True)


def test_the_page_of_a_long_run_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucformat.web.comparing._STEPS", 10)
    monkeypatch.setattr("ucformat.web.comparing._POINTS", 40)
    sizes, statements = [], []
    for number in (200, 400):
        with closing(Catalog(f"sqlite:///{tmp_path}/{number}.db")) as catalog:
            fill(catalog, Plan(number, 1, runs=1))
            with serving(catalog) as ask:
                page, data = both(ask, "/ui/run/run00", "/ui/run.json/run00")
                with executed() as seen:
                    sizes.append(len(ask("/ui/run/run00").body))
                statements.append(len(seen))
            assert data["every"] == 100 * (number - 1) // 40 + 1
            assert f"of each {data['every']:,} steps" in page.text
            assert len(page.rows) == 1 + len(data["steps"]) == 11
            assert data["more"]
            losses = {e.step: e.metrics["val_loss"] for e in catalog.find()}
            points = dict(data["metrics"]["val_loss"])
            assert all(losses[step] == value for step, value in points.items())
            assert 38 <= len(points) <= 40
    assert sizes[1] < 1.05 * sizes[0]
    assert statements[0] == statements[1] < 25


def test_the_page_of_a_long_run_says_which_metrics_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucformat.web.comparing._POINTS", 2)
    with closing(Catalog(f"sqlite:///{tmp_path}/c.db")) as catalog:
        for step in range(4):
            put(catalog, step, metrics={"rare": 1.0} if step == 1 else {})
        with serving(catalog) as ask:
            page, data = both(ask, "/ui/run/run7", "/ui/run.json/run7")
    assert (data["every"], data["metrics"], data["undrawn"]) == (2, {}, [])
    assert "metrics and values that only others have are not seen" in page.text


def test_a_run_and_a_comparison(stored: Catalog) -> None:
    a, b = stored.get("run7@1").id, stored.get("run7@2").id
    with serving(stored) as ask:
        page, data = both(ask, "/ui/run/run7", "/ui/run.json/run7")
        assert data["metrics"]["loss"] == [[1, 1.0], [2, {"$float": "inf"}], [3, 1 / 3]]
        assert [row[1] for row in page.rows[1:]] == ["run7@3", "run7@2", "run7@1"]
        page, data = both(ask, f"/ui/compare?of={a}&of={b}", f"/ui/compare.json?of={a}&of={b}")
        assert (data["a"]["name"], data["b"]["name"]) == ("run7@1", "run7@2")
        assert data["metrics"] == [{"path": "loss", "a": 1.0, "b": {"$float": "inf"}}]
        assert data["tensors"]["numbers"]["of other values"] == 4
        for query in ("", "of=x", f"a={a}", f"of={a}&of={b}&of={a}", f"a={a}&b=none"):
            assert ask(f"/ui/compare?{query}").status in (400, 404)


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """Steps of a run whose tensors move apart, each in its own way, and one of another dtype."""
    folder = tmp_path_factory.mktemp("values")
    url = f"sqlite:///{folder}/c.db"
    with using(catalog=url), closing(Catalog(url)) as catalog:
        for step in range(4):
            base = np.arange(1, 65, dtype="f4").reshape(8, 8)
            last = base.copy()
            last[0, 0] = np.nan if step else 1
            arrays: Arrays = {
                ("same", "weight"): base,
                ("scaled", "weight"): base * np.float32(1 + step),
                ("one", "weight"): base + np.float32(step) * np.eye(8, dtype="f4"),
                ("nan", "weight"): last,
                ("cast", "weight"): base.astype("f8" if step == 1 else "f4"),
                ("zeros", "weight"): np.zeros(8, "f8" if step == 1 else "f4"),
                ("from_zero", "exp_avg"): base * np.float32(step),
                ("short", "weight"): base[: 8 - step],
                (HOSTILE, "weight"): base + np.float32(step),
            }
            ucformat.convert(opened(arrays), folder / str(step), run="run8", step=step)
        shutil.rmtree(folder / "3")
        yield catalog


def test_distances_are_those_of_the_values(values: Catalog) -> None:
    a, b = values.get("run8@0").id, values.get("run8@1").id
    with serving(values) as ask:
        query = f"a={a}&b={b}&values=sample"
        page, data = both(ask, f"/ui/compare?{query}", f"/ui/compare.json?{query}")
        measured = {t["name"]: t for t in data["values"]["tensors"]}
        unequal = {"scaled", "one", "nan", "cast", "zeros", "from_zero", HOSTILE}
        assert measured.keys() == unequal
        assert data["values"]["by_digest"] == 1
        base = np.arange(1, 65, dtype="f8")
        expected = {
            "from_zero": {"$float": "inf"},
            "scaled": 1.0,
            HOSTILE: np.sqrt(64) / np.linalg.norm(base),
            "one": np.sqrt(8) / np.linalg.norm(base),
            "nan": {"$float": "inf"},  # of what became NaN, no other distance would be true
            "cast": 0.0,
            "zeros": 0.0,  # and not 0 / 0
        }
        for name, distance in expected.items():
            assert measured[name]["distance"] == pytest.approx(distance), name
        assert measured["one"]["differing"] == 8
        assert (measured["nan"]["nan_mismatches"], measured["cast"]["differing"]) == (1, 0)
        order = [t["name"] for t in data["values"]["tensors"]]
        assert set(order[:2]) == {"from_zero", "nan"}
        assert order[2:5] == ["scaled", HOSTILE, "one"]
        rows = [row[0] for row in page.rows if len(row) == 6 and row[0] != "tensor"]
        assert rows == order
        assert data["values"]["bytes_read"] > 6 * 64 * 4
        assert json.loads(ask(f"/ui/compare.json?a={a}&b={b}").body)["values"] is None
        gone = ask(f"/ui/compare?a={a}&b={values.get('run8@3').id}&values=sample")
        assert "alert" in {v.get("role") for _, v in parse(gone.body).elements}


def test_no_page_reads_more_than_its_limit(
    tmp_path: Path, values: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by many tensors, nor by one whose parts cannot be read alone."""
    a, b = values.get("run8@0").id, values.get("run8@1").id
    with serving(values) as ask:
        query = f"/ui/compare.json?a={a}&b={b}&values=sample"
        monkeypatch.setattr(measuring, "_TENSORS", 2)
        data = json.loads(ask(query).body)["values"]
        assert (len(data["tensors"]), data["unmeasured"]) == (2, 5)
        monkeypatch.setattr(measuring, "MOST_READ", 700)
        data = json.loads(ask(query).body)["values"]
        assert data["bytes_read"] <= 700
        assert (len(data["tensors"]), data["unmeasured"]) == (1, 6)
    large = np.random.default_rng(0).standard_normal((1024, 1024), dtype="f4")
    ck = ucformat.convert(opened({("w", "weight"): large}), tmp_path / "u", codec="blosc")
    boxes = list(sampled_boxes(ck["w"].info, 64 << 10, 4))
    one = ck["w"].plan(boxes[0]).bytes_read
    assert one > 64 << 10  # a chunk that is compressed is read whole
    drawn = read_sample(ck["w"], boxes, Budget(2 * one + 1))
    assert (len(drawn.boxes), drawn.values.size) == (2, 2 * boxes[0].size)
    assert drawn.bytes_read <= 2 * one + 1
    assert read_sample(ck["w"], boxes, Budget(100)).values.size == 0


def test_what_fails_counts_as_read(values: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:

    def failing(x: Any, y: Any) -> Any:
        if x.size:
            raise UcformatError("broken")
        return compare_values(x, y)

    monkeypatch.setattr(measuring, "MOST_READ", 700)
    a, b = values.get("run8@0").id, values.get("run8@1").id
    with serving(values) as ask:
        monkeypatch.setattr(measuring, "compare_values", failing)
        query = f"/ui/compare.json?a={a}&b={b}&values=sample"
        data = json.loads(ask(query).body)["values"]
        assert (len(data["failed"]), data["unmeasured"]) == (2, 5)
        assert 0 < data["bytes_read"] <= 700


@pytest.mark.parametrize("unit", [1e200, 1.0, 1e-200, 5e-324])
def test_norms_beyond_the_squares_of_float64(unit: float) -> None:
    a, b = np.array([2.0, 4.0]) * unit, np.array([4.0, 4.0]) * unit
    assert measuring._distance(a, b) == pytest.approx(2 / np.sqrt(20))
    assert measuring._norm(a, 2)["norm"] == pytest.approx(np.sqrt(20) * unit)
    assert measuring._distance(np.array([1.0, 1.0]), np.array([1.0, np.nextafter(1, 2)])) > 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("unit", [1.7e308, 1e200, 1.0, 1e-200, 5e-324])
def test_statistics_of_any_finite_numbers(unit: float) -> None:
    told = sampling._statistics(np.array([-1.0, 1.0, 0.0, 1.0, np.nan, np.inf]) * unit)
    assert (told["minimum"], told["maximum"]) == (-unit, unit)
    assert (told["nan"], told["infinite"], told["zero"]) == (1, 1, 1)
    expected = {"mean": 0.25, "deviation": np.sqrt(11) / 4, "rms": np.sqrt(3) / 2}
    for name, value in expected.items():
        assert told[name] == pytest.approx(value * unit, rel=1e-12, abs=5e-324)
    counts = told["histogram"]
    assert (counts[0], counts[len(counts) // 2], counts[-1]) == (1, 1, 2)
    assert sum(counts) == 4


@pytest.mark.filterwarnings("error")
def test_statistics_of_numbers_that_are_nearly_equal() -> None:
    most = np.finfo("f8").max
    for low, high in ((1.0, np.nextafter(1, 2)), (most, most), (-most, most), (0.0, 0.0)):
        told = sampling._statistics(np.array([low, high, high]))
        assert low <= told["mean"] <= high
        assert (told["histogram"][0], sum(told["histogram"])) == (3 if low == high else 1, 3)
        assert told["rms"] <= max(-low, high)


def test_norms_along_a_run(values: Catalog) -> None:
    ref = values.get("run8@1").id
    with serving(values) as ask:
        path = f"{ref}/scaled?along=run"
        page, data = both(ask, f"/ui/tensor/{path}", f"/ui/tensor.json/{path}")
        size = np.linalg.norm(np.arange(1, 65, dtype="f8"))
        norms = {p["step"]: p["norm"] for p in data["along"]["points"]}
        assert norms == pytest.approx({0: size, 1: 2 * size, 2: 3 * size})
        assert [f["step"] for f in data["along"]["failed"]] == [3]
        assert data["along"]["failed"][0]["reason"] in page.text
        assert "norm of scaled" in str([v for tag, v in page.elements if tag == "svg"])
        same = json.loads(ask(f"/ui/tensor.json/{ref}/same?along=run").body)["along"]
        assert [p["norm"] for p in same["points"]] == pytest.approx([size] * 3)
        assert same["bytes_read"] < 2 * data["along"]["bytes_read"] / 3  # of equal ones, one
        nan = json.loads(ask(f"/ui/tensor.json/{ref}/nan?along=run").body)["along"]
        assert nan["points"][1]["norm"] == {"$float": "nan"}
        assert json.loads(ask(f"/ui/tensor.json/{ref}/scaled").body)["along"] is None
    with serving(values, tokens=[token("t", "step < 2")]) as ask:
        answer = ask(f"/ui/tensor.json/{path}", **bearer("t"))
        along = json.loads(answer.body)["along"]
        assert [p["step"] for p in along["points"]] == [0, 1], along


def test_neighbours_that_may_not_be_seen_are_not_named(stored: Catalog) -> None:
    ref, hidden = stored.get("run7@2").id, stored.get("other@4").id
    with serving(stored, tokens=[token("t", "run = 'run7' and step > 1")]) as ask:
        answer = ask(f"/ui/checkpoint.json/{ref}", **bearer("t"))
        data = json.loads(answer.body)
        assert [n["name"] for n in data["lineage"]["nodes"]] == ["run7@2"]
        assert data["lineage"]["hidden"] >= 2
        assert hidden[:8] not in answer.body.decode(), [
            k for k, v in data.items() if hidden[:8] in json.dumps(v)
        ]
        assert "needed by others" in data["protections"]
        assert [
            s["step"] for s in json.loads(ask("/ui/run.json/run7", **bearer("t")).body)["steps"]
        ] == [2, 3]
        for path in (
            f"checkpoint/{hidden}",
            "run/other",
            f"compare?a={ref}&b={hidden}",
            f"tree/{hidden}",
        ):
            assert ask(f"/ui/{path}", **bearer("t")).status == 404


def test_a_given_place_and_names_as_of_folders(tmp_path: Path) -> None:
    ck = ucformat.convert(opened({("..", "weight"): np.zeros(3, "f4")}), tmp_path / "u")
    with serving(places={"..": ck, "ui": ck}) as ask:
        page, data = both(ask, "/ui/", "/ui/list.json")
        assert data["places"] == ["..", "ui"]
        for address in (a for a, text in page.links if text in data["places"]):
            assert "/ui/checkpoint/" in address
            assert ".." not in address.partition("?")[0].split("/")  # a browser would go up
            assert ask(address).status == 200
        assert ask("/ui/resolve/main/model.safetensors").status == 200  # that repository, still


def test_what_is_vendored() -> None:
    with serving() as ask:
        for name in ("page.css", "htmx.min.js", "icon.svg"):
            assert ask(f"/ui/static/{name}").status == 200
        for name in ("..%2fpages.py", "htmx.LICENSE", "%2e%2e/app.py"):
            assert ask(f"/ui/static/{name}").status == 404
