"""`reshard`: one state of a training becomes that of another layout, from memory to memory."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack
from uuid import uuid4

from ucformat.errors import UsageError, check_keywords
from ucformat.storage.memory import MemoryStore
from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.loading.arguments import LoadArguments
from ucformat.torch.loading.load import load
from ucformat.torch.loading.share import open_together
from ucformat.torch.saving.save import prepare, save_in_group
from ucformat.torch.tiers.inventory import number_of
from ucformat.torch.tiers.located import LocatedStore
from ucformat.torch.tiers.peer import PeerStore
from ucformat.torch.tiers.serving import FileServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.load import LoadReport
    from ucformat.torch.loading.match import Strict

__all__ = ["reshard"]

_ROOT = "ucformat-reshard"


def reshard(
    state: Mapping[str, Any],
    into: Mapping[str, Any],
    strict: Strict = "report",
    **arguments: Unpack[LoadArguments],
) -> LoadReport:
    """Fill a state of another layout, or other ranks, from one in memory; the old and the new ranks call this together.

    What each rank holds of `state` is copied once in its memory, in which the others read what they
    hold of `into`. There is no file, and nothing is left when this returns. Both may use other
    ranks: one that has no part in the old or in the new layout passes `{}`.

    Args:
        state: that is there, as for `save`.
        into: the state to fill, as for `load`.
        strict: as for `load`.
        arguments: as for `load`; `names` are those of `into`.

    Returns:
        as for `load`. Its `url` and `lineage` name no place that can be opened later.

    Raises:
        StateMismatch: `into` does not fit.
        UcformatError: a rank failed or died. Every rank gets the same error; parts of `into` may be
            filled.
    """
    check_keywords("reshard", arguments, LoadArguments)
    timeout = arguments.get("timeout", TIMEOUT)
    with group_for_call("reshard", _ROOT, arguments.get("group"), timeout) as ranks:
        folder: str = ranks.combine(None, then=lambda _: f"live-{uuid4().hex}", answer_kind=str)
        root = MemoryStore(_ROOT)
        url = f"{root.url}/{folder}"
        try:
            with ranks.sharing_errors():
                local, options, metadata, _ = prepare(state, url, ranks, {"form": "packed"})
                if local.ranks:
                    raise UsageError(
                        f"{next(iter(local.ranks))} has a value of each rank, which other ranks have no "
                        "use for",
                        hint="leave it out of both states, and set it on the new ranks",
                    )
            save_in_group(local, replace(options, announced=False), metadata, ranks)
            with _served(folder, root, ranks) as store:
                report = load(into, open_together(url, ranks, store=store), strict, **arguments)
                ranks.combine(None)  # no rank reads any more
        finally:
            root.delete_prefix(folder)
    return report


@contextmanager
def _served(folder: str, root: MemoryStore, ranks: Group) -> Iterator[Store]:
    """Serve this rank's folder to the others; yields the files of all of them."""
    url = f"{root.url}/{folder}"
    own = MemoryStore(url.partition("://")[2])
    if ranks.size == 1:
        yield own
        return
    links = ranks.links
    server = links.files if isinstance(links.files, FileServer) else FileServer()
    is_new = links.files is None
    peers: list[PeerStore] = []

    def open_place(rank: int) -> Store:
        if rank == ranks.rank:
            return own
        peers.append(PeerStore(links, rank, root.url, folder))
        return peers[-1]

    server.add(folder, root)
    links.files = server
    try:
        # documents are where rank 0 put them
        yield LocatedStore(url, lambda key: number_of(key) or 0, open_place, range(ranks.size))
    finally:
        for peer in peers:
            peer.close()
        server.remove(folder)
        if is_new:
            links.files = None
            server.close()
