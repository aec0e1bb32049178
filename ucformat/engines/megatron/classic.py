"""Classic checkpoints: the files of all ranks, joined to whole parameters under global names."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ucformat.engines.megatron.names import is_expert
from ucformat.engines.megatron.rank_states import RankFile, read_ranks, read_states
from ucformat.engines.megatron.stacked import add_tensor, joined
from ucformat.errors import AmbiguousLayout, IntegrityError, LayoutError, option_text
from ucformat.geometry.placement import Replicate, Shard
from ucformat.geometry.tensor import Key
from ucformat.geometry.tp_sharding import TP, Shapes, TPSharding, concatenate, replicate, shard
from ucformat.reading.readable import CheckpointMetadata
from ucformat.reading.values import to_json
from ucformat.sources.index import Group, IndexedSource, TensorIndex
from ucformat.sources.tp_merge import LocalContents, compare, cuts_option, layout_of_cuts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucformat.engines.megatron.folder import MegatronFolder, MegatronSourceOptions
    from ucformat.engines.megatron.rank_states import Coordinate
    from ucformat.geometry.box import Box
    from ucformat.geometry.layout import Layout
    from ucformat.geometry.tensor import Extent
    from ucformat.geometry.view import BoxPair
    from ucformat.reading.readable import FileRecord
    from ucformat.sources.tp_merge import Verdict
    from ucformat.storage.base import Store


_WORD_EMBEDDING = (
    "embedding.word_embeddings.weight",
    "language_model.embedding.word_embeddings.weight",
)
_OUTPUT_LAYER = (
    "output_layer.weight",
    "word_embeddings_for_head.weight",
    "language_model.output_layer.weight",
)
_NOT_OURS = ("args", "optimizer", "iteration")
_MIXED = "files of different saves are mixed in one folder, or the ranks' copies had diverged in training"


@dataclass(slots=True)
class _Rank:
    """One rank's parameters and states, in its own coordinates, under global names."""

    coordinate: Coordinate
    file: RankFile
    contents: LocalContents
    groups: list[list[Group]] = field(default_factory=list)


