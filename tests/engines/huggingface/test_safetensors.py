from __future__ import annotations

import json
import struct
import uuid
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests.sources.suite import SourceSuite
from ucformat.checkpoint import open_checkpoint
from ucformat.engines.huggingface.safetensors import Safetensors
from ucformat.errors import (
    IntegrityError,
    MissingData,
    NotACheckpoint,
    UcformatError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from ucformat.schema import SAFETENSORS_DTYPES, SAFETENSORS_PACKED
from ucformat.sources.safetensors import parse_header, read_header
from ucformat.storage.memory import MemoryStore
from ucformat.testing.sources import Sample

if TYPE_CHECKING:
    from pathlib import Path

DTYPE_NAMES = [
    name
    for name in SAFETENSORS_DTYPES.values()
    if name != "bool" and name not in SAFETENSORS_PACKED
]


def arrays(
    names: dict[str, tuple[int, ...]], dtype: str = "float32"
) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(3)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return {
        n: rng.integers(0, 255, (*shape, kind.itemsize), np.uint8).view(kind)[..., 0]
        for n, shape in names.items()
    }


LAYER = {
    "embed.weight": (7, 5),
    "layers.0.w": (5, 3),
    "layers.1.w": (5, 3),
    "norm": (5,),
    "nothing": (0, 4),
    "one": (),
}


def written(folder: Path, files: dict[str, list[str]], **more: Any) -> Sample:
    """These tensors in these files, as the safetensors library writes them."""
    folder.mkdir(exist_ok=True)
    whole = arrays(LAYER)
    for file, names in files.items():
        save_file({n: whole[n] for n in names}, folder / file, metadata={"format": "np"})
    truth = {("weight", n): ("float32", a.shape, a.tobytes()) for n, a in whole.items()}
    return Sample(folder, more.pop("place", "."), "safetensors", truth, **more)


def index(
    folder: Path, files: dict[str, list[str]], name: str = "model.safetensors.index.json"
) -> None:
    weight_map = {n: file for file, names in files.items() for n in names}
    (folder / name).write_text(
        json.dumps({"metadata": {"total_size": 3, "loss": 0.5}, "weight_map": weight_map})
    )


SHARDS = {
    "model-00001-of-00002.safetensors": ["embed.weight", "nothing", "one"],
    "model-00002-of-00002.safetensors": ["layers.0.w", "layers.1.w", "norm"],
}


class TestAFile(SourceSuite):
    @pytest.fixture
    def sample(self, tmp_path: Path) -> Sample:
        return written(
            tmp_path / "m", {"weights.safetensors": list(LAYER)}, place="weights.safetensors"
        )

    def test_its_folder_is_the_file(self, sample: Sample) -> None:
        ck = sample.open()
        assert ck.metadata.folder == "weights.safetensors"
        assert ck.home == f"{sample.folder}/weights.safetensors"
        assert [i.key for i in ck.files()] == ["weights.safetensors"]
        assert dict(ck.objects) == {"metadata": {"format": "np"}}


class TestAModelsFolder(SourceSuite):
    @pytest.fixture
    def sample(self, tmp_path: Path) -> Sample:
        sample = written(tmp_path / "m", {"model.safetensors": list(LAYER)})
        for name in (
            "config.json",
            "tokenizer.json",
            "README.md",
            "chat_template.jinja",
            "further.json",
        ):
            (sample.folder / name).write_text("{}")
        (sample.folder / "optimizer.onnx").write_text("no asset")
        return sample

    def test_small_files_beside_it_are_assets(self, sample: Sample) -> None:
        ck = sample.open()
        texts = {
            "config.json",
            "tokenizer.json",
            "README.md",
            "chat_template.jinja",
            "further.json",
        }
        assert set(ck.metadata.assets) == texts
        assert dict(ck.unread) == {"optimizer.onnx": 8}
        assert set(ck.assets) == texts | {"optimizer.onnx"}


class TestAnIndex(SourceSuite):
    @pytest.fixture
    def sample(self, tmp_path: Path) -> Sample:
        sample = written(tmp_path / "m", SHARDS)
        index(sample.folder, SHARDS)
        return sample

    def test_its_metadata_is_kept(self, sample: Sample) -> None:
        assert sample.open().objects["index"] == {"total_size": 3, "loss": 0.5}

    def test_the_index_itself_opens(self, sample: Sample) -> None:
        ck = open_checkpoint(sample.folder / "model.safetensors.index.json")
        assert len(ck) == len(LAYER)


class TestShardsWithoutIndex(SourceSuite):
    @pytest.fixture
    def sample(self, tmp_path: Path) -> Sample:
        return written(tmp_path / "m", SHARDS)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_every_dtype_is_read_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    a = arrays({"a": (3, 5)}, dtype)["a"]
    name = next(k for k, v in SAFETENSORS_DTYPES.items() if v == dtype)
    header = json.dumps(
        {"a": {"dtype": name, "shape": [3, 5], "data_offsets": [0, a.nbytes]}}
    ).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + a.tobytes())
    safetensors.safe_open(tmp_path / "m.safetensors", "np")  # the library takes it too
    ck = open_checkpoint(tmp_path / "m.safetensors")
    assert ck["a"].info.dtype == dtype
    assert ck["a"].read().tobytes() == a.tobytes()


