"""Which rows of tensors changed since another checkpoint: masks of the trainer, or those of a hook on embeddings."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ucformat.errors import UcformatError, UnsupportedError, UsageError
from ucformat.torch.state.collect import values_of
from ucformat.torch.state.local import local_of
from ucformat.torch.state.names import GlobalNames, plain_name
from ucformat.torch.state.sharded import is_dtensor, is_fsdp1

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ucformat.torch.loading.load import LoadReport
    from ucformat.torch.state.local import LocalState

__all__ = ["ChangedRows"]

_MOST_INTERVALS = 64  # between saves, of which the rows are kept
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Interval:
    """The rows that may have changed between two saves.

    Attributes:
        rows: of each table a bit for each row.
        saved: the id of the checkpoint with which it ended, once that is committed.
    """

    def __init__(self, rows: list[bytes]) -> None:
        self.rows = rows
        self.saved: Callable[[], str | None] = lambda: None


class ChangedRows:
    """Keeps which rows of a model's embeddings may have changed, for `save(…, base=…, changed=rows)`.

        rows = ucformat.torch.ChangedRows(model)
        manager = Manager(folder, increments=Increments("one-shot", patch=True))
        …
        manager.save(step, state, changed=rows)

    Rows count as changed, with those of the optimizer's states that have the embedding's name, that
    were looked up since the base was saved, or had a gradient when an optimizer made a step, such as
    that of an output layer with the same weight. `SparseAdam`, and `SGD` and `Adagrad` without
    momentum and weight decay, change no others. Any other `torch.optim.Optimizer` may change every
    row, so that its tables are compared with the base as if there were no marks. What has no such
    optimizer, but one of copies in fp32, for example, must not change rows that are not looked up.
    After a load call `begin`.

    Args:
        model: has `nn.Embedding` or `nn.EmbeddingBag` in it. The state to be saved has to have the
            model, or tensors in its memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables: list[nn.Embedding | nn.EmbeddingBag] = []  # one for each weight
        self._marks: list[torch.Tensor] = []
        self._names: list[list[str]] = []
        self._intervals: list[Interval] = []
        self._hooks: list[Any] = []
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                weights = [table.weight for table in self._tables]
                number = next(
                    (n for n, w in enumerate(weights) if w is module.weight), len(weights)
                )
                if number == len(weights):
                    self._tables.append(module)
                    self._marks.append(torch.zeros(module.num_embeddings, dtype=torch.bool))
                hook = partial(self._mark_input, number)
                self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if not self._hooks and not dist.is_initialized():  # a stage of a pipeline may have none
            raise UsageError(
                f"{type(model).__name__} has no nn.Embedding or nn.EmbeddingBag in it",
                hint="give masks of rows: changed={name: mask}",
            )
        self._hooks.append(register_optimizer_step_post_hook(_step_hook(weakref.ref(self))))

    def _marks_on(self, number: int, device: torch.device) -> torch.Tensor:
        if self._marks[number].device != device:
            self._marks[number] = self._marks[number].to(device)
        return self._marks[number]

    def _mark_input(
        self, number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        looked_up = args[0] if args else kwargs["input"]
        if is_dtensor(looked_up):
            looked_up = looked_up.full_tensor()
        self._marks_on(number, looked_up.device)[looked_up.detach().reshape(-1)] = True

    @torch.no_grad()
    def mark_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the rows that a step of an optimizer may have changed."""
        for number, table in enumerate(self._tables):
            for group in optimizer.param_groups:
                if any(parameter is table.weight for parameter in group["params"]):
                    if _only_rows_with_gradient(optimizer, group):
                        self._mark_gradient(number, table.weight.grad)
                    else:
                        self._marks[number].fill_(True)

    def _mark_gradient(self, number: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        marks = self._marks_on(number, gradient.device)
        if gradient.is_sparse:
            marks[gradient._indices()[0]] = True  # noqa: SLF001 - `indices` is that of coalesced ones
            return
        try:
            shard = local_of("gradient", "weight", gradient.contiguous())
        except UcformatError:  # partial over its mesh, for example
            marks.fill_(True)
            return
        bits = shard.tensor.view(_INTEGERS[shard.info.itemsize])  # -0.0 changes a weight of -0.0
        for piece in shard.pieces:
            box, begin = piece.box, bits.storage_offset() + piece.offset
            rows = bits.as_strided(box.shape, piece.strides, begin)
            marks[box.start[0] : box.stop[0]] |= rows.ne(0).any(1)

    def find_names(
        self, state: Mapping[str, Any], local: LocalState, names: Mapping[str, int]
    ) -> None:
        """Find the names that the tables have in a state that is saved.

        Raises:
            UsageError: the state does not have a table.
            UnsupportedError: FSDP1 has wrapped a module of the state.
        """
        roots = [root for _, root in values_of(state) if isinstance(root, nn.Module)]
        if self._tables and any(is_fsdp1(part) for root in roots for part in root.modules()):
            raise UnsupportedError(
                "changed=ChangedRows(…) does not see which rows of flat parameters (FSDP1) change",
                hint="give masks of rows: changed={name: mask}",
            )
        by_path = {path: key.name for key, paths in local.paths.items() for path in paths}
        by_module = {
            module: (*path, GlobalNames(names).of(plain_name(root, f"{name}.weight".strip("."))))
            for path, root in values_of(state)
            if isinstance(root, nn.Module)
            for name, module in root.named_modules()
        }
        by_memory = {
            (t.tensor.data_ptr(), t.info.shape): t.key.name
            for t in (local.tensors if state else ())  # an engine's optimizer has other parameters
            if t.key.state == "weight" and t.tensor.numel()
        }
        self._names = []
        for table in self._tables:
            weight = table.weight
            here = weight.to_local() if is_dtensor(weight) else weight
            paths = [by_module[m] for m in by_module if getattr(m, "weight", None) is weight]
            table_names = {by_path[path] for path in paths if path in by_path}
            table_names |= {
                by_memory[k] for k in [(here.data_ptr(), weight.shape)] if k in by_memory
            }
            if not table_names:
                raise UsageError(
                    f"changed=ChangedRows(…) has an embedding of {table.num_embeddings:,} rows that "
                    "is not in the state",
                    hint="give it the model that is saved, or give masks of rows: "
                    "changed={name: mask}",
                )
            self._names.append(sorted(table_names))

    def begin(self, report: LoadReport) -> None:
        """Begin anew from a checkpoint that was loaded."""
        self.end()
        loaded = Interval([])
        loaded.saved = lambda: report.lineage.id
        self._intervals = [loaded]

    def end(self) -> Interval:
        """End the interval with a save, which is to tell whether it was committed."""
        rows = [_bits(marks.cpu().numpy()) for marks in self._marks]
        for marks in self._marks:
            marks.zero_()
        self._intervals = [*self._intervals, Interval(rows)][-_MOST_INTERVALS:]
        return self._intervals[-1]

    def since(self, checkpoint: str) -> dict[str, bytes]:
        """The rows that may have changed since a checkpoint was saved or loaded, by the name of the tensor.

        All of them if this rank does not know the checkpoint, whatever other ranks know.
        """
        saved = [interval.saved() for interval in self._intervals]
        later: list[list[bytes]] = []
        if checkpoint in saved:
            first = len(saved) - saved[::-1].index(checkpoint)
            later = [interval.rows for interval in self._intervals[first:]]
        out: dict[str, bytes] = {}
        for number, names in enumerate(self._names):
            unknown = np.full(len(self._marks[number]), checkpoint not in saved)
            since = np.packbits(unknown)
            for rows in later:
                since |= np.frombuffer(rows[number], np.uint8)
            for name in names:  # which another table may have, too, if they were tied later
                since |= np.frombuffer(out.get(name, since), np.uint8)
                out[name] = since.tobytes()
        return out

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def _step_hook(tracker: weakref.ref[ChangedRows]) -> Callable[..., None]:
    """A hook of all optimizers that does not keep the tracker, and with it the model."""

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rows = tracker()
        if rows is not None:
            rows.mark_step(optimizer)

    return hook


def _only_rows_with_gradient(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a step changes no row of a parameter, and of its states, that has a gradient of zero."""
    if type(optimizer) is torch.optim.SparseAdam:
        return True
    plain = not group.get("weight_decay") and not group.get("maximize")  # which makes -0.0 of 0.0
    if type(optimizer) is torch.optim.SGD:
        return plain and not group["momentum"]
    return type(optimizer) is torch.optim.Adagrad and plain


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
        if is_dtensor(mask) or (isinstance(mask, torch.Tensor) and mask.is_meta):
            raise UsageError(
                f"changed[{name!r}] is a DTensor, or has no data",
                hint="a plain tensor for the rows of the whole tensor: mask.full_tensor()",
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
