"""Damaged and hostile checkpoints as their user meets them: the command line in a process of its own.

Each is handled, or gets its own exit code and a message that names what is wrong and says what to
do next; and nothing is executed, or written anywhere but in the target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests import forkserver
from tests.fakes import Arrays, manifest_file, random_array, same
from tests.sources.torch_files import call, dictionary, glob, pickled, save, tensor, text
from tests.storage.faulty import FaultyStore
from tests.tables import changed_entry
from tests.zero_files import FLAT, a_list, mapping, write_zero3
from ucformat.errors import NotACheckpoint, NotFound, UcformatError
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable

    Ucp = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parents[2]
ODD_NAMES = (
    "../../x",
    "a",
    "a/b",
    "zarr.json",
    "n" * 300,
    "Case",
    "case",
    "/etc/passwd",
    "..",
    "c",
    "__init__",
    "",
)


def arrays(*names: str) -> Arrays:
    return {
        (name, state): random_array((9 + i, 14), "float32", 10 * i + j)
        for i, name in enumerate(names)
        for j, state in enumerate(FLAT)
    }


TRUTH = arrays("up.weight", "down.weight")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A DeepSpeed checkpoint of ZeRO 3 and two ranks."""
    return write_zero3(tmp_path / "source", TRUTH, ranks=2)


@pytest.fixture
def universal(tmp_path: Path, source: Path) -> Path:
    ucformat.convert(source, tmp_path / "universal", chunk_bytes=128, shard_bytes=256)
    return tmp_path / "universal"


def listing(root: Path, *, without: Path | None = None) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    files = (p for p in sorted(root.rglob("*")) if p.is_file())
    return {str(p): p.read_bytes() for p in files if without is None or without not in p.parents}


@pytest.fixture
def ucp(tmp_path: Path) -> Ucp:
    """`ucp(*arguments, code=…)`: runs it and sees that nothing but `<tmp>/target` and below has changed."""

    def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        place = tmp_path / "place"
        place.mkdir(exist_ok=True)
        before = listing(tmp_path, without=tmp_path / "target")
        done = forkserver.ucp(arguments, place, UCP_DEBUG="0")
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        if code:
            assert done.stderr.startswith("error: "), done.stderr
            assert "\nhint: " in done.stderr, done.stderr
        assert listing(tmp_path, without=tmp_path / "target") == before
        return done

    return run


def shards(universal: Path, name: str, state: str) -> list[Path]:
    doc = next(
        d for d in ucformat.open(universal).manifest.tensors if (d.name, d.state) == (name, state)
    )
    return sorted(p for p in (universal / str(doc.path) / "c").rglob("*") if p.is_file())


