"""What every integration must do, done by those whose libraries are installed with the tests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.torch.integrations.compare import held
from ucformat.testing import IntegrationSuite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_in_the_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    now = dict(os.environ)
    for variables in (before, now):
        variables.pop("PYTEST_CURRENT_TEST", None)
    assert now == before


def net() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3)
    )


class TestLightning(IntegrationSuite):
    name = "lightning"

    def train(self, folder: Path, steps: int, resume: Path | None = None) -> dict[str, Any]:
        from lightning import pytorch as pl
        from lightning.pytorch.callbacks import ModelCheckpoint

        from ucformat.engines.lightning.live import UniversalDDPStrategy

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = net()

            def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
                return self.net(batch).square().mean()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.named_parameters(), lr=0.1, foreach=False)

        torch.manual_seed(5)
        module = Module()
        saving = ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=UniversalDDPStrategy(certify=True),
            max_epochs=steps,
            callbacks=[saving],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        rows = (
            torch.arange(12.0).reshape(2, 6) / 12
        )  # a batch: within an epoch, Lightning draws anew
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2), ckpt_path=resume)
        return held(module, trainer.optimizers[0]) | {"step": trainer.global_step}

    def checkpoint(self, folder: Path, step: int) -> Path:
        return folder / f"epoch={step - 1}.ckpt"


class TestHuggingFace(IntegrationSuite):
    name = "huggingface"

    def train(self, folder: Path, steps: int, resume: Path | None = None) -> dict[str, Any]:
        from transformers import set_seed

        from tests.engines.huggingface.live_program import trainer

        more = {"max_steps": steps, "save_steps": 1, "lr_scheduler_type": "constant"}
        of = trainer(folder, **more)
        set_seed(11)
        of.train(resume_from_checkpoint=None if resume is None else str(resume))
        found = held(of.model, of.optimizer.optimizer) | {"step": of.state.global_step}
        return {key: value for key, value in found.items() if "rotary_emb" not in key}  # not saved

    def checkpoint(self, folder: Path, step: int) -> Path:
        return folder / f"checkpoint-{step}"


class TestTorchtitan(IntegrationSuite):
    name = "torchtitan"

    def train(self, folder: Path, steps: int, resume: Path | None = None) -> dict[str, Any]:
        from ucformat.engines.torchtitan.live import CheckpointManager

        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        loop = Loop()
        manager = CheckpointManager(
            folder,
            interval=1,
            model_parts=[model],
            optimizers=[optimizer],
            states={"train_state": loop},
            initial_load_path=None if resume is None else str(resume),
            initial_load_model_only=False,
            certify=True,
        )
        torch.manual_seed(11)
        manager.load()
        while loop.step < steps:
            loop.step += 1
            model(torch.full((2, 6), float(loop.step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(loop.step, last_step=loop.step == steps)
        manager.close()
        return held(model, optimizer) | {"step": loop.step}

    def checkpoint(self, folder: Path, step: int) -> Path:
        return folder / f"step-{step:08}"


class Loop:
    """What a trainer of torchtitan is to its manager."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class TestTheOthers:
    @pytest.mark.parametrize("name", ["accelerate", "deepspeed", "torchtitan_config"])
    def test_they_are_registered_with_their_public_names(self, name: str) -> None:
        from ucformat.torch.integration import INTEGRATIONS

        suite = IntegrationSuite()
        suite.test_it_is_registered_with_its_public_names(INTEGRATIONS[name])
