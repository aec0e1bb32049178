from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import ODD, FakeSource, random_array
from tests.sources.suite import kept, read_whole
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.engines.orbax.export import OrbaxExporter
from ucformat.engines.orbax.export_plan import _chunk_shape, _grid
from ucformat.errors import UnsupportedError, UsageError
from ucformat.geometry.tensor import TensorInfo
from ucformat.jobs.convert import convert
from ucformat.jobs.export import export, plan_export
from ucformat.schema import ITEMSIZE
from ucformat.storage.local import LocalStore
from ucformat.testing import ExporterSuite

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes import Arrays

ALL: Arrays = ODD | {
    (f"m.{name}", "weight"): random_array((3, 5), name) for name in OrbaxExporter.dtypes
}
ALL["padded", "weight"] = random_array(
    (20, 37), "float32"
)  # whose chunks do not divide the last dim


def opened(folder: Path, arrays: Arrays, **facts: Any) -> Checkpoint:
    return Checkpoint(FakeSource.write(LocalStore(folder), arrays, **facts))


def array(folder: Path, name: str) -> Any:
    """An array, as TensorStore reads it."""
    kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    return ts.open({"driver": "zarr", "kvstore": kvstore}).result().read().result()


class TestOrbax(ExporterSuite):
    kind = "orbax"

    def load(self, place: Path) -> dict[tuple[str, str], Any]:
        tree = json.loads((place / "_METADATA").read_text())["tree_metadata"]
        found = {}
        for entry in tree.values():
            kind, name = (part["key"] for part in entry["key_metadata"])
            state = "weight" if kind == "params" else kind
            found[name, state] = array(place, f"{kind}.{name}")
        return found


@pytest.mark.parametrize("name", ["ocdbt_zarr2", "ocdbt_zarr3", "zarr2_files", "ocdbt_raw"])
@pytest.mark.parametrize("between", [False, True], ids=["directly", "universal"])
def test_a_tree_of_orbax_goes_back(name: str, *, between: bool, tmp_path: Path) -> None:
    source = kept("orbax", name).checkpoint
    if between:
        convert(source, tmp_path / "universal")
    done = export(tmp_path / "universal" if between else source, tmp_path / "out", "orbax")
    assert done.left_out == ()
    a, b = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert read_whole(a) == read_whole(b)
    assert dict(a.objects) == dict(b.objects)
    assert dict(a.metadata.paths) == dict(b.metadata.paths)
    assert a.metadata.step == b.metadata.step
    old, new = (
        json.loads((f / "_METADATA").read_text())["tree_metadata"]
        for f in (source, tmp_path / "out")
    )
    assert {k: e["key_metadata"] for k, e in old.items()} == {
        k: e["key_metadata"] for k, e in new.items()
    }
    for key, entry in old.items():
        same = {entry["value_metadata"]["value_type"], new[key]["value_metadata"]["value_type"]}
        assert len(same) == 1 or same == {"jax.Array", "np.ndarray"}


@pytest.mark.parametrize(
    "limits", [{}, {"max_chunk_bytes": 1000, "max_file_bytes": 5000}], ids=["whole", "cut"]
)
def test_every_dtype_and_state(limits: dict[str, Any], tmp_path: Path) -> None:
    objects = {
        "flag": True,
        "n": 3,
        "nan": {"$float": "nan"},
        "text": "ü",
        "none": None,
        "deep": {"a": [1.5, {}]},
    }
    source = opened(tmp_path / "s", ALL, objects=objects, aliases={"head.weight": "embed.weight"})
    done = export(source, tmp_path / "out", "orbax", **limits)
    assert done.left_out == ()
    for (name, state), expected in ALL.items():
        found = array(tmp_path / "out", f"{'params' if state == 'weight' else state}.{name}")
        assert found.dtype.name == expected.dtype.name
        assert found.tobytes() == expected.tobytes(), name
    again = open_checkpoint(tmp_path / "out")
    whole = read_whole(again)
    assert whole.pop(("weight", "head.weight")) == whole["weight", "embed.weight"]
    assert whole == read_whole(source)
    leaves = {"flag": True, "n": 3, "nan": {"$float": "nan"}, "text": "ü", "deep.a.0": 1.5}
    assert {k: v for k, v in again.objects.items() if k != "orbax"} == leaves
    files = list((tmp_path / "out/d").iterdir())
    assert (len(files) > 10) == bool(limits)


