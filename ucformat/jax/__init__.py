"""Universal checkpoints of JAX programs: save and load trees of arrays under any shardings (extra `jax`)."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ucformat.jobs.record import record_commits

if TYPE_CHECKING:
    from ucformat.jax.loading import Loaded, load, load_arrays
    from ucformat.jax.saving import async_save, save
    from ucformat.torch.saving.handles import SaveHandle
    from ucformat.torch.saving.save import Saved

__all__ = ["Loaded", "SaveHandle", "Saved", "async_save", "load", "load_arrays", "save"]

_HOMES = {
    "Loaded": "ucformat.jax.loading",
    "SaveHandle": "ucformat.torch.saving.handles",
    "Saved": "ucformat.torch.saving.save",
    "async_save": "ucformat.jax.saving",
    "load": "ucformat.jax.loading",
    "load_arrays": "ucformat.jax.loading",
    "save": "ucformat.jax.saving",
}

if find_spec("jax") is None:
    raise ModuleNotFoundError("ucformat.jax needs JAX: pip install 'ucformat[jax]'", name="jax")

record_commits()  # saves are recorded in the catalog


def __getattr__(name: str) -> object:
    """Load a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ucformat.jax' has no attribute {name!r}")
    public: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = public
    return public


def __dir__() -> list[str]:
    return __all__