class TestUniversal:
    """A universal checkpoint that was damaged after it was committed."""

    def test_a_flipped_bit(self, universal: Path, tmp_path: Path, ucp: Ucp) -> None:
        path = shards(universal, "up.weight", "exp_avg")[1]
        data = bytearray(path.read_bytes())
        data[70] ^= 1
        path.write_bytes(data)
        done = ucp("verify", universal, code=5)
        (line,) = done.stdout.splitlines()
        assert line.startswith("up.weight (exp_avg) chunk [")
        assert line.endswith(f"[{path.relative_to(universal)}]")
        target = tmp_path / "target" / "x.npy"
        target.parent.mkdir()
        done = ucp("get", universal, "up.weight", "-s", "exp_avg", "-o", target, code=5)
        assert "up.weight (exp_avg)" in done.stderr
        assert str(path.relative_to(universal)) in done.stderr
        assert not target.exists()
        ucp("get", universal, "up.weight", "-s", "master", "-o", target)  # the others are whole
        assert same(np.load(target), TRUTH["up.weight", "master"])
        done = ucp("convert", universal, tmp_path / "target" / "again", code=5)
        assert "up.weight (exp_avg)" in done.stderr
        with pytest.raises(NotFound):
            ucformat.open(tmp_path / "target" / "again")

    @pytest.mark.parametrize("kept", [0, 1, 100, -1])
    def test_a_truncated_shard(self, universal: Path, ucp: Ucp, kept: int) -> None:
        path = shards(universal, "up.weight", "master")[-1]
        path.write_bytes(path.read_bytes()[:kept])
        name = str(path.relative_to(universal))
        assert name in ucp("verify", universal, code=5).stdout
        if kept != -1:  # without its last byte all chunks are there
            assert name in ucp("get", universal, "up.weight", code=5).stderr

    def test_a_missing_chunk_file(self, universal: Path, ucp: Ucp) -> None:
        path = shards(universal, "down.weight", "master")[0]
        path.unlink()
        name = str(path.relative_to(universal))
        (line,) = ucp("verify", universal, code=5).stdout.splitlines()
        assert line.startswith("down.weight (master)")
        assert "missing" in line
        assert name in line
        assert name in ucp("get", universal, "down.weight", code=5).stderr

    def test_a_manifest_of_a_newer_version(self, universal: Path, tmp_path: Path, ucp: Ucp) -> None:
        manifest = universal / "manifest.json"
        manifest.write_bytes(manifest_file({**json.loads(manifest.read_text()), "version": 2}))
        more: dict[str, list[object]] = {"get": ["up.weight"], "convert": [tmp_path / "target"]}
        for command in ("show", "get", "verify", "convert"):
            done = ucp(command, universal, *more.get(command, []), code=7)
            assert "manifest.json has format version 2" in done.stderr
            assert "upgrade" in done.stderr
        assert not (tmp_path / "target").exists()

    def test_a_path_that_leaves_the_checkpoint(
        self, universal: Path, tmp_path: Path, ucp: Ucp
    ) -> None:
        manifest = universal / "manifest.json"
        document = json.loads(manifest.read_text())
        document = changed_entry(document, 0, path="data/../../source")
        manifest.write_bytes(manifest_file(document))
        name = document["tensors"]["names"][0]
        assert "data/../../source" in ucp("get", universal, name, code=6).stderr


