"""What a verification found."""

from __future__ import annotations

from dataclasses import dataclass

from ucformat.errors import ChecksumError
from ucformat.format.structure import Problem  # noqa: TC001 - ranks tell each other reports, by their annotations

__all__ = ["Report"]


@dataclass(frozen=True, slots=True)
class Report:
    """What was verified, and what is wrong with it; true where nothing is.

    `bytes_verified` were compared with a checksum; of `bytes_unverified` it is only known that they are there. In the
    places `unprotected` lie files of a virtual checkpoint, and nothing there says that they are needed.
    """

    url: str
    kind: str
    tensors: int
    bytes_verified: int
    bytes_unverified: int
    problems: tuple[Problem, ...]
    unprotected: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.problems

    def raise_if_damaged(self) -> None:
        """ChecksumError that names every problem, if there is one."""
        if self.problems:
            raise ChecksumError(
                f"{self.url} is damaged:\n  " + "\n  ".join(map(str, self.problems)),
                hint="restore these files from another copy of the checkpoint",
            )
