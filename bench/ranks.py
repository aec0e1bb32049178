"""Plans of saves by up to 16,384 ranks, with the real planning functions: seconds, memory, bytes exchanged and stored.

`python -m bench.ranks [--json] [--ranks N …]`. A process for each case, form and number of ranks. The states are real
DTensors whose memory is one element, on a process group that sends nothing. Statements are made for rank 0, for the
first and the last rank of each distinct description, and for 16 others; the message of each other rank is that of the
first one that holds the same, under its own number. All messages are merged in the tree that ranks form.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.common import table, targets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RANKS = (64, 256, 1024, 4096, 16384)
STATES = (("weight", "bfloat16"), ("master", "float32"), ("exp_avg", "float32"), ("exp_avg_sq", "float32"))
LAYERS, HIDDEN, FFN, VOCAB, KV = 126, 16384, 53248, 128256, 1024
DENSE, EXPERTS, EP = 3, 256, 64  # layers without experts, experts of each other layer, and ranks over which these are
DEPTH = 8  # at most, of the tree: connections that an answer to one rank takes


def llama() -> dict[str, tuple[int, ...]]:
    """The parameters of Llama 405B."""
    out: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        out |= {
            f"{name}.attn.q.weight": (HIDDEN, HIDDEN),
            f"{name}.attn.k.weight": (KV, HIDDEN),
            f"{name}.attn.v.weight": (KV, HIDDEN),
            f"{name}.attn.o.weight": (HIDDEN, HIDDEN),
            f"{name}.mlp.gate.weight": (FFN, HIDDEN),
            f"{name}.mlp.up.weight": (FFN, HIDDEN),
            f"{name}.mlp.down.weight": (HIDDEN, FFN),
            f"{name}.norm1.weight": (HIDDEN,),
            f"{name}.norm2.weight": (HIDDEN,),
        }
    return out | {"norm.weight": (HIDDEN,), "head.weight": (VOCAB, HIDDEN)}


def deepseek() -> dict[str, tuple[int, ...]]:
    """The parameters of DeepSeek-V3 that all ranks share; `experts` has the others."""
    out: dict[str, tuple[int, ...]] = {"embed.weight": (129280, 7168)}
    for layer in range(61):
        name = f"layers.{layer}"
        out |= {
            f"{name}.attn.q_a.weight": (1536, 7168),
            f"{name}.attn.q_a_norm.weight": (1536,),
            f"{name}.attn.q_b.weight": (24576, 1536),
            f"{name}.attn.kv_a.weight": (576, 7168),
            f"{name}.attn.kv_a_norm.weight": (512,),
            f"{name}.attn.kv_b.weight": (32768, 512),
            f"{name}.attn.o.weight": (7168, 16384),
            f"{name}.norm1.weight": (7168,),
            f"{name}.norm2.weight": (7168,),
        }
        kind, width = ("mlp", 18432) if layer < DENSE else ("shared", 2048)
        out |= {f"{name}.{kind}.{m}.weight": (width, 7168) for m in ("gate", "up")}
        out[f"{name}.{kind}.down.weight"] = (7168, width)
        if layer >= DENSE:
            out |= {f"{name}.router.weight": (EXPERTS, 7168), f"{name}.router.bias": (EXPERTS,)}
    return out | {"norm.weight": (7168,), "head.weight": (129280, 7168)}


def experts(index: int) -> dict[str, tuple[int, ...]]:
    """The parameters of the experts that one of 64 expert-parallel ranks holds."""
    mine = range(index * EXPERTS // EP, (index + 1) * EXPERTS // EP)
    return {
        f"layers.{layer}.experts.{e}.{m}.weight": (7168, 2048) if m == "down" else (2048, 7168)
        for layer in range(DENSE, 61)
        for e in mine
        for m in ("gate", "up", "down")
    }


class Held(NamedTuple):
    """Parameters on a mesh: the sizes of its axes, its ranks in row-major order, and the placements of each state."""

    sizes: tuple[int, ...]
    ranks: Sequence[int]
    shapes: dict[str, tuple[int, ...]]
    place: Callable[[str, str, tuple[int, ...]], list[Any]]


class Case(NamedTuple):
    """A way to distribute a model: what a rank holds, and the group of ranks that hold the same tensors."""

    held: Callable[[int, int], list[Held]]
    group: Callable[[int, int], int]


def fsdp2(rank: int, ranks: int) -> list[Held]:
    from torch.distributed.tensor import Shard

    del rank
    return [Held((ranks,), range(ranks), llama(), lambda *_: [Shard(0)])]


def hsdp(rank: int, ranks: int) -> list[Held]:
    from torch.distributed.tensor import Replicate, Shard

    del rank
    return [Held((ranks // 32, 32), range(ranks), llama(), lambda *_: [Replicate(), Shard(0)])]


def stages(ranks: int) -> int:
    return min(16, ranks // 16)


def zero1(rank: int, ranks: int) -> list[Held]:
    """Tensor-parallel by 8, pipeline-parallel by up to 16; optimizer states are sharded over data-parallel ranks."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    pp = stages(ranks)
    dp, each = ranks // 8 // pp, ranks // pp
    stage = rank // each
    first, last = LAYERS * stage // pp, LAYERS * (stage + 1) // pp

    def of(name: str) -> bool:
        if name.startswith("layers."):
            return first <= int(name.split(".")[1]) < last
        return stage == (0 if name.startswith("embed") else pp - 1)

    def place(name: str, state: str, shape: tuple[int, ...]) -> list[Any]:
        dim = 1 if name.endswith(("o.weight", "down.weight")) else 0
        if state == "weight":
            return [Replicate(), Shard(dim) if len(shape) > 1 else Replicate()]
        if len(shape) == 1:
            return [Shard(0), Replicate()]
        return [Shard(0) if dim else _StridedShard(0, split_factor=8), Shard(dim)]

    return [Held((dp, 8), range(stage * each, (stage + 1) * each), {n: s for n, s in llama().items() if of(n)}, place)]


