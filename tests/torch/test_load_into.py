"""`load_into`: a module is what was saved, whatever it was made of: meta tensors, ties, other dtypes, a rank's part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import ucformat
import ucformat.torch
from tests.fakes import FakeSource, random_array
from tests.torch.load_into_program import LAYOUT, Mlp, inputs
from tests.torch.ranks import Ranks
from ucformat.checkpoint import Checkpoint
from ucformat.errors import ChecksumError, Conflict, StateMismatch, UsageError
from ucformat.geometry.layout import Layout
from ucformat.storage.local import LocalStore
from ucformat.torch import load_into

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.arange(20)[None]
#: The experts of a Mixtral as Transformers saves them, as those of its module.
EXPERTS: list[Mapping[str, Any]] = [
    {"rename": r"/(.*)\.block_sparse_moe\.(.*)/", "to": r"\1.mlp.\2"},
    {
        "fuse": r"/(.*)\.experts\.(\d+)\.w1\.weight/",
        "and": [r"\1.experts.\2.w3.weight"],
        "into": r"\1.experts.\2.gate_up_proj",
    },
    {"rename": r"/(.*)\.experts\.(\d+)\.w2\.weight/", "to": r"\1.experts.\2.down_proj"},
    {"stack": r"/(.*)\.experts\.(?P<i>\d+)\.(gate_up_proj|down_proj)/", "into": r"\1.experts.\3"},
]


def model_of(family: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    make: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
        "tied": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
        ),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**SIZES, head_dim=8)
        ),
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**SIZES, num_local_experts=4)
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_embd=32,
                n_layer=2,
                n_head=4,
                vocab_size=61,
                n_positions=64,
                bos_token_id=1,
                eos_token_id=2,
            )
        ),
    }
    made: torch.nn.Module = make[family]().eval()
    return made


def empty(family: str, how: str) -> torch.nn.Module:
    if how == "init_empty_weights":
        with pytest.importorskip("accelerate").init_empty_weights():
            return model_of(family)
    with torch.device("meta" if how == "meta" else "cpu"):
        return model_of(family)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits
    return found


@pytest.fixture(scope="module", params=["llama", "tied", "qwen3", "mixtral", "gpt2"])
def family(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def saved(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """As Transformers saves it, and as universal checkpoints of both forms."""
    folder, model = tmp_path_factory.mktemp(family), model_of(family)
    model.save_pretrained(folder / "hf")
    ucformat.torch.save({"model": model}, folder / "zarr")
    ucformat.torch.save({"model": model}, folder / "packed", form="packed")
    return folder, model


@pytest.mark.front("*-real-zarr", "llama-*", "tied-meta-packed", "qwen3-init_empty_weights-hf")
@pytest.mark.parametrize("form", ["hf", "zarr", "packed"])
@pytest.mark.parametrize("how", ["meta", "init_empty_weights", "real"])
def test_logits_are_those_of_the_model_that_was_saved(
    form: str, how: str, family: str, saved: tuple[Path, torch.nn.Module]
) -> None:
    folder, model = saved
    made = empty(family, how)
    view = EXPERTS if (family, form) == ("mixtral", "hf") else None
    assert load_into(made, ucformat.open(folder / form, view=view)) == ([], [])
    assert torch.equal(logits(made), logits(model))
    assert {n: p.requires_grad for n, p in made.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }


class Odd(torch.nn.Module):
    """Ties, buffers of both kinds, integers, a scalar, something empty, a module that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(5, 7)
        self.b = torch.nn.Linear(5, 7, bias=False)
        self.b.weight = self.a.weight
        self.again = self.a
        self.scale = torch.nn.Parameter(torch.tensor(2.5))
        self.none = torch.nn.Parameter(torch.empty(0, 3))
        self.register_buffer("codes", torch.arange(40, dtype=torch.uint8).reshape(8, 5))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)


def odd_on_meta() -> Odd:
    with torch.device("meta"):
        made = Odd()
    made.scratch = torch.ones(3)
    return made


def stored(model: torch.nn.Module, folder: Path) -> Path:
    state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("make", [Odd, odd_on_meta])
def test_ties_buffers_and_odd_tensors(make: Callable[[], Odd], tmp_path: Path) -> None:
    model = Odd()
    ucformat.torch.save({"model": model}, tmp_path / "ck")
    made = make()
    made.a.weight.mark = "kept"
    before = {n: p for n, p in made.named_parameters() if not p.is_meta}
    assert load_into(made, tmp_path / "ck") == ([], [])
    for name, tensor in model.state_dict().items():
        found = made.state_dict()[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor), name
    assert made.b.weight is made.a.weight is made.again.weight
    assert made.a.weight.mark == "kept"
    assert (made.frozen.requires_grad, made.a.weight.requires_grad) == (False, True)
    assert all(p is before[n] for n, p in made.named_parameters() if n in before)  # filled in place


