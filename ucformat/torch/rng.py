"""The states of the random generators of one rank."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import numpy as np
import torch

from ucformat.errors import UsageError

__all__ = ["Rng"]

_SEED_AND_OFFSET = 16  # bytes of the state of a CUDA generator


class Rng:
    """The generators of this rank, to be part of a training state: Python's, NumPy's, torch's of CPU and devices.

    Each rank has its own. Where the number of ranks changed, rank `r` takes what rank `r` had; ranks that are new are
    seeded from what rank 0 had and their own number, so that no two draw the same numbers, and every restart alike.

    Devices go by their numbers. Where a process drew on one device alone, its current device takes that generator,
    whatever the numbers are now.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states of all generators."""
        kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - the generator that programs use unasked
        version, words, gauss = random.getstate()
        return {
            "python": [version, list(words), gauss],
            "numpy": [str(kind), np.asarray(keys), *(float(r) if isinstance(r, float) else int(r) for r in rest)],
            "torch": torch.get_rng_state(),
            "devices": list(found.get_rng_state_all()) if (found := _devices()) and found.is_initialized() else [],
        }

    def check(self, state: dict[str, Any]) -> None:
        """Find out whether a state can be set here, and change nothing.

        Raises:
            UsageError: generators of several devices were drawn from, and there are fewer devices here.
        """
        _by_device(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators, or none; what `merge` answers to a new rank seeds them.

        Raises:
            UsageError: generators of several devices were drawn from, and there are fewer devices here.
        """
        by_device = _by_device(state)
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
        for device, found in by_device.items():
            _devices().set_rng_state(found, device)

    def merge(self, values: list[Any], rank: int, ranks: int) -> Any:  # noqa: ARG002 - the signature of PerRank's
        """What a rank takes where the number of ranks changed."""
        if rank < len(values):
            return values[rank]
        basis = json.dumps([np.asarray(values[0]["torch"]).tolist(), rank]).encode()
        return {"seed": int.from_bytes(hashlib.sha256(basis).digest()[:7], "little")}


def _devices() -> Any:
    """PyTorch's module of the accelerator, where there is one whose devices have generators."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    module = None if accelerator is None else torch.get_device_module(accelerator)
    return module if hasattr(module, "get_rng_state_all") else None


def _by_device(state: dict[str, Any]) -> dict[int, torch.Tensor]:
    """What the generator of each device here is set to."""
    saved = [torch.as_tensor(s) for s in state.get("devices", ())]
    module = _devices()
    here = module.device_count() if module is not None and saved else 0
    if not here:
        return {}
    drawn = [i for i, s in enumerate(saved) if _is_drawn(s)]
    if len(drawn) > 1 and drawn[-1] >= here:
        raise UsageError(
            f"the generators of the devices {', '.join(map(str, drawn))} were drawn from when it was saved, and here "
            f"are {here} devices",
            hint="make as many visible, or leave Rng out of the state and seed anew",
        )
    out = dict(enumerate(saved[:here]))
    if len(drawn) == 1:
        out[torch.accelerator.current_device_index()] = saved[drawn[0]]
    return out


def _is_drawn(state: torch.Tensor) -> bool:
    """Whether numbers were drawn since it was seeded: CUDA's is a seed and an offset, of 8 bytes each."""
    return state.numel() != _SEED_AND_OFFSET or bool(state[_SEED_AND_OFFSET // 2 :].any())
