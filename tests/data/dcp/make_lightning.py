"""Make `lightning`: `torchrun --nproc-per-node 2 make_lightning.py` with Lightning 2.6, PyTorch 2.13, on CPU.

A tiny model trained for two epochs under `ModelParallelStrategy` (FSDP2), with its sharded checkpoint of the last.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard

HERE = Path(__file__).parent / "lightning"


class Module(pl.LightningModule):
    def __init__(self, lr: float = 1e-2, note: str = "hello") -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Embedding(23, 10), torch.nn.Linear(10, 23))

    def configure_model(self) -> None:
        if not hasattr(self, "cut"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
            self.cut = True

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            self.net(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = torch.arange(20_000, dtype=torch.float32)


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.randint(23, (8,), generator=torch.Generator().manual_seed(i))


def main() -> None:
    trainer = pl.Trainer(
        devices=2,
        accelerator="cpu",
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(Texts(), batch_size=4))
    if trainer.is_global_zero:
        shutil.rmtree(HERE, ignore_errors=True)
    trainer.save_checkpoint(HERE / "ckpt")
    truth = {}
    for name, parameter in module.named_parameters():
        truth[f"weight/{name}"] = parameter.full_tensor()
        for state, value in trainer.optimizers[0].state[parameter].items():
            truth[f"{state}/{name}"] = (
                value.full_tensor() if hasattr(value, "full_tensor") else value
            )
    if trainer.is_global_zero:
        save_file(
            {k: v.detach().contiguous() for k, v in truth.items()}, HERE / "truth.safetensors"
        )
        facts = {"groups": [[n for n, _ in module.named_parameters()]], "step": trainer.global_step}
        (HERE / "truth.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
