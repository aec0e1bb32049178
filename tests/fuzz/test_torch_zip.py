"""Files of torch.save: mutated, and archives whose directories and ends were filled with other numbers."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.fuzzing import harmless, mutated, open_files, stored
from tests.sources.torch_files import dictionary, integer, pickled, storage, tensor
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import IntegrityError, UnsafeError, UnsupportedError

CONSTANT = 48 << 20
NAME = "pytorch_model.bin"  # by which a file is taken for torch's, whatever is in it


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


_WEIGHTS = {
    "a.w": torch.arange(12.0).reshape(3, 4).T,
    "b": torch.zeros(5, dtype=torch.bfloat16),
    "c": torch.tensor(7),
}
_STATE = {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(4, 3)}}
_GROUP = {"lr": 0.1, "params": [0, 1, 2]}
CORPUS = (
    saved(_WEIGHTS),
    saved(
        {
            "model": _WEIGHTS,
            "optimizer": {"state": _STATE, "param_groups": [_GROUP]},
            "step": 3,
            "args": {"x": [1]},
        }
    ),
)


def check(data: bytes) -> bool:
    return harmless(lambda: open_files({NAME: data}), len(data), constant=CONSTANT)


@pytest.mark.matrix
@given(mutated(CORPUS))
@settings(max_examples=120)
def test_mutated_files(data: bytes) -> None:
    check(data)


@pytest.mark.matrix
@given(st.sampled_from(CORPUS), st.data())
@settings(max_examples=80)
def test_files_mutated_in_their_directory(whole: bytes, draw: st.DataObject) -> None:
    at = whole.index(b"PK\1\2")
    check(whole[:at] + draw.draw(mutated([whole[at:]])))


@pytest.mark.matrix
@given(st.sampled_from(CORPUS), st.data())
@settings(max_examples=60)
def test_files_with_another_pickle(whole: bytes, draw: st.DataObject) -> None:
    """Under the right checksum, so that it is unpickled."""
    members = parsed(whole)
    name = next(n for n in members if n.endswith("data.pkl"))
    members[name] = draw.draw(mutated([members[name]]))
    check(zipped([Member(n, data) for n, data in members.items()]))


# archives made by hand

Numbers = dict[str, int]
_LOCAL = {"version": "H", "flags": "H", "method": "H", "time": "I", "crc": "I", "packed": "I", "size": "I",
          "name_length": "H", "extra_length": "H"}  # fmt: skip
_ENTRY = {
    "made": "H",
    **_LOCAL,
    "comment_length": "H",
    "disk": "H",
    "inner": "H",
    "outer": "I",
    "offset": "I",
}
_WIDE = {"length": "Q", "made": "H", "version": "H", "disk": "I", "of_disk": "I", "here": "Q", "count": "Q",
         "nbytes": "Q", "offset": "Q"}  # fmt: skip
_LOCATOR = {"disk": "I", "offset": "Q", "disks": "I"}
_END = {
    "disk": "H",
    "of_disk": "H",
    "here": "H",
    "count": "H",
    "nbytes": "I",
    "offset": "I",
    "comment_length": "H",
}


def record(mark: bytes, form: dict[str, str], numbers: Numbers) -> bytes:
    return mark + b"".join(
        struct.pack(f"<{kind}", numbers.get(name, 0) % (1 << 8 * struct.calcsize(f"<{kind}")))
        for name, kind in form.items()
    )


@dataclass
class Member:
    """A file of an archive; `local` and `entry` are numbers of its two headers that are other than they should be."""

    name: str
    data: bytes
    local: Numbers = field(default_factory=dict)
    entry: Numbers = field(default_factory=dict)
    extra: bytes = b""


def zipped(
    members: list[Member],
    end: Numbers | None = None,
    wide: Numbers | None = None,
    locator: Numbers | None = None,
    comment: bytes = b"",
) -> bytes:
    """An archive; `end`, `wide` and `locator` are numbers of the records at its end that are other than they should be.

    There is a zip64 record where `wide` is given.
    """
    out, directory = bytearray(), b""
    for m in members:
        name = m.name.encode()
        told = {"version": 20, "crc": zlib.crc32(m.data), "packed": len(m.data), "size": len(m.data),
                "name_length": len(name)}  # fmt: skip
        entry = {**told, "offset": len(out), "extra_length": len(m.extra), **m.entry}
        directory += record(b"PK\1\2", _ENTRY, entry) + name + m.extra
        out += record(b"PK\3\4", _LOCAL, {**told, **m.local}) + name + m.data
    start = len(out)
    told = {"here": len(members), "count": len(members), "nbytes": len(directory), "offset": start}
    out += directory
    if wide is not None:
        at = len(out)
        out += record(b"PK\6\6", _WIDE, {"length": 44, "made": 45, "version": 45, **told, **wide})
        out += record(b"PK\6\7", _LOCATOR, {"offset": at, "disks": 1, **(locator or {})})
    out += record(b"PK\5\6", _END, {**told, "comment_length": len(comment), **(end or {})})
    return bytes(out) + comment


def parsed(data: bytes) -> dict[str, bytes]:
    """The members of an archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


