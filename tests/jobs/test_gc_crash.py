"""Real processes, real `kill -9`: a purge that is killed is ended by the next one, and takes nothing else with it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import ucformat
from tests.fakes import FakeSource, random_array
from tests.jobs.conftest import universal
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import NotACheckpoint, NotFound
from ucformat.jobs.gc import collect
from ucformat.jobs.register import register
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog

ROOT = Path(__file__).parents[2]
INSTANTS = 30
WORKER = """
import os, sys
from ucformat.catalog.catalog import Catalog
from ucformat.jobs.gc import collect
for line in sys.stdin:  # it forks, so that everything is loaded already in those who are killed
    pid = os.fork()
    if pid == 0:
        with Catalog(line.strip()) as catalog:
            collect(catalog, apply=True)
        os._exit(0)
    print(pid, flush=True)
    sys.stdin.readline()  # until then the number is that of no other process
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def files(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}


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
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        whole = 1.0
        for instant in range(-2, INSTANTS):
            for n, place in enumerate(places):
                shutil.copytree(tmp_path / "kept" / f"{n}", place)
            register([str(p) for p in places], catalog)
            for id_ in ids:
                catalog.note(id_, "there is a document")
            catalog.delete(*ids, grace=timedelta(0))
            worker.stdin.write(url + "\n")
            worker.stdin.flush()
            pid, begun = int(worker.stdout.readline()), time.perf_counter()
            if instant >= 0:  # else it is only measured
                time.sleep(chance.uniform(0, 1.1 * whole))
                os.kill(pid, signal.SIGKILL)
            worker.stdin.write("\n")
            worker.stdin.flush()
            assert worker.stdout.readline() in ("0\n", "-9\n")
            whole = time.perf_counter() - begun if instant < 0 else whole
            for id_, place in zip(ids, places, strict=True):
                try:
                    ucformat.verify(open_checkpoint(place)).raise_if_damaged()
                    seen["whole"] += 1
                except (NotACheckpoint, NotFound):
                    state = catalog.get(id_).state
                    assert state in ("purging", "purged")
                    seen["gone" if state == "purged" else "going"] += 1
            done = collect(catalog, apply=True)
            assert done.failures == ()
            assert [catalog.get(i).state for i in ids] == ["purged"] * 2
            assert not any(p.exists() for p in places)
            assert files(Path(other.url)) == stays
    assert catalog.get(other.id).state == "committed"
    assert min(seen.values()) > 0, seen
