"""`Certificate`: what the ranks of a training hold, compared with what a checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from ucformat.errors import NotCertified, first_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Certificate", "CertificateEntry"]

#: What a comparison may say of a tensor or a value that is not equal.
Verdict = Literal["different", "missing", "unexpected", "cast", "uninitialised", "older"]

_LISTED = 100  # entries of each kind that a document has
_SHOWN = 20  # lines of an error


class CertificateEntry(NamedTuple):
    """A tensor, or a value, in a certificate.

    Attributes:
        name: of the tensor in the state; of a value, its path.
        state: of the tensor; empty for a value.
        ranks: those that hold it, or that hold something else than what is stored; ascending. Empty:
            no rank.
        detail: what is not equal.
    """

    name: str
    state: str
    ranks: tuple[int, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        tensor = f"{self.name} ({self.state})" if self.state else self.name
        word = "rank" if len(self.ranks) == 1 else "ranks"
        ranks = f" on {word} {ranks_text(self.ranks)}" if self.ranks else ""
        return f"{tensor}{ranks}{self.detail and f': {self.detail}'}"


@dataclass(frozen=True, slots=True)
class Certificate:
    """Whether a training state is the one that was saved; true only if everything is equal.

    `url`, `id` and `step` are those of the checkpoint. `layout` is that of the state: the number of
    ranks as `world`, and the sizes of mesh axes. `values` is the number of plain values that were
    compared, `left` that of stored tensors that were not asked for, `nbytes` are the bytes of the
    tensors that this rank holds, and `seconds` the duration on this rank.

    Attributes:
        equal: tensors whose elements are all held, and equal on every rank that holds them.
        different: tensors and values that are not as they were saved on some rank, and tensors of
            which no rank holds some part.
        missing: what the state has and the checkpoint does not.
        unexpected: what the checkpoint has, and no rank of the state holds.
        cast: tensors of another dtype than the stored ones, and equal to these when they are cast
            likewise. They make the certificate negative, unless it was made with `cast=True`.
        uninitialised: stored states of parameters for which the optimizer has not made any yet.
        older: tensors that are equal to what is stored, which is of an earlier step than the
            checkpoint. They make the certificate negative, unless it was made with `strict_step=False`.
    """

    url: str
    id: str
    step: int | None
    created: datetime
    layout: Mapping[str, Any]
    values: int
    left: int
    nbytes: int
    seconds: float
    may_cast: bool = False
    equal: tuple[CertificateEntry, ...] = ()
    different: tuple[CertificateEntry, ...] = ()
    missing: tuple[CertificateEntry, ...] = ()
    unexpected: tuple[CertificateEntry, ...] = ()
    cast: tuple[CertificateEntry, ...] = ()
    uninitialised: tuple[CertificateEntry, ...] = ()
    older: tuple[CertificateEntry, ...] = ()
    may_be_older: bool = False

    def __bool__(self) -> bool:
        return not any(self._faults().values())

    def _faults(self) -> dict[Verdict, tuple[CertificateEntry, ...]]:
        return {
            verdict: getattr(self, verdict)
            for verdict in get_args(Verdict)
            if not (verdict == "cast" and self.may_cast)
            and not (verdict == "older" and self.may_be_older)
        }

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from ucformat.drawing import card

        rows = [
            (_MEANING[verdict], str(entry))
            for verdict, entries in self._faults().items()
            for entry in entries
        ]
        good = "The state is the one that was saved" if self else "The state is not what was saved"
        facts = {
            "checkpoint": self.url,
            "step": self.step,
            "equal tensors": len(self.equal),
            "values": self.values,
            "not asked for": self.left or None,
            "cast": len(self.cast) or None,
            "older": len(self.older) or None,
            "layout": ", ".join(f"{k} {v}" for k, v in self.layout.items()),
        }
        return card(good, facts, ("what", "where") if rows else (), rows)

    def checked(self) -> Certificate:
        """Return the certificate if it is positive.

        Raises:
            NotCertified: it is negative; the message names tensors and ranks.
        """
        if self:
            return self
        lines = [
            f"{_MEANING[verdict]}: {entry}"
            for verdict, entries in self._faults().items()
            for entry in entries
        ]
        error = NotCertified(
            f"the state is not the one that was saved in {self.url}:\n  "
            + "\n  ".join(first_lines(lines, _SHOWN)),
            hint=(
                "training on would go on from something else; leave= names what the state is not "
                "meant to have"
            ),
        )
        error.certificate = self
        raise error

    def document(self) -> dict[str, Any]:
        """Return the certificate as JSON: of each kind of entries but the equal ones the first 100."""
        counts = {
            field.name: len(getattr(self, field.name))
            for field in fields(self)
            if field.name == "equal" or field.name in get_args(Verdict)
        }
        return {
            "certificate": 1,
            "id": self.id,
            "url": self.url,
            "step": self.step,
            "created": self.created.astimezone(UTC).isoformat(),
            "verdict": bool(self),
            "layout": dict(self.layout),
            "values": self.values,
            "left": self.left,
            "may_cast": self.may_cast,
            "may_be_older": self.may_be_older,
            "counts": counts,
            **{
                verdict: list(map(_entry_document, getattr(self, verdict)[:_LISTED]))
                for verdict in get_args(Verdict)
            },
        }


_MEANING: dict[Verdict, str] = {
    "different": "different",
    "missing": "not in the checkpoint",
    "unexpected": "held by no rank",
    "cast": "cast",
    "uninitialised": "never initialised",
    "older": "older than the checkpoint",
}


def _entry_document(entry: CertificateEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "state": entry.state,
        "ranks": ranks_text(entry.ranks),
        "detail": entry.detail,
    }


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks, ascending, as in `0-3, 8`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)
