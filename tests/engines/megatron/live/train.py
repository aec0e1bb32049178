"""Train a tiny GPT of Megatron-Core under one layout, and save and load it on the way.

Run by ranks that are forked with Megatron-Core imported: `train.py JOB`, JSON of the form `{"spec",
"actions", "to"}`: the layout as in `tests/data/megatron/make.py`, what is done in order, and the
file for the losses of the steps.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import tests.engines.megatron.live.beside  # noqa: F401
from tests.engines.megatron.live import emerging, fused_adam
from tests.engines.megatron.load_megatron import keep_steps, maker
from tests.torch.leaving import leave

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, SEQUENCE = 4, 6  # of a batch


class Training:
    """The model and its optimizer on one rank."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from megatron.core import parallel_state as ps
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.transformer.moe import moe_utils

        if not hasattr(moe_utils, "te_general_gemm"):  # a NameError without Transformer Engine
            moe_utils.te_general_gemm = None
        self.spec, self.ps = spec, ps
        if "muon" in spec:
            emerging.provide()
        if spec.get("fused"):
            fused_adam.provide()
        made_by = maker()
        made_by.VOCAB = spec.get("vocab", made_by.VOCAB)
        self.run = made_by.built(spec, getattr(self, "wrap", made_by.data_parallel))
        self.chunks, self.optimizer = self.run.chunks, self.run.optimizer
        self.step_number = 0
        self.told: dict[str, Any] = {}
        for chunk in self.chunks:
            chunk.eval()  # without dropout
            chunk.config.finalize_model_grads_func = finalize_model_grads
            chunk.config.grad_scale_func = self.optimizer.scale_loss
            chunk.config.batch_p2p_comm = False
        all_to_all = dist.all_to_all_single  # the expert dispatcher passes sizes as tensors

        def with_lists(
            out: Any, own: Any, out_sizes: Any = None, own_sizes: Any = None, **how: Any
        ) -> Any:
            out_sizes, own_sizes = (
                how.pop("output_split_sizes", out_sizes),
                how.pop("input_split_sizes", own_sizes),
            )
            sizes = (s.tolist() if hasattr(s, "tolist") else s for s in (out_sizes, own_sizes))
            return all_to_all(out, own, *sizes, **how)

        dist.all_to_all_single = with_lists

    def step(self) -> float:
        """One step, with the same batch of all data-parallel ranks together under every layout; the loss."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rank, ranks = self.ps.get_data_parallel_rank(), self.ps.get_data_parallel_world_size()
        g = torch.Generator().manual_seed(1000 + self.step_number)
        tokens = torch.randint(0, 19, (ROWS, SEQUENCE), generator=g)
        batches = [tokens[i : i + 1] for i in range(rank, ROWS, ranks)]
        mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)

        def forward(iterator: Any, net: Any) -> Any:
            x = next(iterator)
            out = net(x, torch.arange(SEQUENCE).expand_as(x), mask, labels=torch.roll(x, -1, 1))
            return out, lambda t: (t.float().mean(), {"loss": t.detach().float().mean()})

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        iterators = [iter(batches) for _ in self.chunks]
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        self.step_number += 1
        total = sum((x["loss"] for x in losses), torch.zeros(()))
        dist.all_reduce(total)
        return float(total) / ROWS / int(self.spec.get("tp", 1))

    def model(self) -> dict[str, Any]:
        states = [c.module.sharded_state_dict(metadata={}) for c in self.chunks]
        if len(states) == 1:
            return {"model": states[0]}
        return {f"model{i}": state for i, state in enumerate(states)}

    def state(self) -> dict[str, Any]:
        args = Namespace(**vars(self.run.args), rank=dist.get_rank())
        return {
            **self.model(),
            "optimizer": self.optimizer,
            "args": args,
            "iteration": self.step_number,
            "checkpoint_version": 3.0,
        }

    def listed(self) -> list[str]:
        """The tensors that this rank can only list, as their boxes do not follow from a description."""
        import ucformat.torch.megatron

        state = ucformat.torch.megatron.collect(self.state())
        return sorted(str(t.key) for t in state.tensors if t.distribution is None)

    def load(self, place: str, **options: Any) -> None:
        import ucformat.torch.megatron

        state = {**self.model(), "optimizer": self.optimizer}
        report = ucformat.torch.megatron.load(state, place, certify=True, **options)
        self.told = {
            "left": report.left,
            "problems": report.problems.lines(unexpected=True),
            "complete": bool(report),
            "state": sorted(report.state),
        }
        for name, chunk in zip(self.model(), self.chunks, strict=True):
            if name in report.state:  # otherwise the chunk stood for itself, and is loaded
                chunk.module.load_state_dict(report.state[name])
        self.step_number = report.state["iteration"]

    def load_llama(self, place: str) -> None:
        """Load the weights of a Hugging Face model."""
        import ucformat
        import ucformat.torch.megatron

        options = {"heads": 4, "groups": 2, "local": True}
        model = ucformat.open(place).view([{"preset": "llama-to-megatron", "with": options}])
        ucformat.torch.megatron.load(self.model(), model, strict=True)
        self.optimizer.reload_model_params()

    def with_strategy(self, place: str, *, loading: bool) -> None:
        """Save, or load, by Megatron's own functions with our strategies, as its training loop does."""
        from megatron.core import dist_checkpointing

        import ucformat.torch.megatron

        how = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}
        saving, for_load = ucformat.torch.megatron.strategies(self.optimizer)
        if loading:
            self.run.step(7)  # makes the states, which Megatron-Core does not without Apex
        model = self.model()
        of_optimizer = self.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=dict(how)
        )
        if not loading:
            args = self.run.args
            state = {
                **model,
                "optimizer": of_optimizer,
                "args": args,
                "iteration": self.step_number,
            }
            Path(place).mkdir(exist_ok=True)
            dist.barrier()
            dist_checkpointing.save(state, place, saving, content_metadata=how)
            return
        keep_steps()
        loaded = dist_checkpointing.load({**model, "optimizer": of_optimizer}, place, for_load)
        for name, chunk in zip(model, self.chunks, strict=True):
            chunk.module.load_state_dict(loaded[name])
        self.optimizer.load_state_dict(loaded["optimizer"])
        for optimizer in self.run.optimizers:
            for held in optimizer.optimizer.state.values():
                held["step"] = held["step"].clone()  # it is one tensor, which each would count up
        self.step_number = loaded["iteration"]

    def engines_own(self, folder: Path) -> None:
        """Save with Megatron's own strategy, in a format that it may load under another layout."""
        from megatron.core import dist_checkpointing

        how = {"chained_optim_avoid_prefix": True}
        if "optimizer" in self.spec:
            how["distrib_optim_sharding_type"] = self.spec["optimizer"]
        state = self.state()
        state["optimizer"] = self.optimizer.sharded_state_dict(self.model(), metadata=dict(how))
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(state, str(folder), content_metadata=how)


def main(job: dict[str, Any], kind: type[Training] = Training) -> None:
    import ucformat.torch.megatron as um

    training = kind(job["spec"])
    losses: list[float] = []

    def gradients(count: int) -> None:
        for _ in range(count):
            training.run.step(training.step_number)
            training.step_number += 1

    actions: dict[str, Callable[[Any], object]] = {
        "train": lambda count: losses.extend(training.step() for _ in range(count)),
        "gradients": gradients,
        "save": lambda place: um.save(training.state(), place),
        "load": training.load,
        "cast": lambda place: training.load(place, cast=True),
        "llama": training.load_llama,
        "own": lambda place: training.engines_own(Path(place)),
        "list": lambda _: training.told.update(listed=training.listed()),
        "strategy_save": lambda place: training.with_strategy(place, loading=False),
        "strategy_load": lambda place: training.with_strategy(place, loading=True),
    }
    for action in job["actions"]:
        for what, value in action.items():
            actions[what](value)
    if dist.get_rank() == 0:
        Path(job["to"]).write_text(json.dumps({"losses": losses, **training.told}))
    leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
