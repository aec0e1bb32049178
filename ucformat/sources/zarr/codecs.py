"""The codecs of a chunk, as Zarr v3 writes them; those of Zarr v2 are said in the same words.

A chain is some `transpose`, then `bytes` or `sharding_indexed`, then codecs from bytes to bytes. Where these leave the
elements as they are in memory, chunks are *raw*, and are read in place; all others are decoded whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from ucformat.errors import IntegrityError, Refused

__all__ = ["Codec", "Raw", "Sharding", "check_chain", "has_crc32c", "raw_layout", "sharding_of"]

Codec = dict[str, Any]

#: Codecs from bytes to bytes that are decoded. How strongly they compressed does not matter for that.
PACKING: dict[str, Codec] = {
    "crc32c": {},
    "gzip": {"level": 5},
    "zstd": {"level": 3, "checksum": False},
    "blosc": {"cname": "lz4", "clevel": 5, "shuffle": "noshuffle", "typesize": 1, "blocksize": 0},
}

_NESTED = 4  # shards within shards
_MOST = 8  # codecs one after another: each may blow up what the next one made of a few bytes


@dataclass(frozen=True, slots=True)
class Raw:
    """A chunk whose bytes are its elements; `order` gives its axes, slowest first; a CRC-32C may follow."""

    order: tuple[int, ...]
    checked: bool


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a stored value holds many chunks, and an index of them."""

    chunk: tuple[int, ...]
    codecs: tuple[Codec, ...]
    index_endian: str
    index_checked: bool
    index_first: bool


def check_chain(where: str, codecs: Any, shape: tuple[int, ...], itemsize: int, depth: int = 0) -> tuple[Codec, ...]:
    """The chain of an array's `codecs`, in one spelling; `shape` is that of the chunk that it encodes.

    Raises:
        IntegrityError: it is no chain.
        Refused: it has a codec that is not decoded.
    """
    if not isinstance(codecs, list) or depth > _NESTED:
        raise IntegrityError(f"{where}: its codecs are not a list, or are nested too deeply")
    if len(codecs) > _MOST:
        raise IntegrityError(f"{where}: {len(codecs)} codecs one after another are too many")
    out: list[Codec] = []
    stage = 0  # 0: arrays, 1: bytes
    for given in codecs:
        name, config = _named(where, given)
        if name == "transpose" and stage == 0:
            out.append({"name": name, "configuration": {"order": _order(where, config, len(shape))}})
            shape = tuple(shape[i] for i in out[-1]["configuration"]["order"])
        elif name == "bytes" and stage == 0:
            out.append({"name": name, "configuration": {"endian": _endian(where, config, itemsize)}})
            stage = 1
        elif name == "sharding_indexed" and stage == 0:
            out.append({"name": name, "configuration": _shards(where, config, shape, itemsize, depth)})
            stage = 1
        elif name in PACKING and stage == 1:
            out.append({"name": name, "configuration": PACKING[name]} if PACKING[name] else {"name": name})
        elif name in (*PACKING, "transpose", "bytes", "sharding_indexed"):
            raise IntegrityError(f"{where}: its codec {name!r} does not stand where it may")
        else:
            raise Refused(
                f"{where}: chunks encoded with {name!r} are not read",
                hint=f"those are: {', '.join(['bytes', 'transpose', 'sharding_indexed', *PACKING])}; write the array "
                "anew with one of them",
            )
    if stage == 0:
        raise IntegrityError(f"{where}: its codecs make no bytes of an array")
    return tuple(out)


def _named(where: str, codec: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(codec, str):
        return codec, {}
    if isinstance(codec, dict) and isinstance(name := codec.get("name"), str):
        config = codec.get("configuration", {})
        if isinstance(config, dict):
            return name, config
    raise IntegrityError(f"{where}: {str(codec)[:80]!r} is no codec")


def _order(where: str, config: dict[str, Any], ndim: int) -> list[int]:
    order = config.get("order")
    if order in ("C", "F"):
        return list(range(ndim))[:: 1 if order == "C" else -1]
    if not isinstance(order, list) or any(type(i) is not int for i in order) or sorted(order) != list(range(ndim)):
        raise IntegrityError(f"{where}: the order {str(order)[:80]} of its codec 'transpose' is not one of {ndim} axes")
    return cast("list[int]", order)


def _endian(where: str, config: dict[str, Any], itemsize: int) -> str:
    endian = config.get("endian", "little" if itemsize == 1 else None)
    if endian is None:
        raise Refused(
            f"{where}: its codec 'bytes' does not say which byte comes first",
            hint="give it `endian` in the array's zarr.json, as whoever wrote it knows",
        )
    if endian not in ("little", "big"):
        raise IntegrityError(f"{where}: its codec 'bytes' has the unknown endian {str(endian)[:80]!r}")
    return str(endian)


def _shards(where: str, config: dict[str, Any], shape: tuple[int, ...], itemsize: int, depth: int) -> dict[str, Any]:
    inner = config.get("chunk_shape")
    if (
        not isinstance(inner, list)
        or len(inner) != len(shape)
        or any(type(c) is not int or c < 1 or n % c for c, n in zip(inner, shape, strict=True))
    ):
        raise IntegrityError(f"{where}: shards of {list(shape)} cannot be cut into chunks of {str(inner)[:80]}")
    location = config.get("index_location", "end")
    if location not in ("start", "end"):
        raise IntegrityError(f"{where}: its shards have an index at {str(location)[:80]!r}")
    return {
        "chunk_shape": inner,
        "codecs": list(check_chain(where, config.get("codecs"), tuple(inner), itemsize, depth + 1)),
        "index_codecs": list(check_chain(where, config.get("index_codecs"), (*(1 for _ in inner), 2), 8, _NESTED)),
        "index_location": location,
    }


def raw_layout(codecs: tuple[Codec, ...], ndim: int, itemsize: int) -> Raw | None:
    """How a chunk lies that is stored as it is; None where it must be decoded."""
    order = tuple(range(ndim))
    names = [c["name"] for c in codecs]
    first = names.index("bytes") if "bytes" in names else -1
    if first < 0 or names[first + 1 :] not in ([], ["crc32c"]):
        return None
    if itemsize > 1 and codecs[first]["configuration"]["endian"] != "little":
        return None
    for codec in codecs[:first]:
        order = tuple(order[i] for i in codec["configuration"]["order"])
    return Raw(order, checked=len(names) > first + 1)


def has_crc32c(codecs: tuple[Codec, ...]) -> bool:
    """Whether a CRC-32C is over all that a chunk holds; those inside a shard that is decoded as one do not count."""
    return any(codec["name"] == "crc32c" for codec in codecs)


def sharding_of(codecs: tuple[Codec, ...]) -> Sharding | None:
    """How a stored value holds many chunks; None where it is one chunk, or must be decoded as one."""
    if [c["name"] for c in codecs] != ["sharding_indexed"]:
        return None
    config = codecs[0]["configuration"]
    index = config["index_codecs"]
    if [c["name"] for c in index] not in (["bytes"], ["bytes", "crc32c"]):
        return None
    return Sharding(
        tuple(config["chunk_shape"]),
        tuple(config["codecs"]),
        index[0]["configuration"]["endian"],
        len(index) > 1,
        config["index_location"] == "start",
    )
