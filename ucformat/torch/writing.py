"""Saves what many ranks hold as one universal checkpoint: agree on a plan, write, commit; all or nothing."""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Mapping
from dataclasses import field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ucformat._version import __version__
from ucformat.errors import Uncertain, UsageError
from ucformat.format.arrays import array_doc, grid_doc, put_array, put_file, put_groups
from ucformat.format.commit import commit, discard, new_id
from ucformat.format.digest import bytes_digest
from ucformat.format.universal import group_doc
from ucformat.geometry.tensor import Key, Piece, TensorInfo
from ucformat.reading.readable import Place, path_to_json
from ucformat.schema.manifest import MOST_COMMITS, GroupDoc, LineageDoc, Manifest, SidecarDoc, TensorDoc, WriterDoc
from ucformat.schema.values import dumps
from ucformat.sources.dcp.names import Path
from ucformat.storage.url import open_store
from ucformat.torch.agree import Terms, agree
from ucformat.torch.deal import Claim
from ucformat.torch.fragments import Region, region_of
from ucformat.torch.packing import packed_file, sidecar_of, write_packed
from ucformat.torch.sharding import Leaves, write_shards
from ucformat.torch.wire import message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.format.commit import Attempt
    from ucformat.storage.base import Store
    from ucformat.torch.agree import Layout, Ticket
    from ucformat.torch.group import Group
    from ucformat.torch.memory import Memory

__all__ = ["Listing", "Note", "Saved", "save_listed"]


@message
class Note:
    """What is written in the manifest about a checkpoint, the same on all ranks.

    `after` is the greatest count of commits in its run, as far as is known besides what `lineage` tells.
    """

    step: int | None = None
    run: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    lineage: tuple[LineageDoc, ...] = ()
    after: int | None = None

    @property
    def commits(self) -> int | None:
        """What the checkpoint counts: one more than all that are known; None if none are known of, not even none."""
        known = [n for n in (self.after, *(edge.commits for edge in self.lineage)) if n is not None]
        return min(max(known) + 1, MOST_COMMITS) if known else None

    @classmethod
    def of(
        cls,
        step: int | None,
        run: str | None,
        metrics: Mapping[str, float] | None,
        config: Mapping[str, Any] | None,
        lineage: Sequence[LineageDoc],
        after: int | None = None,
    ) -> Note:
        """The note that the arguments of `save` make."""
        return cls(step, run, dict(metrics or {}), dict(config or {}), tuple(lineage), after)


@message
class Listing:
    """All that one rank saves, but the memory of its tensors: plain data, which another process may have.

    `objects` and `ranks` are JSON forms; `ranks` are those of this rank alone. `paths` and `places` are as LocalState
    has them.
    """

    tensors: tuple[tuple[TensorInfo, tuple[Piece, ...]], ...]
    objects: Mapping[str, Any]
    ranks: Mapping[str, Any]
    groups: tuple[Mapping[str, Any], ...]
    aliases: Mapping[str, str]
    layout: Mapping[str, Any]
    engine: Mapping[str, str]
    paths: Mapping[Key, tuple[Path, ...]] = field(default_factory=dict)
    places: tuple[Place | None, ...] = ()
    stall: float = 0.0  # seconds for which training stood still for it


@message
class Saved:
    """A checkpoint that was committed, and what this rank did for it: bytes, and seconds for planning and writing."""

    url: str
    id: str
    nbytes: int
    planning_s: float
    writing_s: float


@message
class _Written:
    """What a rank tells the coordinator when its data are durable."""

    found: Leaves  # of the Zarr form: digests of chunks
    objects: Mapping[str, Any]
    listing: Listing  # without its tensors
    nbytes: int
    seconds: float


def save_listed(
    listing: Listing,
    memories: Sequence[Memory],
    terms: Terms,
    note: Note,
    group: Group,
    progress: Callable[[int], None] = lambda _: None,
    threads: int = 1,
) -> Saved:
    """Save what is listed, each tensor's pieces in its host memory; all ranks of the group call this together.

    So many `threads` of this rank write the shards of the Zarr form.

    Any rank's failure fails all with one error that names the rank; then nothing is committed, and what was written is
    removed. Where a rank died, what it wrote stays as an attempt that no reader sees and `ucp gc` removes.
    """
    begun = time.monotonic()
    with group.telling():
        store = open_store(terms.url)
        claims = [
            Claim(info, tuple(p.box for p in pieces), tuple(listing.paths.get(info.key, ())))
            for info, pieces in listing.tensors
        ]

    def region(claim: int, piece: int) -> Region:
        info, pieces = listing.tensors[claim]
        return region_of(pieces[piece], memories[claim], info.itemsize)

    ticket, attempt, layout = agree(group, terms, store, claims, listing.aliases, listing.objects, region)
    planned = time.monotonic()
    try:
        written: Any = _write(listing, terms, ticket, store, group, region, progress, threads)
    except Exception as error:  # noqa: BLE001 - told to all ranks
        written = error
    seconds = time.monotonic() - planned
    if isinstance(written, _Written):
        stall = listing.stall or time.monotonic() - begun
        told = replace(written.listing, stall=stall)
        written = replace(written, listing=told, seconds=seconds)

    needed = False  # what was written, by what is committed, or may be

    def committed(all_written: list[Any]) -> Sequence[Any]:
        assert attempt is not None  # noqa: S101 - rank 0 has both
        assert layout is not None  # noqa: S101
        nonlocal needed
        manifest = _manifest(store, terms, note, attempt, layout, ticket, all_written)
        needed = True  # also where it is interrupted
        try:
            done = commit(store, attempt, manifest)
        except Exception as error:
            needed = isinstance(error, Uncertain)
            raise
        return [done.id] * group.size

    try:
        checkpoint: str = group.meet(written, committed, _Written, str)
    except BaseException:
        if attempt is not None and group.whole and not needed:
            discard(store, attempt.id)
        raise
    nbytes = written.nbytes
    return Saved(terms.url, checkpoint, nbytes, planned - begun, time.monotonic() - planned)


