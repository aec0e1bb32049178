"""Checkpoints as patches of others, chains of them, and making these whole or one patch again."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
from tests.fakes import Arrays, manifest_file, random_array
from tests.jobs.forks import Forks
from tests.jobs.test_bases import is_read, source
from tests.tiers import rounds
from ucformat.errors import (
    ChecksumError,
    Conflict,
    NotFinished,
    NotFound,
    UnsupportedError,
    UsageError,
)
from ucformat.format.encoded import find_image
from ucformat.format.encoding import Encoding
from ucformat.format.tile_index import TileIndex
from ucformat.geometry.tensor import TensorInfo
from ucformat.jobs import increments, patch_files
from ucformat.jobs.compact import is_whole
from ucformat.jobs.compare import compare
from ucformat.jobs.dependents import dependents_at
from ucformat.jobs.patch import Patch, stored_bytes
from ucformat.jobs.patch_files import TilesJob, place_boxes
from ucformat.jobs.shards import WriteOptions
from ucformat.schema import ITEMSIZE
from ucformat.schema.manifest import BASES, CODECS, PACKED, PATCHES
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.s3 import Bucket
    from ucformat.checkpoint import Checkpoint


def trained(steps: int) -> Arrays:
    """The tensors of a model after so many small steps; what is frozen stays."""
    arrays: Arrays = {
        ("frozen", "weight"): random_array((300, 100), "float32"),
        ("up", "weight"): np.linspace(1, 2, 700 * 401, dtype=np.float32).reshape(700, 401),
        ("emb", "weight"): random_array((1000, 33), "bfloat16", 1),
        ("noise", "exp_avg"): random_array((50, 40), "float64", 2 + steps),
        ("count", "weight"): np.array(steps, np.int64),
        ("none", "weight"): np.zeros((0, 4), np.int8),
    }
    for step in range(steps):
        arrays["up", "weight"] = arrays["up", "weight"] * np.float32(1 + 1e-6 * (step + 1))
        rows = np.random.default_rng(step).integers(0, 1000, 9)
        arrays["emb", "weight"] = arrays["emb", "weight"].copy()
        arrays["emb", "weight"][rows] = random_array((9, 33), "bfloat16", 100 + step)
    return arrays


def put(place: object, arrays: Arrays, **more: Any) -> Checkpoint:
    return ucformat.convert(source(arrays), str(place), **more)


def encodings(ck: Checkpoint) -> set[Encoding]:
    """How the tiles of a checkpoint are stored."""
    assert ck.universal is not None
    images = [find_image(ck.universal.store, file) for file in ck.universal.sidecar().files]
    return {Encoding(n) for i in images if isinstance(i, TileIndex) for n in i.entries["encoding"]}


def urls(ck: Checkpoint) -> list[str]:
    return [base.url for base in ck.manifest.bases]


@pytest.fixture(params=["local", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        bucket: Bucket = request.getfixturevalue("bucket")
        return bucket.place(f"patch/{tmp_path.name}")
    return str(tmp_path / "tree") if request.param == "local" else f"memory://{tmp_path.name}/tree"


def check_all(ck: Checkpoint, arrays: Arrays, folder: Path, root: str) -> None:
    """Whatever reads a checkpoint finds these tensors."""
    name = ck.url.rpartition("/")[2]
    assert is_read(ck, arrays)
    assert list(ucformat.open(ck.url).tensors) == list(arrays)
    ucformat.verify(ck.url).raise_if_damaged()
    assert all(t.equal for t in compare(ck, source(arrays)))
    assert is_read(ucformat.convert(ck, f"{root}/converted-{name}"), arrays)
    copied = ucformat.copy(ck, f"{root}/copies/{name}", with_bases=True)
    assert is_read(copied.url, arrays)
    ucformat.export(ck, folder / name, "safetensors", states="weight")
    exported = ucformat.open(folder / name)
    assert exported["up"].read().tobytes() == arrays["up", "weight"].tobytes()
    rows = ck["emb", "weight"][400:420, 3:5]
    assert rows.tobytes() == arrays["emb", "weight"][400:420, 3:5].tobytes()


@pytest.mark.front("local", "memory")
def test_a_chain_is_written_folded_and_made_whole(root: str, tmp_path: Path) -> None:
    run = f"{root}/run"
    a = put(f"{run}/0", trained(0))
    b = ucformat.patch(a, source(trained(3)), f"{run}/3")
    c = ucformat.patch(b.url, put(f"{root}/whole", trained(7)), f"{run}/7")
    assert (urls(b), urls(c)) == (["../0"], ["../0", "../3"])  # what is equal is that of its owner
    for ck in (b, c):
        assert set(ck.manifest.requires) == {BASES, CODECS, PATCHES, PACKED}
        assert {Encoding.XOR, Encoding.OVERWRITE, Encoding.RAW} <= encodings(ck)
        stored = stored_bytes(ck)
        assert stored.referenced == 300 * 100 * 4
        assert 4 * stored.written < stored.plain
    check_all(c, trained(7), tmp_path, root)

    folded = ucformat.compact(c, f"{run}/folded", fold=True)
    assert urls(folded) == ["../0"]
    assert folded.id != c.id
    check_all(folded, trained(7), tmp_path, root)
    with pytest.raises(Conflict, match="already holds"):
        ucformat.compact(c, folded.url, fold=True)
    again = ucformat.compact(c, folded.url, fold=True, overwrite=True)
    assert again.id != folded.id
    assert is_read(again, trained(7))
    assert ucformat.compact(c.url, fold=True).id == c.id
    c = ucformat.open(c.url)
    assert urls(c) == ["../0"]
    assert is_read(c, trained(7))
    # the anchor is needed as before, and the patch between is not
    assert c.id in dependents_at(open_store(a.url), a.id)
    assert c.id not in dependents_at(open_store(b.url), b.id)
    assert ucformat.compact(c, fold=True) is c

    whole = ucformat.compact(c.url)
    assert (whole.id, urls(whole)) == (c.id, [])
    assert {kind.codec for kind in whole.manifest.tensors.kinds} == {"blosc"}
    assert whole.id not in dependents_at(open_store(a.url), a.id)
    check_all(whole, trained(7), tmp_path / "whole", f"{root}/again")
    plain = ucformat.compact(b, f"{run}/plain", codec="none")
    assert {kind.codec for kind in plain.manifest.tensors.kinds} == {None}
    assert is_read(plain, trained(3))
    assert is_read(b, trained(3))


def test_the_anchor_knows_that_a_folded_one_needs_it_though_nothing_is_equal(
    tmp_path: Path,
) -> None:
    arrays: list[Arrays] = [
        {("up", "weight"): np.full((300, 300), 1 + n * 1e-6, np.float32)} for n in range(3)
    ]
    a = put(tmp_path / "a", arrays[0])
    b = ucformat.patch(a, source(arrays[1]), tmp_path / "b")
    c = ucformat.patch(b, source(arrays[2]), tmp_path / "c")
    at_anchor = open_store(a.url)
    assert c.id not in dependents_at(at_anchor, a.id)  # c needs it only through b
    folded = ucformat.compact(c, tmp_path / "folded", fold=True)
    assert folded.id in dependents_at(at_anchor, a.id)
    assert ucformat.compact(c, fold=True).id == c.id
    assert c.id in dependents_at(at_anchor, a.id)
    assert c.id not in dependents_at(open_store(b.url), b.id)
    ucformat.compact(c.url)
    assert c.id not in dependents_at(at_anchor, a.id)


def test_what_is_based_on_a_compacted_one_stays_valid(tmp_path: Path) -> None:
    a = put(tmp_path / "a", trained(0))
    b = ucformat.patch(a, source(trained(1)), tmp_path / "b")
    c = ucformat.patch(b, source(trained(2)), tmp_path / "c")
    d = ucformat.patch(c, source(trained(3)), tmp_path / "d")
    ucformat.compact(c.url, fold=True)
    assert is_read(d.url, trained(3))
    ucformat.compact(c.url)
    assert is_read(d.url, trained(3))
    ucformat.verify(d.url).raise_if_damaged()


def test_tensors_that_only_one_of_the_two_has(tmp_path: Path) -> None:
    old, new = trained(0), trained(2)
    new["head", "weight"] = np.zeros((40, 60), np.float32)
    new["up", "weight"] = new["up", "weight"][:100]  # of another shape
    new["emb", "weight"] = new["emb", "weight"].view(np.uint16)  # and of another dtype
    del new["noise", "exp_avg"]
    ck = ucformat.patch(put(tmp_path / "a", old), source(new), tmp_path / "b")
    assert is_read(ck, new)
    based = {t.name for t in ck.manifest.tensors if t.base is not None}
    assert based == {"frozen", "count", "none"}
    assert encodings(ck) <= {Encoding.RAW, Encoding.BLOSC, Encoding.XOR, Encoding.OVERWRITE}


def test_everything_else_is_that_of_the_source(tmp_path: Path) -> None:
    a = put(tmp_path / "a", trained(0))
    b = put(tmp_path / "b", trained(1), run="r", step=5, metrics={"loss": 0.5}, config={"lr": 1e-6})
    ck = ucformat.patch(a, b, tmp_path / "c", states="weight")
    assert (ck.manifest.run, ck.manifest.step, ck.manifest.metrics) == ("r", 5, {"loss": 0.5})
    assert ck.manifest.config == b.manifest.config
    assert ck.objects == b.objects
    assert [(e.kind, e.id) for e in ck.manifest.lineage[-1:]] == [("convert", b.id)]
    assert {key.state for key in ck.tensors} == {"weight"}
    verified = ck.manifest.verified
    assert verified is not None
    # only what was read was compared
    assert {n for n, _ in verified.but} ^ {t.name for t in ck.manifest.tensors} == (
        {"frozen", "none"} if verified.default is False else {"up", "emb", "count"}
    )


def test_what_is_refused(tmp_path: Path) -> None:
    a, other = put(tmp_path / "a", trained(0)), put(tmp_path / "o", {("x", "weight"): np.ones(3)})
    with pytest.raises(UsageError, match="nothing would be a patch"):
        ucformat.patch(other, a, tmp_path / "b")
    with pytest.raises(UnsupportedError, match="none can be based"):
        ucformat.patch(source(trained(0)), a, tmp_path / "b")
    with pytest.raises(UsageError, match="depends on no other checkpoint"):
        ucformat.compact(a, tmp_path / "b")
    with pytest.raises(UnsupportedError, match="has no bases"):
        ucformat.compact(source(trained(0)))
    assert ucformat.compact(a) is a
    assert ucformat.compact(a, fold=True) is a
    with pytest.raises(UsageError, match="codec"):
        ucformat.compact(a, codec="zip")  # type: ignore[arg-type]
    assert not (tmp_path / "b").exists()

    b = ucformat.patch(a, source(trained(1)), tmp_path / "b")
    with pytest.raises(UsageError, match="always a codec"):
        ucformat.compact(b, fold=True, codec="blosc")
    with pytest.raises(TypeError, match="depth"):
        ucformat.compact(b, depth=1)  # type: ignore[call-arg]


def test_a_tensor_that_cannot_be_read_is_not_left_out(tmp_path: Path) -> None:
    """It is of a dtype that only a later version knows."""
    a = put(tmp_path / "a", trained(0))
    b = ucformat.patch(a, source(trained(1)), tmp_path / "b")
    document = json.loads((tmp_path / "b" / "manifest.json").read_text())
    for kind in document["tensors"]["kinds"]:
        if kind["dtype"] == "bfloat16":
            kind |= {"dtype": "acme.float7", "itemsize": 2}
    (tmp_path / "b" / "manifest.json").write_bytes(manifest_file(document))
    ck = ucformat.open(b.url)
    assert ck.unreadable
    acts: list[Callable[[], object]] = [
        lambda: ucformat.patch(a, ck, tmp_path / "c"),
        lambda: ucformat.compact(ck),
        lambda: ucformat.compact(ck, tmp_path / "c"),
        lambda: ucformat.compact(ck, tmp_path / "c", fold=True),
        lambda: ucformat.thin(ck, "exp_avg"),
    ]
    for act in acts:
        with pytest.raises(UnsupportedError, match=r"acme\.float7"):
            act()
    assert ucformat.open(b.url).manifest == ck.manifest
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_a_chain_that_could_not_be_read_is_not_made_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(increments, "MAX_CHAIN", 2)
    a = put(tmp_path / "0", trained(0))
    for n in (1, 2):
        a = ucformat.patch(a, source(trained(n)), tmp_path / str(n))
    with pytest.raises(
        UsageError, match="2 checkpoints are patches of each other already"
    ) as error:
        ucformat.patch(a, source(trained(3)), tmp_path / "3")
    assert "ucp compact --fold" in str(error.value.hint)
    ucformat.patch(ucformat.compact(a, fold=True), source(trained(3)), tmp_path / "3")


def test_what_a_chain_is_folded_onto_is_not_guessed(tmp_path: Path) -> None:
    a = put(tmp_path / "a", trained(0))
    b = ucformat.patch(a, source(trained(1)), tmp_path / "b")
    c = ucformat.patch(b, source(trained(2)), tmp_path / "c")
    ucformat.compact(b)
    for place in (None, tmp_path / "d"):
        with pytest.raises(
            UsageError, match=r"depends on 2 whole checkpoints: .*/a, .*/b"
        ) as error:
            ucformat.compact(c.url, place, fold=True)
        assert "ucp patch BASE SRC DST" in str(error.value.hint)
    assert urls(ucformat.patch(b.url, c.url, tmp_path / "d")) == ["../b"]


def test_a_damaged_base_makes_no_patch(tmp_path: Path) -> None:
    a = put(tmp_path / "a", trained(0))
    file = max((tmp_path / "a" / "data").rglob("c/*/*"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChecksumError, match="crc32c"):
        ucformat.patch(a, source(trained(1)), tmp_path / "b", verify=False)
    with pytest.raises(NotFound):
        ucformat.open(tmp_path / "b")


def test_a_fault_of_a_base_is_reported_as_that_of_the_base(tmp_path: Path) -> None:
    a = put(tmp_path / "a", trained(0))
    b = ucformat.patch(a, source(trained(1)), tmp_path / "b")
    c = ucformat.patch(b, source(trained(2)), tmp_path / "c")
    chunks = {}
    for name in ("up", "frozen"):
        (chunks[name], *_) = sorted((tmp_path / "a" / "data").glob(f"*/weight/{name}/c/*/*"))
        with chunks[name].open("r+b") as file:
            file.write(bytes(64))
    problems = {p.name: p for p in ucformat.verify(c.url).problems}
    assert problems.keys() == {"up", "frozen"}
    assert {(p.file, p.kind) for p in problems.values()} == {(a.url, "base")}
    assert f"in the base {a.id} at {a.url}: the chunk " in problems["up"].reason
    assert f"of {chunks['frozen']} is damaged" in problems["frozen"].reason

    (tmp_path / "a").rename(tmp_path / "elsewhere")
    missing = ucformat.verify(c.url).problems
    assert {(p.file, p.kind) for p in missing} == {(a.url, "base")}
    # the others are not patches
    assert {p.name for p in missing} == {"frozen", "up", "emb", "none"}
    assert len(missing) == 4  # once, not for each tile


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_files, "FILE_BYTES", 1 << 16)
    monkeypatch.setattr(patch_files, "_BATCH_BYTES", 1 << 12)


@pytest.mark.usefixtures("small_files")
def test_several_files_by_several_processes(tmp_path: Path) -> None:
    a = put(tmp_path / "a", trained(0))
    b = put(tmp_path / "b", trained(2))
    done: list[tuple[int, int]] = []
    ucformat.patch(a, b, tmp_path / "c", workers=3, progress=lambda *n: done.append(n))
    assert done[-1][0] == done[-1][1] == sum(i.nbytes for i in b.tensors.values()) - 300 * 100 * 4
    for on in ("part:1/2", "part:0/2"):
        with pytest.raises(NotFinished):
            ucformat.patch(a, b, tmp_path / "d", on=on)
    assert list(tmp_path.rglob("finished"))
    ucformat.patch(a, b, tmp_path / "d", on="commit")
    assert not list(tmp_path.rglob("finished"))
    for place in (tmp_path / "c", tmp_path / "d"):
        assert is_read(str(place), trained(2))
        plain = ucformat.open(place).universal
        assert plain is not None
        sizes = [find_image(plain.store, file).size for file in plain.sidecar().files]
        assert len(sizes) > 5
        # a tile of 'up' is larger
        assert max(sizes) <= max(1 << 16, 700 * 401 * 4)
    files = [sorted(p.read_bytes() for p in (tmp_path / n / "data").rglob("*.bin")) for n in "cd"]
    assert [len(f) for f in files[0]] == [len(f) for f in files[1]]


def test_a_file_is_filled_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    info = TensorInfo("a", "weight", "int8", (60,))  # with its checksum 64 bytes
    infos = [replace(info, name=name) for name in "abc"]
    monkeypatch.setattr(patch_files, "FILE_BYTES", 2 * 64)
    assert [len(boxes) for boxes in place_boxes(infos)] == [2, 1]


def test_another_process_makes_the_same_job(tmp_path: Path) -> None:
    a, b = put(tmp_path / "a", trained(0)), put(tmp_path / "b", trained(2))
    options = WriteOptions()
    planned = Patch.of(b, list(b.tensors.values()), a, f"{tmp_path}/c", options)
    jobs: list[TilesJob] = []
    for name in ("c", "d"):
        store = open_store(tmp_path / name)
        job = planned.job(store, "0" * 20)
        if jobs:
            job = TilesJob.of_spec(json.loads(json.dumps(job.spec())))
        jobs.append(job)
        with job:
            job.take(job.record({n: job.run(n) for n in range(job.count)}))
            assert job.finish()[0].keys() == b.tensors.keys()
    assert jobs[0].plan == jobs[1].plan
    one, other = (sorted(p for p in (tmp_path / n).rglob("*.bin")) for n in "cd")
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in other] != []


WORK = """
import ucformat
from ucformat.geometry.tensor import TensorInfo
from ucformat.jobs import increments, patch_files
patch_files.FILE_BYTES, patch_files._BATCH_BYTES = 1 << 16, 1 << 12
def work(command, *places):
    if command == "patch":
        return "done " + ucformat.patch(*places).id
    return "done " + ucformat.compact(*places, fold=command == "fold").id