def test_names_that_save_model_dropped_are_aliases(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_model

    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    save_model(model, str(tmp_path / "model.safetensors"))
    assert open_checkpoint(tmp_path).aliases == {"b.weight": "a.weight"}


class TestWhichOne:
    """Several files in one folder."""

    def folder(self, tmp_path: Path, *files: str) -> Path:
        for file in files:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            save_file({file: np.ones(2, np.float32)}, tmp_path / file)
        return tmp_path

    @pytest.mark.parametrize(
        "files",
        [
            ("model.safetensors", "consolidated.safetensors"),
            ("model.safetensors", "other.safetensors"),
            ("adapter_model.safetensors",),
            ("anything.safetensors",),
            ("adapter_model.safetensors", "extra.safetensors"),
        ],
    )
    def test_the_one_that_is_a_model_counts(self, tmp_path: Path, files: tuple[str, ...]) -> None:
        assert open_checkpoint(self.folder(tmp_path, *files)).names() == [files[0]]

    @pytest.mark.parametrize(
        "files",
        [
            ("a.safetensors", "b.safetensors"),
            ("adapter_model.safetensors", "model.safetensors"),
            ("model-00001-of-00001.safetensors", "model.safetensors"),
        ],
    )
    def test_else_the_error_names_them(self, tmp_path: Path, files: tuple[str, ...]) -> None:
        with pytest.raises(UsageError, match="several safetensors checkpoints") as error:
            open_checkpoint(self.folder(tmp_path, *files))
        assert "open one of them" in str(error.value)

    def test_a_pipeline_of_diffusers_names_its_parts(self, tmp_path: Path) -> None:
        folder = self.folder(
            tmp_path, "unet/diffusion_pytorch_model.safetensors", "vae/model.safetensors"
        )
        (folder / "model_index.json").write_text("{}")
        with pytest.raises(UsageError, match="several models: unet, vae"):
            open_checkpoint(folder)
        assert len(open_checkpoint(folder / "unet")) == 1

    def test_a_shard_alone_is_not_the_checkpoint(self, tmp_path: Path) -> None:
        written(tmp_path / "m", SHARDS)
        with pytest.raises(NotACheckpoint, match="one of 2 shards"):
            open_checkpoint(tmp_path / "m" / "model-00001-of-00002.safetensors")

    def test_a_shard_that_is_missing(self, tmp_path: Path) -> None:
        written(tmp_path / "m", SHARDS)
        (tmp_path / "m" / "model-00001-of-00002.safetensors").unlink()
        with pytest.raises(MissingData, match=r"model-00001-of-00002\.safetensors is missing"):
            open_checkpoint(tmp_path / "m")

    def test_a_name_in_two_shards(self, tmp_path: Path) -> None:
        written(tmp_path / "m", {k: ["norm", *v] for k, v in SHARDS.items()})
        with pytest.raises(IntegrityError, match="'norm' is in"):
            open_checkpoint(tmp_path / "m")


class TestAnIndexThatDisagrees:
    def disagreeing(self, tmp_path: Path, change: Any) -> Path:
        written(tmp_path / "m", SHARDS)
        index(tmp_path / "m", change(SHARDS))
        return tmp_path / "m"

    def test_it_names_a_shard_that_is_missing(self, tmp_path: Path) -> None:
        folder = self.disagreeing(
            tmp_path, lambda files: {**files, "model-00003-of-00003.safetensors": ["lost"]}
        )
        with pytest.raises(MissingData, match=r"model-00003-of-00003.* is missing.*'lost'"):
            open_checkpoint(folder)

    def test_it_names_a_tensor_that_is_missing(self, tmp_path: Path) -> None:
        first = next(iter(SHARDS))
        folder = self.disagreeing(tmp_path, lambda files: {**files, first: [*files[first], "lost"]})
        with pytest.raises(MissingData, match=r"lacks 'lost'"):
            open_checkpoint(folder)

    def test_it_leaves_out_a_tensor(self, tmp_path: Path) -> None:
        first = next(iter(SHARDS))
        folder = self.disagreeing(tmp_path, lambda files: {**files, first: files[first][1:]})
        with pytest.raises(IntegrityError, match=r"contains 'embed\.weight'"):
            open_checkpoint(folder)

    @pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "a/../../x"])
    def test_it_leads_out_of_the_folder(self, tmp_path: Path, shard: str) -> None:
        with pytest.raises(UnsafeError, match="does not stay inside"):
            open_checkpoint(self.disagreeing(tmp_path, lambda files: {**files, shard: ["x"]}))

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000]
    )
    def test_it_is_no_index(self, tmp_path: Path, text: str) -> None:
        written(tmp_path / "m", SHARDS)
        (tmp_path / "m" / "model.safetensors.index.json").write_text(text)
        with pytest.raises(IntegrityError, match=r"model\.safetensors\.index\.json"):
            open_checkpoint(tmp_path / "m")