def _write(
    listing: Listing,
    terms: Terms,
    ticket: Ticket,
    store: Store,
    group: Group,
    region: Callable[[int, int], Region],
    progress: Callable[[int], None],
    threads: int,
) -> _Written:
    """Write this rank's part, and make it durable."""
    nbytes, one_at_a_time = 0, threading.Lock()

    def wrote(n: int) -> None:
        nonlocal nbytes
        with one_at_a_time:
            nbytes += n
            progress(n)

    found: Leaves = []
    if terms.form == "packed":
        regions = [(region(c, p), listing.tensors[c][0]) for c, p in ticket.part.pieces]
        write_packed(store, packed_file(f"data/{ticket.attempt}", group.rank), regions, wrote)
    else:
        arrays = ticket.arrays(terms)
        found = write_shards(
            store,
            group,
            arrays,
            ticket.part.bundles,
            ticket.part.messages,
            lambda f: region(f.claim, f.piece).within(f.box),
            wrote,
            threads,
        )
        for number in sorted({tensor for tensor, at, _ in found if not any(at)}):
            put_array(store, arrays[number])
        if not group.rank:
            put_groups(store, arrays)
            for array in arrays:
                if not array.grid.count:  # nobody writes a shard of it
                    put_array(store, array)
    store.flush()
    objects = {k: listing.objects[k] for k in ticket.give}
    told = replace(listing, tensors=(), objects={}, paths={})
    return _Written(found, objects, told, nbytes, 0.0)


def _manifest(
    store: Store,
    terms: Terms,
    note: Note,
    attempt: Attempt,
    layout: Layout,
    ticket: Ticket,
    written: Sequence[_Written],
) -> Manifest:
    """The manifest, when all that it names but its small files is durable; these are put now."""
    data, sidecar, grid = f"data/{attempt.id}", None, None
    if terms.form == "packed":
        encoded = sidecar_of(layout.tensors, layout.claims, layout.pieces, data)
        doc = put_file(store, f"{data}/extents.safetensors", encoded)
        sidecar = SidecarDoc(path=doc.path, nbytes=doc.nbytes, digest=doc.digest)
        infos = (t.info for t in layout.tensors)
        docs = [TensorDoc(name=i.name, state=i.state, dtype=i.dtype, shape=i.shape, nbytes=i.nbytes) for i in infos]
    else:
        grid = grid_doc(terms.chunk_bytes, terms.shard_bytes)
        leaves: list[dict[tuple[int, ...], bytes]] = [{} for _ in layout.tensors]
        for w in written:
            for tensor, at, found in w.found:
                leaves[tensor][at] = found
        docs = [array_doc(a, found) for a, found in zip(ticket.arrays(terms), leaves, strict=True)]
    docs = [doc.model_copy(update={"at": at}) for doc, at in zip(docs, layout.paths, strict=True)]
    first = written[0].listing
    return Manifest(
        id=new_id(),
        attempt=attempt.id,
        created=datetime.now(UTC),
        producer={
            "ucformat": __version__,
            "python": platform.python_version(),
            **{f"engine.{k}": v for k, v in first.engine.items()},
        },
        run=note.run,
        step=note.step,
        commits=note.commits,
        metrics=dict(note.metrics),
        config=dict(note.config),
        layout={"world": len(written), **{k: v for w in written for k, v in w.listing.layout.items()}},
        groups=_groups([w.listing for w in written]),
        lineage=note.lineage,
        aliases={a: n for w in written for a, n in w.listing.aliases.items()},
        objects=put_file(store, f"objects/{attempt.id}/objects.json", dumps(_objects(written), indent=1).encode()),
        sidecar=sidecar,
        grid=grid,
        writers=tuple(WriterDoc(nbytes=w.nbytes, seconds=w.seconds, stall=w.listing.stall) for w in written),
        tensors=tuple(docs),
    )


def _objects(written: Sequence[_Written]) -> dict[str, Any]:
    objects = {k: v for w in written for k, v in w.objects.items()}
    if "per_rank" in objects:
        raise UsageError('the state has an object "per_rank", which is our own name', hint="call it otherwise")
    if any(w.listing.ranks for w in written):
        names = dict.fromkeys(k for w in written for k in w.listing.ranks)
        objects["per_rank"] = {k: [w.listing.ranks.get(k) for w in written] for k in names}
    return objects


def _groups(listings: Sequence[Listing]) -> tuple[GroupDoc, ...]:
    """All ranks' optimizer groups: those of equal place, number and hyper-parameters are one, of all parameters."""
    found: dict[str, tuple[dict[str, str], dict[str, Any], Place | None]] = {}
    for listing in listings:
        for number, group in enumerate(listing.groups):
            options = {k: v for k, v in group.items() if k != "params"}
            place = listing.places[number] if listing.places else None
            where = [path_to_json(place.path), place.flattened] if place else []
            digest = bytes_digest(json.dumps([number, options, where]).encode())
            params, _, _ = found.setdefault(digest, ({}, options, place))
            params.update(zip(group["params"], place.names if place else group["params"], strict=True))
    return tuple(
        group_doc(tuple(params), options, replace(place, names=tuple(params.values())) if place else None)
        for params, options, place in found.values()
    )
