"""Errors of the operating system and of object stores as errors of ucformat; and retries.

What an object store answers may hold signatures and tokens (S3 returns the request that it could not verify), so only
its code and its message are shown, and the library's error is not chained to ours.
"""

from __future__ import annotations

import errno
import random
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from ucformat.errors import Conflict, NotFound, PermissionDenied, UcformatError, UnsafeError, UnsupportedError
from ucformat.storage.clouds import NOWHERE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["is_failed_precondition", "is_transient", "map_object_error", "mapping_os_errors", "retry"]

T = TypeVar("T")

_STATUS = re.compile(r"status code: (\d{3})")
_TOLD = re.compile(r"<(Code|Message)>([^<]{1,200})<")
_QUERY = re.compile(r"\?\S*")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*("|$)')  # what was answered in place of what was expected
_REDIRECTED = NOWHERE.partition("://")[2]  # what could not be reached
_FIRST, _LONGEST = 0.1, 10.0  # seconds between two tries
_BUSY = {"408", "409", "429"}  # worth another try, as all 5xx are
_NO_BUCKET = "NoSuchBucket"


def retry(action: str, name: str, call: Callable[[], T], deadline: float) -> T:
    """What `call` gives: a request that may be repeated, tried until it does not fail as networks do.

    obstore has tried each request several times already, but not the whole of a body that broke off. Waits grow, and
    are drawn at random, so that ranks that failed together do not come back together.

    Raises:
        NotFound, PermissionDenied, UcformatError: it failed for good, or beyond `deadline` seconds.
    """
    begun, wait = time.monotonic(), _FIRST
    while True:
        try:
            return call()
        except (UcformatError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - obstore raises its own, ValueError and OSError alike
            failure = map_object_error(error, action, name)
            final = not is_transient(error) or time.monotonic() - begun + wait > deadline
        if final:
            raise failure from None  # here, for in the block above it would have the library's error with it
        time.sleep(random.uniform(wait / 2, wait))  # noqa: S311 - no secret
        wait = min(2 * wait, _LONGEST)


def is_transient(error: Exception) -> bool:
    """Whether a request that failed so may succeed later; of one that writes, it may even have been done."""
    from obstore.exceptions import GenericError, JoinError

    if not isinstance(error, GenericError | JoinError | TimeoutError | ConnectionError):
        return False
    status = _STATUS.search(str(error))
    if _REDIRECTED in str(error):
        return False
    return status is None or status[1] in _BUSY or status[1].startswith("5")


def is_failed_precondition(error: Exception) -> bool:
    """Whether it says that the condition of a put does not hold."""
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    return isinstance(error, AlreadyExistsError | PreconditionError | FileExistsError)


def map_object_error(error: Exception, action: str, name: str) -> UcformatError:
    """The error of ours for what came up when doing `action` (read, write, list, …) to `name`."""
    from obstore.exceptions import NotSupportedError, PermissionDeniedError, UnauthenticatedError

    text = str(error)
    if _REDIRECTED in text:
        return UnsafeError(
            f"cannot {action} {name}: the answer was a redirect to another host, which is not followed",
            hint="credentials must not go there; if it is right, give that host as the endpoint: UCP_ENDPOINT",
        )
    told = dict(_TOLD.findall(text))
    if told.get("Code") == _NO_BUCKET:
        return NotFound(f"cannot {action} {name}: there is no such bucket")
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{name} does not exist")
    status = _STATUS.search(text)
    if told:
        why = ": ".join(told.values())
    elif status:
        why = f"the answer was {status[1]}"
    else:
        why = _QUERY.sub("?…", _QUOTED.sub("…", text.partition("\n")[0]))[:300] or type(error).__name__
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or (status and status[1] in ("401", "403")):
        return PermissionDenied(
            f"cannot {action} {name}: {why}",
            hint="look at the credentials that the cloud's standard chain finds, and at what they allow",
        )
    if isinstance(error, NotSupportedError) or (status and status[1] in ("405", "501")):
        return UnsupportedError(f"cannot {action} {name}: this place does not do that ({why})")
    return UcformatError(f"cannot {action} {name}: {why}", hint="`ucp doctor URL` tells what this place can do")


_SEEK = {"read", "list", "delete"}  # a file in the place of a folder has nothing below it
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CANNOT = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EMLINK, errno.EXDEV}


@contextmanager
def mapping_os_errors(action: str, name: str) -> Iterator[None]:
    """Raise an OSError from inside as the error of ucformat that fits; `action` is a verb (read, list, create, …)."""
    try:
        yield
    except UcformatError:  # some are builtin OSErrors too
        raise
    except OSError as error:
        raise _map_os_error(error, action, name) from error


def _map_os_error(error: OSError, action: str, name: str) -> UcformatError:
    """The error of ucformat for an OSError that came up when doing `action` to `name`."""
    what = f"cannot {action} {name}: {error.strerror or str(error) or type(error).__name__}"
    if action in _SEEK and isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFound(f"{name} does not exist")
    if isinstance(error, FileNotFoundError):
        return NotFound(what, hint="its folder was removed meanwhile; is somebody deleting this checkpoint?")
    if isinstance(error, IsADirectoryError):
        if action == "read":
            return NotFound(f"{name} is a folder, not a file")
        return PermissionDenied(
            what, hint="a folder stands where the file should go; remove it or choose another place"
        )
    if isinstance(error, NotADirectoryError | FileExistsError):
        if action == "create":
            return Conflict(f"{name} exists already")
        return PermissionDenied(what, hint="a file stands where a folder should go; remove it or choose another place")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return PermissionDenied(what, hint="look at the owner and the mode of the file and of its folder")
    if error.errno == errno.ELOOP:
        return UnsafeError(what, hint="a symbolic link stands there, which is not followed; remove it")
    if error.errno in _FULL:
        return UcformatError(what, hint="free some space or choose another place, then try again")
    if error.errno in _CANNOT:
        return UnsupportedError(
            what, hint="this file system cannot do that; write to another place, a local disk for one"
        )
    if error.errno == errno.ENAMETOOLONG:
        return UnsupportedError(what, hint="one part of the path is too long for this file system")
    return UcformatError(what)
