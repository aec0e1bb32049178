"""The keys of the filter language: what they are called, and what they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ucformat.catalog.filter.names import nearest
from ucformat.catalog.filter.pointing import pointing_error

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.catalog.filter.values import Key
    from ucformat.errors import UsageError

__all__ = ["DOCUMENTS", "MANY", "SCALARS", "TENSOR", "Kind", "Target", "resolve"]


class Kind(Enum):
    """What values a key has; the text says what it can be compared with."""

    TEXT = "text in quotes, such as 'good'"
    INTEGER = "a number"
    SIZE = "a number of bytes, or a size such as 10GB"
    FLOAT = "a number, such as 2.1 or 1e-4"
    TIME = "a time in quotes, such as '2026-11-01' or '2026-11-01T12:00:00+02:00'"
    AGE = "an age, such as 7d or 36h"
    TRUTH = "true or false"
    JSON = "text in quotes, a number, true or false"


#: At most one value for each checkpoint.
SCALARS = {
    "id": Kind.TEXT,
    "kind": Kind.TEXT,
    "state": Kind.TEXT,
    "run": Kind.TEXT,
    "step": Kind.INTEGER,
    "created": Kind.TIME,
    "age": Kind.AGE,
    "recorded": Kind.TIME,
    "deleted": Kind.TIME,
    "size": Kind.SIZE,
    "tensors": Kind.INTEGER,
    "format_version": Kind.INTEGER,
    "engine": Kind.TEXT,
    "hold": Kind.TRUTH,
    "verified": Kind.TRUTH,
}

#: Any number of values.
MANY = {"tag": Kind.TEXT, "alias": Kind.TEXT, "url": Kind.TEXT, "note": Kind.TEXT}

#: One value for each tensor: `tensor.NAME`.
TENSOR = {
    "name": Kind.TEXT,
    "state": Kind.TEXT,
    "dtype": Kind.TEXT,
    "shape": Kind.TEXT,
    "digest": Kind.TEXT,
    "size": Kind.SIZE,
}

#: A JSON document, with a path into it: `config.A.B`.
DOCUMENTS = ("config", "topology", "producer")


@dataclass(frozen=True)
class Target:
    """What a key means: `root` is its first part, `path` the rest."""

    root: str
    kind: Kind
    path: tuple[str, ...] = ()


def resolve(key: Key, text: str | None = None, *, more: Iterable[str] = ()) -> Target:
    """What a key means; UsageError, pointing into `text`, where there is none such; `more` are names to offer then."""
    root, *path = key.parts
    bare = SCALARS | MANY

    def wrong(message: str, hint: str) -> UsageError:
        return pointing_error(message, text, key.at, hint=hint)

    if root in DOCUMENTS:
        if not path:
            raise wrong(f"{root} needs a path", f"such as {root}.a.b")
        return Target(root, Kind.JSON, tuple(path))
    if root == "metric":
        if len(path) != 1:
            name = '"' + ".".join(path).replace('"', '""') + '"' if path else "val_loss"
            raise wrong("metric needs the name of one metric", f"such as metric.{name}")
        return Target(root, Kind.FLOAT, tuple(path))
    if root == "tensor":
        if len(path) != 1 or path[0] not in TENSOR:
            known = [f"tensor.{name}" for name in TENSOR]
            raise wrong(f"unknown key {key}", nearest(str(key), known) or f"there are {', '.join(known)}")
        return Target(root, TENSOR[path[0]], tuple(path))
    if root in bare and not path:
        return Target(root, bare[root])
    if root in bare:
        raise wrong(f"{root} has no parts", f"write {root} alone")
    listed = ", ".join([*sorted(bare), "metric.NAME", "tensor.NAME", *(f"{d}.PATH" for d in DOCUMENTS)])
    tails = [name for name in more if name.endswith(f".{key}")]
    offered = nearest(str(key), tails or [*bare, "metric", "tensor", *DOCUMENTS, *more])
    raise wrong(f"unknown key {key}", offered or f"the keys are {listed}")
