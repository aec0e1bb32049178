"""Pickles of PyTorch, read without executing any of their code."""
