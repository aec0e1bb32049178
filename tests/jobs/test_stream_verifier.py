"""A damaged source is not laundered: the checksums that its files carry are compared while it is converted."""

from __future__ import annotations

import random
import shutil
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from crc32c import crc32c

import ucformat
from tests.fakes import random_array, same
from tests.packed import write_packed
from tests.zero_files import FLAT, write_zero3
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.cli.main import ucp
from ucformat.errors import ChecksumError, IntegrityError, NotACheckpoint, NotFound
from ucformat.jobs.materialize import materialize
from ucformat.sources.pickle.file import TorchZip
from ucformat.storage.local import LocalStore
from ucformat.storage.strided import CRC32_SHIFT, CRC32C_SHIFT
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[1] / "data"
SAMPLES = [
    "dcp/fsdp2-uneven/ckpt",
    "deepspeed/tp2-dp2-z1/ckpt",
    "deepspeed/tp2-dp2-z3/ckpt",
    "deepspeed/universal-z2/ckpt",
    "megatron/tp2-tied/classic",
    "megatron/tp2-dp2-full/sharded",
]


@pytest.mark.parametrize("seed", range(20))
def test_crcs_of_parts_make_that_of_the_whole_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    data = chance.randbytes(chance.choice([0, 1, 5, 1000, 100_000]))
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(5))
    parts = list(zip([0, *cuts], [*cuts, len(data)], strict=True))
    chance.shuffle(parts)
    plain = castagnoli = 0
    for a, b in parts:
        plain ^= CRC32_SHIFT(zlib.crc32(data[a:b]), len(data) - b)
        castagnoli ^= CRC32C_SHIFT(crc32c(data[a:b]), len(data) - b)
    assert (plain, castagnoli) == (zlib.crc32(data), crc32c(data))


def torch_file(folder: Path) -> Path:
    import torch

    folder.mkdir()
    large = torch.arange(3000 * 101, dtype=torch.float32).reshape(3000, 101)
    torch.save(
        {"cut": large[7:2500, 3:90], "a": torch.arange(999), "b": torch.ones(5)}, folder / "m.pt"
    )
    return folder / "m.pt"


def flip(file: Path, at: int) -> Callable[[], None]:
    """Flip a bit; what is returned flips it back."""

    def change() -> None:
        with file.open("r+b") as f:
            f.seek(at)
            (byte,) = f.read(1)
            f.seek(at)
            f.write(bytes([byte ^ 4]))

    change()
    return change


def nothing_opens(place: Path) -> bool:
    with pytest.raises((NotACheckpoint, NotFound)):
        ucformat.open(place)
    return True


def refused(src: Path, dst: Path, *named: str, **how: Any) -> None:
    with pytest.raises(ChecksumError) as caught:
        ucformat.convert(src, dst, **how)
    for name in named:
        assert name in str(caught.value)
    assert nothing_opens(dst)


@pytest.mark.front("*-sizes0")
@pytest.mark.parametrize("sizes", [(None, None), (512, 4096)])
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_flipped_bit_is_found_and_a_repaired_source_is_converted(
    sample: str, sizes: tuple[int | None, int | None], tmp_path: Path
) -> None:
    src = tmp_path / "src"
    shutil.copytree(DATA / sample, src)
    ck = ucformat.open(src)
    infos = [i for i in ck.tensors.values() if i.nbytes]
    info = infos[len(infos) // 2]
    extent = next(
        e
        for e in ck.origin.extents(next(iter(ck.metadata.means.get(info.key, (info.key,)))))
        if e.box.size
    )
    restore = flip(src / extent.file, extent.offset)
    refused(
        src,
        tmp_path / "dst",
        extent.file,
        "CRC-32 of its record",
        chunk_bytes=sizes[0],
        shard_bytes=sizes[1],
    )

    taken = ucformat.convert(
        src, tmp_path / "taken", chunk_bytes=sizes[0], shard_bytes=sizes[1], verify=False
    )
    assert taken.manifest.verified is not None
    assert not taken.manifest.verified.default
    restore()
    done = ucformat.convert(src, tmp_path / "dst", chunk_bytes=sizes[0], shard_bytes=sizes[1])
    assert ucformat.verify(done)
    assert done.manifest.verified is not None
    assert (done.manifest.verified.default, done.manifest.verified.but) == (True, ())


def test_padding_that_no_tensor_needs_is_read_and_counted(tmp_path: Path) -> None:
    file = torch_file(tmp_path / "src")
    ck = ucformat.convert(file, tmp_path / "ok")
    assert ck.manifest.verified is not None
    assert ck.manifest.verified.besides > 0
    record = next(
        r for r in TorchZip(LocalStore(file.parent), "m.pt").records() if r.name.endswith("data/0")
    )
    restore = flip(file, record.locate() + 1)  # before the first element of the slice
    refused(file, tmp_path / "dst", "m.pt", record.name, "cut (weight)")
    assert not ucformat.verify(file)
    restore()
    assert ucformat.verify(ucformat.convert(file, tmp_path / "dst"))


def test_no_byte_is_read_twice(tmp_path: Path) -> None:
    arrays = {("w", s): random_array((256, 2560), "float32", i) for i, s in enumerate(FLAT)}
    folder = write_zero3(tmp_path / "run", arrays, 3)
    reads = {}
    for verify in (True, False):
        store = RecordingStore(LocalStore(folder))
        ck = open_checkpoint(store)
        store.reads.clear()
        ucformat.convert(
            ck,
            tmp_path / str(verify),
            chunk_bytes=1 << 15,
            shard_bytes=1 << 20,
            verify=verify,
            workers=1,
        )
        reads[verify] = Counter(
            r for r in store.reads if r.nbytes > 64 and r.file.endswith("optim_states.pt")
        )
    tensors = sum(read.nbytes * n for read, n in reads[False].items())
    more = sum(read.nbytes * n for read, n in (reads[True] - reads[False]).items())
    files = list(folder.rglob("*optim_states.pt"))
    assert tensors >= sum(f.stat().st_size for f in files) // 2
    assert not reads[False] - reads[True]
    assert more <= sum(f.stat().st_size for f in files) // 8, (
        "no tensors: the directories of the zip files"
    )


