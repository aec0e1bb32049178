from __future__ import annotations

import io
import struct
import zipfile
from typing import TYPE_CHECKING
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucformat.errors import UnsupportedError
from ucformat.exporters.base import Sealed, Span
from ucformat.exporters.zip_file import ZipArchive

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ucformat.exporters.base import Part


def span(nbytes: int) -> Span:
    return Span("uint8", nbytes, ())


def joined(parts: Sequence[Part], spans: Sequence[bytes]) -> bytes:
    """What an executor would write, with this content of the spans."""
    out, left = bytearray(), iter(spans)
    crcs: list[int] = []
    for part in parts:
        if isinstance(part, bytes):
            out += part
        elif isinstance(part, Sealed):
            made = part.make(crcs)
            assert len(made) == part.nbytes
            out += made
        else:
            data = next(left)
            assert len(data) == part.nbytes
            crcs.append(crc32(data))
            out += data
    return bytes(out)


names = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40), unique=True
)
contents = st.lists(st.tuples(st.booleans(), st.binary(max_size=200)), max_size=4)


@given(
    names.flatmap(
        lambda n: st.tuples(st.just(n), st.lists(contents, min_size=len(n), max_size=len(n)))
    )
)
def test_every_archive_is_read_by_the_standard_library(
    made: tuple[list[str], list[list[tuple[bool, bytes]]]],
) -> None:
    archive, spans = ZipArchive(), []
    for name, parts in zip(*made, strict=True):
        archive.add(name, *(span(len(data)) if is_span else data for is_span, data in parts))
        spans += [data for is_span, data in parts if is_span]
    data = joined(archive.end(), spans)
    with zipfile.ZipFile(io.BytesIO(data)) as found:
        assert found.testzip() is None
        for name, parts in zip(*made, strict=True):
            assert found.read(name) == b"".join(content for _, content in parts)
        for info in found.infolist():
            start = info.header_offset
            lengths = struct.unpack_from("<2H", data, start + 26)
            assert (start + 30 + sum(lengths)) % 64 == 0


def test_numbers_of_members_beyond_16_bits() -> None:
    archive = ZipArchive()
    for number in range(65_537):
        archive.add(str(number), b"")
    with zipfile.ZipFile(io.BytesIO(joined(archive.end(), ()))) as found:
        assert len(found.namelist()) == 65_537
        assert found.read("65536") == b""


@pytest.mark.parametrize("nbytes", [0xFFFFFFFE, 0xFFFFFFFF, 5 << 30])
def test_sizes_and_offsets_beyond_32_bits(nbytes: int, tmp_path: Path) -> None:
    """The spans are holes of a sparse file, and their checksums made up: the directory is what is tested."""
    archive = ZipArchive()
    archive.add("small", b"before")
    archive.add("large", b"head", span(nbytes - 4))
    archive.add("after", b"behind it")
    archive.add("last", span(3))
    crcs: list[int] = []
    with (tmp_path / "sparse.zip").open("wb") as file:
        for part in archive.end():
            if isinstance(part, Span):
                file.seek(part.nbytes, 1)
                crcs.append(crc32(bytes(part.nbytes)) if part.nbytes < 100 else 7)
            else:
                file.write(part if isinstance(part, bytes) else part.make(crcs))
    with zipfile.ZipFile(tmp_path / "sparse.zip") as found:
        assert [i.file_size for i in found.infolist()] == [6, nbytes, 9, 3]
        assert found.read("after") == b"behind it"
        assert found.read("last") == bytes(3)
        with found.open("large") as member:
            assert member.read(6) == b"head\0\0"
        large = found.getinfo("large")
    form = "<4sI2Q" if nbytes >= 0xFFFFFFFF else "<4s3I"  # of the data descriptor
    with (tmp_path / "sparse.zip").open("rb") as file:
        file.seek(large.header_offset + 26)
        lengths = struct.unpack("<2H", file.read(4))
        file.seek(large.header_offset + 30 + sum(lengths) + nbytes)
        assert struct.unpack(form, file.read(struct.calcsize(form))) == (
            b"PK\7\10",
            large.CRC,
            nbytes,
            nbytes,
        )


def test_a_name_that_is_too_long_is_refused() -> None:
    ZipArchive().add("x" * 65_535, b"")
    with pytest.raises(UnsupportedError, match="65,536 bytes"):
        ZipArchive().add("x" * 65_536, b"")
