"""What ranks do in `test_lossy_saves.py`: train under FSDP2, and go on from moments that were encoded with loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.torch.patches_program import model_and_optimizer, train, values
from ucformat.torch import load, save

if TYPE_CHECKING:
    from pathlib import Path

ENCODE = {"exp_avg": "int8-blockwise", "exp_avg_sq": "adaptive:100"}


def resumed(folder: Path, *, form: Any) -> list[float]:
    """The largest difference of a moment that was saved to the one that was loaded under another layout."""
    model, optimizer = model_and_optimizer(cut=True)
    for step in range(1, 4):
        train(model, optimizer, step)
    before = values(model, optimizer)
    save({"model": model, "optimizer": optimizer}, folder, form=form, encode=ENCODE, certify=True)
    model, optimizer = model_and_optimizer(cut=False, seed=1)
    state = {"model": model, "optimizer": optimizer}
    load(state, folder, lossy=True, certify=True)
    after = values(model, optimizer)
    parameters = len(list(model.parameters()))
    assert all(map(torch.equal, before[:parameters], after[:parameters]))
    moments = zip(before[parameters:], after[parameters:], strict=True)
    return [float((a.float() - b.float()).abs().max()) for a, b in moments]
