"""The tensors and optimizer groups of a whole checkpoint, out of those of its model-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Key, TensorInfo, TensorList
from ucformat.geometry.tp_sharding import Shapes, TPSharding, replicate
from ucformat.geometry.view import View
from ucformat.sources.index import Group, TensorIndex
from ucformat.sources.tp_merge import Replica, Verdict, compare, must_agree

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ucformat.engines.deepspeed.resolver import ShardingResolver
    from ucformat.engines.deepspeed.zero import Slice
    from ucformat.geometry.tensor import Extent
    from ucformat.geometry.view import Part
    from ucformat.sources.index import Locate
    from ucformat.storage.base import Store

_MIXED = "files of different saves are mixed in one folder"


class Merged:
    """All tensors of a checkpoint, merged from its slices, by pipeline stage and tensor-parallel rank."""

    def __init__(
        self, store: Store, stages: Sequence[Sequence[Slice]], resolver: ShardingResolver
    ) -> None:
        self.contents = TensorIndex()
        self.means: dict[Key, tuple[Key, ...]] = {}
        self._store, self._resolver = store, resolver
        self._homes: dict[str, Sequence[Slice]] = {}  # the first stage that holds a parameter
        for slices in stages:
            for one in slices:
                self.contents.unreadable |= one.contents.unreadable
        shapes = [_shapes(stage, self.contents.unreadable) for stage in stages]
        described = (name for slices in stages for name in slices[0].model.described)
        resolver.recognise({name: parts for of in shapes for name, parts in of.items()}, described)
        for stage, of in zip(stages, shapes, strict=True):
            for name in [n for n in of if self.contents.refused_with(Key(n, "weight"))]:
                del of[name]
            self._homes.update((name, stage) for name in of if name not in self._homes)
        for stage, of in zip(stages, shapes, strict=True):
            self._add_stage(stage, of)

    def _add_stage(self, slices: Sequence[Slice], shapes: dict[str, Shapes]) -> None:
        first = slices[0].contents
        buffers = frozenset().union(*(s.model.buffers for s in slices))
        shardings = self._resolver.decide(shapes, buffers, self._verdict)
        for key in first.infos:
            if (reason := self.contents.refused_with(key)) is not None:
                self.contents.unreadable[key] = reason
            elif key not in first.large:
                self._add(key, slices, shapes[key.name], shardings[key.name])
        for of in slices:
            for key in of.contents.large:
                info = of.contents.infos[key]
                self.contents.put(info, of.contents.locate[key])

    def _add(
        self,
        key: Key,
        slices: Sequence[Slice],
        shapes: tuple[tuple[int, ...], ...],
        sharding: TPSharding,
    ) -> None:
        """A tensor in one state, read as its parameter is; states without its shape must be whole on every rank."""
        if len(slices) == 1 and not (sharding.padding_rows or sharding.scaled):
            local = slices[0].contents
            self._put(local.infos[key], local.locate[key])
            return
        infos = [s.contents.infos[key] for s in slices]
        found = tuple(info.shape for info in infos)
        if len({info.dtype for info in infos}) > 1:
            raise IntegrityError(
                f"{key} has the dtypes {', '.join(sorted({i.dtype for i in infos}))}", hint=_MIXED
            )
        if found != shapes:
            whole = len(sharding.regions[0]) == 1 and all(
                regions == sharding.regions[0] for regions in sharding.regions
            )
            if not whole and any(found):
                raise UnsupportedError(
                    f"{key} of the parts {[list(s) for s in found]} belongs to a parameter of the parts "
                    f"{[list(s) for s in shapes]}: states of factored optimizers are means over a rank's part, and "
                    "are not read under tensor parallelism",
                    hint="read the weights and masters alone",
                )
            sharding = replicate(found)
        info = TensorInfo(key.name, key.state, infos[0].dtype, sharding.shape)
        if sharding.mean and found == shapes:
            parts = tuple(key.partial(t) for t in range(len(slices)))
            self._put(info, lambda _: _refuse_mean(key, parts))
            for part, of in zip(parts, slices, strict=True):
                self.contents.locate.setdefault(part, of.contents.locate[key])
            self.means[key] = parts
            return
        if sharding.scaled:
            self._put(info, lambda _: _refuse_scaled(key))
            return
        tensor = _MergedTensor(self._store, info, slices, sharding.regions)
        self._put(info, tensor.extents)
        if sharding.padding_rows:
            spare = TensorInfo(*key.padding, info.dtype, sharding.padding_shape)
            self._put(
                spare, _MergedTensor(self._store, spare, slices, sharding.padding, key).extents
            )

    def _put(self, info: TensorInfo, locate: Locate) -> None:
        """Add a stage's tensor; copies in several stages must be equal."""
        key = info.key
        known = self.contents.infos.get(key)
        if known is None:
            self.contents.put(info, locate)
            return
        if known != info:
            raise IntegrityError(
                f"{key} is {known.dtype} {list(known.shape)} in one pipeline stage and {info.dtype} {list(info.shape)} "
                "in another",
                hint=_MIXED,
            )
        first = self.contents.locate[key]
        if not isinstance(first, _Copies):
            first = _Copies(
                self._store, info, first, may_differ=self._resolver.may_differ(key.name)
            )
            self.contents.locate[key] = first
        first.add(locate)

    def _verdict(self, name: str) -> Verdict:
        """Whether the parts of a parameter are equal: by its weight, or its other states if the weight is constant."""
        slices = self._homes[name]
        states = [key for key in slices[0].contents.infos if key.name == name]
        states.sort(
            key=lambda key: (
                ("weight", "master").index(key.state) if key.state in ("weight", "master") else 2
            )
        )
        found: Verdict = "constant"
        shape = _shape(slices[0], name)
        for key in states:
            if slices[0].contents.infos[key].shape != shape:
                continue
            found = compare(
                self._store, [s.contents.replica(key, Box.whole(shape)) for s in slices]
            )
            if found != "constant":
                break
        return found


