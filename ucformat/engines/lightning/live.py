"""Lightning: strategies for all ranks, a CheckpointIO for one (docs/guides/lightning.md)."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.core import saving
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from ucformat.errors import (
    UcformatError,
    UnsafeError,
    UnsupportedError,
    UsageError,
    check_keywords,
    refuse_arguments,
)
from ucformat.jobs.removal import discard
from ucformat.references import open_reference
from ucformat.schema import MANIFEST
from ucformat.sources.configuration import program_config
from ucformat.storage.base import exists
from ucformat.storage.url import open_store
from ucformat.torch.comm.group import group_for_call, single_process_group
from ucformat.torch.loading.arguments import LoadOptions, RestoreArguments
from ucformat.torch.loading.load import LoadTargets, load, load_local
from ucformat.torch.loading.share import open_together
from ucformat.torch.saving.asynchronous import async_save_local
from ucformat.torch.saving.options import RunArguments, SaveOptions, TrainingLaunch
from ucformat.torch.saving.save import prepare, save_in_group, save_local, saving_group
from ucformat.torch.state.local import local_of
from ucformat.torch.state.memory import torch_dtype
from ucformat.torch.state.objects import Rng, decode, encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.checkpoint import Checkpoint
    from ucformat.torch.loading.load import LoadReport
    from ucformat.torch.saving.handles import SaveHandle
    from ucformat.torch.saving.options import SaveArguments
    from ucformat.torch.state.local import LocalState

    _Read = tuple[dict[tuple[str, str], torch.Tensor], LoadReport]

__all__ = ["UniversalCheckpointIO", "UniversalDDPStrategy", "UniversalModelParallelStrategy"]

_REST = "lightning"  # the object with everything except tensors of the model and of optimizers
_HYPER = ("hyper_parameters", "datamodule_hyper_parameters")
_TENSORS = ("state_dict", "optimizer_states")
#: Arguments of saves that there are not here, and what to do instead.
_NOT_PARTIAL = "in a loop of your own, ucformat.torch.Manager saves some experts at a time"
_OF_STRATEGIES = {
    "group": "all ranks of the strategy save together",
    "increments": 'base="latest", which bases each checkpoint on the newest one beside it',
    "changed": "leave it out: tensors are compared with the base",
    "partial": _NOT_PARTIAL,
}
_OF_ONE_RANK = {
    "group": "one rank saves alone",
    "timeout": "one rank saves alone, and waits for no other",
    "names": "save with UniversalDDPStrategy or UniversalModelParallelStrategy",
    "partial": _NOT_PARTIAL,
}
_OF_TRAINING = ("callbacks", "loops", "optimizer_states", "lr_schedulers")


class _Universal:
    """A base class for strategies: all ranks save and load the live model and optimizers.

    Args:
        background: save in the background, with `async_save`.
        trust: unpickle opaque objects of a checkpoint (hyper-parameters, callbacks), which may run
            code.
        options: arguments of saves, those of `RunArguments`, and of loads, those of
            `RestoreArguments`, except `group` and `timeout`, which is that of the strategy; all
            others are those of the strategy. With `certify`, what the ranks hold after a load is
            compared, too. `strict_step` is True by default, since no report is returned.
    """

    lightning_module: Any
    optimizers: Any

    def __init__(
        self,
        *,
        background: bool = False,
        trust: bool = False,
        **options: Any,
    ) -> None:
        self._arguments = _run_arguments(type(self).__name__, options, _OF_STRATEGIES)
        names = RestoreArguments.__annotations__.keys() - {"timeout"}
        super().__init__(
            **{k: v for k, v in options.items() if k not in self._arguments.keys() | names}
        )
        # Lightning gets no report that could name older tensors
        restoring = {k: v for k, v in options.items() if k in names}
        self._restoring = {"strict_step": True, **restoring}
        self._background, self._trust = background, trust
        self._handle: SaveHandle | None = None
        self._launch = TrainingLaunch()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: checkpoints are loaded in place, after the optimizers are created."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: optimizers are loaded with the model."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: the live model is saved."""
        return {}

    def optimizer_state(self, _optimizer: Any) -> dict[str, Any]:
        """Return nothing: live optimizers are saved."""
        return {}

    def load_model_state_dict(self, _checkpoint: Mapping[str, Any], **_: Any) -> None:
        """Do nothing: `load_checkpoint` has loaded it."""

    def load_optimizer_state_dict(self, _checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has loaded it."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save the live model and optimizers; all ranks call this. An existing checkpoint is replaced."""
        if storage_options is not None:
            raise UsageError(
                "storage_options are not supported",
                hint="leave them out: the url locates the checkpoint",
            )
        url = str(self.broadcast(str(filepath)))  # type: ignore[attr-defined] # of the strategy
        logged = self.lightning_module.trainer.callback_metrics
        arguments = _described(checkpoint, self._launch, self._arguments, logged)
        live = self._live(optimizers="optimizer_states" in checkpoint)
        with saving_group(url, "save", arguments) as ranks, ranks.sharing_errors():
            state, options, metadata, log = prepare(live, url, ranks, arguments)
            if self.is_global_zero:  # type: ignore[attr-defined]
                state = _with_rest(state, _without_tensors(checkpoint))
        if self._background:
            self._handle = async_save_local(state, options, metadata)
            if log is not None:
                self._handle.then(lambda saved: log(saved.url))
        else:
            saved = save_local(state, options, metadata)
            if log is not None:
                log(saved.url)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Load the live model and optimizers, and return what Lightning restores itself."""
        self.wait()
        url = str(self.broadcast(str(checkpoint_path)))  # type: ignore[attr-defined] # of the strategy
        with group_for_call("load", url) as ranks:
            ck = open_together(url, ranks)
        rest = decode(ck.objects.get(_REST, {}), trust=self._trust or weights_only is False)
        strict = "report" if self.lightning_module.strict_loading else False
        state = self._live(optimizers=bool(self.optimizers))
        if "rng" not in ck.per_rank:  # a CheckpointIO does not save random generators
            state.pop("rng", None)
        self._launch.begin(load(state, ck, strict, **self._restoring))  # type: ignore[arg-type]
        return {"state_dict": {}, **dict(rest)}

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, here and in the catalog, unless it is protected."""
        self.wait()
        if self.is_global_zero:  # type: ignore[attr-defined]
            discard(str(filepath))

    def wait(self) -> None:
        """Wait for the save in the background, and raise its error."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def teardown(self) -> None:
        """Wait for the save in the background, and tear the strategy down."""
        self.wait()
        super().teardown()  # type: ignore[misc]

    def _live(self, *, optimizers: bool) -> dict[str, Any]:
        state = {"model": self.lightning_module}
        if optimizers:
            state |= {f"optimizer_{i}": o for i, o in enumerate(self.optimizers)} | {"rng": Rng()}
        return state


class UniversalDDPStrategy(_Universal, DDPStrategy):
    """Lightning's DDPStrategy with universal checkpoints.

    Args:
        background: save in the background, with `async_save`.
        trust: unpickle opaque objects of a checkpoint (hyper-parameters, callbacks), which may run
            code.
        options: arguments of DDPStrategy, and those of `RunArguments` and `RestoreArguments`, as for
            `ucformat.torch.save` and `load`, except `group`. The `timeout` is that of DDPStrategy.
    """


class UniversalModelParallelStrategy(_Universal, ModelParallelStrategy):
    """Lightning's ModelParallelStrategy (FSDP2, tensor parallelism, or both) with universal checkpoints.

    Args:
        background: save in the background, with `async_save`.
        trust: unpickle opaque objects of a checkpoint (hyper-parameters, callbacks), which may run
            code.
        options: arguments of ModelParallelStrategy, and those of `RunArguments` and
            `RestoreArguments`, as for `ucformat.torch.save` and `load`, except `group`. The
            `timeout` is that of ModelParallelStrategy.
    """


class UniversalCheckpointIO(CheckpointIO):
    """A CheckpointIO for strategies that save from one rank: DDP, a single device.

    Lightning passes optimizer states by the numbers of parameters, so only optimizers that know the
    names of their parameters, as `AdamW(self.named_parameters())`, can be saved.

    Args:
        form: as for `ucformat.torch.save`.
        lossy: as for `ucformat.torch.load`.
        arguments: others of `RunArguments`, except `group`, `timeout` and `names`. A load is not
            certified.
    """

    def __init__(self, form: Any = "zarr", *, lossy: bool = False, **arguments: Any) -> None:
        check_keywords("UniversalCheckpointIO", arguments, RunArguments)
        options = {"form": form, **arguments}
        self._arguments = _run_arguments("UniversalCheckpointIO", options, _OF_ONE_RANK)
        self._lossy = lossy
        self._launch = TrainingLaunch()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save from this rank alone; an existing checkpoint is replaced.

        Raises:
            UsageError: there are `storage_options`.
            UnsupportedError: an optimizer does not know the names of its parameters.
        """
        if storage_options is not None:
            raise UsageError(
                "storage_options are not supported",
                hint="leave them out: the url locates the checkpoint",
            )
        named: dict[str, Any] = {"model": checkpoint["state_dict"]}
        numbered = checkpoint.get("optimizer_states", [])
        named |= {f"optimizer_{i}": _named(i, state) for i, state in enumerate(numbered)}
        rest = _without_tensors(checkpoint)
        if numbered:
            rest["optimizer_states"] = [_skeleton(state) for state in numbered]
        arguments = _described(checkpoint, self._launch, self._arguments)
        group = single_process_group()
        state, options, metadata, log = prepare(named, str(path), group, arguments)
        saved = save_in_group(_with_rest(state, rest), options, metadata, group)
        if log is not None:
            log(saved.url)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: Any = None
    ) -> dict[str, Any]:
        """Load a checkpoint in Lightning's form; each rank that calls this reads all of it.

        Args:
            path: a path, URL or reference.
            map_location: the device of the tensors (default: the CPU).
            weights_only: False to unpickle opaque values, which may run code.

        Raises:
            UsageError: `map_location` is not a device.
            UnsafeError: a value is a pickle, and `weights_only` is not False.
            UnsupportedError: the optimizers were saved by a strategy.
        """
        if callable(map_location) or isinstance(map_location, dict):
            raise UsageError("map_location must be a device", hint='such as "cpu"')
        ck = open_reference(str(path))
        rest = dict(decode(ck.objects.get(_REST, {}), trust=weights_only is False))
        numbered = rest.get("optimizer_states", [])
        if not numbered and ck.manifest.groups:
            raise UnsupportedError(
                f"{ck.url} contains optimizers without the numbers of their parameters, which a "
                "CheckpointIO needs",
                hint="load it with UniversalDDPStrategy or UniversalModelParallelStrategy",
            )
        if self._lossy:
            ck = ck.with_lossy()
        tensors, report = _read(ck, torch.device(map_location or "cpu"), optimizers=bool(numbered))
        self._launch.begin(report)
        rest["state_dict"] = _state_dict(ck, tensors)
        for state in numbered:
            for name, number in _numbers(state).items():
                stored = ck.aliases.get(name, name)
                states = {s: t for (n, s), t in tensors.items() if n == stored and s != "weight"}
                state["state"].setdefault(number, {}).update(states)
        return rest

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, here and in the catalog, unless it is protected."""
        discard(str(path))


def _run_arguments(
    name: str, options: Mapping[str, Any], refused: Mapping[str, str]
) -> RunArguments:
    """The arguments of saves among the options of a strategy or a CheckpointIO, checked."""
    refuse_arguments(name, options, refused)
    names = RunArguments.__annotations__.keys() - {"timeout"}
    arguments = cast("RunArguments", {k: v for k, v in options.items() if k in names})
    SaveOptions.of("", arguments)
    return arguments


def _with_rest(state: LocalState, rest: Mapping[str, Any]) -> LocalState:
    return replace(state, objects={**state.objects, _REST: encode(rest)})


def _described(
    checkpoint: Mapping[str, Any],
    launch: TrainingLaunch,
    arguments: RunArguments,
    logged: Mapping[str, Any] | None = None,
) -> SaveArguments:
    """The arguments of a save, by default with the hyper-parameters as its config."""
    config = program_config(
        *((kind, dict(checkpoint[kind])) for kind in _HYPER if checkpoint.get(kind))
    )
    metrics = {name: float(value) for name, value in (logged or {}).items()}
    for callback in checkpoint.get("callbacks", {}).values():
        is_monitor = isinstance(callback, dict) and callback.get("monitor")
        if is_monitor and callback.get("current_score") is not None:
            metrics[callback["monitor"]] = float(callback["current_score"])
    return {
        "step": int(checkpoint["global_step"]),
        "metrics": metrics,
        "config": config,
        "changed": None,
        "tokens": None,
        "deltas": None,
        "times": 0,
        "overwrite": True,
        **launch.next_save(),
        **arguments,
    }


def _without_tensors(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in checkpoint.items() if k not in _TENSORS}


def _named(index: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict by names, in the form of `get_optimizer_state_dict`."""
    if any("param_names" not in group for group in state["param_groups"]):
        raise UnsupportedError(
            f"optimizer {index} does not know the names of its parameters, only their numbers",
            hint=(
                "create it with names, AdamW(self.named_parameters()), or save with "
                "UniversalDDPStrategy"
            ),
        )
    names = {number: name for name, number in _numbers(state).items()}
    groups = [{**g, "params": [names[n] for n in g["params"]]} for g in state["param_groups"]]
    states = {names[n]: dict(values) for n, values in state["state"].items()}
    return {"state": states, "param_groups": groups}


