"""Drawings of pages, as SVG whose colours are those of the style sheet."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ucformat.drawing import colour_of, draw_boxes
from ucformat.errors import UsageError
from ucformat.geometry.box import Box
from ucformat.texts import clean, count, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Points = Sequence[Sequence[float]]

_MOST_POINTS = 400  # of a curve


def _svg(width: float, height: float, *parts: str, label: str = "", kind: str = "") -> Markup:
    """A drawing; without a label it is hidden from screen readers, for whom the text beside it tells the same."""
    described = (
        Markup('role="img" aria-label="{}"').format(label)
        if label
        else Markup('aria-hidden="true"')
    )
    start = Markup('<svg viewBox="0 0 {:g} {:g}" width="{:g}" height="{:g}" class="{}" {}>').format(
        width, height, width, height, kind, described
    )
    return start + Markup("").join(parts) + Markup("</svg>")


def _thinned(points: Points) -> list[tuple[float, float]]:
    """So many points that a curve shows no fewer: of each group the lowest and the highest."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if len(finite) <= _MOST_POINTS:
        return finite
    size = math.ceil(2 * len(finite) / _MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for at in range(0, len(finite), size):
        group = finite[at : at + size]
        kept += sorted({min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])})
    return kept


def _scaled(
    points: Points, left: float, top: float, width: float, height: float
) -> list[tuple[float, float]]:
    """The places of points in a rectangle."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    dx, dy = (max(xs) - min(xs)) or 1.0, (max(ys) - min(ys)) or 1.0
    return [
        (left + width * ((x - min(xs)) / dx), top + height * (1 - (y - min(ys)) / dy))
        for x, y in points
    ]


def _curve(places: Points) -> Markup:
    if len(places) == 1:
        return Markup('<circle class="point" cx="{:.1f}" cy="{:.1f}" r="2"/>').format(*places[0])
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return Markup('<path class="curve" d="M{}"/>').format(path)


def sparkline(points: Points) -> Markup:
    """A curve without axes."""
    thinned = _thinned(points)
    if not thinned:
        return Markup("")
    return _svg(90, 22, _curve(_scaled(thinned, 2, 2, 86, 18)), kind="spark")


def plot(name: str, points: Points) -> Markup:
    """A curve with its axes."""
    thinned = _thinned(points)
    if not thinned:
        return Markup("")
    left, top, width, height = 62, 8, 280, 120
    xs, ys = [x for x, _ in thinned], [y for _, y in thinned]
    text = Markup('<text x="{:g}" y="{:g}" text-anchor="{}" class="faint">{}</text>').format
    return _svg(
        left + width + 12,
        top + height + 24,
        Markup('<path class="axis" d="M{0} {1}V{2}H{3}"/>').format(
            left - 4, top, top + height + 4, left + width
        ),
        text(left - 8, top + 8, "end", f"{max(ys):.4g}"),
        text(left - 8, top + height + 2, "end", f"{min(ys):.4g}") if max(ys) > min(ys) else "",
        text(left, top + height + 18, "start", f"{min(xs):,.0f}"),
        text(left + width, top + height + 18, "end", f"{max(xs):,.0f}")
        if max(xs) > min(xs)
        else "",
        _curve(_scaled(thinned, left, top, width, height)),
        label=f"{shorten(clean(name), 60)}: from {ys[0]:.4g} at step {xs[0]:,.0f} "
        f"to {ys[-1]:.4g} at step {xs[-1]:,.0f}, between {min(ys):.4g} and {max(ys):.4g}",
    )


def bars(files: Sequence[Mapping[str, Any]], total: int) -> Markup:
    """How the bytes of a checkpoint are spread over its files: a strip with a part for each."""
    width, at, parts = 640.0, 0.0, []
    for i, file in enumerate(files):
        share = width * file["bytes"] / total if total else 0.0
        if share >= 0.25:
            parts.append(
                Markup(
                    '<rect class="piece" fill="{}" x="{:.2f}" y="0" width="{:.2f}" height="18"/>'
                ).format(colour_of(i), at, share)
            )
        at += share
    rest = (
        Markup('<rect class="cell" x="{:.2f}" y="0" width="{:.2f}" height="18"/>').format(
            at, width - at
        )
        if width - at > 0.5
        else ""
    )
    label = f"{count(len(files))} files by their bytes; the table below has the numbers"
    return _svg(width, 18, *parts, rest, label=label)


def neighbourhood(graph: Mapping[str, Any]) -> Markup:
    """A checkpoint between those that it was made from, on the left, and those made from it."""
    columns: dict[int, list[Mapping[str, Any]]] = {}
    for node in graph["nodes"]:
        columns.setdefault(node["distance"], []).append(node)
    width, gap, height = 170.0, 80.0, 34.0
    first = min(columns)
    tall = max(map(len, columns.values()))
    places: dict[str, tuple[float, float]] = {}
    boxes: list[str] = []
    for distance, nodes in columns.items():
        x = 2 + (distance - first) * (width + gap)
        for i, node in enumerate(nodes):
            y = 2 + (tall - len(nodes)) * (height + 10) / 2 + i * (height + 10)
            places[node["key"]] = (x, y)
            boxes.append(_node(node, x, y, width, height))
    lines = []
    for edge in graph["edges"]:
        (px, py), (cx, cy) = places[edge["parent"]], places[edge["child"]]
        x, y, to, at = px + width, py + height / 2, cx, cy + height / 2
        middle = (x + to) / 2
        lines.append(
            Markup(
                '<path class="edge{}" d="M{:g} {:g}C{:g} {:g} {:g} {:g} {:g} {:g}"><title>{}</title></path>'
            ).format(
                " needs" if edge["depends"] else "",
                *(x, y, middle, y, middle, at, to, at),
                shorten(clean(edge["label"]), 80),
            )
        )
        lines.append(
            Markup('<text class="faint" x="{:g}" y="{:g}" text-anchor="middle">{}</text>').format(
                middle, (y + at) / 2 - 4, shorten(clean(edge["kind"]), 12)
            )
        )
    return _svg(
        4 + len(columns) * width + (len(columns) - 1) * gap,
        4 + tall * (height + 10) - 10,
        *lines,
        *boxes,
        kind="lineage",
    )


def _node(node: Mapping[str, Any], x: float, y: float, width: float, height: float) -> Markup:
    return Markup(
        '<rect class="node{}" x="{:g}" y="{:g}" width="{:g}" height="{:g}" rx="3"/>'
        '<text x="{:g}" y="{:g}">{}</text><text class="faint" x="{:g}" y="{:g}">{}</text>'
    ).format(
        " here" if node["distance"] == 0 else "",
        *(x, y, width, height, x + 6, y + 14, shorten(clean(node["name"]), 23)),
        *(x + 6, y + 28, shorten(node["state"] or "not in the catalog", 26)),
    )


def boxes(name: str, shape: Sequence[int], picture: Mapping[str, Any]) -> Markup:
    """The boxes in which a tensor is stored, with those of a layout's ranks over them."""
    chunks, ranks = (
        [_box(c) for c in picture["chunks"]],
        {_box(p): p["ranks"] for p in picture["pieces"]},
    )
    others = picture["stored"] - len(chunks)
    label = shorten(clean(name), 60)
    try:
        drawn = draw_boxes(
            label, shape, chunks, ranks, others=others, undrawn=picture["undrawn"], captioned=False
        )
    except UsageError as error:
        return Markup('<p class="faint">Not drawn: {}.</p>').format(error.message)
    return Markup(str(drawn))  # noqa: S704 - it escapes what it shows