class OpenClassic(IndexedSource):
    """One opened classic checkpoint."""

    kind = "megatron"
    part = ""  # there is a file for each of the ranks that the files record

    def __init__(self, store: Store, place: MegatronFolder, options: MegatronSourceOptions) -> None:
        self.store = store
        files, self.args = read_ranks(store, place, options.allow, options.vocab_size)
        recorded = self.args.degree("tensor_model_parallel_size", "model_parallel_size")
        if len(files) == 1 and recorded is None:
            self.part = "the file of one rank, which does not record how many ranks saved"
        self._ranks = {
            coordinate: _Rank(coordinate, f, LocalContents()) for coordinate, f in files.items()
        }
        for rank in self._ranks.values():
            for named, tensors in zip(rank.file.names, rank.file.chunks, strict=True):
                for name, tensor in tensors.items():
                    rank.contents.add_whole(named[name], "weight", rank.file.file, tensor)
            if options.optimizer:
                rank.groups = read_states(rank.file, rank.contents)
        # parts of tensor-parallel ranks whose copies have been compared
        self._agreeing: set[tuple[Key, int]] = set()
        self._degree = 1 + max(t for t, _, _ in files)
        self.contents = TensorIndex()
        self.aliases: dict[str, str] = {}
        first = files[0, 0, 0]
        version = first.values.get("checkpoint_version", 0)
        self._version = version if isinstance(version, int | float) else 0
        self._join(options)
        self.contents.groups = self._groups()
        objects = self._objects()
        step = first.values.get("iteration")
        paths = [f.file.key for f in files.values()]
        paths += [f.distrib.key for f in files.values() if f.distrib]
        degrees = (1 + max(coordinate[i] for coordinate in files) for i in range(3))
        # Megatron-Core calls the stack of layers `decoder`; older models have an `encoder`.
        has_core_names = "decoder" in str(list(first.chunks[0])[:99])
        self.metadata = CheckpointMetadata(
            tensor_list=self.contents.tensor_list(),
            unreadable=self.contents.unreadable,
            aliases=self.aliases,
            objects=objects,
            groups=tuple(g.json() for g in self.contents.groups),
            step=step if type(step) is int else None,
            layout=dict(zip(("tp", "pp", "ep"), degrees, strict=True)),
            assets=self.args.beside.keys,
            engine={"name": "megatron-core" if has_core_names else "megatron-lm"},
            files=(*filter(None, [place.tracker]), *sorted(paths)),
            folder=place.folder,
        )

    def records(self) -> Iterator[FileRecord]:
        """Every record of the files of all ranks."""
        for rank in self._ranks.values():
            yield from rank.file.file.records()
            if rank.file.distrib:
                yield from rank.file.distrib.records()

    def _join(self, options: MegatronSourceOptions) -> None:
        """Join the parts of each parameter, after checks of the ranks that have copies."""
        holders: dict[Key, dict[int, list[_Rank]]] = {}
        for t, p, e in sorted(self._ranks, key=_by_stage):
            rank = self._ranks[t, p, e]
            self.contents.unreadable |= rank.contents.unreadable
            for key in rank.contents.infos:
                holders.setdefault(key, {}).setdefault(t, []).append(rank)
        for key in list(holders):
            if (reason := self.contents.refused_with(key)) is not None:
                self.contents.unreadable[key] = reason
                del holders[key]
        weights = [k for k in holders if k.state == "weight"]
        for key, by_rank in holders.items():
            if sorted(by_rank) != list(range(self._degree)):
                raise IntegrityError(
                    f"{key} is only in the files of the tensor-parallel ranks {sorted(by_rank)}",
                    hint=_MIXED,
                )
        degree = self.args.degree("expert_tensor_parallel_size")
        shapes = {
            k.name: tuple(holders[k][t][0].contents.infos[k].shape for t in range(self._degree))
            for k in weights
        }
        experts = set(filter(is_expert, shapes)) if degree in (None, 1) else set()
        whole = {n for n in experts if degree == 1 or self._experts_are_whole(shapes, n)}
        if degree not in (None, 1, self._degree):
            raise AmbiguousLayout(
                f"experts are sharded across {degree} tensor-parallel ranks and the rest across "
                f"{self._degree}: "
                "the files do not record which rank has which part",
                hint="save it with --ckpt-format torch_dist",
            )

        states = sorted({k.state for k in holders}, key=lambda state: state != "weight")
        layouts = (layout_of_cuts(options.cuts, self._degree), options.layout)
        grouped = self.args.flag("group_query_attention")
        queries = self.args.number("num_query_groups") if grouped else None
        cut = {n: s for n, s in shapes.items() if n not in whole}
        resolver = NameResolver(cut, self._version, [g for g in layouts if g is not None], queries)
        shardings = resolver.decide(lambda name: self._verdict(holders, states, name))
        shardings |= {n: replicate(shapes[n]) for n in shapes if n in whole}
        tied = self._tied(holders, shardings)
        order = {k.name: i for i, k in enumerate(weights)}
        for key in sorted(holders, key=lambda k: order.get(k.name, len(order))):
            if key.name not in shardings:
                raise IntegrityError(f"{key} has no weight", hint=_MIXED)
            if key.name not in tied:
                self._add(key, holders[key], shardings[key.name])
        self.aliases = tied

    def _verdict(
        self, holders: Mapping[Key, dict[int, list[_Rank]]], states: Sequence[str], name: str
    ) -> Verdict:
        """Whether a parameter's parts are equal: by its weight, or if constant, its states."""
        verdict: Verdict = "constant"
        shape = None
        for key in (k for state in states if (k := Key(name, state)) in holders):
            copies = [holders[key][t][0].contents.replica(key) for t in range(self._degree)]
            shape = shape or copies[0].box.shape
            if verdict == "constant" and all(c.box.shape == shape for c in copies):
                verdict = compare(self.store, copies)
        return verdict

    def _experts_are_whole(
        self, shapes: Mapping[str, Sequence[tuple[int, ...]]], name: str
    ) -> bool:
        """Whether each tensor-parallel rank has a whole expert, of the width in the arguments."""
        width = self.args.number("moe_ffn_hidden_size") or self.args.number("ffn_hidden_size")
        second = re.sub(r"linear_fc1\.(weight|bias)", "linear_fc2.weight", name)
        return (
            self._degree > 1
            and width is not None
            and second in shapes
            and shapes[second][0][-1] == width
        )

    def _add(self, key: Key, by_rank: dict[int, list[_Rank]], sharding: TPSharding) -> None:
        firsts = [by_rank[t][0].contents.infos for t in range(self._degree)]
        dtypes = {r.contents.infos[key].dtype for ranks in by_rank.values() for r in ranks}
        if len(dtypes) > 1:
            raise IntegrityError(
                f"{key} has different dtypes in the files of the ranks", hint=_MIXED
            )
        own_shapes = tuple(infos[key].shape for infos in firsts)
        weights = tuple(infos[Key(key.name, "weight")].shape for infos in firsts)
        if own_shapes != weights:
            if any(own_shapes) or len(set(own_shapes)) > 1:
                raise AmbiguousLayout(
                    f"{key} has the parts {[list(s) for s in own_shapes]}, its parameter "
                    f"{[list(s) for s in weights]}: states "
                    "of factored optimizers are not read under tensor parallelism",
                    hint=f"leave the optimizer out: {option_text('optimizer')}",
                )
            sharding = replicate(own_shapes)
        parts = [
            (partial(self._agreed, key, by_rank, t, sharding.regions), sharding.regions[t])
            for t in range(self._degree)
        ]
        tensor = joined(key, dtypes.pop(), sharding.shape, parts)
        add_tensor(self.contents, tensor, self.args)

    def _agreed(
        self,
        key: Key,
        by_rank: dict[int, list[_Rank]],
        t: int,
        regions: tuple[tuple[BoxPair, ...], ...],
        within: Box | None,
    ) -> Iterator[Extent]:
        """The extents of one rank's part, after a check that all copies of it are equal."""
        if (key, t) not in self._agreeing:
            alike = [u for u in range(self._degree) if u == t or regions[u] == regions[t]]
            holders = [rank for u in alike for rank in by_rank[u]]
            for other in holders[1:]:
                self._must_agree(key, holders[0], other)
            self._agreeing.add((key, t))
        return by_rank[t][0].contents.locate[key](within)

    def _must_agree(self, key: Key, one: _Rank, other: _Rank) -> None:
        shapes = {rank.contents.infos[key].shape for rank in (one, other)}
        copies = [rank.contents.replica(key) for rank in (one, other)]
        if len(shapes) > 1 or compare(self.store, copies) == "different":
            names = sorted({e.file for r in (one, other) for e in r.contents.locate[key](None)})
            raise IntegrityError(
                f"{key}: {' and '.join(names)} should be equal, but differ",
                hint=f"{_MIXED}; if it is cut instead, specify how: {option_text('layout')}",
            )

    def _tied(
        self, holders: Mapping[Key, dict[int, list[_Rank]]], shardings: Mapping[str, TPSharding]
    ) -> dict[str, str]:
        """The last stage's copy of the input embedding, if arguments or bytes show one."""
        word = next((n for n in _WORD_EMBEDDING if n in shardings), None)
        if word is None or self.args.tied is False:
            return {}
        head = next((n for n in _OUTPUT_LAYER if n in shardings), None)
        if head is None:
            return {_OUTPUT_LAYER[0]: word} if self.args.tied and word == _WORD_EMBEDDING[0] else {}
        word_key, head_key = Key(word, "weight"), Key(head, "weight")
        copies = [(holders[word_key][t][0], holders[head_key][t][0]) for t in range(self._degree)]
        equal = shardings[word].shape == shardings[head].shape and all(
            compare(self.store, [a.contents.replica(word_key), b.contents.replica(head_key)])
            == "equal"
            for a, b in copies
        )
        if not equal and self.args.tied:
            raise IntegrityError(
                f"{head} should be a copy of {word}, but differs: see "
                f"{copies[0][0].file.file.key} and "
                f"{copies[0][1].file.file.key}",
                hint=_MIXED,
            )
        return {head: word} if equal else {}

    def _groups(self) -> list[Group]:
        """The groups of all ranks' optimizers by position; each parameter once."""
        merged: dict[tuple[int, int], Group] = {}
        seen: set[str] = set(self.aliases)
        for coordinate in sorted(self._ranks, key=_by_stage):
            for o, groups in enumerate(self._ranks[coordinate].groups):
                for g, group in enumerate(groups):
                    names = [n for n in group.names if n not in seen]
                    seen.update(names)
                    into = merged.setdefault((o, g), Group([], group.hyper, group.state))
                    if into.hyper != group.hyper:
                        raise IntegrityError(
                            f"the optimizer groups of {self._ranks[coordinate].file.file.key} have other "
                            "hyper-parameters than "
                            "those of the first rank",
                            hint=_MIXED,
                        )
                    into.names.extend(names)
        return [merged[k] for k in sorted(merged)]

    def _objects(self) -> dict[str, Any]:
        """The first rank's values but tensors; under `ranks` how the others differ."""
        out = self._plain(self._ranks[0, 0, 0], "")
        if self.args.values:
            out["args"] = to_json(dict(self.args.values), path="args")
        by_rank: dict[str, Any] = {}
        for (t, p, e), rank in self._ranks.items():
            if (t, p, e) != (0, 0, 0):
                plain = self._plain(rank, f"tp{t}.pp{p}.ep{e}.")
                unchanged = {k for k, v in plain.items() if json.dumps(v) == json.dumps(out.get(k))}
                if differing := {k: v for k, v in plain.items() if k not in unchanged}:
                    by_rank[f"tp{t}.pp{p}.ep{e}"] = differing
        return {**out, "ranks": by_rank} if by_rank else out

    def _plain(self, rank: _Rank, label: str) -> dict[str, Any]:
        file = rank.file.file

        def spill(path: str, tensor: Any) -> str:
            return self.contents.add_large(label + path, file, tensor)

        values = rank.file.values
        names = [k for k in values if k not in _NOT_OURS and not str(k).startswith("model")]
        chosen = {k: values[k] for k in names}
        optimizer = values.get("optimizer")
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        left = [_without_states(o) for o in optimizers if isinstance(o, dict)]
        if any(left):
            chosen["optimizer"] = left if isinstance(optimizer, list) else left[0]
        if rank.file.extra:
            chosen["_extra_state"] = rank.file.extra
        convert = partial(to_json, read=file.read, spill=spill)
        return {str(k): convert(v, path=str(k)) for k, v in chosen.items()}


