"""The parts of parameters that this rank of a DeepSpeed engine has, as AutoTP's layers describe them.

A pipeline may consist of these layers, too: AutoTP itself has no place in pipelines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ucformat.engines.deepspeed.live_parts import CutParameter, on_mesh
from ucformat.engines.deepspeed.patterns import affine_sharding
from ucformat.errors import LayoutError, UnsupportedError
from ucformat.geometry.distribution import RankMesh
from ucformat.torch.state.local import LocalShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from ucformat.engines.deepspeed.live_experts import LocalExperts

_HINT = "use engine.save_checkpoint, or an engine without AutoTP"
_OWN_LAYERS = "use AutoTP's layers (deepspeed.module_inject.layers), which say how they are cut"


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The tensor-parallel ranks of an engine: the mesh of data-parallel and tensor-parallel ranks, and what is cut.

    `is_even` says whether all these ranks hold equally many elements of each parameter, and so have
    the parameters at the same places of flat buffers. `experts` has the meshes of experts'
    parameters: fewer data-parallel ranks have each; None if an expert is whole on one rank alone.
    """

    mesh: RankMesh
    cut: Mapping[str, CutParameter]
    is_even: bool
    experts: Mapping[str, RankMesh | None]

    @property
    def degree(self) -> int:
        """The number of tensor-parallel ranks."""
        return self.mesh.sizes[1]

    def whole(self, local: LocalShard) -> LocalShard:
        """The part of a whole tensor, of that of this rank's part of it.

        Raises:
            UnsupportedError: it is a state of another shape than the parameter.
        """
        name, flat = local.info.name, local.distribution
        mesh = self.experts.get(name, self.mesh)
        if mesh is None:
            return local
        parameter = self.cut.get(name)
        if parameter is not None and local.info.shape:
            return parameter.whole(local, mesh if flat is None or self.is_even else None)
        if flat is None or not self.is_even:
            return local
        return LocalShard(local.info, local.pieces, local.tensor, on_mesh(mesh, flat, ()))


def tensor_parallel(
    engine: Any, parameters: Mapping[str, torch.nn.Parameter], experts: LocalExperts
) -> TensorParallel | None:
    """Return what AutoTP's layers have cut in an engine; None if there is no tensor parallelism.

    Raises:
        UnsupportedError: a layer does not describe how it has cut a parameter, or an expert is cut
            whose other parts no rank has.
    """
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
    from deepspeed.runtime.utils import is_model_parallel_parameter

    lanes = tensor_parallel_ranks(engine)
    if len(lanes) <= 1:
        return None
    mesh = _mesh(engine, lanes)
    at = mesh.coordinate(dist.get_rank())
    assert at is not None  # noqa: S101 - checked with the mesh
    meshes = _meshes_of_experts(engine, lanes, parameters, experts)
    cut: dict[str, CutParameter] = {}
    is_even = True
    for name, parameter in parameters.items():
        recorded = getattr(parameter, DS_AUTOTP_UC_META, None)
        if not recorded:
            if is_model_parallel_parameter(parameter):
                raise UnsupportedError(
                    f"a layer of the program's own has cut {name} over {len(lanes)} ranks",
                    hint=_OWN_LAYERS,
                )
            continue  # the layer was left as it is
        local = tuple(getattr(parameter, "ds_shape", parameter.shape))
        conversion = recorded.get("conversion") or {}
        affine = conversion.get("affine_map")
        if affine is None:
            reason = conversion.get("unsupported_reason") or "its layer does not tell how"
            raise UnsupportedError(f"AutoTP has cut {name}: {reason}", hint=_HINT)
        shapes = tuple(tuple(affine["ranks"][rank]["shard_shape"]) for rank in range(mesh.sizes[1]))
        try:
            sharding = affine_sharding(affine, shapes)
        except (LayoutError, UnsupportedError) as error:
            raise UnsupportedError(f"AutoTP has cut {name}: {error.message}", hint=_HINT) from error
        if sharding.scaled or shapes[at[1]] != local:
            what = "scales its parts" if sharding.scaled else f"describes a part of {shapes[at[1]]}"
            raise UnsupportedError(
                f"AutoTP has cut {name}, of which this rank has {list(local)}, and {what}",
                hint=_HINT,
            )
        if set(shapes) == {sharding.shape}:
            continue
        if meshes.get(name, mesh) is None:
            raise UnsupportedError(
                f"AutoTP has cut {name}, an expert's, of which no other rank has the rest",
                hint="use deepspeed.moe.layer.MoE(enable_expert_tensor_parallelism=True)",
            )
        is_even = is_even and len(set(shapes)) == 1
        dims = [d for d, n in enumerate(sharding.shape) if local[d] != n]
        whole_dim = dims[0] if len(dims) == 1 and len(sharding.regions[at[1]]) == 1 else None
        cut[name] = CutParameter(sharding.shape, local, sharding.regions[at[1]], whole_dim)
    return TensorParallel(mesh, cut, is_even, meshes)


def tensor_parallel_ranks(engine: Any) -> list[int]:
    """The ranks that have the other parts of what tensor parallelism cuts, and this one, in order."""
    if engine.autotp_size() > 1:
        group = engine.mpu.get_tensor_model_parallel_group()
    elif engine.pipeline_parallelism:
        group = engine.grid.get_slice_parallel_group()
    else:
        return [dist.get_rank()]
    ranks: list[int] = dist.get_process_group_ranks(group)
    return ranks


def _meshes_of_experts(
    engine: Any, columns: list[int], names: Iterable[str], experts: LocalExperts
) -> dict[str, RankMesh | None]:
    """The mesh of each expert's parameter: the ranks that have the same part of it, and tensor-parallel ranks."""
    lane = set(dist.get_process_group_ranks(engine.seq_data_parallel_group))
    meshes: dict[str, RankMesh | None] = {}
    for name in names:
        if (layer := experts.layer_of(name)) is not None:
            apart = lane.issuperset(layer.among) and lane.issuperset(layer.replicas)
            rows = layer.replicas
            meshes[name] = RankMesh.crossing(dist.get_rank(), rows, columns) if apart else None
    return meshes


def _mesh(engine: Any, lanes: list[int]) -> RankMesh:
    """The mesh of data-parallel and tensor-parallel ranks: all of this rank's stage."""
    replicas = dist.get_process_group_ranks(engine.seq_data_parallel_group)
    mesh = RankMesh.crossing(dist.get_rank(), replicas, lanes)
    if engine.pipeline_parallelism:
        ranks = engine.grid.topology().get_axis_list("pipe", engine.grid.get_stage_id())
    else:
        ranks = range(dist.get_world_size())
    if mesh is None or sorted(mesh.ranks.flat) != sorted(ranks):
        raise UnsupportedError(
            "AutoTP with other parallelism than that of data cannot be saved or loaded yet",
            hint=_HINT,
        )
    return mesh
