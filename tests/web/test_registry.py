"""Clients of registries get the files of the hub, by digests that are true."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.web.serving import serving
from tests.web.test_hub import SMALL, files_of, of_kind

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_manifest_names_the_files(tmp_path: Path) -> None:
    ck = of_kind("deepspeed", tmp_path)
    ucformat.export(ck, tmp_path / "e", "safetensors", max_shard_bytes=10_000)
    exported = files_of(tmp_path / "e")
    with serving(places={"m": ck}, presentation=SMALL) as ask:
        assert ask("/v2/").status == 200
        assert json.loads(ask("/v2/m/tags/list").body) == {"name": "m", "tags": ["latest"]}
        answer = ask("/v2/m/manifests/latest", Accept=MANIFEST)
        digest = f"sha256:{hashlib.sha256(answer.body).hexdigest()}"
        assert answer.headers["docker-content-digest"] == digest
        assert answer.headers["content-type"] == MANIFEST
        assert ask(f"/v2/m/manifests/{digest}").body == answer.body
        assert ask("/v2/m/manifests/latest", "HEAD").headers["docker-content-digest"] == digest
        manifest = json.loads(answer.body)
        layers = {
            layer["annotations"]["org.opencontainers.image.title"]: layer
            for layer in manifest["layers"]
        }
        assert layers.keys() == exported.keys()
        for name, data in exported.items():
            assert layers[name]["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
            assert layers[name]["size"] == len(data)
            assert ask(f"/v2/m/blobs/{layers[name]['digest']}").body == data
        config = ask(f"/v2/m/blobs/{manifest['config']['digest']}")
        assert len(config.body) == manifest["config"]["size"]
    kept = list((tmp_path / "cache").rglob("*"))
    assert sum(file.is_file() for file in kept) == len(exported)
    with serving(places={"m": ck}, presentation=SMALL) as ask:
        assert ask("/v2/m/manifests/latest").body == answer.body


def test_what_is_not_there(tmp_path: Path) -> None:
    with serving(places={"m": of_kind("universal", tmp_path)}) as ask:
        for path, code in {
            "/v2/n/manifests/latest": "NAME_UNKNOWN",
            "/v2/m/manifests/7": "NAME_UNKNOWN",
            f"/v2/m/blobs/sha256:{'0' * 64}": "BLOB_UNKNOWN",
            f"/v2/m/manifests/sha256:{'0' * 64}": "MANIFEST_UNKNOWN",
            "/v2/m/else/latest": "UNSUPPORTED",
        }.items():
            answer = ask(path)
            assert answer.status == 404
            assert json.loads(answer.body)["errors"][0]["code"] == code, path
