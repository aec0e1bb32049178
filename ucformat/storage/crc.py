"""CRCs combined from those of parts, which may be computed in any order.

The CRC of two concatenated runs of bytes is the CRC of the first, shifted by the length of the second, xor the CRC of
the second: a CRC is linear, and the inversions at its ends cancel out.
"""

from __future__ import annotations

import threading

_Tables = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class CrcShift:
    """Shifts CRCs of a polynomial, which is given with its lowest coefficient as the highest bit."""

    def __init__(self, polynomial: int) -> None:
        self._polynomial = polynomial
        self._lock = threading.Lock()
        self._doubled: list[_Tables] = []  # for 1, 2, 4, … bytes, computed when first needed

    def __call__(self, crc: int, nbytes: int) -> int:
        """The contribution of a CRC to that of its bytes followed by `nbytes` others."""
        power = 0
        while nbytes:
            if nbytes & 1:
                if power >= len(self._doubled):
                    with self._lock:
                        self._make(power)
                a, b, c, d = self._doubled[power]
                crc = a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24]
            nbytes >>= 1
            power += 1
        return crc

    def _make(self, power: int) -> None:
        """Compute the tables for 1, 2, 4, … `2 ** power` bytes."""
        while len(self._doubled) <= power:
            if self._doubled:
                half = self._doubled[-1]
                rows = [self._apply(half, self._apply(half, 1 << bit)) for bit in range(32)]
            else:
                rows = [self._over_byte(1 << bit) for bit in range(32)]
            tables = tuple(tuple(_xor(rows[8 * k : 8 * k + 8], value) for value in range(256)) for k in range(4))
            self._doubled.append((tables[0], tables[1], tables[2], tables[3]))

    def _over_byte(self, crc: int) -> int:
        for _ in range(8):
            crc = crc >> 1 ^ (self._polynomial if crc & 1 else 0)
        return crc

    @staticmethod
    def _apply(tables: _Tables, crc: int) -> int:
        return tables[0][crc & 255] ^ tables[1][crc >> 8 & 255] ^ tables[2][crc >> 16 & 255] ^ tables[3][crc >> 24]


def _xor(rows: list[int], chosen: int) -> int:
    out = 0
    for bit, row in enumerate(rows):
        if chosen >> bit & 1:
            out ^= row
    return out


CRC32_SHIFT = CrcShift(0xEDB88320)
CRC32C_SHIFT = CrcShift(0x82F63B78)
