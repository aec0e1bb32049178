"""Jobs on a Dask cluster and in the processes of torchrun: real processes, real kills, the commands of the guide."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("distributed", reason="pip install 'ucformat[dask]'")

import ucformat
from tests.jobs.dask_cluster import ROOT, cluster
from tests.jobs.test_parts import SIZES, same_content, source_of
from tests.patience import PATIENCE
from ucformat.catalog.catalog import Catalog
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import ChecksumError, Conflict, NotFound, UcformatError, UsageError
from ucformat.geometry.layout import Layout
from ucformat.jobs.reopen import reopen, spec_of
from ucformat.jobs.shards import ShardJob, WriteOptions
from ucformat.jobs.tasks import run_batch
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("default")  # of the libraries that Dask loads


@pytest.fixture(scope="module")
def workers() -> Iterator[str]:
    """A Dask cluster of two workers, as `--on` names it."""
    with cluster(2) as (address, _):
        yield f"dask://{address}"


@pytest.mark.matrix
def test_two_of_four_workers_are_killed(tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", 21, tensors=24, scale=4)
    whole = ucformat.convert(source, tmp_path / "whole", **SIZES)
    with cluster(4) as (address, pids):
        killed = threading.Event()

        def progress(done: int, total: int) -> None:
            if done > total // 4 and not killed.is_set():
                killed.set()
                for pid in pids[:2]:
                    os.kill(pid, signal.SIGKILL)

        made = ucformat.convert(
            source, tmp_path / "made", **SIZES, on=f"dask://{address}", progress=progress
        )
    assert killed.is_set()
    same_content(whole, made)
    assert ucformat.verify(made)


def test_convert_copy_verify_and_resume(workers: str, tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", 22)
    made = ucformat.convert(source, tmp_path / "made", **SIZES, on=workers)
    same_content(ucformat.convert(source, tmp_path / "whole", **SIZES), made)
    ucformat.copy(made, tmp_path / "copy", on=workers)
    report, local = (
        ucformat.verify(tmp_path / "copy", on=workers),
        ucformat.verify(tmp_path / "copy"),
    )
    assert report
    assert (report.bytes_verified, report.tensors) == (local.bytes_verified, local.tensors)
    victim = max(
        (p for p in (tmp_path / "copy" / "data").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    victim.write_bytes(b"\1" + victim.read_bytes()[1:])
    assert (
        ucformat.verify(tmp_path / "copy", on=workers).problems
        == ucformat.verify(tmp_path / "copy").problems
        != ()
    )


@pytest.mark.matrix
def test_with_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates are those of Dask's configuration; without them, the cluster does not answer."""
    import dask
    from distributed import Security

    made = Security.temporary()
    files = {"ca_file": made.tls_ca_file, "cert": made.tls_client_cert, "key": made.tls_client_key}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    settings = {
        "distributed.comm.tls.ca-file": str(tmp_path / "ca_file"),
        **{
            f"distributed.comm.tls.{role}.{n}": str(tmp_path / n)
            for role in ("client", "scheduler", "worker")
            for n in ("cert", "key")
        },
    }
    variables = {
        f"DASK_{k.upper().replace('.', '__').replace('-', '_')}": v for k, v in settings.items()
    }
    source = source_of(tmp_path / "src", 31)
    with cluster(1, **variables) as (address, _):
        with dask.config.set(settings):
            ucformat.convert(source, tmp_path / "made", **SIZES, on=f"tls://{address}")
        monkeypatch.setattr("ucformat.jobs.on_dask._CONNECT_S", 1.0)
        for on in (f"tls://{address}", f"dask://{address}"):
            with pytest.raises(UcformatError, match="cannot be reached"):
                ucformat.convert(source, tmp_path / "other", **SIZES, on=on)
    same_content(
        ucformat.convert(source, tmp_path / "whole", **SIZES), ucformat.open(tmp_path / "made")
    )


