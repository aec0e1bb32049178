"""The tiers of a run: what `Manager` calls to save to the fast one, to have it copied, and to recover."""

from __future__ import annotations

import logging
import operator
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, count
from typing import TYPE_CHECKING

from ucformat.errors import Conflict, UcformatError, UnsupportedError, UsageError
from ucformat.format.described import packed_file
from ucformat.format.structure import read_manifest
from ucformat.jobs.removal import discard
from ucformat.schema import MANIFEST
from ucformat.settings import local_path
from ucformat.storage.base import exists
from ucformat.storage.local import LocalStore
from ucformat.storage.url import open_store, split_url
from ucformat.storage.wrappers import WrappedStore
from ucformat.torch.comm.group import group_for_call, is_live, single_process_group
from ucformat.torch.comm.wire import message
from ucformat.torch.manager.steps import folder_of, list_steps
from ucformat.torch.saving.handles import SaveHandle, wait_until_done
from ucformat.torch.tiers.copying import (
    copy_from_peers,
    fill,
    gather_documents,
    write_documents,
)
from ucformat.torch.tiers.inventory import number_of
from ucformat.torch.tiers.nodes import gather_nodes, peers_of
from ucformat.torch.tiers.recovery import Survivors
from ucformat.torch.tiers.serving import FileServer
from ucformat.torch.tiers.tier import check_tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from datetime import timedelta

    import torch.distributed as dist

    from ucformat.storage.base import Checksums, Store
    from ucformat.torch.comm.bulk import Links
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.options import RunArguments
    from ucformat.torch.saving.save import Saved
    from ucformat.torch.tiers.nodes import Nodes
    from ucformat.torch.tiers.tier import Tier

__all__ = ["Tiers"]

_log = logging.getLogger("ucformat")

_KEEP = 2  # checkpoints of the fast tier
_REFUSED = {
    "base": "what equals another checkpoint would be read there, which may not survive",
    "patch": "a patch needs another checkpoint, which may not survive",
    "overwrite": "a step that a tier has already is saved beside it",
    "chunk_bytes": "the first tier has packed files",
    "shard_bytes": "the first tier has packed files",
}


@message
class _Cleared:
    """Folders of the fast tier, the oldest first, and those to be removed."""

    folders: tuple[str, ...]
    removed: tuple[str, ...]


@message
class _Destination:
    """The folder for a step, and one of a save that failed, which is removed."""

    folder: str
    removed: tuple[str, ...] = ()


@message
class _Copied:
    """What ranks report of a copy to peers, and what rank 0 decides: the slower tiers to fill now."""

    failures: tuple[str, ...] = ()
    due: tuple[int, ...] = ()

    def __add__(self, other: _Copied) -> _Copied:
        return _Copied((*self.failures, *other.failures)[:3])


class _SlowTier:
    """A slower tier, and the thread that fills it."""

    def __init__(self, url: str, every: int, keep: int | None) -> None:
        self.url, self.every, self.keep = url, every, keep
        self.pool = ThreadPoolExecutor(1, "ucformat-fill")
        self.job: Future[None] | None = None
        self.step = 0  # that of the job

    @property
    def is_busy(self) -> bool:
        return self.job is not None and not self.job.done()


class _CheckedStore(WrappedStore):
    """A store that calls a function before it reads, which raises to end what reads it."""

    def __init__(self, inner: Store, check: Callable[[], None]) -> None:
        super().__init__(inner)
        self._check = check

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        self._check()
        return super().read(key, offset, nbytes)

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        """See Store."""
        self._check()
        super().read_into(key, offset, buffers, crcs)


