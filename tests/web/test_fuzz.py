"""schemathesis asks for whatever the OpenAPI document allows and forbids, and compares each answer with it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.packed import write_packed
from tests.web.serving import bearer, serving, token
from tests.web.test_plane import LAYOUT, TENSORS, recorded
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.web.serving import Client

#: Filters, orders, slices and layouts are languages, of which the document does not say all.
NOT_CHECKED = "positive_data_acceptance"
HOOKS = Path(__file__).with_name("fuzz_hooks.py")


@pytest.fixture(params=["local", "all", "some"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Client, list[str]]]:
    """A server, and the arguments with which schemathesis is told of a token."""
    place = write_packed(LocalStore(tmp_path / "m"), TENSORS, block_bytes=256)
    tokens = [token("all"), token("some", "run = 'run7'")]
    name = request.param
    with ucformat.Catalog(str(tmp_path / "c.db")) as catalog:
        for run in ("run7", "other"):
            for step in (1, 2):
                recorded(tmp_path, catalog, run, step)
        catalog.alias("best", "run7@1")
        given = () if name == "local" else tokens
        with serving(catalog, {"m": place}, tokens=given) as ask:
            header = [] if name == "local" else ["--header", f"Authorization: Bearer {name}"]
            yield ask, header


def names_of(ask: Client, headers: dict[str, Any]) -> dict[str, list[Any]]:
    """What there is, by the names of parameters."""
    told = json.loads(ask("/v1/run7@latest", **headers).body)
    return {
        "ref": ["run7@latest", "m", "run7@1", "alias:best", told["id"], "other@1", "none"],
        "name": ["w", "half", "a/b %c.é", "eighth", "scalar", "nothing"],
        "state": ["weight", "exp_avg"],
        "id": [told["id"], "0"],
        "file": [tensor["file"] for tensor in told["tensors"]],
        "key": [
            *("", "zarr.json", "weight", "weight/w/zarr.json", "weight/w/c/0/0"),
            *("weight/half/c/0/0", "exp_avg/eighth/zarr.json", "weight/nothing/c/0/0"),
        ],
        "base": ["run7@1", "run7@2", "other@1", "m", "none"],
        "base_name": ["1", "a b", "..", "a/b"],
        "where": ["run = 'run7'", "step > 1", "metric.loss < 2", "state = 'deleted'"],
        "sort": ["newest", "-step", "metric.loss", "name"],
        "slice": ["...", "0:2", "1", "0:0", "-1", "0:2,1:"],
        "body": [
            {"layout": LAYOUT, "rank": 0},
            {"layout": LAYOUT, "rank": 5.0, "states": ["weight"]},
            {"layout": {"version": 1, "mesh": {"dp": 1}}, "rank": 0},
        ],
    }


def fuzz(ask: Client, header: list[str], folder: Path, examples: int) -> str:
    """Run schemathesis, and return what it prints."""
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not here: pip install 'ucformat[test]'")
    headers = _bearer(header)
    words = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{ask.url}/v1/openapi.json"),
        *("--checks", "all", "--exclude-checks", NOT_CHECKED),
        *("--exclude-path", "/v1/events"),  # it has no end: tests/web/test_events.py
        *("--max-examples", str(examples), "--seed", "1", "--no-color", *header),
        *("--phases", "examples,coverage,fuzzing", "--generation-database", "none"),
        *("--suppress-health-check", "filter_too_much"),
        *("--request-timeout", "60", "--continue-on-failure", "--warnings", "off"),
    ]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("UCP_")}
    environ["UCFORMAT_FUZZED"] = json.dumps(names_of(ask, headers))
    environ["SCHEMATHESIS_HOOKS"] = "tests.web.fuzz_hooks"
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.matrix
def test_answers_are_as_the_document_says(server: tuple[Client, list[str]], tmp_path: Path) -> None:
    told = fuzz(*server, tmp_path, 60)
    (tested,) = re.findall(r"Tested: (\d+)", told)
    document = json.loads(server[0]("/v1/openapi.json", **_bearer(server[1])).body)
    # without events and the document itself
    assert int(tested) == sum(len(item) for item in document["paths"].values()) - 2


def _bearer(header: list[str]) -> dict[str, Any]:
    return bearer(header[1].rpartition(" ")[2]) if header else {}
