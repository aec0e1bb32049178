"""Finds the newest checkpoint of which every byte survives somewhere, and opens it there."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

from ucformat.catalog.lines import newest_first
from ucformat.errors import IntegrityError, MissingData, NotFound, UpgradeNeeded
from ucformat.format.structure import read_manifest
from ucformat.format.universal import Universal
from ucformat.jobs.record import deleted_below
from ucformat.schema import MANIFEST
from ucformat.storage.base import read_parts, stored_key
from ucformat.storage.local import LocalStore
from ucformat.storage.url import open_store
from ucformat.torch.comm.wire import message
from ucformat.torch.loading.share import open_together
from ucformat.torch.manager.steps import RunContents, step_of
from ucformat.torch.tiers.choice import Places, choose_places, copies_of
from ucformat.torch.tiers.inventory import Contents, contents_of
from ucformat.torch.tiers.located import LocatedStore
from ucformat.torch.tiers.peer import PeerStore

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.structure import Problem
    from ucformat.geometry.tensor import Key
    from ucformat.schema.manifest import FileDoc, Manifest
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.manager.steps import RunStep
    from ucformat.torch.tiers.choice import Copies
    from ucformat.torch.tiers.nodes import Nodes

__all__ = ["Survivors"]

_log = logging.getLogger("ucformat")
_NAMED = 5  # tensors


@message
class _Chosen:
    """Where the files of a checkpoint are read; `lost` is why they cannot be."""

    places: Places | None
    lost: str = ""


class Survivors:
    """What is left of a run's checkpoints, on the nodes of this launch and in slower tiers.

    All ranks call its methods together. Places are numbered: first the nodes, then the tiers.

    Args:
        store: the fast tier's folder on this node.
        tiers: the urls of the slower tiers, which have whole checkpoints.
    """

    def __init__(self, store: LocalStore, tiers: Sequence[str], nodes: Nodes, ranks: Group) -> None:
        self._store, self._tiers, self._nodes, self._ranks = store, tiers, nodes, ranks
        self._own = nodes.number_of(ranks.rank)
        self.contents = Contents()  # on rank 0, what all places have
        self._damaged: set[tuple[int, str]] = set()  # copies: place, and folder and key
        self._lost: set[tuple[str, str]] = set()  # checkpoints: folder and id
        self._chosen: Places | None = None
        self._opened = ("", "")  # the folder and id of the checkpoint that was opened last
        self._peers: list[PeerStore] = []

    @property
    def root(self) -> str:
        """What errors call all of it."""
        return " and ".join([self._store.url, *self._tiers])

    def list(self, ranks: Group) -> RunContents:
        """Find what all places have, and return the checkpoints that may be whole, the newest first."""
        own: Contents | Exception = Contents()
        if self._nodes.nodes[self._own].first == ranks.rank:
            try:
                own = contents_of(self._store, self._own)
            except Exception as error:  # noqa: BLE001 - raised on all ranks
                own = error

        def listed(on_nodes: Contents) -> RunContents:
            self.contents = on_nodes
            for number, url in enumerate(self._tiers, len(self._nodes.nodes)):
                self.contents += contents_of(open_store(url), number, partial=False)
            return self._run_contents()

        listed_contents: RunContents = ranks.combine(
            own, Contents.__add__, Contents, listed, RunContents
        )
        return listed_contents

    def _run_contents(self) -> RunContents:
        deleted = {i for url in self._tiers for i in deleted_below(url)}
        by_id: dict[str, RunStep] = {}
        for placed, step in sorted(self.contents.steps.items()):
            first = self.contents.manifests[placed][0][0]
            root = self._store.url if first < len(self._nodes.nodes) else self._tier(first)
            by_id.setdefault(step.id, replace(step, url=f"{root}/{placed[0]}"))
        steps = newest_first(by_id.values())
        readable = {folder for folder, _ in self.contents.steps}
        unreadable = tuple(
            (f"{self._store.url}/{folder}", step_of(folder) or 0, why)
            for folder, why in self.contents.unreadable.items()
            if folder not in readable
        )
        commits = max((s.commits for s in steps if s.commits is not None), default=0)
        intact = tuple(step for step in steps if step.id not in deleted)
        return RunContents(intact, unreadable, (), commits)

    def _tier(self, place: int) -> str:
        return self._tiers[place - len(self._nodes.nodes)]

    def on_nodes(self) -> tuple[str, ...]:
        """The folders of checkpoints that nodes have, the oldest first, but of lost ones; on rank 0, after `list`."""
        nodes = len(self._nodes.nodes)
        placed = [p for p, ranges in self.contents.manifests.items() if ranges[0][0] < nodes]
        folders = {self.contents.steps[p].id: p[0] for p in placed if p not in self._lost}
        steps = newest_first(self.contents.steps[p] for p in placed if p not in self._lost)
        return tuple(dict.fromkeys(folders[step.id] for step in steps))[::-1]

    def in_tiers(self) -> set[str]:
        """The folders of committed checkpoints that slower tiers have; on rank 0, after `list`."""
        nodes = len(self._nodes.nodes)
        return {p[0] for p, ranges in self.contents.manifests.items() if ranges[-1][1] > nodes}

    def open(self, step: RunStep, ranks: Group) -> Checkpoint:
        """Open a checkpoint of the listing.

        Raises:
            MissingData: some of its files are nowhere; the error names tensors that are in them.
        """
        self._chosen, self._opened = None, (step.url.rpartition("/")[2], step.id)
        chosen: _Chosen = ranks.combine(
            None, then=lambda _: self._choose(step), answer_kind=_Chosen
        )
        if chosen.places is None:
            raise MissingData(chosen.lost)
        self._chosen = chosen.places
        return open_together(step.url, ranks, store=self._located(step.url, chosen.places))

    def avoid(self, problems: Iterable[Problem]) -> bool:
        """Read no more from the copies that have these problems; returns whether other copies may be tried."""
        if self._chosen is None:
            self._lost.add(self._opened)
            return False
        places = self._chosen
        copies = {
            (place, f"{places.folder}/{key}")
            for key in (stored_key(problem.file) for problem in problems)
            if (place := places.locate(key)) is not None
        }
        new = copies - self._damaged
        self._damaged |= new
        for place, key in sorted(new) if not self._ranks.rank else ():
            _log.warning("the copy of %s %s is damaged", key, self._at(place))
        if not new:
            self._lost.add(self._opened)
        return bool(new)

    def close(self) -> None:
        """Close the connections to other ranks."""
        for peer in self._peers:
            peer.close()

    def _at(self, place: int) -> str:
        nodes = self._nodes.nodes
        return f"on node {nodes[place].name}" if place < len(nodes) else f"in {self._tier(place)}"

    def _located(self, url: str, places: Places) -> LocatedStore:
        def open_place(place: int) -> Store:
            if place >= len(self._nodes.nodes):
                return open_store(f"{self._tier(place)}/{places.folder}")
            if place == self._own:
                own = LocalStore(f"{self._store.url}/{places.folder}")
                return own.confined(lambda _: False)  # no link leads out of it
            members = self._nodes.nodes[place].members
            rank = members[self._ranks.rank % len(members)]
            peer = PeerStore(self._ranks.links, rank, self._store.url, places.folder)
            self._peers.append(peer)
            return peer

        return LocatedStore(url, places.locate, open_place, places.used)

    def _choose(self, step: RunStep) -> _Chosen:
        """Rank 0's part of `open`."""
        folder = step.url.rpartition("/")[2]
        damaged = {(n, key.partition("/")[2]) for n, key in self._damaged if _below(key, folder)}
        manifest = self._manifest(step, folder, damaged)
        if manifest is None:
            return _Chosen(None, "no place has an intact manifest of it")
        copies = copies_of(
            self.contents, (folder, step.id), manifest.attempt, len(self._nodes.nodes)
        )
        near = self._nodes.by_rank
        documents = [doc.path for doc in manifest.files]
        places, lost = choose_places(copies, folder, [MANIFEST, *documents], damaged)
        for doc in manifest.files:  # what is read to know the rest
            if doc.path not in lost:
                self._check(doc, copies, folder, damaged)
        places, lost = choose_places(copies, folder, [MANIFEST, *documents], damaged)
        if lost:
            return _Chosen(None, f"{_listed(lost)} survived nowhere")
        keys = [MANIFEST, *documents]
        source = Universal(self._located(step.url, places), manifest=manifest)
        if manifest.sidecar is not None:
            keys += source.sidecar().files
        elif not copies.whole:
            return _Chosen(None, "it has arrays, of which no node has a list")
        places, lost = choose_places(copies, folder, keys, damaged, near)
        return _Chosen(None, _told(source, lost)) if lost else _Chosen(places)

    def _manifest(
        self, step: RunStep, folder: str, damaged: set[tuple[int, str]]
    ) -> Manifest | None:
        """The manifest of a checkpoint, from the first place where it is intact; others are added to `damaged`."""
        for start, stop in self.contents.manifests[folder, step.id]:
            for place in range(start, stop):
                if (place, MANIFEST) in damaged:
                    continue
                store = self._located(step.url, _only(place, folder))
                with suppress(IntegrityError, NotFound, UpgradeNeeded):
                    manifest, _ = read_manifest(store)
                    if manifest.id == step.id:
                        return manifest
                damaged.add((place, MANIFEST))
        return None

    def _check(
        self, doc: FileDoc, copies: Copies, folder: str, damaged: set[tuple[int, str]]
    ) -> None:
        """Add copies of a document that differ from it to `damaged`, up to the first that does not."""
        for place in (*copies.documents.get(doc.path, ()), *copies.whole):
            if (place, doc.path) in damaged:
                continue
            store = self._located(folder, _only(place, folder))
            with suppress(IntegrityError, NotFound):
                if _digest_of(store, doc) == doc.digest:
                    return
            damaged.add((place, doc.path))


def _digest_of(store: Store, doc: FileDoc) -> str:
    """The digest of a document, as manifests have it, read in parts."""
    state = sha256()
    for _, part in read_parts(store, doc.path, doc.nbytes):
        state.update(part)
    return f"sha256:{state.hexdigest()}"


def _only(place: int, folder: str) -> Places:
    """All files in one place."""
    import numpy as np

    return Places(folder, np.zeros(0, np.int32), {}, place)


def _below(key: str, folder: str) -> bool:
    return key.startswith(f"{folder}/")


def _listed(names: Collection[str]) -> str:
    first = sorted(names)[:_NAMED]
    others = len(names) - len(first)
    return ", ".join(first) + (f" and {others:,} others" if others else "")


def _told(source: Universal, lost: Sequence[str]) -> str:
    """What is lost: the tensors that have elements in these files, and the files."""
    files = set(lost)
    names = [str(key) for key in source.docs if _is_in(source, key, files)]
    return (
        f"all copies of {_listed(lost)} are lost, and with them elements of "
        f"{len(names):,} tensors: {_listed(names)}"
    )


def _is_in(source: Universal, key: Key, files: set[str]) -> bool:
    return any(stored_key(extent.file) in files for extent in source.extents(key))
