"""`certify`: compares what the ranks of a DeepSpeed engine hold with what a checkpoint has."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch

from ucformat.engines.deepspeed.live_engine import inspect_engine, optimizer_tensors
from ucformat.engines.deepspeed.live_save import (
    CLIENT,
    fit_groups,
    fit_parts,
    locals_of_buffers,
    tensors_of,
    values_now,
)
from ucformat.engines.deepspeed.stored_states import StoredStates
from ucformat.errors import check_keywords
from ucformat.geometry.tensor import Key
from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.loading.arguments import LoadOptions
from ucformat.torch.loading.certify import CertifyArguments, LiveState, certify_local
from ucformat.torch.loading.match import PARAMETER, Problems, stored_names
from ucformat.torch.loading.share import open_together
from ucformat.torch.loading.values import FittedValues, fit_plain_states
from ucformat.torch.state.local import local_of
from ucformat.torch.state.memory import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    from ucformat.checkpoint import Checkpoint
    from ucformat.engines.deepspeed.live_engine import OptimizerTensor
    from ucformat.torch.certificate import Certificate
    from ucformat.torch.comm.group import Group
    from ucformat.torch.state.local import LocalShard

__all__ = ["certify"]


def certify(
    engine: Any,
    ref: str | PathLike[str] | Checkpoint,
    *,
    optimizer: bool = True,
    scheduler: bool = True,
    **arguments: Unpack[CertifyArguments],
) -> Certificate:
    """Compare what the ranks of a DeepSpeed engine hold now with what a checkpoint has.

    All ranks call this together. The parameters of the module may be those of the checkpoint, or
    these rounded to their dtype, as a training step does.

    Args:
        engine: as returned by `deepspeed.initialize`.
        ref: a checkpoint of any kind that `ucformat.open` opens, a reference to one, or an open
            checkpoint.
        optimizer: compare the states of the optimizer too, not only weights.
        scheduler: compare the learning rate scheduler.
        arguments: as for `ucformat.torch.certify`, but `group` and `names`.

    Returns:
        the certificate, the same on all ranks; true if everything is equal.
    """
    check_keywords("certify", arguments, CertifyArguments)
    with group_for_call("certify", ref, timeout=arguments.get("timeout", TIMEOUT)) as group:
        ck = open_together(ref, group)
        options = LoadOptions.of("report", cast("Any", arguments))
        return certify_engine(engine, ck, group, options, optimizer=optimizer, scheduler=scheduler)


def certify_engine(
    engine: Any,
    ck: Checkpoint,
    group: Group,
    options: LoadOptions,
    *,
    optimizer: bool,
    scheduler: bool,
) -> Certificate:
    """Compare what the ranks of a group hold; see `certify`."""
    begun = time.monotonic()
    with group.sharing_errors():
        trainer = inspect_engine(engine)
        entries = optimizer_tensors(trainer)
        names = stored_names(ck, options.rename)
        stored = StoredStates(ck, names)
        tensors = [*tensors_of(trainer, entries), *locals_of_buffers(trainer)]
        values: list[FittedValues] = []
        if optimizer and stored.trained:
            counted = FittedValues()
            tensors += _counters(entries, stored, counted)
            tensors, numbers = fit_plain_states(tensors, ck, names)
            values = [
                fit_groups(entries, trainer, ck, names),
                fit_parts(trainer, ck, scheduler=scheduler, trust=options.trust),
                values_now(trainer, ck),
                counted,
                numbers,
            ]
        else:
            tensors = [t for t in tensors if t.info.state in PARAMETER]
        problems = Problems()
        for fitted in values:
            problems |= fitted.problems()
        live = LiveState(
            tensors,
            trainer.aliases,
            problems,
            values,
            frozenset(names.get(name, name) for entry in entries for name in entry.shapes),
            trainer.layout,
            optimizer=optimizer and stored.trained,
            # the module's parameters are rounded, and counters have the dtype of the optimizer
            rounded=frozenset(
                t.key for t in tensors if t.info.state == "weight" or not t.info.shape
            ),
        )
        # the client state is the program's
        options = replace(options, leave=(*options.leave, CLIENT))
    return certify_local(live, ck, group, options, names, begun)


def _counters(
    entries: Sequence[OptimizerTensor], stored: StoredStates, counted: FittedValues
) -> Iterator[LocalShard]:
    """The states that are plain numbers, as the tensors that they are in the checkpoint, or as values."""
    for entry in entries:
        for state, value in entry.states.items():
            if torch.is_tensor(value):
                continue
            for name in entry.shapes:
                info = stored.ck.tensors.get(Key(stored.names.get(name, name), state))
                if info is not None and not info.shape:
                    scalar = torch.tensor(value).to(torch_dtype(info.dtype))
                    yield local_of(name, state, scalar)
                elif (number := stored.number(name, state)) is not None:
                    counted.compare(f"the state {state} of {name}", value, number)
