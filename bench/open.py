"""Opening checkpoints: the 1.1 GB ZeRO-3 checkpoint in place, and universal ones of up to a million tensors.

`python -m bench.open`. Of the first it measures the time from a fresh interpreter with imports done
to one row of one tensor, and the bytes read, as a recording store counts them. Of the others only
the manifest exists, and each is opened in processes of its own, which have opened a checkpoint of
one tensor before: processor seconds, and the memory above what the process held then, at the end
and at most.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from datetime import UTC, datetime
from hashlib import md5
from typing import TYPE_CHECKING

import ucformat
from bench.common import OUT, median, ours, real_checkpoint, table, targets
from ucformat.format.structure import manifest_bytes
from ucformat.schema.manifest import Manifest, SidecarDoc
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.storage.local import LocalStore
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROUNDS = 5
STATES = ("weight", "exp_avg", "exp_avg_sq", "master")
ATTEMPT = "0" * 20
#: Tensors -> seconds, bytes.
GOALS = {100_000: (0.15, 60e6), 1_000_000: (1.5, 500e6)}
OPEN = """
import json, sys, time
import ucformat

def held(what="VmRSS"):  # VmHWM is the most; ru_maxrss would begin with that of the parent
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(what)) * 1024

ucformat.open(sys.argv[1])
before = held()
begun = time.process_time()
ck = ucformat.open(sys.argv[2])
seconds = time.process_time() - begun
after, most = held(), held("VmHWM")
begun = time.process_time()
ck[ck.manifest.tensors.names[-1]]
print(json.dumps([seconds, after - before, most - before, time.process_time() - begun, len(ck.tensors)]))
"""


def main() -> None:
    in_place()
    print(
        "\nUniversal checkpoints: names of 50 characters in 4 states (`names`: arrays of one state each):\n"
    )
    folder = OUT / "open"
    shutil.rmtree(folder, ignore_errors=True)
    one = written(folder / "one", 1, "packed")
    rows, goals = [], []
    for tensors, (seconds, memory) in GOALS.items():
        for form in ("arrays", "packed", "names"):
            place = written(folder / f"{form}-{tensors}", tensors, form)
            found = [measured(one, place) for _ in range(ROUNDS)]
            took, after, most, first = (median([f[k] for f in found]) for k in range(4))
            size = (place / "manifest.json").stat().st_size
            cells = [
                f"{size / 1e6:.1f}",
                f"{took:.2f}",
                f"{after / 1e6:.0f}",
                f"{most / 1e6:.0f}",
                f"{first * 1e3:.0f}",
            ]
            rows.append([f"{tensors:,}", form, *cells])
            if form != "names":
                goals.append((f"{tensors:,}, {form}, s", f"<= {seconds}", took))
                goals.append(
                    (f"{tensors:,}, {form}, MB at most", f"<= {memory / 1e6:.0f}", most / 1e6)
                )
    head = [
        "tensors",
        "form",
        "manifest, MB",
        "processor, s",
        "MB held",
        "MB at most",
        "first tensor, ms",
    ]
    print(table(head, rows) + "\n")
    sizes = {
        name: (TensorTable.of(docs(n, "packed")), size)
        for name, n, size in (("DeepSeek-V3", 190_820, 8), ("Llama 405B", 4_548, 0.5))
    }
    goals += [
        (f"table of {name}, packed, MB", f"<= {mb}", len(t.as_json()) / 1e6)
        for name, (t, mb) in sizes.items()
    ]
    print(targets(*goals))
    shutil.rmtree(folder)


def in_place() -> None:
    """The checkpoint of an engine."""
    folder = real_checkpoint()
    seconds, store = [], RecordingStore(LocalStore(folder))
    for _ in range(9):
        store = RecordingStore(LocalStore(folder))
        begun = time.perf_counter()
        ucformat.open(store)["layers.3.up_proj.weight", "exp_avg"][5]
        seconds.append(time.perf_counter() - begun)
    rows = [
        [
            f"{median(seconds) * 1e3:.0f}",
            f"{max(seconds) * 1e3:.0f}",
            f"{store.nbytes / 1e3:.0f}",
            str(len(store.reads)),
        ]
    ]
    print(table(["median, ms", "slowest, ms", "kB read", "reads"], rows) + "\n")
    print(
        targets(
            ("median, ms", "<= 500", median(seconds) * 1e3),
            ("kB read", "<= 2000", store.nbytes / 1e3),
        )
    )


def docs(tensors: int, form: str) -> Iterator[TensorDoc]:
    """The entries of experts: of four states each, or all of different names."""
    for n in range(tensors):
        number, state = (n, "weight") if form == "names" else (n // 4, STATES[n % 4])
        layer, expert, part = number // 768, number // 3 % 256, ("gate", "up", "down")[number % 3]
        name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        shape = (7168, 2048) if number % 3 == 2 else (2048, 7168)
        dtype = "bfloat16" if state == "weight" else "float32"
        at = ("model", name) if state == "weight" else ("optim", "state", name, state)
        if form == "packed":
            yield TensorDoc(name, state, dtype, shape, at=(at,))
            continue
        digest = f"xxh3:{md5(f'{name} {state}'.encode(), usedforsecurity=False).hexdigest()}"
        grid = (256, shape[1] // 8)
        yield TensorDoc(
            name, state, dtype, shape, grid, shape, digest, f"data/{ATTEMPT}/{state}/{name}", (at,)
        )


def written(place: Path, tensors: int, form: str) -> Path:
    """A checkpoint of which only the manifest exists."""
    place.mkdir(parents=True)
    sidecar = SidecarDoc(
        path=f"data/{ATTEMPT}/extents.safetensors", nbytes=0, digest=f"sha256:{'0' * 64}"
    )
    manifest = Manifest(
        id="0" * 32,
        attempt=ATTEMPT,
        created=datetime.now(UTC),
        sidecar=sidecar if form == "packed" else None,
        tensors=TensorTable.of(docs(tensors, form)),
    )
    (place / "manifest.json").write_bytes(manifest_bytes(manifest))
    return place


def measured(one: Path, place: Path) -> list[float]:
    """Processor seconds to open it, bytes held then and at most, seconds to its first tensor, and its tensors."""
    done = subprocess.run(
        [ours(), "-c", OPEN, str(one), str(place)], capture_output=True, text=True, check=True
    )
    found: list[float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
