"""Public reports of states that were wrong in silence: how each comes about, and what a certificate says of it.

Each test first shows that nothing else tells. What the certificates say is printed in
docs/guides/certify.md.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.torch.ranks import Ranks
from tests.torch.test_guides import ROOT, follow

if TYPE_CHECKING:
    from pathlib import Path

GUIDE = "certify.md"
PROGRAM = "tests.torch.reports_program"
RANKS = Ranks(PROGRAM)


def printed(heading: str) -> str:
    """What the guide prints below a heading."""
    _, _, text = (ROOT / "docs" / "guides" / GUIDE).read_text().partition(f"\n### {heading}\n")
    section = re.split("^##", text, maxsplit=1, flags=re.MULTILINE)[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    (block,) = (block for language, block in blocks if not language)
    return str(block)


def said(words: str, folder: Path) -> str:
    """The words of a certificate as in the guide: without the folder, and without the hint."""
    return words.replace(f"{folder}/", "").partition("  hint: ")[0]


def test_stages_that_number_their_layers_from_zero(tmp_path: Path) -> None:
    results = RANKS.run("stages", 2, tmp_path)
    assert [r["loaded"] for r in results] == [[1, 2], [1, 2]]
    for r in results:
        assert said(r["words"], tmp_path) == printed("Stages that number their layers from zero")
        assert "held by no rank: layers.2.weight (weight)" in r["without names"]
        assert "layers.0.weight (weight) has a different value on rank 1" in r["refused"]
        assert r["restored"]


def test_digests_that_agree_on_half_of_the_parameters(tmp_path: Path) -> None:
    for r in RANKS.run("refit", 2, tmp_path):
        assert (r["digests agree"], r["coverage"]) == (True, "51%")
        heading = "Half of the parameters, and all digests agree"
        assert said(r["words"], tmp_path) == printed(heading)
        assert "layers.0.weight (weight) has a different value on rank 1" in r["refused"]


def test_an_adapter_that_reverts_on_all_ranks_but_one(tmp_path: Path) -> None:
    for r in Ranks(PROGRAM, ["peft"]).run("adapter", 3, tmp_path):
        assert r["unexpected"] == []
        heading = "An adapter that reverts on all ranks but one"
        assert said(r["words"], tmp_path) == printed(heading)
        assert "only a part of a checkpoint" in r["refused"]
        assert r["as it was trained"]
        assert r["restored"]


def test_moments_that_are_dropped(tmp_path: Path) -> None:
    for r in RANKS.run("dropped_moments", 2, tmp_path):
        assert r["same output"]
        assert said(r["words"], tmp_path) == printed("Moments that are dropped")
        assert r["restored"]
        assert r["states"] == 2


def test_moments_of_another_rank(tmp_path: Path) -> None:
    for r in RANKS.run("moments_of_rank_0", 2, tmp_path):
        assert said(r["words"], tmp_path) == printed("Moments of another rank")
        assert "only a part of a checkpoint" in r["refused"]
        assert r["as they were saved"]
        assert r["restored"]


@pytest.mark.matrix
def test_a_trainer_on_another_number_of_ranks(tmp_path: Path) -> None:
    modules = ("accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama")
    ranks = Ranks(PROGRAM, modules)
    files = ranks.run("trained", 2, tmp_path)[0]
    assert {"optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"} < {*files}
    assert all(certified(r) for r in ranks.run("resumed", 2, tmp_path))
    (alone,) = ranks.run("resumed", 1, tmp_path)
    step, words, refused = alone["Trainer run/checkpoint-3"]
    assert (step, refused) == (4, "")
    assert said(words, tmp_path) == printed("A Trainer on another number of ranks")
    step, _, refused = alone["CertifiedTrainer run/checkpoint-3"]
    assert step == 3
    assert "where rng_state.pth is not" in refused
    assert alone["CertifiedTrainer universal/step-3"] == (4, "", "")


def certified(resumed: dict[str, Any]) -> bool:
    return all(result == (4, "", "") for result in resumed.values())


def test_an_average_that_is_not_loaded(tmp_path: Path) -> None:
    (output,) = follow(GUIDE, tmp_path)
    assert output == printed("An average that is not loaded")
