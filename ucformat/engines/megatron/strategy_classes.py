"""The pair of strategies with which Megatron's `dist_checkpointing` saves and loads universal checkpoints."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from enum import Enum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint.api import CheckpointException

from ucformat.checkpoint import open_checkpoint
from ucformat.engines.megatron.export_plan import CONTENTS, SINGLE, listed_keys
from ucformat.engines.megatron.folder import COMMON
from ucformat.engines.megatron.live_entries import at_path, is_of_bucket, rebuilt
from ucformat.engines.megatron.live_load import load
from ucformat.engines.megatron.live_save import save
from ucformat.engines.megatron.names import LAYER
from ucformat.errors import StateMismatch, UnsupportedError
from ucformat.torch.state.memory import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from ucformat.torch.loading.arguments import RestoreArguments
    from ucformat.torch.loading.match import Strict
    from ucformat.torch.saving.options import SaveArguments

#: What `metadata.json` says of the format, so that no other strategy takes it for its own.
_BACKEND = "ucformat"
#: The key under which the optimizer is in the state.
_OPTIMIZER = "optimizer"


class SaveStrategy(TorchDistSaveShardedStrategy):
    """Saves with `ucformat.torch.megatron.save`, into the folder that Megatron names; see `strategies`."""

    def __init__(self, optimizer: Any, vocab_size: int | None, arguments: SaveArguments) -> None:
        super().__init__(_BACKEND, 1)
        self._optimizer, self._vocab_size, self._arguments = optimizer, vocab_size, arguments

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Sharded objects are saved, too."""
        return True

    def save(self, sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | Path) -> None:
        """Save a state of which Megatron has saved the values that are the same on all ranks, if any."""
        dist.barrier()  # rank 0 has written it
        file = Path(checkpoint_dir, COMMON)
        common = _read_common(file) if file.exists() else {}
        state = _with_optimizer(sharded_state_dict, self._optimizer)
        is_live = state.get(_OPTIMIZER) is self._optimizer is not None
        values = {k: v for k, v in common.items() if k != _OPTIMIZER or not is_live}
        if _has_single_keys(sharded_state_dict) and CONTENTS not in values:
            values[CONTENTS] = {SINGLE: True}
        save(
            merge(values, state) if _OPTIMIZER in values else {**values, **state},
            checkpoint_dir,
            vocab_size=self._vocab_size,
            **self._arguments,
        )

    def async_save(self, *_: Any) -> NoReturn:
        """Refuse to save by Megatron's own processes."""
        raise UnsupportedError(
            "dist_checkpointing.save(async_sharded_save=True) writes by Megatron's own processes",
            hint="use ucformat.torch.megatron.async_save, which writes by ours",
        )


class LoadStrategy(TorchDistLoadShardedStrategy):
    """Loads with `ucformat.torch.megatron.load`; see `strategies`."""

    def __init__(
        self,
        optimizer: Any,
        vocab_size: int | None,
        strict: Strict,
        arguments: RestoreArguments,
    ) -> None:
        super().__init__()
        self._optimizer, self._vocab_size = optimizer, vocab_size
        self._strict = strict
        # Megatron gets no report that could name older tensors
        self._arguments: RestoreArguments = {"strict_step": True, **arguments}

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Sharded objects are loaded, too."""
        return True

    def load(
        self, sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | PathLike[str]
    ) -> dict[str, Any]:
        """Load what a state dict asks for, in its structure."""
        for entry in nested_values(sharded_state_dict):
            if isinstance(entry, ShardedTensor) and entry.data is None:  # of a list of metadata
                made = torch.zeros if entry.allow_shape_mismatch else torch.empty
                entry.init_data(_device(), made)
        state = _with_optimizer(sharded_state_dict, self._optimizer)
        _refuse_parts(state)
        try:
            loaded_state = load(
                state,
                checkpoint_dir,
                strict=self._strict,
                vocab_size=self._vocab_size,
                **self._arguments,
            ).state
        except StateMismatch as error:
            raise _Mismatch(str(error)) from error
        is_live = state.get(_OPTIMIZER) is self._optimizer is not None

        def put(path: tuple[Any, ...], entry: Any) -> Any:
            return (
                self._of_optimizer(path, entry)
                if is_live and path[0] == _OPTIMIZER
                else at_path(loaded_state, path)
            )

        loaded: dict[str, Any] = rebuilt(sharded_state_dict, put)
        return loaded

    def _of_optimizer(self, path: tuple[Any, ...], entry: Any) -> Any:
        """What the live optimizer has, which is loaded: its own tensors, and its hyper-parameters."""
        if path[-1] != _OPTIMIZER:
            return entry.data
        own = self._optimizer.state_dict()
        return (own[path[1]] if isinstance(own, list) else own)[_OPTIMIZER]

    def load_tensors_metadata(
        self, checkpoint_dir: str | PathLike[str], _: Any = None
    ) -> dict[str, Any]:
        """List the tensors by Megatron's keys, with which it checks strictness itself."""
        tensors, _objects = listed_keys(open_checkpoint(str(checkpoint_dir)))
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(e.shape, dtype=torch_dtype(e.dtype), device="meta")
            ).without_data()
            for key, e in tensors.items()
        }

    def load_sharded_metadata(self, checkpoint_dir: str | PathLike[str]) -> dict[str, Any]:
        """List the tensors and the sharded objects by Megatron's keys."""
        _tensors, objects = listed_keys(open_checkpoint(str(checkpoint_dir)))
        sharded = [ShardedObject.empty_from_unique_key(key) for key in objects]
        return {o.unique_key: o for o in sharded} | self.load_tensors_metadata(checkpoint_dir)


