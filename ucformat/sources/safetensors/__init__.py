"""safetensors files as tensors and extents: which files of a folder are the checkpoint.

An index (`model.safetensors.index.json`) names its shards; without one, numbered files (`model-00001-of-00003.
safetensors`) are a set; else there is one file. Where several of these stand side by side, the one that Hugging Face
would load as the model counts if only one has such a name; `consolidated*.safetensors`, a second copy of the same
weights in Mistral's folders, counts only by itself.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING

from ucformat.errors import UnsupportedError, UsageError
from ucformat.sources.base import Source
from ucformat.sources.model_files import complete_shards, file_sets, find_assets, parse_shard_name, root_files
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucformat.sources.model_files import FileSet
    from ucformat.sources.safetensors.opened import OpenSafetensors
    from ucformat.storage.base import Store

__all__ = ["Safetensors", "choose"]

_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"
_MODELS = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")
_COPY = "consolidated*" + _SUFFIX
_NAMED = 10


class Safetensors(Source):
    """How safetensors files are recognised and opened: one by itself, or those of a folder."""

    kind = "safetensors"
    title = "safetensors"
    before = ("torch_save",)

    def is_marker(self, name: str) -> bool:
        """Whether it is a safetensors file, or the index of several."""
        return name.endswith((_SUFFIX, _INDEX))

    def find(self, store: Store) -> bool:
        """Whether the folder has such a file, or is a pipeline whose folders have."""
        if exists(store, "model" + _SUFFIX) or exists(store, "model_index.json"):
            return True
        return any("/" not in key and self.is_marker(key) for key in root_files(store))

    def open(self, store: Store) -> OpenSafetensors:
        """Open the one checkpoint of a folder; reads the header of each of its files."""
        from ucformat.sources.safetensors.opened import OpenSafetensors

        infos = root_files(store)
        return OpenSafetensors(store, *choose(infos, store.url), find_assets(infos.values()))

    def find_file(self, store: Store, key: str) -> bool:  # noqa: ARG002 - its name says all
        """Whether it is such a file by its name."""
        return self.is_marker(key)

    def open_file(self, store: Store, key: str) -> OpenSafetensors:
        """Open a file alone, or an index with the shards that it names."""
        from ucformat.sources.safetensors.opened import OpenSafetensors

        if key.endswith(_INDEX):
            return OpenSafetensors(store, [], key, (), folder=key)
        found = parse_shard_name(key)
        if found and found[2] > 1:
            index = next((n for n in root_files(store) if n.endswith(_INDEX)), None)
            raise UnsupportedError(
                f"{key} is one of {found[2]} shards of a checkpoint, not a whole one",
                hint=f"open {index}" if index else "open the folder that it lies in",
            )
        return OpenSafetensors(store, [key], None, (), folder=key)


def choose(names: Iterable[str], url: str) -> FileSet:
    """The checkpoint among the files of a folder; UsageError where it is not clear which is meant."""
    names = list(names)
    own = [n for n in names if "/" not in n and n.endswith((_SUFFIX, _INDEX))]
    if not own:
        raise _pipeline([n for n in names if n.count("/") == 1 and n.endswith(_SUFFIX)], url)
    sets = file_sets(own, _INDEX)
    if len(sets) > 1:
        without = {name: chosen for name, chosen in sets.items() if not fnmatch(name, _COPY)}
        models = {name: chosen for name, chosen in without.items() if _stem(name) in _MODELS}
        sets = without if len(without) == 1 else models if len(models) == 1 else sets
    if len(sets) > 1:
        raise UsageError(
            f"{url} holds several safetensors checkpoints: {_listed(sets)}",
            hint=f"open the one that is meant: {url}/{next(iter(sets))}",
        )
    ((files, index),) = sets.values()
    return complete_shards(files), index


def _stem(name: str) -> str:
    return name.removesuffix(_INDEX).removesuffix(_SUFFIX).partition("-*-of-")[0]


def _pipeline(files: Sequence[str], url: str) -> UsageError:
    """What to say of a folder whose folders are checkpoints (a diffusers pipeline)."""
    folders = list(dict.fromkeys(f.partition("/")[0] for f in files))
    return UsageError(
        f"{url} is a pipeline of several models: {_listed(folders)}",
        hint=f"open one of its folders: {url}/{folders[0]}" if folders else "there are no safetensors files in it",
    )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
