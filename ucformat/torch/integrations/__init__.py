"""Adapters for training frameworks; each module requires its framework, and is imported by name (docs/guides)."""
