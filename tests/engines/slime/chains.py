"""A writer of weight versions, from the description in docs/sources/slime.md."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

import numcodecs.zstd  # type: ignore[import-untyped]
import numpy as np
import xxhash
from blake3 import blake3
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

DIGESTS: dict[str, Callable[[bytes], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}
INDEX = "model.safetensors.index.json"


def changed(arrays: Arrays, seed: int, names: tuple[str, ...]) -> Arrays:
    """Arrays of which some elements of some differ."""
    rng = np.random.default_rng(seed)
    out = dict(arrays)
    for name in names:
        array = out[name].copy()
        flat = array.reshape(-1).view(np.uint8)
        at = rng.integers(0, flat.size, max(1, flat.size // 20))
        flat[at] ^= rng.integers(1, 256, at.size, np.uint8)
        out[name] = array
    return out


def xor(old: bytes, new: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(old, new, strict=True))


def overwrite(old: bytes, new: bytes) -> bytes:
    at = [k for k, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    numbers = b"".join(n.to_bytes(4, "little") for n in (len(at), *at))
    return numbers + bytes(new[k] for k in at)


def compress(plain: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(numcodecs.zstd.compress(plain, 1), np.uint8)


def write_index(folder: Path, metadata: dict[str, Any], weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def write_full(folder: Path, arrays: Arrays) -> None:
    """Write a full version, in two files and with a configuration."""
    folder.mkdir(parents=True)
    names = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    files = {name: names[k % 2] for k, name in enumerate(arrays)}
    for file in names:
        held = {name: arrays[name] for name in arrays if files[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    write_index(folder, {"total_size": sum(a.nbytes for a in arrays.values())}, files)
    (folder / "config.json").write_text('{"model_type": "toy"}')


def write_delta(
    run: Path,
    version: int,
    old: Arrays,
    new: Arrays,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    encode: Callable[[bytes, bytes], bytes] | None = None,
    **metadata: Any,
) -> Path:
    """Write a version as a delta of the one before.

    Args:
        encode: makes the change instead of the encoding.
        metadata: members of the index's metadata that are other than they should be.
    """
    folder = run / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    encode = encode or {"xor": xor, "overwrite": overwrite}[encoding]
    raw = {n: (old[n].tobytes(), new[n].tobytes()) for n in new}
    patches = {n: compress(encode(a, b)) for n, (a, b) in raw.items() if a != b}
    digests = {n: DIGESTS[checksum](raw[n][1]) for n in patches}
    files = {}
    for k, name in enumerate(patches):
        files[name] = f"model-0000{k % 2}-of-0000{min(len(patches), 2)}.safetensors"
    for file in set(files.values()):
        held = {name: patches[name] for name in patches if files[name] == file}
        save_file(held, folder / file, metadata={name: digests[name] for name in held})
    described = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
        **metadata,
    }
    write_index(folder, {k: v for k, v in described.items() if v is not None}, files)
    return folder
