"""Settings: what an option says, else `UCP_*` of the environment, else the project's file, else the user's.

The project's file is the nearest `ucformat.toml` in this folder or one above; the user's is `config.toml` in the user's
configuration folder (`~/.config/ucformat` on Linux). A path in a file is relative to the folder of the file.

Whoever may write to a folder above the working directory must not say where credentials go, or which catalog `gc`
believes (docs/security.md). So a file counts only if it is this user's, or root's, and nobody else may write to it, and
a project's file cannot set everything. What does not count is never passed over for a default: unless an option or the
environment sets the same, it is an error.
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

__all__ = [
    "PROJECT_FILE",
    "Settings",
    "allow_root",
    "allowed_roots",
    "load_settings",
    "local_path",
    "roots_with",
    "source_of",
    "using",
]

_given: ContextVar[dict[str, str]] = ContextVar("ucformat_settings", default={})  # noqa: B039 - never changed in place

PROJECT_FILE = "ucformat.toml"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What can be set. Plain Python: every command reads settings, and a library for them takes longer than most."""

    #: A file's path or a url, which may hold a password; "none" switches it off, "" is the default.
    catalog: str = field(default="", repr=False)
    #: Places in which virtual checkpoints may have their files, besides those that this user has registered.
    roots: tuple[str, ...] = ()

    #: Of a service that speaks S3, and is not Amazon's; also AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL.
    endpoint: str = field(default="", repr=False)
    region: str = ""  # of S3; also AWS_REGION and AWS_DEFAULT_REGION
    deadline: float = 180.0  # seconds after which a failing request to a store is given up
    requests: int = 128  # reads of object stores at once, of the whole process
    in_flight: int = 256 << 20  # bytes of these at once

    #: Projects' files that count although they are somebody else's.
    trusted: tuple[str, ...] = ()

    def catalog_url(self) -> str | None:
        """The catalog; None if it is switched off. By default a file in the user's data folder."""
        if self.catalog.lower() == "none":
            return None
        return self.catalog or str(user_data_path("ucformat") / "catalog.db")


@contextmanager
def using(**given: str | None) -> Iterator[None]:
    """Override settings inside the block, as the options of a command do.

    Args:
        given: the settings; None overrides nothing.
    """
    token = _given.set(_given.get() | {k: v for k, v in given.items() if v is not None})
    try:
        yield
    finally:
        _given.reset(token)


def load_settings(**given: str | None) -> Settings:
    """Load the settings.

    Args:
        given: settings that override all others; None overrides nothing.

    Raises:
        UsageError: a file cannot be read, or sets what cannot be set.
        UnsafeError: a file sets something and does not count for it, and neither an option nor the environment sets
            that.
    """
    above: dict[str, Any] = {}
    for key, value in (_environment() | _given.get() | {k: v for k, v in given.items() if v is not None}).items():
        try:
            above[key] = _checked(key, value)
        except ValueError as error:
            raise UsageError(f"the setting {key} cannot be used: {error}", hint=_KNOWN) from None
    found: dict[str, Any] = {}
    refused: dict[str, UnsafeError] = {}
    for path, of_project in ((_user_file(), False), (_project_file(), True)):
        if (file := _opened(path)) is None:
            continue
        trusted = (found | above).get("trusted", ())
        for key, value in _read(file).items():
            reason = (_not_of_a_project(file, key, value) if of_project else None) or _not_ours(file, key, trusted)
            refused.pop(key, None)
            if reason is None:
                found[key] = value
            else:
                refused[key] = reason
    for key, why in refused.items():
        if key not in above:
            raise why
    return Settings(**(found | above))


def source_of(key: str) -> str:
    """The source of a setting: `flag`, `env`, `project`, `user` or `default`.

    Args:
        key: the name of the setting.
    """
    if key in _given.get():
        return "flag"
    if key in _environment():
        return "env"
    for who, path in (("project", _project_file()), ("user", _user_file())):
        if (file := _opened(path)) is not None and key in _read(file):
            return who
    return "default"


def allowed_roots() -> tuple[str, ...]:
    """Where virtual checkpoints may have their files: what the settings say, and what this user has registered.

    Raises:
        UnsafeError: the list of what was registered is not this user's alone.
    """
    settings = load_settings()
    return (*settings.roots, *_registered_roots(settings.trusted))


