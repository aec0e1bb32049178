"""Encodings of tiles: sizes, and speeds of one core, beside plain zstd and patches of positions and values.

`python -m bench.codecs [--gigabyte]`. The model is a small transformer that is trained here, byte by byte on the texts
of this repository, in float32 by AdamW at 3e-4; its weights are cast to bfloat16, as trainers publish them. From one
state, further steps are taken at each learning rate. The synthetic weights are normal, 256 MB or 1 GB of bfloat16,
before and after one step in which each moves by up to the learning rate, as with Adam. Tensors are cut into tiles of
1 MiB. Speeds are of the plain bytes by processor time, the best of the rounds, interleaved.
"""

from __future__ import annotations

import copy
import struct
import sys
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from numcodecs import zstd  # type: ignore[import-untyped]

from bench.common import OUT, ROOT, table, targets
from ucformat.format.encoding import Encoding, compress, decode_tile, encode_tile
from ucformat.format.lossy import WIDTHS, dequantize, quantize_adaptive, quantize_int8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Array = NDArray[Any]
    State = dict[str, Array]

TILE = 1 << 20  # bytes
ROUNDS = 5
STEPS = 300  # of training before anything is measured
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 256, 4, 4, 128, 4
TRAINED = OUT / "codecs.npz"
#: Learning rate and number of the steps between a checkpoint and its base.
UPDATES = {"1 step of 1e-6": (1e-6, 1), "8 steps of 1e-6": (1e-6, 8), "1 step of 3e-4": (3e-4, 1)}