class Tiers:
    """The tiers of a run.

    Args:
        url: that of the run, the slowest tier.
        tiers: the others, the fastest first.
        every: the steps that are saved at the url.
        filled: called on rank 0 when a checkpoint is committed at the url: its url there, and step.

    Raises:
        UsageError: the tiers contradict each other.
        UnsupportedError: an argument is not possible with tiers.
    """

    def __init__(
        self,
        url: str,
        tiers: Sequence[Tier],
        every: int | timedelta | None,
        arguments: RunArguments,
        filled: Callable[[str, int], None],
    ) -> None:
        home_every = check_tiers(tiers, url, every)
        for name, why in _REFUSED.items():
            if arguments.get(name):
                raise UnsupportedError(
                    f"{name}={arguments[name]!r} is not supported with tiers: {why}",  # type: ignore[literal-required]
                    hint=f"leave {name} out",
                )
        if arguments.get("form", "packed") != "packed":
            raise UnsupportedError(
                f"form={arguments['form']!r} is not supported with tiers: in the first one each rank "
                "writes a file of its own",
                hint='form="packed"; `ucp materialize` makes arrays of it at any later time',
            )
        fast, *slower = tiers
        self.every = fast.every
        self.store = LocalStore(local_path(split_url(fast.url)[1]))
        self._keep, self._replicas = fast.keep or _KEEP, fast.replicas
        least = fast.every or 1
        self._slow = [
            _SlowTier(open_store(tier.url).url, tier.every or least, tier.keep) for tier in slower
        ]
        self._slow.append(_SlowTier(url, home_every or least, None))
        self._filled = filled
        self._stopped: UcformatError | None = None  # why copies that are being made fail
        self._group: dist.ProcessGroup | None = arguments.get("group")
        self._nodes: tuple[Links, Nodes] | None = None
        self._folders: list[str] = []  # committed in the fast tier, the oldest first
        self._uncopied: set[str] = set()  # of these, those of which peers lack copies
        self._taken: set[str] = set()  # on rank 0, all folders that some tier has
        self._begun = ""  # the folder of a save of which it is not known that it is committed
        self._pinned: dict[str, int] = {}  # folders from which tiers are being filled, how often
        self._changing = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "ucformat-copy")
        self._job: Future[None] | None = None
        self._server: FileServer | None = None
        self._warned = False

    # Where to save.

    def url_of(self, folder: str) -> str:
        """The url of a checkpoint in the fast tier."""
        return f"{self.store.url}/{folder}"

    def nodes(self, ranks: Group) -> Nodes:
        """The nodes of the job, from which files are served to all ranks from now on; all ranks call this."""
        links = ranks.links
        if self._nodes is None or self._nodes[0] is not links:
            self._nodes = (links, gather_nodes(ranks, local_path(self.store.url)))
        if links.files is None:
            self._server = links.files = FileServer(self.store)
        elif links.files is not self._server:
            raise UsageError(
                "another Manager with tiers is open in this process",
                hint="close it first, or use it as a context manager",
            )
        return self._nodes[1]

    def times(self, ranks: Group) -> int:
        """How many times what a rank writes its node will hold, at most; the same on all ranks."""
        nodes = self.nodes(ranks).nodes
        replicas = min(self._replicas, len(nodes) - 1)
        most = self._keep + 1 + len(self._slow)  # each slower tier may be filled from another one
        return most * (1 + replicas) * max(len(node.members) for node in nodes)

    def begin(self, survivors: Survivors, ranks: Group) -> None:
        """Before the first save of a launch: remove what is left of interrupted saves and lost checkpoints."""

        def clear(_: None) -> _Cleared:
            contents = survivors.contents
            folders = survivors.on_nodes()
            places = {
                *(f for f, _ in contents.manifests),
                *contents.unreadable,
                *(f for f, _ in contents.files),
            }
            places |= {f for f, _ in contents.documents}
            kept = {*folders, *contents.newer}
            removed = tuple(sorted(places - kept))
            self._taken = kept | survivors.in_tiers()
            return _Cleared(folders, removed)

        cleared: _Cleared = ranks.combine(None, then=clear, answer_kind=_Cleared)
        self._folders = list(cleared.folders)
        with ranks.sharing_errors():
            self._remove(cleared.removed, ranks)

    def destination(self, step: int, later: Collection[int], ranks: Group) -> str:
        """The folder for a step, which no tier has yet; all ranks call this, after the last save has ended.

        What that has left behind on any node is removed if it failed.

        Args:
            later: steps after the restored one that some tier has; another checkpoint of these is
                saved beside it.

        Raises:
            Conflict: a tier has another step already.
        """

        def choose(_: None) -> _Destination:
            failed = self._begun and not exists(self.store, f"{self._begun}/{MANIFEST}")
            removed = (self._begun,) if failed else ()
            self._taken.difference_update(removed)
            for again in chain((0,), count(2)):
                folder = folder_of(step, again)
                if folder not in self._taken:
                    self._taken.add(folder)
                    return _Destination(folder, removed)
                if step not in later:
                    raise Conflict(
                        f"a checkpoint of step {step} exists in one of the tiers of {self._slow[-1].url}",
                        hint="choose another url, or restore it first: later steps are kept beside",
                    )
            raise AssertionError  # the loop has no end

        chosen: _Destination = ranks.combine(None, then=choose, answer_kind=_Destination)
        self._begun = chosen.folder
        with ranks.sharing_errors():
            self._remove(chosen.removed, ranks)
        return chosen.folder

    # After a commit in the fast tier.

    def copy(self, saved: Saved | SaveHandle, step: int, *, everywhere: bool) -> None:
        """Copy a checkpoint in the background, when it is committed: to peers, and to the tiers for which it is due.

        Args:
            everywhere: to all tiers, even if they are busy.
        """
        self._job = self._pool.submit(self._copy_saved, saved, step, everywhere)

    def settle(self) -> None:
        """Wait until the last save has ended, and its copies to peers are made; failures are warnings."""
        if self._job is not None:
            self._job.result()

    def wait(self) -> None:
        """Wait until all copies are made; failures are warnings."""
        self.settle()
        for tier in self._slow:
            if tier.job is not None:
                tier.job.result()

    def stop(self, why: UcformatError) -> None:
        """Let the copies fail that are being made, with the next bytes that they read."""
        self._stopped = why

    def close(self) -> None:
        """Wait until all copies are made, and serve no files any more."""
        self.wait()
        for pool in (self._pool, *(tier.pool for tier in self._slow)):
            pool.shutdown()
        if self._nodes is not None and self._server is not None:
            if self._nodes[0].files is self._server:
                self._nodes[0].files = None
            self._server.close()

    @contextmanager
    def _ranks(self, call: str, url: str, links: Links) -> Iterator[Group]:
        """The channel of a thread for one tier."""
        if links.size == 1:  # whose threads have no channels of their own
            yield single_process_group()
            return
        self._check()
        if is_live(links):  # otherwise this would wait for ranks that are gone
            with group_for_call(call, url, self._group, links.timeout) as ranks:
                if ranks.links is links:
                    yield ranks
                    return
        raise UcformatError("the ranks that saved it are no longer connected")

    def _copy_saved(self, saved: Saved | SaveHandle, step: int, everywhere: bool) -> None:  # noqa: FBT001
        folder = saved.url.rpartition("/")[2]
        if isinstance(saved, SaveHandle):
            wait_until_done(saved)
        is_committed = not isinstance(saved, SaveHandle) or saved.committed
        assert self._nodes is not None  # noqa: S101 - the caller has asked for them
        try:
            with self._ranks("copy", self.store.url, self._nodes[0]) as ranks:
                if ranks.combine(is_committed, operator.and_, bool):
                    self._begun = ""
                    self._folders.append(folder)
                    self._uncopied.add(folder)
                    self._copy(folder, step, ranks, everywhere=everywhere)
        except Exception as error:  # noqa: BLE001 - the training goes on
            _log.warning(
                "%s was not copied to other nodes: %s",
                saved.url,
                getattr(error, "message", error),
            )

    def _copy(self, folder: str, step: int, ranks: Group, *, everywhere: bool) -> None:
        """Copy documents to all nodes and files to peers, then remove old checkpoints and fill tiers."""
        assert self._nodes is not None  # noqa: S101 - as above
        nodes = self._nodes[1]
        store = self._folder(folder)
        documents = gather_documents(store, ranks)
        keys = frozenset(documents)
        failures: tuple[str, ...] = ()
        try:
            write_documents(store, documents, nodes, ranks)
            self._copy_from_peers(folder, keys, nodes, ranks)
        except Exception as error:  # noqa: BLE001 - the other ranks wait in what follows
            failures = (f"rank {ranks.rank}: {getattr(error, 'message', None) or repr(error)}",)
        copied: _Copied = ranks.combine(
            _Copied(failures),
            _Copied.__add__,
            _Copied,
            lambda all_ranks: self._due(all_ranks, step, everywhere=everywhere),
            _Copied,
        )
        if copied.failures and not ranks.rank:
            _log.warning("not all copies of %s were made: %s", folder, "; ".join(copied.failures))
        for number in copied.due:
            self._begin_fill(self._slow[number], folder, step, keys)
        if not copied.failures:
            self._uncopied.discard(folder)
        self._remove_old(ranks)

    def _copy_from_peers(
        self, folder: str, documents: frozenset[str], nodes: Nodes, ranks: Group
    ) -> None:
        names = [node.name for node in nodes.nodes]
        replicas = min(self._replicas, len(names) - 1)
        if replicas < self._replicas and not self._warned and not ranks.rank:
            self._warned = True
            _log.warning(
                "%s has %d copies instead of %d: there are only %d nodes (UCP_NODE names them)",
                self.store.url,
                replicas,
                self._replicas,
                len(names),
            )
        own = nodes.number_of(ranks.rank)
        sources = [n for n, peers in enumerate(peers_of(names, replicas)) if own in peers]
        copy_from_peers(
            self._folder(folder), self.store.url, folder, sources, documents, nodes, ranks
        )

    def _due(self, copied: _Copied, step: int, *, everywhere: bool) -> _Copied:
        """On rank 0, the tiers to fill with a step; one that is busy is skipped, with a warning."""
        due = []
        for number, tier in enumerate(self._slow):
            if everywhere or step % tier.every == 0:
                if tier.is_busy and not everywhere:
                    _log.warning(
                        "step %d is not saved at %s, where step %d is still being saved",
                        *(step, tier.url, tier.step),
                    )
                else:
                    due.append(number)
        return _Copied(copied.failures, tuple(due))

    # Slower tiers.

    def _begin_fill(
        self, tier: _SlowTier, folder: str, step: int, documents: frozenset[str]
    ) -> None:
        with self._changing:
            self._pinned[folder] = self._pinned.get(folder, 0) + 1
        tier.step = step
        tier.job = tier.pool.submit(self._fill, tier, folder, step, documents)

    def _fill(self, tier: _SlowTier, folder: str, step: int, documents: frozenset[str]) -> None:
        assert self._nodes is not None  # noqa: S101 - as above
        links, nodes = self._nodes
        url = f"{tier.url}/{folder}"
        try:
            with self._ranks("fill", tier.url, links) as ranks:
                with ranks.sharing_errors():
                    store, target = self._folder(folder), open_store(url)
                    own = self._own_keys(store, documents, nodes, ranks)
                fill(_CheckedStore(store, self._check), target, documents, own, ranks)
                if not ranks.rank:
                    self._drop_old(tier)
                    if tier is self._slow[-1]:
                        self._filled(url, step)
        except Exception as error:  # noqa: BLE001 - the training goes on
            _log.warning(
                "step %d was not saved at %s: %s", step, url, getattr(error, "message", error)
            )
        finally:
            with self._changing:
                self._pinned[folder] -= 1

    def _own_keys(
        self, store: LocalStore, documents: frozenset[str], nodes: Nodes, ranks: Group
    ) -> list[str]:
        """The files that this rank copies: its own, be it there or not, and others that only this node has."""
        first = nodes.of(ranks.rank).first == ranks.rank
        own_file = packed_file(f"data/{read_manifest(store)[0].attempt}", ranks.rank)
        others = (info.key for info in store.list()) if first else ()
        return [own_file, *(k for k in others if number_of(k) is None and k not in documents)]

    def _drop_old(self, tier: _SlowTier) -> None:
        """Remove the oldest checkpoints of a tier that keeps a few, and what interrupted removals left; on rank 0."""
        if tier.keep is not None and self._stopped is None:
            listed = list_steps(tier.url)
            there = {step.url for step in listed.steps}
            old = [step.url for step in listed.steps[tier.keep :]]
            for url in (*old, *(u for u in listed.being_purged if u not in there)):
                discard(url)

    def _check(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    # The folders of the fast tier.

    def survivors(self, ranks: Group) -> Survivors:
        """What is left of the run's checkpoints; all ranks call this."""
        return Survivors(self.store, [tier.url for tier in self._slow], self.nodes(ranks), ranks)

    def _folder(self, folder: str) -> LocalStore:
        return LocalStore(f"{self.store.url}/{folder}").confined(lambda _: False)

    def _remove_old(self, ranks: Group) -> None:
        """Remove what the fast tier does not keep, except what tiers are being filled from.

        The newest stays, and the newest of which all copies are made, even if these are more than it keeps.
        """
        copied = [f for f in self._folders if f not in self._uncopied]
        least = dict.fromkeys([*self._folders[-1:], *copied[-1:]])
        order = list(dict.fromkeys([*least, *reversed(self._folders)]))
        with self._changing:
            old = [f for f in order[max(self._keep, len(least)) :] if not self._pinned.get(f)]
        self._remove(old, ranks)
        self._folders = [f for f in self._folders if f not in old]
        self._uncopied.intersection_update(self._folders)

    def _remove(self, folders: Collection[str], ranks: Group) -> None:
        """Remove folders of the fast tier on this node, the manifest of each first."""
        assert self._nodes is not None  # noqa: S101 - as above
        nodes = self._nodes[1]
        if nodes.of(ranks.rank).first != ranks.rank:
            return
        for folder in folders:
            self.store.delete(f"{folder}/{MANIFEST}")
            self.store.delete_prefix(folder)
        if folders:
            self.store.flush()
