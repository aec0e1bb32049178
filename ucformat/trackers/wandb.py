"""W&B's runs: offline runs in a folder, each in a log of records that W&B writes before it uploads them."""

from __future__ import annotations

import json
import struct
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, NotFound, UnsupportedError, UsageError
from ucformat.jobs.logged import ID_TAG
from ucformat.redacted import learn_url, shown_url
from ucformat.storage.url import open_store, split_url
from ucformat.trackers.content import Point, TrackedContent, TrackedRun, TrackedRuns, joined
from ucformat.trackers.protobuf import MOST_BYTES, Message, damaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.storage.base import Store

_MAGIC = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
_BLOCK, _HEADER = 32 << 10, struct.Struct("<IHB")
_READ_BYTES = 128 * _BLOCK
_MOST_PARTS = MOST_BYTES // _BLOCK
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# fields of the records (wandb/proto/wandb_internal.proto)
_HISTORY, _CONFIG, _ARTIFACT, _RUN, _REQUEST = 2, 5, 8, 17, 100
_LOG_ARTIFACT = 13
_KEY, _NESTED_KEY, _VALUE = 1, 2, 16
_RUN_ID, _RUN_CONFIG, _RUN_NAME = 1, 4, 8


@dataclass(slots=True)
class _Log:
    """What the log of one process of a run has; of each row of history the values by name."""

    id: str = ""
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    references: set[str] = field(default_factory=set)
    ignored: Counter[str] = field(default_factory=Counter)


def wandb_runs(url: str, step_key: str | None = None) -> TrackedRuns:
    """Find the offline runs below a folder; several logs of one run continue each other, as they were begun.

    Args:
        step_key: the name under which the step of the training was logged; `_step` for W&B's own
            count (default: that, unless another step was logged and differs from it).
    """
    learn_url(url)
    if split_url(url)[0] in ("http", "https", "wandb"):
        raise UnsupportedError(
            f"runs of W&B are not read from its server ({shown_url(url)})",
            hint="give the folder of offline runs, such as ./wandb; a run that was uploaded has its "
            "log in its folder, too, unless `wandb sync --clean` has removed it",
        )
    store = open_store(url)
    keys = [(info.key, info.size) for info in store.list() if info.key.endswith(".wandb")]
    if not keys:
        raise NotFound(
            f"{store.url} has no runs of W&B",
            hint="give the folder `wandb`, or one in it such as offline-run-20261128_091659-9u8tuuaa",
        )
    logs: dict[str, list[_Log]] = defaultdict(list)
    for key, size in sorted(keys, key=lambda k: _begun(k[0])):
        log = _read(store, key, size)
        logs[log.id].append(log)
    return TrackedRuns([_run(of_run, step_key) for of_run in logs.values()])


def _begun(key: str) -> tuple[str, str]:
    """The time in the name of a run's folder, `run-20261128_091659-9u8tuuaa`."""
    folder = PurePosixPath(key).parent.name
    return folder.removeprefix("offline-"), key


def _run(logs: Sequence[_Log], step_key: str | None) -> TrackedRun:
    name = next((log.name for log in reversed(logs) if log.name), logs[0].id)
    references = frozenset().union(*(log.references for log in logs))
    return TrackedRun(
        logs[0].id,
        name,
        lambda: references,
        lambda: _joined(logs, name, step_key),
    )


def _joined(logs: Sequence[_Log], run: str, step_key: str | None) -> TrackedContent:
    contents = [_content(log, run, step_key) for log in logs]
    if step_key is None:
        _check_resumed(logs, run)
    return joined(contents)


def _read(store: Store, key: str, size: int) -> _Log:
    log = _Log(id=PurePosixPath(key).stem.removeprefix("run-"))
    for at, record in _records(store, key, size, log.ignored):
        try:
            _add(log, Message(record))
        except IntegrityError as error:
            raise _damaged(store, key, at, error.message) from error
    return log


_damaged = partial(damaged, hint="move the folder away to import the other runs")


def _records(
    store: Store, key: str, size: int, ignored: Counter[str]
) -> Iterator[tuple[int, bytes]]:
    """The offset and the data of each record, of which W&B cuts large ones into parts, and pads blocks."""
    begun, parts = 0, list[bytes]()
    for block, data in _blocks(store, key, size):
        at = 0
        if not block:
            if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
                raise _damaged(store, key, 0, "it is no log of W&B, or of another version")
            at = len(_MAGIC)
        while at + _HEADER.size <= len(data):
            checksum, nbytes, kind = _HEADER.unpack_from(data, at)
            part = data[at + _HEADER.size : at + _HEADER.size + nbytes]
            if len(part) < nbytes and block + len(data) == size:
                break
            if zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum or len(part) < nbytes:
                raise _damaged(store, key, block + at, "a record differs from its checksum")
            if (kind in (_FULL, _FIRST)) == bool(parts) or not _FULL <= kind <= _LAST:
                raise _damaged(store, key, block + at, "parts of records are not in order")
            begun = begun if parts else block + at
            parts.append(part)
            if len(parts) > _MOST_PARTS:
                raise _damaged(store, key, begun, f"a record has more than {MOST_BYTES:,} bytes")
            at += _HEADER.size + nbytes
            if kind in (_FULL, _LAST):
                yield begun, b"".join(parts)
                parts = []
        if block + len(data) == size and at < len(data):
            parts.append(b"")  # unfinished
    if parts:
        ignored["unfinished records at the ends of logs"] += 1


