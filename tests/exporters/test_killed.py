"""Exports that are killed at random instants: the loader finds nothing or the whole checkpoint; then they continue."""

from __future__ import annotations

import random
import signal
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ucformat
from tests.engines.deepspeed.test_export import fake
from tests.exporters.sources import zero3
from tests.exporters.test_export import WORK, tensors_of
from tests.jobs.forks import Forks
from tests.sources.suite import DATA

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    Found = Mapping[str, np.ndarray] | None

MEGATRON = DATA / "megatron" / "tp2-dp2-full" / "sharded" / "iter_0000002"
torch = pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")


def load_dcp(folder: Path) -> Found:
    from torch.distributed import checkpoint as dcp

    try:
        metadata = dcp.FileSystemReader(folder).read_metadata()
    except FileNotFoundError:
        return None
    entries = {
        n: e
        for n, e in metadata.state_dict_metadata.items()
        if isinstance(e, dcp.TensorStorageMetadata)
    }
    state = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
    }
    with warnings.catch_warnings(action="ignore"):  # that one process loads
        dcp.load(state, checkpoint_id=folder)
    return {
        name.removeprefix("model."): t.numpy()
        for name, t in state.items()
        if name.startswith("model.")
    }


def load_torch(folder: Path) -> Found:
    file = folder / "model.pt"
    return {n: t.numpy() for n, t in torch.load(file).items()} if file.exists() else None


def load_npz(folder: Path) -> Found:
    if not (folder / "model.npz").exists():
        return None
    with np.load(folder / "model.npz") as found:
        return dict(found)


def load_orbax(folder: Path) -> Found:
    """Orbax itself, which takes seconds to start, restores whole exports in tests/engines/orbax/test_engine.py."""
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


#: By what DeepSpeed and Megatron find a checkpoint, in the order in which it is written. That
#: DeepSpeed loads nothing without one of its files is proved with it in
#: `test_deepspeed_engines.py`. Megatron takes a folder without `metadata.json` for no checkpoint
#: (`check_is_distributed_checkpoint`), and PyTorch's reader one without `.metadata`.
MARKS: dict[str, tuple[str, ...]] = {
    "deepspeed": ("global_step3/mp_rank_00_model_states.pt", "latest"),
    "deepspeed-3": ("global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest"),
    "deepspeed-universal": ("global_step3/mp_rank_00_model_states.pt", "latest_universal"),
    "deepspeed-universal-3": (
        "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt",
        "latest_universal",
    ),
    "megatron": (".metadata", "metadata.json"),
}
ENGINES: dict[str, list[dict[str, int]]] = {
    "deepspeed": [{"stage": stage, "world": world} for stage in (0, 1, 2, 3) for world in (1, 3)],
    "deepspeed-experts": [
        {"stage": stage, "world": 4, "ep": ep} for stage in (0, 1, 2) for ep in (1, 2)
    ],
    "deepspeed-universal": [{"stage": stage} for stage in (1, 2, 3)],
    "megatron": [{"max_file_bytes": 9000, "max_item_bytes": 500}],
}


def trained(folder: Path, *, experts: bool) -> Path:
    """A universal checkpoint of a model in bf16 with an optimizer."""
    chance = random.Random(5)
    shapes = {
        f"layers.{n}.weight": (chance.randrange(1, 120), chance.randrange(1, 90)) for n in range(6)
    }
    if experts:
        shapes |= {
            f"mlp.deepspeed_moe.experts.deepspeed_experts.{n}.weight": (41, 37) for n in range(4)
        }
    ucformat.convert(fake(shapes, dtype="bfloat16", objects={"buffer_names": []}), folder)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of an export by their paths, without the records of an unfinished one."""
    found = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    return {
        key: file.read_bytes()
        for key, file in found.items()
        if not key.startswith("ucformat-export/")
    }


def check_files(folder: Path, wanted: dict[str, bytes], marks: tuple[str, ...]) -> bool:
    """Whether a loader finds a checkpoint; AssertionError unless all files that it reads are as wanted then."""
    missing = {mark for mark in marks if not (folder / mark).exists()}
    if len(missing) == len(marks):
        return False
    found = files_of(folder)
    assert found.keys() == wanted.keys() - missing
    for key, content in found.items():
        assert content == wanted[key], key
    return True


def fifty_kills(
    folder: Path,
    kind: str,
    source: Path,
    options: Sequence[Mapping[str, int]],
    check: Callable[[Path, int], bool],
) -> None:
    """Kill exports with options chosen at random; `check(target, n)` says whether those of options `n` are whole."""
    chance, given = random.Random(kind), [repr(o).replace(" ", "") for o in options]
    with Forks(WORK) as forks:
        seconds = []
        for n, text in enumerate(given):
            assert forks.run(source, folder / f"first{n}", kind, text)[0] == 0
            seconds.append(forks.seconds)
            assert check(folder / f"first{n}", n)
        kills, number = 0, 0
        while kills < 50:
            target, n = folder / f"out{number}", chance.randrange(len(given))
            number += 1
            for _ in range(3):
                code, _ = forks.run(
                    source, target, kind, given[n], kill_after=chance.uniform(0, seconds[n])
                )
                kills += code == -signal.SIGKILL
                if check(target, n):
                    break
            if not check(target, n) or (target / "ucformat-export").exists():
                assert forks.run(source, target, kind, given[n])[0] == 0
            assert check(target, n)
            assert files_of(target) == files_of(folder / f"first{n}")
            assert not (target / "ucformat-export").exists()


@pytest.mark.matrix
@pytest.mark.parametrize("kind", LOADERS)
def test_fifty_kills(tmp_path: Path, kind: str) -> None:
    load, options = LOADERS[kind]
    source, arrays = zero3(tmp_path / "src", 7, tensors=6)
    wanted = {name: a for (name, state), a in arrays.items() if state == "master"}

    def check(folder: Path, _: int) -> bool:
        found = load(folder)
        if found is None:
            return False
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            assert found[name].tobytes() == array.tobytes(), name
        return True

    fifty_kills(tmp_path, kind, source, [options], check)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ENGINES)
def test_fifty_kills_of_an_engines_files(tmp_path: Path, kind: str) -> None:
    source = (
        MEGATRON
        if kind == "megatron"
        else trained(tmp_path / "src", experts=kind == "deepspeed-experts")
    )
    before, options = ucformat.open(source), ENGINES[kind]
    kind = kind.removesuffix("-experts")
    whole: dict[int, dict[str, bytes]] = {}

    def check(folder: Path, n: int) -> bool:
        if n not in whole:
            after, whole[n] = ucformat.open(folder), files_of(folder)
            assert all(
                after[key].read().tobytes() == before[key].read().tobytes() for key in after.tensors
            )
            lost = {key.state for key in before.tensors.keys() - after.tensors.keys()}
            assert lost == ({"weight"} if options[n].get("stage") == 3 else set())
        name = f"{kind}-3" if options[n].get("stage") == 3 else kind
        return check_files(folder, whole[n], MARKS[name])

    fifty_kills(tmp_path, kind, source, options, check)
