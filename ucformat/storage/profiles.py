"""What `doctor` has measured of places, kept for this user: how long a job takes there, and how files are best read."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from platformdirs import user_data_path

from ucformat.durable import make_folder

if TYPE_CHECKING:
    from pathlib import Path

_MOST = 1000  # places that are kept


@dataclass(frozen=True, slots=True)
class Profile:
    """The speed of a place: milliseconds for a small read, megabytes (10⁶ bytes) a second of one reader or writer.

    `direct`: whether files that are not in the page cache are read faster past it.
    """

    latency_ms: float
    read_mb_per_s: float
    write_mb_per_s: float | None = None
    direct: bool = False


def _file() -> Path:
    return user_data_path("ucformat") / "profiles.json"


def _all() -> dict[str, Any]:
    try:
        profiles = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return profiles if isinstance(profiles, dict) else {}


def keep_profile(url: str, profile: Profile) -> None:
    """Keep what was measured of a place; if that is impossible, do nothing."""
    others = {k: v for k, v in _all().items() if k != url}
    # the latest measurement is the last entry, and the first ones are dropped
    kept = dict([*others.items(), (url, asdict(profile))][-_MOST:])
    with suppress(OSError):
        make_folder(_file().parent)
        beside = _file().with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(kept, indent=1))
        beside.replace(_file())


def profile_of(url: str) -> Profile | None:
    """What is known of a place, or of the nearest place that contains it."""
    profiles = _all()
    for place in sorted(profiles, key=len, reverse=True):
        if url == place or url.startswith(f"{place.rstrip('/')}/"):
            with suppress(TypeError):  # of another version
                return Profile(**profiles[place])
    return None