def test_two_names_for_equal_copies_and_for_others(tmp_path: Path) -> None:
    model = Odd()
    folder = stored(model, tmp_path / "ck")
    assert load_into(odd_on_meta(), folder) == ([], [])
    state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    state["b.weight"] += 1
    save_file(state, folder / "model.safetensors")
    made = odd_on_meta()
    with pytest.raises(StateMismatch, match="tied here"):
        load_into(made, folder)
    assert made.a.weight.is_meta


def test_names_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    state = {
        n: t.detach().clone() for n, t in Odd().state_dict().items() if n not in ("scale", "codes")
    }
    (tmp_path / "ck").mkdir()
    save_file({**state, "more.weight": torch.ones(2)}, tmp_path / "ck" / "model.safetensors")
    made = odd_on_meta()
    with pytest.raises(StateMismatch, match="nothing was changed") as error:
        load_into(made, tmp_path / "ck")
    assert all(
        line in str(error.value)
        for line in ("missing: scale", "missing: codes", "unexpected: more.weight")
    )
    assert all(p.is_meta for p in made.parameters())
    found = load_into(made, tmp_path / "ck", strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["scale", "codes"], ["more.weight"])
    assert made.scale.is_meta
    assert torch.equal(made.a.bias, state["a.bias"])
    reference = Odd()
    expected = reference.load_state_dict({**state, "more.weight": torch.ones(2)}, strict=False)
    assert sorted(expected.missing_keys) == sorted(found.missing_keys)
    assert expected.unexpected_keys == found.unexpected_keys


def test_another_shape_is_an_error_even_if_names_may_differ(tmp_path: Path) -> None:
    folder = stored(Odd(), tmp_path / "ck")
    made = Odd()
    made.scale = torch.nn.Parameter(torch.ones(2))
    before = made.a.bias.clone()
    with pytest.raises(StateMismatch, match="different shape: scale"):
        load_into(made, folder, strict=False)
    assert torch.equal(made.a.bias, before)


def test_renames(tmp_path: Path) -> None:
    source, folder = torch.nn.Linear(3, 2), tmp_path / "ck"
    stored(source, folder)
    made = torch.nn.ModuleDict({"x": torch.nn.Linear(3, 2, device="meta")})
    load_into(made, folder, rename=lambda name: f"x.{name}")
    assert torch.equal(made["x"].weight, source.weight)
    with pytest.raises(UsageError, match="both"):
        load_into(made, folder, rename=lambda name: name, layout=LAYOUT)


FLOATS = ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("have", FLOATS)
def test_dtypes_are_converted_as_torch_does(have: str, device: str, tmp_path: Path) -> None:
    dtype = getattr(torch, have)
    bits = random_array((33, 17), have, 5)
    tensor = torch.frombuffer(bytearray(bits.tobytes()), dtype=dtype).reshape(33, 17)
    save_file({"w": tensor, "n": torch.arange(3)}, tmp_path / "model.safetensors")
    for want in FLOATS:
        made = torch.nn.Module()
        made.w = torch.nn.Parameter(torch.empty(33, 17, dtype=getattr(torch, want), device=device))
        made.register_buffer("n", torch.zeros(3, dtype=torch.int32, device=device))
        load_into(made, tmp_path)
        assert made.w.dtype == getattr(torch, want)  # the module's
        assert made.w.detach().view(torch.uint8).equal(tensor.to(made.w.dtype).view(torch.uint8)), (
            want
        )
        assert made.n.tolist() == [0, 1, 2]
        assert made.n.dtype == torch.int32
    load_into(made, tmp_path, dtype="checkpoint")
    assert made.w.detach().view(torch.uint8).equal(tensor.view(torch.uint8))
    assert made.n.dtype == torch.int64
    load_into(made, tmp_path, dtype=torch.bfloat16)
    assert made.w.dtype == torch.bfloat16
    assert made.n.dtype == torch.int64  # no float


def test_a_weight_is_read_and_the_master_copy_only_where_there_is_no_weight(tmp_path: Path) -> None:
    arrays = {
        ("a", "weight"): np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16),
        ("a", "master"): np.arange(6, dtype=np.float32) + 0.001,
        ("b", "master"): np.arange(4, dtype=np.float32),
        ("b", "exp_avg"): np.ones(4, np.float32),
    }
    ck = Checkpoint(FakeSource.write(LocalStore(tmp_path), arrays))
    made = torch.nn.Module()
    made.a, made.b = torch.nn.Parameter(torch.zeros(6)), torch.nn.Parameter(torch.zeros(4))
    assert load_into(made, ck) == ([], [])
    assert made.a.tolist() == [0, 1, 2, 3, 4, 5]
    assert made.b.tolist() == [0, 1, 2, 3]


