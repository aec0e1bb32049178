"""Values of each rank, in ranges of files."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ucformat
from tests.fakes import FakeSource, give_values
from tests.tiers import rounds
from ucformat.checkpoint import Checkpoint
from ucformat.errors import IntegrityError, MissingData
from ucformat.format.structure import per_rank_problems
from ucformat.schema.manifest import PerRankDoc
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RANKS = 300
DIGEST = "sha256:" + "0" * 64


class Counting(MemoryStore):
    """Counts the bytes and requests that are read of each file with the values of ranks."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.bytes, self.requests = Counter[str](), Counter[str]()

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        data = super().read(key, offset, nbytes)
        if "per_rank" in key:
            self.bytes[key[-9:-4]] += len(data)
            self.requests[key[-9:-4]] += 1
        return data


def stored(ranks: Sequence[dict[str, Any]], *begins: int) -> Counting:
    """A checkpoint with values of each rank, in files that begin at rank 0 and at these."""
    name = uuid4().hex
    source = Checkpoint(
        FakeSource.write(MemoryStore(f"{name}-from"), {("w", "weight"): np.ones(2, np.float32)})
    )
    store = Counting(name)
    ucformat.convert(source, store)
    give_values(store, ranks, *begins)
    return store


def values_of(ranks: int) -> list[dict[str, Any]]:
    """Values of different sizes."""
    return [{"rng": {"$bytes": "A" * 4 * (n % 7 + 100)}, "at": n} for n in range(ranks)]


def test_a_rank_reads_the_index_and_its_range_of_its_file() -> None:
    store = stored(values_of(RANKS), 100, 250)
    ck = ucformat.open(store)
    assert not store.bytes
    assert {name: values[107] for name, values in ck.per_rank.items()} == values_of(RANKS)[107]
    assert [*store.bytes] == ["00100"]
    assert 16 * 150 < store.bytes["00100"] < 16 * 150 + 600
    assert [len(values) for values in ck.per_rank.values()] == [RANKS] * 2
    assert ck.per_rank["at"][99] == 99
    assert [*store.bytes] == ["00100", "00000"]
    assert ck.per_rank["at"][-1] == RANKS - 1
    with pytest.raises(IndexError):
        ck.per_rank["at"][RANKS]
    with pytest.raises(KeyError):
        ck.per_rank["none"]


def test_several_ranks_read_their_files_once_and_no_others() -> None:
    store = stored(values_of(RANKS), 100, 250)
    ck = ucformat.open(store)
    assert ck.per_rank["at"][255:248:-2] == [255, 253, 251, 249]
    assert store.requests == {"00100": 1, "00250": 1}
    assert [*ck.per_rank["at"]] == [*range(RANKS)]
    assert [*ck.per_rank["rng"]] == [values["rng"] for values in values_of(RANKS)]
    assert store.requests == {"00000": 1, "00100": 1, "00250": 1}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=rounds(40, 100), suppress_health_check=[HealthCheck.data_too_large])
@given(st.data())
def test_values_come_back_under_their_names(data: st.DataObject) -> None:
    """Each rank has names of its own; wherever files begin."""
    ranks = data.draw(
        st.lists(st.dictionaries(st.sampled_from("abcü") | st.text(), JSON), min_size=1, max_size=6)
    )
    begins = sorted(data.draw(st.sets(st.integers(1, len(ranks) - 1)))) if len(ranks) > 1 else []
    store = stored(ranks, *begins)
    copied = MemoryStore(uuid4().hex)
    ucformat.convert(ucformat.open(store), copied)
    names = dict.fromkeys(name for values in ranks for name in values)
    part = data.draw(st.slices(len(ranks)))
    for place in (store, copied):
        once, again = ucformat.open(place).per_rank, ucformat.open(place).per_rank
        assert [*once] == [*names]
        for name in names:
            wanted = [values.get(name) for values in ranks]
            assert [once[name][rank] for rank in range(len(ranks))] == wanted
            assert again[name][part] == wanted[part]
            assert [*once[name]] == wanted


def test_copies_and_conversions_have_the_same_files(tmp_path: Path) -> None:
    store = stored(values_of(9), 4, 5)
    before = ucformat.open(store).manifest.per_rank
    ucformat.copy(ucformat.open(store), tmp_path / "copy")
    ucformat.convert(ucformat.open(store), tmp_path / "converted")
    for place in (tmp_path / "copy", tmp_path / "converted"):
        ck = ucformat.open(place)
        after = ck.manifest.per_rank
        assert before is not None
        assert after is not None
        assert [(f.first, f.ranks, f.digest) for f in after.files] == [
            (f.first, f.ranks, f.digest) for f in before.files
        ]
        assert all(f.path.startswith(f"objects/{ck.manifest.attempt}/") for f in after.files)
        assert [*ck.per_rank["at"]] == [*range(9)]
        assert ucformat.verify(place)


