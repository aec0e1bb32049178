"""TensorBoard's runs: folders of event files, below one place."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ucformat.errors import NotFound, UsageError
from ucformat.storage.concurrency import map_io
from ucformat.storage.url import open_store
from ucformat.trackers.content import Point, TrackedContent, TrackedRun, TrackedRuns
from ucformat.trackers.events import EventFile, Restart, read_events

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.storage.base import Info, Store


def tensorboard_runs(url: str) -> TrackedRuns:
    """Find the runs of TensorBoard: each folder with event files, by its path below the place.

    A place that has event files itself is a run with the name of its folder.
    """
    store = open_store(url)
    files: dict[str, list[Info]] = defaultdict(list)
    for info in store.list():
        folder, _, name = info.key.rpartition("/")
        if "tfevents" in name:
            files[folder].append(info)
    if not files:
        raise NotFound(
            f"{store.url} has no event files of TensorBoard",
            hint="give the folder that `tensorboard --logdir` shows",
        )
    runs = []
    for folder, infos in files.items():
        name = folder or store.url.rstrip("/").rpartition("/")[2]
        runs.append(_run(name, cache(partial(_read, store, infos))))
    return TrackedRuns(runs)


def _run(name: str, read: Callable[[], list[EventFile]]) -> TrackedRun:
    return TrackedRun(name, name, lambda: _references(read()), lambda: _content(read()))


def _read(store: Store, infos: Sequence[Info]) -> list[EventFile]:
    """The event files of a run, in the order in which they were begun."""
    files = map_io(lambda info: read_events(store, info.key, info.size), infos)
    return sorted(files, key=lambda file: (file.begins, file.key))


def _references(files: Sequence[EventFile]) -> frozenset[str]:
    texts = (text for file in files for text in file.references)
    return frozenset(id_ for text in texts if (id_ := _id_in(text)) is not None)


def _id_in(text: str) -> str | None:
    """The id of a checkpoint in the text of a reference; None if it is another text."""
    try:
        reference = json.loads(text)
    except (ValueError, RecursionError):
        return None
    id_ = reference.get("id") if isinstance(reference, dict) else None
    return id_ if isinstance(id_, str) else None


def _content(files: Sequence[EventFile]) -> TrackedContent:
    params, metrics, ignored = dict[str, Any](), dict[str, list[Point]](), Counter[str]()
    ends: dict[str, tuple[float, str]] = {}  # of each tag, the time of the last value, and its file
    for file in files:
        params |= file.params
        ignored += file.ignored
        for item in file.logged:
            if isinstance(item, Restart):
                metrics = {
                    tag: [point for point in points if point[0] < item.step]
                    for tag, points in metrics.items()
                }
                continue
            end, other = ends.get(item.tag, (item.wall, file.key))
            if item.wall < end and other != file.key:
                raise UsageError(
                    f"{item.tag!r} was logged to {other} and {file.key} at the same time",
                    hint="move the file of one of the two writers into a folder of its own, which "
                    "is another run",
                )
            ends[item.tag] = max(item.wall, end), file.key
            metrics.setdefault(item.tag, []).append((item.step, item.value))
    return TrackedContent(params, metrics, is_single=True, ignored=dict(ignored))