"""


@pytest.mark.front("patch", "fold")
@pytest.mark.parametrize("command", ["patch", "fold", "whole"])
@pytest.mark.usefixtures("small_files")
def test_kill_9_at_any_instant(command: str, tmp_path: Path) -> None:
    chance = random.Random(command)
    truth = [trained(n) for n in (0, 2, 4)]
    a = put(tmp_path / "a", truth[0])
    b = ucformat.patch(a, source(truth[1]), tmp_path / "b")
    c = put(tmp_path / "whole", truth[2])

    def chain(name: str) -> list[object]:
        if command == "patch":
            return [b.url, c.url, tmp_path / name]
        return [ucformat.patch(b, c, tmp_path / name).url]

    interrupted = 0
    with Forks(WORK) as forks:
        assert forks.run(command, *chain("measured"))[1][0] == "done"
        whole = forks.seconds
        for n in range(rounds(6, 30)):
            places = chain(f"c{n}")
            place = places[-1]
            forks.run(command, *places, kill_after=chance.uniform(0, 1.1 * whole))
            begun = True
            try:
                ck = ucformat.open(place)  # type: ignore[arg-type]
            except NotFound:
                assert command == "patch"
            else:
                assert is_read(ck, truth[2])
                begun = len(ck.manifest.bases) > (command == "fold")
                interrupted += command != "patch" and begun
            if command == "patch":
                try:
                    ck = ucformat.patch(*places)  # type: ignore[arg-type]
                except Conflict:
                    ck = ucformat.open(place)  # type: ignore[arg-type]
                else:
                    interrupted += 1
            else:
                ck = ucformat.compact(place, fold=command == "fold")  # type: ignore[arg-type]
            assert is_read(ck, truth[2])
            ucformat.verify(ck).raise_if_damaged()
            assert urls(ck) == {"patch": ["../a", "../b"], "fold": ["../a"], "whole": []}[command]
            assert is_whole(ck) == (command == "whole")
            for base, needed in ((a, command != "whole"), (b, command == "patch")):
                recorded = ck.id in dependents_at(open_store(base.url), base.id)
                # killed after its commit, it leaves what `gc` removes
                assert recorded == needed or (recorded and not begun)
    assert interrupted


@st.composite
def chains(draw: st.DrawFn) -> list[Arrays]:
    """Three checkpoints of one tensor list, more or less."""
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtypes = st.sampled_from([d for d in ITEMSIZE if not d.startswith(("int4", "uint4"))])
    shapes = st.lists(st.integers(0, 40), max_size=4).map(tuple)
    steps: list[Arrays] = [{}, {}, {}]
    for n in range(draw(st.integers(1, 4))):
        shape, dtype = draw(shapes), draw(dtypes)
        array = random_array(shape, dtype, n)
        for arrays in steps:
            kind = draw(st.sampled_from(["same", "few", "all", "missing"]))
            if kind == "few" and array.size:
                array = array.copy()
                where = chance.integers(0, array.size, 1 + array.size // 50)
                array.reshape(-1)[where] = random_array(
                    (len(where),), dtype, int(chance.integers(99))
                )
            elif kind == "all":
                array = random_array(shape, dtype, int(chance.integers(99)))
            if kind != "missing":
                arrays[f"t{n}", "weight"] = array
    for arrays in steps:
        arrays["always", "weight"] = np.arange(5)
    return steps


@given(steps=chains(), small=st.booleans())
@settings(max_examples=rounds(15, 150), deadline=None)
def test_any_chain_reads_as_what_was_written(steps: list[Arrays], small: bool) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if small:
            patched.setattr(patch_files, "FILE_BYTES", 1 << 10)
            patched.setattr(patch_files, "_BATCH_BYTES", 1 << 8)
        root = f"memory://patches-{os.urandom(8).hex()}"
        first, second, third = steps
        a = put(f"{root}/a", first)
        b = ucformat.patch(a, source(second), f"{root}/b")
        c = ucformat.patch(b, source(third), f"{root}/c")
        folded = ucformat.compact(c, f"{root}/folded", fold=True)
        whole = ucformat.compact(c, f"{root}/whole")
        for ck, arrays in ((b, second), (c, third), (folded, third), (whole, third)):
            assert is_read(ck, arrays)
            ucformat.verify(ck.url).raise_if_damaged()
        assert set(urls(folded)) <= {"../a"}


def test_the_report_is_that_of_the_files(tmp_path: Path) -> None:
    a = put(tmp_path / "a", trained(0))
    ck = ucformat.patch(a, source(trained(0)), tmp_path / "b")
    stored: Any = stored_bytes(ck)
    assert (stored.plain, stored.written) == (0, 0)
    assert stored.referenced == sum(i.nbytes for i in a.tensors.values())
    assert ck.manifest.sidecar is None
