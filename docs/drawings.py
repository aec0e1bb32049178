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
from ucformat.drawing import draw_boxes
from ucformat.geometry.tensor import Key, single_extents
from ucformat.testing import checkpoint_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ucformat.geometry.box import Box

    RankBoxes = Mapping[Box, list[int]]

IMAGES = Path(__file__).parent / "images"
SHAPE = (12, 16)
KEY = Key("layers.0.up_proj.weight", "weight")
WIDTH, HEIGHT = 288, 216  # pixels of a tensor
SAVED = ucformat.Layout(
    mesh={"dp": 2, "tp": 2},
    rules=[{"match": "*", "place": [{"shard": 0, "over": "tp"}]}],
    data=[{"match": "*", "place": [{"flat": "tensor", "over": "dp"}]}],
)
WANTED = ucformat.Layout(
    mesh={"tp": 4}, rules=[{"match": "*", "place": [{"shard": 1, "over": "tp"}]}]
)


def rank_boxes(layout: ucformat.Layout, checkpoint: ucformat.Checkpoint) -> RankBoxes:
    """The boxes that the ranks of a layout hold, each with its ranks."""
    bound = layout.bind(checkpoint.source.metadata.tensor_list)
    boxes: dict[Box, list[int]] = {}
    for rank in range(bound.ranks):
        for piece in bound.pieces(KEY, rank):
            boxes.setdefault(piece.box, []).append(rank)
    return boxes


def stored(checkpoint: ucformat.Checkpoint) -> list[Box]:
    """The chunks of the tensor."""
    return [extent.box for extent in single_extents(checkpoint.source.extents(KEY))]


def read(parts: Iterable[Box], pieces: RankBoxes) -> RankBoxes:
    """What the pieces need of each part."""
    both = {part.intersect(box): ranks for part in parts for box, ranks in pieces.items()}
    return {box: ranks for box, ranks in both.items() if box is not None}


def panel(title: str, parts: Iterable[Box], pieces: RankBoxes, left: int) -> str:
    """The tensor with boxes in it, as SVG."""
    boxes = draw_boxes(title, SHAPE, parts, pieces, width=WIDTH, captioned=False)
    edge = f'width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#808080" stroke-width="2"'
    return (
        f'<text x="{left}" y="16" class="title">{html.escape(title)}</text>\n'
        f'<g transform="translate({left} 26)">{boxes}</g>\n'
        f'<rect x="{left}" y="26" {edge}/>'
    )


def picture(*panels: tuple[str, Iterable[Box], RankBoxes]) -> str:
    """Panels beside each other, on white, so that they can be read on dark pages, too."""
    step = WIDTH + 24
    width, height = len(panels) * step, HEIGHT + 38
    drawn = [panel(*each, left=12 + i * step) for i, each in enumerate(panels)]
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
            rank_boxes(SAVED, checkpoint),
            stored(checkpoint),
            rank_boxes(WANTED, checkpoint),
        )
        one = {box: ranks for box, ranks in after.items() if ranks == [1]}
        return {
            "in_place.svg": picture(
                ("extents: in the files of 4 ranks", (), before),
                ("pieces under tp=4", (), after),
                ("what rank 1 reads", before, read(before, one)),
            ),
            "chunks.svg": picture(
                ("extents: chunks of a Zarr array", chunks, {}),
                ("pieces under tp=4", (), after),
                ("what rank 1 reads", chunks, read(chunks, one)),
            ),
        }


def main() -> None:
    """Write the files."""
    os.environ["UCP_CATALOG"] = "none"
    IMAGES.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (IMAGES / name).write_text(text)
        sys.stdout.write(f"{IMAGES / name}\n")


if __name__ == "__main__":
    main()
