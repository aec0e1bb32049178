"""Which safetensors files of a folder are the checkpoint.

An index (`model.safetensors.index.json`) names its shards; without one, numbered files (`model-00001-of-00003.
safetensors`) are a set; else there is one file. Where several of these stand side by side, the one that Hugging Face
would load as the model counts if only one has such a name; `consolidated*.safetensors`, a second copy of the same
weights in Mistral's folders, counts only by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from ucformat.errors import Refused, UsageError
from ucformat.sources.model_files import complete, numbered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["INDEX", "SUFFIX", "Chosen", "choose", "choose_file"]

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
_MODELS = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")
_COPY = "consolidated*" + SUFFIX
_NAMED = 10


@dataclass(frozen=True, slots=True)
class Chosen:
    """The files of one checkpoint: an index, whose shards it names, or the files themselves."""

    index: str | None
    files: tuple[str, ...]


def choose(names: Iterable[str], url: str) -> Chosen:
    """The checkpoint among the files of a folder; UsageError where it is not clear which is meant."""
    names = list(names)
    own = [n for n in names if "/" not in n and n.endswith((SUFFIX, INDEX))]
    if not own:
        raise _parts([n for n in names if n.count("/") == 1 and n.endswith(SUFFIX)], url)
    sets = _sets(own)
    if len(sets) > 1:
        without = {name: chosen for name, chosen in sets.items() if not fnmatch(name, _COPY)}
        models = {name: chosen for name, chosen in without.items() if _stem(name) in _MODELS}
        sets = without if len(without) == 1 else models if len(models) == 1 else sets
    if len(sets) > 1:
        raise UsageError(
            f"{url} holds several safetensors checkpoints: {_listed(sets)}",
            hint=f"open the one that is meant: {url}/{next(iter(sets))}",
        )
    (chosen,) = sets.values()
    return chosen


def choose_file(key: str, names: Callable[[], Iterable[str]]) -> Chosen:
    """The checkpoint that is this one file, or index; Refused where it is one of several shards.

    `names` gives those of the files beside it, where they matter.
    """
    if key.endswith(INDEX):
        return Chosen(key, ())
    found = numbered(key)
    if found and found[2] > 1:
        index = next((n for n in names() if n.endswith(INDEX)), None)
        raise Refused(
            f"{key} is one of {found[2]} shards of a checkpoint, not a whole one",
            hint=f"open {index}" if index else "open the folder that it lies in",
        )
    return Chosen(None, (key,))


def _sets(own: Sequence[str]) -> dict[str, Chosen]:
    """The checkpoints of a folder by the name of their index, their only file, or what their shards share."""
    indexes = [n for n in own if n.endswith(INDEX)]
    stems = {n.removesuffix(INDEX) for n in indexes}
    sets = {n: Chosen(n, ()) for n in indexes}
    shards: dict[str, list[str]] = {}
    for name in (n for n in own if not n.endswith(INDEX)):
        found = numbered(name)
        if found is None:
            sets[name] = Chosen(None, (name,))
        elif found[0].rpartition("-*-of-")[0] not in stems:  # else the index says which of them count
            shards.setdefault(found[0], []).append(name)
    return {**sets, **{name: Chosen(None, tuple(complete(files))) for name, files in shards.items()}}


def _stem(name: str) -> str:
    return name.removesuffix(INDEX).removesuffix(SUFFIX).partition("-*-of-")[0]


def _parts(files: Sequence[str], url: str) -> UsageError:
    """What to say of a folder whose parts are checkpoints (a diffusers pipeline)."""
    folders = list(dict.fromkeys(f.partition("/")[0] for f in files))
    return UsageError(
        f"{url} is a pipeline of several models: {_listed(folders)}",
        hint=f"open one of its folders: {url}/{folders[0]}" if folders else "there are no safetensors files in it",
    )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
