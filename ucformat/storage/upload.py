"""Writing objects: conditional puts, a single request for a small object, and a multipart upload for a large one.

If the answer to a put is lost, the write id in the object's metadata shows whether it was executed.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
import weakref
from typing import TYPE_CHECKING, Any

from ucformat.errors import (
    Conflict,
    NotFound,
    PermissionDenied,
    UcformatError,
    Uncertain,
    UnsupportedError,
)
from ucformat.storage.base import FileWriter
from ucformat.storage.error_mapping import (
    is_failed_precondition,
    is_transient,
    map_object_error,
    retry,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from obstore.store import ObjectStore as Client

    from ucformat.storage.base import Bytes

WRITE_ID = "ucfwriteid"  # metadata of an object: the request that wrote it; Azure requires an identifier as name

_ATTEMPTS = 5  # at a put that concurrent writers disturb


def write_id(client: Client, key: str, name: str, deadline: float) -> str | None:
    """The write id of an object: empty if it has none, None if there is no object."""
    import obstore

    def head() -> Any:
        return obstore.get(client, key, options={"head": True}).attributes

    try:
        return str(retry("read", name, head, deadline).get(WRITE_ID, ""))
    except NotFound:
        return None


def put_on_condition(
    client: Client, key: str, name: str, data: bytes, mode: Any, conflict: Conflict, deadline: float
) -> None:
    """Put an object on a condition, and find out whether the put was executed if its answer is lost.

    obstore and this function repeat a request whose answer was lost; the write id of the existing
    object then shows whether an earlier attempt succeeded.

    Args:
        conflict: the error to raise if the condition is not met and the existing object is not
            ours.
    """
    import obstore

    own_id, attempts, uncertain = uuid.uuid4().hex, 0, False

    def put() -> None:
        nonlocal attempts, uncertain
        try:
            obstore.put(
                client, key, data, mode=mode, attributes={WRITE_ID: own_id}, use_multipart=False
            )
        except Exception as error:
            if not is_failed_precondition(error) and not is_transient(error):
                raise
            uncertain = uncertain or not is_failed_precondition(error)
            existing = write_id(client, key, name, deadline)
            if existing == own_id:
                return
            if mode == "create" and existing is not None:
                raise conflict from None
            if not is_failed_precondition(error):
                raise
            attempts += 1
            if mode != "create" or attempts == _ATTEMPTS:
                raise conflict from None
            raise TimeoutError("another writer puts and deletes it meanwhile") from None

    try:
        retry("write", name, put, deadline)
    except (Conflict, NotFound, PermissionDenied, UnsupportedError):
        raise
    except UcformatError as error:
        if uncertain:
            raise Uncertain(
                f"it is unknown whether {name} was written: {error.message}", hint=error.hint
            ) from None
        raise


_PART = 8 << 20  # bytes, at least; S3 requires 5 MiB of all parts but the last
_IN_FLIGHT = 3  # parts that are sent concurrently
_MAX_PARTS = 10_000  # of one object
_WAIT = 0.1  # seconds before the first retry of starting an upload
_QUEUED = 1  # parts that wait to be sent


class _Aborted(Exception):
    """Ends an upload that is aborted."""


def unit_for(nbytes: int) -> int:
    """The unit in which to write a file, so that it has no more parts than an upload may have."""
    return max(1, -(-nbytes // _MAX_PARTS))


def part_size(unit: int) -> int:
    """Bytes of a part: the smallest multiple of a unit that is large enough."""
    return -(-_PART // unit) * unit


class ObjectWriter(FileWriter):
    """Holds at most `3 + _IN_FLIGHT` parts in memory; nothing is visible before `close`, or after `abort`.

    If the answer to the last request is lost, the write id shows whether the object was written.
    """

    def __init__(self, client: Client, key: str, name: str, unit: int, deadline: float) -> None:
        self._client, self._key, self._name, self._deadline = client, key, name, deadline
        self._part = part_size(unit)
        self._id = uuid.uuid4().hex
        self._memory = _PartMemory(self._part)
        self._pending = bytearray()  # memory of the next part, of which the first bytes are there
        self._filled = 0
        self._upload: _Upload | None = None
        self._open = True

    def write(self, data: Bytes) -> None:
        """Append bytes."""
        if not self._open:
            raise ValueError("the writer is closed")
        view = memoryview(data).cast("B")
        while view:
            if not self._pending:
                self._pending = self._memory.take()
            take = view[: self._part - self._filled]
            self._pending[self._filled : self._filled + take.nbytes] = take
            self._filled += take.nbytes
            view = view[take.nbytes :]
            if self._filled == self._part:
                self._send()

    def _send(self) -> None:
        if self._upload is None:
            self._upload = _Upload(self._client, self._key, self._part, self._id, self._deadline)
        try:
            self._upload.put(self._take_pending())
        except Exception as error:  # noqa: BLE001 - any error that ended the upload
            raise self._failed(error) from None

    def _take_pending(self) -> memoryview:
        """The bytes of the next part, to which nothing refers any more."""
        part = self._memory.lend(self._pending, self._filled)
        self._pending, self._filled = bytearray(), 0
        return part

    def close(self) -> None:
        """Finish the upload."""
        if not self._open:
            return
        self._open = False
        try:
            if self._upload is None:
                import obstore

                attributes = {WRITE_ID: self._id}
                obstore.put(
                    self._client,
                    self._key,
                    bytes(self._take_pending()),
                    attributes=attributes,
                    use_multipart=False,
                )
            else:
                self._upload.put(self._take_pending())
                self._upload.finish()
        except Exception as error:  # noqa: BLE001 - see above
            if not self._was_written(error):
                raise self._failed(error) from None
        finally:
            self._pending = bytearray()

    def _was_written(self, error: Exception) -> bool:
        """Whether the object was written despite this error, which only lost the answer."""
        if not (is_transient(error) or isinstance(error, FileNotFoundError)):
            return False
        try:
            return write_id(self._client, self._key, self._name, self._deadline) == self._id
        except UcformatError:  # unknown; writing it again does no harm
            return False

    def abort(self) -> None:
        """Abort the upload; the store discards its parts."""
        self._open = False
        self._pending = bytearray()
        if self._upload is not None:
            self._upload.abort()
            self._upload = None

    def _failed(self, error: Exception) -> UcformatError:
        self.abort()
        return map_object_error(error, "write", self._name)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.abort()


class _PartMemory:
    """Memory for parts, which is used again once obstore has let go of it: fresh pages cost more than the copy."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: list[bytearray] = []

    def take(self) -> bytearray:
        """Memory for a part."""
        return self._free.pop() if self._free else bytearray(self._nbytes)

    def lend(self, memory: bytearray, nbytes: int) -> memoryview:
        """The first bytes of memory, which is free again when nothing refers to them."""
        view = memoryview(memory)[:nbytes]
        weakref.finalize(view, self._free.append, memory)
        return view


