"""What an export to DeepSpeed needs to know about the engine that loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.engines.deepspeed.experts import Experts, expert_of, is_expert, recorded_degree
from ucformat.engines.deepspeed.export_options import (
    DTYPES,
    DeepSpeedExportOptions,
    UniversalExportOptions,
)
from ucformat.engines.deepspeed.zero import undo_round_robin
from ucformat.errors import UnsupportedError, UsageError, first_names
from ucformat.geometry.tensor import Key
from ucformat.schema import FLOATS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

#: The stage of ZeRO that partitions parameters.
ZERO3 = 3
_SUB_GROUP = 10**9  # elements: DeepSpeed's default of `sub_group_size`


@dataclass(frozen=True, slots=True)
class TargetEngine:
    """The engine that is to load a checkpoint.

    Attributes:
        settings: its configuration; what it leaves out has DeepSpeed's default.
    """

    stage: int
    dp: int
    tp: int
    dtype: str
    tag: str
    step: int
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls, options: UniversalExportOptions, source: Checkpoint, weights: Sequence[TensorInfo]
    ) -> TargetEngine:
        """The engine that the options describe, or else the one that saved the source."""
        layout = source.metadata.layout
        settings = settings_of(options, source)
        zero = zero_of(settings)
        recorded = layout.get("zero") if options.config is None else zero.get("stage", 0)
        stage = recorded if options.stage is None else options.stage
        if not isinstance(stage, int):
            raise UsageError(
                "the source does not tell the ZeRO stage of the engine",
                hint="pass stage (--stage) or config (--config)",
            )
        dp, tp = _ranks(options, layout) if isinstance(options, DeepSpeedExportOptions) else (1, 1)
        step = options.step if options.step is not None else source.metadata.step
        if step is None:
            raise UsageError(
                "the source does not record the number of training steps", hint="pass step (--step)"
            )
        dtype = options.dtype or _dtype(options, settings, layout, weights)
        if isinstance(options, DeepSpeedExportOptions):
            _refuse_engine(stage, dtype, settings)
        return cls(stage, dp, tp, dtype, options.tag or f"global_step{step}", step, settings)

    @property
    def prefix(self) -> str:
        """How the names of optimizer files begin."""
        return "bf16_zero_pp_rank_" if self.dtype == "bfloat16" else "zero_pp_rank_"

    @property
    def sub_group_size(self) -> int:
        """Elements of each rank after which ZeRO 3 begins another flat group."""
        size = zero_of(self.settings).get("sub_group_size")
        return int(size) if isinstance(size, int | float) else _SUB_GROUP

    def flag(self, name: str) -> bool:
        """Whether an option of `zero_optimization` is set."""
        return zero_of(self.settings).get(name) is True


def settings_of(options: UniversalExportOptions, source: Checkpoint) -> Mapping[str, Any]:
    """The engine's configuration: the given or the recorded one; empty if there is none."""
    settings = source.objects.get("ds_config") if options.config is None else options.config
    return settings if isinstance(settings, Mapping) else {}


