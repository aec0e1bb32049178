"""Which files are of `torch.save`: by their names and first bytes; and which of a folder's are its checkpoint."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ucformat.errors import Refused, UsageError
from ucformat.sources.deepspeed.folder import is_model_or_optimizer
from ucformat.sources.model_files import complete, numbered, root_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.storage.base import Store

__all__ = ["INDEX", "candidates", "check_whole", "choose_files", "is_mark", "looks_like_torch_save"]

INDEX = ".bin.index.json"

_NAMED = 10
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pth.tar")
_MODEL = re.compile(r"pytorch_model(-\d{5,}-of-\d{5,})?\.bin|adapter_model\.bin|consolidated\.\d+\.pth")
_CUT = re.compile(r"consolidated\.(\d+)\.pth")
_BESIDE = re.compile(
    r"(training_args|optimizer|scheduler|scaler|sampler|rng_state|random_states|dl_state_dict)[_\d]*\.\w+"
)
_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def is_mark(name: str) -> bool:
    """Whether it is a model's file by its name."""
    return _MODEL.fullmatch(name) is not None or name.endswith((INDEX, ".ckpt"))


def looks_like_torch_save(store: Store, key: str) -> bool:
    """Whether a file begins as torch's do, or is called as a model's file."""
    if is_model_or_optimizer(key) or not key.endswith((*_SUFFIXES, INDEX)):
        return False
    if is_mark(key):
        return True
    return store.read(key, 0, min(len(_LEGACY), store.info(key).size)).startswith((_ZIP, _LEGACY))


def candidates(store: Store, names: Mapping[str, Any], most: int | None = None) -> Iterator[str]:
    """The files of a folder that may be its checkpoint, the most likely first; of `most`, by their names, at most."""
    own = [n for n in names if "/" not in n and n.endswith((*_SUFFIXES, INDEX)) and not _BESIDE.fullmatch(n)]
    likely = sorted(own, key=lambda n: (not n.endswith(INDEX), not _MODEL.fullmatch(n), n))
    return (n for n in likely[:most] if n.endswith(INDEX) or looks_like_torch_save(store, n))


def check_whole(store: Store, key: str) -> None:
    """Refused where a file is by its name one part of a checkpoint."""
    found = numbered(key)
    if found and found[2] > 1:
        raise Refused(
            f"{key} is one of {found[2]} shards of a checkpoint, not a whole one",
            hint="open the folder that it lies in",
        )
    if _CUT.fullmatch(key):
        choose_files([n for n in root_files(store) if _CUT.fullmatch(n)], store.url)


def choose_files(names: Sequence[str], url: str) -> tuple[list[str], str | None]:
    """The files of the one checkpoint, or its index; UsageError where it is not clear which is meant."""
    cut = [n for n in names if _CUT.fullmatch(n)]
    if len(cut) > 1:
        raise Refused(
            f"{url} holds a model cut over {len(cut)} ranks ({cut[0]} to {cut[-1]}), and no file says how",
            hint="convert it with the tool of its makers (for Llama: transformers' convert_llama_weights_to_hf.py)",
        )
    indexes = [n for n in names if n.endswith(INDEX)]
    stems = {n.removesuffix(INDEX) for n in indexes}
    sets: dict[str, list[str]] = {n: [] for n in indexes}
    for name in (n for n in names if n not in sets):
        found = numbered(name)
        common = found[0] if found else name
        if common.rpartition("-*-of-")[0] not in stems:
            sets.setdefault(common, []).append(name)
    usual = [n for n in sets if n.startswith("pytorch_model") or n == "adapter_model.bin"]
    chosen = list(sets) if len(sets) == 1 else usual
    if len(chosen) != 1:
        more = f" and {len(sets) - _NAMED} more" if len(sets) > _NAMED else ""
        raise UsageError(
            f"{url} holds several files of torch.save: {', '.join(list(sets)[:_NAMED])}{more}",
            hint=f"open the one that is meant: {url}/{next(iter(sets))}",
        )
    files = sets[chosen[0]]
    if not files:
        return [], chosen[0]
    return (complete(files) if numbered(files[0]) else files), None
