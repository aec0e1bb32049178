"""Manifests as conversions and saves make them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

from ucformat.schema.manifest import LineageDoc, Manifest, SidecarDoc
from ucformat.schema.tensors import TensorDoc, TensorTable

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def digest(*words: Any) -> str:
    return f"xxh3:{hashlib.md5(repr(words).encode(), usedforsecurity=False).hexdigest()}"


def tensor(
    name: str = "w", state: str = "weight", shape: tuple[int, ...] = (4, 2), content: Any = 0
) -> TensorDoc:
    return TensorDoc(
        name=name,
        state=state,
        dtype="float32",
        shape=shape,
        chunk=shape,
        shard=shape,
        digest=digest(content),
    )


def manifest(
    id_: str | int, run: str | None = "run7", step: int | None = 0, **more: Any
) -> Manifest:
    """A committed checkpoint; ids of different numbers share no beginning."""
    number = id_ if isinstance(id_, int) else 0
    values: dict[str, Any] = {
        "id": hashlib.sha256(str(id_).encode()).hexdigest()[:32] if isinstance(id_, int) else id_,
        "attempt": "a" * 20,
        "created": BEGIN + timedelta(hours=number),
        "run": run,
        "step": step,
        "tensors": (tensor(content=id_),),
    }
    values |= more
    return Manifest(**{**values, "tensors": TensorTable.of(values["tensors"])})


def made_from(
    parent: Manifest, kind: Any = "convert", url: str = "/nowhere"
) -> tuple[LineageDoc, ...]:
    return (LineageDoc(kind=kind, url=url, id=parent.id),)


def packed_over(*roots: str) -> SidecarDoc:
    return SidecarDoc(path="sidecar", nbytes=0, digest="sha256:" + "0" * 64, roots=roots)
