"""torch_checkpointing's `CheckpointManager`, which saves and loads universal checkpoints."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch_checkpointing as theirs
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import _CheckpointSchema

from ucformat.errors import UsageError
from ucformat.torch.loading.load import load
from ucformat.torch.saving.asynchronous import async_save
from ucformat.torch.saving.save import save
from ucformat.torch.state.objects import PerRank

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from ucformat.torch.saving.handles import SaveHandle

__all__ = ["CheckpointManager"]

#: Options of the library that concern its own files, and what to do instead.
_REFUSED = {
    "storage_config": "give the URL as the checkpoint's id: s3://bucket/run/step-500",
    "subprocess_init_fn": "ucformat writes in a process of its own, which needs no preparation",
    "pre_finalize_callback": "a checkpoint is complete when it becomes visible",
    "finalize_callback": "call the function when the future of the save is done",
}


class CheckpointManager(theirs.CheckpointManager):
    """A `CheckpointManager` of torch_checkpointing that saves and loads universal checkpoints.

        manager = CheckpointManager(CheckpointManager.Config(items={"model": ItemSpec()}))

    All ranks call `save` and `load` together. Tensors and DTensors are saved and loaded under any
    layout, with or without a resharder. A value that differs between ranks is given as
    `PerRank(value)`.

    Raises:
        UsageError: an option or an item is only of use for files of torch_checkpointing; the hint
            says what to do instead.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(theirs.CheckpointManager.Config):
        """The options of torch_checkpointing, and these.

        Attributes:
            saving: arguments of `ucformat.torch.save`, as `{"form": "packed"}`.
            loading: arguments of `ucformat.torch.load`, as `{"strict": False}`; `strict_step` is True
                by default, since no report is returned.
        """

        saving: Mapping[str, Any] = field(default_factory=dict)
        loading: Mapping[str, Any] = field(default_factory=dict)

        def build(self) -> CheckpointManager:
            """Make the manager."""
            return CheckpointManager(self)

    def __init__(self, config: theirs.CheckpointManager.Config | None = None) -> None:
        config = config or CheckpointManager.Config()
        for name, hint in _REFUSED.items():
            if getattr(config, name) is not None:
                raise UsageError(f"the option {name} is not supported", hint=hint)
        self._asynchronous = isinstance(config.save, AsyncCheckpointSaverConfig)
        if not self._asynchronous and not isinstance(config.save, SyncCheckpointSaverConfig):
            raise UsageError(
                f"save={config.save!r} is neither SyncCheckpointSaverConfig nor "
                "AsyncCheckpointSaverConfig"
            )
        for key, spec in [*config.items.items(), ("default", config.default)]:
            _check_item(key, spec)
        self._timeout = config.save.wait_timeout_secs
        self._schema = _CheckpointSchema(items=config.items, default=config.default)
        self._saving = dict(getattr(config, "saving", {}))
        # `load` returns no report that could name older tensors
        self._loading = {"strict_step": True, **getattr(config, "loading", {})}
        self._handle: SaveHandle | None = None
        self._closed = False

    def save(
        self, checkpoint_id: str | os.PathLike[str], checkpoint: Mapping[str, Any]
    ) -> Future[Any] | None:
        """Save the items; training may change them when this returns.

        Args:
            checkpoint_id: where to write the checkpoint, a path or URL.
            checkpoint: the values of the items; an integer `step` is that of the training, too.

        Returns:
            a future that is done when the checkpoint is committed; None if saves are synchronous.

        Raises:
            Conflict: a checkpoint exists there.
            UcformatError: a rank failed, or the save before did; nothing is committed.
        """
        state = self._values_of(checkpoint)
        self._wait()
        step = state.get("step")
        arguments = {**({"step": step} if type(step) is int else {}), **self._saving}
        if not self._asynchronous:
            save(state, checkpoint_id, **arguments)
            return None
        self._handle = async_save(state, checkpoint_id, **arguments)
        return _future_of(self._handle)

    def load(
        self,
        checkpoint_id: str | os.PathLike[str],
        into: Mapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = False,
        metadata_format: Any = None,
    ) -> Mapping[str, Any]:
        """Load items from a checkpoint of any kind and layout.

        Args:
            checkpoint_id: a checkpoint that ucformat can open, or a reference to one.
            into: the values of the items, whose tensors are filled; required.
            map_location: not supported: tensors stay where they are.
            strict: also refuse what only the checkpoint has. What it lacks is always an error,
                unless `loading={"strict": False}`.
            metadata_format: not supported: the format is found.

        Returns:
            the items, as loaded.

        Raises:
            StateMismatch: the checkpoint does not fit; nothing has changed.
        """
        if into is None:
            raise UsageError("load needs the items", hint='load(checkpoint_id, into={"model": …})')
        for name, value in (("map_location", map_location), ("metadata_format", metadata_format)):
            if value is not None:
                raise UsageError(f"load(…, {name}=) is not supported", hint="leave it out")
        state = self._values_of(into)
        load(state, checkpoint_id, **{**({"strict": True} if strict else {}), **self._loading})
        return {k: v.value if isinstance(v, PerRank) else v for k, v in state.items()}

    def prewarm_staging(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: memory for copies is kept from save to save."""

    def lock(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: when `save` returns, the state is copied."""
        return nullcontext()

    def close(self) -> None:
        """Wait for the save in the background.

        Raises:
            UcformatError: it failed.
        """
        self._closed = True
        self._wait()

    def _values_of(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the items, checked by the schema."""
        if self._closed:
            raise UsageError("the CheckpointManager is closed")
        return {k: item.value for k, item in self._schema.build_items(payload, rank=0).items()}

    def _wait(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait(self._timeout)


def _future_of(handle: SaveHandle) -> Future[Any]:
    """The future of a save in the background."""
    future: Future[Any] = Future()

    def follow() -> None:
        try:
            future.set_result(handle.wait())
        except BaseException as error:  # noqa: BLE001 - raised where the future is asked
            future.set_exception(error)

    Thread(target=follow, name="ucformat-follow", daemon=True).start()
    return future


def _check_item(key: str, spec: Any) -> None:
    """UsageError if an item says how its files or its sharding are made."""
    if spec is None:
        return
    if spec.layout is not None:
        raise UsageError(
            f"the item {key} has a layout, but a universal checkpoint has no files of items",
            hint='leave it out; safetensors for Hugging Face are made by saving={"form": "safetensors"}',
        )
    if spec.resharder is not None and type(spec.resharder) is not DefaultResharder:
        raise UsageError(
            f"the item {key} has the resharder {type(spec.resharder).__name__}, which describes "
            "tensors for files of torch_checkpointing",
            hint="leave it out, and save DTensors, which every layout can load",
        )
