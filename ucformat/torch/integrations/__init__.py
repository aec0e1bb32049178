"""Adapters for training frameworks; each requires its framework, and is imported by name (docs/guides).

Those of other packages are attributes, by the names under which they are registered.
"""

from __future__ import annotations

from importlib import import_module

from ucformat.torch.integration import INTEGRATIONS

__all__: list[str] = []


def __getattr__(name: str) -> object:
    """Import the module of a registered integration."""
    if name not in INTEGRATIONS or not (home := INTEGRATIONS[name].module):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(home)


def __dir__() -> list[str]:
    return [name for name, integration in INTEGRATIONS.items() if integration.module]
