"""Exports a checkpoint in the format of another tool: a task for each file, then the files that make it a checkpoint.

    1. The record `ucformat-export/<attempt>/begun.json` is written, which names the plan.
    2. The tasks write all files but those without which no tool takes the folder for a checkpoint.
    3. When these are durable, the others are written, and the folder `ucformat-export` is removed.

An interrupted export is continued by the same call. Whatever else is at the destination is refused,
except beside a target that is a single file.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import (
    NotACheckpoint,
    NotFinished,
    UcformatError,
    UnsupportedError,
    UsageError,
    first_names,
)
from ucformat.exporters.base import weights_of
from ucformat.exporters.registry import EXPORTERS
from ucformat.jobs.batches import RecordOptions, record_all
from ucformat.jobs.export_files import ExportJob
from ucformat.jobs.export_place import begin_export, end_export, give_up_export
from ucformat.jobs.fingerprints import exported_fingerprints, with_fingerprints
from ucformat.jobs.opening import recordable
from ucformat.jobs.record import lineage_from, with_catalog
from ucformat.jobs.run import workers_for
from ucformat.jobs.where import HERE, JobArguments, Where, run_job
from ucformat.reading.readable import PART_OF, check_exact
from ucformat.references import open_reference
from ucformat.schema import CASTABLE, NUMBERS
from ucformat.storage.url import as_strings, open_store
from ucformat.storage.wrappers import find_watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.exporters.base import Exporter, Target
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.storage.base import Store

__all__ = ["Exported", "export", "plan_export", "planned_job"]

_NAMED = 10  # tensors that an error lists of each kind


@dataclass(frozen=True, slots=True)
class Exported:
    """A checkpoint in another format.

    Attributes:
        url: its place.
        files: how many it has.
        nbytes: bytes of the files that hold tensors.
        tensors: how many.
        left_out: what of the source has no place in it.
        verified: whether all elements were compared with checksums in the source's files.
    """

    url: str
    files: int
    nbytes: int
    tensors: int
    left_out: tuple[str, ...]
    verified: bool


def export(
    src: str | PathLike[str] | Checkpoint,
    dst: str | PathLike[str] | Store,
    kind: str,
    *,
    states: str | Iterable[str] | None = None,
    cast: str | None = None,
    like: str | PathLike[str] | Checkpoint | None = None,
    **arguments: Any,
) -> Exported:
    """Write a checkpoint in the format of another tool.

    Resumable: if interrupted, `dst` holds nothing that the tool takes for a checkpoint, and the
    same call continues.

    Args:
        src: a checkpoint, or its path, url or reference; through `Checkpoint.view` with other names
            and shapes.
        dst: path or url of an empty or missing folder; or of a file, if it has an ending of the
            format (`model.pt`): other files in its folder do not matter.
        kind: the format: one of `ucformat.exporters.registry.EXPORTERS`.
        states: the states to export (default: of formats that hold weights alone, each tensor's
            weight, or its master where only that is stored; of others all).
        cast: the dtype of all floating-point tensors (default: as they are stored). A finite value
            that does not fit is an error.
        like: a checkpoint of the model that will load the export, in any format: tensors without a
            name in it, or of other shapes, and names that are missing are an error (default: no
            comparison).
        arguments: those of `JobArguments`, and the options of the format (docs/export).

    Returns:
        What was written, and what the format has no place for.

    Raises:
        UsageError: there is no such format or option, the checkpoint lacks a state, or it is not
            `like` another.
        UnsupportedError: something cannot be expressed in the format.
        Conflict: `dst` is not empty.
        ChecksumError: a file of the source is damaged.
        NotFinished: another process is to finish (`on`).
    """
    job_arguments = arguments.keys() & JobArguments.__annotations__.keys()
    values: Any = {name: arguments.pop(name) for name in job_arguments}
    where, verify = Where.parse(values.get("on", "threads")), values.get("verify", True)
    store = _place(dst, kind, arguments)  # which may give the exporter a name, too
    source, infos, exporter = _prepared(src, kind, states, cast, arguments)
    if like is not None:
        _compare(source, infos, like if isinstance(like, Checkpoint) else open_reference(like))
    with ExportJob(source, store, infos, exporter, verify=verify) as job:
        where.begin(lambda: begin_export(job, overwrite=values.get("overwrite", False)))
        try:
            finished = _run(job, where, values.get("workers"), values.get("progress"))
        except UcformatError:
            if where == HERE:
                give_up_export(job)
            raise
        if not finished:
            raise NotFinished(f"this part of {store.url} is written; another process finishes it")
    _record(job)
    target = job.target
    nbytes = sum(f.nbytes for f in target.files)
    return Exported(
        job.url, len(target.files), nbytes, len(infos), target.left_out, verify and not job.bare
    )


def _place(dst: str | PathLike[str] | Store, kind: str, options: dict[str, Any]) -> Store:
    """The store of the destination; the name of the file that it is, if it is one, is added to the options."""
    if not isinstance(dst, str | PathLike):
        return dst
    named = _file_named(fspath(dst), kind)
    if named is None:
        return open_store(dst)
    if "name" in options:
        raise UsageError(
            f"{fspath(dst)} is the file, so it has no other name", hint="leave out the option name"
        )
    folder, options["name"] = named
    return open_store(folder)


def _file_named(dst: str, kind: str) -> tuple[str, str] | None:
    """The folder and the name of the file that a destination is; None if it is a folder."""
    folder, slash, name = dst.rpartition("/")
    if kind not in EXPORTERS or not name.lower().endswith(EXPORTERS[kind].endings or ("/",)):
        return None
    return (
        folder + slash if slash and (not folder or folder.endswith("/")) else folder or "."
    ), name


def _run(
    job: ExportJob, where: Where, workers: int | None, progress: Callable[[int, int], None] | None
) -> bool:
    """Write the files; returns whether this process has finished the export."""
    source = job.source
    job.resume()
    if where != HERE and (watching := find_watched(source.store)) is not None:
        for file in source.metadata.files:  # others have read them, too
            watching.note(file)
    shown = None if progress is None else _with_last(progress, job.last_nbytes)
    if not run_job(job, where, workers or workers_for(source.store, job.store), shown):
        return False
    job.finish(progress)
    end_export(job)
    return True


def _with_last(progress: Callable[[int, int], None], last: int) -> Callable[[int, int], None]:
    """Progress over tasks, to whose bytes those of the last files are added."""
    return lambda done, total: progress(done, total + last)


def plan_export(
    src: str | PathLike[str] | Checkpoint,
    kind: str,
    *,
    states: str | Iterable[str] | None = None,
    cast: str | None = None,
    **options: Any,
) -> Target:
    """Plan an export; reads no tensors, and writes nothing."""
    source, infos, exporter = _prepared(src, kind, states, cast, options)
    return exporter.target(source, infos)


def planned_job(
    src: str | PathLike[str] | Checkpoint,
    dst: str | PathLike[str],
    kind: str,
    *,
    states: str | Iterable[str] | None = None,
    cast: str | None = None,
    verify: bool = True,
    **options: Any,
) -> ExportJob:
    """The job of an export, to estimate what it costs."""
    store = _place(dst, kind, options)
    source, infos, exporter = _prepared(src, kind, states, cast, options)
    return ExportJob(source, store, infos, exporter, verify=verify)


def _prepared(
    src: str | PathLike[str] | Checkpoint,
    kind: str,
    states: str | Iterable[str] | None,
    cast: str | None,
    options: Mapping[str, Any],
) -> tuple[Checkpoint, list[TensorInfo], Exporter]:
    """The source, through a cast if there is one; the tensors; and the exporter."""
    exporter = EXPORTERS[kind](**options)
    source = src if isinstance(src, Checkpoint) else open_reference(src)
    infos = _chosen(source, None if states is None else as_strings(states), exporter)
    check_exact(source.metadata, (info.key for info in infos), source.url)
    if cast is not None:
        narrowed = _cast_steps(infos, source.aliases, cast)
        keys = [info.key for info in infos]
        source = source.view(narrowed) if narrowed else source
        infos = [source.tensors[key] for key in keys]
    for info in infos:
        if info.dtype not in exporter.dtypes:
            raise UnsupportedError(
                f"{info.key} has the dtype {info.dtype}, which {exporter.title} does not have",
                hint=(
                    "leave the tensor out by a view with `drop` (--view); floating-point values "
                    "can be cast (--cast)"
                ),
            )
    return source, infos, exporter


def _chosen(
    source: Checkpoint, states: Sequence[str] | None, exporter: Exporter
) -> list[TensorInfo]:
    source.check_readable(
        ("weight", "master") if states is None and exporter.weights_only else states
    )
    infos = [
        i
        for i in source.metadata.tensor_list.placed().tensors
        if states is None or i.state in states
    ]
    unknown = set(states or ()) - {i.state for i in infos}
    if unknown:
        raise source.missing_state(min(unknown))
    if not exporter.weights_only:
        return infos
    if states is None:
        infos = weights_of(infos)
    twice = [name for name, count in Counter(i.name for i in infos).items() if count > 1]
    if twice:
        raise UsageError(
            f"{twice[0]} is to be exported in several states, and {exporter.title} has one "
            "tensor of each name",
            hint="choose one state: --state weight",
        )
    if not infos:
        raise UsageError(f"{source.url} stores no weights", hint="--state chooses another state")
    return infos


def _compare(source: Checkpoint, infos: Sequence[TensorInfo], like: Checkpoint) -> None:
    """Compare names and shapes with those of another checkpoint."""
    shapes, like_shapes = _shapes(source, infos), _shapes(like, like.tensors.values())
    kinds = {
        "are not in it": [n for n in shapes if n not in like_shapes],
        "are only in it": [
            n for n in like_shapes if n not in shapes and like.aliases.get(n) not in shapes
        ],
        "have another shape there": [
            n for n, shape in shapes.items() if like_shapes.get(n, shape) != shape
        ],
    }
    lines = [
        f"\n    {len(names):,} {what}: {first_names(names, _NAMED)}"
        for what, names in kinds.items()
        if names
    ]
    if lines:
        raise UsageError(
            f"{source.url} has other tensors than {like.url}:{''.join(lines)}",
            hint=(
                "a view gives tensors other names and shapes: --view megatron-to-llama, … "
                "(docs/view.md)"
            ),
        )


def _shapes(ck: Checkpoint, infos: Iterable[TensorInfo]) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters, by all of their names."""
    shapes = {info.name: info.shape for info in infos if info.state in ("weight", "master")}
    return shapes | {alias: shapes[name] for alias, name in ck.aliases.items() if name in shapes}


