"""Which states are encoded with loss, and how, as callers say it: by patterns of names of states.

Weights never are: a pattern that would fit them is refused, whatever the checkpoint has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from ucformat.format.lossy import Quantized
    from ucformat.geometry.tensor import TensorInfo

__all__ = [
    "Loss",
    "LossyCodec",
    "bound_of",
    "check_encode",
    "check_fits",
    "larger",
    "larger_losses",
    "largest",
    "lossy_codec",
    "packed_losses",
    "unpacked_loss",
]

#: The states of parameters, which are never encoded with loss.
_EXACT = ("weight", "master")
_DTYPES = ("float32", "float16", "bfloat16")
_ADAPTIVE = re.compile("adaptive:([1-9][0-9]{0,8})")
_WIDE_ROW = 512  # elements: longer rows are cut into blocks
_CODECS = (
    '"int8-blockwise"; or "adaptive:N", where N is how often the training will be restored, about'
)


@dataclass(frozen=True, slots=True)
class LossyCodec:
    """An encoding with loss.

    Attributes:
        width: the bits of a code of the adaptive one.
    """

    width: int | None = None

    @classmethod
    def parse(cls, text: str) -> LossyCodec:
        """The encoding that a text names.

        Raises:
            UsageError: there is no such encoding.
        """
        if text == "int8-blockwise":
            return cls()
        if (match := _ADAPTIVE.fullmatch(text)) is None:
            raise UsageError(f"{text!r} is no encoding with loss", hint=_CODECS)
        from ucformat.format.lossy import width_for_restores

        return cls(width_for_restores(int(match[1])))

    @property
    def name(self) -> str:
        """Its name in manifests."""
        return "int8-blockwise" if self.width is None else f"adaptive-{self.width}bit"

    def quantize(self, elements: NDArray[Any]) -> Quantized | None:
        """Encode the elements of a tile; None if it is to be stored as it is.

        So are tiles that would not be smaller or not be changed, and those with infinities or NaNs.
        """
        from ucformat.format.lossy import quantize_adaptive, quantize_int8

        try:
            if self.width is None:
                quantized = quantize_int8(elements)
            else:
                row = elements.shape[-1]
                block = row if 1 < row <= _WIDE_ROW else 256
                quantized = quantize_adaptive(elements, self.width, block)
        except UnsupportedError:
            return None
        is_smaller = len(quantized.payload) < elements.nbytes
        return quantized if is_smaller and not quantized.is_exact(elements) else None


def check_encode(encode: Mapping[str, str]) -> None:
    """Check patterns of states, and the encodings.

    Raises:
        UsageError: there is no such encoding, or a pattern fits weights.
    """
    for pattern, text in encode.items():
        LossyCodec.parse(text)
        for state in _EXACT:
            if fnmatchcase(state, pattern):
                raise UsageError(
                    f"{pattern!r} in encode fits the state {state}, which is never encoded with loss",
                    hint='name the states of the optimizer: encode={"exp_avg*": "int8-blockwise"}; '
                    'codec="blosc" compresses weights without loss',
                )


def check_fits(encode: Mapping[str, str], states: Iterable[str]) -> None:
    """Check that each pattern fits a state, unless there are none but weights, as before the first step.

    Raises:
        UsageError: a pattern fits none.
    """
    others = sorted({*states} - {*_EXACT})
    for pattern in encode:
        if others and not any(fnmatchcase(state, pattern) for state in others):
            raise UsageError(
                f"no state fits {pattern!r} in encode", hint=f"there are {', '.join(others)}"
            )


def lossy_codec(encode: Mapping[str, str], info: TensorInfo) -> LossyCodec | None:
    """The encoding of a tensor; None for scalars, such as `step`, and for other than 16 or 32 bit floats.

    Raises:
        UsageError: two patterns with different encodings fit its state.
    """
    texts = {text for pattern, text in encode.items() if fnmatchcase(info.state, pattern)}
    if len(texts) > 1:
        raise UsageError(
            f"several patterns in encode fit {info.state}, with different encodings",
            hint="give one pattern for it",
        )
    if not texts or info.state in _EXACT or not info.shape or info.dtype not in _DTYPES:
        return None
    return LossyCodec.parse(texts.pop())


# Errors


#: The largest absolute error, and the largest one relative to an element that is not zero.
Loss = tuple[float, float]


def larger(a: Loss, b: Loss) -> Loss:
    """The largest errors of both."""
    return max(a[0], b[0]), max(a[1], b[1])


def bound_of(loss: Loss) -> Loss:
    """The bound that a manifest records: the largest errors, rounded up to three digits."""
    upwards = Context(prec=3, rounding=ROUND_CEILING)
    absolute, relative = (float(upwards.create_decimal_from_float(error)) for error in loss)
    return absolute, relative


def packed_losses(by_item: Iterable[tuple[int, Loss]], count: int) -> bytes:
    """The largest errors by number, each 16 bytes: two integers in the order of the errors; 0 if there is no loss."""
    largest = np.zeros((count, 2), "<u8")
    for item, loss in by_item:
        largest[item] = np.maximum(largest[item], np.array(loss).view("<u8") + 1)
    return largest.tobytes()


def larger_losses(a: bytes, b: bytes) -> bytes:
    """The larger errors of both, each as `packed_losses` has them."""
    joined: bytes = np.maximum(np.frombuffer(a, "<u8"), np.frombuffer(b, "<u8")).tobytes()
    return joined


def largest(numbers: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The largest errors of several, each as two integers of `packed_losses`."""
    absolute, relative = zip(*numbers, strict=True)
    return max(absolute), max(relative)


def unpacked_loss(numbers: tuple[int, int]) -> Loss | None:
    """The errors of one number in `packed_losses`; None if there is no loss."""
    if not any(numbers):
        return None
    absolute, relative = (np.array(numbers, "<u8") - 1).view("<f8").tolist()
    return absolute, relative
