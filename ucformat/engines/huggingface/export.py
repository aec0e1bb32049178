"""The exporter of safetensors files, as Hugging Face's tools load them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.errors import UnsupportedError, UsageError
from ucformat.exporters.adapter import adapter_names, is_wrapped
from ucformat.exporters.base import (
    Exporter,
    ExportOptions,
    Link,
    Span,
    Target,
    TargetFile,
    left_out,
    option,
    weights_of,
)
from ucformat.exporters.safetensors import DTYPE_NAMES, MODEL, SHARD_BYTES, files_of, header_of
from ucformat.reading.readable import PART_OF

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

_ENDING = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class SafetensorsOptions(ExportOptions):
    """The options of `SafetensorsExporter`."""

    max_shard_bytes: int = option(
        SHARD_BYTES,
        "size",
        "maximum size of a file, unless a single tensor is larger; 5 GB by default",
    )
    name: str = option(
        MODEL,
        "text",
        "the name of the files without its ending; with it, of a single file; `model` by default",
    )
    assets: str | None = option(
        None,
        "path",
        "a folder whose config.json, tokenizer and similar files are used, before those of the "
        "checkpoint",
    )

    link: str | None = option(
        None,
        "link",
        "share the bytes of the checkpoint's own safetensors files instead of copying them, by "
        "reflinks, or with "
        "`hard` by hard links",
    )
    read_only: bool = option(
        False,
        "flag",
        "with hard links, remove the permission to write from the checkpoint's own files, so "
        "that nobody damages them",
    )

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise UsageError(f"max_shard_bytes must be at least 1, not {self.max_shard_bytes}")
        if self.link not in (None, "reflink", "hard"):
            raise UsageError(
                f"there are no links of the kind {self.link!r}", hint="there are: reflink, hard"
            )


class SafetensorsExporter(Exporter):
    """Plans safetensors files for Hugging Face."""

    kind = "safetensors"
    title = "safetensors (Hugging Face)"
    summary = "safetensors files for Hugging Face, vLLM and others."
    weights_only = True
    dtypes = DTYPE_NAMES
    endings = (_ENDING,)
    options_type = SafetensorsOptions

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        if self.options.link is not None:
            return self._linked(source, infos)
        if self.one_file:
            name, most = self.options.name[: -len(_ENDING)], sum(i.nbytes for i in infos)
            files = files_of(infos, source.aliases, name, most, source.metadata.part_of)
            return Target(tuple(files), left_out(source, infos, part=True))
        if is_wrapped(info.name for info in infos):
            return self._adapter(source, infos)
        name, most = self.options.name, self.options.max_shard_bytes
        files = files_of(infos, source.aliases, name, most, source.metadata.part_of)
        assets = self._assets(source)
        last = (TargetFile.of(name, data, last=True) for name, data in assets.items())
        return Target((*files, *last), left_out(source, infos, assets=assets, part=True))

    def _adapter(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """The files of the adapter alone of a model that PEFT has wrapped."""
        assets = self._assets(source)
        named = sorted(
            adapter_names(source, infos, assets).items(), key=lambda item: -item[1].itemsize
        )
        header = header_of(named, {"format": "pt"})
        name = "adapter_model" if self.options.name == MODEL else self.options.name
        file = TargetFile.of(f"{name}{_ENDING}", header, *(Span.whole(info) for _, info in named))
        of_base = ("config.json", "generation_config.json")
        beside = {name: data for name, data in assets.items() if name not in of_base}
        last = (TargetFile.of(name, data, last=True) for name, data in beside.items())
        return Target((file, *last), left_out(source, [info for _, info in named], assets=beside))

    def _linked(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """Links to the files of a source that are safetensors files already."""
        source_files = _own_files(source)
        placed = source.origin.metadata.tensor_list.placed().tensors
        whole = {info.key for info in weights_of(placed)}
        if not source_files or source.steps or {info.key for info in infos} != whole:
            raise UnsupportedError(
                f"{source.url} has no safetensors files with exactly these tensors, so there is "
                "nothing to link",
                hint="leave out --link for a copy",
            )
        hard, read_only = self.options.link == "hard", self.options.read_only
        assets = self._assets(source)
        files = []
        for name, (key, size) in source_files.items():
            if name not in assets:
                link, is_last = Link(key, hard, read_only), name.endswith(".json")
                files.append(TargetFile(name, size, tuple, last=is_last, link=link))
        last = [TargetFile.of(name, data, last=True) for name, data in assets.items()]
        part = PART_OF in source.objects.get("metadata", {})
        left = left_out(source, infos, assets=assets, part=part)
        return Target((*sorted(files, key=lambda f: f.last), *last), left)

    def _assets(self, source: Checkpoint) -> dict[str, bytes]:
        """The files beside the tensors, by name."""
        # the options do not need these
        from ucformat.sources.model_files import find_assets
        from ucformat.storage.base import Info
        from ucformat.storage.url import open_store
        from ucformat.views.outdated import outdated

        names = find_assets(Info(name, 0, "") for name in source.assets)
        # of a sub-model, the whole model's sizes
        wrong = outdated(source.viewed, source.assets, source.objects)
        assets = {name: source.assets[name] for name in names if name not in wrong}
        if self.options.assets is not None:
            store = open_store(self.options.assets)
            beside = find_assets(store.list())
            if not beside:
                raise UsageError(f"{store.url} has no config.json, tokenizer or similar file")
            assets |= {name: store.read(name) for name in beside}
        return assets


def _own_files(source: Checkpoint) -> dict[str, tuple[str, int]]:
    """The safetensors files of which a source consists, with their keys and sizes, by the name that loaders expect.

    An index names its shards by their paths below its folder, so they keep them.
    """
    if source.foreign is not None:
        keys = source.metadata.files if source.kind == "safetensors" else ()
        return {key: (key, source.store.info(key).size) for key in keys}
    folder = source.universal.weights_folder if source.universal else None
    if folder is None:
        return {}
    return {i.key.removeprefix(f"{folder}/"): (i.key, i.size) for i in source.store.list(folder)}
