"""The files in a directory of Trainer or Accelerate: which belong to the engine, and which do not.

Trainer writes `checkpoint-500/`, Accelerate's `save_state` a folder of any name. Both contain the
engine's own files:

- DeepSpeed: `latest` and the folder that it names (`global_step500/`; Accelerate:
  `pytorch_model/`);
- FSDP, sharded: `pytorch_model_fsdp_0/` and `optimizer_0/`, written by PyTorch DCP;
- FSDP, whole: `pytorch_model_fsdp.bin` and `optimizer.bin`;
- otherwise: a model's files (`model.safetensors`, `pytorch_model.bin`, `adapter_model.safetensors`,
  or an index), and `optimizer.pt` (Trainer) or `optimizer.bin` (Accelerate).

If there are several models or optimizers, Accelerate numbers all but the first:
`model_1.safetensors`, `optimizer_1.bin`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.errors import UnsupportedError, UsageError, first_names, option_text
from ucformat.sources.registry import SOURCES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator


_MARKERS = re.compile(
    r"trainer_state\.json|random_states_\d+\.pkl|training_args\.bin|pytorch_model_fsdp(_\d+)?\.bin"
)
_OPTIMIZER = re.compile(r"optimizer(?:_(\d+))?\.(?:pt|bin)")
_MODEL = re.compile(r"(?:model|pytorch_model|adapter_model)(?:_(\d+))?(?:-\d{5,}-of-\d{5,})?"
                    r"\.(safetensors|bin)(?:\.index\.json)?")  # fmt: skip
_FSDP = re.compile(r"(pytorch_model_fsdp_(\d+)|optimizer_(\d+))/.+")
_FSDP_WHOLE = re.compile(r"pytorch_model_fsdp(?:_(\d+))?\.bin")
_RUN = re.compile(r"(checkpoint-\d+)/trainer_state\.json")
_VALUE = re.compile(
    r"((?:training_args|scheduler|scaler|sampler|dl_state_dict|custom_checkpoint)(?:_\d+)?)\.(?:pt|bin|pkl)"
)
_RANKED = re.compile(r"(rng_state|random_states)(?:_(\d+))?\.(?:pth|pkl)")
_NOT_READ = (
    (re.compile(r"pytorch_model_fsdp.*_rank\d+\.bin|optimizer(_\d+)?_rank\d+\.bin"), "FSDP's state dicts of each rank"),
    (re.compile(r"rank\d+-of-\d+-.+"), "checkpoints of FSDP under XLA"),
    (re.compile(r"(model|optimizer)\.(pt|bin)_\d.*|user_content\.pt"), "SageMaker's model parallelism"),
    (re.compile(r"pytorch_model_\d+/[^/]*(mp_rank|pp_rank)[^/]*\.pt"), "several DeepSpeed models in one folder"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """The files by role; models, optimizers and their folders by number."""

    deepspeed: bool
    fsdp_models: dict[int, str]  # folders
    fsdp_optimizers: dict[int, str]
    fsdp_whole: dict[int, str]
    models: dict[int, list[str]]
    optimizers: dict[int, str]
    values: dict[str, str]  # name of the object -> file
    ranked: dict[str, dict[int, str]]  # name of the object -> rank -> file
    trainer_state: bool


def is_marker(name: str) -> bool:
    """Whether only Trainer or Accelerate write a file of this name."""
    return _MARKERS.fullmatch(name) is not None


def looks_like_trainer(names: Collection[str]) -> bool:
    """Whether a folder has the files of Trainer or Accelerate, or the checkpoints of a run of Trainer."""
    if any(
        is_marker(n) or (_FSDP.fullmatch(n) and n.startswith("pytorch_model_fsdp")) for n in names
    ):
        return True
    if any(_OPTIMIZER.fullmatch(n) for n in names) and any(_MODEL.fullmatch(n) for n in names):
        return True
    return any(_RUN.fullmatch(n) for n in names) and not any(_MODEL.fullmatch(n) for n in names)


def classify(names: Iterable[str], url: str) -> FolderFiles:
    """Assign the files of a folder to roles."""
    names = list(names)
    for pattern, feature in _NOT_READ:
        for name in names:
            if pattern.fullmatch(name):
                raise UnsupportedError(
                    f"{name}: not yet read: {feature}",
                    hint="save whole or sharded (DCP) state dicts; to open one file by itself, give its path and "
                    f"{option_text('part', 'True', 'true')}",
                )
    is_deepspeed = SOURCES["deepspeed"]().is_marker
    files = FolderFiles(
        deepspeed="latest" in names or any(is_deepspeed(n) for n in names if n.count("/") < 2),
        fsdp_models=_folders(names, 2),
        fsdp_optimizers=_folders(names, 3),
        fsdp_whole={int(m[1] or 0): m[0] for n in names if (m := _FSDP_WHOLE.fullmatch(n))},
        models=_models(names),
        optimizers=_optimizers(names),
        values={m[1]: m[0] for n in names if (m := _VALUE.fullmatch(n))},
        ranked=_ranked_values(names),
        trainer_state="trainer_state.json" in names,
    )
    if not (
        files.deepspeed or files.fsdp_models or files.fsdp_whole or files.models or files.optimizers
    ):
        runs = sorted({m[1] for n in names if (m := _RUN.fullmatch(n))}, key=_step_of)
        if runs:
            raise UsageError(
                f"{url} is the folder of a run: it holds {first_names(runs, 10)}",
                hint=f"open one of them: {url}/{runs[-1]}",
            )
        raise UsageError(
            f"{url} has files of Trainer or Accelerate, but no model and no optimizer",
            hint=(
                "the save did not finish, or files were moved; look for the checkpoint's other "
                "files"
            ),
        )
    return files


def _step_of(run: str) -> int:
    return int(run.partition("-")[2])


def missing_files(files: FolderFiles) -> Iterator[str]:
    """The files that Trainer, unlike Accelerate, always writes with those that are there."""
    trained = bool(files.optimizers or files.fsdp_optimizers)
    torch_files = (*files.optimizers.values(), files.values.get("scheduler", ""))
    of_trainer = (
        files.trainer_state or "training_args" in files.values or "rng_state" in files.ranked
    )
    if not (of_trainer or any(name.endswith(".pt") for name in torch_files)):
        return
    if not files.trainer_state:
        yield "trainer_state.json"
    if trained and "scheduler" not in files.values:  # DeepSpeed's own schedulers are in its files
        yield "scheduler.pt"
    if trained and "rng_state" not in files.ranked:
        yield "rng_state.pth"


def _ranked_values(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """The states of random number generators, of which each rank writes its own."""
    by_name: dict[str, dict[int, str]] = {}
    for name in names:
        if match := _RANKED.fullmatch(name):
            by_name.setdefault(match[1], {})[int(match[2] or 0)] = name
    return by_name


def _folders(names: Iterable[str], number: int) -> dict[int, str]:
    matches = [m for n in names if (m := _FSDP.fullmatch(n))]
    return {int(m[number]): m[1] for m in matches if m[number] is not None}


def _models(names: Iterable[str]) -> dict[int, list[str]]:
    """The files of each model; if it has both safetensors and pickles, the former."""
    by_number: dict[int, list[tuple[str, str]]] = {}
    for name in names:
        if match := _MODEL.fullmatch(name):
            by_number.setdefault(int(match[1] or 0), []).append((match[2], name))
    out = {}
    for number, files in sorted(by_number.items()):
        # `safetensors` is greater than `bin`.
        kind = max(suffix for suffix, _ in files)
        out[number] = [name for suffix, name in files if suffix == kind]
    return out


def _optimizers(names: Iterable[str]) -> dict[int, str]:
    by_number: dict[int, str] = {}
    for name in names:
        if match := _OPTIMIZER.fullmatch(name):
            number = int(match[1] or 0)
            if number in by_number:
                raise UsageError(
                    f"{by_number[number]} and {name} are both present: Trainer's and "
                    "Accelerate's files in one folder",
                    hint="move the files of the save that you do not want elsewhere",
                )
            by_number[number] = name
    return dict(sorted(by_number.items()))
