"""The real checkpoints of `tests/sources`, made once for both folders."""

from __future__ import annotations

from tests.sources.conftest import chosen, shared

__all__ = ["chosen", "shared"]
