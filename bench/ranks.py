"""Plans of saves and loads by up to 16,384 ranks, with the real planning functions: seconds, memory, and bytes.

`python -m bench.ranks [--json] [--ranks N …]`. A process for each case and number of ranks.
Statements are made for rank 0, for the first and the last rank of each distinct description, and
for 16 others; the message of each other rank is that of the first one that holds the same, under
its own number. All messages are merged in the tree that ranks form.

Up to 256 ranks, all statements are made: what all ranks write, piece by piece, is compared with the
extents that a reader of the manifest and the sidecar gets, and what each rank expects from others
with what these send.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from bench.common import table, targets
from bench.ranks_cases import CASES, statement_of, tensors_of, with_own_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.ranks_cases import Case

RANKS = (64, 256, 1024, 4096, 16384)
FORMS = ("packed", "zarr")
COMPARED = 256  # ranks, at most
DEPTH = 8  # at most, of the tree: connections that an answer to one rank takes
ATTEMPT = "0" * 20
TP = "405B TP8 PP ZeRO-1"  # the layout under which models are also loaded
SAVE = (
    "case", "ranks", "first_s", "again_s", "other_s", "rss_mb", "other_rss_mb", "exchanged_mb", "metadata_mb",
    "listed", "differ",
)  # fmt: skip
LOADED = ("load_s", "load_rss_mb", "load_files", "load_ranges", "load_sizes", "load_read")
LOAD = ("case", "ranks", *LOADED, *(f"tp_{k}" for k in LOADED))


class Tree:
    """All ranks but rank 0: their messages, merged in the tree over hosts of eight ranks, in a process of its own."""

    def __init__(self, case: Case, ranks: int, text: str) -> None:
        from ucformat.torch.comm.group import parents_of

        self._parents = parents_of([str(rank // 8) for rank in range(ranks)])
        self._of: list[Any] = [None] * ranks  # the statement and checksums of each rank's group
        self._summaries: list[Any] = [None] * ranks
        for members in groups_of(case, ranks).values():
            stated, sums, _ = statement_of(case, members[0], ranks)
            for rank in members:
                stated.rank = rank
                stated.coordinates = {mesh: mesh.coordinate(rank) for mesh in stated.coordinates}
                self._summaries[rank] = stated.summary(text, sums, NOTHING_KEPT)
                self._of[rank] = (stated, sums)

    def merged(self, question: Any) -> tuple[list[bytes], int]:
        """The messages of the children of rank 0, the first or those after a question, and the bytes of all ranks."""
        from ucformat.torch.comm.wire import encode
        from ucformat.torch.saving.agree import merge_replies, merge_summaries
        from ucformat.torch.saving.statement import Replies, Summary

        kind, merge = (Summary, merge_summaries) if question is None else (Replies, merge_replies)
        below: dict[int, list[Any]] = {}
        sent, first = 0, []
        for rank in range(len(self._summaries) - 1, 0, -1):
            value = self._summaries[rank]
            if question is not None:
                stated, sums = self._of[rank]
                stated.rank = rank
                value = stated.reply(question.others.get(rank, question.common), sums)
            for child in reversed(below.pop(rank, [])):
                value = merge(value, child)
            data = encode(value, kind)
            sent += len(data)
            if self._parents[rank]:
                below.setdefault(self._parents[rank], []).append(value)
            else:
                first.append(data)
        return first[::-1], sent


NOTHING_KEPT: Any = (b"", SimpleNamespace(compared=(), left_out={}))


def groups_of(case: Case, ranks: int) -> dict[int, list[int]]:
    """The ranks that hold the same tensors."""
    groups: dict[int, list[int]] = {}
    for rank in range(ranks):
        groups.setdefault(case.group(rank, ranks), []).append(rank)
    return groups


def serve(case: Case, ranks: int, text: str, pipe: Any) -> None:
    """Answer rank 0's requests for the messages of its children."""
    tree = Tree(case, ranks, text)
    while (request := pipe.recv()) is not None:
        pipe.send(tree.merged(request[1]))


