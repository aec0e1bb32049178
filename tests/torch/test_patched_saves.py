"""Saves of patches: what is loaded is what was saved, whoever saved the base, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
import ucformat.torch
from tests.torch.ranks import KILLED, Ranks
from ucformat.errors import ChecksumError, MissingData, UsageError
from ucformat.format.encoded import find_image
from ucformat.format.tile_index import TileIndex
from ucformat.geometry.tensor import Key, single_extents
from ucformat.jobs.removal import discard
from ucformat.torch import Increments, Manager

if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3 import Bucket
    from ucformat.checkpoint import Checkpoint

W = Key("w", "weight")
PROGRAM = Ranks("tests.torch.patches_program")


def state(steps: int = 0) -> dict[str, torch.Tensor]:
    """Weights after steps of 1e-6, moments that all change, and tensors that do not."""
    generator = torch.Generator().manual_seed(7)
    master = torch.randn(700, 1111, generator=generator) * 0.02
    moment = torch.randn(300, 200, generator=generator)
    for _ in range(steps):
        master += 1e-6 * torch.randn(master.shape, generator=generator).sign()
        moment = moment * 0.9 + torch.randn(moment.shape, generator=generator)
    return {
        "w": master.bfloat16(),
        "moment": moment,
        "frozen": torch.arange(70_000),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(float(steps)),
        "new" if steps > 1 else "old": torch.ones(3),
    }


def stored(place: Path) -> int:
    return sum(f.stat().st_size for f in place.glob("data/**/*") if f.is_file())


def encodings(ck: Checkpoint) -> dict[int, int]:
    """How many tiles have each encoding."""
    out: dict[int, int] = {}
    assert ck.universal is not None
    described = ck.universal.sidecar().described
    files = {*ck.universal.sidecar().files, *(described.files if described else ())}
    for file in files:
        image = find_image(ck.store, file)
        assert isinstance(image, TileIndex)
        for encoding in image.entries["encoding"].tolist():
            out[encoding] = out.get(encoding, 0) + 1
    return out


def loaded(place: Path, model: dict[str, torch.Tensor]) -> bool:
    template = {name: torch.full_like(t, 1) for name, t in model.items()}
    ucformat.torch.load({"model": template}, place)
    return all(torch.equal(template[n], t) for n, t in model.items())


@pytest.mark.parametrize("form", ["packed", "zarr"])
def test_a_chain_is_read_by_everything(form: Any, tmp_path: Path) -> None:
    for n in range(4):
        ucformat.torch.save(
            {"model": state(n)}, tmp_path / str(n), form=form, base=True, patch=True, certify=True
        )
    first, last = ucformat.open(tmp_path / "0"), ucformat.open(tmp_path / "3")
    assert not first.manifest.bases
    assert [base.url for base in last.manifest.bases] == ["../2", "../0"]
    assert loaded(tmp_path / "3", state(3))
    assert ucformat.verify(last).problems == ()
    assert stored(tmp_path / "3") < 0.5 * stored(tmp_path / "0")
    plan = last["w"].plan()
    assert plan.bytes_read > 700 * 1111 * 2  # of the anchor, too
    for made in (
        ucformat.convert(last, tmp_path / "converted"),
        ucformat.open(ucformat.copy(tmp_path / "3", tmp_path / "copy").url),
    ):
        assert ucformat.verify(made).problems == ()
        assert all((made[k].read() == last[k].read()).all() for k in last.tensors)
    ucformat.export(last, tmp_path / "hf", "safetensors")
    assert (ucformat.open(tmp_path / "hf")["w"].read() == last["w"].read()).all()
    assert not discard(str(tmp_path / "2"))
    assert discard(str(tmp_path / "3"))
    assert not discard(str(tmp_path / "2"))
    assert discard(str(tmp_path / "copy"))
    (tmp_path / "1").rename(tmp_path / "elsewhere")  # the base of 2
    problems = ucformat.verify(tmp_path / "2").problems
    assert [p.name for p in problems if p.name == "w"] == ["w"]  # of four tiles
    (tmp_path / "elsewhere").rename(tmp_path / "1")
    assert discard(str(tmp_path / "2"))


def test_every_form_of_a_base(tmp_path: Path) -> None:
    """The next one is a patch of any of them, and no larger."""
    ucformat.torch.save({"model": state()}, tmp_path / "packed", form="packed")
    ucformat.torch.save({"model": state()}, tmp_path / "zarr", chunk_bytes=50_000)
    ucformat.torch.save({"model": state()}, tmp_path / "hf", form="safetensors")
    ucformat.materialize(tmp_path / "packed", tmp_path / "blosc", codec="blosc")
    sizes = set()
    for base in ("packed", "zarr", "hf", "blosc"):
        place = tmp_path / f"on-{base}"
        ucformat.torch.save({"model": state(1)}, place, base=tmp_path / base, patch=True)
        assert loaded(place, state(1))
        assert ucformat.verify(place).problems == ()
        assert encodings(ucformat.open(place)) == {2: 4, 1: 1, 0: 1}, base
        sizes.add(stored(place))
    assert len(sizes) <= 4


def test_equal_tiles_are_told_by_their_fingerprints(tmp_path: Path) -> None:
    model = state()
    ucformat.torch.save({"model": model}, tmp_path / "0", form="packed", base=True)
    model["w"][250, 5] += 1  # between tiles that are equal
    done = ucformat.torch.save({"model": model}, tmp_path / "1", form="packed", base=True)
    ck = ucformat.open(tmp_path / "1")
    assert encodings(ck) == {0: 1, 4: 3}
    assert done.nbytes < 700 * 1111 * 2
    assert loaded(tmp_path / "1", model)
    assert ucformat.verify(ck).problems == ()
    model["w"] += 1  # nothing is the same: the base is not needed for it
    ucformat.torch.save({"model": model}, tmp_path / "2", form="packed", base=True)
    assert [base.url for base in ucformat.open(tmp_path / "2").manifest.bases] == ["../0"]


def test_a_damaged_tile_of_a_base_is_told(tmp_path: Path) -> None:
    ucformat.torch.save({"model": state()}, tmp_path / "0", form="packed")
    ucformat.torch.save({"model": state(1)}, tmp_path / "1", base=tmp_path / "0", patch=True)
    extent = next(single_extents(ucformat.open(tmp_path / "0").source.extents(W)))
    data = bytearray((tmp_path / "0" / extent.file).read_bytes())
    data[extent.offset + 1000] ^= 1
    (tmp_path / "0" / extent.file).write_bytes(data)
    with pytest.raises(ChecksumError, match=r"w \(weight\) in the base .*: the chunk at bytes"):
        loaded(tmp_path / "1", state(1))
    (tmp_path / "0" / extent.file).unlink()
    with pytest.raises(MissingData, match=r"w \(weight\) in the base"):
        loaded(tmp_path / "1", state(1))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="patch=True needs a base"):
        ucformat.torch.save({"m": state()}, tmp_path / "a", patch=True)
    with pytest.raises(UsageError, match='not possible with form="safetensors"'):
        ucformat.torch.save(
            {"m": state()}, tmp_path / "a", form="safetensors", base=True, patch=True
        )
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async"])
@pytest.mark.front("async")
def test_ranks_save_patches_and_go_on_under_another_layout(
    asynchronous: bool, tmp_path: Path
) -> None:
    seen = PROGRAM.run("trained", 2, tmp_path, asynchronous=asynchronous)
    first, *others = (sum(of_save) for of_save in zip(*seen, strict=True))
    assert max(others) < 0.9 * first
    for step in range(1, 7):
        ck = ucformat.open(tmp_path / str(step))
        assert ucformat.verify(ck).problems == ()
        assert [base.url for base in ck.manifest.bases[:1]] == [f"../{step - 1}"] * (step > 1)
        weight = ck["0.weight"]
        if step > 1:
            file_bytes = weight.plan().bytes_read - ucformat.open(
                tmp_path / str(step - 1)
            )["0.weight"].plan().bytes_read  # fmt: skip
            assert file_bytes < 0.1 * 256 * 512 * 2


def test_a_killed_save_leaves_the_chain_readable(tmp_path: Path) -> None:
    assert PROGRAM.run("killed", 2, tmp_path)[1] == KILLED
    assert not (tmp_path / "2" / "manifest.json").exists()
    assert ucformat.verify(tmp_path / "1").problems == ()


def test_patches_on_objects(bucket: Bucket) -> None:
    root = bucket.place("patches/run")
    for n in range(3):
        ucformat.torch.save({"model": state(n)}, f"{root}/{n}", base="latest", patch=True)
    ck = ucformat.open(f"{root}/2")
    assert [base.url for base in ck.manifest.bases] == ["../1", "../0"]
    assert torch.equal(ck["w"].torch(), state(2)["w"])
    assert ucformat.verify(ck).problems == ()


def run_of(folder: Path, policy: Any, steps: range, **arguments: Any) -> list[list[str]]:
    """The steps on which each is based that a run with increments saves."""
    increments = Increments(policy, patch=True, max_chain=arguments.pop("max_chain", 8))
    out = []
    with Manager(folder, increments=increments, **arguments) as manager:
        for step in steps:
            manager.save(step, {"model": state(step)})
            manager.wait()
            bases = ucformat.open(folder / f"step-{step:08d}").manifest.bases
            out.append([base.url.rpartition("-")[2].lstrip("0") for base in bases])
    return out


def test_a_run_with_each_policy(tmp_path: Path) -> None:
    chain = run_of(tmp_path / "c", "consecutive", range(1, 6), max_chain=3, form="packed")
    assert [bases[:1] for bases in chain] == [[], ["1"], ["2"], ["3"], []]
    anchored = run_of(tmp_path / "o", "one-shot", range(1, 4), asynchronous=True)
    assert [bases[:1] for bases in anchored] == [[], ["1"], ["1"]]
    run_of(tmp_path / "i", "intermittent", range(1, 4))
    for folder, last in (("c", 5), ("o", 3), ("i", 3)):
        for place in (tmp_path / folder).glob("step-*"):
            assert ucformat.verify(place).problems == ()
        model = {name: torch.full_like(t, 1) for name, t in state(last).items()}
        with Manager(tmp_path / folder) as manager:
            report = manager.restore_latest({"model": model})
        assert report is not None
        assert report.step == last
        assert all(torch.equal(model[name], t) for name, t in state(last).items())


def test_a_run_keeps_what_it_needs_and_goes_on_from_what_it_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_of(tmp_path, "consecutive", range(1, 5), keep=1)
    assert len(list(tmp_path.glob("step-*/manifest.json"))) == 4  # each needs the one before
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    (file,) = tmp_path.glob("step-00000004/data/*/*.bin")
    file.write_bytes(file.read_bytes()[:-5])
    with Manager(tmp_path, increments=Increments(patch=True)) as manager:
        report = manager.restore_latest({"model": state(3)})
        assert report is not None
        assert report.step == 3
        manager.save(4, {"model": state(4)})
    ck = ucformat.open(tmp_path / "step-00000004")
    assert ucformat.verify(ck).problems == ()
    assert ck.manifest.bases[0].url == "../step-00000003"


def test_increments_choose_the_base(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="increments choose the base"):
        Manager(tmp_path, increments=Increments(), base="latest")
