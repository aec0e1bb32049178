"""Whether what was opened is only a part of a checkpoint: by its names, the files beside it, and its content.

Programs that shard a model write a file or a folder for each rank, stage or shard, and number them.
A part looks like a whole checkpoint to whoever reads it alone, so a source opens one only on
request (`part=true`). What a file contains decides; where it does not tell, names and siblings do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ucformat.errors import (
    NotACheckpoint,
    UcformatError,
    UnsupportedError,
    first_names,
    option_text,
)
from ucformat.reading.readable import PART_OF
from ucformat.reading.stand_ins import Inert
from ucformat.sources.model_files import read_json, read_weight_map
from ucformat.sources.registry import all_sources
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from ucformat.reading.readable import CheckpointMetadata
    from ucformat.storage.base import Store

_MAX_LISTED = 10_000  # files that are listed to find siblings
_MAX_INDEXES = 5

#: Items of `torch.distributed.checkpoint`, which `.metadata` describes.
_ITEMS = (r".*\.distcp", "one file of a distributed checkpoint, whose `.metadata` describes it")

_COUNTED = re.compile(r"(?<!\d)(\d{1,9})[-_. ]?of[-_. ]?(\d{1,9})(?!\d)")
_PROGRESS = re.compile(
    r"(?:epochs?|ep|steps?|iter(?:ation)?s?|rounds?|folds?|trials?|phases?)[-_=. ]?$"
)
_WORLD = re.compile(r"(?<![a-z])(?:world[-_]?size|ws)[-_=. ]?(\d{1,9})(?!\d)")
_LABEL = r"(?<![a-z])({})[-_=. ]?(\d{{1,9}})(?![\da-z])"
_RANK = re.compile(
    _LABEL.format("(?:(?:tp|pp|mp|dp|ep|fsdp)[-_])?rank|tp|pp|mp|cp|etp|shards?|parts?|partitions?")
)
# of a pipeline, or of a training
_PHASE = re.compile(_LABEL.format("stage|chunk|slice|piece|split"))
_DEVICE = re.compile(_LABEL.format("gpu|device|host|node|worker|proc|process|dp|experts?|layers?"))
_RANK_FOLDER = re.compile(
    r"(?:.*[-_.])?(?:rank|shard|partition)[-_.=]?\d{1,9}(?:_\d{1,9})*|(?:(?:tp|pp|mp|cp|etp|ep|dp)[-_.=]?\d{1,9}[-_.]?)+"
)
_LOW_RANK = re.compile(r"lora|dora|adapter|low[-_]?rank|galore")  # whose rank is a size
_DOTTED = re.compile(r"\.(\d{2,9})\.[a-z]+$")
_NUMBER = re.compile(r"\d{1,9}")
_STACK = re.compile(r"((?:[^.]+\.)*?)(\d{1,6})(?:\..*|$)", re.DOTALL)

#: Arguments of training programs that count the ranks among which a model's tensors are
#: divided.
_DEGREES = ("tensor_model_parallel_size", "model_parallel_size", "pipeline_model_parallel_size",
            "expert_model_parallel_size", "mp_world_size")  # fmt: skip
_ARGUMENTS = ("args", "hyper_parameters", "config", "cfg", "hparams")
_FLAT = re.compile(
    r"(.*\.)?(_flat_param|flat_param_\d+|_fsdp_wrapped_module\._flat_param)", re.DOTALL
)
_CUT = "has the same tensors, each with another size of at most one dim"
_META_NORM, _META_SIZES = "norm.weight", "params.json"
_META_EMBEDDING, _META_OUTPUT = "tok_embeddings.weight", "layers.0.attention.wo.weight"


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another file of a folder: the shapes of its tensors by name, and what its content says that it is a part of."""

    shapes: Mapping[str, tuple[int, ...]]
    part: str = ""


def refusal(where: str, what: str, *, openable: bool = True) -> NotACheckpoint:
    """The error for a part that is opened as if it were whole."""
    if not openable:
        return NotACheckpoint(
            f"{where} is only a part of a checkpoint: {what}",
            hint=(
                "open the folder that has all parts, and the files that describe them; by "
                "itself it cannot be read"
            ),
        )
    yes, no = option_text("part", "True", "true"), option_text("part", "False", "false")
    return NotACheckpoint(
        f"{where} seems to be only a part of a checkpoint: {what}",
        hint=f"open the folder that has all parts, or their index; to open this part by itself, {yes}; if it is whole "
        f"in spite of that, {no}",
    )


def parts_of_one(names: Iterable[str], url: str) -> UnsupportedError | None:
    """The error for a folder that has parts of one checkpoint, which nothing describes; None if it has no parts."""
    parts = [name for name in names if _by_label("", name, ())]
    if not parts:
        return None
    return UnsupportedError(
        f"{url} holds parts of a checkpoint, and no file says how they belong together: "
        f"{first_names(parts, 10)}",
        hint="put them together with the program that saved them; to open one file by itself, give its path and "
        f"{option_text('part', 'True', 'true')}",
    )