def roots_with(url: str) -> str:
    """The variable to set before a shell command so that it may also read files in a place: `UCP_ROOTS=…`.

    Args:
        url: the place.
    """
    return _assigned("roots", (*load_settings().roots, url))


def _assigned(key: str, places: tuple[str, ...]) -> str:
    """A list of places as the environment sets it: with commas between, or as JSON where that would not be read so."""
    from shlex import quote  # few commands say so

    plain = ",".join(places)
    odd = plain.startswith("[") or not plain.isprintable() or any("," in place for place in places)
    return f"UCP_{key.upper()}={quote(json.dumps(places) if odd else plain)}"


def _registered_roots(trusted: tuple[str, ...]) -> list[str]:
    file = _opened(_registered())
    lines = [] if file is None else file.text.splitlines()
    if file is not None and lines and (why := _not_ours(file, "roots", trusted)):
        raise why
    found = []
    for line in lines:
        with suppress(ValueError):  # of a line that was being written when the power failed
            found.append(str(json.loads(line)))
    return found


def allow_root(url: str) -> None:
    """Allow this user's virtual checkpoints to have files in a place.

    Args:
        url: the place.
    """
    settings = load_settings()
    if url in settings.roots:
        return
    path, known = _registered(), _registered_roots(settings.trusted)
    try:
        make_folder(path.parent)
        out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)  # whatever the umask, nobody else writes
        try:
            if url not in known:  # on a line of its own, whatever is in the name of a folder, or left of another line
                os.write(out, f"\n{json.dumps(url)}\n".encode())
            os.fsync(out)
        finally:
            os.close(out)
        sync_folder(path.parent)
    except OSError as error:
        raise PermissionDenied(
            f"{path} cannot be written: {error.strerror}",
            hint=f"say yourself that files may be read there: {roots_with(url)}",
        ) from error


def _registered() -> Path:
    return user_data_path("ucformat") / "roots.jsonl"


_FIELDS = tuple(f.name for f in fields(Settings))
_KNOWN = f"what can be set: {', '.join(_FIELDS)}"
#: What only the user says, in a file of the user's or the environment: where secrets are sent, and what may be read.
_OWN = ("endpoint", "roots", "trusted")
_MAX_FILE_BYTES = 1 << 20  # bytes of a file of settings


def _environment() -> dict[str, str]:
    """What `UCP_*` of the environment sets; what is empty sets nothing, and names of ours that set nothing are many."""
    named = {name.upper().removeprefix("UCP_"): v for name, v in os.environ.items() if name.upper().startswith("UCP_")}
    return {key: named[key.upper()] for key in _FIELDS if named.get(key.upper())}


def _checked(key: str, value: Any) -> Any:
    """A value as its setting has it; ValueError says what is wrong with it."""
    if key not in _FIELDS:
        raise ValueError("there is no such setting")
    if key in ("roots", "trusted"):
        listed = _listed(value) if isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not all(isinstance(part, str) for part in listed):
            raise ValueError("it is a list of places")
        return tuple(part for part in listed if part)
    if key in ("requests", "in_flight"):
        return _number(value, int, "a whole number, 1 or more")
    if key == "deadline":
        return _number(value, float, "a number of seconds above 0")
    if not isinstance(value, str):
        raise ValueError("it is text")  # noqa: TRY004 - whatever is wrong with a value
    return value


