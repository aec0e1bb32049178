"""Presets between Megatron and Hugging Face's families, against models of transformers and fusing written by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.fakes import Arrays, FakeSource
from tests.sources.suite import DATA
from ucformat.checkpoint import Checkpoint
from ucformat.errors import LayoutError
from ucformat.storage.memory import MemoryStore
from ucformat.views.document import PRESETS, preset_steps

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

HEADS, GROUPS, HIDDEN, WIDTH, LAYERS, EXPERTS, VOCAB = 4, 2, 16, 20, 2, 3, 29
OPTIONS = {"heads": HEADS, "groups": GROUPS}
Tensors = dict[str, "NDArray[Any]"]


def model_of(family: str) -> Any:
    """A tiny random model of transformers."""
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(5)
    if family == "gpt2":
        size = {
            "n_embd": HIDDEN,
            "n_inner": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": 8,
        }
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, vocab_size=VOCAB))
    size = {
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    }
    size |= {"num_local_experts": EXPERTS} if family == "mixtral" else {}
    kind = family.capitalize()
    return getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**size)
    )


def saved(family: str, folder: Path) -> Checkpoint:
    """A model, in the files that transformers writes."""
    model = model_of(family)
    for number, parameter in enumerate(model.parameters()):  # biases and norms begin as constants
        parameter.data += 0.01 * (number + 1)
    model.save_pretrained(folder)
    return ucformat.open(folder)


def tensors(ck: Checkpoint, state: str = "weight") -> Tensors:
    return {k.name: ck[k.name, k.state].read() for k in ck.tensors if k.state == state}


def equal(found: Tensors, expected: Tensors) -> None:
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert np.array_equal(found[name], array), name


def fused_qkv(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], groups: int) -> NDArray[Any]:
    """As Megatron's own loaders of Hugging Face's models put them together."""
    rest = q.shape[1:]
    parts = [x.reshape(groups, -1, *rest) for x in (q, k, v)]
    return np.concatenate(parts, axis=1).reshape(-1, *rest)


def by_hand(family: str, hf: Tensors) -> Tensors:
    """A model's tensors as Megatron's, with Transformer Engine's names."""
    if family == "gpt2":
        return by_hand_gpt2(hf)
    out = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for i in range(LAYERS):
        a, b = f"model.layers.{i}.", f"decoder.layers.{i}."
        out[b + "self_attention.linear_qkv.layer_norm_weight"] = hf[a + "input_layernorm.weight"]
        second = (
            "pre_mlp_layernorm.weight"
            if family == "mixtral"
            else "mlp.linear_fc1.layer_norm_weight"
        )
        out[b + second] = hf[a + "post_attention_layernorm.weight"]
        out[b + "self_attention.linear_proj.weight"] = hf[a + "self_attn.o_proj.weight"]
        for kind in ("weight", "bias"):
            if a + f"self_attn.q_proj.{kind}" in hf:
                q, k, v = (hf[a + f"self_attn.{x}_proj.{kind}"] for x in "qkv")
                out[b + f"self_attention.linear_qkv.{kind}"] = fused_qkv(q, k, v, GROUPS)
        for x in "qk" if family == "qwen3" else "":
            out[b + f"self_attention.{x}_layernorm.weight"] = hf[a + f"self_attn.{x}_norm.weight"]
        if family != "mixtral":
            gate, up = (hf[a + f"mlp.{x}_proj.weight"] for x in ("gate", "up"))
            out[b + "mlp.linear_fc1.weight"] = np.concatenate([gate, up])
            out[b + "mlp.linear_fc2.weight"] = hf[a + "mlp.down_proj.weight"]
            continue
        out[b + "mlp.router.weight"] = hf[a + "block_sparse_moe.gate.weight"]
        for e in range(EXPERTS):
            w1, w2, w3 = (hf[a + f"block_sparse_moe.experts.{e}.w{n}.weight"] for n in (1, 2, 3))
            out[b + f"mlp.experts.local_experts.{e}.linear_fc1.weight"] = np.concatenate([w1, w3])
            out[b + f"mlp.experts.local_experts.{e}.linear_fc2.weight"] = w2
    return out


