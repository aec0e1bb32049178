"""What very many nodes have in their folders."""

from __future__ import annotations

from datetime import UTC, datetime

from ucformat.schema import MANIFEST
from ucformat.torch.manager.steps import RunStep
from ucformat.torch.tiers.inventory import Contents, ranges_of
from ucformat.torch.tiers.nodes import peers_of

__all__ = ["ATTEMPT", "simulated", "step"]

ATTEMPT = "a" * 20


def step(number: int, *, checkpoint: str = "1" * 32, commits: int = 0) -> RunStep:
    made = datetime(2026, 1, 1, tzinfo=UTC)
    return RunStep(f"/f/step-{number:08d}", number, checkpoint, made, 0, commits=commits or number)


def simulated(count: int, each: int) -> list[Contents]:
    """What each of many nodes has: the files of its own ranks and of a peer's, of two steps."""
    names = [f"rack{n // 32}/node{n}" for n in range(count)]
    sources: list[list[int]] = [[] for _ in names]
    for n, peers in enumerate(peers_of(names, 1)):
        for p in peers:
            sources[p].append(n)
    documents = (MANIFEST, f"data/{ATTEMPT}/extents.safetensors", f"objects/{ATTEMPT}/objects.json")
    out = []
    for n in range(count):
        held = ranges_of(
            r for node in (n, *sources[n]) for r in range(node * each, (node + 1) * each)
        )
        folders = ["step-00000001", "step-00000002"]
        placed = {
            (folder, str(k + 1) * 32): step(k + 1, checkpoint=str(k + 1) * 32)
            for k, folder in enumerate(folders)
        }
        out.append(
            Contents(
                placed,
                dict.fromkeys(placed, ((n, n + 1),)),
                {},
                {(folder, ATTEMPT): ((n, held),) for folder in folders},
                {(folder, documents): ((n, n + 1),) for folder in folders},
            )
        )
    return out
