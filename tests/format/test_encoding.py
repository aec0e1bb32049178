"""Tiles in every encoding: what is decoded is what was encoded, and what is no such tile is refused."""

from __future__ import annotations

import struct
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numcodecs import blosc  # type: ignore[import-untyped]

from ucformat.errors import IntegrityError, UnsupportedError, UpgradeNeeded, UsageError
from ucformat.format import encoding
from ucformat.format.encoding import (
    Encoding,
    apply_overwrite,
    apply_xor,
    compress,
    decode_tile,
    decompress,
    encode_tile,
    overwrite_patch,
    xor_patch,
)

ITEMSIZES = (1, 2, 4, 8, 16)
RAW, BLOSC, XOR, OVERWRITE, SAME = list(Encoding)[:5]


def weights(count: int, seed: int = 0) -> np.ndarray:
    """The bits of bfloat16 weights of a common size."""
    normal = np.random.default_rng(seed).standard_normal(count, np.float32) * np.float32(0.02)
    return (normal.view(np.uint32) >> 16).astype(np.uint16)


def decoded(kind: int, payload: bytes, nbytes: int, itemsize: int, base: bytes | None) -> bytes:
    out = bytearray(b"\xa5" * nbytes)
    decode_tile(kind, payload, memoryview(out), itemsize, base=base)
    return bytes(out)


