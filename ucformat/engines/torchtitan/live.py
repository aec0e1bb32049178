"""torchtitan: a checkpoint manager for its training loop (docs/guides/torchtitan.md)."""

from __future__ import annotations

from copy import deepcopy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch

from ucformat.errors import NotFound, UsageError
from ucformat.torch.manager.manager import Manager
from ucformat.torch.manager.steps import folder_of
from ucformat.torch.state.objects import PerRank, Rng, StateParts

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from os import PathLike

__all__ = ["CheckpointManager"]

_MODEL, _OPTIMIZER, _SCHEDULER, _DATALOADER = "model", "optimizer", "lr_scheduler", "dataloader"


class CheckpointManager:
    """Saves and loads the state of a torchtitan training loop, across layouts.

    All checkpoints contain the full state, including the last one; weights alone can be loaded from
    any of them.

    Args:
        folder: of the run's checkpoints, each as `step-00000500`: a path or URL.
        model_parts: the model, or the pipeline stages of this rank.
        optimizers: one optimizer, several, or an object with a list `optimizers`; each for the
            parameters of one part.
        lr_schedulers: one scheduler, an object with a state dict, or several schedulers in the same
            state; without any (None, or an empty list) the state has none.
        dataloader: an object with a state dict, which differs between ranks.
        states: further entries of the state: objects with a state dict, and plain values.
        interval: save at steps divisible by this number, and at the last step.
        enable_first_step_checkpoint: save at step 1 too.
        keep_latest_k: the number of checkpoints to keep; 0 for all.
        async_mode: `disabled` blocks until the checkpoint is committed; `async` and
            `async_with_pinned_mem` save in the background.
        load_only: never save.
        exclude_from_loading: keys of the state that are not loaded.
        initial_load_path: a checkpoint that ucformat can open, or a reference, to load if the
            folder has none.
        initial_load_model_only: load only the model from `initial_load_path`.
        merge_dataloader: `merge` of `PerRank` for the data loader.
        load_options: arguments of loads other than `verify`, as `{"lossy": True}`; see
            `ucformat.torch.load`. `strict_step` is True by default, since no report is returned.
        options: other arguments of `ucformat.torch.Manager`: run, config, form, increments, …

    Raises:
        UsageError: an optimizer's parameters are not those of one part, or `exclude_from_loading`
            has an unknown key.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        model_parts: torch.nn.Module | Sequence[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any = None,
        dataloader: Any = None,
        states: Mapping[str, Any] | None = None,
        interval: int = 500,
        enable_first_step_checkpoint: bool = False,
        keep_latest_k: int = 10,
        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled",
        load_only: bool = False,
        exclude_from_loading: Collection[str] = (),
        initial_load_path: str | None = None,
        initial_load_model_only: bool = True,
        merge_dataloader: Any = None,
        load_options: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        parts = [model_parts] if isinstance(model_parts, torch.nn.Module) else list(model_parts)
        all_optimizers = _listed(getattr(optimizers, "optimizers", optimizers))
        for optimizer in all_optimizers:
            _check_owner(parts, optimizer)
        self.states: dict[str, Any] = {
            **(states or {}),
            "rng": Rng(),
            _MODEL: StateParts(parts),
            _OPTIMIZER: StateParts(all_optimizers),
        }
        if hasattr(lr_schedulers, "state_dict"):
            self.states[_SCHEDULER] = lr_schedulers
        elif lr_schedulers:
            self.states[_SCHEDULER] = _Alike(lr_schedulers)
        if dataloader is not None:
            self.states[_DATALOADER] = _DataLoader(dataloader, merge_dataloader)
        if unknown := set(exclude_from_loading) - self.states.keys():
            raise UsageError(
                f"the state has no {', '.join(sorted(unknown))}",
                hint=f"there are {', '.join(self.states)}",
            )
        self._excluded = frozenset(exclude_from_loading)
        self._initial, self._initial_model_only = initial_load_path, initial_load_model_only
        self._interval, self._load_only = interval, load_only
        # torchtitan gets no report that could name older tensors
        self._restoring = {"strict_step": True, **load_options}
        self._first = enable_first_step_checkpoint
        self._manager = Manager(
            folder,
            every=interval,
            keep=keep_latest_k or None,
            asynchronous=async_mode != "disabled",
            **{"signals": (), **options},
        )

    def save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 - as the loop calls it
        """Save a checkpoint if it is due; the one of the last step is committed when this returns.

        Args:
            last_step: whether it is the last one, at which a checkpoint is always due.

        Raises:
            UcformatError: a rank failed, or the previous save failed; that checkpoint is not
                committed.
        """
        first = curr_step == 1 and self._first
        if self._load_only or not (last_step or first or curr_step % self._interval == 0):
            return False
        self._manager.save(curr_step, self.states, force=True)
        if last_step:
            self._manager.wait()
        return True

    def load(self, step: int = -1) -> bool:
        """Load a checkpoint of the run, or `initial_load_path` if it has none.

        Args:
            step: the training step, or -1 for the newest intact checkpoint. From step 0, an initial
                checkpoint, only the model is loaded.

        Raises:
            NotFound: there is no checkpoint of this step.
            IntegrityError: all checkpoints are damaged.
            StateMismatch: the checkpoint does not fit the state.
        """
        state = {k: v for k, v in self.states.items() if k not in self._excluded}
        if step >= 0:
            url = f"{self._manager.url}/{folder_of(step)}"
            chosen = {_MODEL: self.states[_MODEL]} if step == 0 else state
            self._manager.load(chosen, url, **self._restoring)
            return True
        try:
            newest = self._manager.restore_latest(state, **self._restoring)
        except NotFound:  # no such folder
            newest = None
        if newest is None and self._initial is not None:
            model = {_MODEL: self.states[_MODEL]}
            chosen = model if self._initial_model_only else state
            self._manager.load(chosen, self._initial, **self._restoring)
            return True
        return newest is not None

    def maybe_wait_for_staging(self) -> None:
        """Do nothing: when `save` returns, the state is copied, and training may change it."""

    def maybe_wait_for_saving(self) -> None:
        """Wait for the save in the background.

        Raises:
            UcformatError: the save failed.
        """
        self._manager.wait()

    def close(self) -> None:
        """Wait for the save in the background."""
        self._manager.close()


class _DataLoader(PerRank):
    call = "CheckpointManager(…, merge_dataloader"


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


def _check_owner(parts: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """UsageError if the parameters of an optimizer are not those of one part."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(mine <= {id(p) for p in part.parameters()} for part in parts):
        raise UsageError(
            f"the parameters of a {type(optimizer).__name__} are not those of one of the "
            f"{len(parts)} model parts",
            hint="pass all parts, and create an optimizer for each",
        )


class _Alike:
    """Schedulers in the same state."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self.schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.schedulers[0].state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for scheduler in self.schedulers:
            scheduler.load_state_dict(deepcopy(state))