@pytest.mark.parametrize("workers", [1, 4])
def test_an_interrupted_conversion_of_a_damaged_source_is_not_continued_into_a_checkpoint(
    workers: int, tmp_path: Path
) -> None:
    file = torch_file(tmp_path / "src")
    record = next(
        r for r in TorchZip(LocalStore(file.parent), "m.pt").records() if r.name.endswith("data/0")
    )
    at = record.locate() + (1000 * 101 + 50) * 4
    restore = flip(file, at)

    def stop(done: int, total: int) -> None:
        if done > total // 3:
            raise KeyboardInterrupt

    how: dict[str, Any] = {"chunk_bytes": 1 << 12, "shard_bytes": 1 << 14, "workers": workers}
    with pytest.raises(KeyboardInterrupt):
        ucformat.convert(file, tmp_path / "dst", progress=stop, **how)
    refused(file, tmp_path / "dst", "m.pt", **how)
    import os

    was = file.stat()
    restore()
    os.utime(
        file, ns=(was.st_atime_ns, was.st_mtime_ns)
    )  # so that it is the same plan, and its shards are kept
    ck = ucformat.convert(file, tmp_path / "dst", **how)
    assert same(ck["cut"][...], ucformat.open(file)["cut"][...]), (
        "a shard that was made of the damaged bytes is made anew"
    )
    assert ucformat.verify(ck)


