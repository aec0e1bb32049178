"""Checkpoints as `DeepSpeedEngine.save_checkpoint` of DeepSpeed 0.19.8 writes them, for any stage and number of ranks.

The folder of the tag has a model states file for each tensor-parallel rank (under ZeRO 3 for each rank), and under ZeRO
an optimizer file for each rank; `latest` beside it names the tag. `latest`, and one file that the engine cannot load a
tag without, are written last: the first model states file; or under ZeRO 3 the first rank's optimizer file, because a
rank that finds no model states goes on without them, but stops where it finds no optimizer.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from ucformat.exporters.base import Span, TargetFile
from ucformat.exporters.deepspeed.flat import Shards, check_dtype, flat_groups
from ucformat.exporters.deepspeed.model import TrainedModel
from ucformat.exporters.deepspeed.objects import VERSION, Values
from ucformat.exporters.deepspeed.optimizer import check_scalars, plain_optimizer, zero3_optimizer, zero12_optimizer
from ucformat.exporters.deepspeed.options import ZERO3, DeepSpeedOptions, Engine
from ucformat.exporters.deepspeed.values import size_of
from ucformat.exporters.pickle import SavedTensor, Storage
from ucformat.exporters.torch_file import lazy_torch_file
from ucformat.geometry.flat_buffer import part_range, part_size
from ucformat.geometry.local import pieces_of
from ucformat.schema import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.exporters.deepspeed.flat import FlatGroup
    from ucformat.exporters.deepspeed.options import UniversalOptions
    from ucformat.geometry.tensor import Key, TensorInfo

__all__ = ["EnginePlan"]


class EnginePlan:
    """The files of one checkpoint.

    Args:
        source: the checkpoint.
        infos: the tensors to export.
        options: the options.

    Raises:
        UcformatError: see `Exporter.target`.
    """

    def __init__(self, source: Checkpoint, infos: Sequence[TensorInfo], options: UniversalOptions) -> None:
        self.source, self.model = source, TrainedModel(source, infos, options)
        model = self.model
        native = options if isinstance(options, DeepSpeedOptions) else DeepSpeedOptions()
        weights_only = native.weights_only
        if not weights_only:
            model.check_groups()
        self.engine = engine = Engine.of(options, source, model.weights)
        self.values = Values.of(model, engine)
        self.fused = native.fused and engine.dtype != "float32"
        if weights_only:
            model.groups, model.trained = [], {}
        self.module = model.module(engine)
        self.buffers = model.buffers(self.module, must=engine.stage == ZERO3 and not weights_only)
        if weights_only and engine.stage == ZERO3:
            self.buffers += [n for n, i in self.module.items() if i.dtype not in FLOATS and n not in self.buffers]
            model.take_all(self.module, self.buffers)
        self.frozen = [n for n in model.untrained(self.module) if n not in self.buffers]
        self.save_frozen = engine.stage > 1 and not weights_only
        self.aliases = {a: n for a, n in source.aliases.items() if n in self.module and a not in self.module}
        self.shards = Shards(native, engine.tp, self.module)
        self.flat = [self._flat(rank) for rank in range(engine.tp)]
        if self.fused:
            for group in model.groups:
                check_dtype("weight", self.module, [n for n in group.names if group.masters[n].size])

    def _flat(self, rank: int) -> list[FlatGroup]:
        if self.engine.stage or self.fused:  # else parameters are not joined
            return flat_groups(self.engine, self.model.groups, self.shards, rank)
        return []

    def files(self) -> Iterator[TargetFile]:
        """The files, those that are last at the end."""
        engine = self.engine
        first: dict[int, TargetFile] = {}
        last: list[TargetFile] = []
        for tp in range(engine.tp):
            like: TargetFile | None = None
            for dp in range(engine.dp if engine.stage == ZERO3 else 1):
                decisive = engine.stage != ZERO3 and not tp
                name = self.model_file(tp, dp)
                file = self.file(
                    name,
                    partial(self.model_states, tp, dp),
                    like if dp > 1 and not self.values.ranks else None,
                    last=decisive,
                )
                like = file
                if decisive:
                    last.append(file)
                else:
                    yield file
            for dp in range(engine.dp if engine.stage and self.model.groups else 0):
                key = f"{engine.prefix}{dp}_mp_rank_{tp:02}_optim_states.pt"
                decisive = engine.stage == ZERO3 and not dp and not tp
                same = first.get(tp) if engine.stage == ZERO3 else None
                file = self.file(key, partial(self._optimizer_states, tp, dp), same, last=decisive)
                first.setdefault(tp, file)
                if decisive:
                    last.append(file)
                else:
                    yield file
        yield from last
        yield TargetFile.of("latest", engine.tag.encode(), last=True)

    def model_file(self, tp: int, dp: int) -> str:
        """The name of a model states file.

        Args:
            tp: the tensor-parallel rank.
            dp: the data-parallel rank.
        """
        prefix = f"zero_pp_rank_{dp}_" if self.engine.stage == ZERO3 else ""
        return f"{prefix}mp_rank_{tp:02}_model_states.pt"

    def file(self, name: str, make: Callable[[bool], Any], like: TargetFile | None, *, last: bool) -> TargetFile:
        """A file in the folder of the tag.

        Args:
            name: its name.
            make: see `lazy_torch_file`.
            like: see `lazy_torch_file`.
            last: see `TargetFile`.
        """
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
            for held in (masters, *group.states.values()):
                used |= {info.key: info for info in held.values()}
        return self.values.left_out(self.model, used)

    def model_states(self, tp: int, dp: int, fill: bool) -> dict[str, Any]:  # noqa: FBT001
        """The content of a model states file.

        Args:
            tp: the tensor-parallel rank.
            dp: the data-parallel rank.
            fill: whether spans need their pieces.
        """
        engine, zero = self.engine, self.engine.stage > 0 and bool(self.model.groups)
        frozen = {n: self.shards.dims(n, self.module[n].shape, tp) for n in self.frozen} if self.save_frozen else {}
        shared = self.aliases if not dp and not tp else {}
        out: dict[str, Any] = {
            "module": self._module(tp, fill),
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": None,
            "frozen_param_shapes": None,
            "shared_params": dict(shared) if zero else None,
            "frozen_param_fragments": None,
        }
        if zero:
            out["param_shapes"] = [{n: size_of(s) for n, s in flat.shapes.items()} for flat in self.flat[tp]]
        elif self.model.groups:
            if fill:
                check_scalars(self.source, self.model.groups if self.fused else ())
            flat = self.flat[tp] if self.fused else None
            out["optimizer"] = plain_optimizer(engine, self.model.groups, self.values, self.shards, flat, tp, fill)
        if self.save_frozen:
            out["frozen_param_shapes"] = {n: size_of(tuple(d.size for d in dims)) for n, dims in frozen.items()}
            out["frozen_param_fragments"] = {n: self._fragment(n, tp, dp, fill) for n in frozen}
        return out | dict(self.values.counters(engine, dp))

    def _module(self, tp: int, fill: bool) -> dict[str, Any]:  # noqa: FBT001
        """The module's tensors; under ZeRO 3 empty ones in the place of parameters."""
        engine = self.engine
        empty = SavedTensor(Storage(Span(engine.dtype, 0, ())), (0,))
        module: dict[str, Any] = {}
        for name, info in self.module.items():
            if engine.stage == ZERO3 and name not in self.buffers:
                kept = info.dtype if name in self.frozen and info.dtype not in FLOATS else None
                module[name] = empty if kept is None else SavedTensor(Storage(Span(kept, 0, ())), (0,))
            else:
                module[name] = self.shards.saved(name, info, tp, fill)
        for flat in (
            self.flat[tp] if self.fused else ()
        ):  # weights are views of one buffer, in the order of the fp32 copy
            joined = flat.saved(self.module, 0, fill).storage
            module |= {n: SavedTensor(joined, flat.shapes[n], slot.start) for n, slot in flat.buffer.slots.items()}
        module |= {alias: module[name] for alias, name in self.aliases.items()}
        return module | self.values.extra

    def _fragment(self, name: str, tp: int, dp: int, fill: bool) -> SavedTensor:  # noqa: FBT001
        """What a rank holds of a parameter that is not trained: all, or under ZeRO 3 its partition."""
        info = self.module[name]
        if self.engine.stage != ZERO3:
            return self.shards.saved(name, info, tp, fill)
        dims = self.shards.dims(name, info.shape, tp)
        numel = math.prod(dim.size for dim in dims)
        part = part_size(numel, self.engine.dp)
        pieces = pieces_of(dims, part_range(numel, part, dp))[0] if fill and numel else ()
        return SavedTensor(Storage(Span(info.dtype, part, tuple((info, p) for p in pieces))), (part,))

    def _optimizer_states(self, tp: int, dp: int, fill: bool) -> dict[str, Any]:  # noqa: FBT001
        """The content of an optimizer file."""
        if fill and not dp and not tp:
            check_scalars(self.source, self.model.groups)
        make = zero3_optimizer if self.engine.stage == ZERO3 else zero12_optimizer
        state = make(self.engine, self.model.groups, self.values, self.flat[tp], dp, fill)
        out: dict[str, Any] = {"optimizer_state_dict": state}
        if "ds_config" in self.values.engine:
            out["ds_config"] = self.values.engine["ds_config"]
        return out | {"ds_version": VERSION}
