"""Expert parallelism (`deepspeed.moe`): the experts of a checkpoint, the ranks that hold them, and their names.

Expert-parallel rank K of E holds n/E of a layer's n experts, as
`….deepspeed_moe.experts.deepspeed_experts.J.…`, where J counts from 0 on each rank: `param_shapes`
and the optimizer use this local name for expert K·n/E + J. The files of the weights, one for each
expert, use the global number. For data-parallel rank R of D, K is R mod E; under
`use_data_before_expert_parallelism` it is R div (D/E). E may differ between layers.

Under ZeRO 1 and 2 the groups of experts' parameters are partitioned across the D/E ranks of the
same K. Under ZeRO 0 the first rank of each K writes its optimizer, which includes the states of all
other parameters.

All this is so within each pipeline stage and tensor-parallel rank if `enable_expert_tensor_parallelism`
is set: each tensor-parallel rank has a part of each expert, and files of its own. Otherwise experts
are whole, and expert parallelism goes over all ranks of a stage, T of tensor parallelism for each
R: K is (R·T + tensor-parallel rank) mod E. If T divides E, the tensor-parallel rank of all that hold K
is K mod T, so its files have all of these experts, and its data-parallel ranks hold E/T of the K's.
DeepSpeed 0.19.8 saves, but cannot load, where T does not divide E.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ucformat.engines.deepspeed.folder import copy_hint
from ucformat.engines.deepspeed.model_states import ModelStates, need, stored
from ucformat.errors import IntegrityError, MissingData, UnsupportedError
from ucformat.reading.stand_ins import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ucformat.engines.deepspeed.autoep import StackedLayer
    from ucformat.sources.pickle.file import TorchFile

_NAME = re.compile(
    r"\.?((?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,6})(\..+)", re.DOTALL
)
_GROUP = re.compile(r"ep_size_(\d{1,6})")
_MAX_LISTED = 10


def is_expert(name: str) -> bool:
    """Whether a tensor belongs to an expert."""
    return _NAME.fullmatch(name) is not None


def expert_of(name: str) -> tuple[str, int] | None:
    """The expert of a tensor: its layer's prefix, and its number; None for other tensors."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def of_first_expert(name: str) -> str:
    """The name of the same tensor of the layer's first expert, which all ranks have; other names unchanged."""
    match = _NAME.fullmatch(name)
    return name if match is None else f"{match[1]}0{match[3]}"


