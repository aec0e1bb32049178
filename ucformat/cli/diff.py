"""`ucp diff`: in what two checkpoints differ."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.catalogs import catalog_at
from ucformat.cli.options import CATALOG, command, ref_argument
from ucformat.cli.output import Heading, terminal_width
from ucformat.cli.text import count, plural, shape_text, shorten, tabbed, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.catalog.diff import Changed, Diff, TensorsDiff
    from ucformat.catalog.query import TensorEntry
    from ucformat.cli.output import Output

__all__ = ["diff"]

_PARTS = ("config", "topology", "producer", "metrics", "tensors")
_MOST = 20  # tensors of which only the values differ that people are shown


@command
@ref_argument("a", "A")
@ref_argument("b", "B")
@click.option(
    "--what",
    "parts",
    default=",".join(_PARTS),
    metavar="PARTS",
    help=f"What to compare, of {','.join(_PARTS)}.  [default: all]",
)
@click.option("--exit-code", "fail", is_flag=True, help="Exit with 1 if they differ, or may.")
@CATALOG
def diff(
    a: str,
    b: str,
    parts: str,
    fail: bool,  # noqa: FBT001
    catalog_url: str | None,
    out: Output,
) -> None:
    """Show in what checkpoint B differs from A: configuration, topology, versions, metrics, tensors.

    No tensor is read: the digests that were made when it was written tell whether its values are the same. Checkpoints
    that the catalog does not know are opened where they lie.
    """
    chosen = _chosen(parts)
    found = _diff(a, b, catalog_url)
    equal = not any(_differs(found, part) for part in chosen)
    out.result(
        lambda: _lines(found, (a, b), chosen, equal=equal),
        lambda: _data(found, chosen, equal=equal),
        lambda: _bare(found, chosen),
    )
    if fail and not equal:
        raise click.exceptions.Exit(1)


def _chosen(text: str) -> list[str]:
    chosen = [part.strip() for part in text.split(",")]
    if unknown := [part for part in chosen if part not in _PARTS]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(_PARTS)}", param_hint="'--what'")
    return [part for part in _PARTS if part in chosen]


def _diff(a: str, b: str, flag: str | None) -> Diff:
    """From the catalog if it knows both, else from what lies in storage."""
    from ucformat.cli.scratch import diff_opened
    from ucformat.errors import NotFound
    from ucformat.settings import load_settings

    if load_settings(catalog=flag).catalog_url() is None:
        return diff_opened(a, b, flag, None)
    with catalog_at(flag) as catalog:
        try:
            return catalog.diff(a, b)
        except NotFound:
            return diff_opened(a, b, flag, catalog)


def _differs(found: Diff, part: str) -> bool:
    return not found.tensors.equal if part == "tensors" else bool(getattr(found, part))


def _lines(found: Diff, names: tuple[str, str], chosen: Sequence[str], *, equal: bool) -> Iterator[str]:
    width = terminal_width()
    if equal:
        yield f"{' and '.join(names)} are equal in {', '.join(chosen)}"
        return
    yield Heading(shorten(" -> ".join(names), width))
    for part in chosen:
        if not _differs(found, part):
            continue
        yield ""
        if part == "tensors":
            yield from _tensors(found.tensors, width)
        else:
            changed: Sequence[Changed] = getattr(found, part)
            rows = [(c.path, _value(c.a), _value(c.b)) for c in changed]
            yield from table((part, *names), rows, left=3, shrink=(0, 1, 2), width=width)


def _value(value: Any) -> str:
    from ucformat.catalog.diff import MISSING

    if value is MISSING:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tensors(found: TensorsDiff, width: int | None) -> Iterator[str]:
    values = [c for c in found.changed if c.what == ("digest",)]
    shown = [c for c in found.changed if c.what != ("digest",)] + values[:_MOST]
    rows = [(t.name, t.state, "added", "", _tensor(t)) for t in found.added]
    rows += [(t.name, t.state, "removed", _tensor(t), "") for t in found.removed]
    for c in shown:
        what = ", ".join("values" if aspect == "digest" else aspect for aspect in c.what)
        x, y = _tensor(c.a), _tensor(c.b)
        rows.append((c.name, c.state, what, x, y if y != x else ""))
    if rows:
        head = ("tensor", "state", "differs in", "was", "is")
        yield from table(head, rows, left=5, shrink=(0, 2, 3, 4), width=width)
    if len(values) > _MOST:
        yield f"and {count(len(values) - _MOST)} more in values only"
    sums = [(found.same, "the same"), (found.unknown, "without digests to compare")]
    yield ", ".join(f"{plural(n, 'tensor')} {what}" for n, what in sums if n or what == "the same")


def _tensor(tensor: TensorEntry) -> str:
    return f"{tensor.dtype} {shape_text(tensor.shape)}"


def _data(found: Diff, chosen: Sequence[str], *, equal: bool) -> dict[str, Any]:
    data: dict[str, Any] = {side: _side(found, side) for side in ("a", "b")}
    data["equal"] = equal
    for part in _PARTS[:-1]:
        data[part] = [_change(c) for c in getattr(found, part)] if part in chosen else None
    t = found.tensors
    data["tensors"] = None
    if "tensors" in chosen:
        data["tensors"] = {
            "added": [_tensor_data(x) for x in t.added],
            "removed": [_tensor_data(x) for x in t.removed],
            "changed": [
                {"name": c.name, "state": c.state, "what": list(c.what), "a": _tensor_data(c.a), "b": _tensor_data(c.b)}
                for c in t.changed
            ],
            "unknown": t.unknown,
            "same": t.same,
        }
    return data


def _side(found: Diff, side: str) -> dict[str, Any]:
    entry = getattr(found, side)
    return {"id": entry.id, "name": entry.name, "url": entry.url}


def _change(change: Changed) -> dict[str, Any]:
    from ucformat.catalog.diff import MISSING

    sides = {"a": change.a, "b": change.b}
    return {"path": change.path} | {side: value for side, value in sides.items() if value is not MISSING}


def _tensor_data(tensor: TensorEntry) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "state": tensor.state,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
        "digest": tensor.digest,
    }


def _bare(found: Diff, chosen: Sequence[str]) -> Iterator[str]:
    for part in chosen:
        if part == "tensors":
            t = found.tensors
            every = [*((x, "added") for x in t.added), *((x, "removed") for x in t.removed)]
            every += [(c.b, ",".join(c.what)) for c in t.changed]
            for x, what in every:
                yield tabbed((part, x.name, x.state, what))
        else:
            for change in getattr(found, part):
                yield tabbed((part, change.path, _value(change.a), _value(change.b)))
