"""Patched tiles: decoded on what a base has in the same box, in whatever form, or an error that names both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import ucformat
from tests.packed import write_encoded, write_packed
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import ChecksumError, IntegrityError, MissingData
from ucformat.geometry.tensor import Key
from ucformat.storage.concurrency import Cache
from ucformat.storage.local import LocalStore
from ucformat.storage.wrappers import RecordingStore, WatchedStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes import Arrays
    from ucformat.checkpoint import Checkpoint
    from ucformat.storage.base import Store

KEY = Key("w", "weight")


def step(number: int) -> Arrays:
    """Arrays of which some elements change with each step, and one array none."""
    rng = np.random.default_rng(1)
    out: Arrays = {
        KEY: rng.integers(0, 1 << 16, (300, 700), np.uint16),
        Key("w", "exp_avg"): rng.standard_normal((300, 700), np.float32),
        Key("b", "weight"): rng.standard_normal(700),
        Key("s", "weight"): np.array(3.0),
        Key("empty", "weight"): np.zeros((0, 4), np.float32),
    }
    for n in range(1, number + 1):
        out[KEY][n::17, ::5] ^= 1
        out[Key("w", "exp_avg")] += np.float32(n)
        out[Key("s", "weight")] += n
    return out


def put(folder: Path, number: int, base: Checkpoint | None = None, ranks: int = 3) -> Checkpoint:
    store = LocalStore(folder / str(number))
    return write_encoded(store, step(number), ranks, base=base)


def equal(ck: Checkpoint, arrays: Arrays) -> bool:
    return all(ck[key].read().tobytes() == a.tobytes() for key, a in arrays.items())


@pytest.mark.parametrize("form", ["packed", "arrays", "encoded", "patched"])
def test_a_base_may_have_any_form(form: str, tmp_path: Path) -> None:
    if form == "packed":
        base = write_packed(LocalStore(tmp_path / "1"), step(1), ranks=2, block_bytes=1000)
    elif form == "patched":
        base = put(tmp_path, 1, put(tmp_path, 0, ranks=1), ranks=2)
    else:
        base = put(tmp_path, 1, ranks=5)
    ck = put(tmp_path, 2, base)
    if form == "arrays":
        ucformat.materialize(tmp_path / "1")
    assert equal(ck, step(2))
    again = ucformat.open(tmp_path / "2")
    assert (again["w"][40:200:3, 5:9] == step(2)[KEY][40:200:3, 5:9]).all()
    assert ucformat.verify(again).problems == ()
    file_bytes = sum(f.stat().st_size for f in (tmp_path / "2").glob("data/*/*.bin"))
    plain_bytes = sum(a.nbytes for a in step(2).values())
    assert file_bytes < 0.7 * plain_bytes


def test_a_chain_is_read_by_everything(tmp_path: Path) -> None:
    ck = put(tmp_path, 0)
    for number in range(1, 9):
        ck = put(tmp_path, number, ck, ranks=1 + number % 3)
    ck = ucformat.open(tmp_path / "8")
    assert equal(ck, step(8))
    whole = ucformat.convert(ck, tmp_path / "whole")
    assert equal(whole, step(8))
    assert not ucformat.open(tmp_path / "whole").manifest.bases


def test_plans_count_what_is_read_of_bases(tmp_path: Path) -> None:
    put(tmp_path, 1, put(tmp_path, 0))
    reads = RecordingStore(LocalStore(tmp_path / "1"))
    ck = open_checkpoint(reads)
    plan = ck["w"].plan()
    base = ucformat.open(tmp_path / "0")["w"].plan()
    reads.clear()
    ck["w"].read()
    assert reads.nbytes < 0.2 * plan.bytes_needed
    assert plan.bytes_read == reads.nbytes + base.bytes_read


def test_the_steps_of_a_run_share_what_they_decode(tmp_path: Path) -> None:
    """Read in ascending order, each tile is read once."""
    base = write_packed(LocalStore(tmp_path / "0"), step(0), ranks=2)
    for number in range(1, 6):
        base = put(tmp_path, number, base, ranks=3)

    def bytes_read(numbers: range, cache: Cache[memoryview] | None) -> int:
        stores = []

        def watch(store: Store) -> WatchedStore:
            stores.append(RecordingStore(store))
            return WatchedStore(stores[-1], cache)

        for n in numbers:
            ck = open_checkpoint(tmp_path / str(n), watch=watch)
            assert (ck["w"].read() == step(n)[KEY]).all()
        reads = (read for store in stores for read in store.reads)
        return sum(read.nbytes for read in reads if read.file.endswith(".bin"))

    alone = bytes_read(range(5, 6), None)
    # besides, each opens the indexes of the files that it needs
    assert bytes_read(range(1, 6), Cache(1 << 26)) < 1.6 * alone
    assert bytes_read(range(1, 6), None) > 3 * alone


def test_another_base_is_told(tmp_path: Path) -> None:
    base = put(tmp_path, 0)
    ck = put(tmp_path, 1, base)
    # the same checkpoint, by its id, with other values
    other = write_encoded(LocalStore(tmp_path / "x"), step(3), 3, id=base.id)
    (tmp_path / "0").rename(tmp_path / "old")
    (tmp_path / "x").rename(tmp_path / "0")
    assert other.id == base.id
    with pytest.raises(ChecksumError) as error:
        ucformat.open(tmp_path / "1")["w"].read()
    assert "w (weight): the tile " in error.value.message
    place = str(tmp_path / "0")
    assert f"{base.id} of {tmp_path / '1'} at {place} is damaged, or another" in error.value.message
    assert f"`ucp verify {place}` names its damage" in str(error.value.hint)
    assert error.value.in_base == place
    problems = ucformat.verify(tmp_path / "1").problems
    # no other has patches
    assert {(p.name, p.state, p.file, p.kind) for p in problems} == {(*KEY, place, "base")}
    (tmp_path / "0").rename(tmp_path / "elsewhere")
    with pytest.raises(MissingData, match=f"based on the checkpoint {base.id} at"):
        ucformat.open(tmp_path / "1")["w"].read()
    assert ck.id


@pytest.mark.parametrize("is_encoded", [True, False])
def test_a_damaged_base_is_told(tmp_path: Path, is_encoded: bool) -> None:
    store = LocalStore(tmp_path / "0")
    base = put(tmp_path, 0) if is_encoded else write_packed(store, step(0), ranks=3)
    put(tmp_path, 1, base)
    (file, *_) = sorted((tmp_path / "0").glob("data/*/rank0.bin"))
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    told = (
        "the tile .* is damaged" if is_encoded else "in the base .* at .*: the chunk .* is damaged"
    )
    with pytest.raises(ChecksumError, match=rf"w \(weight\):? {told}"):
        ucformat.open(tmp_path / "1")["w"].read()
    file.unlink()
    with pytest.raises(MissingData, match=r"rank0\.bin"):
        ucformat.open(tmp_path / "1")["w"].read()


def test_a_loop_is_refused(tmp_path: Path) -> None:
    base = put(tmp_path, 0)
    ck = put(tmp_path, 1, base)
    write_encoded(LocalStore(tmp_path / "x"), step(2), base=ck, id=base.id)
    (tmp_path / "0").rename(tmp_path / "old")
    (tmp_path / "x").rename(tmp_path / "0")
    with pytest.raises(IntegrityError, match="which is based on it"):
        ucformat.open(tmp_path / "1")["w"].read()


def test_a_base_that_lacks_the_tensor(tmp_path: Path) -> None:
    base = put(tmp_path, 0)
    put(tmp_path, 1, base)
    fewer = {key: a[:200] if a.ndim == 2 else a for key, a in step(0).items()}
    write_encoded(LocalStore(tmp_path / "x"), fewer, 3, id=base.id)
    (tmp_path / "0").rename(tmp_path / "old")
    (tmp_path / "x").rename(tmp_path / "0")
    with pytest.raises(IntegrityError, match=r"where it is of uint16 and the shape \[200, 700\]"):
        ucformat.open(tmp_path / "1")["w"].read()
