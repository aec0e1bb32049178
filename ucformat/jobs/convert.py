"""Converts any checkpoint to a universal one: an idempotent task for each shard, then one commit."""

from __future__ import annotations

import logging
import platform
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ucformat._version import __version__
from ucformat.checkpoint import Checkpoint
from ucformat.errors import (
    NotFinished,
    UcformatError,
    Uncertain,
    UnsupportedError,
    UsageError,
    first_names,
)
from ucformat.format.arrays import grid_doc, packed_keys, put_array, put_groups
from ucformat.format.commit import begin, commit, give_up, new_id
from ucformat.format.digest import check_values
from ucformat.format.lossy_states import check_fits, lossy_codec
from ucformat.format.objects import copy_per_rank, put_objects
from ucformat.format.universal import Universal, group_docs, marked, paths_of
from ucformat.geometry.tensor import Key
from ucformat.jobs.compare import spread_of
from ucformat.jobs.finished import discard_finished
from ucformat.jobs.increments import NO_REFERENCES, References, find_references, refuse_deltas
from ucformat.jobs.inputs import Input, joined
from ucformat.jobs.record import expect_commit, lineage_from, record_commits, step_in_name
from ucformat.jobs.run import workers_for
from ucformat.jobs.shards import ShardJob, WriteOptions, plan_document
from ucformat.jobs.where import HERE, Where, run_job
from ucformat.reading.readable import OUTDATED, TRACKERS
from ucformat.references import open_reference
from ucformat.schema.manifest import FileDoc, Manifest, SidecarDoc, VerifiedDoc
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.settings import allowed_roots
from ucformat.sources.configuration import with_config
from ucformat.storage.concurrency import map_io
from ucformat.storage.url import as_store, as_strings
from ucformat.storage.wrappers import check_unchanged, find_watched
from ucformat.views.outdated import outdated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from os import PathLike

    from ucformat.format.arrays import StoredArray
    from ucformat.format.commit import Attempt
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.jobs.patch_files import TilesJob
    from ucformat.jobs.virtual import VirtualExtents
    from ucformat.jobs.weight_files import PlacedFiles, WeightsJob
    from ucformat.storage.base import Store

__all__ = ["convert", "put_others", "write"]

_log = logging.getLogger("ucformat")
_MAX_NAMED = 5  # unread files that a warning names

record_commits()  # here, because the packages below do not know the catalog


