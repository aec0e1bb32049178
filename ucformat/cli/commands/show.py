"""`ucp show`: the contents of a checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from ucformat.catalog.as_json import entry_data, instant
from ucformat.cli.ui.options import CATALOG, OPENING, SRC, STATES, Opening, command
from ucformat.cli.ui.output import Heading, terminal_width
from ucformat.cli.ui.text import field, table
from ucformat.cli.ui.timings import timing_lines
from ucformat.errors import UsageError, first_names
from ucformat.geometry.amounts import by_state, parameters
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import OUTDATED, PART_OF
from ucformat.texts import bytes_text, count, moment, plural, shape_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import CertificationEntry, Entry, HoldEntry, VerificationEntry
    from ucformat.checkpoint import Checkpoint
    from ucformat.cli.ui.output import Output
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.readable import Loss
    from ucformat.schema.manifest import Manifest


# The part of `ucp show` that comes from the catalog.


@dataclass(frozen=True)
class Recorded:
    """A checkpoint in the catalog, its parents as JSON, and its tensors if they are needed."""

    entry: Entry
    parents: tuple[dict[str, Any], ...]
    tensors: tuple[TensorInfo, ...] = ()

    def data(self) -> dict[str, Any]:
        """The JSON."""
        return entry_data(self.entry) | {"parents": list(self.parents)}

    def lines(self, here: str | None, width: int | None) -> Iterator[str]:
        """The lines for people."""
        for label, text in self._rows(here):
            yield from field(label, text, width)

    def _rows(self, here: str | None) -> Iterator[tuple[str, str]]:
        entry = self.entry
        if entry.run is not None:
            yield "run", entry.run
        if entry.state != "committed":
            yield "state", _state(entry)
        if entry.aliases:
            yield "alias", ", ".join(entry.aliases)
        if entry.tags:
            yield "tag", ", ".join(entry.tags)
        if entry.metrics:
            yield (
                "metric",
                ", ".join(f"{name} {value:.6g}" for name, value in entry.metrics.items()),
            )
        yield from _annotations(entry)
        for parent in self.parents:
            yield "from", f"{parent['name']} ({parent['kind']})"
        if entry.verified is not None:
            yield "verified", _verified(entry.verified)
        if entry.certified is not None:
            yield "certified", _certified(entry.certified)
        for url in entry.urls:
            if url != here:
                yield "place" if here is None else "also in", url


def _annotations(entry: Entry) -> Iterator[tuple[str, str]]:
    """Holds and notes, and which annotations are from documents of other catalogs."""
    for hold in entry.holds:
        yield f"hold {hold.id}", _hold(hold)
    for note in entry.notes:
        yield "note", f"{note.text} ({note.who}, {moment(note.created)})"
    if entry.from_documents:
        yield "imported", f"from documents beside it: {', '.join(entry.from_documents)}"


def _state(entry: Entry) -> str:
    if entry.state != "deleted" or entry.deleted is None:
        return entry.state
    until = (
        "" if entry.purge_after is None else f", can be restored until {moment(entry.purge_after)}"
    )
    return f"deleted {moment(entry.deleted)}{until}"


def _hold(hold: HoldEntry) -> str:
    until = "" if hold.until is None else f", until {moment(hold.until)}"
    return f"{hold.reason}{until} ({hold.who}, {moment(hold.created)})"


def _verified(verification: VerificationEntry) -> str:
    result = (
        "intact" if verification.ok else f"damaged: {plural(len(verification.problems), 'problem')}"
    )
    return f"{moment(verification.at)}, {result}"


def _certified(certification: CertificationEntry) -> str:
    document = certification.document
    layout = ", ".join(f"{axis} {size}" for axis, size in document["layout"].items())
    allowed = {"equal"} | ({"cast"} if document["may_cast"] else set())
    allowed |= {"older"} if document.get("may_be_older") else set()
    unequal = sum(n for kind, n in document["counts"].items() if kind not in allowed)
    result = "as saved" if certification.ok else f"{plural(unequal, 'difference')}"
    return f"{moment(certification.at)}, {layout}: {result}"


def look_up(ref: str, out: Output, *, tensors: bool = False) -> Recorded | None:
    """Look up a checkpoint in the catalog, and print a note if the catalog is not available.

    Returns:
        The checkpoint; None if the catalog does not have it, or there is no catalog.
    """
    from ucformat.errors import NotFound, UcformatError
    from ucformat.settings import load_settings

    try:
        url = load_settings().existing_catalog()
        if url is None:
            return None
        from ucformat.catalog.catalog import Catalog

        with Catalog(url, read_only=True) as catalog:
            return _look_up(catalog, ref, tensors=tensors)
    except NotFound:
        return None
    except UcformatError as error:
        out.note(f"the catalog is not available: {error.message}")
        return None


def _look_up(catalog: Catalog, ref: str, *, tensors: bool) -> Recorded:
    from ucformat.geometry.tensor import TensorInfo

    entry = _find(catalog, ref)
    above = catalog.lineage(entry.id, depth=1)
    parents = [(e.kind, above.nodes[e.parent]) for e in above.edges]
    listed = catalog.tensors(entry.id) if tensors else ()
    return Recorded(
        entry,
        tuple(
            {"kind": kind, "id": node.id, "name": node.name, "url": node.url}
            for kind, node in parents
        ),
        tuple(TensorInfo(t.name, t.state, t.dtype, t.shape) for t in listed),
    )


def _find(catalog: Catalog, ref: str) -> Entry:
    """Look up a checkpoint; for run@step also one that is gone, the last of them."""
    from ucformat.catalog.refs import parse_ref
    from ucformat.errors import NotFound

    try:
        return catalog.get(ref)
    except NotFound:
        parsed = parse_ref(ref)
        if parsed.run is None or not isinstance(parsed.at, int):
            raise
        from ucformat.catalog.filter.syntax import quoted  # which other references do not need

        run = f"run = {quoted(parsed.run)}"
        entries = catalog.find(f"{run} and step = {parsed.at} and state != 'committed'", limit=1)
        if not entries:
            raise
        return entries[0]


_MAX_LISTED = 20  # unread files that are listed


@command
@SRC
@click.option(
    "-t",
    "--tensors",
    "globs",
    metavar="GLOB",
    multiple=True,
    help="List the tensors whose names match: '*' for all, '*.bias', … May be repeated.",
)
@STATES
@click.option(
    "--timings",
    is_flag=True,
    help="Show how long each rank took to save it, and to load the one before it.",
)
@OPENING
@CATALOG
def show(
    src: str,
    globs: tuple[str, ...],
    states: tuple[str, ...],
    timings: bool,  # noqa: FBT001
    opening: Opening,
    out: Output,
) -> None:
    """Show what a checkpoint contains: its writer, step, layout, parameters, tensors by state, objects and assets.

    With --view also how much of the whole checkpoint the view is. Reads a few kilobytes, regardless
    of the checkpoint's size. Also shows the checkpoint's entry in the catalog; if its files are
    gone, only that.
    """
    if timings:
        if globs or states:
            raise UsageError("--timings excludes -t and --state", hint="give one of them")
        _show_timings(opening.open(src), out)
        return
    summary, every, recorded = _opened(src, opening, out)
    tensors = _chosen(every, summary["aliases"] or {}, globs, states)
    summary |= _totals(tensors)

    def data() -> dict[str, Any]:
        listed = {"tensors": [_tensor(i) for i in tensors]} if globs else {}
        return summary | listed | {"catalog": None if recorded is None else recorded.data()}

    out.result(
        lambda: _list(tensors) if globs else _describe(summary, recorded),
        data,
        lambda: dict.fromkeys(i.name for i in tensors),
    )


def _show_timings(ck: Checkpoint, out: Output) -> None:
    """What the ranks recorded of the save, and of the load with which its launch began."""
    from ucformat.jobs.timings import load_timings, save_timings

    manifest = _own_manifest(ck)
    saved = None if manifest is None else save_timings(manifest)
    loads = [] if manifest is None else load_timings(manifest)

    def lines() -> Iterator[str]:
        width = terminal_width()
        if saved is None:
            yield "no training has recorded how long ranks took to save it"
        else:
            yield from timing_lines("saved", saved, "writers", width)
        for load in loads:
            yield from timing_lines(f"loaded {load['url']}", load, "readers", width)

    out.result(lines, lambda: {"url": ck.url, "save": saved, "loads": loads})


def _opened(
    src: str, opening: Opening, out: Output
) -> tuple[dict[str, Any], Sequence[TensorInfo], Recorded | None]:
    """The summary of a checkpoint, its tensors, and its entry in the catalog."""
    from ucformat.errors import NotFound

    try:
        ck = opening.open(src)
    except NotFound as gone:
        recorded = look_up(src, out, tensors=True)
        if recorded is None:
            raise
        entry = recorded.entry
        forget = f" (if it is gone: ucp reindex {entry.urls[0]} --forget)" if entry.urls else ""
        out.note(f"{gone.message}{forget}; showing its entry in the catalog")
        return _from_catalog(recorded.entry, recorded.tensors), recorded.tensors, recorded
    manifest = _own_manifest(ck)
    ref = ck.home if manifest is None else manifest.id
    return _summary(ck), list(ck.tensors.values()), look_up(ref, out)


def _own_manifest(ck: Checkpoint) -> Manifest | None:
    """The manifest of a universal checkpoint; None of a view, or a foreign checkpoint, of which it takes pydantic."""
    return None if ck.universal is None or ck.viewed else ck.universal.manifest


def _chosen(
    every: Sequence[TensorInfo],
    aliases: Mapping[str, str],
    globs: Sequence[str],
    states: Sequence[str],
) -> list[TensorInfo]:
    from ucformat.errors import TensorNotFound, UsageError

    existing = dict.fromkeys(info.state for info in every)
    if unknown := [s for s in states if s not in existing]:
        raise UsageError(
            f"no tensor is stored in state {unknown[0]!r}",
            hint=f"the states are {', '.join(existing)}",
        )
    names: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        names.setdefault(name, []).append(alias)
    chosen = [
        info
        for info in every
        if (not states or info.state in states)
        and (
            not globs
            or any(fnmatchcase(n, g) for g in globs for n in (info.name, *names.get(info.name, ())))
        )
    ]
    if globs and not chosen:
        wanted = " or ".join(map(repr, globs))
        raise TensorNotFound(
            f"no tensor's name matches {wanted}",
            hint=(
                "a glob has to match the whole name, such as '*.bias'; `ucp show SRC -t '*'` "
                "lists all"
            ),
        )
    return chosen


def _tensor(info: TensorInfo) -> dict[str, Any]:
    shape = list(info.shape)
    return {
        "name": info.name,
        "state": info.state,
        "dtype": info.dtype,
        "shape": shape,
        "bytes": info.nbytes,
    }


def _outdated(ck: Checkpoint) -> list[str]:
    """The names of files and objects with the sizes of a whole model, of which this is a part."""
    if ck.viewed is None and OUTDATED not in ck.objects:
        return []
    from ucformat.views.outdated import outdated

    return outdated(ck.viewed, ck.assets, ck.objects)


def _summary(ck: Checkpoint) -> dict[str, Any]:
    from ucformat.checkpoint import Checkpoint

    metadata = ck.metadata
    manifest = _own_manifest(ck)
    whole = Checkpoint(ck.origin) if ck.viewed and ck.viewed.steps else None
    return {
        "url": ck.url,
        "kind": ck.kind,
        "id": None if manifest is None else manifest.id,
        "step": metadata.step,
        "engine": dict(metadata.engine),
        "layout": dict(metadata.layout),
        **_amounts(ck.tensors.values()),
        "whole": None if whole is None else _amounts(whole.tensors.values()),
        "outdated": _outdated(ck),
        "states": [],
        "total": {},
        "dropped": [
            {
                "state": state,
                "tensors": gone.tensors,
                "bytes": gone.nbytes,
                "at": instant(gone.at),
                "reason": gone.reason,
            }
            for state, gone in ck.dropped.items()
        ],
        "lossy": _lossy(ck),
        "older": _older(ck),
        "lost": manifest.experts.lost if manifest and manifest.experts else None,
        "deltas": _deltas(manifest),
        "unreadable": [
            {"name": k.name, "state": k.state, "reason": why} for k, why in ck.unreadable.items()
        ],
        "aliases": dict(ck.aliases),
        "groups": [
            {"params": list(g["params"]), "options": {k: v for k, v in g.items() if k != "params"}}
            for g in metadata.groups
        ],
        "objects": list(ck.objects),
        "per_rank": list(ck.per_rank),
        "assets": list(ck.assets),
        "unread": dict(ck.unread),
        "missing": list(ck.missing),
        "zarr_url": ck.zarr_url,
        "hf_url": ck.hf_url,
        "packed": _packed(ck),
        "encoded": _encoded(ck),
        "bases": _bases(ck),
        "unprotected": _unprotected(ck),
    }


def _unprotected(ck: Checkpoint) -> list[str]:
    """The places of its bytes that do not record that it needs them."""
    if ck.universal is None:
        return []
    from ucformat.jobs.dependents import unprotected

    return list(unprotected(ck))


def _packed(ck: Checkpoint) -> dict[str, int] | None:
    """How many tensors of a universal checkpoint are in packed files of its own, and their bytes; None if none are."""
    manifest = _own_manifest(ck)
    if manifest is None or (manifest.sidecar is not None and manifest.sidecar.sources):
        return None
    packed = [Key(t.name, t.state) for t in manifest.tensors if t.in_sidecar]
    infos = [ck.tensors[key] for key in packed if not (ck.hf_url and key.state == "weight")]
    return {"tensors": len(infos), "bytes": sum(info.nbytes for info in infos)} if infos else None


def _encoded(ck: Checkpoint) -> dict[str, Any] | None:
    """The codecs of a universal checkpoint, and the bytes of its tensors and of its files; None if it has no codec."""
    manifest = _own_manifest(ck)
    kinds = () if manifest is None else manifest.tensors.kinds
    codecs = list(dict.fromkeys(kind.codec for kind in kinds if kind.codec is not None))
    if not codecs:
        return None
    from ucformat.jobs.patch import stored_bytes  # which needs NumPy

    stored = stored_bytes(ck)
    return {"codecs": codecs, "bytes": stored.plain, "stored": stored.written}


def _lossy(ck: Checkpoint) -> list[dict[str, Any]]:
    """The states of which tensors were encoded with loss: how many tensors, and their largest errors."""
    states: dict[tuple[str, str], list[Loss]] = {}
    for key, loss in ck.lossy.items():
        states.setdefault((key.state, loss.encoding), []).append(loss)
    return [
        {
            "state": state,
            "encoding": encoding,
            "tensors": len(losses),
            "absolute": max(loss.absolute for loss in losses),
            "relative": max(loss.relative for loss in losses),
        }
        for (state, encoding), losses in states.items()
    ]


def _older(ck: Checkpoint) -> list[dict[str, Any]]:
    """The earlier steps of which tensors are: how many of each, and their bytes."""
    tensors, nbytes = Counter[int](), Counter[int]()
    for key, step in ck.older.items():
        tensors[step] += 1
        nbytes[step] += ck.tensors[key].nbytes
    return [{"step": s, "tensors": tensors[s], "bytes": nbytes[s]} for s in sorted(tensors)]


def _deltas(manifest: Manifest | None) -> dict[str, int] | None:
    """Of which steps it has deltas, and the step at which everything was saved."""
    if manifest is None or manifest.deltas is None:
        return None
    return {name: getattr(manifest.deltas, name) for name in ("since", "first", "last")}


def _bases(ck: Checkpoint) -> list[dict[str, Any]]:
    """The checkpoints of which tensors are: their ids and places, and how many tensors and bytes; and of patches."""
    if ck.universal is None or ck.viewed:
        return []
    amounts = ck.universal.bases.amounts()
    patched = ck.universal.bases.amounts(patched=True)
    return [
        {"id": base.id, "url": base.url, "tensors": number, "bytes": nbytes}
        | {"patched": patched.get(base.url, (0, 0))[0]}
        for base in ck.universal.bases.docs
        for number, nbytes in (amounts.get(base.url, (0, 0)),)
    ]


def _from_catalog(entry: Entry, tensors: Sequence[TensorInfo]) -> dict[str, Any]:
    """The summary of a checkpoint whose files are missing; what the catalog does not have is None."""
    return {
        "url": entry.url,
        "kind": entry.kind,
        "id": entry.id,
        "step": entry.step,
        "engine": {
            k.removeprefix("engine."): v
            for k, v in entry.producer.items()
            if k.startswith("engine.")
        },
        "layout": dict(entry.topology),
        **_amounts(tensors),
        "whole": None,
        "outdated": None,
        "states": [],
        "total": {},
        "dropped": None,
        "lossy": None,
        "older": None,
        "lost": None,
        "deltas": None,
        "unreadable": None,
        "aliases": None,
        "groups": None,
        "objects": None,
        "per_rank": None,
        "assets": None,
        "unread": None,
        "missing": None,
        "zarr_url": None,
        "hf_url": None,
        "packed": None,
        "encoded": None,
        "bases": None,
        "unprotected": None,
    }


def _amounts(tensors: Collection[TensorInfo]) -> dict[str, Any]:
    """The number of parameters, and the bytes of each dtype."""
    dtypes: dict[str, int] = {}
    for info in tensors:
        dtypes[info.dtype] = dtypes.get(info.dtype, 0) + info.nbytes
    return {"parameters": parameters(tensors), "dtypes": dtypes}


def _totals(tensors: Sequence[TensorInfo]) -> dict[str, Any]:
    states = by_state(tensors)
    total = {key: sum(e[key] for e in states) for key in ("tensors", "elements", "bytes")}
    return {"states": states, "total": total}


def _list(tensors: Sequence[TensorInfo]) -> Iterator[str]:
    width = terminal_width()
    rows, last = [], None
    for info in tensors:
        # repeated only in pipes
        name = "" if width is not None and info.name == last else info.name
        rows.append((name, info.state, info.dtype, shape_text(info.shape), bytes_text(info.nbytes)))
        last = info.name
    return table(("name", "state", "dtype", "shape", "size"), rows, left=3, width=width)


def _describe(s: Mapping[str, Any], recorded: Recorded | None) -> Iterator[str]:
    width = terminal_width()
    yield Heading(s["url"] or s["id"])
    engine = " ".join(v for k, v in s["engine"].items() if k in ("name", "version"))
    universal = "universal, of " if engine else "universal"
    shown = {
        "kind": f"{universal}{engine}" if s["kind"] == "ucformat" else engine or s["kind"],
        "id": s["id"],
        "step": None if s["step"] is None else count(s["step"]),
        "part of": s["layout"].get(PART_OF),
        "layout": ", ".join(f"{k} {_value(v)}" for k, v in s["layout"].items() if k != PART_OF),
        "params": count(s["parameters"]) if s["parameters"] else None,
        "hf_url": s["hf_url"],
    }
    for label, text in shown.items():
        if text:
            yield from field(label.replace("_", " "), text, width)
    yield from _storage(s, width)
    for name in s["outdated"] or ():
        yield from field(
            "outdated", f"{name} has the sizes of the whole model, not of the view", width
        )
    for place in s["unprotected"] or ():
        yield from field(
            "unprotected", f"its files in {place}: there is no record that they are needed", width
        )
    if recorded is not None:
        yield from recorded.lines(s["url"], width)
    yield ""
    yield from _states(s, width)
    if s["whole"] is not None:
        yield ""
        yield from _share(s, s["whole"], width)
    beside = list(_beside(s, width))
    if beside:
        yield ""
        yield from beside


def _storage(s: Mapping[str, Any], width: int | None) -> Iterator[str]:
    """How tensors are stored, where that is not as arrays."""
    if s["packed"]:
        amount = f"{plural(s['packed']['tensors'], 'tensor')}, {bytes_text(s['packed']['bytes'])}"
        yield from field(
            "packed", f"{amount}: no arrays of Zarr; `ucp materialize` makes them", width
        )
    for base in s["bases"] or ():
        amount = f"{plural(base['tensors'], 'tensor')}, {bytes_text(base['bytes'])}"
        patches = f"; patches of {plural(base['patched'], 'other')}" if base["patched"] else ""
        yield from field("base", f"{amount} in {base['url']}, {base['id']}{patches}", width)
    if s["bases"]:
        own = s["total"]["bytes"] - sum(base["bytes"] for base in s["bases"])
        hint = "" if s["deltas"] else "; `ucp compact` makes it whole"
        yield from field("own", f"{bytes_text(own)}{hint}", width)
    if s["encoded"]:
        sizes = [bytes_text(s["encoded"][k]) for k in ("bytes", "stored")]
        codecs = ", ".join(s["encoded"]["codecs"])
        yield from field("codec", f"{codecs}: {sizes[0]} in files of {sizes[1]}", width)
    for lossy in s["lossy"] or ():
        errors = f"off by up to {lossy['absolute']:.3g}, relatively by {lossy['relative']:.3g}"
        yield from field(
            "lossy",
            f"{lossy['state']} ({plural(lossy['tensors'], 'tensor')}), by {lossy['encoding']}: {errors}",
            width,
        )
    for older in s["older"] or ():
        amount = f"{plural(older['tensors'], 'tensor')} ({bytes_text(older['bytes'])})"
        yield from field("older", f"{amount} of step {older['step']}", width)
    if deltas := s["deltas"]:
        steps = f"of steps {deltas['first']} to {deltas['last']}, of a chain that begins with step {deltas['since']}"
        yield from field("deltas", steps, width)
    if s["lost"] is not None:
        yield from field(
            "lost", f"{s['lost'] * 100:.2f} % of tokens, if training goes on from here", width
        )


def _states(s: Mapping[str, Any], width: int | None) -> Iterator[str]:
    head = ("state", "dtype", "tensors", "elements", "size")
    rows = [
        (
            e["state"],
            first_names(e["dtypes"], 2 if len(e["dtypes"]) <= 2 else 1),
            count(e["tensors"]),
            count(e["elements"]),
            bytes_text(e["bytes"]),
        )
        for e in s["states"]
    ]
    t = s["total"]
    total = ("total", "", count(t["tensors"]), count(t["elements"]), bytes_text(t["bytes"]))
    return table(head, rows, left=2, width=width, total=total)


def _share(view: Mapping[str, Any], whole: Mapping[str, Any], width: int | None) -> Iterator[str]:
    """How much of the whole checkpoint a view is."""
    dtypes = dict.fromkeys((*whole["dtypes"], *view["dtypes"]))
    rows = [
        ("parameters", *(count(s["parameters"]) for s in (view, whole))),
        *(
            (dtype, *(bytes_text(s["dtypes"].get(dtype, 0)) for s in (view, whole)))
            for dtype in dtypes
        ),
    ]
    return table(("", "view", "whole checkpoint"), rows, left=1, width=width)


def _beside(s: Mapping[str, Any], width: int | None) -> Iterator[str]:
    for alias, name in (s["aliases"] or {}).items():
        yield from field("tied", f"{alias} = {name}", width)
    for i, group in enumerate(s["groups"] or ()):
        options = [
            f"{k} {_value(v)}"
            for k, v in group["options"].items()
            if v is not None and v is not False
        ]
        tensors = plural(len(group["params"]), "tensor")
        yield from field(
            f"group {i}", f"{tensors}: {', '.join(options)}" if options else tensors, width
        )
    for gone in s["dropped"] or ():
        amount = f"{plural(gone['tensors'], 'tensor')}, {bytes_text(gone['bytes'])}"
        text = f"{gone['state']} ({amount}) by thin on {gone['at'][:10]}: {gone['reason']}"
        yield from field("dropped", text, width)
    for tensor in s["unreadable"] or ():
        yield from field(
            "unreadable", f"{tensor['name']} ({tensor['state']}) {tensor['reason']}", width
        )
    for label in ("objects", "per_rank", "assets"):
        if s[label]:
            yield from field(label.replace("_", " "), ", ".join(s[label]), width)
    unread = s["unread"] or {}
    for name in list(unread)[:_MAX_LISTED]:
        kept = "kept as an asset" if name in s["assets"] else "not in a conversion"
        yield from field("not read", f"{name} ({bytes_text(unread[name])}, {kept})", width)
    if len(unread) > _MAX_LISTED:
        yield from field(
            "not read",
            f"and {plural(len(unread) - _MAX_LISTED, 'more file')}; --json lists all",
            width,
        )
    for name in s["missing"] or ():
        yield from field("missing", f"{name}, which the program that saved writes, too", width)


def _value(value: Any) -> str:
    match value:
        case str():
            return value
        case float():
            return f"{value:.6g}"
        case list():
            return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)
