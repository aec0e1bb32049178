"""What `verify` finds in the structure of a checkpoint, under the right digests; whatever it does not find is equal."""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
from tests.fakes import FakeSource, manifest_file, random_array, same
from tests.packed import write_packed
from tests.tables import changed_entry
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import Inconsistent, IntegrityError, UcformatError
from ucformat.format.digest import bytes_digest
from ucformat.format.sidecar import encode
from ucformat.format.universal import Universal
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Block, Extent, Key, single_extents
from ucformat.reading.dtypes import numpy_dtype
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes import Arrays
    from ucformat.jobs.run import Report
    from ucformat.storage.base import Store

    Extents = list[list[Extent]]

ARRAYS: Arrays = {
    ("w", "weight"): random_array((6, 5), "float32", 1),
    ("w", "exp_avg"): random_array((6, 5), "bfloat16", 2),
    ("bias", "weight"): random_array((7,), "float16", 3),
    ("cube", "weight"): random_array((2, 3, 4), "int64", 4),
    ("lone", "weight"): random_array((), "float64", 5),
    ("empty", "weight"): random_array((0, 4), "int8", 6),
}
TIED = {"head": "w"}


def packed() -> MemoryStore:
    """A packed checkpoint whose every extent has a block of its own."""
    store = MemoryStore(uuid.uuid4().hex)
    write_packed(store, ARRAYS, ranks=2, block_bytes=40, aliases=TIED)
    return store


def extents_of(store: Store) -> Extents:
    source = Universal(store)
    return [list(single_extents(source.sidecar().extents(n))) for n in range(len(source.docs))]


def rewritten(
    store: Store,
    extents: Extents | None = None,
    change: Callable[[dict[str, Any]], object] | None = None,
) -> Store:
    """The checkpoint with other extents, and a manifest that was changed, under digests that are right."""
    document = json.loads(store.read("manifest.json"))
    doc = document["sidecar"]
    if extents is not None:
        data = encode(extents)
        doc |= {"nbytes": len(data), "digest": bytes_digest(data)}
        with store.create(doc["path"]) as out:
            out.write(data)
    if change is not None:
        change(document)
    store.delete("manifest.json")
    store.put_if_absent("manifest.json", manifest_file(document))
    return store


def read_all(store: Store) -> Arrays:
    ck = open_checkpoint(store)
    return {(k.name, k.state): ck[k.name, k.state].read() for k in ck.tensors}


def reference(store: Store, extents: Extents) -> Arrays:
    """What these extents hold, read by a few lines that know nothing of plans; of replicas the last."""
    out: Arrays = {}
    for ((name, state), a), some in zip(ARRAYS.items(), extents, strict=True):
        array = np.zeros(a.shape, a.dtype)
        for e in some:
            data = store.read(e.file)
            part = np.ndarray(e.box.shape, numpy_dtype(str(a.dtype)), data, e.offset, e.strides)
            array[tuple(slice(x, y) for x, y in zip(e.box.start, e.box.stop, strict=True))] = part
        out[name, state] = array
    return out


def found(store: Store, key: tuple[str, str] | None = None, reason: str = "") -> Report:
    """Assert that `verify` finds it, and names the tensor and the reason, and that a reader refuses."""
    report = ucformat.verify(store)
    assert not report
    named = [
        p
        for p in report.problems
        if (key is None or (p.name, p.state) == key) and reason in p.reason
    ]
    assert named, report.problems
    with pytest.raises(UcformatError):
        read_all(store)
    return report


W, BIAS, CUBE = ("w", "weight"), ("bias", "weight"), ("cube", "weight")
AT = {key: n for n, key in enumerate(ARRAYS)}


def test_what_is_whole_is_whole() -> None:
    store = packed()
    assert ucformat.verify(rewritten(store, extents_of(store))).problems == ()
    assert all(same(a, ARRAYS[k]) for k, a in read_all(store).items())


@pytest.mark.parametrize("key", [k for k, a in ARRAYS.items() if a.size], ids=str)
def test_an_extent_that_is_missing(key: tuple[str, str]) -> None:
    store = packed()
    extents = extents_of(store)
    for k in range(len(extents[AT[key]])):
        some = [*extents]
        some[AT[key]] = [e for n, e in enumerate(extents[AT[key]]) if n != k]
        found(rewritten(store, some), key, "no rank or file holds")
    some[AT[key]] = []
    report = found(rewritten(store, some), key, "no rank or file holds")
    assert {(p.name, p.state) for p in report.problems} == {key}


