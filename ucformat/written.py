"""Files that people write, YAML or JSON: read without executing anything, and never half."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from ucformat.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Hashable
    from pathlib import Path

    import yaml

__all__ = ["line_of", "read_written"]


def read_written(path: Path, what: str, fault: type[UsageError] = UsageError) -> Any:
    """What a YAML or JSON file holds; `fault` names the line of one, also of a key that is given twice.

    `what` says in errors what kind of file it should be.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise NotFound(f"there is no {what} {path}") from e
    except UnicodeDecodeError as e:
        raise fault(f"the {what} {path} is not UTF-8 text: {e}") from e
    if path.suffix != ".json":
        return _yaml(path, text, fault)
    try:
        return json.loads(text, object_pairs_hook=_pairs)
    except ValueError as e:
        raise fault(f"{path} is not JSON: {e}") from e


def line_of(path: Path, place: str) -> int | None:
    """The line of a place in a file, such as `rules[3].place[0].over`, or of what is nearest above it."""
    import yaml

    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)  # JSON is YAML, too
    except (OSError, ValueError, yaml.YAMLError):
        return None
    line: int | None = None
    for part in re.findall(r"[^.\[\]]+", place):
        below = None
        if isinstance(node, yaml.MappingNode):
            below = next(((k.start_mark, v) for k, v in node.value if k.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            below = (node.value[int(part)].start_mark, node.value[int(part)])
        if below is not None:  # else it is the name of a variant, which is not in the file
            line, node = below[0].line + 1, below[1]
    return line


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is given twice")
        found[key] = value
    return found


def _yaml(path: Path, text: str, fault: type[UsageError]) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """A safe loader to which a key given twice is an error: YAML would forget the first."""

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
        raise fault(f"{path}{line}: {getattr(e, 'problem', None) or e}") from e
