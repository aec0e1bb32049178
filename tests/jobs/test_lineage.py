"""What is made of a checkpoint says truly what it is to it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.fakes import FakeSource, random_array
from tests.jobs.conftest import foreign
from ucformat.checkpoint import Checkpoint
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.catalog.catalog import Catalog

MEAN = {"mean": r"/m\.(\d+)\.w/", "into": "w"}
NARROW = {"cast": "*", "dtype": "bfloat16"}
WIDE = {"cast": "*", "dtype": "float64"}


def models() -> Checkpoint:
    arrays: dict[tuple[str, str], Any] = {
        (f"m.{i}.w", "weight"): random_array((4, 3), "float32", i) for i in range(3)
    }
    return Checkpoint(FakeSource.write(MemoryStore(f"edges-{uuid.uuid4().hex}"), arrays, step=1))


@pytest.mark.parametrize(
    ("views", "kinds"),
    [
        ([], ["convert"]),
        ([[{"rename": r"/m\.(\d+)\.w/", "to": r"n.\1"}]], ["convert"]),
        ([[WIDE]], ["convert"]),
        ([[NARROW]], ["quantize"]),
        ([[WIDE], [NARROW]], ["quantize"]),
        ([[MEAN]], ["average"]),
        ([[MEAN], [{"rename": "w", "to": "v"}]], ["average"]),
        ([[MEAN, NARROW]], ["average", "quantize"]),
        ([[{"cast": "m.0.w", "dtype": "bfloat16"}, {"drop": "m.0.w"}]], ["convert"]),
    ],
)
def test_through_views(
    catalog: Catalog, tmp_path: Path, views: list[Any], kinds: list[str]
) -> None:
    ck = models()
    seen = ck
    for steps in views:
        seen = seen.view(steps)
    made = ucformat.convert(seen, tmp_path / "run7" / "1")
    assert [(e.kind, e.url, e.id) for e in made.manifest.lineage] == [
        (k, ck.home, ck.id) for k in kinds
    ]
    catalog.record(made.manifest, made.url)
    assert sorted(e.kind for e in catalog.lineage(made.id).edges) == kinds


def test_as_arrays_virtual_and_materialised(catalog: Catalog, tmp_path: Path) -> None:
    tag = foreign(tmp_path / "ds")
    virtual = ucformat.convert(tag, tmp_path / "v" / "5", virtual=True)
    arrays = ucformat.materialize(virtual, tmp_path / "a" / "5")
    for made in (virtual, arrays):
        assert {e.kind for e in made.manifest.lineage} == {"convert"}
    narrow = ucformat.materialize(arrays.view([NARROW]), tmp_path / "n" / "5")
    assert "quantize" in {e.kind for e in narrow.manifest.lineage}
    assert narrow.manifest.lineage[-1].id == arrays.id
