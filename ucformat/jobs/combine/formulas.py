"""The formulas by which checkpoints are combined, on blocks of elements in float64.

They are functions of single elements: a block is any part of a tensor, and the results do not
depend on how a tensor is cut. What a formula has to know of whole tensors, such as norms, is a
parameter. Blocks are taken one after the other, so that only some of them are in memory.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.box import Box

    Block = NDArray[np.float64]

#: Cosines above which two tensors count as parallel, as in other implementations of slerp.
PARALLEL = 0.9995

# elements of a block to which products are added while they are in the processor's cache
_TILE = 1 << 15
_GAMMA, _MIX1, _MIX2 = (
    np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def average(blocks: Iterable[Block], weights: Sequence[float]) -> Block:
    """The weighted mean, `Σ wᵢ xᵢ / Σ wᵢ`, as `numpy.average` computes it.

    Args:
        blocks: the blocks x of the inputs, in order, which may be changed.
    """
    total = _weighted_sum(blocks, weights)
    total /= np.sum(weights)
    return total


def ema_weights(decay: float, count: int) -> list[float]:
    """The weights of an exponential moving average, oldest first.

    The average is e₀ = x₀, eₜ = d eₜ₋₁ + (1 - d) xₜ. So x₀ has the weight dⁿ⁻¹, and xₜ the weight
    (1 - d) dⁿ⁻¹⁻ᵗ. They add up to 1.
    """
    return [
        decay ** (count - 1),
        *((1 - decay) * decay ** (count - 1 - t) for t in range(1, count)),
    ]


def softmax_weights(scores: Sequence[float], temperature: float) -> list[float]:
    """The weights `exp(sᵢ / T) / Σ exp(sⱼ / T)`."""
    best = max(scores)
    powers = [math.exp((score - best) / temperature) for score in scores]
    total = math.fsum(powers)
    return [power / total for power in powers]


def task_arithmetic(
    base: Block, blocks: Iterable[Block], weights: Sequence[float], scale: float
) -> Block:
    """Task arithmetic, `b + λ Σ wᵢ (xᵢ - b)`: the base, and the sum of what each fine-tuning added to it.

    Ilharco et al., Editing Models with Task Arithmetic (ICLR 2023), arXiv:2212.04089. There, all w
    are 1.

    Args:
        blocks: the blocks x of the fine-tuned inputs, in order, which may be changed.
    """
    total = _weighted_sum((_minus(block, base) for block in blocks), weights)
    total *= scale
    total += base
    return total


def slerp_weights(dot: float, norms: tuple[float, float], t: float) -> tuple[float, float]:
    """The weights of two tensors in their spherical linear interpolation: `sin((1-t)θ) / sin θ` and `sin(tθ) / sin θ`.

    Shoemake, Animating Rotation with Quaternion Curves (SIGGRAPH 1985). θ is the angle between the
    flattened tensors, which keep their lengths. If that is undefined, because one of them is zero,
    or (nearly) 0 or π, because the cosine is above 0.9995 or below -0.9995, the interpolation is
    linear: `1 - t` and `t`.
    """
    cosine = dot / norms[0] / norms[1] if min(norms) > 0 else 1.0
    if abs(cosine) > PARALLEL:
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def slerp(blocks: Iterable[Block], weights: tuple[float, float]) -> Block:
    """The sum of two blocks with the weights of `slerp_weights`."""
    return _weighted_sum(blocks, weights)


def magnitudes(block: Block, base: Block) -> Block:
    """The magnitudes |x - b|."""
    return np.abs(_minus(block, base), out=block)


def ties(
    base: Block,
    blocks: Iterable[Block],
    thresholds: Sequence[float],
    weights: Sequence[float],
    scale: float,
) -> Block:
    """TIES: trim the differences from the base, elect a sign for each element, and take the mean of those that have it.

    Yadav et al., TIES-Merging: Resolving Interference When Merging Models (NeurIPS 2023),
    arXiv:2306.01708. With the trimmed differences τᵢ, which are zero where |xᵢ - b| is below the
    threshold, the sign is that of `Σ wᵢ τᵢ` (positive if the sum is zero), and the result is `b + λ
    Σ wᵢ τᵢ / Σ wᵢ` over the i whose τᵢ has this sign, or b if there are none. In the paper, all w
    are 1.

    Args:
        blocks: the blocks x of the fine-tuned inputs, in order, which may be changed.
        thresholds: for each of them, the least magnitude that is kept.
    """
    total, memory, kept = np.zeros_like(base), np.empty_like(base), []
    for block, threshold, weight in zip(blocks, thresholds, weights, strict=True):
        delta = _minus(block, base)
        if threshold:
            delta *= np.abs(delta, out=memory) >= threshold
        delta *= weight
        total += delta
        kept.append(delta)
    sign = np.where(total >= 0, 1.0, -1.0)
    mean, divisor = np.zeros_like(base), np.zeros_like(base)
    for delta, weight in zip(kept, weights, strict=True):
        delta *= sign  # noqa: PLW2901 - in place
        agrees = delta > 0
        mean += np.multiply(delta, agrees, out=delta)
        divisor += np.multiply(agrees, weight, out=memory)
    divisor[divisor == 0] = 1
    mean /= divisor
    mean *= sign
    mean *= scale
    mean += base
    return mean


def dare(
    base: Block,
    blocks: Iterable[Block],
    masks: Iterable[NDArray[np.bool_]],
    density: float,
    weights: Sequence[float],
    scale: float,
) -> Block:
    """DARE: drop random elements of the differences from the base, rescale the others, and add up: task arithmetic.

    Yu et al., Language Models are Super Mario: Absorbing Abilities from Homologous Models as a Free
    Lunch (ICML 2024), arXiv:2311.03099. The result is `b + λ Σ wᵢ mᵢ (xᵢ - b) / (1 - p)`, where the
    mask m is 0 with the probability p.

    Args:
        blocks: the blocks x of the fine-tuned inputs, in order, which may be changed.
    """

    def deltas() -> Iterator[Block]:
        for block, mask in zip(blocks, masks, strict=True):
            delta = _minus(block, base)
            delta *= mask
            delta /= density
            yield delta

    total = _weighted_sum(deltas(), weights)
    total *= scale
    total += base
    return total


def dare_masks(
    seed: int, name: str, inputs: int, shape: Sequence[int], box: Box, density: float
) -> Iterator[NDArray[np.bool_]]:
    """Which elements of a box of a tensor DARE keeps of each input, in C order.

    Element number i of the flattened tensor is kept if output i of a SplitMix64 generator (Steele,
    Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) is below the
    density. The generator starts from the first eight bytes, little-endian, of the SHA-256 of
    `{seed}/{number}/{name}`. So the mask depends on nothing else.

    Args:
        density: the share of elements to keep, at most 1.
    """
    steps: NDArray[Any] = np.zeros(1, np.uint64)
    for start, n, size in zip(box.start, box.shape, shape, strict=True):
        steps = (
            steps[:, None] * np.uint64(size) + np.arange(start, start + n, dtype=np.uint64)
        ).reshape(-1)
    steps += np.uint64(1)
    steps *= _GAMMA
    at, memory = np.empty_like(steps), np.empty_like(steps)
    for number in range(inputs):
        key = hashlib.sha256(f"{seed}/{number}/{name}".encode()).digest()[:8]
        np.add(steps, np.frombuffer(key, "<u8"), out=at)
        for shift, factor in ((30, _MIX1), (27, _MIX2), (31, None)):
            at ^= np.right_shift(at, np.uint64(shift), out=memory)
            if factor is not None:
                at *= factor
        # the upper 53 bits are a float from 0 to below 1, times 2 ** 53
        at >>= np.uint64(11)
        yield at < np.uint64(math.ceil(density * 2.0**53))


def low_rank(base: Block, a: Block, b: Block, scaling: float) -> Block:
    """LoRA, `W + s B A`: products are added rank by rank, so that the sums do not depend on the shape of the block.

    Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (ICLR 2022), arXiv:2106.09685.
    """
    step = max(1, _TILE // max(1, base.shape[1]))
    for first in range(0, base.shape[0], step):
        rows = b[first : first + step]
        product = np.zeros((len(rows), base.shape[1]))
        term = np.empty_like(product)
        for k in range(len(a)):
            np.multiply(rows[:, k, None], a[k], out=term)
            product += term
        product *= scaling
        base[first : first + step] += product
    return base


def _weighted_sum(blocks: Iterable[Block], weights: Sequence[float]) -> Block:
    """`Σ wᵢ xᵢ`, added up in order."""
    total: Block | None = None
    for block, weight in zip(blocks, weights, strict=True):
        block *= weight  # noqa: PLW2901 - in place
        if total is None:
            total = block
        else:
            total += block
    assert total is not None  # noqa: S101 - there are always inputs
    return total


def _minus(block: Block, base: Block) -> Block:
    block -= base
    return block
