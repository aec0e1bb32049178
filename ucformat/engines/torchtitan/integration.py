"""The integrations of torchtitan: a manager for loops of its shape, and one for its own trainer."""

from __future__ import annotations

from ucformat.torch.integration import Integration

__all__ = ["TORCHTITAN", "TORCHTITAN_CONFIG"]


class _Torchtitan(Integration):
    title = "torchtitan"
    module = "ucformat.torch.integrations.torchtitan"


class _TorchtitanConfig(Integration):
    title = "torchtitan's own trainer"
    module = "ucformat.torch.integrations.torchtitan_config"


TORCHTITAN, TORCHTITAN_CONFIG = _Torchtitan(), _TorchtitanConfig()
