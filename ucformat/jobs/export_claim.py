"""The claim of an export on its destination: one file with a fixed key, so only one export at a time writes there.

A folder is claimed by `ucformat-export/begun.json`, a file `model.pt` by `ucformat-
export/model.pt.json` beside it. The claim is put only if there is none, and stays until the export
is complete: the same export continues, and another one takes it over only if the caller asks to
overwrite. An export looks at its claim before each of its files appears, so one whose claim was
taken over ends, and its last files do not appear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ucformat.errors import Conflict, NotFound

if TYPE_CHECKING:
    from ucformat.storage.base import Store


#: The folder of an unfinished export with its records; it is removed when the export is complete.
FOLDER = "ucformat-export"


#: The claim on a whole folder.
CLAIM = f"{FOLDER}/begun.json"


class Claim(BaseModel):
    """The export that a destination belongs to: the keys of its files, and of those that it is to remove first."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["ucformat-export-1"] = "ucformat-export-1"
    attempt: Annotated[str, Field(pattern="^[0-9a-f]{20}$")]
    files: tuple[str, ...]
    removes: tuple[str, ...] = ()


def read_claim(store: Store, key: str) -> tuple[Claim, str] | None:
    """The claim on a destination and its content version; None if there is none.

    Raises:
        Conflict: the file is no claim.
    """
    try:
        data, version = store.read_versioned(key)
        return Claim.model_validate_json(data), version
    except NotFound:
        return None
    except ValidationError:
        raise Conflict(
            f"{store.url}/{key} is not a record of an export", hint="choose another place"
        ) from None