def test_an_error_of_a_worker_is_the_error_of_the_job(workers: str, tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", 23)
    whole = ucformat.convert(source, tmp_path / "whole", **SIZES)
    victim = max(
        (p for p in (tmp_path / "whole" / "data").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    victim.write_bytes(b"\1" + victim.read_bytes()[1:])
    with pytest.raises(ChecksumError, match=r"the chunk at bytes .* is damaged"):
        ucformat.convert(whole, tmp_path / "made", chunk_bytes=4096, on=workers)
    with pytest.raises(NotFound):
        ucformat.open(tmp_path / "made" / "manifest.json")


def test_a_view_and_options_come_along(workers: str, tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", 24)
    steps: list[dict[str, Any]] = [{"rename": "t0", "to": "first"}, {"drop": ["t1"]}]
    (tmp_path / "view.yaml").write_text(
        "version: 1\nview:\n" + "".join(f"  - {json.dumps(s)}\n" for s in steps)
    )
    named = ucformat.open(source, view=tmp_path / "view.yaml")
    same_content(
        ucformat.convert(named, tmp_path / "named", **SIZES, on=workers),
        ucformat.convert(
            named.view([{"rename": "t2", "to": "second"}]).view([{"rename": "second", "to": "t2"}]),
            tmp_path / "twice",
            **SIZES,
            on=workers,
        ),
    )
    viewed = ucformat.open(source, view=steps)
    made = ucformat.convert(viewed, tmp_path / "made", **SIZES, on=workers)
    same_content(ucformat.convert(viewed, tmp_path / "whole", **SIZES), made)
    assert "first" in made
    again = reopen(json.loads(json.dumps(spec_of(viewed))))
    assert (again.tensors, again.id) == (viewed.tensors, viewed.id)


def test_options_that_are_layouts_are_told_as_documents(tmp_path: Path) -> None:
    ck = ucformat.open(source_of(tmp_path / "src", 25))
    layout = Layout.parse(
        {
            "version": 1,
            "mesh": {"tp": 2},
            "rules": [{"match": "*", "place": [{"shard": 0, "over": "tp"}]}],
        }
    )
    ck.opened = (str(tmp_path), {"layout": layout})
    told = json.loads(json.dumps(spec_of(ck)))
    assert Layout.parse(told["options"]["layout"]["$layout"]).dump() == layout.dump()


def test_what_only_this_process_has_is_refused(tmp_path: Path) -> None:
    ck = ucformat.convert(source_of(tmp_path / "src", 26), "memory://somewhere", **SIZES)
    with pytest.raises(UsageError, match="memory"):
        spec_of(ck)
    with pytest.raises(UsageError, match="repeat"):
        spec_of(open_checkpoint(tmp_path / "src" / "global_step5"))


def test_a_worker_that_sees_other_files_refuses(tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", 27)
    ck = ucformat.open(source)
    job = ShardJob(
        ck, MemoryStore("none"), "0" * 20, list(ck.tensors.values()), WriteOptions(2048, 1 << 14)
    )
    spec = json.dumps({**job.spec(), "store": str(tmp_path / "dst")})
    file = next(source.glob("*optim_states.pt"))
    os.utime(file, ns=(1, 1))
    with pytest.raises(Conflict, match="other files"):
        run_batch(spec, [0])
    assert not (tmp_path / "dst").exists()


def test_what_is_sent_is_plain_and_has_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "sesame-1234567",
        "AWS_ACCESS_KEY_ID": "AKIA7654321",
        "HF_TOKEN": "hf_abcdefgh",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    ck = ucformat.open(source_of(tmp_path / "src", 28))
    job = ShardJob(
        ck, MemoryStore("none"), "0" * 20, list(ck.tensors.values()), WriteOptions(2048, 1 << 14)
    )
    sent = json.dumps(job.spec())
    assert not [s for s in secrets.values() if s in sent]
    assert json.loads(sent)["job"] == "shards:ShardJob"


def test_a_scheduler_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucformat.jobs.on_dask._CONNECT_S", 0.5)
    with pytest.raises(UcformatError, match=r"cannot be reached"):
        ucformat.convert(
            source_of(tmp_path / "src", 29), tmp_path / "made", **SIZES, on="dask://127.0.0.1:9"
        )


def run(words: list[str], cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.matrix
def test_the_commands_of_the_guide(workers: str, tmp_path: Path) -> None:
    source_of(tmp_path, 30)
    (tmp_path / "global_step5").rename(tmp_path / "global_step100")
    page = (
        (ROOT / "docs" / "guides" / "cluster.md")
        .read_text()
        .replace("dask://127.0.0.1:8786", workers)
    )
    lines = [
        line
        for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(lines) == 10
    for line in lines:
        program, *words = line.removeprefix("$ ").split()
        module = {"ucp": "ucformat.cli", "torchrun": "torch.distributed.run"}[program]
        if program == "torchrun":
            pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")
            words = ["--standalone", *words]
        said = run([sys.executable, "-m", module, *words], tmp_path)
        if program == "torchrun":
            assert len(said.splitlines()) == 1, "rank 0 alone reports"
    places = [
        ucformat.open(tmp_path / f"universal{kind}") for kind in ("", "-by-ranks", "-by-parts")
    ]
    for place in places[1:]:
        same_content(places[0], place)
    models = [
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "model-by-ranks")
    ]
    assert models[0] == models[1]


def test_register_a_tree(workers: str, tmp_path: Path) -> None:
    for step in range(7):
        source = source_of(tmp_path / "scratch" / str(step), step)
        (tmp_path / "tree" / f"run{step % 2}").mkdir(parents=True, exist_ok=True)
        source.rename(tmp_path / "tree" / f"run{step % 2}" / f"global_step{step}")
    ucformat.convert(
        tmp_path / "tree" / "run0" / "global_step0", tmp_path / "tree" / "universal", **SIZES
    )
    (tmp_path / "tree" / "damaged").mkdir()
    (tmp_path / "tree" / "damaged" / "manifest.json").write_text("{")
    found = {}
    for kind in ("here", "there", "parts"):
        with Catalog(f"sqlite:///{tmp_path}/{kind}.db") as catalog:
            wheres = {
                "here": ["threads"],
                "there": [workers],
                "parts": ["part:0/3", "part:2/3", "part:1/3"],
            }[kind]
            done = [
                ucformat.register(tmp_path / "tree", catalog, recursive=True, on=on)
                for on in wheres
            ]
            found[kind] = {
                (e.id, e.kind, e.urls, e.nbytes, e.step, e.created) for d in done for e in d.entries
            }
            assert [f.url for d in done for f in d.failures] == [str(tmp_path / "tree" / "damaged")]
            again = ucformat.register(tmp_path / "tree", catalog, recursive=True, on=wheres[0])
            assert set(again.ids) <= {entry[0] for entry in found[kind]}
            with pytest.raises(UsageError, match="nothing to register"):
                ucformat.register(tmp_path / "tree", catalog, on="part:0/2")
    assert len(found["here"]) == 8
    assert found["here"] == found["there"] == found["parts"]
