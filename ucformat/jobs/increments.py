"""Writing on a base: tensors that equal those of another checkpoint are referenced, and not written.

A tensor is equal if it has the name, state, dtype, shape and fingerprint of one of the base. What
the base itself references, is referenced where it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ucformat.checkpoint import Checkpoint
from ucformat.errors import UnsupportedError, UsageError
from ucformat.format.bases import folder_around, place_of_base, url_of_base
from ucformat.format.structure import sibling_name
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.jobs.dependents import need_base
from ucformat.references import open_reference
from ucformat.schema.limits import MAX_CHAIN
from ucformat.schema.manifest import BASES, BaseDoc
from ucformat.schema.tensors import TensorDoc
from ucformat.settings import allow_root

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from os import PathLike

    from ucformat.format.bases import Bases
    from ucformat.format.commit import Attempt
    from ucformat.format.universal import Universal
    from ucformat.schema.manifest import Manifest
    from ucformat.schema.tensors import TensorTable


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tensors of which a base has one of the same name, state, dtype and shape.

    Attributes:
        equal: the base's tensors that are the same by their fingerprints.
        different: the base's tensors that have another fingerprint.
        unread: the tensors whose fingerprints are not known.
    """

    equal: Sequence[TensorDoc] = ()
    different: Sequence[TensorDoc] = ()
    unread: Sequence[TensorInfo] = ()


@dataclass(frozen=True, slots=True)
class _Owner:
    """A checkpoint that stores tensors: its id, its place, and the attempt that is committed there."""

    id: str
    place: str
    attempt: str


def row_alike(table: TensorTable, info: TensorInfo) -> tuple[int, TensorDoc] | None:
    """The tensor of the same name, state, dtype and shape, if its fingerprint is known, and its row."""
    row = table.row(*info.key)
    doc = None if row is None else table[row]
    if row is None or doc is None or doc.fingerprint is None:
        return None
    return (row, doc) if (doc.stored_dtype, doc.shape) == (info.dtype, info.shape) else None