class _Upload:
    """A multipart upload: obstore takes parts in its own thread, sends several at once, and aborts on an error."""

    def __init__(self, client: Client, key: str, part: int, own_id: str, deadline: float) -> None:
        self._parts: queue.Queue[memoryview | None] = queue.Queue(_QUEUED)
        self._aborted = threading.Event()
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._started = False  # obstore has requested parts
        self._thread = threading.Thread(
            target=self._run, args=(client, key, part, own_id, deadline), name="ucformat-upload"
        )
        self._thread.daemon = True  # a process that ends without closing aborts
        self._thread.start()

    def _run(self, client: Client, key: str, part: int, own_id: str, deadline: float) -> None:
        import obstore

        try:
            end, wait = time.monotonic() + deadline, _WAIT
            while True:
                try:
                    obstore.put(
                        client,
                        key,
                        self._sent_parts(),
                        attributes={WRITE_ID: own_id},
                        use_multipart=True,
                        chunk_size=part,
                        max_concurrency=_IN_FLIGHT,
                    )
                except Exception as error:
                    if self._started or time.monotonic() + wait > end or not is_transient(error):
                        raise
                    # the answer with the upload's id broke off, which obstore does not retry
                    time.sleep(wait)
                    wait *= 2
                else:
                    break
        except BaseException as error:  # noqa: BLE001 - handed to the thread that writes
            self._error = error
        finally:
            self._ended.set()

    def _sent_parts(self) -> Iterator[memoryview]:
        self._started = True
        while (part := self._parts.get()) is not None:
            if part:
                parts, part = [part], None
                yield parts.pop()  # to which nothing here refers once it is sent
        if self._aborted.is_set():
            raise _Aborted

    def put(self, part: memoryview | None) -> None:
        """Hand over a part once there is room for it; raises the error that ended the upload, if any."""
        if not self._enqueue(part):
            raise self._error or RuntimeError("the upload has ended")

    def _enqueue(self, part: memoryview | None) -> bool:
        """Whether the part was handed over before the upload ended."""
        while not self._ended.is_set():
            try:
                # the upload may end while there is no room, so this does not wait forever
                self._parts.put(part, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def finish(self) -> None:
        """Wait until the object is written."""
        self.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Wait until the upload is aborted, unless it was complete."""
        self._aborted.set()
        self._enqueue(None)
        self._thread.join()
