"""The checkpoints on which one is based: tensors that it does not store are theirs (docs/spec/format.md, "Bases").

A base is opened when a tensor of it is first needed, with a store of its own, whose files have the
keys `bases/<n>/…` in the checkpoint. It is found by its place and known by its id, and each tensor
by its fingerprint, so it may have been rewritten in another form.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ucformat.errors import IntegrityError, MissingData, NotFound, UnsafeError
from ucformat.format.mounted import is_below
from ucformat.format.structure import BASES_FOLDER, sibling_name, sibling_url
from ucformat.geometry.tensor import FileRun, Key
from ucformat.schema.limits import MAX_CHAIN
from ucformat.storage.folders import roots_hint
from ucformat.storage.url import open_store, split_url
from ucformat.storage.wrappers import RoutedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Tiles
    from ucformat.schema.manifest import BaseDoc, Manifest
    from ucformat.schema.tensors import TensorDoc
    from ucformat.storage.base import Store

#: The depths of bases that a process has measured: a training bases one checkpoint after another on them.
_measured: dict[str, int] = {}

_RESTORE = "bring it back to that place, or restore this checkpoint from a copy that is whole"


class BaseCheckpoint(Protocol):
    """What is used of an opened base."""

    manifest: Manifest
    store: Store
    docs: Mapping[Key, TensorDoc]
    bases: Bases

    def read_documents(self, known: Collection[str] = ()) -> None:
        """Read what tells where elements are, here and in bases but those with `known` ids."""

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent | Tiles]:
        """See Readable."""

    def file_runs(self, key: Key, within: Box) -> Iterable[Extent | Tiles | FileRun]:
        """See `HasFileRuns`."""


class OpenedBases:
    """The bases that are open of one checkpoint, each once, however many of them are based on it.

    Args:
        manifest: that of the checkpoint itself.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.lock = threading.Lock()
        self.checkpoints: dict[str, BaseCheckpoint] = {}  #: By their ids.
        self._bases = {manifest.id: manifest.bases}
        self._depths = {
            manifest.id: 0
        }  # how many, of which each is based on the next, lead to each

    def link(self, checkpoint: str, base: Manifest) -> str | None:
        """Record that a checkpoint is based on one that is open; or return why it must not be."""
        self._bases.setdefault(base.id, base.bases)
        depths = self._depths.copy()  # kept only if the link is: the next try must find it, too
        links = [(checkpoint, base.id)]
        while links:
            above, below = links.pop()
            if below == checkpoint:
                return "which is based on it"
            if depths.get(below, 0) > depths[above]:
                continue
            depths[below] = depths[above] + 1
            if depths[below] > MAX_CHAIN:
                return f"and {MAX_CHAIN} checkpoints are based on it in turn"
            links += [(below, doc.id) for doc in self._bases[below] if doc.id in self._bases]
        self._depths = depths
        return None


