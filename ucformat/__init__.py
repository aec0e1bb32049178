"""Checkpoints for large models: every layout saves them, every layout reads exactly its slice."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from ucformat._version import __version__
from ucformat.catalog import dependent_finders, on_change, thinners
from ucformat.format import may_replace, on_abandon
from ucformat.redacted import hide_in_record

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ucformat import errors
    from ucformat.catalog.catalog import Catalog
    from ucformat.checkpoint import Checkpoint
    from ucformat.format.zarr_types import register_zarr_dtypes
    from ucformat.geometry.layout import Layout
    from ucformat.jobs.attest import attest
    from ucformat.jobs.combine.combining import average, merge
    from ucformat.jobs.compact import compact
    from ucformat.jobs.convert import convert
    from ucformat.jobs.copy import Copied, copy
    from ucformat.jobs.cost import Cost, estimate
    from ucformat.jobs.doctor import Diagnosis, doctor
    from ucformat.jobs.export import Exported, export
    from ucformat.jobs.fits import Fit, fits
    from ucformat.jobs.gc import collect
    from ucformat.jobs.logged import Reference, Tracker, log_reference
    from ucformat.jobs.materialize import materialize
    from ucformat.jobs.patch import patch
    from ucformat.jobs.register import register, reindex
    from ucformat.jobs.run import Report
    from ucformat.jobs.sign import Signature, sign
    from ucformat.jobs.thin import thin
    from ucformat.jobs.verify import verify
    from ucformat.reading.lazy import Tensor
    from ucformat.reading.rank import ReadPlan
    from ucformat.references import open_reference as open  # noqa: A004
    from ucformat.runs.run import Run
    from ucformat.runs.run import open_run as run
    from ucformat.runs.tensor import RunPlan, RunTensor
    from ucformat.schema.manifest import AttemptDoc, Manifest
    from ucformat.storage.base import Store
    from ucformat.trackers.importing import ImportedCheckpoint, ImportedRuns, import_runs

__all__ = [
    "Catalog",
    "Checkpoint",
    "Copied",
    "Cost",
    "Diagnosis",
    "Exported",
    "Fit",
    "ImportedCheckpoint",
    "ImportedRuns",
    "Layout",
    "ReadPlan",
    "Reference",
    "Report",
    "Run",
    "RunPlan",
    "RunTensor",
    "Signature",
    "Tensor",
    "Tracker",
    "__version__",
    "attest",
    "average",
    "collect",
    "compact",
    "convert",
    "copy",
    "doctor",
    "errors",
    "estimate",
    "export",
    "fits",
    "import_runs",
    "log_reference",
    "materialize",
    "merge",
    "open",
    "patch",
    "register",
    "register_zarr_dtypes",
    "reindex",
    "run",
    "sign",
    "thin",
    "verify",
]

_HOMES = {
    "Catalog": "catalog.catalog:Catalog",
    "Checkpoint": "checkpoint:Checkpoint",
    "Copied": "jobs.copy:Copied",
    "Cost": "jobs.cost:Cost",
    "Diagnosis": "jobs.doctor:Diagnosis",
    "Exported": "jobs.export:Exported",
    "Fit": "jobs.fits:Fit",
    "ImportedCheckpoint": "trackers.importing:ImportedCheckpoint",
    "ImportedRuns": "trackers.importing:ImportedRuns",
    "Layout": "geometry.layout:Layout",
    "ReadPlan": "reading.rank:ReadPlan",
    "Reference": "jobs.logged:Reference",
    "Report": "jobs.run:Report",
    "Run": "runs.run:Run",
    "RunPlan": "runs.tensor:RunPlan",
    "RunTensor": "runs.tensor:RunTensor",
    "Signature": "jobs.sign:Signature",
    "Tensor": "reading.lazy:Tensor",
    "Tracker": "jobs.logged:Tracker",
    "attest": "jobs.attest:attest",
    "average": "jobs.combine.combining:average",
    "collect": "jobs.gc:collect",
    "compact": "jobs.compact:compact",
    "convert": "jobs.convert:convert",
    "copy": "jobs.copy:copy",
    "doctor": "jobs.doctor:doctor",
    "errors": "errors:",
    "estimate": "jobs.cost:estimate",
    "export": "jobs.export:export",
    "fits": "jobs.fits:fits",
    "import_runs": "trackers.importing:import_runs",
    "log_reference": "jobs.logged:log_reference",
    "materialize": "jobs.materialize:materialize",
    "merge": "jobs.combine.combining:merge",
    "open": "references:open_reference",
    "patch": "jobs.patch:patch",
    "register": "jobs.register:register",
    "register_zarr_dtypes": "format.zarr_types:register_zarr_dtypes",
    "reindex": "jobs.register:reindex",
    "run": "runs.run:open_run",
    "sign": "jobs.sign:sign",
    "thin": "jobs.thin:thin",
    "verify": "jobs.verify:verify",
}


def _keep_documents(catalog: Catalog, changed: Collection[int]) -> None:
    from ucformat.jobs.documents import write_documents

    write_documents(catalog, changed=changed)


def _refuse_protected(store: Store, there: Manifest, new: str | None) -> None:
    from ucformat.jobs.documents import refuse_protected

    refuse_protected(store, there, new)


def _release(store: Store, record: AttemptDoc) -> None:
    from ucformat.jobs.dependents import release

    release(store, record)


def _ask_beside(places: Mapping[str, Sequence[str]]) -> Mapping[str, frozenset[str]]:
    from ucformat.jobs.dependents import dependents_of

    return dependents_of(places)


def _thin(url: str, checkpoint: str, states: Sequence[str], reason: str) -> Manifest:
    from ucformat.jobs.thin import thin_at

    return thin_at(url, checkpoint, states, reason)


logging.getLogger("ucformat").addFilter(hide_in_record)
on_change.append(
    _keep_documents
)  # here, for the catalog and the format know nothing of the rooms above them
may_replace.append(_refuse_protected)
on_abandon.append(_release)
dependent_finders.append(_ask_beside)
thinners.append(_thin)


def __getattr__(name: str) -> object:
    """Load a public name when it is first used, so that `import ucformat` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ucformat' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value: object = import_module(f"ucformat.{module}")
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
