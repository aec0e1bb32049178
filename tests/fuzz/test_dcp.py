"""PyTorch DCP: `.metadata` and items, mutated, and metadata whose numbers are not those of the files."""

from __future__ import annotations

import copy
import pickle
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.fuzz.fuzzing import Files, files_below, harmless, mutated, open_files, stored
from tests.sources.suite import DATA
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import UcformatError

CONSTANT = 64 << 20
FILES = files_below(DATA / "dcp/sgd-hf/ckpt")
NUMBERED = files_below(DATA / "dcp/numbered/ckpt")
REAL: Any = pickle.loads(FILES[".metadata"])  # noqa: S301 - of our own data


def check(files: Files) -> bool:
    return harmless(lambda: open_files(files), sum(map(len, files.values())), constant=CONSTANT)


def test_what_is_changed_below_is_read() -> None:
    assert check(FILES)
    assert check({**FILES, ".metadata": pickle.dumps(REAL)})


@pytest.mark.matrix
@given(st.sampled_from([FILES, NUMBERED]), st.data())
@settings(max_examples=60)
def test_mutated_metadata(files: Files, draw: st.DataObject) -> None:
    check({**files, ".metadata": draw.draw(mutated([files[".metadata"]]))})


@pytest.mark.matrix
@given(st.sampled_from(sorted(set(FILES) - {".metadata"})), st.data())
@settings(max_examples=25)
def test_mutated_items(name: str, draw: st.DataObject) -> None:
    check({**FILES, name: draw.draw(mutated([FILES[name]]))})


# other numbers

_number = st.sampled_from(
    (-1, 0, 1, 2, 3, 8, 2**31, 2**32, 2**61, 2**62, 2**63, 2**64, 10**400, None, 0.5, True, "3")
)
_sizes: st.SearchStrategy[Any] = (
    st.lists(_number, max_size=4).map(tuple)
    | st.sampled_from(
        [(0,) * 64, (1,) * 65, (1,) * 20_000, (2**31,) * 3, [2, 3], None, {}, "", (2**61, 2**61)]
    )
    | st.sampled_from(
        [tuple(t.size) for t in REAL.state_dict_metadata.values() if hasattr(t, "size")]
    )
)
_dtype = st.sampled_from(
    (torch.float32, torch.bfloat16, torch.complex128, torch.float8_e4m3fn, torch.quint8, None, 5)
)
_text = st.sampled_from(
    ("", "a", ".", "..", "../x", "/etc/passwd", ".metadata", "__0_0.distcp", "__1_0.distcp", "x" * 20_000, "a\0b",
     "state.0.exp_avg", "param_groups", "optim.param_groups.0.lr", "\ud800", "a" + ".a" * 5000, 5, None)
)  # fmt: skip
_path: st.SearchStrategy[Any] = (
    st.lists(_text | _number, max_size=4).map(tuple)
    | st.just(("a",) * 20_000)
    | st.just(("model", "model"))
    | _number
)


class Edits:
    """Ways to change metadata; each draws what it needs."""

    def __init__(self, meta: Any, draw: st.DataObject) -> None:
        self.meta, self.draw = meta, draw

    def _entry(self) -> Any:
        name = self.draw.draw(st.sampled_from(sorted(self.meta.state_dict_metadata, key=str)))
        return self.meta.state_dict_metadata[name]

    def _stored(self) -> Any:
        return self.draw.draw(st.sampled_from(sorted(self.meta.storage_data, key=str)))

    def size(self) -> None:
        self._entry().size = self.draw.draw(_sizes)

    def chunk(self) -> None:
        chunk: Any = self.draw.draw(st.sampled_from(self._entry().chunks))
        setattr(
            chunk, self.draw.draw(st.sampled_from(("offsets", "sizes"))), self.draw.draw(_sizes)
        )

    def chunks(self) -> None:
        entry: Any = self._entry()
        entry.chunks = self.draw.draw(
            st.sampled_from(
                [
                    [],
                    entry.chunks * 2,
                    entry.chunks * 1000,
                    entry.chunks[:-1],
                    None,
                    [None],
                    [[]],
                    {},
                ]
            )
        )

    def dtype(self) -> None:
        self._entry().properties.dtype = self.draw.draw(_dtype)

    def place(self) -> None:
        info: Any = self.meta.storage_data[self._stored()]
        setattr(
            info, self.draw.draw(st.sampled_from(("offset", "length"))), self.draw.draw(_number)
        )

    def file(self) -> None:
        self.meta.storage_data[self._stored()].relative_path = self.draw.draw(_text)

    def drop(self) -> None:
        del self.meta.storage_data[self._stored()]

    def swap(self) -> None:
        first, second = self._stored(), self._stored()
        data = self.meta.storage_data
        data[first], data[second] = data[second], data[first]

    def index(self) -> None:
        key = MetadataIndex(self.draw.draw(_text), self.draw.draw(_sizes))
        self.meta.storage_data[key] = self.meta.storage_data[self._stored()]

    def kind(self) -> None:
        name = self.draw.draw(st.sampled_from(sorted(self.meta.state_dict_metadata, key=str)))
        self.meta.state_dict_metadata[name] = self.draw.draw(
            st.sampled_from(
                [BytesStorageMetadata(), None, 5, ChunkStorageMetadata((0,), (2,)), Metadata({})]
            )
        )

    def name(self) -> None:
        entries = self.meta.state_dict_metadata
        entries[self.draw.draw(_text)] = entries[
            self.draw.draw(st.sampled_from(sorted(entries, key=str)))
        ]

    def path(self) -> None:
        planned = self.meta.planner_data
        planned[self.draw.draw(st.sampled_from(sorted(planned, key=str)) | _text)] = self.draw.draw(
            _path
        )

    def part(self) -> None:
        name = self.draw.draw(
            st.sampled_from(
                ("state_dict_metadata", "planner_data", "storage_data", "version", "storage_meta")
            )
        )
        setattr(
            self.meta,
            name,
            self.draw.draw(st.sampled_from([None, {}, [], 5, {"a": None}, {5: 5}, {None: {}}])),
        )


