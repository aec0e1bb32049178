"""What proves how a parameter lies over tensor-parallel ranks where no pattern of the checkpoint speaks of it.

DeepSpeed joins such a parameter along dim 0, replicas too, so its silence proves nothing. In this order: the sizes that
the checkpoint's own arguments tell; parts that differ, which are no replicas; and the other parameters: one whose parts
are equal is a replica where the checkpoint calls others replicated and holds parts that differ (ranks that were seeded
alike would have equal parts of everything). Parts of one repeated value prove nothing by themselves: a bias goes with
its weight, a norm with the other norms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.geometry.box import Box
from ucformat.geometry.local import Region
from ucformat.sources.deepspeed.readings import Reading, replicate
from ucformat.sources.pickle.stand_ins import Inert

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ucformat.sources.deepspeed.readings import Shapes

__all__ = ["Sizes", "as_its_weight", "as_other_norms"]

_ARGUMENTS = ("args", "config", "model_config", "hf_config", "hparams")  # of the client state
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim_model")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_VOCABULARY = ("original_vocab_size", "vocab_size")
_HEAD = re.compile(r"(^|[._])(q|k|query|key)_?(layer)?_?norm", re.IGNORECASE)
_NORM = re.compile(r"norm|(^|\.)ln_?\w*\.(weight|bias)$", re.IGNORECASE)
_POSITION = re.compile(r"pos(ition)?_?emb|embed_pos|(^|\.)wpe\.", re.IGNORECASE)
_KINDS = re.compile(r"token_?type", re.IGNORECASE)
_WORDS = re.compile(r"(^|\.)((word|tok|token)_emb\w*|embed_tokens|wte|lm_head|output_layer|embed_out)\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the model that a checkpoint tells: `padded_vocab_size`, `hidden_size`, … by name."""

    told: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Sizes:
        """Those in a model states file: in its arguments, and in what it says of its parameters."""
        told: dict[str, int] = {}
        for key in (*_ARGUMENTS, "universal_checkpoint_info"):
            found = value.get(key)
            found = found.state if isinstance(found, Inert) else found
            for name, n in (found if isinstance(found, dict) else {}).items():
                if isinstance(name, str) and type(n) is int and n > 0:
                    told.setdefault(name, n)
        return cls(told)

    def whole(self, name: str, shapes: Shapes) -> bool | None:
        """Whether each rank's part is the whole parameter (True) or a cut of its rows (False); None: not told."""
        rows, total = shapes[0][0], sum(s[0] for s in shapes)
        size = self._expected(name, len(shapes[0]))
        if size is None and _WORDS.search(name) and (size := self._first(_VOCABULARY)) and rows < size <= total:
            return False  # padded to a size that is not told
        return size == rows if size in (rows, total) else None

    def width(self, name: str, shapes: Shapes) -> bool | None:
        """Whether the parts of a matrix, joined along dim 0, are of the model's width; None: not told.

        False: joined along dim 1 they would be, and one of the two dims of such a matrix always is.
        """
        size = self._first(_WIDTH)
        if size is None or len(shapes[0]) != 2:
            return None
        rows, columns = (sum(s[d] for s in shapes) for d in (0, 1))
        if size in (rows, shapes[0][1]):
            return True
        return False if size in (columns, shapes[0][0]) and not _POSITION.search(name) else None

    def _expected(self, name: str, ndim: int) -> int | None:
        """The rows of a parameter of this name."""
        if _WORDS.search(name) and not _NORM.search(name):
            return self._first(("padded_vocab_size",))
        if _POSITION.search(name):
            return self._first(_POSITIONS) if ndim == 2 else None
        if _KINDS.search(name):
            return self._first(("num_tokentypes", "type_vocab_size"))
        if ndim != 1 or not _NORM.search(name):
            return None
        if not _HEAD.search(name):
            return self._first(_WIDTH)
        width, heads = self._first(_WIDTH), self._first(("num_attention_heads", "n_head"))
        return self._first(("kv_channels", "head_dim")) or (width // heads if width and heads else None)

    def _first(self, names: Iterable[str]) -> int | None:
        return next((self.told[name] for name in names if name in self.told), None)


def as_its_weight(name: str, shapes: Shapes, readings: Mapping[str, Reading]) -> Reading | None:
    """A bias as the rows of its weight lie; None where it is no bias, or its weight's reading does not tell."""
    weight = readings.get(f"{name.removesuffix('bias')}weight") if name.endswith("bias") else None
    if weight is None or weight.mean or weight.scaled or len(weight.shape) < 2 or len(shapes[0]) != 1:
        return None
    regions, padding = _rows(weight.regions), _rows(weight.padding)
    for t, shape in enumerate(shapes):
        held = sum(r.local.size for r in (*regions[t], *(padding[t] if padding else ())))
        if held != shape[0]:
            return None
    out = Reading(weight.shape[:1], regions, padding, weight.padding_rows)
    return out.because("the rows of its weight")


def as_other_norms(name: str, shapes: Shapes, readings: Mapping[str, Reading]) -> Reading | None:
    """A norm as long as the others, of which the reading is known, is on every rank as they are."""
    if not _NORM.search(name) or _HEAD.search(name) or len(shapes[0]) != 1:
        return None
    others = [r for n, r in readings.items() if _NORM.search(n) and not _HEAD.search(n) and len(r.shape) == 1]
    alike = {r.shape for r in others} == {shapes[0]} and all(r == replicate(shapes).because(r.why) for r in others)
    return replicate(shapes).because("the other norms") if alike else None


def _rows(regions: tuple[tuple[Region, ...], ...]) -> tuple[tuple[Region, ...], ...]:
    """What regions of a matrix say of its rows alone."""
    return tuple(tuple(dict.fromkeys(Region(_first(r.local), _first(r.box)) for r in held)) for held in regions)


def _first(box: Box) -> Box:
    return Box(box.start[:1], box.shape[:1])
