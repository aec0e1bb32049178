"""ByteCheckpoint's checkpoints of DDP, FSDP and FSDP2, read in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, MissingData, UnsupportedError
from ucformat.geometry.tensor import Extent
from ucformat.reading.readable import CheckpointMetadata, LazyMapping
from ucformat.reading.stand_ins import Inert, StoredTensor
from ucformat.schema import ITEMSIZE
from ucformat.sources.distcp import METADATA
from ucformat.sources.distcp.metadata import Items, Metadata, check_dense, read_metadata
from ucformat.sources.distcp.opened import ItemValues, OpenDcp, plain_value
from ucformat.sources.pickle.file import TorchFile
from ucformat.sources.pickle.unpickler import unpickle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.engines.bytecheckpoint.folder import Folder
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.readable import FileRecord
    from ucformat.storage.base import ByteRange, Store

_DDP = "module."


class OpenByteCheckpoint(OpenDcp):
    """One opened ByteCheckpoint checkpoint."""

    kind = "bytecheckpoint"
    part = ""  # `.metadata` describes the tensors of all ranks

    def __init__(
        self,
        store: Store,
        folder: Folder,
        allow: tuple[str, ...],
        groups: Sequence[Sequence[str]] | None,
        owners: Mapping[str, str] | None,
    ) -> None:
        metas = {
            part: read_metadata(store, key + METADATA, allow=allow)
            for part, key in folder.parts.items()
        }
        for meta in metas.values():
            _check(meta)
        self._folder = folder
        items = _RawItems(store, _joined(metas), allow, metas)
        super().__init__(
            items, groups, owners or ({"optimizer": "model"} if len(metas) > 1 else None)
        )

    def _make_metadata(self, values: ItemValues) -> CheckpointMetadata:
        """The metadata, with the extra states of all ranks."""
        assert isinstance(self.items, _RawItems)  # noqa: S101
        metas, folder = list(self.items.parts.values()), self._folder
        files = [f for meta in metas for f in (meta.file, *meta.files)]
        version = metas[0].root.get("bytecheckpoint_version")
        groups, places = values.lazy_groups()
        return CheckpointMetadata(
            tensor_list=self.contents.tensor_list(groups),
            unreadable=self.contents.unreadable,
            groups=groups,
            places=places,
            objects=LazyMapping(lambda: _extra_states(self.store, folder)),
            step=folder.step,
            engine={"name": "bytecheckpoint", "version": str(version or "")},
            files=(*files, *folder.extra, *folder.others, *folder.empty),
            assets=folder.others,
            folder=folder.below.rstrip("/"),
        )


def _check(meta: Metadata) -> None:
    user = meta.root.get("user_defined_dict")
    if isinstance(user, dict) and ("fsdp_flat_param_to_fqns" in user or "model_dict_keys" in user):
        raise UnsupportedError(
            f"{meta.file} describes flat parameters (save_decomposed_model_optimizer), which are "
            "not yet read",
            hint="load it with ByteCheckpoint, and save without save_decomposed_model_optimizer",
        )


def _joined(metas: Mapping[str, Metadata]) -> Metadata:
    """Model and optimizer as one state, without the prefix of DDP's wrapper."""
    out = Metadata(next(iter(metas.values())).file, next(iter(metas.values())).root)
    wrapped = "model" in metas and all(f.startswith(_DDP) for f in metas["model"].tensors)
    if wrapped and "optimizer" in metas:
        entries = [
            p[1] for p in metas["optimizer"].paths.values() if len(p) > 2 and p[0] == "state"
        ]
        # only DDP keeps the optimizer's own numbers
        wrapped = all(str(entry).isdigit() for entry in entries)
    for part, meta in metas.items():
        cut = len(_DDP) if wrapped and part == "model" else 0
        for fqn in (*meta.tensors, *meta.values):
            path = meta.paths.get(fqn, (fqn,))
            out.paths[f"{part}.{fqn}"] = (part, str(path[0])[cut:], *path[1:])
        out.tensors |= {f"{part}.{fqn}": entry for fqn, entry in meta.tensors.items()}
        out.values += [f"{part}.{fqn}" for fqn in meta.values]
        out.stored |= {(f"{part}.{fqn}", start): s for (fqn, start), s in meta.stored.items()}
    return out


class _RawItems(Items):
    """Items whose tensors are raw bytes, laid out by a pickle in the metadata."""

    def __init__(
        self, store: Store, meta: Metadata, allow: tuple[str, ...], metas: Mapping[str, Metadata]
    ) -> None:
        super().__init__(store, meta, allow)
        self._layouts: dict[tuple[str, Any], Any] = {}
        self.parts = metas
        for part, part_meta in metas.items():
            recorded = part_meta.root.get("all_tensor_metadata")
            for index, layout in (recorded if isinstance(recorded, dict) else {}).items():
                if isinstance(index, Inert):
                    self._layouts[f"{part}.{index.get('fqn')}", index.get("offset")] = layout

    def chunk_extents(
        self, fqn: str, box: Box, stored: ByteRange, info: TensorInfo
    ) -> list[Extent]:
        """The extent of one chunk, as its pickle describes it."""
        layout, label = self._layouts.get((fqn, box.start)), f"{info.key}{box}"
        if not isinstance(layout, bytes):
            raise MissingData(
                f"the metadata does not describe the layout of {label} in {stored.file}"
            )
        where = f"the layout of {label}"
        tensor = unpickle(layout, file=where, storage_nbytes=lambda _: stored.nbytes)
        form = (info.dtype, box.shape)
        if not isinstance(tensor, StoredTensor) or (tensor.dtype, tensor.shape) != form:
            raise IntegrityError(
                f"{stored.file}: {label} should be {info.dtype} of shape {box.shape}, but its "
                "layout differs"
            )
        check_dense(tensor, stored, label)
        unit = ITEMSIZE[tensor.dtype]
        strides = tuple(s * unit for s in tensor.strides)
        return [Extent(box, stored.file, stored.offset + tensor.offset * unit, strides)]

    def records(self) -> Iterator[FileRecord]:
        """Empty: there are no checksums."""
        return iter(())


def _extra_states(store: Store, folder: Folder) -> dict[str, Any]:
    """`extra_state` of rank 0, and under `rank` the differences of the others."""
    out: dict[str, Any] = {}
    by_rank: dict[str, Any] = {}
    for rank, key in enumerate(folder.extra):
        value = plain_value(TorchFile(store, key), "extra_state")
        if not rank:
            out["extra_state"] = value
        elif value != out["extra_state"]:
            first = out["extra_state"]
            if isinstance(value, dict) and isinstance(first, dict):
                value = {k: v for k, v in value.items() if k not in first or first[k] != v}
            by_rank[str(rank)] = {"extra_state": value}
    return out | ({"rank": by_rank} if by_rank else {})
