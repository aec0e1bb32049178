"""The suite of exporters, for formats that hold the state of an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import ucformat
from ucformat.testing import ExporterSuite, checkpoint_of

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.checkpoint import Checkpoint

__all__ = ["TrainedSuite"]


class TrainedSuite(ExporterSuite):
    """A model whose optimizer has states of all its parameters."""

    parameters = ("layer.weight", "layer.bias", "large.weight")

    def arrays(self) -> dict[tuple[str, str], np.ndarray]:
        rng = np.random.default_rng(7)
        shapes = dict(zip(self.parameters, [(37, 11), (11,), (700, 411)], strict=True))
        return {
            (name, state): rng.standard_normal(shape).astype("float32")
            for state in ("weight", "exp_avg", "exp_avg_sq")
            for name, shape in shapes.items()
        }

    @pytest.fixture
    def source(self, tmp_path: Path) -> Checkpoint:
        group = {"params": list(self.parameters), "lr": 0.1, "betas": [0.9, 0.99]}
        foreign = checkpoint_of(tmp_path / "foreign", self.arrays(), step=7, groups=(group,))
        return ucformat.convert(foreign, tmp_path / "universal", chunk_bytes=4096)
