"""As `train.py`, with Megatron-FSDP, whose CUDA streams and device meshes get the CPU: `fsdp.py JOB`."""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.engines.megatron.live.train import Training, main

if TYPE_CHECKING:
    from collections.abc import Iterator


class Done:
    """An operation that was not asynchronous."""

    def wait(self, *_: Any) -> None:
        """Nothing is left to wait for."""


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let the engine make its meshes and buffers on the CPU."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers

    @contextmanager
    def one_by_one(*_: Any, **__: Any) -> Iterator[Done]:
        yield Done()

    # what follows streams of CUDA, not the works that are waited for
    buffers._coalescing_manager = one_by_one
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        operation = getattr(dist, name)

        def at_once(*args: Any, run: Any = operation, async_op: bool = False, **how: Any) -> Done:
            run(*args, **how)
            return Done()

        setattr(dist, name, at_once)
    mesh_of = adapter.DeviceMesh.from_group

    class Meshes:
        @staticmethod
        def from_group(groups: Any, device_type: str, **how: Any) -> Any:
            return mesh_of(groups, "cpu", **how)

    adapter.DeviceMesh = Meshes

    def of_stage(replicas: Any, parts: Any, ep_size: int = 1) -> torch.Tensor:
        rows, columns = (dist.get_process_group_ranks(g) for g in (replicas, parts))
        return torch.tensor([[r + c - dist.get_rank() for c in columns] for r in rows])

    adapter._get_dp_tp_mesh = of_stage  # that of 0.16.1 takes all ranks for those of one stage
    adapter.TELinear = type("TELinear", (), {})  # without Transformer Engine no class
    current = torch.cuda.current_device
    torch.cuda.current_device = lambda: 0  # of which the engine makes names of devices
    try:
        yield
    finally:
        torch.cuda.current_device = current


class FsdpTraining(Training):
    """A model under Megatron-FSDP, and its optimizer, on one rank."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        syncs = [chunk.no_sync for chunk in self.chunks]
        # which also tells the engine the last batch, after which it reduces over all ranks
        self.chunks[0].config.no_sync_func = syncs[0] if len(syncs) == 1 else syncs

    @staticmethod
    def wrap(spec: dict[str, Any], config: Any, model: Any) -> Any:
        """The model as Megatron-FSDP wraps it."""
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=spec["fsdp"],
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            gradient_reduce_div_fusion=False,  # which gloo has not
            num_distributed_optimizer_instances=spec.get("outer", 1),
            outer_dp_sharding_strategy=spec.get("outer_sharding", "no_shard"),
        )
        with on_cpu():
            return FullyShardedDataParallel(config, ddp, model, device=torch.device("cpu"))

    def model(self) -> dict[str, Any]:
        """The chunks themselves, by name, as the guide prints it."""
        page = (Path(__file__).parents[4] / "docs" / "guides" / "megatron.md").read_text()
        code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1]
        names: dict[str, Any] = {"model": self.chunks, "optimizer": self.optimizer}
        exec(compile(code, "megatron.md", "exec"), names)  # noqa: S102
        state: dict[str, Any] = names["state"]()
        return {key: value for key, value in state.items() if key != "optimizer"}

    def engines_own(self, folder: Path) -> None:
        """Save in the format `fsdp_dtensor`, with the engine's functions in the order of Megatron-LM."""
        import torch.distributed.checkpoint as dcp
        from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
            preprocess_state_dict_for_uneven_dtensor,
        )
        from megatron.core.transformer import fsdp_dtensor_checkpoint as of_engine

        (chunk,) = self.chunks
        model = chunk.state_dict_for_save_checkpoint()
        metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        optimizer = self.optimizer.sharded_state_dict({}, metadata=metadata)
        self._complete(optimizer["state"])
        of_engine.handle_fp8_extra_state_case(model)
        if self.run.args.swiglu:
            model, optimizer = of_engine.handle_swiglu_in_state_dict(Named(chunk), model, optimizer)
        if experts := self.run.args.num_experts:
            model = of_engine.handle_experts_in_state_dict(model, experts)
        state = {
            "args": self.run.args,
            "checkpoint_version": 3.0,
            "iteration": self.step_number,
            "model": model,
            "optimizer": optimizer,
        }
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dcp.save(preprocess_state_dict_for_uneven_dtensor(state), checkpoint_id=folder)

    def _complete(self, states: dict[str, Any]) -> None:
        """Add states of parameters of which this rank has no element.

        Megatron-FSDP 0.16.1 makes none, and its collective calls for each state then do not meet.
        """
        for group in self.optimizer.optimizer.param_groups:
            for p in group["params"]:
                states.setdefault(
                    self.optimizer._param_name(p),
                    {
                        "step": torch.tensor(float(self.step_number)),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    },
                )
        for name in sorted(states):
            states[name] = states.pop(name)


class Named:
    """A chunk whose parameters are found below the wrapper for 16 bits, too, where the engine does not look."""

    def __init__(self, chunk: Any) -> None:
        self.chunk, self.config = chunk, chunk.config

    def get_parameter(self, name: str) -> Any:
        """The parameter of this name, with any number of wrappers."""
        parameters = {k.replace("module.", ""): p for k, p in self.chunk.named_parameters()}
        return parameters[name.replace("module.", "")]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), FsdpTraining)
