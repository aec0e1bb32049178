"""Event files of TensorBoard: records with checksums, each a message with a step."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from crc32c import crc32c

from ucformat.errors import IntegrityError
from ucformat.jobs.logged import TAG
from ucformat.trackers.protobuf import MOST_BYTES, Message, damaged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.storage.base import Store

_HEADER, _CHECKSUM = struct.Struct("<QI"), struct.Struct("<I")
_MASK = 0xA282EAD8
_READ_BYTES = 4 << 20
# fields of the messages (tensorboard/compat/proto, and plugins/hparams/plugin_data.proto)
_WALL, _STEP, _VERSION, _SUMMARY, _SESSION_LOG = 1, 2, 3, 5, 7
_TAG, _SIMPLE, _TENSOR, _METADATA = 1, 2, 8, 9
_START = 1
_DTYPE, _SHAPE, _CONTENT, _SINGLES, _DOUBLES, _TEXTS = 1, 2, 4, 5, 6, 8
_FLOAT, _DOUBLE = 1, 2
_SESSION_START = 3


class Scalar(NamedTuple):
    """A value of a metric, and when it was logged, in seconds since 1970."""

    tag: str
    step: int
    value: float
    wall: float


class Restart(NamedTuple):
    """A training began again: what was logged from this step on does not count."""

    step: int


@dataclass(slots=True)
class EventFile:
    """What was logged to one event file, in its order.

    `begins` is the time of its first event, and `references` are the texts that it got of
    checkpoints.
    """

    key: str
    begins: float = 0.0
    logged: list[Scalar | Restart] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    references: list[str] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)


def read_events(store: Store, key: str, size: int) -> EventFile:
    """Read an event file to its end, or to the record that is still being written.

    Raises:
        IntegrityError: a record differs from its checksum, or is no event.
    """
    events, plugins = EventFile(key), dict[str, str]()
    for at, record in _records(store, key, size, events.ignored):
        try:
            _add(events, Message(record), plugins)
        except IntegrityError as error:
            raise _damaged(store, key, at, error.message) from error
    return events


_damaged = partial(damaged, hint="move the file away to import what others have")


def _records(
    store: Store, key: str, size: int, ignored: Counter[str]
) -> Iterator[tuple[int, bytes]]:
    """The offset and the data of each record."""
    at, buffer, begins = 0, b"", 0
    while at < size:

        def take(offset: int, nbytes: int) -> bytes | None:
            nonlocal buffer, begins
            if offset + nbytes > size:
                return None
            if offset + nbytes > begins + len(buffer):
                begins, buffer = (
                    offset,
                    store.read(key, offset, min(size - offset, max(nbytes, _READ_BYTES))),
                )
            return buffer[offset - begins : offset - begins + nbytes]

        header = take(at, _HEADER.size)
        if header is None:
            break
        nbytes, checksum = _HEADER.unpack(header)
        if checksum != _masked(header[:8]):
            raise _damaged(store, key, at, "the length of a record differs from its checksum")
        if nbytes > MOST_BYTES:
            raise _damaged(store, key, at, f"a record has {nbytes:,} bytes")
        whole = take(at + _HEADER.size, nbytes + _CHECKSUM.size)
        if whole is None:
            break
        data = whole[:nbytes]
        if _CHECKSUM.unpack(whole[nbytes:])[0] != _masked(data):
            raise _damaged(store, key, at, "a record differs from its checksum")
        yield at, data
        at += _HEADER.size + len(whole)
    if at < size:
        ignored["unfinished records at the ends of event files"] += 1


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _add(events: EventFile, event: Message, plugins: dict[str, str]) -> None:
    """Add an event; `plugins` are those of tags so far, which only the first event of a tag names."""
    wall, step = event.double(_WALL), event.integer(_STEP)
    events.begins = events.begins or wall
    if _SESSION_LOG in event and event.message(_SESSION_LOG).integer(1) == _START:
        events.logged.append(Restart(step))
    for value in event.message(_SUMMARY).messages(1):
        tag, plugin_data = value.text(_TAG), value.message(_METADATA).message(1)
        plugin = plugins.setdefault(tag, plugin_data.text(1))
        number = _scalar(value, plugin)
        if number is not None:
            events.logged.append(Scalar(tag, step, number, wall))
        elif plugin == "hparams":
            events.params |= _hyperparameters(plugin_data.bytes_of(2))
        elif plugin == "text":
            if tag.removesuffix("/text_summary") == TAG:
                texts = value.message(_TENSOR).all_bytes(_TEXTS)
                events.references += [text.decode(errors="replace") for text in texts]
        else:
            events.ignored["images, histograms and other values that are no numbers"] += 1


def _scalar(value: Message, plugin: str) -> float | None:
    """The number of a summary's value; None if it has none."""
    if _SIMPLE in value:
        return value.single(_SIMPLE)
    if plugin != "scalars":
        return None
    tensor = value.message(_TENSOR)
    dtype, content = tensor.integer(_DTYPE), tensor.bytes_of(_CONTENT)
    if 2 in tensor.message(_SHAPE):
        return None  # not of one element
    if dtype == _FLOAT:
        return struct.unpack("<f", content)[0] if len(content) == 4 else tensor.single(_SINGLES)
    if dtype == _DOUBLE:
        return struct.unpack("<d", content)[0] if len(content) == 8 else tensor.double(_DOUBLES)
    return None


def _hyperparameters(content: bytes) -> dict[str, Any]:
    """The hyperparameters with which a session began, if this is its record."""
    params: dict[str, Any] = {}
    for entry in Message(content).message(_SESSION_START).messages(1):
        value = entry.message(2)
        params[entry.text(1)] = (
            value.double(2)
            if 2 in value
            else value.text(3)
            if 3 in value
            else bool(value.integer(4))
            if 4 in value
            else None
        )
    return params
