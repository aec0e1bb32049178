"""Adapters of PEFT: what is applied is `W + s B A`, and all else is refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ucformat
from tests.fakes import same
from tests.jobs.combine.reference import source
from tests.sources.suite import DATA
from tests.zero_files import FLAT, write_zero3
from ucformat.errors import (
    Conflict,
    IntegrityError,
    NotACheckpoint,
    NotFound,
    UcformatError,
    UnsupportedError,
    UsageError,
)
from ucformat.jobs.combine import job
from ucformat.reading.dtypes import numpy_dtype

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = "base_model.model."
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 3, "lora_alpha": 5, "use_rslora": False, "fan_in_fan_out": False, "bias": "none",
    "rank_pattern": {}, "alpha_pattern": {}, "use_dora": False, "target_modules": ["q"], "init_lora_weights": True,
    "megatron_core": "megatron.core", "modules_to_save": None, "layer_replication": None,
}  # fmt: skip
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def base_tensors(dtype: str = "float32") -> dict[str, Any]:
    shapes: dict[str, tuple[int, ...]] = {
        "x.q.weight": (20, 30),
        "x.k.weight": (16, 16),
        "x.q.bias": (20,),
    }
    shapes |= {"e.weight": (50, 12), "n.weight": (12,)}
    return {name: normal(*shape).astype(numpy_dtype(dtype)) for name, shape in shapes.items()}


def adapter(place: Path, tensors: dict[str, Any], **config: Any) -> Path:
    place.mkdir(parents=True)
    save_file(
        {PREFIX + name: a for name, a in tensors.items()}, place / "adapter_model.safetensors"
    )
    (place / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return place


def low_rank(module: str, out: int, into: int, rank: int = 3) -> dict[str, Any]:
    return {
        f"{module}.lora_A.weight": normal(rank, into),
        f"{module}.lora_B.weight": normal(out, rank),
    }


def delta(tensors: dict[str, Any], module: str) -> Any:
    """`B A` in float64, rank by rank."""
    a, b = (tensors[f"{module}.lora_{half}.weight"].astype(float) for half in "AB")
    product = np.zeros((b.shape[0], a.shape[1]))
    for k in range(len(a)):
        product += np.outer(b[:, k], a[k])
    return product


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_linear_layer(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_BLOCK", 77)
    monkeypatch.setattr(job, "_READ_BYTES", 1000)
    base = base_tensors(dtype)
    found = low_rank("x.q", 20, 30) | low_rank("x.k", 16, 16)
    place = adapter(tmp_path / "a", found)
    sizes: dict[str, Any] = {"chunk_bytes": 256, "shard_bytes": 1024}
    ck = ucformat.merge("lora", place, tmp_path / "dst", base=source(base), **sizes)
    for module in ("x.q", "x.k"):
        expected = base[f"{module}.weight"].astype(float) + delta(found, module) * (5 / 3)
        assert same(ck[f"{module}.weight"][...], expected.astype(numpy_dtype(dtype)))
    assert all(same(ck[name][...], base[name]) for name in ("x.q.bias", "e.weight", "n.weight"))
    assert [e.how for e in ck.manifest.lineage] == [
        {"method": "lora", "role": "base"},
        {"method": "lora", "role": "adapter", "weight": 1.0},
    ]
    other = ucformat.merge("lora", [place], tmp_path / "other", base=source(base))
    assert all(same(other[name][...], ck[name][...]) for name in base)


def test_scalings_of_patterns_and_weights(tmp_path: Path) -> None:
    base, found = base_tensors(), low_rank("x.q", 20, 30, 2) | low_rank("x.k", 16, 16)
    config = {"rank_pattern": {"q": 2}, "alpha_pattern": {r"x\.k": 7}, "use_rslora": True}
    place = adapter(tmp_path / "a", found, **config)
    ck = ucformat.merge("lora", place, tmp_path / "dst", base=source(base), weights=[0.5])
    for module, scaling in (("x.q", 5 / np.sqrt(2)), ("x.k", 7 / np.sqrt(3))):
        expected = base[f"{module}.weight"].astype(float) + delta(found, module) * (0.5 * scaling)
        np.testing.assert_array_max_ulp(ck[f"{module}.weight"][...], expected.astype(np.float32), 1)


def test_transposed_layers_and_embeddings(tmp_path: Path) -> None:
    """Of a square tensor only the configuration tells whether it is transposed, as Conv1D is."""
    base = base_tensors()
    found = low_rank("x.q", 30, 20) | low_rank("x.k", 16, 16)
    found |= {"e.lora_embedding_A": normal(3, 50), "e.lora_embedding_B": normal(12, 3)}
    ck = ucformat.merge(
        "lora",
        adapter(tmp_path / "a", found, fan_in_fan_out=True),
        tmp_path / "dst",
        base=source(base),
    )
    for module in ("x.q", "x.k"):
        expected = base[f"{module}.weight"].astype(float) + delta(found, module).T * (5 / 3)
        np.testing.assert_array_max_ulp(ck[f"{module}.weight"][...], expected.astype(np.float32), 1)
    product = (found["e.lora_embedding_B"].astype(float) @ found["e.lora_embedding_A"]).T
    np.testing.assert_allclose(
        ck["e.weight"][...], base["e.weight"] + product * (5 / 3), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(
        UnsupportedError, match=r"fan_in_fan_out is false, but not so for x\.q.*x\.k"
    ):
        ucformat.merge("lora", adapter(tmp_path / "b", found), tmp_path / "x", base=source(base))


def test_replaced_tensors_and_several_adapters(tmp_path: Path) -> None:
    base = base_tensors("bfloat16")
    first = low_rank("x.q", 20, 30) | {"n.weight": normal(12), "x.q.bias": normal(20)}
    second = low_rank("x.q", 20, 30)
    places = [adapter(tmp_path / "a", first, bias="lora_only"), adapter(tmp_path / "b", second)]
    ck = ucformat.merge("lora", places, tmp_path / "dst", base=source(base), weights=[1, 2])
    for name in ("n.weight", "x.q.bias"):
        assert same(ck[name][...], first[name].astype(base[name].dtype))
    wide = base["x.q.weight"].astype(float) + delta(first, "x.q") * (5 / 3)
    expected = (wide + delta(second, "x.q") * (2 * 5 / 3)).astype(base["x.q.weight"].dtype)
    assert same(ck["x.q.weight"][...], expected)
    with pytest.raises(UsageError, match="its weight is 2"):
        ucformat.merge("lora", places, tmp_path / "x", base=source(base), weights=[2, 1])
    again = adapter(tmp_path / "c", low_rank("x.q", 20, 30) | {"n.weight": normal(12)})
    with pytest.raises(Conflict, match=r"several adapters replace n\.weight"):
        ucformat.merge("lora", [places[0], again], tmp_path / "x", base=source(base))


Q = low_rank("x.q", 20, 30)
CONVOLUTION = {"x.q.lora_A.weight": normal(3, 4, 3, 3), "x.q.lora_B.weight": normal(20, 3, 1, 1)}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[UcformatError], str]] = {
    "dora": (Q, {"use_dora": True}, UnsupportedError, "use_dora cannot be merged"),
    "magnitudes": (Q | {"x.q.lora_magnitude_vector": normal(20)}, {}, UnsupportedError, "DoRA"),
    "bias": (
        Q | {"x.q.lora_B.bias": normal(20)},
        {"lora_bias": True},
        UnsupportedError,
        "lora_bias",
    ),
    "unknown": (Q, {"use_new_thing": {"a": 1}}, UnsupportedError, "use_new_thing"),
    "pissa": (Q, {"init_lora_weights": "pissa_niter_4"}, UnsupportedError, "pissa_niter_4"),
    "type": (Q, {"peft_type": "LOHA"}, UnsupportedError, "'LOHA'"),
    "convolution": (
        CONVOLUTION,
        {},
        UnsupportedError,
        "linear",
    ),
    "name": (low_rank("y.q", 20, 30), {}, UsageError, r"no tensors for .*y\.q\.lora_A"),
    "module": ({"score.weight": normal(3, 3)}, {}, UsageError, r"no tensors for .*score\.weight"),
    "shape": (low_rank("x.q", 21, 30), {}, UsageError, r"has \(20, 30\)"),
    "replaced": ({"n.weight": normal(13)}, {}, UsageError, r"has the shape \(13,\)"),
    "rank": (Q, {"r": 4}, IntegrityError, "rank of x.q is 4"),
    "half": ({"x.q.lora_A.weight": normal(3, 30)}, {}, IntegrityError, "not both halves"),
    "zero": (Q, {"r": 0}, IntegrityError, "not what PEFT writes"),
    "huge": (Q, {"lora_alpha": 10**400}, IntegrityError, "not what PEFT writes"),
    "pattern": (Q, {"rank_pattern": ["q"]}, IntegrityError, "not what PEFT writes"),
    "slow": (Q, {"rank_pattern": {"(a+)+b": 3}}, UcformatError, r"\(a\+\)\+b"),
    "nothing": (
        {},
        {"target_modules": ["qq"]},
        IntegrityError,
        r'no tensors of LoRA: its target_modules, \["qq"\]',
    ),
    "no LoRA": ({"n.weight": normal(12)}, {}, IntegrityError, "no tensors of LoRA"),
    "not gathered": (
        {name: a[:0] if "_B" in name else a.ravel()[:0] for name, a in Q.items()},
        {},
        IntegrityError,
        r"x\.q\.lora_A\.weight has the shape \(0,\), and no elements",
    ),
    "one not gathered": (Q | {"n.weight": normal(0)}, {}, IntegrityError, "n.weight has the shape"),
    "several": (
        {
            f"x.{m}.lora_{half}.{n}.weight": a
            for n in ("a", "b")
            for m, a, half in (("q", Q["x.q.lora_A.weight"], "A"),)
        },
        {},
        UsageError,
        "several adapters: a, b",
    ),
    "a target is missing": (
        Q,
        {"target_modules": ["q", "k"]},
        IntegrityError,
        r"no tensors for x\.k\.weight of the base",
    ),
    "a module is missing": (
        Q,
        {"modules_to_save": ["n"]},
        IntegrityError,
        r"no tensors for n\.weight of the base",
    ),
    "biases are missing": (
        Q,
        {"bias": "all"},
        IntegrityError,
        r"no tensors for x\.q\.bias of the base",
    ),
    "a layer's bias is missing": (
        Q,
        {"bias": "lora_only"},
        IntegrityError,
        r"no tensors for x\.q\.bias of the base",
    ),
    "odd bias": (Q, {"bias": "some"}, IntegrityError, "the bias 'some'"),
    "nan": (
        Q | {"x.q.lora_B.weight": np.full((20, 3), np.nan, np.float32)},
        {},
        UsageError,
        "lora_B.*not finite",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged(case: str, tmp_path: Path) -> None:
    tensors, config, error, message = REFUSED[case]
    place = adapter(tmp_path / "a", tensors, **config)
    with pytest.raises(error, match=message):
        ucformat.merge("lora", place, tmp_path / "dst", base=source(base_tensors()))
    with pytest.raises(NotFound):
        ucformat.open(tmp_path / "dst")


def whole_model(
    base: dict[str, Any], trained: dict[str, Any], name: str = "default"
) -> dict[str, Any]:
    """The state of a model of PEFT, as engines save it: with the name of the adapter, and the frozen base."""
    inside = {part.rsplit(".lora_", 1)[0] for part in trained if ".lora_" in part}
    out = {}
    for tensor, array in base.items():
        module, _, own = tensor.rpartition(".")
        out[f"{module}.base_layer.{own}" if module in inside else tensor] = array
    for tensor, array in trained.items():
        head, half, tail = tensor.partition(".lora_")
        out[f"{head}{half}{tail[:1]}.{name}.weight" if half else tensor] = array
    return {PREFIX + tensor: array for tensor, array in out.items()}


def test_a_checkpoint_of_trainer(tmp_path: Path) -> None:
    """With the optimizer's states, which are numbered, and the random states, which may be tensors."""
    place = DATA / "huggingface" / "trainer_adapter" / "ckpt"
    found = {
        n.removeprefix(PREFIX): a for n, a in load_file(place / "adapter_model.safetensors").items()
    }
    modules = {n.rpartition(".lora_")[0] for n in found}
    shapes = {
        m: (len(found[f"{m}.lora_B.weight"]), found[f"{m}.lora_A.weight"].shape[1]) for m in modules
    }
    base = {f"{module}.weight": normal(*shape) for module, shape in shapes.items()}
    merged = ucformat.merge("lora", place, tmp_path / "a", base=source(base))
    file = ucformat.merge(
        "lora", place / "adapter_model.safetensors", tmp_path / "b", base=source(base)
    )
    converted = ucformat.convert(place, tmp_path / "u")
    through = ucformat.merge("lora", converted, tmp_path / "c", base=source(base))
    for module in modules:
        expected = base[f"{module}.weight"].astype(float) + delta(found, module) * (8 / 3)
        for ck in (merged, file, through):
            assert same(ck[f"{module}.weight"][...], expected.astype(np.float32))


