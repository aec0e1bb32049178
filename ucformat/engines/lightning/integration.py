"""The integration of Lightning."""

from __future__ import annotations

from ucformat.torch.integration import Integration

__all__ = ["LIGHTNING"]


class _Lightning(Integration):
    title = "Lightning"
    module = "ucformat.torch.integrations.lightning"


LIGHTNING = _Lightning()
