"""Policy files: read and validate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucformat.errors import NotFound, UpgradeNeeded, UsageError
from ucformat.schema import policy as schema
from ucformat.schema.layout import Faults, checked

if TYPE_CHECKING:
    from collections.abc import Hashable

    import yaml

__all__ = ["load_policy"]


def load_policy(source: Path | str | Mapping[str, Any]) -> schema.Policy:
    """The policy in a YAML or JSON file, or in a mapping that was read from one."""
    document = source if isinstance(source, Mapping) else _read(Path(source))
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


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise NotFound(f"there is no policy file {path}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"the policy file {path} is not UTF-8 text: {e}") from e
    if path.suffix != ".json":
        return _yaml(path, text)
    try:
        return json.loads(text, object_pairs_hook=_pairs)
    except ValueError as e:
        raise UsageError(f"{path} is not JSON: {e}") from e


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for i, (key, _) in enumerate(pairs):
        if key in dict(pairs[:i]):
            raise ValueError(f"{key!r} is given twice")
    return dict(pairs)


def _yaml(path: Path, text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """A safe loader to which a key given twice is an error: of two rules, YAML would forget the first."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
                seen.add(str(key.value))
            return super().construct_mapping(node, deep=deep)

    try:
        return yaml.load(text, Loader)  # noqa: S506 (it is a SafeLoader)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{line}: {getattr(e, 'problem', None) or e}") from e
