"""How DeepSpeed's checkpoints are recognised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.sources.base import Folders
from ucformat.sources.deepspeed.folder import (
    DeepSpeedOptions,
    find_tag,
    is_model_or_optimizer,
    is_universal,
    list_files,
    looks_like_deepspeed,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.geometry.layout import Layout
    from ucformat.sources.deepspeed.opened import OpenDeepSpeed
    from ucformat.sources.deepspeed.universal import OpenUniversal
    from ucformat.storage.base import Store

__all__ = ["DeepSpeed"]


class DeepSpeed(Folders):
    """How DeepSpeed checkpoints are recognised and opened.

    Args:
        allow: packages of your own whose pickled classes become inert stand-ins instead of being refused.
        groups: the parameters of each optimizer group, in order, for a ZeRO 0 checkpoint that does not tell them.
        layout: how parameters lie over tensor-parallel ranks, for a checkpoint that does not tell it, or tells it
            wrongly: a layout whose rules are over the axis `tp`, or the name of a preset (`llama`,
            `megatron-deepspeed`, `megatron-deepspeed-swiglu`). Parameters that no rule is for are read as without it.
        vocab: rows of the vocabulary without its padding, where the layout says `pad_to`.
        cuts: the same in a word for each pattern of names (a glob or `/regex/`): `replicate`, `mean`, `halves` (two
            tensors, one after the other, of which each is cut), or the dim along which the ranks' parts are joined. It
            goes before `layout`.
    """

    kind = "deepspeed"
    title = "DeepSpeed"

    def __init__(
        self,
        *,
        allow: Sequence[str] = (),
        groups: Sequence[Sequence[str]] | None = None,
        layout: Layout | str | None = None,
        vocab: int | None = None,
        cuts: Mapping[str, str | int] | None = None,
    ) -> None:
        self._options = DeepSpeedOptions(tuple(allow), groups, layout, vocab, cuts)

    def marks(self, name: str) -> bool:
        """Whether a folder with a file of this name is a tag folder."""
        return is_model_or_optimizer(name)

    def find(self, store: Store) -> bool:
        """Whether this folder has `latest`, or model states as DeepSpeed names them."""
        return looks_like_deepspeed(store)

    def open(self, store: Store) -> OpenDeepSpeed | OpenUniversal:
        """Open the checkpoint that `latest` or `latest_universal` names, or the tag folder that the store is rooted at.

        Reads kilobytes of the model states and layer files, and of the first data-parallel rank's optimizer file of
        each model-parallel rank. The other ranks' must exist, and are opened when their extents are wanted.
        """
        tag = find_tag(store)
        if is_universal(store, tag):
            from ucformat.sources.deepspeed.universal import OpenUniversal

            return OpenUniversal(store, tag, self._options)
        from ucformat.sources.deepspeed.opened import OpenDeepSpeed

        return OpenDeepSpeed(store, list_files(store, tag), self._options)
