"""One error for every file that is not built as Megatron builds it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ucformat.errors import IntegrityError, UcformatError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["built_by_megatron"]


@contextmanager
def built_by_megatron(where: str) -> Iterator[None]:
    """Values of other kinds than Megatron's, at whatever place of a nested dictionary, are damage: IntegrityError."""
    try:
        yield
    except UcformatError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{where} holds something else than Megatron writes there ({type(error).__name__}: {error})",
            hint="the files are damaged, or of a version that ucformat does not know; report it if Megatron reads them",
        ) from error
