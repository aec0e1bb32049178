"""A universal checkpoint whose files are links to files elsewhere, which whoever may write there can make them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.jobs.conftest import universal
from ucformat.errors import UnsafeError
from ucformat.schema import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LEADS_OUT = "by a symbolic link that leads out of"


def _lead_out(file: Path, elsewhere: Path) -> None:
    """Move a file to another folder, and put a link in its place."""
    elsewhere.mkdir(parents=True, exist_ok=True)
    file.rename(elsewhere / file.name)
    file.symlink_to(elsewhere / file.name)


ACTS: list[Callable[[str, Path], object]] = [
    lambda url, _: ucformat.open(url)["w"].read(),
    lambda url, _: ucformat.open(url)["w"][:1],
    lambda url, to: ucformat.copy(url, str(to / "copy")),
    lambda url, to: ucformat.convert(url, str(to / "converted")),
]


@pytest.mark.parametrize("act", ACTS)
def test_what_leads_out_is_not_read(
    act: Callable[[str, Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "run" / "1"
    universal(place)
    for shard in [f for f in (place / "data").rglob("c/*") if f.is_file()] + [
        *(place / "data").rglob("c/*/*")
    ]:
        _lead_out(shard, tmp_path / "secret" / "-".join(shard.relative_to(place).parts))
    with pytest.raises(UnsafeError, match=LEADS_OUT) as caught:
        act(str(place), tmp_path)
    assert "UCP_ROOTS=" in str(caught.value.hint)
    monkeypatch.setenv("UCP_ROOTS", str(tmp_path / "secret"))
    act(str(place), tmp_path)


def test_a_manifest_that_leads_out_is_not_read(tmp_path: Path) -> None:
    place = tmp_path / "run" / "1"
    universal(place)
    _lead_out(place / MANIFEST, tmp_path / "secret")
    with pytest.raises(UnsafeError, match=LEADS_OUT):
        ucformat.open(place)
    assert json.loads((tmp_path / "secret" / MANIFEST).read_text())
    assert ucformat.open(place, roots=[str(tmp_path / "secret")])["w"].read().shape == (5, 7)
