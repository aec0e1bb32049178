"""The commands that memory ends under, and the checkpoints that they read."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

import ucformat
from tests.fakes import random_array
from tests.fuzz.test_zarr_documents import CHUNKS_V3, V3, with_documents
from tests.packed import write_packed
from tests.sources.suite import DATA
from tests.sources.torch_files import dictionary, integer, save, storage, tensor
from tests.zero_files import FLAT, write_zero3
from ucformat.cli.main import ucp
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["COMMANDS", "KINDS", "NEW", "Failed", "contents", "make_world"]


class Failed(Exception):
    """A command line that says something else than that memory ended."""


NEW = "new"

ARRAYS = {
    ("embed.weight", "weight"): random_array((6, 4), "float32", 1),
    ("embed.weight", "master"): random_array((6, 4), "float32", 2),
    ("norm.bias", "weight"): random_array((5,), "bfloat16", 3),
}


def _arrays(place: Path) -> None:
    write_packed(LocalStore(place.parent / "made"), ARRAYS)
    ucformat.convert(place.parent / "made", place, chunk_bytes=32, workers=1)


def _safetensors(place: Path) -> None:
    place.mkdir()
    save_file(
        {name: a for (name, state), a in ARRAYS.items() if a.dtype == np.float32},
        place / "model.safetensors",
    )


def _torch(place: Path) -> None:
    place.mkdir()
    values = {"embed": tensor((3, 2), (2, 1), 0, storage("0", 6)), "step": integer(7)}
    save(place / "model.pt", dictionary(**values), {"0": random_array((6,), "float32").tobytes()})


def _deepspeed(place: Path) -> None:
    write_zero3(
        place,
        {("up", state): random_array((6, 4), "float32", i) for i, state in enumerate(FLAT)},
        ranks=2,
    )


def _zarr(place: Path) -> None:
    kept = ("zarr.json", "plain", "sharded")
    files = {k: v for k, v in with_documents(V3, CHUNKS_V3).items() if k.startswith(kept)}
    for name, data in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)


#: Kind of checkpoint -> what makes one at a place.
KINDS: dict[str, Callable[[Path], Any]] = {
    "arrays": _arrays,
    "packed": lambda place: write_packed(LocalStore(place), ARRAYS),
    "safetensors": _safetensors,
    "torch": _torch,
    "dcp": lambda place: shutil.copytree(DATA / "dcp/sgd-hf/ckpt", place),
    "deepspeed": _deepspeed,
    "orbax": lambda place: shutil.copytree(DATA / "orbax/zarr2_raw/ckpt", place),
    "zarr": _zarr,
}


#: A tensor of each, that `get` reads a part of.
TENSORS = {
    "arrays": "embed.weight",
    "packed": "embed.weight",
    "safetensors": "embed.weight",
    "torch": "embed",
    "dcp": "embed.weight",
    "deepspeed": "up",
    "orbax": "params.embed",
    "zarr": "plain",
}


def make_world(root: Path) -> str:
    """Make a checkpoint of each kind, and a layout."""
    for kind, make in KINDS.items():
        make(root / kind)
    (root / "tp2.json").write_text(
        '{"version": 1, "mesh": {"tp": 2}, "rules": [{"match": "*", "place": []}]}'
    )
    return "made"


def contents(place: Path) -> str:
    """The digest of all that a checkpoint holds."""
    ck = ucformat.open(place)
    found = hashlib.sha256(json.dumps(ck.objects, sort_keys=True).encode())
    for key in sorted(ck.tensors):
        a = ck[key].read()
        found.update(f"{key} {a.dtype} {a.shape}".encode() + a.tobytes())
    found.update(
        repr((ck.metadata.step, ck.metadata.groups, ck.aliases, sorted(ck.assets))).encode()
    )
    return found.hexdigest()


def _parts(place: Path) -> str:
    """The digest of the second row of each tensor."""
    ck = ucformat.open(place)
    found = hashlib.sha256()
    for key in sorted(ck.tensors):
        a = ck[key][1:2] if ck[key].shape else ck[key][...]
        found.update(f"{key} {a.dtype} {a.shape}".encode() + a.tobytes())
    return found.hexdigest()


def _convert(place: Path) -> None:
    ucformat.convert(place, place.parent / NEW, chunk_bytes=64, workers=1)


def _printed(*arguments: Any) -> str:
    """What a command line prints; its error, if it fails."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            ucp.main([str(a) for a in arguments])
        except SystemExit as end:
            if end.code:
                raise (MemoryError if "out of memory" in err.getvalue() else Failed)(
                    err.getvalue()
                ) from None
    return out.getvalue()


def _get(place: Path) -> str:
    return _printed("get", place, TENSORS[place.name], "1:2")


#: What is done with a checkpoint; gives what is found, or writes to `NEW` beside it.
COMMANDS: dict[str, Callable[[Path], str | None]] = {
    "read": contents,
    "parts": _parts,
    "convert": _convert,
    "show": lambda place: _printed("show", place),
    "get": _get,
    "plan": lambda place: _printed("plan", place, "-l", place.parent / "tp2.json"),
    "verify": lambda place: _printed("verify", place),
}
