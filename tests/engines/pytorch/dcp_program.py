"""Save and load through `torch.distributed.checkpoint` with ours as its storage: `dcp_program.py JOBS.json`.

JOBS is a list of trainings with the actions of `train.py`, and these:

- `{"dcp_save": url, …}`: with `Writer(url, …)`; `spelling` as in `train.py`; `how`: `save`, or the
  `thread` or the `process` of `dcp.async_save`, for which `{"dcp_wait": true}` waits
- `{"dcp_load": url, …}`: with `Reader(url, …)`

or of `{"probe": name, "at": folder}`, functions of this file.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ucformat
import ucformat.torch as ucf
from tests.torch.leaving import leave
from tests.torch.train import Job, Run
from ucformat.errors import UsageError


class DcpRun(Run):
    """A training that saves and loads through DCP."""

    def do_dcp_save(
        self, url: str, how: str = "save", spelling: str = "nested", **options: Any
    ) -> None:
        state = self.training.state(spelling)
        writer = ucf.Writer(url, step=self.training.done, **options)
        if how == "save":
            dcp.save(state, storage_writer=writer)
            assert writer.saved is not None
            assert writer.saved.url == url
        else:
            kind = (
                AsyncCheckpointerType.THREAD if how == "thread" else AsyncCheckpointerType.PROCESS
            )
            aside = dist.new_group(
                backend="gloo"
            )  # for DCP's own collectives, while training uses the default group
            self.handle = dcp.async_save(
                state, storage_writer=writer, async_checkpointer_type=kind, process_group=aside
            )

    def do_dcp_wait(self, _: bool) -> None:
        self.handle.result()

    def do_dcp_load(self, url: str, spelling: str = "nested", **options: Any) -> None:
        state = self.training.state(spelling)
        state["step"], state["notes"] = -1, {"rate": 0.0, "of": ["", None, False]}
        dcp.load(state, storage_reader=ucf.Reader(url, **options))
        self.training.restore(state, spelling)
        assert state["notes"] == self.training.state()["notes"]


def failure_on_one_rank(at: str) -> None:
    """What one rank cannot write, fails on all with its name, and nothing opens; the next save works."""
    state = {
        "w": torch.arange(8.0),
        f"of rank {dist.get_rank()}": "fine" if dist.get_rank() == 0 else threading.Lock(),
    }
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=ucf.Writer(at))
    failures = caught.value.failures
    assert set(failures) == set(range(dist.get_world_size()))
    assert all("rank 1: a lock has no JSON form" in str(e) for e, _ in failures.values()), failures
    assert not (Path(at) / "manifest.json").exists()
    dist.barrier()
    dcp.save({"w": torch.arange(8.0)}, storage_writer=ucf.Writer(at))
    assert ucformat.open(at).names() == ["w"]


def values_of_each_rank(at: str) -> None:
    """Values under keys of each rank's own come together, whoever writes them."""
    rank = dist.get_rank()
    mine = {
        "loader": {
            f"rank{rank}": {"seen": rank, "queue": [rank, (rank, None)]},
            "world": dist.get_world_size(),
        }
    }
    dcp.save(mine, storage_writer=ucf.Writer(at))
    if rank == 0:
        each = {
            f"rank{r}": {"seen": r, "queue": [r, {"$tuple": [r, None]}]}
            for r in range(dist.get_world_size())
        }
        assert ucformat.open(at).objects == {"loader": {**each, "world": dist.get_world_size()}}
    back = {"loader": {f"rank{rank}": {"seen": -1, "queue": [-1, (-1, 0)]}, "world": 0}}
    dcp.load(back, storage_reader=ucf.Reader(at))
    assert back == mine


def several_shards(at: str) -> None:
    """A rank may hold several shards of one tensor, in memories of their own."""
    whole = torch.arange(60.0).view(10, 6)
    cuts = {
        "a": [(0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 3, 1), (9, 1, 0)],
        "b": [(0, 8, 1), (8, 2, 0)],
    }
    made = {}
    for name, shards in cuts.items():
        metas = [ShardMetadata([a, 0], [n, 6], f"rank:{r}/cpu") for a, n, r in shards]
        made[name] = sharded_tensor.zeros(EnumerableShardingSpec(metas), 10, 6)
    for shard in made["a"].local_shards():
        start, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        shard.tensor.copy_(whole[start : start + size])
    for form in ("zarr", "packed"):
        dcp.save({"t": made["a"]}, storage_writer=ucf.Writer(f"{at}/{form}", form=form))
        dcp.load({"t": made["b"]}, storage_reader=ucf.Reader(f"{at}/{form}"))
        for shard in made["b"].local_shards():
            start, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            assert torch.equal(shard.tensor, whole[start : start + size])
            shard.tensor.zero_()


