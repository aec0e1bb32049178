"""vLLM's own loader at TP 2, captured: each rank reads its bytes only, and the tokens are the same.

`make .engines/vllm/.installed` installs it for CPU; `UCFORMAT_VLLM_PYTHON` names another
interpreter that has it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import engine
from tests.patience import PATIENCE

pytestmark = [pytest.mark.matrix, pytest.mark.engine]

PROMPT = [5, 17, 99, 3]
TOKENS = 12
# Rows of a rank's columns are 1 KiB and more, and the vocabulary is padded to 1024.
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def generated(python: Path, folder: Path, load_format: str, into: Path) -> list[int]:
    """What vLLM generates on two ranks, with its own loader or the captured one."""
    request = {"folder": str(folder), "load_format": load_format, "prompt": PROMPT}
    (into / "request.json").write_text(json.dumps(request))
    plugin = into / "plugin" / "captured-1.dist-info"
    plugin.mkdir(parents=True, exist_ok=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: captured\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ncaptured = captured_vllm:register\n"
    )
    found_in = (Path.cwd(), Path.cwd() / "tests/engines/vllm", plugin.parent)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(map(str, found_in)),
        "UCFORMAT_CAPTURED": str(into / load_format),
        "UCP_CATALOG": "none",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    script = "tests/engines/vllm/captured_vllm.py"
    done = subprocess.run(
        [str(python), script, str(into / "request.json"), str(into / load_format)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (into / load_format).exists(), done.stdout[-2000:] + done.stderr[-3000:]
    tokens: list[int] = json.loads((into / load_format).read_text())
    return tokens


@pytest.mark.parametrize("load_format", ["captured", "auto"])
def test_the_tokens_are_the_same_and_only_the_shard_is_read(
    tmp_path: Path, load_format: str
) -> None:
    """Those of vLLM's own loader are those of Transformers, and so are those of the captured layout."""
    transformers = pytest.importorskip("transformers")
    try:
        python = engine("vllm")
    except RuntimeError:
        pytest.skip("no vLLM: run `make .engines/vllm/.installed`, or set UCFORMAT_VLLM_PYTHON")
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.08)  # so that the most probable token is one by far
        wanted = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
        )
    model.save_pretrained(tmp_path / "model")
    found = generated(python, tmp_path / "model", load_format, tmp_path)
    assert found == wanted[0].tolist()[len(PROMPT) :]
    for rank in range(2) if load_format == "captured" else ():
        report = json.loads((tmp_path / f"captured.rank{rank}").read_text())
        assert report["read"] <= 1.05 * report["shard"]
        assert any("vllm" in package for package in report["engine"])
        assert any(name.endswith("qkv_proj.weight") for name in report["names"])
