"""Maps errors of the operating system and of object stores to errors of ucformat; and retries.

The answer of an object store may contain signatures and tokens (S3 returns the request that it
could not verify), so only its code and message are shown, and the library's error is not chained.
"""

from __future__ import annotations

import errno
import random
import re
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from ucformat.errors import (
    Conflict,
    NotFound,
    PermissionDenied,
    UcformatError,
    UnsafeError,
    UnsupportedError,
)
from ucformat.storage.clouds import BLOCKING_PROXY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_STATUS = re.compile(r"status code: (\d{3})")
_DETAIL = re.compile(r"<(Code|Message)>([^<]{1,200})<")
_QUERY = re.compile(r"\?\S*")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*("|$)')  # quoted content of an unexpected answer
_REDIRECTED = BLOCKING_PROXY.partition("://")[2]  # appears in the error if a redirect was blocked
_FIRST, _LONGEST = 0.1, 10.0  # seconds between attempts
_BUSY = {"408", "409", "429"}  # retried, as are all 5xx
_NO_BUCKET = "NoSuchBucket"


class _Retries:
    """How often this process has repeated a request."""

    def __init__(self) -> None:
        self._count, self._lock = 0, threading.Lock()

    def add(self) -> None:
        """Count one."""
        with self._lock:
            self._count += 1

    def __int__(self) -> int:
        return self._count


#: The requests that this process has repeated because the storage failed; those that obstore repeats
#: are not among them.
retries = _Retries()


def retry(action: str, name: str, call: Callable[[], T], deadline: float) -> T:
    """Call a function that makes an idempotent request, and retry it while the error is transient.

    obstore itself retries requests, but not after the body of an answer broke off. Waits grow and
    are random, so that ranks that failed together do not retry together.
    """
    begun, wait = time.monotonic(), _FIRST
    while True:
        try:
            return call()
        except (UcformatError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - obstore raises its own, ValueError and OSError
            failure = map_object_error(error, action, name)
            final = not is_transient(error) or time.monotonic() - begun + wait > deadline
        if final:
            raise failure from None  # outside the block above, where the library's error would be its context
        retries.add()
        time.sleep(random.uniform(wait / 2, wait))  # noqa: S311 - not a secret
        wait = min(2 * wait, _LONGEST)


def is_transient(error: Exception) -> bool:
    """Whether a request may succeed if repeated; one that writes may have been executed despite the error."""
    from obstore.exceptions import GenericError, JoinError

    if not isinstance(error, GenericError | JoinError | TimeoutError | ConnectionError):
        return False
    status = _STATUS.search(str(error))
    if _REDIRECTED in str(error):
        return False
    return status is None or status[1] in _BUSY or status[1].startswith("5")


def is_failed_precondition(error: Exception) -> bool:
    """Whether the condition of a put was not met."""
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    return isinstance(error, AlreadyExistsError | PreconditionError | FileExistsError)


def map_object_error(error: Exception, action: str, name: str) -> UcformatError:
    """The error of ucformat for an error of obstore."""
    from obstore.exceptions import NotSupportedError, PermissionDeniedError, UnauthenticatedError

    text = str(error)
    if _REDIRECTED in text:
        return UnsafeError(
            f"cannot {action} {name}: the answer was a redirect to another host, which is not "
            "followed",
            hint=(
                "credentials are not sent to other hosts; if it is right, set that host as the "
                "endpoint: UCP_ENDPOINT"
            ),
        )
    details = dict(_DETAIL.findall(text))
    if details.get("Code") == _NO_BUCKET:
        return NotFound(f"cannot {action} {name}: there is no such bucket")
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{name} does not exist")
    status = _STATUS.search(text)
    if details:
        why = ": ".join(details.values())
    elif status:
        why = f"the answer was {status[1]}"
    else:
        why = (
            _QUERY.sub("?…", _QUOTED.sub("…", text.partition("\n")[0]))[:300]
            or type(error).__name__
        )
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or (
        status and status[1] in ("401", "403")
    ):
        return PermissionDenied(
            f"cannot {action} {name}: {why}",
            hint=(
                "check the credentials that the cloud's standard chain finds, and their permissions"
            ),
        )
    if isinstance(error, NotSupportedError) or (status and status[1] in ("405", "501")):
        return UnsupportedError(
            f"cannot {action} {name}: the storage does not support this ({why})"
        )
    return UcformatError(
        f"cannot {action} {name}: {why}", hint="`ucp doctor URL` reports what the storage supports"
    )


# of these, NotADirectoryError means that there is no such file
_LOOKUPS = {"read", "list", "delete"}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EMLINK, errno.EXDEV}


@contextmanager
def mapping_os_errors(action: str, name: str) -> Iterator[None]:
    """Raise an OSError of the block as an error of ucformat."""
    try:
        yield
    except UcformatError:  # some are built-in OSErrors too
        raise
    except OSError as error:
        raise _map_os_error(error, action, name) from error


def _map_os_error(error: OSError, action: str, name: str) -> UcformatError:
    """The error of ucformat for an OSError of doing `action` to `name`."""
    text = f"cannot {action} {name}: {error.strerror or str(error) or type(error).__name__}"
    if action in _LOOKUPS and isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFound(f"{name} does not exist")
    if isinstance(error, FileNotFoundError):
        return NotFound(
            text,
            hint="its folder was removed meanwhile; is another process deleting the checkpoint?",
        )
    if isinstance(error, IsADirectoryError):
        if action == "read":
            return NotFound(f"{name} is a folder, not a file")
        return PermissionDenied(
            text, hint="a folder is where the file should go; remove it or choose another place"
        )
    if isinstance(error, NotADirectoryError | FileExistsError):
        if action == "create":
            return Conflict(f"{name} exists already")
        return PermissionDenied(
            text, hint="a file is where a folder should go; remove it or choose another place"
        )
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return PermissionDenied(
            text, hint="check the owner and the mode of the file and of its folder"
        )
    if error.errno == errno.ELOOP:
        return UnsafeError(text, hint="it is a symbolic link, which is not followed; remove it")
    if error.errno in _FULL:
        return UcformatError(text, hint="free some space or choose another place, then try again")
    if error.errno in _UNSUPPORTED:
        return UnsupportedError(
            text,
            hint=(
                "this file system does not support it; write to another place, such as a local disk"
            ),
        )
    if error.errno == errno.ENAMETOOLONG:
        return UnsupportedError(text, hint="a part of the path is too long for this file system")
    return UcformatError(text)
