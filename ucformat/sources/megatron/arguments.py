"""The model's sizes and the parallel degrees: from a checkpoint's own arguments (`args`) and the caller's options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError
from ucformat.sources.base import PickleOptions, option
from ucformat.sources.pickle.stand_ins import Inert

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.geometry.layout import Layout

_MAX_RANKS = 1 << 20
_VOCABULARY = ("word_embeddings.weight", "output_layer.weight", "lm_head.weight", "output_layer.bias", "lm_head.bias")


@dataclass(frozen=True, slots=True)
class Arguments:
    """`args` of a checkpoint; every value is None if the checkpoint has none."""

    values: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None  # as the caller gave it
    file: str = ""

    @classmethod
    def of(cls, value: Any, vocab_size: int | None, file: str) -> Arguments:
        """Parse `args`.

        Args:
            value: the value in the file: a namespace, or a mapping; any other value is empty.
            vocab_size: the caller's rows of the vocabulary without padding; None if not given.
        """
        if isinstance(value, Inert):
            value = value.state
        found = {k: v for k, v in value.items() if isinstance(k, str)} if isinstance(value, dict) else {}
        return cls(found, vocab_size, file)

    def number(self, *names: str) -> int | None:
        """The first of these arguments that is an integer; None if there is none."""
        for name in names:
            value = self.values.get(name)
            if value is None or isinstance(value, bool) or not isinstance(value, int):
                continue
            if not 0 <= value <= _MAX_RANKS * 1024:
                raise IntegrityError(f"{self.file}: {name} is {value}")
            return value
        return None

    def degree(self, *names: str) -> int | None:
        """The first of these arguments that is an integer, a number of ranks; None if there is none."""
        value = self.number(*names)
        if value is not None and not 1 <= value <= _MAX_RANKS:
            raise IntegrityError(f"{self.file}: {names[0]} is {value}")
        return value

    def flag(self, *names: str) -> bool | None:
        """The first of these arguments that is a boolean; None if there is none."""
        return next((v for name in names if isinstance(v := self.values.get(name), bool)), None)

    @property
    def tied(self) -> bool | None:
        """Whether the output layer is the input embedding."""
        untied = self.flag("untie_embeddings_and_output_weights")
        return self.flag("share_embeddings_and_output_weights") if untied is None else not untied

    def rows(self, name: str, stored: int) -> int:
        """The rows of a vocabulary table without padding; `stored` if they are unknown, and for other parameters."""
        if not any(name == v or name.endswith("." + v) for v in _VOCABULARY):
            return stored
        rows_kept = self.vocab_size
        if rows_kept is None:
            size, unit = self.number("vocab_size"), self.number("make_vocab_size_divisible_by")
            padded = self.number("padded_vocab_size")
            if padded is None and size and unit:
                unit *= self.degree("tensor_model_parallel_size") or 1
                padded = -(-size // unit) * unit
            rows_kept = size if padded == stored else None  # otherwise the purpose of the other rows is unknown
        return rows_kept if rows_kept is not None and 0 < rows_kept < stored else stored


@dataclass(frozen=True, kw_only=True)
class MegatronOptions(PickleOptions):
    """The options of `Megatron`."""

    stacked: bool = option(
        default=False,
        how="flag",
        text="of a distributed checkpoint, show the stacked tensors of all layers under their keys, as stored",
    )
    vocab_size: int | None = option(
        None, "number", "rows of the vocabulary without its padding, if the checkpoint does not record it"
    )
    optimizer: bool = option(
        default=True,
        how="flag",
        text="whether to read the optimizer's states; false if their parameters cannot be determined",
    )
    layout: Layout | None = option(  # noqa: RUF009 - it makes a field
        None,
        "layout",
        "of a classic checkpoint, how parameters are sharded over tensor-parallel ranks if Megatron's own names do "
        "not determine it: rules over the axis `tp`",
    )
    cuts: Mapping[str, str | int] | None = option(
        None,
        "cuts",
        "the same for the parameters that a pattern matches: `replicate`, `halves` (two tensors, one after the other, "
        "each sharded), or the dim along which parts are joined; it takes precedence over `layout`",
    )
