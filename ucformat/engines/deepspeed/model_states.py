"""The model states file: the module's tensors, tied names, and everything that is not a tensor.

Keys of the file (DeepSpeed 0.19.8): `module` (name -> tensor), `buffer_names`, `optimizer` (ZeRO 0
only), `param_shapes` (ZeRO: for each flat group the shapes of its parameters, in order),
`shared_params` (ZeRO: tied name -> stored name), `frozen_param_shapes` and `frozen_param_fragments`
(ZeRO 2 and 3), the engine's counters and configuration, and every key of the `client_state` that
was passed to `save_checkpoint`.

In a pipeline `module` is None: its tensors are in the layers' files. Megatron-DeepSpeed nests
dictionaries in `module`; their keys, joined by dots, are the parameters' names.

The JSON objects of a checkpoint:

- each key that DeepSpeed itself writes into the model states (`lr_scheduler`, `global_samples`, `ds_config`, …);
- `optimizer`: everything in the first rank's optimizer file except tensors (loss scaler, clipping, …);
- `client_state`: all other keys; a tensor above 64 KiB becomes a tensor of the checkpoint, named by its path
  (`client_state.ema.weight`), in the state `weight`;
- `module`: entries of the module that are not tensors (`get_extra_state`), if any;
- `rank`: if several ranks wrote a file: the differences of each other rank from the first. Ranks are labelled by their
  coordinates: under ZeRO 3 alone by number (`1`), else `tp1`, `pp1.tp0`, `tp0.dp1`;
- `not_stored`: parameters whose values are in no file, because no optimizer had them under ZeRO 3, if any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.engines.deepspeed.autoep import stacked_layers
from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.reading.stand_ins import Inert, StoredTensor
from ucformat.reading.values import to_json
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ucformat.engines.deepspeed.autoep import StackedLayer
    from ucformat.sources.index import TensorIndex
    from ucformat.sources.pickle.file import TorchFile


# Shared by the readers of the ZeRO stages: checked values from the ranks' files.


@dataclass(frozen=True, slots=True)
class Partition:
    """A rank's optimizer file: for each flat group its part of the master and of the states.

    Attributes:
        hypers: the hyper-parameters of each optimizer group, as in the file.
        owners: the optimizer group of each flat group.
    """

    file: TorchFile
    masters: list[StoredTensor]
    states: list[dict[str, Any]]
    hypers: list[Any]
    owners: list[int]

    def values(self) -> list[dict[str, Any]]:
        """All of a group's values by name, for each group."""
        return [{"master": m, **s} for m, s in zip(self.masters, self.states, strict=True)]


def load_all(
    load: Callable[[str], TorchFile], rows: Iterable[Sequence[str]]
) -> list[list[TorchFile]]:
    """Open the files of a grid of keys concurrently."""
    rows = list(rows)
    keys = [key for row in rows for key in row]
    opened = iter(map_io(load, keys))
    return [[next(opened) for _ in row] for row in rows]


def need(mapping: Any, key: str, kind: type | tuple[type, ...], file: str) -> Any:
    """A required entry of a dictionary."""
    value = mapping.get(key) if isinstance(mapping, dict) else None
    if not isinstance(value, kind):
        raise IntegrityError(
            f"{file} has no usable {key!r} ({type(value).__name__})",
            hint="the file is damaged, or of a version of DeepSpeed that ucformat does not know",
        )
    return value


def state_of(states: dict[Any, Any], index: Any, file: str) -> dict[str, Any]:
    """The optimizer states of one entry, by name; empty if the entry has none."""
    value = states.get(index, {}) if isinstance(index, int | str) else None
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise IntegrityError(
            f"{file} has no usable optimizer states of the entry {index!r:.80}",
            hint="the file is damaged, or of a version of DeepSpeed that ucformat does not know",
        )
    return value


