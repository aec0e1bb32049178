"""DeepSpeed checkpoints of data, tensor and pipeline parallelism, ZeRO 0 to 3, read in place."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, Any

from ucformat.engines.deepspeed.degrees import ParallelDegrees, models_by_label
from ucformat.engines.deepspeed.experts import (
    adopt_experts,
    expert_model,
    expert_ranks,
    is_expert,
    partitioned_experts,
)
from ucformat.engines.deepspeed.model_states import ModelStates, Objects, load_all
from ucformat.engines.deepspeed.pipeline import adopt_layers, layers_of, names_of_stages
from ucformat.engines.deepspeed.resolver import ShardingResolver
from ucformat.engines.deepspeed.slices import describe, is_partitioned
from ucformat.engines.deepspeed.zero import Slice, SliceReader
from ucformat.errors import IntegrityError, UnsupportedError, UsageError, option_text
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Key, TensorInfo, TensorList
from ucformat.geometry.tp_sharding import Shapes, TPSharding, replicate
from ucformat.geometry.view import View
from ucformat.reading.readable import CheckpointMetadata
from ucformat.sources.index import Group, IndexedSource, TensorIndex
from ucformat.sources.pickle.allowed import TEXTS
from ucformat.sources.pickle.file import TorchFile, TorchZip
from ucformat.sources.tp_merge import Replica, Verdict, compare, must_agree
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from ucformat.engines.deepspeed.experts import Experts
    from ucformat.engines.deepspeed.folder import DeepSpeedSourceOptions, TagFiles
    from ucformat.geometry.tensor import Extent
    from ucformat.geometry.view import BoxPair
    from ucformat.reading.readable import FileRecord
    from ucformat.sources.index import Locate
    from ucformat.storage.base import Store


class OpenDeepSpeed(IndexedSource):
    """One opened DeepSpeed checkpoint."""

    kind = "deepspeed"
    part = ""  # there is a file for each of the ranks that the files record

    def __init__(self, store: Store, files: TagFiles, options: DeepSpeedSourceOptions) -> None:
        self.store = store
        self._files = files
        self._opened: dict[str, TorchFile] = {}

        # Without `self`, which would make a reference cycle: where thousands of checkpoints are
        # opened, the garbage collector would take much of the time.
        def load(key: str, opened: dict[str, TorchFile] = self._opened) -> TorchFile:
            if key not in opened:
                opened[key] = TorchFile(store, key, allow=(*options.allow, TEXTS))
            return opened[key]

        degrees, stages = _read(load, files, options)
        models = [model for rank_slice in chain(*stages) for model in rank_slice.models]
        stacked = {name for model in models for name in model.stacked_names}
        resolver = ShardingResolver(
            *(models, degrees.tp, options.layout, options.vocab, options.cuts), stacked=stacked
        )
        merged = Merged(store, stages, resolver)
        contents = self.contents = merged.contents
        contents.groups = merge_groups(stages)
        optimizers = {
            rank_slice.label: rank_slice.contents.optimizer for rank_slice in chain(*stages)
        }
        not_stored = list(dict.fromkeys(name for slices in stages for name in slices[0].not_stored))
        objects = Objects(
            models_by_label(degrees, stages), optimizers, contents, not_stored
        ).json()  # adds large tensors
        first = stages[0][0]
        self.metadata = CheckpointMetadata(
            tensor_list=tensor_list(stages, contents),
            unreadable=contents.unreadable,
            aliases={a: b for slices in stages for a, b in slices[0].aliases.items()},
            objects=objects,
            groups=tuple(group.json() for group in contents.groups),
            step=step if isinstance(step := first.model.value.get("global_steps"), int) else None,
            layout=_layout(degrees, stages, files),
            engine={"name": "deepspeed", "version": str(first.model.value.get("ds_version", ""))},
            files=(*files.all, *(key for each in chain(*stages) for key in each.swap_files)),
            means=merged.means,
            factors=merged.factors,
            folder=files.tag,
        )

    def records(self) -> Iterator[FileRecord]:
        """Every record of all ranks' zip files; reads directories of those not open."""
        for key in self._files.all:
            if key != self._files.latest:
                yield from (self._opened.get(key) or TorchZip(self.store, key)).records()


