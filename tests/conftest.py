"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ucformat", deadline=None)  # two cores, shared: a slow moment is no failure
settings.load_profile("ucformat")

os.environ["UCP_CATALOG"] = "none"  # the user's own catalog is none of our business; tests of the catalog name theirs
