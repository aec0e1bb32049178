"""The source for safetensors files, and which files of a folder are its checkpoint.

An index (`model.safetensors.index.json`) names its shards; without one, numbered files
(`model-00001-of-00003. safetensors`) are a set; otherwise there is one file. If a folder has
several of these, the only one with a name that Hugging Face loads as the model is used.
`consolidated*.safetensors`, a second copy of the weights in Mistral's folders, is used only if
there is nothing else.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING

from ucformat.errors import UsageError, first_names
from ucformat.sources.base import Source
from ucformat.sources.model_files import (
    ModelFiles,
    complete_shards,
    file_assets,
    file_sets,
    find_assets,
    root_files,
)
from ucformat.sources.parts import parts_of_one
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucformat.sources.model_files import FileSet
    from ucformat.sources.safetensors import OpenSafetensors
    from ucformat.storage.base import Store

__all__ = ["Safetensors", "choose"]

_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"
_MODEL_STEMS = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")
_DUPLICATE = "consolidated*" + _SUFFIX


class Safetensors(Source):
    """Recognises and opens safetensors files: a single one, or those of a folder."""

    kind = "safetensors"
    title = "safetensors"
    before = ("torch_save",)

    def is_marker(self, name: str) -> bool:
        """Whether it is a safetensors file, or the index of several."""
        return name.endswith((_SUFFIX, _INDEX))

    def find(self, store: Store) -> bool:
        """Whether the folder has such a file, or is a pipeline with models in subfolders."""
        if exists(store, "model" + _SUFFIX) or exists(store, "model_index.json"):
            return True
        return any("/" not in key and self.is_marker(key) for key in root_files(store))

    def open(self, store: Store) -> OpenSafetensors:
        """Open the only checkpoint of a folder; reads the header of each of its files."""
        from ucformat.sources.safetensors import OpenSafetensors

        infos, part = root_files(store), self.options.part is True
        files, index = choose(infos, store.url, part=part)
        assets = find_assets(infos.values())
        return OpenSafetensors(ModelFiles(store, files, index, assets, part=part))

    def find_file(self, store: Store, key: str) -> bool:  # noqa: ARG002 - the name suffices
        """Whether the file is named as a safetensors file, or as the index of several."""
        return self.is_marker(key)

    def open_file(self, store: Store, key: str) -> OpenSafetensors:
        """Open a single file, or an index with its shards."""
        from ucformat.sources.safetensors import OpenSafetensors

        part, assets = self.options.part is True, file_assets(store, key)
        named, index = ([], key) if key.endswith(_INDEX) else ([key], None)
        return OpenSafetensors(ModelFiles(store, named, index, assets, folder=key, part=part))


def choose(names: Iterable[str], url: str, *, part: bool = False) -> FileSet:
    """The files of a folder that are its checkpoint, and the key of their index or None."""
    names = list(names)
    candidates = [n for n in names if "/" not in n and n.endswith((_SUFFIX, _INDEX))]
    if not candidates:
        raise _pipeline([n for n in names if n.count("/") == 1 and n.endswith(_SUFFIX)], url)
    sets = file_sets(candidates, _INDEX)
    if len(sets) > 1:
        without = {name: chosen for name, chosen in sets.items() if not fnmatch(name, _DUPLICATE)}
        models = {name: chosen for name, chosen in without.items() if _stem(name) in _MODEL_STEMS}
        sets = without if len(without) == 1 else models if len(models) == 1 else sets
    if len(sets) > 1:
        if (error := parts_of_one(sets, url)) is not None:
            raise error
        raise UsageError(
            f"{url} holds several safetensors checkpoints: {first_names(sets, 10)}",
            hint=f"open one of them: {url}/{next(iter(sets))}",
        )
    ((files, index),) = sets.values()
    return complete_shards(files, part=part), index


def _stem(name: str) -> str:
    return name.removesuffix(_INDEX).removesuffix(_SUFFIX).partition("-*-of-")[0]


def _pipeline(files: Sequence[str], url: str) -> UsageError:
    """The error for a folder whose subfolders are checkpoints (a diffusers pipeline)."""
    folders = list(dict.fromkeys(f.partition("/")[0] for f in files))
    return UsageError(
        f"{url} is a pipeline of several models: {first_names(folders, 10)}",
        hint=f"open one of its folders: {url}/{folders[0]}"
        if folders
        else "there are no safetensors files in it",
    )
