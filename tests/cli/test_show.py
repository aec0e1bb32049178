"""`ucp show`: what a checkpoint holds, for people, for scripts and for programs."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.conftest import object_of
from tests.fakes import ODD, FakeSource, random_array
from ucformat.catalog.catalog import Catalog
from ucformat.checkpoint import Checkpoint
from ucformat.cli.commands.show import _list
from ucformat.format import arrays as small
from ucformat.geometry.tensor import TensorInfo
from ucformat.jobs.convert import convert
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Run
    from ucformat.catalog.entries import Entry


def test_the_summary_says_what_there_is(run: Run, committed: Path) -> None:
    text = run("show", committed).stdout
    lines = text.splitlines()
    assert lines[0] == str(committed)
    assert "  kind      universal, of fake 1" in lines
    assert "  step      1,700" in lines
    assert "  layout    zero 3, dp 3" in lines
    assert "  tied      head.weight = embed.weight" in lines
    assert "  group 0   1 tensor: lr 0.1" in lines  # what is unset is left out
    assert "  objects   scheduler, client_state" in lines
    assert next(line for line in lines if line.startswith("total")).split()[1:] == [
        str(len(ODD)),
        f"{sum(a.size for a in ODD.values()):,}",
        f"{sum(a.nbytes for a in ODD.values()) / 1024:.1f}",
        "KiB",
    ]


def test_json_has_everything(run: Run, committed: Path) -> None:
    found = object_of(run("show", committed, "--json").stdout)
    assert list(found) == [
        "url", "kind", "id", "step", "engine", "layout", "parameters", "dtypes", "whole", "outdated", "states", "total",
        "dropped", "lossy", "older", "lost", "deltas", "unreadable",
        "aliases", "groups", "objects", "per_rank", "assets", "unread", "missing",
        "zarr_url", "hf_url", "packed", "encoded", "bases", "unprotected", "catalog",
    ]  # fmt: skip
    assert found["kind"] == "ucformat"
    assert found["step"] == 1700
    assert found["total"]["bytes"] == sum(a.nbytes for a in ODD.values())
    assert found["groups"][0] == {
        "params": ["embed.weight"],
        "options": {"lr": 0.1, "foreach": None},
    }
    assert found["groups"][1]["options"]["lr"] == {"$float": "inf"}
    assert found["zarr_url"].startswith(f"{committed}/data/")
    assert found["catalog"] is None


def test_a_view_beside_the_whole_checkpoint(run: Run, tmp_path: Path) -> None:
    arrays = {
        (f"l.{i}.w", state): random_array((8, 6), dtype, i)
        for i in range(4)
        for state, dtype in (("weight", "bfloat16"), ("master", "float32"))
    }
    arrays |= {
        ("only", "master"): random_array((5,), "float32"),
        ("only", "step"): random_array((), "float32"),
    }
    store = LocalStore(tmp_path / "src")
    with store.create("hf/config.json") as file:
        file.write(b'{"num_hidden_layers": 4}')
    facts: dict[str, Any] = {
        "aliases": {"tied": "l.0.w"},
        "assets": {"hf/config.json": "hf/config.json"},
        "objects": {"args": {}},
    }
    convert(Checkpoint(FakeSource.write(store, arrays, **facts)), tmp_path / "ck")
    view = tmp_path / "view.yaml"
    view.write_text(
        r"{version: 1, view: [{select: '/l\.(\d+)\..*/', indices: [0, 2:4]}, {take: 'l.*', first: 2}, {untie: tied}]}"
    )
    whole = object_of(run("show", tmp_path / "ck", "--json").stdout)
    found = object_of(run("show", tmp_path / "ck", "--view", view, "--json").stdout)
    assert (whole["parameters"], whole["whole"], whole["outdated"]) == (4 * 48 + 5, None, [])
    assert whole["dtypes"] == {"bfloat16": 4 * 96, "float32": 4 * 192 + 24}
    assert (
        found["parameters"] == 3 * 12 + 48 + 5
    )  # the tied name is not cut, and is a tensor of its own
    assert found["whole"] == {k: whole[k] for k in ("parameters", "dtypes")}
    assert found["outdated"] == ["hf/config.json", "args"]
    lines = run("show", tmp_path / "ck", "--view", view).stdout.splitlines()
    assert "  params    89" in lines
    assert "  outdated  args has the sizes of the whole model, not of the view" in lines
    assert next(line.split() for line in lines if line.startswith("parameters")) == [
        "parameters",
        "89",
        "197",
    ]
    done = run("convert", tmp_path / "ck", tmp_path / "sub", "--view", view)
    assert "hf/config.json is copied unchanged" in done.stderr
    again = object_of(run("show", tmp_path / "sub", "--json").stdout)
    assert (again["parameters"], again["outdated"]) == (89, ["hf/config.json", "args"])
    assert (
        object_of(run("show", tmp_path / "ck", "--view", view, "-t", "l.*", "--json").stdout)[
            "parameters"
        ]
        == 89
    )


def test_tensors_are_listed_by_glob_and_state(run: Run, committed: Path) -> None:
    found = object_of(run("show", committed, "-t", "embed*", "-s", "master", "--json").stdout)
    assert found["tensors"] == [
        {
            "name": "embed.weight",
            "state": "master",
            "dtype": "float32",
            "shape": [211, 30],
            "bytes": 25320,
        }
    ]
    lines = run("show", committed, "--tensors", "experts.*", "-t", "norm.bias").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "norm.bias", "experts.w1", "experts.w2"]
    assert "4 x 24 x 40" in lines[2]
    assert run("show", committed, "-q", "-t", "*.w?").stdout == "experts.w1\nexperts.w2\n"
    assert run("show", committed, "-q", "-s", "step").stdout == "embed.weight\n"


def test_a_tied_name_finds_the_stored_tensor(run: Run, committed: Path) -> None:
    assert run("show", committed, "-q", "-t", "head.*").stdout == "embed.weight\n"


def test_what_is_not_there_is_said(run: Run, committed: Path, tmp_path: Path) -> None:
    assert "matches 'nope*'" in run("show", committed, "-t", "nope*", code=3).stderr
    assert (
        "hint: the states are weight, master"
        in run("show", committed, "-s", "momentum", code=2).stderr
    )
    assert run("show", tmp_path, code=3).stdout == ""


def test_a_terminal_sees_lines_that_fit_and_a_pipe_full_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "model.decoder.layers.17.mixture_of_experts.experts.local_experts.3.linear_fc1.weight"
    tensors = [TensorInfo(name, s, "float32", (28672, 8192)) for s in ("master", "exp_avg")]
    full = list(_list(tensors))
    assert full[1].startswith(name)
    assert full[2].startswith(name)
    monkeypatch.setattr("ucformat.cli.commands.show.terminal_width", lambda: 80)
    short = list(_list(tensors))
    assert all(len(line) <= 80 for line in short)
    assert short[1].startswith("model.decoder.laye….linear_fc1.weight ")
    assert short[2].startswith("   ")


def test_a_name_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    evil = "a\x1b[31m\nb\u202e"
    arrays = {(evil, "weight"): random_array((2,), "int8")}
    convert(Checkpoint(FakeSource.write(LocalStore(tmp_path / "src"), arrays)), tmp_path / "dst")
    for options in (["-t", "*"], ["-q"]):
        text = run("show", tmp_path / "dst", *options).stdout
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "a\\x1b[31m\\nb" in text


@pytest.fixture
def known(run: Run, committed: Path, catalog: Path, tmp_path: Path) -> Path:
    """A checkpoint that the catalog knows, and much of it."""
    place = tmp_path / "run9" / "1700"
    shutil.copytree(committed, place)
    run("register", place)
    run("tag", "run9@1700", "good", "paper")
    run("alias", "set", "best", "run9@1700")
    run("metric", "run9@1700", "val_loss=2.13", "acc=nan")
    run("hold", "run9@1700", "--reason", "being evaluated", "--until", "2099-01-01")
    run("note", "run9@1700", "looks good")
    run("link", "run9@1700", "run7@3000", "--kind", "finetune")
    return place


def test_what_the_catalog_knows_is_shown(
    run: Run, known: Path, entry: Callable[[str], Entry]
) -> None:
    lines = run("show", "alias:best").stdout.splitlines()
    assert lines[0] == str(known)
    assert lines[6:11] == [
        "  run       run9",
        "  alias     best",
        "  tag       good, paper",
        "  metric    acc nan, val_loss 2.13",
        f"  hold 1    being evaluated, until 2099-01-01 23:59Z ({entry('alias:best').holds[0].who}, {lines[10][-18:]}",
    ]
    assert lines[11].startswith("  note      looks good (")
    assert lines[12].endswith("/src (convert)")
    assert lines[13] == "  from      run7@3000 (finetune)"
    found = object_of(run("show", known, "--json").stdout)["catalog"]
    assert found["name"] == "run9@1700"
    assert found["urls"] == [str(known)]
    assert found["metrics"] == {"acc": {"$float": "nan"}, "val_loss": 2.13}
    parent = entry("run7@3000")
    assert [p["kind"] for p in found["parents"]] == ["convert", "finetune"]
    assert found["parents"][1:] == [
        {"kind": "finetune", "id": parent.id, "name": "run7@3000", "url": parent.url}
    ]


def test_where_else_it_lies_and_whether_it_is_whole(run: Run, known: Path, tmp_path: Path) -> None:
    shutil.copytree(known, tmp_path / "copy")
    run("register", tmp_path / "copy")
    run("verify", known)
    lines = run("show", tmp_path / "copy").stdout.splitlines()
    assert f"  also in   {known}" in lines
    assert any(line.startswith("  verified  ") and line.endswith(", intact") for line in lines)


@pytest.mark.parametrize("different", [0, 2])
def test_what_a_training_held_of_it(run: Run, known: Path, catalog: Path, different: int) -> None:
    document = {
        "layout": {"world": 4, "tp": 2},
        "may_cast": True,
        "counts": {"equal": 7, "cast": 3, "different": different},
    }
    with Catalog(str(catalog)) as opened:
        opened.certified("run9@1700", url=str(known), ok=not different, document=document)
    said = "2 differences" if different else "as saved"
    lines = run("show", known).stdout.splitlines()
    assert [x.endswith(f", world 4, tp 2: {said}") for x in lines if "certified" in x] == [True]
    found = object_of(run("show", known, "--json").stdout)["catalog"]["certified"]
    assert (found["ok"], found["document"]) == (not different, document)
    log = run("log", "run9@1700").stdout
    assert "certify" in log
    assert '"tp": 2' in log


def test_without_a_catalog_the_rest_is_shown(run: Run, known: Path, tmp_path: Path) -> None:
    everything = run("show", known).stdout
    (tmp_path / "broken.db").write_text("this is no database, and never was one")
    for url in (
        "none",
        tmp_path / "never-made.db",
        tmp_path / "broken.db",
        "postgresql://127.0.0.1:1/x",
    ):
        result = run("show", known, "--catalog", url)
        assert set(result.stdout.splitlines()) < set(everything.splitlines())
        assert result.stderr.startswith("note: the catalog is not available: ") is (
            "never" not in str(url) != "none"
        )
        assert object_of(run("show", known, "--catalog", url, "--json").stdout)["catalog"] is None
    assert not (tmp_path / "never-made.db").exists()
    assert "no catalog" in run("show", "run9@1700", "--catalog", "none", code=3).stderr


def test_of_what_is_gone_the_catalog_still_knows(
    run: Run, catalog: Path, entry: Callable[[str], Entry]
) -> None:
    gone = entry("run7@2000")
    result = run("show", "run7@2000")
    assert result.stderr.endswith(
        " (if it is gone: ucp reindex /nowhere/run7/2000 --forget); showing its entry in the catalog\n"
    )
    assert "ucp reindex /nowhere/run7/2000 --forget" in run("verify", "run7@2000", code=3).stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "/nowhere/run7/2000"
    assert "  step      2,000" in lines
    assert "  from      run7@1000 (resume)" in lines
    assert lines[-1].split() == ["total", "1", "8", "32", "B"]
    found = object_of(run("show", gone.id[:8], "--json").stdout)
    assert (found["id"], found["groups"], found["objects"], found["zarr_url"]) == (
        gone.id,
        None,
        None,
        None,
    )
    assert found["catalog"]["state"] == "committed"
    assert run("show", "run7@2000", "-t", "*", "-q").stdout == "w\n"


def test_one_that_is_deleted_or_purged_is_shown_too(
    run: Run, catalog: Path, entry: Callable[[str], Entry]
) -> None:
    run("delete", "run7@2000")
    lines = run("show", "run7@2000").stdout.splitlines()
    assert any(line.startswith("  state     deleted 20") for line in lines)
    assert "is its disk not mounted?" in run("reindex", "/nowhere", code=3).stderr
    assert "state     deleted" in run("show", "run7@2000").stdout
    run("reindex", "/nowhere", "--forget")
    lines = run("show", "run7@2000").stdout.splitlines()
    assert lines[0] == object_of(run("show", "run7@2000", "--json").stdout)["id"]
    assert "  state     purged" in lines
    assert run("show", "run7@2001", code=3).stdout == ""


def test_it_says_what_is_packed_beside_arrays(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "MOST_SMALL_ARRAYS", 2)
    monkeypatch.setattr(small, "SMALL_BYTES", 100)
    arrays = {(f"n{i}", "weight"): random_array((4,), "float32", i) for i in range(3)}
    arrays["large", "weight"] = random_array((100,), "float32", 3)
    place = tmp_path / "ck"
    convert(Checkpoint(FakeSource.write(LocalStore(tmp_path / "src"), arrays)), place)
    assert (
        "  packed    3 tensors, 48 B: no arrays of Zarr; `ucp materialize` makes them"
        in run("show", place).stdout
    )
    assert object_of(run("show", place, "--json").stdout)["packed"] == {"tensors": 3, "bytes": 48}
    run("materialize", place)
    assert "  packed  " not in run("show", place).stdout
    assert object_of(run("show", place, "--json").stdout)["packed"] is None


def test_it_tells_codecs_and_how_large_the_files_are(run: Run, tmp_path: Path) -> None:
    arrays = {("a", "weight"): random_array((400, 300), "uint8") // 128}
    source = Checkpoint(FakeSource.write(LocalStore(tmp_path / "src"), arrays))
    convert(source, tmp_path / "ck", codec="blosc")
    stored = sum(f.stat().st_size for f in (tmp_path / "ck/data").rglob("*") if f.is_file())
    found = object_of(run("show", tmp_path / "ck", "--json").stdout)["encoded"]
    assert found == {"codecs": ["blosc"], "bytes": 120_000, "stored": stored}
    assert "  codec     blosc: 117.2 KiB in files of " in run("show", tmp_path / "ck").stdout


def test_it_says_what_was_encoded_with_loss(run: Run, tmp_path: Path) -> None:
    import torch

    from ucformat.torch import save

    moments = {"w": {"exp_avg": torch.randn(1000)}}
    optimizer = {"state": moments, "param_groups": [{"params": ["w"]}]}
    place = tmp_path / "ck"
    save({"optimizer": optimizer}, place, encode={"exp_avg": "adaptive:2"})
    (found,) = object_of(run("show", place, "--json").stdout)["lossy"]
    assert (found["state"], found["encoding"], found["tensors"]) == ("exp_avg", "adaptive-3bit", 1)
    assert 0.1 < found["absolute"] < 3
    said = run("show", place).stdout
    assert f"exp_avg (1 tensor), by adaptive-3bit: off by up to {found['absolute']:.3g}" in said
    get = ("get", place, "w", "--state", "exp_avg", "0:3")
    assert "--lossy" in run(*get, code=6).stderr
    assert run(*get, "--lossy").stdout
    export = ("export", "npz", place, tmp_path / "a.npz", "--state", "exp_avg")
    assert "--lossy" in run(*export, code=6).stderr
    run(*export, "--lossy")
    exact, encoded = tmp_path / "exact", tmp_path / "encoded"
    save({"optimizer": optimizer}, exact)
    run("convert", exact, encoded, "--encode", "exp_avg=adaptive:2")
    assert object_of(run("show", encoded, "--json").stdout)["lossy"] == [found]
    assert "PATTERN=ENCODING" in run("convert", exact, encoded, "--encode", "x", code=2).stderr


def test_it_says_what_is_older(run: Run, tmp_path: Path) -> None:
    import torch

    from ucformat.torch import Experts, save

    for step in range(1, 3):
        experts = {f"experts.{n}.w": torch.full((2,), 10.0 * step + n) for n in range(3)}
        save({"model": experts}, tmp_path / str(step), step=step, partial=Experts())
    place = tmp_path / "2"
    shown = object_of(run("show", place, "--json").stdout)
    assert shown["older"] == [{"step": 1, "tensors": 2, "bytes": 16}]
    assert shown["lost"] is None
    assert "older     2 tensors (16 B) of step 1" in run("show", place).stdout
    (get, name) = ("get", "experts.2.w")
    assert "--older" in run(get, place, name, code=6).stderr
    assert "12" in run(get, place, name, "--older").stdout
    export = ("export", "npz", place, tmp_path / "a.npz")
    assert "--older" in run(*export, code=6).stderr
    run(*export, "--older")
    verified = run("verify", place)
    assert "2 tensors of them older than the checkpoint's step" in verified.stdout
    assert object_of(run("verify", place, "--json").stdout)["older"] == 2
    compared = run("diff", tmp_path / "1", place)
    assert f"2 tensors of {place} are older than its step" in compared.stdout
    sides = object_of(run("diff", tmp_path / "1", place, "--json").stdout)
    assert (sides["a"]["older"], sides["b"]["older"]) == (0, 2)
