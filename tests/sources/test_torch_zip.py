from __future__ import annotations

import struct
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.sources.torch_files import dictionary, giant, integer, save, storage, tensor
from ucformat.errors import IntegrityError, MissingData, UnsupportedError
from ucformat.sources.pickle.file import TorchFile, TorchZip
from ucformat.storage.local import LocalStore
from ucformat.testing.reading import Counting

if TYPE_CHECKING:
    from pathlib import Path

DATA = struct.pack("<4f", 1, 2, 3, 4)


def opened(path: Path) -> TorchFile:
    return TorchFile(LocalStore(path.parent), path.name)


def test_a_tensor_is_found_where_it_lies(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", dictionary(a=tensor(), t=tensor((2, 2), (1, 2))), {"0": DATA})
    file = opened(path)
    extent, turned = next(file.whole(file.value["a"])), next(file.whole(file.value["t"]))
    assert path.read_bytes()[extent.offset : extent.offset + 16] == DATA
    assert (extent.strides, turned.strides) == ((8, 4), (4, 8))
    assert file.read(file.value["t"]) == struct.pack("<4f", 1, 3, 2, 4)
    assert file.read(file.value["a"]) == DATA


def test_a_file_of_100_gigabytes_opens_with_kilobytes(tmp_path: Path) -> None:
    numel = 25 << 30
    path = giant(tmp_path / "x.pt", tensor((numel,), (1,), 0, storage(numel=numel)), 4 * numel)
    store = Counting(LocalStore(tmp_path))
    file = TorchFile(store, path.name)
    extent = next(file.whole(file.value))
    assert path.stat().st_size > 100_000_000_000
    assert extent.box.size == numel
    assert store.bytes["x.pt"] < 128 << 10
    assert store.requests["x.pt"] <= 3


@pytest.mark.parametrize("cut", [1, 10, 22, 100, 400])
def test_a_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    path = save(tmp_path / "cut.pt", tensor(), {"0": DATA})
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(IntegrityError, match=r"cut\.pt"):
        opened(path)


@pytest.mark.parametrize(
    "content", [b"", b"PK", b"not a file of torch at all", b"PK\3\4" + bytes(100)]
)
def test_other_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "no.pt").write_bytes(content)
    with pytest.raises(IntegrityError, match=r"no\.pt"):
        opened(tmp_path / "no.pt")


def test_the_formats_of_before_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.")
    with tarfile.open(tmp_path / "older.pt", "w") as archive:
        archive.add(tmp_path / "old.pt", "old.pt")
    for name in ("old.pt", "older.pt"):
        with pytest.raises(UnsupportedError, match=rf"{name}(.|\n)*save it again"):
            opened(tmp_path / name)


def test_torchscript_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="TorchScript"):
        opened(save(tmp_path / "x.pt", integer(1), extra={"constants.pkl": b""}))


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="compressed"):
        opened(save(tmp_path / "x.pt", tensor(), {"0": DATA}, compression=zipfile.ZIP_DEFLATED))


def test_encrypted_members_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", tensor(), {"0": DATA})
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\1\2") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(UnsupportedError, match="encrypted"):
        opened(path)


def test_big_endian_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02N.")
        archive.writestr("a/byteorder", b"big")
    with pytest.raises(UnsupportedError, match="big-endian"):
        opened(path)


def test_sizes_past_the_end_are_caught(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", tensor((500,), (1,), 0, storage(numel=500)), {"0": bytes(2000)})
    data = bytearray(path.read_bytes())
    at = data.rindex(b"archive/data/0") - 46
    data[at + 20 : at + 28] = struct.pack("<II", 1 << 30, 1 << 30)
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"data/0 in x\.pt would reach past the end"):
        opened(path)


def test_a_local_header_that_is_not_there(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", tensor(), {"0": DATA})
    data = bytearray(path.read_bytes())
    data[data.rindex(b"archive/data/0", 0, data.rindex(DATA)) - 30] = 0
    path.write_bytes(data)
    file = opened(path)
    with pytest.raises(IntegrityError, match="no header"):
        list(file.whole(file.value))


def test_a_damaged_pickle_is_caught(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", dictionary(name=integer(5)))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"name", b"game", 1))
    with pytest.raises(IntegrityError, match="CRC"):
        opened(path)


def test_a_storage_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"x\.pt(.|\n)*'0'"):
        opened(save(tmp_path / "x.pt", tensor()))


def test_a_storage_twice(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02N.")
        archive.writestr("a/data/0", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a/data/0", b"2")
    with pytest.raises(IntegrityError, match="twice"):
        opened(path)


def test_a_pickle_too_large_is_refused_unread(tmp_path: Path) -> None:
    giant(tmp_path / "x.pt", integer(1), 300 << 20, names=("other", "data.pkl"))
    store = Counting(LocalStore(tmp_path))
    with pytest.raises(UnsupportedError, match=r"data\.pkl in x\.pt has 314,572,800 bytes"):
        TorchZip(store, "x.pt")
    assert store.bytes["x.pt"] < 128 << 10
