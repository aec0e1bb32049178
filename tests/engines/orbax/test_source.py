from __future__ import annotations

import json
import pickle
import re
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import zstd  # type: ignore[import-untyped]

import ucformat
from tests.sources.suite import SourceSuite, kept
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.engines.orbax.ocdbt import _Body, _body, _locate
from ucformat.engines.orbax.source import Orbax
from ucformat.errors import (
    IntegrityError,
    MissingData,
    UcformatError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from ucformat.geometry.tensor import Key
from ucformat.reading.trees import tensor_keys
from ucformat.storage.base import ByteRange
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store
from ucformat.testing.sources import Sample, read_whole

if TYPE_CHECKING:
    from pathlib import Path

NAMES = (
    "ocdbt_zarr2",
    "ocdbt_zarr3",
    "zarr2_files",
    "zarr3_files",
    "ocdbt_raw",
    "zarr2_raw",
    "manager",
)
COUNT = ("weight", "opt_state.1.0.count")


def made(name: str) -> Sample:
    found = kept("orbax", name)
    state = "state." if name == "manager" else ""
    extra = {("weight", f"{state}{n}") for n in ("opt_state.1.0.count", "rng")}
    if state:
        extra.add(("weight", "noise.jax_random_key"))
    return Sample(
        folder=found.folder,
        place="ckpt",
        kind="orbax",
        truth=found.truth,
        step=3,
        extra=frozenset(extra),
        encoded=not name.endswith("_raw"),
    )


class TestOrbax(SourceSuite):
    @pytest.fixture(params=[n for n in NAMES if n != "zarr2_raw"])
    def sample(self, request: pytest.FixtureRequest) -> Sample:
        return made(request.param)

    def damageable(self, copy: Sample) -> list[Path]:
        """Not every chunk of every array: one of each kind of file, and some that hold data."""
        first: dict[str, Path] = {}
        for path in super().damageable(copy):
            first.setdefault(re.sub(r"[0-9a-f]{32}|\d+", "", path.name), path)
        return list(first.values())


@pytest.fixture
def hurt(tmp_path: Path) -> Path:
    """A checkpoint in files, to be changed."""
    shutil.copytree(made("zarr2_files").path, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_files_without_compression_are_read_in_place() -> None:
    sample = made("zarr2_raw")
    ck = sample.open()
    assert {
        key: value for key, value in read_whole(ck).items() if key not in sample.extra
    } == sample.truth
    plan = ck["params.head"].plan()
    assert plan.bytes_read == plan.bytes_needed
    assert set(plan.files) == {"params.head/0.0", "params.head/1.0"}


def test_numbers_and_texts_are_objects_and_random_keys_are_told() -> None:
    ck = made("ocdbt_zarr2").open()
    orbax = ck.objects["orbax"]
    assert dict(ck.objects) == {"step": 3, "lr": 1e-3, "name": "odd sizes", "orbax": orbax}
    assert orbax["random_keys"] == {"rng": "threefry2x32"}
    assert [["step"], "scalar"] in orbax["leaves"]
    assert [["opt_state", 0], "None"] in orbax["leaves"]
    assert [["empty"], "Dict"] in orbax["leaves"]
    assert ck["opt_state.1.0.count"][...] == 3
    assert ck["rng"].dtype == np.uint32
    assert ck.states("params.layers.0.w") == ["weight", "mu", "nu"]
    assert ck.metadata.paths[Key("params.layers.0.w", "mu")] == (
        ("opt_state", 1, 0, "mu", "layers", 0, "w"),
    )


def test_items_are_prefixes_and_json_items_are_objects() -> None:
    ck = made("manager").open()
    assert ck.objects["orbax"]["items"]["loader"] == {"epoch": 2, "seen": [1, 2]}
    assert ck.metadata.folder == "step_40"
    assert ck.home.endswith("/step_40")
    step, item = (open_checkpoint(made("manager").path / p) for p in ("step_40", "step_40/state"))
    assert read_whole(step) == read_whole(ck)
    assert {n.removeprefix("state.") for n in ck} - {"mean", "noise.jax_random_key"} == set(item)


def test_an_item_that_was_lost_is_missed(tmp_path: Path) -> None:
    shutil.copytree(made("manager").path / "step_40", tmp_path / "40")
    (tmp_path / "40/mean/_METADATA").rename(tmp_path / "aside")
    with pytest.raises(MissingData, match=r"mean/.* belongs to an item whose _METADATA is missing"):
        open_checkpoint(tmp_path / "40")
    shutil.rmtree(tmp_path / "40/mean")
    with pytest.raises(MissingData, match="the item mean"):
        open_checkpoint(tmp_path / "40")


def test_values_of_ocdbt_without_compression_are_read_in_place() -> None:
    plan = made("ocdbt_raw").open()["params.head"].plan()
    assert plan.bytes_read == plan.bytes_needed
    assert all("/d/" in file for file in plan.files)


def test_the_step_is_the_folders_name_where_the_tree_has_none(hurt: Path) -> None:
    tree = json.loads((hurt / "_METADATA").read_text())
    del tree["tree_metadata"]["('step',)"]
    (hurt / "_METADATA").write_text(json.dumps(tree))
    assert open_checkpoint(hurt).metadata.step is None
    assert open_checkpoint(hurt.rename(hurt.with_name("1200"))).metadata.step == 1200
    (hurt.with_name("1200")).rename(hurt)
    hurt.with_name("70").mkdir()
    assert open_checkpoint(hurt.rename(hurt.with_name("70") / "default")).metadata.step == 70


def test_steps_are_listed(tmp_path: Path) -> None:
    for step in (5, 10, 9):
        shutil.copytree(made("ocdbt_zarr2").path, tmp_path / str(step) / "default")
    with pytest.raises(UsageError, match="several steps: 5, 9, 10") as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value.hint).endswith("/10")


def test_a_save_that_did_not_end_is_refused(tmp_path: Path) -> None:
    unfinished = tmp_path / "100.orbax-checkpoint-tmp-7"
    shutil.copytree(made("ocdbt_zarr2").path, unfinished / "default.orbax-checkpoint-tmp")
    for place in (tmp_path, unfinished, unfinished / "default.orbax-checkpoint-tmp"):
        with pytest.raises(UnsupportedError, match="did not finish"):
            open_checkpoint(place)
    shutil.copytree(made("ocdbt_zarr2").path, tmp_path / "90" / "default")
    assert open_checkpoint(tmp_path).metadata.folder == "90"  # the save before it is whole
    shutil.copytree(made("ocdbt_zarr2").path, tmp_path / "90" / "params.orbax-checkpoint-tmp")
    with pytest.raises(UnsupportedError, match="did not finish"):
        open_checkpoint(tmp_path / "90")


def test_one_processs_part_and_old_versions_are_refused(hurt: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="_METADATA") as caught:
        open_checkpoint(made("ocdbt_zarr2").path / "ocdbt.process_0")
    assert "folder above" in str(caught.value.hint)
    (hurt / "_METADATA").unlink()
    (hurt / "checkpoint").write_bytes(b"\x81\xa1a\x01")
    with pytest.raises(UnsupportedError, match="msgpack"):
        open_checkpoint(hurt)


def test_missing_chunks_are_an_error_where_orbax_would_have_stored_them(hurt: Path) -> None:
    shutil.rmtree(hurt / "_sharding", ignore_errors=True)
    (hurt / "params.zero" / "1.0").unlink()
    ck = open_checkpoint(hurt)
    with pytest.raises(MissingData, match=r"array params\.zero: its chunk \[1, 0\] is not stored"):
        ck["params.zero"].read()
    assert ck["params.head"].read().any()
    filled = Checkpoint(Orbax(fill_missing=True).open(LocalStore(hurt)))
    assert not filled["params.zero"].read().any()
    edit(
        hurt / "_METADATA", store_array_data_equal_to_fill_value=False
    )  # as versions before 2025 write
    assert not open_checkpoint(hurt)["params.zero"].read().any()
    with pytest.raises(MissingData, match="not stored"):
        Checkpoint(Orbax(fill_missing=False).open(LocalStore(hurt)))["params.zero"].read()


def test_leaves_that_are_not_there_or_not_known(hurt: Path) -> None:
    tree = json.loads((hurt / "_METADATA").read_text())

    def opens(**value: Any) -> None:
        changed = json.loads(json.dumps(tree))
        changed["tree_metadata"]["('params', 'zero')"]["value_metadata"] |= value
        (hurt / "_METADATA").write_text(json.dumps(changed))
        open_checkpoint(hurt)

    with pytest.raises(UnsupportedError, match=r"params\.zero is a 'Weird'"):
        opens(value_type="Weird")
    with pytest.raises(UnsupportedError, match="msgpack"):
        opens(skip_deserialize=True)
    with pytest.raises(IntegrityError, match="should be a number"):
        opens(value_type="scalar")
    with pytest.raises(MissingData, match=r"does not contain the text params\.zero"):
        opens(value_type="string")
    shutil.rmtree(hurt / "params.zero")
    with pytest.raises(
        MissingData, match=r"array params\.zero, which _METADATA names, is not stored"
    ):
        opens()
    (hurt / "_METADATA").write_text(json.dumps(tree | {"use_ocdbt": True}))
    with pytest.raises(MissingData, match=r"manifest\.ocdbt is missing"):
        open_checkpoint(hurt)


def test_any_store_serves_and_the_store_pickles() -> None:
    root = made("ocdbt_zarr2").path
    memory = open_store("memory://orbax-test")
    assert isinstance(memory, MemoryStore)
    for path in root.rglob("*"):
        if path.is_file():
            memory.put_if_absent(path.relative_to(root).as_posix(), path.read_bytes())
    ck = open_checkpoint(memory)
    assert read_whole(ck) == read_whole(open_checkpoint(root))
    local = open_checkpoint(root)
    extent = next(iter(local.source.extents(local.tensors[("params.head", "weight")].key)))  # type: ignore[index]
    again = pickle.loads(pickle.dumps(local.store))  # noqa: S301
    assert again.read(extent.file) == local.store.read(extent.file)
    assert again.info(extent.file) == local.store.info(extent.file)


def test_a_deep_tree_of_ocdbt(tmp_path: Path) -> None:
    """Many small nodes: keys of the inner ones share prefixes that the leaves leave out."""
    truth = {f"params.layer.{i:03}": np.arange(i + 1, dtype=np.float32) for i in range(40)}
    base = {"driver": "file", "path": f"{tmp_path}/"}
    config = {"max_decoded_node_bytes": 500, "max_inline_value_bytes": 16}
    leaf = {"value_metadata": {"value_type": "np.ndarray"}}
    for name, value in truth.items():
        kvstore = {"driver": "ocdbt", "base": base, "config": config, "path": f"{name}/"}
        spec = {"driver": "zarr", "kvstore": kvstore, "metadata": {"compressor": None}}
        ts.open(spec, create=True, dtype="float32", shape=value.shape).result()[...] = value
    entries = {
        n: {"key_metadata": [{"key": k, "key_type": 2} for k in n.split(".")], **leaf}
        for n in truth
    }
    (tmp_path / "_METADATA").write_text(json.dumps({"tree_metadata": entries, "use_ocdbt": True}))
    ck = open_checkpoint(tmp_path)
    assert {n: ck[n].read().tolist() for n in ck} == {
        n: v.tolist() for n, v in truth.items() if n != "params.layer.000"
    } | {"params.layer.000": [0.0]}


def test_what_mirrors_the_parameters_is_their_state() -> None:
    params: dict[tuple[str, ...], tuple[int, ...]] = {
        ("params", "a"): (3, 4),
        ("params", "b", "c"): (5,),
    }

    def named(**others: tuple[int, ...]) -> dict[str, str]:
        paths = {tuple(k.split("__")): v for k, v in others.items()}
        keys = tensor_keys(params | paths)
        return {".".join(p): str(keys[p]) for p in paths}

    assert named(o__0__mu__a=(3, 4), o__0__mu__b__c=(5,)) == {
        "o.0.mu.a": "params.a (mu)",
        "o.0.mu.b.c": "params.b.c (mu)",
    }
    assert named(o__v_row__a=(3,), o__v_row__b__c=(1,))["o.v_row.a"] == "params.a (v_row)"
    assert named(o__trace__a=(3, 4)) == {"o.trace.a": "params.a (trace)"}, "the other is frozen"
    assert named(mine__a=(3, 4)) == {"mine.a": "mine.a (weight)"}
    assert named(mine__a=(3, 4), mine__b__c=(5,))["mine.a"] == "params.a (mine)"
    assert named(mine__a=(3, 4), mine__b__c=(6,))["mine.a"] == "mine.a (weight)"
    twice = named(o__x__mu__a=(3, 4), o__y__mu__a=(3, 4), o__y__mu__b__c=(5,))
    assert twice == {
        "o.x.mu.a": "o.x.mu.a (weight)",
        "o.y.mu.a": "o.y.mu.a (weight)",
        "o.y.mu.b.c": "params.b.c (mu)",
    }


DOCUMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats()
    | st.sampled_from(["jax.Array", "scalar", "string", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "tree_metadata",
                    "key_metadata",
                    "value_metadata",
                    "value_type",
                    "key",
                    "use_ocdbt",
                    "x",
                ]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(
    doc=DOCUMENTS,
    where=st.sampled_from(["root", "tree_metadata", "leaf", "array_metadatas", "strings"]),
)
def test_hostile_documents_are_errors_of_ours(hurt: Path, doc: Any, where: str) -> None:
    original = {
        p: p.read_bytes()
        for p in (hurt / "_METADATA", hurt / "_strings.json", hurt / "array_metadatas/process_0")
    }
    try:
        tree = json.loads((hurt / "_METADATA").read_text())
        if where == "root":
            tree = doc
        elif where == "tree_metadata":
            tree["tree_metadata"] = doc
        elif where == "leaf":
            tree["tree_metadata"]["('params', 'zero')"] = doc
        elif where == "array_metadatas":
            (hurt / "array_metadatas/process_0").write_text(json.dumps({"array_metadatas": doc}))
        else:
            (hurt / "_strings.json").write_text(json.dumps(doc))
        (hurt / "_METADATA").write_text(json.dumps(tree))
        with suppress(UcformatError):
            read_whole(open_checkpoint(hurt))
    finally:
        for path, data in original.items():
            path.write_bytes(data)


def test_damaged_nodes_of_ocdbt_are_errors_of_ours(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    shutil.copytree(made("ocdbt_raw").path, root)
    (node,) = (root / "d").iterdir()
    data = node.read_bytes()
    for at in range(0, len(data), 400):
        node.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(IntegrityError):
            read_whole(open_checkpoint(root))
    node.write_bytes(data)
    assert ucformat.verify(root)


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff\x01\x01", b"\xff\xff\xff\x7f\x01"],
    ids=["five bytes", "a key of 256 MiB"],
)
def test_lengths_that_no_writer_writes_are_damage(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="no valid number at byte 0"):
        _Body(data, "manifest.ocdbt").lengths(2)


SIZES = {"in/d/x:y": 10}
PLACE = "value:d/:x%3Ay:4:6"


@pytest.mark.parametrize(
    ("location", "error", "says"),
    [
        (PLACE.replace("value", "btreenode"), IntegrityError, "is not the location of a value"),
        (f"{PLACE}:0", IntegrityError, "is not the location"),
        (PLACE.removesuffix(":6"), IntegrityError, "is not the location"),
        (PLACE.replace(":4", ":-4"), IntegrityError, "is not the location"),
        (PLACE.replace(":6", ":six"), IntegrityError, "is not the location"),
        (PLACE.replace(":6", ":" + "6" * 5000), IntegrityError, r"is not the location"),
        (PLACE.replace("d/", "d/..%2F"), UnsafeError, "does not stay inside"),
        (PLACE.replace("d/", "e/"), MissingData, r"in/e/x:y is missing"),
        (
            PLACE.replace(":6", ":7"),
            MissingData,
            "has 10 bytes, but values of the checkpoint reach to byte 11",
        ),
        (
            PLACE.replace(":4", ":5"),
            MissingData,
            "has 10 bytes, but values of the checkpoint reach to byte 11",
        ),
    ],
)
def test_a_location_of_ocdbt_that_leads_nowhere(
    location: str, error: type[UcformatError], says: str
) -> None:
    assert _locate(MemoryStore("x"), "in/", PLACE, "value", SIZES) == ByteRange("in/d/x:y", 4, 6)
    with pytest.raises(error, match=says):
        _locate(MemoryStore("x"), "in/", location, "value", SIZES)


LIMIT = 1 << 17


def body_of(packed: bytes) -> bytes:
    """The content of a manifest, inflated."""
    return _body(bytes(12) + b"\0\1" + packed + bytes(4), LIMIT, "manifest.ocdbt").data


def frame(head: bytes, *blocks: bytes) -> bytes:
    """A frame of zstd, of which the last block has the bit that says so."""
    return (
        b"\x28\xb5\x2f\xfd"
        + head
        + b"".join(blocks[:-1])
        + bytes([blocks[-1][0] | 1])
        + blocks[-1][1:]
    )


def block(content: bytes, kind: int = 0, size: int | None = None) -> bytes:
    return ((len(content) if size is None else size) << 3 | kind << 1).to_bytes(
        3, "little"
    ) + content


TEXT = b"abc" * 90
AS_IS, ZEROS = block(TEXT), block(b"\0", 1, LIMIT)
OPEN = b"\0\x58"  # the head of a frame that does not say its size


@pytest.mark.parametrize(
    ("packed", "content"),
    [
        (frame(OPEN, AS_IS, AS_IS), 2 * TEXT),
        (frame(OPEN, ZEROS), bytes(LIMIT)),
        *(
            (frame(bytes([flag, 0x58]) + bytes(flag), AS_IS), TEXT) for flag in (1, 2)
        ),  # the number of no dictionary
        (frame(b"\3\x58" + bytes(4), AS_IS), TEXT),
        (frame(b"\x20\3", block(b"abc")), b"abc"),
        *(
            (frame(h + (14).to_bytes(2, "little"), AS_IS), TEXT) for h in (b"\x60", b"\x40\x58")
        ),  # 256 bytes more
        *((frame(h + (270).to_bytes(4, "little"), AS_IS), TEXT) for h in (b"\xa0", b"\x80\x58")),
        *((frame(h + (270).to_bytes(8, "little"), AS_IS), TEXT) for h in (b"\xe0", b"\xc0\x58")),
        (bytes(zstd.compress(TEXT, 3, checksum=True)), TEXT),
    ],
)
def test_content_of_ocdbt_with_any_head(packed: bytes, content: bytes) -> None:
    assert body_of(packed) == content


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        (frame(OPEN, ZEROS, block(b"a")), "would be inflated to more than 131,072"),
        (frame(OPEN, ZEROS, ZEROS, AS_IS), "would be inflated to more than 262,144"),
        (
            frame(OPEN, block(bytes(3), 2), block(bytes(3), 2), AS_IS),
            "would be inflated to more than 262,144",
        ),
        (
            frame(b"\xa0" + (2 * LIMIT + 1).to_bytes(4, "little"), AS_IS),
            "would be inflated to more than 262,144",
        ),
        (frame(OPEN, AS_IS)[:-1], "a broken frame of zstd"),
        (frame(OPEN, block(TEXT, 3)), "a broken frame of zstd"),
        (frame(OPEN, AS_IS) + b"\0", "more than a frame of zstd"),
        (frame(b"\4\x58", AS_IS), "more than a frame of zstd"),
        (b"\0" + frame(OPEN, AS_IS)[1:], "does not contain a frame of zstd"),
        (frame(OPEN, AS_IS)[:4], "does not contain a frame of zstd"),
        (frame(OPEN, AS_IS)[:5], "a broken frame of zstd"),
    ],
)
def test_content_of_ocdbt_that_may_be_far_more_is_not_decoded(packed: bytes, says: str) -> None:
    with pytest.raises(IntegrityError, match=says):
        body_of(packed)
