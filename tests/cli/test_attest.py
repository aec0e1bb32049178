"""`ucp attest`: one document of JSON, in either format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.cli.conftest import object_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run


def test_both_formats(run: Run, committed: Path) -> None:
    for form, member in (("cyclonedx", "bomFormat"), ("openlineage", "eventType")):
        text = run("attest", committed, "--format", form).stdout
        assert member in json.loads(text)
        assert json.loads(text) == object_of(
            run("attest", committed, "--format", form, "--json").stdout
        )
    assert "bomFormat" in json.loads(run("attest", committed).stdout)
