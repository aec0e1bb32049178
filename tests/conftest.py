"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

#: `make test` tries the same examples every time, `make test-all` others every time. No deadline: the cores are shared.
settings.register_profile("ucformat", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("ucformat")

os.environ["UCP_CATALOG"] = "none"  # the user's own catalog is none of our business; tests of the catalog name theirs
