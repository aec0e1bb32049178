"""What every exporter must do: a suite for pytest.

Subclass `ExporterSuite` with the kind of the exporter, and with a method `load` that reads a target
as the tool does for which it is made:

    from ucformat.testing import ExporterSuite

    class TestToy(ExporterSuite):
        kind = "toy"

        def load(self, place):
            return {(name, "weight"): array for name, array in read_toy(place)}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import ucformat
from ucformat.checkpoint import Checkpoint
from ucformat.errors import IntegrityError, NotACheckpoint, UnsupportedError, UsageError
from ucformat.exporters.base import Exporter, options_of
from ucformat.exporters.registry import EXPORTERS
from ucformat.geometry.tensor import Key
from ucformat.jobs.export import plan_export
from ucformat.reading.arrays import ArraySource
from ucformat.reading.dtypes import numpy_dtype
from ucformat.schema import FINGERPRINT, ITEMSIZE
from ucformat.settings import using
from ucformat.storage.local import LocalStore
from ucformat.storage.wrappers import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ucformat.storage.base import FileWriter, Store

__all__ = ["ExporterSuite", "checkpoint_of"]


def checkpoint_of(
    folder: Path, arrays: Mapping[tuple[str, str], np.ndarray], **facts: Any
) -> Checkpoint:
    """Write arrays to a folder, and open them as a foreign checkpoint.

    Args:
        folder: is made.
        arrays: by name and state.
        facts: further arguments of `CheckpointMetadata`, such as `objects` and `step`.
    """
    folder.mkdir(parents=True)
    return Checkpoint(ArraySource(LocalStore(folder), arrays, **facts))


class _LosesLast(WrappedStore):
    """A store whose writer is killed before it has written certain files."""

    def __init__(self, inner: Store, keys: frozenset[str]) -> None:
        super().__init__(inner)
        self.keys = keys

    def create(self, key: str, unit: int = 1) -> FileWriter:
        if key in self.keys:
            raise _Killed
        return super().create(key, unit)

    def put_if_absent(self, key: str, data: bytes) -> str:
        if key in self.keys:
            raise _Killed
        return super().put_if_absent(key, data)


class _Killed(BaseException):
    """The end of the process."""


class ExporterSuite:
    """The behaviour of every exporter; a subclass has a `kind` and a method `load`."""

    kind: str
    #: Of the exporter.
    options: ClassVar[Mapping[str, Any]] = {}
    #: Of the target; with one of the exporter's `endings` if the format is a file.
    name = "out"

    def load(self, place: Path) -> Mapping[tuple[str, str], np.ndarray]:
        """Read a target as its tool does: arrays by name and state. An error if the tool finds none."""
        raise NotImplementedError

    def arrays(self) -> dict[tuple[str, str], np.ndarray]:
        """The tensors that are exported: by default odd shapes, and of one the state of an optimizer."""
        rng = np.random.default_rng(7)
        arrays = {
            ("layer.weight", "weight"): rng.standard_normal((37, 11)).astype("float32"),
            ("layer.bias", "weight"): rng.standard_normal(11).astype("float32"),
            ("large.weight", "weight"): rng.standard_normal((700, 411)).astype("float32"),
            ("counts", "weight"): rng.integers(0, 99, (3, 2)),
            ("scalar", "weight"): np.array(7.5, "float32"),
            ("empty", "weight"): np.zeros((0, 4), "float32"),
            ("layer.weight", "exp_avg"): rng.standard_normal((37, 11)).astype("float32"),
        }
        known = {key: a for key, a in arrays.items() if str(a.dtype) in self.exporter().dtypes}
        assert known, "the format has none of these dtypes: override `arrays`"
        return known

    def exporter(self) -> Exporter:
        """The exporter as a user gets it."""
        return EXPORTERS[self.kind](**self.options)

    def exported(self) -> dict[tuple[str, str], np.ndarray]:
        """Those of the tensors for which the format has a place."""
        only = self.exporter().weights_only
        return {key: a for key, a in self.arrays().items() if key[1] == "weight" or not only}

    @pytest.fixture
    def source(self, tmp_path: Path) -> Checkpoint:
        """The checkpoint that is exported: a universal one, whose files have checksums."""
        foreign = checkpoint_of(tmp_path / "foreign", self.arrays(), step=7)
        return ucformat.convert(foreign, tmp_path / "universal", chunk_bytes=4096)

    def found(self, place: Path) -> Mapping[tuple[str, str], np.ndarray]:
        """What the tool reads; nothing if it finds no checkpoint."""
        try:
            return self.load(place)
        except Exception:  # noqa: BLE001 - of any tool
            return {}

    def same(self, place: Path) -> None:
        """Check that the tool reads what was exported, bit for bit."""
        found, expected = self.load(place), self.exported()
        assert found.keys() == expected.keys()
        for key, array in expected.items():
            assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape), key
            assert found[key].tobytes() == array.tobytes(), key

    def test_it_is_registered_and_says_what_it_is(self) -> None:
        exporter = EXPORTERS[self.kind]
        assert issubclass(exporter, Exporter)
        assert exporter.kind == self.kind
        assert exporter.title
        assert all(one.metadata["text"] for one in options_of(exporter).values())
        with pytest.raises(UsageError, match="no_such_option"):
            exporter(no_such_option=1)

    def test_the_tool_reads_the_same_bits(self, source: Checkpoint, tmp_path: Path) -> None:
        done = ucformat.export(source, tmp_path / self.name, self.kind, **self.options)
        assert done.verified
        self.same(tmp_path / self.name)

    @pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "computed"])
    def test_the_catalog_has_the_fingerprints_of_its_tensors(
        self, source: Checkpoint, tmp_path: Path, *, recorded: bool
    ) -> None:
        """Of an export that can be opened: those that the source records, else computed as it is written."""
        if not recorded:
            source.source.metadata = source.metadata.replace(fingerprints={})
        url = f"sqlite:///{tmp_path}/catalog.db"
        with using(catalog=url):
            done = ucformat.export(source, tmp_path / self.name, self.kind, **self.options)
        try:
            exported = ucformat.open(done.url)
        except NotACheckpoint:
            return
        with ucformat.Catalog(url) as catalog:
            digests = {Key(t.name, t.state): t.digest for t in catalog.tensors(exported.id)}
        for key, digest in digests.items():
            assert digest == f"{FINGERPRINT}{exported[key].fingerprint}", key

    def test_what_is_left_out_is_told(self, source: Checkpoint) -> None:
        told = plan_export(source, self.kind, **self.options).left_out
        kept = self.exported()
        assert {state for name, state in self.arrays() if (name, state) not in kept} == {
            line.split(" of ")[0] for line in told if line.endswith(("tensor", "tensors"))
        }

    def test_the_plan_is_what_is_written_and_always_the_same(
        self, source: Checkpoint, tmp_path: Path
    ) -> None:
        plans = [plan_export(source, self.kind, **self.options) for _ in range(2)]
        first, second = ([(f.key, f.nbytes, f.last) for f in p.files] for p in plans)
        assert first == second
        store = LocalStore(tmp_path / "out")
        ucformat.export(source, store, self.kind, **self.options)
        assert {i.key: i.size for i in store.list()} == {key: size for key, size, _ in first}

    def test_an_interrupted_export_is_none_and_continues(
        self, source: Checkpoint, tmp_path: Path
    ) -> None:
        """The files that make the target a checkpoint are written last."""
        store = LocalStore(tmp_path / "out")
        files = plan_export(source, self.kind, **self.options).files
        last = frozenset(f.key for f in files if f.last)
        assert last, "no file of the target is `last`"
        with pytest.raises(_Killed):
            ucformat.export(source, _LosesLast(store, last), self.kind, workers=1, **self.options)
        one_file = self.name.lower().endswith(self.exporter().endings or ("/",))
        place = tmp_path / "out" / files[0].key if one_file else tmp_path / "out"
        assert not self.found(place)
        ucformat.export(source, store, self.kind, **self.options)
        self.same(place)

    def test_a_damaged_source_is_never_exported(self, source: Checkpoint, tmp_path: Path) -> None:
        file = max((tmp_path / "universal").rglob("*"), key=lambda p: p.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        with pytest.raises(IntegrityError):
            ucformat.export(source, tmp_path / self.name, self.kind, **self.options)
        assert not self.found(tmp_path / self.name)

    def test_a_dtype_that_it_lacks_is_an_error_that_names_the_tensor(self, tmp_path: Path) -> None:
        lacking = sorted(set(ITEMSIZE) - set(self.exporter().dtypes))
        for dtype in lacking:
            arrays = {("the.odd.one", "weight"): np.zeros(2, numpy_dtype(dtype))}
            source = checkpoint_of(tmp_path / dtype, arrays)
            with pytest.raises(UnsupportedError, match=r"the\.odd\.one"):
                ucformat.export(source, tmp_path / self.name, self.kind, **self.options)
            assert not self.found(tmp_path / self.name)