def _read(
    load: Callable[[str], TorchFile], files: TagFiles, options: DeepSpeedSourceOptions
) -> tuple[ParallelDegrees, list[list[Slice]]]:
    """The checkpoint's slices by pipeline stage and tensor-parallel rank."""
    if files.zero3 and not options.optimizer:
        raise UsageError(
            f"{files.models[0][0]} is of ZeRO 3, which stores the weights in the optimizer's files",
            hint=f"leave out {option_text('optimizer')}",
        )
    first = ModelStates(load(files.models[0][0]))
    # before opening others, which may not belong to it
    degrees = ParallelDegrees.of(files, first, optimizer=options.optimizer)
    other_keys = [row[not m :] for m, row in enumerate(files.models)]
    rows = [[ModelStates(file) for file in row] for row in load_all(load, other_keys)]
    rows[0].insert(0, first)
    if files.swapped and degrees.pp * degrees.tp > 1:
        raise UnsupportedError(
            f"{min(files.swapped)}: not yet read: an optimizer on NVMe under tensor parallelism",
            hint="keep the optimizer in memory when saving (offload_optimizer.device: cpu)",
        )
    grid = [[rows[p * degrees.tp + t] for t in range(degrees.tp)] for p in range(degrees.pp)]
    names, ties = _read_parameters(load, files, options, grid)
    experts = _read_experts(load, files, degrees, grid)
    shared = first.aliases(zero3=files.zero3) if first.param_shapes is not None else None
    optims = files.optims or ((),) * len(rows)

    def read(coordinate: tuple[int, int]) -> Slice:
        p, t = coordinate
        mine = experts[p]
        reader = SliceReader(
            load, files.zero3, mine[t] if mine else None, options.optimizer, files.swapped
        )
        return reader.read(
            grid[p][t],
            optims[p * degrees.tp + t],
            degrees.label(p, t),
            shared=None if p else shared,
            names=names[p],
        )

    stages: list[list[Slice]] = []
    for p in range(degrees.pp):
        mine, model = experts[p], grid[p][0][0]
        numbered = model.param_shapes is None and model.value.get("optimizer") is not None
        if mine and numbered and options.optimizer:
            stages += _expert_stages(load, files, options, degrees, grid[p], mine, p)
            continue
        rank_slice = read((p, 0))
        # The names that were derived for the first rank hold for the stage's other ranks.
        if rank_slice.stage == 0 and rank_slice.contents.groups:
            names[p] = [group.names for group in rank_slice.contents.groups]
        slices = [rank_slice, *map_io(read, [(p, t) for t in range(1, degrees.tp)])]
        stages += _apart(slices) if mine and mine[0].lanes > 1 else [slices]
    stages[0][0].aliases.update(ties)
    return degrees, stages


def _read_experts(
    load: Callable[[str], TorchFile],
    files: TagFiles,
    degrees: ParallelDegrees,
    grid: Sequence[Sequence[Sequence[ModelStates]]],
) -> list[list[Experts] | None]:
    """Give the model states of each stage and tensor-parallel rank the weights of its experts, if any."""
    out: list[list[Experts] | None] = []
    for p, stage in enumerate(grid):
        models = [row[0] for row in stage]
        keys = [files.experts.get(p * degrees.tp + t, {}) for t in range(degrees.tp)]
        if not any(keys) and not any(model.value.get("num_experts") for model in models):
            out.append(None)
            continue
        stacked = any(model.stacked for model in models)
        if stacked and len(grid) * degrees.tp > 1:
            raise UnsupportedError(
                f"{models[0].key}: not yet read: experts of AutoEP with tensor parallelism or in pipelines"
            )
        if files.zero3 and not stacked:
            raise UnsupportedError(
                f"{models[0].key}: not yet read: experts of deepspeed.moe with ZeRO 3, which "
                "DeepSpeed refuses to train",
                hint="experts of AutoEP are read with ZeRO 3, those of deepspeed.moe with ZeRO 0 to 2",
            )
        if files.zero3:
            out.append([partitioned_experts(stage[0])])
            continue
        rows = load_all(load, [tuple(by_number.values()) for by_number in keys])
        opened = [
            dict(zip(by_number, row, strict=True))
            for by_number, row in zip(keys, rows, strict=True)
        ]
        out.append(adopt_experts(models, opened, degrees.dp))
    return out


