"""The paper's 7 sources and 11 targets: every rank's every byte is right, and nothing else is read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from bench import paper
from bench.paper import Opened
from bench.paper_model import SOURCES, TARGETS, expected

if TYPE_CHECKING:
    from pathlib import Path

    from bench.paper_model import Degrees


@pytest.fixture(scope="module", params=SOURCES, ids=str)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(tmp_path_factory.mktemp("paper") / "ckpt", request.param)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_rank_of_the_target_has_its_bytes_and_reads_no_others(
    source: Opened, target: Degrees
) -> None:
    cell = source.cell(target)
    assert cell.wrong is None
    assert str(cell) == "1.00"
    assert cell.read <= 1.005 * cell.needed


def test_the_table_has_77_cells() -> None:
    assert (len(set(SOURCES)), len(set(TARGETS))) == (7, 11)


class TestItFindsErrors:
    @pytest.fixture
    def small(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(paper, "SOURCES", SOURCES[2:3])
        monkeypatch.setattr(paper, "TARGETS", TARGETS[-1:])
        return tmp_path

    def test_one_wrong_element_of_one_rank_is_a_wrong_cell(self, small: Path) -> None:
        opened, target = Opened(small / "ckpt", SOURCES[2]), TARGETS[-1]
        right = opened.truth.arrays[
            "language_model.encoder.layers.1.mlp.dense_h_to_4h.weight", "exp_avg"
        ]
        right[-1, -1] += 1
        cell = opened.cell(target)
        assert cell.wrong is not None
        assert "flat:0 (exp_avg) differs" in cell.wrong
        assert str(cell) == "≠"

    def test_the_command_says_so(
        self, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert paper.main([]) == 0
        out = capsys.readouterr().out
        assert f"| {SOURCES[2]} | 1.00     |" in out
        assert "1 of 1 bit-exact, on 8 ranks in total" in out
        monkeypatch.setattr(
            paper,
            "expected",
            lambda truth, target, rank: {**expected(truth, target, rank), ("x", "y"): 0},
        )
        assert paper.main(["--json"]) == 1
        told = capsys.readouterr()
        (cell,) = json.loads(told.out)
        assert cell["wrong"] == "rank 0: it holds, or should hold, [('x', 'y')]"
        assert f"{SOURCES[2]} -> {TARGETS[-1]}: rank 0" in told.err
