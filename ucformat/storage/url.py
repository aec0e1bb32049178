"""Opens the store of a path or URL."""

from __future__ import annotations

import os
import reprlib
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

from ucformat.errors import UcformatError, UnsupportedError, UsageError
from ucformat.redacted import redacted
from ucformat.registry import Registry
from ucformat.settings import load_settings, local_path
from ucformat.storage.clouds import SCHEMES, reject_secrets
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ucformat.storage.base import Store
    from ucformat.storage.cache.folder import CacheFolder, VersionedStore
    from ucformat.storage.fsspec_store import FsspecStore

_PACKAGES = {  # scheme -> the package on PyPI that fsspec needs for it
    "hdfs": "pyarrow",
    "hf": "huggingface_hub",
    "oss": "ossfs",
    "sftp": "paramiko",
    "smb": "smbprotocol",
    "ssh": "paramiko",
}


#: The function that opens the store of a URL, by the URL's scheme.
STORES: Registry[Callable[[str], Store]] = Registry("stores", "store of the scheme")


def open_store(place: str | os.PathLike[str]) -> Store:
    """Open the store of a path, a `file://` URL, a registered scheme, or any scheme that fsspec supports.

    Nothing is read or written yet.
    """
    scheme, rest = split_url(place)
    if scheme in ("", "file"):
        return LocalStore(rest)
    if scheme not in SCHEMES and scheme != "memory":  # which only name what is in this process
        reject_secrets(str(place))
    store = STORES[scheme](str(place)) if scheme in STORES else _open_fsspec(str(place), scheme)
    if not hasattr(store, "read_with_info") or (folder := open_cache()) is None:
        return store
    from ucformat.storage.cache.store import CachingStore  # here, because most users have no cache

    return CachingStore(cast("VersionedStore", store), folder)


def open_cache() -> CacheFolder | None:
    """Open the cache of files that are read over a network; None if none is configured."""
    settings = load_settings()
    if settings.cache.lower() in ("", "none"):
        return None
    from ucformat.storage.cache.folder import CacheFolder

    return CacheFolder(str(local_path(settings.cache)), settings.cache_bytes)


def as_strings(
    places: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> tuple[str, ...]:
    """A tuple of strings from one string or path, or from several."""
    return (
        (path_text(places),)
        if isinstance(places, str | bytes | os.PathLike)
        else tuple(map(path_text, places))
    )


def as_store(place: str | os.PathLike[str] | Store) -> Store:
    """The store itself, or that of a path or URL, as `open_store` opens it."""
    return (
        cast("Store", place) if hasattr(place, "read_versioned") else open_store(cast("str", place))
    )


def path_text(place: object) -> str:
    """The text of a path or URL."""
    text = os.fspath(place) if isinstance(place, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UsageError(
            f"a place is a path or url, not {reprlib.repr(place)}",
            hint="pass a str or a pathlib.Path",
        )
    return text


def split_url(place: str | os.PathLike[str]) -> tuple[str, str]:
    """Split a URL into its scheme (`""` for a path) and the rest; for a `file` URL the rest is the decoded path."""
    text = path_text(place)
    if not text:
        raise UsageError("an empty string names no place", hint="write `.` for this folder")
    if not isinstance(place, str) or "://" not in text:
        return "", text
    scheme, _, rest = text.partition("://")
    scheme = scheme.lower()
    if scheme == "file":
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            raise UsageError(
                f"{text} is not a file url of this machine", hint="write file:///an/absolute/path"
            )
        rest = unquote(slash + path)
    return scheme, rest


def _open_fsspec(url: str, scheme: str) -> FsspecStore:
    from ucformat.storage.fsspec_store import FsspecStore

    failure: UcformatError  # raised below: here the library's error, which may contain secrets, would be its context
    try:
        return FsspecStore(url)
    except ImportError as error:
        missing = getattr(error.__cause__ or error, "name", None)
        package = _PACKAGES.get(scheme) or missing or scheme
        failure = UnsupportedError(
            f"{url} needs the package {package}", hint=f"pip install {package}"
        )
    except ValueError as error:
        failure = UsageError(f"{url} cannot be opened: {redacted(str(error))}")
        if "rotocol not known" in str(error):
            hint = "write a path, file://, s3://, gs://, abfs://, …"
            failure = UsageError(f"{url}: unknown scheme {scheme!r}", hint=hint)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - each library behind fsspec raises its own errors
        failure = UcformatError(
            f"{url} cannot be opened: {type(error).__name__}: {redacted(str(error))}"
        )
    raise failure from None
