"""Increments and patches: what saves of what changed write and cost, and what reading them costs.

`python -m bench.increments`. One process and /dev/shm. A frozen model of 1 GB in bfloat16 with adapters and their
moments (LoRA), saved whole, on the base, and eight times in a chain, each to a new place; the same model with all
weights moved by a step of 1e-6, as patches; and tables of embeddings of a recommender, of which 1 % of the rows change
between saves, by the policies of Check-N-Run (Eisenman et al., NSDI 2022). Its figures: 6 to 17 times fewer bytes
written, 2.5 to 8 times less capacity, of which a part is due to quantization, which is not used here. Times are the
best of the rounds.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ucformat
from bench.common import table, targets
from ucformat.format.encoded import EncodedStore
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import single_extents
from ucformat.storage.wrappers import layers
from ucformat.torch import ChangedRows, Increments, Manager, load, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOLDER = Path("/dev/shm/ucformat-increments")  # noqa: S108 - memory, so that no disk is measured
ROUNDS = 3
WIDTH, LAYERS, RANK = 2048, 12, 8
SHAPES = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)} | {
    "gate": (4 * WIDTH, WIDTH),
    "down": (WIDTH, 4 * WIDTH),
}
CHAIN = 8
TABLES, ROWS, DIM, TOUCHED, INTERVALS = 10, 1_000_000, 16, 0.01, 20

State = dict[str, Any]


def main() -> None:
    asked: list[tuple[str, str, float]] = []
    for section in (lora, steps, embeddings):
        with folder():
            asked += section()
    print("\n" + targets(*asked))


def frozen() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        f"layers.{n}.{name}.weight": torch.randn(shape).mul_(0.02).bfloat16()
        for n in range(LAYERS)
        for name, shape in SHAPES.items()
    }


def adapters() -> State:
    names = [f"layers.{n}.{name}" for n in range(LAYERS) for name in ("q", "v")]
    return {
        kind: {f"{name}.lora_{half}": torch.randn(RANK, WIDTH) for name in names for half in "AB"}
        for kind in ("weights", "exp_avg", "exp_avg_sq")
    }


def lora() -> list[tuple[str, str, float]]:
    base = frozen()
    sections = [lora_in(form, base) for form in ("zarr", "packed")]
    head = ["LoRA", "whole, MB", "second save, MB", "changed, MB", "full save, ms", "again, ms"]
    head += [
        "on the base, ms",
        "load whole, ms",
        "load chain, ms",
        "open whole, ms",
        "open chain, ms",
    ]
    print(table(head, [row for row, _ in sections]))
    return [target for _, of_form in sections for target in of_form]


def lora_in(form: Any, base: State) -> tuple[list[str], list[tuple[str, str, float]]]:
    """A whole save, one on its base, and a chain of them, of adapters that change beside weights that do not."""

    def saved(state: State, place: str, on: str | None = None) -> float:
        shutil.rmtree(FOLDER / place, ignore_errors=True)
        begun = time.perf_counter()
        save(state, FOLDER / place, base=None if on is None else FOLDER / on, form=form)
        return time.perf_counter() - begun

    first, last, target = ({"model": base, "adapters": adapters()} for _ in range(3))
    full_s = min(saved(first, "0") for _ in range(ROUNDS))
    again_s = min(saved(last, "whole") for _ in range(ROUNDS))
    second_s = min(saved(last, "1", "0") for _ in range(2 * ROUNDS))
    changed, written = bytes_of(last["adapters"]), stored(FOLDER / "1")
    for n in range(2, CHAIN + 1):
        last["adapters"] = adapters()
        saved(last, f"{n}", f"{n - 1}")
    chain, whole = FOLDER / f"{CHAIN}", FOLDER / "whole"
    opened, opened_whole = (
        best(lambda: ucformat.open(chain), 20),
        best(lambda: ucformat.open(whole), 20),
    )
    loaded = loaded_whole = math.inf
    for _ in range(2 * ROUNDS):
        # the base: memory of other files may be slower by a tenth
        loaded_whole = min(loaded_whole, best(lambda: load(target, FOLDER / "0"), 1))
        loaded = min(loaded, best(lambda: load(target, chain), 1))
    assert all(map(torch.equal, tensors(target), tensors(last)))
    seconds = (full_s, again_s, second_s, loaded_whole, loaded)
    row = [form, mb(stored(whole)), mb(written), mb(changed), *(f"{1e3 * s:.0f}" for s in seconds)]
    asked = [
        ("bytes written / bytes that changed", "<= 1.05", written / changed),
        ("time / that of a full save", "<= 0.15", second_s / min(full_s, again_s)),
        ("open of the chain / of a whole one", "<= 1.5", opened / opened_whole),
        ("load of the chain / of a whole one", "<= 1.1", loaded / loaded_whole),
    ]
    shutil.rmtree(FOLDER)
    FOLDER.mkdir()
    opens = [f"{1e3 * s:.1f}" for s in (opened_whole, opened)]
    return row + opens, [(f"LoRA, {form}: {what}", limit, value) for what, limit, value in asked]


def steps() -> list[tuple[str, str, float]]:
    """All weights of the model after one step of 1e-6, as patches of those before."""
    masters = {name: w.float() + 1e-5 * torch.randn(w.shape) for name, w in frozen().items()}

    def weights() -> State:
        return {"model": {name: w.bfloat16() for name, w in masters.items()}}

    before = weights()
    plain = bytes_of(before)
    save(before, FOLDER / "0", form="packed")
    for w in masters.values():
        w.sub_(torch.randn(w.shape).clamp_(-1, 1).mul_(1e-6))
    after = weights()
    full_s = best(lambda: save(after, FOLDER / "whole", form="packed", overwrite=True))
    made_s = best(
        lambda: save(
            after, FOLDER / "1", base=FOLDER / "0", patch=True, form="packed", overwrite=True
        )
    )
    patch, target = stored(FOLDER / "1"), weights()
    whole_s = best(lambda: load(target, FOLDER / "whole"))
    load_s = best(lambda: load(target, FOLDER / "1"))
    assert all(map(torch.equal, tensors(target), tensors(after)))
    with one_core():
        core_made_s = best(
            lambda: save(
                after, FOLDER / "1", base=FOLDER / "0", patch=True, form="packed", overwrite=True
            )
        )
        core_load_s = best(lambda: load(target, FOLDER / "1"))
    ck = ucformat.open(FOLDER / "1")
    share = patch_share(ck)
    print()
    print(
        table(
            [
                "a step of 1e-6",
                "plain, MB",
                "patch, MB",
                "full save, ms",
                "patch, ms",
                "load, ms",
                "load of the patch, ms",
            ],
            [
                [
                    "",
                    mb(plain),
                    mb(patch),
                    *(f"{1e3 * s:.0f}" for s in (full_s, made_s, whole_s, load_s)),
                ]
            ],
        )
    )
    return [
        ("patch of a step of 1e-6 / plain bytes", "<= 0.06", patch / plain),
        ("GB/s of a save of patches, one core", ">= 0.5", plain / core_made_s / 1e9),
        ("GB/s of a load of patches, one core", ">= 1", plain / core_load_s / 1e9),
        ("bytes of patches for an eighth of the rows / their share", "<= 1.1", share),
    ]


def patch_share(ck: ucformat.Checkpoint) -> float:
    """The stored bytes of patches that an eighth of the rows of each tensor needs, beside an eighth of all."""
    store = next(layer for layer in layers(ck.source.store) if isinstance(layer, EncodedStore))
    eighth = whole = 0
    for info in ck.tensors.values():
        rows = Box((0,) * len(info.shape), (info.shape[0] // 8, *info.shape[1:]))
        for e in single_extents(ck.source.extents(info.key)):
            nbytes = (
                store.gaps(e.file, e.offset, 1) + 1
            )  # of the whole tile, of which this is a byte
            whole += nbytes
            eighth += nbytes if e.box.intersect(rows) else 0
    return 8 * eighth / whole


def embeddings() -> list[tuple[str, str, float]]:
    policies: tuple[Any, ...] = ("consecutive", "one-shot", "intermittent")
    sections = [embeddings_by(policy) for policy in policies]
    head = ["embeddings", "whole, MB", f"{INTERVALS} saves, MB", "anchors", "x less written"]
    head += ["x less capacity", "first save, ms", "others, ms", "load of the last, ms"]
    print("\n" + table(head, [row for row, _ in sections]))
    return [target for _, of_policy in sections for target in of_policy]


def embeddings_by(policy: Any) -> tuple[list[str], list[tuple[str, str, float]]]:
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Embedding(ROWS, DIM) for _ in range(TABLES))
    tables = list(model.parameters())
    plain, run = sum(t.nbytes for t in tables), FOLDER / policy
    written, seconds = list[int](), list[float]()
    increments, changed = Increments(policy, patch=True, max_chain=INTERVALS), ChangedRows(model)
    with Manager(run, increments=increments, form="packed", signals=()) as manager:
        for step in range(INTERVALS):
            for module in model if step else ():
                touched = torch.randint(ROWS, (int(ROWS * TOUCHED),))
                module(touched)
                with torch.no_grad():
                    module.weight[touched] += 1e-3 * torch.randn(len(touched), DIM)
            begun = time.perf_counter()
            manager.save(step, {"model": model}, changed=changed)
            seconds.append(time.perf_counter() - begun)
            written.append(stored(run / f"step-{step:08d}"))
    trained = [t.detach().clone() for t in tables]
    for parameter in tables:
        torch.nn.init.zeros_(parameter)
    load_s = best(lambda: load({"model": model}, run / f"step-{INTERVALS - 1:08d}"), 1)
    assert all(map(torch.equal, tables, trained))
    less, capacity = INTERVALS * plain / sum(written), INTERVALS * plain / used(run)
    anchors = sum(nbytes > plain / 2 for nbytes in written)
    times = (seconds[0], sum(seconds[1:]) / (INTERVALS - 1), load_s)
    row = [policy, mb(plain), mb(sum(written)), f"{anchors}", f"{less:.1f}", f"{capacity:.1f}"]
    shutil.rmtree(run)
    return row + [f"{1e3 * s:.0f}" for s in times], [
        (f"embeddings, {policy}: times fewer bytes written", ">= 6", less),
        (f"embeddings, {policy}: times less capacity", ">= 2.5", capacity),
    ]


def best(act: Callable[[], object], rounds: int = ROUNDS) -> float:
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def stored(place: Path) -> int:
    """Bytes of the files with tensors."""
    return sum(f.stat().st_size for f in (place / "data").rglob("*") if f.is_file())


def used(place: Path) -> int:
    return sum(f.stat().st_size for f in place.rglob("*") if f.is_file())


def tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    else:
        for key in sorted(state):
            yield from tensors(state[key])


def bytes_of(state: Any) -> int:
    return sum(t.nbytes for t in tensors(state))


def mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"


@contextmanager
def one_core() -> Iterator[None]:
    """Let this process, and the threads that it starts, run on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def folder() -> Iterator[None]:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


if __name__ == "__main__":
    main()
