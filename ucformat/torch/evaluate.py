"""`state_dict`: the weights of any checkpoint as plain tensors, for those who evaluate or serve."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch

from ucformat.checkpoint import Checkpoint
from ucformat.errors import TensorNotFound, UsageError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Key, Piece, TensorInfo
from ucformat.references import open_reference
from ucformat.torch.local import Local
from ucformat.torch.match import Matched, stored_names
from ucformat.torch.memory import dtype_name, torch_dtype
from ucformat.torch.reading import read

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from os import PathLike

    from ucformat.torch.match import Rename

__all__ = ["state_dict"]

_FEW = 5  # names that an error offers
_PRECISE = (torch.float32, torch.float64)


def state_dict(
    ck: str | PathLike[str] | Checkpoint,
    names: str | Iterable[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    rename: Rename | None = None,
    threads: int | None = None,
) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint by name, whole, each read straight into its tensor; no optimizer state is read.

    Tied names share one tensor. On the CPU and without a cast nothing but the result is allocated; what is cast, or
    goes to another device, passes through two buffers of 32 MiB.

    Args:
        ck: a checkpoint of any kind that `ucformat.open` opens, or a reference to one, or one that is open.
        names: which to read (default: all): a name, the beginning of names up to a dot (`model.layers.3`), a glob
            (`*.norm.weight`), or several of these; they are the names of the result.
        dtype: None: as stored in the state `weight`, or `master` if there is only that. Else floating-point tensors
            are of this dtype, cast where they have another: float32 (and 64) is made of `master` where there is one.
        device: where the tensors are to be.
        rename: makes the result's names of the checkpoint's: a function, or `{regex of the whole name: replacement}`.
        threads: how many read.

    Raises:
        TensorNotFound: one of `names` fits no weight.
        UsageError: `dtype` is no floating-point dtype, or `rename` makes one name of two tensors.
        ChecksumError: a chunk does not match its checksum.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(f"weights cannot be cast to {dtype}", hint="give a floating-point dtype, as torch.bfloat16")
    opened = ck if isinstance(ck, Checkpoint) else open_reference(ck)
    wanted = _chosen(_weights(opened, rename), names, opened.url)
    matched = {stored: _target(opened, stored, dtype, device) for stored in dict.fromkeys(wanted.values())}
    read(opened, list(matched.values()), threads=threads)
    return {name: matched[stored].target.tensor for name, stored in wanted.items()}


def _weights(ck: Checkpoint, rename: Rename | None) -> dict[str, str]:
    """The name under which each weight is stored, by the result's name for it."""
    names = stored_names(ck, rename)
    return {new: stored for new, stored in names.items() if not {"weight", "master"}.isdisjoint(ck.states(stored))}


def _chosen(weights: Mapping[str, str], names: str | Iterable[str] | None, url: str) -> dict[str, str]:
    """Those that are asked for, in the order of the checkpoint."""
    if names is None:
        return dict(weights)
    patterns = [names] if isinstance(names, str) else list(names)
    found: set[str] = set()
    for pattern in patterns:
        fitting = {pattern} & weights.keys() or {name for name in weights if _fits(name, pattern)}
        if not fitting:
            raise TensorNotFound(f"{url} has no weight {pattern!r}", hint=_nearest(pattern, weights))
        found |= fitting
    return {name: stored for name, stored in weights.items() if name in found}


def _fits(name: str, pattern: str) -> bool:
    return name.startswith(pattern.rstrip(".") + ".") or fnmatchcase(name, pattern)


def _nearest(pattern: str, weights: Iterable[str]) -> str:
    from difflib import get_close_matches

    known = list(weights)
    near = get_close_matches(pattern, known, _FEW, 0.5) or known[:_FEW]
    return f"there are, among others: {', '.join(near)}" if near else "the checkpoint holds no weights at all"


def _target(ck: Checkpoint, name: str, dtype: torch.dtype | None, device: str | torch.device) -> Matched:
    """An empty tensor for a weight, and the stored tensor that fills it."""
    have = {s: ck.tensors[Key(name, s)] for s in ("weight", "master") if s in ck.states(name)}
    stored = have["master" if dtype in _PRECISE and "master" in have else next(iter(have))]
    as_stored = torch_dtype(stored.dtype)
    wanted = as_stored if dtype is None or not as_stored.is_floating_point else dtype
    info = TensorInfo(name, "weight", dtype_name(wanted), stored.shape)
    tensor = torch.empty(stored.shape, dtype=wanted, device=device)
    whole = Piece(Box.whole(stored.shape), 0, row_major(stored.shape))
    return Matched(Local(info, (whole,) if stored.size else (), tensor), stored)