class _Copies:
    """A tensor of several stages; the first stage's is read, after a check that all are equal."""

    def __init__(self, store: Store, info: TensorInfo, first: Locate, *, may_differ: bool) -> None:
        self._store, self._info = store, info
        self._copies: list[Replica] = []
        self._agreed = may_differ
        self.add(first)

    def add(self, locate: Locate) -> None:
        self._copies.append(Replica(locate, Box.whole(self._info.shape), self._info.itemsize))

    def __call__(self, within: Box | None) -> Iterator[Extent]:
        if not self._agreed:
            must_agree(self._store, self._info.key, self._copies)
            self._agreed = True
        return self._copies[0].locate(within)


class _MergedTensor:
    """One global tensor: a view of the ranks' local ones."""

    def __init__(
        self, store: Store, info: TensorInfo, slices: Sequence[Slice], regions: Sequence[Sequence[Part]],
        key: Key | None = None,
    ) -> None:  # fmt: skip
        self._store, self._info, self._slices = store, info, slices
        self._key = key or info.key  # of the local tensors
        owners: dict[Box, tuple[int, Part]] = {}
        self._replicas: dict[Box, list[tuple[int, Part]]] = {}
        for rank, held in enumerate(regions):
            for region in held:
                box = region.target
                if box in owners:
                    self._replicas.setdefault(box, [owners[box]]).append((rank, region))
                else:
                    owners[box] = (rank, region)
        self._owners = list(owners.values())
        self._view: View | None = None

    def extents(self, within: Box | None) -> Iterator[Extent]:
        """The extents of the ranks' tensors, in global coordinates; the first call checks that replicas agree."""
        if self._view is None:
            for held in self._replicas.values():
                copies = [self._slices[t].contents.replica(self._key, r.box) for t, r in held]
                must_agree(self._store, self._key, copies)
            self._view = View(self._info, tuple((Key(str(t), ""), r) for t, r in self._owners))

        def local(source: Key, box: Box) -> Iterator[Extent]:
            return self._slices[int(source.name)].contents.locate[self._key](box)

        return self._view.extents(local, within)


def tensor_list(stages: Sequence[Sequence[Slice]], contents: TensorIndex) -> TensorList:
    """All tensors in the order of the module, others after them; the states of each parameter are adjacent."""
    modules = (name for slices in stages for name in slices[0].model.module)
    order = {
        name: i
        for i, name in enumerate(dict.fromkeys((*modules, *(key.name for key in contents.infos))))
    }
    infos = sorted(contents.infos.values(), key=lambda info: order[info.name])
    return TensorList(
        tuple(infos), {name: g for g, group in enumerate(contents.groups) for name in group.names}
    )


