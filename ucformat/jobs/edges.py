"""What a checkpoint that is made of another one is to it: the edges of lineage that are true."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.checkpoint import Checkpoint
from ucformat.format.universal import Universal
from ucformat.schema.dtypes import ITEMSIZE
from ucformat.schema.manifest import LineageDoc
from ucformat.views.viewed import Viewed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.geometry.tensor import Key

__all__ = ["edge_to", "edges_from"]


def edge_to(source: Checkpoint, kind: str) -> LineageDoc:
    """The edge of lineage from what is made of a checkpoint to it.

    Args:
        source: the checkpoint, perhaps through a view.
        kind: what it is to the new one, as in `LineageDoc.kind`.
    """
    commits = source.origin.manifest.known_commits if isinstance(source.origin, Universal) else None
    about = {"url": source.home, "id": Checkpoint(source.origin).id, "engine": dict(source.facts.engine)}
    return LineageDoc.model_validate({"kind": kind, "commits": commits, **about})


def edges_from(source: Checkpoint, keys: Iterable[Key]) -> tuple[LineageDoc, ...]:
    """An `average` where a step of a view takes means, a `quantize` where one casts to fewer bytes, else a `convert`.

    What only has other names, shapes or a wider dtype still has every value, and is a conversion. So is a mean that the
    checkpoint itself asks for (DeepSpeed's `parameter_to_average_patterns`): that is how it is read.

    Args:
        source: what is converted, perhaps through a view.
        keys: the tensors that are taken; a step whose tensors are left out says nothing.
    """
    kinds = set()
    if isinstance(source.source, Viewed):
        for key in keys:
            for file, said in source.source.computed(key):
                formula = file.formula
                if said and formula.operation == "mean" and len(formula.inputs) > 1:
                    kinds.add("average")
                if formula.operation == "cast" and any(
                    ITEMSIZE[formula.info.dtype] < ITEMSIZE[view.info.dtype] for view in formula.inputs
                ):
                    kinds.add("quantize")
    return tuple(edge_to(source, kind) for kind in sorted(kinds) or ("convert",))
