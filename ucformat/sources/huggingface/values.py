"""What Trainer and Accelerate keep besides tensors: counters, scheduler, scaler, random generators, arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.sources.model_files import read_json
from ucformat.sources.pickle.file import ShutFile, TorchFile, open_file
from ucformat.sources.values import to_json
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from ucformat.sources.contents import Contents
    from ucformat.sources.huggingface.folder import Contained
    from ucformat.sources.pickle.stand_ins import StoredTensor
    from ucformat.storage.base import Store

__all__ = ["read_values"]


def read_values(store: Store, found: Contained, contents: Contents, allow: tuple[str, ...]) -> dict[str, Any]:
    """Each file as an object of its name, `trainer_state` too; those that each rank wrote by rank."""
    wanted = [(name, name, key) for name, key in found.values.items()]
    wanted += [
        (name, f"{name}.{rank}", by_rank[rank]) for name, by_rank in found.ranked.items() for rank in sorted(by_rank)
    ]
    objects: dict[str, Any] = {}
    if found.trainer_state:
        objects["trainer_state"] = to_json(read_json(store, "trainer_state.json"))
    opened = map_io(lambda item: open_file(store, item[2], allow=allow), wanted)
    for (name, path, _), file in zip(wanted, opened, strict=True):
        value = _json(file, path, contents)
        if name == path:
            objects[name] = value
        else:
            objects.setdefault(name, {})[path.rpartition(".")[2]] = value
    return objects


def _json(file: TorchFile | ShutFile, path: str, contents: Contents) -> Any:
    """The value as JSON; what has no such form is kept as a pickle that nobody opens unasked."""
    if isinstance(file, ShutFile):
        return to_json(file.opaque())
    opened = file

    def spill(where: str, tensor: StoredTensor) -> str:
        return contents.add_large(where, opened, tensor)

    return to_json(file.value, read=file.read, spill=spill, path=path)