class Base:
    """A checkpoint of which another one, that is about to be written, references tensors.

    Args:
        ck: the base.
        home: the url of the new checkpoint.

    Raises:
        UnsupportedError: the base is no universal checkpoint, or has no fingerprints.
        UsageError: it is opened through a view, or is at the place of the new one.
    """

    def __init__(self, ck: Checkpoint, home: str) -> None:
        if ck.universal is None:
            raise UnsupportedError(
                f"{ck.home} is a checkpoint of {ck.kind}, on which none can be based",
                hint=f"ucp register {ck.home} DST --virtual --checksums makes a universal one of it "
                "without copying it; or convert it",
            )
        if ck.viewed:
            raise UsageError(
                f"{ck.url} is opened through a view, whose tensors are stored nowhere",
                hint="give the checkpoint itself as the base",
            )
        self.manifest = ck.universal.manifest
        table = self.manifest.tensors
        if len(table) and not any(table.fingerprint):
            raise UnsupportedError(
                f"{ck.url} has no fingerprints, so nothing tells which tensors equal its own",
                hint=f"ucp convert {ck.url} DST writes it with fingerprints; a virtual one is "
                "registered again with --checksums",
            )
        self._home, self.url = home, ck.url
        self._bases = ck.universal.bases
        if url_of_base(home, home) == url_of_base(home, ck.url):
            raise UsageError(
                f"{home} cannot be based on the checkpoint that it replaces",
                hint="write it to another place",
            )

    @property
    def urls(self) -> list[str]:
        """Where the tensors may be stored: in the base, and in those that it has tensors of."""
        places = (place_of_base(self.url, doc.url) for doc in self._bases.docs)
        return [url_of_base(self._home, place) for place in (self.url, *places)]

    @property
    def is_deepest(self) -> bool:
        """Whether so many checkpoints lie below the base that one more could not be read."""
        return self._bases.has_below(MAX_CHAIN)

    def check_depth(self) -> None:
        """Raise UsageError if patches of the base could not be read."""
        if self.is_deepest:
            raise UsageError(
                f"{MAX_CHAIN} checkpoints are patches of each other already, the last at {self.url}",
                hint="`ucp compact --fold` makes one patch of it; a training saves without base now and then, "
                "as Manager does with increments",
            )

    def compare(
        self, infos: Iterable[TensorInfo], fingerprints: Mapping[Key, str | None]
    ) -> Comparison:
        """Compare tensors with those of the base, by the fingerprints that are known of them."""
        equal, different, unread = list[TensorDoc](), list[TensorDoc](), list[TensorInfo]()
        for info in infos:
            doc, fingerprint = self.alike(info), fingerprints.get(info.key)
            if doc is None:
                continue
            if fingerprint is None:
                unread.append(info)
            else:
                (equal if fingerprint == doc.fingerprint else different).append(doc)
        return Comparison(equal, different, unread)

    def match(self, info: TensorInfo, fingerprint: str | None) -> TensorDoc | None:
        """The base's tensor that equals one with this fingerprint; None if there is none."""
        doc = self.alike(info)
        return doc if doc is not None and doc.fingerprint == fingerprint else None

    def alike(self, info: TensorInfo) -> TensorDoc | None:
        """The base's tensor of the same name, state, dtype and shape, if its fingerprint is known."""
        alike = row_alike(self.manifest.tensors, info)
        return None if alike is None else alike[1]

    def referenced(
        self,
        docs: Iterable[TensorDoc],
        patched: Iterable[TensorDoc] = (),
        *,
        patch: bool = False,
        left: Iterable[TensorDoc] = (),
        chained: bool = False,
    ) -> References:
        """The references to tensors of the base, in order.

        Args:
            patched: tensors of which others are patches.
            left: tensors that stand for others, whatever these are by now, each with its own step.
            patch: whether others, that are not known yet, may be patches of those of the base, which is
                number 0 then.
            chained: whether the base is needed even if nothing of it is referenced.
        """
        owners: dict[int | None, int] = {None: 0} if patch or chained else {}

        def reference(doc: TensorDoc) -> TensorDoc:
            owner = doc.base if doc.is_referenced else None
            return TensorDoc(
                *(doc.name, doc.state, doc.dtype, doc.shape),
                itemsize=doc.itemsize,
                fingerprint=doc.fingerprint,
                base=owners.setdefault(owner, len(owners)),
            )

        def older(doc: TensorDoc) -> TensorDoc:
            step = self.manifest.step if doc.step is None else doc.step
            return replace(reference(doc), at=doc.at, lossy=doc.lossy, bound=doc.bound, step=step)

        tensors, alike = tuple(map(reference, docs)), tuple(map(reference, patched))
        tensors += tuple(map(older, left))
        return References(
            tuple(map(self._owner, owners)), tensors, self._home, alike, chained=chained
        )

    def _owner(self, number: int | None) -> _Owner:
        if number is None:
            return _Owner(self.manifest.id, self.url, self.manifest.attempt)
        return _owner(self._bases, number)


def _owner(bases: Bases, number: int) -> _Owner:
    manifest = bases.opened(number).manifest
    return _Owner(manifest.id, bases.place(number), manifest.attempt)


