"""Copies a checkpoint of the fast tier: documents to all nodes, files of each node to its peers, all to slower tiers.

A file is copied under its own key, and appears as a whole, so one that exists is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ucformat.format.attempts import KINDS
from ucformat.format.commit import begin, commit, discard
from ucformat.format.structure import committed_manifest
from ucformat.format.universal import Universal
from ucformat.jobs.copy import packed_item, transfer
from ucformat.schema import MANIFEST
from ucformat.storage.base import exists, read_parts
from ucformat.storage.upload import unit_for
from ucformat.torch.tiers.inventory import number_of
from ucformat.torch.tiers.peer import PeerStore

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ucformat.format.commit import Attempt
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.tiers.nodes import Nodes

__all__ = ["copy_files", "copy_from_peers", "fill", "gather_documents", "write_documents"]

_RECORDS = "attempts/"


def gather_documents(store: Store, ranks: Group) -> Mapping[str, bytes]:
    """Return the files of a checkpoint that rank 0 has, except those of ranks; all ranks call this.

    Args:
        store: the folder of the checkpoint on this node.
    """

    def read(_: None) -> Mapping[str, bytes]:
        keys = [i.key for i in store.list() if number_of(i.key) is None]
        return {key: store.read(key) for key in keys}

    documents: Mapping[str, bytes] = ranks.combine(None, then=read, answer_kind=Mapping[str, bytes])
    return documents


def write_documents(
    store: Store, documents: Mapping[str, bytes], nodes: Nodes, ranks: Group
) -> None:
    """Write these files on this node, unless it is that of rank 0; one of its ranks does it."""
    if ranks.rank and nodes.of(ranks.rank).first == ranks.rank:
        for key in sorted(documents, key=lambda key: key == MANIFEST):  # the manifest last
            with store.create(key) as out:
                out.write(documents[key])
        store.flush()


def copy_from_peers(
    store: Store,
    root: str,
    folder: str,
    sources: Iterable[int],
    documents: Collection[str],
    nodes: Nodes,
    ranks: Group,
) -> None:
    """Copy this rank's share of the files that other nodes have written of a checkpoint.

    Those nodes are copying, too: what they have of others is left aside.

    Args:
        store: the folder of the checkpoint on this node.
        root: of the tier.
        sources: the numbers of the nodes of which this node keeps copies.
        documents: the keys of files that every node gets from rank 0.
    """
    own = nodes.of(ranks.rank).members
    position = own.index(ranks.rank)
    for number in sources:
        members = nodes.nodes[number].members
        shares: dict[int | None, int] = {rank: place for place, rank in enumerate(members)}
        shares[None] = 0  # of files that are of no rank
        peer = PeerStore(ranks.links, members[position % len(members)], root, folder)
        try:
            listed = sorted({info.key for info in peer.list()}.difference(documents))
            numbered = [(key, shares.get(number_of(key))) for key in listed]
            mine = [key for key, n in numbered if n is not None and n % len(own) == position]
            copy_files(peer, store, mine)
        finally:
            peer.close()
    store.flush()


def copy_files(source: Store, target: Store, keys: Iterable[str]) -> None:
    """Copy files that the target lacks."""
    there = {info.key: info.size for info in target.list()}
    for key in keys:
        size = source.info(key).size
        if there.get(key) == size:  # of an interrupted copy
            target.adopt(key)
            continue
        with target.create(key, unit_for(size)) as out:
            for _, part in read_parts(source, key, size):
                out.write(part)


def _is_of_another(key: str, attempt: str) -> bool:
    """Whether a file is of another attempt at the same folder, whose record is not copied: nobody would remove it."""
    kind, _, rest = key.partition("/")
    return kind in KINDS and not rest.startswith(f"{attempt}/")


def fill(
    store: Store,
    url_store: Store,
    documents: Collection[str],
    own_keys: Sequence[str],
    ranks: Group,
) -> None:
    """Copy a checkpoint of the fast tier to a slower one, and commit it there; all ranks call this together.

    Files of ranks are compared with their checksums while they are copied.

    Args:
        store: the folder of the checkpoint on this node.
        url_store: where it is copied to.
        documents: the keys of what rank 0 has besides files of ranks.
        own_keys: of the files that this rank copies.
    """
    begun: tuple[Attempt, Manifest, bytes] | None = None

    def start(_: None) -> bool:
        nonlocal begun
        data, _version = store.read_versioned(MANIFEST)
        manifest = committed_manifest(data, store.url)
        if exists(url_store, MANIFEST):
            there = committed_manifest(url_store.read(MANIFEST), url_store.url)
            if there.id == manifest.id:
                return True
        plan = {"tier": manifest.id}
        attempt = begin(url_store, plan, overwrite=False, name=manifest.attempt, keeps=manifest.id)
        begun = (attempt, manifest, data)
        return False

    is_there: bool = ranks.combine(None, then=start, answer_kind=bool)
    if is_there:
        return
    failure: Exception | None = None
    try:
        others = [key for key in own_keys if number_of(key) is None]
        if begun is not None:
            others += sorted(k for k in documents if k != MANIFEST and not k.startswith(_RECORDS))
        source, there = Universal(store), {i.key: i.size for i in url_store.list("data")}
        attempt = source.manifest.attempt
        copy_files(store, url_store, [key for key in others if not _is_of_another(key, attempt)])
        packed = () if source.manifest.sidecar is None else source.sidecar().files
        for key in own_keys:
            if key in packed:  # a rank that holds nothing has an empty file
                transfer(packed_item(source, key), source.store, url_store, there)
        url_store.flush()
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        failure = error

    def end(_: None) -> None:
        assert begun is not None  # noqa: S101 - on rank 0
        commit(url_store, begun[0], begun[1], begun[2])

    try:
        ranks.combine(failure, then=end)
    except Exception:
        if begun is not None and ranks.intact:
            discard(url_store, begun[0].id)
        raise
