"""Records the lineage of the checkpoints that jobs write, and the outcome of jobs in the catalog.

A failure of the catalog fails no job: `ucp reindex` records the checkpoints later.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from ucformat._version import __version__
from ucformat.checkpoint import Checkpoint
from ucformat.errors import NotFound, UcformatError
from ucformat.reading.readable import PART_OF
from ucformat.schema import ITEMSIZE
from ucformat.schema.manifest import LineageDoc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ucformat.catalog.catalog import Catalog
    from ucformat.geometry.tensor import Key
    from ucformat.jobs.run import Report
    from ucformat.schema.manifest import Manifest

T = TypeVar("T")

_log = logging.getLogger("ucformat")


def record_commits() -> None:
    """Record every commit of this process from now on."""
    from ucformat.format.commit import on_commit

    if record_commit not in on_commit:
        on_commit.append(record_commit)


def expect_commit() -> None:
    """Begin to import what records a commit, in a thread, unless the catalog is switched off.

    It takes as long as to write some hundred megabytes. Errors are those of `record_commit`.
    """
    from ucformat.settings import load_settings

    def load() -> None:
        with suppress(Exception):
            import_module("ucformat.catalog.catalog")

    with suppress(UcformatError):
        if load_settings().catalog_url() is not None:
            Thread(target=load, name="ucformat-import", daemon=True).start()


def record_commit(url: str, manifest: Manifest) -> None:
    """Record a checkpoint that was just committed in the catalog of the settings.

    Also the one of its run that the training resumed from, if that is not in the catalog: its
    writer was killed after the commit, before it could be recorded.
    """
    if manifest.is_remnant:
        return  # whoever thins it records that

    def record(catalog: Catalog) -> None:
        from ucformat.catalog.rows import serial_of

        for edge in manifest.lineage:
            if edge.kind in ("resume", "reshard") and edge.id is not None:
                with catalog.database.reading() as c:
                    recorded = serial_of(c, edge.id) is not None
                if not recorded:
                    _record_origin(catalog, edge.url, edge.id, manifest.run, url)
        catalog.record(manifest, url)

    failed = f"the checkpoint {url} is committed, but not in the catalog"
    with_catalog(record, failed, f"`ucp reindex {url}` records it")


def _record_origin(
    catalog: Catalog, url: str, checkpoint: str, run: str | None, child: str
) -> None:
    """Record the checkpoint at a place if it is there, in the folder of the one that continues it or of its named run.

    Others are not recorded: what belongs to another training is no business of this catalog's
    policies.
    """
    from ucformat.format.structure import find_manifest
    from ucformat.storage.url import open_store

    try:
        origin = find_manifest(open_store(url))
        if origin is not None and origin.id == checkpoint:
            beside = url.rstrip("/").rpartition("/")[0] == child.rstrip("/").rpartition("/")[0]
            if origin.run == run and (beside or run is not None):
                catalog.record(origin, url)
    except UcformatError as error:
        _log.debug("%s is not recorded: %s", url, error.message)


def record_verification(ck: Checkpoint, report: Report) -> None:
    """Record the result of a verification if the catalog knows the checkpoint."""

    def note(catalog: Catalog) -> None:
        with suppress(NotFound):
            catalog.verified(
                ck.id,
                url=ck.home,
                ok=bool(report),
                bytes_verified=report.bytes_verified,
                bytes_unverified=report.bytes_unverified,
                problems=[str(p) for p in report.problems],
                tool=f"ucformat {__version__}",
            )

    failed = f"the verification of {ck.url} is not in the catalog"
    with_catalog(note, failed, "verify it again", create=False)


def record_certificate(ck: Checkpoint, document: Mapping[str, Any], *, ok: bool) -> None:
    """Record a certificate if the catalog knows the checkpoint.

    Args:
        document: that of `ucformat.torch.Certificate`.
    """

    def note(catalog: Catalog) -> None:
        with suppress(NotFound):
            catalog.certified(ck.id, url=ck.home, ok=ok, document=document)

    failed = f"the certificate of {ck.url} is not in the catalog"
    with_catalog(note, failed, "certify it again", create=False)


def contradiction(manifest: Manifest, url: str) -> str | None:
    """Why a checkpoint is not the one that the catalog recorded at its place; None if it is."""
    reasons: list[str | None] = [None]
    with_catalog(
        lambda catalog: reasons.append(catalog.contradiction(manifest, url)),
        f"{url} was not compared with the record in the catalog",
        "verify it again",
        create=False,
    )
    return reasons[-1]


def with_catalog(
    use: Callable[[Catalog], object], failed: str, remedy: str, *, create: bool = True
) -> None:
    """Call a function with the catalog of the settings, unless that is switched off; all errors become warnings.

    Args:
        create: whether a catalog that does not exist yet is created; else it is not called.
    """
    try:
        from ucformat.settings import load_settings

        settings = load_settings()
        url = settings.catalog_url() if create else settings.existing_catalog()
        if url is None:
            return
        from ucformat.catalog.catalog import Catalog

        with Catalog(url) as catalog:
            use(catalog)
    except Exception as error:  # noqa: BLE001 - the job itself has succeeded
        _log.warning("%s: %s; %s", failed, getattr(error, "message", error), remedy)


def deleted_below(root: str) -> frozenset[str]:
    """Return the ids of checkpoints below a place that are deleted in the catalog while their files may exist.

    Empty if there is no catalog, or if it cannot be queried, which is logged.
    """

    def ask(catalog: Catalog) -> frozenset[str]:
        from ucformat.catalog.filter.syntax import like_literal
        from ucformat.catalog.refs import same_url

        pattern = f"{like_literal(same_url(root))}/%"
        deleted = catalog.find(f"state != 'committed' and url like '{pattern}'")
        return frozenset(entry.id for entry in deleted)

    return ask_catalog(f"deleted checkpoints below {root}", ask, frozenset[str]())


def ask_catalog(subject: str, ask: Callable[[Catalog], T], otherwise: T) -> T:
    """The answer of the catalog; another one if there is none, or, which is logged, on an error."""
    from ucformat.settings import load_settings

    url = load_settings().existing_catalog()
    if url is None:
        return otherwise
    from ucformat.catalog.catalog import Catalog

    try:
        with Catalog(url, read_only=True) as catalog:
            return ask(catalog)
    except NotFound:  # no catalog yet
        pass
    except Exception as error:  # noqa: BLE001 - of the database
        message = getattr(error, "message", error)
        _log.warning("the catalog cannot be queried for %s: %s", subject, message)
    return otherwise


_STEP = re.compile(
    r"(?:^|[-_.])(?:checkpoint|ckpt|global_?step|step|iter|iteration)[-_=]?(\d{1,18})$", re.ASCII
)


def step_in_name(place: str) -> int | None:
    """The training step that the name of a foreign checkpoint tells, such as `checkpoint-500`."""
    name = (
        place.rstrip("/")
        .rpartition("/")[2]
        .removesuffix(".safetensors")
        .removesuffix(".ckpt")
        .removesuffix(".pt")
    )
    match = _STEP.search(name)
    return int(match[1]) if match else None


def lineage_to(source: Checkpoint, kind: str, how: Mapping[str, Any] | None = None) -> LineageDoc:
    """The edge of lineage from a new checkpoint to its source.

    Args:
        how: more of how it was made, as in `LineageDoc.how` (default: nothing).
    """
    commits = source.universal.manifest.known_commits if source.universal else None
    if source.metadata.part_of:
        how = {**(how or {}), PART_OF: source.metadata.part_of}
    about = {
        "url": source.home,
        "id": Checkpoint(source.origin).id,
        "engine": dict(source.metadata.engine),
    }
    return LineageDoc.model_validate({"kind": kind, "commits": commits, **about, "how": how or {}})


def lineage_from(source: Checkpoint, keys: Iterable[Key]) -> tuple[LineageDoc, ...]:
    """The lineage of a conversion: `average` if a view takes means, `quantize` if it narrows dtypes, else `convert`.

    New names, shapes or a wider dtype keep every value, and are conversions. So is a mean that the
    checkpoint itself defines (DeepSpeed's `parameter_to_average_patterns`), since it is part of
    reading it.

    Args:
        keys: the tensors that are converted; steps that only compute others are ignored.
    """
    kinds = set()
    if source.viewed:
        for key in keys:
            for file, explicit in source.viewed.computed(key):
                formula = file.formula
                if explicit and formula.operation == "mean" and len(formula.inputs) > 1:
                    kinds.add("average")
                if formula.operation == "cast" and any(
                    ITEMSIZE[formula.info.dtype] < ITEMSIZE[view.info.dtype]
                    for view in formula.inputs
                ):
                    kinds.add("quantize")
    return tuple(lineage_to(source, kind) for kind in sorted(kinds) or ("convert",))
