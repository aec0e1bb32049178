"""What the operating system says, as errors of ucformat that name the file and what to do next."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ucformat.errors import Conflict, NotFound, Refused, UcformatError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["explaining"]

_SEEK = {"read", "list", "delete"}  # a file in the place of a folder has nothing below it
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CANNOT = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EMLINK, errno.EXDEV}


@contextmanager
def explaining(action: str, name: str) -> Iterator[None]:
    """Raise an OSError from inside as the error of ucformat that fits; `action` is a verb (read, list, create, …)."""
    try:
        yield
    except UcformatError:  # some are builtin OSErrors too
        raise
    except OSError as error:
        raise _explained(error, action, name) from error


def _explained(error: OSError, action: str, name: str) -> UcformatError:
    """The error of ucformat for an OSError that came up when doing `action` to `name`."""
    what = f"cannot {action} {name}: {error.strerror or str(error) or type(error).__name__}"
    if action in _SEEK and isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFound(f"{name} does not exist")
    if isinstance(error, FileNotFoundError):
        return NotFound(what, hint="its folder was removed meanwhile; is somebody deleting this checkpoint?")
    if isinstance(error, IsADirectoryError):
        if action == "read":
            return NotFound(f"{name} is a folder, not a file")
        return Refused(what, hint="a folder stands where the file should go; remove it or choose another place")
    if isinstance(error, NotADirectoryError | FileExistsError):
        if action == "create":
            return Conflict(f"{name} exists already")
        return Refused(what, hint="a file stands where a folder should go; remove it or choose another place")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return Refused(what, hint="look at the owner and the mode of the file and of its folder")
    if error.errno == errno.ELOOP:
        return Refused(what, hint="a symbolic link stands there, which is not followed; remove it")
    if error.errno in _FULL:
        return UcformatError(what, hint="free some space or choose another place, then try again")
    if error.errno in _CANNOT:
        return Refused(what, hint="this file system cannot do that; write to another place, a local disk for one")
    if error.errno == errno.ENAMETOOLONG:
        return Refused(what, hint="one part of the path is too long for this file system")
    return UcformatError(what)
