"""`ucp get`: exact values in files and on the screen, and no surprise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import object_of
from tests.fakes import ODD, FakeSource, same
from tests.interrupts import interruptions
from ucformat.checkpoint import Checkpoint
from ucformat.cli.commands import get
from ucformat.errors import Conflict, UsageError
from ucformat.jobs.convert import convert
from ucformat.reading.indexing import parse_slice
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("0:512,128:", np.s_[0:512, 128:]),
        ("[0:512, 128:]", np.s_[0:512, 128:]),
        ("-1", (-1,)),
        (":", np.s_[:,]),
        ("::-2, ...", np.s_[::-2, ...]),
        (" 3 , : , +4:-1:2 ", np.s_[3, :, 4:-1:2]),
        ("3,", (3,)),
        ("[...]", (...,)),
    ],
)
def test_slices_are_read_as_numpy_spells_them(text: str, index: Any) -> None:
    assert parse_slice(text) == index


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "a",
        "1:2:3:4",
        "1;2",
        "0:2,,1",
        "[0",
        "::0",
        "__import__('os')",
        "1e3",
        "0x1",
        "9" * 30,
        "٣",
        ",",
    ],
)
def test_anything_else_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="is not a slice"):
        parse_slice(text)


def _spell(part: Any) -> str:
    if part is Ellipsis:
        return "..."
    if isinstance(part, slice):
        return f"{_none(part.start)}:{_none(part.stop)}" + (
            f":{part.step}" if part.step is not None else ""
        )
    return str(part)


def _none(n: int | None) -> str:
    return "" if n is None else str(n)


_INTS = st.none() | st.integers(-40, 40)


@given(
    st.lists(
        st.builds(slice, _INTS, _INTS, _INTS.filter(lambda n: n != 0)) | st.integers(-9, 9),
        min_size=1,
    )
)
def test_every_slice_survives_its_spelling(parts: list[Any]) -> None:
    assert parse_slice(",".join(map(_spell, parts))) == tuple(parts)
    assert parse_slice(f"[{' , '.join(map(_spell, parts))}]") == tuple(parts)


def test_a_slice_becomes_an_npy_file(run: Run, committed: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.npy"
    run("get", committed, "embed.weight", "5:100:3", "--state", "master", "--out", out)
    assert same(np.load(out), ODD["embed.weight", "master"][5:100:3])
    run("get", committed, "embed.weight", "-s", "step", "-o", tmp_path / "step.npy")
    assert same(np.load(tmp_path / "step.npy"), ODD["embed.weight", "step"])


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [
        ("embed.weight", ml_dtypes.bfloat16, "uint16"),
        ("experts.w1", ml_dtypes.float8_e4m3fn, "uint8"),
        ("experts.w2", ml_dtypes.float8_e5m2, "uint8"),
    ],
)
def test_what_npy_has_no_word_for_is_stored_as_bits_and_said(
    run: Run, committed: Path, tmp_path: Path, name: str, dtype: Any, bits: str
) -> None:
    out = tmp_path / "x.npy"
    result = run("get", committed, name, "--out", out)
    assert f"as {bits}" in result.stderr
    assert f"as {bits} bits" in result.stdout
    loaded = np.load(out)
    assert loaded.dtype == bits
    assert same(loaded.view(dtype), ODD[name, "weight"])
    found = object_of(run("get", committed, name, "--out", out, "--force", "--json").stdout)
    assert found["stored_as"] == bits
    assert found["dtype"] == np.dtype(dtype).name


def test_a_cast_is_made_on_request_only(run: Run, committed: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.npy"
    result = run("get", committed, "head.weight", "--dtype", "float32", "--out", out, "--json")
    assert result.stderr == ""
    assert same(np.load(out), ODD["embed.weight", "weight"].astype(np.float32))
    found = object_of(result.stdout)
    assert (found["name"], found["dtype"], found["cast_to"], found["stored_as"]) == (
        "embed.weight", "bfloat16", "float32", "float32",
    )  # fmt: skip
    assert "lose" in run("get", committed, "table", "0,0", "--dtype", "float64", code=2).stderr
    assert (
        "unknown dtype" in run("get", committed, "table", "0,0", "--dtype", "float7", code=2).stderr
    )


def test_no_file_is_overwritten_unasked(run: Run, committed: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.npy"
    out.write_bytes(b"mine")
    assert "--force" in run("get", committed, "mask", "--out", out, code=4).stderr
    assert out.read_bytes() == b"mine"
    run("get", committed, "mask", "--out", out, "--force")
    assert same(np.load(out), ODD["mask", "weight"])
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]
    run("get", committed, "mask", "--out", tmp_path, code=2)
    run("get", committed, "mask", "--out", tmp_path / "none" / "x.npy", code=3)


def test_small_slices_are_printed(run: Run, tmp_path: Path) -> None:
    arrays = {
        ("w", "weight"): np.arange(20_000, dtype=np.float32).reshape(4, 5000) / 4,
        ("z", "weight"): np.array([1 + 2j, complex("nan")], np.complex64),
        ("b", "weight"): np.array([0.5, 3], ml_dtypes.bfloat16),
    }
    convert(Checkpoint(FakeSource.write(LocalStore(tmp_path / "src"), arrays)), tmp_path / "dst")
    src = tmp_path / "dst"
    assert run("get", src, "w", "1:3,:2").stdout == "[[1250.   1250.25]\n [2500.   2500.25]]\n"
    assert run("get", src, "w", "[-1, -1]").stdout == "4999.75\n"
    assert run("get", src, "b").stdout == "[0.5 3. ]\n"
    assert "too many to print" in run("get", src, "w", code=2).stderr
    found = object_of(run("get", src, "w", "[1,::2500]", "--json").stdout)
    assert found["values"] == [1250.0, 1875.0]
    assert found["shape"] == [2]
    assert object_of(run("get", src, "z", "--json").stdout)["values"] == [
        [1.0, 2.0],
        [{"$float": "nan"}, 0.0],
    ]


def test_wrong_names_and_slices_are_explained(run: Run, committed: Path) -> None:
    assert "did you mean embed.weight" in run("get", committed, "embed.weigth", code=3).stderr
    assert (
        "it is stored in: weight, master"
        in run("get", committed, "embed.weight", "-s", "m", code=3).stderr
    )
    assert "has the shape [7]" in run("get", committed, "norm.bias", "7", code=2).stderr
    assert "has the shape [7]" in run("get", committed, "norm.bias", "0,0", code=2).stderr
    assert "'[-1]'" in run("get", committed, "norm.bias", "-1", code=2).stderr
    assert run("get", committed, "norm.bias", "[9:]", "-q").stdout == "[]\n"


@pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning"
)  # of one that comes between `open` and `with`
@pytest.mark.parametrize("force", [False, True])
def test_ctrl_c_at_any_instant_leaves_no_part_of_a_file(force: bool, tmp_path: Path) -> None:
    file, instants = tmp_path / "x.npy", 0
    array = np.arange(1000)
    for _ in interruptions(lambda: get.save(file, array, force=force), (get,)):
        found = list(tmp_path.iterdir())
        assert found in ([], [file])
        if found:
            assert np.array_equal(np.load(file), array)
            file.unlink()
        instants += 1
    assert instants > 20
    with pytest.raises(Conflict, match="exists"):
        get.save(file, array, force=False)
