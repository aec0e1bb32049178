"""FSDP1: which elements of which parameters this rank has in the flat parameters of a module.

FSDP1 joins the parameters of a module to a flat one, with padding, and gives each rank an equal range
of it. So what a rank has of each parameter is a range of its elements, which is saved and filled in
place under the name in the module that is wrapped, as that of any other layout: nothing is gathered.
An optimizer has the flat parameters, or (`use_orig_params`) this rank's view of each parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ucformat.errors import UnsupportedError
from ucformat.geometry.distribution import Distribution, RankMesh
from ucformat.torch.state.names import plain_name
from ucformat.torch.state.sharded import is_flattened, is_fsdp1

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed.fsdp import FullyShardedDataParallel

_FLAT = "_flat_param"  # the name that FSDP1 gives a flat parameter in a module
_OTHERS = "use fully_shard (FSDP2), or the state dicts of torch.distributed.checkpoint.state_dict"


@dataclass(frozen=True, slots=True)
class FlatPart:
    """What this rank has of a tensor that FSDP1 cuts by elements, or of a value beside such a tensor.

    Attributes:
        tensor: the elements from `start` on in one dim, or the value.
        shape: of the whole tensor.
        layout: the sizes of the axes of the mesh, by name.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: int
    distribution: Distribution | None
    layout: Mapping[str, int]

    def size(self) -> tuple[int, ...]:
        """Return the shape, as of a DTensor."""
        return self.shape

    def check(self, label: str) -> None:
        """Check that what this rank has is a plain tensor."""
        if type(self.tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UnsupportedError(
                f"{label} is a {type(self.tensor).__name__} of elements that FSDP1 has cut, whose "
                "parts do not tell those of the whole tensor",
                hint="use fully_shard (FSDP2), which cuts rows",
            )


@dataclass(frozen=True, slots=True)
class FlatSlot:
    """Where a parameter is in what an optimizer has on this rank.

    Attributes:
        param: the flat parameter, in which others are, too (`joined`), or this rank's view of the
            parameter alone.
        at: the first element in `param`, of `size` elements; it is element `start` of the parameter.
        strides: of the parameter, in which it is viewed if it is not cut.
        distribution: over the ranks that cut the flat parameter (None: it is not cut).
        tied: whether it is a further name of a parameter.
    """

    param: torch.Tensor
    joined: bool
    shape: tuple[int, ...]
    at: int
    size: int
    start: int
    strides: tuple[int, ...]
    distribution: Distribution | None
    layout: Mapping[str, int]
    tied: bool = False

    @property
    def optimized(self) -> bool:
        """Whether an optimizer has states of it on this rank: of a view without elements it makes none."""
        return self.joined or self.size > 0

    @property
    def weight(self) -> torch.Tensor | FlatPart:
        """What this rank has of the parameter."""
        return self._part(self.param.detach(), self.distribution)

    def state(self, label: str, tensor: torch.Tensor) -> torch.Tensor | FlatPart:
        """What a state that the optimizer has for `param` is for the parameter.

        Raises:
            UnsupportedError: it has neither an element for each of `param`, nor is it one value.
        """
        # ranks without elements of a view do not know its states, so they do not describe them
        here = self.distribution if self.joined else self._of_holders()
        if not tensor.dim():
            if self.joined or here is None:
                return tensor
            return FlatPart(tensor, (), 0, Distribution(here.mesh), self.layout)
        if tensor.shape != self.param.shape:
            raise UnsupportedError(
                f"{label} has the shape {list(tensor.shape)}, on this rank its parameter has the "
                f"shape {list(self.param.shape)}: how FSDP1 cuts it is not known",
                hint="use fully_shard (FSDP2), or an optimizer whose states have the shape of "
                "their parameter",
            )
        return self._part(tensor, here)

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, step: bool
    ) -> torch.Tensor | None:
        """A new tensor of the optimizer for a state of this shape; None if it would not be this one's alone.

        Args:
            step: it is a counter, which PyTorch keeps on the host.
        """
        if self.joined:
            return None
        if not shape:
            return torch.empty((), dtype=dtype, device="cpu" if step else self.param.device)
        same = shape == self.shape
        return torch.empty_like(self.param, dtype=dtype, requires_grad=False) if same else None

    def _part(
        self, tensor: torch.Tensor, distribution: Distribution | None
    ) -> torch.Tensor | FlatPart:
        part = tensor[self.at : self.at + self.size] if self.joined else tensor
        if distribution is None:
            return part.as_strided(self.shape, self.strides, part.storage_offset())
        return FlatPart(part, self.shape, self.start, distribution, self.layout)

    def _of_holders(self) -> Distribution | None:
        """The distribution over the ranks that have elements."""
        d = self.distribution
        if d is None or d.flat is None:
            return d
        first, last = d.position // d.part, (d.position + math.prod(self.shape) - 1) // d.part
        ranks = d.mesh.ranks.take(range(first, last + 1), d.flat)
        mesh = RankMesh.of(tuple(ranks.shape), ranks.reshape(-1).tolist())
        return Distribution(mesh, (), d.flat, d.part, d.position - first * d.part)


