"""`ucp layout`: about layout files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.cli.options import command

if TYPE_CHECKING:
    from ucformat.cli.output import Output

__all__ = ["schema"]


@command
def schema(out: Output) -> None:
    """Print the JSON Schema of layout files, with which editors complete and check them."""
    from ucformat.cli.output import dumps
    from ucformat.schema.layout import json_schema

    found = json_schema()

    def lines() -> list[str]:
        return dumps(found, indent=2).splitlines()

    out.result(lines, lambda: found, lines)
