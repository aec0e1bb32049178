"""Let vLLM generate by its own loader, or by what `capture` recorded of it: `captured_vllm.py REQUEST OUT`, of JSON.

`OUT.rank0`, … say what each rank of the tensor-parallel group read. `register` is a plugin of vLLM,
which its workers call too; `UCFORMAT_CAPTURED` is OUT.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch


def register() -> None:
    """Add the load format `captured`."""
    out = os.environ["UCFORMAT_CAPTURED"]
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    import ucformat.torch

    class Captured(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            place, config = model_config.model, model_config.hf_config
            captured = ucformat.torch.capture(model.load_weights, place, model=model, config=config)
            rank = torch.distributed.get_rank()
            captured.save(f"{out}.layout{rank}.json")
            captured = ucformat.torch.CapturedLayout.open(f"{out}.layout{rank}.json")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
            captured.load(model, place, config=config)
            plan = captured.plan(place)
            report = {
                "read": plan.bytes_read,
                "shard": sum(p.numel() * p.element_size() for p in model.parameters()),
                "engine": captured.document["captured"]["engine"],
                "names": [name for name, _ in model.named_parameters()],
            }
            Path(f"{out}.rank{rank}").write_text(json.dumps(report))

    register_model_loader("captured")(Captured)


def main() -> None:
    request, out = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["folder"],
        load_format=request["load_format"],
        tensor_parallel_size=2,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
    )
    how = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": request["prompt"]}], how, use_tqdm=False)
    Path(out).write_text(json.dumps(list(answer.outputs[0].token_ids)))


if __name__ == "__main__":
    main()
