"""Megatron-FSDP's checkpoints: made by PyTorch DCP from the state that Megatron saves in its format `fsdp_dtensor`."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.sources.suite import SourceSuite
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import MissingData, UnsupportedError
from ucformat.testing.sources import Sample

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WORD, FC1, NORM, EXPERT = (
    "embedding.word_embeddings.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "final_layernorm.weight",
    "decoder.layers.1.mlp.experts.local_experts.11.linear_fc1.weight",
)
GROUPED = "decoder.layers.1.mlp.experts.linear_fc1.weight11"  # as a module of all experts names it
SHAPES = {
    WORD: (12, 4),
    FC1: (6, 4),
    EXPERT: (6, 3),
    "decoder.layers.1.self_attention.linear_qkv.weight": (5, 4),
    NORM: (4,),
}
ROWS = 10  # of the vocabulary without its padding


def arrays() -> dict[tuple[str, str], torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    return {
        (state, name): torch.randn(shape, generator=rng)
        for name, shape in SHAPES.items()
        for state in ("weight", "master", "exp_avg", "exp_avg_sq")
    }


def halves(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """As Megatron stores it: a gated projection as two tensors."""
    if name not in (FC1, EXPERT):
        return {name: tensor}
    name = GROUPED if name == EXPERT else name
    return {f"{name}_w": tensor[:3], f"{name}_v": tensor[3:]}


def state_of(wrapped: str) -> dict[str, Any]:
    truth = arrays()
    states: dict[str, dict[str, Any]] = {}
    meta = {}
    for name in SHAPES:
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            for stored, part in halves(name, truth[kind, name]).items():
                whole = (
                    truth[kind, name] if kind == "master" else part
                )  # only the moments are split
                of_name = states.setdefault(f"module.{stored}", {})
                of_name["param" if kind == "master" else kind] = whole
                of_name["step"] = torch.tensor(7.0)
        meta[f"module.{GROUPED if name == EXPERT else name}"] = {
            "lr": 0.5,
            "betas": (0.9, 0.95),
            "wd_mult": 0.0 if name == NORM else 1.0,
            "step": 7,
        }
    return {
        "args": Namespace(
            tensor_model_parallel_size=2,
            vocab_size=ROWS,
            padded_vocab_size=12,
            untie_embeddings=False,
        ),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": {wrapped + k: v for n in SHAPES for k, v in halves(n, truth["weight", n]).items()},
        "optimizer": {"state": states, "param_to_group_meta": meta},
        "opt_param_scheduler": {"max_lr": 0.5, "num_steps": 64},
        "rng_state": [
            {
                "random_rng_state": (3, (1, 2), None),
                "torch_rng_state": torch.arange(9, dtype=torch.uint8),
            }
        ],
    }


@pytest.fixture(params=["", "module."])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    dcp.save(state_of(request.param), checkpoint_id=tmp_path / "run" / "iter_0000007", no_dist=True)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    return tmp_path / "run"


class TestMegatronFsdp(SourceSuite):
    cyclic = True
    most_read = 9.0
    more_read = 1 << 20
    outranked = frozenset({"dcp"})

    @pytest.fixture(params=["", "iter_0000007"])
    def sample(self, saved: Path, request: pytest.FixtureRequest) -> Sample:
        truth = {}
        for (state, name), tensor in arrays().items():
            kept = tensor[:ROWS] if name == WORD else tensor
            truth[state, name] = ("float32", tuple(kept.shape), kept.numpy().tobytes())
            truth["step", name] = ("float32", (), torch.tensor(7.0).numpy().tobytes())
            if name == WORD:
                truth[f"{state}.padding", name] = (
                    "float32",
                    (2, 4),
                    tensor[ROWS:].numpy().tobytes(),
                )
        groups = [[name for name in SHAPES if name != NORM], [NORM]]
        extra = frozenset({("weight", "rng_state.0.torch_rng_state")})
        return Sample(saved, request.param, "megatron", truth, groups=groups, step=7, extra=extra)

    def test_what_else_it_has(self, sample: Sample) -> None:
        ck = sample.open()
        assert ck.metadata.engine == {"name": "megatron-core", "format": "fsdp_dtensor"}
        assert ck.metadata.layout == {"tp": 2}
        assert ck.metadata.groups[0]["wd_mult"] == 1.0
        assert ck.objects["opt_param_scheduler"] == {"max_lr": 0.5, "num_steps": 64}
        assert ck.manifest.config["padded_vocab_size"] == 12
        assert not ck.unread


def test_another_programs_folder_of_that_name_is_a_dcp_checkpoint(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "iter_0000003", no_dist=True)
    assert open_checkpoint(tmp_path / "iter_0000003").kind == "dcp"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(UnsupportedError, match="without the state that Megatron-FSDP saves"):
        open_checkpoint(tmp_path)


def test_stages_that_number_their_layers_alike_have_overwritten_each_other(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#7452: a load under another number of stages fills all with the layers of the first."""
    state = state_of("")
    place = tmp_path / "iter_0000007"
    state["args"].num_layers, state["args"].pipeline_model_parallel_size = 4, 2
    dcp.save(state, checkpoint_id=place, no_dist=True)
    with pytest.raises(
        MissingData, match=r"has 2 layers of a model of 4 .* in 2 stages"
    ) as refused:
        open_checkpoint(place)
    assert "ucformat.torch.megatron.save" in str(refused.value.hint)
    state["args"].num_layers, place = 2, tmp_path / "iter_0000008"
    dcp.save(state, checkpoint_id=place, no_dist=True)
    assert open_checkpoint(place).kind == "megatron"