@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
def test_a_whole_model_with_its_adapter(bias: str, tmp_path: Path) -> None:
    """Of it, what was trained is merged: the frozen base is there, too, and other than the base that is given."""
    base = base_tensors() | {"x.k.bias": normal(16)}
    trained = low_rank("x.q", 20, 30)
    biases = {"none": [], "lora_only": ["x.q.bias"], "all": ["x.q.bias", "x.k.bias"]}[bias]
    state = whole_model({name: a + (name in biases) for name, a in base.items()}, trained)
    state |= {
        f"{PREFIX}n.original_module.weight": normal(12),
        f"{PREFIX}n.modules_to_save.default.weight": normal(12),
    }
    state.pop(f"{PREFIX}n.weight")
    facts: dict[str, Any] = {"assets": ("adapter_config.json",)}
    adapted = source(state, **facts)
    with adapted.store.create("adapter_config.json") as out:
        out.write(json.dumps(CONFIG | {"bias": bias}).encode())
    ck = ucformat.merge("lora", adapted, tmp_path / "dst", base=source(base))
    expected = base["x.q.weight"].astype(float) + delta(trained, "x.q") * (5 / 3)
    assert same(ck["x.q.weight"][...], expected.astype(np.float32))
    assert same(ck["n.weight"][...], state[f"{PREFIX}n.modules_to_save.default.weight"])
    for name in ("x.q.bias", "x.k.bias", "x.k.weight", "e.weight"):
        assert same(ck[name][...], base[name] + (name in biases))
    beyond = source(
        {(name, s): a for name, a in state.items() for s in ("weight", "exp_avg")}, **facts
    )
    with beyond.store.create("adapter_config.json") as out:
        out.write(json.dumps(CONFIG | {"bias": bias}).encode())
    with pytest.raises(UnsupportedError, match="was trained, and is no part of the adapter"):
        ucformat.merge("lora", beyond, tmp_path / "x", base=source(base))


