"""`capture` asks an engine's loader where the elements of a checkpoint go, and `CapturedLayout` reads them there."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ucformat.checkpoint import Checkpoint
from ucformat.errors import (
    CoverageError,
    LayoutError,
    StateMismatch,
    UnsupportedError,
    UsageError,
    check_keywords,
    first_lines,
    first_names,
)
from ucformat.geometry.box import Box, bounding_box
from ucformat.geometry.coverage import prove
from ucformat.geometry.layout import Layout, read_document, validate
from ucformat.geometry.moves import Move, NotBoxes, boxes
from ucformat.geometry.tensor import TensorInfo
from ucformat.references import open_reference
from ucformat.schema import CASTABLE
from ucformat.schema.view import Compose
from ucformat.torch.capturing.recorder import Constant, Foreign, Recorder
from ucformat.torch.loading.arguments import ReadArguments
from ucformat.torch.loading.load_into import load_into
from ucformat.torch.loading.match import PARAMETER, parameter_of
from ucformat.torch.state.memory import dtype_name, torch_dtype
from ucformat.torch.state.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from os import PathLike

    from ucformat.geometry.view import BoxPair
    from ucformat.reading.rank import ReadPlan
    from ucformat.schema.layout import CapturedDoc, LayoutDocument
    from ucformat.torch.capturing.recorder import Content

__all__ = ["CapturedLayout", "capture"]

_MOST = 4  # differences that an error lists
#: What of a configuration does not say how a model is loaded: where it is from, and dtypes, which
#: are compared tensor by tensor.
_CIRCUMSTANCES = {"architectures", "dtype", "name_or_path", "torch_dtype", "transformers_version"}
_EXACT = {
    (small, large)
    for large, smaller in {
        "float32": ("float16", "bfloat16"),
        "float64": ("float16", "bfloat16", "float32"),
    }.items()
    for small in smaller
}


def capture(
    loader: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
    checkpoint: str | PathLike[str] | Checkpoint,
    *,
    model: torch.nn.Module | None = None,
    config: object = None,
    engine: Mapping[str, str] | None = None,
    rank: int | None = None,
    ranks: int | None = None,
) -> CapturedLayout:
    """Ask an engine's own loader which part of which tensor goes where in a model on this rank.

    The loader gets tensors that have names, shapes and dtypes, but no values and no memory, and what
    it does with them is recorded: slices, transpositions and reshapes, copies, concatenations,
    casts. Of the checkpoint only metadata is read. The values of the model are undefined until a
    load. Each rank calls this by itself.

    Args:
        loader: a function that loads a model from an iterator of names and tensors, such as
            `model.load_weights` of vLLM. It fills `model`, or returns the model that it has made.
        checkpoint: a checkpoint, a reference to one, or an open one, of whose tensors (in state
            `weight`, or `master` if only that is stored) the loader gets the names, shapes and
            dtypes.
        model: the model that the loader fills (default: what it returns).
        config: what the loader depends on: a mapping of JSON values, a dataclass, or an object
            with `to_dict()` (default: `model.config`, if there is one).
        engine: the names and versions of what loads (default: those of the packages that define
            the model).
        rank: the number of this rank among those that load parts (default: that of
            torch.distributed, or 0).
        ranks: how many there are (default: those of torch.distributed, or 1).

    Returns:
        the layout, which `CapturedLayout.load` reads from any checkpoint of such tensors.

    Raises:
        UnsupportedError: the loader does something with values that a layout cannot say; the
            message names the operation and the tensors. Or it fills elements of a parameter
            twice, or with values that are not from the checkpoint.
        StateMismatch: the loader does not fill a parameter completely.
        UsageError: the engine has no version, or the configuration is not JSON.
    """
    ck = checkpoint if isinstance(checkpoint, Checkpoint) else open_reference(checkpoint)
    recorder = Recorder()
    for name, tensor in _tensors(model).items() if model is not None else ():
        recorder.destination(name, tensor)
    sources = {name: next(iter(infos)) for name in ck.names() if (infos := parameter_of(name, ck))}
    weights = (
        (name, recorder.source(name, info.shape, torch_dtype(info.dtype)))
        for name, info in sources.items()
    )
    try:
        with recorder.watch(), torch.no_grad():
            returned = loader(weights)
    except Exception as error:
        if recorder.refused is not None and error is not recorder.refused:
            raise recorder.refused from error
        raise
    if recorder.refused is not None:  # the loader went on
        raise recorder.refused
    made = returned if isinstance(returned, torch.nn.Module) else model
    if made is None:
        raise UsageError(
            f"the loader returned {type(returned).__name__}, not a model",
            hint="pass the model that it fills: `model=`",
        )
    composer = _Composer(recorder, sources)
    first: dict[tuple[Any, ...], str] = {}
    ties: dict[str, str] = {}
    tensors = _tensors(made)
    parameters = {name for name, _ in made.named_parameters(remove_duplicate=False)}
    for name, tensor in tensors.items():
        stored = first.setdefault(recorder.place(tensor), name) if tensor.numel() else name
        if stored == name:
            composer.add(name, tensor, parameter=name in parameters)
        else:
            ties[name] = stored
    used = {part["from"] for t in composer.tensors.values() for part in t["parts"]}
    number, count = _position(rank, ranks)
    document = {
        "version": 1,
        "mesh": {"rank": 1},
        "view": [
            {"keep": "*", "states": list(PARAMETER)},
            {
                "compose": composer.tensors,
                "of": {
                    name: {"dtype": info.dtype, "shape": list(info.shape)}
                    for name, info in sources.items()
                    if name in used
                },
            },
            *([{"alias": ties}] if ties else ()),
        ],
        "rules": [*composer.rules, {"match": "*", "place": ["replicate"]}],
        "captured": {
            "engine": dict(engine or _versions(made)),
            "model": _class_name(made),
            "config": _json(getattr(made, "config", None) if config is None else config),
            "rank": number,
            "ranks": count,
            "tensors": {n: _described(t) for n, t in tensors.items()},
            "ties": ties,
            "kept": composer.kept,
            "unused": [name for name in sources if name not in used],
        },
    }
    return CapturedLayout(document)


class CapturedLayout:
    """A layout that `capture` recorded, of one rank, and of which engine and model it is.

    Args:
        document: a layout document with the section `captured`.

    Raises:
        LayoutError: it is no such document, or contradicts itself.
        UpgradeNeeded: the document has a newer version.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        model = validate(document)
        self._captured = _checked(model)
        self._steps = [step for step in model.view if isinstance(step, Compose)]
        self._document = dict(document)
        self.layout = Layout.parse(document)

    @classmethod
    def open(cls, path: str | PathLike[str]) -> CapturedLayout:
        """Read a document that `save` wrote; this executes nothing.

        Raises:
            LayoutError: it is no such document, or contradicts itself.
        """
        model = read_document(Path(path))
        return cls(model.model_dump(by_alias=True, exclude_defaults=True, mode="json"))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the document, a layout file in JSON."""
        Path(path).write_text(json.dumps(self._document), encoding="utf-8")

    @property
    def document(self) -> dict[str, Any]:
        """The document, as JSON values."""
        return json.loads(json.dumps(self._document))  # type: ignore[no-any-return]

    @property
    def kept(self) -> tuple[str, ...]:
        """The buffers that the loader does not fill, and a load does not either."""
        return tuple(self._captured.kept)

    @property
    def unused(self) -> tuple[str, ...]:
        """The tensors of the checkpoint that the loader does not use."""
        return tuple(self._captured.unused)

    def plan(self, ref: str | PathLike[str] | Checkpoint) -> ReadPlan:
        """Plan what is read of a checkpoint, and how many bytes that is; reads no tensor.

        Raises:
            LayoutError: the checkpoint lacks a tensor, or has another dtype or shape of it.
        """
        ck = ref if isinstance(ref, Checkpoint) else open_reference(ref)
        stored = {key.state for key in ck.tensors}
        state = next((s for s in PARAMETER if s in stored), "weight")
        return ck.plan(self.layout, 0, state)

    def check(
        self,
        model: torch.nn.Module,
        *,
        config: object = None,
        engine: Mapping[str, str] | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        """Check that the engine, model, configuration, rank and tensors are those that were captured.

        The arguments are those of `capture`.

        Raises:
            StateMismatch: something has changed; the message names it.
        """
        captured = self._captured
        differences = [
            f"{package} is {now or 'not installed'}, and was {before}"
            for package, before in captured.engine.items()
            if (now := (engine or {}).get(package) or _version(package)) != before
        ]
        if _class_name(model) != captured.model:
            differences.append(f"the model is {_class_name(model)}, and was {captured.model}")
        now = _json(getattr(model, "config", None) if config is None else config)
        differences += _differences("config", captured.config, now)
        number, count = _position(rank, ranks)
        if (number, count) != (captured.rank, captured.ranks):
            differences.append(
                f"this is rank {number} of {count}, and was {captured.rank} of {captured.ranks}"
            )
        before = {n: {"dtype": t.dtype, "shape": t.shape} for n, t in captured.tensors.items()}
        tensors = _tensors(model)
        differences += _differences(
            "the model", before, {n: _described(t) for n, t in tensors.items()}
        )
        differences += [
            f"{name} is on the meta device, and the loader does not fill it"
            for name in captured.kept
            if name in tensors and tensors[name].is_meta and tensors[name].numel()
        ]
        if differences:
            raise StateMismatch(
                "the layout was captured of something else; nothing was changed:\n  "
                + "\n  ".join(first_lines(differences, _MOST)),
                hint="capture the loader anew",
            )

    @staticmethod
    def check_ranks(layouts: Iterable[CapturedLayout]) -> None:
        """Check that the layouts of all ranks read together all that any of them reads a part of.

        A loader that takes the wrong part of a tensor gives each parameter the right shape.

        Raises:
            StateMismatch: a rank is missing, the ranks are not of one model and engine, or no rank
                reads some elements of a tensor that others read.
        """
        listed = sorted(layouts, key=lambda layout: layout._captured.rank)  # noqa: SLF001
        if not listed or [c._captured.rank for c in listed] != [*range(listed[0]._captured.ranks)]:  # noqa: SLF001
            raise StateMismatch("these are not the layouts of all ranks")
        left: dict[str, list[Box]] = {}
        for layout in listed:
            captured, first = layout._captured, listed[0]._captured  # noqa: SLF001
            same = ("engine", "model", "config", "ranks")
            if any(getattr(captured, field) != getattr(first, field) for field in same):
                raise StateMismatch(f"rank {captured.rank} was captured of something else")
            for step in layout._steps:  # noqa: SLF001
                for part in (p for t in step.compose.values() for p in t.parts):
                    shape = tuple(step.of[part.from_].shape)
                    start = part.start or [0] * len(shape)
                    box = Box(tuple(start), tuple(part.size or shape))
                    rest = left.setdefault(part.from_, [Box.whole(shape)])
                    left[part.from_] = [piece for old in rest for piece in _outside(old, box)]
        for name, boxes_left in left.items():
            if boxes_left:
                raise StateMismatch(
                    f"no rank reads {boxes_left[0]} of {name}",
                    hint="the loader takes the wrong part, or these are not the ranks of one model",
                )

    def load(
        self,
        model: torch.nn.Module,
        ref: str | PathLike[str] | Checkpoint,
        *,
        config: object = None,
        engine: Mapping[str, str] | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        device: str | torch.device = "cpu",
        **arguments: Unpack[ReadArguments],
    ) -> None:
        """Fill a model with its bytes of a checkpoint, as the engine's loader would; reads no others.

        Args:
            model: as the engine makes it before it loads; parameters may be on the meta device.
            ref: a checkpoint with the tensors that were captured, in their dtypes and shapes, of
                any kind; `Checkpoint.view` gives it other names or dtypes.
            config: as for `capture`, and so are `engine`, `rank` and `ranks`.
            engine: see there.
            rank: see there.
            ranks: see there.
            device: on which parameters of the meta device get memory.
            arguments: `verify` and `threads` of `ReadArguments`.

        Raises:
            StateMismatch: the engine, model, configuration, rank or a tensor has changed.
            LayoutError: the checkpoint lacks a tensor, or has another dtype or shape of it.
            ChecksumError: a chunk does not match its checksum; the contents of the model are
                undefined.
        """
        check_keywords("load", arguments, ReadArguments)
        self.check(model, config=config, engine=engine, rank=rank, ranks=ranks)
        load_into(model, ref, layout=self.layout, rank=0, strict=False, device=device, **arguments)


class _Composer:
    """The tensors of a model, as a step `compose` says them."""

    def __init__(self, recorder: Recorder, sources: Mapping[str, TensorInfo]) -> None:
        self._recorder, self._sources = recorder, sources
        self.tensors: dict[str, dict[str, Any]] = {}
        self.rules: list[dict[str, Any]] = []
        self.kept: list[str] = []

    def add(self, name: str, tensor: torch.Tensor, *, parameter: bool) -> None:
        """Add a parameter or buffer."""
        try:
            contents = self._recorder.contents(tensor)
        except NotBoxes as error:
            raise UnsupportedError(f"{name}: {error.message}") from error
        if not any(isinstance(c.source, str) for c in contents):
            if parameter and tensor.numel():
                raise StateMismatch(
                    f"the loader does not fill {name} from the checkpoint{_by(contents)}",
                    hint="make it a buffer, or give the checkpoint that the loader expects",
                )
            self.kept.append(name)
            return
        if foreign := [c for c in contents if isinstance(c.source, Foreign)]:
            raise UnsupportedError(
                f"the loader does not fill all of {name} from the checkpoint{_by(foreign)}"
            )
        if replaced := self._recorder.replaced(tensor):
            raise UnsupportedError(
                f"the loader fills elements of {name} more than once, with those of "
                f"{first_names(replaced, 3)} first"
            )
        shape = tuple(tensor.shape)
        parts: list[tuple[Content, BoxPair]] = []
        zeros: list[BoxPair] = []
        for content in contents:
            if isinstance(content.source, Constant):
                if content.source.value != 0:
                    raise UnsupportedError(
                        f"the loader sets elements of {name} to {content.source.value}",
                        hint="only zeros, for padding, are captured",
                    )
                zeros += self._boxes(name, _in_place(content.move), shape, shape)
            else:
                source = self._sources[str(content.source)]
                pairs = self._boxes(name, content.move, shape, source.shape)
                parts += [(content, pair) for pair in pairs]
        self._prove(name, tensor, parts, zeros)
        stored = self._unpadded(name, shape, [p.target for _, p in parts]) if zeros else shape
        casts = self._casts(name, [c for c, _ in parts], dtype_name(tensor.dtype))
        self.tensors[name] = {
            "shape": list(stored),
            "parts": [
                self._part(content, pair, cast, stored)
                for (content, pair), cast in zip(parts, casts, strict=True)
            ],
        }

    def _boxes(
        self, name: str, move: Move, target: tuple[int, ...], source: tuple[int, ...]
    ) -> list[BoxPair]:
        try:
            return boxes(move, target, source)
        except NotBoxes as error:
            raise UnsupportedError(
                f"{name}: {error.message}", hint="load this model by its engine"
            ) from error

    def _prove(
        self,
        name: str,
        tensor: torch.Tensor,
        parts: list[tuple[Content, BoxPair]],
        zeros: list[BoxPair],
    ) -> None:
        """Check that every element is filled, and once."""
        info = TensorInfo(name, "weight", dtype_name(tensor.dtype), tuple(tensor.shape))
        targets = [(str(c.source), p.target) for c, p in parts]
        targets += [("zeros", p.target) for p in zeros]
        try:
            prove(info, targets)
        except CoverageError as error:
            raise StateMismatch(
                f"the loader does not fill {name} exactly once: {error.message}"
            ) from error
        if sum(box.size for _, box in targets) != info.size:
            raise UnsupportedError(f"the loader fills elements of {name} more than once")

    def _unpadded(self, name: str, shape: tuple[int, ...], filled: list[Box]) -> tuple[int, ...]:
        """The shape without zeros at the end of a dim, which a rule pads again."""
        around = bounding_box(filled)
        assert around is not None  # noqa: S101 - it has elements of the checkpoint
        shorter = [d for d, (n, m) in enumerate(zip(around.shape, shape, strict=True)) if n < m]
        if any(around.start) or len(shorter) != 1 or sum(b.size for b in filled) != around.size:
            raise UnsupportedError(
                f"the loader sets elements of {name} to 0",
                hint="only zeros at the end of one dim, for padding, are captured",
            )
        pad = {"shard": shorter[0], "over": "rank", "pad_to": shape[shorter[0]]}
        self.rules.append({"match": f"/{_escaped(name)}/", "place": [pad]})
        return around.shape

    def _casts(self, name: str, contents: list[Content], dtype: str) -> list[str | None]:
        """The cast of each part, after which it is converted to the dtype of the model."""
        chains = [_chain(self._sources[str(c.source)].dtype, c.casts) for c in contents]
        dtypes = [chain[-2] if len(chain) > 2 else chain[0] for chain in chains]
        if len(set(dtypes)) > 1:  # of a concatenation: all become the dtype of the model
            chains = [
                [*chain, dtype] if len(chain) == 2 and chain[0] != dtype else chain
                for chain in chains
            ]
            dtypes = [chain[-2] if len(chain) > 2 else chain[0] for chain in chains]
        for content, chain in zip(contents, chains, strict=True):
            if len(chain) > 3 or len(set(dtypes)) > 1 or not set(chain[1:-1]) <= CASTABLE:
                raise UnsupportedError(
                    f"the loader converts {content.source} to {', '.join(chain[1:])} for {name}",
                    hint="one conversion before that to the dtype of the model is captured",
                )
        return [chain[1] if len(chain) == 3 else None for chain in chains]

    def _part(
        self, content: Content, pair: BoxPair, cast: str | None, target: tuple[int, ...]
    ) -> dict[str, Any]:
        source = self._sources[str(content.source)].shape
        part: dict[str, Any] = {"from": content.source}
        if any(pair.box.start):
            part["start"] = list(pair.box.start)
        if pair.box.shape != source:
            part["size"] = list(pair.box.shape)
        if any(pair.target.start):
            part["at"] = list(pair.target.start)
        if _axes(pair) != tuple(range(len(source))) or len(source) != len(target):
            part["axes"] = list(_axes(pair))
        if cast is not None:
            part["cast"] = cast
        return part


def _axes(pair: BoxPair) -> tuple[int | None, ...]:
    """The axes of a pair; where dims have size 1, the same dims if that is possible."""
    named = set(pair.axes)
    return tuple(
        d
        if a is None
        and d not in named
        and d < len(pair.box.shape)
        and len(pair.axes) == len(pair.box.shape)
        else a
        for d, a in enumerate(pair.axes)
    )


def _in_place(move: Move) -> Move:
    """The move of elements to where they are."""
    return replace(
        move, strides=(move.strides[0], move.strides[0]), offsets=(move.offsets[0], move.offsets[0])
    )


def _by(contents: list[Content]) -> str:
    """What filled it instead."""
    others = dict.fromkeys(c.source.operation for c in contents if isinstance(c.source, Foreign))
    return f", but by {first_names(list(others), 3)}" if others else ""


def _chain(dtype: str, casts: tuple[str, ...]) -> list[str]:
    """The dtypes to which values are converted, without those that change nothing."""
    chain = [dtype]
    for cast in casts:
        while len(chain) > 1 and (chain[-2], chain[-1]) in _EXACT:
            chain.pop()
        if cast != chain[-1]:
            chain.append(cast)
    return chain


def _escaped(name: str) -> str:
    """A name as a regular expression."""
    return "".join(c if c.isalnum() or c == "_" else f"\\{c}" for c in name)


def _checked(model: LayoutDocument) -> CapturedDoc:
    """The section `captured` of a document that is complete."""
    captured = model.captured
    if captured is None:
        raise LayoutError(
            "the layout was not captured: it has no section `captured`",
            hint="use it as it is: load_into(model, ref, layout=…)",
        )
    composed = {n for step in model.view if isinstance(step, Compose) for n in step.compose}
    filled = composed | set(captured.ties) | set(captured.kept)
    if filled != set(captured.tensors):
        names = sorted(filled ^ set(captured.tensors))
        raise LayoutError(f"the captured layout contradicts itself about {first_names(names, 3)}")
    return captured


def _outside(box: Box, other: Box) -> Iterator[Box]:
    """The parts of a box that are not in another one."""
    common = box.intersect(other)
    if common is None:
        yield box
        return
    start, shape = list(box.start), list(box.shape)
    for d, (low, high) in enumerate(zip(common.start, common.stop, strict=True)):
        for first, last in ((start[d], low), (high, start[d] + shape[d])):
            if first < last:
                yield Box(
                    (*start[:d], first, *start[d + 1 :]),
                    (*shape[:d], last - first, *shape[d + 1 :]),
                )
        start[d], shape[d] = low, high - low


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a model, those of DTensors refused."""
    out: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or is_dtensor(value):
            raise UnsupportedError(
                f"{name} is a {type(value).__name__}, whose part of a rank is not captured",
                hint="`load_into` reads the parts of DTensors without a layout",
            )
        out[name] = value
    return out


