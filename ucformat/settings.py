"""Settings: what an option says, else `UCP_*` of the environment, else the project's file, else the user's.

The project's file is the nearest `ucformat.toml` in this folder or one above; the user's is `config.toml` in the user's
configuration folder (`~/.config/ucformat` on Linux). A path in a file is relative to the folder of the file.
"""

from __future__ import annotations

import math
import os
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_config_path, user_data_path

from ucformat.errors import Refused, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "PROJECT_FILE",
    "Settings",
    "allow_root",
    "allowed_roots",
    "load_settings",
    "local_path",
    "source_of",
    "using",
]

_given: ContextVar[dict[str, str]] = ContextVar("ucformat_settings", default={})  # noqa: B039 - never changed in place

PROJECT_FILE = "ucformat.toml"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What can be set. Plain Python: every command reads settings, and a library for them takes longer than most."""

    catalog: str = ""  # a file's path or a url; "none" switches it off, "" is the default
    #: Places in which virtual checkpoints may have their files, besides those that this user has registered.
    roots: tuple[str, ...] = ()

    #: Of a service that speaks S3, and is not Amazon's; also AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL.
    endpoint: str = ""
    region: str = ""  # of S3; also AWS_REGION and AWS_DEFAULT_REGION
    deadline: float = 180.0  # seconds after which a failing request to a store is given up
    requests: int = 128  # reads of object stores at once, of the whole process
    in_flight: int = 256 << 20  # bytes of these at once

    def catalog_url(self) -> str | None:
        """The catalog; None if it is switched off. By default a file in the user's data folder."""
        if self.catalog.lower() == "none":
            return None
        return self.catalog or str(user_data_path("ucformat") / "catalog.db")


@contextmanager
def using(**given: str | None) -> Iterator[None]:
    """In the block, what is given here, and is not None, wins over all else: the options of a command."""
    token = _given.set(_given.get() | {k: v for k, v in given.items() if v is not None})
    try:
        yield
    finally:
        _given.reset(token)


def load_settings(**given: str | None) -> Settings:
    """The settings; what is given here, and is not None, wins over all else.

    Raises:
        UsageError: a file cannot be read, or sets what cannot be set.
    """
    asked = _given.get() | {k: v for k, v in given.items() if v is not None}
    found: dict[str, Any] = {}
    for file in (_user_file(), _project_file()):
        found |= {} if file is None else _read(file)
    for key, value in (_environment() | asked).items():
        try:
            found[key] = _checked(key, value)
        except ValueError as error:
            raise UsageError(f"the setting {key} cannot be used: {error}", hint=_KNOWN) from None
    return Settings(**found)


def source_of(key: str) -> str:
    """Who says what a setting is: `flag`, `env`, `project`, `user` or `default`."""
    if key in _given.get():
        return "flag"
    if key in _environment():
        return "env"
    for who, file in (("project", _project_file()), ("user", _user_file())):
        if file is not None and key in _read(file):
            return who
    return "default"


def allowed_roots() -> tuple[str, ...]:
    """Where virtual checkpoints may have their files: what the settings say, and what this user has registered."""
    try:
        known = _trusted().read_text(encoding="utf-8").splitlines()
    except OSError:
        known = []
    return (*load_settings().roots, *known)


def allow_root(url: str) -> None:
    """Let this user's virtual checkpoints have their files in this place, too."""
    if url in allowed_roots():
        return
    file = _trusted()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as out:
            out.write(f"{url}\n")
    except OSError as error:
        raise Refused(
            f"{file} cannot be written: {error.strerror}",
            hint=f"say yourself that files may be read there: UCP_ROOTS={url}",
        ) from error


def _trusted() -> Path:
    return user_data_path("ucformat") / "roots"


_FIELDS = tuple(f.name for f in fields(Settings))
_KNOWN = f"what can be set: {', '.join(_FIELDS)}"


def _environment() -> dict[str, str]:
    """What `UCP_*` of the environment sets; what is empty sets nothing, and names of ours that set nothing are many."""
    named = {name.upper().removeprefix("UCP_"): v for name, v in os.environ.items() if name.upper().startswith("UCP_")}
    return {key: named[key.upper()] for key in _FIELDS if named.get(key.upper())}


def _checked(key: str, value: Any) -> Any:
    """A value as its setting has it; ValueError says what is wrong with it."""
    if key not in _FIELDS:
        raise ValueError("there is no such setting")
    if key == "roots":
        listed = [part for part in value.split(",") if part] if isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not all(isinstance(part, str) for part in listed):
            raise ValueError("it is a list of places")
        return tuple(listed)
    if key in ("requests", "in_flight"):
        return _number(value, int, "a whole number, 1 or more")
    if key == "deadline":
        return _number(value, float, "a number of seconds above 0")
    if not isinstance(value, str):
        raise ValueError("it is text")  # noqa: TRY004 - whatever is wrong with a value
    return value


def _number(value: Any, kind: type[int | float], means: str) -> int | float:
    try:
        number = kind(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(f"it is {means}") from None
    if isinstance(number, bool) or not isinstance(number, int | kind) or not 0 < number < math.inf:
        raise ValueError(f"it is {means}")
    return kind(number)


def _read(file: Path) -> dict[str, Any]:
    """What a file sets."""
    import tomllib  # most users have no file

    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"the settings in {file} cannot be read: {error}", hint="it is a TOML file") from error
    for key, value in found.items():
        if key not in _FIELDS:
            raise UsageError(f"{file} sets {key!r}, which is no setting", hint=_KNOWN)
        try:
            found[key] = _checked(key, value)
        except ValueError as error:
            raise UsageError(f"{file} sets {key!r} to what it cannot be: {error}") from None
    if (catalog := found.get("catalog", "")) and catalog.lower() != "none" and "://" not in catalog:
        found["catalog"] = str(file.parent / local_path(catalog, absolute=False))
    return found


def _project_file() -> Path | None:
    with suppress(OSError):  # the folder was removed, or must not be looked into
        here = Path.cwd()
        return next((f for d in (here, *here.parents) if (f := d / PROJECT_FILE).is_file()), None)
    return None


def _user_file() -> Path | None:
    found = user_config_path("ucformat") / "config.toml"
    with suppress(OSError):
        return found if found.is_file() else None
    return None


def local_path(text: str | os.PathLike[str], *, absolute: bool = True) -> Path:
    """The path that a user writes, with `~` as the home folder.

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