def zero_of(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section `zero_optimization` of a configuration."""
    zero = settings.get("zero_optimization")
    return zero if isinstance(zero, Mapping) else {}


def _enabled(settings: Mapping[str, Any], section: str) -> bool:
    options = settings.get(section)
    return isinstance(options, Mapping) and options.get("enabled") is True


def _ranks(options: DeepSpeedExportOptions, layout: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of data-parallel and tensor-parallel ranks."""
    before = int(layout.get("tp", 1)) if "zero" in layout else None
    tp = options.tp or before or 1
    world = options.world
    if world is None and "zero" in layout and tp == before and isinstance(layout.get("dp"), int):
        world = layout["dp"] * tp
    if world is None:
        raise UsageError(
            "the source does not tell the number of ranks of the engine",
            hint="pass world (--world), as for torchrun",
        )
    if world % tp:
        raise UsageError(f"{world} ranks are not divided by {tp} tensor-parallel ones")
    return world // tp, tp


def _dtype(
    options: UniversalExportOptions,
    settings: Mapping[str, Any],
    layout: Mapping[str, Any],
    weights: Sequence[TensorInfo],
) -> str:
    """The precision: that of the given configuration, else of the weights."""
    sections = {"bf16": "bfloat16", "fp16": "float16"}
    configured = next((d for name, d in sections.items() if _enabled(settings, name)), None)
    if options.config is not None:
        return configured or "float32"
    dtypes = {info.dtype for info in weights} or {layout.get("weight_dtype", configured)}
    dtype = dtypes.pop()
    if dtypes or dtype not in DTYPES:
        kinds = " and ".join(sorted({str(d) for d in (dtype, *dtypes) if d is not None}))
        description = f"the weights are {kinds}" if kinds else "no weights are stored"
        hint = "pass dtype (--dtype)"
        raise UsageError(
            f"{description}, which does not tell the precision of the engine", hint=hint
        )
    return str(dtype)


def _refuse_engine(stage: int, dtype: str, settings: Mapping[str, Any]) -> None:
    """UnsupportedError for configurations whose files are others."""
    zero, types = zero_of(settings), settings.get("data_types")
    accumulated = types.get("grad_accum_dtype") if isinstance(types, Mapping) else None
    offload = zero.get("offload_optimizer")
    nvme = isinstance(offload, Mapping) and offload.get("device") == "nvme"
    bf16_optimizer = stage == 1 and dtype == "bfloat16" and accumulated == "fp32"
    features = {
        "fp32 gradients under ZeRO 1 (BF16_Optimizer)": bf16_optimizer,
        "elastic_checkpoint": stage in (1, 2) and zero.get("elastic_checkpoint") is True,
        "mics_shard_size": stage == 3 and zero.get("mics_shard_size", -1) not in (-1, 0, None),
        "an optimizer offloaded to NVMe": nvme,
    }
    for feature, is_set in features.items():
        if is_set:
            raise UnsupportedError(
                f"the files of a DeepSpeed engine with {feature} are not written",
                hint="change the configuration (config), or export to `deepspeed-universal`",
            )


# The tensors of a checkpoint as DeepSpeed divides them: trained parameters by optimizer group, and
# the rest.


@dataclass(slots=True)
class OptimizerGroup:
    """An optimizer group: its parameters in order, and their states.

    Attributes:
        states: the tensors of each state, by parameter.
        masters: the fp32 copy of each parameter, or the weight itself where that is the only one.
        ranks: the data-parallel ranks that share the group, in the order of their partitions; None:
            all.
    """

    names: list[str]
    document: Mapping[str, Any]
    states: dict[str, dict[str, TensorInfo]] = field(default_factory=dict)
    masters: dict[str, TensorInfo] = field(default_factory=dict)
    ranks: range | None = None

    def part(self, names: Mapping[str, str], **document: Any) -> OptimizerGroup:
        """Some of the parameters."""

        def cut(by_name: Mapping[str, Any]) -> dict[str, Any]:
            return {new: by_name[old] for old, new in names.items() if old in by_name}

        plain = {state: cut(values) for state, values in self.plain().items()}
        states = {state: some for state, infos in self.states.items() if (some := cut(infos))}
        described = {**self.document, "state": plain, **document}
        return OptimizerGroup(list(names.values()), described, states, cut(self.masters))

    def joined(self, other: OptimizerGroup) -> OptimizerGroup:
        """This group's parameters, then those of one with the same hyper-parameters."""

        def both(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
            return {state: {**one.get(state, {}), **two.get(state, {})} for state in (*one, *two)}

        document = {**self.document, "state": both(self.plain(), other.plain())}
        names, masters = [*self.names, *other.names], {**self.masters, **other.masters}
        return OptimizerGroup(names, document, both(self.states, other.states), masters)

    def scalars(self) -> dict[str, dict[str, TensorInfo]]:
        """The states of no dims, such as `step`."""
        return {s: infos for s, infos in self.states.items() if self._is_scalar(s)}

    def shaped(self) -> dict[str, dict[str, TensorInfo]]:
        """The other states."""
        return {s: infos for s, infos in self.states.items() if not self._is_scalar(s)}

    def _is_scalar(self, state: str) -> bool:
        infos = self.states[state]
        of_arrays = any(self.masters[name].shape for name in infos)
        return not any(i.shape for i in infos.values()) and (state == "step" or of_arrays)

    def plain(self) -> dict[str, dict[str, Any]]:
        """Plain numbers by parameter; one for the group is of all with other states."""
        with_states = set().union(*self.states.values())
        stateful = [n for n in self.names if n in with_states] or self.names
        plain: dict[str, dict[str, Any]] = {}
        for state, value in (self.document.get("state") or {}).items():
            is_by_name = isinstance(value, dict) and not any(k.startswith("$") for k in value)
            plain[state] = dict(value) if is_by_name else dict.fromkeys(stateful, value)
        return plain


class TrainedModel:
    """The tensors of a checkpoint, by their part in an engine."""

    def __init__(
        self, source: Checkpoint, infos: Sequence[TensorInfo], options: UniversalExportOptions
    ) -> None:
        self.source, self.options = source, options
        self.by_name: dict[str, dict[str, TensorInfo]] = {}
        for info in infos:
            self.by_name.setdefault(info.name, {})[info.state] = info
        self.groups = [self._group(document) for document in source.metadata.groups]
        self.trained = {name: info for group in self.groups for name, info in group.masters.items()}
        # names of tensors that are values of the client state
        self.placed_in_client: set[str] = set()

    def _group(self, document: Mapping[str, Any]) -> OptimizerGroup:
        names = list(document["params"])
        recorded = zero_of(self.source.objects.get("ds_config") or {})
        layout = self.source.metadata.layout
        # Such a source lists the parameters as they were dealt to its ranks, separately for each
        # expert-parallel rank.
        if recorded.get("round_robin_gradients") is True and layout.get("zero") in (1, 2):
            degree = recorded_degree(document) or 1
            each = len(names) // degree
            ranks = [names[i * each : (i + 1) * each] for i in range(degree)]
            lists = layout["dp"] // degree
            names = [n for of_rank in ranks for n in undo_round_robin(of_rank, lists)]
        group = OptimizerGroup(names, document)
        missing = [n for n in names if not self.by_name.get(n, {}).keys() & {"weight", "master"}]
        if missing:
            raise UnsupportedError(
                f"the optimizer has parameters of which no weight is exported: {some(missing)}",
                hint="export all states, and all parameters",
            )
        for name in names:
            states = self.by_name[name]
            group.masters[name] = states.get("master") or states["weight"]
            for state, info in states.items():
                if state not in ("weight", "master"):
                    group.states.setdefault(state, {})[name] = info
        return group

    @property
    def expert_ranks(self) -> int | None:
        """The number of expert-parallel ranks that saved the source, if it is known."""
        degrees = {d for g in self.groups if (d := recorded_degree(g.document)) is not None}
        if len(degrees) > 1:
            raise UnsupportedError(
                "layers of experts that are divided among different numbers of ranks "
                f"({', '.join(map(str, sorted(degrees)))}) are not exported to DeepSpeed",
                hint="export the weights alone (--weights-only)",
            )
        degree = degrees.pop() if degrees else self.source.metadata.layout.get("ep")
        return degree if isinstance(degree, int) else None

    @property
    def weights(self) -> list[TensorInfo]:
        """The weights of trained parameters; without an optimizer of all floating-point tensors."""
        stored = {n: states["weight"] for n, states in self.by_name.items() if "weight" in states}
        if self.groups:
            return [info for name, info in stored.items() if name in self.trained]
        return [info for info in stored.values() if info.dtype in FLOATS]

    def module(self, engine: TargetEngine) -> dict[str, TensorInfo]:
        """What the module's parameters and buffers are read from: weights in the engine's precision, else masters.

        The engine rounds what is in another precision when it copies it to its parameters, as after
        a step.
        """
        module = {}
        for name, states in self.by_name.items():
            if name in self.placed_in_client or not states.keys() & {"weight", "master"}:
                continue
            weight, master = states.get("weight"), states.get("master")
            right = weight is not None and (weight.dtype == engine.dtype or master is None)
            info = weight if right or master is None else master
            assert info is not None  # noqa: S101
            narrows = engine.dtype == "float16" and info.dtype != "float16"
            if narrows and name in self.trained and master is None:
                raise UnsupportedError(
                    f"{info.key} is {info.dtype}, and in float16 it might overflow",
                    hint="cast weights to float16 by a view, or train in bfloat16",
                )
            module[name] = info
        return module

    def untrained(self, module: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors that the optimizer does not have: buffers, frozen and empty parameters."""
        return {n: i for n, i in module.items() if n not in self.trained or not i.size}

    def buffers(self, module: Mapping[str, TensorInfo], *, must: bool) -> list[str]:
        """The names of the module's buffers."""
        recorded: Any = self.options.buffers
        if recorded is None:
            recorded = self.source.objects.get("buffer_names")
        untrained = self.untrained(module)
        if isinstance(recorded, list | tuple):
            unknown = [n for n in recorded if n not in module]
            if unknown and self.options.buffers is not None:
                raise UsageError(f"these buffers are not stored: {some(unknown)}")
            return [n for n in recorded if n in untrained]
        doubtful = [n for n, i in untrained.items() if i.dtype in FLOATS and i.size]
        if must and doubtful:
            raise UsageError(
                f"the optimizer does not have {some(doubtful)}: these may be buffers, frozen or "
                "tied parameters, "
                "which are stored in different ways",
                hint="name the buffers (--buffers NAME,… or `none`), and make tied names aliases by a view: "
                "{drop: [ALIAS]}, then {alias: {ALIAS: STORED}}",
            )
        return [n for n, i in untrained.items() if i.dtype not in FLOATS]

    def check_groups(self) -> None:
        """Check that there are optimizer groups."""
        if not self.groups:
            raise UsageError(
                f"{self.source.url} has no optimizer groups, without which `load_checkpoint` "
                "restores weights alone",
                hint="pass weights_only=True (--weights-only), and load it with load_module_only=True (with "
                "load_optimizer_states=False at stage 3)",
            )

    def take_all(self, module: Mapping[str, TensorInfo], buffers: Sequence[str]) -> None:
        """Make all parameters one group without states, as ZeRO 3 stores weights."""
        filled = {n: i for n, i in module.items() if n not in buffers and i.size}
        masters = {n: self.by_name[n].get("master") or i for n, i in filled.items()}
        self.groups, self.trained = [OptimizerGroup(list(masters), {}, {}, masters)], masters


def some(names: Iterable[str]) -> str:
    """Names for a message, at most eight."""
    return first_names(names, 8)


def outside(
    source: Checkpoint, trained: Collection[str], names: Iterable[str]
) -> dict[str, tuple[str | int, ...]]:
    """The tensors that the program that saved did not keep in the state of its model, each with its path there.

    Where paths are not known, a tensor `train.rng` belongs to the object `train`, unless trained
    parameters do, too.
    """
    paths = source.metadata.paths
    homes = {paths[key][0][:-1] for n in trained if paths.get(key := Key(n, "weight"))}
    roots = {n.partition(".")[0] for n in trained}
    out: dict[str, tuple[str | int, ...]] = {}
    for name in names:
        stored_paths = paths.get(Key(name, "weight"))
        first, dot, inner = name.partition(".")
        if homes and stored_paths:
            if stored_paths[0][:-1] not in homes:
                out[name] = stored_paths[0]
        elif dot and first in source.objects and roots and first not in roots:
            out[name] = (first, inner)
    return out


# Experts (`deepspeed.moe`): which rank of an engine has which, under which names, and in which optimizer groups.
#
# `ucformat.engines.deepspeed.experts` describes the files. DeepSpeed moves the experts' parameters of
# each optimizer group to a group of their own at the end, marked `moe`, or to several if they are
# large.


# elements of a rank's group of experts: DeepSpeed's default of `max_group_size`
_MAX_GROUP = 178_956_971


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
    def of(
        cls, model: TrainedModel, engine: TargetEngine, options: UniversalExportOptions
    ) -> ExpertRanks:
        """The experts of a model."""
        experts: dict[str, set[int]] = {}
        for prefix, number in filter(None, map(expert_of, model.by_name)):
            experts.setdefault(prefix, set()).add(number)
        if not experts:
            return cls(Experts(engine.dp))
        if not isinstance(options, DeepSpeedExportOptions):
            raise UnsupportedError(
                "experts of deepspeed.moe are not exported to DeepSpeed's universal format",
                hint="export to `deepspeed`",
            )
        _refuse_experts(engine, options)
        counts = {prefix: len(numbers) for prefix, numbers in experts.items()}
        if gaps := [prefix for prefix, numbers in experts.items() if max(numbers) >= len(numbers)]:
            raise UnsupportedError(
                f"some of the experts are not exported: {some(f'{p}*' for p in gaps)}"
            )
        degree = _degree(model, options)
        if engine.dp % degree:
            raise UsageError(
                f"{engine.dp} ranks are not divided by {degree} expert-parallel ones", hint=_HINT
            )
        if uneven := [prefix for prefix, n in counts.items() if n % degree]:
            raise UsageError(
                f"the {counts[uneven[0]]} experts of {uneven[0]}* are not divided by {degree} "
                "expert-parallel ranks",
                hint=_HINT,
            )
        first = engine.settings.get("use_data_before_expert_parallelism") is True
        return cls(Experts(engine.dp, first, counts), degree)

    def rank_of(self, dp: int) -> int:
        """The expert-parallel rank of a data-parallel one."""
        return next(k for k in range(self.degree) if dp in self.experts.holders(self.degree, k))

    def local(self, names: Iterable[str], rank: int) -> dict[str, str]:
        """Those of some tensors that a rank has, and their names there."""
        names = (n for n in names if self.experts.is_on(n, self.degree, rank))
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
            others = [n for n in group.names if not is_expert(n)]
            recorded = recorded_degree(group.document)
            if not mine or (recorded is None and not split):
                out.append(group)
                continue
            if others:
                out.append(group.part({n: n for n in others}))
            part = group.part({n: n for n in mine}) if others else group
            redivided = recorded not in (None, self.degree)
            if last is not None and redivided and _continues(last, group, before):
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
            names = self.local(group.names, rank)
            return [(local, group.masters[name].shape) for name, local in names.items()]

        first = on(0)
        for rank in range(1, self.degree):
            if (mine := on(rank)) != first:
                names = (n for n, _ in (*first, *mine) if (n in dict(first)) != (n in dict(mine)))
                odd = next(names, "in another order, or of other shapes")
                raise UnsupportedError(
                    f"expert-parallel rank {rank} of {self.degree} would have other parameters "
                    "of experts in the "
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
        numbers: dict[
            str, int
        ] = {}  # of the group that each parameter is in, by its name on a rank
        number = numel = 0
        for name, local in self.local(names, 0).items():
            size = group.masters[name].size
            if numel and numel + size > _MAX_GROUP:
                number, numel = number + 1, 0
            numel += size
            numbers[local] = number
        for index in range(number + 1):
            mine = [n for n in names if numbers[self.experts.local_name(n, self.degree)] == index]
            yield group.part({n: n for n in mine}, name=f"ep_size_{self.degree}", moe=True)

    def _ordered(self, names: Sequence[str], before: int) -> Sequence[str]:
        """Names in the order of the module, if each expert-parallel rank saved them so."""
        if before in (1, self.degree):
            return names
        layers = {prefix: i for i, prefix in enumerate(self.experts.counts)}
        experts = {n: expert for n in names if (expert := expert_of(n)) is not None}
        places = {n: (layers[prefix], number) for n, (prefix, number) in experts.items()}
        out = sorted(names, key=places.__getitem__)
        for rank in range(before):
            mine = [n for n in names if self.experts.is_on(n, before, rank)]
            if mine != sorted(mine, key=places.__getitem__):
                raise UnsupportedError(
                    "the optimizer has the experts' parameters in another order than the module "
                    f"({some(mine)}), "
                    f"so that their order on {self.degree} expert-parallel ranks is not known",
                    hint=f"export for {before} expert-parallel ranks (--ep {before})",
                )
        return out


_HINT = "pass ep (--ep), the `ep_size` of the model's layers"


def _degree(model: TrainedModel, options: DeepSpeedExportOptions) -> int:
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
    """Whether DeepSpeed divided a group of experts from that before it because of its size."""
    per_group = ("params", "state")
    first, second = (
        {k: v for k, v in g.document.items() if k not in per_group} for g in (last, group)
    )
    numel = sum(last.masters[n].size for n in last.names) // before
    return first == second and numel + group.masters[group.names[0]].size > _MAX_GROUP


def _refuse_experts(engine: TargetEngine, options: DeepSpeedExportOptions) -> None:
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