class _Mismatch(CheckpointingException, CheckpointException):
    """What does not fit, as callers of Megatron expect it, of its checks and of PyTorch below them."""

    def __init__(self, message: str) -> None:
        CheckpointException.__init__(self, message, {})
        self.args = (message,)

    __str__ = Exception.__str__


def _read_common(file: Path) -> dict[str, Any]:
    """The values that are the same on all ranks, which Megatron has pickled; nothing that the pickle names is run."""
    named = {n: _imported(n) for n in torch.serialization.get_unsafe_globals_in_checkpoint(file)}
    harmless = {
        n: c
        for n, c in named.items()
        if isinstance(c, type) and (c is Namespace or issubclass(c, Enum | PurePath))
    }
    if others := sorted(named.keys() - harmless.keys()):
        raise UnsupportedError(
            f"the state has values of {', '.join(others)}, which are not read back from {file}",
            hint="leave them out of the state, or call ucformat.torch.megatron.save",
        )
    with torch.serialization.safe_globals([*harmless.values()]):
        values: dict[str, Any] = torch.load(file, weights_only=True)
    return values


def _imported(name: str) -> object:
    """A class by its module and name, if its module is imported already."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _has_single_keys(state: Mapping[str, Any]) -> bool:
    """Whether layers, experts and halves of gated projections have keys of their own, on all ranks together."""
    keys = Counter(
        e.key
        for e in nested_values(state)
        if isinstance(e, ShardedTensor) and not e.key.startswith("mtp.")  # always numbered
    )
    numbered = {key: LAYER.fullmatch(key) is not None for key in keys}
    single = any(numbered.values())
    shared = (
        any("layers." in key and not is_numbered for key, is_numbered in numbered.items())
        or any(".experts.experts.linear" in key for key in keys)
        or any(".linear_fc1." in key and count > 1 for key, count in keys.items())
    )
    on_ranks = torch.tensor([single, shared], dtype=torch.int64, device=_device())
    dist.all_reduce(on_ranks)
    return bool(on_ranks[0]) and not on_ranks[1]


def _refuse_parts(state: Mapping[str, Any]) -> None:
    """UnsupportedError if a state is what Megatron gives one of the ranks that share a load."""
    entries = () if _OPTIMIZER in state else nested_values(state)
    keys = (str(getattr(entry, "key", "")) for entry in entries)
    if any(".distributed.dp_group_idx_" in key for key in keys):
        raise UnsupportedError(
            "FullyParallelLoadStrategyWrapper takes the distributed optimizer's state apart, in "
            "which no parameter has a name then",
            hint=(
                "load with the strategy itself, without --ckpt-fully-parallel-load: ranks share "
                "the reading in any case"
            ),
        )


def _with_optimizer(state: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """A sharded state dict with the optimizer itself in the place of its flat buckets, if it has any."""
    of_optimizer = state.get(_OPTIMIZER)
    if of_optimizer is None or not is_of_bucket(of_optimizer):
        return dict(state)
    if optimizer is None:
        raise UnsupportedError(
            "the state has flat buckets of the distributed optimizer, without the names of its parameters",
            hint="ucformat.torch.megatron.strategies(optimizer)",
        )
    return {**state, _OPTIMIZER: optimizer}