def _read_parameters(
    load: Callable[[str], TorchFile],
    files: TagFiles,
    options: DeepSpeedSourceOptions,
    grid: Sequence[Sequence[Sequence[ModelStates]]],
) -> tuple[list[Sequence[Sequence[str]] | None], dict[str, str]]:
    """Give the model states what other files have of their parameters: shapes, and the tensors of layers.

    Args:
        grid: the model states by pipeline stage and tensor-parallel rank.

    Returns:
        the names of each stage's optimizer groups under ZeRO 0 (None: to be derived), and the
        stored name of each tied name.
    """
    first = grid[0][0][0]
    names: list[Sequence[Sequence[str]] | None] = [options.groups] * len(grid)
    ties: dict[str, str] = {}
    partitioned = is_partitioned(first)
    if partitioned and first.in_layers and not options.optimizer:
        raise UsageError(
            f"{first.key}: only the files of the optimizer, a BF16_Optimizer without ZeRO, name "
            "the parameters of each pipeline stage",
            hint=f"leave out {option_text('optimizer')}",
        )
    if partitioned and (files.experts or first.value.get("num_experts")) and options.optimizer:
        raise UnsupportedError(
            f"{first.key}: not yet read: experts with a BF16_Optimizer and ZeRO 0, as of pipelines "
            "in bf16",
            hint=f"save with ZeRO 1; without the optimizer the weights are read: {option_text('optimizer')}",
        )
    opened = dict(zip(files.layers, load_all(load, files.layers.values()), strict=True))
    for t in range(len(grid[0])):
        models = [stage[t][0] for stage in grid]
        layers = layers_of({number: row[t] for number, row in opened.items()})
        if partitioned and options.optimizer:
            keys = [files.optims[p * len(grid[0]) + t] for p in range(len(grid))]
            describe(models, load_all(load, keys), layers)
        if first.in_layers and models[0].param_shapes is not None:
            adopt_layers(models, layers)
        elif first.in_layers:
            names, ties = names_of_stages(models, layers, options.groups)
    return names, ties