def test_a_buffer_that_nobody_can_compute(tmp_path: Path) -> None:
    folder = stored(Odd(), tmp_path / "ck")
    with torch.device("meta"):
        made = Odd()
    with pytest.raises(UsageError, match="the buffer scratch is on the meta device"):
        load_into(made, folder)
    assert made.a.weight.is_meta


@given(data=st.data())
def test_any_part_of_any_shape(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each rank of a layout gets what `torch.chunk` gives it."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dim, degree = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 3))
    whole = torch.from_numpy(random_array(shape, "int32", 1))
    folder = tmp_path_factory.mktemp("shape")
    save_file({"w": whole}, folder / "model.safetensors")
    layout = Layout(
        mesh={"tp": degree}, rules=[{"match": "*", "place": [{"shard": dim, "over": "tp"}]}]
    )
    step = -(-shape[dim] // degree)
    for rank in range(degree):
        size = max(0, min(step, shape[dim] - rank * step))
        expected = whole.narrow(dim, min(rank * step, shape[dim]), size)
        made = torch.nn.Module()
        made.register_buffer("w", torch.zeros(expected.shape, dtype=torch.int32))
        load_into(made, folder, layout=layout, rank=rank)
        assert torch.equal(made.w, expected)
        made.w = torch.zeros(
            (*expected.shape[:dim], size + 1, *expected.shape[dim + 1 :]), dtype=torch.int32
        )
        with pytest.raises(StateMismatch, match=f"rank {rank} of the layout"):
            load_into(made, folder, layout=layout, rank=rank)


def test_tensor_parallelism_of_two_ranks(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Mlp()
    ucformat.torch.save({"model": model}, tmp_path / "ck")
    with torch.no_grad():
        expected = model(inputs())
    for scenario in ("by_layout", "by_dtensor"):
        for results in Ranks("tests.torch.load_into_program").run(scenario, 2, tmp_path / "ck"):
            for found in results:
                torch.testing.assert_close(
                    torch.frombuffer(bytearray(found), dtype=torch.float32).reshape(expected.shape),
                    expected,
                )


def test_a_layout_needs_a_rank_that_it_has(tmp_path: Path) -> None:
    ucformat.torch.save({"model": Mlp()}, tmp_path / "ck")
    with pytest.raises(UsageError, match="needs a rank"):
        load_into(Mlp(10), tmp_path / "ck", layout=LAYOUT)
    with pytest.raises(UsageError, match="no rank 2"):
        load_into(Mlp(10), tmp_path / "ck", layout=LAYOUT, rank=2)


def test_damage_and_changes_are_errors(tmp_path: Path) -> None:
    model = Mlp()
    ucformat.torch.save({"model": model}, tmp_path / "ck", form="packed")
    (file,) = (
        f for f in (tmp_path / "ck" / "data").rglob("*") if f.is_file() and f.suffix == ".bin"
    )
    data = bytearray(file.read_bytes())
    data[data.index(model.up.weight.detach().numpy().tobytes()[:32])] ^= 1
    file.write_bytes(data)
    with torch.device("meta"):
        made = Mlp()
    with pytest.raises(ChecksumError):
        load_into(made, tmp_path / "ck")
    assert all(p.is_meta for p in made.parameters())
    folder = stored(model, tmp_path / "foreign")
    ck = ucformat.open(folder)
    contents = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    with pytest.raises(Conflict):
        load_into(made, ck)
    assert all(p.is_meta for p in made.parameters())


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_the_guide(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs for a model of Transformers run, and a folder for vLLM and SGLang holds the model."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "guides" / "inference.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    load, serve = blocks[0], blocks[-1]
    model_of(name).to(torch.bfloat16).save_pretrained("model")
    model = transformers.AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16)
    ucformat.torch.save({"model": model}, tmp_path / "global_step100")
    names: dict[str, Any] = {}
    exec(compile(load, "inference.md", "exec"), names)  # noqa: S102
    assert torch.equal(logits(names["model"]), logits(model))
    exec(compile(serve, "inference.md", "exec"), names)  # noqa: S102
    served = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "served", dtype=torch.bfloat16
    )
    assert torch.equal(logits(served), logits(model))
    with safe_open(tmp_path / "served" / "model.safetensors", "pt") as file:
        state = model.state_dict()
        assert set(file.keys()) == state.keys() - ({"lm_head.weight"} if name == "tied" else set())
        assert all(torch.equal(file.get_tensor(n), state[n]) for n in file.keys())  # noqa: SIM118 - not a mapping