def test_deepspeeds_checkpoint_of_an_adapter(tmp_path: Path) -> None:
    """ZeRO-3 holds masters alone, and the copy of the adapter beside them may be empty."""
    base, trained = base_tensors(), low_rank("x.q", 20, 30)
    names = [n for n in whole_model(base, trained) if ".lora_" in n]
    arrays = {(n, s): a for n, a in zip(names, trained.values(), strict=True) for s in FLAT}
    write_zero3(tmp_path / "checkpoint-5", arrays, ranks=3)
    adapter(tmp_path / "empty", {name: a.ravel()[:0] for name, a in trained.items()})
    for file in (tmp_path / "empty").iterdir():
        file.rename(tmp_path / "checkpoint-5" / file.name)
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text(json.dumps({"global_step": 5}))
    ck = ucformat.merge("lora", tmp_path / "checkpoint-5", tmp_path / "dst", base=source(base))
    expected = base["x.q.weight"].astype(float) + delta(trained, "x.q") * (5 / 3)
    assert same(ck["x.q.weight"][...], expected.astype(np.float32))
    with pytest.raises(IntegrityError, match="no elements"):
        ucformat.merge(
            "lora",
            tmp_path / "checkpoint-5" / "adapter_model.safetensors",
            tmp_path / "x",
            base=source(base),
        )


