"""Probes whether checkpoints can be read, saved and replaced in a storage place."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from ucformat.errors import PermissionDenied, UcformatError, UnsupportedError
from ucformat.jobs import probes
from ucformat.schema import MANIFEST
from ucformat.settings import load_settings, using
from ucformat.storage.cache.scope import uncached
from ucformat.storage.clouds import SCHEMES, Options, keys_in_environment, s3_settings
from ucformat.storage.local import LocalStore
from ucformat.storage.profiles import Profile, keep_profile, profile_of
from ucformat.storage.url import as_store, split_url

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from ucformat.storage.base import Store

__all__ = ["Access", "Diagnosis", "Probe", "access_to", "doctor"]

_WEB = ("AWS_WEB_IDENTITY_TOKEN_FILE",)
_CONTAINER = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
_GOOGLE = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY")
_AZURE = (
    *(
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_TOKEN",
    ),
    *("AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE"),
)


@dataclass(frozen=True, slots=True)
class Access:
    """The endpoint, region, credentials and cache for a place; None where it has none, or none is configured."""

    endpoint: str | None = None
    region: str | None = None
    credentials: str | None = None
    cache: str | None = None


def access_to(url: str) -> Access:
    """The endpoint, region and credentials with which `clouds.connect` opens a url, and the cache of its files."""
    scheme = split_url(url)[0]
    access = _access_to(SCHEMES.get(scheme))
    return (
        access
        if scheme in ("", "file", "memory")
        else replace(access, cache=load_settings().cache or "none")
    )


def _access_to(cloud: str | None) -> Access:
    if cloud == "s3":
        return _of_s3()
    if cloud == "gs":
        return Access(credentials=_named(_GOOGLE) or "the standard chain of Google")
    if cloud == "az":
        return Access(credentials=_named(_AZURE) or "the standard chain of Azure")
    return Access(credentials="none" if cloud == "http" else None)


def _of_s3() -> Access:
    settings = load_settings()
    endpoint, region, session = s3_settings(Options(settings.endpoint, settings.region))
    return Access(_shown(endpoint) if endpoint else "Amazon's", region, _credentials(session))


def _credentials(session: Any) -> str:
    if keys_in_environment():
        return "environment (AWS_ACCESS_KEY_ID)"
    credentials = None if session is None else session.get_credentials()
    if credentials is not None:
        return f"chain ({credentials.method}, profile {session.profile_name})"
    return _named((*_WEB, *_CONTAINER)) or "none"


def _named(variables: Sequence[str]) -> str | None:
    variable = next((name for name in variables if os.environ.get(name)), None)
    return None if variable is None else f"environment ({variable})"


def _shown(endpoint: str) -> str:
    """A url without a password or a query."""
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


_DEADLINE = 10.0  # seconds after which a failing request is given up: shorter than in training
_PAYS = 1.1  # how much faster reads past the page cache must be: nothing is cached by them
_WHOLE = 64 << 10  # bytes of an existing file that are read to compare ranges with
_log = logging.getLogger("ucformat")

Status = Literal["ok", "missing", "failed"]


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one probe of a place.

    `missing`: the place does not support it. `failed`: an error, or a wrong result.
    """

    name: str
    status: Status
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The capabilities of a place; true if checkpoints can be read and committed there, or with `read_only`, read.

    Values that were not or could not be probed are None. `disk_mb_per_s` and `direct_mb_per_s` are
    those of a large file that is not in the page cache, read through it and past it (`O_DIRECT`).
    """

    url: str
    read_only: bool
    access: Access
    probes: tuple[Probe, ...]
    latency_ms: float | None = None
    mb_per_s: float | None = None
    write_mb_per_s: float | None = None
    disk_mb_per_s: float | None = None
    direct_mb_per_s: float | None = None

    @property
    def reads_direct(self) -> bool:
        """Whether large reads of files that are not in the page cache are made past it from now on."""
        return (self.direct_mb_per_s or 0) >= _PAYS * (self.disk_mb_per_s or 0) > 0

    @property
    def can_read(self) -> bool | None:
        """Whether a checkpoint there can be opened, and read by byte ranges."""
        status = {p.name: p.status for p in self.probes}
        if status.get("ranges") == "missing":  # there was nothing to read
            return None
        return status.get("ranges") == "ok" and status.get("read after write", "ok") == "ok"

    @property
    def can_save(self) -> bool | None:
        """Whether a checkpoint can be committed there atomically: readers never see a partial one."""
        wanted = ("write", "read after write", "list", "parts", "put if absent")
        return None if self.read_only else bool(self.can_read) and self._all(*wanted)

    @property
    def can_overwrite(self) -> bool | None:
        """Whether `overwrite=True` is safe there."""
        return None if self.read_only else bool(self.can_save) and self._all("replace", "delete")

    def _all(self, *names: str) -> bool:
        return {p.name for p in self.probes if p.status == "ok"} >= set(names)

    def __bool__(self) -> bool:
        return bool(self.can_read if self.read_only else self.can_save)


@uncached()
def doctor(place: str | PathLike[str] | Store, *, read_only: bool = False) -> Diagnosis:
    """Probe what a storage place can do: list, read ranges, put and replace on condition, send large files, delete.

    Some 30 MiB are written in a folder `ucf-doctor-…` there, on a disk 100, and removed, also if a
    probe fails. The speed that was measured is kept for this user, for `estimate`; and whether files
    that are not in the page cache are read faster past it, which later reads by this user do then.

    Args:
        place: a path or url. It may be empty; with `read_only` it should hold a checkpoint.
        read_only: write nothing, and probe only whether existing files can be read (default: no).
    """
    with using(deadline=str(min(_DEADLINE, load_settings().deadline))):
        store = as_store(place)
        examined = _Examined(store)
        if not read_only:
            examined.write()
        if not examined.written:
            examined.read()
        diagnosis = Diagnosis(
            store.url,
            read_only,
            access_to(store.url),
            tuple(examined.found),
            examined.latency,
            examined.throughput,
            examined.write_throughput,
            *examined.disk_throughput,
        )
        if examined.latency is not None and examined.throughput is not None:
            direct = diagnosis.reads_direct
            if read_only and (earlier := profile_of(store.url)) is not None:
                direct = earlier.direct  # which is not probed then
            speed = (examined.latency, examined.throughput, examined.write_throughput)
            keep_profile(store.url, Profile(*speed, direct))
        return diagnosis


class _Examined:
    """A place, and the results of its probes so far."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.found: list[Probe] = []
        self.latency: float | None = None
        self.throughput: float | None = None
        self.write_throughput: float | None = None
        self.disk_throughput: tuple[float | None, float | None] = None, None
        self.written = False  # whether the probes can read files of their own

    def run(self, name: str, probe: Callable[[], str]) -> Status:
        """Run a probe and record its result."""
        try:
            result = Probe(name, "ok", probe())
        except (PermissionDenied, UnsupportedError, probes.NotSupported) as error:
            result = Probe(name, "missing", str(getattr(error, "message", error)))
        except UcformatError as error:
            result = Probe(name, "failed", error.message)
        self.found.append(result)
        return result.status

    def write(self) -> None:
        """Probe with files of our own, and remove them."""
        store, root = self.store, f"ucf-doctor-{secrets.token_hex(8)}"
        above = _missing_folders(store)
        try:
            self.written = self.run("write", lambda: probes.write(store, root)) == "ok"
            if self.written:
                self._write_more(root)
            self._clean_up(root, above)
        except BaseException:  # above all Ctrl-C, perhaps during the clean-up
            with suppress(UcformatError):
                _remove(store, root, above)
            raise

    def _clean_up(self, root: str, above: list[Path]) -> None:
        try:
            _remove(self.store, root, above)
        except UcformatError as error:
            if self.written:
                text = f"{error.message}; remove {self.store.url}/{root} by hand"
                self.found.append(Probe("clean up", "failed", text))

    def _write_more(self, root: str) -> None:
        store, small, large = self.store, f"{root}/small", f"{root}/large"
        self.run("list", lambda: probes.list_order(store, root))
        self.run("read after write", lambda: probes.read_after_write(store, root))
        key = large if self.run("parts", lambda: probes.parts(store, root)) == "ok" else small
        self.run("ranges", lambda: probes.ranges(store, key, lambda: store.read(key)))
        self.run("put if absent", lambda: probes.put_if_absent(store, root))
        self.run("replace", lambda: probes.replace(store, root))
        self._measure(small, probes.SMALL, key)
        with suppress(UcformatError):
            self.write_throughput = probes.write_throughput(store, root)
            if isinstance(store, LocalStore):
                speeds = probes.disk_throughput(store, root, key)
                self.disk_throughput = speeds or self.disk_throughput
        self.run("delete", lambda: probes.delete(store, root))

    def read(self) -> None:
        """Probe with existing files."""
        store = self.store
        listed = self.run("list", lambda: probes.list_there(store))
        if listed == "failed":  # the place is unreachable, or the bucket does not exist
            return

        def ranges() -> str:
            key, size = probes.find(store, MANIFEST, listed=listed == "ok")
            result = probes.ranges(store, key, lambda: store.read(key, 0, min(size, _WHOLE)))
            self._measure(key, min(size, probes.SMALL), key)
            return result

        self.run("ranges", ranges)

    def _measure(self, small: str, nbytes: int, large: str) -> None:
        with suppress(UcformatError):
            self.latency = probes.latency(self.store, small, nbytes)
            self.throughput = probes.throughput(self.store, large, self.store.info(large).size)


def _missing_folders(store: Store) -> list[Path]:
    """The folders that will be made for a local place, the innermost first."""
    if not isinstance(store, LocalStore):
        return []
    root = Path(store.url)
    return [folder for folder in (root, *root.parents) if not folder.exists()]


def _remove(store: Store, root: str, above: list[Path]) -> None:
    """Remove the probes' files, and the folders that were created for them."""
    store.delete_prefix(root)
    for folder in above:
        try:
            folder.rmdir()
        except FileNotFoundError:  # interrupted before it was created, or removed already
            continue
        except OSError:  # another process uses it by now
            break
