"""What schemathesis asks for besides what it makes up: names that the server of `test_fuzz` has."""

from __future__ import annotations

import json
import os
from typing import Any

import schemathesis

#: The values of parameters of paths, and bodies of plans.
NAMES: dict[str, Any] = json.loads(os.environ["UCFORMAT_FUZZED"])


def _chosen(text: object, values: list[Any]) -> Any:
    """One of the values, or None: which, what schemathesis has made up decides."""
    number = sum(repr(text).encode("utf-8", "replace"))
    return values[number % len(values)] if number % 4 else None


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Ask for what there is, three times of four."""
    for name in path_parameters or ():
        value = _chosen(path_parameters[name], NAMES[name])
        if value is not None:
            path_parameters[name] = value
    return path_parameters


@schemathesis.hook
def map_query(context: Any, query: Any) -> Any:
    """Write filters, orders and slices that are ones, three times of four."""
    for name in query or ():
        value = _chosen(query[name], NAMES.get(name, [None]))
        if value is not None:
            query[name] = value
    return query


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Send layouts that are ones, three times of four, unless the body is to be wrong."""
    is_meant = (
        isinstance(body, dict)
        and isinstance(body.get("layout"), dict)
        and isinstance(body.get("rank"), int)
        and not isinstance(body["rank"], bool)
        and body["rank"] >= 0
        and body.keys() <= {"layout", "rank"}
    )
    value = _chosen(body, NAMES["body"]) if is_meant else None
    return body if value is None else value
