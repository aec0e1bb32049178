"""Paths of requests as they were sent, in which a slash of a name is still told from one between names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope


def raw_path(scope: Scope) -> str:
    """The path of a request, not decoded and without its query."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.partition(b"?")[0].decode("latin-1")