def recorded_degree(group: object) -> int | None:
    """The number of expert-parallel ranks that share a group of experts; None for other groups."""
    name = group.get("name") if isinstance(group, Mapping) and group.get("moe") else None
    match = _GROUP.fullmatch(name) if isinstance(name, str) else None
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model-parallel rank: their numbers by layer, that is by the prefix of their names.

    Attributes:
        lanes: the tensor-parallel ranks, if each has experts of its own; else 1.
        lane: which of these ranks this is.
        stacked: AutoEP's tensors, and the layer of each.
    """

    dp: int
    data_first: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    lanes: int = 1
    lane: int = 0
    stacked: Mapping[str, StackedLayer] = field(default_factory=dict)

    def holders(self, degree: int, rank: int) -> range:
        """The data-parallel ranks of an expert-parallel rank, in the order of their partitions.

        Args:
            degree: the number of expert-parallel ranks among the data-parallel ranks.
        """
        if not self.data_first:
            return range(rank, self.dp, degree)
        wide = self.dp // degree
        return range(rank * wide, (rank + 1) * wide)

    def place(self, degree: int, rank: int) -> int:
        """The index of a data-parallel rank among those of its expert-parallel rank."""
        return rank % (self.dp // degree) if self.data_first else rank // degree

    def global_name(self, name: str, degree: int, rank: int) -> str:
        """The global name of a parameter."""
        match = _NAME.fullmatch(name)
        if match is None or degree * self.lanes == 1:
            return name
        first = self._whole_rank(rank) * self._on_each(match[1], degree)
        return f"{match[1]}{first + int(match[2])}{match[3]}"

    def local_name(self, name: str, degree: int) -> str:
        """A parameter's name on the rank that holds it; the inverse of `global_name`."""
        match = _NAME.fullmatch(name)
        if match is None or degree * self.lanes == 1:
            return name
        return f"{match[1]}{int(match[2]) % self._on_each(match[1], degree)}{match[3]}"

    def is_on(self, name: str, degree: int, rank: int) -> bool:
        """Whether an expert-parallel rank holds a parameter: its own expert's, or no expert's."""
        match = _NAME.fullmatch(name)
        if match is None:
            return True
        return int(match[2]) // self._on_each(match[1], degree) == self._whole_rank(rank)

    def is_expert(self, name: str) -> bool:
        """Whether a tensor belongs to an expert, or to several in a stack."""
        return name in self.stacked or is_expert(name)

    def _whole_rank(self, rank: int) -> int:
        """An expert-parallel rank among those of all lanes."""
        return self.lane + self.lanes * rank

    def _on_each(self, prefix: str, degree: int) -> int:
        """The experts of a layer on each expert-parallel rank."""
        return self.counts[prefix] // (degree * self.lanes)

    def degree_of(
        self, shapes: Mapping[str, tuple[int, ...]], hyper: Any, parts: Any, file: str
    ) -> int:
        """The number of expert-parallel ranks that share a flat group; 1 without experts."""
        recorded = recorded_degree(hyper)
        numbers: dict[str, set[int]] = {}
        in_stacks: dict[str, int] = {}  # no set of numbers: a file may say any number of rows
        not_of_expert = None
        for name, shape in shapes.items():
            match = _NAME.fullmatch(name)
            if name in self.stacked:
                in_stacks[name] = shape[0] if shape else 0
            elif match is None:
                not_of_expert = name
            else:
                numbers.setdefault(match[1], set()).add(int(match[2]))
        degree = None if recorded is None else recorded // self.lanes
        if degree is None:
            degree = self.dp // parts if isinstance(parts, int) and 0 < parts <= self.dp else 1
        has_experts = bool(numbers or in_stacks)
        if not has_experts or degree < 1 or self.dp % degree:
            degree = 1
        if isinstance(parts, int) and parts * degree != self.dp:
            named = "" if recorded is None else f" named 'ep_size_{recorded}'"
            raise IntegrityError(
                f"{file} was saved by {parts} ranks of one group{named}, but {self.dp} files of "
                "optimizer states are "
                "present",
                hint="files of different saves are mixed in one folder, or experts were assigned to ranks in a way "
                "that ucformat does not know",
            )
        if degree > 1 and not_of_expert is not None:
            raise UnsupportedError(
                f"{file} has {not_of_expert}, which is not an expert's, in a group that is sharded "
                f"across {degree} ranks"
            )
        if has_experts and self.lanes > 1 and self.data_first and degree != self.dp:
            raise UnsupportedError(
                f"{file}: not yet read: experts under use_data_before_expert_parallelism that are "
                f"held by {self.dp // degree} ranks each, across tensor-parallel ranks"
            )
        self._check_shares(numbers, in_stacks, degree, file)
        return degree

    def _check_shares(
        self,
        numbers: Mapping[str, Collection[int]],
        in_stacks: Mapping[str, int],
        degree: int,
        file: str,
    ) -> None:
        """Check that each expert-parallel rank has its share of a group's experts."""
        ranks = degree * self.lanes
        for prefix, ids in numbers.items():
            count = self.counts.get(prefix, 0)
            # not all of a rank's experts if the group was divided because of its size
            if count % ranks or max(ids) * ranks >= count:
                raise _other_number(file, ranks, len(ids), prefix, count)
        for name, own in in_stacks.items():
            layer = self.stacked[name]
            if layer.degree != degree or own * ranks != layer.experts:
                raise _other_number(file, ranks, own, name, layer.experts)


def _other_number(file: str, ranks: int, own: int, prefix: str, count: int) -> IntegrityError:
    """The error for a rank whose number of experts is not its share of all."""
    return IntegrityError(
        f"{file}: {ranks} expert-parallel ranks have {own} experts each of {prefix}*, but there "
        f"are files of {count}",
        hint="files of different saves are mixed in one folder",
    )


def adopt_experts(
    models: Sequence[ModelStates], files: Sequence[Mapping[tuple[int, int], TorchFile]], dp: int
) -> list[Experts]:
    """Add the experts' weights to the model states of a stage's tensor-parallel ranks, each after its layer's gate.

    Args:
        files: of each of these ranks, by layer of experts and expert.
    """
    recorded = [_recorded(model) for model in models]
    if other := next((m for m, r in zip(models, recorded, strict=True) if r != recorded[0]), None):
        raise IntegrityError(
            f"{other.key} and {models[0].key} record other numbers of experts",
            hint="files of different saves are mixed in one folder",
        )
    for of_rank in files:
        _check_none_beyond(recorded[0], of_rank)
    lanes = _lanes(models[0], recorded[0], files)
    return [
        _adopt(
            *(model, of_rank, recorded[0]),
            Experts(dp, _data_first(model), {}, lanes, t % lanes, model.stacked_names),
        )
        for t, (model, of_rank) in enumerate(zip(models, files, strict=True))
    ]


def partitioned_experts(models: Sequence[ModelStates]) -> Experts:
    """The experts of AutoEP under ZeRO 3, of which there are no files.

    Args:
        models: those of all data-parallel ranks.
    """
    first = models[0]
    return Experts(len(models), _data_first(first), stacked=first.stacked_names)


