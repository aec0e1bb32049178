"""Small files that claim much: elements, shards, chunks and indexes that nothing stored justifies."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.fakes import manifest_file
from tests.fuzz.fuzzing import bounded
from tests.fuzz.test_zarr_documents import BYTES, SHARDS, array
from tests.sources.torch_files import dictionary, save, storage, tensor
from tests.tables import with_entries
from ucformat.errors import IntegrityError, MissingData, NotFound, UnsafeError, UnsupportedError
from ucformat.geometry.box import each_index

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ucformat.jobs.run import Report

CONSTANT = 96 << 20  # bytes that a command may take besides: buffers, and the stacks of its threads
ATTEMPT = "0" * 20


def convert(place: Path) -> None:
    ucformat.convert(place, place.parent / "new", workers=1)


def read(place: Path) -> None:
    for t in ucformat.open(place).values():
        t.read()


def plan(place: Path) -> None:
    for t in ucformat.open(place).values():
        t.plan()


COMMANDS = pytest.mark.parametrize("command", [convert, read, plan])


def refused(command: Callable[[Path], None], place: Path, match: str) -> None:
    """The command ends with an error, having done little, and nothing is committed."""
    errors = (IntegrityError, UnsafeError, UnsupportedError)
    with (
        bounded(10_000, constant=CONSTANT, seconds=20),
        pytest.raises(errors, match=match) as error,
    ):
        command(place)
    assert len(str(error.value)) < 1000
    with pytest.raises(NotFound):
        ucformat.open(place.parent / "new")


def verified(place: Path) -> Report:
    with bounded(10_000, constant=CONSTANT, seconds=20):
        return ucformat.verify(place, workers=1)


# grids of foreign arrays


def zarr_of(folder: Path, document: dict[str, Any]) -> Path:
    place = folder / "zarr"
    (place / "a").mkdir(parents=True)
    (place / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    (place / "a/zarr.json").write_text(json.dumps(document))
    return place


@pytest.mark.parametrize(
    ("shape", "chunk"),
    [([1 << 59], [1]), ([1 << 59], [1 << 59]), ([2] * 32, [1] * 32), ([1 << 48], [1 << 20])],
)
@COMMANDS
def test_an_array_of_which_nothing_is_stored(
    tmp_path: Path, shape: list[int], chunk: list[int], command: Callable[[Path], None]
) -> None:
    place = zarr_of(tmp_path, array(shape, chunk, [BYTES]))
    refused(command, place, "is not stored|cut into [0-9,]+ shards")
    assert len(verified(place).problems) == 1


@COMMANDS
def test_a_shard_of_very_many_chunks(tmp_path: Path, command: Callable[[Path], None]) -> None:
    shards = {**SHARDS, "configuration": {**SHARDS["configuration"], "chunk_shape": [1]}}  # type: ignore[dict-item]
    place = zarr_of(tmp_path, array([1 << 30], [1 << 30], [shards]))
    (place / "a/c").mkdir()
    with (place / "a/c/0").open("wb") as file:
        file.write(b"x" * 1000)
        if command is convert:  # else it is too short for its index
            file.truncate(20 << 30)
    refused(command, place, "an index of 17,179,869,188 bytes|too short for the index")


# grids of our own arrays


def arrays_of(
    folder: Path, *tensors: tuple[list[int], list[int], list[int]], dtype: str = "float32"
) -> Path:
    """A universal checkpoint of arrays of these shapes, chunks and shards, of which nothing is stored."""
    place = folder / "universal"
    place.mkdir()
    documents = [
        {
            "name": f"w{number}",
            "state": "weight",
            "dtype": dtype,
            "shape": shape,
            "chunk": chunk,
            "shard": shard,
            "path": f"data/{ATTEMPT}/weight/w{number}",
            "digest": f"xxh3:{'0' * 32}",
        }
        for number, (shape, chunk, shard) in enumerate(tensors)
    ]
    manifest = {"format": "ucformat", "version": 1, "id": "0" * 32, "attempt": ATTEMPT}
    manifest["created"] = "2026-01-01T00:00:00Z"
    (place / "manifest.json").write_bytes(manifest_file(with_entries(manifest, documents)))
    return place


def copy(place: Path) -> None:
    ucformat.copy(place, place.parent / "new")


@pytest.mark.parametrize("command", [convert, read, plan, copy])
def test_arrays_of_very_many_shards(tmp_path: Path, command: Callable[[Path], None]) -> None:
    place = arrays_of(tmp_path, *[([10_000_000], [1], [1])] * 20)
    for shard in (0, 9_999_999):
        file = place / f"data/{ATTEMPT}/weight/w0/c/{shard}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 28)
    refused(command, place, "9,999,998 of (its|the) 10,000,000 shards")
    lost = [str(p) for p in verified(place).problems if "of its" in str(p)]
    assert len(lost) == 20
    assert lost[0].startswith("w0 (weight): 9,999,998 of its 10,000,000 shards are missing")


@pytest.mark.parametrize(
    ("chunk", "shard"),
    [([1 << 50], [1 << 50]), ([1], [1 << 50]), ([1 << 18], [1 << 45]), ([1 << 40], [1 << 40])],
)
@pytest.mark.parametrize("command", [convert, read, plan, copy])
def test_an_array_of_very_many_bytes(
    tmp_path: Path, chunk: list[int], shard: list[int], command: Callable[[Path], None]
) -> None:
    place = arrays_of(tmp_path, ([1 << 50], chunk, shard))
    refused(command, place, "not exist|is missing|cut into 33,554,432 shards")
    assert not verified(place)


@pytest.mark.parametrize("shape", [[1 << 62, 0], [0, 1 << 62], [1 << 30, 1 << 30, 0]])
def test_an_array_without_elements_and_with_long_edges(tmp_path: Path, shape: list[int]) -> None:
    ones = [1] * len(shape)
    place = arrays_of(tmp_path, (shape, ones, ones))
    with bounded(10_000, constant=CONSTANT, seconds=20):
        convert(place)
        assert ucformat.verify(tmp_path / "new")


def test_a_grid_is_walked_without_lists_of_its_edges() -> None:
    with bounded(0, constant=1 << 20):
        assert list(islice(each_index([range(1 << 60), range(3, 1 << 60)]), 2)) == [(0, 3), (0, 4)]
    assert list(each_index([range(2), range(1, 3)])) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert list(each_index([])) == [()]
    assert list(each_index([range(1 << 60), range(0)])) == []


# views of storages


def torch_of(folder: Path, values: dict[str, bytes], numel: int = 1 << 14) -> Path:
    place = folder / "torch"
    place.mkdir()
    save(place / "model.pt", dictionary(**values), {"0": bytes(4 * numel)})
    return place


@COMMANDS
@pytest.mark.parametrize(
    ("shape", "strides"), [((1 << 50,), (0,)), ((2,) * 60, (0,) * 60), ((1 << 14,) * 2, (1, 0))]
)
def test_a_tensor_that_repeats_its_elements(
    tmp_path: Path,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    command: Callable[[Path], None],
) -> None:
    place = torch_of(tmp_path, {"w": tensor(shape, strides, 0, storage("0", 1 << 14))})
    refused(command, place, "expands a storage of 16384 elements")


@COMMANDS
def test_tensors_that_repeat_elements(tmp_path: Path, command: Callable[[Path], None]) -> None:
    each = {f"w{i}": tensor(((1 << 26) - i,), (0,), 0, storage("0", 1 << 14)) for i in range(8)}
    refused(command, torch_of(tmp_path, each), "far larger than the file")


@COMMANDS
def test_tensors_that_share_a_storage(tmp_path: Path, command: Callable[[Path], None]) -> None:
    each = {f"w{i}": tensor(((1 << 18) - i,), (1,), 0, storage("0", 1 << 18)) for i in range(1500)}
    refused(command, torch_of(tmp_path, each, 1 << 18), "far larger than the file")


def test_tensors_that_share_a_storage_as_much_as_models_do(tmp_path: Path) -> None:
    each = {f"w{i}": tensor(((1 << 14) - i,), (1,), 0, storage("0", 1 << 14)) for i in range(60)}
    read(torch_of(tmp_path, each))


def test_tensors_of_very_many_dims(tmp_path: Path) -> None:
    place = torch_of(tmp_path, {"w": tensor((1,) * 62 + (4,), (1,) * 63, 0, storage("0", 1 << 14))})
    with pytest.raises(UnsupportedError, match="63 dims; an array has at most 32"):
        convert(place)
    read(place)


def test_missing_data_is_said_of_what_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="does not exist"):
        read(arrays_of(tmp_path, ([4], [2], [2])))
