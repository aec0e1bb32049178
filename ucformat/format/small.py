"""Which tensors are stored together although the others are arrays.

An array needs two files, its document and a shard, whatever its size. A checkpoint of many small
tensors would consist of nothing else, so these are written to a few packed files beside the arrays.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ucformat.geometry.tensor import Key, TensorInfo

#: A tensor is small if it has fewer bytes.
SMALL_BYTES = 256 << 10

#: A checkpoint with more small tensors than this has none of them as an array.
MOST_SMALL_ARRAYS = 1000

# beside the folders of states
_TAKEN = re.compile(r"(?:rank|small)-[0-9]+\.bin|extents\.safetensors", re.IGNORECASE)


def is_small(info: TensorInfo) -> bool:
    """Whether a tensor is packed in a checkpoint that has many small ones; all ranks find the same.

    So are those of a state whose folder would have the name of a packed file.
    """
    return info.nbytes < SMALL_BYTES or _TAKEN.fullmatch(info.state) is not None


def packed_keys(infos: Iterable[TensorInfo]) -> Collection[Key]:
    """The small tensors, if there are too many for arrays; otherwise none."""
    small = {info.key for info in infos if is_small(info)}
    return small if len(small) > MOST_SMALL_ARRAYS else ()
