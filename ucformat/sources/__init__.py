"""Foreign checkpoints as tensors and extents, read in place."""

from __future__ import annotations

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
    from collections.abc import Mapping

    from ucformat.sources.base import OpenSource, Source
    from ucformat.storage.base import Store

__all__ = ["SOURCES", "open_source", "open_source_file"]

#: All sources, by precedence: each declares which other kinds it comes before.
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
    """Open a foreign checkpoint with the first source that recognises its folder.

    Args:
        store: a store whose root is the folder.
        sources: the sources to ask, in this order.
        options: the options of the source, by name; None: defaults.

    Returns:
        the opened checkpoint; None if no source recognises the folder.

    Raises:
        UsageError: the source has no option of that name.
    """
    for source in sources:
        if source.find(store):
            return with_options(source, options or {}).open(store)
    return None


def open_source_file(
    store: Store, key: str, sources: tuple[Source, ...] = SOURCES, options: Mapping[str, Any] | None = None
) -> OpenSource | None:
    """Open a single file with the first source that recognises it.

    Args:
        store: a store whose root is the file's folder.
        key: the name of the file.
        sources: the sources to ask, in this order.
        options: the options of the source, by name; None: defaults.

    Returns:
        the opened checkpoint; None if no source recognises the file.

    Raises:
        UsageError: the source has no option of that name.
    """
    for source in sources:
        if source.find_file(store, key):
            return with_options(source, options or {}).open_file(store, key)
    return None