def _expert_stages(
    load: Callable[[str], TorchFile],
    files: TagFiles,
    options: DeepSpeedSourceOptions,
    degrees: ParallelDegrees,
    grid: Sequence[Sequence[ModelStates]],
    experts: Sequence[Experts],
    stage: int,
) -> list[list[Slice]]:
    """Under ZeRO 0 each expert-parallel rank is a stage; the tensors that all have agree as across stages."""
    bases = [models[0] for models in grid]
    keys = [
        expert_ranks(experts[t], base, files.expert_optims.get(stage * degrees.tp + t, {}))
        for t, base in enumerate(bases)
    ]
    if len({len(of_rank) for of_rank in keys}) > 1:
        raise IntegrityError(
            f"{keys[0][0]} and others: the tensor-parallel ranks have {[len(k) for k in keys]} "
            "optimizer files of expert-parallel ranks",
            hint=_MIXED,
        )
    opened = load_all(load, zip(*keys, strict=True))
    stages: list[list[Slice]] = []
    for rank, row in enumerate(opened):
        slices: list[Slice] = []
        for t, (base, file, mine) in enumerate(zip(bases, row, experts, strict=True)):
            degree = len(keys[t])
            model = expert_model(base, file, mine, degree, rank)
            label = ".".join(filter(None, (degrees.label(stage, t), f"ep{rank}" if rank else "")))
            names = options.groups and [
                [n for n in g if n in base.module and mine.is_on(n, degree, rank)]
                for g in options.groups
            ]
            if slices and mine.lanes == 1:  # the names that were derived for the first rank
                names = [group.names for group in slices[0].contents.groups]
            rank_slice = SliceReader(load).read([model], (), label, names=names)
            rank_slice.degrees = (degree * mine.lanes,)
            if rank:
                rank_slice.contents.forget(
                    key
                    for key in stages[0][t].contents.infos
                    if key.state == "weight" and key.name not in mine.stacked
                )
            else:
                rank_slice.models = [base]  # only the first has more than that
            slices.append(rank_slice)
        stages += _apart(slices) if experts[0].lanes > 1 else [slices]
    if experts[0].stacked:  # which ranks have parts of, as if they were tensor-parallel
        stacked = experts[0].stacked
        stages.append([slices[0].split(lambda name: name in stacked) for slices in list(stages)])
    return stages


def _apart(slices: Sequence[Slice]) -> list[list[Slice]]:
    """A stage whose tensor-parallel ranks have experts of their own: what they share, then those of each."""
    return [list(slices), *([rank_slice.split(is_expert)] for rank_slice in slices)]


def _layout(degrees: ParallelDegrees, stages: list[list[Slice]], files: TagFiles) -> dict[str, Any]:
    """Stage and ranks, and the dtype of weights of which only the fp32 copy is stored."""
    first = stages[0][0]
    out = degrees.layout(first.stage)
    if files.experts or first.model.stacked:
        every = {n for rank_slice in chain(*stages) for n in rank_slice.degrees}
        sizes = sorted({n for n in every if n > 1} or {1})
        out["ep"] = sizes[0] if len(sizes) == 1 else sizes
    return out | first.weight_dtype(first.stage)


# The tensors and optimizer groups of a whole checkpoint, out of those of its model-parallel ranks.


_MIXED = "files of different saves are mixed in one folder"


