"""The tombstone: what is still to be removed of a checkpoint whose purge was begun."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ucformat.schema.manifest import ATTEMPT
from ucformat.schema.times import Instant  # noqa: TC001 - pydantic reads it at run time

__all__ = ["TOMBSTONE", "TombstoneDoc", "is_tombstone"]

#: The name of the document, in the checkpoint's folder.
TOMBSTONE = "tombstone.json"


class TombstoneDoc(BaseModel):
    """Put before the manifest is removed, and removed last: what goes are the files of this attempt.

    It is `marked` until those were asked for who need the files, and `settled` when there was nobody; where there was
    somebody, it is `withdrawn`, and removed.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["ucformat-tombstone"] = "ucformat-tombstone"
    version: Literal[1] = 1
    id: str
    attempt: Annotated[str, Field(pattern=f"^{ATTEMPT}$")]
    created: Instant
    stage: Literal["marked", "settled", "withdrawn"] = "marked"


class _Head(BaseModel):
    """What every version of the tombstone begins with."""

    format: Literal["ucformat-tombstone"]


def is_tombstone(data: bytes) -> bool:
    """Whether a document is a tombstone, of whatever version."""
    try:
        _Head.model_validate_json(data)
    except ValidationError:
        return False
    return True
