"""Compares what trainings and checkpoints hold, bit for bit, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.geometry.box import Box
from ucformat.geometry.fingerprint import fingerprint_of, text_of
from ucformat.reading.dtypes import dtype_name

if TYPE_CHECKING:
    from ucformat.checkpoint import Checkpoint

__all__ = [
    "Truth",
    "checkpoint_differences",
    "differences",
    "listed",
    "read_losses",
    "relative",
    "without_tuples",
]

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "I64": "int64"}


@dataclass(frozen=True)
class Truth:
    """What a training held: `(dtype, shape, bytes)` by `(state, name)`; the rest is JSON that keeps tuples apart."""

    tensors: dict[tuple[str, str], tuple[str, tuple[int, ...], bytes]]
    facts: dict[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> Truth:
        """Read the two files that the action `truth` writes."""
        data = Path(f"{path}.safetensors").read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        tensors = {}
        for key, entry in json.loads(data[8:start]).items():
            state, _, name = key.partition("/")
            first, last = entry["data_offsets"]
            content = data[start + first : start + last]
            tensors[state, name] = (_DTYPES[entry["dtype"]], tuple(entry["shape"]), content)
        return cls(tensors, json.loads(Path(f"{path}.json").read_text()))


def differences(found: Truth, expected: Truth) -> list[str]:
    """What differs between two trainings that should hold the same, whatever their layouts."""
    out = _unlike(found.tensors, expected.tensors)
    for what in ("groups", "scheduler", "step", "values", "frozen"):
        if found.facts[what] != expected.facts[what]:
            out.append(f"{what}: {found.facts[what]} instead of {expected.facts[what]}")
    return out


def checkpoint_differences(ck: Checkpoint, expected: Truth) -> list[str]:
    """What differs between a checkpoint, read by NumPy alone, and the training that saved it."""
    tensors = {}
    for key, info in ck.tensors.items():
        array = ck[key.name, key.state][...]
        tensors[key.state, key.name] = (
            dtype_name(array.dtype),
            info.shape,
            np.ascontiguousarray(array).tobytes(),
        )
    out = _unlike(tensors, expected.tensors)
    for doc in ck.manifest.tensors:
        elements = ck[doc.name, doc.state][...]
        sums = fingerprint_of(elements, doc.shape, Box.whole(doc.shape))
        if doc.fingerprint != text_of(sums):
            out.append(f"{doc.name} ({doc.state}) has the fingerprint {doc.fingerprint}")
    facts = expected.facts
    groups = [
        {"params": list(g.params), "options": without_tuples(g.options)} for g in ck.manifest.groups
    ]
    for what, is_, should in (
        ("groups", groups, listed(facts["groups"])),
        ("aliases", dict(ck.aliases), facts["aliases"]),
        ("step", ck.manifest.step, facts["step"]),
        ("object step", ck.objects["step"], facts["step"]),
        ("scheduler", without_tuples(ck.objects["scheduler"]), listed(facts["scheduler"])),
    ):
        if is_ != should:
            out.append(f"{what}: {is_} instead of {should}")
    return out


def without_tuples(value: Any) -> Any:
    """The JSON form of values with lists in place of tuples, as engines' own checkpoints are read."""
    if isinstance(value, dict):
        whole = set(value) == {"$tuple"}
        return (
            without_tuples(value["$tuple"])
            if whole
            else {k: without_tuples(v) for k, v in value.items()}
        )
    return [without_tuples(v) for v in value] if isinstance(value, list) else value


def _unlike(found: dict[tuple[str, str], Any], expected: dict[tuple[str, str], Any]) -> list[str]:
    out = [f"{key} is missing" for key in expected.keys() - found.keys()]
    out += [f"{key} is not expected" for key in found.keys() - expected.keys()]
    for key in found.keys() & expected.keys():
        if found[key] != expected[key]:
            (dtype, shape, data), (dtype2, shape2, data2) = found[key], expected[key]
            wrong = sum(a != b for a, b in zip(data, data2, strict=False))
            out.append(
                f"{key}: {dtype} {shape} instead of {dtype2} {shape2}; {wrong} of {len(data2)} bytes differ"
            )
    return sorted(out)


def listed(value: Any) -> Any:
    """Facts with lists for tuples, as plain JSON has them."""
    if isinstance(value, dict):
        return (
            listed(value["tuple"])
            if set(value) == {"tuple"}
            else {k: listed(v) for k, v in value.items()}
        )
    return [listed(v) for v in value] if isinstance(value, list) else value


def read_losses(path: str | Path) -> list[float]:
    """The losses that the action of that name wrote."""
    found: list[float] = json.loads(Path(path).read_text())
    return found


def relative(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of two equally long lists."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
