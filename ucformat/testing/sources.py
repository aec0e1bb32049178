"""What every source must do: a suite for pytest, run over a checkpoint of each kind.

Subclass `SourceSuite` with a fixture `sample` that returns a checkpoint as the engine wrote it, and
what is in it:

    from ucformat.testing import Sample, SourceSuite, truth

    class TestToy(SourceSuite):
        @pytest.fixture
        def sample(self, tmp_path):
            folder, arrays = write_toy(tmp_path)
            return Sample(folder, ".", "toy", truth(arrays))
"""

from __future__ import annotations

import gc
import json
import random
import shutil
import weakref
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest

import ucformat
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import UcformatError
from ucformat.exporters.base import left_out
from ucformat.geometry.box import Box
from ucformat.reading.dtypes import dtype_name
from ucformat.sources.registry import SOURCES, all_sources
from ucformat.storage.local import LocalStore
from ucformat.testing.reading import Counting, nbytes_read, read_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import ModuleType
    from typing import Any

    from ucformat.checkpoint import Checkpoint

__all__ = ["Sample", "SourceSuite", "Truth", "read_whole", "truth", "without"]

#: By state and name: the dtype, the shape and the row-major bytes.
Truth = dict[tuple[str, str], tuple[str, tuple[int, ...], bytes]]


def truth(arrays: Mapping[str, Any], state: str = "weight") -> Truth:
    """What is in a checkpoint of these arrays.

    Args:
        arrays: NumPy arrays by the names of the tensors.
        state: the state of all of them.
    """
    return {
        (state, name): (dtype_name(array.dtype), array.shape, array.tobytes())
        for name, array in arrays.items()
    }


@dataclass(frozen=True)
class Sample:
    """A foreign checkpoint and all that must be found in it.

    Attributes:
        folder: a folder that may be copied and damaged.
        place: what a user opens, relative to `folder`.
        kind: of the source.
        truth: the tensors.
        aliases: the stored name of each tied one.
        groups: the parameters of each optimizer group, in order; None: it has none.
        step: the training step that it says, if any.
        extra: tensors by state and name that are in it, and not in the truth.
        encoded: whether whole chunks must be read for a part of them.
    """

    folder: Path
    place: str
    kind: str
    truth: Truth
    aliases: dict[str, str] = field(default_factory=dict)
    groups: list[list[str]] | None = None
    step: int | None = None
    extra: frozenset[tuple[str, str]] = frozenset()
    encoded: bool = False

    @property
    def path(self) -> Path:
        """What a user opens."""
        return self.folder / self.place

    def open(self) -> Checkpoint:
        """Open it as a user does."""
        return open_checkpoint(self.path)


def read_whole(ck: Checkpoint) -> Truth:
    """Read every tensor through the public interface.

    Args:
        ck: the checkpoint.
    """
    return {
        (key.state, key.name): (info.dtype, info.shape, ck[key.name, key.state].read().tobytes())
        for key, info in ck.tensors.items()
    }


def without(found: Truth, extra: frozenset[tuple[str, str]]) -> Truth:
    """What was found, without some of it.

    Args:
        found: tensors.
        extra: the states and names of those that are left out.
    """
    return {key: value for key, value in found.items() if key not in extra}


