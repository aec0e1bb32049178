"""Faults of one checkpoint among many: each is told with its place, and none stops the others."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ucformat.errors import UcformatError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["naming"]


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Turn what nobody thought of into an error that names the place whose files brought it out."""
    try:
        yield
    except UcformatError:
        raise
    except MemoryError as error:
        raise UcformatError(f"{place}: out of memory", hint="do this where there is more of it") from error
    except Exception as error:
        raise UcformatError(
            f"{place} makes ucformat fail: {type(error).__name__}: {error}",
            hint="that is a fault of ucformat's: please report it, with the small files of that place",
        ) from error
