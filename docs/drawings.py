"""Draw docs/images: `python docs/drawings.py`.

The boxes are those of a checkpoint that is written for it, of a layout bound to it, and of the plan
of a rank. A test draws them again and compares.
"""

from __future__ import annotations

import html
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import ucformat
from ucformat.geometry.tensor import Key, single_extents
from ucformat.testing import checkpoint_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.geometry.box import Box

IMAGES = Path(__file__).parent / "images"
SHAPE = (12, 16)
KEY = Key("layers.0.up_proj.weight", "weight")
CELL = 18  # pixels of an element
COLOURS = ("#4c78a8", "#e08a2e", "#54a24b", "#b279a2")
SAVED = ucformat.Layout(
    mesh={"dp": 2, "tp": 2},
    rules=[{"match": "*", "place": [{"shard": 0, "over": "tp"}]}],
    data=[{"match": "*", "place": [{"flat": "tensor", "over": "dp"}]}],
)
WANTED = ucformat.Layout(
    mesh={"tp": 4}, rules=[{"match": "*", "place": [{"shard": 1, "over": "tp"}]}]
)


def held(layout: ucformat.Layout, checkpoint: ucformat.Checkpoint) -> list[tuple[Box, str, str]]:
    """The boxes that the ranks of a layout hold: each with its label and colour."""
    bound = layout.bind(checkpoint.source.metadata.tensor_list)
    return [
        (piece.box, f"rank {rank}", COLOURS[rank % len(COLOURS)])
        for rank in range(bound.ranks)
        for piece in bound.pieces(KEY, rank)
    ]


def stored(checkpoint: ucformat.Checkpoint) -> list[tuple[Box, str, str]]:
    """The chunks of the tensor."""
    return [(e.box, "", "none") for e in single_extents(checkpoint.source.extents(KEY))]


def intersected(
    parts: Iterable[tuple[Box, str, str]], pieces: Iterable[tuple[Box, str, str]]
) -> list[tuple[Box, str, str]]:
    """What the pieces need of each part, in the colours of the pieces."""
    pieces = list(pieces)
    both = [
        (part.intersect(box), label, colour)
        for part, _, _ in parts
        for box, label, colour in pieces
    ]
    return [(box, "", colour) for box, _, colour in both if box is not None]


def panel(title: str, boxes: Iterable[tuple[Box, str, str]], left: int) -> str:
    """The tensor with boxes in it, as SVG."""
    parts = [f'<text x="{left}" y="16" class="title">{html.escape(title)}</text>']
    for box, label, colour in boxes:
        x, y = left + box.start[1] * CELL, 26 + box.start[0] * CELL
        width, height = box.shape[1] * CELL, box.shape[0] * CELL
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}" fill-opacity=".5" '
            'stroke="#808080"/>'
        )
        if label:
            parts.append(f'<text x="{x + 4}" y="{y + 13}">{html.escape(label)}</text>')
    edge = f'width="{SHAPE[1] * CELL}" height="{SHAPE[0] * CELL}" fill="none" stroke="#808080" stroke-width="2"'
    return "\n".join([*parts, f'<rect x="{left}" y="26" {edge}/>'])


def picture(*panels: tuple[str, Iterable[tuple[Box, str, str]]]) -> str:
    """Panels beside each other, on white, so that they can be read on dark pages, too."""
    step = SHAPE[1] * CELL + 24
    width, height = len(panels) * step, SHAPE[0] * CELL + 38
    drawn = [panel(title, boxes, 12 + i * step) for i, (title, boxes) in enumerate(panels)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        "<style>text{font:11px sans-serif;fill:#222}.title{font-size:13px;font-weight:bold}</style>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
    )
    return "\n".join([head, *drawn, "</svg>\n"])


def pictures() -> dict[str, str]:
    """The text of each file."""
    with tempfile.TemporaryDirectory() as folder:
        array = np.arange(SHAPE[0] * SHAPE[1], dtype="float32").reshape(SHAPE)
        source = checkpoint_of(Path(folder) / "source", {tuple(KEY): array})
        checkpoint = ucformat.convert(source, Path(folder) / "universal", chunk_bytes=128)
        before, chunks, after = (
            held(SAVED, checkpoint),
            stored(checkpoint),
            held(WANTED, checkpoint),
        )
        one = [piece for piece in after if piece[1] == "rank 1"]
        return {
            "in_place.svg": picture(
                ("extents: in the files of 4 ranks", before),
                ("pieces under tp=4", after),
                ("what rank 1 reads", before_of_one(before, one)),
            ),
            "chunks.svg": picture(
                ("extents: chunks of a Zarr array", chunks),
                ("pieces under tp=4", after),
                ("what rank 1 reads", [*chunks, *intersected(chunks, one)]),
            ),
        }


def before_of_one(
    before: list[tuple[Box, str, str]], one: list[tuple[Box, str, str]]
) -> list[tuple[Box, str, str]]:
    """The extents in outline, and what one rank needs of each."""
    outlines = [(box, label, "none") for box, label, _ in before]
    return [*outlines, *intersected(before, one)]


def main() -> None:
    """Write the files."""
    os.environ["UCP_CATALOG"] = "none"
    IMAGES.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (IMAGES / name).write_text(text)
        sys.stdout.write(f"{IMAGES / name}\n")


if __name__ == "__main__":
    main()
