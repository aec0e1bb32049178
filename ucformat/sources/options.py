"""What a caller may tell a source that the files do not say: how they are laid out, names, sizes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.sources.base import Source

__all__ = ["groups_by_optimizer", "options_of", "with_options"]


def options_of(source: Source) -> list[str]:
    """The names of the options that a kind of source takes."""
    return [n for n, p in inspect.signature(type(source)).parameters.items() if p.kind is p.KEYWORD_ONLY]


def with_options(source: Source, options: Mapping[str, Any]) -> Source:
    """A source of the same kind that is told these options; UsageError where it does not take one."""
    if not options:
        return source
    known = options_of(source)
    for name in options:
        if name not in known:
            raise UsageError(
                f"a checkpoint of {source.title} is not opened with the option {name!r}",
                hint=f"its options are: {', '.join(known)}" if known else "it takes none",
            )
    made: Source = type(source)(**options)
    return made


def groups_by_optimizer(
    given: Mapping[str, Sequence[Sequence[str]]] | Sequence[Sequence[str]] | None,
) -> dict[str, Sequence[Sequence[str]]]:
    """The option `groups` of files that may hold several optimizers: of one, the groups alone do."""
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {"optimizer": given}
