"""Save and load DeepSpeed engines, ZeRO 0 to 3, pipelines, experts and AutoTP: from any of them, into any of them."""

from ucformat.engines.deepspeed.live_certify import certify
from ucformat.engines.deepspeed.live_load import EngineReport, load
from ucformat.engines.deepspeed.live_save import collect, save

__all__ = ["EngineReport", "certify", "collect", "load", "save"]
