"""Hugging Face Accelerate: the state of an Accelerator as a training state (docs/guides/huggingface.md)."""

from ucformat.engines.huggingface.accelerate import accelerator_state

__all__ = ["accelerator_state"]