class Merged:
    """All tensors, merged from the slices by pipeline stage and tensor-parallel rank."""

    def __init__(
        self, store: Store, stages: Sequence[Sequence[Slice]], resolver: ShardingResolver
    ) -> None:
        self.contents = TensorIndex()
        self.means: dict[Key, tuple[Key, ...]] = {}
        self.factors: dict[Key, float] = {}
        self._store, self._resolver = store, resolver
        self._homes: dict[str, Sequence[Slice]] = {}  # the first stage that holds a parameter
        for rank_slice in chain(*stages):
            self.contents.unreadable |= rank_slice.contents.unreadable
        shapes = [_shapes(stage, self.contents.unreadable) for stage in stages]
        described = (name for slices in stages for name in slices[0].model.described)
        resolver.recognise({n: parts for each in shapes for n, parts in each.items()}, described)
        for stage, each in zip(stages, shapes, strict=True):
            for name in [n for n in each if self.contents.refused_with(Key(n, "weight"))]:
                del each[name]
            self._homes.update((name, stage) for name in each if name not in self._homes)
        for stage, each in zip(stages, shapes, strict=True):
            self._add_stage(stage, each)

    def _add_stage(self, slices: Sequence[Slice], shapes: dict[str, Shapes]) -> None:
        first = slices[0].contents
        buffers = frozenset().union(*(s.model.buffers for s in slices))
        shardings = self._resolver.decide(shapes, buffers, self._verdict)
        for key in first.infos:
            if (reason := self.contents.refused_with(key)) is not None:
                self.contents.unreadable[key] = reason
            elif key not in first.large:
                self._add(key, slices, shapes[key.name], shardings[key.name])
        for contents in (rank_slice.contents for rank_slice in slices):
            for key in contents.large:
                self.contents.put(contents.infos[key], contents.locate[key])

    def _add(
        self,
        key: Key,
        slices: Sequence[Slice],
        shapes: tuple[tuple[int, ...], ...],
        sharding: TPSharding,
    ) -> None:
        """Add a state, read as its parameter is; one of another shape must be whole."""
        if len(slices) == 1 and not (sharding.padding_rows or sharding.scaled):
            local = slices[0].contents
            self._put(local.infos[key], local.locate[key])
            return
        infos = [s.contents.infos[key] for s in slices]
        own_shapes = tuple(info.shape for info in infos)
        if len({info.dtype for info in infos}) > 1:
            raise IntegrityError(
                f"{key} has the dtypes {', '.join(sorted({i.dtype for i in infos}))}", hint=_MIXED
            )
        if own_shapes != shapes:
            whole = len(sharding.regions[0]) == 1 and len(set(sharding.regions)) == 1
            if not whole and any(own_shapes):
                raise UnsupportedError(
                    f"{key} of the parts {[list(s) for s in own_shapes]} belongs to a parameter of the "
                    "parts "
                    f"{[list(s) for s in shapes]}: states of factored optimizers are means over "
                    "a rank's part, and "
                    "are not read under tensor parallelism",
                    hint="read the weights and masters alone",
                )
            sharding = replicate(own_shapes)
        info = TensorInfo(key.name, key.state, infos[0].dtype, sharding.shape)
        if sharding.mean and own_shapes == shapes:
            parts = tuple(key.partial(t) for t in range(len(slices)))
            self._put(info, lambda _: _refuse_mean(key, parts))
            for part, rank_slice in zip(parts, slices, strict=True):
                self.contents.locate.setdefault(part, rank_slice.contents.locate[key])
            self.means[key] = parts
            return
        tensor = _MergedTensor(self._store, info, slices, sharding.regions)
        if sharding.scaled:
            self._put(info, lambda _: _refuse_scaled(key))
            # Scaling a parameter scales its moments otherwise, and its learning rate.
            if key.state in ("weight", "master") and _is_power_of_two(sharding.factor):
                part = key.partial(0)
                self.contents.locate.setdefault(part, tensor.extents)
                self.means[key], self.factors[key] = (part,), sharding.factor
            return
        self._put(info, tensor.extents)
        if sharding.padding_rows:
            spare = TensorInfo(*key.padding, info.dtype, sharding.padding_shape)
            rows = _MergedTensor(self._store, spare, slices, sharding.padding, key)
            self._put(spare, rows.extents)

    def _put(self, info: TensorInfo, locate: Locate) -> None:
        """Add a stage's tensor; copies in several stages must be equal."""
        key = info.key
        earlier = self.contents.infos.get(key)
        if earlier is None:
            self.contents.put(info, locate)
            return
        if earlier != info:
            raise IntegrityError(
                f"{key} is {earlier.dtype} {list(earlier.shape)} in one pipeline stage and {info.dtype} "
                f"{list(info.shape)} "
                "in another",
                hint=_MIXED,
            )
        first = self.contents.locate[key]
        if not isinstance(first, _Copies):
            may_differ = self._resolver.may_differ(key.name)
            first = _Copies(self._store, info, first, may_differ=may_differ)
            self.contents.locate[key] = first
        first.add(locate)

    def _verdict(self, name: str) -> Verdict:
        """Whether a parameter's parts are equal: by its weight, or if constant, its states."""
        slices = self._homes[name]
        first, shape = slices[0].contents.infos, _shape(slices[0], name)
        states = [key for key in first if key.name == name and first[key].shape == shape]
        order = {"weight": 0, "master": 1}
        verdict: Verdict = "constant"
        for key in sorted(states, key=lambda key: order.get(key.state, 2)):
            copies = [s.contents.replica(key, Box.whole(shape)) for s in slices]
            verdict = compare(self._store, copies)
            if verdict != "constant":
                break
        return verdict


