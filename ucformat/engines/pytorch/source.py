"""The sources for checkpoints of torch.distributed.checkpoint, and for files of torch.save."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from ucformat.errors import MissingData, NotFound, UcformatError, UnsupportedError
from ucformat.sources.base import PickleOptions, Source, groups_by_optimizer, option
from ucformat.sources.distcp import METADATA, SHARD, ItemOptions
from ucformat.sources.model_files import BIN_INDEX as INDEX
from ucformat.sources.model_files import ModelFiles, file_assets, find_assets, root_files
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.engines.pytorch.dcp_shards import OpenShards
    from ucformat.sources.distcp.opened import OpenDcp
    from ucformat.sources.torch_save import OpenTorchSave
    from ucformat.storage.base import Store

__all__ = ["Dcp", "TorchSave"]

_RANK_METADATA = "__0" + METADATA  # of a rank that saved without collectives
_ITEM_FILE = re.compile(r"__\d+_\d+\.distcp")
_METADATA_MODULE = b"torch.distributed.checkpoint.metadata"
_HEAD = 512  # bytes of `.metadata` that are read to recognise it
_MAX_LISTED = 10_000


class Dcp(Source):
    """Recognises and opens checkpoints of torch.distributed.checkpoint."""

    kind = "dcp"
    title = "PyTorch DCP"
    before = ("safetensors", "torch_save")
    options_type = ItemOptions
    options: ItemOptions

    def is_marker(self, name: str) -> bool:
        """Whether only a DCP checkpoint has a file of this name."""
        return name in (METADATA, _RANK_METADATA) or SHARD.fullmatch(name) is not None

    def find(self, store: Store) -> bool:
        """Whether the folder has DCP's `.metadata`, shards of its safetensors writer, or files of ranks."""
        heads = (_head(store, name) for name in (METADATA, _RANK_METADATA))
        return (
            any(_METADATA_MODULE in head for head in heads)
            or _has_shards(store)
            or _has_items(store)
        )

    def open(self, store: Store) -> OpenDcp | OpenShards:
        """Open it: read `.metadata`, and the items of the training step; other items are read when needed."""
        if not _head(store, METADATA):
            if _has_shards(store):
                from ucformat.engines.pytorch.dcp_shards import OpenShards

                return OpenShards(store)
            if not exists(store, _RANK_METADATA) and _has_items(store):
                raise MissingData(
                    f"{store.url} has files of ranks, and no {METADATA} (or an empty one), which "
                    "describes them",
                    hint=(
                        "the save did not finish, or the file was not copied: its name begins "
                        "with a dot"
                    ),
                )
            raise UnsupportedError(
                f"{store.url} was saved without collectives: each rank has metadata of its own",
                hint=(
                    "save with torch.distributed.checkpoint.save(…, no_dist=False, "
                    "use_collectives=True)"
                ),
            )
        from ucformat.sources.distcp.metadata import Items, read_metadata
        from ucformat.sources.distcp.opened import OpenDcp

        options = self.options
        items = Items(store, read_metadata(store, allow=options.allow), options.allow)
        return OpenDcp(items, options.groups, options.owners)


def _has_items(store: Store) -> bool:
    """Whether a folder has files of ranks, such as `__0_0.distcp`."""
    return any(_ITEM_FILE.fullmatch(info.key) for info in islice(store.list(), _MAX_LISTED))


def _has_shards(store: Store) -> bool:
    """Whether a folder has shards of DCP's safetensors writer, by names and the first's metadata."""
    name = next(
        (info.key for info in islice(store.list(), _MAX_LISTED) if SHARD.fullmatch(info.key)), None
    )
    if name is None:
        return False
    from ucformat.sources.safetensors import SHARDING_INFO, read_header

    try:
        return SHARDING_INFO in read_header(store, name).metadata
    except (NotFound, UcformatError):
        return True  # no other program writes such names: opening it reports the problem


def _head(store: Store, key: str) -> bytes:
    """The first bytes of a file; empty if there is no such file."""
    try:
        return store.read(key, 0, min(_HEAD, store.info(key).size))
    except NotFound:
        return b""


_MAX_PROBED = 10  # files whose first bytes are read to recognise a folder
_PROBED_BYTES = 256  # bytes of a file that are read to recognise it
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pth.tar")
_INNER = re.compile(r"\.(pt|pth|ckpt|bin)[-._]")  # an ending with more behind it: `model.pt.rank0`
_ITEMS_SUFFIX = ".distcp"  # several archives, one after another
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
        "the parameters of each group, in order, by the path of an optimizer (`optimizer`); if "
        "there is only one, its "
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
        """Whether the folder has a file of torch.save, by names and first bytes."""
        return any(_candidates(store, root_files(store), _MAX_PROBED))

    def open(self, store: Store) -> OpenTorchSave:
        """Open the only checkpoint of a folder."""
        from ucformat.sources.torch_save import choose_files

        infos, part = root_files(store), self.options.part is True
        keys, index = choose_files(list(_candidates(store, infos)), store.url, part=part)
        return self._open(
            ModelFiles(store, keys, index, find_assets(infos.values(), keys), part=part)
        )

    def find_file(self, store: Store, key: str) -> bool:
        """Whether the file begins as torch's files do, or is named as a model's."""
        return not key.endswith(_ITEMS_SUFFIX) and _looks_like_torch_save(store, key)

    def open_file(self, store: Store, key: str) -> OpenTorchSave:
        """Open a single file, or an index with its shards."""
        part, assets = self.options.part is True, file_assets(store, key)
        named, index = ([], key) if key.endswith(INDEX) else ([key], None)
        return self._open(ModelFiles(store, named, index, assets, folder=key, part=part))

    def _open(self, model: ModelFiles) -> OpenTorchSave:
        from ucformat.sources.torch_save import OpenTorchSave

        groups = groups_by_optimizer(self.options.groups)
        return OpenTorchSave(model, self.options.allow, groups)


def _is_named_as_model(name: str) -> bool:
    """Whether the file is named as a model's."""
    return _MODEL.fullmatch(name) is not None or name.endswith((INDEX, ".ckpt"))


def _looks_like_torch_save(store: Store, key: str) -> bool:
    """Whether a file begins as torch's do, or is named as a model's."""
    if _is_named_as_model(key):
        return True
    head = store.read(key, 0, min(_PROBED_BYTES, store.info(key).size))
    if head.startswith(_LEGACY):
        return True
    # the name of an archive's first file
    first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return head.startswith(_ZIP) and (
        key.endswith(_SUFFIXES) or _PICKLE.fullmatch(first) is not None
    )


def _candidates(store: Store, names: Mapping[str, Any], most: int | None = None) -> Iterator[str]:
    """The files of a folder that may be its checkpoint, the likeliest first; checks at most `most`."""
    here = [n for n in names if "/" not in n and not _OTHER_FILE.fullmatch(n)]
    suffixed = [n for n in here if n.endswith((*_SUFFIXES, INDEX))]
    likely = sorted(suffixed, key=lambda n: (not n.endswith(INDEX), not _MODEL.fullmatch(n), n))
    count = 0
    for name in likely[:most]:
        if name.endswith(INDEX) or _looks_like_torch_save(store, name):
            count += 1
            yield name
    if not count:
        plain = [n for n in here if "." not in n or n.endswith(_ODD) or _INNER.search(n)]
        yield from (n for n in sorted(plain)[:_MAX_PROBED] if _looks_like_torch_save(store, n))
