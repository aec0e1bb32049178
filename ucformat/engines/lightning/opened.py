"""Lightning's sharded checkpoints: a DCP checkpoint, and `meta.pt` with everything but models and optimizers.

Fabric, and Lightning's strategies that shard a model (FSDP, model parallelism), write it beside
DCP's files: epoch, step, loops, schedulers, callbacks and hyper-parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.engines.lightning import META, VERSION
from ucformat.reading.readable import LazyMapping
from ucformat.reading.stand_ins import OpaqueFile
from ucformat.reading.values import to_json
from ucformat.sources.distcp.opened import OpenDcp
from ucformat.sources.pickle.file import TorchZip, open_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.reading.readable import CheckpointMetadata, FileRecord
    from ucformat.sources.distcp.metadata import Items
    from ucformat.sources.distcp.opened import ItemValues


class OpenLightning(OpenDcp):
    """One opened checkpoint of Lightning or Fabric."""

    kind = "lightning"

    def __init__(
        self,
        items: Items,
        groups: Sequence[Sequence[str]] | None,
        owners: Mapping[str, str] | None,
        allow: tuple[str, ...],
    ) -> None:
        self._file = open_file(items.store, META, allow=allow)
        super().__init__(items, groups, owners)

    def _make_metadata(self, values: ItemValues) -> CheckpointMetadata:
        dcp, meta = super()._make_metadata(values), self._meta()
        step = meta.get("global_step")
        engine = dict(dcp.engine)
        if VERSION in meta:
            engine["format"] = engine["name"]
            engine |= {"name": "lightning", "version": str(meta[VERSION])}
        return dcp.replace(
            tensor_list=self.contents.tensor_list(dcp.groups),
            objects=LazyMapping(lambda: _joined(dcp.objects, meta)),
            step=step if type(step) is int else dcp.step,
            engine=engine,
            files=(*dcp.files, META),
        )

    def _meta(self) -> dict[str, Any]:
        """The values of `meta.pt` as JSON; its larger tensors become tensors of the checkpoint."""
        file = self._file
        if isinstance(file, OpaqueFile):
            return {META: to_json(file.opaque())}
        value = self.contents.json_of(file, file.value, exact=True)
        is_plain = isinstance(value, dict) and not any(key.startswith("$") for key in value)
        return value if is_plain else {META: value}

    def records(self) -> Iterator[FileRecord]:
        """List every record of the archives of all items, and of `meta.pt`."""
        yield from super().records()
        yield from TorchZip(self.store, META).records()


def _joined(items: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """The values of items and `meta.pt`, which is one object if both have one of a name."""
    return {**items, META: dict(meta)} if items.keys() & meta.keys() else {**items, **meta}
