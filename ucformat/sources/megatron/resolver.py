"""How a parameter is sharded across tensor-parallel ranks, by the names of Megatron's modules and the parts' shapes.

Column-parallel layers are cut along dim 0, row-parallel ones along dim 1, vocabularies along dim 0, and all other known
parameters are replicated. Of a gated first projection each rank has a part of the gate, then one of the other half; it
is recognised by its shape, with twice as many outputs as the second projection has inputs. Query, key and value are
interleaved by head since version 1 of the files, so that a rank's part is a run of heads; in version 0 each part had
all queries first.

Bytes overrule names: a parameter that should be cut but is equal on all ranks, and not one repeated value, is a doubt.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ucformat.errors import AmbiguousLayout, LayoutError, option_text
from ucformat.geometry.placement import Replicate, Shard
from ucformat.sources.tp_merge.sharding import TP, Shapes, TPSharding, concatenate, cuts_option, replicate, shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucformat.geometry.layout import Layout
    from ucformat.sources.tp_merge.replicas import Verdict

_QKV = re.compile(r"(.*\.)?(linear_qkv|query_key_value)\.(weight|bias)", re.DOTALL)
_FIRST = re.compile(r"(.*\.)?(linear_fc1|dense_h_to_4h)\.(weight|bias)(\d*)", re.DOTALL)
_COLUMN = re.compile(
    r"(.*\.)?(linear_q|linear_kv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|query|key_value)\.(weight|bias)|"
    r"(.*\.)?(word_embeddings|word_embeddings_for_head|output_layer)\.weight|(.*\.)?output_layer\.bias",
    re.DOTALL,
)
_ROWS = r"((.*\.)?(linear_proj|linear_fc2|dense_4h_to_h)|(.*\.)?[a-z_]*attention\.dense)"
_ROW = re.compile(rf"{_ROWS}\.weight\d*", re.DOTALL)
_SAME = re.compile(
    rf"{_ROWS}\.bias\d*|"
    r"(.*\.)?([a-z_]*norm|[a-z_]*norm_\d|router|position_embeddings|tokentype_embeddings)\.(weight|bias|expert_bias)|"
    r"(.*\.)?layer_norm_(weight|bias)|(.*\.)?shared_experts\.gate_weight",
    re.DOTALL,
)
_SECOND = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
_MAX_LISTED = 20


class NameResolver:
    """The shardings of all parameters.

    Args:
        queries: number of query groups that share keys and values; None if the arguments do not record it.
    """

    def __init__(
        self, shapes: Mapping[str, Shapes], version: float, layouts: Sequence[Layout], queries: int | None = None
    ) -> None:
        self._shapes, self._version, self._layouts, self._queries = shapes, version, layouts, queries

    def decide(self, verdict: Callable[[str], Verdict]) -> dict[str, TPSharding]:
        """The sharding of each parameter."""
        out: dict[str, TPSharding] = {}
        doubts: list[str] = []
        for name, shapes in self._shapes.items():
            try:
                found = self._given(name, shapes)
                if found is None:
                    found = self._by_name(name, shapes, verdict)
            except LayoutError as e:
                raise type(e)(f"{name}: {e.message}", hint=e.hint) from e
            if found is None:
                doubts.append(name)
            else:
                out[name] = found
        if doubts:
            raise self._ambiguous(doubts)
        return out

    def _given(self, name: str, shapes: Shapes) -> TPSharding | None:
        if len(shapes) == 1:
            return replicate(shapes)
        return next((found for layout in self._layouts if (found := self._in_layout(layout, name, shapes))), None)

    def _by_name(self, name: str, shapes: Shapes, verdict: Callable[[str], Verdict]) -> TPSharding | None:
        """The sharding by the name, if the bytes do not contradict it; for other names, by the bytes."""
        if _SAME.fullmatch(name):
            return replicate(shapes)  # it is checked when it is read
        found = self._cut(name, shapes)
        if len(set(shapes)) > 1:
            return found
        if found is None:
            return replicate(shapes) if not shapes[0] or verdict(name) == "equal" else None
        return found if verdict(name) != "equal" else None

    def _cut(self, name: str, shapes: Shapes) -> TPSharding | None:
        """How a parameter with this name is cut; None if the name or the cut is unknown."""
        if _QKV.fullmatch(name):
            if self._queries is not None and self._queries < len(shapes):
                return None  # several ranks hold the same keys and values
            if self._version < 1:
                return shard(shapes, Shard(0, TP, parts=(1, 1, 1)))
            return concatenate(shapes, 0)
        if match := _FIRST.fullmatch(name):
            gated = self._gated(name, match)
            if gated is None:
                return None
            return shard(shapes, Shard(0, TP, parts=(1, 1))) if gated else concatenate(shapes, 0)
        if _ROW.fullmatch(name):
            return concatenate(shapes, 1)
        return concatenate(shapes, 0) if _COLUMN.fullmatch(name) else None

    def _gated(self, name: str, match: re.Match[str]) -> bool | None:
        """Whether a first projection has two halves: by the width of the second."""
        start, module, _, number = match.groups()
        second = self._shapes.get(f"{start or ''}{_SECOND[module]}.weight{number}")
        rows = self._shapes[name][0][0]
        if second is None or len(second[0]) != 2 or rows not in (second[0][1], 2 * second[0][1]):
            return None
        return rows == 2 * second[0][1]

    def _in_layout(self, layout: Layout, name: str, shapes: Shapes) -> TPSharding | None:
        """The sharding that a caller's layout gives a parameter."""
        rule = next(iter(layout.rules_for(name, ["weight"])), None)
        if rule is None:
            return None
        cuts = [p for p in rule.place if not isinstance(p, Replicate)]
        if not cuts:
            return replicate(shapes)
        if len(cuts) > 1 or not isinstance(cuts[0], Shard) or tuple(cuts[0].over) != (TP,) or cuts[0].pad_to:
            raise LayoutError(f"{rule} must replicate it, or shard it once over the axis {TP!r}")
        return shard(shapes, cuts[0])

    def _ambiguous(self, doubts: Sequence[str]) -> AmbiguousLayout:
        lines = [f"  {n} (parts of {list(self._shapes[n][0])})" for n in doubts[:_MAX_LISTED]]
        lines += [f"  … and {len(doubts) - _MAX_LISTED} more"] if len(doubts) > _MAX_LISTED else []
        ranks = len(self._shapes[doubts[0]])
        example = "\n".join(f"    - {{match: '{n}', place: [{{shard: 0, over: tp}}]}}" for n in doubts[:3])
        return AmbiguousLayout(
            f"the checkpoint was saved by {ranks} tensor-parallel ranks, and neither Megatron's names nor the bytes "
            "determine how these parameters are sharded:\n" + "\n".join(lines),
            hint=f"specify it for each, as in {cuts_option({doubts[0]: '0'})} (or replicate, halves, 1; a pattern may "
            f"have *); or in a layout file, given as {option_text('layout')}:\n"
            f"    version: 1\n    mesh: {{tp: {ranks}}}\n    rules:\n{example}  # or replicate, shard 1, parts",
        )
