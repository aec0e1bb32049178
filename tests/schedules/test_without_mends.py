"""What is found where the code is wrong: lines of `test_schedules` can fail. Apart, as there is one world at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.schedules.schedule import Player, parse
from tests.schedules.test_schedules import numbered
from tests.schedules.world import World
from ucformat.format.attempts import parse_record
from ucformat.jobs.removal import discard
from ucformat.torch.manager.steps import list_steps

if TYPE_CHECKING:
    from ucformat.schema.manifest import AttemptDoc
    from ucformat.torch.tiers.tiers import Tiers, _SlowTier


@pytest.mark.matrix
def test_what_was_mended_is_found_again_without_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is refused who goes on with an attempt that is being removed."""

    def unmarked(data: bytes) -> AttemptDoc | None:
        doc = parse_record(data)
        return doc and doc.model_copy(update={"removed": None})

    monkeypatch.setattr("ucformat.format.attempts.parse_record", unmarked)
    monkeypatch.setattr("ucformat.format.commit._refuse_removed", lambda *_: None)
    with World() as world:
        player = Player(world)
        (lost,) = player.play(
            parse(
                numbered(player, "gc:[write new/attempts/] resume:[write objects.json] gc resume")
            )
        ).complaints
    assert lost.startswith("lost memory://w/t/new: MissingData")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("without", "schedule", "place"),
    [
        ("jobs.increments.References.protect", "deltas:60 delete gc deltas", "t/b"),
        ("jobs.increments.References.protect", "experts delete gc", "t/b"),
        ("jobs.increments.References.protect", "window:40 delete gc window", "t/b"),
        ("jobs.increments.References.protect", "cut deltas gc", "t/c"),
        ("torch.tiers.copying.transfer", "launch", "u/r/step-00000005"),
    ],
)
def test_what_is_left_out_is_found(
    monkeypatch: pytest.MonkeyPatch, without: str, schedule: str, place: str
) -> None:
    """Nobody records that a base is needed, or no file of a rank is copied to a tier."""
    with World() as world:
        player = Player(world)
        monkeypatch.setattr(f"ucformat.{without}", lambda *_: None)
        complaints = player.play(parse(schedule)).complaints
    assert any(said.startswith(f"lost memory://w/{place}: ") for said in complaints)


@pytest.mark.matrix
def test_a_tier_that_keeps_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_all(_: Tiers, tier: _SlowTier) -> None:
        for step in list_steps(tier.url).steps:
            discard(step.url)

    with World() as world:
        player = Player(world)
        monkeypatch.setattr("ucformat.torch.tiers.tiers.Tiers._drop_old", drop_all)
        complaints = player.play(parse("launch")).complaints
    assert any(said.startswith("lost memory://w/u/r/step-00000005: ") for said in complaints)
