"""`universal_checkpoint_info`: how a checkpoint describes the sharding of its parameters across tensor-parallel ranks.

Megatron-DeepSpeed's models write it into the client state, AutoTP into the model states; its
versions are 0.2, 0.3 and 0.4. It lists patterns of names by how the parts are merged. The
precedence is DeepSpeed's: an affine map first, then replicated, averaged, two sub-parameters,
sub-parameters, row parallelism (joined along dim 1); any other parameter is joined along dim 0. The
vocabulary's padding is cut off after that.

DeepSpeed applies its patterns with `re.match`, so a pattern need only match the beginning of a
name. Those that AutoTP writes are exact names (`^name$`, escaped); they are looked up. An expert's
are those that its rank calls so; here an expert is sharded as the first of its layer, as all are.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ucformat.engines.deepspeed.experts import of_first_expert
from ucformat.errors import (
    IntegrityError,
    LayoutError,
    UnsupportedError,
    UpgradeNeeded,
    option_text,
)
from ucformat.geometry.coverage import prove
from ucformat.geometry.local import strided_regions
from ucformat.geometry.patterns import Pattern, compile_pattern
from ucformat.geometry.placement import Shard
from ucformat.geometry.tensor import TensorInfo
from ucformat.geometry.tp_sharding import (
    TP,
    Shapes,
    TPSharding,
    concatenate,
    mean,
    replicate,
    shard,
    sub_params,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ucformat.geometry.view import BoxPair

Value = TypeVar("Value")


class Patterns(Generic[Value]):
    """Patterns with values; a name gets the value of the first pattern that matches."""

    def __init__(self, pairs: Iterable[tuple[Any, Value]], label: str) -> None:
        self._exact: dict[str, tuple[str, Value]] = {}
        self._others: list[tuple[Pattern, str, Value]] = []
        for pattern, value in pairs:
            if not isinstance(pattern, str):
                raise IntegrityError(
                    f"{label} has a pattern that is not a string ({type(pattern).__name__})"
                )
            name = _literal(pattern)
            if name is not None:
                self._exact.setdefault(name, (pattern, value))
            else:
                self._others.append((_compiled(pattern, label), pattern, value))

    def __bool__(self) -> bool:
        return bool(self._exact or self._others)

    def find(self, name: str) -> tuple[str, Value] | None:
        """The first pattern that matches a name, and its value; None if no pattern matches."""
        if name in self._exact:
            return self._exact[name]
        try:
            matching = ((p, value) for regex, p, value in self._others if regex.match(name))
            return next(matching, None)
        except LayoutError as error:
            raise UnsupportedError(
                error.message, hint=f"specify how the tensors are cut: {option_text('layout')}"
            ) from error


def is_exact(pattern: str) -> bool:
    """Whether a pattern matches exactly one name, as those that AutoTP writes."""
    return _literal(pattern) is not None


def _literal(pattern: str) -> str | None:
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    name = re.sub(r"\\(.)", r"\1", pattern[1:-1])
    return name if re.escape(name) == pattern[1:-1] else None


def _compiled(pattern: str, label: str) -> Pattern:
    try:
        return compile_pattern(pattern)
    except LayoutError as error:
        if error.__cause__ is not None:
            raise IntegrityError(f"{label} has an invalid pattern: {error.message}") from error
        raise UnsupportedError(
            f"of the patterns of {label}, {error.message}",
            hint=f"specify how the tensors are cut instead: {option_text('layout')}",
        ) from error


_KEY = "universal_checkpoint_info"
_LISTS: dict[str, Callable[[Shapes], TPSharding]] = {
    "tp_replicated_parameter_patterns": replicate,
    "parameter_to_average_patterns": mean,
    "parameter_with_2_sub_params_cat_dim_0": lambda s: shard(s, Shard(0, TP, parts=(1, 1))),
}
_ROW = "parameter_with_row_parallelism_patterns"
_SUB = "parameter_with_sub_params"
_AFFINE_NEWEST = 1
_PIECES = 4096


class TensorParallelInfo:
    """The `universal_checkpoint_info` of one checkpoint, its patterns compiled."""

    def __init__(self, value: Any, file: str, padded: int | None) -> None:
        self._value: dict[str, Any] = value if isinstance(value, dict) else {}
        self._where = f"{_KEY} in {file}"
        version = self._value.get("universal_checkpoint_version", 0.2)
        self.version = version if isinstance(version, int | float) else 0.2
        self._padded = padded
        self._lists = {key: self._patterns(key) for key in (*_LISTS, _ROW)}
        self._vocabulary = self._patterns("vocabulary_parameter_patterns")
        self.pipeline = self._patterns("pipeline_replicated_parameter_patterns")
        self._unsupported = self._mapping("autotp_unsupported_parameter_patterns")
        self._sub = Patterns(self._sub_params(), self._where)
        affine = self._value.get("affine_map") or {}
        if not isinstance(affine, dict) or not isinstance(affine.get("version", 1), int):
            raise IntegrityError(f"{self._where} has no usable affine map")
        if affine.get("version", 1) > _AFFINE_NEWEST:
            raise UpgradeNeeded(
                f"{self._where} has an affine map of version {affine['version']}; the newest "
                f"known is {_AFFINE_NEWEST}",
                hint=(
                    f"specify how the tensors are cut: {option_text('layout')}, or use a newer "
                    "ucformat"
                ),
            )
        self._affine = self._mapping("params", affine)

    def __bool__(self) -> bool:
        """Whether it describes how any parameters are sharded."""
        return any((*self._lists.values(), self._sub, self._affine))

    def sharding(self, name: str, shapes: Shapes) -> TPSharding | None:
        """How a parameter is sharded; None if the checkpoint does not describe any parameter."""
        if len(shapes) == 1:
            return self.strip(name, replicate(shapes))
        return self.strip(name, self._find(of_first_expert(name), shapes)) if self else None

    def is_default(self, name: str) -> bool:
        """Whether no pattern matches a parameter, so that it is joined along dim 0."""
        other_patterns = (self._sub, self._affine, self._unsupported)
        every: tuple[Patterns[Any], ...] = (*self._lists.values(), *other_patterns)
        name = of_first_expert(name)
        return not any(patterns.find(name) for patterns in every)

    def is_replicated(self, name: str) -> bool:
        """Whether a pattern declares a parameter replicated."""
        replicated = self._lists["tp_replicated_parameter_patterns"]
        return replicated.find(of_first_expert(name)) is not None

    def is_vocabulary(self, name: str) -> bool:
        """Whether a parameter is a vocabulary table."""
        return self._vocabulary.find(name) is not None

    def _find(self, name: str, shapes: Shapes) -> TPSharding:
        if hit := self._affine.find(name):
            return affine_sharding(hit[1], shapes).because("its affine map")
        if hit := self._unsupported.find(name):
            raise LayoutError(f"AutoTP marks it as cut in a way that it cannot describe ({hit[1]})")
        for key, make in _LISTS.items():
            if self._lists[key].find(name):
                return make(shapes).because(key)
        if hit := self._sub.find(name):
            return self._sub_param(hit[0], hit[1], shapes).because(_SUB)
        if not shapes[0]:
            raise LayoutError(
                f"it has no dims to be joined along, and no pattern of {_KEY} marks it as "
                "replicated"
            )
        if self._lists[_ROW].find(name):
            return concatenate(shapes, 1).because(_ROW)
        return concatenate(shapes, 0).because("no pattern, which means dim 0")

    def _sub_param(self, pattern: str, entry: dict[str, Any], shapes: Shapes) -> TPSharding:
        view: Any = entry.get("shape")
        dim = entry.get("partition_dim")
        sizes = isinstance(view, list | tuple) and all(_is_size(n) or _is_sizes(n) for n in view)
        if not sizes or not isinstance(dim, int) or not 0 <= dim < len(view):
            raise LayoutError(f"{_SUB} has no usable shape and partition_dim")
        ranks, parts = len(shapes), view[dim]
        recorded = (self._value.get("sub_param_shard_widths") or {}).get(pattern)
        if recorded is not None:
            if not isinstance(recorded, list | tuple) or not all(_is_sizes(w) for w in recorded):
                raise LayoutError("sub_param_shard_widths are not lists of numbers")
            return sub_params(shapes, view, dim, recorded)
        if isinstance(parts, int) and (self.version >= 0.3 or is_exact(pattern)):
            parts = _count(parts, dim, shapes)
        parts = [parts] if isinstance(parts, int) else list(parts)
        uneven = [n for n in parts if n % ranks]
        if uneven:
            raise LayoutError(
                f"its sub-parameters {parts} cannot be sharded evenly across {ranks} ranks, and "
                "no widths are recorded"
            )
        return sub_params(shapes, view, dim, [[n // ranks] * ranks for n in parts])

    def strip(self, name: str, sharding: TPSharding) -> TPSharding:
        """The sharding without the padding of a vocabulary; AutoTP's exact names have none."""
        hit = self._vocabulary.find(name)
        rows = self._value.get("original_vocab_size")
        padded = hit is not None and not is_exact(hit[0]) and bool(sharding.shape)
        if not padded or not isinstance(rows, int) or rows < 1:
            return sharding
        if self._padded and sharding.shape[0] != self._padded:
            if sharding.shape[0] > rows:
                raise LayoutError(
                    f"it has {sharding.shape[0]} rows, but the padded vocabulary {self._padded} "
                    f"and the original {rows}"
                )
            return sharding
        return sharding.strip(rows)

    def _patterns(self, key: str) -> Patterns[None]:
        value = self._value.get(key) or []
        if not isinstance(value, list | tuple):
            raise IntegrityError(
                f"{self._where} has a {type(value).__name__} as {key}, instead of a list"
            )
        return Patterns(((pattern, None) for pattern in value), self._where)

    def _mapping(self, key: str, source: Mapping[str, Any] | None = None) -> Patterns[Any]:
        value = (self._value if source is None else source).get(key) or {}
        if not isinstance(value, dict):
            raise IntegrityError(
                f"{self._where} has a {type(value).__name__} as {key}, instead of a mapping"
            )
        return Patterns(value.items(), self._where)

    def _sub_params(self) -> list[tuple[Any, dict[str, Any]]]:
        entries = self._value.get(_SUB) or []
        entries = [_fields(e) for e in entries] if isinstance(entries, list | tuple) else [None]
        lists = (e.get("patterns") if isinstance(e, dict) else None for e in entries)
        if not all(isinstance(patterns, list | tuple) for patterns in lists):
            raise IntegrityError(f"{self._where} has no usable {_SUB}")
        return [(pattern, e) for e in entries for pattern in e["patterns"]]


