"""The suite of sources over the checkpoints of this repository.

Checkpoints that engines wrote are kept in `tests/data/<engine>/<name>/`: the checkpoint as it was
written, and beside it the truth (`truth.safetensors`, with `<state>/<name>` as keys, and
`truth.json`), which `kept` reads; or an engine makes them during the test.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

from click.testing import CliRunner

from tests.engines import Made
from tests.tiers import rounds
from ucformat.cli.main import ucp
from ucformat.sources import safetensors as opened
from ucformat.sources.distcp import metadata
from ucformat.sources.pickle import file
from ucformat.testing.sources import Sample, Truth, read_whole, without
from ucformat.testing.sources import SourceSuite as Suite

__all__ = ["DATA", "Sample", "SourceSuite", "Truth", "kept", "read_whole", "without"]

DATA = Path(__file__).parents[1] / "data"


def kept(engine: str, name: str) -> Made:
    """A checkpoint in `tests/data`, with its truth."""
    folder = DATA / engine / name
    return Made(name, folder, json.loads((folder / "truth.json").read_text()))


class SourceSuite(Suite):
    """What every source of this repository must do: it reads little ahead."""

    changes = rounds(3, 8)
    read_ahead = MappingProxyType(
        {
            file: ("_TAIL", "_HEAD", "_ITEM"),
            opened: ("_FIRST",),
            metadata: ("_HEAD", "_MAX_GAP"),
        }
    )

    def test_a_file_that_is_not_read_is_shown(self, copy: Sample) -> None:
        if copy.path.is_dir():
            (copy.path / "added.bin").write_bytes(bytes(2 << 20))
            lines = CliRunner().invoke(ucp, ["show", str(copy.path)]).output.splitlines()
            assert any("not read" in line and "added.bin (2.0 MiB" in line for line in lines)