def _listed(text: str) -> Any:
    """What a text lists: places with commas between, or JSON, for names with commas in them."""
    if not text.startswith("["):
        return text.split(",")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is a list of places: with commas between, or in JSON if it begins with [") from None


def _number(value: Any, kind: type[int | float], means: str) -> int | float:
    try:
        number = kind(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(f"it is {means}") from None
    if isinstance(number, bool) or not isinstance(number, int | kind) or not 0 < number < math.inf:
        raise ValueError(f"it is {means}")
    return kind(number)


@dataclass(frozen=True, slots=True)
class _File:
    """A file of settings, as it was opened."""

    path: Path
    text: str
    owners: frozenset[int]  # of the file, and of a link that leads to it
    mode: int


def _opened(path: Path | None) -> _File | None:
    """A file and whose it is; None where there is none. It is opened once, so nobody can exchange it in between."""
    if path is None:
        return None
    try:
        link = path.lstat()
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe of that name does not block
        with open(number, "rb") as file:  # noqa: PTH123 - of a number, not of a path
            found = os.fstat(number)
            text = file.read(_MAX_FILE_BYTES + 1 if stat.S_ISREG(found.st_mode) else 0).decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"the settings in {path} cannot be read: {error}", hint="it is a text file") from error
    if not stat.S_ISREG(found.st_mode) or len(text) > _MAX_FILE_BYTES:
        raise UsageError(f"the settings in {path} cannot be read: it is no file of at most {_MAX_FILE_BYTES} bytes")
    return _File(path, text, frozenset({link.st_uid, found.st_uid}), found.st_mode)


def _not_ours(file: _File, key: str, trusted: tuple[str, ...]) -> UnsafeError | None:
    """Why a file does not count; None where it does."""
    from shlex import quote  # most files count

    if file.mode & (stat.S_IWGRP | stat.S_IWOTH):
        return UnsafeError(
            f"{file.path} sets {key!r}, and does not count: its group, or everybody, may write to it",
            hint=f"if what it says is right: chmod go-w {quote(str(file.path))}{_instead(key)}",
        )
    if file.owners <= {os.geteuid(), 0} or str(file.path) in trusted:
        return None
    owner = ", ".join(_name_of(uid) for uid in sorted(file.owners - {os.geteuid(), 0}))
    places = (*trusted, str(file.path))
    return UnsafeError(
        f"{file.path} sets {key!r}, and does not count: it belongs to {owner}",
        hint=f"if it is to be trusted: {_assigned('trusted', places)}, or `trusted = {json.dumps(places)}` in "
        f"{_user_place()}{_instead(key)}",
    )


def _not_of_a_project(file: _File, key: str, value: Any) -> UnsafeError | None:
    """Why a project's file cannot set this; None where it can."""
    remote = key == "catalog" and "://" in value and not value.startswith("sqlite:")
    if key not in _OWN and not remote:
        return None
    what = "a catalog on another machine" if remote else repr(key)
    return UnsafeError(
        f"{file.path} sets {what}, which a project's file cannot: it may come from anybody",
        hint=f"if it is right, put the line into {_user_place()}{_instead(key)}",
    )


def _instead(key: str) -> str:
    return f"; else set UCP_{key.upper()}" + (", or give --catalog" if key == "catalog" else "")


def _name_of(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:  # of another host
        return f"the user with number {uid}"


def _read(file: _File) -> dict[str, Any]:
    """What a file sets."""
    import tomllib  # most users have no file

    try:
        found = tomllib.loads(file.text)
    except ValueError as error:
        raise UsageError(f"the settings in {file.path} cannot be read: {error}", hint="it is a TOML file") from error
    for key, value in found.items():
        if key not in _FIELDS:
            raise UsageError(f"{file.path} sets {key!r}, which is no setting", hint=_KNOWN)
        try:
            found[key] = _checked(key, value)
        except ValueError as error:
            raise UsageError(f"{file.path} sets {key!r} to what it cannot be: {error}") from None
    if (catalog := found.get("catalog", "")) and catalog.lower() != "none" and "://" not in catalog:
        found["catalog"] = str(file.path.parent / local_path(catalog, absolute=False))
    return found


def _project_file() -> Path | None:
    with suppress(OSError):  # the folder was removed, or must not be looked into
        here = Path.cwd()
        return next((f for d in (here, *here.parents) if (f := d / PROJECT_FILE).is_file()), None)
    return None


def _user_file() -> Path | None:
    found = _user_place()
    with suppress(OSError):
        return found if found.is_file() else None
    return None


def _user_place() -> Path:
    return user_config_path("ucformat") / "config.toml"


def local_path(text: str | os.PathLike[str], *, absolute: bool = True) -> Path:
    """The path that a user gave, with `~` expanded.

    Args:
        text: the path.
        absolute: whether to make it absolute (default: yes).

    Raises:
        UsageError: no file can be called so, or `~name` is of nobody.
    """
    given = os.fspath(text)
    try:
        path = Path(given).expanduser()
        os.fsencode(path)
    except RuntimeError:  # `~name` of nobody
        raise UsageError(
            f"{given!r}: there is no user of that name", hint="a folder whose own name begins with ~ is written ./~…"
        ) from None
    except (UnicodeEncodeError, TypeError):
        raise UsageError(f"{given!r} is no path: it is no text that a file can be called") from None
    if "\0" in str(path):
        raise UsageError(f"{given!r} is no path: no file can have a NUL in its name")
    return path.absolute() if absolute else path
