"""Real processes, real `kill -9`: a purge that is killed is ended by the next one, and takes nothing else with it."""

from __future__ import annotations

import random
import shutil
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.fakes import FakeSource, random_array
from tests.jobs.conftest import universal
from tests.jobs.forks import Forks
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import NotACheckpoint, NotFound
from ucformat.jobs.gc import collect
from ucformat.jobs.register import register
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog

INSTANTS = 20
WORK = """
from tempfile import TemporaryDirectory
from ucformat.catalog.catalog import Catalog
from ucformat.jobs.gc import collect
with TemporaryDirectory() as folder, Catalog(f"{folder}/catalog.db") as empty:
    collect(empty, apply=True)  # imports what is imported late
def work(url):
    with Catalog(url) as catalog:
        collect(catalog, apply=True)
"""


def files(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}


@pytest.mark.matrix
def test_kill_9_at_any_instant(catalog: Catalog, tmp_path: Path) -> None:
    arrays = {(f"t{i}", "weight"): random_array((3, 5), "float32", i) for i in range(40)}
    template = Checkpoint(FakeSource.write(MemoryStore(f"crash-{tmp_path.name}"), arrays))
    ids = [ucformat.convert(template, tmp_path / "kept" / f"{n}").id for n in range(2)]
    places = [tmp_path / "run7" / f"{n}" for n in range(2)]
    other = universal(tmp_path / "run7" / "other", 9)
    catalog.record(other.manifest, other.url)
    catalog.tag(other.id, "good")
    stays = files(Path(other.url))
    seen = {"whole": 0, "going": 0, "gone": 0}
    chance = random.Random(7)
    url = str(tmp_path / "ours.db")
    with Forks(WORK) as forks:
        whole = whole_at = gone_at = 0.0
        for instant in range(-2, INSTANTS):
            for n, place in enumerate(places):
                shutil.copytree(tmp_path / "kept" / f"{n}", place)
            register([str(p) for p in places], catalog)
            for id_ in ids:
                catalog.note(id_, "there is a document")
            catalog.delete(*ids, grace=timedelta(0))
            if instant < 0:  # it is only measured
                assert forks.run(url)[0] == 0
                whole = gone_at = forks.seconds
            else:  # every other one between the last before it began and the first after it ended
                after = (
                    chance.uniform(0.9 * whole_at, 1.1 * gone_at)
                    if instant % 2
                    else chance.uniform(0, 1.1 * whole)
                )
                assert forks.run(url, kill_after=after)[0] in (0, -9)
                before = dict(seen)
            for id_, place in zip(ids, places, strict=True):
                try:
                    ucformat.verify(open_checkpoint(place)).raise_if_damaged()
                    seen["whole"] += 1
                except (NotACheckpoint, NotFound):
                    state = catalog.get(id_).state
                    assert state in ("purging", "purged")
                    seen["gone" if state == "purged" else "going"] += 1
            if instant >= 0 and seen["whole"] == before["whole"] + 2:
                whole_at = max(whole_at, after)
            if instant >= 0 and seen["gone"] == before["gone"] + 2:
                gone_at = min(gone_at, after)
            done = collect(catalog, apply=True)
            assert done.failures == ()
            assert [catalog.get(i).state for i in ids] == ["purged"] * 2
            assert not any(p.exists() for p in places)
            assert files(Path(other.url)) == stays
    assert catalog.get(other.id).state == "committed"
    assert min(seen.values()) > 0, seen
