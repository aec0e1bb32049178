"""Sub-models: indices of dims, layers and experts that a view takes, against NumPy and torch."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ucformat
from tests.fakes import Arrays, FakeSource, random_array, same
from tests.packed import write_packed
from tests.sources.suite import DATA
from tests.views.random_steps import drawn, read_all, subset
from ucformat.checkpoint import Checkpoint
from ucformat.errors import ChecksumError, LayoutError, UnsupportedError
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.wrappers import RecordingStore
from ucformat.views import viewed as gather

if TYPE_CHECKING:
    from collections.abc import Callable

ALIASES = {"head.w": "l.0.w"}


def model() -> Arrays:
    """Three layers with optimizer states, a stack of experts and a norm; values are exact in float64."""
    rng = np.random.default_rng(4)
    shapes: dict[str, tuple[int, ...]] = {
        f"l.{i}.{n}": shape
        for i in range(3)
        for n, shape in (("w", (12, 8)), ("v", (12, 8)), ("b", (12,)))
    }
    shapes |= {"experts": (4, 6, 5), "norm": (8,), "scalar": ()}
    out: Arrays = {
        (n, s): rng.standard_normal(shape, np.float32)
        for n, shape in shapes.items()
        for s in ("weight", "exp_avg")
    }
    return out | {(n, "step"): np.array(i, np.float32) for i, n in enumerate(shapes)}


def in_memory(_: Path) -> Checkpoint:
    return Checkpoint(FakeSource.write(MemoryStore("sub"), model(), aliases=ALIASES))


def as_arrays(folder: Path) -> Checkpoint:
    ucformat.convert(in_memory(folder), folder / "arrays", chunk_bytes=64, shard_bytes=256)
    return ucformat.open(folder / "arrays")


def as_packed(folder: Path) -> Checkpoint:
    (folder / "packed").mkdir()
    return write_packed(LocalStore(folder / "packed"), model(), block_bytes=64)


def as_virtual(folder: Path) -> Checkpoint:
    ucformat.convert(as_arrays(folder), folder / "virtual", virtual=True)
    return ucformat.open(folder / "virtual")


def as_safetensors(folder: Path) -> Checkpoint:
    from safetensors.numpy import save_file

    save_file(
        {n: a for (n, s), a in model().items() if s == "weight"}, folder / "model.safetensors"
    )
    return ucformat.open(folder)


def as_deepspeed(_: Path) -> Checkpoint:
    return ucformat.open(next(p for p in sorted((DATA / "deepspeed").iterdir()) if p.is_dir()))


SOURCES: dict[str, Callable[[Path], Checkpoint]] = {
    "memory": in_memory,
    "arrays": as_arrays,
    "packed": as_packed,
    "virtual": as_virtual,
    "safetensors": as_safetensors,
    "deepspeed": as_deepspeed,
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Checkpoint, Any]]:
    """Returns a source, and its tensors."""

    @cache
    def open_it(name: str) -> tuple[Checkpoint, Any]:
        ck = SOURCES[name](tmp_path_factory.mktemp(name))
        return ck, read_all(ck)

    return open_it


@pytest.mark.front("memory", "packed")
@pytest.mark.parametrize("name", SOURCES)
@given(data=st.data())
def test_any_steps_make_what_numpy_makes(
    opened: Callable[[str], tuple[Checkpoint, Any]], name: str, data: st.DataObject
) -> None:
    ck, tensors = opened(name)
    chosen = data.draw(drawn(tensors))
    view = ck.view(chosen.steps)
    assert sorted((*view, *view.aliases)) == sorted(chosen.made)
    for tensor, states in chosen.made.items():
        assert view.states(tensor) == list(states)
        for state, array in states.items():
            assert same(view[tensor, state].read(), array), (tensor, state)
            if array.ndim and array.shape[0]:
                start = data.draw(st.integers(0, array.shape[0] - 1))
                assert same(view[tensor, state][start:], np.array(array[start:], order="C"))


@given(data=st.data(), at_once=st.sampled_from([1, 40, 300, 4 << 20]))
def test_picking_in_memory_makes_the_same(
    opened: Callable[[str], tuple[Checkpoint, Any]], data: st.DataObject, at_once: int
) -> None:
    ck, tensors = opened(data.draw(st.sampled_from(["arrays", "packed", "deepspeed"])))
    chosen = data.draw(drawn(tensors))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "_FEW", 0)
        patch.setattr(gather, "_AT_ONCE", at_once)
        patch.setattr(gather, "_DENSE", data.draw(st.integers(1, 8)))
        view = ck.view(chosen.steps)
        for tensor, states in chosen.made.items():
            for state, array in states.items():
                assert same(view[tensor, state].read(), array), (tensor, state)


@given(data=st.data(), at_once=st.sampled_from([1, 12, 60, 4 << 20]))
def test_scattered_indices_along_several_dims(data: st.DataObject, at_once: int) -> None:
    """Picked in memory, in parts of a few elements, whole and in slices."""
    array = random_array(data.draw(st.sampled_from([(13,), (9, 11), (5, 6, 7)])), "uint16")
    ck = Checkpoint(FakeSource.write(MemoryStore("scattered"), {("w", "weight"): array}))
    listed: list[dict[str, Any]] = []
    for dim in data.draw(st.lists(st.integers(0, array.ndim - 1), min_size=1, max_size=4)):
        given_, picks = subset(data.draw, array.shape[dim])
        listed.append({"take": "w", "dim": dim, **given_})
        array = np.take(array, picks, dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "_FEW", 0)
        patch.setattr(gather, "_AT_ONCE", at_once)
        patch.setattr(gather, "_DENSE", data.draw(st.integers(0, 4)))
        tensor = ck.view(listed)["w"]
        assert same(tensor.read(), np.array(array, order="C"))
        where = tuple(slice(data.draw(st.integers(0, n - 1)), None) for n in array.shape)
        assert same(tensor[where], np.array(array[where], order="C"))


def take(
    shape: tuple[int, ...], *steps: dict[str, Any], folder: Path, packed: bool = False
) -> tuple[Any, Any, int]:
    """What is read of one tensor under a view: its array, the plan, and the bytes that the store read."""
    arrays: Arrays = {("w", "weight"): random_array(shape, "uint8")}
    if packed:
        write_packed(LocalStore(folder), arrays, block_bytes=4096)
    else:
        ucformat.convert(
            Checkpoint(FakeSource.write(MemoryStore("w"), arrays)), folder, chunk_bytes=4096
        )
    store = RecordingStore(LocalStore(folder))
    tensor = ucformat.open(store).view(steps)["w"]
    plan = tensor.plan()
    store.clear()
    return tensor.read(), plan, store.nbytes


class TestBytes:
    """A sub-model reads its own bytes, and what checksums cover besides."""

    def test_the_first_rows(self, tmp_path: Path) -> None:
        whole = random_array((512, 256), "uint8")
        found, plan, read = take((512, 256), {"take": "w", "first": 128}, folder=tmp_path / "a")
        assert same(found, whole[:128])
        assert read == plan.bytes_read
        assert plan.bytes_needed <= read < plan.bytes_needed * 1.02  # with a checksum of each chunk
        assert plan.bytes_unverified == 0

    @pytest.mark.parametrize("packed", [False, True])
    def test_rows_that_end_within_chunks(self, tmp_path: Path, *, packed: bool) -> None:
        """Of arrays only the rows are read; of packed files also the rest of what their checksums cover."""
        steps = {"take": "w", "indices": ["5:70", 200, 203]}
        found, plan, read = take((512, 256), steps, folder=tmp_path / "a", packed=packed)
        assert same(found, np.take(random_array((512, 256), "uint8"), [*range(5, 70), 200, 203], 0))
        assert read == plan.bytes_read
        assert plan.bytes_unverified == 0 if packed else plan.bytes_unverified > 0
        assert read <= plan.bytes_needed + 4 * 4100 if packed else read < plan.bytes_needed * 1.05

    def test_a_chunk_is_read_once_for_all_its_rows(self, tmp_path: Path) -> None:
        found, plan, read = take(
            (512, 256), {"take": "w", "indices": [*range(0, 512, 12)]}, folder=tmp_path, packed=True
        )
        assert same(found, np.array(random_array((512, 256), "uint8")[::12], order="C"))
        assert read == plan.bytes_read == plan.bytes_needed + plan.bytes_besides
        assert read <= 512 * 256

    def test_damage_is_found_in_what_checksums_cover(self, tmp_path: Path) -> None:
        ck = write_packed(
            LocalStore(tmp_path),
            {("w", "weight"): random_array((512, 256), "uint8")},
            block_bytes=4096,
        )
        view = ck.view([{"take": "w", "indices": [0, 100]}])
        view["w"].read()
        file = next(tmp_path.glob("data/*/rank0.bin"))
        content = bytearray(file.read_bytes())
        content[4 + 300] ^= 1  # the second row, which is not taken, but covered with the first
        file.write_bytes(content)
        with pytest.raises(ChecksumError):
            view["w"].read()

    @pytest.mark.parametrize("order", ["sorted", "random"])
    @pytest.mark.parametrize("dim", [0, 1])
    def test_many_indices(self, tmp_path: Path, dim: int, order: str) -> None:
        """Close to each other, they are read with the gaps between them, as the plan says."""
        indices = np.random.default_rng(2).permutation(1000)[:300]
        indices = np.sort(indices) if order == "sorted" else indices
        shape = (1000, 64) if dim == 0 else (64, 1000)
        steps = {"take": "w", "dim": dim, "indices": indices.tolist()}
        found, plan, read = take(shape, steps, folder=tmp_path / "a")
        assert same(found, np.take(random_array(shape, "uint8"), indices, dim))
        assert plan.bytes_needed < plan.bytes_read == read <= 64 * 1000 * 1.01

    def test_few_runs_are_few_ranges(self, tmp_path: Path) -> None:
        steps = {"take": "w", "of": 8, "indices": [1, 6, 3, 4]}
        _, plan, read = take((512, 256), steps, folder=tmp_path / "a")
        assert read == plan.bytes_read
        assert plan.ranges <= 12


class TestVirtual:
    def test_it_refers_to_what_is_taken(self, tmp_path: Path) -> None:
        whole = as_arrays(tmp_path)
        steps: list[dict[str, Any]] = [
            {"select": r"/l\.(\d+)\..*/", "indices": [2, 0]},
            {"take": "l.*.w", "dim": 1, "of": 4, "indices": [3, 0]},
        ]
        ucformat.convert(whole.view(steps), tmp_path / "virtual", virtual=True)
        found = ucformat.open(tmp_path / "virtual")
        assert not list((tmp_path / "virtual").rglob("c/*"))
        assert found["l.1.w", "exp_avg"].shape == (12, 4)
        assert same(
            found["l.0.w"].read(), np.array(model()["l.2.w", "weight"][:, [6, 7, 0, 1]], order="C")
        )

    def test_scattered_indices_have_no_bytes_of_their_own(self, tmp_path: Path) -> None:
        ucformat.convert(
            Checkpoint(
                FakeSource.write(
                    MemoryStore("w"), {("w", "weight"): random_array((9, 400), "uint8")}
                )
            ),
            tmp_path / "a",
        )
        view = ucformat.open(tmp_path / "a").view(
            [{"take": "w", "dim": 1, "indices": [*range(0, 400, 2)]}]
        )
        with pytest.raises(UnsupportedError, match=r"w \(weight\) has no bytes of its own"):
            ucformat.convert(view, tmp_path / "virtual", virtual=True)
        ucformat.convert(view, tmp_path / "copy")
        assert ucformat.open(tmp_path / "copy")["w"].shape == (9, 200)


class TestLayersAndExperts:
    def test_names_numbers_and_order(self) -> None:
        ck = in_memory(None)  # type: ignore[arg-type]
        view = ck.view([{"select": r"/l\.(\d+)\..*/", "indices": [2, 0]}])
        assert view.names() == [
            "l.0.w",
            "l.0.v",
            "l.0.b",
            "l.1.w",
            "l.1.v",
            "l.1.b",
            "experts",
            "norm",
            "scalar",
        ]
        assert dict(view.aliases) == {"head.w": "l.1.w"}
        assert same(view["l.0.v", "exp_avg"].read(), model()["l.2.v", "exp_avg"])
        assert same(view["l.0.w", "step"].read(), model()["l.2.w", "step"])

    def test_an_alias_of_a_layer_that_goes_has_its_values(self) -> None:
        view = in_memory(None).view([{"select": r"/l\.(\d+)\..*/", "indices": ["1:3"]}])  # type: ignore[arg-type]
        assert same(view["head.w"].read(), model()["l.0.w", "weight"])
        assert not view.aliases

    def test_groups_follow(self) -> None:
        arrays: Arrays = {
            (f"l.{i}.w", "weight"): random_array((2,), "float32", i) for i in range(3)
        }
        groups = ({"params": ["l.0.w", "l.1.w"], "lr": 0.1}, {"params": ["l.2.w"], "lr": 0.2})
        ck = Checkpoint(FakeSource.write(MemoryStore("groups"), arrays, groups=groups))
        view = ck.view(
            [{"select": r"/l\.(\d+)\.w/", "indices": [0, 2]}, {"take": "l.*", "first": 1}]
        )
        assert [g["params"] for g in view.metadata.groups] == [["l.0.w"], ["l.1.w"]]

    def test_numbers_keep_their_width(self) -> None:
        arrays: Arrays = {
            (f"layer_{i:02}.w", "weight"): random_array((2,), "float32", i) for i in range(12)
        }
        ck = Checkpoint(FakeSource.write(MemoryStore("width"), arrays))
        assert ck.view([{"select": r"/layer_(\d+)\.w/", "indices": [11, 3]}]).names() == [
            "layer_00.w",
            "layer_01.w",
        ]

    def test_experts_of_each_layer(self) -> None:
        names = [f"layers.{i}.experts.{e}.w" for i in range(2) for e in range(4)]
        arrays: Arrays = {
            (n, "weight"): random_array((2, 2), "float32", i) for i, n in enumerate(names)
        }
        ck = Checkpoint(FakeSource.write(MemoryStore("experts"), arrays))
        view = ck.view(
            [
                {"select": r"/layers\.\d+\.experts\.(\d+)\.w/", "indices": [3, 1]},
                {"select": r"/layers\.(?P<i>\d+)\..*/", "indices": [1]},
            ]
        )
        assert {n: view[n].read().tobytes() for n in view} == {
            "layers.0.experts.0.w": arrays["layers.1.experts.3.w", "weight"].tobytes(),
            "layers.0.experts.1.w": arrays["layers.1.experts.1.w", "weight"].tobytes(),
        }


def test_heads_of_megatrons_fused_attention() -> None:
    """Apart, taken by group, and together again."""
    groups, heads, size, hidden = 4, 2, 3, 5
    fused = random_array((groups * (heads + 2) * size, hidden), "float32")
    ck = Checkpoint(FakeSource.write(MemoryStore("qkv"), {("l.0.qkv", "weight"): fused}))
    parts = [rf"\1.{n}" for n in "qkv"]
    view = ck.view(
        [
            {"split": r"/(.*)\.qkv/", "into": parts, "sizes": [heads, 1, 1], "repeat": groups},
            {"take": "l.*", "of": groups, "indices": [3, 1]},
            {"fuse": r"/(.*)\.q/", "and": parts[1:], "into": r"\1.qkv", "repeat": 2},
        ]
    )
    expected = fused.reshape(groups, -1, hidden)[[3, 1]].reshape(-1, hidden)
    assert same(view["l.0.qkv"].read(), expected)
    assert same(
        ck.view([{"take": "l.*", "of": groups, "indices": [3, 1]}])["l.0.qkv"].read(), expected
    )


def test_a_tied_tensor_that_is_cast_or_taken_remains_tied() -> None:
    view = in_memory(None).view([{"take": "*.w", "first": 4}, {"cast": "*.w", "dtype": "float64"}])  # type: ignore[arg-type]
    assert dict(view.aliases) == ALIASES


class TestErrors:
    @pytest.mark.parametrize(
        ("step", "message"),
        [
            ({"take": "zz*", "first": 1}, r"no tensor is called zz\*\n.*hint: there are"),
            ({"take": ["w", "zz"], "first": 1}, "no tensor is called zz"),
            (
                {"take": "w", "first": 5},
                r"w has the shape \(4, 6\): dim 0 has no index 4: the last is 3",
            ),
            ({"take": "w", "dim": 1, "indices": [0, "4:9"]}, "dim 1 has no index 8: the last is 5"),
            ({"take": "w", "of": 2, "indices": [2]}, "dim 0 has no block 2: the last is 1"),
            ({"take": "w", "of": 3, "indices": [0]}, "cannot be divided into 3 equal blocks"),
            ({"take": "w", "dim": 2, "first": 1}, "there is no dim 2"),
            ({"take": "w", "indices": [1, "0:2"]}, "index 1 is taken twice"),
            ({"take": "w", "indices": ["3:2"]}, "the range 3:2 is empty"),
            ({"take": "w", "indices": []}, "at least 1 item"),
            ({"take": "w", "first": 0}, "greater than or equal to 1"),
            ({"take": "w"}, "one of `indices` and `first`"),
            ({"take": "w", "first": 1, "indices": [0]}, "one of `indices` and `first`"),
            ({"take": "w", "indices": [True]}, "valid integer"),
            ({"take": "w", "indices": ["1-2"]}, "match pattern"),
            ({"take": "empty", "first": 1}, "dim 0 has no index 0: there is none"),
            ({"take": "factored", "first": 1}, "its state row"),
            ({"select": "l.*", "first": 1}, "captures no number in l.0.a"),
            (
                {"select": r"/l\.(\d+)\.a/", "indices": [1]},
                r"there is no l\.1\n.*the numbers are 0, 2",
            ),
            ({"select": r"/l\.(\d+)\.a/", "first": 2}, r"there is no l\.1"),
            ({"select": r"/x\.(\d+)/", "first": 1}, "no tensor is called"),
            (
                {"select": r"/l\.(\d+)\.a/", "indices": ["2:100000000000000000"]},
                r"there is no l\.3",
            ),
        ],
    )
    def test_a_step_that_cannot_be_done(self, step: dict[str, Any], message: str) -> None:
        arrays: Arrays = {
            (n, "weight"): random_array((4, 6), "float32")
            for n in ("w", "l.0.a", "l.2.a", "factored")
        }
        arrays |= {
            ("factored", "row"): random_array((4,), "float32"),
            ("empty", "weight"): random_array((0, 3), "uint8"),
        }
        with pytest.raises(LayoutError) as error:
            Checkpoint(FakeSource.write(MemoryStore("errors"), arrays)).view([step])
        assert re.search(message, str(error.value), re.DOTALL), str(error.value)

    def test_the_documented_sub_model(self, tmp_path: Path) -> None:
        """Of a Llama of 32 layers with 32 query heads in 8 groups."""
        text = (
            (Path(__file__).parents[2] / "docs" / "view.md").read_text().split("## Sub-models")[1]
        )
        (tmp_path / "small.yaml").write_text(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])
        shapes = {
            **{f"self_attn.{n}_proj": (size, 16) for n, size in (("q", 32), ("k", 8), ("v", 8))},
            "self_attn.o_proj": (16, 32),
            "mlp.gate_proj": (24, 16),
            "mlp.up_proj": (24, 16),
            "mlp.down_proj": (16, 24),
        }
        arrays: Arrays = {
            (f"model.layers.{i}.{n}.weight", "weight"): random_array(shape, "float32", i)
            for i in range(32)
            for n, shape in shapes.items()
        }
        view = Checkpoint(FakeSource.write(MemoryStore("llama"), arrays)).view(
            tmp_path / "small.yaml"
        )
        assert len(view) == 4 * len(shapes)
        for name, shape in (("q", (8, 16)), ("k", (2, 16)), ("o", (16, 8))):
            assert view[f"model.layers.3.self_attn.{name}_proj.weight"].shape == shape
        found = view["model.layers.2.self_attn.q_proj.weight"].read()
        q = arrays["model.layers.21.self_attn.q_proj.weight", "weight"]
        assert same(found, np.concatenate([q[:4], q[12:16]]))
        assert same(
            view["model.layers.1.mlp.down_proj.weight"].read(),
            np.array(arrays["model.layers.10.mlp.down_proj.weight", "weight"][:, :6], order="C"),
        )

    def test_a_range_in_yaml_is_text(self, tmp_path: Path) -> None:
        """YAML 1.1 takes 8:16 for 496, a number to the base of 60."""
        (tmp_path / "view.yaml").write_text(
            "{version: 1, view: [{take: norm, indices: [1:3, 7, 4:6]}]}"
        )
        view = in_memory(tmp_path).view(tmp_path / "view.yaml")
        assert same(view["norm"].read(), model()["norm", "weight"][[1, 2, 7, 4, 5]])