def test_files_that_are_no_adapter(tmp_path: Path) -> None:
    place = adapter(tmp_path / "a", Q)
    (place / "adapter_config.json").write_text("{")
    with pytest.raises(IntegrityError, match="not valid JSON"):
        ucformat.merge("lora", place, tmp_path / "x", base=source(base_tensors()))
    (place / "adapter_config.json").unlink()
    with pytest.raises(NotACheckpoint, match=r"no adapter_config\.json"):
        ucformat.merge("lora", place, tmp_path / "x", base=source(base_tensors()))
    other = adapter(tmp_path / "b", {})
    save_file({"w": normal(3)}, other / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match="w is no tensor of an adapter"):
        ucformat.merge("lora", other, tmp_path / "x", base=source(base_tensors()))


def test_a_tensor_to_which_another_is_tied(tmp_path: Path) -> None:
    tied = source(base_tensors(), aliases={"y.q.weight": "x.q.weight"})
    for module in ("x.q", "y.q"):
        with pytest.raises(UnsupportedError, match=r"y\.q\.weight is tied"):
            ucformat.merge(
                "lora",
                adapter(tmp_path / module, low_rank(module, 20, 30)),
                tmp_path / "x",
                base=tied,
            )


def test_a_replaced_tensor_to_which_another_is_tied(tmp_path: Path) -> None:
    tied = source(base_tensors(), aliases={"head.weight": "e.weight"})
    place = adapter(tmp_path / "a", Q | {"head.weight": normal(50, 12)}, modules_to_save=["head"])
    with pytest.raises(UnsupportedError, match=r"changes e\.weight, to which head\.weight is tied"):
        ucformat.merge("lora", place, tmp_path / "x", base=tied)


