"""Settings: from an option, else `UCP_*` in the environment, else the project's file, else the user's.

The project's file is the nearest `ucformat.toml` in this folder or one above; the user's is
`config.toml` in the user's configuration folder (`~/.config/ucformat` on Linux). A path in a file
is relative to the folder of the file.

A user with write access to a folder above the working directory must not control where credentials
are sent, or which catalog `gc` trusts (docs/security.md). So a file is used only if it belongs to
this user or root and nobody else may write to it, and a project's file cannot set everything. A
refused setting never falls back to a default: unless an option or the environment sets the same, it
is an error.
"""

from __future__ import annotations

import json
import math
import os
import pwd
import stat
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_config_path, user_data_path

from ucformat.durable import make_folder, sync_folder
from ucformat.errors import PermissionDenied, UnsafeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_given: ContextVar[dict[str, str]] = ContextVar("ucformat_settings", default={})  # noqa: B039 - never modified in place

PROJECT_FILE = "ucformat.toml"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings. A plain dataclass: every command loads it, and a settings library would be slow to import."""

    #: The path of a file or a url, which may contain a password; "none" disables the catalog, "" is
    #: the default.
    catalog: str = field(default="", repr=False)
    #: Places that may hold files of virtual checkpoints, in addition to those that this user has
    #: registered.
    roots: tuple[str, ...] = ()

    #: The endpoint of an S3-compatible service other than Amazon's; also AWS_ENDPOINT_URL_S3 and
    #: AWS_ENDPOINT_URL.
    endpoint: str = field(default="", repr=False)
    region: str = ""  # of S3; also AWS_REGION and AWS_DEFAULT_REGION
    deadline: float = 180.0  # seconds after which a failing request to a store is given up
    requests: int = 128  # concurrent reads of object stores, in the whole process
    in_flight: int = 256 << 20  # bytes of these reads
    # a folder for copies of what is read over a network; "none" or "": there are none
    cache: str = ""
    cache_bytes: int = 64 << 30  # of these copies on the disk

    #: The name of this node in a training with tiers, `RACK/NODE`; "" is the host's name.
    node: str = ""

    #: Whose signatures `--signed-by trusted` accepts: PEM files of public keys or of authorities'
    #: certificates, and `sigstore:ISSUER,IDENTITY`.
    signers: tuple[str, ...] = ()

    #: Projects' files that are used although they belong to another user.
    trusted: tuple[str, ...] = ()

    def catalog_url(self) -> str | None:
        """The url or path of the catalog (default: a file in the user's data folder); None if it is disabled."""
        if self.catalog.lower() == "none":
            return None
        return self.catalog or str(user_data_path("ucformat") / "catalog.db")

    def existing_catalog(self) -> str | None:
        """The url or path of the catalog; None if it is disabled, or a file that was not created yet."""
        url = self.catalog_url()
        file = None if url is None else catalog_file(url)
        return None if file is not None and not file.exists() else url


@contextmanager
def using(**given: str | None) -> Iterator[None]:
    """Override settings inside the block, as the options of a command do."""
    token = _given.set(_given.get() | {k: v for k, v in given.items() if v is not None})
    try:
        yield
    finally:
        _given.reset(token)


def load_settings(**given: str | None) -> Settings:
    """Load the settings."""
    overrides: dict[str, Any] = {}
    for key, value in (
        _environment() | _given.get() | {k: v for k, v in given.items() if v is not None}
    ).items():
        try:
            overrides[key] = _checked(key, value)
        except ValueError as error:
            raise UsageError(f"the setting {key} is invalid: {error}", hint=_KNOWN) from None
    values: dict[str, Any] = {}
    refused: dict[str, UnsafeError] = {}
    for path, of_project in ((_user_file(), False), (_project_file(), True)):
        if (file := _opened(path)) is None:
            continue
        trusted = (values | overrides).get("trusted", ())
        for key, value in _read(file).items():
            reason = (_not_of_a_project(file, key, value) if of_project else None) or _not_ours(
                file, key, trusted
            )
            # the project's file, which is the later one, overrides the user's, also a refused one
            refused.pop(key, None)
            if reason is None:
                values[key] = value
            else:
                refused[key] = reason
    for key, why in refused.items():
        if key not in overrides:
            raise why
    return Settings(**(values | overrides))


def source_of(key: str) -> str:
    """The source of a setting: `flag`, `env`, `project`, `user` or `default`."""
    if key in _given.get():
        return "flag"
    if key in _environment():
        return "env"
    for source, path in (("project", _project_file()), ("user", _user_file())):
        if (file := _opened(path)) is not None and key in _read(file):
            return source
    return "default"


def allowed_roots() -> tuple[str, ...]:
    """The places that may hold files of virtual checkpoints.

    Those in the settings, and those this user has registered.
    """
    settings = load_settings()
    return (*settings.roots, *_registered_roots(settings.trusted))


def roots_with(url: str) -> str:
    """The assignment for a shell command that allows it to read files in a place too: `UCP_ROOTS=…`."""
    return _assigned("roots", (*load_settings().roots, url))


def _assigned(key: str, places: tuple[str, ...]) -> str:
    """The assignment of a list of places to a variable: separated by commas, or as JSON where that is ambiguous."""
    from shlex import quote  # few commands need it

    plain = ",".join(places)
    odd = plain.startswith("[") or not plain.isprintable() or any("," in place for place in places)
    return f"UCP_{key.upper()}={quote(json.dumps(places) if odd else plain)}"


def _registered_roots(trusted: tuple[str, ...]) -> list[str]:
    file = _opened(_registered())
    lines = [] if file is None else file.text.splitlines()
    if file is not None and lines and (why := _not_ours(file, "roots", trusted)):
        raise why
    roots = []
    for line in lines:
        with suppress(ValueError):  # a line that was incomplete when the power failed
            roots.append(str(json.loads(line)))
    return roots


def allow_root(url: str) -> None:
    """Allow this user's virtual checkpoints to have files in a place."""
    settings = load_settings()
    if url in settings.roots:
        return
    path, registered = _registered(), _registered_roots(settings.trusted)
    try:
        make_folder(path.parent)
        # not writable by others, whatever the umask
        out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if url not in registered:  # on a line of its own, even after an incomplete line
                os.write(out, f"\n{json.dumps(url)}\n".encode())
            os.fsync(out)
        finally:
            os.close(out)
        sync_folder(path.parent)
    except OSError as error:
        raise PermissionDenied(
            f"{path} cannot be written: {error.strerror}",
            hint=f"allow reading files there yourself: {roots_with(url)}",
        ) from error


def _registered() -> Path:
    return user_data_path("ucformat") / "roots.jsonl"


_FIELDS = tuple(f.name for f in fields(Settings))
_KNOWN = f"the settings are: {', '.join(_FIELDS)}"
#: Settings that a project's file cannot have: where secrets are sent, which files may be read,
#: where copies are, and who is trusted.
_USER_ONLY = ("cache", "cache_bytes", "endpoint", "roots", "signers", "trusted")
_MAX_FILE_BYTES = 1 << 20  # bytes of a file of settings


def _environment() -> dict[str, str]:
    """The settings in `UCP_*` variables; empty ones are ignored, as are the many that are not settings."""
    named = {
        name.upper().removeprefix("UCP_"): v
        for name, v in os.environ.items()
        if name.upper().startswith("UCP_")
    }
    return {key: named[key.upper()] for key in _FIELDS if named.get(key.upper())}


def _checked(key: str, value: Any) -> Any:
    """Convert a value to the type of its setting; ValueError if it is invalid."""
    if key not in _FIELDS:
        raise ValueError("there is no such setting")
    if key in ("roots", "signers", "trusted"):
        listed = _listed(value) if isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not all(
            isinstance(part, str) for part in listed
        ):
            raise ValueError(f"it must be a list of {'signers' if key == 'signers' else 'places'}")
        return tuple(part for part in listed if part)
    if key in ("requests", "in_flight", "cache_bytes"):
        return _number(value, int, "a whole number, 1 or more")
    if key == "deadline":
        return _number(value, float, "a number of seconds above 0")
    if not isinstance(value, str):
        raise ValueError("it must be text")  # noqa: TRY004 - as for all invalid values
    return value


def _listed(text: str) -> Any:
    """Parse a list of places: separated by commas, or JSON for names that contain commas."""
    if not text.startswith("["):
        return text.split(",")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(
            "it must be a list of places: separated by commas, or JSON if it begins with ["
        ) from None


def _number(value: Any, kind: type[int | float], means: str) -> int | float:
    try:
        number = kind(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(f"it must be {means}") from None
    if isinstance(number, bool) or not isinstance(number, int | kind) or not 0 < number < math.inf:
        raise ValueError(f"it must be {means}")
    return kind(number)


@dataclass(frozen=True, slots=True)
class _SettingsFile:
    """An opened file of settings."""

    path: Path
    text: str
    owners: frozenset[int]  # of the file, and of a symbolic link to it
    mode: int


def _opened(path: Path | None) -> _SettingsFile | None:
    """A file with its owners; None if there is none. It is opened only once, so that it cannot be exchanged."""
    if path is None:
        return None
    try:
        link = path.lstat()
        # do not block on a named pipe
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(number, "rb") as file:  # noqa: PTH123 - of a number, not of a path
            status = os.fstat(number)
            text = file.read(_MAX_FILE_BYTES + 1 if stat.S_ISREG(status.st_mode) else 0).decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the settings in {path} cannot be read: {error}", hint="it must be a text file"
        ) from error
    if not stat.S_ISREG(status.st_mode) or len(text) > _MAX_FILE_BYTES:
        raise UsageError(
            f"the settings in {path} cannot be read: not a regular file of ≤ {_MAX_FILE_BYTES} "
            "bytes"
        )
    return _SettingsFile(path, text, frozenset({link.st_uid, status.st_uid}), status.st_mode)


def _not_ours(file: _SettingsFile, key: str, trusted: tuple[str, ...]) -> UnsafeError | None:
    """The reason why a file is not trusted; None if it is."""
    from shlex import quote  # most files are trusted

    if file.mode & (stat.S_IWGRP | stat.S_IWOTH):
        return UnsafeError(
            f"{file.path} sets {key!r}, and is not trusted: its group, or everybody, may write "
            "to it",
            hint=f"if its content is right: chmod go-w {quote(str(file.path))}{_instead(key)}",
        )
    if file.owners <= {os.geteuid(), 0} or str(file.path) in trusted:
        return None
    owner = ", ".join(_name_of(uid) for uid in sorted(file.owners - {os.geteuid(), 0}))
    places = (*trusted, str(file.path))
    return UnsafeError(
        f"{file.path} sets {key!r}, and is not trusted: it belongs to {owner}",
        hint=f"to trust it: {_assigned('trusted', places)}, or `trusted = {json.dumps(places)}` in "
        f"{_user_place()}{_instead(key)}",
    )


def _not_of_a_project(file: _SettingsFile, key: str, value: Any) -> UnsafeError | None:
    """The reason why a project's file cannot set this; None if it can."""
    remote = key == "catalog" and "://" in value and not value.startswith("sqlite:")
    if key not in _USER_ONLY and not remote:
        return None
    setting = "a catalog on another machine" if remote else repr(key)
    return UnsafeError(
        f"{file.path} sets {setting}, which a project's file cannot: anybody may have written it",
        hint=f"if it is right, put the line into {_user_place()}{_instead(key)}",
    )


def _instead(key: str) -> str:
    return f"; else set UCP_{key.upper()}" + (", or give --catalog" if key == "catalog" else "")


def _name_of(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:  # of another host
        return f"the user with number {uid}"


def _read(file: _SettingsFile) -> dict[str, Any]:
    """The settings in a file."""
    import tomllib  # most users have no file

    try:
        values = tomllib.loads(file.text)
    except ValueError as error:
        raise UsageError(
            f"the settings in {file.path} cannot be read: {error}", hint="use TOML syntax"
        ) from error
    for key, value in values.items():
        if key not in _FIELDS:
            raise UsageError(f"{file.path} sets {key!r}, which is not a setting", hint=_KNOWN)
        try:
            values[key] = _checked(key, value)
        except ValueError as error:
            raise UsageError(f"{file.path} sets {key!r} to an invalid value: {error}") from None
    for key in ("catalog", "cache"):
        if (path := values.get(key, "")) and path.lower() != "none" and "://" not in path:
            values[key] = str(file.path.parent / local_path(path, absolute=False))
    if "signers" in values:
        values["signers"] = tuple(
            text
            if text.startswith("sigstore:")
            else str(file.path.parent / local_path(text, absolute=False))
            for text in values["signers"]
        )
    return values


def _project_file() -> Path | None:
    with suppress(OSError):  # the folder was removed, or cannot be read
        here = Path.cwd()
        return next((f for d in (here, *here.parents) if (f := d / PROJECT_FILE).is_file()), None)
    return None


def _user_file() -> Path | None:
    file = _user_place()
    with suppress(OSError):
        return file if file.is_file() else None
    return None


def _user_place() -> Path:
    return user_config_path("ucformat") / "config.toml"


def catalog_file(url: str) -> Path | None:
    """The file of a catalog; None if it is on a server."""
    if "://" not in url:
        return local_path(url, absolute=False)
    return Path(url.partition("://")[2][1:].partition("?")[0]) if url.startswith("sqlite") else None


def local_path(text: str | os.PathLike[str], *, absolute: bool = True) -> Path:
    """The path that a user gave, with `~` expanded."""
    given = os.fspath(text)
    try:
        path = Path(given).expanduser()
        os.fsencode(path)
    except RuntimeError:  # no such user
        raise UsageError(
            f"{given!r}: there is no user of that name",
            hint="write ./~… for a folder whose name begins with ~",
        ) from None
    except (UnicodeEncodeError, TypeError):
        raise UsageError(f"{given!r} is not a path: it cannot be encoded as a file name") from None
    if "\0" in str(path):
        raise UsageError(f"{given!r} is not a path: file names cannot contain NUL")
    return path.absolute() if absolute else path
