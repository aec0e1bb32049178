"""`ucp tag`, `ucp metric`, `ucp note`, `ucp hold`, `ucp release`, `ucp log`: what people say of checkpoints."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.conftest import object_of
from ucformat.catalog import labels
from ucformat.texts import ago

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Run
    from ucformat.catalog.entries import Entry


def test_tags(run: Run, catalog: Path, entry: Callable[[str], Entry]) -> None:
    assert run("tag", "run7@1000", "paper", "a tag").stdout == "run7@1000: a tag, paper\n"
    found = object_of(run("tag", "run7@1000", "good", "--json").stdout)
    assert found == {
        "id": entry("run7@1000").id,
        "name": "run7@1000",
        "tags": ["a tag", "good", "paper"],
    }
    assert run("tag", "run7@1000", "good", "-q").stdout == ""
    assert run("tag", "run7@1000", " bad", code=2).stdout == ""
    assert "run7@1000" in run("tag", "run7@999", "good", code=3).stderr.replace(
        "'run7'", "run7@1000"
    )


def test_metrics(run: Run, catalog: Path, entry: Callable[[str], Entry]) -> None:
    assert run("metric", "run7@1000", "acc=0.7", "val_loss=nan", "x=-1e-3").stdout == (
        "run7@1000: acc 0.7, val_loss nan, x -0.001\n"
    )
    found = object_of(run("metric", "run7@1000", "acc=inf", "--json").stdout)
    assert found["metrics"] == {
        "acc": {"$float": "inf"},
        "val_loss": {"$float": "nan"},
        "x": -0.001,
    }
    for wrong in ("acc", "acc=", "acc=much", "=1"):
        assert "NAME=VALUE" in run("metric", "run7@1000", "y=1", wrong, code=2).stderr
    assert "y" not in entry("run7@1000").metrics


def test_notes(run: Run, catalog: Path) -> None:
    run("note", "run7@1000", "looks good")
    found = object_of(run("note", "run7@1000", "is good", "--json").stdout)
    assert [n["text"] for n in found["notes"]] == ["looks good", "is good"]
    assert run("note", "run7@1000", " ", code=2).stdout == ""


def test_holds(run: Run, catalog: Path, entry: Callable[[str], Entry]) -> None:
    assert (
        run("hold", "run7@1000", "--reason", "paper").stdout
        == "run7@1000: hold 1, until it is released\n"
    )
    found = object_of(
        run("hold", "run7@1000", "--reason", "eval", "--until", "30d", "--json").stdout
    )
    assert list(found) == ["id", "name", "hold"]
    assert list(found["hold"]) == ["number", "reason", "until", "created", "who"]
    assert run("hold", "run7@1000", "--reason", "more", "-q").stdout == "3\n"
    assert [h.reason for h in entry("run7@1000").holds] == ["paper", "eval", "more"]
    assert "no hold 9" in run("release", "run7@1000", "--hold", 9, code=3).stderr
    assert run("release", "run7@1000", "--hold", 2).stdout == "run7@1000: 1 hold released, 2 left\n"
    found = object_of(run("release", "run7@1000", "--json").stdout)
    assert found["released"] == 2
    assert found["holds"] == []
    assert run("release", "run7@1000", "-q").stdout == "0\n"
    assert "--reason" in run("hold", "run7@1000", code=2).stderr


@pytest.mark.parametrize(
    ("until", "end"),
    [
        ("2099-12-31", datetime(2099, 12, 31, 23, 59, 59, 999999, UTC)),
        ("2099-12-31T12:00", datetime(2099, 12, 31, 12, tzinfo=UTC)),
        ("2099-12-31T12:00+02:00", datetime(2099, 12, 31, 10, tzinfo=UTC)),
        ("2w", None),
        ("12h", None),
    ],
)
def test_until(
    run: Run, catalog: Path, entry: Callable[[str], Entry], until: str, end: Any
) -> None:
    run("hold", "run7@1000", "--reason", "r", "--until", until)
    found = entry("run7@1000").holds[0].until
    assert found is not None
    span = {"2w": timedelta(days=14), "12h": timedelta(hours=12)}.get(until, timedelta(0))
    assert abs(found - (end or datetime.now(UTC) + span)) < timedelta(minutes=1)


@pytest.mark.parametrize("until", ["tomorrow", "30", "2099-13-01", "3y", "2020-01-01"])
def test_until_what_is_no_time_to_come(run: Run, catalog: Path, until: str) -> None:
    assert run("hold", "run7@1000", "--reason", "r", "--until", until, code=2).stdout == ""


def test_the_log(run: Run, catalog: Path, entry: Callable[[str], Entry]) -> None:
    run("tag", "run7@1000", "good")
    run("hold", "run7@2000", "--reason", "a\ttab\nand more")
    events = object_of(run("log", "run7@1000", "--json").stdout)["events"]
    assert [e["action"] for e in events] == ["tag", "record"]
    assert list(events[0]) == ["at", "who", "action", "id", "detail"]
    assert events[0]["detail"] == {"tags": ["good"]}
    assert [e["action"] for e in object_of(run("log", "-n", 2, "--json").stdout)["events"]] == [
        "hold",
        "tag",
    ]
    cells = run("log", "-q", "-n", 1).stdout.rstrip("\n").split("\t")
    assert cells[2:4] == ["hold", entry("run7@2000").id]
    assert json.loads(cells[4])["reason"] == "a\ttab\nand more"
    assert run("log").stdout.splitlines()[0].split() == [
        "when",
        "what",
        "checkpoint",
        "who",
        "detail",
    ]


def test_interrupted_it_has_not_happened(
    run: Run, catalog: Path, entry: Callable[[str], Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        add_tags(*arguments, **options)
        raise KeyboardInterrupt

    add_tags = labels.add_tags
    monkeypatch.setattr(labels, "add_tags", interrupted)
    assert run("tag", "run7@1000", "good", code=130).stderr.strip() == "interrupted"
    assert entry("run7@1000").tags == ()


def test_ages() -> None:
    now = datetime(2026, 1, 10, tzinfo=UTC)
    spans = [
        timedelta(seconds=-5),
        timedelta(seconds=119),
        timedelta(minutes=119),
        timedelta(hours=47),
        timedelta(9),
    ]
    assert [ago(now - s, now) for s in spans] == ["0s", "119s", "119m", "47h", "9d"]


def test_a_tag_is_taken_off_with_a_reason(run: Run, entry: Callable[[str], Entry]) -> None:
    run("tag", "run7@1000", "good", "oops")
    assert run("untag", "run7@1000", "oops", code=2).stdout == ""
    assert run("untag", "run7@1000", "oops", "--reason", "a slip").stdout == "run7@1000: good\n"
    assert (
        object_of(run("untag", "run7@1000", "good", "--reason", "x", "--json").stdout)["tags"] == []
    )
    [last] = object_of(run("log", "run7@1000", "-n", 1, "--json").stdout)["events"]
    assert (last["action"], last["detail"]) == ("untag", {"tags": ["good"], "reason": "x"})
    assert (
        "does not have the tag 'good'"
        in run("untag", "run7@1000", "good", "--reason", "x", code=3).stderr
    )
    run("tag", "run7@1000", "kept", "--permanent")
    assert "is permanent" in run("untag", "run7@1000", "kept", "--reason", "x", code=6).stderr
    assert entry("run7@1000").tags == ("kept",)
