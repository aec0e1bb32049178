"""Benchmarks against peers, and the demo."""