def _box(place: Mapping[str, Sequence[int]]) -> Box:
    return Box(tuple(place["start"]), tuple(place["shape"]))


def heat(saves: Sequence[Mapping[str, Any]], member: str, title: str) -> Markup:
    """The times of ranks: a column for each save, a row for each rank that one of them recorded."""
    times = [{w["rank"]: w[member] for w in save["writers"]} for save in saves]
    ranks = sorted({rank for of_save in times for rank in of_save})
    most = max(time for of_save in times for time in of_save.values())
    left, wide, high = 54, 22, 14
    cell = Markup(
        '<rect class="{}" fill-opacity="{:.2f}" x="{:g}" y="{:g}" width="{:g}" height="{:g}">'
        "<title>rank {}, {}: {:.3g} s</title></rect>"
    ).format
    text = Markup('<text class="faint" x="{:g}" y="{:g}" text-anchor="{}">{}</text>').format
    parts = []
    for y, rank in enumerate(ranks):
        parts.append(text(left - 6, y * high + 11, "end", f"rank {rank}"))
        for x, (of_save, save) in enumerate(zip(times, saves, strict=True)):
            if rank in of_save:
                heat_of = of_save[rank] / most if most > 0 else 0.0
                name = shorten(clean(save["name"]), 40)
                place = (left + x * wide, y * high, wide - 1, high - 1)
                parts.append(cell("heat", 0.06 + 0.94 * heat_of, *place, rank, name, of_save[rank]))
    first, last = (shorten(clean(save["name"]), 20) for save in (saves[0], saves[-1]))
    below = first if len(saves) == 1 else f"{first} to {last}"
    parts.append(text(left, len(ranks) * high + 13, "start", below))
    label = f"{title}: {count(len(ranks))} ranks in {count(len(saves))} saves, at most {most:.3g} s"
    width = left + max(len(saves) * wide, 240) + 4
    return _svg(width, len(ranks) * high + 20, *parts, label=label, kind="grid")


def swatch(rank: int) -> Markup:
    """The colour of a rank."""
    return Markup(
        '<svg viewBox="0 0 10 10" width="10" height="10" class="swatch" aria-hidden="true">'
        '<rect fill="{}" width="10" height="10"/></svg>'
    ).format(colour_of(rank))


def histogram(numbers: Mapping[str, Any]) -> Markup:
    """How many of a sample's elements have which values."""
    counts = numbers["histogram"]
    width, height, most = 12, 90, max(counts)
    rect = Markup('<rect class="bar" x="{:g}" y="{:.2f}" width="{:g}" height="{:.2f}"/>').format
    text = Markup('<text class="faint" x="{:g}" y="{:g}" text-anchor="{}">{}</text>').format
    low, high = f"{numbers['minimum']:.4g}", f"{numbers['maximum']:.4g}"
    bars_ = [
        rect(i * width, height - height * n / most, width - 1, height * n / most)
        for i, n in enumerate(counts)
    ]
    total = len(counts) * width
    return _svg(
        total,
        height + 18,
        *bars_,
        text(0, height + 14, "start", low),
        text(total, height + 14, "end", high),
        label=f"Histogram of the sample from {low} to {high}",
    )
