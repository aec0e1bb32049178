"""`ucp diff`: in what two checkpoints differ, whether the catalog knows them or not."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.cli.conftest import FACTS, LONG_RUN, object_of
from tests.fakes import ODD, FakeSource, manifest_file, random_array
from ucformat.checkpoint import Checkpoint
from ucformat.schema import MANIFEST
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Run, Terminal
    from ucformat.catalog.entries import Entry


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The checkpoint `committed`, with one tensor more, one less, one of another shape and one of other values."""
    arrays = {k: v for k, v in ODD.items() if k != ("norm.bias", "weight")}
    arrays["experts.w1", "weight"] = random_array((4, 24, 41), "float8_e4m3fn")
    arrays["embed.weight", "exp_avg"] = random_array(
        ODD["embed.weight", "exp_avg"].shape, "float32", 99
    )
    arrays["new.weight", "weight"] = random_array((3,), "float32")
    facts = FACTS | {"layout": {"zero": 1, "dp": 3}, "groups": ()}
    source = Checkpoint(FakeSource.write(LocalStore(tmp_path / "src"), arrays, **facts))
    ucformat.convert(source, tmp_path / "other", chunk_bytes=256, shard_bytes=4096)
    return tmp_path / "other"


def test_of_the_catalog(run: Run, catalog: Path, entry: Callable[[str], Entry]) -> None:
    lines = run("diff", "run7@1000", "run7@2000").stdout.splitlines()
    assert lines[0] == "run7@1000 -> run7@2000"
    assert [line.split() for line in lines[1:7]] == [
        [],
        ["config", "run7@1000", "run7@2000"],
        ["optimizer.lr", "0.0003", "0.0006"],
        [],
        ["metrics", "run7@1000", "run7@2000"],
        ["val_loss", "2.5", "2"],
    ]
    assert lines[9].split() == ["w", "weight", "values"]
    assert lines[10] == "0 tensors the same"
    found = object_of(run("diff", "run7@1000", "run7@2000", "--json").stdout)
    assert list(found) == [
        "a",
        "b",
        "equal",
        "config",
        "topology",
        "producer",
        "metrics",
        "tensors",
    ]
    assert found["a"] == {
        "id": entry("run7@1000").id,
        "name": "run7@1000",
        "url": "/nowhere/run7/1000",
        "older": None,
    }
    assert found["equal"] is False
    assert found["config"] == [{"path": "optimizer.lr", "a": 3e-4, "b": 6e-4}]
    assert found["topology"] == []
    assert list(found["tensors"]) == ["added", "removed", "changed", "unknown", "same", "values"]
    (changed,) = found["tensors"]["changed"]
    assert list(changed) == ["name", "state", "aspects", "a", "b"]
    assert changed["aspects"] == ["digest"]
    assert list(changed["a"]) == ["name", "state", "dtype", "shape", "bytes", "digest"]


def test_parts_and_the_exit_code(run: Run, catalog: Path) -> None:
    pair = ("diff", "run7@1000", "run7@2000")
    assert (
        run(*pair, "--what", "topology", "--exit-code").stdout
        == "run7@1000 and run7@2000 are equal in topology\n"
    )
    assert run(*pair, "--exit-code", code=1).stderr == ""
    found = object_of(
        run(*pair, "--what", "metrics, config", "--json", "--exit-code", code=1).stdout
    )
    assert (found["topology"], found["tensors"], len(found["metrics"])) == (None, None, 1)
    assert run(*pair, "-q", "--what", "config").stdout == "config\toptimizer.lr\t0.0003\t0.0006\n"
    assert run(*pair, "-q", "--what", "tensors").stdout == "tensors\tw\tweight\tdigest\n"
    assert "not one of" in run(*pair, "--what", "everything", code=2).stderr
    assert run("diff", "run7@1000", "run7@1000", "--exit-code").stdout.startswith(
        "run7@1000 and run7@1000 are equal"
    )
    run("diff", "run7@1000", "run7@999", code=3)


def test_a_side_without_a_value(run: Run, catalog: Path) -> None:
    run("metric", "run7@1000", "acc=nan")
    found = object_of(run("diff", "run7@1000", "run7@2000", "--json").stdout)["metrics"]
    assert found == [
        {"path": "acc", "a": {"$float": "nan"}},
        {"path": "val_loss", "a": 2.5, "b": 2.0},
    ]
    assert ["acc", "nan", "-"] in [
        line.split() for line in run("diff", "run7@1000", "run7@2000").stdout.splitlines()
    ]


