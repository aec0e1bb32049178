"""`ucp sign`, and `ucp verify --signed-by`: 6 if it is not signed as was asked for."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from tests.cli.conftest import object_of
from tests.keys import write_keys

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.cli.conftest import Run


def test_signed_and_verified(
    run: Run, committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, keys = tmp_path / "ck", write_keys(tmp_path, "alice", password=b"secret")
    shutil.copytree(committed, place)
    assert "is not signed" in run("verify", place, "--signed-by", keys.public, code=6).stderr
    assert "set UCP_KEY_PASSWORD" in run("sign", place, "--key", keys.private, code=2).stderr
    monkeypatch.setenv("UCP_KEY_PASSWORD", "secret")
    result = run("sign", place, "--key", keys.private)
    assert result.stdout.startswith(f"{place}/manifest.json.sig\n  signed: the manifest")
    assert run("sign", place, "--key", keys.private, code=4).stderr.startswith("error: ")
    lines = run("verify", place, "--signed-by", keys.public).stdout.splitlines()
    assert lines[:2] == [f"{place} is intact", f"  signed by {keys.public}: the manifest"]
    only = run("verify", place, "--signed-by", keys.public, "--signature-only", "--json")
    assert object_of(only.stdout)["signed_by"] == str(keys.public)
    signed = object_of(
        run("sign", place, "--key", keys.private, "--files", "--overwrite", "--json").stdout
    )
    assert signed["files"] > 1
    found = object_of(run("verify", place, "--signed-by", keys.public, "--json").stdout)
    assert (found["signed_by"], found["signed_files"]) == (str(keys.public), signed["files"] - 1)
    run("verify", place, "--signature-only", code=2)


def test_the_trusted_signers(
    run: Run, committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, file = write_keys(tmp_path, "alice"), tmp_path / "ck.sig"
    run("sign", committed, "--key", keys.private, "--signature", file)
    line = ["verify", committed, "--signature", file, "--signature-only", "--signed-by", "trusted"]
    assert "the setting `signers` is empty" in run(*line, code=2).stderr
    monkeypatch.setenv("UCP_SIGNERS", str(keys.public))
    assert f"is signed by {keys.public}" in run(*line).stdout
