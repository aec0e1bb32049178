"""Links to the files of a checkpoint instead of copies of them, on a local disk."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ucformat.errors import UnsafeError, UnsupportedError
from ucformat.storage.base import HIDDEN, check_key
from ucformat.storage.error_mapping import mapping_os_errors
from ucformat.storage.url import split_url

if TYPE_CHECKING:
    from ucformat.exporters.base import Link
    from ucformat.storage.base import Store

_FICLONE = 0x40049409  # of linux/fs.h: share the blocks of a file, which are copied when one of the two is written
_NO_REFLINKS = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS}


def link_file(src: Store, link: Link, dst: Store, key: str) -> None:
    """Make a file of a folder a link to one of another; it appears under its name as a whole."""
    source, target = _path(src) / check_key(link.key), _path(dst) / check_key(key)
    with mapping_os_errors("create", str(target)):
        target.parent.mkdir(parents=True, exist_ok=True)
    hidden = target.with_name(f"{HIDDEN}{secrets.token_hex(8)}.tmp")
    try:
        if link.hard:
            _link(source, hidden, read_only=link.read_only)
        else:
            _clone(source, hidden)
        with mapping_os_errors("create", str(target)):
            hidden.replace(target)
    finally:
        with suppress(OSError):
            hidden.unlink(missing_ok=True)
    dst.adopt(key)


def _path(store: Store) -> Path:
    scheme, path = split_url(store.url)
    if scheme not in ("", "file"):
        raise UnsupportedError(f"{store.url} is not on a local disk, so files there cannot be linked", hint="copy them")
    return Path(path)


def _link(source: Path, hidden: Path, *, read_only: bool) -> None:
    with mapping_os_errors("read", str(source)):
        mode = stat.S_IMODE(source.stat().st_mode)
        if mode & 0o222:
            if not read_only:
                raise UnsafeError(
                    f"{source} can be written, and a program that writes to a hard link of it damages the checkpoint",
                    hint="--read-only (read_only=True) removes the permission to write from the checkpoint's own file",
                )
            source.chmod(mode & ~0o222)
    try:
        with mapping_os_errors("link", str(source)):
            os.link(source.resolve(), hidden, follow_symlinks=False)
    except UnsupportedError as error:  # the file system has none, or they are on two
        raise UnsupportedError(error.message, hint="leave out --link for a copy") from error


def _clone(source: Path, hidden: Path) -> None:
    with mapping_os_errors("read", str(source)):
        taken = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with mapping_os_errors("create", str(hidden)):
            made = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.ioctl(made, _FICLONE, taken)
        except OSError as error:
            if error.errno not in _NO_REFLINKS:
                with mapping_os_errors("link", str(source)):
                    raise
            raise UnsupportedError(
                f"{source} cannot be shared with {hidden.parent}: the file system has no reflinks, or they are on two",
                hint="leave out --link for a copy, or give --link=hard, which shares the checkpoint's own file",
            ) from error
        finally:
            os.close(made)
    finally:
        os.close(taken)
