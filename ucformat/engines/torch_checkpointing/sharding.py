"""How a tensor is shared by ranks: as `metadata.pkl` describes it, or a pickled DTensor itself.

`metadata.pkl` is a pickle of plain values: for each item that was saved with a resharder, the paths
of its tensors, for each the ranks that describe it alike, and the file of each rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.engines.torch_checkpointing.folder import METADATA
from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.geometry.box import Box
from ucformat.sources.pickle.dtensors import distribution_of, distribution_of_part, is_size
from ucformat.sources.pickle.unpickler import unpickle
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.geometry.distribution import Distribution
    from ucformat.reading.readable import StatePath as Path
    from ucformat.reading.stand_ins import LocalPart
    from ucformat.storage.base import Store

_VERSION = "2.0"
_MAX_METADATA = 2 << 30  # bytes
_MAX_RANKS = 1 << 24
#: The formats of files that have tensors.
TORCH, SAFETENSORS = "TorchSerialization", "SafetensorsSerialization"


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of a tensor, and the box of a rank's local tensor that has its elements."""

    box: Box
    rank: int
    local: Box


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor is shared: by the ranks of a mesh, or in boxes that each rank lists."""

    dtype: str
    shape: tuple[int, ...]
    distribution: Distribution | None = None
    boxes: tuple[Placed, ...] = ()

    def placed(self, within: Box) -> Iterator[Placed]:
        """The boxes that intersect a box, each once."""
        if self.distribution is None:
            yield from (p for p in self.boxes if p.box.intersect(within))
            return
        ranks = self.distribution.mesh.ranks
        for at, box in self.distribution.holdings(self.shape, within):
            if box.size:
                rank = int(ranks[self.distribution.coordinate(at, 0)])
                yield Placed(box, rank, Box.whole(box.shape))


@dataclass(frozen=True, slots=True)
class Item:
    """An item of the metadata: the sharding of its tensors, and the file and its format by rank."""

    shardings: dict[Path, Sharding]
    files: dict[int, tuple[str, str]]


@dataclass(slots=True)
class SavedItems:
    """The content of `metadata.pkl`."""

    items: dict[str, Item] = field(default_factory=dict)
    world: int = 0  #: 0: unknown


def read_metadata(store: Store) -> SavedItems:
    """Read and check `metadata.pkl`."""
    size = store.info(METADATA).size
    if size > _MAX_METADATA:
        raise UnsupportedError(f"{METADATA} has {size:,} bytes, more than {_MAX_METADATA:,}")
    root = unpickle(store.read(METADATA, 0, size), file=METADATA, storage_nbytes=lambda _: 0)
    if not isinstance(root, dict) or not isinstance(root.get("metadata"), dict):
        raise _damaged("is not the metadata of a checkpoint")
    if root.get("version") != _VERSION:
        raise UnsupportedError(
            f"{METADATA} has the version {root.get('version')!r:.99}, and ucformat reads {_VERSION}",
            hint="load it with torch_checkpointing 0.1.1, and save it again",
        )
    world: Any = root.get("world_size")
    if not is_size(world) or not 0 < world <= _MAX_RANKS:
        raise _damaged(f"has the world size {world!r:.99}")
    out = SavedItems(world=world)
    try:
        for key, item in root["metadata"].items():
            out.items[_text(key)] = Item(
                {
                    _path(text): _sharding(f"{key}: {text}", groups, world)
                    for text, groups in item["nested_path_to_metadata"].items()
                },
                {
                    int(rank): _file(layout)
                    for rank, layout in item["rank_to_layout_info"].items()
                    if layout is not None
                },
            )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(f"cannot be read ({type(error).__name__}: {error!s:.99})") from error
    return out


def _file(layout: Any) -> tuple[str, str]:
    return check_key(_text(layout["file_path"])), _text(layout["serialization_format"]["type"])


def _path(text: str) -> Path:
    path = tuple(json.loads(text))
    if not all(type(part) in (str, int) for part in path):
        raise _damaged(f"has the path {text!r:.99}")
    return path


def _sharding(label: str, groups: Any, world: int) -> Sharding:
    """The sharding of a tensor, of which several groups of ranks may say the same."""
    kinds: dict[str, list[tuple[Any, tuple[int, ...]]]] = {}
    for group in groups:
        ranks = tuple(group["ranks"])
        if not all(is_size(rank) and rank < world for rank in ranks):
            raise _damaged(f"names ranks of {label} that are none of its {world}")
        packed = group["sharding_metadata"]
        kinds.setdefault(_text(packed["type"]), []).append((packed["data"], ranks))
    if len(kinds) != 1:
        raise _damaged(f"describes {label} in {len(kinds)} ways")
    ((kind, described),) = kinds.items()
    if kind == "DTensorShardingMetadata":
        of_groups = [_of_mesh(label, data) for data, _ in described]
    elif kind == "default_tensor_v1":
        of_groups = [_of_boxes(label, described)]
    else:
        raise UnsupportedError(
            f"{METADATA} describes {label} by {kind!r:.99}, of a resharder that ucformat does not know",
            hint="save it with DefaultResharder, or with DTensors",
        )
    if len({(s.dtype, s.shape) for s in of_groups}) != 1:
        raise _damaged(f"gives {label} several shapes or dtypes")
    return of_groups[0]  # each is of the whole tensor


def _of_mesh(label: str, data: Any) -> Sharding:
    mesh, shape = data["mesh_spec"], _sizes(data["global_shape"])
    sizes, ranks = _sizes(mesh["mesh_shape"]), _sizes(mesh["mesh_data"])
    placements = [
        (_text(p["type"]), p.get("dim"), p.get("split_factor", 1)) for p in data["placements"]
    ]
    return Sharding(
        _dtype(data["dtype"]), shape, distribution_of(label, shape, sizes, ranks, placements)
    )


def _of_boxes(label: str, described: Sequence[tuple[Any, tuple[int, ...]]]) -> Sharding:
    """The boxes that ranks list; equal ones, of replicas, once."""
    boxes: dict[Box, Placed] = {}
    forms = set()
    for data, ranks in described:
        shape = _sizes(data["global_shape"])
        forms.add((_dtype(data["dtype"]), shape))
        parts = zip(data["global_offsets"], data["local_offsets"], data["local_sizes"], strict=True)
        for start, local, size in parts:
            box, own = Box(_sizes(start), _sizes(size)), Box(_sizes(local), _sizes(size))
            if not len(box.start) == len(box.shape) == len(own.start) == len(shape) or not ranks:
                raise _damaged(f"has a box of {label} that is none of its {len(shape)} dims")
            if box.size:
                boxes.setdefault(box, Placed(box, ranks[0], own))
    if len(forms) != 1:
        raise _damaged(f"gives {label} several shapes or dtypes")
    ((dtype, shape),) = forms
    return Sharding(dtype, shape, None, tuple(boxes.values()))


def sharding_of_part(label: str, part: LocalPart) -> Sharding:
    """The sharding of a DTensor, as one rank has pickled it."""
    distribution = distribution_of_part(label, part)
    if distribution is None:
        raise UnsupportedError(
            f"{label} is a DTensor whose mesh cannot be read, and {METADATA} does not describe it",
            hint="save it with a resharder: ItemSpec(resharder=DefaultResharder())",
        )
    return Sharding(part.tensor.dtype, part.shape, distribution)


def _dtype(text: Any) -> str:
    return _text(text).removeprefix("torch.")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _damaged(f"has {value!r:.99} instead of a text")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    out = tuple(values)
    if not all(map(is_size, out)):
        raise _damaged(f"has {values!r:.99} instead of sizes")
    return out


def _damaged(problem: str) -> IntegrityError:
    return IntegrityError(
        f"{METADATA} {problem}", hint="the file is damaged; copy it again from where it was saved"
    )
