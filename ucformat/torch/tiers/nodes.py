"""The nodes of a job, by the names that they have, and which of them keep copies of each other's files."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ucformat.errors import UnsafeError, UsageError
from ucformat.settings import load_settings
from ucformat.storage.error_mapping import mapping_os_errors
from ucformat.torch.comm.merging import Ranges, adjoined, merged
from ucformat.torch.comm.wire import message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.torch.comm.group import Group

__all__ = ["Node", "Nodes", "gather_nodes", "peers_of"]


@message
class Node:
    """A node, and the ranks on it."""

    name: str
    ranks: Ranges

    @property
    def first(self) -> int:
        """The rank that speaks for it: the lowest."""
        return self.ranks[0][0]

    @property
    def members(self) -> list[int]:
        """Its ranks, ascending."""
        return [rank for start, stop in self.ranks for rank in range(start, stop)]


@message
class Nodes:
    """The nodes of a job in the order of their first ranks."""

    nodes: tuple[Node, ...]

    @property
    def by_rank(self) -> list[int]:
        """The number of the node of each rank."""
        numbers = {rank: n for n, node in enumerate(self.nodes) for rank in node.members}
        return [numbers[rank] for rank in range(len(numbers))]

    def of(self, rank: int) -> Node:
        """Return the node of a rank."""
        return self.nodes[self.number_of(rank)]

    def number_of(self, rank: int) -> int:
        """Return the number of the node of a rank."""
        return next(
            n
            for n, node in enumerate(self.nodes)
            if any(start <= rank < stop for start, stop in node.ranks)
        )


def gather_nodes(ranks: Group, folder: Path) -> Nodes:
    """Gather the names of the nodes of all ranks: `UCP_NODE`, else the host's name. All ranks call this.

    Args:
        folder: of the tier on this node; it is made.

    Raises:
        UsageError: ranks of one node have different folders, or those of two nodes the same.
    """
    kind = Mapping[tuple[str, str], Ranges]
    with ranks.sharing_errors():
        name = load_settings().node or socket.gethostname()
        identity = _identity_of(folder)

    def ordered(by_name: Mapping[tuple[str, str], Ranges]) -> Nodes:
        _check_distinct(list(by_name), folder)
        nodes = (Node(name, ranges) for (name, _), ranges in by_name.items())
        return Nodes(tuple(sorted(nodes, key=lambda node: node.first)))

    own = {(name, identity): ((ranks.rank, ranks.rank + 1),)}
    gathered: Nodes = ranks.combine(own, lambda a, b: merged(a, b, adjoined), kind, ordered, Nodes)
    return gathered


def _identity_of(folder: Path) -> str:
    """What tells a folder from all others: the boot of its kernel, its device and its number there."""
    with mapping_os_errors("create", str(folder)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UnsafeError(
            f"others may write in {folder}, of the user with number {status.st_uid}, and checkpoints "
            "in it would be restored",
            hint="a folder of your own, which this makes; or `chmod go-w` if it is yours",
        )
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = socket.gethostname()
    return f"{boot} {status.st_dev} {status.st_ino}"


def _check_distinct(named: Sequence[tuple[str, str]], folder: Path) -> None:
    names, identities = Counter(n for n, _ in named), Counter(i for _, i in named)
    if shared := next((n for n, count in names.items() if count > 1), None):
        raise UsageError(
            f"ranks of the node {shared} have different folders at {folder}",
            hint="give each node, or container, a name of its own: UCP_NODE",
        )
    if same := [n for n, i in named if identities[i] > 1]:
        raise UsageError(
            f"the nodes {same[0]} and {same[1]} have the same folder {folder}, so that one would "
            "keep no copies of the other's files",
            hint="a folder of the node itself, as in /dev/shm; or the same UCP_NODE for both",
        )


def rack_of(name: str) -> str:
    """Return the rack of a node: what is before the last `/` of its name."""
    return name.rpartition("/")[0]


def peers_of(names: Sequence[str], replicas: int) -> list[tuple[int, ...]]:
    """Choose the nodes that keep copies of each node's files.

    Each node keeps the copies of exactly `replicas` others, so memory is balanced. As many copies
    as this allows are in another rack than the original; all of them if no rack has more than half
    of the nodes.

    Args:
        names: of the nodes, each once.

    Raises:
        UsageError: there are not more nodes than replicas.
    """
    count = len(names)
    if replicas >= count:
        raise UsageError(
            f"replicas={replicas} needs at least {replicas + 1} nodes, and there are {count}",
            hint="UCP_NODE names the node of a rank where the host's name does not",
        )
    racks = [rack_of(name) for name in names]
    # the nodes of a rack are neighbours: moved on by at least its size, all leave it
    order = sorted(range(count), key=lambda n: (racks[n], n))
    largest = max(Counter(racks).values())
    least = min(largest, count - largest) or 1
    far = range(least, count - least + 1)
    stride = max(1, len(far) // max(1, replicas))
    spread = [*far[::stride], *far, *range(1, count)]
    shifts = list(dict.fromkeys(shift for shift in spread if 0 < shift < count))[:replicas]
    place = {node: at for at, node in enumerate(order)}
    return [tuple(order[(place[n] + shift) % count] for shift in shifts) for n in range(count)]
