"""What of a foreign checkpoint is the configuration of its training, what are metrics, and which run it is of.

A checkpoint may hold several kinds of configuration (`KINDS`): DeepSpeed's `ds_config`, Trainer's `training_args`,
Megatron's `args`, a model's `config.json`. Each is the configuration itself, not a key in it: their keys stand side by
side. Where two kinds give a key different values, the first kind's stands there, and the other's under the name of its
kind: `config.fp16.enabled` is DeepSpeed's, `config.training_args.fp16` Trainer's (docs/catalog.md, "Configuration").

What was no JSON in the checkpoint becomes plain here: an enum is its value, a data type, path or function its name, a
namespace its fields, a number that is not finite the text `nan`, `inf` or `-inf`. Bytes, tensors but single numbers,
and private fields are left out. Secrets are never taken (`REDACTED`).
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.sources.values import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = [
    "ASSETS",
    "KINDS",
    "REDACTED",
    "TrainingInfo",
    "merged",
    "of_program",
    "plain",
    "read_training_info",
    "with_config",
]

#: Kinds of configuration, the first wins: as objects, at the root or in what a program adds to its engine's values.
KINDS = (
    *("ds_config", "training_args", "args", "hyper_parameters", "datamodule_hyper_parameters", "hparams"),
    *("config", "cfg", "training_config", "train_config", "model_args", "model_config"),
    *("custom_metadata", "attributes", "metadata"),
)
#: Files beside the tensors that are configuration: their kind, after all the others.
ASSETS = {
    "config.json": "model_config",
    "adapter_config.json": "adapter_config",
    "generation_config.json": "generation_config",
}
REDACTED = "(redacted)"
_OF_FILES = ("attributes", "metadata")  # of Zarr groups and safetensors files; elsewhere the words mean anything

_INSIDE = ("client_state", "extra_state", "user_defined_dict", "orbax")  # where programs put values of their own
_METRIC = re.compile(r"(?:.*[^a-z])?(?:loss|acc|accuracy|perplexity|ppl|metric)\d*")
_SECRET = re.compile(
    r"(?:.*[^a-z])?(?:secrets?|password|passwd|passphrase|credentials?|auth|authorization|cookie|"
    r"(?:api|access|private|secret|account|encryption|wandb)[^a-z]?key(?:[^a-z]?id)?|apikey)",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"(?:(.*)[^a-z])?tokens?", re.IGNORECASE)
_OF_TEXT = re.compile(  # the tokens of a tokenizer
    r"(?:.*[^a-z])?(?:additional_special|and|bod|boi|boa|bos|box|cls|decoder_start|eod|eoa|eoi|eos|fim|image|audio|video|mask|"
    r"object|pad|prefix|ref|sep|space|special|speech|start|stop|suffix|unk|vision)(?:[^a-z].*)?",
    re.IGNORECASE,
)
_CREDENTIAL = re.compile(
    r"hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[opsu]_\w{16,}|github_pat_\w+|glpat-[\w-]{16,}|xox[a-z]-[\w-]+|"
    r"(?:AKIA|ASIA)[A-Z0-9]{16}|eyJ[\w-]+\.eyJ[\w-]+\.[\w-]*|Bearer .+"
)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
_NUMBERS = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "int8": "<b",
    "uint8": "<B",
}
_DROPPED = object()
_DEPTH = 64


@dataclass(frozen=True, slots=True)
class TrainingInfo:
    """The configuration, metrics and run name that a checkpoint's files contain, as JSON values; metrics may be NaN."""

    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    run: str | None = None


