"""How a parameter lies over tensor-parallel ranks, where neither the caller nor the checkpoint says so.

What counts as evidence: parts of unequal shape are cut along the dim in which they differ; equal bytes, not all of one
value, are replicas; of a family that is known by its module names, the preset says it. What is left is not guessed: an
error lists it, with the two ways in which it can be read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ucformat.errors import AmbiguousLayout, LayoutError, option_text
from ucformat.sources.cuts import CUTS, how_to_say
from ucformat.sources.deepspeed.readings import Reading, Shapes, concatenate, replicate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucformat.sources.deepspeed.replicas import Verdict

__all__ = ["EQUAL", "MEAN", "Doubt", "ambiguous", "cut", "infer"]

MEAN = "{partial: mean, over: tp}"
EQUAL = "equal bytes"  # why parts are read as replicas

#: Names of modules in which several matrices may be fused, so that their parts do not simply follow one another.
_FUSED = re.compile(
    r"qkv|query_key_value|key_value|c_attn|in_proj|gate_up|up_gate|h_to_4h|fc1|w12|w13|fused|experts", re.IGNORECASE
)
_LISTED = 20


class Doubt(NamedTuple):
    """A parameter that can be read in two ways, as a layout spells them."""

    name: str
    shapes: Shapes
    one: str
    other: str


def infer(
    name: str, shapes: Shapes, verdict: Callable[[], Verdict], siblings: Mapping[str, Shapes], hidden: int | None
) -> Reading | Doubt:
    """The one reading that the evidence allows, or a doubt.

    `verdict` compares the parts' bytes; `siblings` are all parameters; `hidden` is the model's width, if it is known.
    """
    first, ndim = shapes[0], len(shapes[0])
    differing = {d for s in shapes for d, (a, b) in enumerate(zip(first, s, strict=False)) if a != b}
    if len({len(s) for s in shapes}) > 1 or len(differing) > 1:
        raise LayoutError(f"its parts have the shapes {[list(s) for s in shapes]}, which fit no cut")
    fused = _FUSED.search(name) is not None
    if differing:
        d = differing.pop()
        if fused:
            return Doubt(name, shapes, cut(d), cut(d, "parts"))
        return concatenate(shapes, d).because("parts of unequal width")
    if 0 in first:
        return Doubt(name, shapes, "replicate", cut(0)) if ndim else replicate(shapes)
    found = verdict()
    if found == "equal" or not ndim:
        return replicate(shapes).because(EQUAL)
    if found == "constant":
        return Doubt(name, shapes, "replicate", cut(0))
    if ndim == 1:
        weight = siblings.get(name.removesuffix("bias") + "weight") if name.endswith("bias") else None
        if weight and not fused and [s[:1] for s in weight] == [s[:1] for s in shapes]:
            return concatenate(shapes, 0).because("its weight's parts are as long")
        return Doubt(name, shapes, cut(0, "parts") if fused else MEAN, cut(0))
    if ndim == 2 and hidden and not fused and re.search(r"embed|lm_head", name):
        if first[1] * len(shapes) == hidden:
            return concatenate(shapes, 1).because("the model's width")
        if first[1] == hidden:
            return concatenate(shapes, 0).because("the model's width")
    return Doubt(name, shapes, cut(0), cut(1))


def cut(dim: int, how: str = "") -> str:
    """A shard over the tensor-parallel ranks, as a layout spells it."""
    return f"{{shard: {dim}, over: tp{', parts: [1, 1]' if how else ''}}}"


def ambiguous(doubts: Sequence[Doubt], ranks: int) -> AmbiguousLayout:
    """The error that lists what can be read in two ways, and how to say which is meant."""
    lines = [
        f"  {d.name} (parts of {list(d.shapes[0])}): {d.one.strip('{}')} or {d.other.strip('{}')}"
        for d in doubts[:_LISTED]
    ]
    if len(doubts) > _LISTED:
        lines.append(f"  … and {len(doubts) - _LISTED} more")
    told = {d.name: _word(d.one) for d in doubts[:3]}
    example = "\n".join(
        f"    - {{match: {_quoted(d.name)}, place: [{d.one}]}}  # or [{d.other}]" for d in doubts[:_LISTED]
    )
    return AmbiguousLayout(
        f"the checkpoint was saved by {ranks} tensor-parallel ranks and does not say how these parameters are cut:\n"
        + "\n".join(lines),
        hint=f"say it for each, as in {how_to_say(told)} ({', '.join(CUTS)}, or the dim to join along; a "
        "pattern may have *); or in a layout file "
        f"that is given as {option_text('layout')}; a preset may do, too, "
        f"such as {option_text('layout', repr('llama'), 'llama')}:\n    version: 1\n    mesh: {{tp: {ranks}}}\n"
        f"    rules:\n{example}",
    )


def _word(place: str) -> str:
    """What `cuts` calls a placement."""
    if "parts" in place:
        return "halves"
    return {"replicate": "replicate", MEAN: "mean"}.get(place) or place[len("{shard: ") :].partition(",")[0]


def _quoted(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"
