"""Saves with a codec: what is loaded, converted and compared is what was saved, in fewer bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import ucformat
import ucformat.torch
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import UsageError
from ucformat.format.encoded import find_image
from ucformat.format.tile_index import TileIndex
from ucformat.geometry.tensor import Key, single_extents
from ucformat.storage.local import LocalStore
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.torch.saving.options import Codec


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(700, 1111, generator=generator) * 0.02
    return {
        "w": weights.bfloat16(),
        "t": weights.T[:300].clone().T,  # not contiguous
        "cube": torch.randn(3, 40, 50, generator=generator).double(),
        "c": torch.arange(7),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
        "mask": torch.tensor([True, False, True]),
    }


def differences(a: Path, b: Path | Checkpoint) -> int:
    """The elements that differ, which are all read."""
    left, right = ucformat.open(a), ucformat.open(b) if not isinstance(b, Checkpoint) else b
    assert set(left.tensors) == set(right.tensors)
    return sum(left[k].read().tobytes() != right[k].read().tobytes() for k in left.tensors)


def stored(place: Path) -> int:
    return sum(f.stat().st_size for f in place.glob("data/*/*.bin"))


@pytest.mark.parametrize("codec", ["blosc", "raw"])
def test_a_save_is_read_by_everything(codec: Codec, tmp_path: Path) -> None:
    model, place, plain = state(), tmp_path / "a", tmp_path / "plain"
    ucformat.torch.save({"model": model}, place, form="packed", codec=codec, certify=True)
    ucformat.torch.save({"model": model}, plain, form="packed")
    assert (stored(place) < 0.95 * stored(plain)) == (codec == "blosc")
    ck = ucformat.open(place)
    assert ucformat.verify(ck).problems == ()
    template = {name: torch.full_like(t, 1) for name, t in model.items()}
    ucformat.torch.load({"model": template}, place)
    assert all(torch.equal(template[n], t) for n, t in model.items())
    assert (ck["cube"][1:2, 3:7, ::2] == model["cube"][1:2, 3:7, ::2].numpy()).all()
    assert ck["w"].fingerprint == ucformat.open(plain)["w"].fingerprint
    assert not differences(plain, place)
    for made in (
        ucformat.materialize(place, tmp_path / "arrays"),
        ucformat.convert(place, tmp_path / "converted"),
        ucformat.open(ucformat.copy(place, tmp_path / "copy").url),
    ):
        assert ucformat.verify(made).problems == ()
        assert not differences(plain, made)
    ucformat.export(place, tmp_path / "hf", "safetensors")
    weights = ucformat.open(tmp_path / "hf")
    assert (weights["w"].read() == ck["w"].read()).all()


def test_plans_count_what_is_stored(tmp_path: Path) -> None:
    ucformat.torch.save({"model": state()}, tmp_path / "a", form="packed", codec="blosc")
    reads = RecordingStore(LocalStore(tmp_path / "a"))
    ck = open_checkpoint(reads)
    plan = ck["w"].plan()
    reads.clear()
    ck["w"].read()
    assert plan.bytes_needed == 700 * 1111 * 2
    assert plan.bytes_read == reads.nbytes < 0.75 * plan.bytes_needed


def test_small_tensors_beside_arrays(tmp_path: Path) -> None:
    model = {f"p{n}": torch.full((40,), float(n)) for n in range(1200)} | {"w": state()["w"]}
    ucformat.torch.save({"model": model}, tmp_path / "a", form="zarr", codec="blosc")
    ck = ucformat.open(tmp_path / "a")
    assert {k.codec for k in ck.manifest.tensors.kinds if k.path is None} == {"tiles"}
    assert ucformat.verify(ck).problems == ()
    template = {name: torch.zeros_like(t) for name, t in model.items()}
    ucformat.torch.load({"model": template}, ck)
    assert all(torch.equal(template[n], t) for n, t in model.items())


def test_equal_tiles_have_equal_fingerprints_wherever_they_are(tmp_path: Path) -> None:
    first, second = state(), {"before": torch.ones(3), **state()}
    second["w"][5, 5] += 1
    fingerprints = []
    for name, model in (("a", first), ("b", second)):
        ucformat.torch.save({"model": model}, tmp_path / name, form="packed", codec="raw")
        ck = ucformat.open(tmp_path / name)
        tiles = [e for t in ck.source.extents(Key("w", "weight")) for e in single_extents([t])]
        images = [find_image(ck.store, e.file) for e in tiles]
        assert len(tiles) > 2
        fingerprints.append(
            [
                image.fingerprint(image.meeting(e.offset, e.offset + 1).start)
                for image, e in zip(images, tiles, strict=True)
                if isinstance(image, TileIndex)
            ]
        )
    equal = [x == y for x, y in zip(*fingerprints, strict=True)]
    assert equal == [False] + [True] * (len(equal) - 1)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="codec='zip' is not supported"):
        ucformat.torch.save({"m": state()}, tmp_path / "a", form="packed", codec="zip")  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()


def test_saves_in_the_background(tmp_path: Path) -> None:
    model = state()
    ucformat.torch.async_save({"model": model}, tmp_path / "a", form="packed", codec="blosc").wait()
    assert ucformat.verify(tmp_path / "a").problems == ()
    with ucformat.torch.Manager(
        tmp_path / "run", asynchronous=True, form="packed", codec="blosc"
    ) as manager:
        manager.save(1, {"model": model}, force=True)
    (place,) = (tmp_path / "run").glob("step-*")
    assert {k.codec for k in ucformat.open(place).manifest.tensors.kinds} == {"tiles"}
    assert stored(place) < 0.95 * sum(t.nbytes for t in model.values())