def stored(value: Any, label: str, file: str) -> StoredTensor:
    """A value that must be a tensor."""
    if not isinstance(value, StoredTensor):
        raise IntegrityError(f"{label} in {file} is a {type(value).__name__} instead of a tensor")
    return value


def zero_options(value: dict[str, Any]) -> dict[str, Any]:
    """`zero_optimization` of the DeepSpeed configuration in a file; empty if there is none."""
    config = value.get("ds_config")
    options = config.get("zero_optimization") if isinstance(config, dict) else None
    return options if isinstance(options, dict) else {}


def stage_of(value: Any) -> int | None:
    """The ZeRO stage, from 0 to 3, that an optimizer's `zero_stage` names; None if unknown."""
    if isinstance(value, Inert) and value.args:
        value = value.args[0]
    names = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
    stage = names.get(value) if isinstance(value, str) else value
    return stage if isinstance(stage, int) else None


def hyper_parameters(group: Any, file: TorchFile) -> dict[str, Any]:
    """The hyper-parameters of an optimizer group, as JSON."""
    if not isinstance(group, dict):
        raise IntegrityError(f"an optimizer group in {file.key} is a {type(group).__name__}")
    hyper = {k: v for k, v in group.items() if k != "params"}
    plain: dict[str, Any] = to_json(hyper, read=file.read, path="param_groups")
    return plain


def scalars(file: TorchFile, state: dict[str, Any], dropped: frozenset[str]) -> dict[str, Any]:
    """All values of an optimizer file except its parameters' tensors and the dropped keys."""
    # the last two are in the model states too
    besides = ("optimizer_state_dict", "ds_config", "ds_version")
    around = {k: v for k, v in file.value.items() if k not in besides}
    return {**around, **{k: v for k, v in state.items() if k not in dropped}}


def read_scalars(partition: Partition) -> list[dict[str, bytes]]:
    """Read the 0-d tensors among an optimizer's states, as bytes by state, for each flat group."""

    def is_scalar(value: Any) -> bool:
        return isinstance(value, StoredTensor) and not value.shape and value.readable

    read = partition.file.read
    return [{n: read(v) for n, v in s.items() if is_scalar(v)} for s in partition.states]


def check_same_states(
    partition: Partition, first: Partition, scalars: Sequence[Mapping[str, bytes]]
) -> None:
    """Check that two ranks have the same states and `step`, as far as readable."""
    for index, (mine, theirs) in enumerate(zip(first.values(), partition.values(), strict=True)):
        if mine.keys() != theirs.keys() or not all(
            _alike_values(v, theirs[n]) for n, v in mine.items()
        ):
            raise IntegrityError(
                f"{partition.file.key} has other optimizer states of group {index} than "
                f"{first.file.key}: "
                f"{_described(theirs)} instead of {_described(mine)}"
            )
    for expected, recorded in zip(scalars, read_scalars(partition), strict=True):
        if any(expected[n] != recorded[n] for n in expected.keys() & recorded.keys()):
            raise IntegrityError(
                f"{partition.file.key}: an optimizer scalar (`step`) differs from that in "
                f"{first.file.key}",
                hint="files of different saves are mixed in one folder",
            )


def _alike_values(one: Any, other: Any) -> bool:
    """Whether two values may be alike: of one type, tensors of one dtype and number of dims."""
    if not isinstance(one, StoredTensor) or not isinstance(other, StoredTensor):
        return type(one) is type(other)
    same_dtype = one.dtype == other.dtype or not (one.readable and other.readable)
    return same_dtype and len(one.shape) == len(other.shape)


def _described(states: Mapping[str, Any]) -> str:
    kinds = {n: getattr(v, "dtype", type(v).__name__) for n, v in states.items()}
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())


def refuse_flat_state(state: str, tensor: StoredTensor, group: int, file: str) -> UnsupportedError:
    """The error for an optimizer state that is neither as long as the flat group nor a scalar."""
    return UnsupportedError(
        f"{file}: the optimizer state {state!r} of group {group} has shape {tensor.shape}, which "
        "does not match the "
        "group's parameters; such optimizers are not yet read"
    )


