"""What is exported to Orbax, Orbax restores, on one device and on several, in each way that it has.

`make engines` installs it; `UCFORMAT_ORBAX_PYTHON` names another interpreter that has it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.engines import engine
from tests.engines.orbax.test_export import ALL, opened
from tests.patience import PATIENCE
from tests.sources.suite import kept
from ucformat.checkpoint import open_checkpoint
from ucformat.jobs.convert import convert
from ucformat.jobs.export import export

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.checkpoint import Checkpoint

pytestmark = [pytest.mark.matrix, pytest.mark.engine]


def restored(folder: Path, devices: int) -> dict[str, Any]:
    """The leaves that Orbax restores, by their paths: type or dtype, shape, and bits or value."""
    out = folder.with_name(f"restored-{devices}.json")
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
    }
    script = [str(engine("orbax")), "tests/engines/orbax/restore_orbax.py", str(folder), str(out)]
    done = subprocess.run(
        script, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return found["leaves"] | found["typed"]


def without_unused_bits(array: Any) -> Any:
    """Clear the bits of the bytes of int2, int4 and float4 that are no part of the number, as JAX does."""
    bits = re.match(r"(?:int|uint|float)([24])(?!\d)", array.dtype.name)
    mask = 255 if bits is None else (1 << int(bits[1])) - 1
    return array if mask == 255 else (array.view("uint8") & mask).view(array.dtype)


def check(ck: Checkpoint, found: dict[str, Any], paths: dict[Any, str]) -> None:
    """Every tensor is restored bit for bit."""
    for key, info in ck.tensors.items():
        dtype, shape, data = found[paths[key]]
        if not dtype.startswith("key<"):
            assert (dtype, shape) == (info.dtype, list(info.shape)), key
            assert bytes.fromhex(data) == ck[key.name, key.state].read().tobytes(), key


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(
    "limits", [{}, {"max_chunk_bytes": 1000, "max_file_bytes": 5000}], ids=["whole", "cut"]
)
def test_every_dtype_and_state(devices: int, limits: dict[str, Any], tmp_path: Path) -> None:
    objects = {
        "flag": True,
        "n": 3,
        "x": 1.5,
        "text": "ü",
        "none": None,
        "deep": {"a": [1.5, {"b": 2}]},
    }
    arrays = {key: without_unused_bits(array) for key, array in ALL.items()}
    aliases = {"head.weight": "embed.weight"}
    source = opened(tmp_path / "s", arrays, objects=objects, aliases=aliases)
    export(source, tmp_path / "out", "orbax", **limits)
    found = restored(tmp_path / "out", devices)
    roots = {key: "params" if key.state == "weight" else key.state for key in source.tensors}
    check(source, found, {key: json.dumps([root, key.name]) for key, root in roots.items()})
    assert found['["params", "head.weight"]'] == found['["params", "embed.weight"]']
    plain = {path: value for path, (_, shape, value) in found.items() if shape is None}
    assert plain == {
        '["flag"]': "True",
        '["n"]': "3",
        '["x"]': "1.5",
        '["text"]': "'ü'",
        '["none"]': "None",
        '["deep", "a", 0]': "1.5",
        '["deep", "a", 1, "b"]': "2",
    }


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("name", ["ocdbt_zarr3", "zarr2_files"])
def test_a_tree_of_orbax_is_restored_as_it_was(devices: int, name: str, tmp_path: Path) -> None:
    source = open_checkpoint(kept("orbax", name).checkpoint)
    convert(kept("orbax", name).checkpoint, tmp_path / "universal")
    export(tmp_path / "universal", tmp_path / "out", "orbax")
    found = restored(tmp_path / "out", devices)
    check(
        source,
        found,
        {key: json.dumps(list(paths[0])) for key, paths in source.metadata.paths.items()},
    )
    assert found['["rng"]'][0] == "key<fry>"
    assert found['["opt_state", 0]'] == ["NoneType", None, "None"]
    original = kept("orbax", name).truth
    assert bytes.fromhex(found['["params", "head"]'][2]) == original["weight", "params.head"][2]


def test_an_unfinished_export_is_no_checkpoint(tmp_path: Path) -> None:
    export(opened(tmp_path / "s", {("w", "weight"): np.ones(3)}), tmp_path / "out", "orbax")
    for name in ("commit_success.txt", "_CHECKPOINT_METADATA", "_METADATA"):
        (tmp_path / "out" / name).unlink()
    with pytest.raises(AssertionError, match=r"_METADATA\) does not exist"):
        restored(tmp_path / "out", 1)
