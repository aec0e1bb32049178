"""What all exports have in common: planning, verification, continuation, destinations, the catalog."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
from tests.exporters.sources import opened, random_arrays, universal, zero3
from tests.fakes import random_array
from tests.jobs.forks import Forks
from ucformat.catalog.catalog import Catalog
from ucformat.cli.main import ucp
from ucformat.errors import ChecksumError, Conflict, MissingData, NotFinished, UsageError
from ucformat.exporters.base import Exporter, Span, Target, TargetFile
from ucformat.exporters.registry import EXPORTERS
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Extent, Key, Piece
from ucformat.jobs import bands
from ucformat.jobs.export import plan_export
from ucformat.storage.local import LocalStore
from ucformat.testing import ExporterSuite

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

ROOT = Path(__file__).parents[2]
HEAD = bytes(range(256)) * 5  # longer than the shortest band
INDEX = "model.safetensors.index.json"
SMALL: dict[str, Any] = {"max_shard_bytes": 2000}


def load_file(file: Path) -> dict[str, np.ndarray]:
    """What the safetensors library reads; as bytes, since NumPy lacks some of its dtypes."""
    found = {}
    for name, tensor in safetensors.deserialize(file.read_bytes()):  # type: ignore[no-untyped-call]
        size = max(1, int(np.prod(tensor["shape"])))
        found[name] = np.frombuffer(
            tensor["data"], f"V{max(1, len(tensor['data']) // size)}"
        ).reshape(tensor["shape"])
    return found


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a model, if there is one: one file, or an index whose shards are all there."""
    index = folder / INDEX
    if index.exists():
        shards = json.loads(index.read_text())["weight_map"]
        files = {file: load_file(folder / file) for file in set(shards.values())}
        return {name: files[file][name] for name, file in shards.items()}
    single = folder / "model.safetensors"
    return load_file(single) if single.exists() else {}


def same(
    found: dict[str, np.ndarray], arrays: dict[tuple[str, str], np.ndarray], state: str = "weight"
) -> None:
    wanted = {name: a for (name, s), a in arrays.items() if s == state}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes(), name