class Model(torch.nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, WIDTH)
        self.place = torch.nn.Embedding(CONTEXT, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.embed(x) + self.place.weight[: x.shape[1]]
        out: torch.Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return out


def trained() -> dict[str, State]:
    """The states of the model, trained once: `weights`, both moments, and the weights after each update."""
    if not TRAINED.exists():
        OUT.mkdir(parents=True, exist_ok=True)
        arrays = {f"{s}/{name}": a for s, state in train().items() for name, a in state.items()}
        np.savez(TRAINED, allow_pickle=False, **arrays)
    states: dict[str, State] = {}
    with np.load(TRAINED) as file:
        for key in file:
            state, _, name = key.partition("/")
            states.setdefault(state, {})[name] = file[key]
    return states


def train() -> dict[str, State]:
    texts = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "ucformat").rglob("*.py")])
    text = torch.tensor(np.frombuffer(b"".join(t.read_bytes() for t in texts), np.uint8).copy())
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(model: Model, optimizer: torch.optim.Optimizer) -> float:
        begins = torch.randint(len(text) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([text[b : b + CONTEXT + 1] for b in begins]).long()
        loss = torch.nn.functional.cross_entropy(
            model(batch[:, :-1]).reshape(-1, 256), batch[:, 1:].reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    for number in range(STEPS):
        loss = step(model, optimizer)
        if number % 50 == 0:
            print(f"step {number}, loss {loss:.2f}", file=sys.stderr)
    of = {name: optimizer.state[p] for name, p in model.named_parameters()}
    states = {
        "weights": half(model),
        "exp_avg": {name: s["exp_avg"].numpy() for name, s in of.items()},
        "exp_avg_sq": {name: s["exp_avg_sq"].numpy() for name, s in of.items()},
    }
    for update, (rate, count) in UPDATES.items():
        later = copy.deepcopy(model)
        further = torch.optim.AdamW(later.parameters(), lr=rate)
        further.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        further.param_groups[0]["lr"] = rate
        for _ in range(count):
            step(later, further)
        states[update] = half(later)
    return states


def half(model: Model) -> State:
    """The weights in bfloat16, as their bits."""
    return {
        name: p.detach().to(torch.bfloat16).view(torch.uint16).numpy().copy()
        for name, p in model.named_parameters()
    }


def synthetic(nbytes: int) -> dict[str, State]:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(nbytes // 2, np.float32) * np.float32(0.02)

    def bits(values: Array) -> State:
        return {"w": values.astype(ml_dtypes.bfloat16).view(np.uint16)}

    states = {"weights": bits(weights)}
    for update, (rate, count) in UPDATES.items():
        if count == 1:
            moved = np.clip(rng.standard_normal(weights.size, np.float32), -1, 1) * np.float32(rate)
            states[update] = bits(weights - moved)
    return states


def tiles(state: State) -> list[Array]:
    return [
        tensor.reshape(-1)[first : first + TILE // tensor.itemsize]
        for tensor in state.values()
        for first in range(0, tensor.size, TILE // tensor.itemsize)
    ]


class Way(NamedTuple):
    """A way to encode tiles, from their bytes and those of the base, and to apply that to the base's."""

    encode: Callable[[memoryview, memoryview | None, int], tuple[Encoding | None, Any]]
    decode: Callable[[Any, memoryview, int], None]


def by_positions(new: memoryview, base: memoryview | None, itemsize: int) -> tuple[None, bytes]:
    """As slime is described: the positions of the elements that changed and their values, each by zstd."""
    assert base is not None
    values = np.frombuffer(new, f"u{itemsize}")
    places = np.flatnonzero(values != np.frombuffer(base, values.dtype)).astype(np.uint32)
    if not places.size:
        return None, b""
    parts = [zstd.compress(part.tobytes(), 1) for part in (places, values[places])]
    return None, struct.pack("<I", len(parts[0])) + b"".join(parts)


def to_positions(encoded: Any, out: memoryview, itemsize: int) -> None:
    payload = encoded[1]
    if not payload:
        return
    at = 4 + int.from_bytes(payload[:4], "little")
    places, values = zstd.decompress(payload[4:at]), zstd.decompress(payload[at:])
    target = np.frombuffer(out, f"u{itemsize}")
    target[np.frombuffer(places, np.uint32)] = np.frombuffer(values, target.dtype)


OURS = Way(
    lambda new, base, itemsize: encode_tile(new, itemsize, base),
    lambda encoded, out, itemsize: decode_tile(encoded[0], encoded[1], out, itemsize),
)
BLOSC = Way(lambda new, _, itemsize: (Encoding.BLOSC, compress(new, itemsize)), OURS.decode)
ZSTD = Way(
    lambda new, _base, _itemsize: (None, zstd.compress(new, 1)),
    lambda encoded, out, _: zstd.decompress(encoded[1], out),
)
PLAIN = {"ucformat": OURS, "zstd": ZSTD}
PATCHED = {
    "ucformat": OURS,
    "Blosc, no base": BLOSC,
    "positions, values, zstd": Way(by_positions, to_positions),
}


def measured(
    new: State, base: State | None, ways: dict[str, Way]
) -> Iterator[tuple[str, float, float, float, str]]:
    """Each way's size as a share of the plain bytes, GB/s of encoding and decoding, and encodings."""
    parts = [part.view(np.uint8).data for part in tiles(new)]
    itemsize = next(iter(new.values())).itemsize
    bases: Sequence[memoryview | None] = (
        [None] * len(parts) if base is None else [p.view(np.uint8).data for p in tiles(base)]
    )
    total = sum(part.nbytes for part in parts)
    best = {name: [float("inf")] * 2 for name in ways}
    made: dict[str, list[Any]] = {}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            begun = time.thread_time()
            made[name] = [way.encode(p, b, itemsize) for p, b in zip(parts, bases, strict=True)]
            best[name][0] = min(best[name][0], time.thread_time() - begun)
            outs = [bytearray(b or p.nbytes) for p, b in zip(parts, bases, strict=True)]
            begun = time.thread_time()
            for encoded, out in zip(made[name], outs, strict=True):
                way.decode(encoded, memoryview(out), itemsize)
            best[name][1] = min(best[name][1], time.thread_time() - begun)
            assert all(out == part for out, part in zip(outs, parts, strict=True))
    for name in ways:
        kinds = Counter(e[0].name.lower() for e in made[name] if e[0] is not None)
        share = sum(memoryview(e[1]).nbytes for e in made[name]) / total
        encodings = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
        yield name, share, total / best[name][0] / 1e9, total / best[name][1] / 1e9, encodings


LOSSY: dict[str, tuple[Encoding, Callable[[Array], Any]]] = {
    "int8-blockwise": (Encoding.INT8_BLOCKWISE, quantize_int8),
    **{
        f"adaptive, {width} bits": (
            Encoding.ADAPTIVE,
            partial(quantize_adaptive, width=width, block=WIDTH),
        )
        for width in WIDTHS
    },
}


def quantized(state: State) -> Iterator[list[str]]:
    parts = tiles(state)
    total = sum(part.nbytes for part in parts)
    squares = sum(float(np.square(part, dtype=np.float64).sum()) for part in parts)
    for name, (kind, quantize) in LOSSY.items():
        begun = time.thread_time()
        made = [quantize(part) for part in parts]
        encoding = time.thread_time() - begun
        outs = [np.empty_like(part) for part in parts]
        begun = time.thread_time()
        for one, out in zip(made, outs, strict=True):
            dequantize(kind, one.payload, out)
        decoding = time.thread_time() - begun
        wrong = sum(
            float(np.square(out.astype(np.float64) - part).sum())
            for out, part in zip(outs, parts, strict=True)
        )
        cells = (
            f"{sum(len(one.payload) for one in made) / total:.3f}",
            f"{(wrong / squares) ** 0.5:.2g}",
            f"{max(one.absolute for one in made):.2g}",
            f"{total / encoding / 1e9:.2f}",
            f"{total / decoding / 1e9:.2f}",
        )
        yield [name, *cells]


def main() -> None:
    torch.set_num_threads(1)  # as what is measured; on a busy machine also the fastest
    real = trained()
    nbytes = 10**9 if "--gigabyte" in sys.argv[1:] else 1 << 28
    large = synthetic(nbytes)
    moments = {f"{s}.{n}": a for s in ("exp_avg", "exp_avg_sq") for n, a in real[s].items()}
    rows: list[list[str]] = []
    found: dict[tuple[str, str], tuple[float, float, float]] = {}

    def add(what: str, new: State, base: State | None, ways: dict[str, Way]) -> None:
        for name, share, encoding, decoding, kinds in measured(new, base, ways):
            found[what, name] = share, encoding, decoding
            speeds = f"{encoding:.2f}", f"{decoding:.2f}"
            rows.append([what, name, f"{share:.4f}", *speeds, kinds])

    add("bf16 weights", real["weights"], None, PLAIN)
    add("fp32 moments", moments, None, PLAIN)
    add("synthetic bf16", large["weights"], None, PLAIN)
    for update in UPDATES:
        changed = share_of_changed(real[update], real["weights"])
        add(f"{update} ({changed:.1%} changed)", real[update], real["weights"], PATCHED)
        found[update, "ucformat"] = found[f"{update} ({changed:.1%} changed)", "ucformat"]
    for update in large:
        if update != "weights":
            changed = share_of_changed(large[update], large["weights"])
            what = f"synthetic, {update}"
            add(f"{what} ({changed:.1%} changed)", large[update], large["weights"], PATCHED)
            found[what, "ucformat"] = found[f"{what} ({changed:.1%} changed)", "ucformat"]
    head = ["bytes", "way", "stored / plain", "encoding, GB/s", "decoding, GB/s", "tiles"]
    print(table(head, rows) + "\n")
    head = ["with loss", "stored / plain", "error, relative in l2", "largest error"]
    head += ["encoding, GB/s", "decoding, GB/s"]
    lossy = [[s, *cells] for s in ("exp_avg", "exp_avg_sq") for cells in quantized(real[s])]
    print(table(["of", *head], lossy) + "\n")
    slow = [found[w, "ucformat"] for w in ("bf16 weights", "fp32 moments", "synthetic bf16")]
    checks = [
        ("bf16 weights, stored / plain", "<= 0.70", found["bf16 weights", "ucformat"][0]),
        ("fp32 moments, stored / plain", "<= 0.86", found["fp32 moments", "ucformat"][0]),
        ("slowest decoding without a base, GB/s", ">= 1", min(s[2] for s in slow)),
    ]
    for what in ("1 step of 1e-6", "8 steps of 1e-6", "synthetic, 1 step of 1e-6"):
        share, made, applied = found[what, "ucformat"]
        checks += [
            (f"{what}: patch / plain", "<= 0.06", share),
            (f"{what}: made, GB/s", ">= 0.5", made),
            (f"{what}: applied, GB/s", ">= 1", applied),
        ]
    print(targets(*checks))


def share_of_changed(new: State, base: State) -> float:
    changed = sum(int((new[name] != base[name]).sum()) for name in new)
    return changed / sum(a.size for a in new.values())


if __name__ == "__main__":
    main()
