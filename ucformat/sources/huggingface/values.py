"""What Trainer and Accelerate keep besides tensors: counters, scheduler, scaler, random generators, arguments."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from ucformat.errors import Refused
from ucformat.sources.model_files import read_json
from ucformat.sources.stand_ins import Opaque
from ucformat.sources.torch_file import TorchFile
from ucformat.sources.values import to_json
from ucformat.storage.waiting import map_waiting

if TYPE_CHECKING:
    from ucformat.sources.contents import Contents
    from ucformat.sources.huggingface.folder import Contained
    from ucformat.sources.stand_ins import StoredTensor
    from ucformat.storage.base import Store

__all__ = ["read_values"]

_LARGEST = 16 << 20  # bytes of a file that is kept as it is


def read_values(store: Store, found: Contained, contents: Contents, allow: tuple[str, ...]) -> dict[str, Any]:
    """Each file as an object of its name, `trainer_state` too; those that each rank wrote by rank."""
    wanted = [(name, name, key) for name, key in found.values.items()]
    wanted += [
        (name, f"{name}.{rank}", by_rank[rank]) for name, by_rank in found.ranked.items() for rank in sorted(by_rank)
    ]
    objects: dict[str, Any] = {}
    if found.trainer_state:
        objects["trainer_state"] = to_json(read_json(store, "trainer_state.json"))
    opened = map_waiting(lambda item: _open(store, item[2], allow), wanted)
    for (name, path, key), file in zip(wanted, opened, strict=True):
        value = _json(store, key, file, path, contents)
        if name == path:
            objects[name] = value
        else:
            objects.setdefault(name, {})[path.rpartition(".")[2]] = value
    return objects


def _open(store: Store, key: str, allow: tuple[str, ...]) -> TorchFile | None:
    """The file, or None where its pickle names what is not plain."""
    try:
        return TorchFile(store, key, allow=allow)
    except Refused:
        if store.info(key).size > _LARGEST:
            raise
        return None


def _json(store: Store, key: str, file: TorchFile | None, path: str, contents: Contents) -> Any:
    """The value as JSON; what has no such form is kept as a pickle that nobody opens unasked."""
    if file is None:
        return to_json(Opaque(_pickled(store.read(key))))
    opened = file

    def spill(where: str, tensor: StoredTensor) -> str:
        return contents.add_large(where, opened, tensor)

    return to_json(file.value, read=file.read, spill=spill, path=path)


def _pickled(data: bytes) -> bytes:
    """A pickle that is `functools.partial(torch.load, weights_only=False)(io.BytesIO(data))`.

    A file of torch.save is a zip archive; an opaque value is a pickle, which `trust=True` opens. It is put together
    here and not by pickle, because torch is not there.
    """
    load = b"ctorch\nload\n"
    partial = b"cfunctools\npartial\n(" + load + b"tR(" + load + b"(t}X\x0c\x00\x00\x00weights_only\x89sNtb"
    file = b"cio\nBytesIO\n(B" + struct.pack("<I", len(data)) + data + b"tR"
    return b"\x80\x03" + partial + b"(" + file + b"tR."
