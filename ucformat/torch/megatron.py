"""Save and load trainings with Megatron-Core: universal checkpoints from any of its layouts, into any other."""

from ucformat.engines.megatron.live_load import MegatronReport, certify, load
from ucformat.engines.megatron.live_save import async_save, collect, save
from ucformat.engines.megatron.live_strategies import strategies

__all__ = ["MegatronReport", "async_save", "certify", "collect", "load", "save", "strategies"]
