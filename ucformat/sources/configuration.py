"""The training configuration, metrics and run name that a foreign checkpoint contains.

A checkpoint may contain several kinds of configuration (`KINDS`): DeepSpeed's `ds_config`,
Trainer's `training_args`, Megatron's `args`, a model's `config.json`. The kind is not a key: the
keys of all kinds are merged into one object. If two kinds have different values for a key, the
first kind's value gets it, and the other's goes below the name of its kind: `config.fp16.enabled`
is DeepSpeed's, `config.training_args.fp16` Trainer's (docs/catalog.md, "Configuration").

Values without a JSON form become plain ones: an enum its value, a data type, path or function its
name, a namespace its fields, a number that is not finite the text `nan`, `inf` or `-inf`. Bytes,
private fields and all tensors except single numbers are left out. Secrets are never kept
(`REDACTED`).
"""

from __future__ import annotations

import base64
import json
import logging
import math
import re
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ucformat.errors import UcformatError
from ucformat.reading.values import plain_form, to_json
from ucformat.sources.registry import SOURCES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ucformat.reading.readable import CheckpointMetadata

_log = logging.getLogger("ucformat")

#: Kinds of configuration, by precedence: objects at the root or in one of `_CONTAINERS`.
KINDS = (
    *(
        "ds_config",
        "training_args",
        "args",
        "hyper_parameters",
        "datamodule_hyper_parameters",
        "hparams",
    ),
    *("config", "cfg", "training_config", "train_config", "model_args", "model_config"),
    *("custom_metadata", "attributes", "metadata"),
)
#: Files with configuration -> their kind, which comes after all the others.
ASSETS = {
    "config.json": "model_config",
    "adapter_config.json": "adapter_config",
    "generation_config.json": "generation_config",
}
REDACTED = "(redacted)"
# of Zarr groups and safetensors files: not configuration anywhere else
_FILE_KINDS = ("attributes", "metadata")

#: Objects in which training programs store values of their own.
_CONTAINERS = ("client_state", "extra_state", "user_defined_dict")
_METRIC = re.compile(r"(?:.*[^a-z])?(?:loss|acc|accuracy|perplexity|ppl|metric)\d*")
_SECRET = re.compile(
    r"(?:.*[^a-z])?(?:secrets?|password|passwd|passphrase|credentials?|auth|authorization|cookie|"
    r"(?:api|access|private|secret|account|encryption|wandb)[^a-z]?key(?:[^a-z]?id)?|apikey)",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"(?:(.*)[^a-z])?tokens?", re.IGNORECASE)
