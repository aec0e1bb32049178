"""Exports, read back by the loaders of the tools for which they are."""
