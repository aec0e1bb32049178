"""What survives, found out from the files alone, without ucformat's own code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["survivors"]


def survivors(nodes: list[Path], slow: Path) -> list[tuple[int, int, str]]:
    """The checkpoints of which every file is somewhere: commit count, step and id, the newest first."""
    roots = [node / "ck" for node in nodes] + [slow]
    found: dict[str, tuple[int, int, str]] = {}
    for root in roots:
        for manifest in root.glob("step-*/manifest.json"):
            try:
                document = json.loads(manifest.read_text())
            except ValueError:
                continue
            folder = manifest.parent.name
            if all(any((r / folder / key).exists() for r in roots) for key in _files(document)):
                found[document["id"]] = (document["commits"], document["step"], document["id"])
    return sorted(found.values(), reverse=True)


def _files(document: dict[str, Any]) -> list[str]:
    """The files of a packed checkpoint, as its manifest tells."""
    listed = [document.get("objects"), document.get("sidecar"), *document["assets"].values()]
    listed += (document.get("per_rank") or {}).get("files", [])
    keys = [doc["path"] for doc in listed if doc]
    ranks = [w["rank"] for w in document["writers"] if w["nbytes"]]
    return keys + [f"data/{document['attempt']}/rank-{rank:05d}.bin" for rank in ranks]
