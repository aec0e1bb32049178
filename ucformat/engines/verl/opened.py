"""The files that veRL's FSDP workers save, read in place: the tensors of all ranks as whole ones.

Each rank saves its state dicts by `torch.save`: DTensors, of which the file has the rank's part and
how all ranks share the tensor. The first rank's files so tell where everything is; those of another
rank are opened when something that only it has is read, and then compared with them.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ucformat.engines.verl.folder import RANK_FILE
from ucformat.errors import (
    AmbiguousLayout,
    IntegrityError,
    MissingData,
    UnsupportedError,
    first_names,
    option_text,
)
from ucformat.geometry.box import Box, row_major, unravel
from ucformat.reading.readable import CheckpointMetadata, LazyMapping
from ucformat.reading.stand_ins import LocalPart, StoredTensor
from ucformat.sources.base import groups_by_optimizer
from ucformat.sources.distcp.opened import plain_value
from ucformat.sources.index import IndexedSource, TensorIndex
from ucformat.sources.model_files import read_json, root_files
from ucformat.sources.pickle.allowed import PARTS
from ucformat.sources.pickle.dtensors import distribution_of_part, rank_mesh
from ucformat.sources.pickle.file import TorchFile, open_file
from ucformat.sources.pickle.optimizer import Module, Optimizer, add_optimizer, is_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucformat.engines.verl.folder import VerlOptions
    from ucformat.geometry.distribution import Distribution
    from ucformat.geometry.tensor import Extent
    from ucformat.reading.readable import FileRecord
    from ucformat.storage.base import Store

_CONFIG, _HUGGINGFACE = "fsdp_config.json", "huggingface/"
_STEP = re.compile(r"(?:.*/)?global_step_(\d{1,12})(?:/[^/]+)?/?")
_MAX_DEPTH = 5  # levels of a state dict at which tensors are
_MAX_OPEN = 16  # files of ranks whose pickles are kept
_WEIGHTS = re.compile(r".*\.(safetensors|bin)(\.index\.json)?")
_OPTIM = "optim"


class OpenVerl(IndexedSource):
    """One opened checkpoint of a worker: `actor`, `critic`."""

    kind = "verl"
    part = ""  # the files of ranks are counted

    def __init__(self, store: Store, options: VerlOptions) -> None:
        self.store, self.contents = store, TensorIndex()
        names = root_files(store)
        self._world, files = _files_of_ranks(store, names)
        allow = (*options.allow, PARTS)
        if "model" not in files:
            raise MissingData(
                f"{store.url} has no model_world_size_{self._world}_rank_0.pt",
                hint="veRL saves it whenever it saves anything: copy it from where it was saved",
            )
        model = JoinedFile(store, files["model"], allow)
        self._files = [model]
        weights = model.tensors_by_name()
        aliases = self._add(weights, model)
        objects: dict[str, Any] = {}
        if options.optimizer and _OPTIM in files:
            optimizer = JoinedFile(store, files[_OPTIM], allow)
            self._files.append(optimizer)
            groups = groups_by_optimizer(options.groups).get("optimizer")
            if not self._add_optimizer(optimizer, weights, aliases, groups):
                objects["unnamed"] = ["optimizer"]
        if _CONFIG in names:
            objects["fsdp_config"] = read_json(store, _CONFIG)
        if (config := f"{_HUGGINGFACE}config.json") in names:
            objects["model_config"] = read_json(store, config)
        step = _STEP.fullmatch(store.url)
        extra = files.get("extra_state", [])
        read = [
            key
            for kind, of_kind in files.items()
            for key in of_kind
            if options.optimizer or kind != _OPTIM
        ]
        self.metadata = CheckpointMetadata(
            tensor_list=self.contents.tensor_list(),
            unreadable=self.contents.unreadable,
            aliases=aliases,
            objects=LazyMapping(lambda: objects | _extra_states(store, extra, options.allow)),
            groups=tuple(group.json() for group in self.contents.groups),
            step=None if step is None else int(step[1]),
            layout={"fsdp": self._world},
            engine={"name": "verl"},
            files=(*read, *([_CONFIG] if _CONFIG in names else [])),
            assets=tuple(
                n for n in names if n.startswith(_HUGGINGFACE) and not _WEIGHTS.fullmatch(n)
            ),
        )

    def records(self) -> Iterator[FileRecord]:
        """Every record of the files of all ranks."""
        for file in self._files:
            yield from file.records()

    def _add(self, weights: Mapping[str, StoredTensor], file: JoinedFile) -> dict[str, str]:
        """Add the weights; one at the same location as an earlier one is its alias."""
        first: dict[StoredTensor, str] = {}
        aliases: dict[str, str] = {}
        for name, tensor in weights.items():
            if tensor.size and first.setdefault(tensor, name) != name:
                aliases[name] = first[tensor]
            else:
                self.contents.add_whole(name, "weight", file, tensor)
        return aliases

    def _add_optimizer(
        self,
        file: JoinedFile,
        weights: Mapping[str, StoredTensor],
        aliases: Mapping[str, str],
        groups: Any,
    ) -> bool:
        """Add the optimizer's states; returns whether the names of their parameters are certain."""
        if not is_optimizer(file.value):
            raise IntegrityError(
                f"{file.key} holds no optimizer", hint="it is damaged, or another program's"
            )
        sharded = not self._files[0].parts.keys().isdisjoint(weights.values())
        optimizer = Optimizer.parse(file.value, "optimizer", file)
        flat = [
            state
            for group in optimizer.states
            for states in group
            for state, value in states.items()
            if isinstance(value, StoredTensor) and value.shape and value not in file.parts
        ]
        if sharded and flat:
            raise UnsupportedError(
                f"{file.key} has states of flat parameters ({flat[0]}): veRL saves those of FSDP1 "
                "as its ranks hold them, and no file says of which parameters they are",
                hint=f"open the model without its optimizer, {option_text('optimizer', 'False', 'false')}, "
                "or save with actor.strategy=fsdp2",
            )
        shapes = {n: (t.dtype, t.shape) for n, t in weights.items() if n not in aliases}
        return add_optimizer(optimizer, [Module.of(shapes)], self.contents, groups)


