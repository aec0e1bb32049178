"""The document beside files that a virtual checkpoint elsewhere needs: while it is there, they stay."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from ucformat.schema.times import Instant  # noqa: TC001 - pydantic reads it at run time

__all__ = ["NEEDED_BY", "NeededByDoc"]

#: The folder of these documents, beside the files. Each is called by the id of the checkpoint that needs them.
NEEDED_BY = "needed-by"


class NeededByDoc(BaseModel):
    """Who needs the files: a checkpoint of this id, which lies, or is being written, at `url`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["ucformat-needed-by"] = "ucformat-needed-by"
    version: Literal[1] = 1
    id: str
    url: str
    created: Instant
    who: str
