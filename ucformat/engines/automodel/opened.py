"""A folder of NeMo AutoModel: each of its parts is read by the source of its format.

`model` has the shards of DCP's safetensors writer, a DCP checkpoint, or files of Hugging Face (an
adapter of PEFT, or what `consolidated` has); `optim` is a DCP checkpoint of optimizer and
scheduler.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from ucformat.engines.automodel.folder import INCOMPLETE, LOSSES, MODEL, OPTIM, SCHEDULER
from ucformat.errors import IntegrityError, MissingData, UnsupportedError, first_names, option_text
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import CheckpointMetadata
from ucformat.sources.base import with_options
from ucformat.sources.distcp.opened import plain_value
from ucformat.sources.index import Group, IndexedSource, PrefixedSource, TensorIndex
from ucformat.sources.model_files import read_json, root_files
from ucformat.sources.pickle.file import open_file
from ucformat.sources.registry import SOURCES
from ucformat.storage.wrappers import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucformat.engines.automodel.folder import AutomodelOptions
    from ucformat.reading.readable import FileRecord
    from ucformat.sources.base import OpenSource
    from ucformat.storage.base import Store

_CONSOLIDATED = f"{MODEL}/consolidated"
_STEP = re.compile(r"(?:.*/)?epoch_\d{1,9}_step_(\d{1,12})/?")
_ADAPTER = "base_model.model."  # in front of names in adapters of PEFT
_MAGNITUDE = re.compile(r"(.*\.lora_magnitude)")  # of DoRA, `…_vector` in adapters


class OpenAutomodel(IndexedSource):
    """One opened checkpoint of a recipe."""

    kind = "automodel"
    part = ""

    def __init__(self, store: Store, options: AutomodelOptions) -> None:
        self.store, self.contents = store, TensorIndex()
        names = root_files(store)
        if INCOMPLETE in names:
            raise MissingData(
                f"{store.url} has {INCOMPLETE}: it was not saved to its end",
                hint="open an earlier checkpoint of the run, such as the one that LATEST names",
            )
        dcp = {"allow": options.allow} if options.allow else {}
        model = _open_model(store, names, dcp)
        self._sources = [model]
        optimizer = None
        if options.optimizer and any(name.startswith(f"{OPTIM}/") for name in names):
            given = {"groups": options.groups, "owners": options.owners}
            optimizer = _below(store, OPTIM, dcp | {k: v for k, v in given.items() if v})
            self._sources.append(optimizer)
        for info in model.metadata.tensor_list.tensors:
            self.contents.put(info, partial(model.extents, info.key))
        self.contents.unreadable |= model.metadata.unreadable
        groups = [] if optimizer is None else self._add_optimizer(optimizer)
        self.contents.groups += groups
        self._check_shards(model, optimizer)
        values = {} if optimizer is None else dict(optimizer.metadata.objects)
        values |= model.metadata.objects
        if LOSSES in names:
            values["losses"] = read_json(store, LOSSES)
        scheduler = None
        if SCHEDULER in names:
            scheduler = plain_value(open_file(store, SCHEDULER, allow=options.allow), SCHEDULER)
            values["step_scheduler"] = scheduler
        listed = (SCHEDULER, LOSSES)
        self.metadata = CheckpointMetadata(
            tensor_list=self.contents.tensor_list(),
            unreadable=self.contents.unreadable,
            aliases=model.metadata.aliases,
            objects=values,
            groups=tuple(group.json() for group in groups),
            step=_step(store.url, scheduler),
            layout=model.metadata.layout,
            engine={"name": "nemo-automodel"},
            files=(
                *(file for source in self._sources for file in source.metadata.files),
                *(name for name in listed if name in names),
            ),
            assets=model.metadata.assets,
        )

    def records(self) -> Iterator[FileRecord]:
        """Every record of the parts."""
        for source in self._sources:
            yield from source.records()

    def _add_optimizer(self, source: OpenSource) -> list[Group]:
        """Add the optimizer's states, under the names of the weights; returns its groups."""
        weights = {key.name for key in (*self.contents.infos, *self.contents.unreadable)}
        states = source.metadata.tensor_list.tensors
        named = {info.name: _weight_of(info.name, weights) for info in states}
        if unknown := [name for name, weight in named.items() if weight is None]:
            raise UnsupportedError(
                f"{source.store.url}/{OPTIM} has states of parameters that {MODEL} does not have: "
                f"{first_names(unknown, 5)}",
                hint="AutoModel's own models store weights under the names of Hugging Face, and states under "
                f"theirs: open the weights alone, {option_text('optimizer', 'False', 'false')}",
            )
        for info in states:
            key = Key(named[info.name] or info.name, info.state)
            self.contents.add(*key, info.dtype, info.shape, partial(source.extents, info.key))
        for key, why in source.metadata.unreadable.items():
            self.contents.refuse(Key(_weight_of(key.name, weights) or key.name, key.state), why)
        return [
            Group(
                [_weight_of(name, weights) or name for name in group["params"]],
                {k: v for k, v in group.items() if k != "params"},
            )
            for group in source.metadata.groups
        ]

    def _check_shards(self, model: OpenSource, optimizer: OpenSource | None) -> None:
        """Set what the shards are a part of, unless the optimizer's states prove the shape of each weight."""
        infos = self.contents.infos
        unproved = {key.name for key, info in infos.items() if key.state == "weight" and info.shape}
        for key, info in infos.items():
            if not key.state.startswith("exp_avg") and key.state != "momentum_buffer":
                continue
            weight = infos.get(Key(key.name, "weight"))
            if weight is not None and len(weight.shape) == len(info.shape):
                if weight.shape != info.shape:
                    raise IntegrityError(
                        f"{key.name} has the shape {list(weight.shape)} in {MODEL}, and its "
                        f"{key.state} {list(info.shape)}",
                        hint="shards of the last ranks are missing, or of another save: copy all files of the folder",
                    )
                unproved.discard(key.name)
        if unproved or optimizer is None:
            self.part = getattr(model, "part", "") or ""


def _open_model(store: Store, names: Mapping[str, Any], dcp: Mapping[str, Any]) -> OpenSource:
    """The weights: shards or items of DCP, or files of Hugging Face."""
    for folder in (MODEL, _CONSOLIDATED):
        below = PrefixStore(store, folder)
        for kind in ("dcp", "safetensors"):
            if SOURCES[kind]().find(below):
                return _below(store, folder, dcp if kind == "dcp" else {}, kind)
    raise MissingData(
        f"{store.url}/{MODEL} has no weights",
        hint=f"the save did not finish, or they were not copied ({len(names)} files are there)",
    )


def _below(store: Store, folder: str, options: Mapping[str, Any], kind: str = "dcp") -> OpenSource:
    """The checkpoint in a folder, by the source of its kind; `part` is what that says of it."""
    source = with_options(SOURCES[kind](), dict(options)).open(PrefixStore(store, folder))
    prefixed = PrefixedSource(source, store, folder)
    prefixed.part = getattr(source, "part", None)  # type: ignore[attr-defined]
    return prefixed


def _weight_of(name: str, weights: set[str]) -> str | None:
    """The name of the weight that an optimizer's parameter is; None if there is none."""
    adapted = _ADAPTER + _MAGNITUDE.sub(r"\1_vector", name)
    return next((n for n in (name, adapted) if n in weights), None)


def _step(url: str, scheduler: Any) -> int | None:
    """The training step, by the scheduler's own count or by the name of the folder."""
    step = scheduler.get("step") if isinstance(scheduler, dict) else None
    match = _STEP.fullmatch(url)
    return step if type(step) is int else None if match is None else int(match[1])
