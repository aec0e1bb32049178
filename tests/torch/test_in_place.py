"""The safetensors form of a save: any sharding, killed ranks, tools that load the files."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import ucformat
from tests.conformance import reader
from tests.tiers import rounds
from tests.torch.ranks import KILLED, Ranks
from ucformat.errors import NotFound, UsageError
from ucformat.exporters.safetensors import files_of
from ucformat.format.chunking import Tiling
from ucformat.format.described import Described, DescribedRow, FileOrder
from ucformat.format.sidecar import encode_columns
from ucformat.geometry.box import Box
from ucformat.geometry.distribution import BoxList, Cut, Distribution, RankMesh
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.jobs import weight_files
from ucformat.storage.in_place import PartsWriter
from ucformat.storage.local import LocalStore
from ucformat.storage.strided import checksum
from ucformat.torch.saving import in_place
from ucformat.torch.saving import in_place as parts
from ucformat.torch.saving.in_place import (
    WeightFilesPlan,
    WeightPlanner,
    block_crcs,
    write_in_place,
)
from ucformat.torch.saving.shards import PlannedTensors
from ucformat.torch.saving.statement import RankState, WriteItem
from ucformat.torch.saving.write import packed_extents

if TYPE_CHECKING:
    from ucformat.checkpoint import Checkpoint
    from ucformat.storage.in_place import Way
    from ucformat.torch.saving.options import Form

pytest.importorskip("torch")
RANKS = Ranks("tests.torch.in_place_program")


def names_in(ck: Any) -> list[str]:
    data = Path(f"{ck.hf_url}/model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]


def verified(place: str | Path, truth: dict[str, Any]) -> Checkpoint:
    """The checkpoint, which is intact and holds these weights."""
    ck = ucformat.open(place)
    ucformat.verify(ck).raise_if_damaged()
    assert set(ck.names()) == set(truth)
    for name, (dtype, shape, data) in truth.items():
        info = ck.tensors[Key(name, "weight")]
        assert (info.dtype, info.shape) == (dtype, shape)
        assert np.asarray(ck[name][...]).tobytes() == data, name
    return ck


def intact(place: Path, truth: dict[str, Any]) -> None:
    ck = verified(place, truth)
    assert {t["name"]: found for t, found in reader.Checkpoint(place)} == {
        n: d for n, (_, _, d) in truth.items()
    }
    assert sorted(names_in(ck)) == sorted(truth)
    assert list(place.rglob(".ucf-*.tmp")) == []


@pytest.mark.front("1-*")
@pytest.mark.parametrize(("seed", "sizes"), [(1, [2]), (2, [4]), (3, [2, 2]), (4, [3]), (5, [4])])
def test_any_sharding(seed: int, sizes: list[int], tmp_path: Path) -> None:
    found = RANKS.run("any_cut", int(np.prod(sizes)), tmp_path, seed=seed, sizes=sizes)
    intact(tmp_path / "ck", found[0])
    exported = ucformat.export(
        tmp_path / "ck", tmp_path / "out", "safetensors"
    )  # the same file, byte for byte
    (own,) = Path(str(ucformat.open(tmp_path / "ck").hf_url)).glob("*.safetensors")
    assert own.read_bytes() == Path(exported.url, "model.safetensors").read_bytes()


def test_in_the_background(tmp_path: Path) -> None:
    found = RANKS.run("any_cut", 2, tmp_path, seed=7, sizes=[2], background=True)
    intact(tmp_path / "ck", found[0])


@pytest.mark.front("fsdp2-2", "tp-2")
@pytest.mark.parametrize(("kind", "size"), [("fsdp2", 2), ("tied", 4), ("tp", 2), ("ddp", 2)])
def test_transformers_loads_what_was_trained(kind: str, size: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logits = RANKS.run("train", size, tmp_path, kind=kind)[0]
    for step in range(2):
        ck = ucformat.open(tmp_path / f"step-{step}")
        ucformat.verify(ck).raise_if_damaged()
        states = {t.state: t.path is not None for t in ck.manifest.tensors}
        assert states == {"weight": False, "exp_avg": True, "exp_avg_sq": True, "step": True}
        model = transformers.AutoModelForCausalLM.from_pretrained(ck.hf_url)
        assert type(model).__name__ == "LlamaForCausalLM"
        found = model(torch.arange(24).reshape(2, 12)).logits.detach().numpy()
        np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-5)  # sums in another order
        with safe_open(f"{ck.hf_url}/model.safetensors", "np") as file:
            for name in names_in(ck):
                assert np.array_equal(file.get_tensor(name), ck[name][...]), name


@pytest.mark.front("1-1")
@pytest.mark.parametrize(("victim", "after"), [(0, 1), (1, 1), (1, 5), (2, 7)])
def test_a_killed_rank_commits_nothing(victim: int, after: int, tmp_path: Path) -> None:
    found = RANKS.run("killed", 3, tmp_path, victim=victim, after=after)
    assert found[victim] == KILLED
    assert all(isinstance(m, str) for rank, m in enumerate(found) if rank != victim)
    with pytest.raises(NotFound):
        ucformat.open(tmp_path / "ck")


def test_errors_are_raised_on_all_ranks(tmp_path: Path) -> None:
    found = RANKS.run("refused", 2, tmp_path)
    empty, dtype, replica, form = found[0]
    assert "no weights" in empty
    assert "complex128" in dtype
    assert "different value on rank 1" in replica
    assert form == '"zarr" or "packed" or "safetensors"'
    for name in "abc":
        left = [f for f in (tmp_path / name).rglob("*") if f.is_file()]
        assert left == [], name
    ucformat.verify(tmp_path / "e").raise_if_damaged()


def test_assets_are_beside_the_weights(tmp_path: Path) -> None:
    import torch

    from ucformat.torch import Manager, save

    folder = tmp_path / "hf"
    folder.mkdir()
    with pytest.raises(UsageError, match=r"no config\.json"):
        save({"w": torch.ones(3)}, tmp_path / "x", form="safetensors", assets=folder)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "vocab.json").write_text("{}")
    forms: tuple[Form, ...] = ("safetensors", "packed", "zarr")
    for form in forms:
        save({"w": torch.ones(3), "step": 4}, tmp_path / form, form=form, assets=folder)
        ck = ucformat.open(tmp_path / form)
        assert dict(ck.assets) == {f.name: f.read_bytes() for f in folder.iterdir()}
        assert dict(ck.objects) == {"step": 4}
        ucformat.verify(ck).raise_if_damaged()
    beside = Path(str(ucformat.open(tmp_path / "safetensors").hf_url))
    assert sorted(f.name for f in beside.iterdir()) == [
        "config.json",
        "model.safetensors",
        "vocab.json",
    ]
    with Manager(tmp_path / "run", every=1, form="safetensors", assets=folder) as manager:
        manager.save(1, {"w": torch.ones(3)})
    assert Path(str(ucformat.open(tmp_path / "run/step-00000001").hf_url), "vocab.json").exists()


def boxes_of(shape: tuple[int, ...], chance: random.Random) -> list[Box]:
    """Boxes that cover a shape, cut at random along random dims."""
    out = [Box.whole(shape)]
    for _ in range(chance.randrange(6)):
        if not shape:
            break
        box = out.pop(chance.randrange(len(out)))
        d = chance.randrange(len(shape))
        at = chance.randrange(box.shape[d] + 1)
        for low, n in ((0, at), (at, box.shape[d] - at)):
            start, edges = list(box.start), list(box.shape)
            start[d], edges[d] = start[d] + low, n
            out.append(Box(tuple(start), tuple(edges)))
    return [b for b in out if b.size]


def told_of(infos: Any, described: Any, way: Way, uploads: tuple[str, ...]) -> WeightFilesPlan:
    infos = tuple(infos)
    stored = PlannedTensors(infos, ((),) * len(infos), described=described)
    sidecar = encode_columns(*packed_extents(stored, "data/w", {}))
    return WeightFilesPlan(infos, sidecar, {}, "data/w", way, uploads)


def any_weights(
    chance: random.Random, ranks: int
) -> tuple[list[TensorInfo], Described | None, dict[Key, BoxList], list[list[WriteItem]]]:
    """Weights, of which the first are described, those that are listed, and what each rank provides of each."""
    shapes = [
        tuple(chance.randrange(1, 9) for _ in range(chance.randrange(4)))
        for _ in range(chance.randrange(1, 6))
    ]
    infos = [
        TensorInfo(f"t{n}", "weight", chance.choice(["uint8", "float32"]), s)
        for n, s in enumerate(shapes)
    ]
    mesh, rows, held = RankMesh.of((ranks,), chance.sample(range(ranks), ranks)), [], []
    for number, info in enumerate(infos[: chance.randrange(len(infos) + 1)]):
        cuts = (
            (Cut(chance.randrange(len(info.shape)), 0),)
            if info.shape and chance.random() < 0.7
            else ()
        )
        flat = (
            {"flat": 0, "part": -(-info.size // ranks)}
            if not cuts and chance.random() < 0.5
            else {}
        )
        d = Distribution(mesh, cuts, **flat)
        rows.append(
            DescribedRow(
                number, d, chance.randrange(d.copies), Tiling.of(info.shape, info.itemsize).tile
            )
        )
    order = FileOrder()
    rows.sort(key=lambda r: order(infos[r.tensor], r.distribution))
    described = Described(rows, infos, "") if rows else None
    for number, info in enumerate(infos):
        found: list[list[Box]] = [[] for _ in range(ranks)]
        if described and number in described:
            for rank, box, _ in described.stored(number):
                found[rank].append(box)
        else:
            for box in boxes_of(info.shape, chance):
                found[chance.randrange(ranks)].append(box)
        held.append(found)
    items = [
        [WriteItem(i, tuple(of[rank])) for i, of in zip(infos, held, strict=True)]
        for rank in range(ranks)
    ]
    listed = {}
    for info, of in list(zip(infos, held, strict=True))[len(rows) :]:
        both = [(box, rank) for rank, boxes in enumerate(of) for box in boxes]
        mesh = RankMesh((ranks,), 0, (1,))
        listed[info.key] = BoxList(mesh, tuple(b for b, _ in both), tuple(r for _, r in both))
    return infos, described, listed, items


class Mail:
    """Exchanges what ranks send each other, one rank after the other: first all send, then all receive."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int, int], list[tuple[int, Box, Any]]] = {}
        self.receiving = False

    def exchange(
        self,
        group: Any,
        _sizes: Any,
        batches: Any,
        messages: Any,
        elements: Any,
        write: Any,
        threads: int,
    ) -> list[Any]:
        assert threads > 0
        if not self.receiving:
            for m in messages:
                assert m.to != group.rank
                found = [(f.tensor, f.box, elements(f)) for f in m.fragments]
                assert (
                    self.sent.setdefault((group.rank, m.to, m.number), found) is found
                )  # one message
            return []
        out = []
        for number, batch in enumerate(batches):
            for task in batch:
                found = []
                for f in task.fragments:
                    if f.sender == group.rank:
                        found.append(elements(f))
                        continue
                    tensor, box, data = self.sent[f.sender, group.rank, number].pop(0)
                    assert (tensor, box) == (f.tensor, f.box)
                    found.append(data)
                out.append(write(task, found))
        return out


