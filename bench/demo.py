"""The main job on real input: a DeepSpeed ZeRO-3 checkpoint becomes universal, and ranks of other layouts read it.

Run by `make demo`. What it prints is what `ucp` prints; every comparison is bit for bit with the
engine's own memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import ucformat
from tests.engines import Made, make_deepspeed
from ucformat.errors import IntegrityError

OUT = Path("demo-out")
LAYOUT = Path("docs/layouts/demo-tp2-zero1.yaml")


def main() -> None:
    say(
        "Train a small model with DeepSpeed ZeRO-3 on 3 ranks (two optimizer groups, tied embedding), and save it"
    )
    os.environ["UCP_CATALOG"] = str(OUT / "catalog.db")
    spec = {"name": "zero3", "zero": 3, "dtype": "bf16", "tied": True}
    made = make_deepspeed([spec], world=3, folder=OUT / "engine")["zero3"]
    source, target = made.checkpoint, OUT / "universal"
    shutil.rmtree(target, ignore_errors=True)
    for file in OUT.glob("catalog.db*"):
        file.unlink()
    ucp("show", str(source))

    say("Read it in place, without converting: four rows of one tensor")
    ucp("get", str(source), "blocks.0.up.weight", "0:4,:3", "--out", "-")

    say("Materialise it as Zarr arrays, and verify every byte")
    ucp("convert", str(source), str(target), "--run", "demo")
    ucp("verify", str(target))

    say(f"What each rank of {LAYOUT} will read (TP 2 x DP 2, ZeRO-1), then read it")
    ucp("plan", str(target), "--layout", str(LAYOUT), "--rank", "all")
    compare(made, target)

    say("What the catalog knows: the conversion recorded itself; the source is registered in place")
    ucp("register", str(source))
    ucp("metric", "demo@latest", "val_loss=2.13")
    ucp("alias", "set", "best", "demo@latest")
    ucp("ls", "metric.val_loss < 2.5 or kind = 'deepspeed'")
    ucp("lineage", "alias:best")
    print("\nEvery rank's slices equal the engine's own values, bit for bit.")


def compare(made: Made, target: Path) -> None:
    """Every tensor of the converted checkpoint, and every rank's pieces, against the engine's memory."""
    ck, layout, truth = ucformat.open(target), ucformat.Layout.load(LAYOUT), made.truth
    bound = layout.bind(ck.metadata.tensor_list)
    compared = 0
    for rank in range(bound.ranks):
        arrays = ck.plan(layout, rank).execute()
        for (name, state), info in (
            (k, i) for k, i in ck.tensors.items() if (k.state, k.name) in truth
        ):
            whole = ck[name, state][...]
            check(whole.tobytes() == truth[state, name][2], name, state, rank)
            local = bound.local(info.key, rank)
            for piece in local.pieces if local else ():
                buffer = arrays[(piece.buffer or name), state].reshape(-1)
                at = tuple(
                    slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True)
                )
                if piece.buffer is None:
                    held = buffer.reshape(local.shape if local else ())
                else:
                    held = buffer[piece.offset : piece.offset + piece.box.size].reshape(
                        piece.box.shape
                    )
                check(held.tobytes() == whole[at].tobytes(), name, state, rank)
                compared += piece.box.size * info.itemsize
    print(f"compared {compared} bytes over {bound.ranks} ranks")


def check(equal: bool, name: str, state: str, rank: int) -> None:  # noqa: FBT001
    if not equal:
        raise IntegrityError(
            f"{name} ({state}) differs on rank {rank}", hint="this is a bug of ucformat: report it"
        )


def ucp(*words: str) -> None:
    print(f"\n$ ucp {' '.join(words)}", flush=True)
    subprocess.run(["ucp", *words], check=True)


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


if __name__ == "__main__":
    main()
