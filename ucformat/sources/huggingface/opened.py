"""Directories of Hugging Face's Trainer and Accelerate, read in place: the engine's tensors, and everything else."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

from ucformat.errors import MissingData, NotFound
from ucformat.reading.readable import CheckpointMetadata, FileRecord
from ucformat.sources.huggingface.engines import Engine, EngineOptions, open_engine
from ucformat.sources.huggingface.folder import missing_files
from ucformat.sources.index import TensorIndex
from ucformat.sources.model_files import find_assets, read_json
from ucformat.sources.pickle.file import TorchFile, TorchZip, open_file
from ucformat.sources.pickle.stand_ins import OpaqueFile
from ucformat.sources.values import to_json
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Key
    from ucformat.sources.huggingface.folder import FolderFiles
    from ucformat.sources.pickle.stand_ins import StoredTensor
    from ucformat.storage.base import Info, Store

_RANK_FILE = re.compile(r"__(\d{1,9})_\d+\.distcp")
_NUMBER = re.compile(r"_\d+\.(?=\w+$)")  # in `rng_state_2.pth`


def _read_values(store: Store, found: FolderFiles, contents: TensorIndex, allow: tuple[str, ...]) -> dict[str, Any]:
    """Read each file of values as an object of its name, including `trainer_state`; values of each rank by rank."""
    wanted = [(name, name, key) for name, key in found.values.items()]
    wanted += [
        (name, f"{name}.{rank}", by_rank[rank]) for name, by_rank in found.ranked.items() for rank in sorted(by_rank)
    ]
    objects: dict[str, Any] = {}
    if found.trainer_state:
        objects["trainer_state"] = to_json(read_json(store, "trainer_state.json"))
    opened = map_io(lambda item: open_file(store, item[2], allow=allow), wanted)
    for (name, path, _), file in zip(wanted, opened, strict=True):
        value = _to_json(file, path, contents)
        if name == path:
            objects[name] = value
        else:
            objects.setdefault(name, {})[path.rpartition(".")[2]] = value
    return objects


def _to_json(file: TorchFile | OpaqueFile, path: str, contents: TensorIndex) -> Any:
    """The value as JSON; a value without a JSON form is kept as an opaque pickle."""
    if isinstance(file, OpaqueFile):
        return to_json(file.opaque())
    opened = file

    def spill(where: str, tensor: StoredTensor) -> str:
        return contents.add_large(where, opened, tensor)

    return to_json(file.value, read=file.read, spill=spill, path=path)


class OpenHuggingFace:
    """An opened directory of Trainer or Accelerate."""

    kind = "huggingface"

    def __init__(
        self,
        store: Store,
        found: FolderFiles,
        infos: Mapping[str, Info],
        options: EngineOptions,
    ) -> None:
        self.store, self.contents = store, TensorIndex()
        engine = open_engine(store, found, infos, self.contents, options)
        self._engine = engine
        self.part = next((part for s in engine.sources if (part := getattr(s, "part", None))), None)
        for name, by_rank in found.ranked.items():
            _check_ranks(name, by_rank, _world(engine))
        values = [*found.values.values(), *(f for by_rank in found.ranked.values() for f in by_rank.values())]
        self._zips = [*engine.zips, *values]
        objects = {**engine.objects, **_read_values(store, found, self.contents, options.allow)}
        own = (["trainer_state.json"] if found.trainer_state else []) + self._zips
        files = tuple(dict.fromkeys([*engine.files, *own]))
        assets = find_assets((i for i in infos.values()), files)
        self.metadata = CheckpointMetadata(
            tensor_list=self.contents.tensor_list(),
            unreadable=self.contents.unreadable,
            missing=tuple(missing_files(found)),
            aliases=engine.aliases,
            objects=objects,
            assets=assets,
            groups=tuple(group.json() for group in self.contents.groups),
            step=_step(objects, engine),
            layout=engine.layout,
            engine=_engine(store, found, engine, assets),
            files=files,
        )

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """Find where the bytes of a tensor are stored."""
        return self.contents.extents(key, within, self.store.url)

    def records(self) -> Iterator[FileRecord]:
        """List every record of the engine's files and of the others; a safetensors file is one, without a checksum."""
        for source in self._engine.sources:
            yield from source.records()
        for key in self._zips:
            yield from TorchZip(self.store, key).records()
        for key in self._engine.unchecked:
            yield FileRecord(key, key, self.store.info(key).size, None, int)


def _world(engine: Engine) -> int:
    """The ranks that certainly wrote files of the engine."""
    layout = engine.layout
    ranks = [int(m[1]) for name in engine.files if (m := _RANK_FILE.fullmatch(name.rpartition("/")[2]))]
    degrees = [n for axis in ("dp", "tp", "pp") if type(n := layout.get(axis, 1)) is int]
    return max(prod(degrees), 1 + max(ranks, default=-1))


def _check_ranks(name: str, by_rank: Mapping[int, str], world: int) -> None:
    """MissingData if a rank's file is missing; one without a number was written by a single process."""
    example = by_rank[min(by_rank)]
    if not _NUMBER.search(example):
        return
    total = max(world, max(by_rank) + 1)
    if len(by_rank) < total:
        missing = next(rank for rank in range(total) if rank not in by_rank)
        raise MissingData(
            f"{_NUMBER.sub(f'_{missing}.', example)} is missing: {len(by_rank)} of {total} ranks have a file of {name}",
            hint="copy it again from where it was saved; to open the checkpoint without any, move the others elsewhere",
        )


def _step(objects: Mapping[str, Any], engine: Engine) -> int | None:
    """The step counted by Trainer, otherwise the engine's."""
    state = objects.get("trainer_state")
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if type(step) is int else engine.step


def _engine(store: Store, found: FolderFiles, engine: Engine, assets: Sequence[str]) -> dict[str, str]:
    """The program (Trainer or Accelerate), its version according to the model's configuration, and the inner engine."""
    trainer = found.trainer_state or "training_args" in found.values
    out = {"name": "transformers" if trainer else "accelerate"}
    if "config.json" in assets:
        try:
            config = read_json(store, "config.json")
        except NotFound:
            config = None
        version = config.get("transformers_version") if isinstance(config, dict) else None
        if isinstance(version, str):
            out["version"] = version
    return {**out, **engine.described}