@pytest.mark.parametrize("where", ["none", "catalog"])
def test_of_places_that_no_catalog_knows(
    run: Run, catalog: Path, committed: Path, other: Path, where: str, tmp_path: Path
) -> None:
    option = ("--catalog", "none" if where == "none" else catalog)
    before = sorted(tmp_path.rglob("*"))
    found = object_of(run("diff", committed, other, "--json", *option).stdout)
    assert found["topology"] == [{"path": "zero", "a": 3, "b": 1}]
    tensors = found["tensors"]
    assert [t["name"] for t in tensors["added"]] == ["new.weight"]
    assert [t["name"] for t in tensors["removed"]] == ["norm.bias"]
    assert {(t["name"], *t["aspects"]) for t in tensors["changed"]} >= {("embed.weight", "digest")}
    assert tensors["same"] == len(ODD) - 3
    lines = run("diff", committed, other, *option).stdout.splitlines()
    assert ["norm.bias", "weight", "removed"] in [line.split()[:3] for line in lines]
    assert sorted(tmp_path.rglob("*")) == before  # nothing was written beside them
    assert run("diff", committed, committed, "--exit-code", *option).stdout
    run("diff", committed, tmp_path / "nothing", *option, code=3)


def test_of_one_that_it_knows_and_one_that_it_does_not(
    run: Run, catalog: Path, committed: Path, other: Path, tmp_path: Path
) -> None:
    shutil.copytree(committed, tmp_path / "run9" / "1700")
    run("register", tmp_path / "run9" / "1700")
    run("metric", "run9@1700", "val_loss=2")
    found = object_of(run("diff", "run9@1700", other, "--json").stdout)
    assert found["metrics"] == [{"path": "val_loss", "a": 2.0}]


def test_values_are_read_when_asked(run: Run, catalog: Path, committed: Path, other: Path) -> None:
    found = object_of(run("diff", committed, other, "--values", "-w", 1, "--json").stdout)[
        "tensors"
    ]["values"]
    by_name = {(v["name"], v["state"]): v for v in found}
    assert list(found[0]) == [
        "name", "state", "shape", "dtypes", "equal", "elements", "differing", "nan_mismatches", "max_abs", "max_rel",
        "by_digest",
    ]  # fmt: skip
    assert by_name["embed.weight", "master"]["by_digest"] is True
    changed = by_name["embed.weight", "exp_avg"]
    assert changed["equal"] is False
    assert 0 < changed["differing"] <= changed["elements"]
    lines = run("diff", committed, other, "--values").stdout.splitlines()
    assert next(line for line in lines if line.startswith("values of")).split()[2:4] == [
        "state",
        "differ",
    ]
    assert ["embed.weight", "exp_avg"] in [line.split()[:2] for line in lines]
    assert "by their digests" in lines[-1]
    assert (
        "\nvalues\tembed.weight\texp_avg\t"
        in run("diff", committed, other, "--values", "-q").stdout
    )
    assert (
        "leaves out" in run("diff", committed, other, "--values", "--what", "config", code=2).stderr
    )


def test_values_tell_where_digests_cannot(
    run: Run, catalog: Path, committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ("diff", committed, tmp_path / "other-grid", "--what", "tensors", "--exit-code")
    with monkeypatch.context() as patch:
        patch.setenv("UCP_CATALOG", "none")
        ucformat.convert(committed, tmp_path / "other-grid", chunk_bytes=4096)
    assert " are equal in tensors\n" in run(*pair).stdout  # by their fingerprints
    manifest = json.loads((tmp_path / "other-grid" / MANIFEST).read_bytes())
    del manifest["tensors"]["fingerprint"]
    (tmp_path / "other-grid" / MANIFEST).write_bytes(manifest_file(manifest))
    assert "without digests to compare; --values reads them" in run(*pair, code=1).stdout
    assert " are equal in tensors\n" in run(*pair, "--values").stdout
    assert object_of(run(*pair, "--values", "--json").stdout)["equal"] is True


def test_many_tensors_and_long_names_at_a_terminal(
    terminal: Terminal, run: Run, catalog: Path, tmp_path: Path
) -> None:
    name = "model.decoder.layers.{}.mixture_of_experts.experts.local_experts.3.linear_fc1.weight"
    for k in range(2):
        arrays = {
            (name.format(i), "weight"): random_array((2, 2), "float32", 100 * k + i)
            for i in range(30)
        }
        source = Checkpoint(FakeSource.write(LocalStore(tmp_path / f"src{k}"), arrays))
        ucformat.convert(source, tmp_path / f"dst{k}")
    pair = (tmp_path / "dst0", tmp_path / "dst1")
    text = terminal(
        ["diff", *pair], ["diff", *pair, "--values"], ["diff", "run7@1000", f"{LONG_RUN}@4000"]
    )
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "and 10 more in values only" in lines
    assert lines[3].startswith("model.decoder.lay")
