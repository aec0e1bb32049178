"""Writing objects: conditional puts, one request for a small object, and an upload in parts for a large one.

The write id in an object's metadata tells whether a put was carried out whose answer was lost.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from ucformat.errors import Conflict, NotFound, PermissionDenied, UcformatError, Uncertain, UnsupportedError
from ucformat.storage.base import Writer
from ucformat.storage.error_mapping import is_failed_precondition, is_transient, map_object_error, retry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from obstore.store import ObjectStore as Client

    from ucformat.storage.base import Bytes

__all__ = ["WRITE_ID", "ObjectWriter", "part_size", "put_on_condition", "unit_for", "write_id"]

WRITE_ID = "ucfwriteid"  # metadata of an object: which request wrote it; Azure wants the name of an identifier

_TRIES = 5  # at a put that others disturb


def write_id(client: Client, key: str, name: str, deadline: float) -> str | None:
    """The write id of an object; nothing for one without, None where there is no object."""
    import obstore

    def ask() -> Any:
        return obstore.get(client, key, options={"head": True}).attributes

    try:
        return str(retry("read", name, ask, deadline).get(WRITE_ID, ""))
    except NotFound:
        return None


def put_on_condition(
    client: Client, key: str, name: str, data: bytes, mode: Any, conflict: Conflict, deadline: float
) -> None:
    """Put an object; `conflict` where the condition does not hold, unless our own object stands there.

    An answer may be lost, and the request is then repeated, by obstore or here: what stands there tells whether it was
    carried out. Uncertain where that cannot be learnt either.
    """
    import obstore

    own, tries, doubt = uuid.uuid4().hex, 0, False

    def put() -> None:
        nonlocal tries, doubt
        try:
            obstore.put(client, key, data, mode=mode, attributes={WRITE_ID: own}, use_multipart=False)
        except Exception as error:
            if not is_failed_precondition(error) and not is_transient(error):
                raise
            doubt = doubt or not is_failed_precondition(error)
            stands = write_id(client, key, name, deadline)
            if stands == own:
                return
            if mode == "create" and stands is not None:
                raise conflict from None
            if not is_failed_precondition(error):
                raise
            tries += 1
            if mode != "create" or tries == _TRIES:
                raise conflict from None
            raise TimeoutError("somebody else puts and deletes it meanwhile") from None

    try:
        retry("write", name, put, deadline)
    except (Conflict, NotFound, PermissionDenied, UnsupportedError):
        raise
    except UcformatError as error:
        if doubt:
            raise Uncertain(f"nothing told whether {name} was written: {error.message}", hint=error.hint) from None
        raise


_PART = 8 << 20  # bytes, at least; S3 takes no part below 5 MiB but the last
_AT_ONCE = 3  # parts on their way
_PARTS = 10_000  # of one object, at most
_WAIT = 0.1  # seconds between two tries to begin, at first
_AHEAD = 1  # parts that wait for their turn


class _Aborted(Exception):
    """Ends an upload that is given up."""


def unit_for(nbytes: int) -> int:
    """The unit in which to write a file of so many bytes, so that it has no more parts than it may."""
    return max(1, -(-nbytes // _PARTS))


def part_size(unit: int) -> int:
    """Bytes of a part: the smallest multiple of `unit` that is large enough."""
    return -(-_PART // unit) * unit


class ObjectWriter(Writer):
    """Holds at most `2 + _AT_ONCE` parts in memory; nothing is seen before `close`, or after `abort`.

    The answer to the last request may be lost: whether the object stands there, its write id tells.
    """

    def __init__(self, client: Client, key: str, name: str, unit: int, deadline: float) -> None:
        self._client, self._key, self._name, self._deadline = client, key, name, deadline
        self._part = part_size(unit)
        self._id = uuid.uuid4().hex
        self._held = bytearray()
        self._upload: _Upload | None = None
        self._open = True

    def write(self, data: Bytes) -> None:
        """Append bytes."""
        if not self._open:
            raise ValueError("the writer is closed")
        view = memoryview(data).cast("B")
        while view:
            take = view[: self._part - len(self._held)]
            self._held += take
            view = view[take.nbytes :]
            if len(self._held) == self._part:
                self._send()

    def _send(self) -> None:
        if self._upload is None:
            self._upload = _Upload(self._client, self._key, self._part, self._id, self._deadline)
        try:
            self._upload.put(bytes(self._held))
        except Exception as error:  # noqa: BLE001 - whatever ended the upload
            raise self._failed(error) from None
        self._held.clear()

    def close(self) -> None:
        """Finish the upload."""
        if not self._open:
            return
        self._open = False
        try:
            if self._upload is None:
                import obstore

                attributes = {WRITE_ID: self._id}
                obstore.put(self._client, self._key, bytes(self._held), attributes=attributes, use_multipart=False)
            else:
                self._upload.put(bytes(self._held))
                self._upload.finish()
        except Exception as error:  # noqa: BLE001 - see above
            if not self._is_there(error):
                raise self._failed(error) from None
        finally:
            self._held = bytearray()

    def _is_there(self, error: Exception) -> bool:
        """Whether this error means only that the last answer was lost."""
        if not (is_transient(error) or isinstance(error, FileNotFoundError)):
            return False
        try:
            return write_id(self._client, self._key, self._name, self._deadline) == self._id
        except UcformatError:  # it cannot be told; whoever writes it anew does no harm
            return False

    def abort(self) -> None:
        """Give up the upload; the store forgets its parts."""
        self._open = False
        self._held = bytearray()
        if self._upload is not None:
            self._upload.abort()
            self._upload = None

    def _failed(self, error: Exception) -> UcformatError:
        self.abort()
        return map_object_error(error, "write", self._name)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.abort()


class _Upload:
    """An upload in parts: obstore takes them in a thread of its own, sends several at once, and aborts on an error."""

    def __init__(self, client: Client, key: str, part: int, own: str, deadline: float) -> None:
        self._parts: queue.Queue[bytes | None] = queue.Queue(_AHEAD)
        self._given_up = threading.Event()
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._begun = False  # parts were asked for
        self._thread = threading.Thread(
            target=self._run, args=(client, key, part, own, deadline), name="ucformat-upload"
        )
        self._thread.daemon = True  # whoever ends without closing has given up
        self._thread.start()

    def _run(self, client: Client, key: str, part: int, own: str, deadline: float) -> None:
        import obstore

        try:
            until, wait = time.monotonic() + deadline, _WAIT
            while True:
                try:
                    obstore.put(
                        client,
                        key,
                        self._each(),
                        attributes={WRITE_ID: own},
                        use_multipart=True,
                        chunk_size=part,
                        max_concurrency=_AT_ONCE,
                    )
                except Exception as error:
                    if self._begun or time.monotonic() + wait > until or not is_transient(error):
                        raise
                    time.sleep(wait)  # the answer that names the upload broke off: obstore does not ask again
                    wait *= 2
                else:
                    break
        except BaseException as error:  # noqa: BLE001 - handed to the thread that writes
            self._error = error
        finally:
            self._ended.set()

    def _each(self) -> Iterator[bytes]:
        self._begun = True
        while (part := self._parts.get()) is not None:
            if part:
                yield part
        if self._given_up.is_set():
            raise _Aborted

    def put(self, part: bytes | None) -> None:
        """Hand over a part, once there is room for it; raises what ended the upload, if something did."""
        if not self._take(part):
            raise self._error or RuntimeError("the upload has ended")

    def _take(self, part: bytes | None) -> bool:
        """Whether a part was handed over before the upload ended."""
        while not self._ended.is_set():
            try:
                self._parts.put(part, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def finish(self) -> None:
        """Wait until the object is there."""
        self.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Wait until the upload is given up, unless it was complete."""
        self._given_up.set()
        self._take(None)
        self._thread.join()
