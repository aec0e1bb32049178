"""The document beside a checkpoint with what people said of it: from storage alone, a catalog can be made anew."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ucformat.schema.manifest import LineageDoc
from ucformat.schema.times import Instant  # noqa: TC001 - pydantic reads it at run time

__all__ = [
    "CATALOG_DOCUMENT",
    "AliasDoc",
    "CatalogDoc",
    "EdgeDoc",
    "HoldDoc",
    "MetricDoc",
    "NoteDoc",
    "TagDoc",
    "UntagDoc",
]

#: The name of the document, in the checkpoint's folder.
CATALOG_DOCUMENT = "ucformat-catalog.json"


Count = Annotated[int, Field(ge=0, lt=2**31 - 1)]  # as the tables hold it, with room for one more


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class AliasDoc(_Document):
    """An alias that points here; of two that claim it, the higher version is right."""

    name: str
    version: Count
    moved: Instant


class TagDoc(_Document):
    """A tag; one that is permanent is never taken off."""

    name: str
    created: Instant
    who: str
    permanent: bool = False


class UntagDoc(_Document):
    """A tag that was taken off; of a tag and this, the later one is right."""

    name: str
    removed: Instant
    who: str
    reason: str


class HoldDoc(_Document):
    """A hold that nobody has released."""

    reason: str
    until: Instant | None = None
    created: Instant
    who: str


class MetricDoc(_Document):
    """A measured number; null if it was not a number (NaN)."""

    value: float | None
    measured: Instant


class NoteDoc(_Document):
    """What somebody wrote."""

    text: str
    created: Instant
    who: str


class EdgeDoc(LineageDoc):
    """What this checkpoint was made from; with `depends`, its bytes lie in the parent's files."""

    depends: bool = False


class CatalogDoc(_Document):
    """What a catalog knows of a checkpoint and its manifest does not."""

    format: Literal["ucformat-catalog"] = "ucformat-catalog"
    version: Literal[1] = 1
    id: str
    catalog: str
    revision: Count
    run: str | None = None
    deleted: Instant | None = None
    purge_after: Instant | None = None
    aliases: tuple[AliasDoc, ...] = ()
    tags: tuple[TagDoc, ...] = ()
    untags: tuple[UntagDoc, ...] = ()
    holds: tuple[HoldDoc, ...] = ()
    metrics: dict[str, MetricDoc] = {}
    notes: tuple[NoteDoc, ...] = ()
    lineage: tuple[EdgeDoc, ...] = ()
