"""Changes that no test can notice, and why."""

from __future__ import annotations

#: The name of each change, as `python -m tests.mutants` prints it -> the argument.
EQUIVALENT: dict[str, str] = {
    "ucformat/catalog/filter/compile.py:_ago: boundary: span > timedelta(0)": "a span of 0 takes no time over its ends",
}