class _Copies:
    """A tensor of several stages; the first stage's is read, after a check that all are equal."""

    def __init__(self, store: Store, info: TensorInfo, first: Locate, *, may_differ: bool) -> None:
        self._store, self._info = store, info
        self._copies: list[Replica] = []
        self._agreed = may_differ
        self.add(first)

    def add(self, locate: Locate) -> None:
        self._copies.append(Replica(locate, Box.whole(self._info.shape), self._info.itemsize))

    def __call__(self, within: Box | None) -> Iterator[Extent]:
        if not self._agreed:
            must_agree(self._store, self._info.key, self._copies)
            self._agreed = True
        return self._copies[0].locate(within)


class _MergedTensor:
    """One global tensor: a view of the ranks' local ones."""

    def __init__(
        self, store: Store, info: TensorInfo, slices: Sequence[Slice], regions: Sequence[Sequence[BoxPair]],
        key: Key | None = None,
    ) -> None:  # fmt: skip
        self._store, self._info, self._slices = store, info, slices
        self._key = key or info.key  # of the local tensors
        owners: dict[Box, tuple[int, BoxPair]] = {}
        self._replicas: dict[Box, list[tuple[int, BoxPair]]] = {}
        for rank, rank_regions in enumerate(regions):
            for region in rank_regions:
                box = region.target
                if box in owners:
                    self._replicas.setdefault(box, [owners[box]]).append((rank, region))
                else:
                    owners[box] = (rank, region)
        self._owners = list(owners.values())
        self._view: View | None = None

    def extents(self, within: Box | None) -> Iterator[Extent]:
        """The extents in global coordinates; the first call checks that replicas agree."""
        if self._view is None:
            for replicas in self._replicas.values():
                copies = [self._slices[t].contents.replica(self._key, r.box) for t, r in replicas]
                must_agree(self._store, self._key, copies)
            self._view = View(self._info, tuple((Key(str(t), ""), r) for t, r in self._owners))

        def local(source: Key, box: Box) -> Iterator[Extent]:
            return self._slices[int(source.name)].contents.locate[self._key](box)

        return self._view.extents(local, within)


def tensor_list(stages: Sequence[Sequence[Slice]], contents: TensorIndex) -> TensorList:
    """All tensors in the order of the module, others after them."""
    modules = (name for slices in stages for name in slices[0].model.module)
    names = dict.fromkeys((*modules, *(key.name for key in contents.infos)))
    order = {name: i for i, name in enumerate(names)}
    infos = sorted(contents.infos.values(), key=lambda info: order[info.name])
    groups = {name: g for g, group in enumerate(contents.groups) for name in group.names}
    return TensorList(tuple(infos), groups)


def _shapes(slices: Sequence[Slice], unreadable: Collection[Key]) -> dict[str, Shapes]:
    """The shapes of the parts of each parameter of a stage."""
    _check_same_tensors(slices, unreadable)
    contents = slices[0].contents
    names = {key.name: None for key in contents.infos if key not in contents.large}
    return {name: tuple(_shape(s, name) for s in slices) for name in names}


def _shape(rank_slice: Slice, name: str) -> tuple[int, ...]:
    """The shape of the local part of a parameter."""
    infos = rank_slice.contents.infos
    for state in ("weight", "master"):
        if Key(name, state) in infos:
            return infos[Key(name, state)].shape
    tensor = rank_slice.model.module.get(name)
    shape = rank_slice.model.described.get(name)
    if tensor is not None and tensor.numel > 0:  # under ZeRO 3 the module's tensors are empty
        shape = tensor.shape
    return next(i.shape for k, i in infos.items() if k.name == name) if shape is None else shape