class FlatModule:
    """A module that FSDP1 wraps, or of which it wraps parts; its parameters and other entries as of the module alone.

    Raises:
        UnsupportedError: what a rank has of a parameter is not known, or not at this time.
    """

    def __init__(self, label: str, module: torch.nn.Module) -> None:
        self.label, self.module = label, module
        self._names = {id(part): name for name, part in module.named_modules()}
        self._handles: list[Any] = []
        self._slots: dict[int, dict[str, FlatSlot]] = {}  # of each module, by the name there
        self._flattened: set[tuple[int, str]] = set()  # likewise, those in any flat parameter
        for unit in module.modules():
            if is_fsdp1(unit) and (handle := getattr(unit, "_handle", None)) is not None:
                self._check(unit, handle)
                self._add(unit, handle)
                self._handles.append(handle)
        for part in module.modules():
            self._check_part(part)

    def entries(self) -> dict[str, Any]:
        """The entries of the module's state dict, in its order, with parts of the parameters that are cut.

        A further name of a parameter of which this rank has no elements is left out: that two
        parameters are one is seen from their memory.
        """
        out: dict[str, Any] = {}
        seen: set[int] = set()
        for prefix, part in self.module.named_modules(remove_duplicate=False):
            own: dict[str, Any] = {}
            part._save_to_state_dict(own, "", keep_vars=False)  # noqa: SLF001 - without hooks, which gather
            slots = self._slots.get(id(part), {})
            further = {n for n, slot in slots.items() if slot.tied or id(part) in seen}
            own |= {name: slot.weight for name, slot in slots.items()}
            out |= {
                f"{prefix}.{name}" if prefix else name: value
                for name, value in own.items()
                if name != _FLAT and not (name in further and not slots[name].size)
            }
            seen.add(id(part))
        return out

    def parameters(self) -> Iterator[tuple[str, torch.Tensor, FlatSlot | None]]:
        """Yield the name of each parameter, and what an optimizer has for it; tied ones once."""
        for prefix, part in self.module.named_modules():
            slots = self._slots.get(id(part), {})
            own: list[tuple[str, torch.Tensor, FlatSlot | None]] = [
                (n, slot.param, slot) for n, slot in slots.items() if not slot.tied
            ]
            plain = part.named_parameters(recurse=False)
            own += [(n, p, None) for n, p in plain if n not in (*slots, _FLAT)]
            yield from ((f"{prefix}.{n}" if prefix else n, p, slot) for n, p, slot in own)

    def filled(self) -> None:
        """Let the next forward gather what was filled: an evaluation may have left what was gathered before."""
        for handle in self._handles:
            for name in ("_full_param_padded", "_full_prec_full_param_padded"):
                gathered = getattr(handle.flat_param, name, None)
                if gathered is not None:
                    gathered.untyped_storage().resize_(0)

    def _check(self, unit: FullyShardedDataParallel, handle: Any) -> None:
        """Check that this rank's part of a flat parameter is in its place, and known."""
        where, flat = self._where(unit), handle.flat_param
        if handle._offload_params:  # noqa: SLF001 - nothing of a handle is public
            raise UnsupportedError(
                f"{where} is wrapped in FSDP1 with cpu_offload, which keeps copies of its parameters",
                hint=_OTHERS,
            )
        if any(extension is not None for extension in flat._param_extensions):  # noqa: SLF001
            raise UnsupportedError(
                f"{where} has DTensors in FSDP1, as tensor parallelism makes them",
                hint="use fully_shard (FSDP2), which keeps them as they are",
            )
        states = (unit.training_state, handle._training_state)  # noqa: SLF001
        is_cut = handle.is_sharded(flat) or not handle.uses_sharded_strategy
        if any(s.name != "IDLE" for s in states) or handle._skipped_use_sharded_views or not is_cut:  # noqa: SLF001
            raise UnsupportedError(
                f"{where} is in the middle of a step, or of summon_full_params: its parameters are "
                "gathered",
                hint="save and load between two steps, after the backward pass",
            )

    def _add(self, unit: FullyShardedDataParallel, handle: Any) -> None:
        """Add the parameters of a flat one."""
        flat, sharded = handle.flat_param, handle.uses_sharded_strategy
        infos = (*flat._param_infos, *flat._shared_param_infos)  # noqa: SLF001 - as all below
        self._flattened |= {(id(info.module), info.param_name) for info in infos}
        self._flattened.add((id(unit.module), _FLAT))
        if not sharded and handle._use_orig_params:  # noqa: SLF001 - then they are plain tensors
            return
        mesh, layout = _mesh_of(unit, handle)
        padded = flat._numels_with_padding  # noqa: SLF001
        starts = compress(accumulate(padded, initial=0), (not p for p in flat._is_padding_mask))  # noqa: SLF001
        for number, (info, position, here) in enumerate(
            zip(flat._param_infos, starts, flat._shard_param_infos, strict=True)  # noqa: SLF001
        ):
            shape, strides = tuple(flat._shapes[number]), tuple(flat._strides[number])  # noqa: SLF001
            if sharded and not flat._contiguities[number]:  # noqa: SLF001
                raise UnsupportedError(
                    f"{self._where(info.module)}.{info.param_name} has the strides {list(strides)}, "
                    "so FSDP1 cuts its elements in another order than that of their indices",
                    hint="make it contiguous before it is wrapped: "
                    "module.to(memory_format=torch.contiguous_format)",
                )
            size = here.numel_in_shard if here.in_shard else 0
            view = flat._params[number] if handle._use_orig_params else None  # noqa: SLF001
            if view is not None:
                self._check_view(info, view, flat, here)
            cut = sharded and math.prod(shape) > 0
            part = flat._sharded_size.numel()  # noqa: SLF001
            slot = FlatSlot(
                flat if view is None else view,
                view is None,
                shape,
                (here.offset_in_shard or 0) if view is None else 0,
                size,
                here.intra_param_start_idx or 0,
                strides,
                Distribution(mesh, (), len(mesh.sizes) - 1, part, position) if cut else None,
                layout,
            )
            self._slots.setdefault(id(info.module), {})[info.param_name] = slot
        for name, module, _, first_name, first_module, _ in flat._shared_param_infos:  # noqa: SLF001
            slot = self._slots[id(first_module)][first_name]
            self._slots.setdefault(id(module), {}).setdefault(name, replace(slot, tied=True))

    def _check_view(self, info: Any, view: torch.Tensor, flat: torch.Tensor, here: Any) -> None:
        """Check that a parameter is still the view of the flat one that FSDP1 has made."""
        at = flat.data_ptr() + (here.offset_in_shard or 0) * flat.element_size()
        moved = here.in_shard and (view.data_ptr() != at or view.dtype != flat.dtype)
        if moved or getattr(info.module, info.param_name, None) is not view:
            raise UnsupportedError(
                f"{self._where(info.module)}.{info.param_name} has been replaced, which FSDP1 takes "
                "over in its next forward",
                hint="change parameters in place: parameter.copy_(…)",
            )

    def _check_part(self, part: torch.nn.Module) -> None:
        """Check that the entries of a module's state dict are its tensors, without what FSDP1 adds."""
        slots, kind = self._slots.get(id(part), {}), type(part)
        own = kind._save_to_state_dict is not torch.nn.Module._save_to_state_dict  # noqa: SLF001
        hooks = [*part._state_dict_hooks.values(), *part._state_dict_pre_hooks.values()]  # noqa: SLF001
        if (own and slots) or not all(map(_is_torchs, hooks)):
            raise UnsupportedError(
                f"{self._where(part)} ({kind.__name__}) makes its own state dict, of parameters that "
                "FSDP1 would have to gather for it",
                hint=_OTHERS,
            )
        for name, parameter in part._parameters.items():  # noqa: SLF001 - tied ones, too
            if is_flattened(parameter) and (id(part), name) not in self._flattened:
                raise UnsupportedError(
                    f"{self._where(part)}.{name} is in a flat parameter of FSDP1 that the state does not "
                    "have, or is tied to a parameter in another unit, which FSDP1 does not keep equal",
                    hint="pass the module that FSDP1 has returned, and wrap the modules of tied "
                    "parameters in one unit",
                )

    def _where(self, part: torch.nn.Module) -> str:
        name = plain_name(self.module, self._names[id(part)])
        return ".".join(filter(None, (self.label, name)))


def _is_torchs(hook: Any) -> bool:
    """Whether a hook of a state dict is one of PyTorch's own wrappers, which only rename."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _mesh_of(unit: Any, handle: Any) -> tuple[RankMesh, dict[str, int]]:
    """The ranks that cut a flat parameter, and along the first axis of two those that have the same part.

    Only the groups of this rank are known. Where others have groups of another kind, ranks do not
    state the same mesh, and list what they have.
    """
    ranks = dist.get_process_group_ranks(handle.process_group)
    if unit.sharding_strategy.name not in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        return RankMesh.of((len(ranks),), ranks), {"dp": len(ranks)}
    replicas = dist.get_process_group_ranks(unit._inter_node_pg)  # noqa: SLF001
    mesh = RankMesh.crossing(dist.get_rank(), replicas, ranks)
    layout = {"replicate": len(replicas), "shard": len(ranks)}
    return mesh or RankMesh.of((len(ranks),), ranks), layout
