"""What somebody may have seen of what ucformat did, and the secrets that must not be in it."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.s3 import CANARY
from ucformat.cli.main import ucp
from ucformat.errors import UcformatError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["TOKEN", "WORD", "Seen", "written"]

TOKEN = "canary/IQoJb3JpZ2luTokenThatNobodyMaySee=="  # noqa: S105 - nobody takes it
WORD = TOKEN.rpartition("/")[2]
SECRETS = (CANARY, TOKEN, CANARY.rpartition("/")[2], WORD)


class Seen:
    """All text that somebody may have seen."""

    def __init__(self, log: pytest.LogCaptureFixture) -> None:
        self.texts: list[str] = []
        self._log = log

    def error(self, error: BaseException) -> None:
        self.texts += [str(error), repr(error), "".join(traceback.format_exception(error))]

    def run(self, *words: object) -> int:
        """Run `ucp`; its exit code."""
        result = CliRunner().invoke(ucp, [*map(str, words)])
        self.texts += [result.output, result.stdout, result.stderr]
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            self.error(result.exception)
        return result.exit_code

    def fails(self, act: Callable[[], object]) -> None:
        with pytest.raises(UcformatError) as failure:
            act()
        self.error(failure.value)

    def check(self, *more: str) -> None:
        """Nothing secret in all this, nor in the log."""
        records = [
            f"{r.getMessage()} {r.args} {r.exc_text} {r.__dict__}" for r in self._log.records
        ]
        for text in (*self.texts, *records, *more):
            for secret in SECRETS:
                assert secret not in text, text[max(0, text.index(secret) - 200) :][:400]


def written(folder: Path) -> str:
    """All that is in the catalog's files."""
    return "".join(f.read_bytes().decode("latin-1") for f in folder.glob("catalog.db*"))
