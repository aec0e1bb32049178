"""Makes a checkpoint depend on fewer others: on none, or, of a chain of patches, on its anchor alone.

The content and, in place, the id stay. The bases that are no longer needed are told so when the old files are removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack

from ucformat.checkpoint import Checkpoint
from ucformat.errors import UnsupportedError, UsageError, check_choice, check_keywords
from ucformat.format.commit import settle
from ucformat.jobs.increments import refuse_deltas
from ucformat.jobs.materialize import Form, materialize, own_store, rewrite
from ucformat.jobs.patch import Patch
from ucformat.jobs.shards import WriteOptions
from ucformat.jobs.where import JobArguments, Where
from ucformat.references import open_reference
from ucformat.storage.url import as_store

if TYPE_CHECKING:
    from os import PathLike

    from ucformat.format.bases import Bases
    from ucformat.format.commit import Attempt
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = ["compact", "is_whole"]


def compact(
    src: str | PathLike[str] | Checkpoint,
    dst: str | PathLike[str] | Store | None = None,
    *,
    fold: bool = False,
    codec: Literal["blosc", "none"] | None = None,
    **arguments: Unpack[JobArguments],
) -> Checkpoint:
    """Make a checkpoint that depends on others whole, in place or as a new checkpoint, and commit it.

    It is rewritten as arrays, as `materialize` does it; one that depends on no other is left as it is. Everything
    else is kept, in place also the id, so that checkpoints that are based on it stay valid. Nothing is committed
    unless the content is the same by its fingerprints. Resumable, as `materialize` is.

    Args:
        src: a universal checkpoint, or its path, url or reference.
        dst: the place of a new checkpoint (None: in place; then its old files are deleted, processes that have it
            open must open it again, and its bases are no longer needed for it).
        fold: do not make it whole, but one patch of the whole checkpoint from which its chain of patches begins.
        codec: of the arrays, `blosc` or `none` (default: `blosc` if it stores tensors with a codec).
        arguments: see `JobArguments`.

    Raises:
        ChecksumError: the checkpoint or a base is damaged; nothing is committed.
        Conflict: a checkpoint is committed at `dst` already, or the one to be replaced has changed.
        UnsupportedError: it is no universal checkpoint, or a tensor has an unknown dtype; or in place, the place has no
            conditional replacement of files.
        UsageError: it has deltas; or with `dst`, it depends on no other; or with `fold`, a codec is given, or its
            chain begins from several whole checkpoints.
    """
    check_keywords("compact", arguments, JobArguments)
    check_choice("codec", codec, (None, "blosc", "none"))
    source = src if isinstance(src, Checkpoint) else open_reference(src)
    if is_compact(source, dst, fold=fold, codec=codec):
        settle(own_store(source))
        return source
    refuse_deltas(source)
    job_arguments: dict[str, Any] = dict(arguments)
    if fold:
        overwrite = job_arguments.pop("overwrite", False)
        where = Where.parse(job_arguments.pop("on", "threads"))
        return _fold(source, dst, WriteOptions(where=where, **job_arguments), overwrite=overwrite)
    codec = arrays_codec(source, codec)
    return materialize(source, dst, codec=None if codec == "none" else codec, **job_arguments)


def is_compact(
    source: Checkpoint,
    dst: str | PathLike[str] | Store | None,
    *,
    fold: bool,
    codec: Literal["blosc", "none"] | None,
) -> bool:
    """Whether nothing is to be done; errors and arguments are as of `compact`."""
    if fold and codec is not None:
        raise UsageError(
            "what a patch stores has always a codec", hint="leave out one of fold and codec"
        )
    if source.universal is None or source.viewed:
        raise UnsupportedError(
            f"{source.url} is {f'a checkpoint of {source.kind}' if source.foreign else 'a view'}, which has no bases",
            hint="`ucp convert SRC DST` writes it as a universal checkpoint",
        )
    if dst is not None:
        if is_whole(source):
            raise UsageError(
                f"{source.url} depends on no other checkpoint, so nothing is to be made whole",
                hint="`ucp copy SRC DST` copies it as it is",
            )
        return False
    return _is_folded(source.universal.bases) if fold else is_whole(source)


def arrays_codec(
    source: Checkpoint, codec: Literal["blosc", "none"] | None
) -> Literal["blosc", "none"] | None:
    """The codec of the arrays of a checkpoint that is made whole, if none is chosen."""
    return "blosc" if codec is None and source.manifest.tensors.is_encoded else codec


def is_whole(ck: Checkpoint) -> bool:
    """Whether a universal checkpoint stores all of its tensors itself."""
    sidecar = ck.manifest.sidecar
    return not ck.manifest.bases and (sidecar is None or not sidecar.roots)


def _fold(
    source: Checkpoint,
    dst: str | PathLike[str] | Store | None,
    options: WriteOptions,
    *,
    overwrite: bool,
) -> Checkpoint:
    """Write a checkpoint as one patch of the whole one from which its chain begins."""
    home = source.url if dst is None else as_store(dst).url
    patch = Patch.of(source, list(source.tensors.values()), find_anchor(source), home, options)

    def write(store: Store, attempt: Attempt) -> tuple[Manifest, bool]:
        patch.references.protect(str(attempt.keeps))
        return patch.write(store, attempt)

    form = Form(
        "compact",
        patch.document,
        lambda ck: ck.universal is not None and _is_folded(ck.universal.bases),
        write,
        options.verify,
        patch.references.urls,
    )
    return rewrite(source, dst, form, options.where, overwrite=overwrite)


def find_anchor(source: Checkpoint) -> str:
    """The place of the whole checkpoint from which a chain of patches begins.

    Raises:
        UsageError: it begins from several.
    """
    assert source.universal is not None  # noqa: S101 - it was checked
    anchors = _anchors(source.universal.bases)
    if len(anchors) != 1:
        raise UsageError(
            f"{source.url} depends on {len(anchors)} whole checkpoints: {', '.join(sorted(anchors.values()))}",
            hint="`ucp patch BASE SRC DST` writes a patch of one of them; `ucp compact` without --fold makes it whole",
        )
    return next(iter(anchors.values()))


def _is_folded(bases: Bases) -> bool:
    """Whether a checkpoint has at most one base, and that is whole."""
    return len(bases.docs) <= 1 and bases.depth <= 1


def _anchors(bases: Bases) -> dict[str, str]:
    """The places of the whole checkpoints from which a chain begins, by their ids."""
    anchors: dict[str, str] = {}
    for number in range(len(bases.docs)):
        base = bases.opened(number)
        anchors |= _anchors(base.bases) or {base.manifest.id: bases.place(number)}
    return anchors
