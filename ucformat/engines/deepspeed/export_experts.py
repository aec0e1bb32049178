"""Experts (`deepspeed.moe`): which rank of an engine has which, under which names, and in which optimizer groups.

`ucformat.engines.deepspeed.experts` describes the files. DeepSpeed moves the experts' parameters of
each optimizer group to a group of their own at the end, marked `moe`, or to several if they are
large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.engines.deepspeed.experts import Experts, expert_of, is_expert, recorded_degree
from ucformat.engines.deepspeed.export_model import ZERO3, listed
from ucformat.engines.deepspeed.export_options import DeepSpeedOptions
from ucformat.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucformat.engines.deepspeed.export_model import Engine, OptimizerGroup, TrainedModel
    from ucformat.engines.deepspeed.export_options import UniversalOptions

_MAX_GROUP = (
    178_956_971  # elements of a rank's group of experts: DeepSpeed's default of `max_group_size`
)


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """How an engine divides experts among its ranks; without experts, every rank has all parameters.

    Attributes:
        experts: the number of experts of each layer, in the order of the layers, and which ranks
            share them.
    """

    experts: Experts
    degree: int = 1

    @classmethod
    def of(cls, model: TrainedModel, engine: Engine, options: UniversalOptions) -> ExpertRanks:
        """The experts of a model."""
        held: dict[str, set[int]] = {}
        for name in model.by_name:
            if (found := expert_of(name)) is not None:
                held.setdefault(found[0], set()).add(found[1])
        if not held:
            return cls(Experts(engine.dp))
        if not isinstance(options, DeepSpeedOptions):
            raise UnsupportedError(
                "experts of deepspeed.moe are not exported to DeepSpeed's universal format",
                hint="export to `deepspeed`",
            )
        _refuse(engine, options)
        counts = {prefix: len(numbers) for prefix, numbers in held.items()}
        if gaps := [prefix for prefix, numbers in held.items() if max(numbers) >= len(numbers)]:
            raise UnsupportedError(
                f"some of the experts are not exported: {listed(f'{p}*' for p in gaps)}"
            )
        degree = _degree(model, options)
        if engine.dp % degree:
            raise UsageError(
                f"{engine.dp} ranks are not divided by {degree} expert-parallel ones", hint=_HINT
            )
        if uneven := [prefix for prefix, n in counts.items() if n % degree]:
            raise UsageError(
                f"the {counts[uneven[0]]} experts of {uneven[0]}* are not divided by {degree} expert-parallel ranks",
                hint=_HINT,
            )
        first = engine.settings.get("use_data_before_expert_parallelism") is True
        return cls(Experts(engine.dp, first, counts), degree)

    def rank_of(self, dp: int) -> int:
        """The expert-parallel rank of a data-parallel one."""
        return next(k for k in range(self.degree) if dp in self.experts.holders(self.degree, k))

    def local(self, names: Iterable[str], rank: int) -> dict[str, str]:
        """Those of some tensors that a rank has, and their names there."""
        names = (n for n in names if self.experts.locally(n, self.degree, rank))
        return {n: self.experts.local_name(n, self.degree) for n in names}

    def on(self, group: OptimizerGroup, rank: int) -> OptimizerGroup:
        """What a rank has of an optimizer group, under the names there."""
        if self.degree == 1 or not any(map(is_expert, group.names)):
            return group
        part = group.part(self.local(group.names, rank))
        part.ranks = self.experts.holders(self.degree, rank)
        return part

    def groups(
        self, groups: Sequence[OptimizerGroup], before: int, *, split: bool
    ) -> list[OptimizerGroup]:
        """The optimizer groups as DeepSpeed makes them for this number of expert-parallel ranks.

        Args:
            split: whether experts are moved to groups of their own, if they are not.
        """
        out: list[OptimizerGroup] = []
        moved: list[OptimizerGroup] = []
        last: OptimizerGroup | None = None
        for group in groups:
            mine = [n for n in group.names if is_expert(n)]
            rest = [n for n in group.names if not is_expert(n)]
            recorded = recorded_degree(group.document)
            if not mine or (recorded is None and not split):
                out.append(group)
                continue
            if rest:
                out.append(group.part({n: n for n in rest}))
            part = group.part({n: n for n in mine}) if rest else group
            if (
                last is not None
                and recorded not in (None, self.degree)
                and _continues(last, group, before)
            ):
                moved[-1] = moved[-1].joined(part)
            else:
                moved.append(part)
            last = group if recorded is not None else None
        for group in out:
            self._check(group)
        return [*out, *(cut for group in moved for cut in self._cut(group, before))]

    def _check(self, group: OptimizerGroup) -> None:
        """Check that all ranks have the same of a group, as loaders take for granted."""

        def on(rank: int) -> list[tuple[str, tuple[int, ...]]]:
            return [
                (local, group.masters[n].shape)
                for n, local in self.local(group.names, rank).items()
            ]

        first = on(0)
        for rank in range(1, self.degree):
            if (mine := on(rank)) != first:
                names = (n for n, _ in (*first, *mine) if (n in dict(first)) != (n in dict(mine)))
                odd = next(names, "in another order, or of other shapes")
                raise UnsupportedError(
                    f"expert-parallel rank {rank} of {self.degree} would have other parameters of experts in the "
                    f"optimizer than rank 0 ({odd}), and DeepSpeed has the same on all",
                    hint=f"{_HINT}; perhaps some experts are frozen, and others are not",
                )

    def _cut(self, group: OptimizerGroup, before: int) -> Iterator[OptimizerGroup]:
        """A group of experts for this number of ranks, divided where a rank's part is too large."""
        names = self._ordered(group.names, before)
        self._check(group.part({n: n for n in names}))
        if recorded_degree(group.document) == self.degree:
            yield group
            return
        # of the group that each parameter is in, by its name on a rank
        numbers: dict[str, int] = {}
        number = numel = 0
        for name, local in self.local(names, 0).items():
            size = group.masters[name].size
            if numel and numel + size > _MAX_GROUP:
                number, numel = number + 1, 0
            numel += size
            numbers[local] = number
        for wanted in range(number + 1):
            mine = [n for n in names if numbers[self.experts.local_name(n, self.degree)] == wanted]
            yield group.part({n: n for n in mine}, name=f"ep_size_{self.degree}", moe=True)

    def _ordered(self, names: Sequence[str], before: int) -> Sequence[str]:
        """Names in the order of the module, if it is that of each expert-parallel rank that saved them."""
        if before in (1, self.degree):
            return names
        layers = {prefix: i for i, prefix in enumerate(self.experts.counts)}
        places = {
            n: (layers[found[0]], found[1]) for n in names if (found := expert_of(n)) is not None
        }
        out = sorted(names, key=places.__getitem__)
        for rank in range(before):
            mine = [n for n in names if self.experts.locally(n, before, rank)]
            if mine != sorted(mine, key=places.__getitem__):
                raise UnsupportedError(
                    f"the optimizer has the experts' parameters in another order than the module ({listed(mine)}), "
                    f"so that their order on {self.degree} expert-parallel ranks is not known",
                    hint=f"export for {before} expert-parallel ranks (--ep {before})",
                )
        return out


