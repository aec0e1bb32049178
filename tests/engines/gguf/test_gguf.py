"""GGUF files of llama.cpp's own library, read in place and written again, bit for bit."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy

import ucformat
from tests.sources.suite import SourceSuite
from ucformat.checkpoint import open_checkpoint
from ucformat.engines.gguf.header import _BLOCKS, _PLAIN
from ucformat.errors import (
    IntegrityError,
    MissingData,
    NotACheckpoint,
    UcformatError,
    UnsupportedError,
    UsageError,
)
from ucformat.testing import truth
from ucformat.testing.sources import Sample, read_whole

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.testing.sources import Truth

BLOCKS, HEADER = "blk.0.attn_q.weight", "gguf.header"


@pytest.fixture(scope="module")
def gguf() -> Any:
    return pytest.importorskip("gguf", reason="needs llama.cpp's library: pip install gguf")


def write(
    gguf: Any, path: Path, *, alignment: int | None = None, split: int = 0
) -> tuple[dict[str, Any], Truth]:
    """A model of each kind of tensor; returns what gguf-py reads of it, and what must be found."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(1)
    writer.add_rope_freq_base(float("inf"))
    writer.add_string("general.name", "tiny")
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(200)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 200)
    writer.add_array("tags", ["a", "b"])
    expected: Truth = {}
    plain = {
        "output_norm.weight": rng.standard_normal(7).astype("float32"),
        "rope_freqs.weight": rng.standard_normal((3, 5)).astype("float16"),
        "ids": np.arange(6, dtype="int32").reshape(2, 3),
        "one": np.array([2.5]),
    }
    for name, array in plain.items():
        writer.add_tensor(name, array)
        expected |= truth({name: array})
    for kind in ("Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_NL", "TQ2_0", "MXFP4"):
        name = BLOCKS if kind == "Q4_0" else f"blk.0.{kind}.weight"
        quantized = getattr(gguf.GGMLQuantizationType, kind)
        elements, nbytes = gguf.GGML_QUANT_SIZES[quantized]
        data = rng.integers(0, 256, (4, 2 * nbytes), dtype="uint8")
        if kind in ("Q8_0", "Q4_0"):
            values = rng.standard_normal((4, 2 * elements)).astype("float32")
            data = gguf.quants.quantize(values, quantized)
        writer.add_tensor(name, data, raw_dtype=quantized)
        expected |= truth({name: data}, f"blocks.{kind.lower()}")
    half = rng.integers(0, 256, (2, 6), dtype="uint8")
    writer.add_tensor("half", half, raw_dtype=gguf.GGMLQuantizationType.BF16)
    expected["weight", "half"] = ("bfloat16", (2, 3), half.tobytes())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = [path] if path.exists() else sorted(path.parent.glob("*-of-*"))
    tensors = {t.name: t for file in files for t in gguf.GGUFReader(file).tensors}
    return tensors, expected


def headers_of(ck: Any) -> frozenset[tuple[str, str]]:
    return frozenset((key.state, key.name) for key in ck.tensors if key.state == "header")


class TestGguf(SourceSuite):
    most_read = 99.0  # the header is larger than the tensors
    outranked = frozenset()

    @pytest.fixture(params=["folder", "file", "split"])
    def sample(self, request: pytest.FixtureRequest, tmp_path: Path, gguf: Any) -> Sample:
        split = request.param == "split"
        (tmp_path / "model").mkdir()
        _, expected = write(gguf, tmp_path / "model" / "tiny.gguf", split=5 if split else 0)
        place = "tiny.gguf" if request.param == "file" else "."
        extra = headers_of(open_checkpoint(tmp_path / "model"))
        assert len(extra) == (3 if split else 1)
        return Sample(tmp_path / "model", place, "gguf", expected, extra=extra)


def test_the_types_are_those_of_the_library(gguf: Any) -> None:
    sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {k: (n, b) for k, (_, n, b) in _BLOCKS.items()} | {
        k: (1, np.dtype("int16" if d == "bfloat16" else d).itemsize) for k, d in _PLAIN.items()
    } == sizes
    assert all(gguf.GGMLQuantizationType(k).name.lower() == n for k, (n, *_) in _BLOCKS.items())


def test_its_values_and_blocks(tmp_path: Path, gguf: Any) -> None:
    tensors, _ = write(gguf, tmp_path / "tiny.gguf")
    ck = ucformat.open(tmp_path / "tiny.gguf")
    assert ck.manifest.config["llama.block_count"] == 1
    assert ck.objects["model_config"]["tags"] == ["a", "b"]
    assert "tokenizer.ggml.tokens" not in ck.objects["model_config"]
    blocks = ck[BLOCKS, "blocks.q4_0"]
    assert blocks[1:3].tobytes() == tensors[BLOCKS].data[1:3].tobytes()
    # the library takes the rows as they are
    values = gguf.dequantize(blocks.read(), gguf.GGMLQuantizationType.Q4_0)
    assert values.shape == (4, 64)


