"""Universal checkpoints whose weights are safetensors files: equal to any other, and models for other tools."""

from __future__ import annotations

import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ucformat
from tests.conformance import reader
from tests.exporters.sources import opened, random_arrays, zero3
from tests.exporters.test_export import tensors_of
from tests.fakes import random_array, same
from tests.jobs.forks import Forks
from ucformat.cli.main import ucp
from ucformat.errors import (
    ChecksumError,
    Conflict,
    IntegrityError,
    MissingData,
    NotFinished,
    NotFound,
    UnsupportedError,
    UsageError,
)
from ucformat.exporters.safetensors import files_of
from ucformat.format import arrays as small
from ucformat.format.commit import abandon
from ucformat.jobs import weight_files
from ucformat.jobs.compare import compare
from ucformat.jobs.dependents import unprotected
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from tests.exporters.sources import Arrays
    from ucformat.checkpoint import Checkpoint

WEIGHTS: tuple[Literal["safetensors"] | None, ...] = (None, "safetensors")
SIZES: dict[str, Any] = {"chunk_bytes": 256, "shard_bytes": 1 << 11}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files, and several blocks in each."""
    monkeypatch.setattr(weight_files, "files_of", partial(files_of, most=1500))
    monkeypatch.setattr(weight_files, "BLOCK_BYTES", 256)


def trained(seed: int) -> Arrays:
    """Weights and what a training has besides, among it names of which only the master is stored."""
    weights = random_arrays(seed, tensors=5, edge=20)
    chance = random.Random(seed)
    more: Arrays = {
        (f"m{n}", "master"): random_array((5, n + 1), "float32", n)
        for n in range(chance.randrange(3))
    }
    for (name, _), a in list(weights.items())[::2]:
        more[name, "master"] = random_array(a.shape, "float32", seed + 1)
        more[name, "exp_avg"] = random_array(a.shape, "float32", seed + 2)
    return {**weights, **more}


def files(place: Path | str) -> list[Path]:
    return sorted(f for f in Path(place).rglob("*") if f.is_file())


def intact(ck: Checkpoint, arrays: Arrays) -> None:
    """It holds exactly these, for every reader."""
    assert list(ck.tensors) == list(arrays)
    for key, a in arrays.items():
        assert same(ck[key][...], a), key
    ucformat.verify(ck).raise_if_damaged()


def by_name(arrays: Arrays) -> dict[str, np.ndarray]:
    """What the files hold: weights, or masters where only these are stored."""
    return {
        name: a
        for (name, state), a in arrays.items()
        if state == "weight" or (name, "weight") not in arrays
    }


def in_files(ck: Checkpoint, arrays: Arrays) -> None:
    found = tensors_of(Path(str(ck.hf_url)))
    wanted = {
        n: a
        for n, a in by_name(arrays).items()
        if (n, "weight") in arrays or (n, "master") in arrays
    }
    assert found.keys() == wanted.keys()
    for name, a in wanted.items():
        assert found[name].shape == a.shape
        assert found[name].tobytes() == a.tobytes(), name


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 10**6))
def test_any_state_is_the_same_in_this_form(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, arrays = tmp_path_factory.mktemp("any"), trained(seed)
    ck = ucformat.convert(opened(arrays, assets=()), folder / "ck", **SIZES, weights="safetensors")
    assert ck.hf_url == f"{folder}/ck/data/{ck.manifest.attempt}/weights"
    intact(ucformat.open(folder / "ck"), arrays)
    in_files(ck, arrays)
    second = reader.Checkpoint(folder / "ck")  # which knows nothing of safetensors
    assert [data for _, data in second] == [a.tobytes() for a in arrays.values()]
    stored = {(t.name, t.state) for t in ck.manifest.tensors if t.path is None}
    assert {n for n, _ in stored} == by_name(arrays).keys()
    assert not {s for _, s in stored} - {"weight", "master"}
    for t in ck.manifest.tensors:
        if t.state == "exp_avg":
            assert t.path is not None  # an array
            assert t.digest is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "MOST_SMALL_ARRAYS", seed % 3)
        patch.setattr(small, "SMALL_BYTES", 1 + seed % 50)
        patch.setattr(weight_files, "_SMALL_FILE_BYTES", 1 + seed % 100)
        for weights in WEIGHTS:
            mixed = ucformat.convert(
                opened(arrays, assets=()), folder / f"mixed-{weights}", **SIZES, weights=weights
            )
            intact(ucformat.open(folder / f"mixed-{weights}"), arrays)
            second = reader.Checkpoint(folder / f"mixed-{weights}")
            assert [data for _, data in second] == [a.tobytes() for a in arrays.values()]
            packed = {(t.name, t.state) for t in mixed.manifest.tensors if t.path is None}
            chosen = {key: a for key, a in arrays.items() if weights is None or key not in stored}
            little = {key for key, a in chosen.items() if a.nbytes < small.SMALL_BYTES}
            expected = little if len(little) > small.MOST_SMALL_ARRAYS else set()
            assert packed == expected | (stored if weights else set())


@pytest.mark.parametrize(
    ("arrays", "folder"),
    [
        ({("a", "weight"): random_array((), "float32")}, "weights"),
        (
            {
                ("a", "weight"): random_array((), "float32"),
                ("b", "weight"): random_array((), "bool"),
            },
            "weights",
        ),
        ({("a", "weight"): random_array((0, 3), "float32")}, "weights"),
        (
            {
                ("a", "weight"): random_array((), "int64"),
                ("b", "weight"): random_array((0,), "bool"),
            },
            "weights",
        ),
        (
            {
                ("a", "weight"): random_array((5, 3), "float32"),
                ("a", "Weights"): np.zeros(3, np.float32),
            },
            "weights~",
        ),
        (
            {
                ("a", "weight"): random_array((3, 2000), "float32"),
                ("b", "weight"): np.zeros((1, 1, 9), bool),
            },
            "weights",
        ),
    ],
)
def test_unusual_tensors(arrays: Arrays, folder: str, tmp_path: Path) -> None:
    ck = ucformat.convert(opened(arrays), tmp_path / "ck", weights="safetensors")
    assert str(ck.hf_url).endswith(f"/{folder}")
    intact(ucformat.open(tmp_path / "ck"), arrays)
    in_files(ck, arrays)
    for name in [f for f in files(tmp_path / "ck") if f.parent.name == folder]:
        flipped(name, 3)
        assert not ucformat.verify(tmp_path / "ck"), name
        flipped(name, 3)


def flipped(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


def test_verify_and_copy_find_every_damage(tmp_path: Path) -> None:
    arrays = trained(3)
    ck = ucformat.convert(opened(arrays), tmp_path / "ck", **SIZES, weights="safetensors")
    shards = [f for f in files(str(ck.hf_url)) if f.suffix == ".safetensors"]
    index = Path(str(ck.hf_url), "model.safetensors.index.json")
    assert len(shards) > 1
    chance = random.Random(0)
    for file in [*shards, index]:
        size = file.stat().st_size
        for at in {0, 8, size - 1, *(chance.randrange(size) for _ in range(12))}:
            flipped(file, at)
            report = ucformat.verify(tmp_path / "ck")
            assert [p for p in report.problems if p.file.endswith(file.name)], (file, at)
            with pytest.raises(ChecksumError, match=file.name):
                ucformat.copy(tmp_path / "ck", tmp_path / f"{file.name}-{at}")
            flipped(file, at)
        data = file.read_bytes()
        file.write_bytes(data[:-1])
        assert not ucformat.verify(tmp_path / "ck")
        with pytest.raises(IntegrityError, match=file.name):
            ucformat.copy(tmp_path / "ck", tmp_path / f"{file.name}-short")
        file.unlink()
        assert not ucformat.verify(tmp_path / "ck")
        with pytest.raises(MissingData, match=file.name):
            ucformat.copy(tmp_path / "ck", tmp_path / f"{file.name}-gone")
        file.write_bytes(data)
    done = ucformat.copy(tmp_path / "ck", tmp_path / "copy")
    copied = ucformat.open(done.url)
    assert copied.hf_url == f"{tmp_path}/copy/data/{ck.manifest.attempt}/weights"
    intact(copied, arrays)
    in_files(copied, arrays)


def test_a_damaged_weight_is_never_read(tmp_path: Path) -> None:
    arrays = {("w", "weight"): random_array((64, 16), "float32")}
    ck = ucformat.convert(opened(arrays), tmp_path / "ck", weights="safetensors")
    flipped(Path(str(ck.hf_url), "model.safetensors"), -5)
    with pytest.raises(ChecksumError, match="w"):
        ucformat.open(tmp_path / "ck")["w"][60:64, 3:5]


def test_it_becomes_arrays_and_back(tmp_path: Path) -> None:
    arrays = trained(4)
    plain = ucformat.convert(opened(arrays), tmp_path / "arrays")
    ck = ucformat.convert(plain, tmp_path / "ck", weights="safetensors")
    assert ck.manifest.verified is not None
    assert ck.manifest.verified.default
    digests = {(t.name, t.state): t.digest for t in plain.manifest.tensors}
    back = ucformat.convert(ck, tmp_path / "back")
    assert {(t.name, t.state): t.digest for t in back.manifest.tensors} == digests
    assert back.manifest.verified == ck.manifest.verified
    assert back.hf_url is None
    again = ucformat.convert(ck, tmp_path / "again", weights="safetensors")
    own, other = (files(str(c.hf_url)) for c in (ck, again))
    assert [(f.name, f.read_bytes()) for f in own] == [(f.name, f.read_bytes()) for f in other]
    assert not [d for d in compare(plain, ck) if not d.equal]
    done = ucformat.materialize(ck)  # in place
    assert (done.id, done.hf_url) == (ck.id, None)
    assert {(t.name, t.state): t.digest for t in done.manifest.tensors} == digests
    assert not list(Path(ck.url).rglob("*model*.safetensors"))
    intact(ucformat.open(ck.url), arrays)


def test_virtual_checkpoints_views_and_plans_of_it(tmp_path: Path) -> None:
    arrays = {
        ("a", "weight"): random_array((40, 12), "float32"),
        ("b", "weight"): random_array((7,), "bfloat16"),
    }
    ck = ucformat.convert(opened(arrays), tmp_path / "ck", weights="safetensors")
    virtual = ucformat.convert(ck, tmp_path / "virtual", virtual=True, checksums=True)
    assert virtual.hf_url is None
    assert virtual.manifest.sidecar is not None
    needed = {s.path.rpartition("/")[2] for s in virtual.manifest.sidecar.sources}
    assert needed == {
        f.name for f in files(str(ck.hf_url)) if f.suffix == ".safetensors"
    }  # not the index
    assert not unprotected(virtual)
    intact(ucformat.open(tmp_path / "virtual", roots=[tmp_path / "ck"]), arrays)
    viewed = ck.view([{"rename": "a", "to": "z"}])
    assert viewed.hf_url is None
    assert same(viewed["z"][3:9], arrays["a", "weight"][3:9])
    layout = ucformat.Layout({"tp": 2}, [{"match": "*", "place": [{"shard": 0, "over": "tp"}]}])
    halves = []
    for rank in range(2):
        plan = ck.plan(layout, rank)
        assert plan.bytes_unverified == 0
        halves.append(plan.execute()["a", "weight"])
    assert same(np.concatenate(halves), arrays["a", "weight"])
    shutil.rmtree(tmp_path / "virtual")


WORK = """
import ucformat
from functools import partial
from ucformat.errors import Conflict
from ucformat.exporters.safetensors import files_of
from ucformat.jobs import weight_files
weight_files.files_of = partial(files_of, most=100_000)
def work(src, dst):
    try:
        return "won " + ucformat.convert(src, dst, shard_bytes=1 << 18, weights="safetensors").manifest.id
    except Conflict as error:
        return f"conflict {error.exit_code}"
