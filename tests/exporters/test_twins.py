"""One training state has the same fingerprints in every form, of ours and of engines."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ucformat
from tests.engines.megatron.test_export import KEPT
from tests.exporters.test_engines import SAMPLES
from tests.fakes import random_array
from tests.sources.suite import DATA
from ucformat.geometry.box import Box
from ucformat.geometry.fingerprint import fingerprint_of, text_of
from ucformat.settings import using
from ucformat.torch.saving.options import SaveOptions
from ucformat.torch.saving.save import save_local
from ucformat.torch.state.local import LocalState, local_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.fakes import Arrays
    from ucformat.catalog.catalog import Catalog
    from ucformat.checkpoint import Checkpoint

    Fingerprints = dict[tuple[str, str], str]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

#: Names that Megatron has, too.
SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.word_embeddings.weight": (61, 12),
    "decoder.final_layernorm.weight": (13,),
    "decoder.final_layernorm.bias": (1,),
    "output_layer.weight": (37, 11),
}
FORMS = ("zarr", "packed", "safetensors")
ZERO = {"buffers": "none", "step": 7}
#: Exporters, each with options; the first ones are of `make test`.
EXPORTS: list[tuple[str, dict[str, Any]]] = [
    ("safetensors", {}),
    ("torch", {}),
    ("dcp", {"max_item_bytes": 500}),
    ("megatron", {"max_item_bytes": 500}),
    ("orbax", {}),
    ("deepspeed", {"stage": 3, "world": 3, **ZERO}),
    ("deepspeed-universal", {"stage": 1, **ZERO}),
    ("safetensors", {"max_shard_bytes": 500}),
    ("megatron", {"distributed_optimizer": False}),
    ("deepspeed", {"stage": 0, "world": 2, **ZERO}),
    ("deepspeed", {"stage": 1, "world": 5, **ZERO}),
    ("deepspeed", {"stage": 2, "world": 2, **ZERO}),
]
FRONT = 7


def training_state(shapes: dict[str, tuple[int, ...]], seed: int) -> Arrays:
    """Masters, weights that are these in 16 bits, and moments of any bits, NaNs and -0.0 among them."""
    rng, state = np.random.default_rng(seed), {}
    for n, (name, shape) in enumerate(shapes.items()):
        master = rng.standard_normal(shape, "float32")
        state[name, "weight"] = master.astype(ml_dtypes.bfloat16)
        state[name, "master"] = master
        state[name, "exp_avg"] = random_array(shape, "float32", seed + 100 + n)
        state[name, "exp_avg_sq"] = random_array(shape, "float32", seed + 200 + n)
    return state


def tensor_of(array: Any) -> torch.Tensor:
    bits = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
    return bits.view(getattr(torch, array.dtype.name)).reshape(array.shape)


def saved(state: Arrays, place: Path, form: Any) -> Checkpoint:
    """The state as our own save writes it."""
    tensors = tuple(local_of(*key, tensor_of(array)) for key, array in state.items())
    small: dict[str, Any] = {"chunk_bytes": 256, "shard_bytes": 1024} if form == "zarr" else {}
    save_local(
        LocalState(tensors, groups=(group_of(state),)), SaveOptions(str(place), form, **small)
    )
    return ucformat.open(place)


def group_of(state: Arrays) -> dict[str, Any]:
    names = list(dict.fromkeys(name for name, _ in state))
    return {"params": names, "lr": 0.1, "betas": [0.9, 0.99]}


def by_pytorch(state: Arrays, place: Path) -> Checkpoint:
    """The state as DCP itself saves it."""
    model = {n: tensor_of(a) for (n, kind), a in state.items() if kind == "weight"}
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in model}
    for (name, kind), array in state.items():
        if kind != "weight":
            states[name][kind] = tensor_of(array)
    optimizer = {"state": states, "param_groups": [group_of(state)]}
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=place, no_dist=True)
    return ucformat.open(place)


def computed(ck: Checkpoint) -> Fingerprints:
    """What is computed from the tensors, also where fingerprints are recorded."""
    return {key: whole(ck[key].read()) for key in ck.tensors}


def whole(array: Any) -> str:
    return text_of(fingerprint_of(array, array.shape, Box.whole(array.shape)))


def in_the_catalog(catalog: Catalog, ck: Checkpoint) -> Fingerprints:
    return {
        (t.name, t.state): str(t.digest).removeprefix("fingerprint:")
        for t in catalog.tensors(ck.id)
    }


def check_twins(state: Arrays, folder: Path, exports: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Check that all that is made of a state has its fingerprints, when it is written and when it is read."""
    url, expected = f"sqlite:///{folder}/catalog.db", {key: whole(a) for key, a in state.items()}
    ours = [saved(state, folder / form, form) for form in FORMS]
    for twin in ours:
        assert {(t.name, t.state): t.fingerprint for t in twin.manifest.tensors} == expected
        assert computed(twin) == expected
    theirs = by_pytorch(state, folder / "dcp.save")
    with ucformat.Catalog(url) as catalog:
        ucformat.register(theirs.home, catalog, fingerprint=True)
        assert in_the_catalog(catalog, theirs) == computed(theirs) == expected
        for n, (kind, options) in enumerate(exports):
            source = [theirs, *ours][n % 4]
            with using(catalog=url):
                done = ucformat.export(source, folder / f"out{n}", kind, **options)
            # the files of stage 0 do not tell which states are whose
            told = {"groups": [group_of(state)["params"]]} if options.get("stage") == 0 else None
            twin = ucformat.open(done.url, options=told)
            if told:
                ucformat.register(done.url, catalog, options=told, fingerprint=True)
            found = computed(twin)
            assert found == {key: expected[key] for key in found}, (kind, options)
            assert len(found) >= len(expected) // 4, (kind, options)
            assert in_the_catalog(catalog, twin) == found, (kind, options)