class SourceSuite:
    """The behaviour of every source; a subclass has a fixture `sample`."""

    #: Constants of the source's modules that say how much is read along with what is looked for: as
    #: much as a small file holds, so tests make it less.
    read_ahead: ClassVar[Mapping[ModuleType, Sequence[str]]] = {}
    #: The share of the tensors' bytes that opening may read, with little read ahead. Above 1 it
    #: proves nothing: small archives are read in the search for their ends;
    #: `test_opening_large_tensors` is for those.
    most_read = 0.5
    #: Bytes that may be read beyond those of a slice: none but where blocks are read whole, or gaps
    #: along.
    more_read = 0
    #: Of any one file, with little read ahead.
    most_requests = 300
    #: How often bytes of each file are changed.
    changes = 8
    #: Kinds that would open the folder too, had this one not come first.
    outranked: frozenset[str] = frozenset()
    #: Whether it is in reference cycles, so that only the garbage collector frees it.
    cyclic = False

    @pytest.fixture
    def sample(self) -> Sample:
        """The checkpoint that is read."""
        raise NotImplementedError

    @pytest.fixture
    def copy(self, sample: Sample, tmp_path: Path) -> Sample:
        """The sample, in a folder that may be hurt."""
        shutil.copytree(sample.folder, tmp_path / "copy", symlinks=True)
        return replace(sample, folder=tmp_path / "copy")

    def test_it_is_found_and_by_one_source_alone(self, sample: Sample) -> None:
        assert SOURCES[sample.kind].kind == sample.kind
        assert sample.open().kind == sample.kind
        if sample.path.is_dir():
            found = [s.kind for s in all_sources() if s.find(LocalStore(sample.path))]
            assert found[:1] == [sample.kind]
            assert set(found[1:]) <= self.outranked

    def test_every_tensor_is_the_engines_bit_for_bit(self, sample: Sample) -> None:
        ck = sample.open()
        found = read_whole(ck)
        assert found.keys() - sample.extra == sample.truth.keys()
        for key, expected in sample.truth.items():
            assert found[key][:2] == expected[:2], key
            assert found[key][2] == expected[2], key

    def test_what_it_says_of_itself(self, sample: Sample) -> None:
        facts = sample.open().metadata
        assert dict(facts.aliases) == sample.aliases
        assert facts.step == sample.step
        if sample.groups is not None:
            assert [list(g["params"]) for g in facts.groups] == sample.groups
            assert {n: g for g, names in enumerate(sample.groups) for n in names} == dict(
                facts.tensor_list.groups
            )
        else:
            assert not facts.groups
        assert facts.engine["name"]
        json.dumps([dict(facts.objects), facts.layout, list(facts.groups)], allow_nan=False)

    def test_extents_cover_each_tensor_exactly_once(self, sample: Sample) -> None:
        source = sample.open().source
        for info in source.metadata.tensor_list.tensors:
            if (info.state, info.name) in sample.truth:
                data = read_tensor(source, info)  # type: ignore[arg-type]
                assert data == sample.truth[info.state, info.name][2], info.key

    def test_it_is_freed_as_soon_as_it_is_dropped(self, sample: Sample) -> None:
        """In no reference cycle: of thousands, the garbage collector takes a third of the time to open them."""
        if self.cyclic:
            return
        gc.disable()
        try:
            source = weakref.ref(sample.open().source)
            assert source() is None
        finally:
            gc.enable()

    def test_opening_reads_metadata_and_no_tensors(
        self, sample: Sample, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not sample.path.is_dir():
            return
        for module, names in self.read_ahead.items():
            for name in names:
                monkeypatch.setattr(module, name, 1 << 8)
        store = Counting(LocalStore(sample.path))
        source = next(s for s in all_sources() if s.find(store)).open(store)
        read = {
            key: list(ranges) for key, ranges in store.ranges.items()
        }  # asking for extents reads more
        nbytes = sum(
            nbytes_read(read, source, info) for info in source.metadata.tensor_list.tensors
        )
        assert nbytes <= self.most_read * sum(
            info.nbytes for info in source.metadata.tensor_list.tensors
        )
        assert max(store.requests.values()) <= self.most_requests

    def test_slices_read_what_they_need(self, sample: Sample) -> None:
        ck, rng = sample.open(), random.Random(7)
        for (state, name), (_, shape, data) in sample.truth.items():
            tensor = ck[name, state]
            whole = np.frombuffer(data, tensor.dtype).reshape(shape)
            start = tuple(rng.randrange(n) if n else 0 for n in shape)
            stop = tuple(rng.randint(a, n) for a, n in zip(start, shape, strict=True))
            index = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
            assert tensor[index].tobytes() == whole[index].tobytes(), (state, name, index)
            if shape and not sample.encoded:
                rows = Box((start[0], *[0] * (len(shape) - 1)), (stop[0] - start[0], *shape[1:]))
                plan = tensor.plan(rows)
                assert plan.bytes_read <= plan.bytes_needed + self.more_read

    def test_convert_and_read_back(self, sample: Sample, tmp_path: Path) -> None:
        source = sample.open()
        ck = ucformat.convert(source, tmp_path / "universal", chunk_bytes=4096)
        assert read_whole(ck) == read_whole(source)
        assert (dict(ck.aliases), ck.metadata.step) == (dict(source.aliases), source.metadata.step)
        assert list(ck.metadata.groups) == list(source.metadata.groups)
        assert dict(ck.objects) == dict(source.objects)
        assert dict(ck.assets) == dict(source.assets)
        assert ucformat.verify(ck.url)

    def test_a_file_that_is_not_read_is_told_of(
        self, copy: Sample, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Wherever it lies, and whatever it is called: a small one is kept, a large one is named."""
        if not copy.path.is_dir():
            return
        before, assets = dict(copy.open().unread), set(copy.open().assets)
        inside = {copy.path, *(path.parent for path in self.damageable(copy))}
        small = [
            folder / name for folder in inside for name in ("added.json", "added.pth", "added")
        ]
        large = (
            next(folder for folder in sorted(inside, key=lambda folder: len(folder.parts)))
            / "added.bin"
        )
        for path in small:
            path.write_bytes(b"{}")
        large.write_bytes(bytes(2 << 20))
        keys = {str(path.relative_to(copy.path)) for path in small}
        ck = copy.open()
        assert ck.kind == copy.kind
        assert without(read_whole(ck), copy.extra) == copy.truth
        assert ck.unread.keys() - before.keys() <= keys | {"added.bin"}
        assert ck.assets.keys() == assets | keys  # some of them by a rule of the source
        assert ck.unread["added.bin"] == 2 << 20
        converted = ucformat.convert(ck, tmp_path / "converted")
        assert all(converted.assets[key] == b"{}" for key in keys)
        assert not converted.unread
        assert any("does not contain them: added.bin" in message for message in caplog.messages)
        assert "the file added.bin, which was not read" in left_out(ck, [])

    def hurt(self, copy: Sample, path: Path, what: str) -> None:
        """Whatever was done to a file: an error, or the whole truth; never other bytes, never zeros."""
        try:
            ck = open_checkpoint(copy.path)
            found = without(read_whole(ck), copy.extra)
        except UcformatError:
            return
        assert found == copy.truth, f"{path} {what}: it reads, and wrongly"

    def damageable(self, copy: Sample) -> list[Path]:
        ck = copy.open()
        root = copy.path if copy.path.is_dir() else copy.path.parent
        return [root / name for name in ck.metadata.files]

    def test_a_missing_file_is_an_error_or_does_not_matter(
        self, copy: Sample, tmp_path: Path
    ) -> None:
        for path in self.damageable(copy):
            path.rename(tmp_path / "aside")
            self.hurt(copy, path, "is missing")
            (tmp_path / "aside").rename(path)

    def test_a_truncated_file_is_an_error_or_does_not_matter(self, copy: Sample) -> None:
        for path in self.damageable(copy):
            data = path.read_bytes()
            for keep in (0, len(data) // 3, len(data) * 9 // 10, len(data) - 1):
                path.write_bytes(data[:keep])
                self.hurt(copy, path, f"was cut to {keep} of {len(data)} bytes")
            path.write_bytes(data)

    def test_a_changed_byte_in_the_metadata_never_crashes(self, copy: Sample) -> None:
        """Bytes change at random places; what comes is an error of ours, or tensors: never another exception."""
        rng = random.Random(11)
        for path in self.damageable(copy)[:6]:
            data = path.read_bytes()
            for _ in range(self.changes):
                hurt = bytearray(data)
                for at in [rng.randrange(len(data)) for _ in range(3)] if data else []:
                    hurt[at] ^= 1 << rng.randrange(8)
                path.write_bytes(hurt)
                with suppress(UcformatError):
                    read_whole(open_checkpoint(copy.path))
            path.write_bytes(data)

    def test_an_odd_value_in_a_json_file_never_crashes(self, copy: Sample) -> None:
        """A value at a random place is replaced; what comes is as when a byte changes."""
        rng = random.Random(13)
        for path in self.damageable(copy)[:6]:
            data = path.read_bytes()
            try:
                document = json.loads(data)
            except ValueError:
                continue
            for _ in range(2 * self.changes):
                path.write_text(json.dumps(_with_odd_value(document, rng)))
                with suppress(UcformatError):
                    read_whole(open_checkpoint(copy.path))
            path.write_bytes(data)


#: What a file may have where a number, a text or a list is expected.
_ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0.5,
    2.0,
    1 << 40,
    1 << 70,
    "",
    "x",
    "../x",
    [],
    [0],
    [[]],
    {},
    {"x": 0},
)


def _with_odd_value(document: Any, rng: random.Random) -> Any:
    """A JSON document with another value in one place."""
    changed = {"": deepcopy(document)}
    places: list[tuple[Any, Any]] = [(changed, "")]
    for container, key in places:  # which grows
        value = container[key]
        if isinstance(value, dict | list):
            keys = list(value) if isinstance(value, dict) else range(len(value))
            places += [(value, inner) for inner in keys]
    container, key = rng.choice(places)
    container[key] = rng.choice(_ODD)
    return changed[""]
