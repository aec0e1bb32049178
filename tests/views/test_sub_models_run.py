"""Sub-models of models of transformers: what a view takes computes what the model computes that torch slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.checkpoint import Checkpoint

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

HEADS, GROUPS, HEAD, HIDDEN, WIDTH, LAYERS, EXPERTS, VOCAB = 4, 2, 6, 16, 20, 4, 5, 29
KEPT = [0, 2, 3]  # layers
GROUP = [1]  # of key and value heads, each with its query heads
WIDE = [19, *range(3, 9), 0]  # of the MLP
NARROW = [*range(2, 10), 15, 12, 0, 1]  # of the hidden size
CHOSEN = [4, 1, 2]  # experts

STEPS: list[dict[str, Any]] = [
    {"select": r"/model\.layers\.(\d+)\..*/", "indices": [0, "2:4"]},
    {
        "take": ["*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"],
        "of": GROUPS,
        "indices": GROUP,
    },
    {"take": "*.o_proj.weight", "dim": 1, "of": GROUPS, "indices": GROUP},
    {"take": ["*norm.weight", "*.o_proj.weight"], "indices": ["2:10", 15, 12, "0:2"]},
    {"take": ["*embed_tokens.weight", "lm_head.weight"], "dim": 1, "indices": NARROW},
    {
        "take": ["*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"],
        "dim": 1,
        "indices": NARROW,
    },
]
MLP: list[dict[str, Any]] = [
    {"take": ["*.gate_proj.weight", "*.up_proj.weight"], "indices": WIDE},
    {"take": ["*.gate_proj.weight", "*.up_proj.weight"], "dim": 1, "indices": NARROW},
    {"take": "*.down_proj.weight", "dim": 1, "indices": WIDE},
    {"take": "*.down_proj.weight", "indices": NARROW},
]
MOE: list[dict[str, Any]] = [
    {"select": r"/model\.layers\.\d+\.block_sparse_moe\.experts\.(\d+)\..*/", "indices": CHOSEN},
    {"take": "*.gate.weight", "indices": CHOSEN},
    {"take": ["*.gate.weight", "*.w1.weight", "*.w3.weight"], "dim": 1, "indices": NARROW},
    {"take": ["*.w1.weight", "*.w3.weight"], "indices": WIDE},
    {"take": "*.w2.weight", "dim": 1, "indices": WIDE},
    {"take": "*.w2.weight", "indices": NARROW},
]


def model_of(family: str, *, tied: bool, part: bool) -> Any:
    """A tiny model of the whole sizes, or those of the part."""
    size = {
        "hidden_size": len(NARROW) if part else HIDDEN,
        "intermediate_size": len(WIDE) if part else WIDTH,
        "num_hidden_layers": len(KEPT) if part else LAYERS,
        "num_attention_heads": HEADS // GROUPS * len(GROUP) if part else HEADS,
        "num_key_value_heads": len(GROUP) if part else GROUPS,
        "head_dim": HEAD,
        "vocab_size": VOCAB,
        "tie_word_embeddings": tied,
    }
    if family == "mixtral":
        size |= {"num_local_experts": len(CHOSEN) if part else EXPERTS, "num_experts_per_tok": 2}
    kind = family.capitalize()
    torch.manual_seed(5)
    return getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**size)
    ).eval()


def sliced(family: str, model: Any, part: Any) -> None:
    """Fill a model of the part with slices of the whole model's parameters, module by module."""
    rows = torch.tensor(NARROW)
    heads = [h for g in GROUP for h in range(g * HEADS // GROUPS, (g + 1) * HEADS // GROUPS)]
    query = torch.tensor([h * HEAD + i for h in heads for i in range(HEAD)])
    key = torch.tensor([g * HEAD + i for g in GROUP for i in range(HEAD)])
    wide, experts = torch.tensor(WIDE), torch.tensor(CHOSEN)

    def put(into: Any, value: Any) -> None:
        assert into.shape == value.shape
        into.data.copy_(value)

    put(part.model.embed_tokens.weight, model.model.embed_tokens.weight[:, rows])
    put(part.lm_head.weight, model.lm_head.weight[:, rows])
    put(part.model.norm.weight, model.model.norm.weight[rows])
    for to, number in zip(part.model.layers, KEPT, strict=True):
        of = model.model.layers[number]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            put(getattr(to, norm).weight, getattr(of, norm).weight[rows])
        put(to.self_attn.q_proj.weight, of.self_attn.q_proj.weight[query][:, rows])
        put(to.self_attn.k_proj.weight, of.self_attn.k_proj.weight[key][:, rows])
        put(to.self_attn.v_proj.weight, of.self_attn.v_proj.weight[key][:, rows])
        put(to.self_attn.o_proj.weight, of.self_attn.o_proj.weight[rows][:, query])
        if family == "llama":
            put(to.mlp.gate_proj.weight, of.mlp.gate_proj.weight[wide][:, rows])
            put(to.mlp.up_proj.weight, of.mlp.up_proj.weight[wide][:, rows])
            put(to.mlp.down_proj.weight, of.mlp.down_proj.weight[rows][:, wide])
            continue
        put(to.mlp.gate.weight, of.mlp.gate.weight[experts][:, rows])
        both = torch.cat([wide, wide + WIDTH])
        put(to.mlp.experts.gate_up_proj, of.mlp.experts.gate_up_proj[experts][:, both][:, :, rows])
        put(to.mlp.experts.down_proj, of.mlp.experts.down_proj[experts][:, rows][:, :, wide])


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(12).reshape(2, 6) * 2 % VOCAB).logits


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("llama", True), ("mixtral", False)]
)
def test_a_view_of_a_model_computes_what_its_slices_compute(
    family: str, *, tied: bool, tmp_path: Path
) -> None:
    whole = model_of(family, tied=tied, part=False)
    for number, parameter in enumerate(whole.parameters()):  # norms begin as constants
        parameter.data += 0.01 * torch.randn(parameter.shape) + 0.001 * number
    whole.save_pretrained(tmp_path / "whole")
    expected = model_of(family, tied=tied, part=True)
    sliced(family, whole, expected)
    steps = [*STEPS, *(MLP if family == "llama" else MOE)]
    ck = ucformat.open(tmp_path / "whole")
    if tied:  # the files have only one of the two names
        assert "lm_head.weight" not in ck
        steps[4] = {**steps[4], "take": "*embed_tokens.weight"}
    view = ck.view(steps)
    found = save_and_load(view, expected.config, tmp_path / "part")
    assert {n: t.shape for n, t in found.state_dict().items()} == {
        n: t.shape for n, t in expected.state_dict().items()
    }
    assert torch.equal(logits(found), logits(expected))
    assert not torch.allclose(logits(found), logits(whole))
    ucformat.convert(view, tmp_path / "universal")
    again = ucformat.open(tmp_path / "universal")
    assert all(np.array_equal(again[n].read(), view[n].read()) for n in view)


def save_and_load(view: Checkpoint, config: Any, folder: Path) -> Any:
    """The view's tensors as transformers loads them, with the configuration of the part."""
    from safetensors.numpy import save_file

    folder.mkdir()
    save_file({n: view[n].read() for n in view}, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
