"""Transformers: a Trainer that saves and resumes, and a callback (docs/guides/huggingface.md)."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import sort_checkpoints

from ucformat.engines.huggingface.accelerate import unwrapped
from ucformat.engines.huggingface.integration import HUGGINGFACE
from ucformat.engines.huggingface.live_deepspeed import (
    CLIENT,
    STATE,
    client_values,
    load_engine,
    save_engine,
)
from ucformat.errors import NotACheckpoint, NotCertified, UnsupportedError, check_keywords
from ucformat.jobs.removal import discard
from ucformat.schema import MANIFEST
from ucformat.sources.configuration import program_config
from ucformat.torch.comm.group import group_for_call
from ucformat.torch.loading.arguments import RestoreArguments
from ucformat.torch.loading.load import load
from ucformat.torch.loading.share import open_together
from ucformat.torch.saving.asynchronous import async_save
from ucformat.torch.saving.options import SaveArguments, TrainingLaunch
from ucformat.torch.saving.save import save
from ucformat.torch.state.objects import Rng, decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import TrainerState, TrainingArguments

    from ucformat.checkpoint import Checkpoint
    from ucformat.torch.saving.handles import SaveHandle

__all__ = ["SaveCallback", "UniversalTrainer"]

_STOCK_STATE = "trainer_state"  # the same in a folder that the Trainer itself has saved


class SaveCallback(TrainerCallback):
    """A callback that saves a universal checkpoint, `<url>/step-<n>`, in addition to each checkpoint of the Trainer.

    A callback has no access to the gradient scaler and to other callbacks; `UniversalTrainer` saves
    these too.

    Args:
        url: the folder of the checkpoints, a path or URL.
        background: save in the background, with `async_save`.
        options: other arguments of `save`: those of `SaveArguments`.
    """

    def __init__(self, url: str, *, background: bool = False, **options: Any) -> None:
        check_keywords("save", options, SaveArguments)
        self.url, self.background, self.options = url, background, options
        self.handle: SaveHandle | None = None

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **live: Any) -> None:
        """Save a checkpoint after the Trainer has saved one.

        Raises:
            UnsupportedError: a DeepSpeed engine has the state of the Trainer.
        """
        if isinstance(live["optimizer"], DeepSpeedOptimizerWrapper):
            raise UnsupportedError(
                "DeepSpeed manages the state of this Trainer, and a callback has no access to its "
                "engine",
                hint="use UniversalTrainer, which saves the engine",
            )
        parts = _training(live["model"], live["optimizer"], live["lr_scheduler"])
        if state.is_world_process_zero:
            parts[STATE] = asdict(state)
        url = f"{self.url}/step-{state.global_step}"
        with _files_of(live.get("processing_class"), args) as assets:
            options = {**_description(args, state, live["model"]), "assets": assets, **self.options}
            if self.background:
                self.handle = async_save(parts, url, **options)
            else:
                save(parts, url, **options)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Wait for the last save."""
        if self.handle is not None:
            self.handle.wait()


