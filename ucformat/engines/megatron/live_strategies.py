"""`strategies`: Megatron's own `dist_checkpointing` saves and loads universal checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ucformat.torch.loading.arguments import RestoreArguments
    from ucformat.torch.loading.match import Strict
    from ucformat.torch.saving.options import SaveArguments

__all__ = ["strategies"]


def strategies(
    optimizer: Any = None,
    *,
    vocab_size: int | None = None,
    strict: Strict = "report",
    saving: SaveArguments | None = None,
    loading: RestoreArguments | None = None,
) -> tuple[Any, Any]:
    """Make the strategies for `sharded_strategy=` of `dist_checkpointing.save` and of its `load`.

    Megatron writes `common.pt` and `metadata.json` into the folder, beside the checkpoint.

    Args:
        optimizer: the optimizer whose sharded state dict is in the state as `optimizer`; needed for
            the format `dp_reshardable`, whose buckets have no names, and which is then saved and
            loaded under any layout.
        vocab_size: as for `save`.
        strict: as for `load`.
        saving: arguments of `save`.
        loading: arguments of `load`; `strict_step` is True by default, since no report is returned.

    Returns:
        the strategy that saves, and the one that loads.
    """
    from ucformat.engines.megatron.strategy_classes import LoadStrategy, SaveStrategy

    return (
        SaveStrategy(optimizer, vocab_size, saving or {}),
        LoadStrategy(optimizer, vocab_size, strict, loading or {}),
    )
