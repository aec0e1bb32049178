"""Compare what engines held, as their own checkpoints say, without torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 - gives NumPy bfloat16, for safetensors
import numpy as np
from safetensors.numpy import load_file

import ucformat
from tests.torch.verdict import without_tuples

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Held = dict[tuple[str, str], NDArray[Any]]

__all__ = ["differences", "facts", "groups_by_name", "held", "held_by_engine"]


def held(url: Path) -> Held:
    """All tensors of a checkpoint by name and state; the copy that the optimizer updates is `trained`.

    That is `master` where there is one; then the weight of the step stays as `weight`.
    """
    ck = ucformat.open(str(url))
    found = {(k.name, k.state): ck[k.name, k.state].read() for k in ck.tensors}
    return _by_use(found)


def held_by_engine(folder: Path) -> Held:
    """What an engine of a task held when it had saved or loaded, as it says itself."""
    if (folder / "own").exists():
        return held(folder / "own")
    tensors = load_file(folder / "own.safetensors")
    split = {key: key.partition("/") for key in tensors}
    return _by_use({(split[key][2], split[key][0]): tensor for key, tensor in tensors.items()})


def _by_use(found: Held) -> Held:
    out: Held = {}
    for (name, state), array in found.items():
        if state == "master" or (state == "weight" and (name, "master") not in found):
            out[name, "trained"] = array
        else:
            out[name, state] = array
    return out


def differences(one: Held, other: Held, *, cast: bool = False) -> list[str]:
    """What differs, bit for bit; the weights of the step only where both say them.

    With `cast` tensors of other dtypes are to be equal when `other` is cast to that of `one`.
    """
    out = [f"only one has {k}" for k in sorted(one.keys() ^ other.keys()) if k[1] != "weight"]
    for key in sorted(one.keys() & other.keys()):
        a, b = one[key], other[key]
        if cast:
            b = b.astype(a.dtype)
        if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
            out.append(f"{key}: {a.dtype} {a.ravel()[:3]}, {b.dtype} {b.ravel()[:3]}")
    for name, state in one:
        if state == "weight":
            rounded = one[name, "trained"].astype(one[name, state].dtype)
            if not np.array_equal(rounded, one[name, state]):
                out.append(f"{name}: the weight is not its rounded master")
    return out


def facts(folder: Path) -> dict[str, Any]:
    """The rest that a task wrote."""
    found: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return found


def groups_by_name(ck: ucformat.Checkpoint) -> list[dict[str, object]]:
    """Groups by name; which empty parameters are in one depends on the engine."""
    return [
        {
            "params": sorted(g.params),
            **{k: without_tuples(v) for k, v in g.options.items() if k != "param_names"},
        }
        for g in ck.manifest.groups
    ]