def _blocks(store: Store, key: str, size: int) -> Iterator[tuple[int, bytes]]:
    """The offset and the data of each block, many of which are read at once."""
    for begin in range(0, size, _READ_BYTES):
        content = store.read(key, begin, min(_READ_BYTES, size - begin))
        for at in range(0, len(content), _BLOCK):
            yield begin + at, content[at : at + _BLOCK]


def _add(log: _Log, record: Message) -> None:
    if _RUN in record:
        run = record.message(_RUN)
        log.id, log.name = run.text(_RUN_ID) or log.id, run.text(_RUN_NAME) or log.name
        _update(log, run.message(_RUN_CONFIG))
    if _CONFIG in record:
        _update(log, record.message(_CONFIG))
    if _HISTORY in record:
        history = record.message(_HISTORY)
        row = {}
        for item in history.messages(1):
            name = ".".join(_path(item))
            row[name] = _value(item)
        log.rows.append((history.message(2).integer(1), row))
    for artifact in (
        *record.messages(_ARTIFACT),
        *record.message(_REQUEST).message(_LOG_ARTIFACT).messages(1),
    ):
        metadata = _parsed(artifact.text(8) or "null")
        id_ = metadata.get(ID_TAG) if isinstance(metadata, dict) else None
        if isinstance(id_, str):
            log.references.add(id_)


def _path(item: Message) -> list[str]:
    nested = [name.decode(errors="replace") for name in item.all_bytes(_NESTED_KEY)]
    return nested or [item.text(_KEY)]


def _value(item: Message) -> Any:
    return _parsed(item.text(_VALUE))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"a record has what is no JSON: {error}") from error


def _update(log: _Log, config: Message) -> None:
    for item in config.messages(1):
        path = _path(item)
        if path[0] == "_wandb":  # what W&B notes of itself
            continue
        inner = log.config
        for name in path[:-1]:
            there = inner.get(name)
            inner[name] = inner = there if isinstance(there, dict) else {}
        inner[path[-1]] = _value(item)
    for item in config.messages(2):
        *outer, last = _path(item)
        inner = log.config
        for name in outer:
            there = inner.get(name)
            inner = there if isinstance(there, dict) else {}
        inner.pop(last, None)


def _content(log: _Log, run: str, step_key: str | None) -> TrackedContent:
    metrics, ignored = dict[str, list[Point]](), Counter(log.ignored)
    if step_key is None:
        _check_steps(log, run)
    for step, row in log.rows:
        at = step if step_key in (None, "_step") else row.get(step_key)
        if not isinstance(at, int | float) or isinstance(at, bool) or at % 1 != 0:
            ignored[f"rows of the history without {step_key}"] += 1
            continue
        for name, value in row.items():
            if name.startswith("_") or name == step_key:
                continue
            number = _NOT_FINITE.get(value, value) if isinstance(value, str) else value
            if isinstance(number, bool) or not isinstance(number, int | float):
                ignored["texts, media and other values that are no numbers"] += 1
                continue
            try:
                metrics.setdefault(name, []).append((int(at), float(number)))
            except OverflowError:
                ignored["integers beyond all floating-point numbers"] += 1
    return TrackedContent(log.config, metrics, ignored=dict(ignored))


_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _check_resumed(logs: Sequence[_Log], run: str) -> None:
    """Raise UsageError if W&B's count began again: a run that was resumed offline does not know where it was."""
    last: int | None = None
    for log in logs:
        steps = [step for step, _ in log.rows]
        if last is not None and steps and steps[0] <= last:
            raise UsageError(
                f"the run {run!r} of W&B was resumed at step {steps[0]} after step {last}, by W&B's "
                "own count: which is the step of the training?",
                hint="--step-key NAME if the run logged it, or --step-key _step if W&B counts right",
            )
        last = max(steps, default=last)


def _check_steps(log: _Log, run: str) -> None:
    """Raise UsageError if a step of the training was logged that differs from W&B's count of rows."""
    for step, row in log.rows:
        for name, value in row.items():
            if name.rpartition("/")[2] == "global_step" and value != step:
                raise UsageError(
                    f"the run {run!r} of W&B has {value} as {name} in its row of step {step}: which "
                    "is the step of the training?",
                    hint=f"--step-key {name}, or --step-key _step",
                )
