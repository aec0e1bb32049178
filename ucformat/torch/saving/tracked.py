"""What `log_to` of saves does: a tracker gets a reference to each checkpoint that is committed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ucformat.redacted import redacted

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.torch.saving.options import RunArguments

_log = logging.getLogger("ucformat")


def logger_of(arguments: RunArguments, rank: int) -> Callable[[str], None] | None:
    """A function that logs a reference to the checkpoint at a place; None without `log_to`, and on other ranks than 0.

    It logs to the run that is active now. A failure of that function is a warning, since the checkpoint is committed.

    Raises:
        UsageError: no run is active, or `log_to` is no tracker.
        UnsupportedError: the tracker's package is not installed.
    """
    tracker = arguments.get("log_to")
    if tracker is None or rank:
        return None
    from ucformat.jobs.logged import bind, reference_to  # few saves need it

    log, certified = bind(tracker), arguments.get("certify") or None

    def log_place(url: str) -> None:
        try:
            log(reference_to(url, certified=certified))
        except Exception as error:  # noqa: BLE001 - of any tracker
            _log.warning(
                "%s is committed, but no reference to it was logged: %s: %s",
                *(url, type(error).__name__, redacted(str(error))),
            )

    return log_place
