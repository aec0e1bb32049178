"""What the rooms below warn of, shown on stderr while a command runs."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.cli.output import Output

__all__ = ["hearing"]


class _Handler(logging.Handler):
    def __init__(self, out: Output) -> None:
        super().__init__(logging.WARNING)
        self.out = out

    def emit(self, record: logging.LogRecord) -> None:
        """Show a warning as a line."""
        self.out.warn(record.getMessage())


@contextmanager
def hearing(out: Output) -> Iterator[None]:
    """In the block, what ucformat warns of is shown."""
    logger, handler = logging.getLogger("ucformat"), _Handler(out)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
