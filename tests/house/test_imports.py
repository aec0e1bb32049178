"""Imports run downwards only, and the public face costs nothing until it is used."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ucformat

ROOT = Path(ucformat.__file__).parent

#: Room -> what it may import of ucformat. A module at the top of the package is a room of its own.
ALLOWED: dict[str, set[str]] = {
    "_version": set(),
    "redacted": set(),
    "errors": {"redacted"},
    "durable": set(),
    "schema": set(),
    "config_files": {"errors"},
    "geometry": {"schema", "errors", "config_files"},
    "storage": {"schema", "errors", "durable", "redacted", "settings", "_native"},
    "reading": {"schema", "errors", "geometry", "storage"},
    "views": {"schema", "errors", "geometry", "storage", "reading"},
    "format": {"schema", "errors", "geometry", "storage", "reading", "_version"},
    "sources": {"schema", "errors", "geometry", "storage", "reading", "engines", "_native"},
    "exporters": {
        *(
            "schema",
            "errors",
            "config_files",
            "geometry",
            "storage",
            "reading",
            "views",
            "sources",
            "checkpoint",
        )
    },
    "zarr_store": {"geometry", "storage", "reading", "format"},
    "checkpoint": {
        *("schema", "errors", "geometry", "storage", "reading", "views", "format", "sources"),
        *("settings", "zarr_store"),
    },
    "references": {"errors", "storage", "views", "checkpoint", "catalog", "settings"},
    "jobs": {
        *(
            "schema",
            "errors",
            "geometry",
            "storage",
            "reading",
            "views",
            "format",
            "sources",
            "checkpoint",
        ),
        *("_version", "catalog", "durable", "exporters", "references", "settings"),
    },
    "torch": {
        *("schema", "errors", "geometry", "storage", "reading", "format", "sources", "checkpoint"),
        *("_version", "catalog", "references", "redacted", "settings", "exporters", "jobs"),
    },
    "settings": {"errors", "durable"},
    "catalog": {"schema", "errors", "redacted", "settings", "migrations", "config_files"},
    "migrations": set(),
}
#: Module -> what it alone of its room may import besides.
BESIDES = {
    "storage/testing.py": {"numpy", "pytest"},
    "reading/lazy.py": {"torch"},  # of which a tensor is asked for
    "jobs/on_dask.py": {"distributed"},
    "jobs/on_torchrun.py": {"torch"},
    "jobs/profiles.py": {"platformdirs"},
    "torch/integrations/torchtitan_config.py": {
        "tyro"
    },  # by which torchtitan makes options of its configuration
}
FACES = {"cli", "web", "__init__", "__main__"}  # nothing imports them; they may import everything

#: Room -> the third-party packages it may import at all.
OUTSIDE: dict[str, set[str]] = {
    "redacted": set(),
    "errors": set(),
    "durable": set(),
    "schema": {"pydantic", "pydantic_core"},
    "geometry": {"pydantic"},
    "config_files": {"yaml"},
    "storage": {"aiohttp", "boto3", "botocore", "crc32c", "fsspec", "numpy", "obstore"},
    "format": {"numpy", "ml_dtypes", "xxhash", "pydantic", "safetensors", "zarr"},
    "sources": {"numpy", "ml_dtypes", "numcodecs", "tensorstore"},
    "reading": {"ml_dtypes", "numpy"},
    "views": {"numpy"},
    "zarr_store": {"numpy", "zarr"},
    "checkpoint": set(),
    "references": set(),
    "exporters": {"numpy"},
    "jobs": {"numpy", "pydantic"},
    "cli": {"click", "rich", "numpy", "yaml"},
    "settings": {"platformdirs"},
    "torch": {
        "accelerate",
        "deepspeed",
        "lightning",
        "numpy",
        "pydantic",
        "torch",
        "torchtitan",
        "transformers",
    },
    "_version": set(),
    "__init__": set(),
    "__main__": set(),
    "catalog": {"alembic", "lark", "psycopg", "pydantic", "sqlalchemy"},
    "migrations": {"alembic", "sqlalchemy"},
}


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            found.add(str(node.module))
            if node.module == "ucformat":
                found |= {f"ucformat.{a.name}" for a in node.names}
    return found


def room(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_run_downwards_only(file: Path) -> None:
    own = room(file)
    ours = {i.split(".")[1] for i in imports(file) if i.startswith("ucformat.")}
    theirs = {i.split(".")[0] for i in imports(file)} - set(sys.stdlib_module_names) - {"ucformat"}
    if own not in FACES:
        assert ours - {own} <= ALLOWED[own], f"{own} imports {ours - {own} - ALLOWED[own]}"
    if own not in ("__init__", "__main__"):
        assert not ours & FACES - {own}
    allowed = OUTSIDE[own] | BESIDES.get(str(file.relative_to(ROOT)), set())
    assert theirs <= allowed, f"{own} imports {theirs - allowed}"


def loaded(code: str) -> set[str]:
    script = f"import sys, json; {code}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_ucformat_loads_nothing_heavy() -> None:
    heavy = {
        "numpy",
        "pytest",
        "torch",
        "obstore",
        "sqlalchemy",
        "tensorstore",
        "zarr",
        "pydantic",
        "fsspec",
        "rich",
        "yaml",
    }
    assert not loaded("import ucformat") & {*heavy, "pytest"}


def test_opening_and_converting_load_no_engine_and_no_zarr_library() -> None:
    code = "import ucformat; ucformat.open, ucformat.convert, ucformat.verify, ucformat.Layout"
    assert not loaded(code) & {
        "pytest",
        "torch",
        "deepspeed",
        "sqlalchemy",
        "tensorstore",
        "numcodecs",
        "zarr",
    }


def test_knowing_every_kind_of_checkpoint_loads_no_reader() -> None:
    found = loaded("import ucformat.sources.opening")
    assert not found & {
        "numpy",
        "ml_dtypes",
        "ucformat.sources.pickle.unpickler",
        "ucformat.sources.index",
    }
    assert not {
        m
        for m in found
        if m.startswith("ucformat.sources.opening.")
        and m.endswith((".opened", ".dist", ".classic"))
    }


def test_the_public_face_is_sorted_documented_and_real() -> None:
    assert ucformat.__all__ == sorted(ucformat.__all__)
    for name in ucformat.__all__:
        assert getattr(ucformat, name) is not None
    assert set(dir(ucformat)) == set(ucformat.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ucformat.nonsense


@pytest.mark.parametrize(
    "file", [f for f in FILES if f.name != "__init__.py"], ids=lambda f: str(f.relative_to(ROOT))
)
def test_every_module_is_of_a_size_to_read(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 800


def test_the_process_that_writes_in_the_background_does_not_load_torch() -> None:
    assert not loaded("import ucformat.torch.saving.worker") & {"torch", "sqlalchemy", "zarr"}
