"""DeepSpeed checkpoints of data parallelism, ZeRO 0 to 3, read in place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, Refused
from ucformat.facts import Facts
from ucformat.geometry.tensor import Roster
from ucformat.sources.base import Folders
from ucformat.sources.deepspeed.contents import Contents, zero_options
from ucformat.sources.deepspeed.folder import (
    Files,
    check_world,
    find_tag,
    is_model_or_optimizer,
    list_files,
    looks_like_deepspeed,
)
from ucformat.sources.deepspeed.model import ModelStates
from ucformat.sources.deepspeed.objects import Objects
from ucformat.sources.deepspeed.zero0 import read_zero0
from ucformat.sources.deepspeed.zero3 import Zero3, add_frozen
from ucformat.sources.deepspeed.zero12 import Zero12
from ucformat.sources.torch_file import TorchFile
from ucformat.sources.torch_zip import TorchZip

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.geometry.tensor import Extent, Key
    from ucformat.sources.base import Record
    from ucformat.storage.base import Store

__all__ = ["DeepSpeed", "OpenDeepSpeed"]

_THREADS = 8


class DeepSpeed(Folders):
    """How DeepSpeed checkpoints are recognised and opened.

    `allow` names packages of your own whose pickled classes become inert stand-ins instead of being refused. `groups`
    gives the parameters of each optimizer group, in order, for a ZeRO 0 checkpoint that does not tell them.
    """

    kind = "deepspeed"
    title = "DeepSpeed"

    def __init__(self, *, allow: Sequence[str] = (), groups: Sequence[Sequence[str]] | None = None) -> None:
        self._allow, self._groups = tuple(allow), groups

    def marks(self, name: str) -> bool:
        """Whether a folder with a file of this name is a tag folder."""
        return is_model_or_optimizer(name)

    def find(self, store: Store) -> bool:
        """Whether this folder has `latest`, or model states as DeepSpeed names them."""
        return looks_like_deepspeed(store)

    def open(self, store: Store) -> OpenDeepSpeed:
        """Open the checkpoint that `latest` names, or the tag folder that the store is rooted at.

        Reads kilobytes of the model states files (ZeRO 3: of each rank's, because each holds its own client state) and
        of the first rank's optimizer file. The other ranks' must exist, and are opened when their extents are wanted.
        """
        files = list_files(store, find_tag(store))
        keys = [files.model] if files.model else list(files.rank_models)
        models = _open_models(store, keys, self._allow)
        return OpenDeepSpeed(store, files, models, self._allow, self._groups)


class OpenDeepSpeed:
    """One opened DeepSpeed checkpoint."""

    kind = "deepspeed"

    def __init__(
        self,
        store: Store,
        files: Files,
        models: list[ModelStates],
        allow: tuple[str, ...],
        groups: Sequence[Sequence[str]] | None,
    ) -> None:
        self.store = store
        self._files = files
        model = models[0]
        contents = Contents()
        self._contents = contents
        zero3 = files.model is None
        stage = 3 if zero3 else 0
        if zero3 or model.param_shapes is not None:
            check_world(files, model.world or len(files.optims))
        elif files.optims:
            raise Refused(
                f"{files.optims[0]} is there, but {model.key} has no `param_shapes`: a BF16_Optimizer without ZeRO, "
                "perhaps; "
                "such checkpoints are not yet read"
            )
        if zero_options(model.value).get("mics_shard_size", -1) not in (-1, 0, None):
            raise Refused(f"{model.key}: DeepSpeed checkpoints with MiCS are not yet read")
        aliases = model.aliases(zero3=zero3)
        placeholders = _add_weights(model, aliases, contents) if not zero3 else _add_buffers(model, aliases, contents)
        if zero3:
            add_frozen(models, contents)
            Zero3(model, files.optims, allow, contents)
        elif model.param_shapes is not None:
            stage = Zero12(model, files.optims, allow, contents).stage
        else:
            read_zero0(model, groups, contents)
        found = {k.name for k in contents.infos}
        lost = [n for n in placeholders if n not in found]
        objects = Objects(models, contents, lost).json()  # before the roster: large tensors among them join it
        self.facts = Facts(
            roster=_roster(model, contents),
            aliases=aliases,
            objects=objects,
            groups=tuple(group.json() for group in contents.groups),
            step=step if isinstance(step := model.value.get("global_steps"), int) else None,
            layout=_layout(stage, model),
            engine={"name": "deepspeed", "version": str(model.value.get("ds_version", ""))},
            files=files.all,
            folder=files.tag,
        )

    def extents(self, key: Key) -> Iterator[Extent]:
        """Where the bytes of a tensor lie; opens the files of the ranks that hold them, if they are not yet open."""
        return self._contents.extents(key, self.store.url)

    def records(self) -> Iterator[Record]:
        """Every record of the zip files of all ranks; reads the directory of each."""
        for key in self._files.all:
            if key != self._files.latest:
                yield from TorchZip(self.store, key).records()


def _layout(stage: int, model: ModelStates) -> dict[str, Any]:
    """Stage and ranks; under ZeRO 3 also the dtype of the weights, of which only the fp32 copy is stored."""
    out: dict[str, Any] = {"zero": stage, "dp": model.world or 1}
    described = [name for group in model.param_shapes or () for name in group if name in model.module]
    if stage == 3 and described:
        out["weight_dtype"] = model.module[described[0]].dtype
    return out


def _open_models(store: Store, keys: list[str], allow: tuple[str, ...]) -> list[ModelStates]:
    def load(key: str) -> ModelStates:
        return ModelStates(TorchFile(store, key, allow=allow))

    if len(keys) == 1:
        return [load(keys[0])]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(load, keys))


def _add_weights(model: ModelStates, aliases: dict[str, str], contents: Contents) -> list[str]:
    """The module's tensors, each once."""
    for name, tensor in model.module.items():
        if name not in aliases:
            contents.add_whole(name, "weight", model.file, tensor)
    for alias, name in aliases.items():
        if name not in model.module and not any(name in group for group in model.param_shapes or ()):
            raise IntegrityError(f"{model.key}: {alias} is tied to {name}, which is not in the checkpoint")
    return []


def _add_buffers(model: ModelStates, aliases: dict[str, str], contents: Contents) -> list[str]:
    """The buffers of a ZeRO 3 module, as rank 0 has them; returns the names of its empty placeholders."""
    described = {name for group in model.param_shapes or () for name in group} | model.frozen_shapes.keys()
    placeholders = []
    for name, tensor in model.module.items():
        if name in model.buffers or (tensor.size and name not in described and name not in aliases):
            contents.add_whole(name, "weight", model.file, tensor)
        elif name not in aliases:
            placeholders.append(name)
    return placeholders


def _roster(model: ModelStates, contents: Contents) -> Roster:
    """All tensors in the order of the module, what is not in it after that; each with its states together."""
    order = {name: i for i, name in enumerate(model.module)}
    infos = sorted(contents.infos.values(), key=lambda info: order.get(info.name, len(order)))
    return Roster(tuple(infos), {name: g for g, group in enumerate(contents.groups) for name in group.names})
