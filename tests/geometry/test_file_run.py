"""Files of equal boxes, against a list of the boxes."""

from __future__ import annotations

from tests.geometry.test_cut_piece import elements
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import FileRun, Piece, Tiles


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(elements(Piece(box, 0, row_major(box.shape, 1))).values())


def test_parts_of_every_box_along_the_run() -> None:
    width, files = 3, ("a", "b", "c", "d")
    for dim in (0, 1):
        start = tuple(4 if d == dim else 2 for d in range(2))
        shape = tuple(width if d == dim else 5 for d in range(2))
        run = FileRun(Tiles(Box(start, shape), "a", 100, (2, 2), 4, (80, 20)), dim, files)
        assert run.file == "a"
        assert run.box == Box(start, tuple(len(files) * width if d == dim else 5 for d in range(2)))
        for low in range(2, 15):
            for high in range(low + 1, 19):
                within = Box(
                    tuple(low if d == dim else 3 for d in range(2)),
                    tuple(high - low if d == dim else 1 for d in range(2)),
                )
                if not run.box.intersect(within):
                    continue
                needed = indices(within) & indices(run.box)
                listed = []
                for tiles, others in run.parts(within):
                    number = files.index(tiles.file)
                    assert (tiles.offset, tiles.chunk, tiles.steps) == (100, (2, 2), (80, 20))
                    assert tiles.box == run.tiles(number).box
                    assert list(others) == list(files[number + 1 : number + 1 + len(others)])
                    inside = {
                        len(needed & indices(run.tiles(number + n).box))
                        for n in range(1 + len(others))
                    }
                    assert len(inside) == 1, "the files of one part share the same part of the box"
                    assert inside != {0}
                    listed += [tiles.file, *others]
                assert sorted(listed) == [
                    f for n, f in enumerate(files) if needed & indices(run.tiles(n).box)
                ]
