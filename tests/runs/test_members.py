"""Which checkpoints a run has: by the catalog, or in a folder; those on the path, and what is said of the others."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.catalog.acts import put
from tests.catalog.manifests import BEGIN, made_from, manifest
from tests.jobs.conftest import foreign, universal
from tests.torch.runs import fill
from ucformat.catalog.catalog import Catalog
from ucformat.errors import IntegrityError, NotFound, UsageError
from ucformat.runs.members import _LeaveOut
from ucformat.schema.manifest import LaunchDoc, LineageDoc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ucformat.catalog.entries import Entry


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with Catalog() as opened:
        yield opened


def launched(
    catalog: Catalog,
    launch: str,
    steps: dict[int, int],
    continues: dict[str, int] | None = None,
    began: int | None = None,
) -> dict[int, Entry]:
    """A launch saves steps, each with its count of commits; it began with the checkpoint of a number."""
    behind = {other * 32: count for other, count in (continues or {}).items()}
    doc = LaunchDoc(id=launch * 32, continues=behind)
    return {
        step: put(
            catalog,
            number := 1000 * ord(launch) + step,
            f"/data/{launch}/{step}",
            step=step,
            commits=count,
            launch=doc,
            created=BEGIN + timedelta(minutes=number),
            lineage=() if began is None else made_from(manifest(began), "resume"),
        )
        for step, count in steps.items()
    }


A = 1000 * ord("a")


def places(run: ucformat.Run) -> list[str]:
    """The places of its checkpoints, in order of steps, without opening them."""
    recipe: Any = run.recipe
    return ["/".join(url.split("/")[-2:]) for _, _, url in recipe]


class TestSetBack:
    """A launch saved 10 to 50; a second one resumed from 20, and knows of the others."""

    @pytest.fixture(autouse=True)
    def both(self, catalog: Catalog) -> None:
        launched(catalog, "a", {10: 1, 20: 2, 25: 3, 30: 4, 40: 5, 50: 6})
        launched(catalog, "b", {30: 7, 40: 8}, {"a": 6}, A + 20)

    def test_the_path_is_the_newer_one(self) -> None:
        run = ucformat.run("run7")
        assert run.steps == (10, 20, 30, 40)
        assert places(run) == ["a/10", "a/20", "b/30", "b/40"]
        assert run.left_out == {
            f"/data/a/{step}": f"step {step} is not on the path to step 40"
            for step in (25, 30, 40, 50)
        }
        assert repr(run) == "<ucformat.Run run7: steps 10, 20, 30, 40; 4 left out>"

    def test_or_that_to_another_checkpoint(self) -> None:
        old, middle = manifest(A + 50).id, manifest(1000 * ord("b") + 30).id
        assert places(ucformat.run("run7", head=old[:6])) == [
            f"a/{step}" for step in (10, 20, 25, 30, 40, 50)
        ]
        assert ucformat.run("run7", head=middle).steps == (10, 20, 30)
        with pytest.raises(NotFound, match="run7 has no checkpoint 'zzzz'"):
            ucformat.run("run7", head="zzzz")
        with pytest.raises(UsageError, match="run7 has several checkpoints ''"):
            ucformat.run("run7", head="")

    def test_a_third_launch_resumed_from_the_first(self, catalog: Catalog) -> None:
        launched(catalog, "c", {22: 9}, {"a": 6, "b": 8}, A + 10)
        assert places(ucformat.run("run7")) == ["a/10", "c/22"]


def test_one_launch_that_returned(catalog: Catalog) -> None:
    launched(catalog, "a", {10: 1, 20: 2, 30: 3})
    launched(catalog, "b", {15: 4, 25: 5}, {"a": 3})  # nothing tells from where
    assert places(ucformat.run("run7")) == ["a/10", "b/15", "b/25"]


def test_lines_that_do_not_continue_each_other(catalog: Catalog) -> None:
    launched(catalog, "a", {10: 1, 20: 2})
    (head,) = launched(catalog, "b", {10: 1}).values()
    with pytest.raises(UsageError, match="2 lines that do not continue") as caught:
        ucformat.run("run7")
    assert f"step 10: {head.id[:12]}, /data/b/10" in str(caught.value)
    assert f"head={head.id[:12]!r}" in str(caught.value) or "/data/a/20" in str(caught.value)
    assert places(ucformat.run("run7", head=head.id[:12])) == ["b/10"]


def test_deleted_unknown_and_left_out(catalog: Catalog) -> None:
    entries = launched(catalog, "a", {10: 1, 20: 2, 30: 3, 40: 4})
    catalog.delete(entries[20].id)
    assert ucformat.run("run7").steps == (10, 30, 40)
    run = ucformat.run("run7", leave_out=[30])
    assert (run.steps, run.left_out) == ((10, 40), {"/data/a/30": "left out"})
    assert ucformat.run("run7", leave_out=entries[40].id[:8]).steps == (10, 30)
    with pytest.raises(UsageError, match="run7 has no checkpoint 35 to leave out"):
        ucformat.run("run7", leave_out=[30, 35])
    put(catalog, 7, "/data/final", step=None)
    with pytest.raises(UsageError, match=r"unknown steps: no step: .*, /data/final"):
        ucformat.run("run7")
    assert ucformat.run("run7", leave_out=["final"]).steps == (10, 30, 40)
    with pytest.raises(NotFound, match=r"no checkpoints of a run .it's"):
        ucformat.run("it's")


def test_four_characters_of_an_id_are_enough() -> None:
    assert _LeaveOut("abcd").covers("run/step", None, "abcdef")
    assert not _LeaveOut("abc").covers("run/step", None, "abcdef")


def test_no_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_CATALOG", "none")
    with pytest.raises(NotFound, match="there is no run 'run7', and no catalog to look it up in"):
        ucformat.run("run7")


def test_a_conversion_is_another_form_of_its_step(catalog: Catalog, tmp_path: Path) -> None:
    """Of two forms of a checkpoint, the universal one is in the run."""
    for step in (100, 200):
        foreign(tmp_path / "run7", step, content=step)
    ucformat.register(tmp_path / "run7", catalog, recursive=True)
    ucformat.convert(tmp_path / "run7" / "global_step200", tmp_path / "run7" / "converted")
    ucformat.register(tmp_path / "run7" / "converted", catalog)
    run = ucformat.run("run7")
    assert [run.checkpoint(step).kind for step in run.steps] == ["deepspeed", "ucformat"]
    assert list(ucformat.run(tmp_path / "run7").steps) == [100, 200]


class TestAFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        fill(tmp_path / "run7", 10, 20, 30)
        return tmp_path / "run7"

    def test_a_damaged_one_names_its_step(self, folder: Path) -> None:
        (folder / "step-00000020" / "manifest.json").write_text("{}")
        with pytest.raises(IntegrityError, match=r"^step 20: ") as caught:
            ucformat.run(folder)
        assert "ucformat.run(…, leave_out=[20]) reads the others" in str(caught.value)
        run = ucformat.run(folder, leave_out=20)
        assert (run.steps, list(run.left_out.values())) == ((10, 30), ["left out"])

    def test_deleted_ones_are_left_out(self, folder: Path, catalog: Catalog) -> None:
        ucformat.register(folder, catalog, recursive=True)
        catalog.delete(ucformat.open(folder / "step-00000020").id)
        run = ucformat.run(folder)
        assert run.steps == (10, 30)
        assert run.left_out == {f"{folder}/step-00000020": "deleted"}

    def test_one_that_is_being_removed_is_left_out(self, folder: Path) -> None:
        (folder / "step-00000020" / "manifest.json").rename(
            folder / "step-00000020" / "tombstone.json"
        )
        run = ucformat.run(folder)
        assert (run.steps, list(run.left_out.values())) == ((10, 30), ["deleted"])

    def test_what_is_no_run(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match=r"no checkpoint below .*\n.*opens a single"):
            ucformat.run(folder / "step-00000010")
        (tmp_path / "empty").mkdir()
        with pytest.raises(NotFound, match="there is no checkpoint below"):
            ucformat.run(tmp_path / "empty")
        with pytest.raises(NotFound, match="has no checkpoints"):
            ucformat.run(folder, leave_out=[10, 20, 30])
        fill(tmp_path / "run8", 10)
        with pytest.raises(UsageError, match="several runs: run7, run8"):
            ucformat.run(tmp_path)

    def test_a_step_that_was_saved_again(self, folder: Path) -> None:
        """As the catalog does: what the second launch records of the first decides."""
        first = [ucformat.open(folder / f"step-000000{n}").manifest for n in (10, 20, 30)]
        assert first[0].launch is not None
        behind = {first[0].launch.id: 3}
        origin = LineageDoc(kind="resume", url=f"{folder}/step-00000010", id=first[0].id, commits=1)
        again: dict[str, Any] = {
            "launch": LaunchDoc(id="b" * 32, continues=behind),
            "after": 3,
            "lineage": (origin,),
        }
        ucformat.torch.save({"x": 1}, f"{folder}/step-00000030.2", step=30, **again)
        run = ucformat.run(folder)
        assert places(run) == ["run7/step-00000010", "run7/step-00000030.2"]
        assert len(run.left_out) == 2
        assert ucformat.run(folder, head=first[2].id).steps == (10, 20, 30)

    def test_two_checkpoints_of_one_step(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            universal(tmp_path / "run" / name, 5, content=ord(name))
        with pytest.raises(UsageError, match="several checkpoints of step 5") as caught:
            ucformat.run(tmp_path / "run")
        assert "leave_out=[" in str(caught.value)
        assert ucformat.run(tmp_path / "run", leave_out="a").steps == (5,)
