"""Links instead of copies: which files are shared, and when that is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ucformat
from tests.exporters.sources import opened, random_arrays, universal
from tests.exporters.test_export import SMALL, same, tensors_of
from ucformat.cli.main import ucp
from ucformat.errors import UnsafeError, UnsupportedError, UsageError
from ucformat.settings import using


@pytest.fixture(params=[{}, SMALL], ids=["one file", "shards"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder of safetensors files with a configuration."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text("{}")
    source = opened(random_arrays(5))
    ucformat.export(
        source, tmp_path / "hf", "safetensors", assets=str(tmp_path / "assets"), **request.param
    )
    return tmp_path / "hf"


def test_a_hard_link_shares_a_file_that_nobody_writes(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsafeError, match="can be written"):
        ucformat.export(model, tmp_path / "out", "safetensors", link="hard")
    assert not any((tmp_path / "out").rglob("*.safetensors"))
    done = ucformat.export(model, tmp_path / "out", "safetensors", link="hard", read_only=True)
    assert not done.verified
    same(tensors_of(tmp_path / "out"), random_arrays(5))
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert file.samefile(model / file.name)
        assert stat.S_IMODE(file.stat().st_mode) & 0o222 == 0
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    ucformat.export(
        model, tmp_path / "again", "safetensors", link="hard"
    )  # they cannot be written any more
    assert {p.name for p in (tmp_path / "again").iterdir()} == {p.name for p in model.iterdir()}


def test_the_files_of_a_universal_checkpoint_are_linked(model: Path, tmp_path: Path) -> None:
    ck = ucformat.convert(model, tmp_path / "u", weights="safetensors")
    assert ck.hf_url is not None
    ucformat.export(ck, tmp_path / "out", "safetensors", link="hard", read_only=True)
    same(tensors_of(tmp_path / "out"), random_arrays(5))
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert file.samefile(Path(ck.hf_url) / file.name)
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert ucformat.verify(ck)


def test_links_have_the_fingerprints_of_their_source(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it records any: what is linked is not read."""
    read: list[object] = []
    monkeypatch.setattr("ucformat.jobs.fingerprints.read_fingerprint", lambda *_: read.append(0))
    ck = ucformat.convert(model, tmp_path / "u", weights="safetensors")
    url = f"sqlite:///{tmp_path}/catalog.db"
    with using(catalog=url):
        for source, place in ((ck, "a"), (model, "b")):
            ucformat.export(source, tmp_path / place, "safetensors", link="hard", read_only=True)
    with ucformat.Catalog(url) as catalog:
        ours, theirs = (
            {t.name: t.digest for t in catalog.tensors(ucformat.open(tmp_path / place).id)}
            for place in "ab"
        )
    assert ours == {t.name: f"fingerprint:{t.fingerprint}" for t in ck.manifest.tensors}
    empty = f"fingerprint:{'0' * 32}"
    assert (set(theirs.values()), read) == ({None, empty}, [])


def test_a_reflink_shares_blocks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a system call that copies, since few file systems of test machines have reflinks."""

    def clone(made: int, request: int, taken: int) -> int:
        assert request == 0x40049409
        os.sendfile(made, taken, 0, 1 << 30)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    run = CliRunner().invoke(
        ucp, ["export", "safetensors", str(model), str(tmp_path / "out"), "--link"]
    )
    assert run.exit_code == 0, run.stderr
    same(tensors_of(tmp_path / "out"), random_arrays(5))
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in model.iterdir()}


def test_a_file_system_without_reflinks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    with pytest.raises(UnsupportedError, match="no reflinks") as raised:
        ucformat.export(model, tmp_path / "out", "safetensors", link="reflink")
    assert "--link=hard" in str(raised.value.hint)
    ucformat.export(model, tmp_path / "out", "safetensors")  # nothing is in the way
    same(tensors_of(tmp_path / "out"), random_arrays(5))


def test_shards_in_subfolders_keep_their_paths(model: Path, tmp_path: Path) -> None:
    """Two shards of one name in two folders are two files, and the index names both."""
    index = model / "model.safetensors.index.json"
    if not index.exists():
        return
    found = json.loads(index.read_text())
    places = {
        file: f"{'ab'[n % 2]}/part{n // 2}.safetensors"
        for n, file in enumerate(set(found["weight_map"].values()))
    }
    for file, place in places.items():
        (model / place).parent.mkdir(exist_ok=True)
        (model / file).rename(model / place)
    found["weight_map"] = {name: places[file] for name, file in found["weight_map"].items()}
    index.write_text(json.dumps(found))
    ucformat.export(model, tmp_path / "out", "safetensors", link="hard", read_only=True)
    same(tensors_of(tmp_path / "out"), random_arrays(5))
    for place in places.values():
        assert (tmp_path / "out" / place).samefile(model / place)


def test_what_cannot_be_linked(model: Path, tmp_path: Path) -> None:
    ck = universal(tmp_path / "u", random_arrays(5))
    tries: list[tuple[Any, dict[str, Any]]] = [
        (ck, {}),
        (ucformat.open(model), {"cast": "float32"}),
        (ucformat.open(model).view([{"drop": "*layers.0.*"}]), {}),
    ]
    for source, options in tries:
        with pytest.raises(UnsupportedError, match="nothing to link"):
            ucformat.export(source, tmp_path / "out", "safetensors", link="hard", **options)
    with pytest.raises(UnsupportedError, match="not on a local disk"):
        ucformat.export(model, "memory://linked", "safetensors", link="hard", read_only=True)
    with pytest.raises(UsageError, match="no links of the kind 'soft'"):
        ucformat.export(model, tmp_path / "out", "safetensors", link="soft")


def test_where_no_hard_link_can_be_made(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def on_another_disk(source: Any, *args: Any, **options: Any) -> None:
        if str(source).startswith(f"{model}/"):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        link(source, *args, **options)

    monkeypatch.setattr(os, "link", on_another_disk)
    with pytest.raises(UnsupportedError) as error:
        ucformat.export(model, tmp_path / "out", "safetensors", link="hard", read_only=True)
    assert error.value.hint == "leave out --link for a copy"
    assert not any((tmp_path / "out").rglob("*.safetensors"))


def test_a_destination_that_is_a_file_has_no_other_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is the file, so it has no other name"):
        ucformat.export(model, tmp_path / "whole.npz", "npz", name="other.npz")
