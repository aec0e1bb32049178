"""Made-up wrapper subclasses of tensors, of the kinds that programs define."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["Blocks", "Fresh", "Scaled", "Silent", "Wrapper"]


class Wrapper(torch.Tensor):
    """A wrapper of any tensors by name, with any context; each op is done on each of them."""

    inner: dict[str, torch.Tensor]
    context: Any

    @staticmethod
    def __new__(
        cls, inner: dict[str, torch.Tensor], context: Any = None, shape: Any = None
    ) -> Self:
        first = next(iter(inner.values()), torch.empty(0))
        size = first.shape if shape is None else shape
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=torch.float32, device=first.device
        )
        made.__dict__.update(inner)
        made.inner, made.context = inner, context
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.inner), self.context

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> Self:
        return cls(inner, context, size)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wrappers = [a for a in args if isinstance(a, Wrapper)]
        done = {}
        for name in wrappers[0].inner:
            mine = tree_map_only(Wrapper, lambda w, name=name: w.inner[name], args)
            done[name] = func(*mine, **(kwargs or {}))
        if any(not isinstance(t, torch.Tensor) for t in done.values()):
            return next(iter(done.values()))
        size = wrappers[0].shape if func is torch.ops.aten.detach.default else None
        return type(wrappers[0])(done, wrappers[0].context, size)


class Blocks(Wrapper):
    """Rows of codes, a scale for each few elements in a flat tensor, and a table as long as there may be rows."""

    @classmethod
    def of(cls, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> Self:
        return cls(
            {"codes": codes, "scale": scale, "table": table}, {"rows": codes.shape}, codes.shape
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            block, dim, start, stop = args[:4]
            stop = min(stop, block.shape[0])
            ratio = block.scale.numel() / block.shape[0]
            assert dim == 0
            if not (start * ratio).is_integer() or not (stop * ratio).is_integer():
                raise ValueError("within a block")
            scale = block.scale[int(start * ratio) : int(stop * ratio)]
            return cls.of(block.codes[start:stop], scale, block.table.clone())
        if func is torch.ops.aten.is_pinned.default:
            return False
        if func in (torch.ops.aten.view.default, torch.ops.aten.detach.default):
            (block, *_) = args
            return cls.of(block.codes.detach(), block.scale.detach(), block.table.detach())
        raise NotImplementedError(func)


class Scaled(Wrapper):
    """Elements, and a scale for all of them, or for each row; it cannot be sliced."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.is_pinned.default:
            return False
        if func in (torch.ops.aten.view.default, torch.ops.aten.detach.default):
            (mine, *_) = args
            return cls({n: t.detach() for n, t in mine.inner.items()}, mine.context, mine.shape)
        raise NotImplementedError(func)


class Fresh(Scaled):
    """A wrapper that gives a new tensor whenever it is asked for its inner one."""

    @property
    def made(self) -> torch.Tensor:
        return self.inner["elements"].clone()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["made"], None


class Silent(torch.Tensor):
    """A wrapper that does not say what is inside."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.__dict__["inner"] = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = tree_map_only(Silent, lambda t: t.__dict__["inner"], args)
        out = func(*inner, **(kwargs or {}))
        return cls(out) if isinstance(out, torch.Tensor) else out


@dataclass
class Settings:
    """A context."""

    bits: int
    scheme: str = "symmetric"


_numbers = itertools.count()


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that no other tensor has."""
    count = torch.Size(shape).numel()
    first = next(_numbers)
    return (torch.arange(count) + 97 * first).remainder(251).to(dtype).reshape(shape)