@dataclass(frozen=True, slots=True)
class References:
    """The tensors that a new checkpoint at `home` references, and the checkpoints that store them.

    Attributes:
        patched: the tensors of which tensors of the new checkpoint are patches.
        chained: whether the first owner, the base itself, is needed even if nothing of it is referenced.
    """

    owners: tuple[_Owner, ...] = ()
    tensors: tuple[TensorDoc, ...] = ()
    home: str = ""
    patched: tuple[TensorDoc, ...] = ()
    chained: bool = False

    def beside(self, home: str, names: Mapping[str, str]) -> References:
        """These for a checkpoint that will be in one folder with its bases.

        Args:
            names: those of bases there, by their ids; others are named by their ids.
        """
        folder = folder_around(home)
        owners = (replace(o, place=f"{folder}/{names.get(o.id, o.id)}") for o in self.owners)
        return replace(self, owners=tuple(owners), home=home)

    @property
    def keys(self) -> frozenset[Key]:
        """The names and states of the tensors."""
        return frozenset(Key(doc.name, doc.state) for doc in self.tensors)

    @property
    def infos(self) -> list[TensorInfo]:
        """The tensors as readers describe them."""
        return [TensorInfo(d.name, d.state, d.stored_dtype, d.shape) for d in self.tensors]

    @property
    def urls(self) -> tuple[str, ...]:
        """The places of the bases as the manifest has them."""
        return tuple(url_of_base(self.home, owner.place) for owner in self.owners)

    @property
    def plan(self) -> dict[str, Any]:
        """What they add to the plan of an attempt."""
        bases = [(owner.id, url) for owner, url in zip(self.owners, self.urls, strict=True)]
        return {"bases": bases, "referenced": sorted(self.keys)} if bases else {}

    def kept(self, *, patched: bool) -> References:
        """These without the base itself if it is there only for patches, and nothing is `patched`."""
        if patched or self.chained or not self.owners or any(doc.base == 0 for doc in self.tensors):
            return self
        tensors = tuple(replace(doc, base=(doc.base or 0) - 1) for doc in self.tensors)
        return References(self.owners[1:], tensors, self.home)

    def protect(self, checkpoint: str) -> None:
        """Record beside the bases that the new checkpoint needs them, and allow this user to read them.

        Raises:
            Conflict: one of them is being removed or replaced, or was since it was opened.
            PermissionDenied: nothing can be written beside one.
        """
        for owner, url in zip(self.owners, self.urls, strict=True):
            if sibling_name(url) is None:
                allow_root(url)
            base = (owner.place, frozenset((owner.attempt,)))
            need_base(base, owner.id, checkpoint, self.home)

    def among(
        self, docs: tuple[TensorDoc, ...], order: Iterable[Key], *, ordered: bool
    ) -> tuple[TensorDoc, ...]:
        """All tensors of the checkpoint: `ordered` as in an order, else those of bases last."""
        both = (*docs, *self.tensors)
        if not self.tensors or not ordered:
            return both
        number = {key: n for n, key in enumerate(order)}
        return tuple(sorted(both, key=lambda d: number.get(Key(d.name, d.state), len(number))))

    def added_to(self, manifest: Manifest, attempt: Attempt) -> Manifest:
        """A manifest that has these tensors, with their bases."""
        if not self.owners:
            return manifest
        bases = tuple(
            BaseDoc(id=o.id, url=url) for o, url in zip(self.owners, self.urls, strict=True)
        )
        own = {"id": attempt.keeps, "bases": bases, "requires": (*manifest.requires, BASES)}
        return manifest.model_copy(update=own)


NO_REFERENCES = References()


def references_of(source: Universal, keys: Iterable[Key], home: str) -> References:
    """The references of a checkpoint at `home` to tensors of its bases, those among these tensors."""
    docs = [doc for key in keys if (doc := source.docs[key]).is_referenced]
    numbers = {number: n for n, number in enumerate(dict.fromkeys(doc.base or 0 for doc in docs))}
    tensors = tuple(replace(doc, base=numbers[doc.base or 0]) for doc in docs)
    return References(tuple(_owner(source.bases, number) for number in numbers), tensors, home)


def find_references(
    source: Checkpoint,
    infos: Sequence[TensorInfo],
    base: str | PathLike[str] | Checkpoint,
    home: str,
    *,
    patch: bool = False,
) -> References:
    """The tensors of a checkpoint that its base has; those without a fingerprint are read.

    Args:
        patch: whether the others are written as patches of those of the base.
    """
    opened = open_base(base, home)
    fingerprints = source.metadata.fingerprints
    comparison = opened.compare(infos, fingerprints)
    if comparison.unread:
        from ucformat.jobs.fingerprints import compute_fingerprints  # which needs SQLAlchemy

        computed = compute_fingerprints(source, comparison.unread, lambda _: None)
        comparison = opened.compare(infos, {**fingerprints, **computed})
    return opened.referenced(comparison.equal, comparison.different if patch else ())


def refuse_deltas(source: Checkpoint) -> None:
    """Raise UsageError for a checkpoint with deltas, whose content means nothing without its bases."""
    if source.universal is not None and source.universal.manifest.deltas is not None:
        raise UsageError(
            f"{source.url} has deltas, which are applied to the checkpoint that it is based on",
            hint="ucformat.torch.replay it, and save everything; `ucp copy --with-bases` copies it with that",
        )


def open_base(base: str | PathLike[str] | Checkpoint, home: str) -> Base:
    """Open a checkpoint on which one at `home` is about to be based."""
    opened = Base(base if isinstance(base, Checkpoint) else open_reference(base), home)
    opened.check_depth()
    return opened
