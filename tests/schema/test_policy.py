"""The policy file: its schema, its errors, and the example in the docs."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.catalog.rows import keeps, scopes
from ucformat.catalog.retention import load_policy
from ucformat.errors import NotFound, UpgradeNeeded, UsageError
from ucformat.schema.policy import (
    Best,
    Keep,
    Last,
    Policy,
    duration_text,
    parse_duration,
    policy_json_schema,
)

DOCS = Path(__file__).parents[2] / "docs"


def document(**keep: Any) -> dict[str, Any]:
    return {"version": 1, "keep": keep}


def test_the_published_schema_is_current() -> None:
    """Else write it anew: json.dumps(policy_json_schema(), indent=2)."""
    published = (DOCS / "schemas" / "policy-v1.json").read_text()
    assert json.loads(published) == policy_json_schema()


def test_the_example_in_the_docs(tmp_path: Path) -> None:
    example, of_states = re.findall(
        r"```yaml\n(.*?)```", (DOCS / "retention.md").read_text(), re.DOTALL
    )
    path = tmp_path / "policy.yaml"
    path.write_text(of_states)
    assert [keep.states for keep in load_policy(path).keep] == [
        *((), ("weight",), ("weight", "master")),
    ]
    path.write_text(example)
    policy = load_policy(str(path))
    (keep,) = policy.keep
    assert set(keep.model_fields_set) == set(Keep.model_fields) - {"states"}
    assert policy.model_fields_set == set(Policy.model_fields)
    assert policy.grace == Policy.model_fields["grace"].default


def test_a_policy_is_what_its_file_says() -> None:
    policy = load_policy(
        {
            "version": 1,
            "scope": "run = 'a'",
            "keep": {
                "last": 5,
                "every": 1000,
                "best": [{"metric": "loss", "count": 3, "mode": "min", "group": "all"}],
                "younger": "48h",
                "where": ["step > 1", "step > 2"],
            },
            "grace": "0s",
        }
    )
    assert policy.keep == (
        Keep(  # type: ignore[call-arg]
            last=(Last(count=5),),
            every=1000,
            best=(Best(metric="loss", count=3, mode="min", group="all"),),
            younger=timedelta(hours=48),
            where=("step > 1", "step > 2"),
        ),
    )
    assert policy.grace == timedelta(0)
    assert policy.filters() == ("run = 'a'", "step > 1", "step > 2")
    assert policy.metrics() == {"loss"}


def test_what_is_not_said_has_its_default() -> None:
    policy = load_policy(document(where="step > 1"))
    assert policy.filters() == ("step > 1",)
    assert policy.metrics() == frozenset()
    assert policy.scope is None
    assert policy.grace == timedelta(days=7)
    assert load_policy(document(last=1)).filters() == ()
    best = {"metric": "m", "count": 1, "mode": "max"}
    assert load_policy(document(best=best)).keep[0].best == (
        Best(metric="m", count=1, mode="max", group="run"),
    )
    assert load_policy(document(last=[1, {"count": 2, "group": "all"}])).keep[0].last == (
        Last(count=1),
        Last(count=2, group="all"),
    )


@given(keeps, scopes, st.sampled_from([{}, {"grace": "3d"}]))
def test_a_policy_can_be_written_down_again(
    keep: dict[str, Any], scope: dict[str, Any], grace: dict[str, Any]
) -> None:
    policy = load_policy({**document(**keep), **scope, **grace})
    assert load_policy(json.loads(policy.model_dump_json(exclude_defaults=True))) == policy


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ({}, "keep: no rule: everything that nothing protects would be deleted"),
        ({"last": 0}, r"keep\.last\[0\]\.count: Input should be greater than or equal to 1"),
        ({"last": True}, r"keep\.last\[0\]\.count: Input should be a valid integer"),
        ({"last": "5"}, r"keep\.last\[0\]: '5' is not a mapping of count, group"),
        ({"last": []}, r"keep\.last: the list is empty"),
        ({"last": None}, "keep: 'last' has no value"),
        (
            {"last": {"count": 1, "grup": "all"}},
            r"keep\.last\[0\]: unknown key 'grup'; did you mean group\?",
        ),
        (
            {"evry": 5, 3: 4},
            r"keep: unknown key 'evry'; did you mean every\?; unknown key 3; there are last, every, ",
        ),
        ({"every": 0.5}, r"keep\.every: Input should be a valid integer"),
        ({"best": {"metric": "m", "count": 1}}, r"keep\.best\[0\]\.mode: Field required"),
        (
            {"best": {"metric": "m", "count": 1, "mode": "mix"}},
            r"keep\.best\[0\]\.mode: Input should be 'min' or 'max'",
        ),
        (
            {"best": {"metric": "m", "count": 1, "mode": "min", "group": "x"}},
            r"\.group: Input should be 'run' or 'all'",
        ),
        ({"best": "m"}, r"keep\.best\[0\]: 'm' is not a mapping of metric, count, mode, group"),
        ({"younger": 48}, r"keep\.younger: 48 is not a duration: write 90s, 15m, 48h, 7d or 2w"),
        ({"younger": "2 days"}, "'2 days' is not a duration"),
        ({"younger": "0h"}, r"keep\.younger: no checkpoint is younger than 0s"),
        ({"younger": "5300w"}, "'5300w' is more than a hundred years"),
        ({"where": ""}, r"keep\.where\[0\]: String should have at least 1 character"),
        ({"where": [3]}, r"keep\.where\[0\]: Input should be a valid string"),
    ],
)
def test_a_rule_that_cannot_be_meant(keep: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as e:
        load_policy({"version": 1, "keep": keep})
    assert e.value.hint
    assert "keep" in e.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "1"}, "version: Input should be 1"),
        ({"version": None}, "'version' has no value"),
        (
            {"keep": [1]},
            r"keep\[0\]: 1 is not a mapping of last, every, best, younger, where, states",
        ),
        ({"keep": []}, "keep: the list is empty"),
        ({"keep": [{"last": 1}, {"states": ["weight"]}]}, r"keep\[1\]: no rule"),
        ({"keep": {"last": 1, "states": "exp_avg"}}, r"keep\.states: no state is `weight`"),
        ({"keeps": {}}, r"unknown key 'keeps'; did you mean keep\?"),
        ({"group": "all"}, "unknown key 'group'; there are version, scope, keep, grace"),
        ({"scope": ""}, "scope: String should have"),
        ({"grace": "7"}, "grace: '7' is not a duration"),
        ({"grace": "-7d"}, "grace: '-7d' is not a duration"),
    ],
)
def test_a_document_that_is_no_policy(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_policy({**document(last=1), **change})


def test_without_keep_there_is_no_policy() -> None:
    with pytest.raises(UsageError, match="keep: Field required"):
        load_policy({"version": 1})


def test_a_newer_version_needs_an_upgrade() -> None:
    with pytest.raises(UpgradeNeeded, match="the policy has version 2"):
        load_policy({**document(), "version": 2})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "version: 1\nkeep: {last: 2\nrules: [", r"a\.yaml, line 3"),
        (
            "a.yaml",
            "version: 1\nkeep:\n  last: 2\n  last: 4\n",
            r"a\.yaml, line 4: 'last' is given twice",
        ),
        (
            "a.yaml",
            "x: !!python/object/apply:os.getcwd []",
            r"a\.yaml, line 1: could not determine a constructor",
        ),
        ("a.yaml", "", "None is not a mapping of version, scope, keep, grace"),
        ("a.yaml", "\x00", r"a\.yaml"),
        ("a.json", '{"version": 1,\n]', r"a\.json is not JSON: .*line 2"),
        (
            "a.json",
            '{"version": 1, "keep": {"last": 1, "last": 2}}',
            r"a\.json is not JSON: 'last' is given twice",
        ),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_policy(path)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no policy file"):
        load_policy(tmp_path / "nothing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_policy(tmp_path / "binary.yaml")


def test_json_and_yaml_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(document(last=2, younger="2d")))
    (tmp_path / "a.yaml").write_text("version: 1\nkeep:\n  last: 2\n  younger: 48h\n")
    assert load_policy(tmp_path / "a.json") == load_policy(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("48h", 172800), ("7d", 604800), ("2w", 1209600), ("0d", 0)],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@given(st.integers(0, 3_153_600_000))
def test_a_duration_survives_its_text(seconds: int) -> None:
    duration = timedelta(seconds=seconds)
    assert parse_duration(duration_text(duration)) == duration


def test_a_duration_is_in_its_largest_unit() -> None:
    assert [duration_text(timedelta(hours=h)) for h in (0, 0.5, 1, 36, 48, 168)] == [
        "0s",
        "30m",
        "1h",
        "36h",
        "2d",
        "1w",
    ]