def _check_same_tensors(slices: Sequence[Slice], unreadable: Collection[Key]) -> None:
    """All tensor-parallel ranks of a stage hold parts of the same tensors, if they can be read."""
    first = slices[0].contents
    for rank_slice in slices[1:]:
        theirs = rank_slice.contents.infos.keys() - rank_slice.contents.large.keys()
        unshared = (first.infos.keys() - first.large.keys()) ^ theirs
        if unshared := unshared.difference(unreadable):
            key = min(unshared)
            there, not_there = (
                (slices[0], rank_slice) if key in first.infos else (rank_slice, slices[0])
            )
            raise IntegrityError(
                f"{there.model.key} or its optimizer has {key}, that of {not_there.model.key} "
                "does not"
            )


def _refuse_mean(key: Key, parts: Sequence[Key]) -> Iterator[Extent]:
    raise UnsupportedError(
        f"{key} is the mean of {len(parts)} values, one for each tensor-parallel rank, which are "
        "stored separately",
        hint=f"they are {parts[0].state} to {parts[-1].state}",
    )


def _is_power_of_two(factor: float) -> bool:
    """Whether dividing by a factor loses no bits but by overflow."""
    return math.isfinite(factor) and math.frexp(factor)[0] == 0.5


def _refuse_scaled(key: Key) -> Iterator[Extent]:
    raise UnsupportedError(
        f"{key} is scaled, according to the affine map of the checkpoint: only weights are restored, "
        "if all ranks have them times the same power of two",
        hint="DeepSpeed's own converter undoes it for weights; it refuses optimizer states, too",
    )


def merge_groups(stages: Sequence[Sequence[Slice]]) -> list[Group]:
    """Check that groups of tensor-parallel ranks are the same, and join those of pipeline stages.

    They are joined by position if all stages have equally many, with the same hyper-parameters;
    else by hyper-parameters if these belong to only one group of the stage. Other groups stay
    separate. Each parameter keeps its hyper-parameters.
    """
    merged: list[Group] = []
    seen: set[str] = set()
    for slices in stages:
        groups = slices[0].contents.groups
        described = [(g.names, g.hyper) for g in groups]
        for rank_slice in slices[1:]:
            if [(g.names, g.hyper) for g in rank_slice.contents.groups] != described:
                raise IntegrityError(
                    f"the optimizer groups of {slices[0].model.key} and {rank_slice.model.key} differ",
                    hint=_MIXED,
                )
        for group, into in zip(groups, _partners(merged, groups), strict=True):
            # a tied module's, in several stages
            names = [name for name in group.names if name not in seen]
            seen.update(names)
            if into is None:
                merged.append(Group(names, group.hyper, group.state))
            else:
                into.state = _joined(into, group)
                into.names.extend(names)
    return merged


def _partners(merged: Sequence[Group], groups: Sequence[Group]) -> list[Group | None]:
    """The group that each group of a stage is joined to."""
    if len(merged) == len(groups) and all(map(_same_options, merged, groups)):
        return list(merged)
    partners: list[Group | None] = []
    for group in groups:
        alike = [candidate for candidate in merged if _same_options(candidate, group)]
        alone = sum(_same_options(candidate, group) for candidate in groups) == 1
        partners.append(alike[0] if alone and len(alike) == 1 else None)
    return partners


def _same_options(one: Group, other: Group) -> bool:
    return one.hyper == other.hyper and one.state.keys() == other.state.keys()


def _joined(one: Group, other: Group) -> dict[str, Any]:
    """Plain state: one value for all, or one for each name if they differ."""
    out: dict[str, Any] = {}
    for key, value in one.state.items():
        theirs = other.state[key]
        if type(value) is type(theirs) and value == theirs and not isinstance(value, dict):
            out[key] = value
        else:
            out[key] = {**_by_name(value, one.names), **_by_name(theirs, other.names)}
    return out


def _by_name(value: Any, names: Sequence[str]) -> dict[str, Any]:
    if isinstance(value, dict) and value.keys() <= set(names):
        return value
    return dict.fromkeys(names, value)
