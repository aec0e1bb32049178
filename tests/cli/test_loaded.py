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
from safetensors.numpy import save_file

from ucformat.storage.strided import NATIVE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run

CATALOG = {"sqlalchemy", "asyncio", "ucformat.catalog.catalog"}  # asyncio by SQLAlchemy
FILTER = {"lark", "ucformat.catalog.filter"}
DELETION = {"ucformat.catalog.retention"}
FILES = {"ucformat.checkpoint", "ucformat.schema.manifest", "pydantic", "xxhash"}
ARRAYS = {"numpy", "ml_dtypes"} | (set() if NATIVE else {"crc32c"})
FOREIGN = {"ucformat.sources.opening"}
#: What takes long to import. Of these a command loads what the table says and no more; of the rest,
#: as an ORM, torch, other dialects, libraries for object stores and terminals, none of these loads
#: any.
HEAVY = {
    *(CATALOG | FILTER | DELETION | FILES | ARRAYS | FOREIGN | {"crc32c"}),
    *(
        "alembic",
        "sqlalchemy.orm",
        "sqlalchemy.dialects.postgresql",
        "torch",
        "zarr",
        "tensorstore",
    ),
    *("numcodecs", "safetensors", "obstore", "fsspec", "boto3", "rich", "yaml", "tomllib"),
    *(
        "ucformat.reading.rank",
        "ucformat.views.viewed",
        "ucformat.geometry.layout",
        "ucformat.views.document",
    ),
}
#: The modules of sources that read a checkpoint, which recognising it does not need.
READERS = (".opened", ".classic", ".dist", ".universal", ".unpickler", ".index")
PLACES = ("ucformat.sources.", "ucformat.engines.")
PLANS = {"ucformat.reading.rank"}

#: Command -> what it loads of these. `U` is a universal checkpoint in the catalog, `F` a
#: safetensors file.
COMMANDS: dict[str, set[str]] = {
    "--help": set(),
    "sql 'select 1'": CATALOG | {"pydantic"},
    **dict.fromkeys(
        ("ls", "log", "alias list", "lineage U", "diff --quiet U U", "catalog info"), CATALOG
    ),
    **dict.fromkeys(("ls 'step = 1'", "ls --sort -step"), CATALOG | FILTER),
    "show U": CATALOG | FILES,
    "gc": CATALOG | FILES | DELETION,
    "tag U new": CATALOG | FILES | DELETION,
    "get U a": FILES | ARRAYS | PLANS,
    "verify U": CATALOG | FILES | ARRAYS | {"safetensors"},
    "show F": CATALOG | FILES | FOREIGN,
    "get F a": FILES | ARRAYS | PLANS | FOREIGN,
    "convert F N": CATALOG | FILES | ARRAYS | FOREIGN | {"safetensors", "ucformat.views.viewed"},
    "layout schema": {"pydantic"},
}


@pytest.fixture
def words(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the letters in the commands stand for."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    file, universal = tmp_path / "a.safetensors", tmp_path / "run" / "1"
    save_file({"a": np.arange(4, dtype=np.float32)}, file)
    run("convert", file, universal)
    return {"U": str(universal), "F": str(file), "N": str(tmp_path / "run" / "2")}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_loads_only_what_it_works_with(command: str, words: dict[str, str]) -> None:
    loaded = modules_of([words.get(word, word) for word in shlex.split(command)])
    allowed = COMMANDS[command]
    assert sorted(loaded & HEAVY) == sorted(allowed)
    readers = {m for m in loaded if m.startswith(PLACES) and m.endswith(READERS)}
    assert readers == ({"ucformat.sources.index"} if allowed >= FOREIGN else set())


def test_the_help_of_exports_loads_nothing_that_plans_files() -> None:
    loaded = modules_of(["export", "--help"])
    assert {m for m in loaded if m.startswith("ucformat.exporters.")} == {
        f"ucformat.exporters.{name}" for name in ("adapter", "base", "registry", "safetensors")
    }
    assert not {m for m in loaded if m.startswith(("ucformat.sources.", "ucformat.storage."))}


def test_the_program_ends_without_a_last_search_for_garbage() -> None:
    code = (
        "import gc, sys\nsys.argv = ['ucp', '--version']\nfrom ucformat.cli.main import main\n"
        "try: main()\nexcept SystemExit: print(gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 1000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True"


def modules_of(args: list[str]) -> set[str]:
    code = (
        "import json, sys\nfrom ucformat.cli.main import ucp\n"
        f"try: ucp.main({args})\nexcept SystemExit as end: assert not end.code, end.code\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))
