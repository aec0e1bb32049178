"""The manifest of a save, from the reports of all ranks; and a local state as plain data."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ucformat._version import __version__
from ucformat.errors import NotCertified, UsageError, first_names
from ucformat.format.arrays import array_doc, grid_doc
from ucformat.format.commit import new_id
from ucformat.format.digest import bytes_digest, check_values
from ucformat.format.extents import put_sidecar
from ucformat.format.lossy_states import (
    bound_of,
    larger_losses,
    largest,
    lossy_codec,
    unpacked_loss,
)
from ucformat.format.objects import encode_range, put_objects, put_ranges
from ucformat.format.sidecar import encode_columns, joined
from ucformat.format.structure import per_rank_problems, refuse
from ucformat.format.universal import group_doc
from ucformat.geometry.distribution import Distribution, RankMesh
from ucformat.geometry.fingerprint import (
    LANES,
    NO_ELEMENTS,
    added,
    packed_sums,
    text_of,
    texts_of,
    unpacked_sums,
)
from ucformat.geometry.tensor import Key, Piece, TensorInfo
from ucformat.jobs.weight_files import put_assets
from ucformat.reading.readable import PART_OF, GroupPlace, path_to_json
from ucformat.reading.readable import StatePath as Path
from ucformat.schema.limits import MAX_DEPTH, MAX_INTEGER, MOST_COMMITS
from ucformat.schema.manifest import (
    GroupDoc,
    LaunchDoc,
    LineageDoc,
    Manifest,
    PerRankDoc,
    RangesDoc,
    WriterDoc,
)
from ucformat.schema.tensors import TILES, TensorTable
from ucformat.storage.concurrency import gc_paused
from ucformat.torch.comm.merging import merged
from ucformat.torch.comm.wire import encode, message
from ucformat.torch.saving.experts import PartialSave
from ucformat.torch.saving.in_place import WrittenParts, block_crcs
from ucformat.torch.saving.write import ShardDigests, packed_extents

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.format.sidecar import Columns
    from ucformat.schema.tensors import TensorDoc
    from ucformat.storage.base import Store
    from ucformat.torch.saving.in_place import InPlace
    from ucformat.torch.saving.options import SaveArguments, SaveOptions
    from ucformat.torch.saving.plan import Begun, RankPlan
    from ucformat.torch.saving.shards import GlobalPlan
    from ucformat.torch.state.local import LocalState


# Values that each rank has as its own, on the way to rank 0: encoded, or in files that ranks wrote
# on the way.
#
# A rank encodes its values once. On the way up the tree, those of consecutive ranks are put
# together. A rank at which they exceed `MOST_BYTES` writes them, and passes on only the entries of
# the files. So no rank gets the values of all others, and there are files of some megabytes,
# however many ranks there are.


#: The most bytes of values that a rank passes on; it receives no more from each of its children.
MOST_BYTES = 4 << 20


@message
class Ranges:
    """The values of consecutive ranks, from number `first` on: the range of each in a file."""

    first: int
    ranges: tuple[bytes, ...]


@message
class RankValues:
    """The values of consecutive ranks.

    Attributes:
        names: of the values; a rank need not have each.
    """

    names: tuple[str, ...]
    parts: tuple[Ranges | RangesDoc, ...]

    @classmethod
    def of(cls, rank: int, values: Mapping[str, Any]) -> RankValues:
        """Encode the values of a rank."""
        return cls(tuple(values), (Ranges(rank, (encode_range(values),)),))

    @property
    def nbytes(self) -> int:
        """The bytes of values that are in no file; 0 if no rank has any."""
        ranges = (r for part in self.parts if isinstance(part, Ranges) for r in part.ranges)
        return sum(map(len, ranges)) if self.names else 0

    def merged(self, other: RankValues) -> RankValues:
        """Put values together."""
        names, parts = tuple(dict.fromkeys((*self.names, *other.names))), [*self.parts]
        for part in other.parts:
            match parts[-1:], part:
                case [Ranges() as last], Ranges() if last.first + len(last.ranges) == part.first:
                    parts[-1] = Ranges(last.first, last.ranges + part.ranges)
                case _:
                    parts.append(part)
        return RankValues(names, tuple(parts))

    def relieved(self, store: Store, folder: str) -> RankValues:
        """Return what a rank passes on: many bytes are put in files, and made durable."""
        if self.nbytes <= MOST_BYTES:
            return self
        files = self.write(store, folder)
        store.flush()
        return RankValues(self.names, files)

    def write(self, store: Store, folder: str) -> tuple[RangesDoc, ...]:
        """Write the values that are in no file, and return the files with all of them."""
        return tuple(
            put_ranges(store, folder, part.first, part.ranges) if isinstance(part, Ranges) else part
            for part in self.parts
        )


_LISTED = 64  # ranks that a manifest lists, at most, so that it does not grow with ranks


@message
class SaveMetadata:
    """What the manifest records about a checkpoint in addition to its state, the same on all ranks.

    `after` is the greatest known commit count of the run, in addition to those in `lineage`.
    `assets` are files to store; only rank 0 has them. `launch` is that of the training; the one of
    rank 0 counts. `partial` is what a partial save leaves in its base.
    """

    step: int | None = None
    run: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    lineage: tuple[LineageDoc, ...] = ()
    after: int | None = None
    assets: Mapping[str, bytes] = field(default_factory=dict)
    launch: LaunchDoc | None = None
    partial: PartialSave | None = None

    @property
    def commits(self) -> int | None:
        """The commit count of the checkpoint: one more than the greatest known; None without any."""
        counts = [
            n for n in (self.after, *(edge.commits for edge in self.lineage)) if n is not None
        ]
        return min(max(counts) + 1, MOST_COMMITS) if counts else None

    @classmethod
    def of(
        cls, arguments: SaveArguments, assets: Mapping[str, bytes] | None = None
    ) -> SaveMetadata:
        """Create it from the arguments of `save`."""
        step = arguments.get("step")
        about: dict[str, Any] = {
            "run": arguments.get("run"),
            "config": dict(arguments.get("config") or {}),
            "metrics": dict(arguments.get("metrics") or {}),
        }
        check_values(about, "the checkpoint", MAX_DEPTH + 1)
        if step is not None and abs(step) > MAX_INTEGER:
            raise UsageError(
                f"step={step} is beyond the limit of {MAX_INTEGER:,}",
                hint="give the number of a step",
            )
        return cls(
            step=step,
            lineage=tuple(arguments.get("lineage", ())),
            after=arguments.get("after"),
            assets=dict(assets or {}),
            launch=arguments.get("launch"),
            **about,
        )


@message
class StateInfo:
    """All that one rank saves, without the memory of its tensors: data for another process.

    `objects` and `ranks` are JSON forms; `ranks` are those of this rank alone. `paths` and `places`
    are those of `LocalState`. `distributions` are the distinct ones of the tensors, and
    `distributed` has the number of that of each tensor, or -1; it may be empty. `live` has the
    fingerprints of all pieces in their order, as they were at the call, if these are compared with
    what is written. `changed` has a bit for each row of some tensors, by name: whether it changed
    since the base was saved, as far as this rank knows.
    """

    tensors: tuple[tuple[TensorInfo, tuple[Piece, ...]], ...]
    objects: Mapping[str, Any]
    ranks: Mapping[str, Any]
    groups: tuple[Mapping[str, Any], ...]
    aliases: Mapping[str, str]
    layout: Mapping[str, Any]
    engine: Mapping[str, str]
    paths: Mapping[Key, tuple[Path, ...]] = field(default_factory=dict)
    places: tuple[GroupPlace | None, ...] = ()
    stall: float = 0.0  # seconds for which training was blocked
    distributions: tuple[Distribution, ...] = ()
    distributed: tuple[int, ...] = ()
    live: bytes = b""
    changed: Mapping[str, bytes] = field(default_factory=dict)


@gc_paused()
def state_info(
    state: LocalState,
    members: Sequence[int] | None = None,
    tensors: tuple[tuple[TensorInfo, tuple[Piece, ...]], ...] | None = None,
    stall: float = 0.0,
    *,
    certify: bool = False,
) -> StateInfo:
    """Return a local state without its memory.

    Args:
        members: the rank among all ranks of each rank that takes part (None: all take part).
        tensors: the tensors with the pieces that describe them in another memory (None: in the
            memory of the state).
        certify: compute the fingerprints of the tensors, which are live.
    """
    numbers: dict[Distribution | None, int] = {None: -1}
    for t in state.tensors:
        numbers.setdefault(t.distribution, len(numbers) - 1)
    distributions = tuple(d for d in numbers if d is not None)
    if members is not None:
        number_of = {rank: number for number, rank in enumerate(members)}
        meshes = {mesh: numbered_mesh(mesh, number_of) for mesh in {d.mesh for d in distributions}}
        renumbered = [
            None if (mesh := meshes[d.mesh]) is None else replace(d, mesh=mesh)
            for d in distributions
        ]
        distributions = tuple(d for d in renumbered if d is not None)
        order: dict[Distribution | None, int] = {d: n for n, d in enumerate(distributions)}
        numbers = {
            old: order.get(new, -1) for old, new in zip(numbers, [None, *renumbered], strict=True)
        }
    return StateInfo(
        tensors=tuple((t.info, t.pieces) for t in state.tensors) if tensors is None else tensors,
        objects=state.objects,
        ranks=state.ranks,
        groups=state.groups,
        aliases=state.aliases,
        layout=state.layout,
        engine=state.engine,
        paths=state.paths,
        places=state.places,
        stall=stall,
        distributions=distributions,
        distributed=tuple(numbers[t.distribution] for t in state.tensors),
        live=_live(state) if certify else b"",
        changed=state.changed,
    )


def _live(state: LocalState) -> bytes:
    """The fingerprints of all pieces of a state."""
    # not above: the background writer does not import torch
    from ucformat.torch.state.fingerprint import pieces_fingerprints

    sums = pieces_fingerprints((t, piece) for t in state.tensors for piece in t.pieces)
    return packed_sums(enumerate(sums), len(sums))


def numbered_mesh(mesh: RankMesh, number_of: Mapping[int, int]) -> RankMesh | None:
    """Return the mesh with other numbers of its ranks; None if one of them has none."""
    ranks = mesh.ranks.reshape(-1).tolist()
    if not number_of.keys() >= set(ranks):
        return None
    return RankMesh.of(mesh.sizes, [number_of[rank] for rank in ranks])


@message
class RankReport:
    """What one rank reports that differs between ranks: bytes and seconds.

    Attributes:
        state: the digest of what it reports besides, which is the same on most ranks.
        seconds: from the plan until its data was durable, of which it waited for this for `sync`.
        stall: for which training was blocked.
        copy: of a save in the background, for which the state was copied; 0 of others.
        plan: until the ranks had agreed on the plan.
        retries: requests that it repeated.
        listed_at: the byte of its packed file at which listed tensors begin.
    """

    rank: int
    state: bytes
    nbytes: int
    seconds: float
    stall: float
    copy: float = 0.0
    plan: float = 0.0
    sync: float = 0.0
    retries: int = 0
    listed_at: int = 0

    def doc(self, commit: float) -> WriterDoc:
        """Return what the manifest records of it.

        Args:
            commit: seconds in which rank 0 put the documents of the checkpoint together.
        """
        phases = {"copy": self.copy} if self.copy else {}
        phases |= {"plan": self.plan, "write": self.seconds - self.sync, "sync": self.sync}
        if not self.rank:
            phases["commit"] = commit
        return WriterDoc(
            rank=self.rank,
            nbytes=self.nbytes,
            seconds=self.seconds,
            stall=self.stall,
            phases=phases,
            retries=self.retries,
        )


class WrittenByRank(NamedTuple):
    """What one rank has written.

    Attributes:
        shards: of the Zarr form: their digests.
        sync: seconds until its data was durable when all was written.
        packed: of packed tensors: the sums of fingerprints of what it wrote, by description.
        parts: of the safetensors form: parts of files.
        listed_at: as in `RankReport`.
        live: the sums of fingerprints at the call of what this rank, or a replica of it, wrote, by
            description; empty if they are not compared.
        patched: the number of boxes with tiles that need the base, as sums by description.
        losses: the errors of what was encoded with loss, as `packed_losses`, by description.
    """

    shards: ShardDigests
    objects: Mapping[str, Any]
    nbytes: int
    sync: float
    packed: Mapping[bytes, bytes]
    parts: WrittenParts = WrittenParts()
    listed_at: int = 0
    live: Mapping[bytes, bytes] = MappingProxyType({})
    patched: Mapping[bytes, bytes] = MappingProxyType({})
    losses: Mapping[bytes, bytes] = MappingProxyType({})


@message
class WriteReport:
    """What some ranks report to rank 0 when their data is durable.

    Attributes:
        states: what is the same on several ranks, by its digest.
        values: those that each rank has as its own.
    """

    shards: ShardDigests
    objects: Mapping[str, Any]
    states: Mapping[bytes, StateInfo]
    ranks: tuple[RankReport, ...]
    values: RankValues
    packed: Mapping[bytes, bytes] = field(default_factory=dict)
    parts: WrittenParts = WrittenParts()
    live: Mapping[bytes, bytes] = field(default_factory=dict)
    patched: Mapping[bytes, bytes] = field(default_factory=dict)
    losses: Mapping[bytes, bytes] = field(default_factory=dict)


def write_report(
    rank: int,
    state: StateInfo,
    written: WrittenByRank,
    times: tuple[float, float, float, float],
    retries: int,
) -> WriteReport:
    """Return the report of one rank.

    Args:
        times: the members `seconds`, `stall`, `copy` and `plan` of `RankReport`.
        retries: likewise.
    """
    # without what the plan or rank 0 has anyway
    shared = StateInfo(
        (), {}, {}, state.groups, state.aliases, state.layout, state.engine, places=state.places
    )
    digest = hashlib.sha256(encode(shared, StateInfo)).digest()[:16]
    own = RankReport(
        *(rank, digest, written.nbytes, *times, written.sync, retries), written.listed_at
    )
    values = RankValues.of(rank, state.ranks)
    return WriteReport(
        written.shards,
        written.objects,
        {digest: shared},
        (own,),
        values,
        written.packed,
        written.parts,
        written.live,
        written.patched,
        written.losses,
    )


def merge_reports(a: WriteReport, b: WriteReport) -> WriteReport:
    """Return what the ranks of two reports report together."""
    return WriteReport(
        [*a.shards, *b.shards],
        {**a.objects, **b.objects},
        {**a.states, **b.states},
        (*a.ranks, *b.ranks),
        a.values.merged(b.values),
        merged(a.packed, b.packed, added),
        a.parts + b.parts,
        merged(a.live, b.live, added),
        merged(a.patched, b.patched, added),
        merged(a.losses, b.losses, larger_losses),
    )


def manifest_of(
    store: Store,
    options: SaveOptions,
    metadata: SaveMetadata,
    own: RankPlan,
    begun: Begun,
    written: WriteReport,
) -> Manifest:
    """Write sidecar and objects, and return the manifest; all other files must be durable."""
    begun_at = time.monotonic()
    attempt, plan, arrays = begun.attempt, begun.plan, begun.arrays
    data, grid = f"data/{attempt.id}", None
    packed_fingerprints = _fingerprints(plan, written.packed)
    tensors = plan.packed.table.model_copy(update={"fingerprint": packed_fingerprints})
    patched = {key for key, count in plan.sums(written.patched).items() if any(count)}
    references = begun.references.kept(patched=bool(patched))
    if patched:
        references.protect(str(attempt.keeps))
    if options.tile_codec is not None:
        tensors = TensorTable.of(
            replace(doc, codec=TILES, base=0 if Key(doc.name, doc.state) in patched else None)
            for doc in _with_losses(tensors, plan, written.losses, options)
        )
    sidecar = _sidecar(plan, own.weights, written, data)
    if options.form != "packed":
        if arrays or sidecar is None:
            grid = grid_doc(options.chunk_bytes, options.shard_bytes)
        shards: dict[Key, dict[tuple[int, ...], bytes]] = {a.info.key: {} for a in arrays}
        for key, at, digests in written.shards:
            shards[key][at] = digests
        rows = zip(arrays, plan.arrays.paths, strict=True)
        docs = [replace(array_doc(a, shards[a.info.key]), at=at) for a, at in rows]
        sums = unpacked_sums(written.parts.fingerprints)
        weights = (
            replace(doc, fingerprint=text_of(of_weight))
            for doc, of_weight in zip(plan.weights.docs(), sums, strict=True)
        )
        if docs or plan.weights.infos:
            tensors = TensorTable.of([*tensors, *weights, *docs])
    doc, requires = (None, ()) if sidecar is None else put_sidecar(store, data, sidecar, tensors)
    if references.tensors:
        order = sorted(plan.places, key=plan.places.__getitem__)
        of_base = replace(references, tensors=_with_paths(references.tensors, plan))
        tensors = TensorTable.of(of_base.among(tuple(tensors), order, ordered=sidecar is None))
    if options.certify:
        _check_live(plan, written.live, tensors)
    ranks = sorted(written.ranks, key=lambda r: r.rank)
    states = [written.states[digest] for digest in dict.fromkeys(r.state for r in ranks)]
    objects = f"objects/{attempt.id}"
    layout: dict[str, Any] = {
        "world": len(ranks),
        **{k: v for s in states for k, v in s.layout.items()},
    }
    layout |= next(
        ({PART_OF: edge.how[PART_OF]} for edge in metadata.lineage if PART_OF in edge.how), {}
    )
    manifest = Manifest(
        id=new_id(),
        attempt=attempt.id,
        created=datetime.now(UTC),
        producer={
            "ucformat": __version__,
            "python": platform.python_version(),
            **{f"engine.{k}": v for k, v in states[0].engine.items()},
        },
        run=metadata.run,
        step=metadata.step,
        commits=metadata.commits,
        launch=metadata.launch,
        metrics=dict(metadata.metrics),
        config=dict(metadata.config),
        layout=layout,
        groups=_groups(states),
        lineage=metadata.lineage,
        aliases={a: n for s in states for a, n in s.aliases.items()},
        objects=put_objects(store, objects, written.objects),
        per_rank=_per_rank(store, objects, written.values, len(ranks)),
        assets=put_assets(
            store, attempt.id, own.weights and own.weights.files.folder, metadata.assets
        ),
        grid=grid,
        writers=tuple(r.doc(time.monotonic() - begun_at) for r in slowest(ranks)),
        tensors=tensors,
        experts=None if metadata.partial is None else metadata.partial.record,
        window=None if metadata.partial is None else metadata.partial.window,
        deltas=None if metadata.partial is None else metadata.partial.deltas,
    )
    return references.added_to(manifest.with_sidecar(doc, requires), attempt)


def _fingerprints(plan: GlobalPlan, written: Mapping[bytes, bytes]) -> list[str]:
    """The fingerprints of packed tensors, from the sums of what ranks wrote of the rows of each description."""
    infos, elsewhere = plan.packed.infos, len(plan.packed.infos)
    number = {info.key: n for n, info in enumerate(infos)}
    sums = np.zeros((len(infos) + 1, LANES), np.uint64)
    for digest, data in written.items():
        rows = [number.get(key, elsewhere) for key in plan.keys[digest]]
        np.add.at(sums, rows, np.frombuffer(data, "<u8").reshape(-1, LANES))
    return texts_of(sums[:elsewhere])


def _with_losses(
    tensors: TensorTable, plan: GlobalPlan, written: Mapping[bytes, bytes], options: SaveOptions
) -> Iterator[TensorDoc]:
    """Packed tensors, with the bounds of those that were encoded with loss."""
    losses = plan.by_tensor(written, largest)
    for info, doc in zip(plan.packed.infos, tensors, strict=True):
        loss = unpacked_loss(losses.get(info.key, (0, 0)))
        codec = None if loss is None else lossy_codec(options.encode, info)
        yield (
            doc
            if loss is None or codec is None
            else replace(doc, lossy=codec.name, bound=bound_of(loss))
        )


def _with_paths(docs: Sequence[TensorDoc], plan: GlobalPlan) -> tuple[TensorDoc, ...]:
    """Tensors of a base, with the paths that they have in this state."""
    return tuple(
        replace(doc, at=tuple(tuple(path_to_json(p)) for p in plan.state_paths.get(key, ())))
        if doc.step is None  # what the program has not given has the paths that it had
        else doc
        for doc in docs
        for key in (Key(doc.name, doc.state),)
    )


def _check_live(plan: GlobalPlan, live: Mapping[bytes, bytes], tensors: TensorTable) -> None:
    """Check that what was written is what the ranks held at the call, but for what is lossy or older."""
    sums = plan.sums(live)
    different = [
        Key(t.name, t.state)
        for t in tensors
        if t.lossy is None
        and t.step is None
        and t.fingerprint != text_of(sums.get(Key(t.name, t.state), NO_ELEMENTS))
    ]
    if different:
        raise NotCertified(
            "what was written is not what the ranks held when they saved: "
            f"{first_names(different, 5)}; nothing is committed",
            hint=(
                "save again; if it is so again, something changes the tensors during the save, or "
                "the memory or the storage of a host is damaged"
            ),
        )


def _sidecar(
    plan: GlobalPlan, weights: InPlace | None, written: WriteReport, folder: str
) -> bytes | None:
    """The sidecar: packed tensors, then weights; None if all are arrays."""
    if plan.exceptions.packed != "all" and not plan.packed.infos and weights is None:
        return None
    begins = {r.rank: r.listed_at for r in written.ranks}
    columns, files, described = packed_extents(plan.packed, folder, begins)
    parts: list[tuple[Columns, Sequence[str]]] = [(columns, files)]
    if weights is not None:
        number = {
            info.key: n for n, info in enumerate(weights.agreed.infos, len(plan.packed.infos))
        }
        parts.append(weights.files.columns(number, block_crcs(weights.files, written.parts.sums)))
    return encode_columns(*joined(parts), described)


def _per_rank(store: Store, folder: str, values: RankValues, ranks: int) -> PerRankDoc | None:
    """Write the values that are in no file, and return the entry of all; None without values."""
    if not values.names:
        return None
    doc = PerRankDoc(ranks=ranks, names=values.names, files=values.write(store, folder))
    # ranks put the values together, and one may have made a mistake
    refuse(store.url, per_rank_problems(doc))
    return doc


def slowest(ranks: Sequence[RankReport]) -> list[RankReport]:
    """Return the ranks that the manifest lists: those that wrote longest, in order."""
    return sorted(sorted(ranks, key=lambda r: -r.seconds)[:_LISTED], key=lambda r: r.rank)


def _groups(states: Sequence[StateInfo]) -> tuple[GroupDoc, ...]:
    """The groups of all ranks; equal place, number and hyper-parameters are merged."""
    merged: dict[str, tuple[dict[str, str], dict[str, Any], GroupPlace | None]] = {}
    for state in states:
        for number, group in enumerate(state.groups):
            options = {k: v for k, v in group.items() if k != "params"}
            place = state.places[number] if state.places else None
            where = [path_to_json(place.path), place.flattened] if place else []
            digest = bytes_digest(json.dumps([number, options, where]).encode())
            params, _, _ = merged.setdefault(digest, ({}, options, place))
            params.update(
                zip(group["params"], place.names if place else group["params"], strict=True)
            )
    return tuple(
        group_doc(
            tuple(params), options, replace(place, names=tuple(params.values())) if place else None
        )
        for params, options, place in merged.values()
    )
