"""torchtitan's own trainer with its debug Llama, under torchrun: `train_torchtitan.py FOLDER STEPS [KEY=VALUE…]`.

`FOLDER/..` has `tokenizer` and `data`. Each `KEY=VALUE`, the value in JSON, is an option of the
configuration of our checkpoint manager. Writes `FOLDER/watched.json`: the loss of each step, and
for the moments before the first step and after each one, the hash of each whole tensor of the
training.

What torchtitan 0.3.0 asks of GPUs and of a later PyTorch is replaced, and nothing that a checkpoint
has:

- the device is "cpu", whose memory has no statistics; kernels for experts in Triton are not
  imported;
- attention is PyTorch's own, since FlexAttention has no backward pass on CPU (neither has
  parameters);
- parameters are sharded as `partial_dtensor`; PyTorch 2.13 does not read the annotations of
  `spmd_types`;
- gradients are reduced by sums, as Gloo can, and the timeouts of process groups stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterator


def _be_a_device() -> None:
    """Make torchtitan, when it is imported, take the CPU for its device."""
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.current_device = lambda: 0
    cpu.get_device_name = str
    cpu.get_device_properties = lambda _: SimpleNamespace(total_memory=1 << 30)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    cpu.memory_stats = lambda _: {}
    dist.set_timeout = lambda *_: None
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()


_be_a_device()

from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from ucformat.engines.torchtitan.config import UniversalCheckpointManager  # noqa: E402
from ucformat.torch import Increments  # noqa: E402

_GLOBAL_BATCH = 12


class Watched(Trainer):
    """The trainer, which notes what it has."""

    def __init__(self, config: Trainer.Config) -> None:
        super().__init__(config)
        self.losses: dict[int, float] = {}
        self.states: dict[int, dict[str, Any]] = {}
        for module in self.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(enable=True)
        log = self.metrics_processor.log

        def noting(step: int, loss: float, *rest: Any, **more: Any) -> None:
            self.losses[step] = loss
            log(step, loss, *rest, **more)

        self.metrics_processor.log = noting

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        if not self.states:
            self.states[self.step - 1] = self.hashes()
        super().train_step(data_iterator)
        self.states[self.step] = self.hashes()

    def hashes(self) -> dict[str, Any]:
        """The hash of each weight as the state dict has it, and of each optimizer state, and the plain values."""
        (model,) = self.model_parts
        out: dict[str, Any] = {
            f"weight/{name}": _hash(tensor) for name, tensor in model.state_dict().items()
        }
        names = {param: name for name, param in model.named_parameters()}
        for optimizer in self.optimizers:
            for param, states in optimizer.state.items():
                out |= {f"{state}/{names[param]}": _hash(value) for state, value in states.items()}
            out["lr"] = [float(group["lr"]) for group in optimizer.param_groups]
        return out | {"schedulers": self.lr_schedulers.state_dict()}


def _hash(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(
        whole.detach().contiguous().flatten().view(torch.uint8).numpy()
    ).hexdigest()[:16]


def _refused() -> Iterator[str]:
    """The options that the configuration does not accept."""
    for options in ({"last_save_in_hf": True}, {"export_dtype": "bfloat16"}):
        try:
            UniversalCheckpointManager.Config(enable=True, **options)
        except ValueError as error:
            yield str(error).partition("=")[0]


def _dealt(saved: list[dict[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    """A state of torchtitan's data loader: all go on where the first was, for they have read equally far."""
    return {f"dp_rank_{rank}": saved[0]["dp_rank_0"], "world_size": ranks}


def _off(trainer: Watched) -> list[bool]:
    """What a manager that is not enabled does."""
    off = UniversalCheckpointManager.Config().build(
        dataloader=trainer.dataloader,
        model_parts=trainer.model_parts,
        optimizers=trainer.optimizers,
        lr_schedulers=trainer.lr_schedulers,
        states={},
    )
    return [off.load(), off.save(2)]


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    options = {
        key: json.loads(value) for key, _, value in (text.partition("=") for text in sys.argv[3:])
    }
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dump_folder = str(folder)
    config.hf_assets_path = str(folder.parent / "tokenizer")
    config.dataloader.dataset_path = str(folder.parent / "data")
    config.training.steps = steps
    config.training.seq_len = 32
    cut = options.pop("cut", {})  # degrees of torchtitan's parallelism besides FSDP's
    for name, degree in cut.items():
        setattr(config.parallelism, f"{name}_parallel_degree", degree)
    replicas = int(os.environ["WORLD_SIZE"]) // math.prod(cut.values())
    config.training.local_batch_size = _GLOBAL_BATCH // replicas
    config.training.disable_cuda_graphs = True
    config.lr_scheduler.total_steps = 10
    config.parallelism.spmd_backend = "partial_dtensor"
    config.debug.seed = 0
    if options.pop("merge", False):
        options["merge_dataloader"] = _dealt
    if increments := options.pop("increments", None):
        options["increments"] = Increments(**increments)
    config.checkpoint = UniversalCheckpointManager.Config(enable=True, **{"interval": 2, **options})
    json.dumps(config.to_dict())  # as the trainer logs it
    trainer = Watched(config)
    trainer.train()
    trainer.close()
    if dist.get_rank() == 0:
        told = {"losses": trainer.losses, "states": trainer.states, "tokens": trainer.ntokens_seen}
        told |= {"refused": list(_refused()), "off": _off(trainer)}
        (folder / "watched.json").write_text(json.dumps(told))
    dist.destroy_process_group()


main()