@pytest.fixture(autouse=True)
def _short_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written in bands, of which one may end inside of a tensor."""
    monkeypatch.setattr("ucformat.jobs.bands.BAND_BYTES", 1000)


def test_one_state_in_every_form(tmp_path: Path) -> None:
    check_twins(training_state(SHAPES, 0), tmp_path, EXPORTS[:FRONT])


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(8))
def test_any_state_in_every_form(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    shapes = {
        name: tuple(chance.randrange(1, 30) for _ in range(chance.randrange(1, 4)))
        for name in SHAPES
    }
    exports = chance.sample(EXPORTS, len(EXPORTS))  # so that each is made of each source
    check_twins(training_state(shapes, seed), tmp_path, exports)


@pytest.mark.parametrize(
    "sample", KEPT[:1] + [pytest.param(k, marks=pytest.mark.matrix) for k in KEPT[1:]]
)
def test_what_megatron_saved_in_two_formats(sample: str) -> None:
    """A training that Megatron-Core saved distributed, and a file for each rank."""
    first, second = (
        computed(ucformat.open(DATA / "megatron" / sample / kind))
        for kind in ("sharded", "classic")
    )
    assert first == second


@pytest.mark.matrix
@pytest.mark.parametrize("sample", SAMPLES)
def test_what_engines_saved(sample: str, tmp_path: Path) -> None:
    """Converted and exported, it has the fingerprints of what is read of the engine's files."""
    foreign = ucformat.open(DATA / sample)
    expected = computed(foreign)
    with ucformat.Catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        ucformat.register(foreign.home, catalog, fingerprint=True)
        assert in_the_catalog(catalog, foreign) == expected
        for weights in (None, "safetensors"):
            ck = ucformat.convert(foreign, tmp_path / str(weights), weights=weights)
            assert {(t.name, t.state): t.fingerprint for t in ck.manifest.tensors} == expected
        with using(catalog=catalog.url):
            done = ucformat.export(foreign, tmp_path / "orbax", "orbax")
        twin = ucformat.open(done.url)
        found = computed(twin)  # also of what Orbax stores as tensors, such as random states
        assert in_the_catalog(catalog, twin) == found
        padding = {key for key in expected if key[1].endswith(".padding")}  # which is left out
        assert {
            k: text for k, text in expected.items() if k not in padding
        }.items() <= found.items()
