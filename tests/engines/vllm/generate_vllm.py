"""Let vLLM generate from folders of models, greedily: `generate_vllm.py REQUEST OUT`, both JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    request = json.loads(Path(sys.argv[1]).read_text())
    found = []
    for folder in request["folders"]:
        llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype=request["dtype"],
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=2,
        )
        how = SamplingParams(
            temperature=0, max_tokens=request["tokens"], detokenize=False, ignore_eos=True
        )
        (answer,) = llm.generate([{"prompt_token_ids": request["prompt"]}], how, use_tqdm=False)
        found.append(list(answer.outputs[0].token_ids))
        del llm  # a process has one engine at a time
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
