"""What `thin` has dropped from a checkpoint, as its lineage records it (docs/spec/provenance.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from ucformat.schema.tensors import Size, TensorTable, Text  # noqa: TC001 - pydantic reads them
from ucformat.schema.values import Time  # noqa: TC001 - pydantic reads it

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.schema.manifest import Manifest

THIN = "thin"


class DroppedDoc(BaseModel):
    """The tensors of a state that were dropped."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: Text
    tensors: Size
    nbytes: Size


class ThinDoc(BaseModel):
    """`how` of an edge of lineage of the kind `thin`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    at: Time
    reason: Text
    dropped: tuple[DroppedDoc, ...]


class Dropped(NamedTuple):
    """What was dropped of a state, the last time, and why."""

    tensors: int
    nbytes: int
    at: datetime
    reason: str

    def __str__(self) -> str:
        return f"dropped by thin on {self.at:%Y-%m-%d} ({self.reason})"


def amounts(infos: Iterable[TensorInfo]) -> dict[str, tuple[int, int]]:
    """The number of tensors and their bytes, by state."""
    out: dict[str, tuple[int, int]] = {}
    for info in infos:
        tensors, nbytes = out.get(info.state, (0, 0))
        out[info.state] = tensors + 1, nbytes + info.nbytes
    return out


def state_bytes(tensors: TensorTable) -> dict[str, int]:
    """The bytes of each state, where a master of which no weight is stored counts as the weight."""
    kinds = [(kind.state, kind.nbytes) for kind in tensors.kinds]
    rows = list(zip(tensors.name, tensors.kind, strict=True))
    weights = {name for name, kind in rows if kinds[kind][0] == "weight"}
    out: dict[str, int] = {}
    for name, kind in rows:
        state, nbytes = kinds[kind]
        if state == "master" and name not in weights:
            state = "weight"
        out[state] = out.get(state, 0) + nbytes
    return out


def dropped_states(manifest: Manifest) -> Mapping[str, Dropped]:
    """The states of which tensors were dropped, all or some."""
    out: dict[str, Dropped] = {}
    for edge in manifest.lineage:
        if edge.kind != THIN:
            continue
        try:
            doc = ThinDoc.model_validate(edge.how)
        except ValidationError:  # of another writer
            continue
        for state in doc.dropped:
            before = out.get(state.state, (0, 0))
            out[state.state] = Dropped(
                before[0] + state.tensors, before[1] + state.nbytes, doc.at, doc.reason
            )
    return out