def by_hand_gpt2(hf: Tensors) -> Tensors:
    out = {
        "embedding.word_embeddings.weight": hf["transformer.wte.weight"],
        "embedding.position_embeddings.weight": hf["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": hf["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": hf["transformer.ln_f.bias"],
    }
    for i in range(LAYERS):
        a, b = f"transformer.h.{i}.", f"decoder.layers.{i}."
        for kind in ("weight", "bias"):
            out[b + f"self_attention.linear_qkv.layer_norm_{kind}"] = hf[a + f"ln_1.{kind}"]
            out[b + f"mlp.linear_fc1.layer_norm_{kind}"] = hf[a + f"ln_2.{kind}"]
            q, k, v = np.split(hf[a + f"attn.c_attn.{kind}"].T, 3)
            out[b + f"self_attention.linear_qkv.{kind}"] = fused_qkv(q, k, v, HEADS)
            out[b + f"self_attention.linear_proj.{kind}"] = hf[a + f"attn.c_proj.{kind}"].T
            out[b + f"mlp.linear_fc1.{kind}"] = hf[a + f"mlp.c_fc.{kind}"].T
            out[b + f"mlp.linear_fc2.{kind}"] = hf[a + f"mlp.c_proj.{kind}"].T
    return out


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral", "gpt2"])
def test_a_model_of_transformers_and_back(family: str, tmp_path: Path) -> None:
    ck = saved(family, tmp_path)
    hf = tensors(ck)
    view = ck.view(f"{family}-to-megatron")  # config.json tells the numbers
    equal(tensors(view), by_hand(family, hf))
    options = {"heads": HEADS} if family == "gpt2" else OPTIONS
    equal(tensors(view.view([{"preset": f"megatron-to-{family}", "with": options}])), hf)


def test_what_transformers_itself_holds_of_mixtral(tmp_path: Path) -> None:
    """Its module has all experts in one tensor; its files have them apart."""
    module = {n: t.detach().numpy() for n, t in model_of("mixtral").state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in module
    model = model_of("mixtral")
    model.save_pretrained(tmp_path)
    files = ucformat.open(tmp_path)
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in files
    ck = checkpoint({(n, "weight"): a for n, a in module.items()})
    view = ck.view([{"preset": "mixtral-to-megatron", "with": OPTIONS}])
    equal(tensors(view), tensors(files.view("mixtral-to-megatron")))
    equal(
        tensors(view.view([{"preset": "megatron-to-mixtral", "with": {**OPTIONS, "fused": True}}])),
        module,
    )


def checkpoint(arrays: Arrays, **facts: Any) -> Checkpoint:
    return Checkpoint(FakeSource.write(MemoryStore("presets"), arrays, **facts))


def megatron(*, local: bool, grouped: bool | None = None, bias: bool = False) -> Arrays:
    """Weights and optimizer states of a Megatron model."""
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (VOCAB, HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,),
        "output_layer.weight": (VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        at = f"decoder.layers.{i}."
        qkv, moe = HIDDEN // HEADS * (HEADS + 2 * GROUPS), grouped is not None
        shapes |= {
            at
            + ("input_layernorm." if local else "self_attention.linear_qkv.layer_norm_")
            + "weight": (HIDDEN,),
            at + "self_attention.linear_qkv.weight": (qkv, HIDDEN),
            at + "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
            at
            + ("pre_mlp_layernorm." if local or moe else "mlp.linear_fc1.layer_norm_")
            + "weight": (HIDDEN,),
        }
        shapes |= {at + "self_attention.linear_qkv.bias": (qkv,)} if bias else {}
        if grouped is None:
            shapes |= {
                at + "mlp.linear_fc1.weight": (2 * WIDTH, HIDDEN),
                at + "mlp.linear_fc2.weight": (HIDDEN, WIDTH),
            }
            continue
        shapes[at + "mlp.router.weight"] = (EXPERTS, HIDDEN)
        name = at + (
            "mlp.experts.{1}.weight{0}" if grouped else "mlp.experts.local_experts.{0}.{1}.weight"
        )
        for e in range(EXPERTS):
            shapes[name.format(e, "linear_fc1")] = (2 * WIDTH, HIDDEN)
            shapes[name.format(e, "linear_fc2")] = (HIDDEN, WIDTH)
    states = ("weight", "master", "exp_avg", "exp_avg_sq")
    out = {
        (n, s): rng.standard_normal(shape, np.float32)
        for n, shape in shapes.items()
        for s in states
    }
    return out | {(n, "step"): np.array(3.0, np.float32) for n in shapes}


@pytest.mark.parametrize(
    ("family", "back", "made"),
    [
        ("llama", {"local": True}, {"local": True}),
        ("llama", {}, {"local": False}),
        ("qwen2", {}, {"local": False, "bias": True}),
        ("mixtral", {"local": True}, {"local": True, "grouped": False}),
        ("mixtral", {"grouped": True, "local": True}, {"local": True, "grouped": True}),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_presets_are_each_others_inverse(family: str, back: Any, made: Any, *, fused: bool) -> None:
    if fused and family != "mixtral":
        return
    arrays = megatron(**made)
    ck = checkpoint(
        arrays, objects={"args": {"num_attention_heads": HEADS, "num_query_groups": GROUPS}}
    )
    there = {"preset": f"megatron-to-{family}", "with": {"fused": True} if fused else {}}
    again = ck.view([there]).view(
        [{"preset": f"{family}-to-megatron", "with": {**OPTIONS, **back}}]
    )
    for state in ("weight", "master", "exp_avg", "exp_avg_sq", "step"):
        equal(tensors(again, state), {n: a for (n, s), a in arrays.items() if s == state})


def test_a_tied_output_layer_stays_a_further_name() -> None:
    arrays = {k: v for k, v in megatron(local=False).items() if k[0] != "output_layer.weight"}
    ck = checkpoint(arrays, aliases={"output_layer.weight": "embedding.word_embeddings.weight"})
    view = ck.view([{"preset": "megatron-to-llama", "with": OPTIONS}])
    assert dict(view.aliases) == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_vocabulary_without_its_padding() -> None:
    ck = checkpoint(megatron(local=False))
    view = ck.view([{"preset": "megatron-to-llama", "with": {**OPTIONS, "vocab": 27}}])
    assert (
        view["model.embed_tokens.weight"].shape
        == view["lm_head.weight", "exp_avg"].shape
        == (27, HIDDEN)
    )


def test_stacked_and_unstacked() -> None:
    arrays = megatron(local=True, grouped=False)
    ck = checkpoint(arrays)
    view = ck.view("megatron-stack")
    first = view["decoder.layers.mlp.experts.experts.linear_fc1.weight", "exp_avg"]
    assert first.shape == (LAYERS, EXPERTS, 2 * WIDTH, HIDDEN)
    expected = arrays["decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight", "exp_avg"]
    assert np.array_equal(first.read()[1, 2], expected)
    again = view.view("megatron-unstack")
    for state in ("weight", "exp_avg"):
        equal(tensors(again, state), {n: a for (n, s), a in arrays.items() if s == state})


def test_a_real_checkpoint_seen_as_llama() -> None:
    """Its arguments tell the numbers; both of its formats look the same."""
    seen = []
    for kind in ("sharded", "classic"):
        ck = ucformat.open(DATA / "megatron" / "tp2-pp2-flat" / kind, view="megatron-to-llama")
        q = ck["model.layers.1.self_attn.q_proj.weight", "exp_avg"]
        assert (q.shape, ck["model.layers.0.mlp.up_proj.weight"].shape) == ((8, 8), (10, 8))
        assert ck.states("lm_head.weight") == ck.states("model.embed_tokens.weight")
        seen.append(tensors(ck, "master"))
    equal(*seen)


@pytest.mark.parametrize(
    ("name", "options", "objects", "words"),
    [
        ("megatron-to-bert", {}, {}, "no preset 'megatron-to-bert'"),
        ("megatron-to-llama", {"head": 4}, {}, "no option 'head'"),
        ("megatron-to-llama", {}, {}, "needs the number of heads"),
        ("megatron-to-llama", {"heads": 4}, {}, "needs the number of groups"),
        (
            "megatron-to-llama",
            {"heads": 4, "groups": 3},
            {},
            "4 heads cannot be split into 3 groups",
        ),
        ("megatron-to-llama", {"heads": 0, "groups": 1}, {}, "must be at least 1, not 0"),
        ("megatron-to-llama", OPTIONS, {"args": {"apply_layernorm_1p": True}}, "norms less one"),
        ("megatron-to-gpt2", {"heads": 4}, {"args": {"rotary_interleaved": True}}, "neighbouring"),
    ],
)
def test_what_does_not_fit_is_said(name: str, options: Any, objects: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        preset_steps(name, options, objects, {}, [])


def test_without_grouped_queries_there_are_as_many_groups_as_heads() -> None:
    args = {"num_attention_heads": 4, "num_query_groups": 1, "group_query_attention": False}
    steps = preset_steps("megatron-to-llama", {}, {"args": args}, {}, [])
    assert next(s["repeat"] for s in steps if "split" in s) == 4
    config = json.dumps({"text_config": {"num_attention_heads": 8}}).encode()
    steps = preset_steps("llama-to-megatron", {}, {}, {"hf/config.json": config}, [])
    assert next(s["repeat"] for s in steps if "fuse" in s) == 8


def test_every_preset_makes_steps() -> None:
    for name, preset in PRESETS.items():
        given = {k: v for k, v in OPTIONS.items() if k in preset.options}
        assert preset_steps(name, given, {}, {}, [])
