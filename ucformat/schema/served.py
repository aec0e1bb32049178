"""The document in which a server describes a checkpoint, and names the bytes of its tensors (docs/http.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ucformat.schema.tensors import Size, StatePath  # noqa: TC001 - pydantic reads them
from ucformat.schema.values import Number, Values  # noqa: TC001 - pydantic reads them

#: The version of the document.
VERSION = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class ServedTensorDoc(_Part):
    """A tensor; `file` is the name of its bytes, in the order of rows."""

    name: str
    state: str
    dtype: str
    shape: Annotated[tuple[Size, ...], Field(max_length=64)]
    nbytes: Annotated[Size, Field(alias="bytes")]
    file: str
    paths: tuple[StatePath, ...]
    fingerprint: str | None


class ServedPlaceDoc(_Part):
    """See `reading.readable.GroupPlace`."""

    path: StatePath
    names: tuple[str, ...]
    flattened: bool


class ServedAssetDoc(_Part):
    """An asset; `file` is the name of its bytes."""

    file: str


class UnreadableDoc(_Part):
    """A tensor that cannot be read, and why."""

    name: str
    state: str
    reason: str


class LossDoc(_Part):
    """See `reading.readable.Loss`."""

    name: str
    state: str
    encoding: str
    absolute: Number
    relative: Number


class OlderDoc(_Part):
    """A tensor that is older than the checkpoint, and its step."""

    name: str
    state: str
    step: int


class ServedDoc(_Part):
    """A checkpoint; `ref` is the name under which its files are asked for, and `catalog` what the catalog has of it."""

    ucformat_served: Literal[1] = 1
    id: str
    ref: str
    kind: str
    step: Size | None
    run: str | None
    config: Values
    metrics: dict[str, Number]
    engine: dict[str, str]
    layout: Values
    aliases: dict[str, str]
    nbytes: Annotated[Size, Field(alias="bytes")]
    tensors: tuple[ServedTensorDoc, ...]
    groups: tuple[Values, ...]
    places: tuple[ServedPlaceDoc | None, ...]
    objects: Values
    assets: dict[str, ServedAssetDoc]
    unreadable: tuple[UnreadableDoc, ...]
    lossy: tuple[LossDoc, ...]
    older: tuple[OlderDoc, ...] = ()
    missing: tuple[str, ...]
    catalog: dict[str, Any] | None
