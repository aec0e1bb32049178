"""The options of exports to Megatron-Core."""

from __future__ import annotations

from dataclasses import dataclass

from ucformat.exporters.base import DistcpOptions, option


@dataclass(frozen=True, kw_only=True)
class MegatronExportOptions(DistcpOptions):
    """The options of `MegatronExporter`."""

    distributed_optimizer: bool | None = option(
        None,
        "flag",
        "whether the job that loads has the distributed optimizer (--use-distributed-optimizer); "
        "as in Megatron's "
        "sources, and of others yes",
    )
    expert_parallel: bool | None = option(
        None,
        "flag",
        "whether the job that loads has expert parallelism, and so a second optimizer; as in "
        "Megatron's sources",
    )
    chained_prefix: bool | None = option(
        None,
        "flag",
        "whether names of states have the prefix `chained_N.` of several optimizers; as in "
        "Megatron's sources",
    )
    local: bool | None = option(
        None,
        "flag",
        "whether the model is of the local specification; by the names of the norms if not given",
    )