def test_chunks_of_zarr_that_are_read_in_parts(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", reason="pip install 'ucformat[zarr]'")
    group = zarr.open_group(tmp_path / "z", mode="w", zarr_format=3)
    value = np.arange(300 * 70, dtype=np.float32).reshape(300, 70)
    made = group.create_array(
        "w",
        shape=value.shape,
        dtype="float32",
        chunks=(300, 70),
        compressors=[zarr.codecs.Crc32cCodec()],
    )
    made[:] = value
    (chunk,) = [f for f in (tmp_path / "z").rglob("*") if f.is_file() and f.name != "zarr.json"]
    ck = ucformat.convert(tmp_path / "z", tmp_path / "ok", chunk_bytes=1024, shard_bytes=4096)
    assert ck.manifest.verified is not None
    assert ck.manifest.verified.default
    restore = flip(chunk, 5000)
    refused(
        tmp_path / "z",
        tmp_path / "dst",
        chunk.name,
        "w (weight)",
        chunk_bytes=1024,
        shard_bytes=4096,
    )
    restore()
    assert same(
        ucformat.convert(tmp_path / "z", tmp_path / "dst", chunk_bytes=1024)["w"][...], value
    )


@pytest.mark.front("codecs[014]*", "codecs2-shards1-view1", "codecs3-None-None")
@pytest.mark.parametrize("view", [None, [{"cast": "*", "dtype": "float64"}]])
@pytest.mark.parametrize("shards", [None, (300, 70)])
@pytest.mark.parametrize(
    "codecs", [["zstd"], ["gzip"], ["zstd", "crc32c"], ["gzip", "crc32c"], ["crc32c", "gzip"]]
)
def test_compressed_chunks_of_zarr(
    codecs: list[str], shards: Any, view: Any, tmp_path: Path
) -> None:
    zarr = pytest.importorskip("zarr", reason="pip install 'ucformat[zarr]'")
    made = {
        "zstd": zarr.codecs.ZstdCodec,
        "gzip": zarr.codecs.GzipCodec,
        "crc32c": zarr.codecs.Crc32cCodec,
    }
    group = zarr.open_group(tmp_path / "z", mode="w", zarr_format=3)
    value = np.arange(300 * 70, dtype=np.float32).reshape(300, 70)
    array = group.create_array(
        "w",
        shape=value.shape,
        dtype="float32",
        chunks=(100, 70),
        shards=shards,
        compressors=[made[c]() for c in codecs],
    )
    array[:] = value
    how: dict[str, Any] = {"chunk_bytes": 1024, "shard_bytes": 4096}
    ck = ucformat.convert(ucformat.open(tmp_path / "z", view=view), tmp_path / "ok", **how)
    assert ck.manifest.verified is not None
    assert ck.manifest.verified.default == ("crc32c" in codecs)
    if (
        codecs[-1] != "crc32c"
    ):  # bits of what is around the elements, such as the time in a header of gzip, may differ
        return
    chunk = max(
        (f for f in (tmp_path / "z").rglob("*") if f.name != "zarr.json"),
        key=lambda f: f.stat().st_size,
    )
    nbytes, where = chunk.stat().st_size // (3 if shards else 1), r"array w: its chunk \["
    for at in range(0, nbytes, nbytes // 20):  # of a shard, somewhere in its first chunk
        restore = flip(chunk, at)
        with pytest.raises(IntegrityError, match=where):
            ucformat.convert(ucformat.open(tmp_path / "z", view=view), tmp_path / "dst", **how)
        assert nothing_opens(tmp_path / "dst")
        restore()
    assert same(ucformat.convert(tmp_path / "z", tmp_path / "dst", **how)["w"][...], value)


@pytest.mark.parametrize("view", [None, [{"cast": "*", "dtype": "float64"}]])
@pytest.mark.parametrize("kind", ["arrays", "packed"])
@pytest.mark.parametrize("recorded", [False, True])
def test_universal_sources(
    recorded: bool, kind: str, view: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if what was read of a damaged source is recorded: once it is restored, it is read again."""
    monkeypatch.setattr("ucformat.jobs.tasks._RECORD_S", 0.0 if recorded else 1000.0)
    arrays = {
        ("w", "weight"): random_array((300, 70), "float32", 1),
        ("v", "weight"): random_array((11,), "float32", 2),
    }
    packed: Checkpoint = write_packed(LocalStore(tmp_path / "packed"), arrays, block_bytes=1 << 14)
    folder = tmp_path / kind
    if kind == "arrays":
        ucformat.convert(packed, folder)
    files = [
        f
        for f in (folder / "data").rglob("*")
        if f.is_file() and f.name not in ("zarr.json", "extents.safetensors")
    ]
    file = max(files, key=lambda f: f.stat().st_size)
    restore = flip(file, 9000)
    for act in (ucformat.convert, materialize):
        source = ucformat.open(folder, view=view)
        with pytest.raises(ChecksumError, match=file.name):
            act(source, tmp_path / "dst", chunk_bytes=999, shard_bytes=9999)
        assert nothing_opens(tmp_path / "dst")
    restore()
    made = ucformat.convert(folder, tmp_path / "dst", chunk_bytes=999, shard_bytes=9999)
    assert made.manifest.verified is not None
    assert made.manifest.verified.default
    assert same(made["w"][...], arrays["w", "weight"])


def test_what_carries_no_checksums_is_said_to_be_unverified(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": random_array((9, 9), "float32", 1)}, tmp_path / "model.safetensors")
    found = CliRunner().invoke(
        ucp, ["convert", str(tmp_path / "model.safetensors"), str(tmp_path / "dst")]
    )
    assert found.exit_code == 0, found.output
    assert (
        "1 tensor converted without verification: SRC's files have no checksums for them"
        in found.output
    )
    verified = ucformat.open(tmp_path / "dst").manifest.verified
    assert verified is not None
    assert (verified.default, verified.but) == (False, ())


def test_the_option(tmp_path: Path) -> None:
    file = torch_file(tmp_path / "src")
    record = next(
        r for r in TorchZip(LocalStore(file.parent), "m.pt").records() if r.name.endswith("data/0")
    )
    flip(file, record.locate() + 5000)
    words = ["convert", str(file), str(tmp_path / "dst")]
    found = CliRunner().invoke(ucp, words)
    assert found.exit_code == 5
    assert "--no-verify" in found.output
    assert CliRunner().invoke(ucp, [*words, "--no-verify"]).exit_code == 0


def test_a_virtual_checkpoint_of_a_damaged_file_gets_no_checksums(tmp_path: Path) -> None:
    file = torch_file(tmp_path / "src")
    plain = CliRunner().invoke(ucp, ["register", str(file), str(tmp_path / "plain"), "--virtual"])
    assert (
        "the bytes of 3 tensors are unverified: --checksums verifies those it can" in plain.output
    )
    with_sums = ucformat.convert(file, tmp_path / "sums", virtual=True, checksums=True)
    assert with_sums.manifest.verified is not None
    assert with_sums.manifest.verified.default
    record = next(
        r for r in TorchZip(LocalStore(file.parent), "m.pt").records() if r.name.endswith("data/0")
    )
    flip(file, record.locate() + 5000)
    refused(file, tmp_path / "dst", "m.pt", record.name, virtual=True, checksums=True)
