"""The exporters that packages register, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.registry import Registry

if TYPE_CHECKING:
    from ucformat.exporters.base import Exporter

EXPORTERS: Registry[type[Exporter]] = Registry("exporters", "export to")
