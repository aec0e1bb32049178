"""The exporters that packages register, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.registry import Registry

if TYPE_CHECKING:
    from ucformat.exporters.base import Exporter

EXPORTERS: Registry[type[Exporter]] = Registry("exporters", "export to")


def make_exporter(kind: str, **options: Any) -> Exporter:
    """The exporter of a kind.

    Raises:
        UsageError: there is no such kind, or it has no such option.
    """
    return EXPORTERS[kind](**options)
