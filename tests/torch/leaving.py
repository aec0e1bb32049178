"""How a rank of a test program ends."""

from __future__ import annotations

import atexit
import os
import sys

import torch.distributed as dist


def leave() -> None:
    """End a rank when all ranks are done, without taking the group or the interpreter down.

    torch 2.13 now and then aborts there, in gloo's threads. Ranks meet in the store, since one that
    ends closes the connections on which others may still be reading.
    """
    store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    if store.add("ranks that leave", 1) == world:
        store.set("all leave", "")
    store.wait(["all leave"])
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