def _cast_steps(
    infos: Sequence[TensorInfo], aliases: Mapping[str, str], dtype: str
) -> list[dict[str, Any]]:
    """The steps of a view that casts floating-point tensors, with their tied names."""
    if dtype not in CASTABLE:
        raise UsageError(
            f"tensors are not cast to {dtype!r}", hint=f"they are to {', '.join(sorted(CASTABLE))}"
        )
    names: dict[str, list[str]] = {}
    for info in infos:
        if info.dtype in NUMBERS and info.dtype != dtype:
            names.setdefault(info.state, []).append(f"/{re.escape(info.name)}/")
    steps = [
        {"cast": patterns, "states": [state], "dtype": dtype} for state, patterns in names.items()
    ]
    if not steps or not aliases:
        return steps
    return [
        {"drop": [f"/{re.escape(alias)}/" for alias in aliases]},
        *steps,
        {"alias": dict(aliases)},
    ]


def _record(job: ExportJob) -> None:
    """Record the export in the catalog, with its source as parent, if it is of a format that can be opened.

    Its tensors have the fingerprints of what was written. It is not of the source's run, of which
    the newest checkpoint is one to resume from.
    """
    source, url = job.source, job.url

    def record(catalog: Catalog) -> None:
        part = source.metadata.part_of
        try:
            ck = open_checkpoint(url, options={"part": True} if part else None)
        except NotACheckpoint:
            return
        opened, manifest = recordable(ck), source.manifest
        about: dict[str, Any] = {
            "tensors": with_fingerprints(opened.manifest.tensors, exported_fingerprints(job, ck)),
            "lineage": lineage_from(source, [i.key for i in job.infos]),
            "metrics": manifest.metrics,
        }
        about["config"] = opened.manifest.config or manifest.config
        if part:
            about["layout"] = {**opened.manifest.layout, PART_OF: part}
        opened = replace(opened, manifest=opened.manifest.model_copy(update=about))
        record_all(catalog, [(url, opened, 0)], RecordOptions(strict=True), None)

    with_catalog(
        record,
        f"the export {url} is complete, but not in the catalog",
        f"`ucp register {url}` records it",
    )
