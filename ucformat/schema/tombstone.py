"""The tombstone: what is still to be removed of a checkpoint whose purge was begun."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 - pydantic reads it at run time
from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["TOMBSTONE", "TombstoneDoc"]

#: The name of the document, in the checkpoint's folder.
TOMBSTONE = "tombstone.json"


class TombstoneDoc(BaseModel):
    """Put before the manifest is removed, and removed last; it names all that goes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["ucformat-tombstone"] = "ucformat-tombstone"
    version: Literal[1] = 1
    id: str
    attempt: str
    files: tuple[str, ...] = ()
    created: datetime
