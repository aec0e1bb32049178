"""DeepSpeed checkpoints of data, tensor and pipeline parallelism, ZeRO 0 to 3, read in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.engines.deepspeed.experts import adopt_experts, check_degree, expert_model
from ucformat.engines.deepspeed.merge import Merged, merge_groups, tensor_list
from ucformat.engines.deepspeed.model_states import ModelStates, Objects, load_all
from ucformat.engines.deepspeed.pipeline import adopt_layers, layers_of, names_of_stages
from ucformat.engines.deepspeed.resolver import ShardingResolver
from ucformat.engines.deepspeed.zero import ParallelDegrees, Slice, read_slice
from ucformat.errors import UnsupportedError, UsageError, option_text
from ucformat.reading.readable import CheckpointMetadata
from ucformat.sources.pickle.file import TorchFile, TorchZip
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.engines.deepspeed.experts import Experts
    from ucformat.engines.deepspeed.folder import DeepSpeedOptions, TagFiles
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Key
    from ucformat.reading.readable import FileRecord
    from ucformat.storage.base import Store


class OpenDeepSpeed:
    """One opened DeepSpeed checkpoint."""

    kind = "deepspeed"
    part = ""  # there is a file for each of the ranks that the files record

    def __init__(self, store: Store, files: TagFiles, how: DeepSpeedOptions) -> None:
        self.store = store
        self._files = files
        self._opened: dict[str, TorchFile] = {}

        def load(key: str, opened: dict[str, TorchFile] = self._opened) -> TorchFile:
            file = opened[key] = TorchFile(store, key, allow=how.allow)
            return file

        degrees, stages = _read(load, files, how)
        models = [m for slices in stages for of in slices for m in of.models]
        resolver = ShardingResolver(models, degrees.tp, how.layout, how.vocab, how.cuts)
        merged = Merged(store, stages, resolver)
        contents = self._contents = merged.contents
        contents.groups = merge_groups(stages)
        by_label = {
            degrees.label(p, t, d) if d else of.label: model
            for p, slices in enumerate(stages)
            for t, of in enumerate(slices)
            for d, model in enumerate(of.models)
        }
        optimizers = {of.label: of.contents.optimizer for slices in stages for of in slices}
        not_stored = list(dict.fromkeys(name for slices in stages for name in slices[0].not_stored))
        objects = Objects(by_label, optimizers, contents, not_stored).json()  # adds large tensors
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
            files=files.all,
            means=merged.means,
            folder=files.tag,
        )

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """Where the bytes of a tensor are; opens the files of the ranks that hold them, if they are not yet open."""
        return self._contents.extents(key, within, self.store.url)

    def records(self) -> Iterator[FileRecord]:
        """Every record of the zip files of all ranks; reads the directories of those that are not open."""
        for key in self._files.all:
            if key != self._files.latest:
                yield from (self._opened.get(key) or TorchZip(self.store, key)).records()


def _read(
    load: Callable[[str], TorchFile], files: TagFiles, how: DeepSpeedOptions
) -> tuple[ParallelDegrees, list[list[Slice]]]:
    """The checkpoint's slices by pipeline stage and tensor-parallel rank."""
    if files.zero3 and not how.optimizer:
        raise UsageError(
            f"{files.models[0][0]} is of ZeRO 3, which stores the weights in the optimizer's files",
            hint=f"leave out {option_text('optimizer')}",
        )
    first = ModelStates(load(files.models[0][0]))
    # before opening others, which may not belong to it
    degrees = ParallelDegrees.of(files, first, optimizer=how.optimizer)
    others = [row[not m :] for m, row in enumerate(files.models)]
    rows = [[ModelStates(file) for file in row] for row in load_all(load, others)]
    rows[0].insert(0, first)
    grid = [[rows[p * degrees.tp + t] for t in range(degrees.tp)] for p in range(degrees.pp)]
    names: list[Sequence[Sequence[str]] | None] = [how.groups] * degrees.pp
    ties: dict[str, str] = {}
    if first.in_layers:
        opened = dict(zip(files.layers, load_all(load, files.layers.values()), strict=True))
        for t in range(degrees.tp):
            models = [stage[t][0] for stage in grid]
            layers = layers_of({number: row[t] for number, row in opened.items()})
            if models[0].param_shapes is not None:
                adopt_layers(models, layers)
            else:
                names, ties = names_of_stages(models, layers, how.groups)
    experts = None
    if files.experts or first.value.get("num_experts"):
        if degrees.pp * degrees.tp > 1 or files.zero3:
            raise UnsupportedError(
                f"{first.key}: not yet read: experts with tensor parallelism, pipelines or ZeRO 3"
            )
        weights = [row[0] for row in load_all(load, [[key] for key in files.experts.values()])]
        experts = adopt_experts(first, dict(zip(files.experts, weights, strict=True)), degrees.dp)
        if (
            first.param_shapes is None
            and first.value.get("optimizer") is not None
            and how.optimizer
        ):
            return degrees, _expert_stages(files, load, experts, first, how)
    shared = first.aliases(zero3=files.zero3) if first.param_shapes is not None else None
    optims = files.optims or ((),) * len(rows)

    def read(at: tuple[int, int]) -> Slice:
        p, t = at
        return read_slice(
            grid[p][t],
            optims[p * degrees.tp + t],
            degrees.label(p, t),
            load,
            zero3=files.zero3,
            shared=None if p else shared,
            names=names[p],
            experts=experts,
            optimizer=how.optimizer,
        )

    stages: list[list[Slice]] = []
    for p in range(degrees.pp):
        one = read((p, 0))
        if one.stage == 0 and one.contents.groups:
            names[p] = [group.names for group in one.contents.groups]
        stages.append([one, *map_io(read, [(p, t) for t in range(1, degrees.tp)])])
    stages[0][0].aliases.update(ties)
    return degrees, stages