@st.composite
def tiles(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """A tile and its base, of which some elements differ, and the size of elements."""
    itemsize = draw(st.sampled_from((*ITEMSIZES, 3)))
    nbytes = draw(st.integers(0, 40)) * itemsize * draw(st.sampled_from((1, 1, 300)))
    nbytes += draw(st.sampled_from((0, 0, 1, itemsize - 1)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.integers(0, draw(st.sampled_from((1, 3, 256))), nbytes, np.uint8)
    new, bits = base.copy(), rng.integers(0, 256, nbytes, np.uint8)
    whole = nbytes // itemsize
    for _ in range(draw(st.integers(0, 4))):
        begin, step = draw(st.integers(0, whole)), draw(st.sampled_from((1, 1, 2, 37)))
        end = begin + draw(st.integers(0, whole))
        for k in range(begin * itemsize, min(end, whole) * itemsize, step * itemsize):
            new[k : k + itemsize] ^= bits[k : k + itemsize]
    return new.tobytes(), base.tobytes(), itemsize


@given(tiles())
def test_what_is_decoded_is_what_was_encoded(tile: tuple[bytes, bytes, int]) -> None:
    new, base, itemsize = tile
    for against in (None, base):
        kind, payload = encode_tile(new, itemsize, against)
        assert decoded(kind, bytes(payload), len(new), itemsize, against) == new
        assert len(payload) <= len(new)
        assert against is not None or kind in {RAW, BLOSC}
    assert (kind is SAME) is (new == base)


@given(tiles())
@example((b"", b"", 1))
def test_each_encoding_by_itself(tile: tuple[bytes, bytes, int]) -> None:
    new, base, itemsize = tile
    out = bytearray(len(new))
    decompress(compress(new, itemsize), memoryview(out), itemsize)
    assert out == new
    patch, out = xor_patch(new, base, itemsize), bytearray(base)
    for expected in (new, base):
        apply_xor(patch, memoryview(out), itemsize)
        assert out == expected
    if itemsize not in ITEMSIZES or len(new) % itemsize:
        return
    changed = np.frombuffer(new, f"V{itemsize}") != np.frombuffer(base, f"V{itemsize}")
    overwrite, out = overwrite_patch(new, itemsize, changed), bytearray(base)
    if overwrite is not None:
        for _ in range(2):
            apply_overwrite(overwrite, memoryview(out), itemsize)
            assert out == new
    else:  # it would be longer than the tile
        assert 8 * max(1, changed.sum()) + itemsize * changed.sum() > len(new)


@pytest.mark.parametrize("itemsize", ITEMSIZES)
def test_more_runs_than_are_placed_at_once(itemsize: int) -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(0, 256, (1 << 20, itemsize), np.uint8)
    changed = rng.random(1 << 20) < 0.04
    for begin in rng.integers(0, 1 << 20, 40):
        changed[begin : begin + rng.integers(0, 2000)] = True
    new = base.copy()
    new[changed] ^= rng.integers(1, 256, (int(changed.sum()), itemsize), np.uint8)
    patch = overwrite_patch(new.tobytes(), itemsize, changed)
    assert patch is not None
    out = bytearray(base.tobytes())
    apply_overwrite(patch, memoryview(out), itemsize)
    assert out == new.tobytes()


def test_runs_about_as_long_as_those_that_are_copied_by_themselves() -> None:
    base, changed = bytes(8192), np.zeros(4096, np.bool_)
    for begin, count in ((0, 255), (300, 256), (600, 257), (4000, 96)):
        changed[begin : begin + count] = True
    new = (changed * np.uint16(0xABCD)).tobytes()
    patch, out = overwrite_patch(new, 2, changed), bytearray(base)
    assert patch is not None
    apply_overwrite(patch, memoryview(out), 2)
    assert out == new


@pytest.mark.parametrize("itemsize", [*ITEMSIZES, 3])
def test_a_change_of_any_byte_is_seen(itemsize: int) -> None:
    base = np.random.default_rng(6).bytes(100 * itemsize)
    for k in range(itemsize):
        new = bytearray(base)
        new[50 * itemsize + k] ^= 1
        kind, payload = encode_tile(new, itemsize, base)
        assert kind is not SAME
        assert decoded(kind, bytes(payload), len(new), itemsize, base) == new


def test_the_shortest_is_chosen() -> None:
    noise = np.random.default_rng(2).bytes(1 << 16)
    base = weights(1 << 15)
    near, rows, far = base.copy(), base.copy(), weights(1 << 15, 3)
    near[::40] ^= 1
    rows[1024:1536] = far[:512]
    for new, against, kind in (
        (noise, None, RAW),
        (noise, near.tobytes(), RAW),
        (near.tobytes(), None, BLOSC),
        (bytes(1 << 16), near.tobytes(), BLOSC),
        (far.tobytes(), near.tobytes(), BLOSC),
        (near.tobytes(), base.tobytes(), XOR),
        (rows.tobytes(), base.tobytes(), OVERWRITE),
        (base.tobytes(), base.tobytes(), SAME),
        (b"", None, RAW),
        (b"", b"", SAME),
    ):
        assert encode_tile(new, 2, against)[0] is kind


def test_rows_that_a_trainer_says_have_changed() -> None:
    """No base is needed, and the patch has few bytes besides those of the rows."""
    table = weights(10_000 * 64).reshape(10_000, 64)
    new, changed = table.copy(), np.zeros(10_000, np.bool_)
    changed[np.random.default_rng(4).choice(10_000, 100, replace=False)] = True
    new[changed] = np.random.default_rng(5).integers(0, 1 << 16, (100, 64), np.uint16)
    patch = overwrite_patch(new.tobytes(), 2, changed)
    assert patch is not None
    assert len(patch) < 1.05 * new[changed].nbytes
    out = bytearray(table.tobytes())
    apply_overwrite(patch, memoryview(out), 2)
    assert out == new.tobytes()
    with pytest.raises(UsageError, match="a mask of 7"):
        overwrite_patch(new.tobytes(), 2, changed[:7])


def test_threads_compress_and_decompress_side_by_side() -> None:
    parts = [weights(1 << 18, seed).tobytes() for seed in range(8)]

    def there_and_back(part: bytes) -> bool:
        out = bytearray(len(part))
        decompress(compress(part, 2), memoryview(out), 2)
        return out == part

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(there_and_back, parts * 4))


def test_it_is_one_block_of_planes() -> None:
    """Blosc's own choice of blocks takes a tenth more."""
    part = weights(1 << 19).tobytes()
    stored = compress(part, 2)
    assert struct.unpack_from("<I", stored, 8) == (len(part),)
    assert len(stored) < 0.70 * len(part)


def buffer(**fields: int) -> bytes:
    """A Blosc buffer of 256 bytes of u16, with fields of its header changed."""
    stored = compress(bytes(256), 2)
    names = ("version", "zstd", "flags", "typesize", "nbytes", "blocksize", "cbytes")
    found = dict(zip(names, struct.unpack_from("<BBBBIII", stored), strict=True))
    return struct.pack("<BBBBIII", *(found | fields).values()) + stored[16:]


CBYTES = len(buffer())
DAMAGED = {
    "nothing": b"",
    "a piece of a header": buffer()[:15],
    "no content": buffer(cbytes=16)[:16],
    "another version": buffer(version=3),
    "another zstd": buffer(zstd=2),
    "another compressor": buffer(flags=0x31),
    "shuffled by bits": buffer(flags=0x94),
    "not shuffled": buffer(flags=0x90),
    "split": buffer(flags=0x81),
    "copied, but not there": buffer(flags=0x93),
    "elements of another size": buffer(typesize=4),
    "more bytes than were expected": buffer(nbytes=1 << 31),
    "fewer bytes than were expected": buffer(nbytes=255),
    "a whole buffer of fewer bytes": compress(bytes(128), 2),
    "more bytes than are stored": buffer(cbytes=CBYTES + 1),
    "fewer bytes than are stored": buffer(cbytes=CBYTES - 1),
    "more bytes than it says": buffer() + b"x",
    "blocks of nothing": buffer(blocksize=0),
    "blocks beyond the end": buffer(blocksize=1 << 30),
    "another content": buffer()[:-1] + b"x",
}


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("kind", [BLOSC, XOR])
def test_what_is_no_blosc_buffer(kind: Encoding, what: str) -> None:
    out = bytearray(bytes(range(256)))
    with pytest.raises(IntegrityError, match=r"^shard 3 is damaged"):
        decode_tile(kind, DAMAGED[what], memoryview(out), 2, where="shard 3")
    assert kind is BLOSC or out == bytes(range(256))


def test_only_the_form_that_is_written_is_read() -> None:
    """Blosc itself decodes all but the first two."""
    part = weights(4096).tobytes()
    for what in ("another version", "another zstd"):
        with pytest.raises(IntegrityError, match="no Blosc buffer"):
            decompress(DAMAGED[what], memoryview(bytearray(256)), 2)
    for name, shuffle in ((b"lz4", 1), (b"zlib", 1), (b"zstd", 0), (b"zstd", 2)):
        stored = blosc.compress(part, name, 1, shuffle, len(part), 2)
        assert blosc.decompress(stored) == part
        with pytest.raises(IntegrityError, match="no Blosc buffer of shuffled bytes by zstd"):
            decompress(stored, memoryview(bytearray(len(part))), 2)


def patch_of(runs: int, count: int, columns: list[int], values: bytes) -> bytes:
    """A patch whose runs and values are not compressed."""
    column = struct.pack(f"<{len(columns)}I", *columns)
    return struct.pack("<III", runs, count, len(column)) + column + values


# of 100 elements of 2 bytes
BAD_PATCHES = {
    "nothing": b"",
    "a run without elements": patch_of(1, 0, [0, 0], b""),
    "elements in no run": patch_of(0, 2, [], bytes(4)),
    "a run beyond the end": patch_of(1, 2, [99, 1], bytes(4)),
    "a run far beyond the end": patch_of(1, 2, [2**32 - 1, 1], bytes(4)),
    "runs that lie beyond the end together": patch_of(2, 2, [49, 49, 0, 0], bytes(4)),
    "distances whose sum overflows": patch_of(2, 2, [2**32 - 1, 1, 0, 0], bytes(4)),
    "more elements than are counted": patch_of(1, 2, [0, 2], bytes(4)),
    "fewer elements than are counted": patch_of(1, 2, [0, 0], bytes(4)),
    "a sum that overflows": patch_of(2, 2, [0, 0, 2**32 - 1, 1], bytes(4)),
    "more than the tile has": patch_of(1, 2**32 - 1, [0, 2**32 - 2], b""),
    "more runs than the tile has": patch_of(2**32 - 1, 2**32 - 1, [], b""),
    "values that are missing": patch_of(1, 2, [0, 1], bytes(3)),
    "values too many": patch_of(1, 2, [0, 1], bytes(5)),
    "runs that are missing": patch_of(2, 2, [0, 1], bytes(4)),
    "runs beyond the payload": struct.pack("<III", 1, 2, 1 << 31) + bytes(12),
}


@pytest.mark.parametrize("what", BAD_PATCHES)
def test_what_is_no_patch_of_elements_changes_nothing(what: str) -> None:
    out = bytearray(range(200))
    with pytest.raises(IntegrityError, match=r"^shard 3 is damaged"):
        apply_overwrite(BAD_PATCHES[what], memoryview(out), 2, "shard 3")
    assert out == bytearray(range(200))


def test_a_patch_of_a_whole_number_of_elements() -> None:
    good = patch_of(2, 3, [1, 95, 0, 1], bytes(6))
    out = bytearray(range(200))
    apply_overwrite(good, memoryview(out), 2)
    assert [k for k in range(100) if out[2 * k : 2 * k + 2] == b"\0\0"] == [1, 98, 99]
    for nbytes, itemsize in ((199, 2), (200, 3)):
        with pytest.raises(IntegrityError, match="no patch of elements"):
            apply_overwrite(good, memoryview(bytearray(nbytes)), itemsize)


def test_a_tile_that_does_not_fit_what_is_said_of_it() -> None:
    out = memoryview(bytearray(64))
    for kind, payload, base, error, message in (
        (RAW, bytes(63), None, IntegrityError, "has 63 bytes, and 64 were expected"),
        (SAME, b"x", bytes(64), IntegrityError, "bytes of its own"),
        (SAME, b"", bytes(63), IntegrityError, "its base 63"),
        (7, b"", None, UpgradeNeeded, "the encoding 7"),
        (Encoding.ADAPTIVE, b"", None, UsageError, "with loss"),
    ):
        with pytest.raises(error, match=message):
            decode_tile(kind, payload, out, 2, base=base)
    with pytest.raises(UsageError, match="no base of 1"):
        encode_tile(bytes(64), 2, b"x")
    with pytest.raises(UsageError, match="no base of 1"):
        xor_patch(bytes(64), b"x", 2)


def test_more_than_blosc_can_compress_is_stored_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MAX_BLOSC", 1000)
    with pytest.raises(UnsupportedError, match="smaller chunks"):
        compress(bytes(1001), 1)
    assert encode_tile(bytes(1001), 1)[0] is RAW
    assert encode_tile(bytes(1001), 1, bytes(1000) + b"x")[0] is RAW
    assert encode_tile(bytes(1001), 1, bytes(1001))[0] is SAME


def test_without_numcodecs(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = compress(bytes(64), 2)
    encoding._blosc.cache_clear()
    monkeypatch.setitem(sys.modules, "numcodecs", None)
    try:
        for act in (
            lambda: compress(bytes(64), 2),
            lambda: decompress(stored, memoryview(bytearray(64)), 2),
        ):
            with pytest.raises(UnsupportedError, match=r"ucformat\[codecs\]"):
                act()
    finally:
        encoding._blosc.cache_clear()
