"""`load` and `certify`: fill what the ranks of Megatron-Core hold, or compare it, with a checkpoint of any engine."""

from __future__ import annotations

import re
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from operator import setitem
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch

from ucformat.engines.megatron.live_entries import loaded_tensor, rebuilt
from ucformat.engines.megatron.live_optimizer import IDENTIFIERS
from ucformat.engines.megatron.live_save import LiveModel, aliases_of
from ucformat.engines.megatron.names import with_norms_of_both
from ucformat.errors import (
    PermissionDenied,
    UnsupportedError,
    check_keywords,
    refuse_arguments,
)
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.loading.arguments import LoadOptions, RestoreArguments
from ucformat.torch.loading.certify import CertifyArguments, LiveState, certify_local
from ucformat.torch.loading.load import LoadReport, LoadTargets, load_local
from ucformat.torch.loading.match import (
    PARAMETER,
    Matched,
    Problems,
    holds_training,
    match,
    stored_names,
)
from ucformat.torch.loading.read import read
from ucformat.torch.loading.share import open_together, read_shared
from ucformat.torch.loading.values import FittedValues, plain_states
from ucformat.torch.state.collect import ValueSlot
from ucformat.torch.state.local import LocalShard, local_of
from ucformat.torch.state.memory import torch_dtype
from ucformat.torch.state.objects import decode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from os import PathLike

    import torch.distributed as dist

    from ucformat.checkpoint import Checkpoint
    from ucformat.engines.megatron.live_optimizer import LivePart
    from ucformat.engines.megatron.live_shards import LocalBoxes
    from ucformat.reading.execute import ReadOptions
    from ucformat.torch.certificate import Certificate
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.match import Strict
    from ucformat.torch.loading.read import ReadAmount

__all__ = ["MegatronReport", "certify", "load"]


@dataclass(frozen=True, slots=True)
class MegatronReport(LoadReport):
    """The result of a load with Megatron-Core; see `LoadReport`.

    `state` is the state dict that `dist_checkpointing.load` would return: the values that the
    checkpoint has as the same on all ranks (`args`, `iteration`, …), and what the sharded state
    dict asked for, in its structure. Its tensors are those of the model, which are filled.
    """

    state: dict[str, Any] = field(default_factory=dict)


def load(
    sharded_state_dict: Mapping[str, Any],
    ref: str | PathLike[str] | Checkpoint,
    *,
    strict: Strict = "report",
    vocab_size: int | None = None,
    **arguments: Unpack[RestoreArguments],
) -> MegatronReport:
    """Load a checkpoint into a training with Megatron-Core; all ranks call this together.

    Each rank reads what it holds straight into its memory: into parameters, and into the partitions
    of the distributed optimizer, whose step and hyper-parameters are set, too. All mismatches are
    found before anything is changed, and raised in one error on all ranks.

    Args:
        sharded_state_dict: as for `save`: with the optimizer itself, or without it for weights
            alone.
        ref: a checkpoint of any kind that `ucformat.open` opens, a reference to one, or an open
            checkpoint; Megatron's own and those of `save` under any layout need no view.
        strict: as for `ucformat.torch.load`.
        vocab_size: the rows of the vocabulary without padding (default: as the checkpoint has them).
        arguments: those of `RestoreArguments`, by keyword, as for `ucformat.torch.load`, but
            `names`.

    Raises:
        StateMismatch: the checkpoint does not fit; the message lists all mismatches.
        UnsupportedError: an optimizer's state cannot be loaded yet.
        ChecksumError: a chunk does not match its checksum.
        UcformatError: a rank failed or died. Every rank gets the same error.
    """
    check_keywords("load", arguments, RestoreArguments)
    refuse_arguments("ucformat.torch.megatron.load", arguments, _REFUSED)
    with group_for_call("load", ref, timeout=arguments.get("timeout", TIMEOUT)) as group:
        with group.sharing_errors():
            options = LoadOptions.of(strict, arguments)
        plan = _Plan(options)
        try:
            ck = open_together(ref, group)
            with group.sharing_errors():
                plan.make(sharded_state_dict, ck, vocab_size)
            report = load_local(plan.targets(), ck, group, plan.options, plan.names)
            for chunk in plan.live.entries.chunks:
                chunk.install()
        except BaseException:
            plan.undo()
            raise
        with group.sharing_errors():
            state = plan.state(sharded_state_dict)
        loaded = {f.name: getattr(report, f.name) for f in fields(report)}
        if options.certify:
            certificate = _certified(sharded_state_dict, ck, group, options, vocab_size)
            loaded["certificate"] = certificate.checked()
    return MegatronReport(**loaded, state=state)


