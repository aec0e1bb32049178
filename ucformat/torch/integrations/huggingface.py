"""Hugging Face Transformers: a Trainer that saves and resumes, and a callback (docs/guides/huggingface.md)."""

from ucformat.engines.huggingface.live import SaveCallback, UniversalTrainer

__all__ = ["SaveCallback", "UniversalTrainer"]
