"""Find the Megatron checkpoint in a folder: the one that its tracker names, or the folder itself."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from ucformat.errors import IntegrityError, NotFound, UcformatError, UsageError
from ucformat.storage.base import check_key, exists

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.storage.base import Store

__all__ = [
    "CONFIG",
    "MODEL",
    "RANK_FOLDER",
    "TRACKER",
    "MegatronFolder",
    "backend_of",
    "built_by_megatron",
    "find_place",
    "is_marker",
]

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG = "metadata.json"  # of a distributed checkpoint
MODEL = re.compile(r"mp_rank_(\d{1,6})(?:_(\d{1,6}))?(?:_(\d{1,6}))?/(model_optim_rng|model_rng)\.pt")
RANK_FOLDER = re.compile(r"mp_rank_\d{1,6}(_\d{1,6}){0,2}")

_ITERATION = re.compile(r"iter_\d{7,}|release")
_MAX_KEYS = 10_000
_MAX_METADATA_BYTES = 4096  # bytes of metadata.json
_MAX_TRACKER_BYTES = 64  # bytes of the tracker
_MAX_LISTED = 10


@dataclass(frozen=True, slots=True)
class MegatronFolder:
    """A checkpoint's folder in the store ("" for the root), and the tracker if it names the folder."""

    folder: str
    tracker: str | None
    classic: bool


def is_marker(name: str) -> bool:
    """Whether a folder with such a file holds Megatron checkpoints.

    Args:
        name: the file's name.
    """
    return name in (TRACKER, "model_optim_rng.pt", "model_rng.pt")


def find_place(store: Store) -> MegatronFolder | None:
    """Find the checkpoint; None if there is none.

    Args:
        store: a store whose root is the save folder or a checkpoint.

    Raises:
        NotFound: the tracker names a folder that is missing.
        UsageError: there are several checkpoints and no tracker, or the tracker names none.
    """
    if backend_of(store) is not None:
        return MegatronFolder("", None, classic=False)
    named = _named(store)
    if named is None and exists(store, TRACKER):
        raise UsageError(f"{store.url}/{TRACKER} names no iteration", hint="open the folder of one iteration itself")
    if named is not None:
        if next(iter(store.list(named)), None) is None:
            raise NotFound(
                f"{store.url}/{TRACKER} names {named}, but there is no such folder",
                hint="it was moved or deleted, or the save did not finish; open another iteration's folder itself",
            )
        return MegatronFolder(named, TRACKER, classic=backend_of(store, named) is None)
    keys = [info.key for info in islice(store.list(), _MAX_KEYS)]
    if any(MODEL.fullmatch(k) for k in keys):
        return MegatronFolder("", None, classic=True)
    folders = sorted({k.split("/", 1)[0] for k in keys if _ITERATION.fullmatch(k.split("/", 1)[0]) and _inside(k)})
    if len(folders) > 1:
        more = f" and {len(folders) - _MAX_LISTED} more" if len(folders) > _MAX_LISTED else ""
        raise UsageError(
            f"{store.url} holds several iterations and no {TRACKER}: {', '.join(folders[:_MAX_LISTED])}{more}",
            hint="open the folder of one of them",
        )
    return MegatronFolder(folders[0], None, classic=backend_of(store, folders[0]) is None) if folders else None


def backend_of(store: Store, folder: str = "") -> str | None:
    """The format that `metadata.json` names; None if there is no such file of Megatron's.

    Args:
        store: the store.
        folder: the checkpoint's folder; "" for the root.
    """
    key = f"{folder}/{CONFIG}" if folder else CONFIG
    if not exists(store, key) or (size := store.info(key).size) > _MAX_METADATA_BYTES:
        return None
    try:
        found = json.loads(store.read(key, 0, size).decode())
    except (ValueError, RecursionError):
        return None
    backend = found.get("sharded_backend") if isinstance(found, dict) else None
    return backend if isinstance(backend, str) else None


def _inside(key: str) -> bool:
    below = key.split("/", 1)[-1]
    return below == CONFIG or MODEL.fullmatch(below) is not None


def _named(store: Store) -> str | None:
    """The folder that the tracker names."""
    if not exists(store, TRACKER) or (size := store.info(TRACKER).size) > _MAX_TRACKER_BYTES:
        return None
    text = store.read(TRACKER, 0, size).decode(errors="replace").strip()
    if text == "release":
        return text
    return check_key(f"iter_{int(text):07d}") if text.isdecimal() and len(text) < 19 else None


@contextmanager
def built_by_megatron(where: str) -> Iterator[None]:
    """Report values that Megatron would not write, at any depth, as damage.

    Args:
        where: the checkpoint, for messages.

    Raises:
        IntegrityError: the body raised an error that is not ucformat's own.
    """
    try:
        yield
    except UcformatError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{where} holds values that Megatron does not write ({type(error).__name__}: {error})",
            hint="the files are damaged, or of a version that ucformat does not know; report it if Megatron reads them",
        ) from error