def holding(data: bytes) -> MemoryStore:
    """A store with this one file."""
    store = MemoryStore(uuid.uuid4().hex)
    store.put_if_absent("f.safetensors", data)
    return store


def entry(
    dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def parsed(header: bytes, data: int = 8) -> Any:
    return parse_header(header, 8 + len(header) + data, "f.safetensors")


class TestTheHeader:
    @pytest.mark.parametrize(
        ("header", "match"),
        [
            (b" {}", "begins with"),
            (b"[]", "begins with"),
            (b'{"a": 1', "cannot be read"),
            (b'{"a": NaN}', "NaN is not JSON"),
            (b'{"\xff": 1}', "cannot be read"),
            (b'{"a":' * 100_000, "cannot be read"),
            (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read"),
            (json.dumps({"__metadata__": {"a": 1}}).encode(), "__metadata__"),
            (json.dumps({"a": [1]}).encode(), "without exactly"),
            (json.dumps({"a": entry(more=1)}).encode(), "without exactly"),
            (json.dumps({"a": entry(shape=(2.0,))}).encode(), "gives the tensor"),
            (json.dumps({"a": entry(shape=(True, 2))}).encode(), "gives the tensor"),
            (json.dumps({"a": entry(shape=(-2,))}).encode(), "gives the tensor"),
            (json.dumps({"a": entry(shape="2")}).encode(), "gives the tensor"),
            (json.dumps({"a": entry(shape=(1 << 63,))}).encode(), "gives the tensor"),
            (json.dumps({"a": entry(offsets=(0, 8, 8))}).encode(), "gives the tensor"),
            (json.dumps({"a": entry(offsets=(8, 0))}).encode(), "-8 bytes"),
            (json.dumps({"a": entry(shape=(3,))}).encode(), "8 bytes, but F32"),
            (json.dumps({"a": entry(shape=[1 << 62] * 64)}).encode(), "8 bytes, but F32"),
            (json.dumps({"a": entry(), "b": entry()}).encode(), "overlaps the tensor 'a'"),
            (
                json.dumps({"a": entry(shape=(1,), offsets=(4, 8))}).encode(),
                "leaves a gap after the header",
            ),
            (json.dumps({"a": entry(shape=(1,), offsets=(0, 4))}).encode(), "should have .* bytes"),
            (
                json.dumps({"a": entry(shape=(3,), offsets=(0, 12))}).encode(),
                "should have .* bytes",
            ),
        ],
    )
    def test_what_is_damaged(self, header: bytes, match: str) -> None:
        with pytest.raises(IntegrityError, match=match) as error:
            parsed(header)
        assert error.value.hint
        assert "f.safetensors" in error.value.message

    def test_a_key_that_stands_there_twice(self) -> None:
        one = json.dumps({"a": entry()})[1:-1].encode()
        with pytest.raises(IntegrityError, match="'a' is used twice"):
            parsed(b"{" + one + b"," + one + b"}")

    @pytest.mark.parametrize("dtype", ["F9_E4M4", "F4_E2M1", "f32", ""])
    def test_an_unknown_dtype_makes_only_its_tensor_unreadable(self, dtype: str) -> None:
        header = parsed(json.dumps({"a": entry(dtype)}).encode())
        assert not header.tensors
        assert header.unreadable == {"a": f"has the dtype {dtype!r}, which ucformat does not know"}

    @pytest.mark.parametrize("dtype", [None, {}, 3])
    def test_a_dtype_that_is_no_text(self, dtype: Any) -> None:
        with pytest.raises(IntegrityError, match="data type"):
            parsed(json.dumps({"a": entry(dtype)}).encode())

    @pytest.mark.parametrize(
        ("dtype", "shape", "nbytes", "ours"),
        [
            ("F4", (2, 8), 8, (2, 4)),
            ("F6_E2M3", (2, 8), 12, (2, 6)),
            ("F6_E3M2", (4,), 3, (3,)),
            ("F4", (2,), 1, (1,)),
        ],
    )
    def test_values_that_share_bytes(
        self, dtype: str, shape: Any, nbytes: int, ours: tuple[int, ...]
    ) -> None:
        text = json.dumps({"a": entry(dtype, shape, (0, nbytes))}).encode()
        assert parse_header(text, 8 + len(text) + nbytes, "f").tensors["a"].shape == ours

    @pytest.mark.parametrize(
        ("dtype", "shape", "nbytes"),
        [("F4", (4, 3), 6), ("F6_E2M3", (2, 2), 3), ("F6_E3M2", (4, 1), 3)],
    )
    def test_rows_that_begin_within_a_byte(self, dtype: str, shape: Any, nbytes: int) -> None:
        text = json.dumps({"a": entry(dtype, shape, (0, nbytes))}).encode()
        assert (
            "rows do not begin at whole bytes"
            in parse_header(text, 8 + len(text) + nbytes, "f").unreadable["a"]
        )

    def test_padding_and_empty_tensors(self) -> None:
        header = {
            "e": entry(shape=(0, 1 << 40), offsets=(8, 8)),
            "a": entry(),
            "f": entry(shape=(0,), offsets=(0, 0)),
        }
        assert list(parsed(json.dumps(header).encode() + b"   ").tensors) == ["e", "a", "f"]

    @pytest.mark.parametrize(
        ("data", "match"),
        [
            (b"", "has 0 bytes"),
            (b"1234567", "has 7 bytes"),
            (struct.pack("<Q", 100_000_001), "more than 100,000,000"),
            (struct.pack("<Q", 1 << 63), "more than 100,000,000"),
            (struct.pack("<Q", 3) + b"{}", "but the file has 10"),
        ],
    )
    def test_its_length(self, data: bytes, match: str) -> None:
        store = holding(data)
        with pytest.raises(IntegrityError, match=match):
            read_header(store, "f.safetensors")

    def test_dcp_shards_are_refused(self) -> None:
        header = json.dumps({"__metadata__": {"DCP_SHARDING_INFO": "{}"}, "a": entry()}).encode()
        store = holding(struct.pack("<Q", len(header)) + header + bytes(8))
        with pytest.raises(UnsupportedError, match="HuggingFaceStorageWriter"):
            Safetensors().open(store)


def check_hostile(data: bytes) -> None:
    """A right read, or an error of ours; where the library reads it, so do we, and the same."""
    store = holding(data)
    try:
        source = Safetensors().open(store)
    except UcformatError:
        return
    if source.metadata.unreadable:  # of a dtype that the library does not know either
        return
    theirs = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    for info in source.metadata.tensor_list.tensors:
        extents = list(source.extents(info.key))
        ours = b"".join(store.read(e.file, e.offset, info.nbytes) for e in extents)
        assert ours == bytes(theirs[info.name]["data"])
        assert info.shape == tuple(theirs[info.name]["shape"])


@settings(max_examples=150)
@given(st.binary(max_size=200))
def test_arbitrary_bytes(data: bytes) -> None:
    check_hostile(data)
    check_hostile(struct.pack("<Q", max(0, len(data) - 8)) + data)


@settings(max_examples=150)
@given(
    st.dictionaries(
        st.text(max_size=3) | st.just("__metadata__"),
        st.fixed_dictionaries({
            "dtype": st.sampled_from([*SAFETENSORS_DTYPES, "F9"]),
            "shape": st.lists(st.integers(-1, 4) | st.integers(), max_size=3),
            "data_offsets": st.lists(st.integers(-1, 40), min_size=1, max_size=3),
        })
        | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
        max_size=4,
    ),
    st.integers(0, 48),
)  # fmt: skip
def test_arbitrary_headers(header: dict[str, Any], tail: int) -> None:
    text = json.dumps(header).encode()
    check_hostile(struct.pack("<Q", len(text)) + text + bytes(range(tail)))


@settings(max_examples=150)
@given(st.data())
def test_mutated_files(data: st.DataObject) -> None:
    text = json.dumps(
        {"__metadata__": {"a": "b"}, "x": entry(), "y": entry("U8", (2, 3), (8, 14))}
    ).encode()
    whole = bytearray(struct.pack("<Q", len(text)) + text + bytes(range(14)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        if data.draw(st.booleans()):
            whole[at] = data.draw(st.sampled_from(b'0123456789{}[]",:-eE.\x00\xff '))
        else:
            del whole[at : at + data.draw(st.integers(1, 3))]
    check_hostile(bytes(whole))
