from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import ODD, FakeSource, random_array, same
from ucformat.checkpoint import Checkpoint
from ucformat.errors import Conflict, UnsupportedError, UsageError
from ucformat.exporters.registry import EXPORTERS
from ucformat.jobs.export import export
from ucformat.schema import ITEMSIZE
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.testing import ExporterSuite

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes import Arrays

KNOWN: Arrays = {
    (f"layer.{name}", "weight"): random_array((3, 5), name)
    for name in ITEMSIZE
    if hasattr(np, name)
}
SHAPES: Arrays = {
    ("scalar", "weight"): random_array((), "float32"),
    ("empty", "weight"): random_array((0, 4), "int64"),
    ("large", "weight"): random_array((1200, 1801), "float64"),
}


def opened(folder: Path, arrays: Arrays, **facts: Any) -> Checkpoint:
    return Checkpoint(FakeSource.write(LocalStore(folder), arrays, **facts))


def loaded(place: Path) -> dict[str, Any]:
    """The tensors of an archive or a folder, as NumPy reads them."""
    if place.is_dir():
        index = json.loads((place / "index.json").read_text())["tensors"]
        return {
            name: np.load(place / entry["file"], allow_pickle=False)
            for name, entry in index.items()
        }
    with np.load(place, allow_pickle=False) as found:
        return dict(found)


class TestNpz(ExporterSuite):
    kind, name = "npz", "weights.npz"

    def load(self, place: Path) -> dict[tuple[str, str], Any]:
        return {(name, "weight"): array for name, array in loaded(place).items()}


class TestNpy(ExporterSuite):
    kind = "npy"

    def load(self, place: Path) -> dict[tuple[str, str], Any]:
        return {(name, "weight"): array for name, array in loaded(place).items()}


@pytest.mark.parametrize(("kind", "place"), [("npz", "out/weights.npz"), ("npy", "out/weights")])
class TestBoth:
    def test_numpy_reads_the_same_bits(self, kind: str, place: str, tmp_path: Path) -> None:
        arrays = KNOWN | SHAPES
        source = opened(
            tmp_path / "src", arrays | {("large", "exp_avg"): SHAPES["large", "weight"]}
        )
        done = export(source, tmp_path / place, kind)
        found = loaded(tmp_path / place)
        assert found.keys() == {name for name, _ in arrays}
        for (name, _), array in arrays.items():
            assert same(found[name], array), name
        assert done.left_out == ("exp_avg of 1 tensor",)

    def test_tied_names_are_there(self, kind: str, place: str, tmp_path: Path) -> None:
        export(
            opened(tmp_path / "src", SHAPES, aliases={"tied": "large", "of nothing": "gone"}),
            tmp_path / place,
            kind,
        )
        found = loaded(tmp_path / place)
        assert found.keys() == {"scalar", "empty", "large", "tied"}
        assert same(found["tied"], found["large"])

    def test_dtypes_that_numpy_lacks(self, kind: str, place: str, tmp_path: Path) -> None:
        source = opened(tmp_path / "src", {k: a for k, a in ODD.items() if k[1] == "weight"})
        with pytest.raises(
            UnsupportedError, match=r"embed.weight \(weight\) has the dtype bfloat16"
        ) as caught:
            export(source, tmp_path / place, kind)
        assert "--cast float32" in str(caught.value.hint)
        assert "--raw" in str(caught.value.hint)
        assert not (tmp_path / place).exists()
        export(source, tmp_path / place, kind, raw=True)
        found = loaded(tmp_path / place)
        assert found["embed.weight"].dtype == np.uint16
        assert same(found["embed.weight"].view(ml_dtypes.bfloat16), ODD["embed.weight", "weight"])
        assert same(found["experts.w1"].view(ml_dtypes.float8_e4m3fn), ODD["experts.w1", "weight"])
        assert same(found["table"], ODD["table", "weight"])

    def test_a_cast_resolves_it(self, kind: str, place: str, tmp_path: Path) -> None:
        array = np.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16)
        export(
            opened(tmp_path / "src", {("w", "weight"): array}),
            tmp_path / place,
            kind,
            cast="float32",
        )
        assert same(loaded(tmp_path / place)["w"], array.astype(np.float32))

    def test_names_that_are_no_file_names_come_back(
        self, kind: str, place: str, tmp_path: Path
    ) -> None:
        names = [
            "../../up",
            "/root",
            "a/b/c",
            "..",
            ".",
            "x" * 3000,
            "ü%2F",
            "%n3",
            "A",
            "a",
            "CON",
            "a b",
            "%2E",
            "",
        ]
        arrays = {(name, "weight"): np.full(3, n) for n, name in enumerate(names)}
        export(opened(tmp_path / "src", arrays), tmp_path / place, kind)
        assert {name: array.tolist() for name, array in loaded(tmp_path / place).items()} == {
            name: [n] * 3 for n, name in enumerate(names)
        }
        assert {p.name for p in tmp_path.iterdir()} == {"src", "out"}
        assert len(list((tmp_path / "out").iterdir())) == 1


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), unique=True, min_size=1))
def test_no_two_names_have_one_file(names: list[str]) -> None:
    source = Checkpoint(
        FakeSource.write(MemoryStore("names"), {(n, "weight"): np.zeros(1) for n in names})
    )
    target = EXPORTERS["npy"]().target(source, list(source.tensors.values()))
    keys = [file.key for file in target.files]
    assert len({key.lower() for key in keys}) == len(names) + 1
    assert not any("/" in key or key.startswith(".") or len(key) > 255 for key in keys)


