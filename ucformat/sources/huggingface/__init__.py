"""Directories of Hugging Face's Trainer and Accelerate as tensors and extents."""

from ucformat.sources.huggingface.source import HuggingFace

__all__ = ["HuggingFace"]