def _numbers(state: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of an optimizer's parameters by their names."""
    groups = state["param_groups"]
    return {k: v for g in groups for k, v in zip(g["param_names"], g["params"], strict=True)}


def _skeleton(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict without its tensors."""
    values = {
        n: {k: v for k, v in s.items() if not isinstance(v, torch.Tensor)}
        for n, s in state["state"].items()
    }
    return {"state": values, "param_groups": state["param_groups"]}


def _read(ck: Checkpoint, device: torch.device, *, optimizers: bool) -> _Read:
    tensors = {
        (key.name, key.state): torch.empty(info.shape, dtype=torch_dtype(info.dtype), device=device)
        for key, info in ck.tensors.items()
        if optimizers or key.state == "weight"
    }
    shards = [local_of(name, state, t) for (name, state), t in tensors.items()]
    targets = LoadTargets(shards, stateful=optimizers)
    # nothing here returns a report that could name older tensors
    options = LoadOptions(strict_step=True)
    return tensors, load_local(targets, ck, single_process_group(), options)


def _state_dict(
    ck: Checkpoint, tensors: Mapping[tuple[str, str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The state dict of the module, with all names of tied tensors."""
    weights = {name: tensors[name, "weight"] for name in ck.names() if (name, "weight") in tensors}
    return weights | {a: weights[n] for a, n in ck.aliases.items() if n in weights}


def _is_universal(path: Any) -> bool:
    if not isinstance(path, str | PathLike) or Path(path).is_file():
        return False
    try:
        return exists(open_store(path), MANIFEST)
    except UcformatError:
        return False


def _load_for_inference(path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
    """What `load_from_checkpoint` loads: of a universal one no state of the training."""
    if not _is_universal(path):
        return _stock_load(path, map_location, weights_only)
    ck = open_reference(str(path))
    if _REST not in ck.objects:
        raise UsageError(
            f"{ck.url} was not saved by Lightning", hint="load it with ucformat.torch.load"
        )
    needed = {k: v for k, v in ck.objects[_REST].items() if k not in _OF_TRAINING}
    try:
        rest = dict(decode(needed, trust=weights_only is False))
    except UnsafeError as error:
        raise UnsafeError(
            error.message, hint="weights_only=False, if you trust the author of the checkpoint"
        ) from error
    device = torch.device("cpu" if callable(map_location) or map_location is None else map_location)
    tensors, _ = _read(ck, device, optimizers=False)
    return {**rest, "state_dict": _state_dict(ck, tensors)}


#: Lightning reads a checkpoint for `load_from_checkpoint` as a file, and has no place for another
#: way.
_stock_load = saving.pl_load
saving.pl_load = _load_for_inference
