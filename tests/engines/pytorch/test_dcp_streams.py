"""Stream extensions of `torch.distributed.checkpoint`: what is written through them is read, and not run."""

from __future__ import annotations

import gzip
import io
import logging
import pickle
from typing import IO, TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.distributed.checkpoint_utils import Rot13Example

import ucformat
import ucformat.torch as ucf
from ucformat.engines.pytorch import dcp_streams
from ucformat.errors import Conflict, UnsupportedError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is", "ignore:Detected an existing checkpoint"
)


class Gzip(StreamTransformExtension):
    """A compression that PyTorch does not have."""

    @staticmethod
    def registry_name() -> str:
        return "stream.gzip"

    @staticmethod
    def from_descriptor(version: str) -> Gzip:
        assert version == "7"
        return Gzip()

    def get_descriptor(self) -> str:
        return "stream.gzip/7"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return cast("IO[bytes]", gzip.GzipFile(fileobj=output, mode="wb", mtime=0))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - PyTorch's name
        return cast("IO[bytes]", gzip.GzipFile(fileobj=input, mode="rb"))


def registry() -> ExtensionRegistry:
    out = ExtensionRegistry()
    out.register(Gzip)
    out.register(Rot13Example)
    return out


def state_of(seed: float) -> dict[str, Any]:
    weights = {"w": torch.full((300, 7), seed), "b": torch.arange(5.0) + seed}
    return {"model": weights, "step": int(seed), "blob": io.BytesIO(bytes([int(seed)] * 9))}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        all(torch.equal(t, other["model"][n]) for n, t in one["model"].items())
        and one["step"] == other["step"]
        and one["blob"].getvalue() == other["blob"].getvalue()
    )


EXTENSIONS: list[list[StreamTransformExtension]] = [
    [Rot13Example()],
    [Gzip()],
    [Rot13Example(), Gzip()],
]


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, ucf.Writer])
def test_both_readers_read_what_both_writers_write(
    tmp_path: Path, writer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for number, extensions in enumerate(EXTENSIONS):
        place = tmp_path / str(number)
        with caplog.at_level(logging.WARNING, "ucformat"):
            dcp.save(state_of(3), storage_writer=writer(place, _extensions=extensions))
        assert ("stream.rot13" in caplog.text) == (writer is ucf.Writer)
        # PyTorch 2.13 decodes two extensions in the wrong order
        for reader in (dcp.FileSystemReader, ucf.Reader)[len(extensions) - 1 :]:
            state = state_of(8)
            dcp.load(state, storage_reader=reader(place, registry()))
            assert same(state, state_of(3)), (number, reader)
        with pytest.raises(UnsupportedError, match=r"(?s)transformed by .*Reader\(path\) loads it"):
            ucformat.open(place)


def test_a_part_is_read_without_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save(state_of(3), storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[Gzip()]))
    monkeypatch.setattr(dcp_streams, "_MAX_KEPT", 100)
    state = {"model": {"w": torch.zeros(300, 7)}}
    reader = ucf.Reader(tmp_path, registry())
    dcp.load(state, storage_reader=reader)
    assert torch.equal(state["model"]["w"], state_of(3)["model"]["w"])
    reader.reset(tmp_path)
    dcp.load(state, storage_reader=reader)


def test_an_extension_that_is_not_known_is_named(tmp_path: Path) -> None:
    dcp.save(state_of(3), storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[Gzip()]))
    with pytest.raises(CheckpointException, match=r"stream\.gzip/7"):
        dcp.load(state_of(8), storage_reader=ucf.Reader(tmp_path))


def test_damaged_streams_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save(state_of(3), storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[Gzip()]))
    with monkeypatch.context() as patch:
        patch.setattr(dcp_streams, "_MAX_ARCHIVE", -1)  # a stream that decodes to too much
        with pytest.raises(CheckpointException, match="decode to more than"):
            dcp.load(state_of(8), storage_reader=ucf.Reader(tmp_path, registry()))
    (file,) = tmp_path.glob("*.distcp")
    content, refused = file.read_bytes(), list[str]()
    for at in range(0, len(content), 40):
        file.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
        state = state_of(8)
        try:
            dcp.load(state, storage_reader=ucf.Reader(tmp_path, registry()))
        except CheckpointException as error:
            refused.append(str(error))
        else:
            assert same(state, state_of(3)), at  # bytes that no decoder looks at
    assert len(refused) > 20
    assert all("__0_0.distcp" in message for message in refused)
    file.write_bytes(content[:-300])
    with pytest.raises(CheckpointException, match="ends at byte"):
        dcp.load(state_of(8), storage_reader=ucf.Reader(tmp_path, registry()))


class Runs:
    """An object whose pickle writes a file when it is loaded."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (self.file, "w")


def test_values_in_streams_are_not_unpickled(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    state = {**state_of(3), "bad": Runs(str(ran))}
    dcp.save(state, storage_writer=ucf.Writer(tmp_path / "ck", _extensions=[Rot13Example()]))
    loaded = state_of(8)
    dcp.load(loaded, storage_reader=ucf.Reader(tmp_path / "ck", registry()))
    assert same(loaded, state_of(3))
    with pytest.raises(CheckpointException, match="bad"):
        dcp.load({"bad": 1}, storage_reader=ucf.Reader(tmp_path / "ck", registry()))
    assert not ran.exists()


def test_streams_and_universal_checkpoints_do_not_share_a_place(tmp_path: Path) -> None:
    dcp.save(state_of(3), storage_writer=ucf.Writer(tmp_path / "a"))
    before = sorted(p.name for p in (tmp_path / "a").iterdir())
    streams = ucf.Writer(tmp_path / "a", _extensions=[Gzip()])
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state_of(4), storage_writer=streams)
    assert isinstance(next(iter(caught.value.failures.values()))[0], Conflict)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == before
    dcp.save(state_of(4), checkpoint_id=tmp_path / "b", storage_writer=streams)
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        dcp.save(state_of(4), storage_writer=ucf.Writer(tmp_path / "b"))
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state_of(4), checkpoint_id="memory://x/y", storage_writer=streams)
    assert isinstance(next(iter(caught.value.failures.values()))[0], UsageError)


def test_a_background_save_takes_extensions(tmp_path: Path) -> None:
    writer = ucf.Writer(tmp_path, _extensions=[Gzip()])
    assert pickle.loads(pickle.dumps(writer)).checkpoint_id == str(tmp_path)  # noqa: S301
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        future: Any = dcp.async_save(state_of(3), storage_writer=writer)
        future.result(60)
    finally:
        torch.distributed.destroy_process_group()
    state = state_of(8)
    dcp.load(state, storage_reader=ucf.Reader(tmp_path, registry()))
    assert same(state, state_of(3))