class Bases:
    """The bases of a checkpoint.

    Args:
        home: the url of the checkpoint.
        opened: those that are open, of the checkpoint that was opened first.
        allowed: returns the places in which bases may be that are not beside the checkpoint.
        open_base: opens the checkpoint in a store.
    """

    def __init__(
        self,
        home: str,
        manifest: Manifest,
        opened: OpenedBases,
        allowed: Callable[[], Sequence[str]],
        open_base: Callable[[Store], BaseCheckpoint],
    ) -> None:
        self.docs: Sequence[BaseDoc] = manifest.bases
        self._table = manifest.tensors
        self._home, self._allowed, self._open_base = home, allowed, open_base
        self._id, self._all = manifest.id, opened
        self._linked: dict[int, BaseCheckpoint] = {}

    def place(self, number: int) -> str:
        """The path or url of a base, if it may be read there."""
        url = self.docs[number].url
        place = place_of_base(self._home, url)
        if sibling_name(url) is None:
            is_allowed = is_below(place, self._allowed())
        else:
            scheme, path = split_url(place)
            # a link may lead anywhere
            is_link = scheme in ("", "file") and os.path.realpath(path) != path
            is_allowed = not is_link or is_below(place, self._allowed())
        if not is_allowed:
            raise UnsafeError(
                f"{self._home} is based on {place}, and reading files there is not allowed",
                hint=roots_hint(place),
            )
        return place

    def amounts(self, *, patched: bool = False) -> dict[str, tuple[int, int]]:
        """The number and the bytes of the tensors of each base, by its url in the manifest.

        Args:
            patched: count those of which tensors are patches instead.
        """
        if not self.docs:
            return {}
        totals = [[0, 0] for _ in self.docs]
        for number, nbytes in self._table.by_kind(
            lambda k: (k.base if k.is_referenced != patched else None, k.nbytes)
        ):
            if number is not None:
                totals[number][0] += 1
                totals[number][1] += nbytes
        return {doc.url: (n, size) for doc, (n, size) in zip(self.docs, totals, strict=True) if n}

    def opened(self, number: int) -> BaseCheckpoint:
        """A base; opened when it is first asked for.

        Raises:
            MissingData: it is not at its place.
            UnsafeError: it must not be read there.
            IntegrityError: another checkpoint is there, or the bases form a loop.
        """
        base = self._linked.get(number)
        if base is None:
            with self._all.lock:
                base = self._linked[number] = self._link(self.docs[number], number)
        return base

    @property
    def depth(self) -> int:
        """How many checkpoints, of which each is based on the next, there are below this one."""
        return self._measure({})

    def has_below(self, count: int) -> bool:
        """Whether so many checkpoints lie below this one, by what this process has measured before."""
        # which may have been made whole in place since, and so have fewer below it
        _measured[self._id] = self._measure(_measured)
        return _measured[self._id] >= count and self.depth >= count

    def _measure(self, depths: dict[str, int]) -> int:
        """The depth, by those of bases that are known by their ids; others are added."""
        for number, doc in enumerate(self.docs):
            if doc.id not in depths:
                depths[doc.id] = self.opened(number).bases._measure(depths)  # noqa: SLF001
        return max((1 + depths[doc.id] for doc in self.docs), default=0)

    def _link(self, doc: BaseDoc, number: int) -> BaseCheckpoint:
        base = self._all.checkpoints.get(doc.id)
        if base is None:
            base = self._open(doc, number)
        reason = self._all.link(self._id, base.manifest)
        if reason is not None:
            raise IntegrityError(
                f"{self._home} is based on {doc.url}, {reason}",
                hint="no writer makes such checkpoints; `ucp compact` makes one of them whole, or "
                "restore it from a copy that is",
            )
        self._all.checkpoints[doc.id] = base
        return base

    def _open(self, doc: BaseDoc, number: int) -> BaseCheckpoint:
        place = self.place(number)
        try:
            base = self._open_base(open_store(place))
        except NotFound as error:
            raise MissingData(
                f"{self._home} is based on the checkpoint {doc.id} at {place}, which is not there",
                hint=_RESTORE,
            ) from error
        if base.manifest.id != doc.id:
            raise IntegrityError(
                f"{self._home} is based on the checkpoint {doc.id} at {place}, where there is "
                f"another one by now, {base.manifest.id}",
                hint=_RESTORE,
            )
        return base

    def with_tensor(self, doc: TensorDoc, *, equal: bool = False) -> BaseCheckpoint:
        """The base of a tensor, which has one of the same name, state, dtype and shape.

        Args:
            equal: whether it must have the same fingerprint, too.
        """
        number, key = doc.base or 0, Key(doc.name, doc.state)
        base = self.opened(number)
        there = base.docs.get(key)
        if there is None:
            fault = "which has no such tensor"
        elif (there.dtype, there.unit, there.shape) != (doc.dtype, doc.unit, doc.shape):
            fault = f"where it is of {there.dtype} and the shape {list(there.shape)}"
        elif equal and there.fingerprint != doc.fingerprint:
            fault = "where it has another fingerprint" if there.fingerprint else "where it has none"
        else:
            return base
        raise IntegrityError(
            f"{self._home} has {key} from its base {base.manifest.id} at {base.store.url}, {fault}",
            hint="restore the base, or this checkpoint, from another copy",
        )

    def _holder(self, doc: TensorDoc) -> tuple[BaseCheckpoint, Key, str]:
        """The base of a tensor that is there, its key, and the folder of the base's files."""
        base = self.with_tensor(doc, equal=True)
        return base, Key(doc.name, doc.state), f"{BASES_FOLDER}{doc.base}/"

    def extents(self, doc: TensorDoc, within: Box | None) -> Iterator[Extent | Tiles]:
        """The extents of a tensor of a base; see Readable."""
        base, key, folder = self._holder(doc)
        for extent in base.extents(key, within):
            yield replace(extent, file=folder + extent.file)

    def file_runs(self, doc: TensorDoc, within: Box) -> Iterator[Extent | Tiles | FileRun]:
        """The same; see `HasFileRuns`."""
        base, key, folder = self._holder(doc)
        for run in base.file_runs(key, within):
            if isinstance(run, FileRun):
                first = replace(run.first, file=folder + run.first.file)
                yield replace(run, first=first, files=[folder + file for file in run.files])
            else:
                yield replace(run, file=folder + run.file)


class BasesStore(RoutedStore):
    """The store of a checkpoint with the files of its bases."""

    def __init__(self, inner: Store, bases: Bases) -> None:
        super().__init__(inner)
        self._bases = bases

    def place(self, key: str) -> tuple[Store, str] | None:
        """See RoutedStore."""
        if not key.startswith(BASES_FOLDER):
            return None
        number, _, name = key.removeprefix(BASES_FOLDER).partition("/")
        return self._bases.opened(int(number)).store, name


# Places of bases, as a manifest has them.


def place_of_base(home: str, url: str) -> str:
    """The path or url of the base of a checkpoint; the real path if it is beside one that is a folder here."""
    name = sibling_name(url)
    if name is None:
        return url
    folder, _ = _folder_and_name(home)
    if folder is None:
        raise UnsafeError(
            f"{home} is based on {url}, but nothing can be beside it",
            hint="open it by a path or url that has a folder",
        )
    return f"{folder.rstrip('/')}/{name}"


def url_of_base(home: str, place: str) -> str:
    """How the manifest of a checkpoint has the place of its base: relative if they are in one folder."""
    folder, name = _folder_and_name(place)
    beside = sibling_url(name)
    if folder is not None and folder == _folder_and_name(home)[0] and beside is not None:
        return beside
    scheme, path = split_url(place)
    return os.path.realpath(path) if scheme in ("", "file") else place


def folder_around(place: str) -> str | None:
    """The folder in which a checkpoint is, or will be; None if it is the root of a store."""
    return _folder_and_name(place)[0]


def _folder_and_name(place: str) -> tuple[str | None, str]:
    """The folder in which a checkpoint is, and its name there; no folder if it is the root of a store."""
    scheme, path = split_url(place)
    if scheme in ("", "file"):
        folder, _, name = os.path.realpath(path).rpartition("/")
        return folder or "/", name
    folder, _, name = place.rstrip("/").rpartition("/")
    return (None if folder.endswith((":", ":/")) else folder), name