def first(key: tuple[str, str]) -> tuple[Store, Extents, Extent]:
    store = packed()
    extents = extents_of(store)
    return store, extents, extents[AT[key]][0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda e: replace(e, box=Box((5, *e.box.start[1:]), (2, *e.box.shape[1:]))),
            "exceeds the tensor",
        ),
        (
            lambda e: replace(e, box=Box((1 << 61, *e.box.start[1:]), e.box.shape)),
            "exceeds the tensor",
        ),
        (
            lambda e: replace(e, box=Box(e.box.start, ((1 << 63) - 1, *e.box.shape[1:]))),
            "exceeds the tensor",
        ),
        (
            lambda e: replace(e, box=Box((e.box.start[0] + 1, *e.box.start[1:]), e.box.shape)),
            "share",
        ),
        (lambda e: replace(e, offset=e.offset + 4), "exceed the block"),
        (lambda e: replace(e, offset=e.offset - 4), "exceed the block"),
        (lambda e: replace(e, offset=(1 << 63) - 1), "impossible offset"),
        (lambda e: replace(e, offset=(1 << 63) - 1, block=None), "impossible offset"),
        (lambda e: replace(e, strides=((1 << 62), 4), block=None), "impossible offset"),
        (lambda e: replace(e, strides=(40, 8)), "exceed the block"),
        (
            lambda e: replace(e, block=replace(e.block, nbytes=e.block.nbytes - 4)),
            "exceed the block",
        ),
        (lambda e: replace(e, block=Block(1 << 61, 40, 0)), "impossible offset"),
        (lambda e: replace(e, file="roots/0/x"), "does not list"),
    ],
)
def test_an_extent_that_cannot_be(change: Callable[[Extent], Extent], reason: str) -> None:
    store, extents, _ = first(W)
    whole = next(e for e in extents[AT[W]] if e.box.shape == (1, 5) or e.box.shape[0] > 1)
    extents[AT[W]] = [change(e) if e is whole else e for e in extents[AT[W]]]
    found(rewritten(store, extents), W, reason)


def test_a_file_of_its_own_without_checksums_is_refused() -> None:
    store, extents, one = first(BIAS)
    extents[AT[BIAS]][0] = replace(one, block=None)
    found(rewritten(store, extents), BIAS, "no checksum that belongs to its place")


def test_replicas() -> None:
    """Those that are equal do no harm; of those that differ any might be read, whatever their own checksums say."""
    store, extents, one = first(CUBE)
    data = store.read(one.file)
    other = bytearray(data)
    with store.create("data/again.bin") as out:
        out.write(data)
    again = replace(one, file="data/again.bin")
    extents[AT[CUBE]].append(again)
    assert ucformat.verify(rewritten(store, extents))
    other[one.offset] ^= 1
    block = one.block
    assert block is not None
    wrong = bytes(other[block.offset : block.offset + block.nbytes])
    with store.create("data/again.bin") as out:
        out.write(bytes(other))
    (problem,) = ucformat.verify(
        store
    ).problems  # its checksum is wrong: that it differs is no second problem
    assert "crc32c differs" in problem.reason
    extents[AT[CUBE]][-1] = replace(again, block=replace(block, crc32c=crc32c(wrong)))
    (problem,) = ucformat.verify(rewritten(store, extents)).problems
    assert (problem.name, problem.state) == CUBE
    assert f"its replicas of {one.box} differ" in problem.reason
    assert one.file in problem.reason
    assert problem.file == "data/again.bin"