def some_ranks(at: str) -> None:
    """Each half of the ranks saves and loads by itself; so does each rank with `no_dist`."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, 2 * half)))]
    mine = groups[rank // half]
    url = f"{at}/half{rank // half}"
    state = {"w": torch.full((5,), float(rank // half)), "half": rank // half}
    dcp.save(state, storage_writer=ucf.Writer(url, group=mine), process_group=mine)
    back = {"w": torch.zeros(5), "half": -1}
    dcp.load(back, storage_reader=ucf.Reader(url), process_group=mine)
    assert torch.equal(back["w"], state["w"])
    assert back["half"] == rank // half
    assert ucformat.open(url).manifest.layout["world"] == half
    with pytest.raises(
        CheckpointException, match=f"DCP saves with {half} ranks, the Writer with {2 * half}"
    ):
        dcp.save(state, storage_writer=ucf.Writer(f"{at}/unlike{rank // half}"), process_group=mine)
    alone = f"{at}/alone{rank}"
    dcp.save({"w": torch.full((3,), float(rank))}, storage_writer=ucf.Writer(alone), no_dist=True)
    back = {"w": torch.zeros(3)}
    dcp.load(back, storage_reader=ucf.Reader(alone), no_dist=True)
    assert back["w"].tolist() == [rank] * 3


def kept_plans(at: str) -> None:
    """Plans that DCP keeps from save to save, and does not tell again, lose nothing."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for step in range(3):
        sharded = distribute_tensor(torch.arange(10.0) + step, mesh, [Shard(0)])
        tied = torch.arange(6.0) * step
        state = {"model": {"s": sharded, "a": tied, "b": tied}, "step": step}
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=ucf.Writer(f"{at}/{step}", step=step), planner=planner)
        ck = ucformat.open(f"{at}/{step}")
        assert ck.aliases == {"b": "a"}
        assert ck["s"][...].tolist() == [i + step for i in range(10)]
        assert ck["b"][...].tolist() == [i * step for i in range(6)]
        assert ck.objects == {"step": step}, rank
        dist.barrier()


def without_collectives(at: str) -> None:
    """Where DCP plans for each rank by itself, there is one checkpoint all the same, and what is held alike is once."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "s": distribute_tensor(torch.arange(9.0), mesh, [Shard(0)]),
        "r": torch.arange(4.0),
        "step": 5,
    }
    dcp.save(state, storage_writer=ucf.Writer(at), use_collectives=False)
    back = {
        "s": distribute_tensor(torch.zeros(9), mesh, [Replicate()]),
        "r": torch.zeros(4),
        "step": 0,
    }
    dcp.load(back, storage_reader=ucf.Reader(at))
    assert back["s"].to_local().tolist() == list(range(9))
    assert (back["r"].tolist(), back["step"]) == ([0, 1, 2, 3], 5)
    assert ucformat.open(at).manifest.layout["world"] == dist.get_world_size()
    unlike = {"r": torch.full((4,), float(dist.get_rank()))}
    with pytest.raises(UsageError, match="has a different value on rank 1 than on rank 0"):
        dcp.save(unlike, storage_writer=ucf.Writer(f"{at}/unlike"), use_collectives=False)


def deepspeed(at: str) -> None:
    """A DeepSpeed checkpoint into the state dict of a model under FSDP2 x TP; what is there after, whole, is saved."""
    ck = ucformat.open(f"{at}/ckpt")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Module()
    for name, tensor in ck.items():
        if 0 not in tensor.shape:
            trained = "exp_avg" in ck.states(name)  # in fp32, whatever the engine computed in
            _add(
                model,
                name,
                torch.zeros(tensor.shape, dtype=getattr(torch, str(tensor.dtype))),
                mesh["tp"],
                trained,
            )
    fully_shard(model, mesh=mesh["dp"])
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": matrices}], lr=7.0)
    weights, states = get_state_dict(model, optimizer)
    state = {"app": {"model": weights}, "optim": states}
    dcp.load(state, storage_reader=ucf.Reader(f"{at}/ckpt"))
    out = {f"weight/{n}": t for n, t in weights.items()}
    out |= {f"{s}/{n}": t for n, by_state in states["state"].items() for s, t in by_state.items()}
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in out.items()}
    if dist.get_rank() == 0:
        torch.save({"tensors": whole, "groups": states["param_groups"]}, f"{at}/loaded.pt")


def _add(model: nn.Module, name: str, tensor: torch.Tensor, tp: Any, trained: bool) -> None:
    """Put a tensor in its place in a tree of modules, as a buffer unless trained; matrices are cut over `tp`."""
    *folders, last = name.split(".")
    for folder in folders:
        if not hasattr(model, folder):
            model.add_module(folder, nn.Module())
        model = getattr(model, folder)
    if trained:
        placement = Shard(1) if tensor.dim() > 1 else Replicate()
        model.register_parameter(
            last, nn.Parameter(distribute_tensor(tensor.float(), tp, [placement]))
        )
    else:
        model.register_buffer(last, tensor)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for entry in json.loads(Path(sys.argv[1]).read_text()):
        if "probe" in entry:
            globals()[entry["probe"]](entry["at"])
        else:
            run = DcpRun(Job(**entry))
            for action in entry["actions"]:
                run.act(action)
        dist.barrier()
    leave()


if __name__ == "__main__":
    main()
