"""What a Trainer saves and loads where a DeepSpeed engine has its model and optimizer.

The rest of its state is the engine's client state: values that rank 0 knows, and the generators of
each rank.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ucformat.torch.integration import INTEGRATIONS
from ucformat.torch.state.objects import PerRank, Rng, decode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.checkpoint import Checkpoint
    from ucformat.torch.loading.load import LoadReport

__all__ = ["CLIENT", "STATE", "client_values", "load_engine", "save_engine"]

STATE = "trainer"  # the entry that is the TrainerState
CLIENT = "client_state"  # the object of an engine's checkpoint, and the path of its values by rank


def save_engine(engine: Any, url: Any, rest: Mapping[str, Any], **options: Any) -> None:
    """Save an engine, with the rest of a Trainer's state as rank 0 has it; collective.

    Args:
        rest: objects with a state dict, plain values, and the generators.
    """
    client: dict[str, Any] = {}
    for name, value in rest.items():
        if isinstance(value, Rng):
            client[name] = PerRank(value.state_dict())
        elif dist.get_rank() == 0:  # a log has times, which differ between ranks
            client[name] = value.state_dict() if hasattr(value, "state_dict") else value
    _deepspeed().save(engine, url, client_state=client, **options)


def load_engine(engine: Any, ck: Checkpoint | str, **options: Any) -> LoadReport:
    """Load an engine from any checkpoint; collective."""
    report: LoadReport = _deepspeed().load(engine, ck, **options)
    return report


def client_values(ck: Checkpoint) -> dict[str, Any]:
    """The values that `save_engine` has saved beside an engine; none of another checkpoint."""
    saved = ck.objects.get(CLIENT)
    if not isinstance(saved, dict) or STATE not in saved:  # a program's own, maybe pickles
        return {}
    return dict(decode(saved))


def _deepspeed() -> Any:
    """The module of the integration, another room, which is found by its name."""
    return import_module(INTEGRATIONS["deepspeed"].module)
