"""What is found without a mend: that lines of `test_schedules` can fail. Apart, for two worlds cannot be at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.schedules.schedule import Player, parse
from tests.schedules.test_schedules import numbered
from tests.schedules.world import World
from ucformat.format.attempts import parse_record

if TYPE_CHECKING:
    from ucformat.schema.manifest import AttemptDoc


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
