"""How directories of Hugging Face's Trainer and Accelerate are recognised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.sources.base import Folders, groups_by_optimizer
from ucformat.sources.huggingface.folder import classify, looks_like_trainer, marks
from ucformat.sources.model_files import root_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.geometry.layout import Layout
    from ucformat.sources.huggingface.opened import OpenHuggingFace
    from ucformat.storage.base import Store

__all__ = ["HuggingFace"]


class HuggingFace(Folders):
    """How directories of Trainer (`checkpoint-500/`) and of Accelerate's `save_state` are recognised and opened.

    `allow` names packages of your own whose pickled classes become inert stand-ins instead of being refused. `groups`
    gives, by the name of an optimizer (`optimizer`), the parameters of each of its groups, in order, where the files do
    not tell them; of one optimizer the groups alone do. `layout`, `vocab` and `cuts` are for DeepSpeed inside, `owners`
    is for PyTorch DCP.
    """

    kind = "huggingface"
    title = "Hugging Face Trainer and Accelerate"

    def __init__(
        self,
        *,
        allow: Sequence[str] = (),
        groups: Mapping[str, Sequence[Sequence[str]]] | Sequence[Sequence[str]] | None = None,
        layout: Layout | str | None = None,
        vocab: int | None = None,
        cuts: Mapping[str, str | int] | None = None,
        owners: Mapping[str, str] | None = None,
    ) -> None:
        options = {"layout": layout, "vocab": vocab, "cuts": cuts, "owners": owners}
        self._options = {k: v for k, v in options.items() if v is not None}
        self._allow, self._groups = tuple(allow), groups_by_optimizer(groups)

    def marks(self, name: str) -> bool:
        """Whether only Trainer or Accelerate call a file so."""
        return marks(name)

    def find(self, store: Store) -> bool:
        """Whether the files of this folder are Trainer's or Accelerate's."""
        return looks_like_trainer(root_files(store))

    def open(self, store: Store) -> OpenHuggingFace:
        """Open it: what the engine inside reads, and the small files beside it."""
        from ucformat.sources.huggingface.engines import Told
        from ucformat.sources.huggingface.opened import OpenHuggingFace

        infos = root_files(store)
        found = classify(infos, store.url)
        return OpenHuggingFace(store, found, infos, Told(self._allow, self._groups, self._options))
