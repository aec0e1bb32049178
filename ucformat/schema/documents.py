"""The documents that may be beside a manifest.

The sidecar's metadata describes how ranks held tensors. The tombstone names the files of a
checkpoint whose purge has begun. A dependent's document keeps files that a virtual checkpoint
elsewhere needs from being removed. The catalog's document has what people recorded about a
checkpoint, so that a catalog can be rebuilt from it. The channel's document, in the folder above,
names the newest version of what is published there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ucformat.schema import ATTEMPT
from ucformat.schema.manifest import LineageDoc
from ucformat.schema.values import Instant, version_of


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TombstoneDoc(_Document):
    """Put before the manifest is removed, and removed last: what goes are the files of this attempt.

    It is `marked` until those were asked for who need the files, and `settled` when there was
    nobody; where there was somebody, it is `withdrawn`, and removed.
    """

    format: Literal["ucformat-tombstone"] = "ucformat-tombstone"
    version: Literal[1] = 1
    id: str
    attempt: Annotated[str, Field(pattern=f"^{ATTEMPT}$")]
    created: Instant
    stage: Literal["marked", "settled", "withdrawn"] = "marked"


def is_tombstone(data: bytes) -> bool:
    """Whether a document is a tombstone of any version."""
    return version_of(data, "ucformat-tombstone") is not None


Count = Annotated[int, Field(ge=0, lt=2**31 - 1)]  # as the tables hold it, with room for one more


class ReasonDoc(_Document):
    """Why a catalog keeps a checkpoint, and until when (None: until it says otherwise)."""

    text: str
    until: Instant | None = None


class NeededByDoc(_Document):
    """Who needs the files: a checkpoint of this id, which lies, or is being written, at `url`; or a catalog.

    With `reasons`, it is the catalog of this id, which keeps the checkpoint `keeps`, or if the list
    is empty no longer does. `revision` is that of the catalog's document.

    With `keeps` alone, the checkpoint is based on that one, and needs it in whatever form it is
    stored. `url` may be relative to the place of that, as `../<name>`, and copies that have the
    same base are at the `urls` besides.
    """

    format: Literal["ucformat-needed-by"] = "ucformat-needed-by"
    version: Literal[1] = 1
    id: str
    url: str
    created: Instant
    who: str
    keeps: str | None = None
    urls: tuple[str, ...] = ()
    reasons: tuple[ReasonDoc, ...] | None = None
    revision: Count = 0


#: The name of the document, in the folder of a channel.
CHANNEL = "channel.json"


class VersionDoc(_Document):
    """A version of a channel: its number, and the checkpoint that it is, in a folder beside the document.

    `content` is the digest of the names, dtypes, shapes and fingerprints of its tensors.
    """

    number: Annotated[int, Field(ge=0, lt=2**63)]
    folder: Annotated[str, Field(pattern=r"^v-[0-9]{8,19}(\.[0-9]{1,9})?$")]
    id: str
    content: str


class ChannelDoc(_Document):
    """The versions of a channel that are kept, the newest first."""

    format: Literal["ucformat-channel"] = "ucformat-channel"
    version: Literal[1] = 1
    versions: Annotated[tuple[VersionDoc, ...], Field(min_length=1)]


class _CatalogPart(_Document):
    model_config = ConfigDict(ser_json_inf_nan="strings")


class AliasDoc(_CatalogPart):
    """An alias that points here; of two that claim it, the higher version is right."""

    name: str
    version: Count
    moved: Instant


class TagDoc(_CatalogPart):
    """A tag; one that is permanent is never taken off."""

    name: str
    created: Instant
    who: str
    permanent: bool = False


class UntagDoc(_CatalogPart):
    """A tag that was taken off; of a tag and this, the later one is right."""

    name: str
    removed: Instant
    who: str
    reason: str


class HoldDoc(_CatalogPart):
    """A hold that nobody has released."""

    reason: str
    until: Instant | None = None
    created: Instant
    who: str


def _number(value: Any) -> Any:
    """Infinity, for which JSON has no number, is a text."""
    return float(value) if value in ("Infinity", "-Infinity") else value


class MetricDoc(_CatalogPart):
    """A measured number; null if it was not a number (NaN)."""

    value: Annotated[float, BeforeValidator(_number)] | None
    measured: Instant


class NoteDoc(_CatalogPart):
    """What somebody wrote."""

    text: str
    created: Instant
    who: str


class EdgeDoc(LineageDoc):
    """What this checkpoint was made from; with `depends`, its bytes lie in the parent's files."""

    depends: bool = False


class CatalogDoc(_CatalogPart):
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


_Count = Annotated[int, Field(strict=True, ge=1, lt=1 << 31)]
_Number = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]


class _Exact(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MeshDoc(_Exact):
    """The mesh of a described tensor: `strides` has an item for each axis, or `ranks` one for each coordinate."""

    sizes: tuple[_Count, ...]
    first: _Number = 0
    strides: tuple[_Number, ...] = ()
    ranks: tuple[_Number, ...] = ()


class DistributionDoc(_Exact):
    """A distribution of described tensors: the number of its mesh, and the cuts as pairs of a dim and an axis."""

    mesh: _Number
    cuts: tuple[tuple[_Number, _Number], ...] = ()
    flat: _Number | None = None
    part: Annotated[int, Field(strict=True, ge=0, le=1 << 60)] = 0


class DescribedDoc(_Exact):
    """What the sidecar's metadata says about described tensors.

    Attributes:
        distributions: the distributions, without positions in flat buffers.
    """

    tensors: _Number
    folder: Annotated[str, Field(pattern=r"^data/[^/]+$")]
    meshes: tuple[MeshDoc, ...]
    distributions: tuple[DistributionDoc, ...]
