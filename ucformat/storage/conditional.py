"""Puts on a condition, and whether one was carried out whose answer was lost."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from ucformat.errors import Conflict, NotFound, Refused, UcformatError, Uncertain
from ucformat.storage.object_errors import is_condition, may_pass, persist

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

__all__ = ["WRITE_ID", "put_on_condition", "write_id"]

WRITE_ID = "ucfwriteid"  # metadata of an object: which request wrote it; Azure wants the name of an identifier

_TRIES = 5  # at a put that others disturb


def write_id(client: Client, key: str, name: str, deadline: float) -> str | None:
    """The write id of an object; nothing for one without, None where there is no object."""
    import obstore

    def ask() -> Any:
        return obstore.get(client, key, options={"head": True}).attributes

    try:
        return str(persist("read", name, ask, deadline).get(WRITE_ID, ""))
    except NotFound:
        return None


def put_on_condition(
    client: Client, key: str, name: str, data: bytes, mode: Any, conflict: Conflict, deadline: float
) -> None:
    """Put an object; `conflict` where the condition does not hold, unless our own object stands there.

    An answer may be lost, and the request is then repeated, by obstore or here: what stands there tells whether it was
    carried out. Uncertain where that cannot be learnt either.
    """
    import obstore

    own, tries, doubt = uuid.uuid4().hex, 0, False

    def put() -> None:
        nonlocal tries, doubt
        try:
            obstore.put(client, key, data, mode=mode, attributes={WRITE_ID: own}, use_multipart=False)
        except Exception as error:
            if not is_condition(error) and not may_pass(error):
                raise
            doubt = doubt or not is_condition(error)
            stands = write_id(client, key, name, deadline)
            if stands == own:
                return
            if mode == "create" and stands is not None:
                raise conflict from None
            if not is_condition(error):
                raise
            tries += 1
            if mode != "create" or tries == _TRIES:
                raise conflict from None
            raise TimeoutError("somebody else puts and deletes it meanwhile") from None

    try:
        persist("write", name, put, deadline)
    except (Conflict, NotFound, Refused):
        raise
    except UcformatError as error:
        if doubt:
            raise Uncertain(f"nothing told whether {name} was written: {error.message}", hint=error.hint) from None
        raise
