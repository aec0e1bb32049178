"""What is written as OCDBT, TensorStore reads, whatever the sizes of nodes and the number of levels."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from ucformat.engines.orbax import ocdbt
from ucformat.engines.orbax.ocdbt import ValueLocation, make_tree, read_ocdbt
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Mapping

keys = st.text(st.sampled_from("ab./é0") | st.characters(codec="utf-8"), min_size=1, max_size=30)
values = st.dictionaries(
    keys, st.tuples(st.integers(0, 3), st.binary(max_size=300)), min_size=1, max_size=60
)


def put(folder: Path, given_: Mapping[str, tuple[int, bytes]]) -> None:
    """Write the values: inline, or in one of three data files."""
    files = {f"d/{i}": bytearray(b"x" * i) for i in (1, 2, 3)}
    found: dict[str, bytes | ValueLocation] = {}
    for key, (where, data) in given_.items():
        if where:
            found[key] = ValueLocation(f"d/{where}", len(files[f"d/{where}"]), len(data))
            files[f"d/{where}"] += data
        else:
            found[key] = data
    nodes, manifest = make_tree(found, "d/nodes")
    (folder / "d").mkdir()
    for name, content in {
        **files,
        "d/nodes": bytearray(nodes),
        "manifest.ocdbt": bytearray(manifest),
    }.items():
        (folder / name).write_bytes(content)


@given(values, st.sampled_from([1, 60, 300, 1 << 20]))
def test_tensorstore_reads_it(given_: dict[str, tuple[int, bytes]], cut: int) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocdbt, "_CUT", cut)
        folder = Path(name)
        put(folder, given_)
        base = ts.KvStore.open(f"file://{folder}/").result()
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
        assert {k.decode(): store[k] for k in store.list().result()} == {
            k: v for k, (_, v) in given_.items()
        }
        version = ts.ocdbt.dump(base).result()["versions"][0]
        sums = version["root"]["statistics"]
        assert sums["num_keys"] == len(given_)
        assert sums["num_indirect_value_bytes"] == sum(
            len(v) for where, v in given_.values() if where
        )
        assert sums["num_tree_bytes"] == (folder / "d/nodes").stat().st_size
        ours = LocalStore(folder)
        sizes = {info.key: info.size for info in ours.list()}
        for key, value in read_ocdbt(ours, "", sizes).items():
            assert (value if isinstance(value, bytes) else ours.read(*value)) == given_[key][1]


def test_many_values_take_several_nodes() -> None:
    found = {f"{i:06}": ValueLocation("d/0", 64 * i, 64) for i in range(200_000)}
    nodes, manifest = make_tree(found, "d/nodes")
    assert len(nodes) < 16 * len(found)
    assert len(manifest) < 200
    assert make_tree(dict(reversed(found.items())), "d/nodes") == (nodes, manifest)