class RankZero:
    """A group in which this process is rank 0, with the collective that `agree` uses."""

    def __init__(self, ranks: int, pipe: Any) -> None:
        self.rank, self.size, self._pipe = 0, ranks, pipe
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
            self.exchanged += sum(
                DEPTH * len(encode(told, answer_kind)) for told in answer.others.values()
            )
            answer = answer.others.get(0, answer.common)
        self.exchanged += sent + (self.size - 1) * len(encode(answer, answer_kind))
        return answer


class Memory:
    """The most memory of this process since the object was made, above what it had then."""

    def __init__(self) -> None:
        from pathlib import Path

        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self._before = self._now("VmRSS")

    @staticmethod
    def _now(what: str) -> int:
        with open("/proc/self/status") as status:  # noqa: PTH123
            return next(int(line.split()[1]) << 10 for line in status if line.startswith(what))

    def peak_mb(self) -> float:
        """In megabytes."""
        return (self._now("VmHWM") - self._before) / 1e6


def warm_up() -> None:
    """Import, and make once, what all forks need: memory and seconds are counted without them."""
    import torch

    import ucformat.torch  # noqa: F401
    from ucformat.format import arrays as small

    small.MOST_SMALL_ARRAYS = 1 << 60  # all tensors of the Zarr form are arrays here
    torch.set_num_threads(1)  # a fork would wait for the threads of its parent
    tensors_of(CASES[TP], 0, 16)


