"""`ucp diff`: the differences between two checkpoints."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from ucformat.catalog.as_json import change_data, tensor_data
from ucformat.cli.ui.catalogs import opened_catalog
from ucformat.cli.ui.options import CATALOG, SOURCE, bundle, command, ref_argument
from ucformat.cli.ui.output import Heading, terminal_width
from ucformat.cli.ui.text import tabbed, table
from ucformat.cli.ui.where import workers_option
from ucformat.texts import count, plural, shape_text, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.content import ListedTensor
    from ucformat.catalog.diff import Changed, Diff
    from ucformat.catalog.entries import Entry
    from ucformat.checkpoint import Checkpoint
    from ucformat.cli.ui.output import Output
    from ucformat.jobs.compare import TensorDifference

_PARTS = ("config", "topology", "producer", "metrics", "tensors")
_MAX_VALUE_ROWS = 20  # tensors that are listed although only their values differ


@dataclass(frozen=True)
class Reading:
    """Whether values are read, and how many blocks at once."""

    values: bool = False
    workers: int | None = None


@command
@ref_argument("a", "A")
@ref_argument("b", "B")
@click.option(
    "--what",
    "parts",
    default=",".join(_PARTS),
    metavar="PARTS",
    help=f"Parts to compare, comma-separated: {','.join(_PARTS)}.  [default: all]",
)
@bundle(
    "reading",
    Reading,
    click.option(
        "--values",
        is_flag=True,
        help="Also read the tensors and show by how much their values differ.",
    ),
    workers_option("blocks that --values compares", "one for each core, at most 4"),
)
@click.option("--exit-code", "fail", is_flag=True, help="Exit with 1 if they differ or may differ.")
@SOURCE
@CATALOG
def diff(
    a: str,
    b: str,
    parts: str,
    reading: Reading,
    options: dict[str, Any] | None,
    fail: bool,  # noqa: FBT001
    out: Output,
) -> None:
    """Show how checkpoint B differs from A: configuration, topology, versions, metrics, tensors.

    Without --values no tensor is read; tensors are compared by the digests from when they were
    written. Checkpoints that are not in the catalog are opened in place.
    """
    chosen = _chosen(parts)
    if reading.values and "tensors" not in chosen:
        raise click.UsageError("--values compares tensors, which --what leaves out")
    opened = _opener(options)
    differences = _Differences(
        # with options the checkpoints have to be opened, whatever the catalog has of them
        _diff(a, b, opened, is_recorded=not options),
        _read_values(opened(a), opened(b), reading.workers, out) if reading.values else None,
        lambda: (_older(a, opened), _older(b, opened)),
    )
    equal = not any(differences.differs(part) for part in chosen)
    out.result(
        lambda: _lines(differences, (a, b), chosen, equal=equal),
        lambda: _data(differences, chosen, equal=equal),
        lambda: _bare(differences, chosen),
    )
    if fail and not equal:
        raise click.exceptions.Exit(1)


@dataclass(frozen=True)
class _Differences:
    """The differences in the catalog or manifests, and those of the values if they were read.

    Attributes:
        count_older: returns how many tensors of each side are of earlier steps than it; None where it
            cannot be opened.
    """

    diff: Diff
    values: list[TensorDifference] | None
    count_older: Callable[[], tuple[int | None, int | None]]

    def changed(self, part: str) -> Sequence[Changed]:
        """The changes in a part other than the tensors."""
        changed: Sequence[Changed] = getattr(self.diff, part)
        return changed

    def differs(self, part: str) -> bool:
        """Whether a part differs or may differ."""
        if part != "tensors":
            return bool(self.changed(part))
        t = self.diff.tensors
        if self.values is None:
            return not t.equal
        other = any(set(c.aspects) & {"shape", "dtype"} for c in t.changed)
        return bool(t.added or t.removed) or other or not all(v.equal for v in self.values)


def _chosen(text: str) -> list[str]:
    chosen = [part.strip() for part in text.split(",")]
    if unknown := [part for part in chosen if part not in _PARTS]:
        raise click.BadParameter(
            f"{unknown[0]!r} is not one of {', '.join(_PARTS)}", param_hint="'--what'"
        )
    return [part for part in _PARTS if part in chosen]


def _opener(options: dict[str, Any] | None) -> Callable[[str], Checkpoint]:
    """A function that opens each checkpoint once."""
    from ucformat.cli.ui.options import open_any

    return cache(partial(open_any, options=options))


def _diff(a: str, b: str, opened: Callable[[str], Checkpoint], *, is_recorded: bool) -> Diff:
    """Compare two checkpoints in the catalog if it has both, else their manifests."""
    from ucformat.errors import NotFound
    from ucformat.settings import load_settings

    if load_settings().catalog_url() is None:
        return _diff_opened(a, b, None, opened)
    with opened_catalog() as catalog:
        try:
            if is_recorded:
                return catalog.diff(a, b)
        except NotFound:
            pass
        return _diff_opened(a, b, catalog, opened)


def _lines(
    differences: _Differences, names: tuple[str, str], chosen: Sequence[str], *, equal: bool
) -> Iterator[str]:
    width = terminal_width()
    if equal:
        yield f"{' and '.join(names)} are equal in {', '.join(chosen)}"
        yield from _older_lines(differences, names, chosen)
        return
    yield Heading(shorten(" -> ".join(names), width))
    for part in chosen:
        if not differences.differs(part):
            continue
        yield ""
        if part == "tensors":
            yield from _tensors(differences, width)
        else:
            rows = [(c.path, _value(c.a), _value(c.b)) for c in differences.changed(part)]
            yield from table((part, *names), rows, left=3, shrink=(0, 1, 2), width=width)
    yield from _older_lines(differences, names, chosen)


def _older_lines(
    differences: _Differences, names: tuple[str, str], chosen: Sequence[str]
) -> Iterator[str]:
    counts = differences.count_older() if "tensors" in chosen else ()
    for name, older in zip(names, counts, strict=False):
        if older:
            yield f"{plural(older, 'tensor')} of {name} {'is' if older == 1 else 'are'} older than its step"


def _value(value: Any) -> str:
    from ucformat.catalog.diff import MISSING

    if value is MISSING:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tensors(differences: _Differences, width: int | None) -> Iterator[str]:

    t = differences.diff.tensors
    rows = [(x.name, x.state, "added", "", _tensor(x)) for x in t.added]
    rows += [(x.name, x.state, "removed", _tensor(x), "") for x in t.removed]
    alone = [c for c in t.changed if c.aspects == ("digest",)]
    other = [c for c in t.changed if c.aspects != ("digest",)]
    for c in [*other, *(alone[:_MAX_VALUE_ROWS] if differences.values is None else [])]:
        what = ", ".join("values" if aspect == "digest" else aspect for aspect in c.aspects)
        x, y = _tensor(c.a), _tensor(c.b)
        rows.append((c.name, c.state, what, *((x, y) if x != y else ("", ""))))
    if rows:
        head = ("tensor", "state", "differs in", "was", "is")
        yield from table(head, rows, left=5, shrink=(0, 2, 3, 4), width=width)
    if differences.values is not None:
        yield from (
            ["", *_value_lines(differences.values, width)]
            if rows
            else _value_lines(differences.values, width)
        )
        return
    if len(alone) > _MAX_VALUE_ROWS:
        yield f"and {count(len(alone) - _MAX_VALUE_ROWS)} more in values only"
    yield f"{plural(t.same, 'tensor')} the same" + (
        f", {count(t.unknown)} without digests to compare; --values reads them" if t.unknown else ""
    )


def _tensor(tensor: ListedTensor) -> str:
    return f"{tensor.dtype} {shape_text(tensor.shape)}"


def _data(differences: _Differences, chosen: Sequence[str], *, equal: bool) -> dict[str, Any]:

    data: dict[str, Any] = {
        side: _side(getattr(differences.diff, side)) | {"older": older}
        for side, older in zip("ab", differences.count_older(), strict=True)
    }
    data["equal"] = equal
    for part in _PARTS[:-1]:
        data[part] = [change_data(c) for c in differences.changed(part)] if part in chosen else None
    t = differences.diff.tensors
    data["tensors"] = None
    if "tensors" in chosen:
        data["tensors"] = {
            "added": [_tensor_data(x) for x in t.added],
            "removed": [_tensor_data(x) for x in t.removed],
            "changed": [
                {"name": c.name, "state": c.state, "aspects": list(c.aspects)}
                | {"a": _tensor_data(c.a), "b": _tensor_data(c.b)}
                for c in t.changed
            ],
            "unknown": t.unknown,
            "same": t.same,
            "values": None if differences.values is None else _value_data(differences.values),
        }
    return data


def _side(entry: Entry) -> dict[str, Any]:
    return {"id": entry.id, "name": entry.name, "url": entry.url}


def _tensor_data(tensor: ListedTensor) -> dict[str, Any]:
    return tensor_data(tensor) | {"digest": tensor.digest}


def _bare(differences: _Differences, chosen: Sequence[str]) -> Iterator[str]:
    for part in chosen:
        if part == "tensors":
            t = differences.diff.tensors
            every = [*((x, "added") for x in t.added), *((x, "removed") for x in t.removed)]
            every += [(c.b, ",".join(c.aspects)) for c in t.changed]
            for x, what in every:
                yield tabbed((part, x.name, x.state, what))
            for v in differences.values or ():
                if not v.equal:
                    yield tabbed(
                        (
                            "values",
                            v.name,
                            v.state,
                            str(v.differing),
                            repr(v.max_abs),
                            repr(v.max_rel),
                        )
                    )
        else:
            for change in differences.changed(part):
                yield tabbed((part, change.path, _value(change.a), _value(change.b)))


def _read_values(
    left: Checkpoint, right: Checkpoint, workers: int | None, out: Output
) -> list[TensorDifference]:
    """Compare the tensors with the same name, state and shape in both checkpoints, element by element."""
    from ucformat.jobs.compare import compare

    with out.progress("comparing") as progress:
        return list(compare(left, right, workers=workers, progress=progress))


def _value_data(values: Sequence[TensorDifference]) -> list[dict[str, Any]]:
    """The JSON of compared values."""
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


def _value_lines(values: Sequence[TensorDifference], width: int | None) -> Iterator[str]:
    """A line for each tensor whose values differ, and the number of the others."""
    rows = [
        (
            v.name,
            v.state,
            count(v.differing),
            count(v.elements),
            f"{v.max_abs:.3g}",
            f"{v.max_rel:.3g}",
            count(v.nan_mismatches) if v.nan_mismatches else "-",
        )
        for v in values
        if not v.equal
    ]
    if rows:
        head = ("values of", "state", "differ", "of", "max abs", "max rel", "nan in one")
        yield from table(head, rows, left=2, width=width)
    same = [v for v in values if v.equal]
    by_digest = sum(v.by_digest for v in same)
    yield f"{plural(len(same), 'tensor')} the same, {count(by_digest)} of them by their digests"


def _older(ref: str, opened: Callable[[str], Checkpoint]) -> int | None:
    """How many tensors of a checkpoint are older than its step; None if it cannot be opened."""
    from ucformat.errors import UcformatError

    try:
        return len(opened(ref).older)
    except UcformatError:  # the catalog may know what is gone
        return None


def _diff_opened(
    a: str, b: str, catalog: Catalog | None, opened: Callable[[str], Checkpoint]
) -> Diff:
    """Compare the manifests of two checkpoints, and the metrics that the catalog has of them."""
    from ucformat.catalog.catalog import Catalog

    with (
        TemporaryDirectory(prefix="ucformat-") as folder,
        Catalog(f"{folder}/catalog.db") as scratch,
    ):
        return scratch.diff(*(_record(opened(ref), scratch, catalog) for ref in (a, b)))


def _record(ck: Checkpoint, scratch: Catalog, catalog: Catalog | None) -> str:
    """Record a checkpoint in the scratch catalog, and return its id."""
    from ucformat.errors import NotFound

    manifest = ck.manifest.model_copy(update={"id": ck.id})
    if catalog is not None:
        with suppress(NotFound):
            manifest = manifest.model_copy(update={"metrics": dict(catalog.get(ck.id).metrics)})
    scratch.record(manifest, ck.home, kind=ck.kind)
    return ck.id
