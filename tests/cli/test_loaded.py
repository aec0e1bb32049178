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
OPENED = {"ucformat.checkpoint", "xxhash"}
FILES = OPENED | {"ucformat.schema.manifest", "pydantic"}
DOCUMENTS = {"ucformat.schema.documents"}
ARRAYS = {"numpy", "ml_dtypes"} | (set() if NATIVE else {"crc32c"})
FOREIGN = {"ucformat.sources.opening"}
#: What takes long to import. Of these a command loads what the table says and no more; of the rest,
#: as an ORM, torch, other dialects, libraries for object stores and terminals, none of these loads
#: any.
HEAVY = {
    *(CATALOG | FILTER | DELETION | FILES | DOCUMENTS | ARRAYS | FOREIGN | {"crc32c"}),
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
        "ucformat.jobs.weight_files",
        "ucformat.jobs.patch_files",
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
    "import wandb --help": set(),
    "sql 'select 1'": CATALOG | {"pydantic"},
    **dict.fromkeys(
        ("ls", "log", "alias list", "lineage U", "diff --quiet U U", "catalog info"), CATALOG
    ),
    **dict.fromkeys(("ls 'step = 1'", "ls --sort -step"), CATALOG | FILTER),
    "show U": CATALOG | FILES | DOCUMENTS,
    "gc": CATALOG | FILES | DOCUMENTS | DELETION,
    "tag U new": CATALOG | FILES | DOCUMENTS | DELETION,
    "get U a": FILES | ARRAYS | PLANS,
    "verify U": CATALOG | FILES | DOCUMENTS | ARRAYS | {"safetensors"},
    "show F": CATALOG | OPENED | FOREIGN,
    "get F a": OPENED | ARRAYS | PLANS | FOREIGN,
    "convert F N": CATALOG | FILES | DOCUMENTS | ARRAYS | FOREIGN,
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


@pytest.mark.parametrize("command", ["show U", "verify U"])
def test_a_catalog_that_was_not_created_is_neither_created_nor_opened(
    command: str, words: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = tmp_path / "absent.db"
    monkeypatch.setenv("UCP_CATALOG", str(absent))
    assert not modules_of([words.get(word, word) for word in command.split()]) & CATALOG
    assert not absent.exists()


def test_garbage_is_collected_as_usual_after_the_first_time() -> None:
    code = (
        "import gc, sys\nusual = gc.get_threshold()\n"
        "from ucformat.cli.main import main\nsys.argv = ['ucp', '--version']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "delayed = gc.get_threshold()\ngc.collect()\n"
        "print(delayed[0] > usual[0], gc.get_threshold() == usual)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True"


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
