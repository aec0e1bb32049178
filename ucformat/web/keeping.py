"""What the page of retention shows: what a policy would keep, thin and delete, and what `gc` would remove now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.catalog.as_json import retention_data
from ucformat.catalog.retention import read_policy
from ucformat.errors import UcformatError, UnsupportedError, UsageError
from ucformat.jobs.gc import collect, collected_data
from ucformat.jobs.listing import warning_of_gone

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog
    from ucformat.schema.policy import Policy
    from ucformat.web.library import Access, Library

_VALUES = 10_000  # of a policy
_RULES = 100  # of a policy; each filter is a query
_ROWS = 200  # that are listed of each kind
_KINDS = (
    *("delete", "thin", "keep", "untouched", "runs"),
    *("purge", "waiting", "resumed", "failures"),
)


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
        "gone": None,
        "gc": _shortened(collected_data(collect(library.catalog), applied=False)),
    }
    if not policy.strip():
        return data
    try:
        return data | _planned(library.catalog, policy)
    except UcformatError as error:
        return data | {"error": library.shown_error(error, access)}


def _planned(catalog: Catalog, text: str) -> dict[str, Any]:
    policy = read_policy(text, _VALUES)
    if _rules(policy) > _RULES:
        raise UsageError(
            f"this policy has more than {_RULES} rules, which is too many for this page",
            hint="ucp retain --policy FILE shows what it would do",
        )
    plan = catalog.retain(policy)
    return {
        "retain": _shortened(retention_data(plan, applied=False)),
        "contradictions": list(plan.contradictions),
        "gone": warning_of_gone([kept.row for kept in plan.keep]),
    }


def _rules(policy: Policy) -> int:
    return sum(
        1 + len(keep.last) + len(keep.best) + len(keep.where) + len(keep.states)
        for keep in policy.keep
    )


def _shortened(data: dict[str, Any]) -> dict[str, Any]:
    """Plans with the first of each kind of checkpoints, and how many there are of each."""
    counts = {kind: len(data[kind]) for kind in _KINDS if kind in data}
    return data | {kind: data[kind][:_ROWS] for kind in counts} | {"counts": counts}
