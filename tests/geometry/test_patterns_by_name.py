"""The paper's patterns under their names there, against slices that NumPy makes, in sizes that nothing divides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ucformat
from tests.fakes import FakeSource, random_array, same
from ucformat.checkpoint import Checkpoint
from ucformat.errors import LayoutError
from ucformat.storage.memory import MemoryStore

TP, CP = 3, 2
A = random_array((11, 7), "float32")


def by_rank(pattern: dict[str, Any]) -> list[np.ndarray | None]:
    """What each rank of tp and cp reads of `A`; None where it holds nothing of it."""
    ck = Checkpoint(FakeSource.write(MemoryStore("by-name"), {("w", "weight"): A}))
    rule = {"match": "w", "place": [pattern]}
    layout = ucformat.Layout.parse({"version": 1, "mesh": {"tp": TP, "cp": CP}, "rules": [rule]})
    layout.bind(ck.metadata.tensor_list).prove()
    return [ck.plan(layout, rank).execute().get(("w", "weight")) for rank in range(TP * CP)]


def chunk(a: np.ndarray, dim: int, at: int, degree: int = TP) -> np.ndarray:
    """As torch.chunk."""
    width = -(-a.shape[dim] // degree)
    return np.take(
        a, range(min(at * width, a.shape[dim]), min((at + 1) * width, a.shape[dim])), axis=dim
    )


def fused(at: int) -> np.ndarray:
    """Rows 0 to 5, 5 to 9 and 9 to 11, each sharded separately."""
    return np.concatenate([chunk(part, 0, at) for part in np.split(A, [5, 9])])


EXPECTED = [
    ({"pattern": "replicate"}, lambda _tp, _cp: A),
    ({"pattern": "partial", "over": "tp"}, lambda _tp, _cp: A),
    ({"pattern": "unique"}, lambda tp, cp: A if tp == cp == 0 else None),
    ({"pattern": "unique", "owner": 2, "over": "tp"}, lambda tp, _cp: A if tp == 2 else None),
    (
        {"pattern": "unique", "owner": 1, "over": ["tp", "cp"]},
        lambda tp, cp: A if (tp, cp) == (0, 1) else None,
    ),
    ({"pattern": "shard-V", "over": "tp"}, lambda tp, _cp: chunk(A, 0, tp)),
    ({"pattern": "shard-H", "over": "tp"}, lambda tp, _cp: chunk(A, 1, tp)),
    (
        {"pattern": "shard-V", "over": ["tp", "cp"]},
        lambda tp, cp: chunk(A, 0, tp * CP + cp, TP * CP),
    ),
    (
        {"pattern": "shard-Hy", "over": ["cp", "tp"], "dims": [1, 0]},
        lambda tp, cp: chunk(chunk(A, 1, cp, CP), 0, tp),
    ),
    ({"pattern": "shard-NC", "over": "tp", "parts": [5, 4, 2]}, lambda tp, _cp: fused(tp)),
    (
        {"pattern": "shard-NC", "over": "tp", "dims": [1], "parts": [[1, 3, 0], 3]},
        lambda tp, _cp: np.concatenate(
            [A[:, [(0,), (1, 2, 3), ()][tp]], A[:, 4 + tp : 5 + tp]], axis=1
        ),
    ),
]


@pytest.mark.parametrize(
    ("pattern", "expected"), EXPECTED, ids=lambda p: str(p) if isinstance(p, dict) else ""
)
def test_each_rank_holds_what_numpy_cuts(pattern: dict[str, Any], expected: Any) -> None:
    for rank, array in enumerate(by_rank(pattern)):
        cut = expected(*divmod(rank, CP))
        if cut is None or not cut.size:
            assert array is None or not array.size, rank
        else:
            assert array is not None
            assert same(array, np.ascontiguousarray(cut)), rank


@pytest.mark.parametrize("pattern", ["partial", "unique", "shard-V", "shard-H", "shard-NC"])
def test_a_pattern_is_what_it_stands_for(pattern: str) -> None:
    """Also as a source, where the values of a `partial` are averaged, and one owner is asked."""
    more = {
        "over": "tp",
        **(
            {"parts": [5, 6]}
            if pattern == "shard-NC"
            else {"owner": 1}
            if pattern == "unique"
            else {}
        ),
    }
    spelled = {
        "partial": {"partial": "mean", "over": "tp"},
        "unique": {"owner": 1, "over": "tp"},
        "shard-V": {"shard": 0, "over": "tp"},
        "shard-H": {"shard": 1, "over": "tp"},
        "shard-NC": {"shard": 0, "over": "tp", "parts": [5, 6]},
    }[pattern]
    parsed = [
        ucformat.Layout.parse(
            {"version": 1, "mesh": {"tp": TP}, "rules": [{"match": "w", "place": [place]}]}
        ).rules
        for place in ({"pattern": pattern, **more}, spelled)
    ]
    assert parsed[0] == parsed[1]


@pytest.mark.parametrize(
    ("pattern", "missing"),
    [
        ({"pattern": "shard-V"}, "needs `over`"),
        ({"pattern": "shard-H"}, "needs `over`"),
        ({"pattern": "shard-NC", "over": "tp"}, "needs `parts`"),
        ({"pattern": "shard-NC", "over": "tp", "parts": [5, 6], "dims": [0, 1]}, "for one dim"),
        ({"pattern": "shard-Hy", "over": ["tp", "cp"], "dims": [0]}, "needs `dims`"),
    ],
)
def test_what_a_pattern_needs_is_named(pattern: dict[str, Any], missing: str) -> None:
    with pytest.raises(LayoutError, match=missing):
        by_rank(pattern)