def test_replicas_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucformat.format.audit._PART", 16)
    store, extents, _ = first(CUBE)
    a = ARRAYS[CUBE]
    for at in (0, a.nbytes - 1):
        other = bytearray(a.tobytes())
        other[at] ^= 128
        extents[AT[CUBE]] = []
        for name, data in (("data/a", a.tobytes()), ("data/b", bytes(other))):
            with store.create(name) as out:
                out.write(data)
            block = Block(0, len(data), crc32c(data))
            extents[AT[CUBE]].append(Extent(Box.whole(a.shape), name, 0, (96, 32, 8), block))
        (problem,) = ucformat.verify(rewritten(store, extents)).problems
        assert "differ" in problem.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda m: m["aliases"].update(x="nothing"),
            "an alias of 'nothing', which is not stored",
        ),
        (
            lambda m: m["aliases"].update(x="head"),
            "'x' is an alias of 'head', which is another alias",
        ),
        (lambda m: m["aliases"].update(x="x"), "'x' is an alias of 'x', which is another alias"),
        (lambda m: m["aliases"].update(bias="w"), "'bias' is stored, and an alias of 'w' too"),
        (
            lambda m: [m["tensors"][k].append(m["tensors"][k][0]) for k in ("name", "kind")],
            "lists it twice",
        ),
        (lambda m: m["tensors"]["kinds"][0].update(shape=[1] * 65), "invalid shape"),
        (
            lambda m: m["tensors"]["kinds"].append({**m["tensors"]["kinds"][0], "shape": [1] * 65}),
            "invalid shape",
        ),
        (lambda m: m["tensors"]["kinds"][0].update(path="data/x"), "invalid chunk grid"),
        (lambda m: m.update(sidecar=None), "there is no sidecar"),
        (lambda m: m["sidecar"].update(nbytes=3), "bytes instead of 3"),
        (
            lambda m: m["sidecar"].update(sources=[{"path": "roots/0/x", "nbytes": 1}]),
            "is not below a root",
        ),
        (
            lambda m: m["sidecar"].update(
                roots=["/a"], sources=[{"path": "roots/0/x", "nbytes": 1}] * 2
            ),
            "'roots/0/x' is listed twice",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself(
    change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    found(rewritten(packed(), change=change), reason=reason)


def test_all_that_is_wrong_with_a_manifest_is_named() -> None:
    store = rewritten(
        packed(), change=lambda m: m.update(aliases={f"a{k}": "no" for k in range(9)})
    )
    assert len(ucformat.verify(store).problems) == 9
    with pytest.raises(Inconsistent, match=r"'a0' is an alias of 'no'.* and 4 more") as failure:
        open_checkpoint(store)
    assert len(failure.value.problems) == 9
    assert failure.value.exit_code == IntegrityError.exit_code


def test_arrays_without_a_digest_or_with_an_impossible_grid() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    place = MemoryStore(uuid.uuid4().hex)
    ucformat.convert(open_fake(store), place)
    for change, reason in (
        ({"digest": None}, "no digest"),
        ({"chunk": [1, 2, 3]}, "invalid chunk grid"),
        ({"shard": [5, 4], "chunk": [3, 4]}, "invalid chunk grid"),
    ):
        copy = MemoryStore(uuid.uuid4().hex)
        for info in place.list():
            copy.put_if_absent(info.key, place.read(info.key))
        document = json.loads(copy.read("manifest.json"))
        document = changed_entry(document, 0, **change)
        copy.delete("manifest.json")
        copy.put_if_absent("manifest.json", manifest_file(document))
        (problem,) = ucformat.verify(copy).problems
        assert (problem.name, problem.state) == W
        assert reason in problem.reason


def open_fake(store: Store) -> Checkpoint:
    return Checkpoint(FakeSource.write(store, ARRAYS))


def test_holes_in_foreign_checkpoints_are_problems_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ck = open_fake(MemoryStore(uuid.uuid4().hex))
    assert ucformat.verify(ck)
    whole = FakeSource.extents
    monkeypatch.setattr(
        FakeSource, "extents", lambda self, key, within=None: list(whole(self, key, within))[1:]
    )
    report = ucformat.verify(ck)
    assert {(p.name, p.state) for p in report.problems} == {k for k, a in ARRAYS.items() if a.size}
    assert all("no rank or file holds" in p.reason for p in report.problems)


_NUMBERS = st.one_of(
    st.integers(-3, 8),
    st.sampled_from(
        [-(1 << 62), 40, 1 << 31, 1 << 32, (1 << 60) + 1, (1 << 62) + 1, (1 << 63) - 1]
    ),
)


@st.composite
def mutations(draw: st.DrawFn) -> tuple[str, list[int]]:
    kinds = (
        "remove",
        "double",
        "start",
        "shape",
        "file",
        "block",
        "bare",
        "tensor",
        "shift",
        "replica",
        "alias",
    )
    return draw(st.sampled_from(kinds)), [
        draw(st.integers(0, 99)),
        draw(st.integers(0, 2)),
        draw(_NUMBERS),
    ]


def mutate(
    store: Store, extents: Extents, aliases: dict[str, str], kind: str, numbers: list[int]
) -> None:
    """One change to an extent or an alias. Offsets and strides inside of a block are left: they say what is stored."""
    number, d, value = numbers
    places = [(n, k) for n, some in enumerate(extents) for k in range(len(some))]
    names = [*aliases, *(n for n, _ in ARRAYS), "nothing"]
    if kind == "alias":
        aliases[names[number % len(names)] if d else "new"] = (
            names[value % len(names)] if d else "head" if value % 2 else "no"
        )
        return
    if not places:
        return
    n, k = places[number % len(places)]
    e = extents[n][k]
    if kind == "remove":
        del extents[n][k]
        return
    if kind == "tensor" and (other := value % len(extents)) != n:
        if len(ARRAYS_NDIM[other]) == len(e.box.shape):
            extents[other].append(extents[n].pop(k))
        return
    if kind == "replica":
        name = f"data/replica{value % 3}.bin"
        data = bytearray(store.read(e.file) if not e.file.startswith("roots") else b"x")
        if d and e.box.size and 0 <= e.offset < len(data):
            data[e.offset] ^= 1
        with suppress(UcformatError):
            with store.create(name) as out:
                out.write(bytes(data))
            extents[n].append(replace(e, file=name, block=None))
        return
    if kind == "double":
        extents[n].append(e)
        return
    extents[n][k] = replace(e, **_other(e, kind, d, value))


def _other(e: Extent, kind: str, d: int, value: int) -> dict[str, Any]:
    """What changes of an extent."""
    dim, block = d % max(1, len(e.box.shape)), e.block or Block(e.offset, 8, 0)
    match kind:
        case "start":
            return {"box": Box(_set(e.box.start, dim, value), e.box.shape)}
        case "shape":
            return {"box": Box(e.box.start, _set(e.box.shape, dim, value))}
        case "file":
            return {"file": ["data/none.bin", "roots/0/x", e.file][d]}
        case "block":
            return {
                "block": [
                    replace(block, crc32c=abs(value)),
                    None,
                    replace(block, nbytes=abs(value)),
                ][d]
            }
        case "bare":
            return {"block": None}
        case "shift":
            return {"offset": abs(value) + (1 << 20), "block": None}
    return {}


def _set(of: tuple[int, ...], d: int, value: int) -> tuple[int, ...]:
    return (*of[:d], value, *of[d + 1 :]) if of else of


ARRAYS_NDIM = [a.shape for a in ARRAYS.values()]


@given(st.lists(mutations(), min_size=1, max_size=3))
@settings(max_examples=150)
def test_every_mutation_is_found_or_leaves_the_content_equal(
    todo: list[tuple[str, list[int]]],
) -> None:
    store = packed()
    extents, aliases = extents_of(store), dict(TIED)
    for kind, numbers in todo:
        mutate(store, extents, aliases, kind, numbers)
    rewritten(store, extents, lambda m: m.update(aliases=aliases))
    report = ucformat.verify(store)
    assert isinstance(report.problems, tuple)
    if report:
        read = read_all(store)
        assert all(same(a, ARRAYS[key]) for key, a in read.items()), (
            "it is not found, and reads otherwise"
        )
        assert all(same(a, ARRAYS[key]) for key, a in reference(store, extents).items())
        stored = {n for n, _ in ARRAYS}
        assert all(a not in stored and n in stored for a, n in aliases.items())
        assert open_checkpoint(store)["head"].name in stored
    else:
        assert all(p.reason and p.file for p in report.problems)
    for key in (Key(*k) for k in ARRAYS):  # a reader gives the truth, or an error of ours
        with suppress(UcformatError):
            got = open_checkpoint(store)[key.name, key.state].read()
            if not any(f"{key}" in str(p) for p in report.problems):
                assert same(got, ARRAYS[key])