def _fields(entry: Any) -> Any:
    """An entry as a mapping; some files hold DeepSpeed's `SubparamShape` itself."""
    return getattr(entry, "state", None) or entry


def _is_size(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and -1 <= n < 1 << 50


def _is_sizes(sizes: Any) -> bool:
    return isinstance(sizes, list | tuple) and all(_is_size(n) and n >= 0 for n in sizes)


def _count(count: int, dim: int, shapes: Shapes) -> list[int]:
    """The sizes of `count` equal sub-parameters, as a number meant before version 0.4."""
    total = sum(s[dim] if dim < len(s) else 0 for s in shapes)
    if count < 1 or total % count or count > total:
        raise LayoutError(f"{count} sub-parameters do not divide the {total} of its dim {dim}")
    return [total // count] * count


def affine_sharding(entry: Any, shapes: Shapes) -> TPSharding:
    """The sharding that an affine map describes."""
    try:
        shape = _sizes(entry["logical_shape"])
        ranks = {int(rank): described for rank, described in entry["ranks"].items()}
        if sorted(ranks) != list(range(len(shapes))):
            raise LayoutError(f"its affine map is for {len(ranks)} ranks, not for {len(shapes)}")
        regions: list[tuple[BoxPair, ...]] = []
        scales: set[float] = set()
        for rank, local in enumerate(shapes):
            parts: list[BoxPair] = []
            if _sizes(ranks[rank]["shard_shape"]) != local:
                raise LayoutError(
                    f"its affine map gives rank {rank} the shape {ranks[rank]['shard_shape']}, "
                    f"not {list(local)}"
                )
            if len(ranks[rank]["pieces"]) > _PIECES:
                raise UnsupportedError(f"an affine map has more than {_PIECES} pieces")
            for piece in ranks[rank]["pieces"]:
                source, target = ((int(o), _sizes(s)) for o, s in (piece["source"], piece["dest"]))
                parts += strided_regions(shape, local, _sizes(piece["shape"]), source, target)
                scales.add(float(piece.get("scale", 1.0)))
            info = TensorInfo("the part of a rank", "weight", "uint8", local)
            prove(info, enumerate(part.box for part in parts))
            regions.append(tuple(parts))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, LayoutError):
            raise
        raise LayoutError(f"its affine map is invalid ({type(error).__name__}: {error})") from error
    first = dict.fromkeys(part.target for parts in regions for part in parts)
    prove(TensorInfo("it", "weight", "uint8", shape), enumerate(first))
    factor = next(iter(scales)) if len(scales) == 1 else 0.0
    return replace(TPSharding(shape, tuple(regions)), scaled=scales != {1.0}, factor=factor)


def _sizes(values: Any) -> tuple[int, ...]:
    if not all(_is_size(n) for n in values):
        raise ValueError("a size is not a number")
    return tuple(values)
