"""How files of `torch.save` are recognised: one by itself, or that of a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.sources.model_files import find_assets, root_files
from ucformat.sources.options import groups_by_optimizer
from ucformat.sources.torch_save.folder import (
    INDEX,
    candidates,
    check_whole,
    choose_files,
    is_mark,
    looks_like_torch_save,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.sources.torch_save.opened import OpenTorchSave
    from ucformat.storage.base import Store

__all__ = ["TorchSave"]

_LOOK = 10  # files whose first bytes are read to recognise a folder


class TorchSave:
    """How files of torch.save are recognised and opened: one by itself, or that of a folder.

    `allow` names packages of your own whose pickled classes become inert stand-ins instead of being refused. `groups`
    gives, by the path of an optimizer's state dict (`optimizer`), the parameters of each of its groups, in order; of
    one optimizer at that path the groups alone do.
    """

    kind = "torch_save"
    title = "torch.save"

    def __init__(
        self,
        *,
        allow: Sequence[str] = (),
        groups: Mapping[str, Sequence[Sequence[str]]] | Sequence[Sequence[str]] | None = None,
    ) -> None:
        self._allow, self._groups = tuple(allow), groups_by_optimizer(groups)

    def marks(self, name: str) -> bool:
        """Whether it is a model's file by its name."""
        return is_mark(name)

    def find(self, store: Store) -> bool:
        """Whether the folder has a file of torch.save; reads the first bytes of such as may be one by their names."""
        return any(candidates(store, root_files(store), _LOOK))

    def open(self, store: Store) -> OpenTorchSave:
        """Open the one checkpoint of a folder."""
        from ucformat.sources.torch_save.opened import OpenTorchSave

        infos = root_files(store)
        keys, index = choose_files(list(candidates(store, infos)), store.url)
        return OpenTorchSave(store, keys, index, self._allow, self._groups, find_assets(infos.values(), keys))

    def find_file(self, store: Store, key: str) -> bool:
        """Whether it begins as torch's files do, or is called as a model's file."""
        return looks_like_torch_save(store, key)

    def open_file(self, store: Store, key: str) -> OpenTorchSave:
        """Open a file alone, or an index with the shards that it names."""
        from ucformat.sources.torch_save.opened import OpenTorchSave

        check_whole(store, key)
        index = key if key.endswith(INDEX) else None
        return OpenTorchSave(store, [] if index else [key], index, self._allow, self._groups, (), folder=key)
