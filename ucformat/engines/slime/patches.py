"""How a change of a tensor is stored: compressed with zstd, as one of two encodings.

`xor` has the bytes of the new tensor XOR those of the old one. `overwrite` has the number of
changed bytes and the position of each, as little-endian 4-byte integers, and then their new
values.
"""

from __future__ import annotations

import re
import reprlib
import zlib
from typing import TYPE_CHECKING, Any

from ucformat.errors import ChecksumError, IntegrityError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

_INSTALL = "pip install 'ucformat[slime]'"
_MAGIC = b"\x28\xb5\x2f\xfd"  # of a zstd frame


def _xxh3(data: memoryview) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


def _blake3(data: memoryview) -> str:
    try:
        from blake3 import blake3
    except ImportError:
        raise UnsupportedError(
            "the tensors of these versions have BLAKE3 digests, and the package blake3 is not installed",
            hint=_INSTALL,
        ) from None
    return blake3(data).hexdigest()


def _adler32(data: memoryview) -> str:
    return f"{zlib.adler32(data):08x}"


#: By the name of the algorithm: the digits of a digest, and what computes it.
_DIGESTS: dict[str, tuple[int, Callable[[memoryview], str]]] = {
    "xxh3-128": (32, _xxh3),
    "blake3": (64, _blake3),
    "adler32": (8, _adler32),
}


def is_digest(text: object, checksum: str | None = None) -> bool:
    """Whether a text is a digest of an algorithm (None: of any)."""
    sizes = [n for name, (n, _) in _DIGESTS.items() if checksum in (None, name)]
    return isinstance(text, str) and any(re.fullmatch(f"[0-9a-f]{{{n}}}", text) for n in sizes)


def check_supported(metadata: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The encoding and the algorithm of the digests in the metadata of a delta's index.

    Raises:
        UnsupportedError: one of them, or the compression, is none that is known.
    """
    for member, choices in (
        ("delta_encoding", _ENCODINGS),
        ("compression_format", ("zstd",)),
        ("checksum_format", _DIGESTS),
    ):
        value = metadata.get(member)
        if not isinstance(value, str) or value not in choices:
            raise UnsupportedError(
                f"{where}: the {member} {reprlib.repr(value)} is not supported",
                hint=f"it can be {' or '.join(choices)}",
            )
    return metadata["delta_encoding"], metadata["checksum_format"]


def apply(
    encoding: str, data: NDArray[np.uint8], stored: bytes, checksum: str, digest: str, where: str
) -> None:
    """Change the bytes of a tensor in place, and compare the result with its digest."""
    _ENCODINGS[encoding](data, stored, where)
    if _DIGESTS[checksum][1](data.data) != digest:
        raise ChecksumError(
            f"{where}: the changed tensor does not match its {checksum} digest",
            hint="the change is damaged, or the version before it is not the one that it was made of",
        )


def _xor(data: NDArray[np.uint8], stored: bytes, where: str) -> None:
    import numpy as np  # not above: folders of any kind are recognised without it

    if (size := _decoded_size(stored, where)) != data.size:
        raise IntegrityError(
            f"{where}: its change has {size:,} bytes, and the tensor {data.size:,}"
        )
    np.bitwise_xor(data, _decompress(stored, size, where), out=data)


def _overwrite(data: NDArray[np.uint8], stored: bytes, where: str) -> None:
    import numpy as np  # not above: folders of any kind are recognised without it

    size = _decoded_size(stored, where)
    count, rest = divmod(size - 4, 5)
    if size < 4 or rest or count > data.size:
        raise IntegrityError(
            f"{where}: {size:,} bytes are no list of changes of a tensor of {data.size:,}"
        )
    plain = _decompress(stored, size, where)
    if int.from_bytes(plain[:4].tobytes(), "little") != count:
        raise IntegrityError(f"{where}: its list of changes does not have as many as it says")
    places = plain[4 : 4 + 4 * count].view("<u4")
    if count and (int(places[-1]) >= data.size or np.any(places[1:] <= places[:-1])):
        raise IntegrityError(
            f"{where}: the positions of its changes are not in order, or not in the tensor"
        )
    data[places] = plain[4 + 4 * count :]


_ENCODINGS: dict[str, Callable[[NDArray[np.uint8], bytes, str], None]] = {
    "xor": _xor,
    "overwrite": _overwrite,
}


def _decoded_size(stored: bytes, where: str) -> int:
    """The decoded size in the header of a zstd frame: nothing is decoded to more than it says."""
    descriptor = stored[4] if len(stored) > 4 else 0
    single = descriptor >> 5 & 1  # there is no byte for the size of the window
    nbytes = (single, 2, 4, 8)[descriptor >> 6]
    at = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    if not stored.startswith(_MAGIC) or len(stored) < at + nbytes:
        raise IntegrityError(f"{where}: its change is no zstd frame")
    if not nbytes:
        raise UnsupportedError(
            f"{where}: its zstd frame does not say how large it decodes",
            hint="write it with the size of its content, as the compressors of zstd do by default",
        )
    return int.from_bytes(stored[at : at + nbytes], "little") + (256 if nbytes == 2 else 0)


def _decompress(stored: bytes, size: int, where: str) -> NDArray[np.uint8]:
    import numpy as np  # not above: folders of any kind are recognised without it

    try:
        from numcodecs.zstd import decompress  # type: ignore[import-untyped]
    except ImportError:
        raise UnsupportedError(
            "the deltas of weight versions are compressed, and the package numcodecs is not installed",
            hint=_INSTALL,
        ) from None
    plain = np.empty(size, np.uint8)
    try:
        decompress(stored, plain)
    except (RuntimeError, ValueError) as error:
        raise IntegrityError(f"{where}: its change cannot be decompressed: {error}") from None
    return plain