_TOKENIZER_TOKEN = re.compile(  # `pad` of `pad_token`
    r"(?:.*[^a-z])?(?:additional_special|and|bod|boi|boa|bos|box|cls|decoder_start|eod|eoa|eoi|eos|fim|image|audio|video|mask|"
    r"object|pad|prefix|ref|sep|space|special|speech|start|stop|suffix|unk|vision)(?:[^a-z].*)?",
    re.IGNORECASE,
)
_CREDENTIAL = re.compile(
    r"hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[opsu]_\w{16,}|github_pat_\w+|glpat-[\w-]{16,}|xox[a-z]-[\w-]+|"
    r"(?:AKIA|ASIA)[A-Z0-9]{16}|eyJ[\w-]+\.eyJ[\w-]+\.[\w-]*|Bearer .+"
)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
_NUMBER_FORMATS = {
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
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class TrainingInfo:
    """The configuration, metrics and run name that a checkpoint's files contain, as JSON values; metrics may be NaN."""

    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    run: str | None = None


def find_training_info(
    metadata: CheckpointMetadata, assets: Mapping[str, bytes], url: str
) -> TrainingInfo:
    """Extract configuration, metrics and run name from a foreign checkpoint; nothing, with a warning, if that fails."""
    files = [name for name in ASSETS if name in metadata.assets]
    try:
        readers = {name: partial(_read_json, assets, name, url) for name in files}
        return read_training_info(metadata.objects, readers, metadata.aliases)
    except UcformatError as error:  # the tensors can be read without it
        _log.warning("%s: its configuration cannot be read: %s", url, error.message)
        return TrainingInfo()


def _read_json(assets: Mapping[str, bytes], name: str, url: str) -> Any:
    """A JSON file beside the tensors; None with a warning if it is invalid."""
    try:
        return json.loads(assets[name])
    except (ValueError, RecursionError) as error:
        _log.warning(
            "%s/%s is not valid JSON (%s), and is left out of the configuration", url, name, error
        )
        return None


def read_training_info(
    objects: Mapping[str, Any], assets: Mapping[str, Callable[[], Any]], aliases: Iterable[str] = ()
) -> TrainingInfo:
    """Extract configuration, metrics and run name from the values of a checkpoint.

    Args:
        assets: functions that read the JSON files listed in `ASSETS`, by file name; only files that
            exist.
        aliases: names of tied tensors, which safetensors stores in its metadata and which are not
            configuration.
    """
    kinds = [*_kinds(objects), *((ASSETS[name], to_json(read())) for name, read in assets.items())]
    tied = frozenset((*aliases, "format"))
    configs = [(kind, {k: v for k, v in _mapping(value).items() if kind != "metadata" or k not in tied})
             for kind, value in kinds]  # fmt: skip
    # Reversed, so that of several configurations of a kind the first is used.
    arguments = dict(reversed(configs)).get("training_args", {})
    run = arguments.get("run_name") or dict(reversed(configs)).get("args", {}).get("wandb_exp_name")
    # Trainer's default for `run_name` is `output_dir`, which is a path and not a name.
    named = isinstance(run, str) and run and run != arguments.get("output_dir")
    return TrainingInfo(merge_configs(configs), dict(_metrics(objects)), run if named else None)


def merge_configs(kinds: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Merge several kinds of configuration into one object.

    Returns:
        all keys with the first kind's value; the differing values of later kinds below the name of
        their kind.
    """
    out: dict[str, Any] = {}
    conflicts: list[tuple[str, dict[str, Any]]] = []
    for kind, config in kinds:
        conflicts.append((kind, {k: v for k, v in config.items() if k in out and out[k] != v}))
        out |= {k: v for k, v in config.items() if k not in out}
    for kind, differing in conflicts:
        if differing:
            name, n = kind, 1
            while name in out:
                n += 1
                name = f"{kind}~{n}"
            out[name] = differing
    return out


def program_config(*kinds: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The configuration of a running program; values without a JSON form become text."""
    return merge_configs(
        (kind, _mapping(to_json(json.loads(json.dumps(dict(config), default=str, skipkeys=True)))))
        for kind, config in kinds
    )


def with_config(known: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add a configuration that the user gives, which takes precedence; the values that it replaces go below `source`.

    Args:
        given: the user's, of any values; None or empty: `known` is returned unchanged.
    """
    return (
        dict(known)
        if not given
        else merge_configs([("config", _mapping(to_json(dict(given)))), ("source", known)])
    )


def plain_config(value: Any) -> Any:
    """Simplify a configuration to plain JSON without secrets."""
    plain = _plain(value, 0)
    return None if plain is _DROPPED else plain


def _mapping(value: Any) -> dict[str, Any]:
    plain = plain_config(value)
    return plain if isinstance(plain, dict) else {}


def _containers(objects: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects that hold what a program saved beside its own state."""
    named = (objects.get(name) for name in (*_CONTAINERS, *SOURCES.names()))
    return [value for value in named if isinstance(value, dict)]


def _of_engines(objects: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects that are called as a kind of checkpoint: what its files hold by the names of items."""
    return [v for name in SOURCES.names() if isinstance(v := objects.get(name), dict)]


def _kinds(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    containers = [objects, *_containers(objects)]
    for by_item in _of_engines(objects):
        containers += [p for name in ("items", "trees") if isinstance(p := by_item.get(name), dict)]
        trees = by_item.get("trees")
        for custom in trees.values() if isinstance(trees, dict) else ():
            yield "custom_metadata", custom
    for kind in KINDS:
        for container in containers:
            config = container.get(kind)
            if (
                isinstance(config, dict)
                and (kind not in _FILE_KINDS or container is objects)
                and not _by_file(kind, config)
            ):
                yield kind, config


def _by_file(kind: str, metadata: Mapping[str, Any]) -> bool:
    """Whether this is the metadata of several safetensors files, by file, which is not one configuration."""
    return kind == "metadata" and not all(isinstance(v, str) for v in metadata.values())


def _plain(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
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
        # No forms are `$$`, which escapes a key that begins with `$`, and `$int:`, an integer key.
        if name.startswith("$") and not name.startswith(("$$", "$int:")):
            return _special("$class" if "$class" in value else name, value, depth)
    return _fields(value, depth)


def _fields(value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    out = {}
    for key, item in value.items():
        text = str(key)
        text = (
            text.removeprefix("$int:")
            if text.startswith("$int:")
            else text[1:]
            if text.startswith("$$")
            else text
        )
        plain = _plain(item, depth + 1)
        if plain is not _DROPPED:
            out[text] = (
                REDACTED
                if plain not in (None, False, True, "") and _is_secret(text, plain)
                else plain
            )
    return out


def _is_secret(key: str, value: Any) -> bool:
    key = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key)  # apiKey, hubToken
    token = _TOKEN.fullmatch(key)
    if token and (
        isinstance(value, str)
        or (isinstance(value, list) and any(isinstance(v, str) for v in value))
    ):
        return not _TOKENIZER_TOKEN.fullmatch(token[1] or "")
    return _SECRET.fullmatch(key) is not None


def _special(form: str, value: Mapping[str, Any], depth: int) -> Any:
    """Simplify a value in one of the `$` forms (see `ucformat.reading.values`)."""
    plain = plain_form(value)
    if plain is not value:
        return _plain(plain, depth)
    inner = value[form]
    match form:
        case "$class":
            return _object(value, depth)
        case "$float" | "$dtype" | "$datetime" | "$path":
            return _plain(inner if isinstance(inner, str | int | float) else str(inner), depth)
        case "$set" | "$slice" | "$tuple":
            return _plain(inner, depth)
        case "$dict":
            pairs = [(_plain(k, depth + 1), v) for k, v in inner]
            return _fields(
                {str(k): v for k, v in pairs if isinstance(k, str | int | float | bool | None)},
                depth,
            )
        case "$tensor":
            number = _number(value)
            return _DROPPED if number is None else _plain(number, depth)
    return _DROPPED


def _object(value: Mapping[str, Any], depth: int) -> Any:
    """Simplify an object: a namespace or dataclass to its fields, a collection to its items, an enum to its value."""
    parts = (value.get(key) for key in ("$state", "$items", "$args"))
    state, items, args = (
        p["$tuple"] if isinstance(p, dict) and set(p) == {"$tuple"} else p for p in parts
    )
    if isinstance(state, dict) and "$class" not in state:
        return _fields({k: v for k, v in state.items() if not str(k).startswith("_")}, depth)
    if items is not None:
        return _plain(items, depth)
    if isinstance(args, list) and len(args) == 1:
        return _plain(args[0], depth)
    return _plain(args, depth) if args else str(value["$class"])


def _number(value: Any) -> float | int | None:
    """A number, possibly as a 0-d tensor or, if it is not finite, as text; None for other values."""
    value = plain_form(value)
    if isinstance(value, dict) and set(value) == {"$float"}:
        return float(value["$float"])
    if isinstance(value, dict) and set(value) == {"$tensor"}:
        tensor = value["$tensor"]
        code, data = _NUMBER_FORMATS.get(tensor["dtype"]), base64.b64decode(tensor["data"])
        if code is None or len(data) != struct.calcsize(code):
            return None
        number: float | int = struct.unpack(code, data)[0]
        return number
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _metrics(objects: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The last values that Trainer logged, metrics of Orbax and Lightning, and values named as losses or `metrics`."""
    items = (by_item.get("items") for by_item in _of_engines(objects))
    for container in [objects, *_containers(objects), *(p for p in items if isinstance(p, dict))]:
        named = {k: v for k, v in container.items() if _METRIC.fullmatch(k)}
        metrics = container.get("metrics")
        yield from _numbers({**named, **(metrics if isinstance(metrics, dict) else {})})
    callbacks = objects.get("callbacks")
    for callback in callbacks.values() if isinstance(callbacks, dict) else ():
        monitor = callback.get("monitor") if isinstance(callback, dict) else None
        if isinstance(monitor, str):
            yield from _numbers(
                {
                    monitor: callback.get("current_score"),
                    "best_metric": callback.get("best_model_score"),
                }
            )
    state = objects.get("trainer_state")
    if isinstance(state, dict):
        history = state.get("log_history")
        for entry in history if isinstance(history, list) else ():
            yield from _numbers(
                {k: v for k, v in entry.items() if k != "step"} if isinstance(entry, dict) else {}
            )
        yield from _numbers({"best_metric": state.get("best_metric")})


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        number = _number(value)
        with suppress(OverflowError):  # of an integer beyond all floats
            if number is not None:
                yield name, float(number)
