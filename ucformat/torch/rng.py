"""The states of the random generators of one rank."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import numpy as np
import torch

__all__ = ["Rng"]


class Rng:
    """The generators of this rank, to be part of a training state: Python's, NumPy's, torch's of CPU and devices.

    Each rank has its own. Where the number of ranks changed, rank `r` takes what rank `r` had; ranks that are new are
    seeded from what rank 0 had and their own number, so that no two draw the same numbers, and every restart alike.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states of all generators."""
        kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - the generator that programs use unasked
        version, words, gauss = random.getstate()
        return {
            "python": [version, list(words), gauss],
            "numpy": [str(kind), np.asarray(keys), *(float(r) if isinstance(r, float) else int(r) for r in rest)],
            "torch": torch.get_rng_state(),
            "devices": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators; what `merge` answers to a new rank seeds them."""
        if "seed" in state:
            random.seed(state["seed"])
            np.random.seed(state["seed"] % (1 << 32))  # noqa: NPY002
            torch.manual_seed(state["seed"])
            return
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.asarray(keys), *rest))  # noqa: NPY002
        torch.set_rng_state(torch.as_tensor(state["torch"]))
        if torch.cuda.is_available() and state["devices"]:
            torch.cuda.set_rng_state_all([torch.as_tensor(s) for s in state["devices"]])

    def merge(self, values: list[Any], rank: int, ranks: int) -> Any:  # noqa: ARG002 - the signature of PerRank's
        """What a rank takes where the number of ranks changed."""
        if rank < len(values):
            return values[rank]
        basis = json.dumps([np.asarray(values[0]["torch"]).tolist(), rank]).encode()
        return {"seed": int.from_bytes(hashlib.sha256(basis).digest()[:7], "little")}