def test_tied_names_have_one_value(tmp_path: Path) -> None:
    arrays = {("w", "weight"): random_array((500, 300), "float32")}
    export(opened(tmp_path / "s", arrays, aliases={"v": "w"}), tmp_path / "out", "orbax")
    assert array(tmp_path / "out", "params.v").tobytes() == arrays["w", "weight"].tobytes()
    assert sum(f.stat().st_size for f in (tmp_path / "out/d").iterdir()) < 500 * 300 * 4 + 2000


def test_values_without_a_place_are_named(tmp_path: Path) -> None:
    objects = {
        "huge": 1 << 80,
        "bytes": {"$bytes": "AA=="},
        "fine": {"class": {"$class": "a.B"}, "n": 1},
    }
    source = opened(
        tmp_path / "s", ODD, objects=objects, groups=({"lr": 0.1, "params": ["norm.bias"]},)
    )
    left = export(source, tmp_path / "out", "orbax").left_out
    hypers = "the hyper-parameters of the optimizer"
    assert sorted(left) == [
        "the " + v for v in (hypers[4:], "value bytes", "value fine.class", "value huge")
    ]
    assert open_checkpoint(tmp_path / "out").objects["fine.n"] == 1


def test_leaves_that_orbax_would_confuse_are_refused(tmp_path: Path) -> None:
    one = np.zeros(1)
    source = opened(tmp_path / "a", {("w", "weight"): one}, objects={"params": {"w": 3}})
    with pytest.raises(UnsupportedError, match=r"two leaves of the tree would be named params\.w"):
        export(source, tmp_path / "out", "orbax")
    source = opened(tmp_path / "b", {("w", "weight"): one}, objects={"params": 3})
    with pytest.raises(UnsupportedError, match=r"params would be a leaf .* such as params\.w"):
        export(source, tmp_path / "out", "orbax")
    assert not (tmp_path / "out").exists()


def test_without_the_last_files_it_is_no_checkpoint(tmp_path: Path) -> None:
    """Orbax, and our source, restore nothing without `_METADATA`, which is written when all data is durable."""
    target = plan_export(opened(tmp_path / "s", ODD), "orbax")
    last = [file.key for file in target.files if file.last]
    assert last == ["manifest.ocdbt", "_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt"]
    assert [f.key for f in target.files[-4:]] == last


def test_noted_names_are_checked(tmp_path: Path) -> None:
    export(opened(tmp_path / "s", {("w", "weight"): np.zeros(3)}), tmp_path / "out", "orbax")
    path = tmp_path / "out/_METADATA"
    tree = json.loads(path.read_text())
    assert tree["custom_metadata"] == {"ucformat": {"params.w": ["w", "weight"]}}
    for noted in (
        3,
        {"params.w": 3},
        {"params.w": ["w"]},
        {"params.w": ["w", 3]},
        {"other": ["w", "weight"]},
    ):
        path.write_text(json.dumps({**tree, "custom_metadata": {"ucformat": noted}}))
        assert list(open_checkpoint(tmp_path / "out").tensors) == [("params.w", "weight")]


sizes = st.lists(st.integers(0, 40), max_size=4).map(tuple)


@given(sizes, st.sampled_from(list(ITEMSIZE)), st.integers(16, 4000))
def test_chunks_cover_each_element_once(shape: tuple[int, ...], dtype: str, most: int) -> None:
    info = TensorInfo("w", "weight", dtype, shape)
    chunk = _chunk_shape(info, most)
    assert int(np.prod(chunk, dtype=int)) * info.itemsize <= most
    covered = np.zeros(shape, int)
    for _, start in _grid(shape, chunk):
        covered[tuple(slice(s, s + c) for s, c in zip(start, chunk, strict=True))] += 1
    assert (covered == 1).all()


def test_limits_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 1 byte"):
        plan_export(opened(tmp_path / "s", ODD), "orbax", max_chunk_bytes=15)