def _files_of_ranks(store: Store, names: Mapping[str, Any]) -> tuple[int, dict[str, list[str]]]:
    """The number of ranks, and the files of all of them by what they hold."""
    matches = [match for name in names if (match := RANK_FILE.fullmatch(name))]
    worlds = sorted({int(match[2]) for match in matches})
    world = worlds[0]
    config = read_json(store, _CONFIG) if _CONFIG in names else None
    recorded = config.get("world_size") if isinstance(config, dict) else None
    if type(recorded) is int and recorded in worlds:
        world = recorded
    elif len(worlds) > 1 or recorded is not None:
        raise AmbiguousLayout(
            f"{store.url} has files of {first_names(worlds, 5)} ranks"
            + (f", and {_CONFIG} says {recorded}" if recorded is not None else ""),
            hint="files of several saves are mixed: remove those of the others",
        )
    by_kind: dict[str, dict[int, str]] = {}
    for match in matches:
        if int(match[2]) == world:
            by_kind.setdefault(match[1], {})[int(match[3])] = match[0]
    for kind, ranks in by_kind.items():
        if missing := [rank for rank in range(world) if rank not in ranks]:
            raise MissingData(
                f"{store.url} lacks the files {kind}_world_size_{world}_rank_N.pt of the ranks "
                f"{first_names(missing, 10)}",
                hint="the save did not finish, or they are on the disks of other nodes: copy them here",
            )
    return world, {kind: [ranks[r] for r in range(world)] for kind, ranks in by_kind.items()}


class _Whole(StoredTensor):
    """A tensor that ranks share, by the place of the first rank's part of it."""

    __slots__ = ()