def certify(
    sharded_state_dict: Mapping[str, Any],
    ref: str | PathLike[str] | Checkpoint,
    *,
    vocab_size: int | None = None,
    **arguments: Unpack[CertifyArguments],
) -> Certificate:
    """Compare what the ranks of a training with Megatron-Core hold now with what a checkpoint has.

    All ranks call this together. Padding of a vocabulary is compared where it has as many rows.

    Args:
        sharded_state_dict: as for `load`; without the optimizer, only weights are compared.
        ref: as for `load`.
        vocab_size: as for `load`.
        arguments: as for `ucformat.torch.certify`, but `group` and `names`.

    Returns:
        the certificate, the same on all ranks; true if everything is equal.
    """
    check_keywords("certify", arguments, CertifyArguments)
    refuse_arguments("ucformat.torch.megatron.certify", arguments, _REFUSED)
    with group_for_call("certify", ref, timeout=arguments.get("timeout", TIMEOUT)) as group:
        ck = open_together(ref, group)
        options = LoadOptions.of("report", cast("Any", arguments))
        return _certified(sharded_state_dict, ck, group, options, vocab_size)


def _certified(
    state: Mapping[str, Any],
    ck: Checkpoint,
    group: Group,
    options: LoadOptions,
    vocab_size: int | None,
) -> Certificate:
    """Compare what the ranks of a group hold; see `certify`."""
    begun = time.monotonic()
    with group.sharing_errors():
        plan = _Plan(options)
        live = plan.live_state(state, ck, vocab_size)
    return certify_local(live, ck, group, plan.options, plan.names, begun)


_REFUSED = {
    "names": "the keys of the sharded state dict are the names in the whole model",
}


