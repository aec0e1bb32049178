"""Files as torch.save writes them, made by hand: the pickle opcode by opcode, the zip member by member."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "call",
    "dictionary",
    "giant",
    "glob",
    "integer",
    "pickled",
    "save",
    "storage",
    "tensor",
    "text",
    "tuple_of",
]


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    data = value.to_bytes(16, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def glob(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def tuple_of(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def call(function: bytes, *args: bytes) -> bytes:
    return function + tuple_of(*args) + b"R"


def dictionary(**values: bytes) -> bytes:
    return b"}(" + b"".join(text(k) + v for k, v in values.items()) + b"u"


def storage(key: str = "0", numel: int = 4, kind: str = "FloatStorage") -> bytes:
    return (
        tuple_of(text("storage"), glob("torch", kind), text(key), text("cpu"), integer(numel))
        + b"Q"
    )


def tensor(
    shape: tuple[int, ...] = (2, 2),
    strides: tuple[int, ...] = (2, 1),
    offset: int = 0,
    of: bytes | None = None,
) -> bytes:
    sizes = [tuple_of(*map(integer, s)) for s in (shape, strides)]
    empty = call(glob("collections", "OrderedDict"))
    return call(
        glob("torch._utils", "_rebuild_tensor_v2"),
        of or storage(),
        integer(offset),
        *sizes,
        b"\x89",
        empty,
    )


def pickled(value: bytes) -> bytes:
    return b"\x80\x02" + value + b"."


def save(
    path: Path,
    value: bytes,
    storages: dict[str, bytes] | None = None,
    *,
    compression: int = zipfile.ZIP_STORED,
    extra: dict[str, bytes] | None = None,
) -> Path:
    """A file with this pickle and these storages; `extra` members stand beside them."""
    members = {"data.pkl": pickled(value), "byteorder": b"little", **(extra or {})}
    members |= {f"data/{key}": data for key, data in (storages or {}).items()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(f"archive/{name}", data)
    return path


def giant(
    path: Path, value: bytes, nbytes: int, names: tuple[str, str] = ("data.pkl", "data/0")
) -> Path:
    """A sparse file of a pickle and so many zero bytes, under these names; sizes and offsets in the zip64 form."""
    out = io.BytesIO()
    directory = b""
    members: list[tuple[str, bytes | None]] = [
        (f"archive/{names[0]}", pickled(value)),
        (f"archive/{names[1]}", None),
    ]
    members.append(("archive/version", b"3\n"))
    with path.open("wb") as file:
        for name, data in members:
            at, size, crc = (
                file.tell(),
                nbytes if data is None else len(data),
                zlib.crc32(data or b""),
            )
            file.write(
                struct.pack("<4s5HIIIHH", b"PK\3\4", 45, 0, 0, 0, 0, crc, 0, 0, len(name), 0)
                + name.encode()
            )
            if data is None:
                file.seek(nbytes, io.SEEK_CUR)
            else:
                file.write(data)
            wide = struct.pack("<HHQQQ", 1, 24, size, size, at)
            none = 0xFFFFFFFF
            entry = (45, 45, 0, 0, 0, 0, crc, none, none, len(name), len(wide), 0, 0, 0, 0, none)
            directory += struct.pack("<4s6HIIIHHHHHII", b"PK\1\2", *entry) + name.encode() + wide
        start, count = file.tell(), len(members)
        out.write(directory)
        out.write(
            struct.pack(
                "<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start
            )
            + struct.pack("<4sIQI", b"PK\6\7", 0, start + len(directory), 1)
            + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
        )
        file.write(out.getvalue())
    return path