def marked(metadata: CheckpointMetadata, what: str) -> CheckpointMetadata:
    """The metadata of a part that is opened knowingly."""
    return metadata.replace(layout={**metadata.layout, PART_OF: what})


def part_by_content(value: Any) -> str | None:
    """What a pickled value says that it is a part of; empty if it says that it is whole, None if it says neither."""
    if not isinstance(value, dict):
        return None
    for source in all_sources():
        if part := source.part_of("", value):
            return part
    if any(isinstance(k, str) and _FLAT.fullmatch(k) for k in value):
        return "one rank's flat parameters of FSDP"
    degrees: dict[str, int] = {}
    for arguments in (value, *(value[k] for k in _ARGUMENTS if k in value)):
        attributes = arguments.attributes if isinstance(arguments, Inert) else arguments
        if isinstance(attributes, dict):
            degrees |= {n: attributes[n] for n in _DEGREES if type(attributes.get(n)) is int}
            rank, ranks = (attributes.get(n) for n in ("rank", "world_size"))
            # 0 may have saved for all
            if type(rank) is int and type(ranks) is int and 0 < rank < ranks:
                return f"rank {rank} of {ranks}, according to its content"
    above = {name: n for name, n in degrees.items() if n > 1}
    if above:
        return (
            "one rank's part, according to its arguments "
            f"({', '.join(f'{k} {n}' for k, n in above.items())})"
        )
    return "" if any(name.startswith("pipeline") for name in degrees) else None


