"""Exports that are killed at random instants: the loader finds nothing or the whole checkpoint; then they continue."""

from __future__ import annotations

import random
import signal
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ucformat
from tests.exporters.sources import zero3
from tests.exporters.test_export import WORK, tensors_of
from tests.jobs.forks import Forks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Found = Mapping[str, np.ndarray] | None

torch = pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")


def load_dcp(folder: Path) -> Found:
    from torch.distributed import checkpoint as dcp

    try:
        metadata = dcp.FileSystemReader(folder).read_metadata()
    except FileNotFoundError:
        return None
    entries = {n: e for n, e in metadata.state_dict_metadata.items() if isinstance(e, dcp.TensorStorageMetadata)}
    state = {name: torch.zeros(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings(action="ignore"):  # that one process loads
        dcp.load(state, checkpoint_id=folder)
    return {name.removeprefix("model."): t.numpy() for name, t in state.items() if name.startswith("model.")}


def load_torch(folder: Path) -> Found:
    file = folder / "model.pt"
    return {n: t.numpy() for n, t in torch.load(file).items()} if file.exists() else None


def load_npz(folder: Path) -> Found:
    if not (folder / "model.npz").exists():
        return None
    with np.load(folder / "model.npz") as found:
        return dict(found)


def load_orbax(folder: Path) -> Found:
    """Orbax itself, which takes seconds to start, restores whole exports in tests/engines/test_orbax.py."""
    if not (folder / "_METADATA").exists():
        return None
    ck = ucformat.open(folder)
    return {name: np.asarray(ck[name, "master"].read()) for name in ck.names()}


LOADERS: dict[str, tuple[Callable[[Path], Found], dict[str, int]]] = {
    "safetensors": (lambda folder: tensors_of(folder) or None, {"max_shard_bytes": 2000}),
    "dcp": (load_dcp, {"max_file_bytes": 4000, "max_item_bytes": 2000}),
    "torch": (load_torch, {}),
    "npz": (load_npz, {}),
    "orbax": (load_orbax, {"max_file_bytes": 4000, "max_chunk_bytes": 2000}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", LOADERS)
def test_fifty_kills(tmp_path: Path, kind: str) -> None:
    load, options = LOADERS[kind]
    source, arrays = zero3(tmp_path / "src", 7, tensors=6)
    wanted = {name: a for (name, state), a in arrays.items() if state == "master"}
    given, chance = repr(options).replace(" ", ""), random.Random(kind)

    def check(folder: Path) -> bool:
        found = load(folder)
        if found is None:
            return False
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            assert found[name].tobytes() == array.tobytes(), name
        return True

    with Forks(WORK) as forks:
        assert forks.run(source, tmp_path / "first", kind, given)[0] == 0
        assert check(tmp_path / "first")
        seconds, kills, number = forks.seconds, 0, 0
        while kills < 50:
            target = tmp_path / f"out{number}"
            number += 1
            for _ in range(3):
                code, _ = forks.run(source, target, kind, given, kill_after=chance.uniform(0, seconds))
                kills += code == -signal.SIGKILL
                if check(target):
                    break
            if not check(target) or (target / "ucformat-export").exists():
                assert forks.run(source, target, kind, given)[0] == 0
            assert check(target)
            assert not (target / "ucformat-export").exists()
