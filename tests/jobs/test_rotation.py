"""What a training removes by itself: protected checkpoints stay, and the catalog knows of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

import ucformat
from ucformat.jobs.removal import discard

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two checkpoints in a catalog."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "own.db"))
    found = [tmp_path / "run" / "checkpoint-1", tmp_path / "run" / "checkpoint-2"]
    for number, place in enumerate(found):
        source = tmp_path / f"{number}.safetensors"
        save_file({"w": np.full(3, number, "float32")}, source)
        ucformat.convert(source, place)
    return found


def test_what_is_removed_is_found_no_more(places: list[Path]) -> None:
    with ucformat.Catalog() as catalog:
        ids = {e.url: e.id for e in catalog.find()}
        for url in ids:
            catalog.metric(str(url), {"loss": 1.0})
        assert discard(str(places[0]))
        assert [e.url for e in catalog.find("metric.loss < 2")] == [str(places[1])]
        gone = catalog.get(ids[str(places[0])])
        assert (gone.state, gone.urls) == ("purged", ())
        assert not places[0].exists()
        assert discard(str(places[0]))  # again


def test_a_copy_elsewhere_stays(places: list[Path], tmp_path: Path) -> None:
    ucformat.copy(places[0], tmp_path / "copy")
    assert discard(str(places[0]))
    with ucformat.Catalog() as catalog:
        assert str(tmp_path / "copy") in {e.url for e in catalog.find()}


@pytest.mark.parametrize("how", ["hold", "tag", "alias", "needed"])
def test_what_is_protected_stays_with_a_warning(
    places: list[Path], how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ucformat.Catalog() as catalog:
        if how == "hold":
            catalog.hold(str(places[0]), "paper")
        elif how == "tag":
            catalog.tag(str(places[0]), "released")
        elif how == "alias":
            catalog.alias("best", str(places[0]))
        else:
            (places[0] / "needed-by").mkdir()
            (places[0] / "needed-by" / f"{'0' * 32}.json").write_text("{}")
        caplog.clear()
        for _ in range(2):
            assert not discard(str(places[0]))
        assert caplog.text.count("is not removed: ") == 1
        assert ucformat.verify(places[0])
        assert len(catalog.find()) == 2
