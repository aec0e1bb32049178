"""vLLM generates the same tokens as Transformers from exports, weights that are safetensors files, and a server.

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
from tests.web.serving import serving
from ucformat.web.library import Presentation

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


def generated(
    folders: Sequence[Path | str], into: Path, endpoint: str | None = None
) -> list[list[int]]:
    """What vLLM generates from each folder, or repository of a server."""
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
        **({"HF_ENDPOINT": endpoint} if endpoint else {"HF_HUB_OFFLINE": "1"}),
        "HF_HOME": str(into / "home"),
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
    options: dict[str, Any] = {"stage": 3, "world": 2, "weights_only": True, "step": 1}
    ucformat.export(tmp_path / "arrays", tmp_path / "zero3", "deepspeed", buffers="none", **options)
    served = {name: ucformat.open(tmp_path / name) for name in ("arrays", "zero3")}
    presentation = Presentation(options={"assets": str(tmp_path / "assets")})
    with serving(places=served, presentation=presentation) as ask:
        places: list[Path | str] = [Path(url), tmp_path / "exported", *served]
        found = generated(places, tmp_path, ask.url)
    assert found == [wanted[0].tolist()[len(PROMPT) :]] * 4
