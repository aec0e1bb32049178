"""What processes that share a cache do in `test_cache_processes.py`: they read files, and compare what they get.

A file has generations. How many there are is written into another file after each; a read must
return the bytes of one that was current while it lasted.
"""

from __future__ import annotations

import hashlib
import os
import random
from functools import lru_cache
from typing import TYPE_CHECKING

from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "NAMES",
    "Wrong",
    "content",
    "read_for_ever",
    "read_once",
    "read_replicated",
    "rewrite",
    "size_of",
]

NAMES = [f"f{n}" for n in range(6)]


class Wrong(Exception):
    """A read has returned other bytes."""


def size_of(name: str) -> int:
    """Bytes of a file: less than a block of the cache, and several."""
    return (900, 70_000, 1 << 20, (1 << 20) + 1, 2_500_000, 3 << 20)[int(name[1:])]


@lru_cache(64)
def content(name: str, generation: int) -> bytes:
    """A generation of a file."""
    return random.Random(f"{name} {generation}").randbytes(size_of(name))


def rewrite(files: Path, name: str, generation: int) -> None:
    """Replace a file by a later generation, which is told before and after."""
    _tell(files, name, "coming", generation)
    fresh = files / f".fresh-{name}"
    fresh.write_bytes(content(name, generation))
    os.utime(fresh, (generation + 1, generation + 1))
    fresh.replace(files / name)
    _tell(files, name, "generation", generation)


def _tell(files: Path, name: str, what: str, generation: int) -> None:
    number = files.with_name(f"{name}.{what}")
    number.with_suffix(".fresh").write_text(str(generation))
    number.with_suffix(".fresh").replace(number)


def _told(files: Path, name: str, what: str) -> int:
    return int(files.with_name(f"{name}.{what}").read_text())


def read_once(url: str, files: Path, rng: random.Random) -> None:
    """Read a range of a file, or all of it."""
    name = rng.choice(NAMES)
    begin = rng.choice([0, rng.randrange(size_of(name))])
    nbytes = rng.choice([None, rng.randrange(size_of(name) - begin) + 1])
    first = _told(files, name, "generation")
    data = open_store(url).read(name, begin, nbytes)
    last = _told(files, name, "coming")  # it may be in its place already
    end = size_of(name) if nbytes is None else begin + nbytes
    if not any(data == content(name, g)[begin:end] for g in range(first, last + 1)):
        raise Wrong(f"bytes {begin} to {end} of {name} are of no generation from {first} to {last}")


def read_for_ever(
    url: str, files: Path, seed: int, environment: dict[str, str], failed: str
) -> None:
    """Read until the process is killed; write to a file what was wrong."""
    os.environ |= environment
    rng = random.Random(seed)
    try:
        while True:
            read_once(url, files, rng)
    except BaseException as error:
        with open(failed, "a", encoding="utf-8") as out:  # noqa: PTH123 - a path that was handed over
            out.write(f"{type(error).__name__}: {error}\n")
        raise


def read_replicated(url: str, environment: dict[str, str], result: str) -> None:
    """Read all of a checkpoint, as a rank that holds all of it, and write a digest of it to a file."""
    os.environ |= environment
    import ucformat  # after the environment, which it reads

    layout = ucformat.Layout({"dp": 8}, [{"match": "*", "place": ["replicate"]}])
    arrays = ucformat.open(url).plan(layout, 0).execute()
    digest = hashlib.blake2b()
    for key in sorted(arrays):
        digest.update(arrays[key].tobytes())
    with open(result, "w", encoding="utf-8") as out:  # noqa: PTH123 - a path that was handed over
        out.write(digest.hexdigest())
