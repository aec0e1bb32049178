from __future__ import annotations

import builtins
import json
import pickle
import random
import shutil
import struct
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import ucformat
from tests.engines.slime.chains import (
    INDEX,
    changed,
    compress,
    overwrite,
    write_delta,
    write_full,
    xor,
)
from tests.sources.suite import Sample, SourceSuite, read_whole
from ucformat.checkpoint import open_checkpoint
from ucformat.cli.main import ucp
from ucformat.engines.slime import patches
from ucformat.errors import (
    ChecksumError,
    Conflict,
    IntegrityError,
    MissingData,
    UcformatError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Extent, Key
from ucformat.storage.url import open_store
from ucformat.testing import truth

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engines.slime.chains import Arrays

RNG = np.random.default_rng(5)


def model() -> Arrays:
    return {
        "embed": RNG.standard_normal((64, 24)).astype(ml_dtypes.bfloat16),
        "layers.0/w": RNG.standard_normal((16, 24)).astype(np.float32),
        "frozen": RNG.standard_normal((40, 24)).astype(np.float32),
        "norm": RNG.standard_normal(24).astype(ml_dtypes.bfloat16),
        "scale": np.array(1.5, np.float32),
        "nothing": np.zeros((0, 4), np.float32),
    }


class Run:
    """A folder of versions, and what is in each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.truth = folder, [model()]

    def full(self, version: int) -> None:
        write_full(self.version(version), self.truth[version])

    def delta(self, *names: str, **how: Any) -> None:
        old, number = self.truth[-1], len(self.truth)
        self.truth.append(changed(old, number, names))
        write_delta(self.folder, number, old, self.truth[-1], **how)

    def version(self, number: int) -> Path:
        return self.folder / f"weight_v{number:06d}"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Version 1 is full, after one that is not needed, and all encodings and digests follow."""
    out = Run(tmp_path / "run")
    out.truth.append(changed(out.truth[0], 1, ("embed", "frozen")))
    out.full(0)
    out.full(1)
    out.delta("embed", "layers.0/w")
    out.delta("embed", "scale", encoding="overwrite", checksum="blake3")
    out.delta()  # of a version in which nothing changed
    out.delta("embed", "norm", checksum="adler32")
    return out


@pytest.fixture
def based(tmp_path: Path) -> Run:
    """The versions of a run that began with a checkpoint elsewhere, `base`."""
    out = Run(tmp_path / "run")
    write_full(tmp_path / "base", out.truth[0])
    out.delta("embed", "norm")
    out.delta("embed", encoding="overwrite")
    return out


class TestSlime(SourceSuite):
    read_only_its_own = False

    @pytest.fixture
    def sample(self, run: Run) -> Sample:
        return Sample(run.folder, ".", "slime", truth(run.truth[-1]), encoded=True)

    def damageable(self, copy: Sample) -> list[Path]:
        files = super().damageable(copy)
        own = copy.path / "weight_v000005"
        return [f for f in files if f.parent == own] if self.read_only_its_own else files

    def test_a_file_that_is_not_read_is_told_of(
        self, copy: Sample, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The folders of other versions are other checkpoints."""
        self.read_only_its_own = True
        super().test_a_file_that_is_not_read_is_told_of(copy, tmp_path, caplog)

    def test_no_changed_byte_of_a_delta_is_read(self, copy: Sample) -> None:
        rng = random.Random(17)
        for folder in sorted(copy.path.glob("weight_v00000[2-5]")):
            for path in folder.iterdir():
                data = path.read_bytes()
                for at in rng.sample(range(len(data)), min(len(data), self.changes * 4)):
                    hurt = bytearray(data)
                    hurt[at] ^= 1 << rng.randrange(8)
                    path.write_bytes(hurt)
                    self.hurt(copy, path, f"has another byte {at}")
                path.write_bytes(data)


def test_every_version_is_what_a_receiver_would_have(run: Run) -> None:
    for number in range(2, 6):
        expected = truth(run.truth[number])
        alone = open_checkpoint(run.version(number))
        assert alone.kind == "slime"
        assert alone.home == str(run.version(number))
        assert read_whole(alone) == expected
        assert alone.objects["weight_version"] == {"version": number, "full_version": 1}
        chosen = open_checkpoint(run.folder, options={"version": number})
        assert read_whole(chosen) == expected
        assert chosen.id == alone.id
        assert json.loads(chosen.assets["config.json"]) == {"model_type": "toy"}
    assert open_checkpoint(run.version(1)).kind == "safetensors"  # it needs no other
    assert read_whole(open_checkpoint(run.folder, options={"version": 1})) == truth(run.truth[1])


def test_version_0_is_named(based: Run, tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="has no full version") as caught:
        open_checkpoint(based.folder)
    assert "'base'" in str(caught.value.hint)
    base = {"base": str(tmp_path / "base")}
    for place in (based.folder, based.version(2)):
        ck = open_checkpoint(place, options=base)
        assert read_whole(ck) == truth(based.truth[2])
        assert json.loads(ck.assets["config.json"]) == {"model_type": "toy"}
    shutil.copytree(tmp_path / "base", based.version(0))
    assert read_whole(open_checkpoint(based.folder)) == truth(based.truth[2])
    with pytest.raises(UsageError, match="weight_v000000 is a full version"):
        open_checkpoint(based.folder, options=base)


def test_of_another_base_nothing_changed_is_read(based: Run, tmp_path: Path) -> None:
    write_full(tmp_path / "other", changed(based.truth[0], 9, ("embed",)))
    ck = open_checkpoint(based.folder, options={"base": str(tmp_path / "other")})
    assert ck["norm"].read().tobytes() == based.truth[2]["norm"].tobytes()
    with pytest.raises(ChecksumError, match=r"weight_v000001: 'embed'.*xxh3-128"):
        ck["embed"].read()
    fewer = {name: array for name, array in based.truth[0].items() if name != "norm"}
    write_full(tmp_path / "fewer", fewer)
    with pytest.raises(IntegrityError, match=r"weight_v000001 changes 'norm'"):
        open_checkpoint(based.folder, options={"base": str(tmp_path / "fewer")})


def test_a_base_that_changes_meanwhile_is_noticed(based: Run, tmp_path: Path) -> None:
    ck = open_checkpoint(based.folder, options={"base": str(tmp_path / "base")})
    shutil.rmtree(tmp_path / "base")
    write_full(tmp_path / "base", changed(based.truth[0], 9, ("frozen",)))
    with pytest.raises(Conflict, match="changed since"):
        ucformat.convert(ck, tmp_path / "converted")


def test_in_memory_and_in_another_process(run: Run) -> None:
    for path in sorted(run.folder.glob("*/*")):
        with open_store(f"memory://slime/{path.parent.name}").create(path.name) as out:
            out.write(path.read_bytes())
    ck = open_checkpoint("memory://slime/weight_v000005")
    assert read_whole(ck) == truth(run.truth[5])
    (extent,) = open_checkpoint(run.folder).source.extents(Key("embed", "weight"))
    assert isinstance(extent, Extent)
    store = pickle.loads(pickle.dumps(open_checkpoint(run.folder).store))  # noqa: S301
    assert store.read(extent.file) == run.truth[5]["embed"].tobytes()


def test_a_tensor_decodes_itself_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    apply = patches.apply

    def noted(*args: Any) -> None:
        seen.append(args[-1].rpartition(" ")[2])
        apply(*args)

    monkeypatch.setattr("ucformat.engines.slime.opened.apply", noted)
    ck = open_checkpoint(run.folder)
    ck["frozen"][3:5]
    assert seen == []
    ck["norm"][3:5]
    assert seen == ["'norm'"]


def test_an_unchanged_tensor_reads_its_slice(run: Run) -> None:
    plan = open_checkpoint(run.folder)["frozen"].plan(Box((3, 0), (2, 24)))
    assert plan.bytes_read == 2 * 24 * 4


def test_the_commands(based: Run, tmp_path: Path) -> None:
    def call(*args: str) -> str:
        done = CliRunner().invoke(ucp, [*args, "--source", f"base={tmp_path / 'base'}"])
        assert done.exit_code == 0, done.output
        return done.output

    place = str(based.folder)
    assert "slime" in call("show", place)
    assert "is intact" in call("verify", place)
    call("convert", f"{place}/weight_v000001", str(tmp_path / "one"))
    call("export", "safetensors", place, str(tmp_path / "two"))
    assert read_whole(open_checkpoint(tmp_path / "one")) == truth(based.truth[1])
    assert read_whole(open_checkpoint(tmp_path / "two")) == truth(based.truth[2])
    assert (tmp_path / "two/config.json").exists()


def test_verify_compares_digests(run: Run) -> None:
    report = ucformat.verify(str(run.folder))
    names = ("embed", "layers.0/w", "scale", "norm")
    assert (bool(report), report.bytes_verified) == (
        True,
        sum(run.truth[5][name].nbytes for name in names),
    )
    path = next(run.version(3).glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    report = ucformat.verify(str(run.folder))
    assert not report
    assert "weight_v000003" in report.problems[0].reason


def index_of(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return index


def refused(run: Run, error: type[UcformatError], match: str, number: int | None = None) -> None:
    """Opening or reading fails for this reason."""
    with pytest.raises(error, match=match):
        read_whole(open_checkpoint(run.folder, options={"version": number} if number else None))


def test_a_link_that_is_missing(run: Run) -> None:
    shutil.rmtree(run.version(3))
    refused(run, MissingData, "weight_v000003 is missing")
    assert read_whole(open_checkpoint(run.version(2))) == truth(run.truth[2])


@pytest.mark.parametrize(
    ("member", "value", "error"),
    [
        ("version", "000004", IntegrityError),
        ("version", None, IntegrityError),
        ("version", -1, IntegrityError),
        ("base_version", "000003", IntegrityError),  # itself
        ("base_version", "000005", IntegrityError),  # a loop
        ("base_version", "000001", IntegrityError),  # not the one before
        ("base_version", "../../000002", IntegrityError),
        ("delta_encoding", "add", UnsupportedError),
        ("delta_encoding", ["xor"], UnsupportedError),
        ("compression_format", "lz4", UnsupportedError),
        ("checksum_format", "crc32", UnsupportedError),
        ("checksum_format", None, UnsupportedError),
        ("checksum_format", "adler32", IntegrityError),  # the digests are longer
    ],
)
def test_an_index_that_says_something_else(
    run: Run, member: str, value: Any, error: type[UcformatError]
) -> None:
    index = index_of(run.version(3))
    index["metadata"][member] = value
    (run.version(3) / INDEX).write_text(json.dumps(index))
    match = "adler32 digest in the header" if value == "adler32" else member
    refused(run, error, f"weight_v000003.*{match}")


def test_numbers_may_be_numbers(run: Run) -> None:
    index = index_of(run.version(3))
    index["metadata"] |= {"version": 3, "base_version": 2}
    (run.version(3) / INDEX).write_text(json.dumps(index))
    assert read_whole(open_checkpoint(run.folder)) == truth(run.truth[5])


def test_an_index_and_files_that_disagree(run: Run) -> None:
    folder = run.version(5)
    index = index_of(folder)
    for weight_map, error, match in (
        ({**index["weight_map"], "x": "model-00000-of-00002.safetensors"}, IntegrityError, "'x'"),
        ({"embed": index["weight_map"]["embed"]}, IntegrityError, "'norm' is not in this file"),
        ({**index["weight_map"], "x": "model-00007.safetensors"}, MissingData, "model-00007"),
        ({**index["weight_map"], "x": "../weight_v000002/a.safetensors"}, UnsafeError, "inside"),
        ({**index["weight_map"], "x": 3}, IntegrityError, "weight_map"),
        (None, IntegrityError, "weight_map"),
    ):
        (folder / INDEX).write_text(json.dumps({**index, "weight_map": weight_map}))
        refused(run, error, match)
    (folder / INDEX).write_text(json.dumps(index))
    extra = {"frozen": compress(b"")}
    save_file(extra, folder / "extra.safetensors", metadata={"frozen": "0" * 8})
    refused(run, IntegrityError, "'frozen' is not in this file")


def test_a_version_that_is_being_written(run: Run) -> None:
    run.version(6).mkdir()
    (run.version(6) / "model-00000-of-00001.safetensors.tmp").write_bytes(b"")
    assert read_whole(open_checkpoint(run.folder)) == truth(run.truth[5])
    (run.version(5) / INDEX).unlink()
    refused(run, MissingData, "no index that describes it")
    with pytest.raises(MissingData, match="no index that describes it"):
        open_checkpoint(run.version(5))  # and not the compressed bytes
    assert read_whole(open_checkpoint(run.folder, options={"version": 4})) == truth(run.truth[4])
    save_file(run.truth[5], run.version(6) / "model-00001.safetensors")  # as slime's saver does
    refused(run, MissingData, "no whole model")


def test_files_and_folders_by_other_names(run: Run, tmp_path: Path) -> None:
    file = next(run.version(5).glob("*.safetensors"))
    for name, options in ((INDEX, None), (file.name, {"part": True})):
        with pytest.raises(UsageError, match="is a file of a delta"):
            open_checkpoint(run.version(5) / name, options=options)
    shutil.copytree(run.version(5), tmp_path / "mine")
    with pytest.raises(MissingData, match="cannot be found by the name"):
        open_checkpoint(tmp_path / "mine")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/weight_v000005").symlink_to(run.version(5))
    with pytest.raises(MissingData):  # what is beside the link is no chain
        open_checkpoint(tmp_path / "linked/weight_v000005")


def test_options(run: Run) -> None:
    for place, options, match in (
        (run.folder, {"version": 7}, "has no version 7"),
        (run.version(5), {"version": 4}, "is version 5, not 4"),
        (run.folder, {"version": True}, "not the number"),
        (run.folder, {"base": 3}, "not the path"),
    ):
        with pytest.raises(UsageError, match=match):
            open_checkpoint(place, options=options)


def hostile(run: Run, change: bytes, encoding: str, match: str) -> None:
    """A delta whose change of the tensor `scale`, of 4 bytes, decodes to this."""
    old = run.truth[-1]
    write_delta(
        run.folder,
        len(run.truth),
        old,
        changed(old, 9, ("scale",)),
        encoding=encoding,
        encode=lambda *_: change,
    )
    refused(run, IntegrityError, match)
    shutil.rmtree(run.version(len(run.truth)))


def numbers(*values: int) -> bytes:
    return b"".join(n.to_bytes(4, "little") for n in values)


def test_changes_that_do_not_fit(run: Run) -> None:
    hostile(run, bytes(5), "xor", "has 5 bytes")
    hostile(run, bytes(3), "xor", "has 3 bytes")
    hostile(run, bytes(1 << 30), "xor", "has 1,073,741,824 bytes")  # refused before it is decoded
    hostile(run, bytes(1 << 30), "overwrite", "no list of changes")
    hostile(run, b"", "overwrite", "no list of changes")
    hostile(run, numbers(1, 4) + b"x", "overwrite", "not in the tensor")
    hostile(run, numbers(1, 1 << 31) + b"x", "overwrite", "not in the tensor")
    hostile(run, numbers(2, 1, 1) + b"xy", "overwrite", "not in order")
    hostile(run, numbers(2, 1, 0) + b"xy", "overwrite", "not in order")
    hostile(run, numbers(9, 0) + b"x", "overwrite", "as many as it says")
    hostile(run, numbers(5, 0, 1, 2, 3, 4) + b"xxxxx", "overwrite", "no list of changes")


def zeros(number: int) -> bytes:
    """A zstd frame that says that it has some bytes, and has one block of 128 KiB."""
    return b"\x28\xb5\x2f\xfd\xe0" + number.to_bytes(8, "little") + b"\x02\x00\x10\x00"


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (b"", "no zstd frame"),
        (b"\x28\xb5\x2f\xfd", "no zstd frame"),
        (b"\x28\xb5\x2f\xfd\xe0\x00", "no zstd frame"),
        (zeros(1 << 60), "has 1,152,921,504,606,846,976 bytes"),
        (zeros(4), "cannot be decompressed"),
        (bytes(compress(b"abcd")) * 2, "cannot be decompressed"),
        (bytes(compress(b"abcd")) + b"x", "cannot be decompressed"),
        (struct.pack("<II", 0x184D2A50, 4) + b"1234" + bytes(compress(b"abcd")), "no zstd frame"),
    ],
)
def test_frames_that_lie(frame: bytes, match: str) -> None:
    data = np.zeros(4, np.uint8)
    with pytest.raises(IntegrityError, match=match):
        patches.apply("xor", data, frame, "adler32", "0" * 8, "w")


def test_a_frame_without_a_size_is_not_supported() -> None:
    frame = b"\x28\xb5\x2f\xfd\x00\x58" + b"\x21\x00\x00abcd"
    with pytest.raises(UnsupportedError, match="does not say how large"):
        patches.apply("xor", np.zeros(4, np.uint8), frame, "adler32", "0" * 8, "w")


@pytest.mark.parametrize("size", [1, 4, 255, 256, 257, 65791, 65792, 200_000])
@pytest.mark.parametrize(("encoding", "encode"), [("xor", xor), ("overwrite", overwrite)])
def test_sizes_of_frames(size: int, encoding: str, encode: Callable[[bytes, bytes], bytes]) -> None:
    old, new = RNG.bytes(size), RNG.bytes(size - 1) + b"!"
    data = np.frombuffer(old, np.uint8).copy()
    stored = compress(encode(old, new)).tobytes()
    for checksum, (_, digest) in patches._DIGESTS.items():
        data[:] = np.frombuffer(old, np.uint8)
        expected = digest(memoryview(new))
        patches.apply(encoding, data, stored, checksum, expected, "w")
        assert data.tobytes() == new


@pytest.mark.parametrize(("package", "version"), [("blake3", 3), ("numcodecs", 2)])
def test_without_a_package(
    run: Run, package: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    ck = open_checkpoint(run.folder, options={"version": version})
    ck["frozen"].read()
    with pytest.raises(UnsupportedError, match=package) as caught:
        ck["embed"].read()
    assert "ucformat[slime]" in str(caught.value.hint)
