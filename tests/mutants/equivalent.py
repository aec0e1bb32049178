"""Changes that no test can notice, and why."""

from __future__ import annotations

#: The name of each change, as `python -m tests.mutants` prints it -> the argument.
EQUIVALENT: dict[str, str] = {}