#: Keys that hold or describe tensors.
TENSOR_KEYS = frozenset(
    (
        "module", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments",
    )
)  # fmt: skip
#: Keys that DeepSpeed itself writes; all others are the client state.
ENGINE_KEYS = frozenset(
    ("lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps",
     "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
     "universal_checkpoint_info", "num_experts", "ds_autoep_layers", "buffer_names")
)  # fmt: skip


#: The state of a loss scaler; its settings belong to the configuration.
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def scaler_of(optimizer: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The fields of the loss scaler in the object `optimizer`, and whether it is dynamic.

    There are three forms: that of our own checkpoints of engines; DeepSpeed's pickled scaler of
    ZeRO 1 to 3; its fields of ZeRO 0.
    """
    scaler = optimizer.get("loss_scaler", optimizer)
    if "$class" in scaler:
        scaler = scaler.get("$state") or {}
    return scaler, bool(scaler.get("dynamic") or scaler.get("dynamic_loss_scale"))


_EXTRA = "_extra_state"  # values of modules other than tensors
_DEPTH = 20


class ModelStates:
    """One model states file, with checked entries."""

    def __init__(self, file: TorchFile) -> None:
        self.file, self.key = file, file.key
        self.value: dict[str, Any] = file.value if isinstance(file.value, dict) else {}
        self.in_layers = "module" in self.value and self.value["module"] is None
        module: dict[Any, Any] = {}
        if not self.in_layers:
            module = _flattened(need(self.value, "module", dict, self.key), self.key)
        self.module: dict[str, StoredTensor] = {}
        self.extra: dict[str, Any] = {}
        for name, value in module.items():
            (self.module if isinstance(value, StoredTensor) else self.extra)[name] = value
        self._homes: dict[str, TorchFile] = {}
        self.buffers = frozenset(self._names("buffer_names", (list, tuple, set)))
        self._names("shared_params", dict)
        self.stacked = stacked_layers(self.value, self.key)  # by number among layers of experts
        # of stacked tensors the weight of each expert that a file holds
        self.stacks: dict[str, list[tuple[StoredTensor, TorchFile]]] = {}
        shapes = self.value.get("param_shapes")
        if not isinstance(shapes, list | tuple | None):
            raise IntegrityError(f"{self.key} has no usable 'param_shapes'")
        self.param_shapes: list[dict[str, tuple[int, ...]]] | None = None
        if shapes is not None:
            self.param_shapes = [self._shapes(g, "param_shapes") for g in shapes]
        frozen = self.value.get("frozen_param_shapes") or {}
        self.frozen_shapes = self._shapes(frozen, "frozen_param_shapes")
        if any(not isinstance(name, str) for name in module):
            raise IntegrityError(f"{self.key} has a tensor whose name is not a string")

    def adopt(self, name: str, tensor: StoredTensor, home: TorchFile) -> None:
        """Add a tensor of the module that another file holds."""
        self.module[name], self._homes[name] = tensor, home

    def adopt_after(self, prefix: str, tensors: dict[str, tuple[StoredTensor, TorchFile]]) -> None:
        """Add tensors of other files after the module's last with a prefix, or else at the end."""
        places = (i + 1 for i, name in enumerate(self.module) if name.startswith(prefix))
        index = max(places, default=len(self.module))
        duplicate = next((name for name in tensors if name in self.module), None)
        if duplicate is not None:
            raise IntegrityError(f"{duplicate} is in {self.key} and in {tensors[duplicate][1].key}")
        self._homes.update((name, home) for name, (_, home) in tensors.items())
        items = list(self.module.items())
        self.module = dict(
            [*items[:index], *((n, t) for n, (t, _) in tensors.items()), *items[index:]]
        )

    def adopt_stack(self, name: str, experts: list[tuple[StoredTensor, TorchFile]]) -> None:
        """Add a stacked tensor of the module, of the files of its experts."""
        self.stacks[name] = experts
        if experts:
            self._homes[name] = experts[0][1]

    @property
    def stacked_names(self) -> dict[str, StackedLayer]:
        """The stacked tensors, and the layer of each."""
        return {n: layer for layer in self.stacked.values() for n in layer.names}

    def join_stacks(self) -> None:
        """Describe stacked tensors as all ranks together have them, not as one of them has."""
        stacked = self.stacked_names
        for group in self.param_shapes or ():
            for name, shape in group.items():
                if name in stacked and shape:
                    group[name] = (stacked[name].experts, *shape[1:])

    def home(self, name: str) -> TorchFile:
        """The file that holds a tensor of the module."""
        return self._homes.get(name, self.file)

    @property
    def described(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters in `param_shapes`."""
        return {name: shape for group in self.param_shapes or () for name, shape in group.items()}

    @property
    def dims(self) -> tuple[int | None, int | None, int | None]:
        """The pipeline and tensor-parallel degrees and their product; None if unrecorded."""
        recorded = self.value.get("checkpoint_parallel_dimensions")
        recorded = recorded if isinstance(recorded, dict) else {}
        degrees = (recorded.get("pp_degree"), recorded.get("tp_degree"))
        sizes = (*degrees, self.value.get("mp_world_size"))
        pp, tp, mp = (n if isinstance(n, int) and n > 0 else None for n in sizes)
        return pp, tp, mp

    @property
    def world(self) -> int | None:
        """The number of data-parallel ranks that saved, sequence-parallel ones included."""
        world = self.value.get("dp_world_size")
        return world if isinstance(world, int) else None

    def aliases(self, *, zero3: bool, shared: dict[str, str] | None = None) -> dict[str, str]:
        """The stored name of each tied name.

        ZeRO lists them in `shared_params`, but before stage 3 it compares addresses, and all empty
        tensors have address 0, so a pair counts only if both are one stored tensor. ZeRO 0 has no
        list: parameters stored in the same place are tied.

        Args:
            shared: the list in the first rank's file, if this file has none.
        """
        shared = self.value.get("shared_params") or shared
        if zero3:
            return dict(shared or {})
        if shared:
            confirmed = {a: b for a, b in shared.items() if self._is_same_tensor(a, b)}
            return {a: confirmed.get(b, b) for a, b in confirmed.items()}
        if self.value.get("param_shapes") is not None:
            return {}
        first: dict[tuple[str, StoredTensor], str] = {}
        names: dict[str, str] = {}
        for name, tensor in self.module.items():
            where = self.home(name).key, tensor
            tied = tensor.size and tensor.readable and name not in self.buffers
            if tied and first.setdefault(where, name) != name:
                names[name] = first[where]
        return names

    def _is_same_tensor(self, alias: str, name: str) -> bool:
        one, other = self.module.get(alias), self.module.get(name)
        if one is None or one != other or self.home(alias).key != self.home(name).key:
            return False
        return one.size > 0 and one.readable

    def _names(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """An optional value that contains only names."""
        value = self.value.get(key) or ()
        if not value:
            return value
        names: Any = value if isinstance(value, kind) else (None,)
        if not all(isinstance(name, str) for name in (*names, *getattr(names, "values", tuple)())):
            raise IntegrityError(f"{self.key} has no usable {key!r}")
        return value

    def _shapes(self, shapes: Any, key: str) -> dict[str, tuple[int, ...]]:
        if not isinstance(shapes, dict) or not all(isinstance(s, tuple) for s in shapes.values()):
            raise IntegrityError(f"{self.key} has no usable {key!r}")
        return dict(shapes)


def _flattened(module: dict[Any, Any], file: str, depth: int = 0) -> dict[Any, Any]:
    """Nested dictionaries of tensors as one, their keys joined by dots."""
    out: dict[Any, Any] = {}
    for key, value in module.items():
        is_module = isinstance(key, str) and not key.endswith(_EXTRA)
        if is_module and isinstance(value, dict) and _holds_tensors(value):
            if depth > _DEPTH:
                raise IntegrityError(f"{file} has modules nested more than {_DEPTH} deep")
            out.update((f"{key}.{k}", v) for k, v in _flattened(value, file, depth + 1).items())
        else:
            out[key] = value
    return out


def _holds_tensors(value: dict[Any, Any]) -> bool:
    """Whether it is a dictionary of tensors and such dictionaries, by names."""
    return bool(value) and all(
        isinstance(k, str) and (isinstance(v, StoredTensor | dict) or k.endswith(_EXTRA))
        for k, v in value.items()
    )


class Objects:
    """Collects them, and adds the large tensors among them to the contents."""

    def __init__(
        self,
        models: Mapping[str, ModelStates],
        optimizers: Mapping[str, Any],
        contents: TensorIndex,
        not_stored: list[str],
    ) -> None:
        self._models, self._optimizers = models, optimizers
        self._contents, self._not_stored = contents, not_stored
        # path -> tensor, CRC-32, name, as the first rank has it
        self._spilled: dict[str, tuple[StoredTensor, int, str]] = {}

    def json(self) -> dict[str, Any]:
        """All objects."""
        first: dict[str, Any] = {}
        by_rank = {}
        for rank in self._models:
            theirs = self._of_rank(rank)
            if self._optimizers.get(rank):
                theirs["optimizer"] = self._optimizers[rank]
            if not rank:
                first = theirs
                continue
            differing = {k: v for k, v in theirs.items() if v != first.get(k)}
            for key in ("client_state", "module", "optimizer"):
                if key in differing and key in first:
                    differing[key] = _difference(differing[key], first[key])
            if differing:
                by_rank[rank] = differing
        if by_rank:
            first["rank"] = by_rank
        if self._not_stored:
            first["not_stored"] = self._not_stored
        return first

    def _of_rank(self, rank: str) -> dict[str, Any]:
        """What one model states file holds besides its tensors."""
        model = self._models[rank]
        client = {k: v for k, v in model.value.items() if k not in ENGINE_KEYS | TENSOR_KEYS}
        parts: dict[str, Any] = {k: v for k, v in model.value.items() if k in ENGINE_KEYS}
        if client:
            parts["client_state"] = client
        if model.extra:
            parts["module"] = model.extra

        def spill(path: str, tensor: StoredTensor) -> str:
            return self._spill(rank, path, tensor)

        return {k: to_json(v, read=model.file.read, spill=spill, path=k) for k, v in parts.items()}

    def _spill(self, rank: str, path: str, tensor: StoredTensor) -> str:
        """Add a large tensor to the checkpoint's, once if all ranks have it; its name."""
        model = self._models[rank]
        crc32 = model.file.crc32(tensor)
        first = self._spilled.get(path)
        if rank and first and crc32 and first[1] == crc32 and _form(first[0]) == _form(tensor):
            return first[2]
        prefix = f"rank{rank}." if rank.isdigit() else f"{rank}." if rank else ""
        name = self._contents.add_large(prefix + path, model.file, tensor)
        if not rank:
            self._spilled[path] = (tensor, crc32, name)
        return name


def _form(tensor: StoredTensor) -> tuple[Any, ...]:
    """A tensor's description without the number of its storage."""
    return tensor.dtype, tensor.shape, tensor.strides, tensor.offset, tensor.numel


def _difference(value: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """The entries of a dictionary that differ; the whole dictionary if its keys are not plain."""
    if "$dict" in value or "$dict" in first:
        return value
    return {k: v for k, v in value.items() if k not in first or first[k] != v}
