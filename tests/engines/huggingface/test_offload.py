"""Offload folders of Accelerate, as it writes them, and PyTorch files with an index, as Transformers did."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from accelerate.utils import OffloadedWeightsLoader, offload_state_dict
from huggingface_hub import save_torch_state_dict

import ucformat
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import (
    IntegrityError,
    MissingData,
    NotACheckpoint,
    TensorNotFound,
    UcformatError,
    UnsupportedError,
)
from ucformat.testing.sources import read_whole

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = {"part": False}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "a.weight": torch.randn(3, 5),
        "a.bias": torch.randn(5).bfloat16(),  # NumPy has no bfloat16: huggingface/accelerate#454
        "eight": torch.randn(4, 2).to(torch.float8_e4m3fn),
        "half": torch.randn(2).half(),
        "ids": torch.arange(3),
        "mask": torch.tensor([True, False]),
        "scale": torch.tensor(2.5),  # has no dims, and its file one
    }


def raw(tensor: torch.Tensor) -> bytes:
    data: bytes = (
        (tensor.reshape(-1).view(torch.uint8) if tensor.dim() else tensor).numpy().tobytes()
    )
    return data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    offload_state_dict(tmp_path / "offload", tensors())
    return tmp_path / "offload"


def test_every_tensor_is_accelerates_bit_for_bit(folder: Path) -> None:
    ck = ucformat.open(folder, options=WHOLE)
    assert ck.kind == "offload"
    loader = OffloadedWeightsLoader(save_folder=str(folder))
    read = read_whole(ck)
    assert {name for _, name in read} == set(loader) == set(tensors())
    for (_, name), (dtype, shape, data) in read.items():
        expected = loader[name]
        assert (dtype, shape) == (str(expected.dtype).removeprefix("torch."), tuple(expected.shape))
        assert data == raw(expected) == raw(tensors()[name])
    assert ck["a.weight"][1:, 2:4].tolist() == tensors()["a.weight"][1:, 2:4].tolist()


def test_it_may_be_a_part(folder: Path, tmp_path: Path) -> None:
    """A device map leaves other modules on devices, and nothing in the folder tells of them."""
    with pytest.raises(NotACheckpoint, match="no file tells whether tensors stayed elsewhere"):
        open_checkpoint(folder)
    part = ucformat.open(folder, options={"part": True})
    assert part.metadata.part_of
    made = ucformat.convert(part, tmp_path / "made")
    assert made.metadata.part_of == part.metadata.part_of
    assert not ucformat.open(folder, options=WHOLE).metadata.part_of


def test_a_model_that_transformers_has_offloaded(tmp_path: Path) -> None:
    """Weights of safetensors files are not copied: the index has the path of their file, which is elsewhere."""
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=4)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    file = str(tmp_path / "model" / "model.safetensors")
    entry = {"safetensors_file": file, "weight_name": "transformer.wte.weight", "dtype": "float32"}
    offload_state_dict(tmp_path / "offload", tensors())
    index = json.loads((tmp_path / "offload" / "index.json").read_text())
    (tmp_path / "offload" / "index.json").write_text(json.dumps({**index, "wte": entry}))
    ck = ucformat.open(tmp_path / "offload", options=WHOLE)
    assert OffloadedWeightsLoader(save_folder=str(tmp_path / "offload"))["wte"].shape == (11, 8)
    assert "was not copied here" in next(iter(ck.unreadable.values()))
    with pytest.raises(UnsupportedError, match="wte"):
        ucformat.convert(ck, tmp_path / "made")


def changed(folder: Path, name: str, **entry: Any) -> Path:
    index = json.loads((folder / "index.json").read_text())
    index[name] = {**index.get(name, {"dtype": "float32", "shape": [1]}), **entry}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b"])
def test_names_that_lead_elsewhere(name: str, folder: Path) -> None:
    (folder.parent / "outside.dat").write_bytes(bytes(4))
    with pytest.raises(UcformatError) as error:
        ucformat.open(changed(folder, name), options=WHOLE)
    assert not isinstance(error.value, TensorNotFound | MissingData)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"shape": [3, 6]}, "has 60 bytes, but float32"),
        ({"shape": [-3, 5]}, "the shape"),
        ({"shape": "x"}, "the shape"),
        ({"shape": [1 << 60, 0]}, "the shape"),
        ({"dtype": 4}, "the data type"),
    ],
)
def test_an_index_that_does_not_fit(entry: dict[str, Any], error: str, folder: Path) -> None:
    with pytest.raises(IntegrityError, match=error):
        ucformat.open(changed(folder, "a.weight", **entry), options=WHOLE)


def test_what_is_missing_or_unknown(folder: Path) -> None:
    ck = ucformat.open(changed(folder, "ids", dtype="int128"), options=WHOLE)
    assert [key.name for key in ck.unreadable] == ["ids"]
    (folder / "half.dat").unlink()
    with pytest.raises(MissingData, match=r"half\.dat is missing"):
        ucformat.open(folder, options=WHOLE)
    (folder / "index.json").write_text("[]")
    with pytest.raises(IntegrityError, match="not an index of offloaded tensors"):
        ucformat.open(folder, options=WHOLE)


def test_pytorch_files_with_an_index(tmp_path: Path) -> None:
    """Transformers before 5 wrote them; huggingface_hub still does."""
    state = {f"layers.{i}.weight": torch.full((8, 8), float(i)) for i in range(6)}
    save_torch_state_dict(state, tmp_path, safe_serialization=False, max_shard_size=600)
    assert len(list(tmp_path.glob("pytorch_model-*.bin"))) > 1
    ck = open_checkpoint(tmp_path)
    assert {n: ck[n].read().tobytes() for n in ck} == {n: raw(t) for n, t in state.items()}
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    index["weight_map"]["layers.0.weight"] = "../pytorch_model-00001-of-00003.bin"
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(UcformatError):
        open_checkpoint(tmp_path)