"""


@pytest.mark.matrix
def test_kill_9_at_any_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the sizes are those of WORK
    source, arrays = zero3(tmp_path / "src", scale=3)
    chance = random.Random(5)
    nothing = 0
    with Forks(WORK) as forks:
        assert forks.run(source, tmp_path / "measured")[1][0] == "won"
        whole = forks.seconds
        for round_ in range(15):
            target = tmp_path / f"dst{round_}"
            forks.run(source, target, kill_after=chance.uniform(0, 1.1 * whole))
            try:
                ck = ucformat.open(target)
            except NotFound:
                nothing += 1
                assert forks.run(source, target)[1][0] == "won"
                ck = ucformat.open(target)
            for key, a in arrays.items():
                assert same(ck[key][...], a), key
            ucformat.verify(ck).raise_if_damaged()
            assert len(files(str(ck.hf_url))) > 2
            assert [p.name for p in (target / "data").iterdir()] == [ck.manifest.attempt]
    assert nothing > 0


@pytest.mark.parametrize("count", [1, 3])
def test_parts(count: int, tmp_path: Path) -> None:
    source, arrays = zero3(tmp_path / "src")
    how: dict[str, Any] = {**SIZES, "weights": "safetensors"}
    whole = ucformat.convert(source, tmp_path / "whole", **how)
    order = list(range(count))
    random.Random(count).shuffle(order)
    for k in order[1:]:
        with pytest.raises(NotFinished):
            ucformat.convert(source, tmp_path / "dst", **how, on=f"part:{k}/{count}")
    if count > 1:
        with pytest.raises(MissingData, match=r"parts? "):
            ucformat.convert(source, tmp_path / "dst", **how, on="commit")
    with pytest.raises(NotFinished):
        ucformat.convert(source, tmp_path / "dst", **how, on=f"part:{order[0]}/{count}")
    with pytest.raises(NotFound):
        ucformat.open(tmp_path / "dst")
    ck = ucformat.convert(source, tmp_path / "dst", **how, on="commit")
    one, other = whole.manifest.verified, ck.manifest.verified
    assert one is not None
    assert other is not None
    assert (one.default, one.but) == (other.default, other.but)
    for key, a in arrays.items():
        assert same(ck[key][...], a), key
    ucformat.verify(ck).raise_if_damaged()
    found = [[f.read_bytes() for f in files(str(c.hf_url))] for c in (whole, ck)]
    assert found[0] == found[1]


def test_parts_say_what_no_checksum_covers(tmp_path: Path) -> None:
    source = tmp_path / "hf"  # which has no checksums
    ucformat.export(opened(random_arrays(5)), source, "safetensors")
    for k in range(2):
        with pytest.raises(NotFinished):
            ucformat.convert(source, tmp_path / "dst", weights="safetensors", on=f"part:{k}/2")
    verified = ucformat.convert(
        source, tmp_path / "dst", weights="safetensors", on="commit"
    ).manifest.verified
    assert verified is not None
    assert (verified.default, verified.but) == (False, ())


def test_a_damaged_source_commits_nothing(tmp_path: Path) -> None:
    arrays = {
        ("w", "weight"): random_array((64, 16), "float32"),
        ("w", "exp_avg"): random_array((64, 16), "float32"),
    }
    ck = ucformat.convert(opened(arrays), tmp_path / "ck", weights="safetensors")
    flipped(Path(str(ck.hf_url), "model.safetensors"), 3000)
    with pytest.raises(ChecksumError, match="w"):
        ucformat.convert(ck, tmp_path / "dst", weights="safetensors")
    with pytest.raises(NotFound):
        ucformat.open(tmp_path / "dst")


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    moment = opened({("w", "exp_avg"): random_array((3,), "float32")})
    with pytest.raises(UsageError, match="no weights are to be converted"):
        ucformat.convert(moment, tmp_path / "dst", weights="safetensors")
    weight = opened({("w", "weight"): random_array((3,), "complex128")})
    with pytest.raises(UnsupportedError, match=r"w \(weight\) has the dtype complex128"):
        ucformat.convert(weight, tmp_path / "dst", weights="safetensors")
    one = opened({("w", "weight"): random_array((3,), "float32")})
    with pytest.raises(UsageError, match="virtual"):
        ucformat.convert(one, tmp_path / "dst", weights="safetensors", virtual=True)
    with pytest.raises(UsageError, match="'zip' is not supported"):
        ucformat.convert(one, tmp_path / "dst", weights="zip")  # type: ignore[arg-type]
    assert files(tmp_path) == []
    assert one.hf_url is None


def test_the_command(tmp_path: Path) -> None:
    source, _ = zero3(tmp_path / "src")
    run = CliRunner()
    dry = run.invoke(
        ucp,
        [
            "convert",
            str(source),
            str(tmp_path / "ck"),
            "--weights",
            "safetensors",
            "--dry-run",
            "--json",
        ],
    )
    assert dry.exit_code == 0, dry.output
    assert not (tmp_path / "ck").exists()
    done = run.invoke(
        ucp, ["convert", str(source), str(tmp_path / "ck"), "--weights", "safetensors", "-q"]
    )
    assert done.exit_code == 0, done.output
    shown = run.invoke(ucp, ["show", str(tmp_path / "ck"), "--json"])
    url = json.loads(shown.stdout)["hf_url"]
    assert url == ucformat.open(tmp_path / "ck").hf_url
    sizes = sum(f.stat().st_size for f in files(url))
    shards = sum(f.stat().st_size for f in files(tmp_path / "ck") if "/c/" in f"{f}/")
    assert json.loads(dry.stdout)["bytes_written"] == sizes + shards
    assert url in run.invoke(ucp, ["show", str(tmp_path / "ck")], env={"COLUMNS": "400"}).stdout


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_same_model(tied: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=300,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf/tokenizer_config.json").write_text("{}")
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    ck = ucformat.convert(tmp_path / "hf", tmp_path / "ck", weights="safetensors")
    folder = Path(str(ck.hf_url))
    assert (folder / "tokenizer_config.json").read_bytes() == b"{}"
    assert (folder / "model.safetensors.index.json").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(model(tokens).logits, loaded(tokens).logits)
    found = ucformat.open(tmp_path / "ck")
    for name in found.names():
        assert same(found[name][...], state[name])
    assert dict(found.assets) == {
        name: (tmp_path / "hf" / name).read_bytes() for name in found.assets
    }
    assert {"config.json", "tokenizer_config.json"} <= found.assets.keys()
    ucformat.verify(found).raise_if_damaged()
    loaded.save_pretrained(folder, max_shard_size="5GB")  # as docs say: it damages the checkpoint
    (folder / "config.json").write_text("{}")
    assert not ucformat.verify(tmp_path / "ck")


def test_tied_names_are_written_as_by_the_export(tmp_path: Path) -> None:
    arrays = {("lm_head.weight", "weight"): random_array((30, 4), "float32")}
    source = opened(arrays, aliases={"model.embed_tokens.weight": "lm_head.weight"})
    ck = ucformat.convert(source, tmp_path / "ck", weights="safetensors")
    assert list(tensors_of(Path(str(ck.hf_url)))) == ["model.embed_tokens.weight"]
    assert ucformat.open(tmp_path / "ck").aliases == {"model.embed_tokens.weight": "lm_head.weight"}
    intact(ck, arrays)
    ucformat.export(source, tmp_path / "out", "safetensors")
    assert (tmp_path / "out/model.safetensors").read_bytes() == Path(
        str(ck.hf_url), "model.safetensors"
    ).read_bytes()


def test_an_unfinished_one_is_removed(tmp_path: Path) -> None:
    source, _ = zero3(tmp_path / "src")
    with pytest.raises(NotFinished):
        ucformat.convert(source, tmp_path / "dst", weights="safetensors", on="part:0/1")
    assert list((tmp_path / "dst").rglob("model*.safetensors"))
    (attempt,) = (p.stem for p in (tmp_path / "dst/attempts").iterdir())
    abandon(LocalStore(tmp_path / "dst"), attempt)
    assert files(tmp_path / "dst") == []


def test_overwriting_is_a_conflict_or_a_replacement(tmp_path: Path) -> None:
    one, other = trained(1), trained(2)
    ucformat.convert(opened(one), tmp_path / "ck", weights="safetensors")
    with pytest.raises(Conflict):
        ucformat.convert(opened(other), tmp_path / "ck", weights="safetensors")
    ucformat.convert(opened(other), tmp_path / "ck", weights="safetensors", overwrite=True)
    ck = ucformat.open(tmp_path / "ck")
    intact(ck, other)
    assert [p.name for p in (tmp_path / "ck/data").iterdir()] == [ck.manifest.attempt]
