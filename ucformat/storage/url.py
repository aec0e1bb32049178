"""From what a user writes for a place, a path or a url, to its store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import unquote

from ucformat.errors import UcformatError, UnsupportedError, UsageError
from ucformat.redacted import redacted
from ucformat.settings import load_settings
from ucformat.storage.clouds import SCHEMES, Options, refuse_secrets
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.objects import BUDGET, ObjectStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.storage.base import Store

__all__ = ["each", "open_store", "split_url"]

_PACKAGES = {  # pip's name of what fsspec imports for a scheme
    "hdfs": "pyarrow",
    "hf": "huggingface_hub",
    "oss": "ossfs",
    "sftp": "paramiko",
    "smb": "smbprotocol",
    "ssh": "paramiko",
}


def open_store(place: str | os.PathLike[str]) -> Store:
    """The store of a path, of a `file://` or `memory://` url, of an object store, or of any scheme that fsspec knows.

    Nothing is read or written yet.

    Raises:
        UsageError: nobody knows the scheme, or the url holds a password or a signature.
        UnsupportedError: its package is not installed.
    """
    scheme, rest = split_url(place)
    if scheme in ("", "file"):
        return LocalStore(rest)
    if scheme == "memory":
        return MemoryStore(rest)
    if scheme in SCHEMES:
        settings = load_settings()
        BUDGET.set(settings.requests, settings.in_flight)
        return ObjectStore(str(place), Options(settings.endpoint, settings.region, settings.deadline))
    refuse_secrets(str(place))
    return _open_fsspec(str(place), scheme)


def each(given: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """What somebody gives as one text or path, or as several: a text is never taken for the letters in it."""
    return (os.fspath(given),) if isinstance(given, str | os.PathLike) else tuple(os.fspath(one) for one in given)


def split_url(place: str | os.PathLike[str]) -> tuple[str, str]:
    """The scheme (`""` for a path) and the rest; of a `file` url the rest is the decoded path."""
    text = os.fspath(place)
    if not text:
        raise UsageError("an empty string names no place", hint="write `.` for this folder")
    if not isinstance(place, str) or "://" not in text:
        return "", text
    scheme, _, rest = text.partition("://")
    scheme = scheme.lower()
    if scheme == "file":
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            raise UsageError(f"{text} is not a file url of this machine", hint="write file:///an/absolute/path")
        rest = unquote(slash + path)
    return scheme, rest


def _open_fsspec(url: str, scheme: str) -> Store:
    from ucformat.storage.fsspec_store import FsspecStore

    failure: UcformatError  # raised below: here it would have the library's error with it, which may hold secrets
    try:
        return FsspecStore(url)
    except ImportError as error:
        missing = getattr(error.__cause__ or error, "name", None)
        package = _PACKAGES.get(scheme) or missing or scheme
        failure = UnsupportedError(f"{url} needs the package {package}", hint=f"pip install {package}")
    except ValueError as error:
        failure = UsageError(f"{url} cannot be opened: {redacted(str(error))}")
        if "rotocol not known" in str(error):
            hint = "write a path, file://, s3://, gs://, abfs://, …"
            failure = UsageError(f"{url}: nobody knows the scheme {scheme!r}", hint=hint)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - each library behind fsspec has errors of its own
        failure = UcformatError(f"{url} cannot be opened: {type(error).__name__}: {redacted(str(error))}")
    raise failure from None