class JoinedFile(TorchFile):
    """The files of all ranks that hold one state dict, as a file of whole tensors.

    Attributes:
        parts: for each tensor that ranks share: where the first rank's file has its part, that
            part, and how the ranks hold the tensor.
    """

    def __init__(self, store: Store, keys: list[str], allow: tuple[str, ...]) -> None:
        super().__init__(store, keys[0], allow=allow)
        self._keys, self._allow = keys, allow
        self.parts: dict[StoredTensor, tuple[tuple[Any, ...], LocalPart, Distribution]] = {}
        self._plain: dict[StoredTensor, tuple[Any, ...]] = {}
        self._opened: OrderedDict[int, TorchFile] = OrderedDict()
        self.value = self._joined(self.value, ())

    def tensors_by_name(self) -> dict[str, StoredTensor]:
        """The tensors of a module's state dict, which holds nothing else."""
        if not isinstance(self.value, dict) or not all(
            isinstance(n, str) and isinstance(t, StoredTensor) for n, t in self.value.items()
        ):
            raise UnsupportedError(
                f"{self.key} holds something other than tensors by name",
                hint="save with veRL's FSDP workers as they are, and report this checkpoint",
            )
        return self.value

    def whole(self, tensor: StoredTensor, within: Box | None = None) -> Iterator[Extent]:
        """The extents of a whole tensor, or of those of its parts that overlap a box."""
        if tensor not in self.parts:
            self._check_plain(tensor)
            yield from super().whole(tensor)
            return
        path, first, distribution = self.parts[tensor]
        for holding in distribution.holdings(tensor.shape, within or Box.whole(tensor.shape)):
            coordinate = distribution.coordinate(holding.at, 0)
            rank = int(distribution.mesh.ranks[coordinate])
            file, local = self._part(rank, path, first, distribution)
            if local.tensor.shape != holding.box.shape:
                raise IntegrityError(
                    f"{file.key} has {list(local.tensor.shape)} of {_text(path)}, not "
                    f"{list(holding.box.shape)} as its placement implies"
                )
            for extent in file.whole(local.tensor):
                yield replace(extent, box=extent.box.shift(holding.box.start))

    def read(self, tensor: StoredTensor) -> bytes:
        """Read a small tensor."""
        if tensor in self.parts:
            raise UnsupportedError(
                f"{self.key} has a sharded tensor among values that are no states"
            )
        self._check_plain(tensor)
        return super().read(tensor)

    def records(self) -> Iterator[FileRecord]:
        """Every record of the files of all ranks."""
        yield from super().records()
        for rank in range(1, len(self._keys)):
            yield from self._file(rank).records()

    def _joined(self, value: Any, path: tuple[Any, ...]) -> Any:
        """A value with stand-ins for what ranks share."""
        if isinstance(value, LocalPart):
            distribution = _distribution(value, self, path, len(self._keys))
            local = value.tensor
            # tied parameters are at one place of the file, and so are equal again
            whole = _Whole(
                local.storage,
                local.dtype,
                value.shape,
                row_major(value.shape),
                local.offset,
                local.offset + math.prod(value.shape),
            )
            self.parts.setdefault(whole, (path, value, distribution))
            return whole
        if isinstance(value, StoredTensor):
            self._plain.setdefault(value, path)
        elif len(path) == _MAX_DEPTH:
            return value
        elif isinstance(value, dict):
            return {k: self._joined(v, (*path, k)) for k, v in value.items()}
        elif isinstance(value, list):
            return [self._joined(v, (*path, i)) for i, v in enumerate(value)]
        return value

    def _file(self, rank: int) -> TorchFile:
        """The file of a rank; the pickles of the last ones are kept."""
        if not rank:
            return self
        file = self._opened.get(rank)
        if file is None:
            file = TorchFile(self.store, self._keys[rank], allow=self._allow)
            self._opened[rank] = file
            while len(self._opened) > _MAX_OPEN:
                self._opened.popitem(last=False)
        return file

    def _part(
        self, rank: int, path: tuple[Any, ...], first: LocalPart, distribution: Distribution
    ) -> tuple[TorchFile, LocalPart]:
        """The file of a rank, and what it has of a tensor, which must be a part of the same one."""
        if not rank:
            return self, first
        file = self._file(rank)
        part = _at(file.value, path)
        if (
            not isinstance(part, LocalPart)
            or (part.shape, part.tensor.dtype) != (first.shape, first.tensor.dtype)
            or _distribution(part, file, path, len(self._keys), rank) != distribution
        ):
            raise IntegrityError(
                f"{_text(path)} in {file.key} is not a part of the same tensor as in {self.key}",
                hint="files of two saves are mixed: copy all of one save",
            )
        return file, part

    def _check_plain(self, tensor: StoredTensor) -> None:
        """Check that all ranks have the same copy of a tensor that they do not share."""
        path = self._plain.get(tensor)
        if path is not None and (other := self._differing.get(path)) is not None:
            raise AmbiguousLayout(
                f"{_text(path)} is not sharded, and not the same in {self.key} and {other}",
                hint="open the file of one rank, "
                + option_text("part", "True", "true")
                + ", or drop the tensor by a view",
            )

    @cached_property
    def _differing(self) -> dict[tuple[Any, ...], str]:
        """The tensors without placement of which ranks have different copies, and a file of another one."""
        out: dict[tuple[Any, ...], str] = {}
        mine = {}
        for path in self._plain.values():
            value = _at(self.value, path)
            mine[path] = (value, self.crc32(value))
        for rank in range(1, len(self._keys)):
            file = self._file(rank)
            for path, (tensor, crc) in mine.items():
                other = _at(file.value, path)
                if not isinstance(other, StoredTensor) or not _alike(
                    self, tensor, crc, file, other
                ):
                    out.setdefault(path, file.key)
        return out


