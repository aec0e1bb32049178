"""The source for files of `torch.save`, and which files of a folder are its checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.sources.base import PickleOptions, Source, groups_by_optimizer, option
from ucformat.sources.model_files import (
    BIN_INDEX as INDEX,
)
from ucformat.sources.model_files import (
    file_assets,
    find_assets,
    root_files,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.sources.torch_save import OpenTorchSave
    from ucformat.storage.base import Store

__all__ = ["TorchSave"]

_MAX_PROBED = 10  # files whose first bytes are read to recognise a folder
_HEAD = 256  # bytes of a file that are read to recognise it
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pth.tar")
_INNER = re.compile(r"\.(pt|pth|ckpt|bin)[-._]")  # an ending with more behind it: `model.pt.rank0`
_ITEMS = ".distcp"  # several archives, one after another
_PROGRAMS = (".pt", ".pth", ".pth.tar")
# endings that people give to such files
_ODD = (".pkl", ".tar", ".model", ".state", ".weights", ".chkpt", ".torch")
_MODEL = re.compile(
    r"pytorch_model(-\d{5,}-of-\d{5,})?\.bin|adapter_model\.bin|consolidated\.\d+\.pth"
)
_OTHER_FILE = re.compile(
    r"(training_args|optimizer|distrib_optim|scheduler|scaler|sampler|rng_state|random_states|dl_state_dict|"
    r"custom_checkpoint)[_\d]*\.\w+"
)
# of DeepSpeed's universal format
_ATOM = re.compile(r"(fp32|exp_avg|exp_avg_sq|step|optimizer_state)\.pt")
_PICKLE = re.compile(rb"[^/]+/data\.pkl")
_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True, kw_only=True)
class TorchSaveOptions(PickleOptions):
    """The options of `TorchSave`."""

    groups: Mapping[str, Sequence[Sequence[str]]] | Sequence[Sequence[str]] | None = option(
        None,
        "document",
        "the parameters of each group, in order, by the path of an optimizer (`optimizer`); if there is only one, its "
        "groups suffice",
    )


class TorchSave(Source):
    """Recognises and opens files of torch.save: a single one, or that of a folder."""

    kind = "torch_save"
    title = "torch.save"
    options_type = TorchSaveOptions
    options: TorchSaveOptions

    def is_marker(self, name: str) -> bool:
        """Whether the file is named as a model's, or as a checkpoint of some program."""
        if _is_named_as_model(name):
            return True
        return name.endswith(_PROGRAMS) and not (
            _OTHER_FILE.fullmatch(name) or _ATOM.fullmatch(name)
        )

    def find(self, store: Store) -> bool:
        """Whether the folder has a file of torch.save; reads the first bytes of files whose names allow it."""
        return any(_candidates(store, root_files(store), _MAX_PROBED))

    def open(self, store: Store) -> OpenTorchSave:
        """Open the only checkpoint of a folder."""
        from ucformat.sources.torch_save import OpenTorchSave, choose_files

        infos = root_files(store)
        groups, part = groups_by_optimizer(self.options.groups), self.options.part is True
        keys, index = choose_files(list(_candidates(store, infos)), store.url, part=part)
        assets = find_assets(infos.values(), keys)
        return OpenTorchSave(store, keys, index, self.options.allow, groups, assets, part=part)

    def find_file(self, store: Store, key: str) -> bool:
        """Whether the file begins as torch's files do, or is named as a model's."""
        return not key.endswith(_ITEMS) and _looks_like_torch_save(store, key)

    def open_file(self, store: Store, key: str) -> OpenTorchSave:
        """Open a single file, or an index with its shards."""
        from ucformat.sources.torch_save import OpenTorchSave

        index = key if key.endswith(INDEX) else None
        groups, part = groups_by_optimizer(self.options.groups), self.options.part is True
        keys, assets = [] if index else [key], file_assets(store, key)
        return OpenTorchSave(
            store, keys, index, self.options.allow, groups, assets, folder=key, part=part
        )


def _is_named_as_model(name: str) -> bool:
    """Whether the file is named as a model's."""
    return _MODEL.fullmatch(name) is not None or name.endswith((INDEX, ".ckpt"))


def _looks_like_torch_save(store: Store, key: str) -> bool:
    """Whether a file begins as torch's do, or is named as a model's."""
    if _is_named_as_model(key):
        return True
    head = store.read(key, 0, min(_HEAD, store.info(key).size))
    if head.startswith(_LEGACY):
        return True
    # the name of an archive's first file
    first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return head.startswith(_ZIP) and (
        key.endswith(_SUFFIXES) or _PICKLE.fullmatch(first) is not None
    )


def _candidates(store: Store, names: Mapping[str, Any], most: int | None = None) -> Iterator[str]:
    """The files of a folder that may be its checkpoint, the most likely first; checks at most `most` of them."""
    here = [n for n in names if "/" not in n and not _OTHER_FILE.fullmatch(n)]
    own = [n for n in here if n.endswith((*_SUFFIXES, INDEX))]
    likely = sorted(own, key=lambda n: (not n.endswith(INDEX), not _MODEL.fullmatch(n), n))
    found = 0
    for name in likely[:most]:
        if name.endswith(INDEX) or _looks_like_torch_save(store, name):
            found += 1
            yield name
    if not found:
        plain = [n for n in here if "." not in n or n.endswith(_ODD) or _INNER.search(n)]
        yield from (n for n in sorted(plain)[:_MAX_PROBED] if _looks_like_torch_save(store, n))