class TestDeepSpeed:
    """A folder of DeepSpeed's that is damaged, or was made to do harm."""

    def part(self, source: Path, rank: int, kind: str = "optim") -> Path:
        return next(
            (source / "global_step5").glob(f"*zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")
        )

    @pytest.mark.parametrize(("rank", "kind"), [(1, "optim"), (0, "optim"), (1, "model")])
    def test_a_missing_rank_file(
        self, source: Path, tmp_path: Path, ucp: Ucp, rank: int, kind: str
    ) -> None:
        path = self.part(source, rank, kind)
        path.unlink()
        for arguments in (["show", source], ["convert", source, tmp_path / "target"]):
            done = ucp(*arguments, code=5)
            assert path.name in done.stderr
            assert "missing" in done.stderr
        assert not (tmp_path / "target").exists()

    @pytest.mark.parametrize(
        ("rank", "kind", "function"),
        [
            (1, "optim", ("os", "system")),
            (0, "model", ("os", "system")),
            (0, "optim", ("posix", "system")),
            (1, "model", ("builtins", "eval")),
        ],
    )
    def test_a_pickle_that_runs_a_command(
        self,
        source: Path,
        tmp_path: Path,
        ucp: Ucp,
        rank: int,
        kind: str,
        function: tuple[str, str],
    ) -> None:
        path = self.part(source, rank, kind)
        save(path, dictionary(x=call(glob(*function), text(f"touch {tmp_path / 'harm'}"))))
        for arguments in (["verify", source], ["convert", source, tmp_path / "target"]):
            done = ucp(*arguments, code=6)
            assert path.name in done.stderr
            assert ".".join(function) in done.stderr
        assert not (tmp_path / "harm").exists()
        with pytest.raises(NotFound):
            ucformat.open(tmp_path / "target")

    def test_the_crafted_pickle_does_run_where_pickles_are_trusted(self, tmp_path: Path) -> None:
        """Else the test above would prove nothing."""
        (tmp_path / "x.pickle").write_bytes(
            pickled(call(glob("os", "system"), text(f"touch {tmp_path / 'seen'}")))
        )
        code = f"import pickle, pathlib; pickle.loads(pathlib.Path({str(tmp_path / 'x.pickle')!r}).read_bytes())"
        subprocess.run([sys.executable, "-c", code], check=True)
        assert (tmp_path / "seen").exists()

    def test_an_offset_past_the_end_of_the_file(self, tmp_path: Path, ucp: Ucp) -> None:
        for n, crafted in enumerate(
            (tensor((2, 2), offset=3), tensor((2, 2), (1 << 40, 1)), tensor((1 << 40, 4), (4, 1)))
        ):
            tag = tmp_path / f"offset{n}" / "global_step1"
            tag.mkdir(parents=True)
            module = dictionary(module=mapping([(text("w"), crafted)]), buffer_names=a_list())
            save(tag / "mp_rank_00_model_states.pt", module, {"0": bytes(16)})
            assert (
                "mp_rank_00_model_states.pt"
                in ucp("convert", tag, tmp_path / "target", code=5).stderr
            )
            assert not (tmp_path / "target").exists()

    def test_a_storage_that_reaches_past_the_end_of_the_file(
        self, source: Path, tmp_path: Path, ucp: Ucp
    ) -> None:
        path = self.part(source, 1)
        data = bytearray(path.read_bytes())
        at = data.rindex(b"archive/data/0") - 46  # its entry in the directory
        data[at + 20 : at + 28] = (1 << 30).to_bytes(4, "little") * 2
        path.write_bytes(data)
        for arguments in (["verify", source], ["convert", source, tmp_path / "target"]):
            done = ucp(*arguments, code=5)
            assert path.name in done.stderr
            assert "past the end" in done.stderr

    def test_a_flat_group_shorter_than_its_parameters(
        self, source: Path, tmp_path: Path, ucp: Ucp
    ) -> None:
        (tmp_path / "other").mkdir()
        write_zero3(tmp_path / "other" / "x", arrays("up.weight"), ranks=2)
        path = self.part(source, 1)
        path.write_bytes(self.part(tmp_path / "other" / "x", 1).read_bytes())
        assert path.name in ucp("convert", source, tmp_path / "target", code=5).stderr

    def test_a_truncated_rank_file(self, source: Path, tmp_path: Path, ucp: Ucp) -> None:
        path = self.part(source, 1)
        path.write_bytes(path.read_bytes()[:-200])
        for arguments in (["verify", source], ["convert", source, tmp_path / "target"]):
            assert path.name in ucp(*arguments, code=5).stderr

    def test_a_flipped_bit(self, source: Path, ucp: Ucp) -> None:
        path = self.part(source, 1)
        data = bytearray(path.read_bytes())
        data[data.index(TRUTH["up.weight", "exp_avg"].tobytes()[252 : 252 + 32])] ^= (
            1  # rank 1's half of 126 elements
        )
        path.write_bytes(data)
        (line,) = ucp("verify", source, code=5).stdout.splitlines()
        assert line.endswith(f"[global_step5/{path.name}]")
        assert "up.weight (exp_avg)" in line
        assert "down.weight (exp_avg)" in line

    @pytest.mark.parametrize("tag", ["../elsewhere", "/etc", "global_step5/../../elsewhere", ".."])
    def test_a_latest_that_points_elsewhere(
        self, source: Path, tmp_path: Path, ucp: Ucp, tag: str
    ) -> None:
        write_zero3(tmp_path / "elsewhere", TRUTH, ranks=1)
        (source / "latest").write_text(tag)
        for arguments in (["show", source], ["convert", source, tmp_path / "target"]):
            assert tag in ucp(*arguments, code=6).stderr
        assert not (tmp_path / "target").exists()


def test_names_that_are_paths_or_collide_or_are_long(tmp_path: Path, ucp: Ucp) -> None:
    import tensorstore
    import zarr

    truth = arrays(*ODD_NAMES)
    source, target = write_zero3(tmp_path / "source", truth, ranks=2), tmp_path / "target"
    ucp("convert", source, target, "--chunk-bytes", "64", "--shard-bytes", "256")
    ucp("verify", target)
    ucp("verify", source)
    ck = ucformat.open(target)
    assert set(ck) == set(ODD_NAMES)
    group: Any = zarr.open_group(ck.zarr_url, mode="r")
    folders = set()
    for doc in ck.manifest.tensors:
        if doc.state == "step":
            continue
        a = truth[doc.name, doc.state]
        assert same(ck[doc.name, doc.state][...], a), doc.name
        assert same(
            np.asarray(group[str(doc.path).removeprefix(f"data/{ck.manifest.attempt}/")][...]), a
        ), doc.name
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{ck.url}/{doc.path}"}}
        assert same(np.asarray(tensorstore.open(spec).result().read().result()), a), doc.name
        folders.add(str(doc.path).lower())
    assert len(folders) == len(truth)
    for n, name in enumerate(ODD_NAMES[:5]):
        ucp("get", target, name, "0:2", "-o", target / f"{n}.npy")
        assert same(np.load(target / f"{n}.npy"), truth[name, "master"][:2])


