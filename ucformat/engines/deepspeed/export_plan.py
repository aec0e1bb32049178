"""The files of a DeepSpeed engine and of its universal format, as an export plans them."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from ucformat.engines.deepspeed.experts import expert_of
from ucformat.engines.deepspeed.export_model import ZERO3, ExpertRanks, TargetEngine, TrainedModel
from ucformat.engines.deepspeed.export_objects import VERSION, ValueDecoder, Values, size_of
from ucformat.engines.deepspeed.export_optimizer import (
    Shards,
    TensorParallelPart,
    check_dtype,
    check_scalars,
    flat_groups,
    plain_optimizer,
    zero_optimizer,
)
from ucformat.engines.deepspeed.export_options import DeepSpeedExportOptions, UniversalExportOptions
from ucformat.errors import UsageError
from ucformat.exporters.base import Span, TargetFile
from ucformat.exporters.pickle import SavedTensor, Storage
from ucformat.exporters.values import whole
from ucformat.exporters.zip_file import lazy_torch_file
from ucformat.geometry.flat_buffer import part_range, part_size
from ucformat.geometry.local import pieces_of
from ucformat.schema import FLOATS
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.engines.deepspeed.export_model import OptimizerGroup
    from ucformat.engines.deepspeed.export_optimizer import FlatGroup
    from ucformat.geometry.tensor import Key, TensorInfo


# Checkpoints as `DeepSpeedEngine.save_checkpoint` of DeepSpeed 0.19.8 writes them, for any stage
# and number of ranks.
#
# The folder of the tag has a model states file for each tensor-parallel rank (under ZeRO 3 for each
# rank), and under ZeRO an optimizer file for each rank; `latest` beside it names the tag. `latest`,
# and one file that the engine cannot load a tag without, are written last: the first model states
# file; or under ZeRO 3 the first rank's optimizer file, because a rank that finds no model states
# goes on without them, but stops where it finds no optimizer.


class EnginePlan:
    """The files of one checkpoint."""

    def __init__(
        self, source: Checkpoint, infos: Sequence[TensorInfo], options: UniversalExportOptions
    ) -> None:
        self.source, self.model = source, TrainedModel(source, infos, options)
        model = self.model
        native = (
            options if isinstance(options, DeepSpeedExportOptions) else DeepSpeedExportOptions()
        )
        weights_only = native.weights_only
        if not weights_only:
            model.check_groups()
        self.engine = engine = TargetEngine.of(options, source, model.weights)
        self.values = Values.of(model, engine)
        self.fused = native.fused and engine.dtype != "float32"
        if weights_only:
            model.groups, model.trained = [], {}
        self.module = model.module(engine)
        self.buffers = model.buffers(self.module, must=engine.stage == ZERO3 and not weights_only)
        if weights_only and engine.stage == ZERO3:
            numbers = (n for n, i in self.module.items() if i.dtype not in FLOATS)
            self.buffers += [n for n in numbers if n not in self.buffers]
            model.take_all(self.module, self.buffers)
        self.frozen = [n for n in model.untrained(self.module) if n not in self.buffers]
        self.save_frozen = engine.stage > 1 and not weights_only
        aliases = ((a, n) for a, n in source.aliases.items() if a not in self.module)
        self.aliases = {alias: name for alias, name in aliases if name in self.module}
        self.experts = ExpertRanks.of(model, engine, options)
        self.shards = Shards(native, engine.tp, self.module)
        if model.groups and self.experts.experts.counts:
            unchanged = engine.stage == 0 and source.metadata.layout.get("zero") == 0
            before = model.expert_ranks or 1
            split = not unchanged or before != self.experts.degree
            model.groups = self.experts.groups(model.groups, before, split=split)
        joined = engine.stage > 0 or self.fused
        self._flat = {
            (tp, rank): flat_groups(engine, self.groups_on(rank), self.shards, tp) if joined else []
            for tp, rank in product(range(engine.tp), range(self.experts.degree))
        }
        for group in model.groups if self.fused else ():
            names = [n for n in group.names if group.masters[n].size]
            check_dtype("weight", self.module, names)

    def groups_on(self, expert_rank: int) -> list[OptimizerGroup]:
        """The optimizer groups as an expert-parallel rank has them."""
        return [self.experts.on(group, expert_rank) for group in self.model.groups]

    def flat(self, tp: int = 0, dp: int = 0) -> list[FlatGroup]:
        """The flat groups of a rank; none where parameters are not joined."""
        return self._flat[tp, self.experts.rank_of(dp)]

    def files(self) -> Iterator[TargetFile]:
        """The files, those that are last at the end."""
        engine = self.engine
        first: dict[int, TargetFile] = {}
        last: list[TargetFile] = []
        for tp in range(engine.tp):
            like: TargetFile | None = None
            for dp in range(engine.dp if engine.stage == ZERO3 else 1):
                decisive = engine.stage != ZERO3 and not tp
                states = partial(self.model_states, tp, dp)
                # Files of all ranks but the first have one size; only that has the tied names.
                template = like if dp > 1 and not self.values.ranks else None
                like = self.file(self.model_file(tp, dp), states, template, last=decisive)
                if decisive:
                    last.append(like)
                else:
                    yield like
            for dp in range(engine.dp if engine.stage and self.model.groups else 0):
                key = f"{engine.prefix}{dp}_mp_rank_{tp:02}_optim_states.pt"
                decisive = engine.stage == ZERO3 and not dp and not tp
                template = first.get(tp) if engine.stage == ZERO3 else None
                file = self.file(
                    key, partial(self._optimizer_states, tp, dp), template, last=decisive
                )
                first.setdefault(tp, file)
                if decisive:
                    last.append(file)
                else:
                    yield file
        yield from self._expert_files()
        yield from last
        yield TargetFile.of("latest", engine.tag.encode(), last=True)

    def _expert_files(self) -> Iterator[TargetFile]:
        """The weights of each expert, and at stage 0 the optimizer of each expert-parallel rank."""
        layers = {prefix: i for i, prefix in enumerate(self.experts.experts.counts)}
        by_expert: dict[tuple[str, int], list[str]] = {}
        for name in (*self.module, *self.aliases):
            if (expert := expert_of(name)) is not None:
                by_expert.setdefault(expert, []).append(name)
        for (prefix, number), names in by_expert.items():
            key = f"layer_{layers[prefix]}_expert_{number}_mp_rank_00_model_states.pt"
            yield self.file(key, partial(self._expert, names), None, last=False)
        if layers and self.model.groups and not self.engine.stage:
            for rank in range(self.experts.degree):
                key = f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
                yield self.file(key, partial(self._expert_optimizer, rank), None, last=False)

    def _expert_optimizer(self, rank: int, fill: bool) -> dict[str, Any]:  # noqa: FBT001
        groups = self.groups_on(rank)
        part = TensorParallelPart(self.shards, 0, fill)
        return {"optimizer": plain_optimizer(self.engine, groups, self.values, part, None)}

    def model_file(self, tp: int, dp: int) -> str:
        """The name of a model states file."""
        prefix = f"zero_pp_rank_{dp}_" if self.engine.stage == ZERO3 else ""
        return f"{prefix}mp_rank_{tp:02}_model_states.pt"

    def file(
        self, name: str, make: Callable[[bool], Any], like: TargetFile | None, *, last: bool
    ) -> TargetFile:
        """A file in the folder of the tag."""
        return lazy_torch_file(f"{self.engine.tag}/{name}", make, like=like, last=last)

    def left_out(self) -> tuple[str, ...]:
        """What of the source is not in the files."""
        used: dict[Key, TensorInfo] = {}
        engine = self.engine
        for name, info in self.module.items():
            if engine.stage != ZERO3 or name in self.frozen or name in self.buffers:
                used[info.key] = info
        for group in self.model.groups:
            masters = group.masters if engine.stage or engine.dtype != "float32" else {}
            for infos in (masters, *group.states.values()):
                used |= {info.key: info for info in infos.values()}
        return self.values.left_out(self.model, used)

    def model_states(self, tp: int, dp: int, fill: bool) -> dict[str, Any]:  # noqa: FBT001
        """The content of a model states file."""
        engine, zero = self.engine, self.engine.stage > 0 and bool(self.model.groups)
        frozen = self.experts.local(self.frozen, 0) if self.save_frozen else {}
        shared = self.aliases if not dp and not tp else {}
        out: dict[str, Any] = {
            "module": self._module(tp, fill),
            "buffer_names": list(self.experts.local(self.buffers, 0).values()),
            "optimizer": None,
            "param_shapes": None,
            "frozen_param_shapes": None,
            "shared_params": dict(shared) if zero else None,
            "frozen_param_fragments": None,
        }
        if zero:
            out["param_shapes"] = [
                {n: size_of(s) for n, s in flat.shapes.items()} for flat in self.flat(tp)
            ]
        elif self.model.groups:
            if fill:
                check_scalars(self.source, self.model.groups if self.fused else ())
            flat = self.flat(tp) if self.fused else None
            part = TensorParallelPart(self.shards, tp, fill)
            out["optimizer"] = plain_optimizer(engine, self.groups_on(0), self.values, part, flat)
        if self.save_frozen:
            shapes = {n: self.shards.dims(n, self.module[n].shape, tp) for n in frozen}
            sizes = {n: size_of(tuple(d.size for d in dims)) for n, dims in shapes.items()}
            out["frozen_param_shapes"] = {local: sizes[n] for n, local in frozen.items()}
            fragments = {local: self._fragment(n, tp, dp, fill) for n, local in frozen.items()}
            out["frozen_param_fragments"] = fragments
        if counts := self.experts.experts.counts:
            out |= {"num_experts": list(counts.values()), "ds_autoep_layers": None}
        return out | dict(self.values.counters(engine, dp))

    def _module(self, tp: int, fill: bool) -> dict[str, Any]:  # noqa: FBT001
        """The module's tensors; under ZeRO 3 empty ones in the place of parameters."""
        engine = self.engine
        empty = SavedTensor(Storage(Span(engine.dtype, 0, ())), (0,))
        module: dict[str, Any] = {}
        for name, info in self.module.items():
            if expert_of(name) is not None:
                continue
            if engine.stage == ZERO3 and name not in self.buffers:
                dtype = info.dtype if name in self.frozen and info.dtype not in FLOATS else None
                module[name] = (
                    empty if dtype is None else SavedTensor(Storage(Span(dtype, 0, ())), (0,))
                )
            else:
                module[name] = self.shards.saved(name, info, tp, fill)
        # weights are views of one buffer, as the fp32 copy is
        for flat in self.flat(tp) if self.fused else ():
            joined = flat.saved(self.module, 0, fill).storage
            module |= {
                n: SavedTensor(joined, flat.shapes[n], slot.start)
                for n, slot in flat.buffer.slots.items()
            }
        module |= {alias: module[name] for alias, name in self.aliases.items() if name in module}
        return module | self.values.extra

    def _expert(self, names: Sequence[str], fill: bool) -> dict[str, SavedTensor]:  # noqa: FBT001
        """The weights of an expert."""
        return {
            n: self.shards.saved(n, self.module[self.aliases.get(n, n)], 0, fill) for n in names
        }

    def _fragment(self, name: str, tp: int, dp: int, fill: bool) -> SavedTensor:  # noqa: FBT001
        """A rank's part of an untrained parameter: all, or under ZeRO 3 its partition."""
        info = self.module[name]
        if self.engine.stage != ZERO3:
            return self.shards.saved(name, info, tp, fill)
        dims = self.shards.dims(name, info.shape, tp)
        numel = math.prod(dim.size for dim in dims)
        part = part_size(numel, self.engine.dp)
        pieces = pieces_of(dims, part_range(numel, part, dp))[0] if fill and numel else ()
        span = Span(info.dtype, part, tuple((info, p) for p in pieces))
        return SavedTensor(Storage(span), (part,))

    def _optimizer_states(self, tp: int, dp: int, fill: bool) -> dict[str, Any]:  # noqa: FBT001
        """The content of an optimizer file."""
        if fill and not dp and not tp:
            check_scalars(self.source, self.model.groups)
        flat = self.flat(tp, dp)
        state = zero_optimizer(self.engine, self.model.groups, self.values, flat, dp, fill)
        out: dict[str, Any] = {"optimizer_state_dict": state}
        if "ds_config" in self.values.engine:
            out["ds_config"] = self.values.engine["ds_config"]
        return out | {"ds_version": VERSION}


