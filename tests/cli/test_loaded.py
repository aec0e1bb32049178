"""What each command imports, and when: a library that it does not work with costs it half of its time.

Measured in modules and not in seconds, which are the machine's.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import sqlalchemy as sa
from safetensors.numpy import save_file

from ucformat.catalog.filter import compile_sort, parse_sort
from ucformat.catalog.models import Checkpoint
from ucformat.catalog.query import NEWEST

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run

#: What no command needs to answer from the catalog or from a manifest.
NEVER = (
    "alembic",
    "sqlalchemy.orm",
    "sqlalchemy.dialects.postgresql",
    "torch",
    "zarr",
    "tensorstore",
    "obstore",
    "rich",
)
ARRAYS = ("numpy", "ml_dtypes")
CATALOG = ("sqlalchemy",)
FILES = ("ucformat.checkpoint", "ucformat.schema.manifest", "xxhash", "fsspec")
FOREIGN = ("ucformat.sources", "ucformat.planning", "ucformat.geometry.view_document", "ucformat.viewed")
FILTER = ("lark", "ucformat.catalog.filter")

#: Command -> what it must not have imported by its end. `U` is a universal checkpoint in the catalog, `F` a file.
COMMANDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("ls", "sql 'select 1'", "log", "alias list", "lineage U"),
        (*NEVER, *ARRAYS, *FILES, *FOREIGN, *FILTER, "pydantic"),
    ),
    "catalog info": (*NEVER, *ARRAYS, *FILES, *FOREIGN, "pydantic"),
    "ls 'step = 1'": (*NEVER, *ARRAYS, *FILES, *FOREIGN, "pydantic"),
    "ls --sort -step": (*NEVER, *ARRAYS, *FILES, *FOREIGN, "pydantic"),
    "diff --quiet U U": (*NEVER, *ARRAYS, *FOREIGN, *FILTER),
    "show U": (*NEVER, *ARRAYS, *FOREIGN, *FILTER),
    "get U a": (*NEVER, "ucformat.sources", "ucformat.viewed", *CATALOG, *FILTER),
    "show F": (*NEVER, *FILTER),
    "get F a": (*NEVER, *CATALOG, *FILTER),
    "layout schema": (*NEVER, *ARRAYS, *CATALOG, *FILES, "ucformat.sources"),
}


@pytest.fixture
def words(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the letters in the commands stand for."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    file, universal = tmp_path / "a.safetensors", tmp_path / "run" / "1"
    save_file({"a": np.arange(4, dtype=np.float32)}, file)
    run("convert", file, universal)
    return {"U": str(universal), "F": str(file)}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_loads_only_what_it_works_with(command: str, words: dict[str, str]) -> None:
    args = [words.get(word, word) for word in shlex.split(command)]
    code = (
        "import json, sys\nfrom ucformat.cli.main import ucp\n"
        f"try: ucp.main({args})\nexcept SystemExit as end: assert not end.code, end.code\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert sorted(loaded & set(COMMANDS[command])) == []


def test_the_order_without_the_filter_language_is_the_same() -> None:
    found = sa.select(Checkpoint.serial).order_by(*compile_sort(parse_sort(NEWEST)))
    here = sa.select(Checkpoint.serial).order_by(Checkpoint.created.desc().nulls_last(), Checkpoint.serial.desc())
    assert str(found) == str(here)
