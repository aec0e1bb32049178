"""Load distributed checkpoints with Megatron-Core itself, under any layout; save what the ranks then have.

Run by torchrun in the virtual environment that has Megatron: `load_megatron.py JOB`, JSON of the
form `{"spec", "from", "to"}`: the layout as in `tests/data/megatron/make.py`, the checkpoint, and
the folder for `loaded/truth.safetensors`, every tensor whole, and `resumed/truth.safetensors`, the
same after one more step.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))  # for `tests`

from tests.torch.leaving import leave

_MAKER = Path(__file__).parents[2] / "data" / "megatron" / "make.py"


def maker() -> Any:
    spec = importlib.util.spec_from_file_location("megatron_maker", _MAKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["megatron_maker"] = module
    spec.loader.exec_module(module)
    return module


def keep_steps() -> None:
    """Without Apex and Transformer Engine, Megatron-Core 0.16.1 asks a checkpoint for the step of each parameter."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def put_all(self: Any, p: Any, tensors: dict[str, Any]) -> None:
        own = self._get_main_param_and_optimizer_states(p)
        put(self, p, {**({"step": own["step"]} if "step" in own else {}), **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = put_all


def main(job: dict[str, Any]) -> None:
    run = maker().built(job["spec"])
    import megatron.core as mc
    from megatron.core import dist_checkpointing

    keep_steps()
    run.step(7)  # makes the states, which the checkpoint then replaces
    metadata = dist_checkpointing.load_content_metadata(job["from"])
    chunks = [c.module.sharded_state_dict(metadata=dict(metadata)) for c in run.chunks]
    model = (
        {"model": chunks[0]} if len(chunks) == 1 else {f"model{i}": m for i, m in enumerate(chunks)}
    )
    state = {
        **model,
        "optimizer": run.optimizer.sharded_state_dict(
            model, is_loading=True, metadata=dict(metadata)
        ),
    }
    loaded = dist_checkpointing.load(state, job["from"], strict="raise_unexpected")
    for i, chunk in enumerate(run.chunks):
        chunk.module.load_state_dict(loaded["model" if len(run.chunks) == 1 else f"model{i}"])
    run.optimizer.load_state_dict(loaded["optimizer"])
    for optimizer in run.optimizers:
        for held in optimizer.optimizer.state.values():
            held["step"] = held[
                "step"
            ].clone()  # it is one tensor for all parameters, which each would count up
    to = Path(job["to"])
    for name in ("loaded", "resumed"):
        (to / name).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        run.save_truth(to / name, mc.__version__)
        run.step(2)
    facts = {"iteration": loaded["iteration"], "torch": torch.__version__}
    (to / "facts.json").write_text(json.dumps(facts))
    leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
