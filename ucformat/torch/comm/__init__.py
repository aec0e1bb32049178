"""Connections, messages and collectives among the ranks that save or load together."""
