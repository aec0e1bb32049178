"""The common interface of checkpoints, foreign and universal: names, lazy tensors, plans."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from functools import cached_property
from itertools import islice
from os import PathLike
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, cast

from ucformat.errors import (
    NotACheckpoint,
    NotFound,
    TensorNotFound,
    UcformatError,
    UnsupportedError,
    UsageError,
    first_names,
)
from ucformat.format.digest import bytes_digest, document_digest
from ucformat.format.stored_tensors import index_tensors
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import LazyValues, unreadable_error
from ucformat.schema import MANIFEST, TOMBSTONE
from ucformat.settings import allowed_roots
from ucformat.storage.base import exists
from ucformat.storage.cache.scope import read_consistently
from ucformat.storage.concurrency import gc_paused
from ucformat.storage.url import as_store, as_strings
from ucformat.storage.wrappers import CachedListingStore, WatchedStore
from ucformat.texts import bytes_text, count, shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ucformat.drawing import Drawing
    from ucformat.format.thinned import Dropped
    from ucformat.format.universal import Universal
    from ucformat.geometry.layout import Layout
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.lazy import Tensor
    from ucformat.reading.plan import Verify
    from ucformat.reading.rank import Bound, ReadPlan
    from ucformat.reading.readable import CheckpointMetadata, Loss, Readable
    from ucformat.schema.manifest import Manifest
    from ucformat.sources.base import OpenSource
    from ucformat.sources.configuration import TrainingInfo
    from ucformat.storage.base import Info, Store
    from ucformat.views.document import Steps
    from ucformat.views.steps import Taken
    from ucformat.views.viewed import Viewed
    from ucformat.zarr_store.store import CheckpointStore

__all__ = ["Checkpoint", "open_checkpoint"]

# that make another model of equal tensors
_CONFIGURATIONS = ("adapter_config.json", "config.json", "params.json")
_MAX_DOCUMENT = 64 << 20  # bytes: larger ones are read by no source
_MAX_LISTED = 10_000  # files in which checkpoints are looked for
_MAX_NAMED = 10  # folders that an error names


@gc_paused()
def open_checkpoint(
    place: str | PathLike[str] | Store,
    *,
    roots: Callable[[], Sequence[str]] = tuple,
    options: Mapping[str, Any] | None = None,
    watch: Callable[[Store], WatchedStore] = WatchedStore,
) -> Checkpoint:
    """Open a checkpoint in place, reading kilobytes of it; nothing in it is ever executed.

    Args:
        roots: returns the places that may hold a virtual checkpoint's files, or bases; called only
            if they are needed.
        watch: makes the watched stores, also of bases.

    Raises:
        NotFound: the place does not exist, or is empty.
        NotACheckpoint: the place holds no checkpoint, or no committed one.
    """
    return read_consistently(lambda: _open(place, roots, options, watch), optimistic=False)


def _open(
    place: str | PathLike[str] | Store,
    roots: Callable[[], Sequence[str]],
    options: Mapping[str, Any] | None,
    watch: Callable[[Store], WatchedStore],
) -> Checkpoint:
    store = watch(as_store(place))
    is_committed, manifest = _look_for_manifest(store)
    if not is_committed:
        from ucformat.sources.opening import open_source, open_source_file, titles

        with CachedListingStore(store) as seen:
            try:
                missing: UcformatError | None = None
                if next(iter(seen.list()), None) is None:
                    missing = NotFound(
                        f"{store.url} does not exist, or is empty", hint="check the path"
                    )
            except UnsupportedError as error:  # plain HTTP, which has no folders
                missing = error
            if missing is not None:
                if (
                    isinstance(place, str | PathLike)
                    and (file := open_source_file(place, watch, options)) is not None
                ):
                    return Checkpoint(file)
                raise missing
            source = open_source(seen, options=options)
        if source is None:
            if exists(store, TOMBSTONE):
                raise NotACheckpoint(
                    f"the checkpoint at {store.url} was deleted, and is not yet completely removed",
                    hint=f"`ucp gc {store.url} --apply` completes that",
                )
            from ucformat.format.attempts import attempt_of

            infos = list(islice(store.list(), _MAX_LISTED))
            if folders := _checkpoints_below(infos):
                newest, older = folders[-_MAX_NAMED:], folders[:-_MAX_NAMED]
                raise NotACheckpoint(
                    f"{store.url} is no checkpoint itself; these folders in it seem to be: "
                    f"{first_names([*newest, *older], _MAX_NAMED)}",
                    hint=(
                        f"open one of them: {store.url}/{folders[-1]}; or record all of them: "
                        f"ucp register -r {store.url}"
                    ),
                )
            if any(i.key.startswith("attempts/") and attempt_of(i.key) for i in infos):
                raise NotACheckpoint(
                    f"{store.url} holds no committed checkpoint, only what an unfinished save or "
                    "command has written",
                    hint=(
                        "if that was interrupted, run it again; or remove its files: ucp gc "
                        f"{store.url} --apply"
                    ),
                )
            raise NotACheckpoint(
                f"{store.url} holds no checkpoint that ucformat knows",
                hint=f"a universal one has a {MANIFEST} (an interrupted conversion has none: run it again); "
                f"foreign ones that can be read: {titles()}",
            ) from None
        return Checkpoint(source)
    if options:
        hint = f"leave out {', '.join(options)}"
        raise UsageError(
            f"{store.url} is a universal checkpoint, which takes no options", hint=hint
        )
    # imported only here, since its documents need pydantic, which foreign checkpoints do not
    from ucformat.format.structure import committed_manifest
    from ucformat.format.universal import Universal

    parsed = None if manifest is None else committed_manifest(manifest, store.url)
    return Checkpoint(Universal(store, roots, parsed, watch=watch))


def _look_for_manifest(store: WatchedStore) -> tuple[bool, bytes | None]:
    """Whether there is a manifest; over a network its content and version come with the same answer."""
    if store.is_local:  # whose links are confined before anything is read
        return exists(store, MANIFEST), None
    try:
        return True, store.read_versioned(MANIFEST)[0]
    except NotFound:
        return False, None


def _checkpoints_below(infos: Sequence[Info]) -> list[str]:
    """The outermost folders that look like checkpoints, numbers in their names by value: the last is the newest."""
    from ucformat.format.attempts import outside_attempts
    from ucformat.sources.opening import marked_folders

    folders = marked_folders(infos) | {
        i.key.rpartition("/")[0] for i in infos if i.key.endswith(f"/{MANIFEST}")
    }
    folders = outside_attempts(folders, (i.key for i in infos))
    outer = [
        f for f in folders if f and not any(f.startswith(f"{other}/") for other in folders if other)
    ]
    return sorted(outer, key=_by_numbers)


def _by_numbers(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in re.split(r"(\d{1,18})", name)
    ]


class Checkpoint(Mapping[str, "Tensor"]):
    """A checkpoint that is read in place, whatever wrote it.

    `ck[name]` is a lazy tensor in state `weight`, or `master` where only that is stored; `ck[name,
    state]` in another.
    """

    def __init__(self, source: Readable) -> None:
        if source.metadata.means:
            from ucformat.views.viewed import Viewed

            source = Viewed(source, ())
        self.source = source  # for other modules of ucformat, not for users
        origin = source
        while (view := _view(origin)) is not None:
            origin = view.base
        self.origin = origin  # the checkpoint under all views: one of the next two
        self.universal = cast("Universal", origin) if origin.kind == "ucformat" else None
        self.foreign = None if self.universal else cast("OpenSource", origin)
        self.viewed = _view(source)
        self._infos, self._states = index_tensors(source.metadata.tensor_list.tensors)
        self._bound: tuple[Layout, Any, Readable, Bound] | None = (
            None  # the last one, since ranks are planned in turn
        )
        self.opened: tuple[str, Mapping[str, Any]] | None = (
            None  # the place and the options, for other processes
        )
        self.roots: tuple[str, ...] = ()  # with which it was opened

    @property
    def url(self) -> str:
        """The url of its store."""
        return self.source.store.url

    @property
    def home(self) -> str:
        """The url of the folder or file that is the checkpoint: of a DeepSpeed run that was opened, its tag folder."""
        return f"{self.url}/{self.metadata.folder}" if self.metadata.folder else self.url

    @cached_property
    def id(self) -> str:
        """The id: of a universal checkpoint the manifest's, of a foreign one a digest of its content.

        The latter is computed from the writer's unique id of the save, if it has one; else from the
        checksums in its files, and from the documents beside them that have none, which may tell
        two saves of equal tensors apart (steps and metrics in `trainer_state.json`, the scale of an
        adapter); or if not all tensors have a checksum, from the place and the files' sizes and
        times, too. That of a view includes its steps.
        """
        if self.viewed is not None and self.viewed.steps:
            steps = [step.model_dump(by_alias=True) for _, step in self.viewed.steps]
            return document_digest([Checkpoint(self.origin).id, steps]).rpartition(":")[2][:32]
        if self.universal:
            return self.universal.manifest.id
        if (identity := getattr(self.foreign, "id", None)) is not None:
            return str(identity)
        if self.metadata.save_id:
            return document_digest([self.kind, self.metadata.save_id]).rpartition(":")[2][:32]
        records = list(cast("OpenSource", self.foreign).records())
        sums = sorted(
            (r.file.rpartition("/")[2], r.name, r.nbytes, r.crc32) for r in records if r.crc32
        )
        if not sums or any(r.crc32 is None for r in records):
            files = [(i.key.rpartition("/")[2], i.size, i.version) for i in self.files()]
            return document_digest([self.home, *files, *self._documents()]).rpartition(":")[2][:32]
        return document_digest([self.kind, sums, *self._documents()]).rpartition(":")[2][:32]

    def _documents(self) -> list[tuple[str, str]]:
        """The names and digests of a foreign checkpoint's documents: those it was read from, and configurations."""
        documents = [key for key in self._file_keys() if key.endswith(".json")]
        keys = [key for key in documents if self.store.info(key).size <= _MAX_DOCUMENT]
        contents = {key.rpartition("/")[2]: self.store.read(key) for key in keys}
        # configurations above the folder belong to all checkpoints of the run
        if not self.metadata.folder:
            contents |= {name: self.assets[name] for name in _CONFIGURATIONS if name in self.assets}
        return sorted((name, bytes_digest(data)) for name, data in contents.items())

    @property
    def store(self) -> Store:
        """The store that it is read from."""
        return self.source.store

    @property
    def kind(self) -> str:
        """The writer: `ucformat`, `deepspeed`, …."""
        return self.source.kind

    @property
    def metadata(self) -> CheckpointMetadata:
        """The metadata: tensor list, optimizer groups, step, source layout, engine."""
        return self.source.metadata

    def names(self) -> list[str]:
        """Names of the stored tensors, in the order of the training program; tied names are in `aliases`."""
        return list(self._states)

    def states(self, name: str) -> list[str]:
        """The states in which a tensor is stored.

        Args:
            name: the tensor's name or alias.
        """
        return list(self._states[self._stored(name)])

    @property
    def tensors(self) -> Mapping[Key, TensorInfo]:
        """Dtype and shape of each stored tensor, by (name, state)."""
        return MappingProxyType(self._infos)

    @property
    def unreadable(self) -> Mapping[Key, str]:
        """Tensors of a foreign checkpoint that cannot be read, such as those of an unknown dtype, with the reason."""
        return MappingProxyType(dict(self.metadata.unreadable))

    def check_readable(
        self, states: Iterable[str] | None = None, matches: Callable[[str], bool] | None = None
    ) -> None:
        """Check that all tensors can be read.

        Args:
            states: only of these states (None: all).
            matches: only those whose name it accepts (None: all).

        Raises:
            UnsupportedError: one of them cannot be read.
        """
        chosen = None if states is None else set(states)
        wrong = {
            k: why
            for k, why in self.metadata.unreadable.items()
            if chosen is None or k.state in chosen
        }
        if wrong := {k: why for k, why in wrong.items() if matches is None or matches(k.name)}:
            raise unreadable_error(wrong, self.url)

    @property
    def lossy(self) -> Mapping[Key, Loss]:
        """Tensors that were encoded with loss, with the name of the encoding and the largest errors."""
        return MappingProxyType(dict(self.metadata.lossy))

    def with_lossy(self) -> Checkpoint:
        """The same checkpoint, of which tensors that were encoded with loss can be read, too."""
        return self._allowing(lossy_allowed=True) if self.metadata.lossy else self

    @property
    def older(self) -> Mapping[Key, int]:
        """Tensors that a partial save took from earlier checkpoints, with the step of each."""
        return MappingProxyType(dict(self.metadata.older))

    def with_older(self) -> Checkpoint:
        """The same checkpoint, of which tensors that are older than its step can be read, too."""
        return self._allowing(older_allowed=True) if self.metadata.older else self

    def _allowing(self, **allowed: bool) -> Checkpoint:
        source: Any = copy(self.source)
        source.metadata = self.metadata.replace(**allowed)
        checkpoint = Checkpoint(source)
        checkpoint.opened, checkpoint.roots = self.opened, self.roots
        return checkpoint

    @cached_property
    def dropped(self) -> Mapping[str, Dropped]:
        """The states of which `thin` dropped tensors: how many, their bytes, when and why."""
        if self.universal is None:
            return {}
        from ucformat.format.thinned import dropped_states

        return dropped_states(self.universal.manifest)

    def missing_state(self, state: str) -> UsageError:
        """The error for a state of which no tensor is stored."""
        stored = ", ".join(sorted({key.state for key in self._infos}))
        gone = f"; it was {self.dropped[state]}" if state in self.dropped else ""
        return UsageError(
            f"{self.url} stores no tensor in state {state!r}{gone}", hint=f"there are: {stored}"
        )

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied tensors: further name -> name under which it is stored."""
        return self.metadata.aliases

    @cached_property
    def objects(self) -> Mapping[str, Any]:
        """The non-tensor values: step counters, scheduler, scaler, client state, random generators; plain JSON."""
        return self.universal.objects() if self.universal else dict(self.metadata.objects)

    @cached_property
    def per_rank(self) -> Mapping[str, Sequence[Any]]:
        """The values that each rank saved as its own, by name: `per_rank[name][rank]`, plain JSON."""
        doc = self.universal.manifest.per_rank if self.universal else None
        if self.universal is None or doc is None:
            return {}
        # with NumPy, which many commands do not need
        from ucformat.format.objects import PerRankValues

        return PerRankValues(self.universal, doc)

    @cached_property
    def assets(self) -> Mapping[str, bytes]:
        """Files that are kept unchanged, read on access; of a foreign one also small files that were not read."""
        if self.universal:
            docs, read = self.universal.manifest.assets, self.universal.read_file
            return LazyValues(docs, lambda name: read(docs[name]))
        from ucformat.sources.unread import small_enough

        return LazyValues((*self.metadata.assets, *small_enough(self.unread)), self.store.read)

    @cached_property
    def unread(self) -> Mapping[str, int]:
        """The files in a foreign checkpoint's folder that were not read, with their sizes; small ones are in `assets`.

        A universal checkpoint has none: it consists of what its manifest lists.
        """
        if self.foreign is None:
            return {}
        from ucformat.sources.unread import find_unread

        return MappingProxyType(find_unread(self.foreign))

    @property
    def missing(self) -> Sequence[str]:
        """Files that a foreign checkpoint lacks although its program always writes them, such as `scheduler.pt`.

        What there is can be read without them, and a training that continues from it would lack
        their state.
        """
        return self.metadata.missing

    @cached_property
    def training_info(self) -> TrainingInfo:
        """The configuration, metrics and run in the checkpoint's files; of a universal one, in its manifest."""
        from ucformat.sources.configuration import TrainingInfo, find_training_info

        if self.universal:
            m = self.universal.manifest
            return TrainingInfo(m.config, m.metrics, m.run)
        if isinstance(info := getattr(self.foreign, "training_info", None), TrainingInfo):
            return info
        return find_training_info(
            self.metadata, LazyValues(self.metadata.assets, self.store.read), self.url
        )

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest; of a foreign one, or a view, one that describes it, without id, attempt, paths and digests."""
        if self.universal and not self.viewed:
            return self.universal.manifest
        from ucformat.format.universal import describe

        training = self.training_info
        return describe(self.metadata, training.run, training.metrics, training.config)

    def files(self) -> list[Info]:
        """The current files of a foreign checkpoint; if its run was opened, those of the tag folder."""
        return [self.store.info(key) for key in self._file_keys()]

    def _file_keys(self) -> list[str]:
        folder = self.metadata.folder
        # the shards of an index file are beside it
        below = f"{folder}/" if folder and folder not in self.metadata.files else ""
        return [f for f in self.metadata.files if f.startswith(below)]

    @property
    def zarr_url(self) -> str | None:
        """The url of the Zarr v3 group with the arrays; None for a foreign checkpoint or a view."""
        return (
            f"{self.url}/data/{self.manifest.attempt}"
            if self.universal and not self.viewed
            else None
        )

    def zarr_store(self, *, verify: Verify = "whole") -> CheckpointStore:
        """A read-only store for zarr-python (extra `zarr`), whatever wrote the checkpoint: `zarr.open_group(store)`.

        It has a group for each state, and in it an array for each tensor. A chunk is read when it
        is asked for.

        Args:
            verify: which checksums to verify, as for `Tensor.read`.
        """
        from ucformat.zarr_store.store import CheckpointStore  # with zarr, which is slow to import

        return CheckpointStore(self, verify=verify)

    @property
    def hf_url(self) -> str | None:
        """The url of the folder that `from_pretrained` and vLLM take; None if the weights are not safetensors files."""
        folder = self.universal.weights_folder if self.universal and not self.viewed else None
        return None if folder is None else f"{self.url}/{folder}"

    def _stored(self, name: str) -> str:
        name = self.aliases.get(name, name)
        if name not in self._states:
            raise TensorNotFound(
                f"{self.url} has no tensor {name!r}", hint=_nearest(name, self._states)
            )
        return name

    def __getitem__(self, key: str | tuple[str, str]) -> Tensor:
        name, state = key if isinstance(key, tuple) else (key, None)
        for wanted in (state,) if state is not None else ("weight", "master"):
            refused = Key(self.aliases.get(name, name), wanted)
            if refused in self.metadata.unreadable and refused not in self._infos:
                raise unreadable_error({refused: self.metadata.unreadable[refused]}, self.url)
        stored = self._stored(name)
        states = self._states[stored]
        if state is None:
            state = next((s for s in ("weight", "master") if s in states), None)
        if state not in states:
            message = f"{self.url} has no {name!r} in state {state or 'weight or master'!r}"
            if state is not None and state in self.dropped:
                message += f": tensors of this state were {self.dropped[state]}"
            raise TensorNotFound(message, hint=f"it is stored in: {', '.join(states)}")
        from ucformat.reading.lazy import Tensor

        return Tensor(self._infos[Key(stored, state)], self.source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End a `with` block: a checkpoint holds nothing open that must be closed."""

    def _ipython_key_completions_(self) -> list[str | tuple[str, str]]:
        """The names that IPython and Jupyter offer after `ck[`, and after them their states."""
        return [*self.names(), *self.aliases, *self._infos]

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from ucformat.drawing import card
        from ucformat.geometry.amounts import by_state

        rows = [
            (s["state"], ", ".join(sorted(s["dtypes"])), count(s["tensors"]),
             count(s["elements"]), bytes_text(s["bytes"]))
            for s in by_state(self._infos.values())
        ]  # fmt: skip
        committed = self.universal.manifest if self.universal else None
        engine = " ".join(self.metadata.engine.values())
        facts = {
            "place": self.url,
            "kind": self.kind if self.kind in engine else f"{self.kind} {engine}".strip(),
            "id": committed and committed.id,
            "run": committed and committed.run,
            "step": self.metadata.step,
            "layout": ", ".join(f"{k} {v}" for k, v in self.metadata.layout.items()) or None,
            "part of": self.metadata.part_of or None,
            "not readable": len(self.unreadable) or None,
            "lossy": len(self.lossy) or None,
        }
        names = self.url.rstrip("/").rpartition("/")[2]
        return card(names, facts, ("state", "dtype", "tensors", "elements", "size"), rows)

    def plot(self, layout: Layout | None, name: str, state: str | None = None) -> Drawing:
        """Draw how a tensor is stored, and over that which boxes of it the ranks of a layout hold; reads no values.

        Args:
            layout: None draws the storage alone.
            name: of the tensor; if the layout has a view, in the view.
            state: as in `ck[name, state]` (None: its weight, or else its master).

        Raises:
            UsageError: the ranks' boxes are too many to be drawn.
        """
        from ucformat.drawing import draw_boxes
        from ucformat.geometry.box import Box
        from ucformat.geometry.tensor import single_extents

        shown = self if layout is None or not layout.view else self.view(layout)
        info = (shown[name] if state is None else shown[name, state]).info
        stored = single_extents(shown.source.extents(info.key, Box.whole(info.shape)))
        held: dict[Box, list[int]] = {}
        if layout is not None:
            from ucformat.reading.rank import Bound

            bound = Bound.of(shown.metadata.tensor_list, layout, [info.state]).layout
            key = Key(layout.rename(info.name), info.state)
            for rank in range(bound.ranks):
                for piece in bound.pieces(key, rank):
                    held.setdefault(piece.box, []).append(rank)
        label = f"{info.name} ({info.state}), {info.dtype}, {shape_text(info.shape)}"
        return draw_boxes(label, info.shape, (extent.box for extent in stored), held)

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, key: object) -> bool:
        try:
            self[key]  # type: ignore[index]
        except (TensorNotFound, UnsupportedError, TypeError, ValueError):
            return False
        return True

    def plan(
        self,
        layout: Layout,
        rank: int,
        states: str | Iterable[str] | None = None,
        *,
        verify: Verify = "whole",
        most_boxes: int | None = None,
    ) -> ReadPlan:
        """Plan the reads of one rank of a layout; reads no tensor bytes.

        Args:
            layout: the placement of each tensor on each rank; if it has a view, of the tensors of
                the view.
            rank: the rank in the layout's mesh.
            states: one of `weight`, `master`, `exp_avg`, …, or several (None: all).
            verify: the checksums to verify: of chunks that are read `whole` (default), `always`
                (reads whole chunks) or `never`.
            most_boxes: of all tensors together; what has more is UnsupportedError (None: any
                number).
        """
        from ucformat.reading.rank import Bound, plan_rank

        chosen = None if states is None else as_strings(states)
        for state in {*(chosen or ())} & self.dropped.keys():
            if all(key.state != state for key in self._infos):
                raise self.missing_state(state)
        bound = self._bound  # threads may plan under several layouts
        if bound is None or bound[0] is not layout or bound[1] != chosen:
            source = self.view(layout).source if layout.view else self.source
            bound = (
                layout,
                chosen,
                source,
                Bound.of(source.metadata.tensor_list, layout, chosen),
            )
            self._bound = bound
        return plan_rank(bound[2], bound[3], rank, verify, most_boxes)

    def view(self, steps: Steps) -> Checkpoint:
        """The same checkpoint under other names, shapes and dtypes; nothing is copied.

        Args:
            steps: the steps as a layout file spells them (`docs/view.md`), that is, a list of
                mappings; or the path of such a file, a layout, or the name of a preset.

        Raises:
            LayoutError: a step cannot be applied; the message names the step and the tensor.
        """
        from ucformat.views.document import expand, read_steps
        from ucformat.views.viewed import Viewed

        viewed = Checkpoint(
            Viewed(
                self.source,
                expand(read_steps(steps), lambda: (self.objects, self.assets, self.names())),
            )
        )
        viewed.opened, viewed.roots = self.opened, self.roots
        return viewed

    @property
    def steps(self) -> tuple[Taken, ...]:
        """The inputs and outputs of each step of a view; empty if this is none."""
        view = _view(self.source)
        return () if view is None else tuple(view.taken)

    @property
    def recipe(self) -> tuple[str, Mapping[str, Any], tuple[str, ...], list[list[dict[str, Any]]]]:
        """What opens it again: the place, the options, the roots, and the steps of its views, the innermost first."""
        views: list[list[dict[str, Any]]] = []
        source = self.source
        while (view := _view(source)) is not None:
            if view.steps:
                views.insert(
                    0, [step.model_dump(by_alias=True, mode="json") for _, step in view.steps]
                )
            source = view.base
        return *(self.opened or (self.url, {})), self.roots, views

    def __reduce__(self) -> tuple[Callable[..., Checkpoint], tuple[Any, ...]]:
        if (self.opened is None and self.foreign is not None) or self.recipe[0].startswith(
            "memory:"
        ):
            raise UsageError(
                f"{self.url} cannot be opened in another process", hint="open it by its path or url"
            )
        return _open_again, (
            *self.recipe,
            self.metadata.lossy_allowed,
            self.metadata.older_allowed,
        )

    def __repr__(self) -> str:
        total = sum(i.nbytes for i in self._infos.values())
        return f"<ucformat.Checkpoint {self.url} ({self.kind}): {len(self)} tensors, {total} bytes>"


def _open_again(
    place: str,
    options: Mapping[str, Any],
    roots: tuple[str, ...],
    views: list[list[dict[str, Any]]],
    lossy: bool,  # noqa: FBT001 - as pickled
    older: bool,  # noqa: FBT001 - as pickled
) -> Checkpoint:
    """Open a checkpoint by its recipe."""
    checkpoint = open_checkpoint(place, roots=lambda: (*roots, *allowed_roots()), options=options)
    checkpoint.opened, checkpoint.roots = (place, options), roots
    for steps in views:
        checkpoint = checkpoint.view(steps)
    checkpoint = checkpoint.with_lossy() if lossy else checkpoint
    return checkpoint.with_older() if older else checkpoint


def _view(source: Readable) -> Viewed | None:
    """The source if it is a view; does not import `views`, which most commands do not need."""
    return cast("Viewed", source) if getattr(source, "is_view", False) else None


def _nearest(name: str, names: Mapping[str, Any]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, names, 3, 0.4)
    return f"did you mean {' or '.join(near)}?" if near else "`ck.names()` or `ucp show` lists them"
