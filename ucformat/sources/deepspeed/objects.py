"""The values of a DeepSpeed checkpoint that are no tensors, as JSON objects.

- each key that DeepSpeed itself writes into the model states (`lr_scheduler`, `global_samples`, `ds_config`, …);
- `optimizer`: what the optimizer's file holds besides tensors (loss scaler, clipping, …), as the first rank has it;
- `client_state`: all other keys; a tensor above 64 KiB becomes a tensor of the checkpoint, named by its path
  (`client_state.ema.weight`), in the state `weight`;
- `module`: entries of the module that are no tensors (`get_extra_state`), if any;
- `rank`: where several ranks wrote a file: for each other rank what differs from the first's. They are called by their
  place: under ZeRO 3 alone by number (`1`), else `tp1`, `pp1.tp0`, `tp0.dp1`;
- `not_stored`: parameters whose values are in no file, because no optimizer had them under ZeRO 3, if any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.sources.deepspeed.model import ENGINE_KEYS, TENSOR_KEYS
from ucformat.sources.values import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.sources.deepspeed.contents import Contents
    from ucformat.sources.deepspeed.model import ModelStates
    from ucformat.sources.pickle.stand_ins import StoredTensor

__all__ = ["Objects"]


class Objects:
    """Collects them, and adds the large tensors among them to the contents."""

    def __init__(
        self, models: Mapping[str, ModelStates], optimizers: Mapping[str, Any], contents: Contents, lost: list[str]
    ) -> None:
        self._models, self._optimizers, self._contents, self._lost = models, optimizers, contents, lost
        self._spilled: dict[
            str, tuple[StoredTensor, int, str]
        ] = {}  # path -> tensor, CRC-32, name, as the first rank has it

    def json(self) -> dict[str, Any]:
        """All objects."""
        first: dict[str, Any] = {}
        others = {}
        for rank in self._models:
            theirs = self._of_rank(rank)
            if self._optimizers.get(rank):
                theirs["optimizer"] = self._optimizers[rank]
            if not rank:
                first = theirs
                continue
            differing = {k: v for k, v in theirs.items() if v != first.get(k)}
            for key in ("client_state", "module", "optimizer"):
                if key in differing and key in first:
                    differing[key] = _difference(differing[key], first[key])
            if differing:
                others[rank] = differing
        if others:
            first["rank"] = others
        if self._lost:
            first["not_stored"] = self._lost
        return first

    def _of_rank(self, rank: str) -> dict[str, Any]:
        """What one model states file holds besides its tensors."""
        model = self._models[rank]
        client = {k: v for k, v in model.value.items() if k not in ENGINE_KEYS | TENSOR_KEYS}
        parts: dict[str, Any] = {k: v for k, v in model.value.items() if k in ENGINE_KEYS}
        if client:
            parts["client_state"] = client
        if model.extra:
            parts["module"] = model.extra

        def spill(path: str, tensor: StoredTensor) -> str:
            return self._spill(rank, path, tensor)

        return {k: to_json(v, read=model.file.read, spill=spill, path=k) for k, v in parts.items()}

    def _spill(self, rank: str, path: str, tensor: StoredTensor) -> str:
        """The name of a large tensor, which becomes one of the checkpoint's; a copy that all ranks have, only once."""
        model = self._models[rank]
        crc32 = model.file.crc32(tensor)
        same = self._spilled.get(path)
        if rank and same and crc32 and same[1] == crc32 and _form(same[0]) == _form(tensor):
            return same[2]
        prefix = f"rank{rank}." if rank.isdigit() else f"{rank}." if rank else ""
        name = self._contents.add_large(prefix + path, model.file, tensor)
        if not rank:
            self._spilled[path] = (tensor, crc32, name)
        return name


def _form(tensor: StoredTensor) -> tuple[Any, ...]:
    """All of a tensor but which storage of its file it is in."""
    return tensor.dtype, tensor.shape, tensor.strides, tensor.offset, tensor.numel


def _difference(value: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """The entries of a dictionary that differ; all of it where its keys are not plain."""
    if "$dict" in value or "$dict" in first:
        return value
    return {k: v for k, v in value.items() if k not in first or first[k] != v}
