"""Imports run downwards only, and the public face costs nothing until it is used."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ucformat

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(ucformat.__file__).parent

#: Room of the core -> what it may import of ucformat. A module at the top of the package is a room of its own.
ALLOWED: dict[str, set[str]] = {
    "_version": set(),
    "redacted": set(),
    "errors": {"redacted"},
    "registry": {"errors"},
    "durable": set(),
    "texts": set(),
    "drawing": {"errors", "geometry", "texts"},
    "schema": set(),
    "config_files": {"errors"},
    "geometry": {"schema", "errors", "config_files", "_native"},
    "storage": {"schema", "errors", "registry", "durable", "redacted", "settings", "_native"},
    "reading": {"schema", "errors", "geometry", "storage", "drawing", "texts"},
    "views": {"schema", "errors", "registry", "geometry", "storage", "reading"},
    "format": {"schema", "errors", "geometry", "storage", "reading", "_version", "_native"},
    "sources": {"schema", "errors", "registry", "geometry", "storage", "reading", "_native"},
    "exporters": {
        *("schema", "errors", "registry", "config_files", "geometry", "storage", "reading"),
        *("views", "sources", "checkpoint"),
    },
    "zarr_store": {"errors", "geometry", "storage", "reading", "format"},
    "checkpoint": {
        *("schema", "errors", "geometry", "storage", "reading", "views", "format", "sources"),
        *("settings", "zarr_store", "drawing", "texts"),
    },
    "signatures": {"schema", "errors", "geometry", "storage", "format", "checkpoint", "settings"},
    "references": {
        *("errors", "storage", "views", "checkpoint", "catalog", "settings", "signatures"),
    },
    "jobs": {
        *("schema", "errors", "geometry", "storage", "reading", "views", "format", "sources"),
        *("checkpoint", "_version", "catalog", "durable", "exporters", "references", "settings"),
        *("redacted", "signatures"),
    },
    "runs": {
        *("schema", "errors", "geometry", "storage", "reading", "checkpoint", "references"),
        *("catalog", "jobs", "zarr_store"),
    },
    "trackers": {"errors", "redacted", "storage", "sources", "catalog", "jobs"},
    "torch": {
        *("schema", "errors", "geometry", "storage", "reading", "format", "sources", "checkpoint"),
        *("_version", "catalog", "references", "redacted", "registry", "settings", "exporters"),
        *("jobs", "drawing"),
    },
    "jax": {
        *("errors", "geometry", "storage", "reading", "checkpoint", "references", "torch"),
        *("schema", "jobs"),
    },
    "web": {
        *(
            "sources",
            "schema",
            "errors",
            "geometry",
            "storage",
            "reading",
            "views",
            "format",
            "exporters",
        ),
        *("checkpoint", "catalog", "references", "jobs", "runs", "zarr_store", "_version"),
        *("drawing", "texts"),
    },
    "settings": {"errors", "durable"},
    "catalog": {
        *("schema", "errors", "redacted", "settings", "migrations", "config_files", "texts"),
        "drawing",
    },
    "migrations": set(),
}
#: What the rooms of engines may import: the core, and each its own modules.
ENGINES = ROOT / "engines"
CORE = ALLOWED.keys() - {"_version", "migrations", "zarr_store"}

#: Module -> what it alone of its room may import besides.
BESIDES = {
    "reading/lazy.py": {"torch"},  # of which a tensor is asked for
    "jobs/logged.py": {"mlflow", "wandb"},  # to which a reference is logged
    "jobs/on_dask.py": {"distributed"},
    "jobs/on_torchrun.py": {"torch"},
    "storage/profiles.py": {"platformdirs"},
    "trackers/events.py": {"crc32c"},
    "trackers/mlflow.py": {"mlflow", "sqlalchemy"},
}
#: Faces: nothing imports them; they may import everything. The last are where users import the
#: integrations from.
FACES = {"cli", "testing", "__init__", "__main__"}
INTEGRATIONS = {
    ROOT / "torch/__init__.py",
    ROOT / "torch/deepspeed.py",
    ROOT / "torch/megatron.py",
    *(ROOT / "torch/integrations").glob("*.py"),
}

#: Room -> the third-party packages it may import at all.
OUTSIDE: dict[str, set[str]] = {
    "redacted": set(),
    "errors": set(),
    "registry": set(),
    "durable": set(),
    "texts": set(),
    "drawing": set(),
    "schema": {"pydantic", "pydantic_core"},
    "geometry": {"numpy", "pydantic"},
    "config_files": {"yaml"},
    "storage": {"aiohttp", "boto3", "botocore", "crc32c", "fsspec", "numpy", "obstore"},
    "format": {"numcodecs", "numpy", "ml_dtypes", "xxhash", "pydantic", "safetensors", "zarr"},
    "sources": {"numpy"},
    "reading": {"ml_dtypes", "numpy"},
    "views": {"numpy"},
    "zarr_store": {"numpy", "zarr"},
    "checkpoint": set(),
    "references": set(),
    "runs": {"numpy"},
    "signatures": {"model_signing"},
    "exporters": {"numpy"},
    "jobs": {"numpy", "pydantic"},
    "cli": {"click", "rich", "numpy", "yaml"},
    "settings": {"platformdirs"},
    "web": {"jinja2", "markupsafe", "numpy", "platformdirs", "starlette", "uvicorn"},
    "testing": {"numpy", "pytest", "torch"},
    "jax": {"jax", "numpy"},
    "torch": {"numpy", "pydantic", "torch"},
    "_version": set(),
    "__init__": set(),
    "__main__": set(),
    "catalog": {"alembic", "lark", "psycopg", "pydantic", "sqlalchemy"},
    "migrations": {"alembic", "sqlalchemy"},
    "engines": set(),
    "engines/bitsandbytes": {"torch"},
    "engines/bytecheckpoint": {"numpy"},
    "engines/deepspeed": {"deepspeed", "ml_dtypes", "numpy", "torch"},
    "engines/huggingface": {"accelerate", "torch", "transformers"},
    "engines/lightning": {"lightning", "torch"},
    "engines/megatron": {"megatron", "ml_dtypes", "numpy", "torch", "yaml"},
    "engines/numpy": {"numpy"},
    "engines/orbax": {"numcodecs", "numpy", "tensorstore"},
    "engines/pytorch": {"numpy", "torch"},
    "engines/slime": {"blake3", "numcodecs", "numpy", "xxhash"},
    "engines/torch_checkpointing": {"numpy", "torch_checkpointing"},
    "engines/torchtitan": {
        "torch",
        "torchtitan",
        "tyro",
    },  # tyro makes options of its configuration
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
    parts = file.relative_to(ROOT).parts
    if parts[0] == "engines" and len(parts) > 2:
        return "/".join(parts[:2])
    return parts[0].removesuffix(".py")


def room_of_module(name: str) -> str:
    parts = name.split(".")[1:]
    return "/".join(parts[:2]) if parts[0] == "engines" and len(parts) > 1 else parts[0]


FILES = sorted(ROOT.rglob("*.py"))


def test_imports_run_downwards_only() -> None:
    for file in FILES:
        _check_imports(file)


def _check_imports(file: Path) -> None:
    own = room(file)
    ours = {room_of_module(i) for i in imports(file) if i.startswith("ucformat.")} - {own}
    theirs = {i.split(".")[0] for i in imports(file)} - set(sys.stdlib_module_names) - {"ucformat"}
    if own not in FACES and file not in INTEGRATIONS:
        allowed = CORE if ENGINES in file.parents else ALLOWED[own]
        assert ours <= allowed, f"{file} imports {ours - allowed}"
    if own not in ("__init__", "__main__"):
        assert not ours & FACES, f"{file} imports {ours & FACES}"
    allowed = OUTSIDE.get(own, set()) | BESIDES.get(str(file.relative_to(ROOT)), set())
    assert theirs <= allowed, f"{file} imports {theirs - allowed}"


#: Programs whose checkpoints are known in the rooms of `engines` only. Formats that the core itself
#: writes (safetensors files as Hugging Face's tools load them, adapters of PEFT) are not among them.
PROGRAMS = re.compile(
    r"deepspeed|megatron|orbax|lightning|torchtitan|torch_checkpointing|bytecheckpoint|accelerate|torchao|bitsandbytes",
    re.IGNORECASE,
)
#: Where the core says a name to people: in a hint, or as an example.
SAID = {
    "cli/commands/convert.py",
    "jobs/export.py",
    "schema/view.py",
    "torch/loading/load_into.py",
}


def test_the_core_knows_no_engine() -> None:
    for file in FILES:
        name = str(file.relative_to(ROOT))
        if ENGINES in file.parents or file in INTEGRATIONS or name in SAID:
            continue
        for line, text in code_of(file):
            assert not PROGRAMS.search(text), f"{name}:{line}: {text}"


def code_of(file: Path) -> Iterator[tuple[int, str]]:
    """Names and strings with their lines; docstrings and comments are left out."""
    with tokenize.open(file) as lines:
        previous = tokenize.NEWLINE
        for token in tokenize.generate_tokens(lines.readline):
            alone = previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.NL, tokenize.DEDENT)
            if token.type == tokenize.NAME or (token.type == tokenize.STRING and not alone):
                yield token.start[0], token.string
            if token.type != tokenize.COMMENT:
                previous = token.type


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


def test_every_module_is_of_a_size_to_read() -> None:
    lines = {f: len(f.read_text().splitlines()) for f in FILES if f.name != "__init__.py"}
    assert {str(f.relative_to(ROOT)): n for f, n in lines.items() if n > 800} == {}


def test_the_process_that_writes_in_the_background_does_not_load_torch() -> None:
    assert not loaded("import ucformat.torch.saving.worker") & {"torch", "sqlalchemy", "zarr"}