def test_options_that_narrow_the_targets(tmp_path: Path) -> None:
    for name, option in {"exclude_modules": ["x.k"], "layers_to_transform": [0]}.items():
        place = adapter(tmp_path / name, Q, target_modules=["q", "k"], **{name: option})
        ck = ucformat.merge("lora", place, tmp_path / f"dst-{name}", base=source(base_tensors()))
        assert ck["x.q.weight"].shape == (20, 30)


def test_a_quantized_base(tmp_path: Path) -> None:
    place = adapter(tmp_path / "a", Q)
    base = base_tensors() | {"x.q.weight": np.ones((20, 30), np.int8)}
    with pytest.raises(UnsupportedError, match=r"x\.q\.weight of the base has the dtype int8"):
        ucformat.merge("lora", place, tmp_path / "x", base=source(base))
    base["x.q.weight"] = np.ones((20, 30), numpy_dtype("float8_e4m3fn"))
    ucformat.merge("lora", place, tmp_path / "y", base=source(base))  # plain numbers
    with pytest.raises(
        UnsupportedError, match=r"x\.q\.weight of the base has the dtype float8_e4m3fn and a scale"
    ):
        ucformat.merge(
            "lora", place, tmp_path / "x", base=source(base | {"x.q.weight_scale_inv": np.ones(1)})
        )


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # of transformers, which PEFT calls
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["c_attn", "c_proj"]},
        {
            "target_modules": ["c_attn"],
            "bias": "all",
            "use_rslora": True,
            "rank_pattern": {r"h\.1\.attn\.c_attn": 2},
        },
        {"target_modules": ["wpe", "c_fc"], "alpha_pattern": {"c_fc": 3}},
        {"target_modules": "all-linear", "bias": "lora_only", "modules_to_save": ["wpe"]},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_what_peft_merges(options: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "base")
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=7, fan_in_fan_out=True, **options)
    )
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    tuned.save_pretrained(tmp_path / "adapter")
    torch.save(
        tuned.state_dict(), tmp_path / "adapter_model.bin"
    )  # the whole model, as an engine saves it
    (tmp_path / "adapter_config.json").write_bytes(
        (tmp_path / "adapter" / "adapter_config.json").read_bytes()
    )
    merged = tuned.merge_and_unload().state_dict()
    ck = ucformat.merge("lora", tmp_path / "adapter", tmp_path / "dst", base=tmp_path / "base")
    other = ucformat.merge(
        "lora", tmp_path / "adapter_model.bin", tmp_path / "other", base=tmp_path / "base"
    )
    assert all(same(ck[name][...], other[name][...]) for name in ck.names())
    epsilon = float(torch.finfo(getattr(torch, dtype)).eps)
    for name in ck.names():
        ours, theirs = ck[name][...].astype(float), merged[name].double().numpy()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2 * epsilon * np.abs(theirs).max())
