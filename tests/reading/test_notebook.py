"""What notebooks show of checkpoints, tensors, plans, lineages and certificates, and what they complete."""

from __future__ import annotations

import tracemalloc
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

import ucformat
from tests.exporters.sources import opened, universal, zero3
from tests.fakes import random_array
from tests.markup import Markup
from ucformat.catalog.catalog import Catalog
from ucformat.drawing import card
from ucformat.errors import TensorNotFound, UsageError
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import single_extents

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.drawing import Drawing

HOSTILE = "<img src=x onerror=alert(1)>&\"'\u202e.weight"
SVG = "{http://www.w3.org/2000/svg}"


def parsed(page: str) -> Markup:
    """What a notebook shows, which must neither act nor lead anywhere."""
    markup = Markup(page)
    for _, values in markup.elements:
        assert not any(name.startswith("on") or name in ("src", "href") for name in values)
    return markup


def shown(value: Any) -> str:
    """The text of what a notebook shows of a value."""
    page = parsed(value._repr_html_())
    assert {tag for tag, _ in page.elements} <= {
        "div",
        "table",
        "tr",
        "td",
        "th",
        "details",
        "summary",
        "pre",
    }
    assert "\u202e" not in page.text
    return page.text


def rectangles(drawing: Drawing, *, of_ranks: bool) -> list[tuple[float, ...]]:
    """The rectangles of ranks, or of the storage: x, y, width, height."""
    root = ET.fromstring(str(drawing))  # noqa: S314 - our own
    return [
        tuple(float(r.attrib[a]) for a in ("x", "y", "width", "height"))
        for r in root.iter(f"{SVG}rect")
        if (r.attrib["fill"] != "none") is of_ranks
    ]


def label(drawing: Drawing) -> str:
    return ET.fromstring(str(drawing)).attrib["aria-label"]  # noqa: S314 - our own


def layout(tp: int, dim: int = 0) -> ucformat.Layout:
    return ucformat.Layout(
        mesh={"tp": tp}, rules=[{"match": "*", "place": [{"shard": dim, "over": "tp"}]}]
    )


def test_a_checkpoint_and_its_tensors(tmp_path: Path) -> None:
    ck = universal(tmp_path / "run7", {("w", "weight"): random_array((4, 6), "bfloat16")}, step=7)
    text = shown(ck)
    for word in (
        "run7",
        str(ck.url),
        "ucformat",
        "weight",
        "bfloat16",
        "24",
        "48 B",
        ck.manifest.id,
    ):
        assert word in text
    text = shown(ck["w"])
    for word in ("w", "4 x 6", "bfloat16", "48 B", ck["w"].fingerprint):
        assert word in text


def test_a_checkpoint_of_an_engine_and_a_plan(tmp_path: Path) -> None:
    place, _ = zero3(tmp_path / "engine")
    ck = ucformat.open(place)
    assert "deepspeed" in shown(ck)
    plan = ck.plan(layout(2), 1, states="master")
    text = shown(plan)
    assert "What rank 1 reads" in text
    assert f"{plan.requests} in {len(plan.files)} files" in text
    assert all(file in text for file in plan.files)


def test_hostile_names_are_text(tmp_path: Path) -> None:
    ck = opened({(HOSTILE, "weight"): random_array((3, 4), "float32")})
    assert "<img src=x onerror=alert(1)>&\"'\\u202e.weight" in shown(ck[HOSTILE])
    shown(ck)
    for drawing in (ck.plot(None, HOSTILE), ck.plot(layout(2), HOSTILE)):
        assert "<img" in label(drawing)
        assert "<img" not in str(drawing)
        assert drawing._repr_html_() == str(drawing)
    shown_card = parsed(card(HOSTILE, {HOSTILE: HOSTILE}, [HOSTILE], [[HOSTILE]], more=HOSTILE))
    assert shown_card.text.count("<img") == 6


def test_long_tables_say_what_they_leave_out() -> None:
    page = parsed(card("t", {"none": None}, ["n"], [[n] for n in range(1234)]))
    assert "and 1,184 more" in page.text
    assert "none" not in page.text


def test_lineage(tmp_path: Path) -> None:
    from tests.catalog.acts import put

    with Catalog(str(tmp_path / "catalog.db")) as catalog:
        put(catalog, 1)
        put(catalog, 2)
        catalog.link("run7@2", "run7@1", "finetune")
        text = shown(catalog.lineage("run7@2"))
        assert "Ancestors of run7@2" in text
        assert "finetune" in text
        assert "Descendants of run7@1" in shown(catalog.lineage("run7@1", "down"))


def test_certificates() -> None:
    from ucformat.torch.certificate import Certificate, CertificateEntry

    entry = CertificateEntry(HOSTILE, "master", (0, 1), "3 elements")
    facts: dict[str, Any] = {
        "layout": {"world": 2},
        "values": 3,
        "left": 0,
        "nbytes": 8,
        "seconds": 0.1,
    }
    now = datetime(2026, 1, 1, tzinfo=UTC)
    good = Certificate("/data/1", "id", 7, now, equal=(entry,), **facts)
    bad = Certificate("/data/1", "id", 7, now, different=(entry,), **facts)
    assert "The state is the one that was saved" in shown(good)
    text = shown(bad)
    assert "The state is not what was saved" in text
    assert "(master) on ranks 0-1: 3 elements" in text or "on ranks 0" in text


