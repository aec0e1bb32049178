"""Foreign checkpoints as tensors and extents, read in place."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ucformat.sources.base import by_precedence, with_options
from ucformat.sources.bytecheckpoint import ByteCheckpoint
from ucformat.sources.dcp import Dcp
from ucformat.sources.deepspeed import DeepSpeed
from ucformat.sources.huggingface import HuggingFace
from ucformat.sources.megatron import Megatron
from ucformat.sources.orbax import Orbax
from ucformat.sources.safetensors import Safetensors
from ucformat.sources.torch_save import TorchSave
from ucformat.sources.zarr import Zarr

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucformat.sources.base import OpenSource, Source
    from ucformat.storage.base import Store

__all__ = ["SOURCES", "open_source", "open_source_file"]

#: The kinds of foreign checkpoint that are known; each declares itself which others it comes before.
SOURCES: tuple[Source, ...] = by_precedence(
    (
        ByteCheckpoint(),
        Dcp(),
        DeepSpeed(),
        HuggingFace(),
        Megatron(),
        Orbax(),
        Safetensors(),
        TorchSave(),
        Zarr(),
    )
)


def open_source(
    store: Store, sources: tuple[Source, ...] = SOURCES, options: Mapping[str, Any] | None = None
) -> OpenSource | None:
    """The checkpoint in this place, opened by the first source that recognises it; None where none does.

    `options` are those of the source's class; UsageError where it has no such option.
    """
    for source in sources:
        if source.find(store):
            with _uncollected():
                return with_options(source, options or {}).open(store)
    return None


def open_source_file(
    store: Store, key: str, sources: tuple[Source, ...] = SOURCES, options: Mapping[str, Any] | None = None
) -> OpenSource | None:
    """The checkpoint that is this one file; None where no source recognises it."""
    for source in sources:
        if source.find_file(store, key):
            with _uncollected():
                return with_options(source, options or {}).open_file(store, key)
    return None


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without collecting garbage: of a million small objects that all stay, that takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