def _shapes(slices: Sequence[Slice], unreadable: Collection[Key]) -> dict[str, Shapes]:
    """The shapes of the parts of each parameter of a stage."""
    _check_same_tensors(slices, unreadable)
    contents = slices[0].contents
    names = {key.name: None for key in contents.infos if key not in contents.large}
    return {name: tuple(_shape(s, name) for s in slices) for name in names}


def _shape(of: Slice, name: str) -> tuple[int, ...]:
    """The shape of the local part of a parameter."""
    infos = of.contents.infos
    for state in ("weight", "master"):
        if Key(name, state) in infos:
            return infos[Key(name, state)].shape
    described = of.model.described
    return (
        described[name]
        if name in described
        else next(i.shape for k, i in infos.items() if k.name == name)
    )


def _check_same_tensors(slices: Sequence[Slice], unreadable: Collection[Key]) -> None:
    """All tensor-parallel ranks of a stage hold parts of the same tensors; of some only other ranks' can be read."""
    first = slices[0].contents
    for of in slices[1:]:
        unshared = (first.infos.keys() - first.large.keys()) ^ (
            of.contents.infos.keys() - of.contents.large.keys()
        )
        if unshared := unshared.difference(unreadable):
            key = min(unshared)
            there, not_there = (slices[0], of) if key in first.infos else (of, slices[0])
            raise IntegrityError(
                f"{there.model.key} or its optimizer has {key}, that of {not_there.model.key} does not"
            )


def _refuse_mean(key: Key, parts: Sequence[Key]) -> Iterator[Extent]:
    raise UnsupportedError(
        f"{key} is the mean of {len(parts)} values, one for each tensor-parallel rank, which are stored separately",
        hint=f"they are {parts[0].state} to {parts[-1].state}",
    )


def _refuse_scaled(key: Key) -> Iterator[Extent]:
    raise UnsupportedError(
        f"{key} is scaled, according to the affine map of the checkpoint, so it is not read in place",
        hint="DeepSpeed's own converter undoes it for weights; it refuses optimizer states, too",
    )


def merge_groups(stages: Sequence[Sequence[Slice]]) -> list[Group]:
    """Check that groups of tensor-parallel ranks are the same, and join those of pipeline stages.

    They are joined by position if all stages have equally many, with the same hyper-parameters;
    else by hyper-parameters if these belong to only one group of the stage. Other groups stay
    separate. Each parameter keeps its hyper-parameters.
    """
    merged: list[Group] = []
    seen: set[str] = set()
    for slices in stages:
        groups = slices[0].contents.groups
        for of in slices[1:]:
            if [(g.names, g.hyper) for g in of.contents.groups] != [
                (g.names, g.hyper) for g in groups
            ]:
                raise IntegrityError(
                    f"the optimizer groups of {slices[0].model.key} and {of.model.key} differ",
                    hint="files of different saves are mixed in one folder",
                )
        for group, into in zip(groups, _partners(merged, groups), strict=True):
            # a tied module's, in several stages
            names = [name for name in group.names if name not in seen]
            seen.update(names)
            if into is None:
                merged.append(Group(names, group.hyper, group.state))
            else:
                into.state = _joined(into, group)
                into.names.extend(names)
    return merged


def _partners(merged: Sequence[Group], groups: Sequence[Group]) -> list[Group | None]:
    """The group that each group of a stage is joined to."""
    if len(merged) == len(groups) and all(
        _alike(a, b) for a, b in zip(merged, groups, strict=True)
    ):
        return list(merged)
    found: list[Group | None] = []
    for group in groups:
        same = [other for other in merged if _alike(other, group)]
        alone = sum(_alike(other, group) for other in groups) == 1
        found.append(same[0] if alone and len(same) == 1 else None)
    return found


def _alike(one: Group, other: Group) -> bool:
    return one.hyper == other.hyper and one.state.keys() == other.state.keys()


def _joined(one: Group, other: Group) -> dict[str, Any]:
    """Plain state: one value for all, or one for each name if they differ."""
    out: dict[str, Any] = {}
    for key, value in one.state.items():
        theirs = other.state[key]
        if type(value) is type(theirs) and value == theirs and not isinstance(value, dict):
            out[key] = value
        else:
            out[key] = {**_by_name(value, one.names), **_by_name(theirs, other.names)}
    return out


def _by_name(value: Any, names: Sequence[str]) -> dict[str, Any]:
    if isinstance(value, dict) and value.keys() <= set(names):
        return value
    return dict.fromkeys(names, value)