@pytest.mark.parametrize("split", [0, 5])
@pytest.mark.parametrize("through", ["", "universal"])
def test_an_export_is_the_same_file(split: int, through: str, tmp_path: Path, gguf: Any) -> None:
    (tmp_path / "model").mkdir()
    write(gguf, tmp_path / "model" / "tiny.gguf", split=split, alignment=None if split else 64)
    place = tmp_path / "model"
    if through:
        ucformat.convert(place, tmp_path / "universal")
        place = tmp_path / "universal"
    ucformat.export(place, tmp_path / "again", "gguf")
    files = sorted(p.name for p in (tmp_path / "model").iterdir())
    assert len(files) == (3 if split else 1)
    for name in files:
        again = (tmp_path / "again" / name).read_bytes()
        assert again == (tmp_path / "model" / name).read_bytes(), name
    with pytest.raises(UsageError, match=r"'model\.GGUF' is not the name"):  # which no source opens
        ucformat.export(place, tmp_path / "again", "gguf", name="model.GGUF")
    one = tmp_path / "one" / "model.gguf"
    one.parent.mkdir()
    if split:
        with pytest.raises(UsageError, match="split into 3 files"):
            ucformat.export(place, one, "gguf")
    else:
        ucformat.export(place, one, "gguf")
        assert one.read_bytes() == (tmp_path / "model" / files[0]).read_bytes()


def test_nothing_takes_blocks_for_weights(tmp_path: Path, gguf: Any) -> None:
    write(gguf, tmp_path / "tiny.gguf")
    done = ucformat.export(tmp_path / "tiny.gguf", tmp_path / "hf", "safetensors")
    assert "blocks.q4_0 of 1 tensor" in str(done.left_out)
    names = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert set(names) == {"output_norm.weight", "rope_freqs.weight", "ids", "one", "half"} - (
        set() if "half" in names else {"half"}
    )


def test_what_is_not_those_files_is_no_gguf(tmp_path: Path, gguf: Any) -> None:
    write(gguf, tmp_path / "tiny.gguf")
    view = [{"drop": ["one"]}]
    ck = ucformat.open(tmp_path / "tiny.gguf", view=view)
    with pytest.raises(UnsupportedError, match=r"the file has one .* and the checkpoint has not"):
        ucformat.export(ck, tmp_path / "out", "gguf")
    renamed = ucformat.open(tmp_path / "tiny.gguf", view=[{"rename": "one", "to": "two"}])
    with pytest.raises(UnsupportedError, match="the file has one"):
        ucformat.export(renamed, tmp_path / "out", "gguf")
    safetensors.numpy.save_file({"w": np.ones(2, "float32")}, tmp_path / "w.safetensors")
    with pytest.raises(UnsupportedError, match="no header of a GGUF file") as error:
        ucformat.export(tmp_path / "w.safetensors", tmp_path / "out", "gguf")
    assert "convert_hf_to_gguf" in (error.value.hint or "")


def damaged(path: Path, at: int, data: bytes) -> Path:
    """A copy of a file with other bytes somewhere."""
    out = path.with_name("damaged.gguf")
    whole = bytearray(path.read_bytes())
    whole[at : at + len(data)] = data
    out.write_bytes(whole)
    return out


class TestPublicTraps:
    @pytest.mark.parametrize("alignment", [8, 16, 64, 256])
    def test_alignments(self, alignment: int, tmp_path: Path, gguf: Any) -> None:
        """ollama/ollama#18130: 32 was taken for any alignment, and each tensor was its neighbour."""
        _, expected = write(gguf, tmp_path / "tiny.gguf", alignment=alignment)
        ck = open_checkpoint(tmp_path / "tiny.gguf")
        read = read_whole(ck)
        assert {k: v for k, v in read.items() if k[0] != "header"} == expected

    @pytest.mark.parametrize("alignment", [0, 3])
    def test_an_alignment_that_is_none(self, alignment: int, tmp_path: Path, gguf: Any) -> None:
        """gittensor-ai-lab/sparkinfer#24: a division by zero."""
        write(gguf, tmp_path / "tiny.gguf", alignment=64)
        data = (tmp_path / "tiny.gguf").read_bytes()
        at = data.index(b"general.alignment") + len("general.alignment") + 4
        with pytest.raises(IntegrityError, match="no power of two"):
            open_checkpoint(damaged(tmp_path / "tiny.gguf", at, struct.pack("<I", alignment)))

    def test_an_alignment_whose_padding_fills_the_memory(self, tmp_path: Path, gguf: Any) -> None:
        write(gguf, tmp_path / "tiny.gguf", alignment=64)
        data = (tmp_path / "tiny.gguf").read_bytes()
        at = data.index(b"general.alignment") + len("general.alignment") + 4
        with pytest.raises(IntegrityError, match="the alignment 2,147,483,648"):
            open_checkpoint(damaged(tmp_path / "tiny.gguf", at, struct.pack("<I", 1 << 31)))

    @pytest.mark.parametrize("size", [(1 << 42) + 1, (1 << 63) - 1, 0])
    def test_dims_whose_product_overflows(self, size: int, tmp_path: Path, gguf: Any) -> None:
        """ggml-org/llama.cpp#18674, #27203 and #24263: 2^64 bytes were none."""
        write(gguf, tmp_path / "tiny.gguf")
        data = (tmp_path / "tiny.gguf").read_bytes()
        at = data.index(b"blk.0.Q8_0.weight") + len("blk.0.Q8_0.weight") + 4
        with pytest.raises(IntegrityError, match=r"Q8_0\.weight|what is before it ends"):
            open_checkpoint(damaged(tmp_path / "tiny.gguf", at + 8, struct.pack("<Q", size)))

    def test_numbers_of_tensors(self, tmp_path: Path, gguf: Any) -> None:
        """ggml-org/llama.cpp#15711: memory for 2^60 tensors."""
        write(gguf, tmp_path / "tiny.gguf")
        for at in (8, 16):
            with pytest.raises(IntegrityError, match="would have"):
                open_checkpoint(damaged(tmp_path / "tiny.gguf", at, struct.pack("<Q", 1 << 60)))

    def test_files_of_big_endian_machines(self, tmp_path: Path, gguf: Any) -> None:
        """ggml-org/llama.cpp#3298: read as they are, their values are others."""
        writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
        writer.add_tensor("w", np.ones(4, "float32"))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(UnsupportedError, match="big-endian"):
            open_checkpoint(tmp_path / "big.gguf")

    def test_a_type_of_the_future_is_refused_alone(self, tmp_path: Path, gguf: Any) -> None:
        write(gguf, tmp_path / "tiny.gguf")
        data = (tmp_path / "tiny.gguf").read_bytes()
        at = data.index(BLOCKS.encode()) + len(BLOCKS) + 4 + 16
        ck = open_checkpoint(damaged(tmp_path / "tiny.gguf", at, struct.pack("<I", 99)))
        ((key, reason),) = ck.unreadable.items()
        assert (key.name, "type 99" in reason) == (BLOCKS, True)
        assert ck["one"].read().tolist() == [2.5]