def _by_stage(coordinate: Coordinate) -> tuple[int, int, int]:
    """The order of ranks by stage, then expert-parallel and tensor-parallel rank."""
    return coordinate[1], coordinate[2], coordinate[0]


def _without_states(value: dict[Any, Any]) -> dict[Any, Any]:
    """The entries of an optimizer other than states, groups and fp32 copies."""
    excluded = ("state", "param_groups", "fp32_from_fp16_params", "fp32_from_fp16")
    out = {k: v for k, v in value.items() if k not in excluded}
    if isinstance(out.get("optimizer"), dict):
        inner = _without_states(out.pop("optimizer"))
        out |= {"optimizer": inner} if inner else {}
    return out


# How a parameter is sharded across tensor-parallel ranks, by the names of Megatron's modules and
# the parts' shapes.
#
# Column-parallel layers are cut along dim 0, row-parallel ones along dim 1, vocabularies along dim
# 0, and all other known parameters are replicated. Of a gated first projection each rank has a part
# of the gate, then one of the other half; it is recognised by its shape, with twice as many outputs
# as the second projection has inputs. Query, key and value are interleaved by head since version 1
# of the files, so that a rank's part is a run of heads; in version 0 each part had all queries
# first.
#
# Bytes overrule names: a parameter that should be cut but is equal on all ranks, and not one
# repeated value, is a doubt.

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
        queries: number of query groups that share keys and values; None if the arguments do not
            record it.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shapes],
        version: float,
        layouts: Sequence[Layout],
        queries: int | None = None,
    ) -> None:
        self._shapes, self._version = shapes, version
        self._layouts, self._queries = layouts, queries

    def decide(self, verdict: Callable[[str], Verdict]) -> dict[str, TPSharding]:
        """The sharding of each parameter."""
        out: dict[str, TPSharding] = {}
        doubts: list[str] = []
        for name, shapes in self._shapes.items():
            try:
                sharding = self._given(name, shapes) or self._by_name(name, shapes, verdict)
            except LayoutError as e:
                raise type(e)(f"{name}: {e.message}", hint=e.hint) from e
            if sharding is None:
                doubts.append(name)
            else:
                out[name] = sharding
        if doubts:
            raise self._ambiguous(doubts)
        return out

    def _given(self, name: str, shapes: Shapes) -> TPSharding | None:
        if len(shapes) == 1:
            return replicate(shapes)
        shardings = (self._in_layout(layout, name, shapes) for layout in self._layouts)
        return next(filter(None, shardings), None)

    def _by_name(
        self, name: str, shapes: Shapes, verdict: Callable[[str], Verdict]
    ) -> TPSharding | None:
        """The sharding by the name, unless the bytes contradict it; else by the bytes."""
        if _SAME.fullmatch(name):
            return replicate(shapes)  # it is checked when it is read
        cut = self._cut(name, shapes)
        if len(set(shapes)) > 1:
            return cut
        if cut is None:
            return replicate(shapes) if not shapes[0] or verdict(name) == "equal" else None
        return cut if verdict(name) != "equal" else None

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
        cut = cuts[0] if len(cuts) == 1 else None
        if not isinstance(cut, Shard) or tuple(cut.over) != (TP,) or cut.pad_to:
            raise LayoutError(f"{rule} must replicate it, or shard it once over the axis {TP!r}")
        return shard(shapes, cut)

    def _ambiguous(self, doubts: Sequence[str]) -> AmbiguousLayout:
        lines = [f"  {n} (parts of {list(self._shapes[n][0])})" for n in doubts[:_MAX_LISTED]]
        lines += [f"  … and {len(doubts) - _MAX_LISTED} more"] if len(doubts) > _MAX_LISTED else []
        ranks = len(self._shapes[doubts[0]])
        example = "\n".join(
            f"    - {{match: '{n}', place: [{{shard: 0, over: tp}}]}}" for n in doubts[:3]
        )
        return AmbiguousLayout(
            f"the checkpoint was saved by {ranks} tensor-parallel ranks, and neither Megatron's "
            "names nor the bytes "
            "determine how these parameters are sharded:\n" + "\n".join(lines),
            hint=f"specify it for each, as in {cuts_option({doubts[0]: '0'})} (or replicate, halves, 1; a pattern may "
            f"have *); or in a layout file, given as {option_text('layout')}:\n"
            f"    version: 1\n    mesh: {{tp: {ranks}}}\n    rules:\n{example}  # or replicate, "
            "shard 1, parts",
        )
