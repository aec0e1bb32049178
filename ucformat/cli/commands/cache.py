"""`ucp cache`: the cache of files that are read over a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ucformat.cli.ui.options import command
from ucformat.cli.ui.output import terminal_width
from ucformat.cli.ui.text import field
from ucformat.texts import bytes_text, count

if TYPE_CHECKING:
    from ucformat.cli.ui.output import Output


@command
@click.option("--clear", is_flag=True, help="Remove everything from it.")
def cache(out: Output, *, clear: bool) -> None:
    """Show the cache of files that are read over a network: its folder, its size and its limit."""
    from ucformat.errors import UsageError
    from ucformat.storage.url import open_cache

    folder = open_cache()
    if folder is None:
        raise UsageError(
            "no cache is configured",
            hint="set UCP_CACHE, or `cache` in your config.toml, to a folder",
        )
    if clear:
        folder.clear()
    used = folder.usage()
    out.result(
        lambda: [
            *field("folder", folder.path, terminal_width()),
            *field("entries", count(used.entries), terminal_width()),
            *field(
                "size",
                f"{bytes_text(used.nbytes)} of at most {bytes_text(folder.limit)}",
                terminal_width(),
            ),
        ],
        lambda: {
            "path": folder.path,
            "entries": used.entries,
            "bytes": used.nbytes,
            "limit": folder.limit,
        },
        lambda: [str(used.nbytes)],
    )
