"""The process that writes in the background."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from ucformat.torch.saving.asynchronous import async_save
from ucformat.torch.saving.background import writers
from ucformat.torch.saving.worker import NICE

if TYPE_CHECKING:
    from pathlib import Path


def test_it_yields_to_the_training(tmp_path: Path) -> None:
    async_save({"a": torch.ones(4)}, tmp_path / "1").wait()
    own, its = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, writers[None]._process.pid))
    assert its == min(own + NICE, 19) > own
