"""Virtual checkpoints: no byte moved, and read like any other as long as nothing changes."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ucformat
from tests.fakes import same
from tests.zero_files import FLAT, write_zero3
from ucformat import Layout
from ucformat.errors import (
    Conflict,
    IntegrityError,
    MissingData,
    UnsafeError,
    UnsupportedError,
    UsageError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ucformat.checkpoint import Checkpoint

ARRAYS = {
    (name, state): np.random.default_rng(i).normal(size=shape).astype(np.float32)
    for i, (name, shape) in enumerate({"embed": (37, 12), "up": (24, 12), "norm": (12,)}.items())
    for state in FLAT
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_zero3(tmp_path / "run", ARRAYS, 3)


@pytest.fixture
def ck(source: Path, tmp_path: Path) -> Checkpoint:
    return ucformat.convert(source, tmp_path / "virtual", virtual=True)


def holds(ck: Checkpoint, arrays: dict[tuple[str, str], NDArray[Any]] = ARRAYS) -> bool:
    return all(same(ck[key].read(), a) for key, a in arrays.items())


def size_of(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def test_it_reads_as_its_source_does(ck: Checkpoint, source: Path) -> None:
    foreign = ucformat.open(source)
    assert ck.kind == "ucformat"
    assert holds(ucformat.open(ck.url))
    assert ck.tensors == foreign.tensors
    assert (ck.metadata.groups, ck.metadata.step) == (
        foreign.metadata.groups,
        foreign.metadata.step,
    )
    assert dict(ck.objects) == dict(foreign.objects)
    assert [(entry.kind, entry.id) for entry in ck.manifest.lineage] == [("convert", foreign.id)]


def test_no_tensor_is_copied(tmp_path: Path) -> None:
    save_file({"big": np.zeros((1000, 1000), np.float32)}, tmp_path / "model.safetensors")
    ucformat.convert(tmp_path / "model.safetensors", tmp_path / "virtual", virtual=True)
    assert size_of(tmp_path / "virtual") < 10_000


def test_it_plans_and_slices(ck: Checkpoint) -> None:
    layout = Layout(
        {"tp": 2},
        [
            {"match": "norm", "place": ["replicate"]},
            {"match": "*", "place": [{"shard": 0, "over": "tp"}]},
        ],
    )
    plan = ck.plan(layout, 1, ["exp_avg"])
    assert same(plan.execute()["up", "exp_avg"], ARRAYS["up", "exp_avg"][12:])
    assert plan.bytes_read <= 1.1 * plan.bytes_needed
    assert same(
        ck["embed", "master"][5:9, 3:4], np.ascontiguousarray(ARRAYS["embed", "master"][5:9, 3:4])
    )


def test_a_virtual_one_of_a_virtual_one_points_to_the_files_themselves(
    ck: Checkpoint, tmp_path: Path
) -> None:
    again = ucformat.convert(ck, tmp_path / "again", virtual=True)
    assert again.manifest.sidecar is not None
    assert again.manifest.sidecar.roots == ck.manifest.sidecar.roots  # type: ignore[union-attr]
    assert holds(again)


def test_of_arrays_and_of_a_view(source: Path, tmp_path: Path) -> None:
    arrays = ucformat.convert(source, tmp_path / "arrays", chunk_bytes=256)
    seen = arrays.view([{"transpose": "up"}, {"rename": "up", "to": "pu"}])
    ck = ucformat.convert(seen, tmp_path / "virtual", virtual=True)
    assert same(ck["pu", "exp_avg"].read(), np.ascontiguousarray(ARRAYS["up", "exp_avg"].T))
    assert same(ck["embed", "exp_avg"].read(), ARRAYS["embed", "exp_avg"])
    report = ucformat.verify(ck)
    assert report
    assert report.bytes_verified > 0  # the chunks of what is whole keep their checksums


def test_what_is_computed_is_refused(source: Path, tmp_path: Path) -> None:
    view = ucformat.open(source, view=[{"cast": "up", "dtype": "bfloat16"}])
    with pytest.raises(
        UnsupportedError, match=r"up \(master\) has no bytes of its own(.|\n)*ucp convert"
    ):
        ucformat.convert(view, tmp_path / "virtual", virtual=True)
    assert not (tmp_path / "virtual" / "manifest.json").exists()


class TestChanges:
    """A file that is not what was registered is never served."""

    def file(self, source: Path) -> Path:
        return next(source.rglob("*zero_pp_rank_1_mp_rank_00_optim_states.pt"))

    def test_another_time(self, ck: Checkpoint, source: Path) -> None:
        assert holds(ck)
        os.utime(self.file(source), (1, 1))
        for opened in (ck, ucformat.open(ck.url)):
            with pytest.raises(
                IntegrityError, match=r"rank_1_mp.*has changed(.|\n)*register its checkpoint again"
            ):
                holds(opened)

    def test_another_size(self, ck: Checkpoint, source: Path) -> None:
        before = self.file(source).stat()
        with self.file(source).open("ab") as out:
            out.write(b"x")
        os.utime(self.file(source), ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(IntegrityError, match="has changed"):
            holds(ck)

    def test_gone(self, ck: Checkpoint, source: Path) -> None:
        self.file(source).unlink()
        with pytest.raises(MissingData, match="rank_1_mp"):
            holds(ck)

    def test_verify_says_which(self, ck: Checkpoint, source: Path) -> None:
        assert ucformat.verify(ck)
        os.utime(self.file(source), (1, 1))
        report = ucformat.verify(ck)
        assert {p.file for p in report.problems} == {
            f"roots/0/global_step5/{self.file(source).name}"
        }
        assert {p.name for p in report.problems} >= {"embed", "up"}

    def test_checksums_find_what_size_and_time_hide(self, source: Path, tmp_path: Path) -> None:
        ck = ucformat.convert(source, tmp_path / "virtual", virtual=True, checksums=True)
        report = ucformat.verify(ck)
        assert report
        assert report.bytes_unverified == 0
        path = self.file(source)
        before, data = path.stat(), bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert "digest differs" in str(ucformat.verify(ck).problems[0])
        with pytest.raises(IntegrityError, match="nothing was replaced"):
            ucformat.materialize(ck)
        assert ucformat.open(ck.url).manifest.attempt == ck.manifest.attempt
        part = ucformat.open(ck.url, view=[{"keep": "up"}])
        with pytest.raises(IntegrityError, match=path.name):
            ucformat.materialize(part, tmp_path / "made")

    @pytest.mark.parametrize("view", [None, [{"keep": "up"}], [{"cast": "*", "dtype": "float64"}]])
    @pytest.mark.parametrize("checksums", [True, False])
    def test_what_it_was_made_of_is_said_to_be_verified_if_it_was(
        self, source: Path, tmp_path: Path, checksums: bool, view: Any
    ) -> None:
        ucformat.convert(source, tmp_path / "virtual", virtual=True, checksums=checksums)
        ck = ucformat.open(tmp_path / "virtual", view=view)
        made = ucformat.materialize(ck, tmp_path / "made")
        unchecked = ucformat.materialize(ck, tmp_path / "unchecked", verify=False)
        converted = ucformat.convert(ck, tmp_path / "converted")
        for found, all_of_it in ((made, checksums), (unchecked, False), (converted, False)):
            assert found.manifest.verified is not None
            assert (found.manifest.verified.default, found.manifest.verified.but) == (all_of_it, ())


class TestRoots:
    """Files outside the checkpoint are read only where the opener allows it."""

    @pytest.fixture(autouse=True)
    def stranger(self, ck: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "stranger"))

    def test_by_default_nowhere(self, ck: Checkpoint, source: Path) -> None:
        opened = ucformat.open(ck.url)
        assert opened.names() == ["embed", "up", "norm"]
        with pytest.raises(UnsafeError, match=rf"{source}(.|\n)*UCP_ROOTS={source}"):
            holds(opened)

    @pytest.mark.parametrize("root", ["run", "."])
    def test_where_it_is_given(self, ck: Checkpoint, tmp_path: Path, root: str) -> None:
        assert holds(ucformat.open(ck.url, roots=[str(tmp_path / root)]))
        assert holds(ucformat.open(ck.url, roots=tmp_path / root))
        assert holds(
            ucformat.open(ck.url, roots=(str(r) for r in (tmp_path / "other", tmp_path / root)))
        )

    def test_not_beside_what_is_given(self, ck: Checkpoint, tmp_path: Path) -> None:
        with pytest.raises(UnsafeError):
            holds(ucformat.open(ck.url, roots=[str(tmp_path / "ru"), f"{tmp_path}/run/../other"]))

    def test_where_the_settings_say(
        self, ck: Checkpoint, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("UCP_ROOTS", f"/elsewhere,{source}")
        assert holds(ucformat.open(ck.url))

    def test_a_link_does_not_lead_out(self, ck: Checkpoint, source: Path, tmp_path: Path) -> None:
        (tmp_path / "allowed").mkdir()
        (tmp_path / "allowed" / "link").symlink_to(source)
        inside = ucformat.convert(
            ucformat.open(tmp_path / "allowed" / "link"), tmp_path / "linked", virtual=True
        )
        (tmp_path / "stranger" / "ucformat" / "roots.jsonl").unlink()
        with pytest.raises(UnsafeError):
            holds(ucformat.open(inside.url, roots=[str(tmp_path / "allowed")]))

    @pytest.mark.parametrize(
        "key", ["roots/0/../../secret", "roots/9/x", "roots/x/y", "roots/0/not_listed"]
    )
    def test_what_is_not_listed_is_never_read(self, ck: Checkpoint, source: Path, key: str) -> None:
        store = ucformat.open(ck.url, roots=[str(source)]).store
        with pytest.raises((IntegrityError, UnsafeError)):
            store.read(key)


def test_materialised_in_place_it_needs_its_source_no_more(ck: Checkpoint, source: Path) -> None:
    arrays = ucformat.materialize(ck)
    shutil.rmtree(source)
    again = ucformat.open(ck.url)
    assert again.id == arrays.id == ck.id
    assert again.manifest.sidecar is None
    assert holds(again)
    assert ucformat.verify(again)


def test_it_is_committed_like_any_other(ck: Checkpoint, source: Path) -> None:
    with pytest.raises(Conflict, match="already holds"):
        ucformat.convert(source, ck.url, virtual=True, checksums=True)
    again = ucformat.convert(source, ck.url, virtual=True, checksums=True, overwrite=True)
    assert holds(again)


@pytest.mark.parametrize("given", [{"checksums": True}, {"virtual": True, "chunk_bytes": 64}])
def test_arguments_that_make_no_sense(source: Path, tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ucformat.convert(source, tmp_path / "out", **given)