class TestSafetensors(ExporterSuite):
    kind = "safetensors"
    options = SMALL

    def load(self, place: Path) -> dict[tuple[str, str], np.ndarray]:
        found: dict[tuple[str, str], np.ndarray] = {}
        for file in set(json.loads((place / INDEX).read_text())["weight_map"].values()):
            with safetensors.safe_open(place / file, "numpy") as opened:
                found |= {(name, "weight"): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return found


class _Scattered(Exporter):
    """Files of spans in which tensors lie transposed, padded and in pieces."""

    kind, title = "scattered", "scattered spans"

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        return Target(
            tuple(
                TargetFile.of(f"{n}", HEAD, *self._spans(i), b"tail") for n, i in enumerate(infos)
            )
        )

    def _spans(self, info: TensorInfo) -> Iterator[Span]:
        shape = info.shape
        strides = tuple(
            int(np.prod(shape[:d])) for d in range(len(shape))
        )  # Fortran order, after a pad of 3
        yield Span(info.dtype, info.size + 5, ((info, Piece(Box.whole(shape), 3, strides)),))
        if shape and shape[0] > 1:
            inner = shape[1:]
            steps = (0, *(shape[0] * int(np.prod(inner[d + 1 :])) for d in range(len(inner))))
            starts = [Box((r, *(0,) * len(inner)), (1, *inner)) for r in range(shape[0])]
            rows = tuple((info, Piece(box, r, steps)) for r, box in enumerate(starts))
            yield Span(info.dtype, info.size, rows)


@given(seed=st.integers(0, 10**6), band=st.sampled_from([64, 1000, 1 << 20]))
@settings(max_examples=25, deadline=None)
def test_any_placement_of_elements(
    tmp_path_factory: pytest.TempPathFactory, seed: int, band: int
) -> None:
    folder = tmp_path_factory.mktemp("scattered")
    arrays = random_arrays(seed, 5, edge=9)
    source = universal(folder / "u", arrays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXPORTERS._objects, "scattered", _Scattered)
        patch.setattr(bands, "BAND_BYTES", band)
        done = ucformat.export(source, folder / "out", "scattered")
    assert done.verified
    for n, array in enumerate(arrays.values()):
        fortran = np.concatenate(
            [np.zeros(3, array.dtype), array.ravel("F"), np.zeros(2, array.dtype)]
        )
        wanted = HEAD + fortran.tobytes()
        if array.ndim and array.shape[0] > 1:
            wanted += np.moveaxis(array, 0, -1).tobytes()
        assert (folder / "out" / str(n)).read_bytes() == wanted + b"tail"


@given(seed=st.integers(0, 10**6), count=st.integers(1, 5), data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_order_of_parts(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    source, arrays = zero3(folder / "src", seed)
    order = data.draw(
        st.permutations(
            [*range(count), *data.draw(st.lists(st.integers(0, count - 1), max_size=3))]
        )
    )
    for n, index in enumerate(order):
        with pytest.raises(NotFinished, match="another process finishes it"):
            ucformat.export(
                source, folder / "out", "safetensors", on=f"part:{index}/{count}", **SMALL
            )
        assert tensors_of(folder / "out") == {}
        if (
            n + 1 < len(order)
            and set(order[: n + 1]) != set(range(count))
            and data.draw(st.booleans())
        ):
            try:
                ucformat.export(source, folder / "out", "safetensors", on="commit", **SMALL)
            except MissingData:
                assert tensors_of(folder / "out") == {}
            else:
                break
    else:
        done = ucformat.export(source, folder / "out", "safetensors", on="commit", **SMALL)
        assert done.verified
    same(tensors_of(folder / "out"), arrays, "master")
    assert not (folder / "out" / "ucformat-export").exists()


def test_damage_is_found_across_parts(tmp_path: Path) -> None:
    """Several threads read a band, and no part reads a record whole: the commit combines their checksums."""
    source, _ = zero3(tmp_path / "src", 2, scale=8)

    def export(on: str) -> None:
        ucformat.export(source, tmp_path / "out", "safetensors", on=on, max_shard_bytes=10**6)

    file = next(source.glob("*optim_states.pt"))
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 8] ^= 1  # in the masters
    file.write_bytes(damaged)
    for index in range(2):
        with pytest.raises(NotFinished):
            export(f"part:{index}/2")
    with pytest.raises(ChecksumError, match="CRC-32"):
        export("commit")
    assert tensors_of(tmp_path / "out") == {}


WORK = """
import ucformat
from ucformat.jobs import bands
bands.BAND_BYTES = 1 << 14

def work(source, target, kind, options):
    return ucformat.export(source, target, kind, **eval(options)).files
"""


@pytest.mark.front("0")
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_instant(tmp_path: Path, seed: int) -> None:
    source, arrays = zero3(tmp_path / "src", seed, tensors=9)
    chance, options = random.Random(seed), repr(SMALL).replace(" ", "")
    with Forks(WORK) as forks:
        assert forks.run(source, tmp_path / "first", "safetensors", options)[0] == 0
        seconds, ended = forks.seconds, 0
        for number in range(12):
            target = tmp_path / f"out{number // 4}"
            code, _ = forks.run(
                source, target, "safetensors", options, kill_after=chance.uniform(0, seconds)
            )
            assert code in (0, -signal.SIGKILL, 1)
            if found := tensors_of(target):
                same(found, arrays, "master")
                ended += 1
        for number in range(3):
            target = tmp_path / f"out{number}"
            if not tensors_of(target) or (target / "ucformat-export").exists():
                ucformat.export(source, target, "safetensors", **SMALL)
            same(tensors_of(target), arrays, "master")
            assert {p.suffix for p in target.iterdir()} == {".safetensors", ".json"}
    assert ended < 12


def test_what_is_recorded_is_not_written_again(tmp_path: Path) -> None:
    source, _ = zero3(tmp_path / "src")
    for _ in range(2):
        with pytest.raises(NotFinished):
            ucformat.export(source, tmp_path / "out", "safetensors", on="part:0/1", **SMALL)
        there = {p: p.stat().st_ino for p in (tmp_path / "out").glob("*.safetensors")}
    ucformat.export(source, tmp_path / "out", "safetensors", **SMALL)
    assert there
    assert {p: p.stat().st_ino for p in there} == there


def test_what_a_killed_export_left_is_removed_before_its_records_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing would say that it is to be removed, if the second one is killed, too."""
    source, _ = zero3(tmp_path / "src")
    with pytest.raises(NotFinished):
        ucformat.export(source, tmp_path / "out", "safetensors", on="part:0/1", **SMALL)
    left = tmp_path / "out" / ".ucf-0123456789abcdef.tmp"
    left.write_bytes(b"")
    ended = []

    def killed(store: LocalStore, prefix: str) -> None:
        ended.append(prefix)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStore, "delete_prefix", killed)
    with pytest.raises(KeyboardInterrupt):
        ucformat.export(source, tmp_path / "out", "safetensors", **SMALL)
    assert ended == ["ucformat-export"]
    assert not left.exists()


def test_a_damaged_source_yields_no_model(tmp_path: Path) -> None:
    source, _ = zero3(tmp_path / "src")
    ck = ucformat.open(source)
    extent = next(ck.source.extents(Key("t2", "master")))
    assert isinstance(extent, Extent)
    file = source / Path(extent.file).name
    content = bytearray(file.read_bytes())
    content[extent.offset] ^= 1
    file.write_bytes(content)
    for options in ({}, SMALL):
        with pytest.raises(ChecksumError, match=file.name):
            ucformat.export(source, tmp_path / "out", "safetensors", overwrite=True, **options)
        assert tensors_of(tmp_path / "out") == {}
    done = ucformat.export(source, tmp_path / "out", "safetensors", overwrite=True, verify=False)
    assert not done.verified


def test_what_is_in_the_way(tmp_path: Path) -> None:
    arrays = random_arrays(1)
    source = universal(tmp_path / "u", arrays)
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(Conflict, match=r"notes\.txt"):
            ucformat.export(source, out, "safetensors", overwrite=overwrite)
    (out / "notes.txt").unlink()
    ucformat.export(source, out, "safetensors", **SMALL)
    with pytest.raises(Conflict, match="is not empty"):
        ucformat.export(source, out, "safetensors")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(Conflict, match=r"notes\.txt, which belongs to no checkpoint"):
        ucformat.export(source, out, "safetensors", overwrite=True)
    same(tensors_of(out), arrays)
    (out / "notes.txt").unlink()
    ucformat.export(source, out, "safetensors", overwrite=True)
    assert [p.name for p in out.iterdir()] == ["model.safetensors"]
    with pytest.raises(Conflict, match="universal checkpoint"):
        ucformat.export(source, tmp_path / "u", "safetensors", overwrite=True)
    with pytest.raises(Conflict, match="is the source"):
        ucformat.export(out, out, "safetensors", overwrite=True, cast="float32")
    same(tensors_of(out), arrays)


def test_an_interrupted_replacement_is_continued_only_by_one(tmp_path: Path) -> None:
    """Somebody else's record of files to remove removes nothing."""
    source, _ = zero3(tmp_path / "src")
    out = tmp_path / "out"
    ucformat.export(source, out, "safetensors")
    with pytest.raises(NotFinished):
        ucformat.export(source, out, "safetensors", overwrite=True, on="part:0/2", **SMALL)
    (record,) = out.glob("ucformat-export/begun.json")
    next(out.glob("ucformat-export/*/cleared.json")).unlink()
    (out / "mine.txt").write_text("mine")
    found = json.loads(record.read_text())
    record.write_text(json.dumps({**found, "removes": ["mine.txt"]}))
    with pytest.raises(Conflict, match="was to replace"):
        ucformat.export(source, out, "safetensors", **SMALL)
    assert (out / "mine.txt").exists()
    record.write_text(json.dumps({**found, "removes": ["../src/global_step5/x"]}))
    with pytest.raises(ucformat.errors.UnsafeError):
        ucformat.export(source, out, "safetensors", overwrite=True, **SMALL)


def test_a_protected_export_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    source, _ = zero3(tmp_path / "src")
    ucformat.register(source, Catalog())
    ucformat.export(source, tmp_path / "out", "safetensors")
    with Catalog() as catalog:
        entry = catalog.get(str(tmp_path / "out"))
        edges = catalog.lineage(entry.id)
        assert [(e.kind, e.run) for e in catalog.find()] == [
            ("safetensors", tmp_path.name),
            ("deepspeed", "src"),
        ]
        assert [edge.kind for edge in edges.edges] == ["convert"]
        catalog.hold(entry.id, "in production")
    with pytest.raises(Conflict, match="in production"):
        ucformat.export(source, tmp_path / "out", "safetensors", overwrite=True, **SMALL)


def test_what_has_no_place_is_named(tmp_path: Path) -> None:
    source, arrays = zero3(tmp_path / "src")
    target = plan_export(source, "safetensors")
    assert "exp_avg of 5 tensors" in target.left_out
    assert any(what.startswith("the value ") for what in target.left_out)
    ucformat.export(source, tmp_path / "out", "safetensors", states="exp_avg")
    same(tensors_of(tmp_path / "out"), arrays, "exp_avg")
    with pytest.raises(UsageError, match="in several states"):
        plan_export(source, "safetensors", states=["exp_avg", "master"])
    with pytest.raises(UsageError, match="no tensor in state 'weights'"):
        plan_export(source, "safetensors", states="weights")
    with pytest.raises(UsageError, match="no export to 'onnx'"):
        plan_export(source, "onnx")
    with pytest.raises(UsageError, match="not exported with the option 'shards'"):
        plan_export(source, "safetensors", shards=3)


def test_a_cast_that_loses_a_value_is_an_error(tmp_path: Path) -> None:
    arrays = {
        ("a", "weight"): np.array([1.0, 70000.0], np.float32),
        ("b", "weight"): random_array((4,), "int64"),
    }
    source = opened(arrays)
    with pytest.raises(UsageError, match=r"70000\.0 does not fit float16"):
        ucformat.export(source, tmp_path / "out", "safetensors", cast="float16")
    assert tensors_of(tmp_path / "out") == {}
    ucformat.export(source, tmp_path / "out2", "safetensors", cast="bfloat16")
    found = load_file(tmp_path / "out2" / "model.safetensors")
    assert found["a"].view("<u2").tolist() == [0x3F80, 0x4789]  # 1 and 70,144
    assert found["b"].tobytes() == arrays["b", "weight"].tobytes()
    with pytest.raises(UsageError, match="not cast to 'int8'"):
        ucformat.export(source, tmp_path / "out3", "safetensors", cast="int8")


def test_the_command(tmp_path: Path) -> None:
    arrays = random_arrays(3)
    universal(tmp_path / "u", arrays)
    run = CliRunner().invoke
    words = [
        "export",
        "safetensors",
        str(tmp_path / "u"),
        str(tmp_path / "out"),
        "--max-shard-bytes",
        "2KB",
    ]
    planned = json.loads(run(ucp, [*words, "--dry-run", "--json"]).stdout)
    assert not (tmp_path / "out").exists()
    assert planned["bytes_read"] >= sum(a.nbytes for a in arrays.values())
    assert planned["seconds"] is None
    assert "time" in run(ucp, [*words, "--dry-run"]).stdout
    one = json.loads(
        run(
            ucp,
            ["export", "torch", str(tmp_path / "u"), str(tmp_path / "m.pt"), "--dry-run", "--json"],
        ).stdout
    )
    assert [f["file"] for f in one["files"]] == ["m.pt"]
    done = json.loads(run(ucp, [*words, "--json"]).stdout)
    assert (done["files"], done["bytes"]) == (len(planned["files"]), planned["bytes"])
    assert {p.name: p.stat().st_size for p in (tmp_path / "out").iterdir()} == {
        f["file"]: f["bytes"] for f in planned["files"]
    }
    again = run(ucp, words)
    assert again.exit_code == 4
    assert "is not empty" in again.stderr
    assert run(ucp, [*words, "--overwrite", "--quiet"]).stdout == f"{tmp_path / 'out'}\n"
    same(tensors_of(tmp_path / "out"), arrays)


def test_other_tensors_than_the_model_has(tmp_path: Path) -> None:
    arrays = {(f"w{n}", "weight"): random_array((n + 1, 3), "float32") for n in range(4)}
    source = opened(arrays, aliases={"tied": "w0"})
    ucformat.export(source, tmp_path / "model", "safetensors")
    ucformat.export(
        source.view([{"cast": "*", "dtype": "float64"}]),
        tmp_path / "same",
        "safetensors",
        like=source,
    )
    ucformat.export(source, tmp_path / "same2", "safetensors", like=tmp_path / "model")
    changed = source.view([{"rename": "w1", "to": "v1"}, {"transpose": "w3"}])
    with pytest.raises(UsageError) as raised:
        ucformat.export(changed, tmp_path / "out", "safetensors", like=tmp_path / "model")
    for line in ("1 are not in it: v1", "1 are only in it: w1", "1 have another shape there: w3"):
        assert line in raised.value.message
    assert not (tmp_path / "out").exists()