class UniversalTrainer(Trainer):
    """A Trainer that saves universal checkpoints; as the first base class, it changes another subclass of Trainer.

    `save_options` are arguments of `save`, those of `SaveArguments`; with `certify` among them, loads are
    certified, too. `load_options` are arguments of `load`, those of `RestoreArguments`; `strict_step`
    is True by default, since no report is returned. `save_in_background` saves with `async_save`. Set
    them as class attributes. Where DeepSpeed manages the state, its engine is saved and loaded, as by
    `ucformat.torch.deepspeed`.
    """

    save_options: Mapping[str, Any] = MappingProxyType({})
    load_options: Mapping[str, Any] = MappingProxyType({})
    save_in_background = False
    _resumed: Checkpoint | None = None
    _handle: SaveHandle | None = None
    _launch: TrainingLaunch

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, optionally from a universal checkpoint.

        Args:
            resume_from_checkpoint: True for the last committed checkpoint in `output_dir`, or a
                checkpoint of a Trainer that ucformat can open or a reference to one, saved by any
                number of ranks. The random generators of a folder that the Trainer itself has saved
                are restored only on as many ranks, as by the Trainer.

        Raises:
            UnsupportedError: no Trainer has saved the checkpoint; or DeepSpeed manages the state,
                and `save_in_background` is set.
        """
        check_keywords("save", self.save_options, SaveArguments)
        check_keywords("load", self.load_options, RestoreArguments)
        if self.is_deepspeed_enabled and self.save_in_background:
            raise UnsupportedError(
                "a DeepSpeed engine is not saved in the background",
                hint="leave save_in_background out",
            )
        self._launch = TrainingLaunch()
        if not resume_from_checkpoint:
            return self._finished(super().train(None, *args, **kwargs))
        url = resume_from_checkpoint
        if resume_from_checkpoint is True:
            url = _last(Path(str(self.args.output_dir)))
        with group_for_call("load", url) as ranks:
            self._resumed = open_together(url, ranks)
        with TemporaryDirectory() as folder:  # the Trainer reads its state only from a file
            state = json.dumps(_trainer_state(self._resumed))
            (Path(folder) / "trainer_state.json").write_text(state)
            try:
                return self._finished(super().train(folder, *args, **kwargs))
            finally:
                self._resumed = None

    def _finished(self, output: Any) -> Any:
        self._settle()
        return output

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Prepare all but what a DeepSpeed engine holds, which Trainer would load by the engine itself."""
        ours = self._resumed is not None and self.is_deepspeed_enabled
        its = None if ours else resume_from_checkpoint
        prepared = super()._prepare_for_training(max_steps, train_dataloader, its)
        if ours:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._resumed is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            state = self._live()
            del state["rng"]  # restored later, after batches were skipped
            saved = client_values(self._resumed)
            scheduler = state.pop("scheduler", None) if "scheduler" in saved else None
            if not self.is_deepspeed_enabled:
                report = load(state, self._resumed, **self._restoring)
            else:
                report = load_engine(self.deepspeed, self._resumed, **self._restoring)
                if state:
                    load(state, self._resumed, **self._restoring)
            if scheduler is not None:
                scheduler.load_state_dict(saved["scheduler"])
            self._launch.begin(report)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_rng_state(checkpoint)
        elif STATE in self._resumed.objects:
            load({"rng": Rng()}, self._resumed, certify=self._certify)
        elif STATE in client_values(self._resumed):
            load({CLIENT: {"rng": Rng()}}, self._resumed)
        else:  # of files that the Trainer itself has saved, those that it would read
            if self._certify:
                _check_generators(self._resumed.url, self.args.world_size)
            super()._load_rng_state(self._resumed.url)

    def _load_best_model(self) -> None:
        self._settle()
        best = str(self.state.best_model_checkpoint)
        if self.is_deepspeed_enabled:
            alone = {"optimizer": False, "scheduler": False}
            load_engine(self.deepspeed, best, **alone, **self._restoring)
        else:
            load({"model": self.model}, best, **self._restoring)

    def _save_checkpoint(self, _model: Any, trial: Any) -> None:
        self._settle()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run = Path(self._get_output_dir(trial=trial))
        url = run / f"checkpoint-{self.state.global_step}"
        best = run / f"checkpoint-{self.state.best_global_step}"
        # else it is in the folder of the run that was resumed
        if best == url or (best / MANIFEST).exists():
            self.state.best_model_checkpoint = str(best)
        state = self._live()
        if self.args.process_index == 0:
            self.state.stateful_callbacks = self._callback_states()
            state[STATE] = asdict(self.state)
        if "model" in state and (
            self.args.save_only_model and not self.is_distributed_loading_by_transformers
        ):
            state = {"model": state["model"], **{k: v for k, v in state.items() if k == STATE}}
        described = _description(self.args, self.state, self.model)
        options = {"overwrite": True, **self._launch.next_save(), **described}
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        model = self.model if self.is_deepspeed_enabled else None
        with _files_of(tokenizer, self.args, model) as assets:
            options |= {"assets": assets, **self.save_options}
            if self.is_deepspeed_enabled:
                save_engine(self.deepspeed, url, state, **options)
            elif self.save_in_background:
                self._handle = async_save(state, url, **options)
            else:
                save(state, url, **options)
        if not self.save_in_background:
            self._rotate(run)

    def _settle(self) -> None:
        """Wait for the save in the background."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait()
            self._rotate(Path(handle.url).parent)

    def _rotate(self, run: Path) -> None:
        """Remove committed checkpoints beyond `save_total_limit`, unless they are protected."""
        if self.args.should_save and self.args.save_total_limit:
            here = [p for p in sort_checkpoints(str(run)) if (Path(p) / MANIFEST).exists()]
            stay = {here[-1], str(Path(self.state.best_model_checkpoint or here[-1]))} & {*here}
            excess = len(here) - max(self.args.save_total_limit, len(stay))
            for checkpoint in here:
                if excess > 0 and checkpoint not in stay and discard(checkpoint):
                    excess -= 1
        if dist.is_initialized():
            dist.barrier()

    @property
    def _certify(self) -> bool:
        return bool(self._restoring["certify"])

    @property
    def _restoring(self) -> Mapping[str, Any]:
        certify = bool(self.save_options.get("certify"))
        # `train` returns no report that could name older tensors
        return {"certify": certify, "strict_step": True, **self.load_options}

    def _live(self) -> dict[str, Any]:
        """The live state of the training, without what a DeepSpeed engine has of it."""
        if self.is_deepspeed_enabled:
            rest: dict[str, Any] = {"rng": Rng()}
            if not isinstance(self.lr_scheduler, DeepSpeedSchedulerWrapper):
                rest["scheduler"] = self.lr_scheduler
            return rest
        state = _training(self.model, self.optimizer, self.lr_scheduler)
        scaler = getattr(self.accelerator, "scaler", None)
        return state if scaler is None else {**state, "scaler": scaler}

    def _callback_states(self) -> dict[str, Any]:
        """The states of callbacks, in the form of TrainerState."""
        by_name: dict[str, list[Any]] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                by_name.setdefault(type(callback).__name__, []).append(callback.state())
        return {name: states[0] if len(states) == 1 else states for name, states in by_name.items()}


def _check_generators(url: str, ranks: int) -> None:
    """NotCertified if the Trainer would leave the generators of a rank as they are, for it has no file of them."""
    names = [f"rng_state_{r}.pth" for r in range(ranks)] if ranks > 1 else ["rng_state.pth"]
    lacking = [name for name in names if not (Path(url) / name).is_file()]
    if lacking:
        raise NotCertified(
            f"the random generators are not those that were saved in {url}, where "
            f"{', '.join(lacking)} is not",
            hint="resume on as many ranks as saved it; a checkpoint of UniversalTrainer has them "
            "for any number",
        )


def _trainer_state(ck: Checkpoint) -> Any:
    """The TrainerState that is stored in a checkpoint."""
    for name in (STATE, _STOCK_STATE):
        if name in ck.objects:
            return decode(ck.objects[name])
    if STATE in (saved := client_values(ck)):
        return saved[STATE]
    raise UnsupportedError(
        f"{ck.url} has no state of a Trainer: its step, epoch and log",
        hint="name a checkpoint that a Trainer saved; or load the weights by ucformat.torch.load({'model': model}, …), "
        "and train() without resume_from_checkpoint",
    )


def _training(model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": unwrapped(optimizer), "scheduler": scheduler, "rng": Rng()}


@contextmanager
def _files_of(tokenizer: Any, args: TrainingArguments, model: Any = None) -> Iterator[str | None]:
    """A folder with the files of a tokenizer or processor, and of a model, for the rank that stores them."""
    files = None if model is None else HUGGINGFACE.model_files(model, "zarr")
    saves = hasattr(tokenizer, "save_pretrained")
    if args.process_index != 0 or not (saves or files):
        yield None
        return
    with TemporaryDirectory() as folder:
        for name, content in ({} if files is None else files()).items():
            (Path(folder) / name).write_bytes(content)
        if saves:
            tokenizer.save_pretrained(folder)
        yield folder


def _description(args: TrainingArguments, state: TrainerState, model: Any) -> dict[str, Any]:
    """The arguments of `save` that describe the checkpoint."""
    logged: dict[str, Any] = {}
    for entry in state.log_history:
        if entry.get("step") == state.global_step:
            logged |= entry
    numbers = {k: float(v) for k, v in logged.items() if isinstance(v, int | float)}
    metrics = {k: v for k, v in numbers.items() if k not in ("step", "epoch")}
    of_model = json.loads(model.config.to_json_string())
    config = program_config(("training_args", args.to_sanitized_dict()), ("model_config", of_model))
    return {"step": state.global_step, "run": args.run_name, "metrics": metrics, "config": config}


def _last(folder: Path) -> str:
    """The last committed checkpoint in a Trainer's folder."""
    committed = (p for p in folder.glob("checkpoint-*") if (p / MANIFEST).exists())
    steps = {p: p.name.rpartition("-")[2] for p in committed}
    numbers = {p: int(n) for p, n in steps.items() if n.isdecimal()}
    if not numbers:
        raise NotACheckpoint(
            f"no checkpoint is committed in {folder}",
            hint=(
                "train() without resume_from_checkpoint, or pass the path of one that Trainer "
                "itself has saved"
            ),
        )
    return str(max(numbers, key=numbers.__getitem__))
