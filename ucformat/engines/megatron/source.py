"""How Megatron's checkpoints, distributed and classic ones, are recognised and opened."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from ucformat.engines.megatron.folder import (
    DIST,
    RANK_FOLDER,
    MegatronFolder,
    MegatronSourceOptions,
    backend_of,
    built_by_megatron,
    find_place,
    is_marker,
)
from ucformat.errors import NotACheckpoint, UcformatError, UnsupportedError
from ucformat.sources.base import Source

if TYPE_CHECKING:
    from ucformat.engines.megatron.classic import OpenClassic
    from ucformat.engines.megatron.dist import OpenDist, OpenFsdp
    from ucformat.storage.base import Store


__all__ = ["Megatron"]


class Megatron(Source):
    """How Megatron's checkpoints are recognised and opened."""

    kind = "megatron"
    title = "Megatron"
    before = ("dcp", "torch_save")
    packages = ("apex", "megatron", "nemo", "transformer_engine")
    part_files = MappingProxyType(
        {
            r"distrib_optim\.pt": "one rank's part of Megatron's distributed optimizer",
            r"model(_optim)?_rng\.pt": "one rank's file of a Megatron checkpoint",
        }
    )
    options_type = MegatronSourceOptions
    options: MegatronSourceOptions

    def is_marker(self, name: str) -> bool:
        """Whether a folder with a file of this name is a Megatron checkpoint."""
        return is_marker(name)

    def marked_folder(self, folder: str) -> str:
        """The folder of an iteration, above those of its ranks."""
        above, _, name = folder.rpartition("/")
        return above if RANK_FOLDER.fullmatch(name) else folder

    def find(self, store: Store) -> bool:
        """Whether the folder has Megatron's tracker, its `metadata.json`, or files of its ranks."""
        try:
            return find_place(store) is not None
        except UcformatError:
            return True  # opening raises an error that describes the fault

    def open(self, store: Store) -> OpenDist | OpenClassic | OpenFsdp:
        """Open the checkpoint that the tracker names, or the one that the store is rooted at."""
        place = find_place(store)
        if place is None:
            raise NotACheckpoint(f"{store.url} holds no Megatron checkpoint")
        where = f"{store.url}/{place.folder}" if place.folder else store.url
        if place.classic:
            from ucformat.engines.megatron.classic import OpenClassic

            with built_by_megatron(where):
                return OpenClassic(store, place, self.options)
        if place.fsdp:
            return _open_fsdp(store, place, where, self.options)
        backend = backend_of(store, place.folder)
        if backend != DIST:
            raise UnsupportedError(
                f"{place.folder or store.url} is a distributed checkpoint in the format "
                f"{backend!r}; {DIST!r} is read",
                hint=(
                    "load it once with the Megatron that wrote it, and save it with "
                    "--ckpt-format torch_dist"
                ),
            )
        from ucformat.engines.megatron.dist import OpenDist

        with built_by_megatron(where):
            return OpenDist(store, place, self.options)


def _open_fsdp(
    store: Store, place: MegatronFolder, where: str, options: MegatronSourceOptions
) -> OpenFsdp:
    """Open a folder that has DCP's `.metadata` alone, after a check that Megatron-FSDP wrote it."""
    from ucformat.engines.megatron.dist import OpenFsdp, is_fsdp
    from ucformat.sources.distcp.metadata import read_metadata

    meta = read_metadata(
        store, f"{place.folder}/.metadata" if place.folder else ".metadata", allow=options.allow
    )
    if not is_fsdp(meta):
        raise UnsupportedError(
            f"{where} holds a checkpoint of PyTorch DCP without the state that Megatron-FSDP saves",
            hint=(
                "a distributed checkpoint of Megatron-Core has metadata.json and common.pt, "
                "too: copy these again"
            ),
        )
    with built_by_megatron(where):
        return OpenFsdp(store, place, meta, options)