def damage(store: MemoryStore, key: str, at: int) -> None:
    data = bytearray(store.read(key))
    data[at] ^= 1
    store.delete(key)
    store.put_if_absent(key, bytes(data))


def key_of(store: MemoryStore, name: str) -> str:
    return next(i.key for i in store.list("objects") if i.key.endswith(name))


@pytest.mark.parametrize("at", [0, 3, -1, -5, -30])
def test_damage_is_found(at: int) -> None:
    store = stored(values_of(5), 2)
    damage(store, key_of(store, "per_rank-00002.bin"), at)
    ck = ucformat.open(store)
    with pytest.raises(IntegrityError, match=r"per_rank-00002\.bin"):
        list(ck.per_rank["at"])
    assert "per_rank-00002.bin" in str(ucformat.verify(store).problems)
    assert ck.per_rank["at"][:2] == [0, 1]
    if at in (0, 3):  # of rank 2
        assert ck.per_rank["at"][3] == 3
    with pytest.raises(IntegrityError, match="differs from its checksum"):
        ck.per_rank["at"][2]
    with pytest.raises(IntegrityError, match=r"per_rank-00002\.bin"):
        ucformat.convert(ck, MemoryStore(uuid4().hex))


def test_a_missing_file_is_named() -> None:
    store = stored(values_of(3), 1)
    store.delete(key_of(store, "per_rank-00001.bin"))
    assert ucformat.open(store).per_rank["at"][0] == 0
    with pytest.raises(MissingData, match=r"per_rank-00001\.bin"):
        ucformat.open(store).per_rank["at"][1]
    assert "per_rank-00001.bin" in str(ucformat.verify(store).problems)


def doc(
    *files: tuple[int, int, int], ranks: int = 5, names: tuple[str, ...] = ("a", "b")
) -> PerRankDoc:
    """The entry of files, each with its first rank, its number of ranks, and its bytes."""
    entries = [
        {"path": f"objects/{n}", "digest": DIGEST, "first": first, "ranks": count, "nbytes": nbytes}
        for n, (first, count, nbytes) in enumerate(files)
    ]
    return PerRankDoc.model_validate({"ranks": ranks, "names": names, "files": entries})


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (
            doc((0, 2, 100), (3, 2, 100)),
            "'objects/1' has the values of ranks from 3 on, not from 2 on",
        ),
        (
            doc((0, 2, 100), (1, 4, 100)),
            "'objects/1' has the values of ranks from 1 on, not from 2 on",
        ),
        (
            doc((3, 2, 100), (0, 3, 100)),
            "'objects/0' has the values of ranks from 3 on, not from 0 on",
        ),
        (
            doc((0, 2, 100), (2, 2, 100)),
            "the manifest has files with the values of 4 ranks, and 5 ranks",
        ),
        (
            doc((0, 2, 100), (2, 4, 100)),
            "the manifest has files with the values of 6 ranks, and 5 ranks",
        ),
        (doc(), "the manifest has files with the values of 0 ranks, and 5 ranks"),
        (doc((0, 5, 113)), "'objects/0' has 113 bytes, too few for the values of 5 ranks"),
        (doc((0, 5, 114), names=("a", "a")), "the manifest lists a name of values of ranks twice"),
    ],
)
def test_files_that_have_not_each_rank_once_are_refused(wrong: PerRankDoc, reason: str) -> None:
    assert reason in [problem.reason for problem in per_rank_problems(wrong)]


def test_files_that_have_each_rank_once_are_accepted() -> None:
    assert not [*per_rank_problems(doc((0, 2, 48), (2, 3, 70)))]


@pytest.mark.parametrize(
    ("files", "ranks"),
    [(((0, 0, 100),), 5), (((0, 2**20 + 1, 2**30),), 2**20 + 1), (((2**20, 1, 100),), 5), ((), 0)],
)
def test_numbers_of_ranks_are_bounded(files: tuple[tuple[int, int, int], ...], ranks: int) -> None:
    with pytest.raises(ValueError, match=r"ranks|first"):
        doc(*files, ranks=ranks)
