"""Exports that Hugging Face's transformers load, from what engines save: equal logits."""

from __future__ import annotations

import json
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.torch import save_file

import ucformat
import ucformat.torch
from tests.exporters.sources import opened, random_arrays
from tests.fakes import random_array
from tests.zero_files import FLAT, write_zero3
from ucformat.errors import UnsupportedError, UsageError
from ucformat.exporters.safetensors import written_names
from ucformat.geometry.tensor import TensorInfo
from ucformat.jobs.export import plan_export

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

torch = pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")
transformers = pytest.importorskip("transformers", reason="pip install transformers")

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, **HEADS},
    "llama-tied": {**SMALL, **HEADS, "tie_word_embeddings": True},
    "qwen3": {**SMALL, **HEADS},
    "mixtral": {**SMALL, **HEADS, "num_local_experts": 3},
    "gemma": {**SMALL, **HEADS},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 64},
}
TOKENS = torch.arange(24).reshape(2, 12) % 97


def made(family: str) -> Any:
    config = transformers.AutoConfig.for_model(family.partition("-")[0], **FAMILIES[family])
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(TOKENS).logits


def saved(model: Any, folder: Path, way: str) -> Path:
    """Save a model as an engine does."""
    state = model.state_dict()
    if way == "universal":
        ucformat.torch.save({"model": model}, folder)
    elif way == "dcp":
        from torch.distributed import checkpoint as dcp

        with warnings.catch_warnings(action="ignore"):  # that one process saves
            dcp.save({"model": state}, checkpoint_id=folder)
    elif way == "torch":
        folder.mkdir()
        torch.save(state, folder / "model.pt")
    else:
        names = dict(model.named_parameters())  # those of tied tensors once, as engines have them
        arrays = {
            (n, s): (
                p.detach().numpy() if s == "master" else random_array(tuple(p.shape), "float32", k)
            )
            for n, p in names.items()
            for k, s in enumerate(FLAT)
        }
        return write_zero3(folder, arrays, 2) / "global_step5"
    return folder


