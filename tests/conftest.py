"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("ucformat", deadline=None)  # two cores, shared: a slow moment is no failure
settings.load_profile("ucformat")
