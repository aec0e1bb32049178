"""What is said of files that lie elsewhere, and are read only where the user's settings allow it."""

from __future__ import annotations

import os

from ucformat.settings import roots_with

__all__ = ["led_to", "roots_hint"]


def roots_hint(folder: str) -> str:
    """How to say that files in this folder, or place, may be read."""
    return f"if files may be read there: {roots_with(folder)}, `roots` in config.toml, or open(place, roots=[…])"


def led_to(root: str | os.PathLike[str], key: str) -> str:
    """The folder that the last link on the way from a root to a file leads to, or in which the file is that it is.

    Args:
        root: a local place.
        key: the file's.
    """
    at = led = os.path.realpath(root)
    for name in key.split("/"):
        at = os.path.realpath(f"{at}/{name}")
        if not at.startswith(f"{led}/"):
            led = at
    return led if os.path.isdir(led) else os.path.dirname(led)  # noqa: PTH112, PTH120 - texts, as they are shown