def in_fork(act: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(act, arguments)


def of_rank_zero(name: str, form: Any, ranks: int, pipe: Any) -> dict[str, Any]:
    """The seconds of rank 0 for the first plan and the next one, its memory, the bytes exchanged, and the metadata."""
    from ucformat.format.sidecar import encode_columns
    from ucformat.torch.saving.agree import Coordinator, agree
    from ucformat.torch.saving.options import SaveOptions
    from ucformat.torch.saving.plan import own_part
    from ucformat.torch.saving.write import packed_extents

    stated, sums, stating = statement_of(CASES[name], 0, ranks)
    group: Any = RankZero(ranks, pipe)
    memory = Memory()
    options = SaveOptions("", form)
    coordinator = Coordinator()
    known: list[Any] = []  # as `SavePlanner` keeps it
    text: Any = name  # the options of all ranks, which those of a form would be in a save

    def plan() -> tuple[Any, Any, bytes]:
        coordinator.begin(stated, options, lambda _: (ATTEMPT, None))
        agree(group, stated, text, sums, NOTHING_KEPT, coordinator)
        made = coordinator.plan
        assert made is not None
        if known != [made.digest]:
            own_part(stated, made.exceptions, options)
            known[:] = [made.digest]
        if not made.packed.infos:
            return made.exceptions, made, b""
        begins = dict.fromkeys(range(ranks), 0)
        extents = packed_extents(made.packed, f"data/{ATTEMPT}", begins)
        return made.exceptions, made, encode_columns(*extents)

    begun = time.process_time()
    answer, found, sidecar = plan()
    first = time.process_time()
    exchanged = group.exchanged
    peak = memory.peak_mb()
    again = time.process_time()
    if not stated.is_of(
        [replace(i) for i in stated.items],
        list(stated._distributions),  # noqa: SLF001
        stated.facts,
    ):
        raise SystemExit(f"{name}: an equal state is not found to be equal")
    plan()
    again_s = time.process_time() - again
    arrays = options.arrays(found.arrays.infos, ATTEMPT)
    manifest = manifest_with(found.packed.table if sidecar else table_of(arrays), sidecar)
    row = {
        "first_s": stating + first - begun,
        "again_s": again_s,
        "rss_mb": peak,
        "exchanged_mb": exchanged / 1e6,
        "metadata_mb": (len(sidecar) + len(manifest)) / 1e6,
    }
    listed = len(answer.listed)
    return {
        "row": row,
        "exceptions": answer,
        "manifest": manifest,
        "sidecar": sidecar,
        "listed": listed,
    }


def table_of(arrays: list[Any]) -> Any:
    """The tensors of a manifest, for arrays that were not written."""
    from ucformat.schema.tensors import TensorDoc, TensorTable

    return TensorTable.of(
        TensorDoc(
            name=a.info.name,
            state=a.info.state,
            dtype=a.info.dtype,
            shape=a.info.shape,
            chunk=a.grid.chunk,
            shard=a.grid.shard,
            digest=f"xxh3:{n:032x}",
            path=a.path,
        )
        for n, a in enumerate(arrays)
    )


def manifest_with(tensors: Any, sidecar: bytes) -> bytes:
    """A manifest as a save by many ranks writes it."""
    from datetime import UTC, datetime

    from ucformat.format.digest import bytes_digest
    from ucformat.format.structure import manifest_bytes
    from ucformat.schema.manifest import PACKED, Manifest, SidecarDoc, WriterDoc

    path = f"data/{ATTEMPT}/extents.safetensors"
    manifest = Manifest(
        id="0" * 32,
        attempt=ATTEMPT,
        created=datetime.now(UTC),
        requires=(PACKED,) if sidecar else (),
        sidecar=SidecarDoc(path=path, nbytes=len(sidecar), digest=bytes_digest(sidecar))
        if sidecar
        else None,
        writers=tuple(
            WriterDoc(rank=n, nbytes=10**9 + n, seconds=10 + n / 7, stall=n / 7000)
            for n in range(64)
        ),
        tensors=tensors,
    )
    return manifest_bytes(manifest)


def of_other(
    name: str, rank: int, ranks: int, found: dict[str, Any]
) -> dict[str, tuple[float, float]]:
    """The processor seconds of another rank, and its memory in MB, for each form."""
    from ucformat.torch.saving.options import SaveOptions
    from ucformat.torch.saving.plan import own_part

    stated, _, stating = statement_of(CASES[name], rank, ranks)
    out = {}
    for form, exceptions in found.items():
        memory, begun = Memory(), time.process_time()
        own_part(stated, exceptions, SaveOptions("", form))  # type: ignore[arg-type]
        out[form] = (stating + time.process_time() - begun, memory.peak_mb())
    return out


def opened(found: dict[str, Any]) -> Any:
    """The checkpoint of a manifest and a sidecar; its store has files of any size, and counts what is asked of it."""
    from ucformat.checkpoint import Checkpoint
    from ucformat.format.universal import Universal, grid_of
    from ucformat.schema import MANIFEST
    from ucformat.storage.base import Info
    from ucformat.storage.memory import MemoryStore

    class Store(MemoryStore):
        asked: int = 0
        arrays: dict[str, Any]

        def info(self, key: str) -> Info:
            self.asked += 1
            path, _, at = key.partition("/c")
            if path not in self.arrays:
                return Info(key, 1 << 50, "0")
            index = tuple(int(i) for i in at.split("/")[1:])
            return Info(key, self.arrays[path].file_nbytes(index), "0")

    store = Store(uuid4().hex)
    store.put_if_absent(MANIFEST, found["manifest"])
    if found["sidecar"]:
        store.put_if_absent(f"data/{ATTEMPT}/extents.safetensors", found["sidecar"])
    store.arrays = {}
    before = Memory(), time.process_time()
    ck = Checkpoint(Universal(store))
    seconds = time.process_time() - before[1]
    store.arrays = {d.path: grid_of(d) for d in ck.source.docs.values() if d.path}  # type: ignore[attr-defined]
    return ck, store, seconds


def of_load(name: str, rank: int, ranks: int, found: dict[str, Any]) -> dict[str, float]:
    """What a load costs a rank before it reads: to open the checkpoint, match its tensors, and plan the ranges."""
    from ucformat.reading.execute import _check_sizes
    from ucformat.reading.plan import make_plan
    from ucformat.reading.rank import item_for
    from ucformat.torch.loading.match import match, stored_names
    from ucformat.torch.state.local import local_of

    shards = [
        local_of(key, state, with_own_memory(tensor))
        for key, state, tensor in tensors_of(CASES[name], rank, ranks)
    ]
    memory = Memory()
    ck, store, seconds = opened(found)
    begun = time.process_time()
    matched, problems, _ = match(shards, {}, ck, stored_names(ck, None), cast=False)
    if problems.lines(unexpected=False):
        raise SystemExit(f"{name}: {problems.lines(unexpected=False)[:3]}")
    items = [
        item_for(ck.source, m.stored, [(n, p) for p in m.target.pieces])
        for n, m in enumerate(matched)
    ]
    plan = make_plan(items)
    _check_sizes(plan, ck.source.store)
    return {
        "load_s": seconds + time.process_time() - begun,
        "load_rss_mb": memory.peak_mb(),
        "load_files": len(plan.files),
        "load_ranges": plan.ranges,
        "load_sizes": store.asked,
        "load_read": plan.bytes_read / plan.bytes_needed,
    }


def differences(name: str, ranks: int, found: dict[str, Any]) -> int:
    """How many pieces or messages differ: as written and as read, as sent and as received."""
    from ucformat.format.chunking import Tiling
    from ucformat.format.described import ALIGNMENT
    from ucformat.format.universal import grid_of
    from ucformat.torch.saving.options import SaveOptions
    from ucformat.torch.saving.plan import own_part

    gc.disable()  # which would go through millions of pieces again and again
    extents: Counter[Any] = Counter()  # as written minus as read, and as sent minus as received
    ck, _, _ = opened(found["packed"])
    described = ck.source.sidecar().described
    number = {(i.name, i.state): n for n, i in enumerate(ck.metadata.tensor_list.tensors)}
    for n in number.values():
        for rank, box, offset in described.stored(n):
            extents[n, rank, offset, box] -= 1
    owners: Counter[Any] = Counter()
    for key, doc in opened(found["zarr"])[0].source.docs.items():
        owners.update({(key, at): -1 for at in grid_of(doc).shards()})
    for rank in range(ranks):
        stated, _, _ = statement_of(CASES[name], rank, ranks)
        plans = {
            form: own_part(stated, found[form]["exceptions"], SaveOptions("", form))
            for form in ("packed", "zarr")
        }
        end = 0
        for item, piece in plans["packed"].pieces:
            info, box = stated.items[item].info, stated.items[item].boxes[piece]
            end += -end % ALIGNMENT
            extents[number[info.key], rank, end, box] += 1
            end += Tiling.of(info.shape, info.itemsize).nbytes(box)
        zarr = plans["zarr"]
        # messages of each sender, which come in the order in which they are sent
        received: Counter[int] = Counter()
        for batch in zarr.batches:
            for task in batch:
                owners[stated.items[task.tensor].info.key, task.at] += 1
            for sender in {f.sender for s in batch for f in s.fragments} - {rank}:
                sent = tuple(
                    (stated.items[f.tensor].info.key, f.box)
                    for s in batch
                    for f in s.fragments
                    if f.sender == sender
                )
                extents[sender, rank, received[sender], hash(sent)] -= 1
                received[sender] += 1
        told: Counter[int] = Counter()
        for message in zarr.messages:
            sent = tuple((stated.items[f.tensor].info.key, f.box) for f in message.fragments)
            extents[rank, message.to, told[message.to], hash(sent)] += 1
            told[message.to] += 1
    return sum(n != 0 for n in (*extents.values(), *owners.values()))


def simulate(name: str, ranks: int) -> list[dict[str, Any]]:
    """The rows of both forms."""
    case = CASES[name]
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    tree = fork.Process(target=serve, args=(case, ranks, name, there))
    tree.start()
    found = {form: in_fork(of_rank_zero, name, form, ranks, here) for form in FORMS}
    here.send(None)
    tree.join()
    groups, chance = groups_of(case, ranks), random.Random(ranks)
    some = chance.sample(sorted(groups), min(len(groups), 8))
    others = {r for g in some for r in (groups[g][0], groups[g][-1])} | set(
        chance.sample(range(ranks), 16)
    )
    told = {form: found[form]["exceptions"] for form in FORMS}
    measured = [in_fork(of_other, name, rank, ranks, told) for rank in sorted(others - {0})]
    differ = in_fork(differences, name, ranks, found) if ranks <= COMPARED else None
    rows = []
    for form in FORMS:
        row = {
            "case": f"{name}, {form}",
            "ranks": ranks,
            **found[form]["row"],
            "other_s": max(m[form][0] for m in measured),
            "other_rss_mb": max(m[form][1] for m in measured),
            "listed": found[form]["listed"],
            "differ": differ,
        }
        for under, layout in {"": name, **({"tp_": TP} if "405B" in name else {})}.items():
            load = in_fork(of_load, layout, ranks // 2, ranks, found[form])
            row |= {f"{under}{k}": v for k, v in load.items()}
        rows.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one list of rows")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="numbers of ranks")
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        warm_up()
        print(json.dumps(simulate(given.case[0], given.ranks[0])))
        return
    # longest first
    asked = [
        (case, ranks) for ranks in sorted(given.ranks, reverse=True) for case in given.case[::-1]
    ]
    with ThreadPoolExecutor(2) as pool:
        rows = [row for found in pool.map(lambda one: run_alone(*one), asked) for row in found]
    order = {case: n for n, case in enumerate(CASES)}
    rows.sort(key=lambda row: (order[row["case"].rpartition(", ")[0]], row["case"], row["ranks"]))
    if given.json:
        print(json.dumps(rows))
        return
    print("Seconds are those of the processor, memory is that above the state and the imports.\n")
    for heads in (SAVE, LOAD):
        print(
            table(list(heads), [[str(row.get(head, "")) for head in heads] for row in rows]) + "\n"
        )
    print(targets(*goals(rows)))


def run_alone(case: str, ranks: int) -> list[dict[str, Any]]:
    """The rows of a case, from a process of its own."""
    command = [sys.executable, "-m", "bench.ranks", "--one", "--case", case, "--ranks", str(ranks)]
    rows: list[dict[str, Any]] = json.loads(
        subprocess.check_output(command, text=True).splitlines()[-1]
    )
    for row in rows:
        print(json.dumps(row), file=sys.stderr)
    return rows


def goals(rows: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """What each case has to hold at its most ranks, and how it grows from 1,024 ranks on."""
    out = []
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        last, large = of_case[-1], case.startswith("DeepSeek")
        limits = {
            "first_s": 10 if large else 3, "again_s": 0.1, "rss_mb": 500, "other_s": 1, "other_rss_mb": 200,
            "exchanged_mb": 20, "metadata_mb": 15 if large else 3, "listed": 0,
            **{k: 1 if k.endswith("_s") else 300 for k in last if k.endswith(("load_s", "load_rss_mb"))},
        }  # fmt: skip
        out += [
            (f"{case}, {last['ranks']} ranks: {k}", f"<= {limit}", last[k])
            for k, limit in limits.items()
        ]
        compared = [row for row in of_case if row["differ"] is not None]
        out += [
            (f"{case}, {row['ranks']} ranks: differ", "<= 0", row["differ"]) for row in compared
        ]
        middle = next((row for row in of_case if row["ranks"] == 1024), None)
        if middle and last is not middle:
            growing = ("first_s", "rss_mb", "metadata_mb")
            out += [
                (f"{case}, from 1024: {k}, times", "<= 1.5", last[k] / max(middle[k], 1e-3))
                for k in growing
            ]
    return out


if __name__ == "__main__":
    main()
