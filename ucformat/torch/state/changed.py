"""Which rows of tensors changed since another checkpoint: masks of the trainer, or those of a hook on embeddings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ucformat.errors import UsageError
from ucformat.torch.state.collect import plain_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ucformat.torch.loading.load import LoadReport
    from ucformat.torch.state.local import LocalState

__all__ = ["ChangedRows"]

_MOST_INTERVALS = 64  # between saves, of which the rows are kept


class Interval:
    """The rows that were looked up between two saves.

    Attributes:
        rows: a bit for each row, by the name of the tensor.
        saved: the id of the checkpoint with which it ended, once that is committed.
    """

    def __init__(self, rows: Mapping[str, bytes]) -> None:
        self.rows = rows
        self.saved: Callable[[], str | None] = lambda: None


class ChangedRows:
    """Keeps which rows of a model's embeddings were looked up, for `save(…, base=…, changed=rows)`.

        rows = ucformat.torch.ChangedRows(model)
        manager = Manager(folder, increments=Increments("one-shot", patch=True))
        …
        manager.save(step, state, changed=rows)

    A row that was looked up since the base was saved counts as changed, with those of the optimizer's
    states that have the embedding's name. This is right if the optimizer changes no other row:
    `SparseAdam`, or SGD without momentum and weight decay, with `nn.Embedding(…, sparse=True)` or not.
    With Adam, momentum or weight decay rows change that were not looked up; `verify_changed=True`
    finds that. After a load call `begin`.

    Args:
        model: has `nn.Embedding` or `nn.EmbeddingBag` in it. Names are those of its tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._marks: dict[str, torch.Tensor] = {}
        self._intervals: list[Interval] = []
        self._hooks = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                weight = plain_name(model, f"{name}.weight" if name else "weight")
                self._marks[weight] = torch.zeros(module.num_embeddings, dtype=torch.bool)
                hook = partial(self._mark, weight)
                self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if not self._hooks:
            raise UsageError(
                f"{type(model).__name__} has no nn.Embedding or nn.EmbeddingBag in it",
                hint="give masks of rows: changed={name: mask}",
            )

    def _mark(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        looked_up = args[0] if args else kwargs["input"]
        if isinstance(looked_up, DTensor):
            looked_up = looked_up.full_tensor()
        marks = self._marks[name]
        if marks.device != looked_up.device:
            marks = self._marks[name] = marks.to(looked_up.device)
        marks[looked_up.detach().reshape(-1)] = True

    def begin(self, report: LoadReport) -> None:
        """Begin anew from a checkpoint that was loaded."""
        self.end()
        loaded = Interval({})
        loaded.saved = lambda: report.lineage.id
        self._intervals = [loaded]

    def end(self) -> Interval:
        """End the interval with a save, which is to tell whether it was committed."""
        rows = {name: _bits(marks.cpu().numpy()) for name, marks in self._marks.items()}
        for marks in self._marks.values():
            marks.zero_()
        self._intervals = [*self._intervals, Interval(rows)][-_MOST_INTERVALS:]
        return self._intervals[-1]

    def since(self, checkpoint: str) -> dict[str, bytes]:
        """The rows that were looked up since a checkpoint was saved or loaded; none are known of others."""
        saved = [interval.saved() for interval in self._intervals]
        if checkpoint not in saved:
            return {}
        first = len(saved) - saved[::-1].index(checkpoint)
        later = [interval.rows for interval in self._intervals[first:]]
        out = {name: np.zeros(-(-len(marks) // 8), np.uint8) for name, marks in self._marks.items()}
        for rows in later:
            for name, bits in rows.items():
                out[name] |= np.frombuffer(bits, np.uint8)
        return {name: bits.tobytes() for name, bits in out.items()}

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def packed_masks(masks: Mapping[str, Any], state: LocalState) -> dict[str, bytes]:
    """A bit for each row of the masks that a trainer gives.

    Raises:
        UsageError: a mask is for no tensor of this rank, or has not a bool for each of its rows.
    """
    rows = {t.key.name: t.info.shape[0] for t in reversed(state.tensors) if t.info.shape}
    out = {}
    for name, mask in masks.items():
        if name not in rows:
            raise UsageError(
                f"changed has rows of {name!r}, and this rank has no such tensor with rows",
                hint="give the names of tensors in the checkpoint",
            )
        array = mask.cpu().numpy() if isinstance(mask, torch.Tensor) else np.asarray(mask)
        if array.dtype != np.bool_ or array.shape != (rows[name],):
            raise UsageError(
                f"changed[{name!r}] is {array.dtype} of the shape {list(array.shape)}",
                hint=f"a bool for each of the {rows[name]:,} rows of the whole tensor",
            )
        out[name] = _bits(array)
    return out


def _bits(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> bytes:
    return np.packbits(mask).tobytes()
