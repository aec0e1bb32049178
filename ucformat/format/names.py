"""From the names of tensors to folder names: percent-encoded, never a path, never two alike where case is ignored."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["folder_names"]

_LONGEST = 200  # bytes; file systems allow 255
_RESERVED = frozenset({"zarr.json", "c"})


def folder_names(names: Iterable[str]) -> dict[str, str]:
    """A folder name for each name of one folder.

    All but letters, digits, `.`, `_` and `-` are percent-encoded as UTF-8, a leading dot too. A name gets a hash of
    itself as a suffix where it is longer than 200 bytes, reserved (`zarr.json`, `c`, `__…`), empty, or differs from
    another only in case. Readers take the folder from the manifest, never from the name.
    """
    plain = {name: _encode(name) for name in names}
    seen: dict[str, int] = {}
    for folder in plain.values():
        seen[folder.lower()] = seen.get(folder.lower(), 0) + 1
    return {
        name: folder if _is_safe(folder) and seen[folder.lower()] == 1 else _with_hash(name, folder)
        for name, folder in plain.items()
    }


def _encode(name: str) -> str:
    folder = quote(name, safe="", errors="surrogatepass").replace("~", "%7E")
    return "%2E" + folder[1:] if folder.startswith(".") else folder


def _is_safe(folder: str) -> bool:
    return 0 < len(folder) <= _LONGEST and folder.lower() not in _RESERVED and not folder.startswith("__")


def _with_hash(name: str, folder: str) -> str:
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    head = folder[: _LONGEST - 17].rstrip("%")
    return f"{'_%5F' + head[2:] if head.startswith('__') else head}~{digest}"