_EDITS = [name for name in vars(Edits) if not name.startswith("_")]


@pytest.mark.matrix
@given(st.lists(st.sampled_from(_EDITS), min_size=1, max_size=4), st.data())
@settings(max_examples=25)
def test_metadata_with_other_numbers(edits: list[str], draw: st.DataObject) -> None:
    change = Edits(copy.deepcopy(REAL), draw)
    for name in edits:
        with suppress(
            AttributeError, TypeError, KeyError, ValueError
        ):  # an earlier edit left nothing to change
            getattr(change, name)()
    check({**FILES, ".metadata": pickle.dumps(change.meta)})


def made(
    shape: Any,
    boxes: list[tuple[Any, Any]],
    places: list[tuple[str, int, int]] | None = None,
    dtype: Any = torch.float32,
) -> Files:
    """A folder with the tensor `w`, whose chunks lie at these places: file, offset, length."""
    chunks: Any = [ChunkStorageMetadata(offsets, sizes) for offsets, sizes in boxes]
    entry = TensorStorageMetadata(TensorProperties(dtype), shape, chunks)
    item = next(
        (info for index, info in REAL.storage_data.items() if index.offset is not None),
        _StorageInfo("", 0, 0),
    )
    places = places or [(item.relative_path, item.offset, item.length)] * len(boxes)
    data = {MetadataIndex("w", b[0]): _StorageInfo(*p) for b, p in zip(boxes, places, strict=True)}
    return {**FILES, ".metadata": pickle.dumps(Metadata({"w": entry}, {"w": ("w",)}, data))}


WIDE = 1 << 61
DAMAGED: dict[str, Files] = {
    "a chunk outside the tensor": made((4, 4), [((2, 2), (4, 4))]),
    "a chunk far outside": made((4, 4), [((WIDE, 0), (4, 4))]),
    "chunks that overlap": made((4, 4), [((0, 0), (3, 4)), ((1, 0), (3, 4))]),
    "a hole": made((4, 4), [((0, 0), (1, 4)), ((2, 0), (2, 4))]),
    "an offset past the end": made((4,), [((0,), (4,))], [("__0_0.distcp", 1 << 40, 100)]),
    "a length past the end": made((4,), [((0,), (4,))], [("__0_0.distcp", 0, 1 << 40)]),
    "a file that is not there": made((4,), [((0,), (4,))], [("__9_9.distcp", 0, 100)]),
    "a file above": made((4,), [((0,), (4,))], [("../x", 0, 100)]),
    "the metadata as an item": made((4,), [((0,), (4,))], [(".metadata", 0, 100)]),
    "an item of no bytes": made((4,), [((0,), (4,))], [("__0_0.distcp", 0, 0)]),
    "a huge tensor": made((WIDE, WIDE), [((0, 0), (WIDE, WIDE))]),
    "twenty thousand dims": made((1,) * 20_000, [((0,) * 20_000, (1,) * 20_000)]),
    "twenty thousand dims of chunks": made((4,), [((0,) * 20_000, (1,) * 20_000)]),
    "many chunks of no elements, and one that leaves a hole": made(
        (1 << 40,), [((i,), (0,)) for i in range(2000)] + [((0,), (4,))]
    ),
    "chunks of one element, of a huge tensor": made(
        (1 << 40,), [((3 * i,), (1,)) for i in range(2000)]
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_metadata_that_are_damaged_are_refused(what: str) -> None:
    files = DAMAGED[what]

    def read() -> None:
        with pytest.raises(UcformatError) as error:
            open_checkpoint(stored(files))["w"].read()
        assert len(str(error.value)) < 4000

    assert harmless(read, sum(map(len, files.values())), constant=CONSTANT)


def test_a_step_that_is_a_tensor_of_many_numbers() -> None:
    meta = copy.deepcopy(REAL)
    item = {index.fqn: index for index in meta.storage_data if index.fqn.startswith("train.")}
    meta.storage_data[item["train.step"]] = meta.storage_data[item["train.generator"]]
    assert open_files({**FILES, ".metadata": pickle.dumps(meta)}).metadata.step is None
