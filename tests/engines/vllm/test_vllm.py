"""vLLM generates the same tokens as Transformers from what is exported, and from weights that are safetensors files.

`make .engines/vllm/.installed` installs it for CPU; `UCFORMAT_VLLM_PYTHON` names another
interpreter that has it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
import ucformat.torch
from tests.engines import engine
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.matrix, pytest.mark.engine]

PROMPT = [5, 17, 99, 3]
TOKENS = 12
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def generated(folders: Sequence[Path], into: Path) -> list[list[int]]:
    """What vLLM generates from each folder."""
    try:
        python = engine("vllm")
    except RuntimeError:
        pytest.skip("no vLLM: run `make .engines/vllm/.installed`, or set UCFORMAT_VLLM_PYTHON")
    request = {
        "folders": [str(f) for f in folders],
        "prompt": PROMPT,
        "tokens": TOKENS,
        "dtype": "float32",
    }
    (into / "request.json").write_text(json.dumps(request))
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    script = [
        str(python),
        "tests/engines/vllm/generate_vllm.py",
        str(into / "request.json"),
        str(into / "found.json"),
    ]
    done = subprocess.run(
        script, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[int]] = json.loads((into / "found.json").read_text())
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_vllm_generates_the_same(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.08)  # so that the most probable token is one by far
        wanted = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
        )
    model.save_pretrained(tmp_path / "assets")
    (tmp_path / "assets" / "model.safetensors").unlink()
    ucformat.torch.save(
        {"model": model}, tmp_path / "in_place", form="safetensors", assets=tmp_path / "assets"
    )
    ucformat.torch.save({"model": model}, tmp_path / "arrays")
    ucformat.export(
        tmp_path / "arrays",
        tmp_path / "exported",
        "safetensors",
        assets=tmp_path / "assets",
        max_shard_bytes=500_000,
    )
    assert len(list((tmp_path / "exported").glob("*.safetensors"))) > 1
    url = ucformat.open(tmp_path / "in_place").hf_url
    assert url is not None
    found = generated([Path(url), tmp_path / "exported"], tmp_path)
    assert found == [wanted[0].tolist()[len(PROMPT) :]] * 2