def _recorded(model: ModelStates) -> list[int]:
    """The number of experts of each layer of experts."""
    recorded = model.value.get("num_experts") or []
    if not isinstance(recorded, list) or any(type(n) is not int or n < 1 for n in recorded):
        raise IntegrityError(f"{model.key} has no usable 'num_experts' ({recorded!r:.80})")
    return recorded


def _data_first(model: ModelStates) -> bool:
    config = model.value.get("ds_config")
    return isinstance(config, dict) and config.get("use_data_before_expert_parallelism") is True


def _check_none_beyond(recorded: Sequence[int], files: Mapping[tuple[int, int], TorchFile]) -> None:
    beyond = (f for (i, e), f in files.items() if i >= len(recorded) or e >= recorded[i])
    if (extra := next(beyond, None)) is not None:
        raise IntegrityError(
            f"{extra.key} does not belong to this checkpoint, whose layers have {recorded} experts",
            hint="an earlier save of another model left it; move it elsewhere",
        )


def _lanes(
    model: ModelStates,
    recorded: Sequence[int],
    files: Sequence[Mapping[tuple[int, int], TorchFile]],
) -> int:
    """The number of tensor-parallel ranks if each has experts of its own; else 1, and each has all files."""
    every = set().union(*files)
    spread = len(files) > 1 and sum(map(len, files)) == len(every)
    before = f"{model.key.rpartition('/')[0]}/".lstrip("/")
    first = int(model.key.rpartition("mp_rank_")[2].partition("_")[0])
    missing: list[str] = []
    for t, of_rank in enumerate([every] if spread else files):
        absent = islice(_missing(recorded, of_rank), _MAX_LISTED + 1 - len(missing))
        rank = "*" if spread else f"{first + t:02d}"
        missing += [
            f"{before}layer_{i}_expert_{e}_mp_rank_{rank}_model_states.pt" for i, e in absent
        ]
    if missing:
        names = ", ".join(missing[:_MAX_LISTED])
        raise MissingData(
            f"{names}{' and more' if len(missing) > _MAX_LISTED else ''} is missing: the "
            "checkpoint has "
            f"{len(recorded)} layers of {', '.join(map(str, recorded[:_MAX_LISTED]))} experts",
            hint=copy_hint(),
        )
    shares = {
        tuple(sum(i == layer for i, _ in of_rank) for layer in range(len(recorded)))
        for of_rank in files
    }
    if spread and len(shares) > 1:
        raise UnsupportedError(
            f"{model.key}: not yet read: whole experts of which the {len(files)} tensor-parallel "
            "ranks hold unequal shares, because the number of expert-parallel ranks is no multiple "
            "of theirs (DeepSpeed itself cannot load such a checkpoint)",
            hint="save with more expert-parallel ranks, or with enable_expert_tensor_parallelism",
        )
    return len(files) if spread else 1


def _adopt(
    model: ModelStates,
    files: Mapping[tuple[int, int], TorchFile],
    recorded: Sequence[int],
    experts: Experts,
) -> Experts:
    """Add the weights of a rank's experts to its model states; returns `experts` with their numbers."""
    counts: dict[str, int] = {}
    layers: list[dict[str, tuple[StoredTensor, TorchFile]]] = []
    for layer, number in enumerate(recorded):
        if layer in model.stacked:
            _adopt_stacks(model, files, layer, number)
            continue
        tensors = {}
        prefixes = set()
        first = None
        for expert in range(number):
            if (file := files.get((layer, expert))) is None:
                continue
            first = first or file.key
            for name, tensor in _tensors(file, expert):
                tensors[name] = tensor, file
                prefixes.add(name[: name.rindex("deepspeed_experts.")] + "deepspeed_experts.")
        if len(prefixes) > 1 or prefixes & counts.keys():
            raise IntegrityError(
                f"the files of layer {layer}'s experts, {first} and others, hold "
                "several layers' or "
                "another one's: " + ", ".join(sorted(prefixes)),
                hint="files of different saves are mixed in one folder",
            )
        counts.update(dict.fromkeys(prefixes, number))
        layers.append(tensors)
    for prefix, tensors in zip(counts, filter(None, layers), strict=True):
        model.adopt_after(prefix.removesuffix("experts.deepspeed_experts."), tensors)
    return replace(experts, counts=counts)


