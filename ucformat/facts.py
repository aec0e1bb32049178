"""What a checkpoint says of itself, apart from its tensors' bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.geometry.tensor import Key, Roster

__all__ = ["TRACKERS", "Facts"]

#: Files that name the last checkpoint of a run. They change while older ones are read, and hold nothing of these.
TRACKERS = frozenset({"latest", "latest_universal", "latest_checkpointed_iteration.txt"})


@dataclass(frozen=True, slots=True)
class Facts:
    """Plain JSON values throughout, save the roster."""

    roster: Roster
    aliases: Mapping[str, str] = field(default_factory=dict)  # tied name -> name of the stored tensor
    objects: Mapping[str, Any] = field(default_factory=dict)
    assets: tuple[str, ...] = ()  # keys of files to keep as they are
    groups: tuple[Mapping[str, Any], ...] = ()  # optimizer groups: hyper-parameters and "params", names in order
    step: int | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)  # {"zero": 3, "dp": 4, …}
    engine: Mapping[str, str] = field(default_factory=dict)  # {"name": "deepspeed", "version": "0.19.8", …}
    files: tuple[str, ...] = ()  # keys of every file that holds a part of it
    #: Tensors that are stored as several contributions, of which each is the mean; those are in no roster.
    means: Mapping[Key, tuple[Key, ...]] = field(default_factory=dict)
    save_id: str = ""  # what the writer called this one save, as it calls no other; where it did
    folder: str = ""  # the folder or file in the store that is the checkpoint itself, where the store is around it

    def but(self, **changed: Any) -> Facts:
        """The same but for these fields; of a source's own, lazy kind of facts, all is read."""
        return Facts(**{f.name: getattr(self, f.name) for f in fields(Facts)} | changed)