def expert_parallel(rank: int, ranks: int) -> list[Held]:
    from torch.distributed.tensor import Shard

    every = Held((ranks,), range(ranks), deepseek(), lambda *_: [Shard(0)])
    mine = range(rank % EP, ranks, EP)
    return [every, Held((len(mine),), mine, experts(rank % EP), lambda *_: [Shard(0)])]


CASES = {
    "405B FSDP2": Case(fsdp2, lambda _, ranks: ranks * 0),
    "405B HSDP": Case(hsdp, lambda _, ranks: ranks * 0),
    "405B TP8 PP ZeRO-1": Case(zero1, lambda rank, ranks: rank // (ranks // stages(ranks))),
    "DeepSeek-V3 EP64": Case(expert_parallel, lambda rank, _: rank % EP),
}


def statement_of(case: Case, rank: int, ranks: int) -> tuple[Any, list[Any], float, float]:
    """What a rank states, the checksums of its pieces, and the processor seconds for this and to collect its state.

    Its tensors are DTensors whose memory is one element.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ucformat.torch.saving.assignment import WriteItem
    from ucformat.torch.saving.equality import checksums
    from ucformat.torch.saving.manifest import state_info
    from ucformat.torch.saving.statement import Facts, Statement
    from ucformat.torch.state.elements import elements_of, host_memory
    from ucformat.torch.state.local import LocalState, local_of

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    tensors = []
    try:
        for held in case.held(rank, ranks):
            places = torch.tensor(list(held.ranks)).reshape(held.sizes)
            mesh = DeviceMesh("cpu", places, _init_backend=False, _rank=rank)

            @cache  # layers repeat, and no value differs
            def made(shape: tuple[int, ...], dtype: str, placements: tuple[Any, ...], mesh: Any = mesh) -> Any:
                local, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
                one = torch.empty((), dtype=getattr(torch, dtype)).expand(local)
                strides = torch.empty(shape, device="meta").stride()
                return DTensor.from_local(
                    one, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
                )

            tensors += [
                (name, state, made(shape, dtype, tuple(held.place(name, state, shape))))
                for name, shape in held.shapes.items()
                for state, dtype in STATES
            ]
    finally:
        dist.destroy_process_group()
    begun = time.process_time()
    shards = tuple(local_of(*tensor) for tensor in tensors)
    collected = time.process_time()
    info = state_info(LocalState(shards))
    items = [WriteItem(i, tuple(p.box for p in pieces)) for i, pieces in info.tensors]
    memories = [host_memory(s.tensor) for s in shards]
    sums = checksums(items, lambda n, p: elements_of(shards[n].pieces[p], memories[n], shards[n].info.itemsize))
    distributions = [info.distributions[n] if n >= 0 else None for n in info.distributed]
    stated = Statement(rank, items, distributions, Facts({}, {}))
    return stated, sums, time.process_time() - collected, collected - begun


class Tree:
    """All ranks but rank 0: their messages, merged in the tree over hosts of eight ranks, in a process of its own."""

    def __init__(self, case: Case, ranks: int, text: str) -> None:
        from ucformat.torch.comm.tree import parents_of

        self._parents = parents_of([str(rank // 8) for rank in range(ranks)])
        groups: dict[int, list[int]] = {}
        for rank in range(ranks):
            groups.setdefault(case.group(rank, ranks), []).append(rank)
        self._of: list[Any] = [None] * ranks  # the statement and checksums of each rank's group
        self._offers: list[Any] = [None] * ranks
        self.listed = 0
        for members in groups.values():
            stated, sums, _, _ = statement_of(case, members[0], ranks)
            self.listed += not stated.complete
            for rank in members:
                stated.rank = rank
                stated.coordinates = {mesh: mesh.coordinate(rank) for mesh in stated.coordinates}
                self._offers[rank] = stated.offer(text, sums, ())
                self._of[rank] = (stated, sums)

    def merged(self, question: Any) -> tuple[list[bytes], int]:
        """The messages of the children of rank 0, the first or those after a question, and the bytes of all ranks."""
        from ucformat.torch.comm.wire import encode
        from ucformat.torch.saving.agree import merge_more, merge_offers
        from ucformat.torch.saving.statement import More, Offer

        kind, merge = (Offer, merge_offers) if question is None else (More, merge_more)
        below: dict[int, list[Any]] = {}
        sent, first = 0, []
        for rank in range(len(self._offers) - 1, 0, -1):
            value = self._offers[rank]
            if question is not None:
                stated, sums = self._of[rank]
                stated.rank = rank
                value = stated.more(question.others.get(rank, question.common), sums)
            for child in reversed(below.pop(rank, [])):
                value = merge(value, child)
            data = encode(value, kind)
            sent += len(data)
            if self._parents[rank]:
                below.setdefault(self._parents[rank], []).append(value)
            else:
                first.append(data)
        return first[::-1], sent


def serve(case: Case, ranks: int, text: str, pipe: Any) -> None:
    """Answer rank 0's requests for the messages of its children."""
    tree = Tree(case, ranks, text)
    pipe.send(tree.listed)
    while (request := pipe.recv()) is not None:
        pipe.send(tree.merged(request[1]))


class RankZero:
    """A group in which this process is rank 0, with the collective that `agree` uses."""

    def __init__(self, ranks: int, pipe: Any) -> None:
        self.rank, self.size, self._pipe = 0, ranks, pipe
        self.cache: dict[str, Any] = {}
        self.exchanged = 0
        self._question: Any = None

    def combine(self, value: Any, merge: Any, kind: Any, then: Any, answer_kind: Any) -> Any:
        """As `Group.combine`."""
        from ucformat.torch.comm.wire import Addressed, decode, encode

        self._pipe.send(("merge", self._question))
        children, sent = self._pipe.recv()
        for data in children:
            value = merge(value, decode(data, kind))
        answer = then(value)
        self._question = answer if isinstance(answer, Addressed) else None
        if isinstance(answer, Addressed):
            self.exchanged += sum(DEPTH * len(encode(told, answer_kind)) for told in answer.others.values())
            answer = answer.others.get(0, answer.common)
        self.exchanged += sent + (self.size - 1) * len(encode(answer, answer_kind))
        return answer


def memory(what: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    with open("/proc/self/status") as status:  # noqa: PTH123
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(what))


def in_fork(act: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(act, arguments)


def of_rank_zero(name: str, form: Any, ranks: int, pipe: Any) -> dict[str, Any]:
    """The seconds of rank 0 for the first plan and the next one, its memory, and the bytes exchanged and stored."""
    from pathlib import Path

    from ucformat.schema.tensors import TensorDoc, TensorTable
    from ucformat.torch.saving.agree import agree
    from ucformat.torch.saving.plan import SaveOptions, described_plan, write_plan
    from ucformat.torch.saving.statement import Exceptions
    from ucformat.torch.saving.write import sidecar_of

    stated, sums, stating, _ = statement_of(CASES[name], 0, ranks)
    group: Any = RankZero(ranks, pipe)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = memory("VmRSS")
    options = SaveOptions("", form)
    known: list[Any] = []  # as `plan_save` keeps it

    def plan() -> tuple[Any, Any, bytes]:
        answer, joined = agree(group, stated, name, sums, lambda: "0" * 20, equal=True, arrays=form == "zarr")
        if answer.attempt is None or joined is None:
            raise SystemExit(f"{name}: the descriptions do not fit each other")
        if not known or known[0] is not joined:
            part = write_plan(stated, answer.exceptions or Exceptions(), options)
            known[:] = [joined, described_plan(joined, form), part]
        found = known[1]
        if form == "zarr":
            return answer, found, b""
        return answer, found, sidecar_of(found.infos, (), (), f"data/{'0' * 20}", found.described)

    begun = time.process_time()
    answer, found, sidecar = plan()
    first = time.process_time()
    exchanged = group.exchanged
    peak = memory("VmHWM") - before
    again = time.process_time()
    if not stated.is_of([replace(i) for i in stated.items], list(stated._distributions), stated.facts):  # noqa: SLF001
        raise SystemExit(f"{name}: an equal state is not found to be equal")
    plan()
    again_s = time.process_time() - again
    docs = [
        TensorDoc(
            name=a.info.name,
            state=a.info.state,
            dtype=a.info.dtype,
            shape=a.info.shape,
            chunk=a.grid.chunk,
            shard=a.grid.shard,
            digest=f"xxh3:{'0' * 32}",
            path=a.path,
        )
        for a in (found.arrays("0" * 20, options) if form == "zarr" else ())
    ]
    out = {
        "first_s": stating + first - begun,
        "again_s": again_s,
        "rss_mb": peak / 1e6,
        "exchanged_mb": exchanged / 1e6,
        "metadata_mb": (len(sidecar) + len((found.table or TensorTable.of(docs)).as_json())) / 1e6,
    }
    pipe.send(None)
    return {"row": out, "answer": answer}


def of_other(name: str, form: Any, rank: int, ranks: int, answer: Any) -> tuple[float, float]:
    """The processor seconds of another rank, and its memory in MB."""
    from pathlib import Path

    from ucformat.torch.saving.plan import SaveOptions, write_plan
    from ucformat.torch.saving.statement import Exceptions

    stated, _, stating, _ = statement_of(CASES[name], rank, ranks)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    begun = time.process_time()
    write_plan(stated, answer.exceptions or Exceptions(), SaveOptions("", form))
    return stating + time.process_time() - begun, (memory("VmHWM") - before) / 1e6


def simulate(name: str, form: str, ranks: int) -> dict[str, Any]:
    """A row of the table."""
    case = CASES[name]
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    tree = fork.Process(target=serve, args=(case, ranks, name, there))
    tree.start()
    listed = here.recv()
    found = in_fork(of_rank_zero, name, form, ranks, here)
    tree.join()
    groups: dict[int, list[int]] = {}
    for rank in range(ranks):
        groups.setdefault(case.group(rank, ranks), []).append(rank)
    chance = random.Random(ranks)
    some = chance.sample(sorted(groups), min(len(groups), 8))
    others = {r for g in some for r in (groups[g][0], groups[g][-1])} | set(chance.sample(range(ranks), 16))
    measured = [in_fork(of_other, name, form, rank, ranks, found["answer"]) for rank in sorted(others - {0})]
    row = found["row"]
    return {
        "case": f"{name}, {form}",
        "ranks": ranks,
        **{k: round(v, 3) for k, v in row.items()},
        "other_s": round(max(s for s, _ in measured), 3),
        "other_rss_mb": round(max(m for _, m in measured), 1),
        "listed": listed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one list of rows")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="numbers of ranks")
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--form", nargs="*", default=["packed", "zarr"], choices=["packed", "zarr"])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        import ucformat.torch  # noqa: F401 - memory is counted above that of imports

        print(json.dumps(simulate(given.case[0], given.form[0], given.ranks[0])))
        return
    asked = [(case, form, ranks) for case in given.case for form in given.form for ranks in given.ranks]
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda one: run_alone(*one), asked))
    if given.json:
        print(json.dumps(rows))
        return
    heads = ("case", "ranks", "first_s", "again_s", "other_s", "rss_mb", "other_rss_mb", "exchanged_mb", "metadata_mb")
    print("Seconds are those of the processor, memory is that above the state and the imports.\n")
    print(table([*heads, "listed"], [[str(row[head]) for head in (*heads, "listed")] for row in rows]) + "\n")
    print(targets(*goals(rows)))


def run_alone(case: str, form: str, ranks: int) -> dict[str, Any]:
    """A row, from a process of its own."""
    command = [sys.executable, "-m", "bench.ranks", "--one", "--case", case, "--form", form, "--ranks", str(ranks)]
    row: dict[str, Any] = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    print(json.dumps(row), file=sys.stderr)
    return row


def goals(rows: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """What each case has to hold at its most ranks, and how it grows from 1,024 ranks on."""
    out = []
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        last, large = of_case[-1], case.startswith("DeepSeek")
        limits = {
            "first_s": 10 if large else 3, "again_s": 0.1, "rss_mb": 500, "other_s": 1, "other_rss_mb": 200,
            "exchanged_mb": 20, "metadata_mb": 15 if large else 3, "listed": 0,
        }  # fmt: skip
        out += [(f"{case}, {last['ranks']} ranks: {k}", f"<= {limit}", last[k]) for k, limit in limits.items()]
        middle = next((row for row in of_case if row["ranks"] == 1024), None)
        if middle and last is not middle:
            growing = ("first_s", "rss_mb", "metadata_mb")
            out += [(f"{case}, from 1024: {k}, times", "<= 1.5", last[k] / max(middle[k], 1e-3)) for k in growing]
    return out


if __name__ == "__main__":
    main()
