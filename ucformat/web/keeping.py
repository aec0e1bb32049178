"""What the page of retention shows: what a policy would keep, thin and delete, and what `gc` would remove now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.catalog.as_json import retention_data
from ucformat.catalog.retention import read_policy
from ucformat.errors import UcformatError, UnsupportedError
from ucformat.jobs.gc import collect, collected_data

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog
    from ucformat.web.library import Access, Library

_ROWS = 200  # that are listed of each kind
_KINDS = ("delete", "thin", "keep", "untouched", "purge", "waiting")


def preview_data(library: Library, access: Access, policy: str) -> dict[str, Any]:
    """The data of the page of retention.

    Args:
        policy: YAML or JSON; empty for none.

    Raises:
        UnsupportedError: the client may not see all, so no plan of what it sees would be true.
    """
    if library.is_limited(access):
        raise UnsupportedError(
            "what a policy keeps depends on all checkpoints, of which this client sees some"
        )
    if library.catalog is None:
        raise UnsupportedError("this server has no catalog, and so no retention")
    data: dict[str, Any] = {
        "policy": policy,
        "error": None,
        "retain": None,
        "contradictions": [],
        "gc": _shortened(collected_data(collect(library.catalog), applied=False)),
    }
    if not policy.strip():
        return data
    try:
        return data | _planned(library.catalog, policy)
    except UcformatError as error:
        return data | {"error": library.shown_error(error, access)}


def _planned(catalog: Catalog, text: str) -> dict[str, Any]:
    plan = catalog.retain(read_policy(text))
    return {
        "retain": _shortened(retention_data(plan, applied=False)),
        "contradictions": list(plan.contradictions),
    }


def _shortened(data: dict[str, Any]) -> dict[str, Any]:
    """Plans with the first of each kind of checkpoints, and how many there are of each."""
    counts = {kind: len(data[kind]) for kind in _KINDS if kind in data}
    return data | {kind: data[kind][:_ROWS] for kind in counts} | {"counts": counts}