def test_splits(tmp_path: Path, gguf: Any) -> None:
    write(gguf, tmp_path / "tiny.gguf", split=5)
    first, second, third = sorted(tmp_path.iterdir())
    assert set(read_whole(open_checkpoint(first))) == set(read_whole(open_checkpoint(tmp_path)))
    with pytest.raises(NotACheckpoint, match="part"):
        open_checkpoint(second)
    part = ucformat.open(second, options={"part": True})
    assert part.metadata.part_of
    write(gguf, tmp_path / "other.gguf")
    with pytest.raises(UsageError, match="several GGUF models"):
        open_checkpoint(tmp_path)
    (tmp_path / "other.gguf").unlink()
    third.unlink()
    with pytest.raises(MissingData, match="00003-of-00003"):
        open_checkpoint(tmp_path)
    with pytest.raises(NotACheckpoint, match="one of 3 shards"):
        open_checkpoint(first)
    third.write_bytes(second.read_bytes())
    with pytest.raises(IntegrityError, match="not the splits of one model"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("value", [["a"], "two", -1, 2.0])
def test_splits_that_are_no_numbers(value: Any, tmp_path: Path, gguf: Any) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_key_value("split.count", value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(IntegrityError, match=r"split\.count .*, which is no number"):
        open_checkpoint(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("padding", [0, 3])
def test_a_vocabulary_alone(padding: int, tmp_path: Path, gguf: Any) -> None:
    """What `convert_hf_to_gguf.py --vocab-only` writes has no tensors, and no padding behind its header."""
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    data = (tmp_path / "vocab.gguf").read_bytes() + bytes(padding)
    assert len(data) % 32, "the end is aligned: write other tokens"
    (tmp_path / "vocab.gguf").write_bytes(data)
    ck = open_checkpoint(tmp_path / "vocab.gguf")
    assert ck.objects["model_config"]["tokenizer.ggml.tokens"] == ["a", "bc"]
    ucformat.export(tmp_path / "vocab.gguf", tmp_path / "again.gguf", "gguf")
    assert (tmp_path / "again.gguf").read_bytes() == data
    (tmp_path / "vocab.gguf").write_bytes(data + bytes(64))
    with pytest.raises(IntegrityError, match="bytes after"):
        open_checkpoint(tmp_path / "vocab.gguf")


@pytest.mark.parametrize("seed", range(4))
def test_any_change_of_a_header_is_an_error_or_readable(
    seed: int, tmp_path: Path, gguf: Any
) -> None:
    write(gguf, tmp_path / "tiny.gguf")
    rng = np.random.default_rng(seed)
    size = len((tmp_path / "tiny.gguf").read_bytes())
    for _ in range(60):
        at = int(rng.integers(0, min(size, 6000)))
        path = damaged(tmp_path / "tiny.gguf", at, rng.bytes(int(rng.integers(1, 9))))
        with suppress(UcformatError):
            read_whole(open_checkpoint(path))
    for end in rng.integers(0, size, 30):
        path.write_bytes((tmp_path / "tiny.gguf").read_bytes()[: int(end)])
        with pytest.raises(UcformatError):
            open_checkpoint(path)