_HINT = "pass ep (--ep), the `ep_size` of the model's layers"


def _degree(model: TrainedModel, options: DeepSpeedOptions) -> int:
    """The number of expert-parallel ranks."""
    recorded = model.expert_ranks
    if options.ep is not None:
        return options.ep
    if not model.groups:
        return 1  # weights are in a file for each expert, whatever the ranks
    if recorded is None:
        raise UsageError(
            "the source does not tell the number of expert-parallel ranks of the engine", hint=_HINT
        )
    return recorded


def _continues(last: OptimizerGroup, group: OptimizerGroup, before: int) -> bool:
    """Whether a group of experts was one with that before it, and DeepSpeed divided it because of its size."""
    hypers = [
        {k: v for k, v in g.document.items() if k not in ("params", "state")} for g in (last, group)
    ]
    numel = sum(last.masters[n].size for n in last.names) // before
    return hypers[0] == hypers[1] and numel + group.masters[group.names[0]].size > _MAX_GROUP


def _refuse(engine: Engine, options: DeepSpeedOptions) -> None:
    """UnsupportedError for engines that DeepSpeed does not have, or whose files are not written."""
    if engine.stage == ZERO3:
        raise UnsupportedError(
            "the model has experts of deepspeed.moe, which DeepSpeed does not train at stage 3",
            hint="pass stage (--stage) 0, 1 or 2",
        )
    if engine.tp > 1 or options.fused:
        feature = "tensor parallelism" if engine.tp > 1 else "FusedAdam at stage 0"
        raise UnsupportedError(
            f"experts of deepspeed.moe are not exported for an engine with {feature}"
        )