PICKLE = pickled(dictionary(w=tensor(), v=tensor(of=storage("1"))))
PLAIN = (
    Member("archive/data.pkl", PICKLE),
    Member("archive/byteorder", b"little"),
    Member("archive/data/0", bytes(16)),
    Member("archive/data/1", bytes(range(16))),
)

_number = st.sampled_from(
    (
        0,
        1,
        8,
        16,
        30,
        64,
        99,
        2**15,
        2**16 - 1,
        2**31,
        2**32 - 1,
        2**32,
        2**40,
        2**63 - 1,
        2**63,
        2**64 - 1,
    )
) | st.integers(0, 700)


def _numbers(form: dict[str, str]) -> st.SearchStrategy[Numbers]:
    return st.dictionaries(st.sampled_from(list(form)), _number, max_size=3)


_extra = st.builds(
    lambda kind, claimed, values: (
        struct.pack("<HH", kind, claimed if claimed is not None else 8 * len(values))
        + b"".join(struct.pack("<Q", v) for v in values)
    ),
    st.sampled_from((1, 1, 0x7075, 99)),
    st.none() | st.sampled_from((0, 3, 8, 24, 65535)),
    st.lists(_number, max_size=3),
)
_member = st.builds(
    Member,
    st.sampled_from(
        [m.name for m in PLAIN]
        + ["archive/data", "archive/data/2", "other/data.pkl", "", "/", "../x"]
    ),
    st.sampled_from((PICKLE, b"little", b"big", b"", bytes(16))),
    _numbers(_LOCAL),
    _numbers(_ENTRY),
    st.just(b"") | _extra,
)
_members = st.lists(st.sampled_from(PLAIN) | _member, max_size=6) | st.builds(
    lambda m: [*PLAIN, *m], st.lists(_member, max_size=2)
)


@pytest.mark.matrix
@given(
    st.just(list(PLAIN)) | _members,
    _numbers(_END),
    st.none() | _numbers(_WIDE),
    _numbers(_LOCATOR),
    st.sampled_from((b"", b"x" * 70_000, b"PK\5\6" + bytes(18), b"PK\5\6" * 200)),
)
@settings(max_examples=150)
def test_archives_of_other_numbers(
    members: list[Member], end: Numbers, wide: Numbers | None, locator: Numbers, comment: bytes
) -> None:
    check(zipped(members, end, wide, locator, comment))


def test_the_archive_made_by_hand_is_read() -> None:
    assert check(zipped(list(PLAIN)))
    assert check(
        zipped(list(PLAIN), dict.fromkeys(("here", "count", "nbytes", "offset"), 2**32 - 1), {})
    )


_NONE = {"nbytes": 2**32 - 1, "offset": 2**32 - 1, "count": 2**16 - 1}
DAMAGED: dict[str, bytes] = {
    "a directory past the end": zipped(list(PLAIN), {"offset": 2**31}),
    "a directory larger than the file": zipped(list(PLAIN), {"nbytes": 2**31}),
    "a wide directory past the end": zipped(list(PLAIN), _NONE, {"offset": 2**63}),
    "a wide directory of all numbers": zipped(list(PLAIN), _NONE, {"nbytes": 2**64 - 1, "offset": 2**64 - 1}),
    "members that overlap": zipped([*PLAIN[:3], Member("archive/data/1", bytes(16), entry={"offset": 0})]),
    "a name that repeats": zipped([*PLAIN, PLAIN[3]]),
    "a compressed member": zipped([*PLAIN[:3], Member("archive/data/1", b"", entry={"method": 8, "size": 2**31})]),
    "a member past the end": zipped([*PLAIN[:3], Member("archive/data/1", bytes(16), entry={"offset": 2**31})]),
    "two sizes": zipped([*PLAIN[:3], Member("archive/data/1", bytes(16), entry={"size": 2**31})]),
    "a size past the end": zipped([*PLAIN[:3], Member("archive/data/1", b"", entry={"size": 2**31, "packed": 2**31})]),
    "no member": zipped([]),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_archives_that_are_damaged_are_refused(what: str) -> None:
    def read() -> None:
        with pytest.raises((IntegrityError, UnsafeError, UnsupportedError)) as error:
            open_files({NAME: DAMAGED[what]})
        assert len(str(error.value)) < 2000

    assert harmless(read, len(DAMAGED[what]), constant=CONSTANT)


def test_a_local_header_that_reaches_past_the_end() -> None:
    data = zipped(
        [*PLAIN[:2], PLAIN[3], Member("archive/data/0", bytes(16), local={"extra_length": 65535})]
    )
    ck = open_checkpoint(stored({NAME: data}))
    with pytest.raises(IntegrityError, match="past the end"):
        ck["w"].read()


def test_numbers_of_the_pickle_that_no_storage_has() -> None:
    data = zipped(
        [
            Member(
                "archive/data.pkl", pickled(dictionary(w=tensor((1 << 40,), (0,)), n=integer(1)))
            ),
            *PLAIN[1:],
        ]
    )
    check(data)