class Uploads:
    """Uploads in memory."""

    def __init__(self) -> None:
        self.parts: dict[tuple[str, int], bytes] = {}

    def put(self, key: str, upload: str, number: int, data: Any) -> str:
        assert (key, number) not in self.parts
        self.parts[key, number] = bytes(data)
        return upload


@settings(max_examples=rounds(30, 100))
@given(seed=st.integers(0, 10**9))
def test_any_boxes_of_any_ranks(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whoever provides which box, the bytes are those of the export, and the checksums those of the bytes."""
    chance, folder = random.Random(seed), tmp_path_factory.mktemp("boxes")
    ranks = chance.randrange(1, 5)
    infos, described, listed, all_items = any_weights(chance, ranks)
    values = [
        np.frombuffer(chance.randbytes(i.nbytes), f"u{i.itemsize}").reshape(i.shape) for i in infos
    ]
    way: Way = chance.choice(["in place", "parts", "whole"])
    sums, mail, uploads, least = [], Mail(), Uploads(), chance.choice([64, 1 << 20])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files, "BLOCK_BYTES", chance.choice([8, 40, 1 << 20]))
        patch.setattr(
            weight_files, "files_of", partial(files_of, most=chance.choice([100, 1 << 20]))
        )
        patch.setattr(parts, "PART_BYTES", least)
        patch.setattr(parts, "BATCH_BYTES", 4 * least)
        patch.setattr(in_place, "exchange", mail.exchange)
        patch.setattr(PartsWriter, "_multipart", uploads)
        told = told_of(infos, described, way, ("id",) * 99)
        all_ranks = []
        for rank in range(ranks):
            items = all_items[rank]
            pieces = [(n, p) for n, item in enumerate(items) for p in range(len(item.boxes))]

            def elements(item: int, piece: int, items: Any = items) -> Any:
                box = items[item].boxes[piece]
                part = values[item][
                    tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
                ]
                return np.asarray(part) if seed % 2 or not box.shape else np.asfortranarray(part)

            state = RankState(items, [None] * len(items), {}, {}, elements)
            group: Any = SimpleNamespace(rank=rank, size=ranks)
            weights = WeightPlanner().plan(group, items, pieces, told, listed)
            all_ranks.append((group, state, weights))
        for mail.receiving in (False, True):
            for group, state, weights in all_ranks:
                store = LocalStore(folder)
                if not mail.receiving:
                    patch.setattr(PartsWriter, "write", lambda *_: None)
                written = write_in_place(store, weights, state, group, lambda _: None)
                store.flush()
                sums.append(written.sums if mail.receiving else b"")
            patch.undo()
            patch.setattr(in_place, "exchange", mail.exchange)
            patch.setattr(PartsWriter, "_multipart", uploads)
    assert not any(mail.sent.values())  # all was received
    files = all_ranks[0][2].files
    crcs = block_crcs(files, b"".join(sums))
    for number, target in enumerate(files.files):
        if way == "parts":
            (folder / target.key).parent.mkdir(parents=True, exist_ok=True)
            of = [data for (key, _), data in sorted(uploads.parts.items()) if key == target.key]
            (folder / target.key).write_bytes(b"".join(of))
            largest = files.block_sizes(number)[1:].max(initial=0)
            assert all(len(data) > least - largest for data in of[:-1])
        data, at = (folder / target.key).read_bytes(), 0
        assert len(data) == target.nbytes
        for n, size in zip(files.numbers(number), files.block_sizes(number).tolist(), strict=True):
            assert checksum(memoryview(data[at : at + size])) == crcs[n]
            at += size
        assert at == len(data)
    for info, a in zip(infos, values, strict=True):
        placed = files.tensors[info.key]
        data = (folder / files.files[placed.file].key).read_bytes()
        assert data[placed.offset : placed.offset + info.nbytes] == a.tobytes()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [16, 1024])
def test_plans_do_not_grow_with_ranks(dim: int, ranks: int) -> None:
    infos = tuple(TensorInfo(f"t{n}", "weight", "float32", (8192, 4096)) for n in range(8))
    d = Distribution(RankMesh.of((ranks,), list(range(ranks))), (Cut(dim, 0),))
    rows = [DescribedRow(n, d, 0, Tiling.of(i.shape, i.itemsize).tile) for n, i in enumerate(infos)]
    described = Described(rows, infos, "")
    assert len(told_of(infos, described, "parts", ()).described) < 8 << 10
    items = [WriteItem(i, d.boxes(i.shape, (ranks // 2,))) for i in infos]
    ways: tuple[Way, ...] = ("in place", "parts")
    for way in ways:
        group: Any = SimpleNamespace(rank=ranks // 2, size=ranks)
        told = told_of(infos, described, way, ())
        pieces = [(n, 0) for n in range(len(items))]
        plan = WeightPlanner().plan(group, items, pieces, told, {}).exchanged
        sent = sum(len(m.fragments) for m in plan.messages)
        received = sum(len(task.fragments) for batch in plan.batches for task in batch)
        assert bool(plan.parts) == (way == "parts" or dim == 1)
        assert sent <= len(plan.parts)
        assert received <= 4 * max(len(plan.parts), ranks)
