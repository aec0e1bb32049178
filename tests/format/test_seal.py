"""Checksums and digests of the chunks of a band, by the compiled function and by that in Python."""

from __future__ import annotations

import random
from unittest import mock

import pytest
from crc32c import crc32c
from xxhash import xxh3_128_digest

from ucformat.format import shard

RNG = random.Random(41)
#: Bytes of a chunk: those that are digested in other ways, and stripes of 64 and blocks of 1,024 that
#: are whole, or one byte more or less.
SIZES = [
    *(1, 4, 240, 241, 256, 1023, 1024, 1025),
    *(64 * n + d for n in (5, 16, 17, 33) for d in (-1, 0, 1)),
    *(65_536, 88_064, 100_003),
]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("nbytes", SIZES)
def test_the_checksum_of_each_chunk_is_put_behind_it_and_its_digest_returned(
    nbytes: int, *, native: bool
) -> None:
    if native and not shard.NATIVE:
        pytest.skip("ucformat._native was not built")
    chunks = [RNG.randbytes(nbytes) for _ in range(3)]
    band = bytearray(b"".join(chunk + b"room" for chunk in chunks))
    with mock.patch.object(shard, "NATIVE", native):
        digests = shard.seal(memoryview(band), nbytes + 4)
    assert digests == b"".join(map(xxh3_128_digest, chunks))
    assert band == b"".join(c + crc32c(c).to_bytes(4, "little") for c in chunks)


@pytest.mark.skipif(not shard.NATIVE, reason="ucformat._native was not built")
@pytest.mark.parametrize(("nbytes", "pitch"), [(1000, 300), (488, 244), (600, 0), (600, -300)])
def test_what_are_no_such_chunks_is_refused(nbytes: int, pitch: int) -> None:
    from ucformat._native import seal

    with pytest.raises(ValueError, match="no chunks of more than 240"):
        seal(bytearray(nbytes), pitch)
    with pytest.raises(BufferError):
        seal(bytes(600), 300)
