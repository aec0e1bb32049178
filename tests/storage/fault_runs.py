"""What is done under faults: conversions and saves of small checkpoints, by seed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import ucformat
from tests.fakes import Arrays, random_array, same
from tests.storage.proxy import fine
from tests.storage.weather import Weather
from tests.zero_files import FLAT, write_zero3
from ucformat.errors import Conflict, NotFound, UcformatError, Uncertain
from ucformat.torch import save

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.storage.conftest import Faulty

__all__ = ["CHUNK", "OUTCOMES", "converted", "is_whole", "saved", "source", "truth"]

CHUNK, SHARD = 1 << 10, 16 << 10  # bytes; a shard of two parts, and some more small ones
#: A run in seven meets a storm, in which operations fail for good, after a second.
STORM, CALM = 7, 60.0

OUTCOMES = ("committed", "failed", "uncertain")


def truth(seed: int) -> Arrays:
    """Two tensors, in all states: one of several parts, and a small one."""
    return {
        (name, state): random_array(shape, "float32", 100 * seed + 10 * i + j)
        for i, (name, shape) in enumerate({"w": (97, 33), "b": (7,)}.items())
        for j, state in enumerate(FLAT)
    }


def source(folder: Path, seed: int = 0) -> Path:
    """A ZeRO-3 checkpoint of it, by two ranks."""
    return write_zero3(folder / f"src{seed}", truth(seed), ranks=2)


def is_whole(url: str, expected: Arrays) -> bool:
    """Whether it opens, and every bit is as it should be; NotFound where nothing is committed."""
    ck = ucformat.open(url)
    ucformat.verify(ck).raise_if_damaged()
    return all(same(ck[key][...], a) for key, a in expected.items())


def _weather(seed: int, requests: int, faulty: Faulty, patch: pytest.MonkeyPatch) -> None:
    """Begin to make the faults of this seed, for what takes about so many requests."""
    storm = seed % STORM == STORM - 1
    patch.setenv("UCP_DEADLINE", "1" if storm else str(CALM))
    faulty.proxy.choose = Weather(
        seed, storm=random.Random(seed).randrange(requests) if storm else None
    )


def _outcome(act: Any, url: str, expected: Arrays, faulty: Faulty) -> str:
    """What came of it, when nothing that must not be has come of it."""
    failure: UcformatError | None = None
    try:
        act()
    except UcformatError as error:
        failure = error
    finally:
        faulty.proxy.choose = fine
    if failure is None:
        assert is_whole(url, expected)
        return "committed"
    assert not isinstance(failure, Conflict), failure  # there is nobody else
    try:
        assert is_whole(url, expected)  # it is whole, or it is not there
        assert isinstance(failure, Uncertain), failure
    except NotFound:
        act()
        assert is_whole(url, expected)
        return "failed"
    try:
        act()  # whoever runs it again is told so
    except Conflict as error:
        assert "already holds the committed checkpoint" in error.message  # noqa: PT017 - it may also succeed
    else:
        raise AssertionError("committed twice")
    return "uncertain"


def converted(seed: int, src: Path, stored: str, faulty: Faulty, patch: pytest.MonkeyPatch) -> str:
    """Convert a local checkpoint, or, of every third seed, the one at `stored`."""
    place = faulty.bucket.place()

    def act() -> None:
        ucformat.convert(src if seed % 3 else stored, place, chunk_bytes=CHUNK, shard_bytes=SHARD)

    _weather(seed, 46 if seed % 3 else 85, faulty, patch)
    return _outcome(act, place, truth(0), faulty)


def saved(seed: int, faulty: Faulty, patch: pytest.MonkeyPatch) -> str:
    """Save a state in one process: packed, or of every second seed as arrays."""
    place = faulty.bucket.place()
    arrays = {
        name: random_array(shape, "float32", seed) for name, shape in (("w", (97, 33)), ("b", (7,)))
    }
    state: dict[str, Any] = {
        "model": {name: torch.from_numpy(np.array(a)) for name, a in arrays.items()},
        "step": seed,
    }
    sizes: dict[str, Any] = (
        {"form": "zarr", "chunk_bytes": CHUNK, "shard_bytes": SHARD}
        if seed % 2
        else {"form": "packed"}
    )
    _weather(seed, 16 if seed % 2 else 12, faulty, patch)
    return _outcome(
        lambda: save(state, place, **sizes),
        place,
        {(n, "weight"): a for n, a in arrays.items()},
        faulty,
    )
