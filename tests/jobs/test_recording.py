"""Every commit is recorded, once, whichever name it was made by."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.catalog.manifests import manifest
from tests.fakes import FakeSource, random_array
from tests.packed import write_packed
from ucformat.checkpoint import Checkpoint
from ucformat.errors import UsageError
from ucformat.jobs.documents import read_document
from ucformat.jobs.record import record_commit
from ucformat.schema.manifest import LineageDoc
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ARRAYS = {("w", "weight"): random_array((4, 3), "float32")}

WAYS = {
    "ucformat.convert": "import ucformat; ucformat.convert(src, dst)",
    "jobs.convert": "from ucformat.jobs.convert import convert; convert(src, dst)",
    "jobs.copy": "from ucformat.jobs.copy import copy; copy(src, dst)",
    "jobs.materialize": "from ucformat.jobs.materialize import materialize; materialize(src, dst)",
    "torch.saving": "import torch; from ucformat.torch.saving.save import save; save({'w': torch.ones(2)}, dst)",
    "Writer": (
        "import torch, torch.distributed.checkpoint as dcp; from ucformat.engines.pytorch.dcp_writer import Writer; "
        "dcp.save({'w': torch.ones(2)}, storage_writer=Writer(dst), no_dist=True)"
    ),
    "all are imported": (
        "import ucformat.torch; import ucformat.jobs.copy, ucformat.jobs.materialize; "
        "from ucformat.jobs.record import record_commits; record_commits(); ucformat.convert(src, dst)"
    ),
}
COUNT = """
from ucformat.catalog.catalog import Catalog
told, record = [], Catalog.record
Catalog.record = lambda catalog, manifest, url: (told.append(url), record(catalog, manifest, url))
"""


@pytest.mark.front("ucformat.convert", "torch.saving", "Writer", "all are imported")
@pytest.mark.parametrize("way", WAYS)
def test_a_commit_is_in_the_catalog_and_told_once(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_packed(LocalStore(tmp_path / "src"), ARRAYS)
    catalog = str(tmp_path / "catalog.db")
    monkeypatch.setenv("UCP_CATALOG", catalog)
    code = f"{COUNT}src, dst = {str(tmp_path / 'src')!r}, {str(tmp_path / 'dst')!r}; {WAYS[way]}; assert told == [dst]"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with ucformat.Catalog(catalog) as found:
        assert [tuple(e.urls) for e in found.find("")] == [(str(tmp_path / "dst"),)]


WAITING = """
import sys, time
import ucformat, ucformat.jobs.convert as jobs
write = jobs.write

def waiting(*args):
    end = time.monotonic() + 60
    while CATALOG not in sys.modules and time.monotonic() < end:
        time.sleep(0.01)
    assert CATALOG in sys.modules
    return write(*args)

jobs.write = waiting
CATALOG = "ucformat.catalog.catalog"
"""


def test_the_catalog_is_imported_while_a_conversion_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_packed(LocalStore(tmp_path / "src"), ARRAYS)
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    code = f"{WAITING}assert CATALOG not in sys.modules; {WAYS['ucformat.convert']}"
    code = f"src, dst = {str(tmp_path / 'src')!r}, {str(tmp_path / 'dst')!r}\n{code}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


MARKS = {
    "ucformat.Catalog": "import ucformat; ucformat.Catalog(url).tag(id, 'kept')",
    "catalog.catalog": "from ucformat.catalog.catalog import Catalog; Catalog(url).tag(id, 'kept')",
    "catalog.names": (
        "import ucformat.catalog.labels; from ucformat.catalog import catalog; catalog.Catalog(url).tag(id, 'kept')"
    ),
    "ucp": "from ucformat.cli.main import ucp; ucp.main(['tag', id, 'kept', '--catalog', url])",
    "cli.mark": "from ucformat.cli.commands.labels import tag; tag.main([id, 'kept', '--catalog', url])",
    "cli.catalogs": (
        "from ucformat.cli.ui.catalogs import opened_catalog\n"
        "from ucformat.settings import using\n"
        "with using(catalog=url), opened_catalog() as c: c.tag(id, 'kept')"
    ),
}


@pytest.mark.front("ucp", "catalog.names")
@pytest.mark.parametrize("way", MARKS)
def test_a_mark_is_written_beside_the_checkpoint(way: str, tmp_path: Path) -> None:
    write_packed(LocalStore(tmp_path / "src"), ARRAYS)
    url = str(tmp_path / "catalog.db")
    with ucformat.Catalog(url) as catalog:
        found = ucformat.register([str(tmp_path / "src")], catalog).entries[0]
    code = f"url, id = {url!r}, {found.id!r}\n{MARKS[way]}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    doc = read_document(LocalStore(tmp_path / "src"))
    assert doc is not None
    assert [t.name for t in doc.tags] == ["kept"]


def test_a_conversion_of_nothing_is_an_error(tmp_path: Path) -> None:
    ck = Checkpoint(FakeSource.write(MemoryStore("nothing"), ARRAYS))
    acts: tuple[Callable[[], object], ...] = (
        lambda: ucformat.convert(ck, tmp_path / "x", states=[]),
        lambda: ucformat.convert(ck, tmp_path / "x", states=(), virtual=True),
        lambda: ucformat.convert(ck, tmp_path / "x", states=["master"]),
        lambda: ucformat.convert(ck.view([{"drop": "*"}]), tmp_path / "x"),
    )
    for act in acts:
        with pytest.raises(UsageError):
            act()
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("odd", ["run7@latest", "alias:nothing", "abcd", "/nowhere", "run@x@y", ""])
def test_an_odd_id_in_the_lineage_keeps_no_save_out_of_the_catalog(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A manifest may name its parent by any text, which is no reference to look up."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    edge = LineageDoc(kind="resume", url=str(tmp_path / "gone"), id=odd)
    record_commit("/data/1", manifest(1, lineage=(edge,)))
    with ucformat.Catalog(str(tmp_path / "catalog.db")) as found:
        assert [e.urls for e in found.find("")] == [("/data/1",)]
    assert not caplog.records