@pytest.mark.parametrize("names", [("w", "w.npy"), ("a\0b",)])
def test_names_that_an_archive_confuses_are_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    source = opened(tmp_path / "src", {(n, "weight"): np.zeros(1) for n in names})
    with pytest.raises(UnsupportedError, match=r"cannot be told from another name"):
        export(source, tmp_path / "x.npz", "npz")
    export(source, tmp_path / "x", "npy")
    assert loaded(tmp_path / "x").keys() == set(names)


def test_an_array_of_as_many_dims_as_numpy_has(tmp_path: Path) -> None:
    export(
        opened(tmp_path / "s", {("w", "weight"): np.ones((1,) * 64, "f4")}),
        tmp_path / "w.npz",
        "npz",
    )
    assert loaded(tmp_path / "w.npz")["w"].shape == (1,) * 64


def test_arrays_can_be_mapped_to_memory(tmp_path: Path) -> None:
    export(opened(tmp_path / "src", SHAPES), tmp_path / "x", "npy")
    mapped = np.load(tmp_path / "x/large.npy", mmap_mode="r")
    assert same(np.asarray(mapped), SHAPES["large", "weight"])


class TestAFile:
    """A destination that is a file: what else is in its folder does not matter."""

    def test_other_files_stay(self, tmp_path: Path) -> None:
        (tmp_path / "other.txt").write_text("mine")
        source = opened(tmp_path / "src", KNOWN)
        done = export(source, tmp_path / "a.NPZ", "npz")
        export(source, str(tmp_path / "b.npz"), "npz")
        assert done.url == str(tmp_path / "a.NPZ")
        assert {p.name for p in tmp_path.iterdir()} == {"other.txt", "src", "a.NPZ", "b.npz"}
        assert (tmp_path / "other.txt").read_text() == "mine"

    def test_it_is_replaced_only_if_told(self, tmp_path: Path) -> None:
        source = opened(tmp_path / "src", SHAPES)
        (tmp_path / "a.npz").write_text("mine")
        with pytest.raises(Conflict, match=r"a\.npz exists"):
            export(source, tmp_path / "a.npz", "npz")
        assert (tmp_path / "a.npz").read_text() == "mine"
        export(source, tmp_path / "a.npz", "npz", overwrite=True)
        assert loaded(tmp_path / "a.npz").keys() == {"scalar", "empty", "large"}
        assert {p.name for p in tmp_path.iterdir()} == {"src", "a.npz"}

    def test_a_folder_takes_a_file_of_the_usual_name(self, tmp_path: Path) -> None:
        export(opened(tmp_path / "src", SHAPES), tmp_path / "out", "npz")
        assert loaded(tmp_path / "out/model.npz").keys() == {"scalar", "empty", "large"}

    @pytest.mark.parametrize("name", ["model.pt", "../x.npz", "model"])
    def test_names_that_are_no_such_file(self, name: str) -> None:
        with pytest.raises(UsageError, match=r"is not the name of an \.npz file"):
            EXPORTERS["npz"](name=name)

    def test_a_file_has_no_other_name(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no other name"):
            export(opened(tmp_path / "src", SHAPES), tmp_path / "a.npz", "npz", name="b.npz")
