"""DeepSpeed's universal format, as `ds_to_universal` of DeepSpeed 0.19.8 writes it: a file for each parameter's state.

An engine with `"checkpoint": {"load_universal": true}` loads it with any number of ranks. It looks for the model states
of its own stage, of which one file is written, for the stage in the options. That file and `latest_universal` are
written last, because the engine loads nothing without them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ucformat.errors import UsageError
from ucformat.exporters.base import TargetFile
from ucformat.exporters.deepspeed.native import EnginePlan
from ucformat.exporters.deepspeed.optimizer import check_scalars, zero_optimizer
from ucformat.exporters.deepspeed.options import ZERO3
from ucformat.exporters.deepspeed.values import ValueDecoder
from ucformat.exporters.torch_file import lazy_torch_file
from ucformat.exporters.values import whole
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.exporters.deepspeed.model import OptimizerGroup

_INFO = {"universal_checkpoint_version": 0.4}
#: What the converter leaves out of the optimizer's state dict, because it is in the files of the parameters.
_SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups", "fp32_flat_groups")


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
        """The values of the optimizer that are not of single parameters, in the forms for all stages."""
        groups = self.model.groups
        if fill:
            check_scalars(self.source, groups)
        state = zero_optimizer(self.engine, groups, self.values, self.flat(), 0, fill)
        base = state["optimizer_state_dict" if self.engine.stage == ZERO3 else "base_optimizer_state"]
        names = [next(iter(flat.dims), None) for flat in self.flat()]
        scalars = {i: _scalars(flat.group, n) for i, (flat, n) in enumerate(zip(self.flat(), names, strict=True)) if n}
        kept = {k: v for k, v in state.items() if k not in _SHARDED}
        common = {"state": {i: found for i, found in scalars.items() if found}, "param_groups": base["param_groups"]}
        return kept | {"optimizer_state_dict": common, "param_groups": base["param_groups"]}

    def not_restored(self) -> tuple[str, ...]:
        """What DeepSpeed itself does not restore from the files."""
        found: list[str] = []
        if names := [n for n in self.model.untrained(self.module) if self.module[n].size]:
            plural = "s" * (len(names) != 1)
            found.append(
                f"buffers and frozen parameters ({len(names)} tensor{plural}): written, but not loaded by DeepSpeed"
            )
        decode = ValueDecoder({})
        hypers = [repr(decode.hyper(group.document)) for group in self.model.groups]
        if self.engine.stage == ZERO3 and len(set(hypers)) > 1:
            found.append(
                "hyper-parameters of optimizer groups after the first: written, but at stage 3 DeepSpeed gives all "
                "groups those of the first"
            )
        return tuple(found)


def _scalars(group: OptimizerGroup, name: str) -> dict[str, Any]:
    """The states of a parameter that have no dims, or are plain numbers."""
    decode = ValueDecoder({})
    found: dict[str, Any] = {state: whole(infos[name]) for state, infos in group.scalars().items()}
    return found | {state: decode(values[name]) for state, values in group.plain().items()}
