"""Ranks that die, full disks, writers that are killed, ranks that disagree: one error, and nothing is half done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner

import ucformat
from tests.torch.faults_program import TIMEOUT, full_state
from tests.torch.ranks import KILLED, Ranks
from ucformat.cli.main import ucp
from ucformat.errors import NotFound

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return Ranks("tests.torch.faults_program")


def holds(place: Path, seed: int) -> bool:
    """Whether a whole checkpoint of the state of this seed lies there."""
    ck = ucformat.open(place)
    whole = {
        n: bool(torch.equal(torch.from_numpy(ck[n][...]), t)) for n, t in full_state(seed).items()
    }
    return (
        bool(ucformat.verify(ck))
        and whole == dict.fromkeys(whole, True)
        and ck.objects["step"] == seed
    )


def opens(place: Path) -> bool:
    try:
        ucformat.open(place)
    except NotFound:
        return False
    return True


def files(place: Path) -> set[str]:
    return {
        str(p.relative_to(place))
        for p in place.rglob("*")
        if p.is_file() and p.name != ".ucformat-lock"
    }


def attempts(place: Path) -> int:
    return len(list((place / "attempts").glob("*.json")))


def collect_garbage(place: Path, tmp_path: Path) -> None:
    """`ucp gc` of what interrupted writers left."""
    given = [
        "gc",
        str(place),
        "--grace",
        "0s",
        "--apply",
        "--yes",
        "--catalog",
        str(tmp_path / "catalog.db"),
    ]
    result = CliRunner().invoke(ucp, given)
    assert result.exit_code == 0, result.output


def check_survivors(found: list[Any], doomed: int) -> None:
    assert found[doomed] == KILLED
    for rank, seen in enumerate(found):
        if rank != doomed:
            assert seen["kind"] == "UcformatError"
            assert seen["message"].startswith(
                f"rank {doomed} died or has been unresponsive for {TIMEOUT:g} s: rank {rank} failed"
            )


@pytest.mark.front("zarr-0-overwrite")
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize(
    ("form", "doomed"), [("zarr", 0), ("zarr", 2), ("packed", 0), ("packed", 1)]
)
def test_a_rank_is_killed_in_a_save(
    ranks: Ranks, tmp_path: Path, form: str, doomed: int, overwrite: bool
) -> None:
    found = ranks.run("killed_in_save", 3, tmp_path, form=form, doomed=doomed, overwrite=overwrite)
    check_survivors(found, doomed)
    new, here, other = tmp_path / "new", tmp_path / "here", tmp_path / "other"
    assert holds(other, 1)
    assert holds(here, 2)
    assert not opens(new)
    place = here if overwrite else new
    assert attempts(place) == 1 + overwrite
    before = files(place)
    (identity, *rest) = ranks.run(
        "plain_save", 2, tmp_path, name=place.name, seed=5, form=form, overwrite=overwrite
    )
    assert set(rest) == {identity}
    assert holds(place, 5)
    assert before & files(place) != set()  # what was left is still there, and harms nobody
    collect_garbage(place, tmp_path)
    assert attempts(place) == 1
    assert before & files(place) <= {"manifest.json"}
    assert holds(place, 5)


def test_what_is_left_where_nothing_was_committed_is_removed_too(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run("killed_in_save", 2, tmp_path, form="packed", doomed=1, overwrite=False)
    new = tmp_path / "new"
    assert files(new)
    collect_garbage(new, tmp_path)
    assert not files(new)
    assert holds(tmp_path / "here", 2)


@pytest.mark.matrix
@pytest.mark.parametrize(("form", "doomed"), [("zarr", 1), ("packed", 0)])
def test_a_rank_is_killed_in_an_async_save(
    ranks: Ranks, tmp_path: Path, form: str, doomed: int
) -> None:
    found = ranks.run("killed_in_async_save", 2, tmp_path, form=form, doomed=doomed)
    assert found[doomed] == KILLED
    seen, again = found[1 - doomed]
    for error in (seen, again):
        assert error["kind"] == "UcformatError"
        assert f"rank {doomed} died" in error["message"]
    assert holds(tmp_path / "here", 2)
    assert holds(tmp_path / "other", 1)
    assert not opens(tmp_path / "more")
    ranks.run("plain_save", 2, tmp_path, name="here", seed=5, form=form, overwrite=True)
    assert holds(tmp_path / "here", 5)
    collect_garbage(tmp_path / "here", tmp_path)
    assert attempts(tmp_path / "here") == 1
    assert holds(tmp_path / "here", 5)


@pytest.mark.parametrize("doomed", [0, 1])
def test_a_full_disk_of_one_rank(ranks: Ranks, tmp_path: Path, doomed: int) -> None:
    found = ranks.run("disk_full", 2, tmp_path, doomed=doomed)
    assert len(found[0]) == 4
    for (name, seen, left), (_, other, _) in zip(*found, strict=True):
        assert seen["message"] == other["message"]
        assert seen["message"].startswith(f"rank {doomed}: cannot write ")
        assert "No space left on device" in seen["message"] or "File too large" in seen["message"]
        assert left == []
        assert holds(tmp_path / name, 2)


def test_saves_in_the_background(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run("async_life", 2, tmp_path)
    for rank, out in enumerate(found):
        staged, identity, committed, error = out["copied"]
        assert (staged, committed, error) == (True, True, None)
        assert ucformat.open(tmp_path / "copied").id == identity
        assert out["under way"] == (True, False, False)
        assert out["two under way"] == (False, False)
        assert out["impatient"] == "TimeoutError"
        assert out["room made"] == (True, True)
        assert out["back-pressure"] == (True, True)
        seen, done, committed = out["died"]
        assert (done, committed) == (True, False)
        if rank:
            assert "rank 1: the process that wrote" in seen["message"]
            assert "was killed by signal 9" in seen["message"]
        else:
            assert "rank 1 died" in seen["message"]
        assert "rank 1" in out["unseen"]["message"]
        assert out["unseen"]["kind"] == "UcformatError"
        assert out["unstaged"]["message"].startswith(
            "rank 1: cannot stage a copy of the state: RuntimeError"
        )
        assert out["buffers"][0] == out["buffers"][1]
    whole = {
        "copied": 1,
        "first": 2,
        "second": 3,
        "third": 4,
        "fourth": 5,
        "after": 7,
        "before": 10,
        "idle": 11,
    }
    for name, seed in whole.items():
        assert holds(tmp_path / name, seed)
    for name in ("dead", "unseen", "refused", "unstaged"):
        assert not opens(tmp_path / name)
    assert not files(tmp_path / "unstaged")


EXPECTED = {
    "conflict": ("Conflict", "already holds the committed checkpoint"),
    "object": ("UsageError", "the object 'a' has a different value on rank 1 than on rank 0"),
    "tensor": ("UsageError", "w (weight) has a different value on rank 1 than on rank 0"),
    "parts": ("UsageError", "w (weight) has a different value on rank 1 than on rank 0"),
    "shape": ("UsageError", "w (weight) is float32 (2,) on rank 0, but float32 (3,) on rank 1"),
    "dtype": ("UsageError", "w (weight) is float32 (2,) on rank 0, but int32 (2,) on rank 1"),
    "terms": ("UsageError", "rank 1 saves with "),
    "collect": ("UnsupportedError", "rank 1: a function has no JSON form and cannot be pickled"),
    "async": ("UnsupportedError", "rank 1: a function has no JSON form and cannot be pickled"),
    "hole": ("CoverageError", "w (weight) of shape (6,): no rank or file holds [3:6]"),
    "open": ("NotFound", "rank 0: "),
    "fit": ("StateMismatch", "both (weight) is [204], in the checkpoint [203]"),
}


def test_ranks_that_disagree(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run("manners", 2, tmp_path)
    for name, (kind, words) in EXPECTED.items():
        assert first[name]["kind"] == second[name]["kind"] == kind
        assert first[name]["message"] == second[name]["message"]
        assert words in first[name]["message"]
    assert holds(tmp_path / "taken", 1)
    assert ucformat.open(tmp_path / "taken").id == first["id"]
    for place in ("x", "x0", "x1", "nowhere"):
        assert not files(tmp_path / place)
    assert first["first"] == ([0.0, 0.0, 0.0], 0, {"rank": 0})
    assert second["first"] == ([0.0, 0.0, 0.0], 0, {"rank": 1})
