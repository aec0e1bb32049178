"""The model states file: the module's tensors, tied names, and everything that is no tensor.

Keys of the file (DeepSpeed 0.19.8): `module` (name -> tensor), `buffer_names`, `optimizer` (ZeRO 0 alone),
`param_shapes` (ZeRO: for each flat group its parameters' shapes, in the order in which they lie in it), `shared_params`
(ZeRO: tied name -> stored name), `frozen_param_shapes` and `frozen_param_fragments` (ZeRO 2 and 3), the engine's
counters and configuration, and every key of the `client_state` that `save_checkpoint` was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, Refused
from ucformat.sources.deepspeed.contents import need
from ucformat.sources.stand_ins import StoredTensor

if TYPE_CHECKING:
    from ucformat.sources.torch_file import TorchFile

__all__ = ["ENGINE_KEYS", "ModelStates"]

#: Keys that hold or describe tensors.
TENSOR_KEYS = frozenset(
    (
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
    )
)
#: Keys that DeepSpeed itself writes; all others are the client state.
ENGINE_KEYS = frozenset(
    ("lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps",
     "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
     "universal_checkpoint_info")
)  # fmt: skip


class ModelStates:
    """One model states file, its parts checked."""

    def __init__(self, file: TorchFile) -> None:
        self.file, self.key = file, file.key
        self.value: dict[str, Any] = file.value if isinstance(file.value, dict) else {}
        module = self.value.get("module")
        if module is None and "module" in self.value:
            raise Refused(f"{self.key}: DeepSpeed checkpoints with pipeline parallelism are not yet read")
        module = need(self.value, "module", dict, self.key)
        self.module: dict[str, StoredTensor] = {k: v for k, v in module.items() if isinstance(v, StoredTensor)}
        self.extra: dict[str, Any] = {k: v for k, v in module.items() if not isinstance(v, StoredTensor)}
        self.buffers = frozenset(self.value.get("buffer_names") or ())
        self._refuse_what_is_not_read()
        shapes = self.value.get("param_shapes")
        self.param_shapes = None if shapes is None else [self._shapes(g, "param_shapes") for g in shapes]
        self.frozen_shapes = self._shapes(self.value.get("frozen_param_shapes") or {}, "frozen_param_shapes")
        if any(not isinstance(name, str) for name in module):
            raise IntegrityError(f"{self.key} has a tensor whose name is not text")

    @property
    def world(self) -> int | None:
        """How many data-parallel ranks saved the checkpoint (sequence-parallel ones included)."""
        world = self.value.get("dp_world_size")
        return world if isinstance(world, int) else None

    def aliases(self, *, zero3: bool) -> dict[str, str]:
        """Tied name -> stored name.

        ZeRO says so in `shared_params`; but before stage 3 that goes by address, and all empty tensors have address 0,
        so a pair counts only where both are one stored tensor. ZeRO 0 says nothing: what is stored in the same place is
        tied.
        """
        shared = self.value.get("shared_params")
        if zero3:
            return dict(shared or {})
        if shared:
            same = {a: b for a, b in shared.items() if self._same(a, b)}
            return {a: same.get(b, b) for a, b in same.items()}
        if self.param_shapes is not None:
            return {}
        first: dict[StoredTensor, str] = {}
        found: dict[str, str] = {}
        for name, tensor in self.module.items():
            if tensor.size and name not in self.buffers and first.setdefault(tensor, name) != name:
                found[name] = first[tensor]
        return found

    def _same(self, a: str, b: str) -> bool:
        one, other = self.module.get(a), self.module.get(b)
        return one is not None and one == other and one.size > 0

    def _shapes(self, shapes: Any, what: str) -> dict[str, tuple[int, ...]]:
        if not isinstance(shapes, dict) or not all(isinstance(s, tuple) for s in shapes.values()):
            raise IntegrityError(f"{self.key} has no usable {what!r}")
        return dict(shapes)

    def _refuse_what_is_not_read(self) -> None:
        value = self.value
        dims = value.get("checkpoint_parallel_dimensions") or {}
        if value.get("mp_world_size") not in (None, 1) or any(
            dims.get(k) not in (None, 1) for k in ("pp_degree", "tp_degree")
        ):
            raise Refused(f"{self.key}: DeepSpeed checkpoints with tensor or pipeline parallelism are not yet read")
        if value.get("ds_autoep_layers") or value.get("num_experts") not in (None, [], 0):
            raise Refused(f"{self.key}: DeepSpeed checkpoints with expert parallelism are not yet read")
