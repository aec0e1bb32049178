"""Plain HTTP: universal checkpoints and single files open; what would have to be listed or written is refused."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.s3_files import BUCKET, serving_files
from tests.sources.suite import DATA
from ucformat.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("http")


@pytest.fixture(scope="module")
def base(folder: Path) -> Iterator[str]:
    ucformat.convert(DATA / "dcp" / "fsdp2-uneven" / "ckpt", folder / "universal")
    shutil.copytree(DATA / "huggingface" / "trainer" / "ckpt", folder / "trainer")
    with serving_files(folder) as served:
        yield f"{served.endpoint}/{BUCKET}"


def test_a_universal_checkpoint_is_read_and_verified(base: str, folder: Path) -> None:
    ck, local = ucformat.open(f"{base}/universal"), ucformat.open(folder / "universal")
    assert ck.names() == local.names()
    assert ck["head.weight"][1:3].tobytes() == local["head.weight"][1:3].tobytes()
    assert ucformat.verify(ck)


def test_a_single_file_opens_by_its_name(base: str, folder: Path) -> None:
    ck, local = (
        ucformat.open(f"{base}/trainer/model.safetensors"),
        ucformat.open(folder / "trainer/model.safetensors"),
    )
    assert {n: ck[n][...].tobytes() for n in ck} == {n: local[n][...].tobytes() for n in local}


def test_nothing_is_written(base: str, folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="can be read, but not written to"):
        ucformat.convert(folder / "universal", f"{base}/new")
