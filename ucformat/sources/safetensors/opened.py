"""safetensors checkpoints, read in place: one file, or the shards of one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, Refused
from ucformat.reading.readable import Facts
from ucformat.sources.contents import Contents
from ucformat.sources.model_files import check_index, check_shards, present, read_weight_map
from ucformat.sources.safetensors.header import Header, read_header
from ucformat.sources.values import to_json
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Key
    from ucformat.reading.readable import Record
    from ucformat.sources.safetensors.folder import Chosen
    from ucformat.storage.base import Store

__all__ = ["OpenSafetensors"]

_CUT = "DCP_SHARDING_INFO"  # in `__metadata__`: PyTorch DCP cut the tensors over the files


class OpenSafetensors:
    """One opened checkpoint of safetensors files."""

    kind = "safetensors"

    def __init__(self, store: Store, chosen: Chosen, assets: Sequence[str], folder: str = "") -> None:
        self.store = store
        self.contents = Contents()
        weight_map: dict[str, str] | None = None
        index_metadata: dict[str, Any] = {}
        keys = list(chosen.files)
        if chosen.index is not None:
            weight_map, index_metadata = read_weight_map(store, chosen.index)
            keys = check_index(weight_map, chosen.index, present(store, weight_map))
        headers = _read_all(store, keys)
        if weight_map is not None and chosen.index is not None:
            check_shards(weight_map, chosen.index, {h.file: h.tensors for h in headers})
        for header in headers:
            _add(header, self.contents)
        objects = _metadata(headers)
        if index_metadata:
            objects["index"] = to_json(index_metadata)
        self.facts = Facts(
            roster=self.contents.roster(),
            aliases=_aliases(headers, self.contents),
            objects=objects,
            assets=tuple(assets),
            engine={"name": "safetensors"},
            files=tuple(([chosen.index] if chosen.index else []) + keys),
            folder=folder,
        )

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """Where the bytes of a tensor lie: in one file, one after another."""
        return self.contents.extents(key, within, self.store.url)

    def records(self) -> Iterator[Record]:
        """None: safetensors keeps no checksums."""
        return iter(())


def _read_all(store: Store, keys: Sequence[str]) -> list[Header]:
    return map_io(lambda key: read_header(store, key), keys)


def _add(header: Header, contents: Contents) -> None:
    """The tensors of a file."""
    if _CUT in header.metadata:
        raise Refused(
            f"{header.file} was saved by PyTorch's HuggingFaceStorageWriter, which cuts tensors over files",
            hint="open the folder that it wrote as a DCP checkpoint, or consolidate it with PyTorch",
        )
    for name, stored in header.tensors.items():
        try:
            contents.add(name, "weight", stored.dtype, stored.shape, partial(header.extents, name))
        except IntegrityError as error:
            raise IntegrityError(
                f"{name!r} stands in {header.file} and in another file of the checkpoint",
                hint="files of different saves are mixed in one folder; move those that do not belong elsewhere",
            ) from error


def _aliases(headers: Sequence[Header], contents: Contents) -> dict[str, str]:
    """Tied names, where `safetensors.torch.save_model` dropped them: it says so in the metadata, name by name."""
    names = {key.name for key in contents.infos}
    told = {k: v for header in headers for k, v in header.metadata.items()}
    return {alias: name for alias, name in told.items() if name in names and alias not in names}


def _metadata(headers: Sequence[Header]) -> dict[str, Any]:
    """`__metadata__` as an object: one where all files have the same, else by file."""
    first = headers[0].metadata
    if all(h.metadata == first for h in headers):
        return {"metadata": to_json(first)} if first else {}
    return {"metadata": {h.file: to_json(h.metadata) for h in headers}}