def _adopt_stacks(
    model: ModelStates, files: Mapping[tuple[int, int], TorchFile], layer: int, number: int
) -> None:
    """Add the stacked weights of a layer of AutoEP to the model states."""
    stacked = model.stacked[layer]
    if stacked.experts != number:
        raise IntegrityError(
            f"{model.key} records {number} experts of layer {layer}, and {stacked.experts} of AutoEP's"
        )
    of_layer = [files[layer, expert] for expert in range(number)]
    for name in stacked.names:
        parts: list[tuple[StoredTensor, TorchFile]] = []
        for expert, file in enumerate(of_layer):
            tensors = file.value if isinstance(file.value, dict) else {}
            tensor = stored(tensors.get(f"{name}.{expert}"), f"{name}.{expert}", file.key)
            if parts and (tensor.dtype, tensor.shape) != (parts[0][0].dtype, parts[0][0].shape):
                raise IntegrityError(
                    f"{name}.{expert} in {file.key} is {tensor.dtype} {list(tensor.shape)}, that of "
                    f"the first expert {parts[0][0].dtype} {list(parts[0][0].shape)}",
                    hint="files of different saves are mixed in one folder",
                )
            parts.append((tensor, file))
        model.adopt_stack(name, parts)


def expert_model(
    base: ModelStates, file: TorchFile, experts: Experts, degree: int, rank: int
) -> ModelStates:
    """The model states of an expert-parallel rank under ZeRO 0.

    Its own optimizer and experts, and all shared tensors.
    """
    state = need(file.value, "optimizer", (dict, type(None)), file.key)
    buffers = [experts.global_name(name, degree, rank) for name in base.buffers]
    file.value = {"module": {}, "buffer_names": buffers, "optimizer": state}
    model = ModelStates(file)
    for name, tensor in base.module.items():
        if experts.is_on(name, degree, rank):
            model.adopt(name, tensor, base.home(name))
    for name, parts in base.stacks.items():
        local = len(parts) // degree
        model.adopt_stack(name, parts[rank * local : (rank + 1) * local])
    return model


def expert_ranks(experts: Experts, model: ModelStates, files: Mapping[int, str]) -> list[str]:
    """The optimizer files of a rank's expert-parallel ranks under ZeRO 0: there must be one for each.

    Args:
        files: by expert-parallel rank among those of all lanes.
    """
    state = model.value.get("optimizer")
    inner = state.get("optimizer_state_dict", state) if isinstance(state, dict) else {}
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    recorded_sizes = map(recorded_degree, groups if isinstance(groups, list) else ())
    there = 1 + max(files, default=-1)
    sizes = {size for size in recorded_sizes if size is not None} or {there}
    if len(sizes) > 1:
        raise UnsupportedError(
            f"{model.key}: layers of experts are sharded across different numbers of ranks "
            f"({sorted(sizes)}), which is "
            "read with ZeRO 1 and 2 only"
        )
    recorded = sizes.pop()
    expected = range(experts.lane, max(recorded, experts.lane + 1), experts.lanes)
    if absent := [k for k in expected if k not in files]:
        folder, _, name = model.key.rpartition("/")
        rank = name.removeprefix("mp_rank_").partition("_")[0]
        names = [f"expp_rank_{k}_mp_rank_{rank}_optim_states.pt" for k in absent[:_MAX_LISTED]]
        raise MissingData(
            f"{', '.join(names)} is missing in {folder or 'the folder'}: {recorded} "
            "expert-parallel ranks saved it",
            hint=copy_hint(weights=True),
        )
    counts = {**experts.counts, **{n: layer.experts for n, layer in experts.stacked.items()}}
    uneven = next((p for p, n in counts.items() if n % recorded), None)
    ranks = experts.dp * experts.lanes
    other = any(layer.degree != recorded for layer in experts.stacked.values())
    if other or files.keys() - set(expected) or uneven is not None or ranks % recorded:
        raise IntegrityError(
            f"there are optimizer files of {there} expert-parallel ranks, but {model.key} was "
            f"saved by {recorded} of "
            f"{ranks} ranks" + (f", with {counts[uneven]} experts in {uneven}*" if uneven else ""),
            hint="an earlier save by more ranks left some; move those elsewhere",
        )
    return [files[k] for k in expected]


def _missing(
    recorded: Sequence[int], files: Collection[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """The experts without a file, by layer and expert."""
    there = [0] * len(recorded)
    for layer, expert in files:
        if layer < len(recorded) and expert < recorded[layer]:
            there[layer] += 1
    for layer, number in enumerate(recorded):
        if there[layer] < number:
            yield from ((layer, e) for e in range(number) if (layer, e) not in files)


def _tensors(file: TorchFile, expert: int) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of an expert's file, under their names in the whole checkpoint."""
    if not isinstance(file.value, dict):
        raise IntegrityError(
            f"{file.key} holds a {type(file.value).__name__} instead of an expert's tensors"
        )
    for name, tensor in file.value.items():
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None or int(match[2]) != expert:
            raise IntegrityError(
                f"{file.key} holds {name!r:.200}, which is not a tensor of expert {expert}"
            )
        if isinstance(tensor, StoredTensor):
            yield f"{match[1]}{match[2]}{match[3]}", tensor
