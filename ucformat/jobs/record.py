"""What is recorded of a job: the lineage of what it made, and its outcome in the catalog.

What the catalog cannot record fails no job: `ucp reindex` makes up for it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from ucformat._version import __version__
from ucformat.checkpoint import Checkpoint
from ucformat.errors import NotFound
from ucformat.schema.dtypes import ITEMSIZE
from ucformat.schema.manifest import LineageDoc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ucformat.catalog.catalog import Catalog
    from ucformat.geometry.tensor import Key
    from ucformat.jobs.run import Report
    from ucformat.schema.manifest import Manifest

__all__ = ["contradiction", "lineage_from", "lineage_to", "record_commit", "record_commits", "record_verification"]

_log = logging.getLogger("ucformat")


def record_commits() -> None:
    """Have every commit of this process recorded."""
    from ucformat.format.commit import on_commit

    if record_commit not in on_commit:
        on_commit.append(record_commit)


def record_commit(url: str, manifest: Manifest) -> None:
    """Record a checkpoint that was just committed in the catalog of the settings.

    Args:
        url: its place.
        manifest: its manifest.
    """
    failed = f"the checkpoint {url} is committed, but not in the catalog"
    _tell(lambda catalog: catalog.record(manifest, url), failed, f"`ucp reindex {url}` makes up for it")


def record_verification(ck: Checkpoint, report: Report) -> None:
    """Record the result of a verification if the catalog knows the checkpoint.

    Args:
        ck: the checkpoint.
        report: the result.
    """

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

    _tell(note, f"the verification of {ck.url} is not in the catalog", "verify it again")


def contradiction(manifest: Manifest, url: str) -> str | None:
    """Why a checkpoint is not the one that the catalog recorded at its place; None if it is.

    Args:
        manifest: the checkpoint's manifest.
        url: its place.
    """
    found: list[str | None] = [None]
    _tell(
        lambda catalog: found.append(catalog.contradiction(manifest, url)),
        f"the catalog was not asked whether {url} is what it recorded",
        "verify it again",
    )
    return found[-1]


def _tell(tell: Callable[[Catalog], object], failed: str, remedy: str) -> None:
    """Tell the catalog of the settings, unless it is switched off; whatever goes wrong becomes a warning."""
    try:
        from ucformat.settings import load_settings

        url = load_settings().catalog_url()
        if url is None:
            return
        from ucformat.catalog.catalog import Catalog

        with Catalog(url) as catalog:
            tell(catalog)
    except Exception as error:  # noqa: BLE001 - what happened has happened, whatever the catalog says
        _log.warning("%s: %s; %s", failed, getattr(error, "message", error), remedy)


def lineage_to(source: Checkpoint, kind: str) -> LineageDoc:
    """The edge of lineage from what is made of a checkpoint to it.

    Args:
        source: the checkpoint, perhaps through a view.
        kind: what it is to the new one, as in `LineageDoc.kind`.
    """
    commits = source.universal.manifest.known_commits if source.universal else None
    about = {"url": source.home, "id": Checkpoint(source.origin).id, "engine": dict(source.metadata.engine)}
    return LineageDoc.model_validate({"kind": kind, "commits": commits, **about})


def lineage_from(source: Checkpoint, keys: Iterable[Key]) -> tuple[LineageDoc, ...]:
    """An `average` where a step of a view takes means, a `quantize` where one casts to fewer bytes, else a `convert`.

    What only has other names, shapes or a wider dtype still has every value, and is a conversion. So is a mean that the
    checkpoint itself asks for (DeepSpeed's `parameter_to_average_patterns`): that is how it is read.

    Args:
        source: what is converted, perhaps through a view.
        keys: the tensors that are taken; a step whose tensors are left out says nothing.
    """
    kinds = set()
    if source.viewed:
        for key in keys:
            for file, said in source.viewed.computed(key):
                formula = file.formula
                if said and formula.operation == "mean" and len(formula.inputs) > 1:
                    kinds.add("average")
                if formula.operation == "cast" and any(
                    ITEMSIZE[formula.info.dtype] < ITEMSIZE[view.info.dtype] for view in formula.inputs
                ):
                    kinds.add("quantize")
    return tuple(lineage_to(source, kind) for kind in sorted(kinds) or ("convert",))
