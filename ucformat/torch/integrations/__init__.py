"""Adapters for training frameworks; each module needs its framework, and is imported by name (docs/guides)."""
