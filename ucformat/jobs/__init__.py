"""Runs lists of idempotent tasks."""
