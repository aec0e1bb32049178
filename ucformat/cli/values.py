"""What `ucp diff --values` says: how far the values of tensors are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.cli.text import count, plural, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.cli.output import Output
    from ucformat.jobs.compare import TensorDifference

__all__ = ["read_values", "value_data", "value_lines"]


def read_values(
    a: str, b: str, options: dict[str, Any] | None, workers: int | None, out: Output
) -> list[TensorDifference]:
    """Compare what both checkpoints hold in the same state and shape, element by element."""
    from ucformat.cli.source_options import open_any
    from ucformat.jobs.compare import compare

    left, right = open_any(a, options), open_any(b, options)
    with out.progress("comparing") as progress:
        return list(compare(left, right, workers=workers, progress=progress))


def value_data(values: Sequence[TensorDifference]) -> list[dict[str, Any]]:
    """As JSON has them."""
    return [
        {
            "name": v.name,
            "state": v.state,
            "shape": list(v.shape),
            "dtypes": list(v.dtypes),
            "equal": v.equal,
            "elements": v.elements,
            "differing": v.differing,
            "nan_mismatches": v.nan_mismatches,
            "max_abs": v.max_abs,
            "max_rel": v.max_rel,
            "by_digest": v.by_digest,
        }
        for v in values
    ]


def value_lines(values: Sequence[TensorDifference], width: int | None) -> Iterator[str]:
    """A line for each tensor whose values differ, and how many do not."""
    rows = [
        (v.name, v.state, count(v.differing), count(v.elements), f"{v.max_abs:.3g}", f"{v.max_rel:.3g}", _nan(v))
        for v in values
        if not v.equal
    ]
    if rows:
        head = ("values of", "state", "differ", "of", "max abs", "max rel", "nan in one")
        yield from table(head, rows, left=2, width=width)
    same = [v for v in values if v.equal]
    known = sum(v.by_digest for v in same)
    yield f"{plural(len(same), 'tensor')} the same, {count(known)} of them by their digests"


def _nan(value: TensorDifference) -> str:
    return count(value.nan_mismatches) if value.nan_mismatches else "-"
