"""Policy files: read and validate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ucformat.errors import UpgradeNeeded, UsageError
from ucformat.schema import policy as schema
from ucformat.schema.layout import Faults, checked
from ucformat.written import read_written

__all__ = ["load_policy"]


def load_policy(source: Path | str | Mapping[str, Any]) -> schema.Policy:
    """The policy in a YAML or JSON file, or in a mapping that was read from one."""
    document = source if isinstance(source, Mapping) else read_written(Path(source), "policy file")
    version = document.get("version") if isinstance(document, Mapping) else None
    if isinstance(version, int) and version > schema.VERSION:
        raise UpgradeNeeded(
            f"the policy is of version {version}; this ucformat reads up to {schema.VERSION}", hint="upgrade ucformat"
        )
    try:
        return checked(schema.Policy, document)
    except Faults as e:
        hint = "`keep` says what stays, as `last: 5`; docs/retention.md describes the file"
        raise UsageError(f"not a policy:\n{e}", hint=hint) from e
