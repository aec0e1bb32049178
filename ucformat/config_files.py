"""Configuration files, YAML or JSON: read without executing anything, and completely or not at all."""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ucformat.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Hashable
    from pathlib import Path

    import yaml

_MAX_VALUES = 1_000_000  # values of a YAML file with its aliases expanded


def read_config_file(path: Path, what: str, fault: type[UsageError] = UsageError) -> Any:
    """Read a YAML or JSON file; a key that is given twice is an error."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise NotFound(f"there is no {what} {path}") from e
    except UnicodeDecodeError as e:
        raise fault(f"the {what} {path} is not UTF-8 text: {e}") from e
    except (OSError, ValueError) as e:
        raise fault(f"the {what} {path} cannot be read: {e}") from e
    if path.suffix != ".json":
        return _yaml(path, text, fault)
    try:
        return json.loads(text, object_pairs_hook=_pairs)
    except ValueError as e:
        raise fault(f"{path} is not JSON: {e}") from e
    except RecursionError as e:
        raise fault(f"{path} is nested too deeply") from e


def line_of(path: Path, place: str) -> int | None:
    """The line of a value in a file, such as `rules[3].place[0].over`, or of its nearest existing parent."""
    import yaml

    try:
        node = _composed(path.read_text(encoding="utf-8"))  # JSON is YAML, too
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    line: int | None = None
    for part in re.findall(r"[^.\[\]]+", place):
        below = None
        if isinstance(node, yaml.MappingNode):
            below = next(((k.start_mark, v) for k, v in node.value if k.value == part), None)
        elif (
            isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value)
        ):
            below = (node.value[int(part)].start_mark, node.value[int(part)])
        if below is not None:  # else it is the name of a union variant, which is not in the file
            line, node = below[0].line + 1, below[1]
    return line


@lru_cache(maxsize=1)  # many faults need lines of the same file
def _composed(text: str) -> yaml.Node | None:
    import yaml

    node: yaml.Node | None = yaml.compose(text, yaml.SafeLoader)
    return node


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"{key!r} is given twice")
        members[key] = value
    return members


def read_config_text(
    text: str, what: str, fault: type[UsageError] = UsageError, most: int = _MAX_VALUES
) -> Any:
    """Read YAML or JSON; a key that is given twice is an error.

    Args:
        most: values that aliases of YAML may expand to.
    """
    try:  # YAML takes most JSON, but no tabs
        return json.loads(text, object_pairs_hook=_pairs)
    except (ValueError, RecursionError):
        return _yaml(f"the {what}", text, fault, most)


def _yaml(path: Path | str, text: str, fault: type[UsageError], most: int = _MAX_VALUES) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """A safe loader that rejects duplicate keys: PyYAML ignores the first."""

        def construct_mapping(
            self,
            node: yaml.MappingNode,
            deep: bool = False,  # noqa: FBT001, FBT002
        ) -> dict[Hashable, Any]:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        problem = f"{key.value!r} is given twice"
                        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                    seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

        def construct_number(self, node: yaml.ScalarNode) -> Any:
            """A number; of `8:16`, which YAML 1.1 takes for 496, the text."""
            kind = (
                type(self).construct_yaml_float
                if node.tag.endswith("float")
                else type(self).construct_yaml_int
            )
            return node.value if ":" in node.value else kind(self, node)

    for tag in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{tag}", Loader.construct_number)
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_aliases(node, most)
        return loader.construct_document(node)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise fault(f"{path}{line}: {getattr(e, 'problem', None) or e}") from e
    except RecursionError as e:
        raise fault(f"{path} is nested too deeply") from e
    # of a number or a date
    except (ValueError, IndexError, KeyError, OverflowError, AttributeError, TypeError) as e:
        raise fault(f"{path} holds an invalid value: {e}") from e


def _check_aliases(root: yaml.Node, most: int) -> None:
    """Raise an error if aliases expand to too many values, or one contains itself."""
    if _expanded_size(root) > most:
        from yaml.constructor import ConstructorError

        raise ConstructorError(
            None, None, f"its aliases expand to more than {most:,} values", root.start_mark
        )


def _expanded_size(root: yaml.Node) -> float:
    """The number of values in a document with its aliases expanded; infinite if one contains itself."""
    sizes: dict[int, float] = {}
    todo: list[tuple[yaml.Node, bool]] = [(root, False)]
    while todo:
        node, done = todo.pop()
        inner = _inner(node)
        if done:
            sizes[id(node)] = 1 + sum(sizes[id(n)] for n in inner)
        elif id(node) not in sizes:
            # until it is known: a node that refers to it meanwhile is inside of it
            sizes[id(node)] = math.inf
            todo.append((node, True))
            todo += [(n, False) for n in inner]
    return sizes[id(root)]


def _inner(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node.value, str):
        return []
    return [n for entry in node.value for n in (entry if isinstance(entry, tuple) else (entry,))]
