"""The `zarr.json` documents of a universal checkpoint (Zarr v3, `sharding_indexed`, crc32c).

The format says them to the byte, so that `verify` can: all that they hold is in the manifest.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ucformat.schema.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from ucformat.format.chunking import Grid
    from ucformat.geometry.tensor import Key

__all__ = ["array_json", "group_json", "shard_key"]


def group_json() -> bytes:
    """The metadata document of a group."""
    return _encode({"zarr_format": 3, "node_type": "group", "attributes": {}})


def array_json(key: Key, dtype: str, grid: Grid) -> bytes:
    """The metadata document of one tensor's array."""
    as_bytes: dict[str, Any] = {"name": "bytes"}
    if ITEMSIZE[dtype] > 1:
        as_bytes["configuration"] = {"endian": "little"}
    index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {
        "chunk_shape": list(grid.chunk),
        "codecs": [as_bytes, {"name": "crc32c"}],
        "index_codecs": index_codecs,
        "index_location": "end",
    }
    from ucformat.reading.dtypes import fill_value  # NumPy, which whoever reads a manifest does without

    return _encode(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(grid.shape),
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid.shard)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": fill_value(dtype),
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {"ucformat": {"name": key.name, "state": key.state}},
        }
    )


def shard_key(array: str, shard: tuple[int, ...]) -> str:
    """The key of a shard's file below the array's folder: `<array>/c/0/1`; `<array>/c` for a 0-d tensor."""
    return "/".join([array, "c", *map(str, shard)])


def _encode(document: object) -> bytes:
    return json.dumps(document, indent=1).encode()