@pytest.mark.parametrize("way", ["universal", "dcp", "torch", "deepspeed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_from_pretrained_has_equal_logits(tmp_path: Path, family: str, way: str) -> None:
    model = made(family)
    model.config.save_pretrained(tmp_path / "config")
    source = saved(model, tmp_path / "saved", way)
    ck = ucformat.open(source)
    for most in (20_000, 10**9):
        done = ucformat.export(
            ck,
            tmp_path / f"out{most}",
            "safetensors",
            assets=str(tmp_path / "config"),
            max_shard_bytes=most,
        )
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            done.url, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert torch.equal(logits(loaded.eval()), logits(model))


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3", "mixtral", "gpt2"])
def test_from_megatron_through_a_view(tmp_path: Path, family: str) -> None:
    model, name = made(family), family.partition("-")[0]
    model.config.save_pretrained(tmp_path / "config")
    model.save_pretrained(tmp_path / "hf")
    named = ucformat.open(tmp_path / "hf").view(f"{name}-to-megatron")
    ucformat.export(named, tmp_path / "megatron", "megatron")
    heads = {"heads": 4} if name == "gpt2" else {"heads": 4, "groups": 2}
    source = ucformat.open(
        tmp_path / "megatron", view=[{"preset": f"megatron-to-{name}", "with": heads}]
    )
    done = ucformat.export(source, tmp_path / "out", "safetensors", assets=str(tmp_path / "config"))
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        done.url, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(loaded.eval()), logits(model))


def test_assets_of_the_checkpoint_are_carried_over(tmp_path: Path) -> None:
    made("llama-tied").save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text('{"version": "1.0"}')
    ck = ucformat.convert(tmp_path / "hf", tmp_path / "u")
    for source in (ck, ucformat.open(tmp_path / "hf")):
        done = ucformat.export(source, tmp_path / f"out-{source.kind}", "safetensors")
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            assert (tmp_path / f"out-{source.kind}" / name).read_bytes() == (
                tmp_path / "hf" / name
            ).read_bytes()
        assert not any("config.json" in what for what in done.left_out)


def test_tied_names_come_back(tmp_path: Path) -> None:
    arrays = {("lm_head.weight", "weight"): random_array((7, 4), "bfloat16")}
    source = opened(
        arrays, aliases={"model.embed_tokens.weight": "lm_head.weight", "format": "lm_head.weight"}
    )
    ucformat.export(source, tmp_path / "out", "safetensors")
    with safetensors_file(tmp_path / "out" / "model.safetensors") as header:
        assert header["__metadata__"] == {
            "format": "pt",
            "lm_head.weight": "model.embed_tokens.weight",
        }
    back = ucformat.open(tmp_path / "out")
    assert back.names() == ["model.embed_tokens.weight"]
    assert back["lm_head.weight"].read().tobytes() == arrays["lm_head.weight", "weight"].tobytes()
    infos = [TensorInfo("a", "weight", "float32", ())]
    assert written_names({"embed_tokens.weight": "a", "wte": "a"}, infos) == {
        "a": "embed_tokens.weight"
    }
    assert written_names({"embedder": "a"}, infos) == {"a": "a"}


@contextmanager
def safetensors_file(file: Path) -> Iterator[dict[str, Any]]:
    """The header of a file."""
    data = file.read_bytes()
    yield json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_files_that_the_library_writes_are_equal(tmp_path: Path) -> None:
    """Of tensors in its order: of falling alignment, then by name."""
    names = [("z", "int64"), ("a", "float32"), ("b", "float32"), ("c", "bfloat16"), ("d", "bool")]
    arrays = {(n, "weight"): random_array((3, 5), dtype, k) for k, (n, dtype) in enumerate(names)}
    ucformat.export(opened(arrays), tmp_path / "out", "safetensors")
    tensors = {n: torch.from_numpy(a.view(np.uint8).copy()) for (n, _), a in arrays.items()}
    dtypes = {
        "int64": torch.int64,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "bool": torch.bool,
    }
    typed = {n: tensors[n].view(dtypes[dtype]).reshape(3, 5) for n, dtype in names}
    save_file(typed, tmp_path / "theirs.safetensors", {"format": "pt"})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "theirs.safetensors"
    ).read_bytes()


def test_what_safetensors_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"a \(weight\) has the dtype complex128, which safetensors"
    ):
        plan_export(opened({("a", "weight"): random_array((2,), "complex128")}), "safetensors")
    with pytest.raises(UnsupportedError, match="no tensor of the name '__metadata__'"):
        plan_export(
            opened({("__metadata__", "weight"): random_array((2,), "float32")}), "safetensors"
        )
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"has no config\.json"):
        plan_export(opened(random_arrays(0)), "safetensors", assets=str(tmp_path / "empty"))
    with pytest.raises(UsageError, match="at least 1"):
        plan_export(opened(random_arrays(0)), "safetensors", max_shard_bytes=0)


def test_the_configuration_of_a_sub_model_is_not_that_of_the_model(tmp_path: Path) -> None:
    model = made("llama")
    model.save_pretrained(tmp_path / "hf")
    sub = ucformat.open(tmp_path / "hf").view(
        [{"select": r"/model\.layers\.(\d+)\..*/", "indices": [1]}]
    )
    done = ucformat.export(sub, tmp_path / "out", "safetensors")
    assert "the asset config.json" in done.left_out
    assert not (tmp_path / "out" / "config.json").exists()
    one = transformers.AutoConfig.for_model(
        "llama", **{**FAMILIES["llama"], "num_hidden_layers": 1}
    )
    one.save_pretrained(tmp_path / "config")
    ucformat.export(sub, tmp_path / "right", "safetensors", assets=str(tmp_path / "config"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "right").eval()
    model.model.layers = model.model.layers[1:]
    model.model.layers[0].self_attn.layer_idx = 0
    assert torch.equal(logits(loaded), logits(model))
