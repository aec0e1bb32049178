"""64 ranks' checkpoint read by 64 ranks of other layouts: each byte once."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from bench import paper
from bench.paper_ranks import many_ranks

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

RANKS = 64


def test_every_byte_is_read_once_over_all_ranks(tmp_path: Path) -> None:
    found = list(islice(many_ranks(tmp_path, RANKS, hidden=102, layers=1), 2))
    assert [c.target.split(",")[0] for c in found] == ["ZeRO 3", "FSDP2"]
    files = len(list(tmp_path.glob("global_step*/*.pt")))
    assert files == 2 * RANKS
    for cell in found:
        assert cell.wrong is None
        assert cell.ranks == RANKS
        assert cell.needed <= cell.read <= 1.02 * cell.needed
        assert cell.planning <= files * (64 << 10)


def test_other_numbers_of_ranks_and_zero_1(tmp_path: Path) -> None:
    for ranks in (1, 7):
        assert [c.wrong for c in many_ranks(tmp_path / str(ranks), ranks, hidden=30, layers=1)] == [
            None
        ] * 3


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert paper.main(["--ranks", "3"]) == 0
    assert "| 3 ranks of ZeRO 3, read as" in capsys.readouterr().out