def convert(
    src: str | PathLike[str] | Checkpoint,
    dst: str | PathLike[str] | Store,
    states: str | Iterable[str] | None = None,
    chunk_bytes: int | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,  # noqa: FBT001, FBT002 - the signature users know
    workers: int | None = None,
    *,
    run: str | None = None,
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    step: int | None = None,
    virtual: bool = False,
    checksums: bool = False,
    unprotected: bool = False,
    weights: Literal["safetensors"] | None = None,
    base: str | PathLike[str] | Checkpoint | None = None,
    codec: Literal["blosc"] | None = None,
    encode: Mapping[str, str] | None = None,
    verify: bool = True,
    on: str = "threads",
    progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Write the content of a checkpoint as a universal checkpoint, and commit it.

    An interrupted conversion leaves nothing that opens; called again with the same arguments it
    continues, and reuses intact shards. Memory: less than 64 MiB for each worker, whatever the
    sizes of the tensors.

    Args:
        src: a checkpoint, or its path, url or reference.
        dst: the path, url or store of the new checkpoint.
        states: the state, or states, to convert (default: all).
        chunk_bytes: the most bytes of a chunk, the unit of reading (default 1 MiB).
        shard_bytes: the most bytes of a shard, the unit of writing (default 128 MiB).
        overwrite: replace a checkpoint that is committed at `dst`; it stays whole until the new one
            is.
        workers: shards written at once (default: one for each core; for object stores eight at
            least).
        run: the name of the training run, for the catalog (default: the source's, if known).
        config: the configuration of the training, plain JSON values, in addition to the source's.
        metrics: measured numbers by name, in addition to the source's; these win.
        step: the training step (default: the source's, else the one in its name, such as
            `checkpoint-500`).
        virtual: write only the locations of the tensors' bytes in the source's files, which must
            stay as they are. A document beside them, in `needed-by/`, keeps every catalog from
            removing them.
        checksums: with `virtual`, read these files, and record their checksums and the fingerprints
            that the source lacks, for `verify`. Only tensors that do not lie row-major in the files
            are read a second time.
        unprotected: with `virtual`, continue if nothing can be written beside the source's files.
        weights: `safetensors` stores the weights, or masters where only these are stored, in
            safetensors files with the configuration and the tokenizer beside them:
            `Checkpoint.hf_url` is a folder that Hugging Face's tools load. Everything else is
            stored as arrays (default: everything is). Tensors below 256 KiB are packed into files
            beside the arrays if there are more than 1,000 of them; `materialize` writes those as
            arrays, too.
        base: a universal checkpoint, or its path, url or reference: tensors that it has under the
            same name and state, with equal dtype, shape and fingerprint, are not written again, but
            read there (docs/cli.md#bases). The base must then stay; a document beside it
            keeps every catalog from removing it. Tensors of which the source has no fingerprint are
            read to compare them. With `weights`, these are always written.
        codec: `blosc` compresses the chunks of arrays, without loss (default: they are stored as
            they are). Safetensors files are not compressed.
        encode: encode states of optimizers with loss, as `ucformat.torch.save` does (default: no).
            They, and small tensors that are packed, are in files of tiles beside the arrays.
        verify: compare the bytes that are read with the checksums in the source's files (CRC-32 of
            zip records, CRC-32C of chunks). The manifest's `verified` lists the tensors of which
            all bytes were compared.
        on: where shards are written (docs/guides/cluster.md): `threads` of this process, the
            workers of a Dask cluster (`dask://HOST:PORT`, `tls://HOST:PORT`), the processes of
            `torchrun`, or a part of them that other processes do not write (`part:I/N`), and then
            `commit`.
        progress: called with the bytes done and the bytes in all.

    Raises:
        NotFinished: this process has done its part, and another one commits.
        ChecksumError: the source is damaged; the message names file, record and tensors.
        MissingData: with `commit`, parts are missing; the message names them, and nothing is
            committed.
        Conflict: a checkpoint is committed at `dst` already, or another writer committed one in the
            meantime; or a file of the source was changed since it was opened; or with `virtual`,
            the source is being removed or replaced.
        UnsupportedError: with `virtual`, a tensor has no bytes of its own in a file: it is
            compressed, or computed; or with `weights`, a tensor has a dtype that safetensors does
            not have; or the base is no universal checkpoint, or has no fingerprints.
        PermissionDenied: with `virtual` and without `unprotected`, nothing can be written beside
            the source's files.
        UsageError: `checksums` or `unprotected` without `virtual`, or `virtual` with a size of
            chunks or shards, with `base`, `codec`, `encode` or `weights`; `encode` with `weights`,
            or of states that there are not, or were encoded with loss already; or `weights` of a checkpoint without
            weights.
    """
    source = src if isinstance(src, Checkpoint) else open_reference(src)
    store = as_store(dst)
    check_values(
        {"run": run, "config": with_config({}, config), "metrics": dict(metrics or {})},
        "the checkpoint",
    )
    where = Where.parse(on)
    options = WriteOptions(
        *(chunk_bytes, shard_bytes, workers, progress, verify, where, codec), encode or {}
    )
    infos = chosen(source, None if states is None else as_strings(states))
    _check_virtual(options, virtual=virtual, checksums=checksums, unprotected=unprotected)
    _check_weights(source, infos, weights, virtual=virtual)
    encoded = lossy_tensors(source, infos, options, weights)
    references = NO_REFERENCES
    if base is not None:
        if virtual:
            raise UsageError(
                "a virtual checkpoint has no tensors of its own that a base could have",
                hint="leave out one of the two",
            )
        references = find_references(source, based_tensors(infos, weights), base, store.url)
        referenced = references.keys
        infos = [i for i in infos if i.key not in referenced]
    plan = (
        plan_document(source, infos, options)
        | references.plan
        | ({"virtual": checksums} if virtual else {})
    )
    plan |= {"weights": weights} if weights else {}
    # before there are files of an attempt, which may be inside the source's folder
    warn_of_unread(source)
    placed = _virtual_extents(source, infos) if virtual else None
    needs = list(references.urls) if placed is None else [url for url, _ in placed.homes]
    attempt = options.where.begin(lambda: begin(store, plan, overwrite=overwrite, needs=needs))
    try:
        references.protect(str(attempt.keeps))
        expect_commit()
        if placed is None:
            files = _planned_files(source, infos, attempt.id, weights)
            in_files: Callable[[], WeightsJob | TilesJob] | None = None
            file_tensors = set() if files is None else {*files.tensors}
            if encoded:
                from ucformat.jobs.patch_files import TilesJob, TilesPlan

                file_tensors |= encoded
                keys = tuple(i.key for i in infos if i.key not in file_tensors)
                tiles = TilesPlan(infos, {}, {}, keys)
                in_files = partial(TilesJob, source, None, store, attempt.id, tiles, options)
            elif files is not None:
                from ucformat.jobs.weight_files import WeightsJob

                in_files = partial(
                    WeightsJob, source, store, attempt.id, infos, files, options, weights
                )
            others = [i for i in infos if i.key not in file_tensors]
            arrays = ShardJob(source, store, attempt.id, others, options)
            manifest, recorded = write(arrays, attempt, in_files, references)
        else:
            recorded = False
            manifest = _write_virtual(
                source,
                store,
                attempt,
                placed,
                options,
                checksums=checksums,
                unprotected=unprotected,
            )
        about = {
            "run": run or manifest.run,
            "step": step_of(source, manifest) if step is None else step,
            "config": with_config(manifest.config, config),
        }
        done = commit(
            store,
            attempt,
            manifest.model_copy(
                update={**about, "metrics": {**manifest.metrics, **(metrics or {})}}
            ),
        )
        if recorded:
            discard_finished(store, attempt.id)
    # the commit may have happened: its files must stay
    except Uncertain:
        raise
    except UcformatError:
        if placed is not None:  # little work is lost, and the source's files are no longer needed
            give_up(store, attempt)
        raise
    return Checkpoint(Universal(store, allowed_roots, done))


# Most conversions write neither of these, and so do not import what does.


def _virtual_extents(source: Checkpoint, infos: Sequence[TensorInfo]) -> VirtualExtents:
    from ucformat.jobs.virtual import VirtualExtents

    return VirtualExtents(source, infos)


def _planned_files(
    source: Checkpoint, infos: Sequence[TensorInfo], attempt: str, weights: str | None
) -> PlacedFiles | None:
    """Plan the files that are no arrays; None if there are none."""
    if weights is None and not packed_keys(infos):
        return None
    from ucformat.jobs.weight_files import plan_files

    return plan_files(source, infos, attempt, weights)


def step_of(source: Checkpoint, manifest: Manifest) -> int | None:
    """The step of what was written of a source: its own, else the one in its name."""
    is_recorded = source.universal or manifest.step is not None
    return manifest.step if is_recorded else step_in_name(source.home)


def warn_of_unread(source: Checkpoint) -> None:
    if lost := [name for name in source.unread if name not in source.assets]:
        _log.warning(
            "%s: ucformat does not know what these files are, and the new checkpoint does not "
            "contain them: %s",
            *(source.home, first_names(lost, _MAX_NAMED)),
        )
    if source.missing:
        _log.warning(
            "%s lacks files that its program writes: %s", source.home, ", ".join(source.missing)
        )


def _write_virtual(
    source: Checkpoint,
    store: Store,
    attempt: Attempt,
    placed: VirtualExtents,
    options: WriteOptions,
    *,
    checksums: bool,
    unprotected: bool,
) -> Manifest:
    """Write the extents; files that are read to record checksums are compared with those that they contain."""
    from ucformat.jobs.virtual import put_virtual

    read = Input(source, verify=bool(checksums and options.verify))
    verifier = read.verifier
    with closing(read):
        if verifier is not None:
            for info in placed.infos:
                verifier.expect(info, source.source.extents(info.key), None)
        sidecar, requires, tensors = put_virtual(
            source,
            store,
            attempt,
            placed,
            checksums=checksums,
            unprotected=unprotected,
            progress=options.progress,
        )
        if verifier is not None:
            verifier.complete(options.workers)
    verified = VerifiedDoc(default=False) if verifier is None else verifier.described(placed.infos)
    manifest = put_others(source, store, attempt, tensors)
    own = {"id": attempt.keeps or manifest.id, "verified": verified}
    return manifest.with_sidecar(sidecar, requires).model_copy(update=own)


def based_tensors(infos: Sequence[TensorInfo], weights: str | None) -> list[TensorInfo]:
    """The tensors that may be those of a base: all but weights that other tools load."""
    if not weights:
        return list(infos)
    from ucformat.exporters.base import weights_of

    loadable = {i.key for i in weights_of(infos)}
    return [i for i in infos if i.key not in loadable]


def lossy_tensors(
    source: Checkpoint,
    infos: Sequence[TensorInfo],
    options: WriteOptions,
    weights: str | None,
) -> set[Key]:
    """The tensors that are encoded with loss."""
    if not options.encode:
        return set()
    if weights is not None:
        raise UsageError(
            "states that are encoded with loss cannot be beside safetensors files",
            hint="leave out one of encode and weights",
        )
    check_fits(options.encode, {info.state for info in infos})
    keys = {i.key for i in infos if lossy_codec(options.encode, i) is not None}
    if again := sorted(keys & source.metadata.lossy.keys()):
        raise UsageError(
            f"{first_names(again, _MAX_NAMED)} were encoded with loss already, and nothing would tell "
            "both errors",
            hint="convert them without encode, or encode what was saved without loss",
        )
    return keys


def _check_virtual(
    options: WriteOptions, *, virtual: bool, checksums: bool, unprotected: bool
) -> None:
    if checksums and not virtual:
        raise UsageError(
            "checksums of the source's files are for a virtual checkpoint; others always have "
            "their own"
        )
    if unprotected and not virtual:
        raise UsageError("only a virtual checkpoint needs files that could be unprotected")
    if virtual and options.where != HERE:
        raise UsageError(
            "a virtual checkpoint is written by one process: its bytes stay where they are"
        )
    if virtual and (options.chunk_bytes or options.shard_bytes or options.codec or options.encode):
        raise UsageError(
            "a virtual checkpoint has no chunks and shards: its bytes stay as and where they are"
        )


def _check_weights(
    source: Checkpoint, infos: Sequence[TensorInfo], weights: str | None, *, virtual: bool
) -> None:
    if weights is None:
        return
    if weights != "safetensors":
        raise UsageError(
            f"weights={weights!r} is not supported",
            hint='"safetensors", or leave it out for arrays',
        )
    if virtual:
        raise UsageError(
            "a virtual checkpoint has no files of its own for weights",
            hint="leave out one of the two",
        )
    from ucformat.exporters.adapter import is_wrapped

    if is_wrapped(info.name for info in infos):
        raise UnsupportedError(
            f"{source.url} is of a model that PEFT has wrapped: its tensors have other names "
            "than those that Hugging "
            "Face's tools load",
            hint="`ucp export safetensors` writes PEFT's files of the adapter",
        )
    _planned_files(source, infos, "", weights)  # raises before anything is written


def chosen(source: Checkpoint, states: Sequence[str] | None) -> list[TensorInfo]:
    """The tensors of the chosen states; of all if there is no choice."""
    source.check_readable(states)
    if states is None:
        refuse_deltas(source)
    infos = [i for i in source.tensors.values() if states is None or i.state in states]
    unknown = set(states or ()) - {i.state for i in infos}
    if unknown:
        raise source.missing_state(min(unknown))
    if not infos and (states is not None or source.steps):
        reason = "no state is chosen" if source.tensors else "the view leaves no tensor"
        raise UsageError(
            f"{source.url}: {reason}, so nothing would be written",
            hint="leave out `states` for all",
        )
    return infos


def write(
    job: ShardJob,
    attempt: Attempt,
    in_files: Callable[[], WeightsJob | TilesJob] | None = None,
    references: References = NO_REFERENCES,
) -> tuple[Manifest, bool]:
    """Write tensors, and everything else of a checkpoint.

    Args:
        in_files: makes the job that writes the other tensors (default: there are none).
        references: the tensors of a base that are not among those (default: there are none).

    Returns:
        The manifest, which the caller commits, and whether there are records, which the caller then
        discards.

    Raises:
        NotFinished: another process is to commit.
    """
    store, options = job.store, job.options
    with job, ThreadPoolExecutor(1) as beside:
        for source in job.sources:
            _list_files(source)
        metadata = (
            beside.submit(_write_metadata, store, job.arrays) if options.where.finishes else None
        )
        if finishes := _run_tasks(job, job, attempt):
            arrays, verified = job.finish()
        if metadata is not None:
            metadata.result()
    recorded, folder, infos = job.recorded or options.where != HERE, None, job.infos
    sidecar: SidecarDoc | None = None
    requires: tuple[str, ...] = ()
    docs_in_files: Mapping[Key, TensorDoc] = {}
    if in_files is not None:
        with in_files() as files:
            if finishes := _run_tasks(files, job, attempt, job.total):
                docs_in_files, files_verified = files.finish()
                sidecar, requires = files.put_sidecar()
                file_infos = [info for info in files.infos if info.key in docs_in_files]
                verified = joined([(job.infos, verified), (file_infos, files_verified)])
        recorded, folder, infos = recorded or files.recorded, files.folder, files.infos
    if not finishes:
        raise NotFinished(f"this part of {store.url} is written; another process commits it")
    by_key = {Key(doc.name, doc.state): doc for doc in arrays}
    docs = tuple(by_key.get(i.key) or docs_in_files[i.key] for i in infos)
    docs = references.among(docs, job.source.tensors, ordered=sidecar is None)
    docs = marked(docs, job.source.metadata)
    if references.tensors:
        verified = joined([(infos, verified), (references.infos, VerifiedDoc(default=False))])
    manifest = references.added_to(put_others(job.source, store, attempt, docs, folder), attempt)
    for source in job.sources[1:]:
        _check_unchanged(source)
    grid = (
        grid_doc(options.chunk_bytes, options.shard_bytes)
        if job.infos or in_files is None
        else None
    )
    manifest = manifest.with_sidecar(sidecar, (*requires, *manifest.requires))
    return manifest.model_copy(update={"verified": verified, "grid": grid}), recorded


def _run_tasks(
    tasks: ShardJob | WeightsJob | TilesJob, job: ShardJob, attempt: Attempt, before: int = 0
) -> bool:
    """Run the tasks of a job, which come after so many bytes of the job of the arrays."""
    options = job.options
    # another call has begun this attempt, and has perhaps left finished tasks
    if attempt.began is None:
        tasks.resume()
    for source in job.sources if options.where != HERE else ():
        if (watching := find_watched(source.store)) is not None:
            for file in source.metadata.files:  # others have read them, too
                watching.note(file)
    workers = options.workers or workers_for(*(source.store for source in job.sources), job.store)
    report = (
        None
        if options.progress is None
        else partial(_report, options.progress, before, before + tasks.total)
    )
    return run_job(tasks, options.where, workers, report)


def _report(
    progress: Callable[[int, int], None], before: int, total: int, done: int, _job_total: int
) -> None:
    progress(min(before + done, total), total)


def _list_files(source: Checkpoint) -> None:
    """Fetch the versions of a universal checkpoint's files at once, if each would otherwise be a request."""
    if source.universal and source.store.costs.parallel is not None:
        for _ in source.universal.store.list(f"data/{source.universal.manifest.attempt}"):
            pass


def put_others(
    source: Checkpoint,
    store: Store,
    attempt: Attempt,
    tensors: tuple[TensorDoc, ...],
    folder: str | None = None,
) -> Manifest:
    """Write everything except the tensors, and return the manifest; `folder` is that of safetensors files.

    These are the last reads of the source; its files must still be the ones that were opened.
    """
    objects = attempt.folder("objects")
    names, keys = {t.name for t in tensors}, [Key(t.name, t.state) for t in tensors]
    spread = spread_of(source.viewed, keys)
    old = outdated(source.viewed, source.assets, source.objects)
    values = {
        **source.objects,
        **({"spread": spread} if spread else {}),
        **({OUTDATED: old} if old else {}),
    }
    manifest = Manifest(
        id=new_id(),
        attempt=attempt.id,
        created=datetime.now(UTC),
        producer={"ucformat": __version__, "python": platform.python_version()}
        | {f"engine.{k}": v for k, v in source.metadata.engine.items()},
        run=source.manifest.run,
        launch=None if source.universal is None else source.universal.manifest.launch,
        metrics=source.manifest.metrics,
        config=source.manifest.config,
        step=source.metadata.step,
        layout=dict(source.metadata.layout),
        groups=group_docs(source.metadata),
        lineage=lineage_from(source, keys),
        aliases={a: n for a, n in source.aliases.items() if n in names},
        objects=put_objects(store, objects, values),
        per_rank=copy_per_rank(source.universal, store, objects),
        experts=None if source.universal is None else source.universal.manifest.experts,
        assets=_put_assets(store, attempt.id, folder, source.assets),
        tensors=TensorTable.of(
            t if t.at == at else replace(t, at=at)
            for t, at in zip(tensors, (paths_of(source.metadata, k) for k in keys), strict=True)
        ),
    )
    _check_unchanged(source)
    return manifest


def _put_assets(
    store: Store, attempt: str, folder: str | None, assets: Mapping[str, bytes]
) -> dict[str, FileDoc]:
    if not assets:
        return {}
    from ucformat.jobs.weight_files import put_assets

    return put_assets(store, attempt, folder, assets)


def _check_unchanged(source: Checkpoint) -> None:
    check_unchanged(source.store, "nothing was committed", TRACKERS)


def _write_metadata(store: Store, arrays: Sequence[StoredArray]) -> None:
    """Write every `zarr.json`: of the group, of each state, of each array."""
    put_groups(store, arrays)
    # on a disk, more threads would only delay those that write shards
    each = map_io if store.costs.parallel else map
    list(each(lambda array: put_array(store, array), arrays))
