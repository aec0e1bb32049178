"""Checkpoints that are exported, and what they hold."""

from __future__ import annotations

import random
import uuid
from typing import TYPE_CHECKING, Any

import ucformat
from tests.fakes import FakeSource, random_array
from tests.zero_files import FLAT, write_zero3
from ucformat.checkpoint import Checkpoint
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

Arrays = dict[tuple[str, str], "np.ndarray"]

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "bool", "uint8")


def random_arrays(
    seed: int, tensors: int = 8, dtypes: tuple[str, ...] = DTYPES, edge: int = 40
) -> Arrays:
    """Weights of random shapes and dtypes, among them a scalar and one without elements."""
    chance = random.Random(seed)
    shapes = [
        tuple(chance.randrange(1, edge) for _ in range(chance.randrange(1, 4)))
        for _ in range(tensors)
    ]
    shapes += [(), (3, 0, 2)]
    return {
        (f"model.layers.{n}.weight", "weight"): random_array(shape, chance.choice(dtypes), seed + n)
        for n, shape in enumerate(shapes)
    }


def opened(arrays: Arrays, **facts: Any) -> Checkpoint:
    """A foreign checkpoint in memory."""
    return Checkpoint(
        FakeSource.write(MemoryStore(f"exported-{uuid.uuid4().hex}"), arrays, **facts)
    )


def universal(folder: Path, arrays: Arrays, **facts: Any) -> Checkpoint:
    """A universal checkpoint of small chunks."""
    return ucformat.convert(opened(arrays, **facts), folder, chunk_bytes=256, shard_bytes=1 << 11)


def zero3(
    folder: Path, seed: int = 0, tensors: int = 5, ranks: int = 3, scale: int = 1
) -> tuple[Path, Arrays]:
    """A DeepSpeed checkpoint, whose records each hold parts of all tensors, and what it holds."""
    chance = random.Random(seed)
    shapes = [
        (scale * chance.randrange(1, 200), scale * chance.randrange(1, 90)) for _ in range(tensors)
    ]
    arrays = {
        (f"t{n}", s): random_array(shape, "float32", seed + 10 * n + k)
        for n, shape in enumerate(shapes)
        for k, s in enumerate(FLAT)
    }
    return write_zero3(folder, arrays, ranks) / "global_step5", arrays