@pytest.mark.parametrize("shape", [(), (7,), (12, 10), (3, 4, 6), (2, 3, 4, 5), (0, 4)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_boxes_that_are_drawn_cover_the_tensor(
    tmp_path: Path, shape: tuple[int, ...], ranks: int
) -> None:
    """Whatever dim is cut, the areas of the ranks' rectangles, and those of the storage, are the whole."""
    ck = universal(tmp_path / "ck", {("w", "weight"): random_array(shape, "float32")})
    size = ck["w"].size
    for dim in range(len(shape)):
        drawing = ck.plot(layout(ranks, dim), "w")
        for of_ranks in (True, False):
            places = rectangles(drawing, of_ranks=of_ranks)
            if not size:
                assert places == []
                continue
            right = max(x + w for x, _, w, _ in places)
            bottom = max(y + h for _, y, _, h in places)
            area = sum(w * h for _, _, w, h in places)
            assert area == pytest.approx(right * bottom, rel=0.01), (dim, of_ranks)
    parts = len([*single_extents(ck.source.extents(ck["w"].info.key, Box.whole(shape)))])
    assert f"stored in {parts} part" in label(ck.plot(None, "w"))


def test_ranks_are_named_and_replicas_share_a_box(tmp_path: Path) -> None:
    ck = universal(tmp_path / "ck", {("w", "weight"): random_array((64, 64), "float32")})
    replicated = ucformat.Layout(
        mesh={"dp": 2, "tp": 2}, rules=[{"match": "*", "place": [{"shard": 0, "over": "tp"}]}]
    )
    drawing = ck.plot(replicated, "w")
    assert len(rectangles(drawing, of_ranks=True)) == 2
    assert "boxes of 4 ranks" in label(drawing)
    assert "<title>ranks 0, 2: " in str(drawing)
    assert "box of 1 rank" in label(ck.plot(layout(1), "w"))


def test_a_layout_s_view_and_states(tmp_path: Path) -> None:
    arrays = {("w", s): random_array((4, 4), "float32") for s in ("master", "exp_avg")}
    ck = universal(tmp_path / "ck", arrays)
    assert "(master)" in label(ck.plot(None, "w"))
    assert "(exp_avg)" in label(ck.plot(layout(2), "w", "exp_avg"))
    viewed = ucformat.Layout(
        mesh={"tp": 2},
        rules=[{"match": "*", "place": [{"shard": 0, "over": "tp"}]}],
        view=[{"rename": "w", "to": "v"}],
    )
    assert label(ck.plot(viewed, "v")).startswith("v (master)")
    with pytest.raises(TensorNotFound):
        ck.plot(viewed, "w")


def test_too_much_is_not_drawn(tmp_path: Path) -> None:
    ck = universal(tmp_path / "ck", {("w", "weight"): random_array((6000, 2, 2), "float32")})
    finely = ck.plot(None, "w")
    assert len(rectangles(finely, of_ranks=False)) < 5000
    with pytest.raises(UsageError, match="more than 4,096 rectangles"):
        ck.plot(layout(2, 1), "w")
    parts = [Box((n, 0), (1, 2)) for n in range(5000)]
    from ucformat.drawing import draw_boxes

    many = draw_boxes("w", (5000, 2), parts, {})
    assert "5,000 parts, which are too many to be drawn" in label(many)
    assert rectangles(many, of_ranks=False) == []


def test_a_tensor_of_very_many_rows_takes_no_memory_to_draw() -> None:
    from ucformat.drawing import draw_boxes

    shape = (10**7, 2, 1)
    tracemalloc.start()
    try:
        draw_boxes("w", shape, [Box((0, 0, 0), (10**7, 1, 1))], {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def test_ipython_completes_names_and_states(tmp_path: Path) -> None:
    completer = pytest.importorskip("IPython.core.completer", reason="needs pip install ipython")
    shells = pytest.importorskip("IPython.core.interactiveshell")

    arrays = {
        (name, s): random_array((2,), "float32")
        for name in ("model.up.weight", "model.down.weight")
        for s in ("master", "exp_avg")
    }
    shell = shells.InteractiveShell()
    shell.user_ns["ck"] = universal(tmp_path / "ck", arrays)

    def offered(text: str) -> set[str]:
        with completer.provisionalcompleter():
            return {c.text.strip("'") for c in shell.Completer.completions(text, len(text))}

    assert offered("ck['model.") >= {"model.up.weight", "model.down.weight"}
    assert offered("ck['model.up.weight', 'ex") == {"exp_avg"}
    shown_as: Any = shell.display_formatter
    data, _ = shown_as.format(shell.user_ns["ck"]["model.up.weight"])
    assert "model.up.weight" in data["text/html"]
