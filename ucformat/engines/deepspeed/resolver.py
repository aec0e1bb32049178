"""The sharding of each parameter across tensor-parallel ranks: given, or else inferred."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ucformat.engines.deepspeed.experts import is_expert
from ucformat.engines.deepspeed.inference import (
    EQUAL,
    MEAN,
    Doubt,
    ModelSizes,
    ambiguous,
    as_its_weight,
    as_other_norms,
    cut,
    family_of,
    infer,
    preset_layout,
)
from ucformat.engines.deepspeed.patterns import TensorParallelInfo
from ucformat.errors import AmbiguousLayout, LayoutError, UnsupportedError, option_text
from ucformat.geometry.placement import axes_of, place
from ucformat.geometry.tp_sharding import (
    TP,
    Shapes,
    TPSharding,
    concatenate,
    mean,
    replicate,
    shard,
)
from ucformat.reading.stand_ins import Inert
from ucformat.sources.tp_merge import cuts_option, layout_of_cuts
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from ucformat.engines.deepspeed.model_states import ModelStates
    from ucformat.geometry.layout import Layout
    from ucformat.sources.tp_merge import Verdict


class ShardingResolver:
    """Finds the sharding of parameters: `recognise` gets all of them, then `decide` any."""

    def __init__(
        self,
        models: list[ModelStates],
        ranks: int,
        layout: Layout | str | None = None,
        vocab: int | None = None,
        cuts: Mapping[str, str | int] | None = None,
        stacked: Collection[str] = (),
    ) -> None:
        self._ranks, self._vocab, self._stacked = ranks, vocab, stacked
        self._file = models[0].key
        describing = (m for m in models if m.value.get("universal_checkpoint_info"))
        described_by = next(describing, models[0])
        info = described_by.value.get("universal_checkpoint_info")
        self.info = TensorParallelInfo(info, described_by.key, _padded(described_by, info))
        recorded = info.get("original_vocab_size") if isinstance(info, dict) else None
        if vocab is None and isinstance(recorded, int):
            self._vocab = recorded
        layouts = (layout_of_cuts(cuts, ranks), _layout_of(layout, ranks))
        self._layouts = [candidate for candidate in layouts if candidate is not None]
        self._sizes = ModelSizes.of(described_by.value)
        self._shapes: Mapping[str, Shapes] = {}
        self._described: list[str] = []
        self._proved: dict[str, bool] = {}  # evidence from the other parameters, computed on demand
        self._family: Layout | None = None
        self._width: int | None = None
        self._tables: dict[int, str] = {}  # padded rows -> the vocabularies with this number

    def recognise(self, shapes: Mapping[str, Shapes], described: Iterable[str] = ()) -> None:
        """Determine the model's family and width from all parameters."""
        self._shapes, self._width = shapes, _width(shapes)
        self._described = [name for name in described if name not in shapes]
        if not self.info and self._ranks > 1 and (preset := family_of(dict(shapes))):
            self._family = preset_layout(preset, self._ranks)

    def decide(
        self,
        shapes: Mapping[str, Shapes],
        buffers: frozenset[str],
        verdict: Callable[[str], Verdict],
    ) -> dict[str, TPSharding]:
        """The sharding of each of these parameters."""
        out: dict[str, TPSharding] = {}
        doubts: dict[str, Doubt] = {}
        verdict = self._compared(shapes, verdict)
        for name, parts in shapes.items():
            try:
                reading = self._given(name, parts, buffers, verdict)
                if reading is None and self._family is not None:
                    reading = self._preset(self._family, name, parts, verdict)
                if reading is None:
                    reading = infer(name, parts, partial(verdict, name), shapes, self._width)
                    by_bytes = isinstance(reading, TPSharding) and reading.why == EQUAL
                    if by_bytes and parts[0] and not self._differ(verdict):
                        reading = Doubt(name, parts, "replicate", cut(0))
            except LayoutError as error:
                raise type(error)(
                    f"{self._file}: {name}: {error.message}",
                    hint=error.hint
                    or f"specify how it is cut: {cuts_option({name: 'replicate'})}, …",
                ) from error
            if isinstance(reading, Doubt):
                doubts[name] = reading
            else:
                out[name] = reading
        for name in list(doubts):
            parts = shapes[name]
            if len(set(parts)) == 1 and verdict(name) == "constant":
                settled = as_its_weight(name, parts, out) or as_other_norms(name, parts, out)
                if settled is not None:
                    out[name] = settled
                    del doubts[name]
        if doubts:
            raise ambiguous(list(doubts.values()), self._ranks)
        self._check_vocabulary(out)
        return out

    def _compared(
        self, shapes: Mapping[str, Shapes], verdict: Callable[[str], Verdict]
    ) -> Callable[[str], Verdict]:
        """`verdict`, cached, and computed at once for all parameters that no pattern matches."""
        verdicts: dict[str, Verdict] = {}
        if self.info and self._ranks > 1:
            alike = [n for n, s in shapes.items() if len(set(s)) == 1 and s[0]]
            unmatched = [n for n in alike if self.info.is_default(n)]
            verdicts.update(zip(unmatched, map_io(verdict, unmatched), strict=True))

        def compared(name: str) -> Verdict:
            if name not in verdicts:
                verdicts[name] = verdict(name)
            return verdicts[name]

        return compared

    def _weigh(
        self, name: str, shapes: Shapes, joined: TPSharding, verdict: Callable[[str], Verdict]
    ) -> TPSharding | Doubt:
        """The sharding of a parameter that no pattern matches, which DeepSpeed joins along dim 0."""
        whole, compared = self._sizes.whole(name, shapes), verdict(name)
        if compared == "different":
            if whole:
                return Doubt(name, shapes, MEAN, cut(0))
            is_turned = self._sizes.width(name, shapes) is False
            return Doubt(name, shapes, cut(0), cut(1)) if is_turned else joined
        if whole is False:
            return joined.because("the rows that the arguments record")
        replica = self.info.strip(name, replicate(shapes))
        if whole:
            return replica.because("the rows that the arguments record")
        if compared == "equal" and self._equal_means_replica(verdict):
            return replica.because("equal bytes, while those of sharded parameters differ")
        return Doubt(name, shapes, "replicate", cut(0))

    def _equal_means_replica(self, verdict: Callable[[str], Verdict]) -> bool:
        """Whether equal parts are replicas: others are declared so, and some parts differ."""
        called = any(map(self.info.is_replicated, self._described)) or any(
            self.info.is_replicated(n) and len(set(s)) == 1 and verdict(n) != "different"
            for n, s in self._shapes.items()
        )
        return called and self._differ(verdict)

    def _differ(self, verdict: Callable[[str], Verdict]) -> bool:
        """Whether ranks hold different parts of any parameter: they were not seeded alike."""
        if "differ" not in self._proved:
            names = sorted(self._shapes, key=lambda n: -len(self._shapes[n][0]))  # matrices first
            self._proved["differ"] = any(
                len(set(self._shapes[n])) > 1 or (self._shapes[n][0] and verdict(n) == "different")
                for n in names
                if not self.info.is_replicated(n)
            )
        return self._proved["differ"]

    def may_differ(self, name: str) -> bool:
        """Whether the copies of a parameter in several pipeline stages may differ; the first stage's copy is then read.

        Megatron-DeepSpeed ties the whole embedding module, but the last stage trains only the
        vocabulary.
        """
        return self.info.pipeline.find(name) is not None and not self.info.is_vocabulary(name)

    def _given(
        self, name: str, shapes: Shapes, buffers: frozenset[str], verdict: Callable[[str], Verdict]
    ) -> TPSharding | Doubt | None:
        """The sharding that the caller or the checkpoint gives."""
        if name in self._stacked and shapes[0]:  # of which each rank has some experts
            return concatenate(shapes, 0)
        if len(shapes) < self._ranks:  # an expert that only one of the ranks has
            return self._alone(name, shapes)
        for layout in self._layouts:
            placed = self._placed(layout, name, shapes)
            if placed is not None:
                return placed.because("the given layout")
        if is_expert(name) and self._ranks > 1 and self.info and self.info.is_default(name):
            return None  # patterns describe the layers that are not experts
        if name in buffers and self._ranks > 1 and self.info and self.info.is_default(name):
            # patterns describe parameters only
            if len(set(shapes)) == 1 and verdict(name) != "different":
                return replicate(shapes).because("equal buffers")
            return None
        sharding = self.info.sharding(name, shapes)
        settled = sharding is None or self._ranks == 1 or len(set(shapes)) > 1
        if sharding is None or settled or not self.info.is_default(name):
            return sharding
        return self._weigh(name, shapes, sharding, verdict)

    def _alone(self, name: str, shapes: Shapes) -> TPSharding:
        """The sharding of an expert that only one of the ranks has: none, or the rest of it is nowhere."""
        if self.info and not self.info.is_default(name):
            try:
                described = self.info.sharding(name, shapes * self._ranks)
            except LayoutError:  # in parts of other shapes
                described = None
            if described is None or described.shape != shapes[0]:
                raise UnsupportedError(
                    f"{self._file}: {name} is an expert of one tensor-parallel rank, which has a part "
                    "of it, and no other rank has the rest",
                    hint="train with enable_expert_tensor_parallelism, or do not let AutoTP cut experts",
                )
        return replicate(shapes)

    def _preset(
        self, family: Layout, name: str, shapes: Shapes, verdict: Callable[[str], Verdict]
    ) -> TPSharding | Doubt | None:
        """The sharding of a recognised family's preset, if the bytes do not contradict it."""
        placed = self._placed(family, name, shapes)
        if placed is None or len(set(shapes)) > 1:
            return placed
        targets = {region.target for regions in placed.regions for region in regions}
        replicated = len(targets) == len(placed.regions[0])
        if verdict(name) == ("different" if replicated else "equal"):
            return Doubt(name, shapes, "replicate", cut(0))
        return placed.because("its family")

    def _placed(self, layout: Layout, name: str, shapes: Shapes) -> TPSharding | None:
        """The sharding that a layout gives a parameter; None if no rule matches it."""
        for rule in layout.rules:
            match = rule.find(name)
            if match is None or not rule.has_state("weight"):
                continue
            placed = place(layout.meshes[rule.mesh] if rule.mesh else layout.mesh, [(rule, match)])
            has_other_axes = any(axes_of(p) not in ((), (TP,)) for p in rule.place)
            if placed.flat or placed.holders or has_other_axes:
                raise LayoutError(f"{rule} uses another axis than {TP!r}")
            if placed.partial:
                return mean(shapes)
            if not placed.shards:
                return replicate(shapes)
            placement = placed.shards[0]
            if placement.pad_to is None:
                sharding = shard(shapes, placement)
                return sharding if placement.dim else self.info.strip(name, sharding)
            if self._vocab is None:
                raise LayoutError(
                    f"{rule} pads it, but its size without padding is unknown",
                    hint=(
                        f"give it: {option_text('vocab', '50257')}, or leave out pad_to to keep "
                        "the padding as rows"
                    ),
                )
            return shard(shapes, placement, self._vocab)
        return None

    def _check_vocabulary(self, shardings: Mapping[str, TPSharding]) -> None:
        """Check that all padded tables have one size; otherwise it is unclear which one is padded."""
        padded = self._tables
        for name, sharding in shardings.items():
            if sharding.padding_rows:
                padded[sharding.shape[0] + sharding.padding_rows] = name
        if len(padded) > 1:
            names = " and ".join(padded.values())
            raise AmbiguousLayout(
                f"{self._file}: {names} are vocabularies of {' and '.join(map(str, padded))} "
                "rows, but one original "
                f"size, {self._vocab}, is recorded: which of them is padded is unclear",
                hint="specify how they are cut in a layout, where a rule without pad_to keeps all rows: "
                f"{option_text('layout')}",
            )


