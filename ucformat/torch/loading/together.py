"""Opens a checkpoint on all ranks of a job, of which one reads its documents."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ucformat.checkpoint import Checkpoint
from ucformat.references import open_reference, open_watched
from ucformat.storage.cache.scope import read_consistently
from ucformat.storage.shared import Answer, Question, RememberingStore
from ucformat.storage.url import path_text
from ucformat.torch.comm.wire import message

if TYPE_CHECKING:
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group


@message
class _Opened:
    """What rank 0 has opened.

    Attributes:
        answers: of its store, while the checkpoint was opened.
    """

    place: str
    answers: Mapping[Question, Answer]


def open_together(place: str | PathLike[str] | Checkpoint, ranks: Group) -> Checkpoint:
    """Open a checkpoint on all ranks, which call this together.

    If all ranks name the same place, rank 0 alone looks it up in the catalog and reads the manifest, the sidecar and
    the objects, or what tells the structure of a foreign checkpoint, and the others get what it has read. So a job
    makes as many requests as one process, and all ranks open the same checkpoint even if another one is committed
    meanwhile.
    """
    named = None if isinstance(place, Checkpoint) else path_text(place)
    if isinstance(place, PathLike) and not Path(place).is_absolute():
        named = f"./{named}"  # and no reference to the catalog
    found: Checkpoint | None = None

    def read(common: str | None) -> _Opened | None:
        nonlocal found
        if common is None:
            return None
        answers: dict[Question, Answer] = {}
        found, url = _open(common, answers)
        return _Opened(url, answers)

    if ranks.size == 1:
        return place if isinstance(place, Checkpoint) else open_reference(place)
    opened: _Opened | None = ranks.combine(named, _same, str | None, read, _Opened | None)
    failure = None
    try:
        if opened is None:
            found = place if isinstance(place, Checkpoint) else open_reference(place)
        elif ranks.rank:
            found, _ = _open(opened.place, dict(opened.answers))
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        failure = error
    ranks.combine(failure)
    assert found is not None  # noqa: S101 - no rank failed
    return found


def _same(a: str | None, b: str | None) -> str | None:
    return a if a == b else None


def _open(place: str, answers: dict[Question, Answer]) -> tuple[Checkpoint, str]:
    return read_consistently(lambda: _read_documents(place, answers), optimistic=False)


def _read_documents(place: str, answers: dict[Question, Answer]) -> tuple[Checkpoint, str]:
    stores: list[RememberingStore] = []

    def watch(store: Store) -> RememberingStore:
        stores.append(RememberingStore(store, answers))
        return stores[-1]

    ck, url = open_watched(place, watch)
    _ = ck.objects, ck.id
    if ck.universal is not None and ck.universal.manifest.sidecar is not None:
        ck.universal.sidecar()
    for store in stores:
        store.forget_bytes()
    return ck, url