class TestNoCheckpoint:
    """Places that hold nothing, or something else."""

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            (["model.onnx", "config.json"], "holds no checkpoint"),
            (["deep/down/mp_rank_00_model_states.pt"], "is no checkpoint itself; these folders"),
        ],
    )
    def test_a_folder_of_other_things(
        self, tmp_path: Path, ucp: Ucp, files: list[str], message: str
    ) -> None:
        for name in files:
            (tmp_path / "other" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "other" / name).write_text("{}")
        for arguments in (["show"], ["verify"], ["get", "w"], ["convert", tmp_path / "target"]):
            done = ucp(arguments[0], tmp_path / "other", *arguments[1:], code=3)
            assert f"{tmp_path / 'other'} {message}" in done.stderr
        assert not (tmp_path / "target").exists()

    def test_a_file_instead_of_a_folder(self, source: Path, tmp_path: Path, ucp: Ucp) -> None:
        file = next(source.rglob("*optim_states.pt"))
        for arguments in (["show"], ["verify"], ["get", "w"], ["convert", tmp_path / "target"]):
            assert str(file) in ucp(arguments[0], file, *arguments[1:], code=3).stderr
        assert not (tmp_path / "target").exists()

    def test_a_target_that_is_a_file(self, source: Path, tmp_path: Path, ucp: Ucp) -> None:
        (tmp_path / "taken").write_text("mine")
        done = ucp("convert", source, tmp_path / "taken", code=6)
        assert str(tmp_path / "taken") in done.stderr

    @pytest.mark.parametrize("make", [False, True])
    def test_nothing_there(self, tmp_path: Path, ucp: Ucp, make: bool) -> None:
        if make:
            (tmp_path / "empty").mkdir()
        assert (
            f"{tmp_path / 'empty'} does not exist, or is empty"
            in ucp("show", tmp_path / "empty", code=3).stderr
        )

    def test_an_interrupted_conversion(self, universal: Path, ucp: Ucp) -> None:
        (universal / "manifest.json").unlink()
        assert "interrupted" in ucp("show", universal, code=3).stderr


def test_a_full_disk_leaves_nothing_that_opens_and_the_next_run_completes(
    source: Path, tmp_path: Path
) -> None:
    whole = FaultyStore(LocalStore(tmp_path / "whole"))
    ucformat.convert(source, whole, chunk_bytes=128, shard_bytes=512, workers=1)
    for n in sorted(
        {*range(1, whole.writes, max(1, whole.writes // 30)), whole.writes - 1, whole.writes}
    ):
        target = tmp_path / f"full{n}"
        store = FaultyStore(LocalStore(target), fail_write=n)
        with pytest.raises(UcformatError, match="No space left on device"):
            ucformat.convert(source, store, chunk_bytes=128, shard_bytes=512, workers=1)
        assert store.failed
        with pytest.raises((NotACheckpoint, NotFound)):
            ucformat.open(target)
        ck = ucformat.convert(source, target, chunk_bytes=128, shard_bytes=512, workers=1)
        for key, a in TRUTH.items():
            assert same(ck[key][...], a), (n, key)
        assert ucformat.verify(ck)
        assert {f.name for f in target.rglob(".ucf-*")} <= {
            ".ucf-lock"
        }  # of who begins anew what was begun


def test_a_file_that_cannot_be_written_to_its_end(source: Path, tmp_path: Path, ucp: Ucp) -> None:
    """Where the system itself refuses to write: files of that process may not grow past 2 KiB."""
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048)); import signal; "
    code += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from ucformat.cli.main import ucp; ucp.main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", str(source), str(tmp_path / "target")],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr
    assert str(tmp_path / "target") in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(NotFound):
        ucformat.open(tmp_path / "target")
    ucp("convert", source, tmp_path / "target")
    ucp("verify", tmp_path / "target")