def _padded(model: ModelStates, info: Any) -> int | None:
    """The size that the vocabulary was padded to, if the file has it."""
    args = model.value.get("args")
    size = info.get("padded_vocab_size") if isinstance(info, dict) else None
    if size is None and isinstance(args, Inert | dict):
        size = args.get("padded_vocab_size")
    return size if isinstance(size, int) else None


def _layout_of(layout: Layout | str | None, ranks: int) -> Layout | None:
    """The caller's layout, or the preset with this name."""
    if isinstance(layout, str):
        return preset_layout(layout, ranks)
    if layout is None:
        return None
    if layout.mesh.axes.get(TP, 1) != ranks:
        raise LayoutError(
            f"the layout is for {layout.mesh.axes.get(TP, 1)} coordinates of the axis {TP!r}, "
            "but the checkpoint was "
            f"saved by {ranks} tensor-parallel ranks",
            hint=f"give it the mesh {{{TP}: {ranks}}}",
        )
    return layout


def _width(shapes: Mapping[str, Shapes]) -> int | None:
    """The model's width, if all norms have the same length."""
    norms = (s[0] for n, s in shapes.items() if "norm" in n.lower() and n.endswith("weight"))
    lengths = {shape[0] for shape in norms if len(shape) == 1}
    return lengths.pop() if len(lengths) == 1 else None