def _described(tensor: torch.Tensor) -> dict[str, Any]:
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}


def _class_name(model: torch.nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _versions(model: torch.nn.Module) -> dict[str, str]:
    """The versions of the packages that define a model, but PyTorch."""
    packages = {c.__module__.partition(".")[0] for c in type(model).__mro__} - {"torch", "builtins"}
    distributions = packages_distributions()
    names = sorted({name for package in packages for name in distributions.get(package, ())})
    if not names:
        raise UsageError(
            f"{_class_name(model)} is of no installed package, so its version is not known",
            hint="give it one: engine={'name': 'version'}",
        )
    return {name: version(name) for name in names}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _position(rank: int | None, ranks: int | None) -> tuple[int, int]:
    """The rank, and how many there are."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    number = rank if rank is not None else torch.distributed.get_rank() if distributed else 0
    count = ranks if ranks is not None else torch.distributed.get_world_size() if distributed else 1
    if not 0 <= number < count:
        raise UsageError(f"there is no rank {number} of {count}", hint="pass both rank= and ranks=")
    return number, count


def _json(config: object) -> Any:
    """A configuration as JSON values, without circumstances."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    elif is_dataclass(config) and not isinstance(config, type):
        config = asdict(config)
    try:
        return _lasting(json.loads(json.dumps(config)))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the configuration is not JSON: {error}",
            hint="pass what the loader depends on: config={…}",
        ) from error


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            k: _lasting(v)
            for k, v in value.items()
            if k not in _CIRCUMSTANCES and not k.startswith("_")
        }
    return [_lasting(v) for v in value] if isinstance(value, list) else value


def _differences(label: str, before: Any, now: Any) -> list[str]:
    """How two JSON values differ."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return [] if before == now else [f"{label}: {now!r}, and was {before!r}"]
    out: list[str] = []
    for key in dict.fromkeys((*before, *now)):
        if key not in before or key not in now:
            out.append(f"{label}: {key} is {'new' if key in now else 'missing'}")
        else:
            out += _differences(f"{label}.{key}", before[key], now[key])
    return out