def part_by_shapes(store: Store, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """What the shapes of a model of Meta or Mistral say.

    Whose ranks (`consolidated.00.pth`) have some rows or columns.
    """
    norm, embedding, output = (
        shapes.get(n, ()) for n in (_META_NORM, _META_EMBEDDING, _META_OUTPUT)
    )
    if len(norm) != 1 or len(embedding) != 2 or len(output) != 2:
        return None
    # Ranks have some columns of the embedding, whose whole width is that of the norm, and of the
    # output projection, whose whole width is `n_heads * head_dim`, which need not be the same.
    width, parameters = norm[0], read_json(store, _META_SIZES) if exists(store, _META_SIZES) else {}
    sizes = (
        [parameters.get(n) for n in ("n_heads", "head_dim")]
        if isinstance(parameters, dict)
        else [None, None]
    )
    heads, dim = (n if type(n) is int and n > 0 else None for n in sizes)
    inner = heads * dim if heads and dim else width
    narrow = 0 < output[1] < inner and (heads is not None or inner % output[1] == 0)
    if embedding[1] < width or narrow:
        ranks = width // embedding[1] if 0 < embedding[1] < width else inner // output[1]
        return f"one of {ranks} tensor-parallel ranks, according to its shapes"
    return "" if heads else None


def part_by_names(
    store: Store,
    key: str,
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    open_other: Callable[[str], Sibling] | None = None,
) -> str:
    """What the name of a file, that of its folder, and the files beside it say that it is a part of; else empty.

    Args:
        key: the name of the file; empty if the folder itself was opened.
    """
    names = shapes.keys()
    folder = store.url.rstrip("/").rpartition("/")[2].lower()
    if reason := _by_folder(folder, key.lower(), names):
        return reason
    if not key:
        return ""
    if reason := _by_label(store.url, key, names):
        return reason
    beside = list(_siblings(store))
    return _by_index(store, key, beside) or _by_siblings(key, beside, shapes, open_other)


def _by_folder(folder: str, file: str, names: Collection[str]) -> str:
    counted = _counted(folder)
    if counted == 1:
        return ""
    if counted:
        return f"its folder is one of {counted}"
    if _RANK_FOLDER.fullmatch(folder) and not _is_low_rank(folder, file, names):
        return f"its folder is called {folder}, as that of one of several ranks"
    return (
        f"its folder is called {folder}, as that of one pipeline stage"
        if _is_phase(folder, names)
        else ""
    )


def _by_label(url: str, key: str, names: Collection[str]) -> str:
    """What a file's own name says."""
    name = key.lower()
    for pattern, description in (_ITEMS, *(p for s in all_sources() for p in s.part_files.items())):
        if re.fullmatch(pattern, name):
            return description
    if name.endswith(".pt") and url:
        for source in all_sources():
            if part := source.part_of(url, {}):
                return part
    counted, world = _counted(name), _WORLD.search(name)
    if counted == 1 or (world and int(world[1]) == 1):
        return ""
    if counted:
        return f"one of {counted} shards"
    label = _RANK.search(name)
    if label and not _is_low_rank(name, name, names):
        total = f" of {int(world[1])}" if world else ""
        return f"{label[1]} {int(label[2])}{total}, according to its name"
    return "one pipeline stage, according to its name" if _is_phase(name, names) else ""


def _counted(name: str) -> int:
    """How many parts there are according to the name of one (`-00001-of-00004`); 0 if it does not tell."""
    for m in _COUNTED.finditer(name):
        if not _PROGRESS.search(name[: m.start()]) and int(m[1]) <= int(m[2]) and int(m[2]):
            return int(m[2])
    return 0


def _is_low_rank(name: str, file: str, names: Collection[str]) -> bool:
    """Whether the rank in a name is that of an adapter's factors."""
    label = _RANK.search(name)
    if label is None or not int(label[2]):
        return False
    return any(_LOW_RANK.search(text.lower()) for text in (name, file, *names))


def _is_phase(name: str, names: Collection[str]) -> bool:
    """Whether a stage in a name is one of a pipeline: it is number 0, or its layers do not begin with the first."""
    label = _PHASE.search(name)
    return label is not None and (
        int(label[2]) == 0 or any(min(n) > 0 for n in _stacks(names).values())
    )


def _siblings(store: Store) -> Iterator[str]:
    try:
        yield from (info.key for info in islice(store.list(), _MAX_LISTED) if "/" not in info.key)
    except UcformatError:  # plain HTTP, which has no folders
        return


def _by_index(store: Store, key: str, beside: Iterable[str]) -> str:
    for index in [n for n in beside if n.endswith(".index.json") and n != key][:_MAX_INDEXES]:
        try:
            files = set(read_weight_map(store, index)[0].values())
        except UcformatError:  # it is not an index of tensors
            continue
        if key in files and len(files) > 1:
            return f"one of the {len(files)} files of {index}"
    return ""


def _by_siblings(
    key: str,
    beside: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    open_other: Callable[[str], Sibling] | None,
) -> str:
    """What files say whose names differ in one number."""
    dotted = _DOTTED.search(key.lower())
    for m in _NUMBER.finditer(key):
        pattern = re.compile(
            rf"{re.escape(key[: m.start()])}(\d{{1,9}}){re.escape(key[m.end() :])}"
        )
        numbered = {int(n[1]): n[0] for n in map(pattern.fullmatch, beside) if n}
        others = sorted((n for n in numbered if n != int(m[0])), key=lambda n: abs(n - int(m[0])))
        if dotted and m.start() == dotted.start(1) and (int(m[0]) == 0 or numbered):
            ranks = {*numbered, int(m[0])}
            if len(ranks) > 1 and ranks == set(range(len(ranks))):
                return f"one of {len(ranks)} numbered files, such as {numbered[others[0]]}"
        if not others:
            continue
        label = _DEVICE.search(key.lower())
        if label and label.start(2) == m.start():
            return f"{label[1]} {int(label[2])}, beside {numbered[others[0]]}"
        reason = (
            "" if open_other is None else _by_content_of(shapes, open_other, numbered[others[0]])
        )
        if reason and (reason != _CUT or _are_ranks({*numbered, int(m[0])}, shapes)):
            return f"{numbered[others[0]]} {reason}"
    return ""


def _by_content_of(
    shapes: Mapping[str, tuple[int, ...]], open_other: Callable[[str], Sibling], sibling: str
) -> str:
    """What the content of a file beside says that both are parts of."""
    try:
        beside = open_other(sibling)
    except UcformatError:  # another kind of file
        return ""
    if beside.part:
        return f"beside it is {beside.part}"
    if _complete(shapes, beside.shapes):
        return "has other layers or tensors of the same model"
    return _CUT if _cut(shapes, beside.shapes) else ""


def _are_ranks(numbers: Collection[int], names: Iterable[str]) -> bool:
    """Whether numbers of files may be those of ranks, and are not the ranks of adapters."""
    first = min(numbers)
    return (
        first <= 1
        and max(numbers) - first < len(numbers)
        and not any(_LOW_RANK.search(n.lower()) for n in names)
    )


def _complete(names: Collection[str], beside: Collection[str]) -> bool:
    """Whether two files have different layers of one stack, or else different tensors of one module."""
    theirs = _stacks(beside)
    if any(mine.isdisjoint(theirs.get(stack, mine)) for stack, mine in _stacks(names).items()):
        return True
    modules, other_modules = (
        {name.partition(".")[0] for name in keys if "." in name} for keys in (names, beside)
    )
    return set(beside).isdisjoint(names) and not modules.isdisjoint(other_modules)


def _cut(shapes: Mapping[str, tuple[int, ...]], beside: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether two files have the same tensors, some of which differ in one dim, and none in more."""
    if shapes.keys() != beside.keys() or any(len(s) != len(beside[n]) for n, s in shapes.items()):
        return False
    return (
        max(
            (sum(a != b for a, b in zip(s, beside[n], strict=True)) for n, s in shapes.items()),
            default=0,
        )
        == 1
    )


def _stacks(names: Iterable[str]) -> dict[str, set[int]]:
    """The numbers of layers, by what is before the number in their names."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        if m := _STACK.fullmatch(name):
            numbers.setdefault(m[1], set()).add(int(m[2]))
    return numbers
