"""What the hub's clients read is what an export writes, and nothing that is damaged looks whole."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pytest

import ucformat
from tests.exporters.sources import opened, universal, zero3
from tests.web.serving import damaged, run_client, serving
from ucformat.errors import ChecksumError, MissingData
from ucformat.geometry.tensor import Extent
from ucformat.jobs.bands import FileRanges
from ucformat.jobs.export import plan_export
from ucformat.jobs.inputs import Input
from ucformat.web.library import Presentation

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.checkpoint import Checkpoint

ARRAYS = {
    (f"layers.{n}.weight", "weight"): np.arange(n, n + 40 * 30, dtype="f4").reshape(40, 30)
    for n in range(5)
}
SMALL = Presentation(options={"max_shard_bytes": 10_000})


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def of_kind(kind: str, folder: Path) -> Checkpoint:
    if kind == "deepspeed":
        return ucformat.open(zero3(folder / "z")[0])
    return universal(folder / "u", ARRAYS)


@pytest.mark.parametrize("kind", ["universal", "deepspeed"])
def test_files_are_those_of_an_export(tmp_path: Path, kind: str) -> None:
    ck = of_kind(kind, tmp_path)
    ucformat.export(ck, tmp_path / "e", "safetensors", max_shard_bytes=10_000)
    exported = files_of(tmp_path / "e")
    assert len(exported) > 2
    with serving(places={"m": ck}, presentation=SMALL) as ask:
        info = json.loads(ask("/api/models/m/revision/main").body)
        assert {f["rfilename"]: f["size"] for f in info["siblings"]} == {
            name: len(data) for name, data in exported.items()
        }
        for name, data in exported.items():
            whole = ask(f"/m/resolve/{info['sha']}/{name}")
            assert (whole.status, whole.body) == (200, data)
            assert whole.headers["x-repo-commit"] == info["sha"]
            chance = np.random.default_rng(len(data))
            for first, last in np.sort(chance.integers(0, len(data), (4, 2))):
                part = ask(f"/m/resolve/main/{name}", Range=f"bytes={first}-{last}")
                assert (part.status, part.body) == (206, data[first : last + 1])
                assert part.headers["content-range"] == f"bytes {first}-{last}/{len(data)}"


def test_ranges_and_conditions(tmp_path: Path) -> None:
    with serving(places={"m": of_kind("universal", tmp_path)}) as ask:
        path = "/m/resolve/main/model.safetensors"
        whole = ask(path)
        etag = whole.headers["etag"]
        pinned = f"/m/resolve/{whole.headers['x-repo-commit']}/model.safetensors"
        moved = ask(path, "HEAD")
        assert (moved.status, moved.headers["location"]) == (307, pinned)
        head = ask(pinned, "HEAD")
        assert (head.status, head.body) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.body))
        assert ask(path, Range="bytes=-7").body == whole.body[-7:]
        assert ask(path, Range="bytes=9-").body == whole.body[9:]
        assert ask(path, Range=f"bytes={len(whole.body)}-").status == 416
        assert ask(path, Range="bytes=0-1,4-5").body == whole.body
        assert ask(path, If_None_Match=etag).status == 304
        assert ask(path, Range="bytes=0-1", If_Range=etag).status == 206
        assert ask(path, Range="bytes=0-1", If_Range='"other"').body == whole.body


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/models/none", "RepoNotFound"),
        ("/none/resolve/main/config.json", "RepoNotFound"),
        ("/m/resolve/77/model.safetensors", "RevisionNotFound"),
        ("/m/resolve/main/none.json", "EntryNotFound"),
        ("/m/resolve/main/..%2f..%2fetc%2fpasswd", "EntryNotFound"),
        ("/%2Fetc/resolve/main/passwd", "RepoNotFound"),
    ],
)
def test_what_is_not_there(tmp_path: Path, path: str, code: str) -> None:
    with serving(places={"m": of_kind("universal", tmp_path)}) as ask:
        answer = ask(path)
        assert (answer.status, answer.headers["x-error-code"]) == (404, code)


def test_a_damaged_file_never_looks_whole(tmp_path: Path) -> None:
    with serving(places={"m": damaged(tmp_path / "u")}) as ask:
        with pytest.raises(http.client.IncompleteRead):
            ask("/m/resolve/main/model.safetensors")
        with pytest.raises(http.client.IncompleteRead):
            ask("/m/resolve/main/model.safetensors", Range=f"bytes=-{1 << 20}")
        intact = ask("/m/resolve/main/model.safetensors", Range=f"bytes=0-{2 << 20}")
        assert len(intact.body) == (2 << 20) + 1


def test_what_is_read_again_is_compared_again(tmp_path: Path) -> None:
    folder, _ = zero3(tmp_path / "z", scale=9)
    ck = ucformat.open(folder)
    (planned,) = [f for f in plan_export(ck, "safetensors").files if "safetensors" in f.key]
    file, source = FileRanges(planned), Input(ck, verify=True, shared=True)
    verifier = source.verifier
    assert verifier is not None
    with source.task() as sums:
        file.read(source, 0, file.nbytes)
    assert sums
    verifier.forget(sums)
    assert not verifier.unfinished()
    extent = next(iter(ck.source.extents(next(iter(ck.tensors)))))
    assert isinstance(extent, Extent)
    damaged = folder / extent.file
    data = bytearray(damaged.read_bytes())
    data[extent.offset] ^= 1
    damaged.write_bytes(data)

    def read_again() -> None:
        with source.task():
            file.read(source, 0, file.nbytes)
            verifier.complete()

    with pytest.raises(ChecksumError):
        read_again()


CLIENT = """
import sys
from huggingface_hub import HfApi, snapshot_download, get_safetensors_metadata, HfFileSystem
folder = snapshot_download("m", revision="latest", local_dir=sys.argv[1])
api = HfApi()
assert api.repo_exists("m") and not api.repo_exists("n")
assert api.file_exists("m", "model.safetensors.index.json")
paths = [file.path for file in api.list_repo_tree("m", recursive=True)]
assert [file.path for file in api.get_paths_info("m", paths[:2])] == paths[:2]
assert sum(get_safetensors_metadata("m").parameter_count.values()) == 6000
assert len(HfFileSystem().ls("ucformat/m")) == len(paths)
"""


def test_the_hub_s_own_client(tmp_path: Path) -> None:
    ck = of_kind("universal", tmp_path)
    ucformat.export(ck, tmp_path / "e", "safetensors", max_shard_bytes=10_000)
    with serving(places={"m": ck}, presentation=SMALL) as ask:
        run_client(CLIENT, str(tmp_path / "d"), server=ask, home=tmp_path / "home")
    downloaded = {n: d for n, d in files_of(tmp_path / "d").items() if not n.startswith(".cache")}
    assert downloaded == files_of(tmp_path / "e")


def test_another_configuration_is_another_commit(tmp_path: Path) -> None:
    ck, commits = of_kind("universal", tmp_path), set()
    (tmp_path / "a").mkdir()
    (tmp_path / "v.yaml").touch()
    for text, name in (("{}", "w"), ('{"model_type": "llama"}', "w"), ("{}", "v")):
        (tmp_path / "a" / "config.json").write_text(text)
        (tmp_path / "v.yaml").write_text(
            f"version: 1\nview: [{{rename: 'layers.0.weight', to: '{name}'}}]\n"
        )
        presentation = Presentation(str(tmp_path / "v.yaml"), {"assets": str(tmp_path / "a")})
        with serving(places={"m": ck}, presentation=presentation) as ask:
            commits.add(json.loads(ask("/api/models/m").body)["sha"])
    assert len(commits) == 3


def test_names_of_files_are_only_text(tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    names = [
        'tokenizer_"quoted".json',
        "tokenizer_\n.json",
        "tokenizer_é.json",
        "tokenizer_<script>.json",
    ]
    assets.mkdir()
    for name in ("config.json", *names):
        (assets / name).write_text("{}")
    presentation = Presentation(options={"assets": str(assets)})
    with serving(places={"m": of_kind("universal", tmp_path)}, presentation=presentation) as ask:
        listed = [f["path"] for f in json.loads(ask("/api/models/m/tree/main").body)]
        for name in names:
            answer = ask(f"/m/resolve/main/{quote(name)}")
            assert (answer.status == 200) == (name in listed), name
            assert "\n" not in answer.headers.get("content-disposition", "")
        assert set(names) - set(listed) == {names[1]}


DOWNLOAD = """
import sys
from huggingface_hub import hf_hub_download
hf_hub_download("m", "model.safetensors", local_dir=sys.argv[1])
"""


def test_an_interrupted_download_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(1 << 20, dtype="f4").reshape(1024, 1024)
    ck = ucformat.convert(opened({("w", "weight"): array}), tmp_path / "u")
    read, faults = FileRanges.read, [MissingData("the disk is gone", hint="wait")]

    def fail_once(file: FileRanges, source: Input, start: int, stop: int) -> Any:
        if start >= 1 << 20 and faults:
            raise faults.pop()
        return read(file, source, start, stop)

    with serving(places={"m": ck}) as ask:
        whole = ask("/m/resolve/main/model.safetensors")
        monkeypatch.setattr(FileRanges, "read", fail_once)
        with caplog.at_level("INFO", "ucformat.web"):
            run_client(DOWNLOAD, str(tmp_path / "d"), server=ask, home=tmp_path / "home")
    assert (tmp_path / "d" / "model.safetensors").read_bytes() == whole.body
    assert "the response was broken off: the disk is gone" in caplog.text