def read_training_info(
    objects: Mapping[str, Any], assets: Mapping[str, Callable[[], Any]], aliases: Iterable[str] = ()
) -> TrainingInfo:
    """What the values of a checkpoint tell.

    Args:
        objects: its non-tensor values, as `CheckpointMetadata` has them.
        assets: how to read those of its files that `ASSETS` names, as JSON.
        aliases: names of tied tensors, which safetensors keeps in its metadata.
    """
    kinds = [*_kinds(objects), *((ASSETS[name], to_json(read())) for name, read in assets.items())]
    tied = frozenset((*aliases, "format"))
    found = [(kind, {k: v for k, v in _mapping(value).items() if kind != "metadata" or k not in tied})
             for kind, value in kinds]  # fmt: skip
    arguments = dict(reversed(found)).get("training_args", {})
    run = arguments.get("run_name") or dict(reversed(found)).get("args", {}).get("wandb_exp_name")
    named = isinstance(run, str) and run and run != arguments.get("output_dir")
    return TrainingInfo(merged(found), dict(_metrics(objects)), run if named else None)


def merged(kinds: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Several kinds of configuration as one: of a key that several have, the others' stand under their kind's name."""
    out: dict[str, Any] = {}
    others: list[tuple[str, dict[str, Any]]] = []
    for kind, config in kinds:
        others.append((kind, {k: v for k, v in config.items() if k in out and out[k] != v}))
        out |= {k: v for k, v in config.items() if k not in out}
    for kind, differing in others:
        if differing:
            name, n = kind, 1
            while name in out:
                n += 1
                name = f"{kind}~{n}"
            out[name] = differing
    return out


def of_program(*kinds: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The configuration that a running program holds, by its kinds; of what is no JSON, the text."""
    return merged(
        (kind, _mapping(to_json(json.loads(json.dumps(dict(config), default=str, skipkeys=True)))))
        for kind, config in kinds
    )


def with_config(known: Mapping[str, Any], said: Mapping[str, Any] | None) -> dict[str, Any]:
    """A configuration with what somebody said of it, which wins: what it differs from stands under `source`.

    Raises:
        UnsupportedError: a value has no JSON form.
    """
    return dict(known) if not said else merged([("config", _mapping(to_json(dict(said)))), ("source", known)])


def plain(value: Any) -> Any:
    """A configuration as plain JSON, without secrets; of a value in the form of `ucformat.sources.values`."""
    found = _plain(value, 0)
    return None if found is _DROPPED else found


def _mapping(value: Any) -> dict[str, Any]:
    found = plain(value)
    return found if isinstance(found, dict) else {}


def _kinds(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    places = [objects, *(p for name in _INSIDE if isinstance(p := objects.get(name), dict))]
    orbax = objects.get("orbax")
    if isinstance(orbax, dict):
        places += [p for name in ("items", "trees") if isinstance(p := orbax.get(name), dict)]
        trees = orbax.get("trees")
        for custom in trees.values() if isinstance(trees, dict) else ():
            yield "custom_metadata", custom
    for kind in KINDS:
        for place in places:
            found = place.get(kind)
            if isinstance(found, dict) and (kind not in _OF_FILES or place is objects) and not _by_file(kind, found):
                yield kind, found


def _by_file(kind: str, found: Mapping[str, Any]) -> bool:
    """Whether this is the metadata of several safetensors files, by file: of no use as one configuration."""
    return kind == "metadata" and not all(isinstance(v, str) for v in found.values())


def _plain(value: Any, depth: int) -> Any:
    if depth > _DEPTH:
        return _DROPPED
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return REDACTED if _CREDENTIAL.fullmatch(value) else _USERINFO.sub(f"{REDACTED}@", value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [v for item in value if (v := _plain(item, depth + 1)) is not _DROPPED]
    if not isinstance(value, dict):
        return str(value)
    if len(value) == 1 or "$class" in value:
        name = next(iter(value))
        if name.startswith("$") and not name.startswith(("$$", "$int:")):
            return _special("$class" if "$class" in value else name, value, depth)
    return _fields(value, depth)


def _fields(value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    out = {}
    for key, item in value.items():
        text = str(key)
        text = text.removeprefix("$int:") if text.startswith("$int:") else text[1:] if text.startswith("$$") else text
        found = _plain(item, depth + 1)
        if found is not _DROPPED:
            out[text] = REDACTED if found not in (None, False, True, "") and _is_secret(text, found) else found
    return out


def _is_secret(key: str, value: Any) -> bool:
    key = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key)  # apiKey, hubToken
    token = _TOKEN.fullmatch(key)
    if token and (isinstance(value, str) or (isinstance(value, list) and any(isinstance(v, str) for v in value))):
        return not _OF_TEXT.fullmatch(token[1] or "")
    return _SECRET.fullmatch(key) is not None


def _special(form: str, value: Mapping[str, Any], depth: int) -> Any:
    """What JSON has no word for (see `ucformat.sources.values`)."""
    inner = value[form]
    match form:
        case "$class":
            return _object(value, depth)
        case "$float" | "$dtype" | "$datetime" | "$path":
            return _plain(inner if isinstance(inner, str | int | float) else str(inner), depth)
        case "$set" | "$slice":
            return _plain(inner, depth)
        case "$dict":
            pairs = [(_plain(k, depth + 1), v) for k, v in inner]
            return _fields({str(k): v for k, v in pairs if isinstance(k, str | int | float | bool | None)}, depth)
        case "$tensor":
            number = _number(value)
            return _DROPPED if number is None else _plain(number, depth)
    return _DROPPED


def _object(value: Mapping[str, Any], depth: int) -> Any:
    """A namespace or dataclass is its fields, a mapping or list its items, an enum its value, a class its name."""
    state, items, args = value.get("$state"), value.get("$items"), value.get("$args")
    if isinstance(state, dict) and "$class" not in state:
        return _fields({k: v for k, v in state.items() if not str(k).startswith("_")}, depth)
    if items is not None:
        return _plain(items, depth)
    if isinstance(args, list) and len(args) == 1:
        return _plain(args[0], depth)
    return _plain(args, depth) if args else str(value["$class"])


def _number(value: Any) -> float | int | None:
    """A number, also one in a tensor or written as text because it is not finite; None of all else."""
    if isinstance(value, dict) and set(value) == {"$float"}:
        return float(value["$float"])
    if isinstance(value, dict) and set(value) == {"$tensor"}:
        tensor = value["$tensor"]
        code, data = _NUMBERS.get(tensor["dtype"]), base64.b64decode(tensor["data"])
        if code is None or len(data) != struct.calcsize(code):
            return None
        number: float | int = struct.unpack(code, data)[0]
        return number
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _metrics(objects: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Trainer's last of each, Orbax's, what a callback of Lightning watches, and what is called a loss or `metrics`."""
    places = [objects, *(p for name in _INSIDE if isinstance(p := objects.get(name), dict))]
    items = objects["orbax"].get("items") if isinstance(objects.get("orbax"), dict) else None
    for place in [*places, items] if isinstance(items, dict) else places:
        named = {k: v for k, v in place.items() if _METRIC.fullmatch(k)}
        metrics = place.get("metrics")
        yield from _numbers({**named, **(metrics if isinstance(metrics, dict) else {})})
    callbacks = objects.get("callbacks")
    for callback in callbacks.values() if isinstance(callbacks, dict) else ():
        monitor = callback.get("monitor") if isinstance(callback, dict) else None
        if isinstance(monitor, str):
            yield from _numbers(
                {monitor: callback.get("current_score"), "best_metric": callback.get("best_model_score")}
            )
    state = objects.get("trainer_state")
    if isinstance(state, dict):
        history = state.get("log_history")
        for entry in history if isinstance(history, list) else ():
            yield from _numbers({k: v for k, v in entry.items() if k != "step"} if isinstance(entry, dict) else {})
        yield from _numbers({"best_metric": state.get("best_metric")})


def _numbers(found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in found.items():
        number = _number(value)
        if (number is not None and abs(number) < 2**1000) or (isinstance(number, float) and not math.isfinite(number)):
            yield name, float(number)
