"""Jobs in parts: whoever does what, how often and in which order, the result is that of one process."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
from tests.fakes import random_array
from tests.jobs.forks import Forks
from tests.tiers import rounds
from tests.zero_files import FLAT, write_zero3
from ucformat.errors import (
    ChecksumError,
    MissingData,
    NotACheckpoint,
    NotFinished,
    NotFound,
    PermissionDenied,
    UcformatError,
    UsageError,
)
from ucformat.jobs.finished import StreamSum, _remove
from ucformat.jobs.tasks import batches, part_of
from ucformat.jobs.where import Where
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ucformat.checkpoint import Checkpoint

SIZES: dict[str, Any] = {"chunk_bytes": 2048, "shard_bytes": 1 << 14}


def source_of(
    folder: Path, seed: int = 0, tensors: int = 5, ranks: int = 3, scale: int = 1
) -> Path:
    """A ZeRO-3 checkpoint: its records, of which each has one checksum, hold parts of all tensors."""
    chance = random.Random(seed)
    shapes = [
        (scale * chance.randrange(1, 200), scale * chance.randrange(1, 90)) for _ in range(tensors)
    ]
    arrays = {
        (f"t{n}", s): random_array(shape, "float32", seed + 10 * n + k)
        for n, shape in enumerate(shapes)
        for k, s in enumerate(FLAT)
    }
    return write_zero3(folder, arrays, ranks) / "global_step5"


def part(source: Path | Checkpoint, target: Path, on: str) -> None:
    with pytest.raises(NotFinished, match="another process commits it"):
        ucformat.convert(source, target, **SIZES, on=on)


def same_content(one: Checkpoint, other: Checkpoint) -> None:
    """All that does not say when and where it was written is equal."""
    a, b = (ck.manifest for ck in (one, other))
    assert {(t.name, t.state): (t.digest, t.shape, t.dtype) for t in a.tensors} == {
        (t.name, t.state): (t.digest, t.shape, t.dtype) for t in b.tensors
    }
    assert (a.step, a.groups, a.layout, a.aliases) == (b.step, b.groups, b.layout, b.aliases)
    assert a.verified is not None
    assert b.verified is not None
    assert (a.verified.default, a.verified.but) == (b.verified.default, b.verified.but)
    assert one.objects == other.objects


@given(seed=st.integers(0, 10**6), count=st.integers(1, 6), data=st.data())
@settings(max_examples=rounds(8, 25), deadline=None)
def test_any_order_of_parts(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    source = source_of(folder / "src", seed)
    whole = ucformat.convert(source, folder / "whole", **SIZES)
    order = data.draw(
        st.permutations(
            [*range(count), *data.draw(st.lists(st.integers(0, count - 1), max_size=3))]
        )
    )
    done: set[int] = set()
    for index in order:
        if data.draw(st.booleans()) and done != set(range(count)):
            with pytest.raises(MissingData) as raised:
                ucformat.convert(source, folder / "parts", **SIZES, on="commit")
            late = {n for n in range(count) if n not in done and shards_of(source, n, count)}
            if done and late:
                assert named(str(raised.value)) == late
            with pytest.raises((NotACheckpoint, NotFound)):
                ucformat.open(folder / "parts")
        part(source, folder / "parts", f"part:{index}/{count}")
        done.add(index)
    made = ucformat.convert(source, folder / "parts", **SIZES, on="commit")
    same_content(whole, made)
    assert ucformat.verify(made)
    assert not list((folder / "parts" / "objects").glob("*/finished")), "the records are removed"


def shards_of(source: Path, index: int, count: int) -> int:
    """How many shards a part has."""
    from ucformat.jobs.shards import ShardJob, WriteOptions
    from ucformat.storage.memory import MemoryStore

    ck = ucformat.open(source)
    job = ShardJob(
        ck, MemoryStore("none"), "0" * 20, list(ck.tensors.values()), WriteOptions(2048, 1 << 14)
    )
    return len(list(part_of(job, index, count)))


def named(message: str) -> set[int]:
    """The parts that a message names."""
    words = message.partition("those of part")[2].partition(" of ")[0].removeprefix("s")
    return {int(n) for n in words.split(",")}


def test_nothing_that_is_recorded_is_read_again(tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", 3, scale=5)
    reads, written = (
        RecordingStore(LocalStore(source)),
        RecordingStore(LocalStore(tmp_path / "dst")),
    )

    def again() -> int:
        ck = ucformat.open(reads)
        before = reads.nbytes
        with pytest.raises(NotFinished):
            ucformat.convert(ck, written, **SIZES, on="part:0/2")
        return reads.nbytes - before

    nbytes = sum(i.nbytes for i in ucformat.open(source).tensors.values())
    metadata = 400_000  # the directories of three zip files, and what is near them
    assert again() > nbytes // 3 + metadata
    written.clear()
    assert again() < metadata
    assert not [r for r in written.reads if r.file.startswith("data/")]
    ck = ucformat.open(reads)
    before = reads.nbytes
    ucformat.convert(ck, written, **SIZES)
    assert reads.nbytes - before < 0.6 * nbytes + metadata, "the other part"


def test_a_shard_that_was_changed_is_written_again(tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", 5)
    for index in range(2):
        part(source, tmp_path / "dst", f"part:{index}/2")
    shards = sorted(p for p in (tmp_path / "dst" / "data").rglob("*") if p.is_file())
    random.Random(0).shuffle(shards)
    gone, flipped, *_ = shards
    gone.unlink()
    content = bytearray(flipped.read_bytes())
    content[0] ^= 1
    flipped.write_bytes(content)
    with pytest.raises(MissingData, match="2 of the "):
        ucformat.convert(source, tmp_path / "dst", **SIZES, on="commit")
    for index in range(2):
        part(source, tmp_path / "dst", f"part:{index}/2")
    made = ucformat.convert(source, tmp_path / "dst", **SIZES, on="commit")
    assert ucformat.verify(made)
    same_content(ucformat.convert(source, tmp_path / "whole", **SIZES), made)


def flips(source: Path) -> Iterator[None]:
    """Flip one bit of tensor data in a file of the source, and back."""
    file = next(source.glob("*optim_states.pt"))
    good = file.read_bytes()
    chance = random.Random(1)
    for _ in range(8):
        bad = bytearray(good)
        bad[chance.randrange(len(good) // 4, 3 * len(good) // 4)] ^= 1 << chance.randrange(8)
        file.write_bytes(bad)
        yield
    file.write_bytes(good)


def test_damage_of_the_source_is_found_across_parts(tmp_path: Path) -> None:
    """No part reads a record whole: their checksums are combined by the commit."""
    source = source_of(tmp_path / "src", 7, tensors=4, ranks=2)
    found = 0
    for n, _ in enumerate(flips(source)):
        target = tmp_path / f"dst{n}"
        try:
            for index in range(3):
                with pytest.raises(NotFinished):
                    ucformat.convert(source, target, **SIZES, on=f"part:{index}/3")
        except UcformatError:  # the flip hit the structure of the file
            found += 1
            continue
        with pytest.raises(ChecksumError, match="CRC-32"):
            ucformat.convert(source, target, **SIZES, on="commit")
        found += 1
        with pytest.raises((NotACheckpoint, NotFound)):
            ucformat.open(target)
    assert found == 8


@pytest.mark.parametrize("seed", range(6))
def test_planted_records_commit_nothing_wrong(seed: int, tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", seed)
    for index in range(2):
        part(source, tmp_path / "dst", f"part:{index}/2")
    chance = random.Random(seed)
    (attempt,) = (tmp_path / "dst" / "objects").iterdir()
    for file in (attempt / "finished").iterdir():
        doc = json.loads(file.read_text())
        task = chance.choice(doc["tasks"])
        kind = chance.randrange(5)
        if kind == 0:
            task["task"] = chance.choice([10**9, -1, task["task"] + 1])
        elif kind == 1:
            task["file"] = "../../etc/passwd"
        elif kind == 2:
            task["digests"] = "zz"
        elif kind == 3:
            doc["sums"] = [{**s, "ranges": [[0, 2**70]]} for s in doc["sums"]]
        else:
            doc["tasks"] = "none"
        file.write_text(json.dumps(doc))
    with pytest.raises(UcformatError):
        ucformat.convert(source, tmp_path / "dst", **SIZES, on="commit")
    made = ucformat.convert(source, tmp_path / "dst", **SIZES)
    assert ucformat.verify(made)
    same_content(ucformat.convert(source, tmp_path / "whole", **SIZES), made)


WORK = """
import ucformat
from ucformat.errors import NotFinished
ucformat.convert, ucformat.open
def work(src, dst, on):
    try:
        return "committed " + ucformat.convert(src, dst, chunk_bytes=2048, shard_bytes=1 << 14, on=on).manifest.id
    except NotFinished as error:
        return f"part {error.exit_code}"