class _Plan:
    """What this rank reads, and how it is applied; before, only missing states of optimizers are made."""

    live: LiveModel
    ck: Checkpoint
    names: dict[str, str]

    def __init__(self, options: LoadOptions) -> None:
        self.options = options
        self.problems = Problems()
        self.values = FittedValues()
        self._tensors: list[LocalShard] = []
        self._padding: list[Matched] = []
        self._weights: list[LocalBoxes] = []
        self._common: dict[str, Any] = {}
        self._steps: list[tuple[LivePart, float]] = []
        self._forgotten: list[LivePart] = []
        self._objects: dict[tuple[Any, ...], Any] = {}
        self._parts: list[LivePart] = []

    def make(self, state: Mapping[str, Any], ck: Checkpoint, vocab_size: int | None) -> None:
        """Match the state with the checkpoint."""
        self._open(ck)
        self.live = live = LiveModel(state, vocab_size, rows=self._stored_rows)
        self._parts = live.parts
        for part in live.parts:
            if not part.empty:
                part.make_states()
                self._want_optimizer(part)
        for local in (*live.weights(steps=False), *live.states(shared=False)):
            if not (self._forgotten and is_of_step(local.info.key)):
                self._want(local)
        self._tell_padding()
        self._want_objects()
        self._read_common()
        self.problems |= self.values.problems()

    def _open(self, ck: Checkpoint) -> None:
        """Take the names from the checkpoint; keys alone do not tell those of norms."""
        self.ck = ck
        self.names = with_norms_of_both(stored_names(ck, self.options.rename))

    def live_state(
        self, state: Mapping[str, Any], ck: Checkpoint, vocab_size: int | None
    ) -> LiveState:
        """What this rank holds now, to be compared; nothing is made."""
        self._open(ck)
        self.live = live = LiveModel(state, vocab_size, rows=self._stored_rows)
        tensors: list[LocalShard] = []
        optimized: set[str] = set()
        for part in live.parts if holds_training(ck) else ():
            if not part.empty:
                names = part.names()
                optimized.update(self.names.get(name, name) for name in names)
                tensors += self._compare_step(part, names)
                self._want_groups(part)
                self._want_scale(part)
        for local in (*live.weights(steps=False), *live.states()):
            stored = self._stored_padding(local.info.key)
            if not local.info.state.endswith(".padding") or (
                # that of an fp32 copy may have been read from the weight's
                stored is not None
                and (stored.state, stored.shape) == (local.info.state, local.info.shape)
            ):
                tensors.append(local.shard())
        self._leave_padding({t.info.key for t in tensors})
        trained = bool(live.parts) and holds_training(ck)
        return LiveState(
            tensors,
            aliases_of(live),
            self.values.problems(),
            [self.values],
            frozenset(optimized),
            live.layout.degrees,
            optimizer=trained,
        )

    def _compare_step(self, part: LivePart, names: Sequence[str]) -> Iterator[LocalShard]:
        """The step as the checkpoint has it: a tensor of each parameter, or a value."""
        step = part.step()
        for name in names:
            info = self.ck.tensors.get(Key(self.names.get(name, name), "step"))
            if info is not None and not info.shape and step is not None:
                yield local_of(name, "step", torch.tensor(step, dtype=torch_dtype(info.dtype)))
        if step is None:
            if names and part.counts_steps and any(map(is_of_step, self.ck.tensors)):
                self.values.compare("the step", None, self._step(names))
        elif not any(key.state == "step" for key in self.ck.tensors):
            self.values.compare("the step", float(step), self._step(names))

    def _leave_padding(self, but: Collection[Key] = ()) -> None:
        """Leave the padding of vocabularies, which is read or compared by its rows, but for some."""
        padding = (key for key in self.ck.tensors if key.state.endswith(".padding"))
        handled = tuple(f"{key.name}.{key.state}" for key in padding if key not in but)
        self.options = replace(self.options, leave=(*self.options.leave, *handled))

    def targets(self) -> LoadTargets:
        """What this rank asks of the checkpoint."""
        optimizer = bool(self.live.parts)
        self._leave_padding()
        return LoadTargets(
            self._tensors,
            aliases_of(self.live),
            self.problems,
            self._put,
            self.live.layout.degrees,
            stateful=optimizer and holds_training(self.ck),
            optimizer=optimizer,
            fill=self._fill,
        )

    def _fill(
        self,
        ck: Checkpoint,
        matched: Sequence[Matched],
        ranks: Group,
        replicas: dist.ProcessGroup | None,
        options: ReadOptions,
    ) -> ReadAmount:
        """Fill the targets, and the padding of a vocabulary, which need not be complete."""
        return read_shared(ck, [*matched, *self._padding], ranks, replicas, options)

    def _stored(self, key: Key) -> TensorInfo | None:
        """What the checkpoint has under a name and state of the model; of a parameter either of its states."""
        name = self.names.get(key.name, key.name)
        states = PARAMETER if key.state in PARAMETER else (key.state,)
        return next(
            (i for s in states if (i := self.ck.tensors.get(Key(name, s))) is not None), None
        )

    def _stored_rows(self, name: str, rows: int) -> int:
        """The rows of a vocabulary that the checkpoint has without padding, if they are fewer than those here."""
        info = self._stored(Key(name, "weight"))
        return rows if info is None or not info.shape else min(rows, info.shape[0])

    def _want(self, local: LocalBoxes) -> None:
        """Ask for a tensor; of the padding of a vocabulary as many rows as there are."""
        self._weights.append(local)
        if not local.info.state.endswith(".padding"):
            self._tensors += local.targets()
            return
        stored = self._stored_padding(local.info.key)
        rows = 0 if stored is None else stored.shape[0]
        if stored is None:
            return
        if rows < local.info.shape[0]:
            local = local.first_rows(rows)
        info = replace(local.info, shape=stored.shape)
        for target in local.targets():
            self._padding.append(Matched(replace_info(target, info), stored))

    def _tell_padding(self) -> None:
        """Say where a vocabulary is padded by another number of rows."""
        own = {
            h.info.name: h.info.shape[0] for h in self._weights if h.info.state == "weight.padding"
        }
        for name in dict.fromkeys(h.info.name for h in self._weights if h.info.state == "weight"):
            stored = self._stored_padding(Key(name, "weight.padding"))
            rows = 0 if stored is None else stored.shape[0]
            if rows != own.get(name, 0):
                self.values.inexact.append(
                    f"{name} is padded by {own.get(name, 0)} rows, in the checkpoint by {rows}; rows "
                    "that only one has stay as they are, or are not loaded"
                )

    def _stored_padding(self, key: Key) -> TensorInfo | None:
        """What the checkpoint has of the rows that pad a vocabulary; of fp32 copies perhaps as weights."""
        name, state = self.names.get(key.name, key.name), key.state
        stored = self.ck.tensors.get(Key(name, state))
        if stored is None and state == "master.padding":
            stored = self.ck.tensors.get(Key(name, "weight.padding"))
        return stored

    def _want_optimizer(self, part: LivePart) -> None:
        """Make an optimizer's states, and match its step and hyper-parameters."""
        if not holds_training(self.ck):
            lacking = (
                "all optimizer states: the checkpoint contains only weights (leave the optimizer "
                "out of the state to load these)"
            )
            self.problems |= Problems(missing=(lacking,))
            return
        names = part.names()
        if not any(map(is_of_step, self.ck.tensors)):
            self._forgotten.append(part)  # saved before the first step
        elif part.counts_steps and (step := self._step(names)) is not None:
            self._steps.append((part, step))
        self._want_groups(part)
        self._want_scale(part)

    def _want_scale(self, part: LivePart) -> None:
        """Match a dynamic loss scale, of which all optimizers have the same."""
        scaler = getattr(part.optimizer, "grad_scaler", None)
        if scaler is None or not scaler.state_dict():
            return
        name, stored = "grad_scaler", self.ck.objects.get("optimizer")
        chained = stored.values() if isinstance(stored, Mapping) else ()
        # in a sharded object of its own, if the optimizer's format was `dp_reshardable`
        sharded = (v.get("0") for k, v in self.ck.objects.items() if k.endswith(f".{name}"))
        places = (stored, *chained)
        scales = [p[name] for p in places if isinstance(p, Mapping) and p.get(name)]
        saved = next(iter(scales), None) or next(sharded, None)
        if saved is None:
            self.values.missing.append("the loss scale of the optimizer")
            return
        slot = ValueSlot(scaler.state_dict(), scaler.load_state_dict)
        self.values.fit("the loss scale of the optimizer", slot, decode(saved, slot.value))

    def _step(self, names: Sequence[str]) -> float | None:
        """The step of these parameters, which must be one for all of them."""
        recorded: dict[float, str] = {}
        scalars = []
        for name in names:
            stored = self.names.get(name, name)
            info = self.ck.tensors.get(Key(stored, "step"))
            if info is not None and not info.shape:
                scalar = torch.zeros((), dtype=torch_dtype(info.dtype))
                scalars.append(local_of(name, "step", scalar))
                continue
            value = self._plain_states.get(stored, {}).get("step")
            if value is not None:
                recorded.setdefault(float(decode(value)), name)
        matched, problems, _ = match(scalars, {}, self.ck, self.names, cast=True)
        read(self.ck, matched)
        self.problems |= problems
        # so that they are not unexpected
        self._tensors += [LocalShard(s.info, (), s.tensor) for s in scalars]
        for scalar in scalars:
            recorded.setdefault(float(scalar.tensor), scalar.info.name)
        if len(recorded) > 1:
            (a, one), (b, other), *_ = recorded.items()
            self.values.others.append(
                f"step is {a:g} for {one} and {b:g} for {other}, but Megatron-Core keeps one value "
                "for both"
            )
        if not recorded and names:
            self.values.missing.append(f"the step of {names[0]}")
        return next(iter(recorded), None)

    @cached_property
    def _plain_states(self) -> Mapping[str, Mapping[str, Any]]:
        return plain_states(self.ck)

    @cached_property
    def _hypers(self) -> dict[str, Mapping[str, Any]]:
        """The hyper-parameters of the group of each parameter that is stored."""
        return {name: g.options for g in self.ck.manifest.groups for name in g.params}

    def _want_groups(self, part: LivePart) -> None:
        """Match optimizer groups by the names of their parameters, and groups without any by Megatron's identifiers."""
        groups = part.optimizer.optimizer.param_groups
        for number, (group, names) in enumerate(zip(groups, part.numbered_names(), strict=True)):
            label = f"optimizer group {number}"
            options = [
                o for n in names if (o := self._hypers.get(self.names.get(n, n))) is not None
            ]
            options = options or self._options_like(group)
            hypers = [
                {k: v for k, v in o.items() if k in group and k not in _NOT_HYPER} for o in options
            ]
            for key, value in self.values.common_options(label, names, hypers).items():
                current = group[key]
                slot = ValueSlot(current, partial(setitem, group, key))
                self.values.fit(
                    f"the hyper-parameter {key} of {label}", slot, decode(value, current)
                )

    def _options_like(self, group: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The hyper-parameters of the groups with a group's identifiers, rather of optimizers of its kind."""
        alike: list[Mapping[str, Any]] = [
            g.options
            for g in self.ck.manifest.groups
            if all(g.options.get(i) == group.get(i) for i in IDENTIFIERS)
        ]
        hyper = group.keys() - _NOT_HYPER
        return [options for options in alike if hyper <= options.keys()] or alike

    def _want_objects(self) -> None:
        """Match sharded objects, by their keys and shards."""
        for path, item in self.live.entries.objects.items():
            key, _, shard = item.unique_key.rpartition("/shard_")
            sharded = self.ck.objects.get(key)
            stored = self.ck.objects.get(item.unique_key, _ABSENT)
            if stored is _ABSENT and isinstance(sharded, Mapping):
                stored = sharded.get(shard.split("_")[0], _ABSENT)
            label = f"the object {item.unique_key}"
            if stored is _ABSENT:
                empty = item.data is None and key.endswith("_extra_state")
                if not empty:
                    self.values.missing.append(label)
                self._objects[path] = item.data
                continue
            with self.values.decoding(label) as lost:
                self._objects[path] = decode(stored, item.data, trust=self.options.trust, lost=lost)

    def _read_common(self) -> None:
        """Read the values that are the same on all ranks, as Megatron's checkpoints have them."""
        engine = self.ck.manifest.producer.get("engine.name", self.ck.kind)
        asked = {item.key for item in self.live.entries.objects.values()}
        for name, value in self.ck.objects.items() if engine in _ENGINES else ():
            if name in asked or _SHARD.search(name) or "." in name:
                continue
            if name == "args" and isinstance(value, Mapping):
                pairs = ((k, self._decoded(f"args.{k}", v)) for k, v in value.items())
                self._common[name] = Namespace(**{k: v for k, v in pairs if v is not _ABSENT})
            elif (decoded := self._decoded(name, value)) is not _ABSENT:
                self._common[name] = decoded
        if self.ck.metadata.step is not None:
            self._common.setdefault("iteration", self.ck.metadata.step)

    def _decoded(self, name: str, value: Any) -> Any:
        """A value; one that only `trust=True` loads is left out, and told."""
        try:
            return decode(value, trust=self.options.trust)
        except (PermissionDenied, UnsupportedError) as error:
            self.values.inexact.append(f"the object {name} is not in `state`: {error.message}")
            return _ABSENT

    def _put(self) -> None:
        """Apply what was read."""
        self.values.put()
        for part in self._forgotten:
            part.forget()
        for part, step in self._steps:
            part.put_step(step)

    def undo(self) -> None:
        """Delete the states that were made."""
        for part in self._parts:
            part.undo()

    def state(self, sharded_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict that was loaded, as Megatron returns it."""
        from megatron.core.dist_checkpointing.dict_utils import merge

        entries = self.live.entries

        def put(path: tuple[Any, ...], _: Any) -> Any:
            if path in entries.objects:
                return self._objects.get(path)
            return loaded_tensor(entries, path)

        common = self._common
        own = {k: v for k, v in rebuilt(sharded_state_dict, put).items() if v != {}}
        for key in own.keys() & common.keys():
            if not isinstance(own[key], dict) or not isinstance(common[key], dict):
                common.pop(key)
        merged: dict[str, Any] = merge(common, own)
        return merged


_ABSENT = object()
_ENGINES = ("megatron-core", "megatron")  # ours, and the kind of Megatron's own
_SHARD = re.compile(r"/shard_[\d.]*_[\d.]*$")
#: Options that select an implementation, or are no hyper-parameters.
_NOT_HYPER = frozenset(
    (
        "params",
        "state",
        "step",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "default_config",
        *IDENTIFIERS,
    )
)


def is_of_step(key: Key) -> bool:
    """Whether only a step makes such a state."""
    return key.state.removesuffix(".padding") not in PARAMETER


def replace_info(target: LocalShard, info: TensorInfo) -> LocalShard:
    """The same pieces of a tensor that is larger."""
    return LocalShard(info, target.pieces, target.tensor)
