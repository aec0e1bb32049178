"""torchtitan's trainer: the manager that a configuration names (docs/guides/torchtitan.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping  # noqa: TC003 - tyro resolves the annotations
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from torchtitan.components.checkpointer import BaseCheckpointManager

from ucformat.engines.torchtitan.live import CheckpointManager
from ucformat.engines.torchtitan.storage import RunStorage
from ucformat.errors import UsageError
from ucformat.torch.manager.increments import Increments  # noqa: TC001 - as above

if TYPE_CHECKING:
    import torch

__all__ = ["UniversalCheckpointManager"]

_CONVERT = "convert the files by a view, and set initial_load_path to the result"
_EXPORT = "export the last checkpoint: ucp export safetensors SRC DST"
#: Options of torchtitan that would change what is stored, the values that are supported, and what
#: to do instead.
_FIXED = {
    "initial_load_in_hf": (False, _CONVERT),
    "initial_load_in_hf_quantized": (False, _CONVERT),
    "last_save_in_hf": (False, f"{_EXPORT} --view …"),
    "export_dtype": ("float32", f"{_EXPORT} --cast …"),
}
#: Options of the configuration that are the manager's own.
_OPTIONS = (
    *("interval", "enable_first_step_checkpoint", "keep_latest_k", "async_mode", "load_only"),
    *("form", "run", "certify", "increments", "exclude_from_loading", "merge_dataloader"),
    *("initial_load_path", "initial_load_model_only", "load_options"),
)


class UniversalCheckpointManager(BaseCheckpointManager):
    """A checkpoint manager of torchtitan that saves universal checkpoints.

        Trainer.Config(checkpoint=UniversalCheckpointManager.Config(enable=True, interval=500), …)

    All checkpoints contain the full state, also the last: weights alone can be loaded from any of
    them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's options of checkpoints, and these.

        Attributes:
            async_mode: `disabled` blocks until the checkpoint is committed; the others save in the
                background.
            form: as for `ucformat.torch.save`.
            run: name of the training run, for the catalog.
            certify: compare what was written with what the ranks held, and what they hold after a
                load with what was saved; as for `ucformat.torch.save` and `load`.
            increments: save what changed, as for `ucformat.torch.Manager`; no option of the command
                line.
            save_options: other arguments of `ucformat.torch.Manager`, as `{"codec": "blosc"}`; no option
                of the command line.
            load_options: as for `CheckpointManager`; no option of the command line.
            merge_dataloader: `merge` of `PerRank` for the data loader, with which another number of
                ranks loads it. It is a function, and so no option of the command line.
        """

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        form: Literal["zarr", "packed", "safetensors"] = "zarr"
        run: str | None = None
        certify: bool = False
        increments: Annotated[Increments | None, tyro.conf.Suppress] = None
        save_options: Annotated[Mapping[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        load_options: Annotated[Mapping[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        merge_dataloader: Annotated[Callable[..., Any] | None, tyro.conf.Suppress] = None

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            for name, (supported, hint) in _FIXED.items():
                if getattr(self, name) != supported:
                    raise UsageError(
                        f"checkpoint.{name}={getattr(self, name)!r} is not supported", hint=hint
                    )

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,  # noqa: ARG002 - names of Hugging Face, which exports need only
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[None] = Future()  # not None, for which torchtitan would not wait
        if not self.enable:
            return
        # what torchtitan's base class asks, after 0.3.0
        self.folder, self.keep_latest_k = _joined(base_folder, config.folder), config.keep_latest_k
        self._storage = RunStorage()
        self._manager = CheckpointManager(
            self.folder,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            dataloader=dataloader,
            states=states,
            **{name: getattr(config, name) for name in _OPTIONS},
            **config.save_options,
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 - as torchtitan calls it
        return self._manager.save(curr_step, last_step)

    def _load(self, step: int = -1) -> bool:
        return self._manager.load(step)

    def _maybe_wait_for_staging(self) -> None:
        self._manager.maybe_wait_for_staging()

    def _wait_for_saving(self) -> None:
        self._manager.maybe_wait_for_saving()

    def _close(self) -> None:
        self._manager.close()


def _joined(base: str, folder: str) -> str:
    """A folder below another, which may be a URL."""
    return folder if "://" in folder or not base else f"{base.rstrip('/')}/{PurePosixPath(folder)}"