"""


@pytest.mark.matrix
def test_killed_parts_are_run_again(tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", 11, tensors=12)
    chance = random.Random(2)
    with Forks(WORK) as forks:
        for round_ in range(6):
            target = tmp_path / f"dst{round_}"
            for index in chance.sample(range(3), 3):
                if chance.random() < 0.7:
                    forks.run(source, target, f"part:{index}/3", kill_after=chance.uniform(0, 0.4))
                assert forks.run(source, target, f"part:{index}/3")[1] == ["part", "0"]
            assert forks.run(source, target, "commit")[1][0] == "committed"
    whole = ucformat.convert(source, tmp_path / "whole", **SIZES)
    for round_ in range(6):
        same_content(whole, ucformat.open(tmp_path / f"dst{round_}"))


@pytest.mark.parametrize("form", ["packed", "arrays"])
def test_copy_verify_and_materialize(form: str, tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", 13)
    ck = ucformat.convert(source, tmp_path / "arrays", **SIZES)
    if form == "packed":
        pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")
        import torch

        from ucformat.torch import save

        state = {n: torch.from_numpy(ck[n, "master"][...]) for n in ck.names()}
        save(state, tmp_path / "packed", form="packed")
        ck = ucformat.open(tmp_path / "packed")
    for index in (2, 0, 1):
        with pytest.raises(NotFinished):
            ucformat.copy(ck, tmp_path / "copied", on=f"part:{index}/3")
    done = ucformat.copy(ck, tmp_path / "copied", on="commit")
    copied = ucformat.open(tmp_path / "copied")
    assert copied.id == ck.id
    assert (done.kept, done.already) == (0, False)
    reports = [ucformat.verify(copied, on=f"part:{n}/3") for n in range(3)]
    whole = ucformat.verify(copied)
    assert all(reports)
    assert sum(r.bytes_verified for r in reports) == whole.bytes_verified
    assert [r.part for r in reports] == ["0/3", "1/3", "2/3"]
    victim = max(
        (p for p in (tmp_path / "copied" / "data").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    reports = [ucformat.verify(tmp_path / "copied", on=f"part:{n}/3") for n in range(3)]
    assert sorted(map(bool, reports)) == [False, True, True]
    if form == "packed":
        for index in (1, 0):
            with pytest.raises(NotFinished):
                ucformat.materialize(
                    ck, chunk_bytes=2048, shard_bytes=1 << 14, on=f"part:{index}/2"
                )
        made = ucformat.materialize(ck, chunk_bytes=2048, shard_bytes=1 << 14, on="commit")
        assert ucformat.verify(made)
        assert made.id == ck.id
        assert {n: made[n][...].tobytes() for n in made} == {
            n: t.numpy().tobytes() for n, t in state.items()
        }


def test_shards_with_other_content_are_found_by_one_part(tmp_path: Path) -> None:
    """Chunks that match their checksums, but are not those of the manifest."""
    one = ucformat.convert(source_of(tmp_path / "a", 1), tmp_path / "one", **SIZES)
    arrays = [
        d
        for d in (tmp_path / "one" / "data").rglob("c")
        if len([f for f in d.rglob("*") if f.is_file()]) > 1
    ]
    first, second, *_ = sorted(f for f in arrays[0].rglob("*") if f.is_file())
    if first.stat().st_size == second.stat().st_size:
        first.write_bytes(second.read_bytes())
    assert not all(ucformat.verify(one, on=f"part:{n}/2") for n in range(2))


def test_parts_have_about_as_many_bytes(tmp_path: Path) -> None:
    from ucformat.jobs.shards import ShardJob, WriteOptions
    from ucformat.storage.memory import MemoryStore

    ck = ucformat.open(source_of(tmp_path / "src", 17, tensors=30))
    job = ShardJob(
        ck, MemoryStore("none"), "0" * 20, list(ck.tensors.values()), WriteOptions(2048, 1 << 14)
    )
    parts = [list(part_of(job, n, 4)) for n in range(4)]
    assert sorted(sum(parts, [])) == list(range(job.count))  # noqa: RUF017 - few
    loads = [sum(map(job.nbytes, p)) for p in parts]
    assert max(loads) - min(loads) <= 1 << 14
    assert sum((b for b in batches(job, 4)), []) == list(range(job.count))  # noqa: RUF017


@pytest.mark.parametrize(
    "on",
    [
        "",
        "part:3",
        "part:3/3",
        "part:-1/3",
        "part:a/b",
        "dask:/x",
        "dask://",
        "slurm",
        "part:0/0",
        "tls://",
    ],
)
def test_what_is_no_place(on: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"place where tasks run|no part"):
        Where.parse(on)


@given(
    read=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=8),
    given_=st.lists(st.tuples(st.integers(-3, 44), st.integers(-1, 6)), max_size=6),
)
def test_ranges_are_taken_once(read: list[tuple[int, int]], given_: list[tuple[int, int]]) -> None:
    one = StreamSum("f", "", 0, 40, 0, castagnoli=True)
    left = set(range(40))
    for a, n in read:
        one.waits -= sum(y - x for x, y in one.claim(a, min(40, a + n)))
        left -= set(range(a, a + n))
    ranges = [(a, a + n) for a, n in given_]
    wanted = [b for a, stop in ranges for b in range(a, stop)]
    fits = (
        wanted == sorted(set(wanted))
        and set(wanted) <= left
        and all(a < stop for a, stop in ranges)
    )
    assert one.take(ranges) == fits
    left -= set(wanted) if fits else set()
    assert {b for a, stop in one.left for b in range(a, stop)} == left
    assert one.waits == len(left)


def test_records_that_cannot_be_removed_stay(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(MemoryStore):
        def delete_prefix(self, prefix: str) -> None:
            raise PermissionDenied(f"{prefix} may not be changed")

    with caplog.at_level("DEBUG", "ucformat"):
        _remove(Stubborn("stubborn"), "finished")
    assert "the records in finished stay: finished may not be changed" in caplog.text
