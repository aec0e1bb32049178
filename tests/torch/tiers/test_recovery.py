"""Real processes that stand for nodes: killed, some nodes lost, and restored in another world, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.torch.ranks import KILLED, Ranks
from tests.torch.tiers.judge import survivors

if TYPE_CHECKING:
    from pathlib import Path

RANKS = Ranks("tests.torch.tiers.life")
NODES = [f"rack{n // 2}/node{n}" for n in range(4)]
TIERS = {"keep": 2, "replicas": 1, "slow": 4}
#: Ranks on each of the nodes, and a layout.
WORLDS: list[tuple[list[int], dict[str, Any]]] = [
    ([0, 1, 2, 3], {}),
    ([0, 0, 1, 1], {}),
    ([0, 1, 2], {}),
    ([0, 1], {"tp": 2}),
    ([0, 0, 1, 1], {"tp": 2}),
    ([0, 1, 2, 3], {"replicas": 2}),
    ([0, 1], {"data": "ddp"}),
    ([0], {}),
]


def folder_of(place: Path, node: str) -> Path:
    return place / "nodes" / node.replace("/", "-")


class Rounds:
    """Launches one after another, in which a training goes on from what survived the one before."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.chance = place, random.Random(f"rounds {seed}")
        self.seed = seed
        self.launch = 0
        self.nodes = list(NODES)

    def run(self, **options: Any) -> dict[str, Any]:
        """One launch in a world of the nodes that there are; what it restored, compared with what survived."""
        self.launch += 1
        numbers, layout = options.pop("world", None) or self.chance.choice(WORLDS)
        names = self.chance.sample(self.nodes, len(set(numbers)))
        folders = [folder_of(self.place, name) for name in names]
        expected = survivors([f for f in folders if f.exists()], self.place / "slow")
        outcome = RANKS.run(
            "live",
            len(numbers),
            self.place,
            nodes=[names[n] for n in numbers],
            layout=layout,
            seed=100 * self.seed + self.launch,
            tiers=TIERS,
            **options,
        )
        told: dict[str, Any] = json.loads((self.place / "told.json").read_text())
        log = (self.place / "rank-0.log").read_text()
        about = f"launch {self.launch} on {names}, {layout}, expected {expected[:2]}, {told}\n{log}"
        assert told["step"] == (expected[0][1] if expected else None), about
        if expected:
            assert told["same"], about
            # of two checkpoints of one step the newer
            token = json.loads((self.place / "truth" / f"{told['token']}.json").read_text())
            assert token, about
        if options.get("die") is not None:
            assert outcome == [KILLED] * len(numbers), about
            time.sleep(0.3)  # the writing processes end when they see that their ranks have
        return told

    def lose(self, count: int) -> None:
        """Remove the folders of some nodes."""
        there = [n for n in self.nodes if folder_of(self.place, n).exists()]
        for name in self.chance.sample(there, min(count, len(there))):
            shutil.rmtree(folder_of(self.place, name))


def test_a_node_is_lost_and_all_is_there_under_another_layout(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, 0)
    assert rounds.run(world=([0, 1], {}), steps=3, die=0.5)["step"] is None
    shutil.rmtree(folder_of(tmp_path, next(n for n in NODES if folder_of(tmp_path, n).exists())))
    rounds.nodes = [n for n in NODES if folder_of(tmp_path, n).exists()]
    assert rounds.run(world=([0], {}), steps=0)["step"] == 3


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(25))
def test_rounds(tmp_path: Path, seed: int) -> None:
    """Four rounds each: a hundred in all, of which none may be wrong."""
    rounds = Rounds(tmp_path, seed)
    restored = []
    for _ in range(5):
        told = rounds.run(
            steps=rounds.chance.randrange(1, 7),
            die=rounds.chance.uniform(0, 0.4),
            asynchronous=rounds.chance.random() < 0.5,
            verify=rounds.chance.choice(["full", "quick"]),
        )
        restored.append(told["step"])
        rounds.lose(rounds.chance.choice([0, 1, 1, 2]))
    assert restored[0] is None
