"""A training of a tiny language model in NumPy, for `ucp demo`: what ranks of an engine would save of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucformat.checkpoint import Checkpoint
from ucformat.reading.arrays import ArraySource
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float32]

_TEXT = (
    "every layout saves it, every layout reads exactly its slice. missing data is an error, never "
    "zeros, and an interrupted command can be repeated. "
)
_VOCABULARY, _HIDDEN, _INNER, _LAYERS = 128, 32, 128, 2
_RATE, _BETAS, _EPSILON = 0.002, (0.9, 0.999), 1e-8


class Training:
    """A model that predicts the next character of a sentence, and its Adam."""

    def __init__(self) -> None:
        chance = np.random.default_rng(0)
        shapes = {"model.embed_tokens.weight": (_VOCABULARY, _HIDDEN)}
        for layer in range(_LAYERS):
            stem = f"model.layers.{layer}.mlp"
            shapes[f"{stem}.up_proj.weight"] = (_INNER, _HIDDEN)
            shapes[f"{stem}.down_proj.weight"] = (_HIDDEN, _INNER)
        shapes["lm_head.weight"] = (_VOCABULARY, _HIDDEN)
        self.step = 0
        self.weights: dict[str, Array] = {
            name: (chance.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32)
            for name, shape in shapes.items()
        }
        self.moments: dict[str, dict[str, Array]] = {
            state: {name: np.zeros_like(w) for name, w in self.weights.items()}
            for state in ("exp_avg", "exp_avg_sq")
        }

    def train(self, steps: int) -> float:
        """Train, and return the loss of the last step."""
        loss = 0.0
        for _ in range(steps):
            self.step += 1
            loss, gradients = self._backward()
            for name, gradient in gradients.items():
                self._update(name, gradient)
        return loss

    def _backward(self) -> tuple[float, dict[str, Array]]:
        """The loss, and its gradients."""
        codes = np.frombuffer(_TEXT.encode(), np.uint8)
        here, there = codes, np.roll(codes, -1)
        w, count = self.weights, len(codes)
        hidden = w["model.embed_tokens.weight"][here]
        kept = []
        for layer in range(_LAYERS):
            stem = f"model.layers.{layer}.mlp"
            inner = np.maximum(hidden @ w[f"{stem}.up_proj.weight"].T, 0)
            kept.append((hidden, inner))
            hidden = hidden + inner @ w[f"{stem}.down_proj.weight"].T
        logits = hidden @ w["lm_head.weight"].T
        logits -= logits.max(axis=1, keepdims=True)
        chances = np.exp(logits)
        chances /= chances.sum(axis=1, keepdims=True)
        loss = float(-np.log(chances[np.arange(count), there]).mean())

        error = chances
        error[np.arange(count), there] -= 1
        error /= count
        gradients = {"lm_head.weight": error.T @ hidden}
        back = error @ w["lm_head.weight"]
        for layer in reversed(range(_LAYERS)):
            stem = f"model.layers.{layer}.mlp"
            before, inner = kept[layer]
            gradients[f"{stem}.down_proj.weight"] = back.T @ inner
            inside = (back @ w[f"{stem}.down_proj.weight"]) * (inner > 0)
            gradients[f"{stem}.up_proj.weight"] = inside.T @ before
            back = back + inside @ w[f"{stem}.up_proj.weight"]
        of_rows = np.zeros_like(w["model.embed_tokens.weight"])
        np.add.at(of_rows, here, back)
        gradients["model.embed_tokens.weight"] = of_rows
        return loss, gradients

    def _update(self, name: str, gradient: Array) -> None:
        """A step of Adam for one parameter."""
        first, second = (self.moments[state][name] for state in ("exp_avg", "exp_avg_sq"))
        first += (1 - _BETAS[0]) * (gradient - first)
        second += (1 - _BETAS[1]) * (gradient * gradient - second)
        size = np.sqrt(second / (1 - _BETAS[1] ** self.step)) + _EPSILON
        self.weights[name] -= _RATE / (1 - _BETAS[0] ** self.step) * first / size

    def checkpoint(self) -> Checkpoint:
        """The state now, as a checkpoint in memory, which exporters take."""
        arrays = {
            (name, state): array
            for state, by_name in {"master": self.weights, **self.moments}.items()
            for name, array in by_name.items()
        }
        group = {
            "params": list(self.weights),
            "lr": _RATE,
            "betas": list(_BETAS),
            "eps": _EPSILON,
            "weight_decay": 0.0,
        }
        return Checkpoint(
            ArraySource(
                MemoryStore(f"demo-{self.step}"),
                arrays,
                kind="numpy",
                groups=[group],
                step=self.step,
                engine={"name": "numpy", "version": np.__version__},
            )
        )