def _alike(
    mine: TorchFile, tensor: StoredTensor, crc: int, file: TorchFile, other: StoredTensor
) -> bool:
    """Whether two copies are equal, by their checksums or, without these, by their bytes."""
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    if not tensor.size or not tensor.readable:
        return True
    same_layout = (tensor.strides, tensor.offset) == (other.strides, other.offset)
    if crc and same_layout and crc == file.crc32(other) and tensor.numel == other.numel:
        return True
    return TorchFile.read(mine, tensor) == TorchFile.read(file, other)


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    """What is at a path; None if there is nothing."""
    for key in path:
        try:
            value = value[key]
        except (IndexError, KeyError, TypeError):
            return None
    return value


def _text(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _distribution(
    part: LocalPart, file: TorchFile, path: tuple[Any, ...], world: int, rank: int = 0
) -> Distribution:
    """How the ranks hold a tensor, by what one of them has saved of its placement."""
    where = f"{_text(path)} in {file.key}"
    if part.spec is None:
        raise UnsupportedError(
            f"{where} is a ShardedTensor, not a DTensor",
            hint="save it with a version of PyTorch and veRL that gives FSDP a device mesh, or "
            "merge it with `python -m verl.model_merger`",
        )
    distribution = distribution_of_part(where, part)
    if distribution is None:
        raise UnsupportedError(
            f"{where} is placed on a device mesh that ucformat does not know",
            hint="report it with the version of PyTorch that saved it",
        )
    sizes = distribution.mesh.sizes
    coordinate = tuple(unravel(rank, sizes))
    recorded = part.spec.get("mesh").get("_coordinate_on_dim")
    if distribution.mesh != rank_mesh(sizes, tuple(range(world))) or recorded not in (
        None,
        coordinate,
        list(coordinate),
    ):
        raise UnsupportedError(
            f"{where} is on {distribution.mesh.size} ranks at {recorded}, which is not how rank "
            f"{rank} of {world} ranks in order would be",
            hint="only meshes of all ranks, in their order, are read, as veRL makes them",
        )
    box = distribution.local(part.shape, coordinate)
    if part.tensor.shape != box.shape:
        raise IntegrityError(
            f"{where} has the shape {list(part.tensor.shape)}, not {list(box.shape)} as its "
            "placement implies"
        )
    return distribution


def _extra_states(store: Store, keys: list[str], allow: tuple[str, ...]) -> dict[str, Any]:
    """`lr_scheduler` and `rng` of the first rank, and under `ranks` what differs on the others."""
    out: dict[str, Any] = {}
    ranks: dict[str, Any] = {}
    for rank, key in enumerate(keys):
        value = plain_value(open_file(store, key, allow=allow, exact=True), "extra_state")
        value = (
            value if isinstance(value, dict) and "$opaque" not in value else {"extra_state": value}
        )
        if not rank:
            out = value
        elif other := {k: v for k, v in value.items() if k not in out or out[k] != v}:
            ranks[str(rank)] = other
    return out | ({"ranks": ranks} if ranks else {})