def _expert_stages(
    files: TagFiles,
    load: Callable[[str], TorchFile],
    experts: Experts,
    first: ModelStates,
    how: DeepSpeedOptions,
) -> list[list[Slice]]:
    """Under ZeRO 0 each expert-parallel rank as a slice of its own; shared tensors must agree as across stages."""
    degree = len(files.expert_optims)
    check_degree(experts, first, degree)
    opened = [row[0] for row in load_all(load, [[key] for key in files.expert_optims])]
    stages: list[list[Slice]] = []
    for rank, file in enumerate(opened):
        model = expert_model(first, file, experts, degree, rank)
        label = f"ep{rank}" if rank else ""
        names = (
            None
            if how.groups is None
            else [[n for n in g if experts.locally(n, degree, rank)] for g in how.groups]
        )
        of = read_slice([model], (), label, load, zero3=False, shared=None, names=names)
        if rank:
            of.contents.forget(key for key in stages[0][0].contents.infos if key.state == "weight")
        else:
            of.models = [first]  # only the first has more than that
        stages.append([of])
    return stages


def _layout(degrees: ParallelDegrees, stages: list[list[Slice]], files: TagFiles) -> dict[str, Any]:
    """Stage and ranks; under ZeRO 3 also the dtype of the weights, of which only the fp32 copy is stored."""
    first = stages[0][0]
    out: dict[str, Any] = {"zero": first.stage, "dp": degrees.dp}
    if files.experts and (first.degrees or files.expert_optims):
        sizes = sorted({n for n in first.degrees if n > 1} or {len(files.expert_optims) or 1})
        out["ep"] = sizes[0] if len(sizes) == 1 else sizes
    out |= {axis: n for axis, n in (("tp", degrees.tp), ("pp", degrees.pp)) if n > 1}
    described = [name for name in first.model.described if name in first.model.module]
    if first.stage == 3 and described:
        out["weight_dtype"] = first.model.module[described[0]].dtype
    return out