# DeepSpeed's universal format, as `ds_to_universal` of DeepSpeed 0.19.8 writes it: a file for each
# parameter's state.
#
# An engine with `"checkpoint": {"load_universal": true}` loads it with any number of ranks. It
# looks for the model states of its own stage, of which one file is written, for the stage in the
# options. That file and `latest_universal` are written last, because the engine loads nothing
# without them.

_INFO = {"universal_checkpoint_version": 0.4}
#: What the converter leaves out of the optimizer's state dict, because it is in the files of the
#: parameters.
_SHARDED = (
    "base_optimizer_state",
    "param_slice_mappings",
    "single_partition_of_fp32_groups",
    "fp32_flat_groups",
)


class UniversalPlan(EnginePlan):
    """The files of one checkpoint."""

    def files(self) -> Iterator[TargetFile]:
        """See EnginePlan."""
        engine = self.engine
        if not engine.stage:
            raise UsageError(
                "a DeepSpeed engine of stage 0 does not load the universal format",
                hint="pass stage (--stage) 1, 2 or 3",
            )
        for group in self.model.groups:
            for name, master in group.masters.items():
                if not master.size:
                    continue
                states = {"fp32": master} | {s: infos[name] for s, infos in group.shaped().items()}
                for state, info in states.items():
                    yield self._atom(name, state, {"cat_dim": 0, "param": whole(info)})
                for state, value in _scalars(group, name).items():
                    yield self._atom(name, state, value)
        yield self.file("zero/optimizer_state.pt", self._optimizer_state, None, last=False)
        yield self.file(self.model_file(0, 0), partial(self.model_states, 0, 0), None, last=True)
        yield TargetFile.of("latest_universal", engine.tag.encode(), last=True)

    def _atom(self, name: str, state: str, value: Any) -> TargetFile:
        key = check_key(f"{self.engine.tag}/zero/{name}/{state}.pt")
        return lazy_torch_file(key, lambda _: value)

    def model_states(self, tp: int, dp: int, fill: bool) -> dict[str, Any]:  # noqa: FBT001
        """See EnginePlan."""
        return super().model_states(tp, dp, fill) | {"universal_checkpoint_info": dict(_INFO)}

    def _optimizer_state(self, fill: bool) -> dict[str, Any]:  # noqa: FBT001
        """The optimizer's values that are not of single parameters, as of all stages."""
        groups = self.model.groups
        if fill:
            check_scalars(self.source, groups)
        state = zero_optimizer(self.engine, groups, self.values, self.flat(), 0, fill)
        inner = "optimizer_state_dict" if self.engine.stage == ZERO3 else "base_optimizer_state"
        hypers = state[inner]["param_groups"]
        filled = ((i, flat) for i, flat in enumerate(self.flat()) if flat.dims)
        scalars = {i: _scalars(flat.group, next(iter(flat.dims))) for i, flat in filled}
        not_sharded = {k: v for k, v in state.items() if k not in _SHARDED}
        common = {"state": {i: s for i, s in scalars.items() if s}, "param_groups": hypers}
        return not_sharded | {"optimizer_state_dict": common, "param_groups": hypers}

    def not_restored(self) -> tuple[str, ...]:
        """What DeepSpeed itself does not restore from the files."""
        notes: list[str] = []
        if names := [n for n in self.model.untrained(self.module) if self.module[n].size]:
            plural = "s" * (len(names) != 1)
            notes.append(
                f"buffers and frozen parameters ({len(names)} tensor{plural}): written, but not "
                "loaded by DeepSpeed"
            )
        decode = ValueDecoder({})
        hypers = [repr(decode.hyper(group.document)) for group in self.model.groups]
        if self.engine.stage == ZERO3 and len(set(hypers)) > 1:
            notes.append(
                "hyper-parameters of optimizer groups after the first: written, but at stage 3 "
                "DeepSpeed gives all "
                "groups those of the first"
            )
        return tuple(notes)


def _scalars(group: OptimizerGroup, name: str) -> dict[str, Any]:
    """The states of a parameter that have no dims, or are plain numbers."""
    decode = ValueDecoder({})
    scalars: dict[str, Any] = {s: whole(infos[name]) for s, infos in group.scalars().items()}
    return scalars | {state: decode(values[name]) for state, values in group.plain().items()}
